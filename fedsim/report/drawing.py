"""Draw and save figures: their style, width, captions and files."""

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
from matplotlib.colors import ListedColormap, to_rgb
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
LABELS: ContextVar[str] = ContextVar("labels", default="legend")
"""Lines of accuracy have their names in a `legend` or at their `ends`, within a `style`."""
DPI, PREVIEW_DPI = 300, 110
"""Dots per inch of PNG files, and of the smaller pictures on the page."""
LARGE = 1000
"""Height in pixels from which garbage is collected after a figure is saved: such figures leave up
to 600 MB in reference cycles."""
SHARES = "fedsim_shares"
"""The colours of shares and numbers: matplotlib's viridis_r without its lightest tenth, which can
hardly be told from white paper."""
matplotlib.colormaps.register(
    ListedColormap(matplotlib.colormaps["viridis_r"](np.linspace(0.12, 1, 256))),
    name=SHARES,
    force=True,
)
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
def style(
    name: str = "paper", width: float | None = None, labels: str = "legend"
) -> Iterator[None]:
    """Enter the context in which figures are drawn and saved: a style of `SHEETS`, `WIDTH` and
    `LABELS`."""
    palette = cycler(color=ON_DARK if name == "dark" else COLOURS)
    width_before = WIDTH.set(width)
    labels_before = LABELS.set(labels)
    try:
        with matplotlib.style.context([*SHEETS[name], {"axes.prop_cycle": palette}]):
            yield
    finally:
        WIDTH.reset(width_before)
        LABELS.reset(labels_before)


def is_dark() -> bool:
    """Return whether figures have a dark background, inside of `style`."""
    return sum(to_rgb(matplotlib.rcParams["figure.facecolor"])) < 1


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
