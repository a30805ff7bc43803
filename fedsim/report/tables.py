"""The tables of a report: results, accuracy by client, paired differences, times and traffic, the simulated clock.

Columns are lists of a name, a measure, and how a group's values of it are shown.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from fedsim.core.record import AGGREGATES, FINAL_WINDOW, KEY, PHASES
from fedsim.results import measures
from fedsim.results.groups import REFERENCE, Group, Panel
from fedsim.results.measures import (
    PHASE_SECONDS,
    Measure,
    cost_a_round,
    find_measure,
    one_time_cost,
    total_cost,
    values_by_seed,
)
from fedsim.results.runs import Run, Seeds
from fedsim.results.statistics import UNIT, Difference, half_width_in_sd, holm, paired_values, pooled
from fedsim.results.table import (
    Table,
    estimate_measure,
    median_reached,
    number,
    show_estimate,
    show_interval,
    show_median_reached,
    show_p,
    show_seeds,
)
from fedsim.tracking.tables import show_bytes, show_seconds

Format = str | Callable[[float], str]
Column = tuple[str, Measure, Callable[[Group, Measure], str]]


def _cells(group: Group, columns: Sequence[Column]) -> list[str]:
    return [show(group, measure) for _, measure, show in columns]


def _names(columns: Sequence[Column]) -> list[str]:
    return [name for name, *_ in columns]


def _accuracy(group: Group, measure: Measure) -> str:
    """The mean of a measure between 0 and 1 with its interval, which is cut there."""
    return show_estimate(estimate_measure(group, measure, UNIT))


def _mean(form: Format) -> Callable[[Group, Measure], str]:
    def show(group: Group, measure: Measure) -> str:
        found = estimate_measure(group, measure)
        return number(None if found is None else found.mean, form)

    return show


def _never_selected(run: Run) -> float:
    return float((run.selections == 0).sum())


def clients(groups: Sequence[Group]) -> Table:
    """Mean, spread and ends of the distribution over clients, as means over seeds, of runs that measured them."""
    columns: list[Column] = [
        *((name.replace("_", " "), find_measure(f"{KEY}_{name}"), _accuracy) for name in AGGREGATES),
        ("clients never selected", _never_selected, _mean(".3g")),
    ]
    rows = [
        [group.name, show_seeds(group), str(group.runs[0].config[KEY]), *_cells(group, columns)]
        for group in groups
        if group.complete and group.runs[0].config.get(KEY)
    ]
    note = (
        f"Accuracy of the global model on each client, the mean of the last {FINAL_WINDOW} rounds of a run, with its"
        " 95 % interval over seeds; every client counts once. std: standard deviation over clients. worst and best"
        " tenth: mean of the tenth of the clients with the lowest and the highest accuracy. never selected: mean of the"
        " clients that had not been selected by then, in runs that had any. measured on: labels: test accuracy of each"
        " class, weighted by the client's labels; test: the client's own test samples; holdout, train: its own samples"
        " of that kind."
    )
    header = ["run", "seeds", "measured on", *_names(columns)]
    return Table("clients", "Accuracy by client", header, rows, note)


FINAL, LAST = f"final accuracy (last {FINAL_WINDOW})", "last round"
"""What tables call the two: the mean of the last rounds, which everything is compared by, and the last one alone."""


def _total(run: Run, name: str) -> float:
    return float(run.summary["totals"][name])


def overview(groups: Sequence[Group]) -> Table:
    """The results and costs of every group, as means over seeds."""
    columns: list[Column] = [
        (FINAL, measures.final_accuracy, _accuracy),
        (LAST, measures.last_accuracy, _accuracy),
        ("fluct.", measures.fluctuation, _mean(".3f")),
        ("covered after", measures.rounds_to_cover, show_median_reached),
        ("Gini", measures.selection_gini, _mean(".3f")),
        ("part.", measures.participation, _mean(".3f")),
        ("down", partial(_total, name="bytes_down"), _mean(show_bytes)),
        ("up", partial(_total, name="bytes_up"), _mean(show_bytes)),
    ]
    rows = [[group.name, show_seeds(group), *_cells(group, columns)] for group in groups]
    note = (
        f"Final accuracy: mean of the last {FINAL_WINDOW} rounds of a run, with its 95 % interval over seeds (Student's"
        " t, cut at 0 and 1); all comparisons use it. last round: a single evaluation. fluct.: largest distance of one"
        " of those rounds from their mean. covered after: median round by which every client was selected. part.: mean"
        " share of clients that upload in a round."
    )
    return Table("overview", "Overview", ["run", "seeds", *_names(columns)], rows, note)


def checkpoints(groups: Sequence[Group]) -> Table:
    """Accuracy after 15 % and 50 % of the rounds, of the single round and of a window around it, and at the end."""
    columns: list[Column] = [
        ("15 %", find_measure("accuracy@0.15"), _accuracy),
        ("around 15 %", find_measure("accuracy_around@0.15"), _accuracy),
        ("50 %", find_measure("accuracy@0.5"), _accuracy),
        ("around 50 %", find_measure("accuracy_around@0.5"), _accuracy),
        (FINAL, measures.final_accuracy, _accuracy),
        (LAST, measures.last_accuracy, _accuracy),
    ]
    rows = [[group.name, show_seeds(group), *_cells(group, columns)] for group in groups]
    note = "Single rounds are noisy; 'around' is the mean of eleven rounds centred on the checkpoint."
    return Table("checkpoints", "Accuracy at checkpoints", ["run", "seeds", *_names(columns)], rows, note)


def selections(groups: Sequence[Group]) -> Table:
    """The distribution of the clients' numbers of selections, as means over seeds."""
    columns: list[Column] = [
        ("covered after", measures.rounds_to_cover, show_median_reached),
        ("never", _never_selected, _mean(".3g")),
        ("min", lambda run: float(run.selections.min()), _mean(".3g")),
        ("median", lambda run: float(np.median(run.selections)), _mean(".3g")),
        ("max", lambda run: float(run.selections.max()), _mean(".3g")),
        ("Gini", measures.selection_gini, _mean(".3f")),
    ]
    rows = [[group.name, *_cells(group, columns)] for group in groups if group.complete]
    note = "never: clients that were not selected at all. min to Gini are over clients' numbers of selections."
    return Table("selections", "How often clients were selected", ["run", *_names(columns)], rows, note)


