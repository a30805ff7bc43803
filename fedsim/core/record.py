"""The record of a round, which is one line of metrics.jsonl, and the final accuracy of a run.

The round loop makes the records; the summary of a run and reports read them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Phase = Literal["select", "ask", "train", "aggregate", "evaluate"]
PHASES: tuple[Phase, ...] = ("select", "ask", "train", "aggregate", "evaluate")
"""Phases of a round: the server's own computations to select, the clients' answers to its
questions, all local training, aggregation, and evaluation on the test set."""

CLIENT_ACCURACY = "client_accuracy"
"""The config key, and the first part of the names of the record's measures, of the accuracy of each
client."""
MeasuredOn = Literal["labels", "test", "holdout", "train"]
"""Values of this key: the samples on which accuracy is measured (`rounds/client_accuracy.py`)."""
CLIENT_ACCURACY_MEASURES = ("mean", "std", "worst_tenth", "best_tenth", "never_selected")
"""Measures over the accuracies of all clients; a record's names begin with `client_accuracy_`."""


@dataclass(frozen=True)
class Record:
    """Everything that was measured in a round. The ledger (`clients/ledger.py`) defines the costs.

    Losses and accuracies are None if they were not measured in the round. `participation_ratio` is
    uploaded / N. `coverage` is the share of clients that have been selected at least once.
    `wall_seconds` is the sum of all phases of all rounds until now.

    With a simulated clock, `simulated_seconds` is the round's duration on the clients' devices.
    `simulated_seconds_ask` (the selector's questions) and `simulated_seconds_train` (training of
    the cohort) are its parts. `simulated_time` is the sum over all rounds until now. `late`
    lists the selected clients whose updates did not arrive in time.

    `nonfinite_reports` is the number of losses that clients reported as nan or infinity, and
    `dropped_updates` the number of updates that held one. `epsilon`, which only private runs have,
    covers the differential privacy of all rounds until now. `learning_rate` is the rate of the
    round's local training; records of earlier versions lack it.

    Runs with `local.drop_out`, and on real nodes (`fedsim.flower`), have `late`, too. Those on real
    nodes have the bytes that crossed the network next to those of the ledger: `wire_bytes_down` and
    `wire_bytes_up`.
    """

    round: int
    test_accuracy: float | None
    test_loss: float | None
    train_loss: float | None
    participation_ratio: float
    contacted: int
    trained: int
    uploaded: int
    bytes_down: int
    bytes_up: int
    forward_samples: int
    train_samples: int
    server_forward_samples: int
    seconds_select: float
    seconds_ask: float
    seconds_train: float
    seconds_aggregate: float
    seconds_evaluate: float
    wall_seconds: float
    selected: list[int]
    coverage: float
    nonfinite_reports: int
    dropped_updates: int
    simulated_seconds: float | None = None
    simulated_seconds_ask: float | None = None
    simulated_seconds_train: float | None = None
    simulated_time: float | None = None
    late: list[int] | None = None
    client_accuracy_mean: float | None = None
    client_accuracy_std: float | None = None
    client_accuracy_worst_tenth: float | None = None
    client_accuracy_best_tenth: float | None = None
    client_accuracy_never_selected: float | None = None
    epsilon: float | None = None
    learning_rate: float | None = None
    wire_bytes_down: int | None = None
    wire_bytes_up: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields in order, without those that do not apply to the run."""
        values = dict(vars(self))
        for name in (*CLOCK_FIELDS, *WIRE_FIELDS):
            if values[name] is None:
                del values[name]
        if self.client_accuracy_mean is None:
            for name in CLIENT_ACCURACY_FIELDS:
                del values[name]
        if self.epsilon is None:
            del values["epsilon"]
        return values


TOTAL_FIELDS = (
    "contacted",
    "trained",
    "uploaded",
    "bytes_down",
    "bytes_up",
    "forward_samples",
    "train_samples",
    "server_forward_samples",
    "seconds_select",
    "seconds_ask",
    "seconds_train",
    "seconds_aggregate",
    "seconds_evaluate",
    "nonfinite_reports",
    "dropped_updates",
)
"""Fields that summary.json adds up over all rounds."""
LAST_FIELDS = ("wall_seconds", "coverage")
"""Fields whose last value is in summary.json."""
CLOCK_FIELDS = (
    "simulated_seconds",
    "simulated_seconds_ask",
    "simulated_seconds_train",
    "simulated_time",
    "late",
)
"""Fields that only runs with a simulated clock have; `late` also runs on real nodes, and with
`local.drop_out`."""
WIRE_FIELDS = ("wire_bytes_down", "wire_bytes_up")
"""Fields that only runs on real nodes have, and that summary.json adds up."""
CLIENT_ACCURACY_FIELDS = tuple(f"client_accuracy_{name}" for name in CLIENT_ACCURACY_MEASURES)
"""Fields that only runs with `client_accuracy` have."""

FINAL_WINDOW = 11
"""Number of last rounds over which the final accuracy is a mean, if `final_window` is null.

GPFL prints "last 10"; its published logs agree with the last 11.
"""
SHORT = 3
"""Runs of fewer windows than this are short: early rounds weigh much in their final accuracy."""


def short_run_warning(num_rounds: int, window: int) -> str | None:
    """Return a warning on runs that are shorter than `SHORT` windows; None for longer ones.

    A single round is no mean, so it gets no warning either.
    """
    if num_rounds >= SHORT * window:
        return None
    num_averaged = min(window, num_rounds)
    if num_averaged == 1:
        return None
    warning = (
        f"final accuracy is the mean of the last {num_averaged} of only {num_rounds} rounds, "
        "so early rounds weigh much"
    )
    third = max(num_rounds // SHORT, 1)
    if third == num_averaged:
        return warning
    return f"{warning} (final_window={third}: the mean of the last third)"


def reaches(
    accuracies: Sequence[float | None], target: float, window: int, num_rounds: int
) -> bool:
    """Return whether a run reaches the accuracy `target` in the last of the rounds so far.

    The round must have been evaluated, and the mean of the window that ends with it
    (`mean_of_last`) must be at least `target`. Windows that begin before round 1 count only if the
    whole run, of `num_rounds`, is shorter than a window.
    """
    if mean_of_last(accuracies, 1) is None or len(accuracies) < min(window, num_rounds):
        return False
    return (mean_of_last(accuracies, window) or 0.0) >= target


def mean_of_last(accuracies: Sequence[float | None], window: int = FINAL_WINDOW) -> float | None:
    """Return the final accuracy: the mean test accuracy over those of the last `window` rounds that
    were evaluated.

    `accuracies` holds the test accuracy after each round, None or nan if it was not measured.
    Returns None if none of these rounds was evaluated.
    """
    measured = []
    for accuracy in accuracies[-window:]:
        if accuracy is not None and math.isfinite(accuracy):
            measured.append(float(accuracy))
    return math.fsum(measured) / len(measured) if measured else None
