"""Curves of a group: means and ranges over its seeds round by round, and what the rounds had cost by then.

Measures by the names that files use, such as `final_accuracy` or `accuracy@0.15`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.core.record import AGGREGATES, FINAL_WINDOW, KEY, PHASES
from fedsim.results import measures
from fedsim.results import measures as costs
from fedsim.results.groups import Group
from fedsim.results.measures import Measure
from fedsim.results.runs import Floats, Run, Seeds
from fedsim.results.statistics import UNBOUNDED, UNIT

SMOOTHED_FROM = 5 * FINAL_WINDOW
"""Rounds from which on accuracies are smoothed: in shorter runs the window would be most of the curve."""


@dataclass(frozen=True)
class Axis:
    """What accuracy is drawn against: a label, and what one run spends of it in each round [T].

    `unit`: that of the numbers on the axis, which then have a prefix (5 MB); None: they are written as they are.
    """

    label: str
    needs: Sequence[str]
    spent: Callable[[Run], Floats]
    unit: str | None = None


AXES: Mapping[str, Axis] = {
    "rounds": Axis("round", (), lambda run: np.ones(len(run.records))),
    "bytes": Axis(
        "bytes sent, both ways",
        ("bytes_down", "bytes_up"),
        lambda run: run.series("bytes_down") + run.series("bytes_up"),
        unit="B",
    ),
    "samples": Axis(
        "samples passed by clients",
        ("train_samples", "forward_samples"),
        lambda run: run.series("train_samples") + run.series("forward_samples"),
        unit="",
    ),
    "seconds": Axis(
        "computing time without evaluation [s]",
        tuple(f"seconds_{phase}" for phase in PHASES),
        lambda run: sum((run.series(f"seconds_{phase}") for phase in PHASES if phase != "evaluate"), start=np.zeros(1)),
    ),
    "simulated": Axis("simulated time [min]", ("simulated_seconds",), lambda run: run.series("simulated_seconds") / 60),
}


@dataclass(frozen=True)
class AccuracyCurve:
    """Test accuracy after the rounds that were evaluated, over seeds.

    `rounds` [T], 1-based; `raw` [T]: the mean; `smoothed` [T]: the mean of the seeds' smoothed accuracies, whose last
    value is the final accuracy; `low`, `high` [T]: their range.
    """

    rounds: NDArray[np.int64]
    raw: Floats
    smoothed: Floats
    low: Floats
    high: Floats


def accuracy_curve(runs: Sequence[Run]) -> AccuracyCurve:
    """The accuracies of finished runs of one group. Raises `ValueError` if there are none."""
    values = stack_series(runs, "test_accuracy")
    measured = np.isfinite(values).any(0)
    rounds = np.flatnonzero(measured)
    smoothed = np.stack([smooth(row, smoothing_window(values.shape[1])) for row in values])[:, measured]
    raw = np.nanmean(values[:, measured], 0)
    return AccuracyCurve(rounds + 1, raw, np.nanmean(smoothed, 0), np.nanmin(smoothed, 0), np.nanmax(smoothed, 0))


def smoothing_window(num_rounds: int) -> int:
    """Rounds in the mean that is drawn: those of the final accuracy, and one in runs too short for it."""
    return FINAL_WINDOW if num_rounds >= SMOOTHED_FROM else 1


def smooth(values: Floats, window: int) -> Floats:
    """At each round the mean over those of the last `window` rounds that were evaluated; nan where none was. [T]"""
    known = np.isfinite(values)
    sums, counts = (_window_sums(part, window) for part in (np.where(known, values, 0.0), known.astype(np.float64)))
    smoothed: Floats = np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)
    return smoothed


def _window_sums(values: Floats, window: int) -> Floats:
    sums: Floats = np.convolve(values, np.ones(window))[: len(values)]
    return sums


def spent_until(runs: Sequence[Run], axis: str) -> Floats:
    """What had been spent of `axis` by the end of each round, mean over runs [T]."""
    rows = [np.cumsum(AXES[axis].spent(run)) for run in runs]
    length = min(map(len, rows))
    mean: Floats = np.stack([row[:length] for row in rows]).mean(0)
    return mean


def is_recorded(runs: Sequence[Run], names: Sequence[str]) -> bool:
    """Whether all runs have records of rounds with these quantities."""
    return all(run.records and all(run.records[0].get(name) is not None for name in names) for run in runs)


def stack_series(runs: Sequence[Run], name: str) -> Floats:
    """A recorded quantity of all runs, [S, T], cut to the length T of the shortest."""
    rows = [run.series(name) for run in runs]
    length = min(map(len, rows))
    return np.stack([row[:length] for row in rows])


FIRST_ROUND_MEASURES = ("rounds_to_cover", "rounds_to")
"""Measures of the first round in which something happens; no value means that it never happened in the run."""
COUNT_MEASURES = ("most_selections", "mean_selections", "peak_selections")
"""Measures that cannot exceed the number of rounds."""


SHARES = ("final_accuracy", "final_accuracy_10", "mean_accuracy", "accuracy", "accuracy_around", "participation")
"""Measures that lie between 0 and 1."""


def bounds_of(measure: str) -> tuple[float, float]:
    """Where a measure can lie, as far as that is known."""
    return UNIT if base_name(measure) in SHARES or measure.startswith(KEY) else UNBOUNDED


def base_name(measure: str) -> str:
    """The name of a measure without its argument."""
    return measure.partition("@")[0]


def find_measure(text: str) -> Measure:
    """The measure with a name such as `final_accuracy` or `accuracy@0.15` (@ an argument). Raises KeyError."""
    name, _, argument = text.partition("@")
    if argument:
        measure: Measure = MEASURES_WITH_ARGUMENT[name](float(argument))
        return measure
    return MEASURES[name]


MEASURES: Mapping[str, Measure] = {
    "final_accuracy": measures.final_accuracy(),
    "final_accuracy_10": measures.final_accuracy(10),
    "mean_accuracy": measures.mean_accuracy(),
    "fluctuation": measures.fluctuation(),
    "steadiness": measures.steadiness(),
    "rounds_to_cover": measures.rounds_to_cover(),
    "participation": measures.mean_participation,
    "most_selections": measures.most_selections,
    "selection_gini": measures.selection_gini,
    "speed": costs.speed,
    "selection_overhead": costs.selection_overhead,
    "seconds_200": costs.seconds_200,
    "choosing_seconds_200": costs.choosing_seconds_200,
    "participation_rise": measures.participation_rise,
    "mean_selections": measures.mean_selections,
    "peak_selections": measures.peak_selections,
    "peak_height": measures.peak_height,
    "num_clients": measures.num_clients,
    "samples_total": measures.samples_total,
    "samples_mean": measures.samples_mean,
    "samples_deviation": measures.samples_deviation,
    **{f"{KEY}_{name}": measures.client_accuracy(name) for name in AGGREGATES},
}
MEASURES_WITH_ARGUMENT: Mapping[str, Any] = {
    "accuracy": measures.accuracy_after,
    "accuracy_around": measures.accuracy_around,
    "mean_accuracy": measures.mean_accuracy,
    "gain_after": measures.gain_after,
    "rounds_to": measures.rounds_to,
    "bytes_to": measures.bytes_to,
    "simulated_seconds_to": measures.simulated_seconds_to,
    "peak_distance": measures.peak_distance,
}


def is_known(run: Run, measure: str) -> bool:
    """Whether a measure can be told for a run: for runs that are read from a summary.json, whether it holds it."""
    return run.kept is None or measure in run.kept


def value_of(run: Run, measure: str) -> float | None:
    """The measure of a run; None if it does not exist. Raises KeyError for names that are not `is_known`."""
    return find_measure(measure)(run) if run.kept is None else run.kept[measure]


def values_by_seed(group: Group, measure: str) -> dict[Seeds, float]:
    """A measure of the group's finished runs by their seeds, without runs for which it does not exist."""
    values = {run.seeds: value_of(run, measure) for run in group.complete if is_known(run, measure)}
    return {seeds: value for seeds, value in values.items() if value is not None}