def pairs(panels: Sequence[Panel]) -> Table:
    """Paired differences of every line of a panel to its reference; Holm's correction is over the whole table."""
    compared: list[tuple[str, str, Difference | None]] = [
        (panel.title, f"{line} - {panel.name_of(reference)}", _final_difference(group, reference))
        for panel in panels
        for line, group in panel.lines.items()
        if (reference := _reference(panel, group)) is not group
    ]
    if all(difference is None for _, _, difference in compared):  # nothing to pair, as with one seed
        compared = []
    corrected_p = holm([math.nan if difference is None else difference.p_value for _, _, difference in compared])
    rows = [
        [title, name, *(["-"] + [""] * (2 + len(P_HEADER)) if difference is None else _pair_cells(difference, after))]
        for (title, name, difference), after in zip(compared, corrected_p, strict=True)
    ]
    header = ["", "difference of final accuracy", "mean", "95 % interval", "p (sign flips)", *P_HEADER]
    return Table("pairs", "Paired differences at equal seeds", header, rows, f"{PAIRS_NOTE} {LEVEL_NOTE}")


PAIRS_NOTE = (
    "Intervals and p: Student's t. Holm: corrected for all comparisons of this table. Sign flips: without"
    " assumptions, but n pairs cannot give less than 2 / 2^n, so that fewer than six never fall below .05."
    " detectable: the true difference that as many pairs would show in 80 % of cases; smaller ones cannot be told"
    f" from none here. With n pairs an interval reaches {half_width_in_sd(3):.1f} (n = 3),"
    f" {half_width_in_sd(5):.1f} (5) or {half_width_in_sd(10):.1f} (10) standard deviations to each side; fewer than"
    " 3 pairs decide nothing."
)


