"""The measures in summary.json that follow from a run's records and from its final model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.core.record import CLIENT_ACCURACY, LAST_FIELDS, TOTAL_FIELDS, Record, mean_of_last
from fedsim.rounds.client_accuracy import aggregates
from fedsim.rounds.loop import Simulation


def totals_of(records: Sequence[Record], initial_accuracy: float) -> dict[str, Any]:
    """Return the part of a summary that follows from the records of all rounds."""
    accuracies = [r.test_accuracy for r in records]
    evaluated = [accuracy for accuracy in accuracies if accuracy is not None]
    ratios = [r.participation_ratio for r in records]
    totals: dict[str, Any] = {
        "rounds": len(records),
        "initial_accuracy": initial_accuracy,
        "smoothed_accuracy": mean_of_last(accuracies),
        "last_accuracy": evaluated[-1] if evaluated else None,
        "best_accuracy": max(evaluated, default=None),
        "mean_participation_ratio": float(np.mean(ratios)) if ratios else None,
    }
    totals |= dict.fromkeys(LAST_FIELDS, 0.0)
    if records:
        last = records[-1]
        totals |= {name: getattr(last, name) for name in LAST_FIELDS}
        if last.late is not None:
            totals["simulated_seconds"] = last.simulated_time
            totals["late_updates"] = sum(len(r.late or ()) for r in records)
        if last.epsilon is not None:
            totals["epsilon"] = last.epsilon
    totals["totals"] = {name: sum(getattr(r, name) for r in records) for name in TOTAL_FIELDS}
    return totals


def client_accuracies(
    simulation: Simulation,
) -> tuple[dict[str, Any], dict[str, NDArray[Any]] | None]:
    """Return the summary and the arrays of the final model's accuracy on each of N clients.

    The arrays are those of clients.npz, all [N]: `accuracy`, nan where there is none; `samples`,
    on which it was measured; `selected`, whether the client was ever selected. The summary is
    empty and the arrays are None if a run does not measure them.
    """
    measure = simulation.components.client_accuracy
    accuracies = None if measure is None else simulation.measure()[1]
    if measure is None or accuracies is None:
        return {}, None
    selected = simulation.covered
    summary: dict[str, Any] = dict(aggregates(accuracies, selected))
    summary["clients"] = int(np.isfinite(accuracies).sum())
    summary["clients_never_selected"] = int((~selected).sum())
    arrays = {"accuracy": accuracies, "samples": measure.samples, "selected": selected}
    return {CLIENT_ACCURACY: summary}, arrays
