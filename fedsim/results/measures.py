"""Single numbers of a run; None if the run ended too early or the number does not exist.

What runs cost, as single numbers of a run: bytes, samples and seconds; None if the run ended too early to tell.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import floor
from fedsim.core.record import FINAL_WINDOW, KEY, PHASES, last_of, mean_of_last
from fedsim.results.runs import Floats, Run

Measure = Callable[[Run], float | None]


def accuracy_at(round: int) -> Measure:
    """Test accuracy after `round` (1-based), a single evaluation."""
    return lambda run: _value_at(run.series("test_accuracy"), round)


def accuracy_after(share: float) -> Measure:
    """Test accuracy after the `share` of all rounds, rounded down to a round; a single evaluation."""
    return lambda run: accuracy_at(floor(share * run.num_rounds))(run)


def accuracy_around(share: float, width: int = FINAL_WINDOW) -> Measure:
    """Mean test accuracy in a window of `width` rounds centred on the `share` of all rounds."""

    def measure(run: Run) -> float | None:
        round = floor(share * run.num_rounds)
        values = run.series("test_accuracy")[max(round - 1 - width // 2, 0) : round + width // 2]
        return _finite_mean(values)

    return measure


def final_accuracy(window: int = FINAL_WINDOW) -> Measure:
    """Mean test accuracy over those of the last `window` rounds that were evaluated."""
    return lambda run: mean_of_last(run.series("test_accuracy").tolist(), window)


def last_accuracy(run: Run) -> float | None:
    """Test accuracy after the last round that was evaluated: a single, noisy one."""
    return last_of(run.series("test_accuracy").tolist())


def client_accuracy(aggregate: str, window: int = FINAL_WINDOW) -> Measure:
    """An aggregate over clients (`fedsim.core.record.AGGREGATES`): the mean over the last `window` rounds
    that have it; None for runs that did not measure it."""
    name = f"{KEY}_{aggregate}"
    return lambda run: mean_of_last([record.get(name) for record in run.records], window)


def mean_accuracy(share: float = 1.0) -> Measure:
    """Mean test accuracy over the first `share` of all rounds (area under the learning curve): speed of convergence."""
    return lambda run: _finite_mean(run.series("test_accuracy")[: floor(share * run.num_rounds)])


def fluctuation(window: int = FINAL_WINDOW) -> Measure:
    """Largest distance of the last `window` accuracies from their mean: the ± of GPFL's Table II."""

    def measure(run: Run) -> float | None:
        values = run.series("test_accuracy")[-window:]
        values = values[np.isfinite(values)]
        return float(np.abs(values - values.mean()).max()) if len(values) else None

    return measure


def steadiness(window: int = FINAL_WINDOW) -> Measure:
    """The negative fluctuation, so that a higher value is better."""

    def measure(run: Run) -> float | None:
        value = fluctuation(window)(run)
        return None if value is None else -value

    return measure


def gain_after(share: float) -> Measure:
    """Final accuracy minus the accuracy in a window around the `share` of all rounds."""

    def measure(run: Run) -> float | None:
        early, late = accuracy_around(share)(run), final_accuracy()(run)
        return None if early is None or late is None else late - early

    return measure


def rounds_to_cover(share: float = 1.0) -> Measure:
    """Rounds until the `share` of all clients has been selected at least once."""
    return lambda run: _first_round(run.series("coverage") >= share - 1e-9)


def rounds_to(target: float) -> Measure:
    """Rounds until the test accuracy first reaches `target`."""
    return lambda run: _first_round(run.series("test_accuracy") >= target)


def bytes_to(target: float) -> Measure:
    """Bytes in both directions until the test accuracy first reaches `target`."""

    def measure(run: Run) -> float | None:
        reached = rounds_to(target)(run)
        if reached is None:
            return None
        return float((run.series("bytes_down") + run.series("bytes_up"))[: int(reached)].sum())

    return measure


def simulated_seconds_to(target: float) -> Measure:
    """Seconds on the simulated clock until the test accuracy first reaches `target`; None without such a clock."""

    def measure(run: Run) -> float | None:
        reached = rounds_to(target)(run)
        if reached is None or not is_simulated(run):
            return None
        return float(run.series("simulated_seconds")[: int(reached)].sum())

    return measure


def is_simulated(run: Run) -> bool:
    """Whether its rounds have times on the simulated clock."""
    return bool(run.records) and run.records[0].get("simulated_seconds") is not None


def mean_participation(run: Run) -> float | None:
    """Mean share of clients that upload in a round."""
    return _finite_mean(run.series("participation_ratio"))


