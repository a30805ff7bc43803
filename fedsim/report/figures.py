"""All figures of a report within settings: accuracy, participation and coverage, accuracies and
data of clients, selections, times.

They show finished runs: a panel for each setting, and in it a line, bar or row for each method. A
look is the colour, dash and marker of a method, the same in all figures. Figures are made and saved
within `style`. They are returned as `Plot`s, and `save` writes them (`fedsim.report.drawing`).
"""

from collections.abc import Mapping

import pandas as pd

from fedsim.core.record import PHASES
from fedsim.report.accuracy_figures import accuracy_plots
from fedsim.report.client_figures import clients_plot, partitions_plot
from fedsim.report.drawing import Plot
from fedsim.report.looks import Look
from fedsim.report.selection_figures import (
    coverage_plot,
    histogram_plot,
    imperfect_plot,
    participation_plot,
    round_plots,
)
from fedsim.report.time_figures import phases_plot
from fedsim.results.frames import by, by_setting
from fedsim.results.measures import PHASE_SECONDS, is_recorded

SIMULATED = ("ask", "train")
"""Phases that take time on the simulated clock of the clients' devices."""


def all_plots(
    runs: pd.DataFrame, looks: Mapping[str, Look], log_x: bool | None = None
) -> list[Plot]:
    """Return all figures for which the finished runs (at least one) have data.

    `looks` has those of all methods. `log_x` is as in `accuracy_plots`.
    """
    panels = {}
    for setting, rows in by_setting(runs).items():
        panels[setting] = {method: list(line["run"]) for method, line in by(rows, "method").items()}
    all_runs = list(runs["run"])
    clock = [f"simulated_seconds_{phase}" for phase in SIMULATED]
    plots = [imperfect_plot(runs, looks), *accuracy_plots(panels, looks, log_x)]
    plots += [coverage_plot(runs), participation_plot(runs)]
    if is_recorded(all_runs, ["selected"]):
        plots += [histogram_plot(panels, looks), *round_plots(panels)]
    plots.append(clients_plot(panels, looks))
    if is_recorded(all_runs, PHASE_SECONDS):
        label = "seconds of a run"
        plots.append(phases_plot("phases", panels, PHASES, "seconds_", label))
    if is_recorded(all_runs, clock):
        label = "simulated seconds of a run"
        prefix = "simulated_seconds_"
        plots.append(phases_plot("simulated_phases", panels, SIMULATED, prefix, label))
    plots.append(partitions_plot(runs))
    return [plot for plot in plots if plot is not None]
