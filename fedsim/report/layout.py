"""The layout of figures: their size, panels, rows and legend."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedsim.report.drawing import WIDTH
from fedsim.report.looks import Look
from fedsim.results.runs import Run

COLUMN, PAGE = 3.5, 7.16
"""Widths in inches of a column and of the text of a two-column page (IEEE)."""
PAPER_TEXT = 8.0
"""Size of text on paper in points. Heights below are meant for it: they grow with the text."""
HEIGHT = 2.3
"""Height of a panel with lines, in inches."""
LEGEND_ROW = 0.17
"""Height of a row of a legend, in inches."""
MAX_BEHIND, MAX_RANGES = 3, 9
"""Largest numbers of lines in a panel that are drawn with their single rounds, and with the ranges
of their seeds."""
MARKS = 8
"""Approximate number of markers on a line."""
Lines = Mapping[str, Sequence[Run]]
"""The finished runs of a setting by method, each list sorted by seed."""


def new_figure(height: float, *, is_wide: bool = True) -> Figure:
    """Return a figure that is `height` inches high on paper.

    It is as wide as the page, or as a column of the page, unless `WIDTH` is set.
    """
    scale = matplotlib.rcParams["font.size"] / PAPER_TEXT
    width = WIDTH.get() or scale * (PAGE if is_wide else COLUMN)
    return Figure(figsize=(width, scale * height))


def make_axes(
    num_panels: int, height: float, extra: float = 0.0, max_columns: int = 2
) -> tuple[Figure, list[Axes]]:
    """Return a figure with `num_panels` panels.

    A row has at most `max_columns` panels, and as many as fit if half of them fit into a column of
    the page. A panel is `height` inches high on paper. `extra` inches are added for what is below
    the panels. With `max_columns` above 2 all panels share their y axis.
    """
    figure = new_figure(0, is_wide=num_panels > max_columns // 2)
    scale = matplotlib.rcParams["font.size"] / PAPER_TEXT
    fitting = round(figure.get_figwidth() / (scale * PAGE) * max_columns)
    columns = min(num_panels, max_columns, max(fitting, 1))
    rows = math.ceil(num_panels / columns)
    figure.set_figheight(scale * (height * rows + extra))
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=max_columns > 2).flat)
    for unused in axes[num_panels:]:
        unused.remove()
    return figure, axes[:num_panels]


def line_axes(titles: Sequence[str], looks: Mapping[str, Look]) -> tuple[Figure, list[Axes]]:
    """Return axes with these titles for lines with these looks.

    Several lines have one legend, below all panels.
    """
    figure, all_axes = make_axes(len(titles), HEIGHT)
    if len(looks) > 1:
        size = matplotlib.rcParams["font.size"]
        columns = _legend_columns(list(looks), 72 * figure.get_figwidth() / size)
        legend = LEGEND_ROW * math.ceil(len(looks) / columns) + 0.1
        figure.set_figheight(figure.get_figheight() + legend * size / PAPER_TEXT)
        handles = [Line2D([], [], label=name, **look) for name, look in looks.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    for title, axes in zip(titles, all_axes, strict=True):
        axes.set_title(title)
        axes.grid()
    return figure, all_axes


def _legend_columns(names: Sequence[str], width: float) -> int:
    """Return the largest number of columns of a legend with these names.

    `width` is that of the figure as a multiple of the text size. On average a character takes 0.6
    of this size, and the line of an entry with the gaps around it takes 4.2.
    """
    lengths = [len(name) for name in names]
    for columns in range(len(names), 1, -1):
        longest = [max(part) for part in np.array_split(lengths, columns)]
        if 0.6 * sum(longest) + 4.2 * columns <= width:
            return columns
    return 1


def row_axes(
    panels: Mapping[str, Sequence[str]], row: float, margin: float, extra: float = 0.0
) -> tuple[Figure, list[Axes]]:
    """Return axes with a row for each method, from the top down.

    `panels` has the methods of each panel by its title. A row is `row` inches high, and each panel
    has a `margin` in inches around its rows. `extra` is as in `make_axes`.
    """
    num_rows = max(map(len, panels.values()))
    figure, all_axes = make_axes(len(panels), row * num_rows + margin, extra)
    for (title, methods), axes in zip(panels.items(), all_axes, strict=True):
        axes.set_title(title)
        axes.set_yticks(range(len(methods)), list(methods))
        axes.set_ylim(len(methods) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    return figure, all_axes


def write_beside_rows(axes: Axes, texts: Sequence[str]) -> None:
    """Write the texts to the right of the rows of `row_axes`, one beside each row."""
    for number, text in enumerate(texts):
        place = (1.02, number)
        axes.annotate(text, place, xycoords=("axes fraction", "data"), va="center")


def dots_of(look: Look) -> dict[str, Any]:
    """Return how the results of single seeds look, as matplotlib's keyword arguments."""
    colour = look["color"]
    return {"color": colour, "markerfacecolor": colour, "alpha": 0.4}
