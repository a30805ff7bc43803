import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

Phase = Literal["select", "ask", "train", "aggregate", "evaluate"]
PHASES: tuple[Phase, ...] = ("select", "ask", "train", "aggregate", "evaluate")
"""What the server computes to select; what clients compute to answer its questions; local training,
whoever asked for it; aggregation; the test set."""
QUANTITIES = ("bytes_down", "forward_samples", "train_samples", "bytes_up")
"""What an exchange of the server with a client is made of, in the order in which a client does
it."""

CLIENT_ACCURACY = "client_accuracy"
MeasuredOn = Literal["labels", "test", "holdout", "train"]
CLIENT_ACCURACY_MEASURES = ("mean", "std", "worst_tenth", "best_tenth", "never_selected")
"""What a record has of the accuracies of all clients, each behind `client_accuracy_`."""
SUM, LAST, CLOCK, CLIENTS = (
    {"summary": "sum"},
    {"summary": "last"},
    {"only_with": "clock"},
    {"only_with": CLIENT_ACCURACY},
)
"""What fields of records carry: their sum is among the totals of summary.json, or their last value
is in it; they are in records with a simulated clock alone, or of runs that measure accuracy client
by client."""


@dataclass(frozen=True)
class Record:
    """One line of metrics.jsonl. Losses and accuracies are None where nothing was measured in the
    round.

    `participation_ratio` is uploaded / N; `coverage` the share of clients that have been selected
    at least once; `wall_seconds` the sum of all phases up to and including this round.

    With a simulated clock: `simulated_seconds`, the round's duration on the clients' devices, and
    its two parts, of the questions before the selection and of the selected's training;
    `simulated_time`, the sum up to and including this round; `late`, those of the selected whose
    updates did not arrive in time. `epsilon`, in private runs alone: of the differential privacy of
    all rounds up to this one.
    """

    round: int
    test_accuracy: float | None
    test_loss: float | None
    train_loss: float | None
    participation_ratio: float
    contacted: int = field(metadata=SUM)
    trained: int = field(metadata=SUM)
    uploaded: int = field(metadata=SUM)
    bytes_down: int = field(metadata=SUM)
    bytes_up: int = field(metadata=SUM)
    forward_samples: int = field(metadata=SUM)
    train_samples: int = field(metadata=SUM)
    server_forward_samples: int = field(metadata=SUM)
    seconds_select: float = field(metadata=SUM)
    seconds_ask: float = field(metadata=SUM)
    seconds_train: float = field(metadata=SUM)
    seconds_aggregate: float = field(metadata=SUM)
    seconds_evaluate: float = field(metadata=SUM)
    wall_seconds: float = field(metadata=LAST)
    selected: list[int]
    coverage: float = field(metadata=LAST)
    nonfinite_reports: int = field(metadata=SUM)
    dropped_updates: int = field(metadata=SUM)
    simulated_seconds: float | None = field(default=None, metadata=CLOCK)
    simulated_seconds_ask: float | None = field(default=None, metadata=CLOCK)
    simulated_seconds_train: float | None = field(default=None, metadata=CLOCK)
    simulated_time: float | None = field(default=None, metadata=CLOCK)
    late: list[int] | None = field(default=None, metadata=CLOCK)
    client_accuracy_mean: float | None = field(default=None, metadata=CLIENTS)
    client_accuracy_std: float | None = field(default=None, metadata=CLIENTS)
    client_accuracy_worst_tenth: float | None = field(default=None, metadata=CLIENTS)
    client_accuracy_best_tenth: float | None = field(default=None, metadata=CLIENTS)
    client_accuracy_never_selected: float | None = field(default=None, metadata=CLIENTS)
    epsilon: float | None = None

    def as_dict(self) -> dict[str, Any]:
        absent = {
            *(CLOCK_FIELDS if self.late is None else ()),
            *(CLIENT_ACCURACY_FIELDS if self.client_accuracy_mean is None else ()),
        }
        absent |= {"epsilon"} if self.epsilon is None else set()
        return {name: value for name, value in asdict(self).items() if name not in absent}


def _carrying(metadata: dict[str, str]) -> tuple[str, ...]:
    return tuple(one.name for one in fields(Record) if one.metadata == metadata)


TOTAL_FIELDS, LAST_FIELDS = _carrying(SUM), _carrying(LAST)
CLOCK_FIELDS, CLIENT_ACCURACY_FIELDS = _carrying(CLOCK), _carrying(CLIENTS)
"""Names of the fields that carry it."""
FINAL_WINDOW = 11
"""Rounds in the final mean: GPFL prints "last 10", its published logs agree with the last 11."""


def mean_of_last(accuracies: Sequence[float | None], window: int = FINAL_WINDOW) -> float | None:
    """The final accuracy: the mean over those of the last `window` rounds that were evaluated; None
    if none was.

    `accuracies`: the test accuracy after each round; None or nan where it was not measured.
    """
    measured = [
        float(value) for value in accuracies[-window:] if value is not None and math.isfinite(value)
    ]
    return math.fsum(measured) / len(measured) if measured else None
