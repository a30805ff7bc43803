"""Figures of methods over several settings: mean ranks, gains by setting, gains next to costs, and
performance profiles.

A gain is final accuracy minus that of random selection at the same seed, in percentage points.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator

from fedsim.core.arrays import Ints
from fedsim.report.drawing import CAPTIONS, Plot
from fedsim.report.layout import (
    add_legend,
    figure_size,
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
"""Minimum width in inches of the axis of mean ranks between names on both sides. It includes the
ranks next to the names."""
FIRST_BAR, BAR_STEP = 0.8, 0.4
"""Distance in rows from the axis of ranks to the first bar, and from each bar to the next."""
FIRST_NAME = 1.2
"""Distance in rows from the axis of ranks to the first name, if there are no bars."""
ABOVE_RANKS = 3
"""Height in rows of the ticks and the title above the axis of ranks."""
BEYOND_RANKS, NAME_DISTANCE = 0.3, 0.4
"""Distances in ranks from the first and the last rank to the ends of the axis, and to the names."""
BAR_END = 0.05
"""Distance in ranks from a mean rank to the end of the bar that joins it with others."""

GAIN_WIDTH, GAIN_HEIGHT = 0.21, 0.18
"""Width and height in inches of a cell of the map of gains."""
AROUND_GAINS = 0.2
"""Height in inches of the space around a block of the map of gains."""
BESIDE_GAINS = 0.75
"""Width in inches of the bar of colours next to the map of gains."""
COLOURED = 0.95
"""Quantile of the absolute gains at which the colours of the map end."""
DARK = 0.6
"""Cells are dark from this share of the gain at which colours end."""

GAINS_LABEL = "gain in points (log scale beyond 2)"
GAINS_PANEL, COST_PANEL = 1.7, 0.65
"""Widths in inches of the panels of gains and of costs next to each other."""
COST_ROW, AROUND_COSTS = 0.15, 0.65
"""Heights in inches of the row of a method in these panels, and of the space around a panel."""
CLASS_MARKERS = "os^Dv"
"""matplotlib's markers of classes of methods."""
LINEAR_UNTIL = 2
"""The axis of gains is linear up to this number of points, and logarithmic beyond."""
GAIN_TICKS = ((0, -10, 10), (-2, 2), (-50, 50, -5, 5))
"""Ticks of gains in points. Where labels would overlap, those of earlier tuples are drawn."""
SMALL_TICKS = [*range(2, 10), *range(20, 100, 10)]
"""Small ticks of positive and negative gains in points. Beyond `LINEAR_UNTIL` they get closer, as
on any logarithmic axis."""

MAX_PROFILES = 8
"""Maximum number of lines in a figure of profiles."""
NUM_LEVELS = 200
"""Number of gains at which a profile is computed."""
LEVEL_MARGIN = 0.01
"""Profiles are drawn from so far below the smallest gain to so far above the largest."""
PROFILE_MARKERS = 5
"""Number of markers on a profile."""


