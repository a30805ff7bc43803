"""A figure with its caption, and the files it is written to."""

import io
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from PIL import Image

from fedsim.disk import write_atomically

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
