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
LEGEND_MARGIN = 0.1
"""Height of the space around a legend, in inches."""
BESIDE_LINES = 0.6
"""Width in inches of the ticks and the label of the y axis of a panel with lines."""
MAX_BEHIND = 3
"""Maximum number of lines in a panel for which single rounds are drawn behind them."""
MAX_RANGES = 9
"""Maximum number of lines in a panel for which the ranges of seeds are drawn."""
MARKS = 8
"""Approximate number of markers on a line."""
NAMES_SHARE = 0.45
"""Maximum share of a panel's width for the names of its rows, if they can be broken at spaces."""
WORD_SHARE = 0.6
"""Maximum share of a panel's width for a word in the names of its rows. Longer words are broken."""
BESIDE_ROWS = 1.02
"""Place of texts to the right of rows, as a multiple of the width of the axes."""
BAR, BAR_THICKNESS = 0.45, 0.08
"""Heights in inches of a horizontal bar of colours with its ticks and label, and without them."""
BAR_LENGTH = 0.6
"""Approximate length of such a bar, as a share of the figure's width. Names of rows and texts next
to them take the rest."""
Lines = Mapping[str, Sequence[Run]]
"""The finished runs of a setting by method, each list sorted by seed."""


def text_scale() -> float:
    """Return the size of text as a multiple of that on paper."""
    return float(matplotlib.rcParams["font.size"]) / PAPER_TEXT


def text_width(text: str, size: float | None = None) -> float:
    """Return the width in inches of the widest line of a text, in the style's font.

    `size` is the size of the text in points; None: the style's.
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


def fit_text(text: str, width: float, word_width: float = math.inf) -> str:
    """Return a text with line breaks at its spaces. A line of several words is at most `width`
    inches wide.

    A word that is wider than `word_width` inches, which are at least `width`, is broken into parts
    of at most this width.
    """
    words: list[str] = []
    for word in text.split():
        words += _parts_of_word(word, word_width) if text_width(word) > word_width else [word]
    lines: list[str] = []
    for word in words:
        longer = " ".join([*lines[-1:], word])
        if lines and text_width(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return "\n".join(lines)


def _parts_of_word(word: str, width: float) -> list[str]:
    """Return the parts of a word, each as long as `width` inches allow."""
    parts = [word[0]]
    for character in word[1:]:
        if text_width(parts[-1] + character) <= width:
            parts[-1] += character
        else:
            parts.append(character)
    return parts


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
    num_panels: int,
    height: float,
    extra: float = 0.0,
    *,
    max_columns: int = 2,
    sharey: bool = False,
) -> tuple[Figure, list[Axes]]:
    """Return a figure with `num_panels` panels, which have one y axis if `sharey` is true.

    The page has room for `max_columns` panels next to each other, and a column of the page for half
    as many. The figure is as wide as a column if this is enough for all panels. A panel is `height`
    inches high on paper. `extra` inches are added below the panels.
    """
    figure = new_figure(0, is_wide=num_panels > max_columns // 2)
    share_of_page = figure.get_figwidth() / (text_scale() * PAGE)
    fitting = max(round(share_of_page * max_columns), 1)
    num_columns = min(num_panels, max_columns, fitting)
    num_rows = math.ceil(num_panels / num_columns)
    grow(figure, height * num_rows + extra)
    axes = list(figure.subplots(num_rows, num_columns, squeeze=False, sharey=sharey).flat)
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

    `beside` is the width in inches that ticks and labels take next to the panel.
    """
    width = figure.get_figwidth() / num_columns_of(axes) - beside
    text = fit_text(title, width)
    # A long word has room above what is on the left of the panel.
    axes.set_title(text, loc="center" if text_width(text) <= width else "right")
    axes.set_xlabel(fit_text(xlabel, width))


