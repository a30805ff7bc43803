"""Figures of ablations (`fedsim.results.ablations`).

A figure has lines of final accuracy against the values of one number, or maps of final accuracy by
two numbers. It has a panel for each setting or map. Lengths are in inches, except in points (1/72
inch) where that is said.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle
from matplotlib.transforms import ScaledTranslation

from fedsim.core.arrays import Floats
from fedsim.report.drawing import CAPTIONS, Plot
from fedsim.report.layout import (
    BESIDE_LINES,
    dots_of,
    line_axes,
    make_axes,
    num_columns_of,
    text_scale,
    write_around,
)
from fedsim.report.looks import Look, make_looks
from fedsim.report.ticks import FittingTicks
from fedsim.results.ablations import Point, axis, by_grid, file_name

SHIFT = 5.0
"""Distance in points of markers at the same value, so that the intervals of all lines are seen."""
DOTS_SHIFT = 2.5
"""Distance in points of the results of single seeds from their mean."""
SIDE_MARGIN, MAX_SIDE_MARGIN = 0.08, 0.3
"""Margins beside the lines of a panel, as shares of its width: without shifts, and at most."""
LINEAR_PART = 0.5
"""Length of the linear part of a logarithmic axis, from 0 to the lowest value, in decades."""
CELL_HEIGHT = 0.36
"""Height of a row of a map."""
AROUND_MAP = 0.7
"""Height of the title, ticks and label of a map."""
BEST_FRAME = "#D55E00"
"""Colour of the frame of the best cell of a map."""


def ablation_plots(
    ablations: Sequence[Sequence[Point]], selectors: Mapping[str, str]
) -> list[Plot]:
    """Return a figure for each ablation. `selectors` has the selector of each group."""
    plots = []
    for points in ablations:
        is_map = len(points[0].keys) > 1
        plots.append(_map_plot(points) if is_map else _line_plot(points, selectors))
    return plots


def _data(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the data of a figure: a mapping for each point, which becomes a row."""
    rows = []
    for point in points:
        row: dict[str, Any] = {"setting": point.setting, "method": point.method}
        row.update(zip(point.keys, point.values, strict=True))
        row["seeds"] = [point.accuracy.num]  # a list, because pandas needs one to make a frame
        row["accuracy"] = point.accuracy.mean
        row["low"], row["high"] = point.accuracy.interval
        rows.append(row)
    return rows


def _line_plot(points: Sequence[Point], selectors: Mapping[str, str]) -> Plot:
    """Return a figure with a panel for each setting and a line for each method.

    `selectors` has the selector of each group.
    """
    (key,) = points[0].keys
    lines_of_panels: dict[str, dict[str, list[Point]]] = {}
    for (setting, method), line in by_grid(points).items():
        lines_of_panels.setdefault(setting, {})[method] = line
    values = axis(points, 0)
    looks = make_looks({point.method: selectors[point.group] for point in points})
    is_log = is_logarithmic(values)
    label = f"{key} (log scale)" if is_log else key
    figure, all_axes = line_axes(list(lines_of_panels), looks, label)
    for lines, axes in zip(lines_of_panels.values(), all_axes, strict=True):
        if is_log:
            lowest = min(value for value in values if value > 0)
            axes.set_xscale("symlog", linthresh=lowest, linscale=LINEAR_PART)  # it can show 0
        # The markers of all lines at a value are around it.
        last_shift = SHIFT * (len(lines) - 1) / 2
        for number, (method, line) in enumerate(lines.items()):
            _draw_line(axes, line, looks[method], SHIFT * number - last_shift)
        # The margins make room for shifted markers.
        panel_points = 72 * (figure.get_figwidth() / num_columns_of(axes) - BESIDE_LINES)
        axes.margins(x=min(MAX_SIDE_MARGIN, SIDE_MARGIN + last_shift / panel_points))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_major_locator(FittingTicks([[values[0], values[-1]], values]))
        axes.set_xticks([], minor=True)
        axes.set_ylabel("final test accuracy")
    caption = CAPTIONS["ablation"].format(key=key)
    return Plot(file_name(points), caption, figure, _data(points))


