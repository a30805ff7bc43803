"""Curves of runs that differ in seeds alone: accuracy round by round, and what rounds cost until
then."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.core.arrays import Floats, Ints
from fedsim.results.measures import BYTES, PHASE_SECONDS, SAMPLES, SIMULATED
from fedsim.results.runs import Run

MIN_WINDOWS = 5
"""Accuracies are smoothed if the shortest run of a curve has at least this many windows. In shorter
runs the window would be most of the curve."""


@dataclass(frozen=True)
class Axis:
    """An axis that accuracy is drawn against: its label, and the recorded quantities whose sum is
    spent (none: each round counts 1).

    The sum is divided by `per`. Numbers on the axis have the `unit` with a prefix (5 MB), if there
    is one.
    """

    label: str
    names: Sequence[str] = ()
    per: float = 1.0
    unit: str | None = None


AXES: Mapping[str, Axis] = {
    "rounds": Axis("round"),
    "bytes": Axis("bytes sent, both ways", BYTES, unit="B"),
    "samples": Axis("samples passed by clients", SAMPLES, unit=""),
    "seconds": Axis("computing time without evaluation [s]", PHASE_SECONDS[:-1]),
    "simulated": Axis("simulated time [min]", SIMULATED, per=60.0),
}


@dataclass(frozen=True)
class AccuracyCurve:
    """Test accuracy after the rounds that were evaluated, over seeds.

    `rounds` [T] are 1-based and `raw` [T] is the mean. `smoothed` [T] is the mean of the seeds'
    smoothed accuracies, whose last value is the final accuracy; `low` and `high` [T] are their
    range. Each smoothed value is a mean over `window` rounds: those of the final accuracy, or one
    in short runs.
    """

    rounds: Ints
    raw: Floats
    smoothed: Floats
    low: Floats
    high: Floats
    window: int


def accuracy_curve(runs: Sequence[Run]) -> AccuracyCurve:
    """Return the curve of finished runs of one group. Raises `ValueError` if there are none."""
    accuracies = stack_series(runs, "test_accuracy")
    window = smoothing_window(runs)
    is_measured = np.isfinite(accuracies).any(0)
    by_run = np.stack([smooth(row, window) for row in accuracies])[:, is_measured]
    return AccuracyCurve(
        rounds=np.flatnonzero(is_measured) + 1,
        raw=np.nanmean(accuracies[:, is_measured], 0),
        smoothed=np.nanmean(by_run, 0),
        low=np.nanmin(by_run, 0),
        high=np.nanmax(by_run, 0),
        window=window,
    )


def smoothing_window(runs: Sequence[Run]) -> int:
    """Return the number of rounds over which the curve of these runs is smoothed.

    It is the window of the final accuracy, or 1 if the shortest run is too short (`MIN_WINDOWS`).
    """
    window = runs[0].final_window
    num_rounds = min(run.rounds.num for run in runs)
    return window if num_rounds >= MIN_WINDOWS * window else 1


def smooth(values: Floats, window: int) -> Floats:
    """Return at each round [T] the mean over those of the last `window` rounds that were evaluated;
    nan where none was."""
    is_known = np.isfinite(values)
    kernel = np.ones(window)
    sums = np.convolve(np.where(is_known, values, 0.0), kernel)[: len(values)]
    counts = np.convolve(is_known.astype(np.float64), kernel)[: len(values)]
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)


def spent_until(runs: Sequence[Run], axis_name: str) -> Floats:
    """Return what was spent of one of `AXES` by the end of each round [T], the mean over runs."""
    axis = AXES[axis_name]
    if not axis.names:
        return np.arange(1.0, min(run.rounds.num for run in runs) + 1)
    return np.cumsum(stack_series(runs, *axis.names) / axis.per, axis=1).mean(0)


def stack_series(runs: Sequence[Run], *names: str) -> Floats:
    """Return the sum of recorded quantities of all runs, [S, T], cut to the length T of the
    shortest run."""
    length = min(run.rounds.num for run in runs)
    return np.stack([np.sum([run.columns[name][:length] for name in names], 0) for run in runs])