def line_axes(
    titles: Sequence[str], looks: Mapping[str, Look], xlabel: str, *, has_legend: bool = True
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel for each title, for lines with these looks.

    With `has_legend`, several lines have one legend below all panels.
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
    Names that are too long for the figure are broken into lines.
    """
    gaps = (handle_length + ENTRY_GAPS) * matplotlib.rcParams["font.size"] / 72
    columns = _legend_columns(handles, gaps, figure.get_figwidth())
    ordered = [handle for column in columns for handle in column]  # matplotlib fills columns
    labels = [str(handle.get_label()) for handle in ordered]
    height = LEGEND_ROW * len(columns[0]) + LEGEND_MARGIN
    if len(columns) == 1:
        width = figure.get_figwidth() - gaps
        labels = [fit_text(label, width, word_width=width) for label in labels]
        height += TEXT_LINE * sum(label.count("\n") for label in labels)
    grow(figure, height)
    figure.legend(
        handles=ordered,
        labels=labels,
        loc="outside lower center",
        ncols=len(columns),
        handlelength=handle_length,
    )


def _legend_columns(
    handles: Sequence[Artist], gaps: float, max_width: float
) -> list[Sequence[Artist]]:
    """Return the entries of each column of a legend: as many columns as are `max_width` inches wide
    together, or a single one.

    An entry is as wide as its text and its `gaps` in inches.
    """
    for num_columns in range(len(handles), 1, -1):
        columns = [handles[first::num_columns] for first in range(num_columns)]
        width = num_columns * gaps
        for column in columns:
            width += widest([str(handle.get_label()) for handle in column])
        if width <= max_width:
            return columns
    return [handles]


def row_axes(
    methods: Mapping[str, Sequence[str]], min_height: float, margin: float, xlabel: str
) -> tuple[Figure, list[Axes]]:
    """Return a figure whose panels have a row for each method, from the top down.

    `methods` has the methods of each panel by its title. Rows are `min_height` inches high on
    paper, or higher if a name has several lines. `margin` is the height in inches of the space
    around the rows of a panel.
    """
    figure, all_axes = make_axes(len(methods), margin)  # their rows are added below
    num_columns = num_columns_of(all_axes[0])
    height = min_height
    xlabel_lines = 1
    for (title, names), axes in zip(methods.items(), all_axes, strict=True):
        texts = fit_names(names, figure.get_figwidth() / num_columns)
        height = max(height, row_height(texts, min_height))
        write_around(figure, axes, title, xlabel, widest(texts))
        xlabel_lines = max(xlabel_lines, axes.get_xlabel().count("\n") + 1)
        axes.set_yticks(range(len(names)), texts)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    max_rows = max(map(len, methods.values()))
    panel_height = height * max_rows + TEXT_LINE * (xlabel_lines - 1)
    grow(figure, math.ceil(len(methods) / num_columns) * panel_height)
    return figure, all_axes


def row_height(names: Sequence[str], height: float) -> float:
    """Return the height in inches of a row that has room for each of the names.

    It is `height`, or more if a name has several lines.
    """
    num_lines = max(name.count("\n") + 1 for name in names)
    return height if num_lines == 1 else max(height, num_lines * TEXT_LINE)


def fit_names(names: Sequence[str], width: float) -> list[str]:
    """Return the names of the rows of a panel of `width` inches, broken into lines.

    A line takes at most `NAMES_SHARE` of the width, and one of a single word `WORD_SHARE`.
    """
    return [fit_text(name, NAMES_SHARE * width, WORD_SHARE * width) for name in names]


def write_beside_rows(axes: Axes, texts: Sequence[str]) -> None:
    """Write the texts to the right of the rows of `row_axes`, one for each row."""
    for row, text in enumerate(texts):
        axes.annotate(text, (BESIDE_ROWS, row), xycoords=("axes fraction", "data"), va="center")


def add_color_bar(
    figure: Figure, image: ScalarMappable, all_axes: Sequence[Axes], label: str
) -> None:
    """Add a horizontal bar of colours below all panels. The figure grows by its height."""
    height_before = figure.get_figheight()
    grow(figure, BAR)
    length = BAR_LENGTH * figure.get_figwidth()
    figure.colorbar(
        image,
        ax=all_axes,
        label=label,
        location="bottom",
        shrink=0.9,
        aspect=length / (text_scale() * BAR_THICKNESS),
        fraction=1 - height_before / figure.get_figheight(),
        pad=0.02,
    )


def dots_of(look: Look) -> dict[str, Any]:
    """Return the look of the results of single seeds, as matplotlib's keyword arguments."""
    colour = look["color"]
    return {"color": colour, "markerfacecolor": colour, "alpha": 0.4}
