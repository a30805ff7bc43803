"""Numbers of one run. None where it did not get that far, or where the number does not exist."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fedsim.communication.ledger import PHASES
from fedsim.report.runs import Floats, Run

FINAL_WINDOW = 11
"""Rounds of the final mean: GPFL prints "last 10"; its published logs agree with the last 11 (report both)."""

Measure = Callable[[Run], float | None]


def accuracy_at(round: int) -> Measure:
    """Test accuracy after that round (1-based), a single evaluation."""
    return lambda run: _at(run.series("test_accuracy"), round)


def accuracy_after(share: float) -> Measure:
    """The same after that share of all rounds, rounded down."""
    return lambda run: accuracy_at(int(share * run.num_rounds))(run)


def accuracy_around(share: float, width: int = FINAL_WINDOW) -> Measure:
    """Mean test accuracy of a window of `width` rounds centred on that share of all rounds."""

    def measure(run: Run) -> float | None:
        round = int(share * run.num_rounds)
        values = run.series("test_accuracy")[max(round - 1 - width // 2, 0) : round + width // 2]
        return _mean(values)

    return measure


def final_accuracy(window: int = FINAL_WINDOW) -> Measure:
    """Mean test accuracy of the last `window` rounds (of those that were evaluated)."""
    return lambda run: _mean(run.series("test_accuracy")[-window:])


def fluctuation(window: int = FINAL_WINDOW) -> Measure:
    """The largest distance of the last rounds' accuracies from their mean: the plus-minus of GPFL's Table II."""

    def measure(run: Run) -> float | None:
        values = run.series("test_accuracy")[-window:]
        values = values[np.isfinite(values)]
        return float(np.abs(values - values.mean()).max()) if len(values) else None

    return measure


def steadiness(window: int = FINAL_WINDOW) -> Measure:
    """Minus the fluctuation: more is better."""

    def measure(run: Run) -> float | None:
        value = fluctuation(window)(run)
        return None if value is None else -value

    return measure


def gain_after(share: float) -> Measure:
    """What the accuracy gains from a window around that share of all rounds to the end."""

    def measure(run: Run) -> float | None:
        early, late = accuracy_around(share)(run), final_accuracy()(run)
        return None if early is None or late is None else late - early

    return measure


def rounds_to_cover(share: float = 1.0) -> Measure:
    """Rounds until that share of all clients was selected at least once."""
    return lambda run: _first(run.series("coverage") >= share - 1e-9)


def rounds_to(target: float) -> Measure:
    """Rounds until the test accuracy first reaches `target`."""
    return lambda run: _first(run.series("test_accuracy") >= target)


def bytes_to(target: float) -> Measure:
    """Bytes, both ways, until the test accuracy first reaches `target`."""

    def measure(run: Run) -> float | None:
        reached = rounds_to(target)(run)
        if reached is None:
            return None
        return float((run.series("bytes_down") + run.series("bytes_up"))[: int(reached)].sum())

    return measure


def mean_participation(run: Run) -> float | None:
    """Mean share of clients that upload."""
    return _mean(run.series("participation_ratio"))


def participation_rise(run: Run) -> float | None:
    """Mean share of clients that upload in the second half of the rounds minus that in the first."""
    ratios = run.series("participation_ratio")
    early, late = _mean(ratios[: len(ratios) // 2]), _mean(ratios[len(ratios) // 2 :])
    return None if early is None or late is None else late - early


def selection_gini(run: Run) -> float | None:
    """Gini coefficient of how often clients were selected: 0 all alike, towards 1 always the same."""
    return gini(run.selections.astype(np.float64))


def most_selections(run: Run) -> float | None:
    """Selections of the client that was selected most."""
    return float(run.selections.max())


def mean_selections(run: Run) -> float | None:
    """How often a client was selected, on average."""
    return float(run.selections.mean())


def peak_selections(run: Run) -> float | None:
    """Where the histogram of selections peaks: how often the most clients alike were selected (ties: the median)."""
    counts = np.bincount(run.selections)
    return float(np.median(np.flatnonzero(counts == counts.max())))


def peak_height(run: Run) -> float | None:
    """Clients at that peak, selected equally often."""
    return float(np.bincount(run.selections).max())


def peak_distance(selections: float) -> Measure:
    """How far that peak lies from so many selections."""
    return lambda run: abs((peak_selections(run) or 0.0) - selections)


def num_clients(run: Run) -> float | None:
    """Clients among which the training samples are divided; None where the partition was not kept."""
    sizes = client_sizes(run)
    return None if sizes is None else float(len(sizes))


def samples_total(run: Run) -> float | None:
    """Training samples that clients hold, all together."""
    sizes = client_sizes(run)
    return None if sizes is None else float(sizes.sum())


def samples_mean(run: Run) -> float | None:
    """Training samples a client."""
    sizes = client_sizes(run)
    return None if sizes is None else float(sizes.mean())


def samples_deviation(run: Run) -> float | None:
    """Their standard deviation over clients (of a population: divided by N)."""
    sizes = client_sizes(run)
    return None if sizes is None else float(sizes.std())


def client_sizes(run: Run) -> NDArray[np.int64] | None:
    """Training samples of each client [N]; None where the partition was not kept."""
    division = run.division()
    return None if division is None else division.histograms.sum(1)


def seconds(phase: str) -> Measure:
    """Seconds of a phase over the whole run."""
    return lambda run: float(run.series(f"seconds_{phase}").sum())


def cost_of_rounds(name: str, rounds: int = 200) -> Measure:
    """What that many rounds cost of a quantity that the records hold for every round (seconds, bytes, samples).

    A run that is long enough gives it as it is. For a shorter one the start-up rounds count once, as they were, and the
    mean of all later ones stands for each round that is missing. None where a run ended during its start-up, or did
    not record how long that lasts.
    """

    def measure(run: Run) -> float | None:
        spent = run.series(name)
        if len(spent) >= rounds:
            return float(spent[:rounds].sum())
        if run.start_up_rounds is None or len(spent) <= run.start_up_rounds:
            return None
        return float(spent.sum() + (rounds - len(spent)) * spent[run.start_up_rounds :].mean())

    return measure


def seconds_200(run: Run) -> float | None:
    """Seconds of 200 rounds, all phases."""
    return _seconds_of_200(run, PHASES)


def choosing_seconds_200(run: Run) -> float | None:
    """Seconds of choosing clients in 200 rounds: the server's, and what clients compute to be chosen."""
    return _seconds_of_200(run, ("select", "ask"))


