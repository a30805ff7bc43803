"""How figures are drawn and saved: their style, width, captions and files."""

import gc
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.style
import numpy as np
import pandas as pd
import yaml
from cycler import cycler
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from PIL import Image

from fedsim.core.configs import YAML_LOADER
from fedsim.core.disk import write_files
from fedsim.report.looks import COLOURS, ON_DARK
from fedsim.report.sections import ASSETS
from fedsim.report.table import csv_text

SHEETS: Mapping[str, Sequence[str | Path]] = {
    "paper": [ASSETS / "paper.mplstyle"],
    "slides": [ASSETS / "paper.mplstyle", ASSETS / "slides.mplstyle"],
    "dark": [
        "dark_background",
        ASSETS / "paper.mplstyle",
        ASSETS / "slides.mplstyle",
        ASSETS / "dark.mplstyle",
    ],
}
"""matplotlib's style sheets of each style, of which later ones win."""
WIDTH: ContextVar[float | None] = ContextVar("width", default=None)
"""The width of all figures in inches, inside of `style`. None: that of a column or of a page,
depending on the number of panels."""
DPI, PREVIEW_DPI = 300, 110
"""Dots per inch of PNG files, and of the smaller pictures on the page."""
LARGE = 1000
"""Height in pixels from which garbage is collected after a figure is saved: such figures leave up
to 600 MB in reference cycles."""
CAPTIONS: Mapping[str, str] = yaml.load((ASSETS / "figures.yaml").read_text("utf-8"), YAML_LOADER)


@dataclass(frozen=True)
class Plot:
    """A figure, the name of its files, its caption, and the `data` that it shows.

    The data are mappings of columns (docs/figures.md has them), for example one for each line.
    """

    name: str
    caption: str
    figure: Figure
    data: Sequence[Mapping[str, Any]] = ()


@contextmanager
def style(name: str = "paper", width: float | None = None) -> Iterator[None]:
    """Enter the context in which figures are drawn and saved: a style of `SHEETS`, and `WIDTH`."""
    palette = cycler(color=ON_DARK if name == "dark" else COLOURS)
    token = WIDTH.set(width)
    try:
        with matplotlib.style.context([*SHEETS[name], {"axes.prop_cycle": palette}]):
            yield
    finally:
        WIDTH.reset(token)


def save(plots: Sequence[Plot], folder: Path) -> list[tuple[str, bytes]]:
    """Write the figures as PNG, PDF and SVG to `folder`, and their data as CSV. Return their
    captions and smaller PNGs for the page.

    The figures are cleared to free memory, and cannot be used again.
    """
    files: dict[str, bytes] = {}
    pictures = []
    for plot in plots:
        png, pdf, svg, preview = io.BytesIO(), io.BytesIO(), io.BytesIO(), io.BytesIO()
        plot.figure.set_dpi(DPI)
        screen = FigureCanvasAgg(plot.figure)
        screen.print_png(png)  # not by savefig, which would draw each figure twice
        plot.figure.set_layout_engine("none")  # it is laid out by now
        FigureCanvasPdf(plot.figure).print_pdf(pdf, metadata={"CreationDate": None})
        FigureCanvasSVG(plot.figure).print_svg(svg, metadata={"Date": None})
        picture = Image.fromarray(np.asarray(screen.buffer_rgba())).convert("RGB")
        width, height = (round(side * PREVIEW_DPI / DPI) for side in picture.size)
        picture.resize((width, height), Image.Resampling.LANCZOS).save(preview, "png")
        files[f"{plot.name}.png"] = png.getvalue()
        files[f"{plot.name}.pdf"] = pdf.getvalue()
        files[f"{plot.name}.svg"] = svg.getvalue()
        if plot.data:
            data = pd.concat([pd.DataFrame(columns) for columns in plot.data])
            files[f"{plot.name}.csv"] = csv_text(data).encode()
        pictures.append((plot.caption, preview.getvalue()))
        plot.figure.clear()
        if picture.height > LARGE:
            gc.collect()
    write_files(folder, files)
    return pictures
