"""Measures by the names that files use, such as `final_accuracy` or `accuracy@0.15`."""

from collections.abc import Mapping
from typing import Any

from fedsim.client_accuracy import AGGREGATES, KEY
from fedsim.report import costs, measures
from fedsim.report.groups import Group
from fedsim.report.measures import Measure
from fedsim.report.runs import Run, Seeds
from fedsim.report.statistics import UNBOUNDED, UNIT

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
