"""The final accuracy of a run, as the report, the terminal and summary.json have it."""

import math
from collections.abc import Sequence

FINAL_WINDOW = 11
"""Rounds in the final mean: GPFL prints "last 10", its published logs agree with the last 11."""


def mean_of_last(accuracies: Sequence[float | None], window: int = FINAL_WINDOW) -> float | None:
    """The final accuracy: the mean over those of the last `window` rounds that were evaluated; None if none was.

    `accuracies`: the test accuracy after each round; None or nan where it was not measured.
    """
    measured = _measured(accuracies[-window:])
    return math.fsum(measured) / len(measured) if measured else None


def last_of(accuracies: Sequence[float | None]) -> float | None:
    """The accuracy of the last round that was evaluated; None if none was."""
    measured = _measured(accuracies)
    return measured[-1] if measured else None


def _measured(accuracies: Sequence[float | None]) -> list[float]:
    return [float(value) for value in accuracies if value is not None and math.isfinite(value)]