def speed(run: Run) -> float | None:
    """Minus the seconds of 200 rounds, all phases: more is better."""
    found = seconds_200(run)
    return None if found is None else -found


def _seconds_of_200(run: Run, phases: Sequence[str]) -> float | None:
    spent = [cost_of_rounds(f"seconds_{phase}")(run) for phase in phases]
    return None if None in spent else sum(value for value in spent if value is not None)


def selection_overhead(run: Run) -> float | None:
    """Seconds of choosing clients, the server's and what clients compute to be chosen, over those of all the rest."""
    spent = {phase: seconds(phase)(run) or 0.0 for phase in PHASES}
    chosen = spent.pop("select") + spent.pop("ask")
    rest = sum(spent.values())
    return chosen / rest if rest else None


def gini(values: Floats) -> float:
    """Mean absolute difference of all pairs over twice the mean."""
    ordered = np.sort(values)
    total = ordered.sum()
    if not total:
        return 0.0
    ranks = np.arange(1, len(ordered) + 1)
    return float((2 * ranks - len(ordered) - 1) @ ordered / (len(ordered) * total))


def label_histograms(run: Run) -> NDArray[np.int64] | None:
    """Training samples of each class per client [N, C]; None where the partition was not kept."""
    division = run.division()
    return None if division is None else division.histograms


def _at(values: Floats, round: int) -> float | None:
    if not 1 <= round <= len(values) or math.isnan(values[round - 1]):
        return None
    return float(values[round - 1])


def _mean(values: Floats) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def _first(reached: NDArray[np.bool_]) -> float | None:
    return float(np.argmax(reached)) + 1 if reached.any() else None
