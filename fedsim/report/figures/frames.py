"""Axes of panels, legends, and labels at the ends of lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from fedsim.report.figures.plot import COLUMN, PAGE, SMALL
from fedsim.report.looks import Look

MAX_LABELS, MAX_LENGTH = 8, 24
"""Up to so many methods, with names of up to so many characters, are named at the ends of their lines."""
LINE_HEIGHT = 1.35 * SMALL
"""Points from one label at the end of a line to the next."""
LEGEND_ROW = 0.15
"""Inches of a row of a legend."""


def make_axes(num_panels: int, height: float, extra: float = 0.0) -> tuple[Figure, list[Axes]]:
    """A figure of the width of a column for one panel, else of a page, two panels side by side.

    `height`: of a panel, in inches; `extra`: of what is below them.
    """
    columns = min(num_panels, 2)
    rows = -(-num_panels // columns)
    figure = Figure(figsize=(COLUMN if columns == 1 else PAGE, height * rows + extra))
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[num_panels:]:
        unused.remove()
    return figure, axes[:num_panels]


def line_style(look: Look) -> dict[str, Any]:
    """The look as matplotlib's keyword arguments."""
    return {"color": look.colour, "linestyle": look.dash, "marker": look.marker, "markerfacecolor": "white"}


def named_at_ends(names: Sequence[str]) -> bool:
    """Whether methods are named at the ends of their lines; otherwise there is a legend."""
    return 1 < len(names) <= MAX_LABELS and max(map(len, names)) <= MAX_LENGTH


def legend_height(num_panels: int, names: Sequence[str]) -> float:
    """Inches that `legend` needs below the panels."""
    return LEGEND_ROW * -(-len(names) // _legend_columns(num_panels, names)) + 0.1


def legend(figure: Figure, looks: Mapping[str, Look], num_panels: int) -> None:
    """One legend for all panels, below them."""
    handles = [Line2D([], [], label=name, **line_style(look)) for name, look in looks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=_legend_columns(num_panels, list(looks)))


def _legend_columns(num_panels: int, names: Sequence[str]) -> int:
    width = (COLUMN if num_panels == 1 else PAGE) * 72
    return max(1, min(len(names), int(width / (0.6 * SMALL * max(map(len, names)) + 30))))


@dataclass(frozen=True)
class End:
    """The end of a line, in data coordinates, and what is written beside it."""

    x: float
    y: float
    name: str
    colour: str


def label_ends(ax: Axes, ends: Sequence[End]) -> None:
    """Write the names of lines to the right of the axes, at the height of their ends or as near as there is room.

    The figure must have been laid out (`draw_without_rendering`): only then is the height of the axes known.
    """
    height = ax.get_window_extent().height * 72 / ax.figure.dpi
    low, high = ax.get_ylim()
    ends = sorted(ends, key=lambda end: end.y)
    wanted = np.array([(end.y - low) / (high - low) * height for end in ends])
    for end, position in zip(ends, spread(wanted, LINE_HEIGHT, 0.0, height), strict=True):
        ax.annotate(
            end.name,
            (end.x, end.y),
            (1.04, position / height),
            textcoords="axes fraction",
            color=end.colour,
            fontsize=SMALL,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": end.colour,
                "linewidth": 0.5,
                "relpos": (0, 0.5),
                "shrinkA": 0,
                "shrinkB": 2,
            },
        )


def spread(wanted: NDArray[np.float64], gap: float, low: float, high: float) -> NDArray[np.float64]:
    """Positions at least `gap` apart, in the order of the sorted `wanted`, each as near to it as that allows.

    They lie from `low` to `high` where there is room for all; else they begin at `low`. Neighbours that are too near
    are put around their common mean, again and again until none are.
    """
    blocks: list[list[float]] = []  # [sum of wanted minus offsets within the block, number of members]
    room = max(high - low - gap * (len(wanted) - 1), 0.0)
    for number, value in enumerate(wanted):
        blocks.append([float(np.clip(value - number * gap, low, low + room)), 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += count
    starts = [total / count for total, count in blocks for _ in range(int(count))]
    return np.array([start + gap * number for number, start in enumerate(starts)])


def name_rows(ax: Axes, names: Sequence[str]) -> None:
    """Name the rows 0, 1, ... of axes from the top down."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def write_beside_rows(ax: Axes, texts: Sequence[str]) -> None:
    """Write a text to the right of each row of `name_rows`."""
    for number, text in enumerate(texts):
        ax.annotate(text, (1.02, number), xycoords=("axes fraction", "data"), fontsize=SMALL, va="center")
