"""What figures are made of: the look of each method, the same everywhere; axes, legends, labels; and their files."""

import io
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from PIL import Image

from fedsim.core.disk import write_atomically
from fedsim.results.groups import Panel, sort_key

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Okabe and Ito's palette, told apart with any colour blindness, without its yellow, which white paper swallows."""
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")


@dataclass(frozen=True)
class Look:
    """The colour, dash and marker of a method, as matplotlib writes them."""

    colour: str
    dash: str
    marker: str


def make_looks(panels: Sequence[Panel]) -> Mapping[str, Look]:
    """The look of each line of the panels by its name, in the order in which legends have them.

    Colours repeat after seven methods, with another dash; colour and marker together after 63.
    """
    names = sorted({name for panel in panels for name in panel.lines}, key=sort_key)
    return {name: _look(number) for number, name in enumerate(names)}


def _look(number: int) -> Look:
    dash = DASHES[number // len(COLOURS) % len(DASHES)]
    return Look(COLOURS[number % len(COLOURS)], dash, MARKERS[number % len(MARKERS)])


COLUMN, PAGE = 3.5, 7.16
"""Widths in inches of a column and of the text of a two-column page (IEEE)."""
FONT, SMALL = 8.0, 7.0
"""Sizes of text in points, as printed."""
DPI, PREVIEW_DPI = 300, 110

STYLE: dict[str, Any] = {
    "pdf.fonttype": 42,  # TrueType: text in the PDF can be searched, and publishers accept it
    "ps.fonttype": 42,
    "font.size": FONT,
    "axes.titlesize": FONT,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.0,
    "lines.markersize": 3.0,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "figure.constrained_layout.use": True,
}


def style() -> AbstractContextManager[None]:
    """The context in which figures are drawn and saved."""
    return matplotlib.rc_context(STYLE)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Plot:
    """A figure, the name of its files, and its caption."""

    name: str
    caption: str
    figure: Figure

    def save(self, folder: Path) -> bytes:
        """Write it as PNG and PDF to `folder`; returns a smaller PNG, for a page on the screen."""
        folder.mkdir(parents=True, exist_ok=True)
        png, pdf = io.BytesIO(), io.BytesIO()
        with style():
            self.figure.savefig(png, format="png", dpi=DPI)
            self.figure.set_layout_engine("none")  # as it is laid out by now: that is most of the time of saving
            self.figure.savefig(pdf, format="pdf", dpi=DPI, metadata={"CreationDate": None})
        write_atomically(folder / f"{self.name}.png", png.getvalue())
        write_atomically(folder / f"{self.name}.pdf", pdf.getvalue())
        return _smaller(png)


def _smaller(png: io.BytesIO) -> bytes:
    """The picture in a PNG file at `PREVIEW_DPI`, as a PNG file's content."""
    preview = io.BytesIO()
    with Image.open(png) as picture:
        size = [round(side * PREVIEW_DPI / DPI) for side in picture.size]
        picture.convert("RGB").resize((size[0], size[1]), Image.Resampling.LANCZOS).save(preview, "png", optimize=True)
    return preview.getvalue()


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
