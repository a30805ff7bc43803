"""Single numbers of a run, by name; None if the run ended too early or the number does not exist.

A measure is a function of a run and perhaps of one argument, which stands behind @ in its name:
`final_accuracy`, `accuracy@0.15`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

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
from fedsim.results.curves import is_recorded
from fedsim.results.groups import Group, Panel
from fedsim.results.runs import Run, Seeds
from fedsim.results.statistics import (
    MIN_SEEDS,
    UNBOUNDED,
    UNIT,
    Difference,
    Estimate,
    holm,
    paired_values,
    pooled,
)

Measure = Callable[[Run], float | None]
PHASE_SECONDS = tuple(f"seconds_{phase}" for phase in PHASES)
BYTES, SAMPLES, SIMULATED = (
    ("bytes_down", "bytes_up"),
    ("train_samples", "forward_samples"),
    ("simulated_seconds",),
)
SPENT = {"bytes": BYTES, "samples": SAMPLES, "simulated time": SIMULATED}


def accuracy_around(run: Run, share: float, width: int = FINAL_WINDOW) -> float | None:
    """Mean test accuracy in a window of `width` rounds centred on the `share` of all rounds,
    rounded down to one."""
    round = floor(share * run.num_rounds)
    return _finite_mean(
        run.columns["test_accuracy"][max(round - 1 - width // 2, 0) : round + width // 2]
    )


def final_accuracy(run: Run) -> float | None:
    """Mean test accuracy over those of the last 11 rounds that were evaluated."""
    return mean_of_last(run.columns["test_accuracy"][-FINAL_WINDOW:].tolist())


def last_accuracy(run: Run) -> float | None:
    """Test accuracy after the last round that was evaluated: a single, noisy one."""
    values = run.columns["test_accuracy"]
    values = values[np.isfinite(values)]
    return float(values[-1]) if len(values) else None


def client_accuracy(run: Run, aggregate: str) -> float | None:
    """One of `CLIENT_ACCURACY_MEASURES` over clients: the mean over the last rounds that have it; None where it
    was not measured."""
    return mean_of_last(
        run.columns.get(f"{CLIENT_ACCURACY}_{aggregate}", np.empty(0)).tolist(), FINAL_WINDOW
    )


def mean_accuracy(run: Run, share: float = 1.0) -> float | None:
    """Mean test accuracy over the first `share` of all rounds (area under the learning curve):
    speed of convergence."""
    return _finite_mean(run.columns["test_accuracy"][: floor(share * run.num_rounds)])


def fluctuation(run: Run) -> float | None:
    """Largest distance of the last 11 accuracies from their mean: the ± of GPFL's Table II."""
    values = run.columns["test_accuracy"][-FINAL_WINDOW:]
    values = values[np.isfinite(values)]
    return float(np.abs(values - values.mean()).max()) if len(values) else None


def gain_after(run: Run, share: float) -> float | None:
    """Final accuracy minus the accuracy in a window around the `share` of all rounds."""
    early, late = accuracy_around(run, share), final_accuracy(run)
    return None if early is None or late is None else late - early


def rounds_to_cover(run: Run, share: float = 1.0) -> float | None:
    """Rounds until the `share` of all clients has been selected at least once."""
    return _first_round(run.columns["coverage"] >= share - 1e-9)


def rounds_to(run: Run, target: float) -> float | None:
    """Rounds until the test accuracy first reaches `target`."""
    return _first_round(run.columns["test_accuracy"] >= target)


def spent_to(run: Run, target: float, names: Sequence[str]) -> float | None:
    """The sum of quantities until the test accuracy first reaches `target`; None if they were not
    recorded."""
    reached, spent = rounds_to(run, target), _spent(run, names)
    return float(spent[: int(reached)].sum()) if reached is not None and len(spent) else None


def accuracy_by_bytes(run: Run, budget: float) -> float | None:
    """Mean test accuracy over the first `budget` bytes sent (area under accuracy against bytes): 0
    before the first evaluation, between two that of the former, the last one where a run ends
    earlier; None without records of bytes."""
    spent, known = _spent(run, BYTES), np.isfinite(run.columns["test_accuracy"])
    if not len(spent) or budget <= 0:
        return None
    starts = np.minimum(np.append(np.cumsum(spent)[known], budget), budget)
    return float(np.diff(starts) @ run.columns["test_accuracy"][known]) / budget


