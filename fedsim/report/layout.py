"""The layout of figures: their size, panels, rows and legend.

Texts are measured, so that legends, titles and labels fit into a figure of any width.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.textpath import text_to_path

from fedsim.report.drawing import WIDTH
from fedsim.report.looks import Look
from fedsim.results.runs import Run

COLUMN, PAGE = 3.5, 7.16
"""Widths in inches of a column and of the text of a two-column page (IEEE)."""
PAPER_TEXT = 8.0
"""Size of text on paper in points. Heights below are meant for it: they grow with the text."""
HEIGHT = 2.3
"""Height of a panel with lines, in inches."""
TEXT_LINE = 0.15
"""Height of a line of text, in inches."""
LEGEND_ROW = 0.17
"""Height of a row of a legend, in inches."""
ENTRY_GAPS = 2.2
"""Gaps around the text of a legend's entry, as a multiple of the text size."""
BESIDE_LINES = 0.6
"""Width in inches of what is next to a panel with lines: the ticks and the label of its y axis."""
MAX_BEHIND, MAX_RANGES = 3, 9
"""Largest numbers of lines in a panel that are drawn with their single rounds, and with the ranges
of their seeds."""
MARKS = 8
"""Approximate number of markers on a line."""
BAR, BAR_THICKNESS = 0.45, 0.08
"""Heights in inches of a horizontal bar of colours with its ticks and label, and without them."""
Lines = Mapping[str, Sequence[Run]]
"""The finished runs of a setting by method, each list sorted by seed."""


def text_scale() -> float:
    """Return the size of text as a multiple of that on paper."""
    return float(matplotlib.rcParams["font.size"]) / PAPER_TEXT


def text_width(text: str, size: float | None = None) -> float:
    """Return the width in inches of a text in the style's font, that of its widest line.

    `size` is in points; None: that of the style.
    """
    points = size or matplotlib.rcParams["font.size"]
    family = matplotlib.rcParams["font.family"]
    return max(_line_points(line, points, *family) for line in text.split("\n")) / 72


@cache
def _line_points(text: str, size: float, *family: str) -> float:
    font = FontProperties(size=size, family=list(family))
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0])


def widest(texts: Sequence[str]) -> float:
    """Return the width of the widest text in inches; 0 if there is none."""
    return max(map(text_width, texts), default=0.0)


def fit_text(text: str, width: float) -> str:
    """Return a text with line breaks at its spaces. A line of several words is at most `width`
    inches wide."""
    lines: list[str] = []
    for word in text.split():
        longer = " ".join([*lines[-1:], word])
        if lines and text_width(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return "\n".join(lines)


def new_figure(height: float, *, is_wide: bool = True) -> Figure:
    """Return a figure that is `height` inches high on paper.

    It is as wide as the page, or as a column of the page, unless `WIDTH` is set.
    """
    return Figure(figsize=figure_size(height, is_wide=is_wide))


def figure_size(height: float = HEIGHT, *, is_wide: bool = False) -> tuple[float, float]:
    """Return the width and height in inches of a figure that is `height` inches high on paper."""
    width = WIDTH.get() or text_scale() * (PAGE if is_wide else COLUMN)
    return width, text_scale() * height


def grow(figure: Figure, height: float) -> None:
    """Make a figure higher by `height` inches on paper."""
    figure.set_figheight(figure.get_figheight() + text_scale() * height)


def make_axes(
    num_panels: int, height: float, extra: float = 0.0, max_columns: int = 2
) -> tuple[Figure, list[Axes]]:
    """Return a figure with `num_panels` panels.

    A row has at most `max_columns` panels, and as many as fit if half of them fit into a column of
    the page. A panel is `height` inches high on paper. `extra` inches are added for what is below
    the panels. With `max_columns` above 2 all panels share their y axis.
    """
    figure = new_figure(0, is_wide=num_panels > max_columns // 2)
    fitting = round(figure.get_figwidth() / (text_scale() * PAGE) * max_columns)
    columns = min(num_panels, max_columns, max(fitting, 1))
    rows = math.ceil(num_panels / columns)
    grow(figure, height * rows + extra)
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=max_columns > 2).flat)
    for unused in axes[num_panels:]:
        unused.remove()
    return figure, axes[:num_panels]


def num_columns_of(axes: Axes) -> int:
    """Return the number of columns of the grid in which a panel of `make_axes` is."""
    spec = axes.get_subplotspec()
    assert spec is not None  # `make_axes` has placed it in a grid
    return spec.get_gridspec().ncols