def settings_plots(comparison: Comparison, looks: Mapping[str, Look]) -> list[Plot]:
    """Return all figures over settings. `looks` has the look of each method."""
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
    (`rank_tests`). Heights are in rows of `RANK_ROW` inches, and count downwards from the axis.
    """
    methods = list(comparison.ranks)
    ranks = [rank for rank, _ in comparison.ranks.values()]
    num_methods = len(methods)
    _, critical = rank_tests(comparison.means)
    bars = _bars(ranks, critical)

    # 1. Place the names below the bars, on one side or on both sides.
    width, _ = figure_size(is_wide=True)
    names = fit_names(methods, width)
    has_one_side = 2 * widest(methods) + text_scale() * RANKS_AXIS > width
    num_left = num_methods if has_one_side else math.ceil(num_methods / 2)
    name_step = row_height(names, RANK_ROW) / RANK_ROW
    first_name = FIRST_NAME + BAR_STEP * len(bars)
    bottom = first_name + name_step * num_left

    # 2. Draw the axis.
    figure = new_figure(RANK_ROW * (bottom + ABOVE_RANKS))
    axes = figure.subplots()
    axes.set(xlim=(1 - BEYOND_RANKS, num_methods + BEYOND_RANKS), ylim=(bottom, 0), yticks=[])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.spines["top"].set_visible(True)
    axes.xaxis.tick_top()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    title = f"critical difference {critical:.2f}"
    if critical > num_methods - 1:
        title += " (more than all ranks differ by)"
    figure.suptitle(fit_text(title, width))

    # 3. Draw the bars, and a line from each mean rank to the name of its method.
    for number, (best, worst) in enumerate(bars):
        height = FIRST_BAR + BAR_STEP * number
        start, end = ranks[best] - BAR_END, ranks[worst] + BAR_END
        axes.hlines(height, start, end, "#D55E00", linewidth=2)
    for number, (name, rank) in enumerate(zip(names, ranks, strict=True)):
        if number < num_left:
            height = first_name + name_step * number
            end = 1 - NAME_DISTANCE
            axes.text(end, height, f"{name}  {rank:.2f} ", ha="right", va="center")
        else:  # the worst method is the highest, so that no lines cross
            height = first_name + name_step * (num_methods - 1 - number)
            end = num_methods + NAME_DISTANCE
            axes.text(end, height, f" {rank:.2f}  {name}", ha="left", va="center")
        x, y = [rank, rank, end], [0, height, height]
        axes.plot(x, y, color="grey", linewidth=0.6, clip_on=False)
    caption = CAPTIONS["settings_ranks"].format(settings=len(comparison.settings))
    data = {"method": methods, "mean_rank": ranks}
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
    # 1. Collect the gains by row and column. A cell with fewer than two common seeds has none.
    methods = [method for method in comparison.by_gain if method != comparison.reference]
    settings = ["all settings", *comparison.settings]
    gains: dict[tuple[int, int], Difference] = {}
    points = np.full((len(methods), len(settings)), math.nan)
    for row, method in enumerate(methods):
        by_setting = comparison.gains(method)
        strata_of_columns = [by_setting, *([series] for series in by_setting)]
        for column, strata in enumerate(strata_of_columns):
            gain = pooled(strata)
            if gain is not None:
                gains[row, column] = gain
                points[row, column] = 100 * gain.mean

    # 2. Draw them. A few gains that are far off would leave the others white.
    figure, blocks = _gains_axes(methods, settings)
    limit = float(np.quantile(np.nan_to_num(np.abs(points)), COLOURED)) or 1.0
    all_axes = []
    for axes, columns in blocks:
        image = axes.imshow(points[:, columns], vmin=-limit, vmax=limit, cmap="PuOr", aspect="auto")
        for (row, column), gain in gains.items():
            if column in columns:
                _write_gain(axes, gain, row, column - columns[0], limit)
        all_axes.append(axes)
    all_axes[0].axvline(0.5, color="white", linewidth=2)  # between all settings and each
    figure.colorbar(image, ax=all_axes, label="gain in points", pad=0.01, extend="both")
    data = []
    for (row, column), gain in gains.items():
        data.append({"setting": settings[column], "method": [methods[row]], **_in_points(gain)})
    return Plot("settings_gains", CAPTIONS["settings_gains"], figure, data)


def _gains_axes(
    methods: Sequence[str], settings: Sequence[str]
) -> tuple[Figure, list[tuple[Axes, Ints]]]:
    """Return the figure of `gains_plot`, and the axes of each block with the numbers of its
    settings.

    The axes have the names of methods and settings as ticks. There are as many blocks as it takes
    for cells to be `GAIN_WIDTH` inches wide.
    """
    figure = new_figure(0)
    names = fit_names(methods, figure.get_figwidth())
    room = (figure.get_figwidth() - widest(names)) / text_scale() - BESIDE_GAINS
    max_columns = max(1, math.floor(room / GAIN_WIDTH))
    num_blocks = math.ceil(len(settings) / max_columns)
    block_height = row_height(names, GAIN_HEIGHT) * len(methods) + AROUND_GAINS
    grow(figure, num_blocks * block_height + AROUND_GAINS)
    # The names of settings are written upwards, at the size of the style.
    figure.set_figheight(figure.get_figheight() + num_blocks * widest(settings))
    blocks = []
    all_axes = figure.subplots(num_blocks, squeeze=False)[:, 0]
    all_columns = np.array_split(np.arange(len(settings)), num_blocks)
    for axes, columns in zip(all_axes, all_columns, strict=True):
        axes.set_xticks(range(len(columns)), [settings[column] for column in columns], rotation=90)
        axes.set_yticks(range(len(methods)), names)
        blocks.append((axes, columns))
    return figure, blocks


def _in_points(gain: Mean) -> dict[str, float]:
    """Return a gain and its interval in percentage points."""
    low, high = gain.interval
    return {"seeds": gain.num, "gain": 100 * gain.mean, "low": 100 * low, "high": 100 * high}


def _write_gain(axes: Axes, gain: Difference, row: int, column: int, limit: float) -> None:
    """Write a gain into its cell: bold if its interval excludes 0, white on dark colours.

    `limit` is the gain in points at which colours end.
    """
    points = 100 * gain.mean
    if abs(points) < 0.05:
        text = "0"
    elif abs(points) < 9.95:
        text = f"{points:+.1f}"
    else:
        text = f"{points:+.0f}"
    low, high = gain.interval
    excludes_0 = not low <= 0 <= high
    weight = "bold" if excludes_0 else "normal"
    colour = "black" if excludes_0 else "#707070"
    if abs(points) > DARK * limit:
        colour = "white"
    font: dict[str, Any] = {"size": "x-small", "weight": weight, "color": colour}
    axes.text(column, row, text, ha="center", va="center", **font)


def costs_plot(comparison: Comparison) -> Plot:
    """Return a figure with a row for each method: its gain over random selection, and its costs.

    Gains are in percentage points, costs are multiples of those of random selection. Colour and
    marker show the class of a method. Markers on the Pareto front are filled. A quantity that some
    run did not record has no panel. On a narrow figure the panels are in several rows.
    """
    methods = comparison.by_gain
    looks = _class_looks([*comparison.classes.values(), *comparison.ceiling])
    # The ceiling has no class, so its name stands for one.
    classes = {method: comparison.classes.get(method, method) for method in methods}
    costs = {}
    for quantity, fields in SPENT.items():
        multiples = {method: comparison.share(method, fields) for method in methods}
        if np.isfinite(list(multiples.values())).all():
            costs[quantity] = multiples
    figure, gains_axes, costs_axes = _costs_axes(methods, list(costs))

    # 1. Draw the gains.
    data = []
    for row, method in enumerate(methods):
        gain = estimate(list(pooled_values(comparison.gains(method))))
        if gain is None:
            continue
        half_width = 100 * gain.half_width if gain.num > 1 else None
        look = looks[classes[method]]
        gains_axes.errorbar(
            100 * gain.mean, row, xerr=half_width, linestyle="none", elinewidth=0.8, **look
        )
        record = {"method": [method], "asks_for": classes[method], **_in_points(gain)}
        record.update((quantity, multiples[method]) for quantity, multiples in costs.items())
        data.append(record)
    gains_axes.set_xscale("symlog", linthresh=LINEAR_UNTIL, linscale=0.8)
    gains_axes.xaxis.set_major_formatter("{x:g}")
    gains_axes.xaxis.set_major_locator(FittingTicks(GAIN_TICKS))
    negative_ticks = [-tick for tick in SMALL_TICKS]
    gains_axes.xaxis.set_minor_locator(FixedLocator([*negative_ticks, *SMALL_TICKS]))

    # 2. Draw the costs.
    for axes, multiples in zip(costs_axes, costs.values(), strict=True):
        front = comparison.front(multiples)
        for row, method in enumerate(methods):
            fill = "full" if method in front else "none"
            look = looks[classes[method]]
            axes.plot(
                multiples[method], row, linestyle="none", markersize=4, fillstyle=fill, **look
            )
        set_log_scale(axes)
    handles = [Line2D([], [], linestyle="", label=name, **look) for name, look in looks.items()]
    add_legend(figure, handles, handle_length=1)
    return Plot("settings_costs", CAPTIONS["settings_costs"], figure, data)


def _class_looks(classes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the marker and colour of each distinct class, as matplotlib's keyword arguments."""
    looks = {}
    colours, markers = itertools.cycle(CLASS_COLOURS), itertools.cycle(CLASS_MARKERS)
    for name in dict.fromkeys(classes):
        colour = next(colours)
        looks[name] = {"marker": next(markers), "color": colour, "markerfacecolor": colour}
    return looks