def participation_rise(run: Run) -> float | None:
    """Mean share of clients that upload in the second half of the rounds, minus that in the first
    half."""
    ratios = run.columns["participation_ratio"]
    early, late = _finite_mean(ratios[: len(ratios) // 2]), _finite_mean(ratios[len(ratios) // 2 :])
    return None if early is None or late is None else late - early


def imperfect_choices(run: Run) -> float | None:
    """The share of all choices that went to imperfect clients; None if all are honest, or nobody
    was chosen."""
    if run.imperfect is None or not len(run.rounds.chosen[1]):
        return None
    return float(np.isin(run.rounds.chosen[1], run.imperfect).mean())


def peak_selections(run: Run) -> float:
    """The mode of the histogram of the clients' numbers of selections (the median if there are
    several modes)."""
    counts = np.bincount(run.selections)
    return float(np.median(np.flatnonzero(counts == counts.max())))


def _of_sizes(of: Callable[[Ints], float]) -> Measure:
    """A statistic of the clients' numbers of training samples [N]; None if the partition was not
    saved."""
    return lambda run: None if run.histograms is None else float(of(run.histograms.sum(1)))


def gini(values: Floats) -> float:
    """Gini coefficient: the mean absolute difference of all pairs divided by twice the mean; 0 if
    all values are equal, near 1 if a few have all."""
    ordered = np.sort(values)
    total = ordered.sum()
    ranks = np.arange(1, len(ordered) + 1)
    return (
        float((2 * ranks - len(ordered) - 1) @ ordered / (len(ordered) * total)) if total else 0.0
    )


def _finite_mean(values: Floats) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def _first_round(reached: Bools) -> float | None:
    return float(np.argmax(reached)) + 1 if reached.any() else None


def _negative(measure: Measure) -> Measure:
    """Of a measure of which less is better."""
    return lambda run: None if (value := measure(run)) is None else -value


def _spent(run: Run, names: Sequence[str]) -> Floats:
    """The sum of quantities in every round, [T]; empty if they were not recorded."""
    return (
        np.sum([run.columns[name] for name in names], 0)
        if is_recorded([run], names)
        else np.empty(0)
    )


def total_cost(run: Run, names: Sequence[str]) -> float | None:
    """What the whole run cost, in the sum of quantities (bytes, seconds, samples); None if they
    were not recorded."""
    spent = _spent(run, names)
    return float(spent.sum()) if len(spent) else None


def start_up_cost(run: Run, names: Sequence[str]) -> float | None:
    """Return what the start-up rounds cost in the sum of recorded quantities: 0 if the run has
    none.

    None if the run did not record how many they are, or ended within them.
    """
    start, later = run.start_up_rounds, cost_a_round(run, names)
    return None if later is None else float(_spent(run, names)[:start].sum())


def cost_a_round(run: Run, names: Sequence[str]) -> float | None:
    """The mean cost of a round after the start-up rounds, in the sum of recorded quantities; None
    as above."""
    spent, start = _spent(run, names), run.start_up_rounds
    return None if start is None or len(spent) <= start else float(spent[start:].mean())


def cost_of_rounds(run: Run, names: Sequence[str], rounds: int = 200) -> float | None:
    """The cost of the first `rounds` rounds in the sum of recorded quantities (seconds, bytes,
    samples).

    For judging papers' times of 200 rounds; tables show what runs did cost. Each round that is
    missing is assumed to cost the mean of those after the start-up, which is wrong where a method
    does more every so many rounds. None if a run ended during its start-up or did not record how
    long it lasts.
    """
    spent = _spent(run, names)
    if len(spent) >= rounds:
        return float(spent[:rounds].sum())
    later = cost_a_round(run, names)
    return None if later is None else float(spent.sum() + (rounds - len(spent)) * later)


def seconds_200(run: Run, phases: Sequence[str] = PHASES) -> float | None:
    """Seconds of 200 rounds in some phases; of selection: by the server, and by clients to answer
    its requests."""
    spent = [cost_of_rounds(run, [f"seconds_{phase}"]) for phase in phases]
    return None if None in spent else sum(value for value in spent if value is not None)


def selection_overhead(run: Run) -> float | None:
    """Seconds spent on selection, by the server and by clients for it, divided by those of all
    other phases."""
    choosing, whole = (
        total_cost(run, names) for names in (["seconds_select", "seconds_ask"], PHASE_SECONDS)
    )
    return (
        None
        if choosing is None or whole is None or whole == choosing
        else choosing / (whole - choosing)
    )


MEASURES: Mapping[str, Callable[..., float | None]] = {
    "accuracy": partial(accuracy_around, width=1),  # a single evaluation
    "accuracy_around": accuracy_around,
    "accuracy_by_bytes": accuracy_by_bytes,
    "bytes_down": lambda run: float(run.summary["totals"]["bytes_down"]),
    "bytes_to": partial(spent_to, names=BYTES),
    "bytes_up": lambda run: float(run.summary["totals"]["bytes_up"]),
    "choosing_seconds_200": partial(seconds_200, phases=("select", "ask")),
    "fewest_selections": lambda run: float(run.selections.min()),
    "final_accuracy": final_accuracy,
    "fluctuation": fluctuation,
    "gain_after": gain_after,
    "imperfect_choices": imperfect_choices,
    "last_accuracy": last_accuracy,
    "late_a_round": lambda run: _finite_mean(run.columns.get("late", np.empty(0))),
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
    "selection_gini": lambda run: gini(run.selections.astype(np.float64)),
    "selection_overhead": selection_overhead,
    "simulated_seconds_to": partial(spent_to, names=SIMULATED),
    "start_up_rounds": lambda run: run.start_up_rounds,
    "speed": _negative(seconds_200),
    "steadiness": _negative(fluctuation),
    **{
        f"{CLIENT_ACCURACY}_{name}": partial(client_accuracy, aggregate=name)
        for name in CLIENT_ACCURACY_MEASURES
    },
}
FIRST_ROUND_MEASURES = ("rounds_to_cover", "rounds_to")
"""Measures of the first round in which something happens; no value means that it never happened in
the run."""
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


def base_name(measure: str) -> str:
    """The name of a measure without its argument."""
    return measure.partition("@")[0]


def bounds_of(measure: str) -> tuple[float, float]:
    """Where a measure can lie, as far as that is known."""
    return (
        UNIT if base_name(measure) in SHARES or measure.startswith(CLIENT_ACCURACY) else UNBOUNDED
    )


def find_measure(text: str) -> Measure:
    """The measure with a name such as `final_accuracy` or `accuracy@0.15`. Raises KeyError."""
    name, _, argument = text.partition("@")
    measure = MEASURES[name]
    return (lambda run: measure(run, float(argument))) if argument else measure


class Preference(NamedTuple):
    """The share of its `choices` that a line gave to imperfect clients, and their share of the
    `clients`. `p_value`: of choosing them no more often than that, one-sided; `corrected`: by Holm
    over all lines; nan below `MIN_SEEDS`."""

    setting: str
    line: str
    choices: Estimate
    clients: float
    p_value: float
    corrected: float = np.nan


def preferences(panels: Iterable[Panel]) -> list[Preference]:
    """Of all lines with imperfect clients."""
    found: list[Preference] = []
    for setting, line, group in (
        (panel.title, *line) for panel in panels for line in panel.lines.items()
    ):
        choices = Estimate(tuple(values_by_seed(group, "imperfect_choices").values()), UNIT)
        if choices.num:
            numbers = [
                len(run.imperfect) / run.num_clients
                for run in group.complete
                if run.imperfect is not None
            ]
            p_value = choices.p_above(numbers[0]) if choices.num >= MIN_SEEDS else np.nan
            found.append(Preference(setting, line, choices, numbers[0], p_value))
    corrected_p = holm([one.p_value for one in found])
    return [one._replace(corrected=after) for one, after in zip(found, corrected_p, strict=True)]


def measured(group: Group, measures: Iterable[str | Measure]) -> list[list[float | None]]:
    """Of each of the `measures`, named or given: its values for the group's finished runs."""
    found = [find_measure(one) if isinstance(one, str) else one for one in measures]
    return [[measure(run) for run in group.complete] for measure in found]


def values_by_seed(group: Group, measure: str | Measure) -> dict[Seeds, float]:
    """A measure, named or given, of the group's finished runs by their seeds, without runs for
    which it does not exist."""
    found = find_measure(measure) if isinstance(measure, str) else measure
    return {run.seeds: value for run in group.complete if (value := found(run)) is not None}


def finals(group: Group) -> dict[Seeds, float]:
    """The final accuracy of the group's finished runs by their seeds."""
    return values_by_seed(group, "final_accuracy")


def mean_final(group: Group) -> float | None:
    """The mean final accuracy; None without finished runs."""
    return float(np.mean(list(finals(group).values()))) if finals(group) else None


def final_lead(group: Group, reference: Group) -> Difference | None:
    """The mean difference of final accuracy at equal seeds."""
    return pooled([paired_values(finals(group), finals(reference))])
