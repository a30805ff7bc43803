"""Figures of methods over several settings: critical differences, gains, gains beside costs,
profiles."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator

from fedsim.report.drawing import CAPTIONS, Plot
from fedsim.report.layout import (
    add_legend,
    fit_names,
    fit_text,
    grow,
    line_axes,
    new_figure,
    row_height,
    text_scale,
    widest,
)
from fedsim.report.looks import CLASS_COLOURS, Look
from fedsim.report.ticks import FittingTicks, set_log_scale
from fedsim.results.measures import SPENT
from fedsim.results.ranking import Comparison, profile, rank_tests
from fedsim.results.statistics import Difference, Mean, estimate, pooled, pooled_values

RANK_ROW = 0.16
"""Height of a row of the diagram of mean ranks, in inches."""
RANKS_AXIS = 2.4
"""Smallest width of the axis of mean ranks between the names on both sides, with these ranks, in
inches."""
GAIN_WIDTH, BESIDE_GAINS = 0.21, 0.75
"""Width in inches of a cell of the map of gains, and of the bar of colours next to the map."""
GAINS_PANEL, COST_PANEL = 1.7, 0.65
"""Widths in inches of the panels of gains and of costs next to each other."""
GAIN_TICKS = ((0, -10, 10), (-2, 2), (-50, 50, -5, 5))
"""Ticks of gains in points; earlier ones have precedence."""
SMALL_GAIN_TICKS = [
    sign * tens * digit for sign in (-1, 1) for tens in (1, 10) for digit in range(2, 10)
]
"""Small ticks of gains. Those beyond 2 points get closer, as on any logarithmic axis."""
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

    The better half of the methods is named on the left of the axis, the other half on the right. On
    a narrow figure all are named on the left. Bars join methods that cannot be told apart
    (`rank_tests`). Heights count downwards in rows.
    """
    ranks = [rank for rank, _ in comparison.ranks.values()]
    _, critical = rank_tests(comparison.means)
    num = len(ranks)
    width = new_figure(0).get_figwidth()
    # On a narrow figure the axis would have no room between names.
    is_narrow = 2 * widest(list(comparison.ranks)) + text_scale() * RANKS_AXIS > width
    half = num if is_narrow else math.ceil(num / 2)
    names = fit_names(list(comparison.ranks), width)
    step = row_height(names, RANK_ROW) / RANK_ROW
    bars = _bars(ranks, critical)
    top = 1.2 + 0.4 * len(bars)  # place of the names, in rows below the axis
    bottom = top + step * half
    figure = new_figure(RANK_ROW * (bottom + 3))
    axes = figure.subplots()
    axes.set(xlim=(0.7, num + 0.3), ylim=(bottom, 0), yticks=[])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.spines["top"].set_visible(True)
    axes.xaxis.tick_top()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    remark = " (more than all ranks differ by)" if critical > num - 1 else ""
    title = f"critical difference {critical:.2f}{remark}"
    figure.suptitle(fit_text(title, figure.get_figwidth()))
    for row, (first, last) in enumerate(bars):
        height = 0.8 + 0.4 * row
        axes.hlines(height, ranks[first] - 0.05, ranks[last] + 0.05, "#D55E00", linewidth=2)
    for number, (name, rank) in enumerate(zip(names, ranks, strict=True)):
        if number < half:
            side, end, row, text = "right", 0.6, number, f"{name}  {rank:.2f} "
        else:
            side, end, row, text = "left", num + 0.4, num - 1 - number, f" {rank:.2f}  {name}"
        height = top + step * row
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

    The first column has the means over all settings, by which methods are sorted. On a narrow
    figure, further settings are in blocks below.
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
    figure = new_figure(0)
    texts = fit_names(names, figure.get_figwidth())
    room = (figure.get_figwidth() - widest(texts)) / text_scale() - BESIDE_GAINS
    num_blocks = math.ceil(len(titles) / max(1, math.floor(room / GAIN_WIDTH)))
    blocks = np.array_split(np.arange(len(titles)), num_blocks)
    grow(figure, num_blocks * (row_height(texts, 0.18) * len(names) + 0.2) + 0.2)
    figure.set_figheight(figure.get_figheight() + num_blocks * widest(titles))
    all_axes = figure.subplots(num_blocks, squeeze=False)[:, 0]
    # A few gains that are far off would leave the others white.
    reach = float(np.quantile(np.nan_to_num(np.abs(points)), 0.95)) or 1.0
    for axes, columns in zip(all_axes, blocks, strict=True):
        shown = points[:, columns]
        image = axes.imshow(shown, vmin=-reach, vmax=reach, cmap="PuOr", aspect="auto")
        for row, place in np.ndindex(shown.shape):
            gain = rows[row][columns[place]]
            if gain is not None:
                _write_gain(axes, gain, row, place, reach)
        axes.set_xticks(range(len(columns)), [titles[column] for column in columns], rotation=90)
        axes.set_yticks(range(len(names)), texts)
    all_axes[0].axvline(0.5, color="white", linewidth=2)
    figure.colorbar(image, ax=all_axes, label="gain in points", pad=0.01, extend="both")
    data = []
    for row, column in np.ndindex(points.shape):
        gain = rows[row][column]
        if gain is not None:
            data.append({"setting": titles[column], "method": [names[row]], **_in_points(gain)})
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
    not record are left out. On a narrow figure the panels are in several rows.
    """
    names = comparison.by_gain
    classes = [comparison.classes.get(name, name) for name in names]
    marks = zip(itertools.cycle(CLASS_COLOURS), itertools.cycle("os^Dv"), strict=False)
    looks: dict[str, dict[str, Any]] = {}
    for kind in [*comparison.classes.values(), *comparison.ceiling]:
        if kind not in looks:
            colour, marker = next(marks)
            looks[kind] = {"marker": marker, "color": colour, "markerfacecolor": colour}
    costs = {}
    for quantity, fields in SPENT.items():
        shares = {name: comparison.share(name, fields) for name in names}
        if np.isfinite(list(shares.values())).all():
            costs[quantity] = shares
    figure, gain_axes, cost_axes = _costs_axes(names, list(costs))
    data = []
    for row, (name, kind) in enumerate(zip(names, classes, strict=True)):
        gain = estimate(list(pooled_values(comparison.gains(name))))
        if gain:
            spent = {quantity: shares[name] for quantity, shares in costs.items()}
            data.append({"method": [name], "asks_for": kind, **_in_points(gain), **spent})
            reach = 100 * gain.half_width if gain.num > 1 else None
            gain_axes.errorbar(
                100 * gain.mean, row, xerr=reach, linestyle="none", elinewidth=0.8, **looks[kind]
            )
    for axes, shares in zip(cost_axes, costs.values(), strict=True):
        front = comparison.front(shares)
        for row, (name, kind) in enumerate(zip(names, classes, strict=True)):
            fill = "full" if name in front else "none"
            axes.plot(
                shares[name], row, linestyle="none", markersize=4, fillstyle=fill, **looks[kind]
            )
        set_log_scale(axes)
    gain_axes.set_xscale("symlog", linthresh=2, linscale=0.8)
    gain_axes.xaxis.set_major_formatter("{x:g}")
    gain_axes.xaxis.set_major_locator(FittingTicks(GAIN_TICKS))
    gain_axes.xaxis.set_minor_locator(FixedLocator(SMALL_GAIN_TICKS))
    handles = [Line2D([], [], linestyle="", label=kind, **look) for kind, look in looks.items()]
    add_legend(figure, handles, handle_length=1)
    return Plot("settings_costs", CAPTIONS["settings_costs"], figure, data)


def _costs_axes(names: Sequence[str], quantities: Sequence[str]) -> tuple[Figure, Axes, list[Axes]]:
    """Return the figure of `costs_plot`, the panel of gains, and those of costs.

    All are in one row if they fit next to the names of methods. Otherwise gains are above costs.
    """
    figure = new_figure(0)
    widths = {"gain in points (log scale beyond 2)": GAINS_PANEL}
    widths.update(dict.fromkeys(quantities, COST_PANEL))
    texts = fit_names(names, figure.get_figwidth())
    room = (figure.get_figwidth() - widest(texts)) / text_scale()
    lines = [list(widths)]
    if sum(widths.values()) > room:
        num = max(1, math.floor(room / COST_PANEL))
        lines = [list(widths)[:1]]
        lines += [list(quantities[first : first + num]) for first in range(0, len(quantities), num)]
    grow(figure, len(lines) * (row_height(texts, 0.15) * len(names) + 0.65))
    grid = figure.add_gridspec(len(lines), 1)
    all_axes: list[Axes] = []
    for number, line in enumerate(lines):
        ratios = [widths[label] for label in line]
        row = grid[number].subgridspec(1, len(line), width_ratios=ratios)
        panels = row.subplots(sharey=True, squeeze=False)[0]
        for label, axes in zip(line, panels, strict=True):
            is_gain = not all_axes
            width = text_scale() * room * widths[label] / sum(ratios)
            axes.set_xlabel(fit_text(label, width))
            axes.set(yticks=range(len(names)), yticklabels=texts, ylim=(len(names) - 0.5, -0.5))
            axes.tick_params(axis="y", length=0)
            axes.axvline(0 if is_gain else 1, color="grey", linewidth=0.6, zorder=0)
            axes.grid(axis="y")
            axes.margins(x=0.12)
            all_axes.append(axes)
    return figure, all_axes[0], all_axes[1:]


def profiles_plot(comparison: Comparison, looks: Mapping[str, Look]) -> Plot:
    """Return performance profiles (`profile`) of random selection, the ceiling and the best method
    of each class."""
    methods = [comparison.reference, *comparison.ceiling, *comparison.best.values()]
    names = list(dict.fromkeys(methods))[:MAX_PROFILES]
    gains = {name: [series.to_numpy() for series in comparison.gains(name)] for name in names}
    all_gains = np.concatenate([values for own in gains.values() for values in own])
    levels = np.linspace(all_gains.min() - 0.01, all_gains.max() + 0.01, NUM_LEVELS)
    label = "gain over random selection at the same seed"
    figure, (axes,) = line_axes([""], {name: looks[name] for name in names}, label)
    data = []
    for number, (name, own) in enumerate(gains.items()):
        share, low, high = profile(own, levels)
        data.append({"method": name, "gain": levels, "share": share, "low": low, "high": high})
        axes.fill_between(levels, low, high, color=looks[name]["color"], alpha=0.12, linewidth=0)
        axes.plot(levels, share, markevery=(number * 5, NUM_LEVELS // 5), **looks[name])
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_ylabel("share of runs with at least it")
    caption = CAPTIONS["settings_profiles"]
    return Plot("settings_profiles", caption, figure, data)
