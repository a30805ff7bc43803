"""What figures are made of: the look of each method, the same everywhere; axes, legends, rows; and their files."""

import io
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from fedsim.core.disk import write_atomically
from fedsim.results.groups import Panel, sort_key

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Okabe and Ito's palette, told apart with any colour blindness, without its yellow, which white paper swallows."""
DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}
MARKERS = {
    **{"o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down"},
    **{"P": "cross", "X": "x", "<": "triangle-left", ">": "triangle-right"},
}
"""matplotlib's dashes and markers, and plotly's names of them."""


@dataclass(frozen=True)
class Look:
    """The colour, dash and marker of a method, as matplotlib writes them."""

    colour: str
    dash: str
    marker: str

    @property
    def style(self) -> dict[str, Any]:
        """As matplotlib's keyword arguments."""
        return {"color": self.colour, "linestyle": self.dash, "marker": self.marker, "markerfacecolor": "white"}


def make_looks(panels: Sequence[Panel]) -> Mapping[str, Look]:
    """The look of each line of the panels by its name, in the order in which legends have them.

    Colours repeat after seven methods, with another dash; colour and marker together after 63.
    """
    names = sorted({name for panel in panels for name in panel.lines}, key=sort_key)
    dashes, markers = list(DASHES), list(MARKERS)
    looks = {}
    for number, name in enumerate(names):
        colour, dash = COLOURS[number % len(COLOURS)], dashes[number // len(COLOURS) % len(dashes)]
        looks[name] = Look(colour, dash, markers[number % len(markers)])
    return looks


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
        png, pdf, preview = io.BytesIO(), io.BytesIO(), io.BytesIO()
        with style():
            self.figure.savefig(png, format="png", dpi=DPI)
            self.figure.set_layout_engine("none")  # as it is laid out by now: that is most of the time of saving
            self.figure.savefig(pdf, format="pdf", dpi=DPI, metadata={"CreationDate": None})
        write_atomically(folder / f"{self.name}.png", png.getvalue())
        write_atomically(folder / f"{self.name}.pdf", pdf.getvalue())
        with Image.open(png) as picture:
            width, height = (round(side * PREVIEW_DPI / DPI) for side in picture.size)
            small = picture.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
            small.save(preview, "png", optimize=True)
        return preview.getvalue()


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


def line_axes(panels: Sequence[Panel], height: float, looks: Mapping[str, Look]) -> tuple[Figure, list[Axes]]:
    """Axes for lines of these looks, with one legend for all panels below them, if there are several lines."""
    width = (COLUMN if len(panels) == 1 else PAGE) * 72
    columns = max(1, min(len(looks), int(width / (0.6 * SMALL * max(map(len, looks)) + 30))))
    several = len(looks) > 1
    figure, axes = make_axes(len(panels), height, LEGEND_ROW * -(-len(looks) // columns) + 0.1 if several else 0.0)
    if several:
        handles = [Line2D([], [], label=name, **look.style) for name, look in looks.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    for panel, ax in zip(panels, axes, strict=True):
        ax.set_title(panel.title)
        ax.grid()
    return figure, axes


def row_axes(panels: Sequence[Panel], row: float, margin: float, extra: float = 0.0) -> tuple[Figure, list[Axes]]:
    """Axes with a row for each line of a panel, from the top down, of `row` inches and a `margin` around them."""
    figure, axes = make_axes(len(panels), row * max(len(panel.lines) for panel in panels) + margin, extra)
    for panel, ax in zip(panels, axes, strict=True):
        ax.set_title(panel.title)
        ax.set_yticks(range(len(panel.lines)), list(panel.lines))
        ax.set_ylim(len(panel.lines) - 0.5, -0.5)
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
    return figure, axes


def write_beside_rows(ax: Axes, texts: Sequence[str]) -> None:
    """Write a text to the right of each row."""
    for number, text in enumerate(texts):
        ax.annotate(text, (1.02, number), xycoords=("axes fraction", "data"), fontsize=SMALL, va="center")
