"""Participation and coverage over rounds: a strip of colour per method, where lines would lie on each other."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from fedsim.report import measures
from fedsim.report.curves import stack_series
from fedsim.report.figures.frames import make_axes, name_rows, write_beside_rows
from fedsim.report.figures.plot import Plot
from fedsim.report.groups import Group
from fedsim.report.panels import Panel
from fedsim.report.runs import Floats
from fedsim.report.tables.formatting import show_median_reached

ROW, MARGIN = 0.17, 0.8
"""Inches of a method's strip, and of what is above and below the strips of a panel."""

Remark = Callable[[Group], str]


def coverage_plot(panels: Sequence[Panel]) -> Plot:
    """The share of clients that have been selected at least once."""
    figure = _strips(panels, "coverage", 1.0, "coverage", _covered_after, logarithmic=True)
    caption = "Share of clients selected so far, mean over seeds; right: median round by which all had been."
    return Plot("coverage", caption, figure)


def participation_plot(panels: Sequence[Panel]) -> Plot:
    """The share of clients that upload in a round."""
    groups = [group for panel in panels for group in panel.lines.values()]
    highest = max(float(_mean_over_seeds(group, "participation_ratio").max()) for group in groups)
    figure = _strips(panels, "participation_ratio", highest, "participation", _mean_participation)
    caption = "Share of clients that upload in a round, mean over seeds; right: mean over all rounds."
    return Plot("participation", caption, figure)


def _strips(
    panels: Sequence[Panel], name: str, highest: float, label: str, remark: Remark, *, logarithmic: bool = False
) -> Figure:
    """A strip per method: the mean over seeds of the series `name` by colour, and a remark to the right of it."""
    figure, axes = make_axes(len(panels), ROW * max(len(panel.lines) for panel in panels) + MARGIN)
    for panel, ax in zip(panels, axes, strict=True):
        mesh: QuadMesh
        for number, group in enumerate(panel.lines.values()):
            values = _mean_over_seeds(group, name)
            edges = np.arange(len(values) + 1) + 0.5
            mesh = ax.pcolormesh(
                edges, [number - 0.4, number + 0.4], values[None], vmin=0, vmax=highest, cmap="viridis", rasterized=True
            )
        name_rows(ax, list(panel.lines))
        write_beside_rows(ax, [remark(group) for group in panel.lines.values()])
        ax.set(xlabel="round", title=panel.title, xscale="log" if logarithmic else "linear")
        ax.xaxis.set_major_formatter("{x:g}")
    figure.colorbar(mesh, ax=axes, label=label, fraction=0.05, aspect=30 * axes[0].get_position().height)
    return figure


def _covered_after(group: Group) -> str:
    return show_median_reached(group, measures.rounds_to_cover(), lambda value: f"{value:.0f}")


def _mean_participation(group: Group) -> str:
    values = [value for run in group.complete if (value := measures.mean_participation(run)) is not None]
    return f"{100 * np.mean(values):.3g} %" if values else "-"


def _mean_over_seeds(group: Group, name: str) -> Floats:
    mean: Floats = stack_series(group.complete, name).mean(0)
    return mean