class _Panel(NamedTuple):
    """A panel of `costs_plot`: its label, its width in inches on paper, and the value of random
    selection, where a line is drawn."""

    label: str
    width: float
    reference: float


def _costs_axes(
    methods: Sequence[str], quantities: Sequence[str]
) -> tuple[Figure, Axes, list[Axes]]:
    """Return the figure of `costs_plot`, its panel of gains, and its panels of costs.

    All panels are in one row if they fit next to the names of methods. Otherwise gains are above
    costs.
    """
    figure = new_figure(0)
    names = fit_names(methods, figure.get_figwidth())
    room = (figure.get_figwidth() - widest(names)) / text_scale()
    # 1. Distribute the panels over rows.
    gains_panel = _Panel(GAINS_LABEL, GAINS_PANEL, 0.0)
    cost_panels = [_Panel(quantity, COST_PANEL, 1.0) for quantity in quantities]
    panel_rows = [[gains_panel, *cost_panels]]
    if sum(panel.width for panel in panel_rows[0]) > room:
        per_row = max(1, math.floor(room / COST_PANEL))
        panel_rows = [[gains_panel]]
        for first in range(0, len(cost_panels), per_row):
            panel_rows.append(cost_panels[first : first + per_row])
    # 2. Make their axes.
    grow(figure, len(panel_rows) * (row_height(names, COST_ROW) * len(methods) + AROUND_COSTS))
    grid = figure.add_gridspec(len(panel_rows), 1)
    all_axes: list[Axes] = []
    for number, panels in enumerate(panel_rows):
        widths = [panel.width for panel in panels]
        row = grid[number].subgridspec(1, len(panels), width_ratios=widths)
        axes_of_row = row.subplots(sharey=True, squeeze=False)[0]
        for panel, axes in zip(panels, axes_of_row, strict=True):
            width = text_scale() * room * panel.width / sum(widths)
            axes.set_xlabel(fit_text(panel.label, width))
            axes.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))
            axes.tick_params(axis="y", length=0)
            axes.axvline(panel.reference, color="grey", linewidth=0.6, zorder=0)
            axes.grid(axis="y")
            axes.margins(x=0.12)
            all_axes.append(axes)
    return figure, all_axes[0], all_axes[1:]