def participation_rise(run: Run) -> float | None:
    """Mean share of clients that upload in the second half of the rounds, minus that in the first half."""
    ratios = run.series("participation_ratio")
    early, late = _finite_mean(ratios[: len(ratios) // 2]), _finite_mean(ratios[len(ratios) // 2 :])
    return None if early is None or late is None else late - early


def selection_gini(run: Run) -> float | None:
    """Gini coefficient of the clients' numbers of selections: 0 if all are equal, near 1 if few clients have all."""
    return gini(run.selections.astype(np.float64))


def most_selections(run: Run) -> float | None:
    """Number of selections of the client that was selected most often."""
    return float(run.selections.max())


def mean_selections(run: Run) -> float | None:
    """Mean number of selections per client."""
    return float(run.selections.mean())


def peak_selections(run: Run) -> float | None:
    """The mode of the histogram of the clients' numbers of selections (the median if there are several modes)."""
    counts = np.bincount(run.selections)
    return float(np.median(np.flatnonzero(counts == counts.max())))


def peak_height(run: Run) -> float | None:
    """Number of clients at the mode of the histogram of selections."""
    return float(np.bincount(run.selections).max())


def peak_distance(selections: float) -> Measure:
    """Distance of the mode of the histogram of selections from `selections`."""
    return lambda run: abs((peak_selections(run) or 0.0) - selections)


def num_clients(run: Run) -> float | None:
    """Number of clients in the partition; None if the partition was not saved."""
    sizes = client_sizes(run)
    return None if sizes is None else float(len(sizes))


def samples_total(run: Run) -> float | None:
    """Training samples of all clients; None if the partition was not saved."""
    sizes = client_sizes(run)
    return None if sizes is None else float(sizes.sum())


def samples_mean(run: Run) -> float | None:
    """Mean number of training samples per client; None if the partition was not saved."""
    sizes = client_sizes(run)
    return None if sizes is None else float(sizes.mean())


def samples_deviation(run: Run) -> float | None:
    """Standard deviation over clients (divisor N) of the number of training samples; None if there is no partition."""
    sizes = client_sizes(run)
    return None if sizes is None else float(sizes.std())


def client_sizes(run: Run) -> NDArray[np.int64] | None:
    """Number of training samples of each client [N]; None if the partition was not saved."""
    return None if run.histograms is None else run.histograms.sum(1)


def gini(values: Floats) -> float:
    """Gini coefficient: the mean absolute difference of all pairs divided by twice the mean; 0 if all values are 0."""
    ordered = np.sort(values)
    total = ordered.sum()
    if not total:
        return 0.0
    ranks = np.arange(1, len(ordered) + 1)
    return float((2 * ranks - len(ordered) - 1) @ ordered / (len(ordered) * total))


def _value_at(values: Floats, round: int) -> float | None:
    if not 1 <= round <= len(values) or math.isnan(values[round - 1]):
        return None
    return float(values[round - 1])


def _finite_mean(values: Floats) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def _first_round(reached: NDArray[np.bool_]) -> float | None:
    return float(np.argmax(reached)) + 1 if reached.any() else None


def total_cost(*names: str) -> Measure:
    """What the whole run cost, in the sum of recorded quantities (bytes, seconds, samples)."""
    return lambda run: float(_spent(run, names).sum())


def one_time_cost(*names: str) -> Measure:
    """What the start-up rounds cost beyond as many of the later rounds, in the sum of recorded quantities.

    0 if the run has no start-up rounds; None if it ended within them, or did not record how many they are.
    """

    def measure(run: Run) -> float | None:
        parts = _start_up_and_later(run, names)
        return None if parts is None else float(parts[0].sum() - len(parts[0]) * parts[1].mean())

    return measure


def cost_a_round(*names: str) -> Measure:
    """The mean cost of a round after the start-up rounds, in the sum of recorded quantities; None as above."""

    def measure(run: Run) -> float | None:
        parts = _start_up_and_later(run, names)
        return None if parts is None else float(parts[1].mean())

    return measure


def _start_up_and_later(run: Run, names: Sequence[str]) -> tuple[Floats, Floats] | None:
    """The costs of the start-up rounds [S] and of the later ones [T - S]."""
    spent, start = _spent(run, names), run.start_up_rounds
    return None if start is None or len(spent) <= start else (spent[:start], spent[start:])


def _spent(run: Run, names: Sequence[str]) -> Floats:
    spent: Floats = np.stack([run.series(name) for name in names]).sum(0)
    return spent


def seconds(phase: str) -> Measure:
    """Seconds spent in a phase over the whole run."""
    return lambda run: float(run.series(f"seconds_{phase}").sum())


def cost_of_rounds(name: str, rounds: int = 200) -> Measure:
    """The cost of the first `rounds` rounds in a recorded quantity `name` (seconds, bytes, samples).

    For judging papers' times of 200 rounds; tables show what runs did cost. A run that is long enough gives it
    directly. For a shorter one, each missing round is assumed to cost the mean of the rounds after the start-up rounds,
    which is wrong where a method does more every so many rounds. None if a run ended during its start-up or did not
    record how long it lasts.
    """

    def measure(run: Run) -> float | None:
        spent = run.series(name)
        if len(spent) >= rounds:
            return float(spent[:rounds].sum())
        later = cost_a_round(name)(run)
        return None if later is None else float(spent.sum() + (rounds - len(spent)) * later)

    return measure


def seconds_200(run: Run) -> float | None:
    """Seconds of 200 rounds over all phases."""
    return _seconds_of_200(run, PHASES)


def choosing_seconds_200(run: Run) -> float | None:
    """Seconds spent on selection in 200 rounds: by the server, and by clients to answer its requests."""
    return _seconds_of_200(run, ("select", "ask"))


def speed(run: Run) -> float | None:
    """The negative seconds of 200 rounds over all phases, so that a higher value is better."""
    total = seconds_200(run)
    return None if total is None else -total


def _seconds_of_200(run: Run, phases: Sequence[str]) -> float | None:
    spent = [cost_of_rounds(f"seconds_{phase}")(run) for phase in phases]
    return None if None in spent else sum(value for value in spent if value is not None)


def selection_overhead(run: Run) -> float | None:
    """Seconds spent on selection, by the server and by clients for it, divided by those of all other phases."""
    spent = {phase: seconds(phase)(run) or 0.0 for phase in PHASES}
    choosing = spent.pop("select") + spent.pop("ask")
    rest = sum(spent.values())
    return choosing / rest if rest else None
