"""Single numbers of a run, by name; None if the run ended too early or the number does not exist. One may take an
argument, which stands behind @ in its name: `accuracy@0.15`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import floor
from fedsim.core.record import AGGREGATES, FINAL_WINDOW, KEY, PHASES, mean_of_last
from fedsim.results.curves import is_recorded
from fedsim.results.groups import Group
from fedsim.results.runs import Floats, Run, Seeds
from fedsim.results.statistics import UNBOUNDED, UNIT

Measure = Callable[[Run], float | None]
PHASE_SECONDS = tuple(f"seconds_{phase}" for phase in PHASES)


def accuracy_around(run: Run, share: float, width: int = FINAL_WINDOW) -> float | None:
    """Mean test accuracy in a window of `width` rounds centred on the `share` of all rounds, rounded down."""
    round = floor(share * run.num_rounds)
    return _finite_mean(run.series("test_accuracy")[max(round - 1 - width // 2, 0) : round + width // 2])


def final_accuracy(run: Run) -> float | None:
    """Mean test accuracy over those of the last rounds that were evaluated."""
    return mean_of_last(run.series("test_accuracy").tolist())


def last_accuracy(run: Run) -> float | None:
    """Test accuracy after the last round that was evaluated."""
    values = _finite(run.series("test_accuracy"))
    return float(values[-1]) if len(values) else None


def client_accuracy(run: Run, aggregate: str) -> float | None:
    """One of `AGGREGATES` over clients: the mean over the last rounds that have it; None where it was not measured."""
    return mean_of_last([record.get(f"{KEY}_{aggregate}") for record in run.records])


def mean_accuracy(run: Run, share: float = 1.0) -> float | None:
    """Mean test accuracy over the first `share` of all rounds (area under the learning curve): speed of convergence."""
    return _finite_mean(run.series("test_accuracy")[: floor(share * run.num_rounds)])


def fluctuation(run: Run) -> float | None:
    """Largest distance of the last 11 accuracies from their mean: the ± of GPFL's Table II."""
    values = _finite(run.series("test_accuracy")[-FINAL_WINDOW:])
    return float(np.abs(values - values.mean()).max()) if len(values) else None


def gain_after(run: Run, share: float) -> float | None:
    """Final accuracy minus the accuracy in a window around the `share` of all rounds."""
    early, late = accuracy_around(run, share), final_accuracy(run)
    return None if early is None or late is None else late - early


def rounds_to_cover(run: Run, share: float = 1.0) -> float | None:
    """Rounds until the `share` of all clients has been selected at least once."""
    return _first_round(run.series("coverage") >= share - 1e-9)


def rounds_to(run: Run, target: float) -> float | None:
    """Rounds until the test accuracy first reaches `target`."""
    return _first_round(run.series("test_accuracy") >= target)


def cost_to(run: Run, target: float, names: Sequence[str]) -> float | None:
    """The cost until the test accuracy first reaches `target`, in the sum of recorded quantities (bytes, simulated
    seconds); None where they were not recorded."""
    reached = rounds_to(run, target) if is_recorded([run], names) else None
    return None if reached is None else float(run.total(names)[: int(reached)].sum())


bytes_to = partial(cost_to, names=("bytes_down", "bytes_up"))
simulated_seconds_to = partial(cost_to, names=("simulated_seconds",))


def participation(run: Run) -> float | None:
    return _finite_mean(run.series("participation_ratio"))


