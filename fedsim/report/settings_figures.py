"""Figures of methods over several settings: critical differences, gains, accuracy against bytes, profiles."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from fedsim.report.figures import CAPTIONS, PAGE, SMALL, Plot, line_axes, style
from fedsim.report.page import make_looks
from fedsim.results.groups import Panel
from fedsim.results.measures import BYTES, mean_final
from fedsim.results.ranking import Comparison, mean_cost, profile, rank_tests
from fedsim.results.statistics import pooled

MOST_PROFILES, LEVELS = 8, 200
"""Lines of a figure of profiles, and points of a line."""


def settings_plots(found: Comparison | None) -> list[Plot]:
    with style():
        return [] if found is None else [make(found) for make in (ranks_plot, gains_plot, bytes_plot, profiles_plot)]


def ranks_plot(found: Comparison) -> Plot:
    """Demsar's diagram: mean ranks on an axis, the better half named on its left; bars join those that cannot be told
    apart."""
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
    ax.set_title(f"critical difference {difference:.2f}" + " (more than all ranks differ by)" * (difference > num - 1))
    for row, (first, last) in enumerate(bars):
        ax.hlines(0.8 + 0.4 * row, ranks[first] - 0.05, ranks[last] + 0.05, "#D55E00", linewidth=2)
    for at, (name, rank) in enumerate(zip(found.ranks, ranks, strict=True)):
        side, end, row = ("right", 0.6, at) if at < half else ("left", num + 0.4, num - 1 - at)
        ax.plot([rank, rank, end], [0, top + row, top + row], "k", linewidth=0.6, clip_on=False)
        text = f"{name}  {rank:.2f} " if side == "right" else f" {rank:.2f}  {name}"
        ax.text(end, top + row, text, ha=side, va="center", size=SMALL)
    return Plot("settings_ranks", CAPTIONS["settings_ranks"].format(settings=len(found.panels)), figure)


def gains_plot(found: Comparison) -> Plot:
    """A map of gains over random selection in points, methods by settings, with a first column of means over all, by
    which methods are sorted."""
    means = dict(zip(found.methods, found.means.mean(0), strict=True))
    names = [*found.ceiling, *sorted({*means} - {found.reference}, key=lambda name: (-means[name], name))]
    titles = ["all settings", *(panel.title for panel in found.panels)]
    rows = [[pooled(gains), *(pooled([one]) for one in gains)] for gains in map(found.gains, names)]
    points = np.array([[np.nan if one is None else 100 * one.mean for one in row] for row in rows])
    figure = Figure(figsize=(PAGE, 0.18 * len(names) + 0.06 * max(map(len, titles)) + 0.4))
    ax = figure.subplots()
    reach = float(np.quantile(np.nan_to_num(np.abs(points)), 0.95)) or 1.0  # a few far off would leave the others white
    image = ax.imshow(points, vmin=-reach, vmax=reach, cmap="PuOr", aspect="auto")
    for row, column in np.ndindex(points.shape):
        one, value = rows[row][column], points[row, column]
        if one is not None:
            weight = "normal" if one.interval[0] <= 0 <= one.interval[1] else "bold"
            colour = "white" if abs(value) > 0.6 * reach else {"normal": "#707070", "bold": "black"}[weight]
            text = "0" if abs(value) < 0.05 else f"{value:+.1f}" if abs(value) < 9.95 else f"{value:+.0f}"
            ax.text(column, row, text, size=SMALL - 2, weight=weight, color=colour, ha="center", va="center")
    ax.set_xticks(range(len(titles)), titles, rotation=90)
    ax.set_yticks(range(len(names)), names)
    ax.axvline(0.5, color="white", linewidth=2)
    figure.colorbar(image, ax=ax, label="gain in points", pad=0.01, extend="both")
    return Plot("settings_gains", CAPTIONS["settings_gains"], figure)


def bytes_plot(found: Comparison) -> Plot:
    """Final accuracy against bytes as multiples of those of random selection: means over settings. Names stand on the
    right in the order of accuracies, those of the front in bold."""
    looks = make_looks([Panel("", {name: found.panels[0].lines[name] for name in found.methods})])
    y = dict(sorted(zip(found.methods, found.means.mean(0).tolist(), strict=True), key=lambda one: one[1]))
    costs = {name: [mean_cost(own, BYTES) / mean_cost(one, BYTES) for own, one in found.pairs(name)] for name in y}
    x = {name: float(np.mean(shares)) for name, shares in costs.items()}
    figure = Figure(figsize=(PAGE, max(2.6, 0.13 * len(y) + 0.6)))
    ax = figure.subplots()
    for name in y:
        lead = found.verdicts[name].difference if name in found.verdicts else None
        half = 0.0 if lead is None else (lead.interval[1] - lead.interval[0]) / 2
        ax.errorbar(x[name], y[name], half, elinewidth=0.6, **{**looks[name], "linestyle": "none"})
    front = [n for n in y if not any((x[o], -y[o]) != (x[n], -y[n]) and x[o] <= x[n] and y[o] >= y[n] for o in y)]
    front.sort(key=x.__getitem__)
    ax.step([x[name] for name in front], [y[name] for name in front], "grey", where="post", linewidth=0.8, zorder=0)
    for name in found.ceiling:
        height = float(np.mean([mean_final(own) for own, _ in found.pairs(name)]))
        ax.axhline(height, color="black", linestyle="--", linewidth=0.8)
        ax.text(0.01, height, name, transform=ax.get_yaxis_transform(), va="top", size=SMALL)
    ax.set(xscale="log", xlabel="bytes sent, both ways (random selection: 1)", ylabel="final test accuracy")
    ax.margins(0.05)
    low, high = ax.get_ylim()
    heights = apart([(value - low) / (high - low) for value in y.values()], 0.95 / max(18, len(y)))
    for name, height in zip(y, heights, strict=True):
        line = {"arrowstyle": "-", "linewidth": 0.4, "color": looks[name]["color"], "shrinkA": 0, "shrinkB": 0}
        label = ax.annotate(name, (x[name], y[name]), (1.03, height), textcoords="axes fraction", arrowprops=line)
        label.set(va="center", size=SMALL, weight="bold" if name in front else "normal")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_locator(NullLocator())
    return Plot("settings_bytes", CAPTIONS["settings_bytes"], figure)


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending `heights`, moved up so that they are at least `gap` apart, and then down where they pass 1."""
    up = [*accumulate(heights, lambda below, own: max(own, below + gap))]
    return [*accumulate(up[::-1], lambda above, own: min(own, above - gap), initial=1 + gap)][:0:-1]


def profiles_plot(found: Comparison) -> Plot:
    names = [*dict.fromkeys([found.reference, *found.ceiling, *found.best.values()])][:MOST_PROFILES]
    gains = {name: [np.array([*by_seed.values()]) for by_seed in found.gains(name)] for name in names}
    ends = np.concatenate([values for own in gains.values() for values in own])
    levels = np.linspace(ends.min() - 0.01, ends.max() + 0.01, LEVELS)
    panel = Panel("", {name: found.panels[0].lines[name] for name in names})
    looks = make_looks([panel])
    figure, (ax,) = line_axes([panel], looks)
    for at, (name, own) in enumerate(gains.items()):
        share, low, high = profile(own, levels)
        ax.fill_between(levels, low, high, color=looks[name]["color"], alpha=0.12, linewidth=0)
        ax.plot(levels, share, markevery=(at * 5, LEVELS // 5), **looks[name])
    ax.set(xlabel="gain over random selection at the same seed", ylabel="share of runs with at least it")
    return Plot("settings_profiles", CAPTIONS["settings_profiles"], figure)
