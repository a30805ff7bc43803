"""Figures of methods over several settings: critical differences, gains, gains beside costs,
profiles."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from fedsim.report.drawing import CAPTIONS, Plot
from fedsim.report.layout import line_axes, new_figure
from fedsim.report.looks import COLOURS, Look
from fedsim.results.measures import SPENT
from fedsim.results.ranking import Comparison, profile, rank_tests
from fedsim.results.statistics import Difference, Mean, estimate, pooled, pooled_values

GAIN_TICKS = (-50, -10, -5, -2, 0, 2, 5, 10, 50)
MULTIPLE_TICKS = (0.01, 0.1, 0.2, 0.5, 0.7, 1, 1.4, 2, 5, 10, 20, 50, 100)
MAX_PROFILES = 8
"""Lines of a figure of profiles."""
NUM_LEVELS = 200
"""Points of a profile."""


def settings_plots(comparison: Comparison, looks: Mapping[str, Look]) -> list[Plot]:
    """Return all figures over settings. `looks` has those of all methods."""
    return [
        ranks_plot(comparison),
        gains_plot(comparison),
        costs_plot(comparison),
        profiles_plot(comparison, looks),
    ]


def ranks_plot(comparison: Comparison) -> Plot:
    """Return Demsar's diagram of mean ranks.

    The better half of the methods is named on the left of the axis, the other half on the right.
    Bars join methods that cannot be told apart (`rank_tests`). Heights count downwards in rows.
    """
    ranks = [rank for rank, _ in comparison.ranks.values()]
    _, critical = rank_tests(comparison.means)
    num = len(ranks)
    half = math.ceil(num / 2)
    bars = _bars(ranks, critical)
    top = 1.2 + 0.4 * len(bars)  # place of the names, in rows below the axis
    figure = new_figure(0.16 * (top + half + 3))
    axes = figure.subplots()
    axes.set(xlim=(0.7, num + 0.3), ylim=(top + half, 0), yticks=[])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.spines["top"].set_visible(True)
    axes.xaxis.tick_top()
    remark = " (more than all ranks differ by)" if critical > num - 1 else ""
    axes.set_title(f"critical difference {critical:.2f}{remark}")
    for row, (first, last) in enumerate(bars):
        height = 0.8 + 0.4 * row
        axes.hlines(height, ranks[first] - 0.05, ranks[last] + 0.05, "#D55E00", linewidth=2)
    for number, (name, rank) in enumerate(zip(comparison.ranks, ranks, strict=True)):
        if number < half:
            side, end, row, text = "right", 0.6, number, f"{name}  {rank:.2f} "
        else:
            side, end, row, text = "left", num + 0.4, num - 1 - number, f" {rank:.2f}  {name}"
        height = top + row
        line = [rank, rank, end], [0, height, height]
        axes.plot(*line, color="grey", linewidth=0.6, clip_on=False)
        axes.text(end, height, text, ha=side, va="center")
    caption = CAPTIONS["settings_ranks"].format(settings=len(comparison.settings))
    data = {"method": list(comparison.ranks), "mean_rank": ranks}
    return Plot("settings_ranks", caption, figure, [data])


def _bars(ranks: list[float], critical: float) -> list[tuple[int, int]]:
    """Return the first and last position in `ranks` (ascending) that each bar joins.

    Bars that lie within a longer bar are left out.
    """
    bars = []
    furthest = 0
    for first, rank in enumerate(ranks):
        last = sum(other <= rank + critical for other in ranks) - 1
        if last > max(first, furthest):
            bars.append((first, last))
        furthest = max(furthest, last)
    return bars


def gains_plot(comparison: Comparison) -> Plot:
    """Return a map of gains over random selection in percentage points, methods by settings.

    The first column has the means over all settings, by which methods are sorted.
    """
    names = [name for name in comparison.by_gain if name != comparison.reference]
    titles = ["all settings", *comparison.settings]
    rows = []
    for name in names:
        gains = comparison.gains(name)
        rows.append([pooled(gains), *(pooled([gain]) for gain in gains)])
    points = np.array(
        [[math.nan if gain is None else 100 * gain.mean for gain in row] for row in rows]
    )
    figure = new_figure(0.18 * len(names) + 0.065 * max(map(len, titles)) + 0.4)
    axes = figure.subplots()
    # A few gains that are far off would leave the others white.
    reach = float(np.quantile(np.nan_to_num(np.abs(points)), 0.95)) or 1.0
    image = axes.imshow(points, vmin=-reach, vmax=reach, cmap="PuOr", aspect="auto")
    data = []
    for row, column in np.ndindex(points.shape):
        gain = rows[row][column]
        if gain is not None:
            _write_gain(axes, gain, row, column, reach)
            data.append({"setting": titles[column], "method": [names[row]], **_in_points(gain)})
    axes.set_xticks(range(len(titles)), titles, rotation=90)
    axes.set_yticks(range(len(names)), names)
    axes.axvline(0.5, color="white", linewidth=2)
    figure.colorbar(image, ax=axes, label="gain in points", pad=0.01, extend="both")
    return Plot("settings_gains", CAPTIONS["settings_gains"], figure, data)


def _in_points(gain: Mean) -> dict[str, float]:
    """Return a gain and its interval in percentage points."""
    low, high = gain.interval
    return {"seeds": gain.num, "gain": 100 * gain.mean, "low": 100 * low, "high": 100 * high}


def _write_gain(axes: Axes, gain: Difference, row: int, column: int, reach: float) -> None:
    """Write a gain into its cell: bold if its interval excludes 0, white on dark colours.

    `reach` is the gain in points at which colours end.
    """
    points = 100 * gain.mean
    low, high = gain.interval
    is_told = not low <= 0 <= high
    colour = "black" if is_told else "#707070"
    if abs(points) > 0.6 * reach:
        colour = "white"
    text = "0" if abs(points) < 0.05 else f"{points:+.1f}"
    if abs(points) >= 9.95:
        text = f"{points:+.0f}"
    weight = "bold" if is_told else "normal"
    font: dict[str, Any] = {"size": "x-small", "weight": weight, "color": colour}
    axes.text(column, row, text, ha="center", va="center", **font)


def costs_plot(comparison: Comparison) -> Plot:
    """Return a figure with a row for each method: its gain over random selection, and its costs.

    Gains are in percentage points, costs are multiples of those of random selection. Colour and
    marker show the class of a method. Markers on the Pareto front are filled. Costs that a run did
    not record are left out.
    """
    names = comparison.by_gain
    classes = [comparison.classes.get(name, name) for name in names]
    colours = [f"C{number}" for number in range(len(COLOURS))]
    marks = itertools.cycle(itertools.product("os^", colours))
    looks: dict[str, dict[str, Any]] = {}
    for kind in [*comparison.classes.values(), *comparison.ceiling]:
        if kind not in looks:
            marker, colour = next(marks)
            looks[kind] = {"marker": marker, "color": colour, "markerfacecolor": colour}
    costs = {}
    for kind, quantities in SPENT.items():
        shares = {name: comparison.share(name, quantities) for name in names}
        if np.isfinite(list(shares.values())).all():
            costs[kind] = shares
    figure = new_figure(0.15 * len(names) + 1.0)
    widths = [2] + [1] * len(costs)
    all_axes = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
    gain_axes = all_axes[0]
    data = []
    for row, (name, kind) in enumerate(zip(names, classes, strict=True)):
        gain = estimate(list(pooled_values(comparison.gains(name))))
        if gain:
            spent = {kind: shares[name] for kind, shares in costs.items()}
            data.append({"method": [name], "asks_for": kind, **_in_points(gain), **spent})
            reach = 100 * gain.half_width if gain.num > 1 else None
            gain_axes.errorbar(
                100 * gain.mean, row, xerr=reach, linestyle="none", elinewidth=0.8, **looks[kind]
            )
    for axes, shares in zip(all_axes[1:], costs.values(), strict=True):
        front = comparison.front(shares)
        for row, (name, kind) in enumerate(zip(names, classes, strict=True)):
            fill = "full" if name in front else "none"
            axes.plot(
                shares[name], row, linestyle="none", markersize=4, fillstyle=fill, **looks[kind]
            )
    gain_axes.set_xscale("symlog", linthresh=2, linscale=0.8)
    gain_axes.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))
    for axes, label in zip(all_axes, ["gain in points", *costs], strict=True):
        is_gain = axes is gain_axes
        if not is_gain:
            axes.set_xscale("log")
        axes.axvline(0 if is_gain else 1, color="grey", linewidth=0.6, zorder=0)
        axes.xaxis.set_major_locator(FixedLocator(GAIN_TICKS if is_gain else MULTIPLE_TICKS))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(label)
        axes.grid(axis="y")
    handles = [Line2D([], [], linestyle="", label=kind, **look) for kind, look in looks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return Plot("settings_costs", CAPTIONS["settings_costs"], figure, data)


def profiles_plot(comparison: Comparison, looks: Mapping[str, Look]) -> Plot:
    """Return performance profiles (`profile`) of random selection, the ceiling and the best method
    of each class."""
    methods = [comparison.reference, *comparison.ceiling, *comparison.best.values()]
    names = list(dict.fromkeys(methods))[:MAX_PROFILES]
    gains = {name: [series.to_numpy() for series in comparison.gains(name)] for name in names}
    all_gains = np.concatenate([values for own in gains.values() for values in own])
    levels = np.linspace(all_gains.min() - 0.01, all_gains.max() + 0.01, NUM_LEVELS)
    figure, (axes,) = line_axes([""], {name: looks[name] for name in names})
    data = []
    for number, (name, own) in enumerate(gains.items()):
        share, low, high = profile(own, levels)
        data.append({"method": name, "gain": levels, "share": share, "low": low, "high": high})
        axes.fill_between(levels, low, high, color=looks[name]["color"], alpha=0.12, linewidth=0)
        axes.plot(levels, share, markevery=(number * 5, NUM_LEVELS // 5), **looks[name])
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set(
        xlabel="gain over random selection at the same seed",
        ylabel="share of runs with at least it",
    )
    caption = CAPTIONS["settings_profiles"]
    return Plot("settings_profiles", caption, figure, data)
