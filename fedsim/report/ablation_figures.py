"""Figures of ablations (`fedsim.results.ablations`): final accuracy by the values of a number, or a
map by two."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.transforms import ScaledTranslation

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
"""Distance in points (1/72 inch) of lines at the same value, so that all intervals can be seen."""


def ablation_plots(
    ablations: Sequence[Sequence[Point]], selectors: Mapping[str, str]
) -> list[Plot]:
    """Return a figure for each ablation. `selectors` has the selector of each group."""
    return [
        _map_plot(points) if len(points[0].keys) > 1 else _line_plot(points, selectors)
        for points in ablations
    ]


def _data(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the data of a figure: a row for each point."""
    rows = []
    for point in points:
        low, high = point.accuracy.interval
        row: dict[str, Any] = {"setting": point.setting, "method": point.method}
        row.update(zip(point.keys, point.values, strict=True))
        row.update(seeds=[point.accuracy.num], accuracy=point.accuracy.mean, low=low, high=high)
        rows.append(row)
    return rows


def _line_plot(points: Sequence[Point], selectors: Mapping[str, str]) -> Plot:
    panels: dict[str, dict[str, list[Point]]] = {}
    for (setting, method), line in by_grid(points).items():
        panels.setdefault(setting, {})[method] = line
    values = axis(points, 0)
    looks = make_looks({point.method: selectors[point.group] for point in points})
    is_log = is_logarithmic(values)
    label = f"{points[0].keys[0]} (log scale)" if is_log else points[0].keys[0]
    figure, all_axes = line_axes(list(panels), looks, label)
    for lines, axes in zip(panels.values(), all_axes, strict=True):
        if is_log:
            lowest = min(value for value in values if value > 0)
            axes.set_xscale("symlog", linthresh=lowest, linscale=0.5)
        furthest = SHIFT * (len(lines) - 1) / 2
        for number, (method, line) in enumerate(lines.items()):
            shift = SHIFT * number - furthest
            _draw_line(axes, line, looks[method], shift)
        points_wide = 72 * (figure.get_figwidth() / num_columns_of(axes) - BESIDE_LINES)
        axes.margins(x=min(0.3, 0.08 + furthest / points_wide))  # all shifted markers are seen
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_major_locator(FittingTicks([[values[0], values[-1]], values]))
        axes.set_xticks([], minor=True)
        axes.set_ylabel("final test accuracy")
    caption = CAPTIONS["ablation"].format(key=points[0].keys[0])
    return Plot(file_name(points), caption, figure, _data(points))


def is_logarithmic(values: Sequence[float]) -> bool:
    """Return whether the closest of the positive values, ascending, are further apart on a
    logarithmic axis."""
    if values[0] < 0:
        return False
    positive = np.array([value for value in values if value > 0])

    def closest(places: np.ndarray) -> float:
        return float(np.diff(places).min() / np.ptp(places))

    return closest(np.log(positive)) > closest(positive)


def _draw_line(axes: Axes, points: Sequence[Point], look: Look, shift: float) -> None:
    """Draw means with intervals, the best one filled, and next to them the values of the seeds, by
    `shift` points (1/72 inch) to the right."""
    to_inches = axes.figure.dpi_scale_trans
    place = axes.transData + ScaledTranslation(shift / 72, 0, to_inches)
    right = axes.transData + ScaledTranslation((shift + 2.5) / 72, 0, to_inches)
    x = [point.value for point in points]
    means = [point.accuracy.mean for point in points]
    intervals = np.array([point.accuracy.interval for point in points]).T
    reach = np.abs(intervals - means)
    axes.errorbar(x, means, reach, elinewidth=0.8, capsize=2, transform=place, **look)
    for point in points:
        accuracy = point.accuracy
        values = accuracy.values
        axes.plot([point.value] * len(values), values, ".", transform=right, **dots_of(look))
        if point.is_best:
            filled = dict(look, markerfacecolor=look["color"])
            axes.plot(point.value, accuracy.mean, zorder=3, transform=place, **filled)
        ends = [*accuracy.interval, *accuracy.values]
        axes.update_datalim([(point.value, end) for end in ends])
    axes.autoscale_view()


def _map_plot(points: Sequence[Point]) -> Plot:
    """Return all maps of an ablation, with one scale of colours: rows are the values of the first
    number, columns those of the second."""
    rows, columns = axis(points, 0), axis(points, 1)
    maps = by_grid(points)
    figure, all_axes = make_axes(len(maps), 0.36 * len(rows) + 0.7)
    means = [point.accuracy.mean for point in points]
    limits: dict[str, Any] = {"vmin": min(means), "vmax": max(means)}
    for (name, members), axes in zip(maps.items(), all_axes, strict=True):
        cells = np.full((len(rows), len(columns)), np.nan)
        for point in members:
            row, column = rows.index(point.value), columns.index(point.second_value)
            cells[row, column] = point.accuracy.mean
            _draw_cell(axes, point, row, column)
        image = axes.imshow(cells, aspect="auto", origin="lower", **limits)
        axes.set_xticks(range(len(columns)), [f"{value:g}" for value in columns])
        axes.set_yticks(range(len(rows)), [f"{value:g}" for value in rows])
        write_around(figure, axes, " ".join(name), points[0].keys[1], text_scale() * BESIDE_LINES)
        axes.set_ylabel(points[0].keys[0])
    figure.colorbar(image, ax=all_axes, label="final test accuracy", pad=0.02)
    caption = CAPTIONS["ablation_map"].format(keys=" and ".join(points[0].keys))
    return Plot(file_name(points), caption, figure, _data(points))


def _draw_cell(axes: Axes, point: Point, row: int, column: int) -> None:
    """Write the mean into its cell. The best one is framed, cells that cannot be told apart from it
    are hatched."""
    if point.is_level:
        corner = column - 0.5, row - 0.5
        hatch: dict[str, Any] = {
            "hatch": "////",
            "edgecolor": "white",
            "linewidth": 0,
            "alpha": 0.5,
        }
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, **hatch))
    edge = "#D55E00" if point.is_best else "none"
    box = {"facecolor": "white", "edgecolor": edge, "linewidth": 1.5, "pad": 1.5}
    text = f"{point.accuracy.mean:.3f}"
    axes.text(column, row, text, color="black", ha="center", va="center", bbox=box)
