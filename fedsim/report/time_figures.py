"""Figures of the durations of phases."""

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np

from fedsim.report.drawing import CAPTIONS, Plot, is_dark
from fedsim.report.layout import Lines, add_legend, row_axes


def phases_plot(
    name: str, panels: Mapping[str, Lines], phases: Sequence[str], prefix: str, label: str
) -> Plot:
    """Return a figure with a bar for each method, whose parts are the mean durations of phases.

    `phases` are selection, training, and so on. A duration is the sum over rounds of the recorded
    quantity `prefix` + phase.
    """
    titles = {title: list(lines) for title, lines in panels.items()}
    figure, all_axes = row_axes(titles, 0.2, 0.7, label)
    darkest = 0.3 if is_dark() else 0.0
    colours = matplotlib.colormaps["cividis"](np.linspace(darkest, 0.95, len(phases)))
    data = []
    for (title, lines), axes in zip(panels.items(), all_axes, strict=True):
        left = np.zeros(len(lines))
        for phase, colour in zip(phases, colours, strict=True):
            key = f"{prefix}{phase}"
            means = [np.mean([run.columns[key].sum() for run in runs]) for runs in lines.values()]
            axes.barh(range(len(left)), means, left=left, color=colour, height=0.7, label=phase)
            left += means
            data.append({"setting": title, "method": list(lines), "phase": phase, "seconds": means})
    handles, _ = all_axes[0].get_legend_handles_labels()
    add_legend(figure, handles, handle_length=1)
    return Plot(name, CAPTIONS[name], figure, data)