def profiles_plot(comparison: Comparison, looks: Mapping[str, Look]) -> Plot:
    """Return performance profiles (`profile`) of random selection, the ceiling and the best method
    of each class."""
    candidates = [comparison.reference, *comparison.ceiling, *comparison.best.values()]
    methods = list(dict.fromkeys(candidates))[:MAX_PROFILES]
    gains = {}
    for method in methods:
        gains[method] = [series.to_numpy() for series in comparison.gains(method)]
    all_gains = np.concatenate([values for by_setting in gains.values() for values in by_setting])
    lowest, highest = all_gains.min() - LEVEL_MARGIN, all_gains.max() + LEVEL_MARGIN
    levels = np.linspace(lowest, highest, NUM_LEVELS)
    label = "gain over random selection at the same seed"
    figure, (axes,) = line_axes([""], {method: looks[method] for method in methods}, label)
    marker_step = NUM_LEVELS // PROFILE_MARKERS
    shift = marker_step // MAX_PROFILES  # so that markers of lines do not cover each other
    data = []
    for number, (method, by_setting) in enumerate(gains.items()):
        share, low, high = profile(by_setting, levels)
        look = looks[method]
        axes.fill_between(levels, low, high, color=look["color"], alpha=0.12, linewidth=0)
        axes.plot(levels, share, markevery=(number * shift, marker_step), **look)
        data.append({"method": method, "gain": levels, "share": share, "low": low, "high": high})
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_ylabel("share of runs with at least it")
    return Plot("settings_profiles", CAPTIONS["settings_profiles"], figure, data)
