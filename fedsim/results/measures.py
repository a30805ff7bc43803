"""Measures: single numbers of a run, by name; nan if the run ended too early or has no such number.

A measure is a function of a run and perhaps of one argument, which follows @ in its name:
`final_accuracy`, `accuracy@0.15`. Costs are sums of recorded quantities: bytes, samples, seconds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from fedsim.core.arrays import Bools, Floats, Ints
from fedsim.core.record import (
    CLIENT_ACCURACY,
    CLIENT_ACCURACY_MEASURES,
    FINAL_WINDOW,
    PHASES,
    mean_of_last,
)
from fedsim.core.rounding import floor
from fedsim.results.runs import Run
from fedsim.results.statistics import UNBOUNDED, UNIT

Measure = Callable[[Run], float]
PHASE_SECONDS = tuple(f"seconds_{phase}" for phase in PHASES)
BYTES = ("bytes_down", "bytes_up")
SAMPLES = ("train_samples", "forward_samples")
SIMULATED = ("simulated_seconds",)
SPENT = {"bytes": BYTES, "samples": SAMPLES, "simulated time": SIMULATED}
"""What reaching an accuracy costs, by the name in tables."""


def is_recorded(runs: Sequence[Run], names: Sequence[str]) -> bool:
    """Return whether all runs have records of rounds with these quantities."""
    for run in runs:
        if not run.rounds.num:
            return False
        for name in names:
            if name not in run.columns or np.isnan(run.columns[name][0]):
                return False
    return True


def spent(run: Run, names: Sequence[str]) -> Floats:
    """Return the sum of quantities in every round [T]; nan in round 1 alone if not recorded."""
    if not is_recorded([run], names):
        return np.array([math.nan])
    return np.sum([run.columns[name] for name in names], 0)


def accuracy_around(run: Run, share: float, width: int = FINAL_WINDOW) -> float:
    """Return the mean test accuracy in a window of `width` rounds, centred on the `share` of all
    rounds, rounded down to a round."""
    middle = floor(share * run.num_rounds)
    first = max(middle - 1 - width // 2, 0)
    return _finite_mean(run.columns["test_accuracy"][first : middle + width // 2])


def final_accuracy(run: Run) -> float:
    """Return the mean test accuracy over those of the last 11 rounds that were evaluated."""
    return _final_mean(run.columns["test_accuracy"])


def last_accuracy(run: Run) -> float:
    """Return the test accuracy after the last round that was evaluated: a single, noisy one."""
    accuracies = _finite(run.columns["test_accuracy"])
    return float(accuracies[-1]) if len(accuracies) else math.nan


def client_accuracy(run: Run, aggregate: str) -> float:
    """Return one of `CLIENT_ACCURACY_MEASURES` over clients: the mean over the last rounds that
    have it."""
    return _final_mean(run.columns.get(f"{CLIENT_ACCURACY}_{aggregate}", np.empty(0)))


def mean_accuracy(run: Run, share: float = 1.0) -> float:
    """Return the mean test accuracy over the first `share` of all rounds (area under the learning
    curve): speed of convergence."""
    return _finite_mean(run.columns["test_accuracy"][: floor(share * run.num_rounds)])


def fluctuation(run: Run) -> float:
    """Return the largest distance of the last 11 accuracies from their mean: the ± of GPFL's
    Table II."""
    accuracies = _finite(run.columns["test_accuracy"][-FINAL_WINDOW:])
    if not len(accuracies):
        return math.nan
    return float(np.abs(accuracies - accuracies.mean()).max())


def gain_after(run: Run, share: float) -> float:
    """Return final accuracy minus the accuracy in a window around the `share` of all rounds."""
    return final_accuracy(run) - accuracy_around(run, share)


def rounds_to_cover(run: Run, share: float = 1.0) -> float:
    """Return the rounds until the `share` of all clients has been selected at least once."""
    return _first_round(run.columns["coverage"] >= share - 1e-9)


def rounds_to(run: Run, target: float) -> float:
    """Return the rounds until the test accuracy first reaches `target`."""
    return _first_round(run.columns["test_accuracy"] >= target)


def spent_to(run: Run, target: float, names: Sequence[str]) -> float:
    """Return the sum of quantities until the test accuracy first reaches `target`."""
    rounds = rounds_to(run, target)
    return math.nan if math.isnan(rounds) else float(spent(run, names)[: int(rounds)].sum())


def accuracy_by_bytes(run: Run, budget: float) -> float:
    """Return the mean test accuracy over the first `budget` bytes sent (area under accuracy against
    bytes).

    The accuracy is 0 before the first evaluation, that of the former between two, and the last one
    where a run ends earlier.
    """
    bytes_sent = spent(run, BYTES)
    if math.isnan(bytes_sent[0]) or not budget > 0:
        return math.nan
    accuracies = run.columns["test_accuracy"]
    is_known = np.isfinite(accuracies)
    starts = np.minimum(np.append(np.cumsum(bytes_sent)[is_known], budget), budget)
    return float(np.diff(starts) @ accuracies[is_known]) / budget


def participation_rise(run: Run) -> float:
    """Return the mean share of clients that upload in the second half of the rounds, minus that in
    the first half."""
    ratios = run.columns["participation_ratio"]
    half = len(ratios) // 2
    return _finite_mean(ratios[half:]) - _finite_mean(ratios[:half])


def imperfect_choices(run: Run) -> float:
    """Return the share of all choices that went to imperfect clients; nan if all are honest."""
    clients = run.rounds.chosen[1]
    if run.imperfect is None or not len(clients):
        return math.nan
    return float(np.isin(clients, run.imperfect).mean())


def imperfect_share(run: Run) -> float:
    """Return the share of the clients that are imperfect; nan if all are honest."""
    return math.nan if run.imperfect is None else len(run.imperfect) / run.num_clients


def peak_selections(run: Run) -> float:
    """Return the mode of the histogram of the clients' numbers of selections (the median if there
    are several modes)."""
    counts = np.bincount(run.selections)
    return float(np.median(np.flatnonzero(counts == counts.max())))


def selection_gini(run: Run) -> float:
    """Return the Gini coefficient of the clients' numbers of selections.

    It is the mean absolute difference of all pairs, divided by twice the mean: 0 if all are equal,
    near 1 if a few have all.
    """
    ordered = np.sort(run.selections.astype(np.float64))
    num = len(ordered)
    weights = 2 * np.arange(1, num + 1) - num - 1
    total = ordered.sum()
    return float(weights @ ordered / (num * total)) if total else 0.0


def total_cost(run: Run, names: Sequence[str]) -> float:
    """Return what the whole run cost, in the sum of quantities."""
    return float(spent(run, names).sum())


def start_up_cost(run: Run, names: Sequence[str]) -> float:
    """Return what the start-up rounds cost; nan if the run did not record how many they are, or
    ended within them."""
    if math.isnan(cost_a_round(run, names)):
        return math.nan
    return float(spent(run, names)[: run.start_up_rounds].sum())


def cost_a_round(run: Run, names: Sequence[str]) -> float:
    """Return the mean cost of a round after the start-up rounds; nan as for `start_up_cost`."""
    costs = spent(run, names)
    start = run.start_up_rounds
    return math.nan if start is None or len(costs) <= start else float(costs[start:].mean())


def cost_of_rounds(run: Run, names: Sequence[str], rounds: int = 200) -> float:
    """Return the cost of the first `rounds` rounds, for judging papers' times of 200 rounds.

    Each round that is missing is assumed to cost the mean of the rounds after the start-up, which
    is wrong where a method does more every so many rounds.
    """
    costs = spent(run, names)
    if len(costs) >= rounds:
        return float(costs[:rounds].sum())
    return float(costs.sum() + (rounds - len(costs)) * cost_a_round(run, names))


def seconds_200(run: Run, phases: Sequence[str] = PHASES) -> float:
    """Return the seconds of 200 rounds in some phases."""
    return sum(cost_of_rounds(run, [f"seconds_{phase}"]) for phase in phases)


def selection_overhead(run: Run) -> float:
    """Return the seconds spent on selection, by the server and by clients for it, divided by those
    of all other phases."""
    selecting = total_cost(run, ["seconds_select", "seconds_ask"])
    remaining = total_cost(run, PHASE_SECONDS) - selecting
    return selecting / remaining if remaining else math.nan


def _of_sizes(statistic: Callable[[Ints], float]) -> Measure:
    """Return the measure that is a statistic of the clients' numbers of training samples [N]; nan
    if the partition was not saved."""

    def measure(run: Run) -> float:
        return math.nan if run.histograms is None else float(statistic(run.histograms.sum(1)))

    return measure


def _final_mean(values: Floats) -> float:
    mean = mean_of_last(values[-FINAL_WINDOW:].tolist())
    return math.nan if mean is None else mean


def _finite(values: Floats) -> Floats:
    return values[np.isfinite(values)]


def _finite_mean(values: Floats) -> float:
    finite = _finite(values)
    return float(finite.mean()) if len(finite) else math.nan


def _first_round(reached: Bools) -> float:
    return float(np.argmax(reached)) + 1 if reached.any() else math.nan


def _start_up_rounds(run: Run) -> float:
    return math.nan if run.start_up_rounds is None else run.start_up_rounds


def _total(name: str) -> Measure:
    return lambda run: float(run.summary["totals"][name])


def _longest(run: Run) -> float:
    return float(max(run.columns.get("seconds_select", ()), default=math.nan))


MEASURES: Mapping[str, Callable[..., float]] = {
    "accuracy": partial(accuracy_around, width=1),  # a single evaluation
    "accuracy_around": accuracy_around,
    "accuracy_by_bytes": accuracy_by_bytes,
    "bytes_down": _total("bytes_down"),
    "bytes_to": partial(spent_to, names=BYTES),
    "bytes_up": _total("bytes_up"),
    "choosing_seconds_200": partial(seconds_200, phases=("select", "ask")),
    "fewest_selections": lambda run: float(run.selections.min()),
    "final_accuracy": final_accuracy,
    "fluctuation": fluctuation,
    "gain_after": gain_after,
    "imperfect_choices": imperfect_choices,
    "imperfect_share": imperfect_share,
    "last_accuracy": last_accuracy,
    "late_a_round": lambda run: _finite_mean(run.columns.get("late", np.empty(0))),
    "longest_selection": _longest,
    "mean_accuracy": mean_accuracy,
    "mean_selections": lambda run: float(run.selections.mean()),
    "median_selections": lambda run: float(np.median(run.selections)),
    "most_selections": lambda run: float(run.selections.max()),
    "never_selected": lambda run: float((run.selections == 0).sum()),
    "num_clients": _of_sizes(len),
    "num_rounds": lambda run: run.num_rounds,
    "participation": lambda run: _finite_mean(run.columns["participation_ratio"]),
    "participation_rise": participation_rise,
    "peak_height": lambda run: float(np.bincount(run.selections).max()),  # clients at the mode
    "peak_selections": peak_selections,
    "rounds_to": rounds_to,
    "rounds_to_cover": rounds_to_cover,
    "samples_deviation": _of_sizes(np.std),  # divisor N
    "samples_to": partial(spent_to, names=SAMPLES),
    "samples_mean": _of_sizes(np.mean),
    "samples_total": _of_sizes(np.sum),
    "seconds_200": seconds_200,
    "selection_gini": selection_gini,
    "selection_overhead": selection_overhead,
    "simulated_seconds_to": partial(spent_to, names=SIMULATED),
    "speed": lambda run: -seconds_200(run),
    "start_up_rounds": _start_up_rounds,
    "steadiness": lambda run: -fluctuation(run),
}
FIRST_ROUND_MEASURES = ("rounds_to_cover", "rounds_to")
"""Measures of the first round in which something happens. nan means that it never happened."""
COUNT_MEASURES = ("most_selections", "mean_selections", "peak_selections")
"""Measures that cannot exceed the number of rounds."""
SHARES = (
    "final_accuracy",
    "mean_accuracy",
    "accuracy",
    "accuracy_around",
    "participation",
    "imperfect_choices",
)
"""Measures that lie between 0 and 1."""
COSTS = {
    "total": total_cost,
    "start_up": start_up_cost,
    "a_round": cost_a_round,
}
"""Measures that are sums of quantities, by the first word of their names: `total:bytes_up`."""


def base_name(measure: str) -> str:
    """Return the name of a measure without its argument."""
    return measure.partition("@")[0]


def bounds_of(measure: str) -> tuple[float, float]:
    """Return where a measure can lie, as far as that is known."""
    is_share = base_name(measure) in SHARES or measure.startswith(CLIENT_ACCURACY)
    return UNIT if is_share else UNBOUNDED


def find_measure(name: str) -> Measure:
    """Return the measure with a name such as `final_accuracy`, `accuracy@0.15`,
    `client_accuracy_mean` or `total:bytes_up,bytes_down`. Raises KeyError."""
    kind, _, quantities = name.partition(":")
    if quantities:
        return partial(COSTS[kind], names=quantities.split(","))
    aggregate = name.removeprefix(f"{CLIENT_ACCURACY}_")
    if aggregate in CLIENT_ACCURACY_MEASURES and aggregate != name:
        return partial(client_accuracy, aggregate=aggregate)
    base, _, argument = name.partition("@")
    measure = MEASURES[base]
    return partial(_with_argument, measure, float(argument)) if argument else measure


def _with_argument(measure: Callable[..., float], argument: float, run: Run) -> float:
    return measure(run, argument)