def _final_difference(group: Group, reference: Group) -> Difference | None:
    return pooled([_final_by_seed(group, reference)])


def _final_by_seed(group: Group, reference: Group) -> dict[Seeds, float]:
    return paired_values(values_by_seed(group, "final_accuracy"), values_by_seed(reference, "final_accuracy"))


def _reference(panel: Panel, group: Group) -> Group:
    """What a line of a panel is compared with: random selection in its setting, or else the first line.

    The first line, too, where all lines are random selection, as in a sweep over aggregators.
    """
    nothing_else = all(line.choices.get("selector") == REFERENCE for line in panel.lines.values())
    found = None if nothing_else else panel.reference_of(group, REFERENCE)
    return found or panel.reference(REFERENCE)


def _pair_cells(difference: Difference, corrected: float) -> list[str]:
    return [*show_interval(difference), show_p(difference.p_flips), *_p_cells(difference, corrected)]


def pooled_pairs(panels: Sequence[Panel]) -> Table:
    """Differences to the reference, pooled over the divisions of the data at each seed: for lines that all have."""
    settings: dict[str, list[Panel]] = {}
    for panel in panels:
        settings.setdefault(panel.besides_partition, []).append(panel)
    compared = [(title, *found) for title, some in settings.items() if len(some) > 1 for found in _pooled(some)]
    corrected_p = holm([difference.p_value for _, _, difference in compared])
    rows = [
        [title, name, number(difference.strata), *show_interval(difference), *_p_cells(difference, after)]
        for (title, name, difference), after in zip(compared, corrected_p, strict=True)
    ]
    header = ["", "difference of final accuracy", "settings", "mean", "95 % interval", *P_HEADER]
    note = (
        "The mean over the settings' differences, each with the same weight, is taken at each seed first: settings of"
        " one seed are not independent. Intervals and p: Student's t over seeds. Holm: corrected for all rows of this"
        f" table. {LEVEL_NOTE}"
    )
    return Table("pooled", "Paired differences pooled over divisions of the data", header, rows, note)


def _pooled(panels: Sequence[Panel]) -> list[tuple[str, Difference]]:
    """The differences of lines that all panels have, where they are to the same line everywhere."""
    found = []
    for line in panels[0].lines:
        if any(line not in panel.lines for panel in panels):
            continue
        references = [_reference(panel, panel.lines[line]) for panel in panels]
        names = {panel.name_of(reference) for panel, reference in zip(panels, references, strict=True)}
        if len(names) > 1 or line in names:
            continue
        strata = [_final_by_seed(p.lines[line], other) for p, other in zip(panels, references, strict=True)]
        if (difference := pooled(strata)) is not None:
            found.append((f"{line} - {names.pop()}", difference))
    return found


LEVEL_MARGIN = 0.02
LEVEL_NOTE = f"level: p-value of equivalence within +-{LEVEL_MARGIN} (two one-sided tests, not corrected)."
P_HEADER = ["p", "p (Holm)", "level", "pairs", "detectable"]


def _p_cells(difference: Difference, corrected: float) -> list[str]:
    p_values = [show_p(p) for p in (difference.p_value, corrected, difference.p_equivalent(LEVEL_MARGIN))]
    return [*p_values, number(difference.num), number(difference.detectable, ".4f")]