def write_around(figure: Figure, axes: Axes, title: str, xlabel: str, beside: float) -> None:
    """Set the title and the label of the x axis of a panel of `make_axes`, broken into lines.

    `beside` is the width in inches of what is next to the panel.
    """
    width = figure.get_figwidth() / num_columns_of(axes) - beside
    text = fit_text(title, width)
    # A long word has room above what is on the left of the panel.
    axes.set_title(text, loc="center" if text_width(text) <= width else "right")
    axes.set_xlabel(fit_text(xlabel, width))


def line_axes(
    titles: Sequence[str], looks: Mapping[str, Look], xlabel: str, *, has_legend: bool = True
) -> tuple[Figure, list[Axes]]:
    """Return axes with these titles for lines with these looks.

    Several lines have one legend, below all panels.
    """
    figure, all_axes = make_axes(len(titles), HEIGHT)
    for title, axes in zip(titles, all_axes, strict=True):
        write_around(figure, axes, title, xlabel, text_scale() * BESIDE_LINES)
        axes.grid()
    if has_legend and len(looks) > 1:
        add_legend(figure, [Line2D([], [], label=name, **look) for name, look in looks.items()])
    return figure, all_axes


def add_legend(figure: Figure, handles: Sequence[Artist], handle_length: float = 2.2) -> None:
    """Add a legend below all panels, which is read row by row. The figure grows by its height.

    `handle_length` is the width of the line or patch of an entry, as a multiple of the text size.
    """
    gaps = (handle_length + ENTRY_GAPS) * matplotlib.rcParams["font.size"] / 72
    for num_columns in range(len(handles), 0, -1):
        columns = [handles[first::num_columns] for first in range(num_columns)]
        width = num_columns * gaps
        for column in columns:
            width += widest([str(handle.get_label()) for handle in column])
        if width <= figure.get_figwidth():
            break
    grow(figure, LEGEND_ROW * len(columns[0]) + 0.1)
    figure.legend(
        handles=[handle for column in columns for handle in column],  # matplotlib fills columns
        loc="outside lower center",
        ncols=num_columns,
        handlelength=handle_length,
    )


def row_axes(
    panels: Mapping[str, Sequence[str]], row: float, margin: float, xlabel: str
) -> tuple[Figure, list[Axes]]:
    """Return axes with a row for each method, from the top down.

    `panels` has the methods of each panel by its title. A row is `row` inches high, or higher if
    names have several lines. Each panel has a `margin` in inches around its rows.
    """
    num_rows = max(map(len, panels.values()))
    figure, all_axes = make_axes(len(panels), margin)
    height = row
    num_lines = 1
    for (title, methods), axes in zip(panels.items(), all_axes, strict=True):
        names = fit_names(methods, figure.get_figwidth() / num_columns_of(axes))
        height = max(height, row_height(names, row))
        write_around(figure, axes, title, xlabel, widest(names))
        num_lines = max(num_lines, axes.get_xlabel().count("\n") + 1)
        axes.set_yticks(range(len(methods)), names)
        axes.set_ylim(len(methods) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    num_panel_rows = math.ceil(len(panels) / num_columns_of(all_axes[0]))
    grow(figure, num_panel_rows * (height * num_rows + TEXT_LINE * (num_lines - 1)))
    return figure, all_axes


def row_height(names: Sequence[str], height: float) -> float:
    """Return the height in inches of a row with the longest of the names: `height`, or more if it
    has several lines."""
    num_lines = max(name.count("\n") + 1 for name in names)
    return height if num_lines == 1 else max(height, num_lines * TEXT_LINE)


def fit_names(names: Sequence[str], width: float) -> list[str]:
    """Return the names of the rows of a panel, broken into lines if they would take more than half
    of the `width` in inches of the panel."""
    return [fit_text(name, 0.45 * width) for name in names]


def write_beside_rows(axes: Axes, texts: Sequence[str]) -> None:
    """Write the texts to the right of the rows of `row_axes`, one beside each row."""
    for number, text in enumerate(texts):
        place = (1.02, number)
        axes.annotate(text, place, xycoords=("axes fraction", "data"), va="center")


def add_color_bar(
    figure: Figure, image: ScalarMappable, all_axes: Sequence[Axes], label: str
) -> None:
    """Add a horizontal bar of colours below all panels. The figure grows by its height."""
    before = figure.get_figheight()
    length = 0.6 * figure.get_figwidth()  # names of rows and texts next to them take the rest
    grow(figure, BAR)
    share = 1 - before / figure.get_figheight()
    figure.colorbar(
        image,
        ax=all_axes,
        label=label,
        location="bottom",
        shrink=0.9,
        aspect=length / (text_scale() * BAR_THICKNESS),
        fraction=share,
        pad=0.02,
    )


def dots_of(look: Look) -> dict[str, Any]:
    """Return how the results of single seeds look, as matplotlib's keyword arguments."""
    colour = look["color"]
    return {"color": colour, "markerfacecolor": colour, "alpha": 0.4}
