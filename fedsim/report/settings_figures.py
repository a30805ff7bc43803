"""Figures of methods over several settings: critical differences, gains, gains beside costs,
profiles."""

import itertools
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from fedsim.report.figures import CAPTIONS, PAGE, SMALL, Plot, line_axes, style
from fedsim.report.page import COLOURS, make_looks
from fedsim.results.groups import Panel
from fedsim.results.measures import SPENT
from fedsim.results.ranking import Comparison, profile, rank_tests
from fedsim.results.statistics import estimate, pooled, pooled_values

GAINS, MULTIPLES = (
    (-50, -10, -5, -2, 0, 2, 5, 10, 50),
    (0.01, 0.1, 0.2, 0.5, 0.7, 1, 1.4, 2, 5, 10, 20, 50, 100),
)
"""Ticks of axes on which these are drawn."""
MOST_PROFILES, LEVELS = 8, 200
"""Lines of a figure of profiles, and points of a line."""


def settings_plots(found: Comparison | None) -> list[Plot]:
    with style():
        return (
            []
            if found is None
            else [make(found) for make in (ranks_plot, gains_plot, costs_plot, profiles_plot)]
        )


def ranks_plot(found: Comparison) -> Plot:
    """Demsar's diagram: mean ranks on an axis, the better half named on its left; bars join those
    that cannot be told apart."""
    ranks, (_, difference) = [rank for rank, _ in found.ranks.values()], rank_tests(found.means)
    num, half, ends = (
        len(ranks),
        -(-len(ranks) // 2),
        [sum(r <= rank + difference for r in ranks) - 1 for rank in ranks],
    )
    bars = [
        (at, end) for at, end in enumerate(ends) if end > max([at, *ends[:at]])
    ]  # first and last, the longest alone
    top = 1.2 + 0.4 * len(bars)  # of the names, in rows below the axis
    figure = Figure(figsize=(PAGE, 0.15 * (top + half + 3)))
    ax = figure.subplots()
    ax.set(xlim=(0.7, num + 0.3), ylim=(top + half, 0), yticks=[])
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.spines["top"].set_visible(True)
    ax.xaxis.tick_top()
    ax.set_title(
        f"critical difference {difference:.2f}"
        + " (more than all ranks differ by)" * (difference > num - 1)
    )
    for row, (first, last) in enumerate(bars):
        ax.hlines(0.8 + 0.4 * row, ranks[first] - 0.05, ranks[last] + 0.05, "#D55E00", linewidth=2)
    for at, (name, rank) in enumerate(zip(found.ranks, ranks, strict=True)):
        side, end, row = ("right", 0.6, at) if at < half else ("left", num + 0.4, num - 1 - at)
        ax.plot([rank, rank, end], [0, top + row, top + row], "k", linewidth=0.6, clip_on=False)
        text = f"{name}  {rank:.2f} " if side == "right" else f" {rank:.2f}  {name}"
        ax.text(end, top + row, text, ha=side, va="center", size=SMALL)
    return Plot(
        "settings_ranks", CAPTIONS["settings_ranks"].format(settings=len(found.panels)), figure
    )


def gains_plot(found: Comparison) -> Plot:
    """A map of gains over random selection in points, methods by settings, with a first column of
    means over all, by which methods are sorted."""
    names = [name for name in found.by_gain if name != found.reference]
    titles = ["all settings", *(panel.title for panel in found.panels)]
    rows = [[pooled(gains), *(pooled([one]) for one in gains)] for gains in map(found.gains, names)]
    points = np.array([[np.nan if one is None else 100 * one.mean for one in row] for row in rows])
    figure = Figure(figsize=(PAGE, 0.18 * len(names) + 0.06 * max(map(len, titles)) + 0.4))
    ax = figure.subplots()
    reach = (
        float(np.quantile(np.nan_to_num(np.abs(points)), 0.95)) or 1.0
    )  # a few far off would leave the others white
    image = ax.imshow(points, vmin=-reach, vmax=reach, cmap="PuOr", aspect="auto")
    for row, column in np.ndindex(points.shape):
        one, value = rows[row][column], points[row, column]
        if one is not None:
            weight = "normal" if one.interval[0] <= 0 <= one.interval[1] else "bold"
            colour = (
                "white"
                if abs(value) > 0.6 * reach
                else {"normal": "#707070", "bold": "black"}[weight]
            )
            text = (
                "0"
                if abs(value) < 0.05
                else f"{value:+.1f}"
                if abs(value) < 9.95
                else f"{value:+.0f}"
            )
            ax.text(
                column,
                row,
                text,
                size=SMALL - 2,
                weight=weight,
                color=colour,
                ha="center",
                va="center",
            )
    ax.set_xticks(range(len(titles)), titles, rotation=90)
    ax.set_yticks(range(len(names)), names)
    ax.axvline(0.5, color="white", linewidth=2)
    figure.colorbar(image, ax=ax, label="gain in points", pad=0.01, extend="both")
    return Plot("settings_gains", CAPTIONS["settings_gains"], figure)


def costs_plot(found: Comparison) -> Plot:
    """Draw gains over random selection in points, and what runs cost as multiples of its, with a
    row for each line.

    Colour and marker say what a method asks clients for and needs at the server. Filled: the front
    of accuracy against cost.
    """
    names, classes = found.by_gain, [*dict.fromkeys([*found.classes.values(), *found.ceiling])]
    marks: list[dict[str, Any]] = [
        {"marker": marker, "color": colour} for marker in "os^" for colour in COLOURS
    ]
    look_of = dict(zip(classes, itertools.cycle(marks), strict=False))
    looks = [look_of[found.classes.get(name, name)] for name in names]
    shares = {
        kind: {name: found.share(name, spent) for name in names} for kind, spent in SPENT.items()
    }
    shares = {kind: own for kind, own in shares.items() if np.isfinite([*own.values()]).all()}
    figure = Figure(figsize=(PAGE, 0.14 * len(names) + 0.9))
    widths, fronts = [2, *[1] * len(shares)], [found.front(own) for own in shares.values()]
    ax, *others = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[
        0
    ]
    for row, name in enumerate(names):
        if gain := estimate([*pooled_values(found.gains(name)).values()]):
            reach = 100 * gain.half_width if gain.num > 1 else None
            ax.errorbar(
                100 * gain.mean, row, xerr=reach, linestyle="none", elinewidth=0.8, **looks[row]
            )
        for its, own, front in zip(others, shares.values(), fronts, strict=True):
            style = "full" if name in front else "none"
            its.plot(own[name], row, linestyle="none", markersize=4, fillstyle=style, **looks[row])
    ax.set_xscale("symlog", linthresh=2, linscale=0.8)
    ax.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))
    for its, label in zip((ax, *others), ("gain in points", *shares), strict=True):
        if its is not ax:
            its.set_xscale("log")
        its.axvline(0 if its is ax else 1, color="grey", linewidth=0.6, zorder=0)
        its.xaxis.set_major_locator(FixedLocator(GAINS if its is ax else MULTIPLES))
        its.xaxis.set_major_formatter("{x:g}")
        its.xaxis.set_minor_locator(NullLocator())
        its.tick_params(axis="y", length=0)
        its.set_xlabel(label)
        its.grid(axis="y")
    handles = [Line2D([], [], linestyle="", label=name, **look) for name, look in look_of.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return Plot("settings_costs", CAPTIONS["settings_costs"], figure)


def profiles_plot(found: Comparison) -> Plot:
    names = [*dict.fromkeys([found.reference, *found.ceiling, *found.best.values()])][
        :MOST_PROFILES
    ]
    gains = {
        name: [np.array([*by_seed.values()]) for by_seed in found.gains(name)] for name in names
    }
    ends = np.concatenate([values for own in gains.values() for values in own])
    levels = np.linspace(ends.min() - 0.01, ends.max() + 0.01, LEVELS)
    panel = Panel("", {name: found.panels[0].lines[name] for name in names})
    looks = make_looks([panel])
    figure, (ax,) = line_axes([panel], looks)
    for at, (name, own) in enumerate(gains.items()):
        share, low, high = profile(own, levels)
        ax.fill_between(levels, low, high, color=looks[name]["color"], alpha=0.12, linewidth=0)
        ax.plot(levels, share, markevery=(at * 5, LEVELS // 5), **looks[name])
    ax.set(
        xlabel="gain over random selection at the same seed",
        ylabel="share of runs with at least it",
    )
    return Plot("settings_profiles", CAPTIONS["settings_profiles"], figure)