def targets(panels: Sequence[Panel]) -> Table:
    """Rounds and bytes until a run first reaches the mean final accuracy of the reference."""
    rows = []
    for panel in panels:
        level = estimate_measure(panel.reference(REFERENCE), measures.final_accuracy)
        if level is None:
            continue
        for line, group in panel.lines.items():
            rounds = show_median_reached(group, partial(measures.rounds_to, target=level.mean))
            volume = show_median_reached(group, partial(measures.bytes_to, target=level.mean), show_bytes)
            rows.append([panel.title, line, number(level.mean, ".4f"), rounds, volume])
    header = ["", "run", "target", "rounds", "bytes both ways"]
    note = (
        "Target: the mean final accuracy of the panel's reference. Medians over all finished runs; those that never get"
        " there count as beyond."
    )
    return Table("targets", "To a target accuracy", header, rows, note)


LEVELS = (0.9, 0.95, 1.0)
"""Targets as shares of the reference's mean final accuracy."""


def time_to_accuracy(panels: Sequence[Panel]) -> Table:
    """Simulated time until a run first reaches shares of the mean final accuracy of the reference."""
    rows = []
    for panel in panels:
        reference = panel.reference(REFERENCE)
        level = estimate_measure(reference, measures.final_accuracy)
        if level is None or not all(_is_simulated(group) for group in panel.lines.values()):
            continue
        for share in LEVELS:
            target = share * level.mean
            measure = partial(measures.simulated_seconds_to, target=target)
            slowest = median_reached(reference, measure)
            for line, group in panel.lines.items():
                shown = show_median_reached(group, measure, show_seconds)
                rounds = show_median_reached(group, partial(measures.rounds_to, target=target))
                speed_up = _show_ratio(slowest, median_reached(group, measure))
                aims = number(target, ".4f"), number(share, ".0%")
                rows.append([panel.title, line, *aims, shown, speed_up, rounds])
    header = ["", "run", "target", "of the reference's final", "simulated time", "times as fast", "rounds"]
    note = (
        "Medians over all finished runs; those that never get there count as beyond. times as fast: the reference's"
        " median time divided by this one. Simulated time is that of clients' devices and network; what the server"
        " computes takes none."
    )
    return Table("time_to_accuracy", "Simulated time to an accuracy", header, rows, note)


def simulated_phases(groups: Sequence[Group]) -> Table:
    """Simulated time of whole runs beside the measured one, by what the server waited for."""
    rows = []
    for group in groups:
        if not _is_simulated(group):
            continue
        runs = group.complete
        count = runs[0].num_rounds
        total, ask, train = (
            float(np.mean([total_cost(run, f"simulated_seconds{part}") for run in runs]))
            for part in ("", "_ask", "_train")
        )
        late = float(np.mean([sum(len(record["late"]) for record in run.records) for run in runs])) / count
        walls = [wall for run in runs if (wall := run.records[-1].get("wall_seconds")) is not None]
        measured = float(np.mean(walls)) if len(walls) == len(runs) else None
        times = [number(value, show_seconds) for value in (measured, total, ask, train, total / count)]
        rows.append([group.name, number(count), *times, number(late, ".2f")])
    header = ["run", "rounds", "measured", "simulated", "ask", "train", "a round", "late a round"]
    note = (
        "Means over seeds of whole runs. measured: this machine's computing time, all phases. ask: questions before the"
        " selection; train: from the selection until the server went on; the rest of the simulated time are rounds in"
        " which no client could be reached. late: selected clients whose updates did not arrive in time."
    )
    return Table("simulated_phases", "Simulated time by phase", header, rows, note)


def _show_ratio(reference: float | None, own: float | None) -> str:
    return "-" if reference is None or not own else number(reference / own, ".2f")


def _is_simulated(group: Group) -> bool:
    return bool(group.complete) and all(measures.is_simulated(run) for run in group.complete)


BYTES = ("bytes_down", "bytes_up")
SAMPLES = ("train_samples", "forward_samples")


