"""Seconds of whole runs by phase."""

from collections.abc import Sequence

import matplotlib
import numpy as np

from fedsim.communication.ledger import PHASES
from fedsim.report.figures.frames import make_axes, name_rows
from fedsim.report.figures.plot import Plot
from fedsim.report.groups import Group
from fedsim.report.panels import Panel

ROW, MARGIN, LEGEND = 0.2, 0.7, 0.25


def phases_plot(panels: Sequence[Panel]) -> Plot:
    """A bar per method, in parts: what the server selects for, what clients are asked, training, and so on."""
    height = ROW * max(len(panel.lines) for panel in panels) + MARGIN
    figure, axes = make_axes(len(panels), height, LEGEND)
    colours = matplotlib.colormaps["cividis"](np.linspace(0, 1, len(PHASES)))
    for panel, ax in zip(panels, axes, strict=True):
        left = np.zeros(len(panel.lines))
        for phase, colour in zip(PHASES, colours, strict=True):
            spent = np.array([_mean_seconds(group, phase) for group in panel.lines.values()])
            ax.barh(range(len(left)), spent, left=left, color=colour, height=0.7, label=phase)
            left += spent
        name_rows(ax, list(panel.lines))
        ax.set(xlabel="seconds of a run", title=panel.title)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(PHASES), columnspacing=1, handlelength=1)
    caption = (
        "Seconds of whole runs by phase, mean over seeds; they mean something only if runs did not share their machine."
    )
    return Plot("phases", caption, figure)


def _mean_seconds(group: Group, phase: str) -> float:
    return float(np.mean([run.series(f"seconds_{phase}").sum() for run in group.complete]))