def is_logarithmic(values: Sequence[float]) -> bool:
    """Return whether a logarithmic axis shows `values`, ascending, further apart than a linear one.

    What counts is the smallest distance of two positive values as a share of the axis. With
    negative values, the axis is linear.
    """
    if values[0] < 0:
        return False
    positive = np.array([value for value in values if value > 0])

    def smallest_share(places: Floats) -> float:
        return float(np.diff(places).min() / np.ptp(places))

    return smallest_share(np.log(positive)) > smallest_share(positive)


def _draw_line(axes: Axes, points: Sequence[Point], look: Look, shift: float) -> None:
    """Draw means with intervals, `shift` points to the right of their values. The best is filled.

    The accuracies of single seeds are dots to the right of their mean.
    """
    to_inches = axes.figure.dpi_scale_trans
    at_means = axes.transData + ScaledTranslation(shift / 72, 0, to_inches)
    at_dots = axes.transData + ScaledTranslation((shift + DOTS_SHIFT) / 72, 0, to_inches)
    x = [point.value for point in points]
    means = [point.accuracy.mean for point in points]
    intervals = np.array([point.accuracy.interval for point in points]).T
    reach = np.abs(intervals - means)
    axes.errorbar(x, means, reach, elinewidth=0.8, capsize=2, transform=at_means, **look)
    for point in points:
        mean = point.accuracy.mean
        accuracies = point.accuracy.values
        x_of_dots = [point.value] * len(accuracies)
        axes.plot(x_of_dots, accuracies, ".", transform=at_dots, **dots_of(look))
        if point.is_best:
            filled = dict(look, markerfacecolor=look["color"])
            axes.plot(point.value, mean, zorder=3, transform=at_means, **filled)
        # matplotlib takes no account of what is drawn with transforms like these.
        for accuracy in [*point.accuracy.interval, *accuracies]:
            axes.update_datalim([(point.value, accuracy)])
    axes.autoscale_view()


def _map_plot(points: Sequence[Point]) -> Plot:
    """Return a figure with all maps of an ablation, which share one scale of colours.

    The values of the first number are on the y axis, those of the second one on the x axis.
    """
    y_key, x_key = points[0].keys
    y_values, x_values = axis(points, 0), axis(points, 1)
    maps = by_grid(points)
    figure, all_axes = make_axes(len(maps), CELL_HEIGHT * len(y_values) + AROUND_MAP)
    all_means = [point.accuracy.mean for point in points]
    colours = Normalize(min(all_means), max(all_means))
    for (name, points_of_map), axes in zip(maps.items(), all_axes, strict=True):
        means = np.full((len(y_values), len(x_values)), np.nan)
        for point in points_of_map:
            row, column = y_values.index(point.value), x_values.index(point.second_value)
            means[row, column] = point.accuracy.mean
            _draw_cell(axes, point, row, column)
        axes.imshow(means, norm=colours, aspect="auto", origin="lower")
        axes.set_xticks(range(len(x_values)), [f"{value:g}" for value in x_values])
        axes.set_yticks(range(len(y_values)), [f"{value:g}" for value in y_values])
        width_of_ticks = text_scale() * BESIDE_LINES
        write_around(figure, axes, " ".join(name), x_key, width_of_ticks)
        axes.set_ylabel(y_key)
    figure.colorbar(ScalarMappable(colours), ax=all_axes, label="final test accuracy", pad=0.02)
    caption = CAPTIONS["ablation_map"].format(keys=" and ".join(points[0].keys))
    return Plot(file_name(points), caption, figure, _data(points))


def _draw_cell(axes: Axes, point: Point, row: int, column: int) -> None:
    """Write the mean into its cell.

    The best cell has a frame. Cells that no test tells apart from the best are hatched.
    """
    if point.is_level:
        corner = column - 0.5, row - 0.5
        hatch: dict[str, Any] = {"hatch": "////", "edgecolor": "white", "alpha": 0.5}
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, linewidth=0, **hatch))
    edge = BEST_FRAME if point.is_best else "none"
    box = {"facecolor": "white", "edgecolor": edge, "linewidth": 1.5, "pad": 1.5}
    text = f"{point.accuracy.mean:.3f}"
    axes.text(column, row, text, color="black", ha="center", va="center", bbox=box)
