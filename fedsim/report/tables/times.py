"""Tables of the time and traffic of runs. Times are meaningful only if the runs did not share their machine."""

from collections.abc import Iterator, Sequence

import numpy as np

from fedsim.communication.ledger import PHASES
from fedsim.report.groups import Group
from fedsim.report.measures import cost_of_rounds
from fedsim.report.runs import Run
from fedsim.report.tables.table import Table
from fedsim.tracking.console import show_bytes, show_seconds


def phases(groups: Sequence[Group]) -> Table:
    """Seconds by phase and bytes, scaled to 200 rounds as in GPFL's Fig. 6."""
    rows = []
    for group, runs in _groups_with_records(groups):
        spent = [_mean_cost(f"seconds_{phase}", runs) for phase in PHASES]
        moved = [_mean_cost(name, runs) for name in ("bytes_down", "bytes_up")]
        if None in spent:
            rows.append([group.name, *["-"] * (len(PHASES) + 3)])
            continue
        times = [value or 0.0 for value in spent]
        cells = [show_seconds(value) for value in (sum(times), *times)] + [show_bytes(value or 0.0) for value in moved]
        rows.append([group.name, *cells])
    note = (
        "Runs of fewer rounds: their start-up (rounds that cost other than the later ones) counts once, the mean of the"
        " later rounds for each that is missing; '-' where a run ended before that."
    )
    return Table("phases", "Cost of 200 rounds", ["run", "total", *PHASES, "down", "up"], rows, note)


def selection_times(groups: Sequence[Group]) -> Table:
    """Milliseconds per round by phase, and the time of the server's selection relative to that of training."""
    rows = []
    for group, runs in _groups_with_records(groups):
        spent = {phase: 1e3 * float(np.mean([_mean_after_first_round(run, phase) for run in runs])) for phase in PHASES}
        share = spent["select"] / spent["train"] if spent["train"] else float("nan")
        worst = 1e3 * max(float(run.series("seconds_select").max()) for run in runs)
        shown = [f"{value:.1f}" for value in (*spent.values(), sum(spent.values()))]
        rows.append([group.name, *shown, f"{share:.0%}", f"{worst:.0f}"])
    note = (
        "Means over all rounds but the first. select: what the server computes; ask: what clients compute to answer its"
        " questions; train: local training, whoever asked for it. worst: the longest selection of a round, the first"
        " included."
    )
    header = ["run", *PHASES, "all", "select / train", "worst select"]
    return Table("selection_times", "Milliseconds a round", header, rows, note)


def _mean_cost(name: str, runs: Sequence[Run]) -> float | None:
    """Mean cost of 200 rounds in the quantity `name`, over the runs that give one; None if none does."""
    values = [value for run in runs if (value := cost_of_rounds(name)(run)) is not None]
    return float(np.mean(values)) if values else None


def _groups_with_records(groups: Sequence[Group]) -> Iterator[tuple[Group, list[Run]]]:
    """Groups that have finished runs with records, and these runs."""
    for group in groups:
        if runs := [run for run in group.complete if run.records]:
            yield group, runs


def _mean_after_first_round(run: Run, phase: str) -> float:
    """Mean seconds of a phase in all rounds but the first."""
    values = run.series(f"seconds_{phase}")
    return float(values[1:].mean() if len(values) > 1 else values.mean())