def participation_rise(run: Run) -> float | None:
    """Mean share of clients that upload in the second half of the rounds, minus that in the first half."""
    ratios = run.series("participation_ratio")
    early, late = _finite_mean(ratios[: len(ratios) // 2]), _finite_mean(ratios[len(ratios) // 2 :])
    return None if early is None or late is None else late - early


def selection_gini(run: Run) -> float | None:
    """Gini coefficient of the clients' numbers of selections: 0 if all are equal, near 1 if few clients have all."""
    return gini(run.selections.astype(np.float64))


def peak_selections(run: Run) -> float:
    """The mode of the clients' numbers of selections (the median if there are several modes)."""
    counts = np.bincount(run.selections)
    return float(np.median(np.flatnonzero(counts == counts.max())))


def of_sizes(run: Run, of: Callable[[NDArray[np.int64]], float]) -> float | None:
    """A statistic of the clients' numbers of training samples [N]; None if the partition was not saved."""
    return None if run.histograms is None else float(of(run.histograms.sum(1)))


def gini(values: Floats) -> float:
    """Gini coefficient: the mean absolute difference of all pairs divided by twice the mean; 0 if all values are 0."""
    ordered = np.sort(values)
    total = ordered.sum()
    ranks = np.arange(1, len(ordered) + 1)
    return float((2 * ranks - len(ordered) - 1) @ ordered / (len(ordered) * total)) if total else 0.0


def _finite(values: Floats) -> Floats:
    return values[np.isfinite(values)]


def _finite_mean(values: Floats) -> float | None:
    return float(_finite(values).mean()) if len(_finite(values)) else None


def _first_round(reached: NDArray[np.bool_]) -> float | None:
    return float(np.argmax(reached)) + 1 if reached.any() else None


def total_cost(run: Run, *names: str) -> float:
    """What the whole run cost, in the sum of recorded quantities."""
    return float(run.total(names).sum())


def one_time_cost(run: Run, *names: str) -> float | None:
    """What the start-up rounds cost beyond as many of the later rounds: 0 if the run has none, None if it ended within
    them, or did not record how many they are."""
    start, later = run.start_up_rounds, cost_a_round(run, *names)
    return None if start is None or later is None else float(run.total(names)[:start].sum()) - start * later


def cost_a_round(run: Run, *names: str) -> float | None:
    """The mean cost of a round after the start-up rounds; None as above."""
    spent, start = run.total(names), run.start_up_rounds
    return None if start is None or len(spent) <= start else float(spent[start:].mean())


def cost_of_rounds(run: Run, *names: str, rounds: int = 200) -> float | None:
    """The cost of the first `rounds` rounds. Each that a shorter run lacks is assumed to cost the mean of those after
    the start-up rounds, which is wrong where a method does more every so many rounds; None as above."""
    spent = run.total(names)
    if len(spent) >= rounds:
        return float(spent[:rounds].sum())
    later = cost_a_round(run, *names)
    return None if later is None else float(spent.sum() + (rounds - len(spent)) * later)


def seconds_200(run: Run, phases: Sequence[str] = PHASES) -> float | None:
    """Seconds of 200 rounds in some phases; of selection: by the server, and by clients to answer its requests."""
    return cost_of_rounds(run, *(f"seconds_{phase}" for phase in phases))


def selection_overhead(run: Run) -> float | None:
    """Seconds spent on selection, by the server and by clients for it, divided by those of all other phases."""
    choosing, rest = total_cost(run, *PHASE_SECONDS[:2]), total_cost(run, *PHASE_SECONDS[2:])
    return choosing / rest if rest else None


MEASURES: Mapping[str, Callable[..., float | None]] = {
    "accuracy": partial(accuracy_around, width=1),
    "accuracy_around": accuracy_around,
    "bytes_to": bytes_to,
    "choosing_seconds_200": partial(seconds_200, phases=("select", "ask")),
    "final_accuracy": final_accuracy,
    "fluctuation": fluctuation,
    "gain_after": gain_after,
    "mean_accuracy": mean_accuracy,
    "mean_selections": lambda run: float(run.selections.mean()),
    "most_selections": lambda run: float(run.selections.max()),
    "num_clients": partial(of_sizes, of=len),
    "participation": participation,
    "participation_rise": participation_rise,
    "peak_distance": lambda run, selections: abs(peak_selections(run) - selections),
    "peak_height": lambda run: float(np.bincount(run.selections).max()),  # clients at the mode
    "peak_selections": peak_selections,
    "rounds_to": rounds_to,
    "rounds_to_cover": rounds_to_cover,
    "samples_deviation": partial(of_sizes, of=np.std),  # divisor N
    "samples_mean": partial(of_sizes, of=np.mean),
    "samples_total": partial(of_sizes, of=np.sum),
    "seconds_200": seconds_200,
    "selection_gini": selection_gini,
    "selection_overhead": selection_overhead,
    "simulated_seconds_to": simulated_seconds_to,
    "speed": lambda run: None if (value := seconds_200(run)) is None else -value,
    "steadiness": lambda run: None if (value := fluctuation(run)) is None else -value,
    **{f"{KEY}_{name}": partial(client_accuracy, aggregate=name) for name in AGGREGATES},
}
FIRST_ROUND_MEASURES = ("rounds_to_cover", "rounds_to")
"""Of the first round in which something happens; no value means that it never happened in the run."""
COUNT_MEASURES = ("most_selections", "mean_selections", "peak_selections")
"""They cannot exceed the number of rounds."""
SHARES = ("final_accuracy", "mean_accuracy", "accuracy", "accuracy_around", "participation")


def base_name(measure: str) -> str:
    return measure.partition("@")[0]


def bounds_of(measure: str) -> tuple[float, float]:
    return UNIT if base_name(measure) in SHARES or measure.startswith(KEY) else UNBOUNDED


def find_measure(text: str) -> Measure:
    """The measure with a name such as `final_accuracy` or `accuracy@0.15`. Raises KeyError."""
    name, _, argument = text.partition("@")
    measure = MEASURES[name]
    return (lambda run: measure(run, float(argument))) if argument else measure


def values_of(group: Group, measure: Measure) -> list[float]:
    """A measure of those of the group's finished runs for which it exists."""
    return [value for run in group.complete if (value := measure(run)) is not None]


def values_by_seed(group: Group, measure: str) -> dict[Seeds, float]:
    """The same by their seeds, of a measure's name."""
    found = find_measure(measure)
    return {run.seeds: value for run in group.complete if (value := found(run)) is not None}
