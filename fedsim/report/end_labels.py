"""The names of lines at their ends, instead of a legend."""

import math
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.optimize import isotonic_regression

from fedsim.core.arrays import Floats
from fedsim.report.layout import (
    BESIDE_LINES,
    TEXT_LINE,
    fit_text,
    grow,
    num_columns_of,
    text_scale,
    widest,
)
from fedsim.report.looks import Look

LINE_HEIGHT = 1.35
"""Distance of two lines of names as a multiple of the text size."""
LINES_IN_PANEL = 10
"""Number of lines of names for which a panel has room if the label of its x axis is one line."""
LEAST_SHARE = 0.9
"""The layout leaves axes at least this share of their height after their names are placed."""


def label_ends(
    axes: Axes,
    ends: Mapping[str, tuple[float, float]],
    looks: Mapping[str, Look],
    max_width: float = math.inf,
) -> None:
    """Write the names of lines to the right of the axes, each as high as its line ends, or next to
    it if another name is there. A thin line leads from the end to the line's marker at its name.

    `ends` are points in data coordinates. The limits of the axes stay as they are from here on.
    Names are broken into lines that are at most `max_width` inches wide.
    """
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = to_axes.transform(list(ends.values()))[:, 1]
    inches = LEAST_SHARE * axes.bbox.height / axes.figure.dpi
    size = matplotlib.rcParams["font.size"]
    distance = LINE_HEIGHT * size / 72 / inches
    texts = fit_end_names(list(ends), max_width)
    places = spread_out(heights, distance, [text.count("\n") + 1 for text in texts])
    for name, text, place in zip(ends, texts, places, strict=True):
        line = {
            "arrowstyle": "-",
            "color": looks[name]["color"],
            "linewidth": 0.6,
            "shrinkA": 0,
            "shrinkB": 0,
        }
        marker_place = (1.05, place)
        axes.annotate(
            "",
            ends[name],
            marker_place,
            textcoords="axes fraction",
            annotation_clip=False,
            arrowprops=line,
        )
        axes.plot(*marker_place, transform=axes.transAxes, clip_on=False, **looks[name])
        axes.annotate(
            text,
            marker_place,
            (0.6 * size, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center",
        )


def fit_end_names(names: Sequence[str], max_width: float) -> list[str]:
    """Return the names broken into lines that are at most `max_width` inches wide."""
    return [fit_text(name, max_width, word_width=max_width) for name in names]


def make_room(
    figure: Figure, all_axes: Sequence[Axes], names: Sequence[Sequence[str]], xlabel: str
) -> None:
    """Make room for the names that `label_ends` writes next to the panels of a figure.

    This comes before `label_ends`. `names` are those of each panel, broken into lines. The label of
    the x axis is broken as well, because it is centred below what the names leave. The figure grows
    if it is too low.
    """
    num_columns = num_columns_of(all_axes[0])
    names_width = max(map(widest, names))
    beside = text_scale() * BESIDE_LINES + names_width
    label = fit_text(xlabel, figure.get_figwidth() / num_columns - beside)
    for axes in all_axes:
        axes.set_xlabel(label)
    max_lines = 0
    for panel_names in names:
        num_lines = sum(name.count("\n") + 1 for name in panel_names)
        max_lines = max(max_lines, num_lines)
    missing_lines = max(max_lines + label.count("\n") - LINES_IN_PANEL, 0)
    share_of_figure = LEAST_SHARE * all_axes[0].get_position().height
    grow(figure, TEXT_LINE * missing_lines / share_of_figure)


def spread_out(heights: Floats, distance: float, num_lines: Sequence[int]) -> Floats:
    """Return the places of names: as near to the heights as possible, and in the same order.

    All lines of all names are at least `distance` apart. `num_lines` has the number of lines of
    each name, whose place is the middle of them. The lines lie in [0, 1] if there is room for all;
    otherwise they begin at 1.
    """
    order = np.argsort(-heights, kind="stable")
    lines = np.array(num_lines)[order]
    lines_above = np.cumsum(lines) - lines
    to_middle = distance * (lines - 1) / 2  # from the first line of a name
    steps = distance * lines_above
    # With the steps added, the places of first lines must only not increase.
    raised = isotonic_regression(heights[order] + to_middle + steps, increasing=False).x
    lowest = distance * (lines.sum() - 1)
    places = np.empty(len(heights))
    places[order] = np.clip(raised, min(lowest, 1), 1) - steps - to_middle
    return places
