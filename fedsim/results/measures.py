"""Measures: functions that return a single number of a run. Each has a name.

A measure may have one argument, which follows @ in its name: `final_accuracy`, `accuracy@0.15`. It
returns nan if the run ended too early or has no such number. Quantities are the numbers that a run
records for each round (bytes, samples, seconds). Costs are sums of quantities. N is the number of
clients and T the number of recorded rounds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fedsim.core.arrays import Bools, Floats, Ints
from fedsim.core.record import (
    CLIENT_ACCURACY,
    CLIENT_ACCURACY_MEASURES,
    FINAL_WINDOW,
    PHASES,
    mean_of_last,
    reaches,
)
from fedsim.core.rounding import floor
from fedsim.results.runs import Run
from fedsim.results.statistics import UNBOUNDED, UNIT

Measure = Callable[[Run], float]
"""A function of a run that returns a single number."""
PHASE_SECONDS = tuple(f"seconds_{phase}" for phase in PHASES)
BYTES = ("bytes_down", "bytes_up")
SAMPLES = ("train_samples", "forward_samples")
SIMULATED = ("simulated_seconds",)
UPLOADS = ("participation_ratio",)
"""The number of clients that upload, as a share of all clients."""
ROUNDING = 1e-9
"""Relative tolerance of sums of costs."""
SPENT = {"bytes": BYTES, "samples": SAMPLES, "simulated time": SIMULATED}
"""The costs of reaching an accuracy: quantities by the name of their sum in tables."""


def is_recorded(runs: Sequence[Run], names: Sequence[str]) -> bool:
    """Return whether all runs recorded these quantities. A run without rounds recorded none."""
    for run in runs:
        if not run.rounds.num:
            return False
        for name in names:
            # A quantity is recorded in all rounds or in none, so that round 1 tells.
            if name not in run.columns or np.isnan(run.columns[name][0]):
                return False
    return True


def spent(run: Run, names: Sequence[str]) -> Floats:
    """Return the sum of some quantities in each round [T].

    If one of them was not recorded, the result is a single nan, so that sums over rounds are nan.
    """
    if not is_recorded([run], names):
        return np.array([math.nan])
    return np.sum([run.columns[name] for name in names], 0)


def accuracy_around(run: Run, share: float, width: int = FINAL_WINDOW) -> float:
    """Return the mean test accuracy in a window of `width` rounds.

    The window is centred on round `share` * (number of rounds), rounded down. If `width` is even,
    it has one round more after the centre than before. Rounds without evaluation do not count.
    """
    middle = floor(share * run.num_rounds)  # 1-based
    first = max(middle - (width + 1) // 2, 0)
    return _finite_mean(run.columns["test_accuracy"][first : middle + width // 2])


def final_accuracy(run: Run) -> float:
    """Return the mean test accuracy of the last `run.final_window` rounds. Rounds without
    evaluation do not count."""
    return _final_mean(run.columns["test_accuracy"], run.final_window)


def last_accuracy(run: Run) -> float:
    """Return the test accuracy after the last evaluated round: a single, noisy value."""
    accuracies = _finite(run.columns["test_accuracy"])
    return float(accuracies[-1]) if len(accuracies) else math.nan


def client_accuracy(run: Run, aggregate: str) -> float:
    """Return an aggregate of the clients' accuracies (one of `CLIENT_ACCURACY_MEASURES`), as a mean
    over the rounds of the final accuracy. Rounds without it do not count."""
    values = run.columns.get(f"{CLIENT_ACCURACY}_{aggregate}", np.empty(0))
    return _final_mean(values, run.final_window)


def mean_accuracy(run: Run, share: float = 1.0) -> float:
    """Return the mean test accuracy over the first `share` of all rounds.

    It is the area under the learning curve, and measures the speed of convergence.
    """
    return _finite_mean(run.columns["test_accuracy"][: floor(share * run.num_rounds)])


def fluctuation(run: Run) -> float:
    """Return the largest distance of an accuracy in the rounds of the final accuracy from it.

    GPFL's Table II prints it after ±.
    """
    accuracies = _finite(run.columns["test_accuracy"][-run.final_window :])
    if not len(accuracies):
        return math.nan
    return float(np.abs(accuracies - accuracies.mean()).max())


def gain_after(run: Run, share: float) -> float:
    """Return final accuracy minus the accuracy in an equal window around the `share` of all
    rounds."""
    return final_accuracy(run) - accuracy_around(run, share, run.final_window)


def rounds_to_cover(run: Run, share: float = 1.0) -> float:
    """Return the first round after which at least the `share` of all clients has been selected."""
    return _first_round(run.columns["coverage"] >= share - 1e-9)  # 0.3 may be recorded as 0.29999


def rounds_to(run: Run, target: float) -> float:
    """Return the first round after which a single test accuracy is at least `target`.

    Papers count so. fedsim's own tables use `rounds_until`.
    """
    return _first_round(run.columns["test_accuracy"] >= target)


def rounds_until(run: Run, target: float) -> float:
    """Return the first round at which the mean of the last `run.final_window` rounds is at least
    `target` (`reaches`). A run with `stop_at=target` ends there."""
    accuracies = run.columns["test_accuracy"]
    window = run.final_window
    if not len(accuracies):
        return math.nan
    # `reaches` decides, but only at the rounds whose mean is near the target or above it: for each
    # round it takes longer than all of the means.
    padded = np.concatenate([np.full(window - 1, math.nan), accuracies])
    windows = np.lib.stride_tricks.sliding_window_view(padded, window)
    num_measured = np.isfinite(windows).sum(1)
    means = np.nansum(windows, 1) / np.maximum(num_measured, 1)
    for end in np.flatnonzero(means >= target - ROUNDING) + 1:
        latest = accuracies[max(end - window, 0) : end].tolist()
        if reaches(latest, target, window, run.num_rounds):
            return float(end)
    return math.nan


def cost_until(run: Run, target: float, names: Sequence[str]) -> float:
    """Return the sum of quantities up to the round `rounds_until`."""
    rounds = rounds_until(run, target)
    return math.nan if math.isnan(rounds) else float(spent(run, names)[: int(rounds)].sum())


def cut(run: Run, budget: float, names: Sequence[str]) -> tuple[float, int]:
    """Return the final accuracy that a run would have, and the number of its rounds, if it had
    ended before its cost exceeds a `budget`."""
    num = int((np.cumsum(spent(run, names)) <= budget * (1 + ROUNDING)).sum())
    return _final_mean(run.columns["test_accuracy"][:num], run.final_window), num


def accuracy_by_bytes(run: Run, budget: float) -> float:
    """Return the mean test accuracy over the first `budget` bytes that are sent.

    It is the area under the curve of accuracy against bytes, divided by `budget`. The curve is a
    step function: 0 until the first evaluation, and after each evaluation its accuracy. The last
    accuracy lasts to the end of the budget, also if the run ended before.
    """
    bytes_sent = spent(run, BYTES)
    if math.isnan(bytes_sent[0]) or not budget > 0:
        return math.nan
    accuracies = run.columns["test_accuracy"]
    is_known = np.isfinite(accuracies)
    # Step i begins at edges[i] bytes. Steps beyond the budget have the width 0.
    edges = np.minimum(np.append(np.cumsum(bytes_sent)[is_known], budget), budget)
    return float(np.diff(edges) @ accuracies[is_known]) / budget


def participation_rise(run: Run) -> float:
    """Return the mean share of clients that upload in the second half of the rounds, minus that in
    the first half."""
    ratios = run.columns["participation_ratio"]
    half = len(ratios) // 2
    return _finite_mean(ratios[half:]) - _finite_mean(ratios[:half])


def imperfect_choices(run: Run) -> float:
    """Return the share of all selections that went to imperfect clients; nan if all clients are
    honest."""
    clients = run.rounds.chosen[1]  # row 0 has the rounds
    if run.imperfect is None or not len(clients):
        return math.nan
    return float(np.isin(clients, run.imperfect).mean())


def imperfect_share(run: Run) -> float:
    """Return the share of the N clients that are imperfect; nan if all clients are honest."""
    return math.nan if run.imperfect is None else len(run.imperfect) / run.num_clients


def _of_selections(measure: Callable[[Ints], Any]) -> Measure:
    """Return the measure of the clients' numbers of selections [N] of a run.

    It is nan if the run does not hold who was selected (a compact archive).
    """

    def of_run(run: Run) -> float:
        return float(measure(run.selections)) if is_recorded([run], ["selected"]) else math.nan

    return of_run


def peak_selections(selections: Ints) -> float:
    """Return the number of selections that most clients have.

    It is the mode of the clients' numbers of selections, and the median of the modes if there are
    several.
    """
    num_clients = np.bincount(selections)  # by number of selections
    return float(np.median(np.flatnonzero(num_clients == num_clients.max())))


def selection_gini(selections: Ints) -> float:
    """Return the Gini coefficient of the clients' numbers of selections.

    It is the mean absolute difference of all pairs, divided by twice the mean. It is 0 if all
    numbers are equal, and near 1 if a few clients have all selections.
    """
    # With ascending x_i it is sum((2 i - N - 1) x_i) / (N sum(x_i)).
    ordered = np.sort(selections.astype(np.float64))
    num = len(ordered)
    weights = 2 * np.arange(1, num + 1) - num - 1
    total = ordered.sum()
    return float(weights @ ordered / (num * total)) if total else 0.0


def total_cost(run: Run, names: Sequence[str]) -> float:
    """Return the sum of quantities over all rounds; nan if not recorded."""
    return float(spent(run, names).sum())


def start_up_end(run: Run) -> int | None:
    """Return the last round of the start-up: 0 without one, None if it was not recorded.

    Methods start up with clients. If nobody could be reached in the start-up rounds, the start-up
    ends with the first round in which a client sent or received something.
    """
    if not run.start_up_rounds:
        return run.start_up_rounds
    has_clients = spent(run, BYTES) > 0
    first = int(np.argmax(has_clients)) + 1 if has_clients.any() else run.rounds.num
    return max(run.start_up_rounds, first)


def start_up_cost(run: Run, names: Sequence[str]) -> float:
    """Return the sum of quantities over the start-up rounds.

    Start-up rounds are the initial rounds in which a method does more than later. nan if the run
    did not record the quantities or the number of start-up rounds, or ended during them.
    """
    if math.isnan(cost_a_round(run, names)):
        return math.nan
    return float(spent(run, names)[: start_up_end(run)].sum())


def cost_a_round(run: Run, names: Sequence[str]) -> float:
    """Return the mean cost of a round after the start-up rounds; nan as for `start_up_cost`."""
    costs = spent(run, names)
    start = start_up_end(run)
    return math.nan if start is None or len(costs) <= start else float(costs[start:].mean())


def cost_of_rounds(run: Run, names: Sequence[str], rounds: int = 200) -> float:
    """Return the cost of the first `rounds` rounds.

    Papers print times of 200 rounds. Each round that the run lacks is assumed to cost the mean of
    the rounds after the start-up. This is wrong for methods that do more in some rounds.
    """
    costs = spent(run, names)
    if len(costs) >= rounds:
        return float(costs[:rounds].sum())
    return float(costs.sum() + (rounds - len(costs)) * cost_a_round(run, names))


def seconds_200(run: Run, phases: Sequence[str] = PHASES) -> float:
    """Return the seconds that 200 rounds take in these phases (`cost_of_rounds`)."""
    return sum(cost_of_rounds(run, [f"seconds_{phase}"]) for phase in phases)


def selection_overhead(run: Run) -> float:
    """Return the seconds of selection divided by the seconds of all other phases.

    Selection includes what clients compute for it (phase `ask`). nan if the other phases took no
    time.
    """
    selecting = total_cost(run, ["seconds_select", "seconds_ask"])
    remaining = total_cost(run, PHASE_SECONDS) - selecting
    return selecting / remaining if remaining else math.nan


def _of_sizes(statistic: Callable[[Ints], float]) -> Measure:
    """Return a measure: a statistic of the clients' numbers of training samples [N].

    The measure is nan if the partition was not saved.
    """

    def measure(run: Run) -> float:
        return math.nan if run.histograms is None else float(statistic(run.histograms.sum(1)))

    return measure


def _final_mean(values: Floats, window: int) -> float:
    """Return the mean of the finite values of the last `window` rounds; nan without any."""
    mean = mean_of_last(values[-window:].tolist(), window)
    return math.nan if mean is None else mean


def _finite(values: Floats) -> Floats:
    return values[np.isfinite(values)]


def _finite_mean(values: Floats) -> float:
    """Return the mean of the finite values; nan without any."""
    finite = _finite(values)
    return float(finite.mean()) if len(finite) else math.nan


def _first_round(is_reached: Bools) -> float:
    """Return the first round, from 1, for which `is_reached` [T] is true; nan if none is."""
    return float(np.argmax(is_reached)) + 1 if is_reached.any() else math.nan


def _start_up_rounds(run: Run) -> float:
    """Return the number of start-up rounds; nan if it was not recorded."""
    return math.nan if run.start_up_rounds is None else run.start_up_rounds


def _ended_after(run: Run) -> float:
    """Return the number of rounds of a run that could end earlier by `stop_at`; nan for others."""
    return run.rounds.num if run.config.get("stop_at") else math.nan


def _total(name: str) -> Measure:
    """Return the measure that reads a total of summary.json."""
    return lambda run: float(run.summary["totals"][name])


def _longest_selection(run: Run) -> float:
    """Return the most seconds that the server took to select in a round."""
    return float(max(run.columns.get("seconds_select", ()), default=math.nan))


MEASURES: Mapping[str, Callable[..., float]] = {
    "accuracy": partial(accuracy_around, width=1),  # a single evaluation
    "accuracy_around": accuracy_around,
    "accuracy_by_bytes": accuracy_by_bytes,
    "bytes_down": _total("bytes_down"),
    "bytes_until": partial(cost_until, names=BYTES),
    "bytes_up": _total("bytes_up"),
    "choosing_seconds_200": partial(seconds_200, phases=("select", "ask")),
    "ended_after": _ended_after,
    "fewest_selections": _of_selections(np.min),
    "final_accuracy": final_accuracy,
    "fluctuation": fluctuation,
    "gain_after": gain_after,
    "imperfect_choices": imperfect_choices,
    "imperfect_share": imperfect_share,
    "last_accuracy": last_accuracy,
    "late_a_round": lambda run: _finite_mean(run.columns.get("late", np.empty(0))),
    "longest_selection": _longest_selection,
    "mean_accuracy": mean_accuracy,
    "mean_selections": _of_selections(np.mean),
    "median_selections": _of_selections(np.median),
    "most_selections": _of_selections(np.max),
    "never_selected": _of_selections(lambda selections: (selections == 0).sum()),
    "num_clients": _of_sizes(len),
    "num_rounds": lambda run: run.rounds.num,
    "participation": lambda run: _finite_mean(run.columns["participation_ratio"]),
    "participation_rise": participation_rise,
    # The number of clients at the mode, that is, with `peak_selections` selections.
    "peak_height": _of_selections(lambda selections: np.bincount(selections).max()),
    "peak_selections": _of_selections(peak_selections),
    "rounds_to": rounds_to,
    "rounds_to_cover": rounds_to_cover,
    "rounds_until": rounds_until,
    "samples_deviation": _of_sizes(np.std),  # divisor N
    "samples_mean": _of_sizes(np.mean),
    "samples_total": _of_sizes(np.sum),
    "seconds_200": seconds_200,
    "seconds_until": partial(cost_until, names=PHASE_SECONDS),
    "selection_gini": _of_selections(selection_gini),
    "selection_overhead": selection_overhead,
    "simulated_until": partial(cost_until, names=SIMULATED),
    "speed": lambda run: -seconds_200(run),  # claims compare measures of which more is better
    "start_up_rounds": _start_up_rounds,
    "steadiness": lambda run: -fluctuation(run),
}
"""The function of each measure by its name. An argument after @ is passed after the run."""
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
"""Measures of quantities that the name lists after a colon: `total:bytes_up,bytes_down`."""


def base_name(measure: str) -> str:
    """Return the name of a measure without @ and its argument."""
    return measure.partition("@")[0]


def bounds_of(measure: str) -> tuple[float, float]:
    """Return the smallest and the largest value that a measure can have."""
    is_share = base_name(measure) in SHARES or measure.startswith(CLIENT_ACCURACY)
    return UNIT if is_share else UNBOUNDED


def find_measure(name: str) -> Measure:
    """Return the measure with this name. Raises KeyError if there is none.

    Names are `final_accuracy`, `accuracy@0.15`, `client_accuracy_mean` or
    `total:bytes_up,bytes_down`, for example.
    """
    cost, _, quantities = name.partition(":")
    if quantities:
        return partial(COSTS[cost], names=quantities.split(","))
    aggregate = name.removeprefix(f"{CLIENT_ACCURACY}_")
    if aggregate in CLIENT_ACCURACY_MEASURES and aggregate != name:  # the prefix was there
        return partial(client_accuracy, aggregate=aggregate)
    base, _, argument = name.partition("@")
    measure = MEASURES[base]
    return partial(_with_argument, measure, float(argument)) if argument else measure


def _with_argument(measure: Callable[..., float], argument: float, run: Run) -> float:
    """Return the measure of a run. `partial` fixes the first two parameters, so `run` is last."""
    return measure(run, argument)