def costs(groups: Sequence[Group]) -> Table:
    """What the runs cost as they are, and what of it the start-up and each later round take."""
    columns: list[tuple[str, Callable[..., float | None], Sequence[str], Format]] = [
        ("time", total_cost, PHASE_SECONDS, show_seconds),
        ("down", total_cost, ["bytes_down"], show_bytes),
        ("up", total_cost, ["bytes_up"], show_bytes),
        ("samples", total_cost, SAMPLES, ",.0f"),
        ("one-time bytes", one_time_cost, BYTES, show_bytes),
        ("one-time time", one_time_cost, PHASE_SECONDS, _show_signed_seconds),
        ("bytes a round", cost_a_round, BYTES, show_bytes),
        ("time a round", cost_a_round, PHASE_SECONDS, show_seconds),
    ]
    rows = []
    for group, runs in _groups_with_records(groups, (*SAMPLES, *PHASE_SECONDS)):
        cells = [_mean_of_all(runs, measure, names, show) for _, measure, names, show in columns]
        rows.append([group.name, number(runs[0].num_rounds), number(runs[0].start_up_rounds), *cells])
    note = (
        "Means over seeds of whole runs. samples: those that clients trained on or passed forward. one-time: what the"
        " start-up rounds cost beyond as many later ones. a round: mean of the rounds after the start-up. '-' where a"
        " run ended within its start-up. Times mean something only if runs did not share their machine."
    )
    header = ["run", "rounds", "start-up rounds", *(name for name, *_ in columns)]
    return Table("costs", "What the runs cost", header, rows, note)


def phases(groups: Sequence[Group]) -> Table:
    """Seconds of whole runs by phase."""
    rows = []
    for group, runs in _groups_with_records(groups, PHASE_SECONDS):
        names = [PHASE_SECONDS, *([name] for name in PHASE_SECONDS)]
        spent = [_mean_of_all(runs, total_cost, some, show_seconds) for some in names]
        rows.append([group.name, number(runs[0].num_rounds), *spent])
    note = "Means over seeds of whole runs. Times mean something only if runs did not share their machine."
    return Table("phases", "Time by phase", ["run", "rounds", "total", *PHASES], rows, note)


def selection_times(groups: Sequence[Group]) -> Table:
    """Milliseconds per round by phase, and the time of the server's selection relative to that of training."""
    rows = []
    for group, runs in _groups_with_records(groups, PHASE_SECONDS):
        spent = {phase: 1e3 * float(np.mean([_mean_after_first_round(run, phase) for run in runs])) for phase in PHASES}
        share = spent["select"] / spent["train"] if spent["train"] else float("nan")
        worst = 1e3 * max(float(run.series("seconds_select").max()) for run in runs)
        shown = [number(value, ".1f") for value in (*spent.values(), sum(spent.values()))]
        rows.append([group.name, *shown, number(share, ".0%"), number(worst, ".0f")])
    note = (
        "Means over all rounds but the first. select: what the server computes; ask: what clients compute to answer its"
        " questions; train: local training, whoever asked for it. worst: the longest selection of a round, the first"
        " included."
    )
    header = ["run", *PHASES, "all", "select / train", "worst select"]
    return Table("selection_times", "Milliseconds a round", header, rows, note)


def _show_signed_seconds(value: float) -> str:
    return ("-" if value < 0 else "") + show_seconds(abs(value))


def _mean_of_all(runs: Sequence[Run], measure: Callable[..., float | None], names: Sequence[str], form: Format) -> str:
    """The mean of a cost over all runs; '-' if one of them does not have it."""
    values = [value for run in runs if (value := measure(run, *names)) is not None]
    return number(float(np.mean(values)) if len(values) == len(runs) else None, form)


def _groups_with_records(groups: Sequence[Group], names: Sequence[str]) -> Iterator[tuple[Group, list[Run]]]:
    """Groups that have finished runs with records of the quantities `names`, and these runs."""
    for group in groups:
        if runs := [run for run in group.complete if run.records and run.records[0].keys() >= set(names)]:
            yield group, runs


def _mean_after_first_round(run: Run, phase: str) -> float:
    """Mean seconds of a phase in all rounds but the first."""
    values = run.series(f"seconds_{phase}")
    return float(values[1:].mean() if len(values) > 1 else values.mean())
