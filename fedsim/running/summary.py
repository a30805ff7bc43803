"""The measures in summary.json that follow from a run's records and from its final model.

`fedsim.running.experiment` calls both functions when a run ends.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.core.record import (
    CLIENT_ACCURACY,
    FINAL_WINDOW,
    LAST_FIELDS,
    TOTAL_FIELDS,
    WIRE_FIELDS,
    Record,
    mean_of_last,
)
from fedsim.rounds.client_accuracy import aggregates
from fedsim.rounds.loop import Simulation


def totals_of(
    records: Sequence[Record], initial_accuracy: float, window: int = FINAL_WINDOW
) -> dict[str, Any]:
    """Return the part of a summary that follows from the records of all rounds.

    `window` is the number of last rounds over which the final accuracy is a mean.
    Records of rounds without an evaluation have no test accuracy. Without any evaluated round, the
    accuracies of the summary are None.
    """
    accuracies = [record.test_accuracy for record in records]
    evaluated = [accuracy for accuracy in accuracies if accuracy is not None]
    ratios = [record.participation_ratio for record in records]
    totals: dict[str, Any] = {
        "rounds": len(records),
        "initial_accuracy": initial_accuracy,
        "final_accuracy": mean_of_last(accuracies, window),
        "final_window": window,
        "last_accuracy": evaluated[-1] if evaluated else None,
        "best_accuracy": max(evaluated, default=None),
        "mean_participation_ratio": float(np.mean(ratios)) if ratios else None,
    }
    totals |= dict.fromkeys(LAST_FIELDS, 0.0)  # for a run that ended before its first round
    if records:
        last = records[-1]
        totals |= {name: getattr(last, name) for name in LAST_FIELDS}
        if last.simulated_time is not None:
            totals["simulated_seconds"] = last.simulated_time
        if last.late is not None:
            totals["late_updates"] = sum(len(record.late or ()) for record in records)
        if last.epsilon is not None:  # the aggregator is differentially private
            totals["epsilon"] = last.epsilon
        if last.wire_bytes_down is not None:  # the run is on real nodes
            for name in WIRE_FIELDS:
                totals[name] = sum(getattr(record, name) for record in records)
    sums = {name: sum(getattr(record, name) for record in records) for name in TOTAL_FIELDS}
    totals["totals"] = sums
    return totals


def client_accuracies(
    simulation: Simulation,
) -> tuple[dict[str, Any], dict[str, NDArray[Any]] | None]:
    """Return the summary and the arrays of the final model's accuracy on each of N clients.

    The arrays are those of clients.npz, all [N]:
    - `accuracy`: the accuracy on the client's samples, nan for a client without samples;
    - `samples`: the number of samples on which it was measured;
    - `selected`: whether the client was ever selected.

    The summary is empty and the arrays are None if the run does not measure these accuracies.
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
