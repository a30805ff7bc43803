"""Curves of a group: means and ranges over its seeds round by round, and what the rounds had cost
by then."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.core.arrays import Floats, Ints
from fedsim.core.record import FINAL_WINDOW, PHASES
from fedsim.results.runs import Run

SMOOTHED_FROM = 5 * FINAL_WINDOW
"""Rounds from which on accuracies are smoothed: in shorter runs the window would be most of the
curve."""


@dataclass(frozen=True)
class Axis:
    """What accuracy is drawn against: a label, and the recorded quantities whose sum is spent
    (none: a round counts 1).

    `per`: how many of them are 1 on the axis. `unit`: that of the numbers on it, which then have a
    prefix (5 MB).
    """

    label: str
    names: Sequence[str] = ()
    per: float = 1.0
    unit: str | None = None


AXES: Mapping[str, Axis] = {
    "rounds": Axis("round"),
    "bytes": Axis("bytes sent, both ways", ("bytes_down", "bytes_up"), unit="B"),
    "samples": Axis("samples passed by clients", ("train_samples", "forward_samples"), unit=""),
    "seconds": Axis(
        "computing time without evaluation [s]",
        [f"seconds_{phase}" for phase in PHASES if phase != "evaluate"],
    ),
    "simulated": Axis("simulated time [min]", ("simulated_seconds",), per=60.0),
}


@dataclass(frozen=True)
class AccuracyCurve:
    """Test accuracy after the rounds that were evaluated, over seeds.

    `rounds` [T], 1-based; `raw` [T]: the mean; `smoothed` [T]: the mean of the seeds' smoothed
    accuracies, whose last value is the final accuracy; `low`, `high` [T]: their range. `window`:
    the rounds in the mean that is drawn, those of the final accuracy, and one in runs too short for
    it.
    """

    rounds: Ints
    raw: Floats
    smoothed: Floats
    low: Floats
    high: Floats
    window: int


def accuracy_curve(runs: Sequence[Run]) -> AccuracyCurve:
    """The accuracies of finished runs of one group. Raises `ValueError` if there are none."""
    values = stack_series(runs, "test_accuracy")
    measured, window = (
        np.isfinite(values).any(0),
        FINAL_WINDOW if values.shape[1] >= SMOOTHED_FROM else 1,
    )
    smoothed = np.stack([smooth(row, window) for row in values])[:, measured]
    raw = np.nanmean(values[:, measured], 0)
    ends = np.nanmin(smoothed, 0), np.nanmax(smoothed, 0)
    return AccuracyCurve(np.flatnonzero(measured) + 1, raw, np.nanmean(smoothed, 0), *ends, window)


def smooth(values: Floats, window: int) -> Floats:
    """At each round the mean over those of the last `window` rounds that were evaluated; nan where
    none was. [T]"""
    known = np.isfinite(values)
    sums, counts = (
        np.convolve(part, np.ones(window))[: len(values)]
        for part in (np.where(known, values, 0.0), known.astype(np.float64))
    )
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)


def spent_until(runs: Sequence[Run], axis: str) -> Floats:
    """What had been spent of `axis`, one of `AXES`, by the end of each round, mean over runs
    [T]."""
    of = AXES[axis]
    spent = [
        np.sum([run.columns[name] for name in of.names], 0) / of.per
        if of.names
        else np.ones(run.rounds.num)
        for run in runs
    ]
    return _stacked([np.cumsum(one) for one in spent]).mean(0)


def is_recorded(runs: Sequence[Run], names: Sequence[str]) -> bool:
    """Whether all runs have records of rounds with these quantities."""
    return all(
        run.rounds.num
        and all(name in run.columns and not np.isnan(run.columns[name][0]) for name in names)
        for run in runs
    )


def stack_series(runs: Sequence[Run], name: str) -> Floats:
    """A recorded quantity of all runs, [S, T], cut to the length T of the shortest."""
    return _stacked([run.columns[name] for run in runs])


def _stacked(rows: Sequence[Floats]) -> Floats:
    length = min(map(len, rows))
    return np.stack([row[:length] for row in rows])
