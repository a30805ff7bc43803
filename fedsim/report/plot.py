"""What figures are made of: axes, legends, rows; and their files."""

import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from fedsim.core.disk import write_files
from fedsim.report.page import Look
from fedsim.results.groups import Panel

COLUMN, PAGE = 3.5, 7.16
"""Widths in inches of a column and of the text of a two-column page (IEEE)."""
SMALL = 7.0
"""Size of text in points, as printed, but for titles and labels of axes."""
DPI, PREVIEW_DPI = 300, 110


def style() -> AbstractContextManager[None]:
    """The context in which figures are drawn and saved."""
    return matplotlib.rc_context(fname=Path(__file__).parent / "assets" / "figures.mplstyle")


@dataclass(frozen=True)
class Plot:
    """A figure, the name of its files, and its caption."""

    name: str
    caption: str
    figure: Figure


def save(plots: Iterable[Plot], folder: Path) -> list[tuple[str, bytes]]:
    """Write the figures as PNG and PDF to `folder`; returns captions and smaller PNGs, for a page on the screen."""
    files: dict[str, bytes] = {}
    pictures = []
    for plot in plots:
        png, pdf, preview = io.BytesIO(), io.BytesIO(), io.BytesIO()
        with style():
            plot.figure.savefig(png, format="png", dpi=DPI)
            plot.figure.set_layout_engine("none")  # as it is laid out by now: that is most of the time of saving
            plot.figure.savefig(pdf, format="pdf", dpi=DPI, metadata={"CreationDate": None})
        with Image.open(png) as picture:
            width, height = (round(side * PREVIEW_DPI / DPI) for side in picture.size)
            small = picture.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
            small.save(preview, "png", optimize=True)
        files |= {f"{plot.name}.png": png.getvalue(), f"{plot.name}.pdf": pdf.getvalue()}
        pictures.append((plot.caption, preview.getvalue()))
    write_files(folder, files)
    return pictures


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
        handles = [Line2D([], [], label=name, **look) for name, look in looks.items()]
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
