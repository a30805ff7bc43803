"""The table of accuracies client by client, of runs that measured them (`client_accuracy`).

Tables of the results of runs: accuracies, selections, paired differences, costs to a target accuracy.

Tables of the simulated clock: time to an accuracy, and where the time of rounds went. Empty without such a clock.

Tables of the time and traffic of runs. Times are meaningful only if the runs did not share their machine.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from fedsim.core.record import AGGREGATES, FINAL_WINDOW, KEY, PHASES
from fedsim.results import measures
from fedsim.results.groups import REFERENCE, Group, Panel
from fedsim.results.measures import Measure, client_accuracy, cost_a_round, one_time_cost, total_cost
from fedsim.results.named_measures import values_by_seed
from fedsim.results.runs import Run, Seeds
from fedsim.results.statistics import Difference, half_width_in_sd, holm, paired_values, pooled
from fedsim.results.table import (
    Table,
    estimate_measure,
    mean_total,
    median_reached,
    show_accuracy,
    show_interval,
    show_mean,
    show_median_reached,
    show_p,
    show_seeds,
)
from fedsim.tracking.tables import show_bytes, show_seconds


def clients(groups: Sequence[Group]) -> Table:
    """Mean, spread and ends of the distribution over clients, as means over seeds."""
    header = ["run", "seeds", "measured on", *(name.replace("_", " ") for name in AGGREGATES), "clients never selected"]
    rows = [
        [
            group.name,
            show_seeds(group),
            str(group.runs[0].config[KEY]),
            *(show_accuracy(group, client_accuracy(name)) for name in AGGREGATES),
            f"{np.mean([(run.selections == 0).sum() for run in group.complete]):.3g}",
        ]
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
    return Table("clients", "Accuracy by client", header, rows, note)


FINAL, LAST = f"final accuracy (last {FINAL_WINDOW})", "last round"
"""What tables call the two: the mean of the last rounds, which everything is compared by, and the last one alone."""


def overview(groups: Sequence[Group]) -> Table:
    """The results and costs of every group, as means over seeds."""
    header = ["run", "seeds", FINAL, LAST, "fluct.", "covered after", "Gini", "part.", "down", "up"]
    rows = [
        [
            group.name,
            show_seeds(group),
            show_accuracy(group, measures.final_accuracy()),
            show_accuracy(group, measures.last_accuracy),
            show_mean(estimate_measure(group, measures.fluctuation())),
            show_median_reached(group, measures.rounds_to_cover(), lambda value: f"{value:.0f}"),
            show_mean(estimate_measure(group, measures.selection_gini)),
            show_mean(estimate_measure(group, measures.mean_participation)),
            *(show_bytes(mean_total(group, name)) if group.complete else "-" for name in ("bytes_down", "bytes_up")),
        ]
        for group in groups
    ]
    note = (
        f"Final accuracy: mean of the last {FINAL_WINDOW} rounds of a run, with its 95 % interval over seeds (Student's"
        " t, cut at 0 and 1); all comparisons use it. last round: a single evaluation. fluct.: largest distance of one"
        " of those rounds from their mean. covered after: median round by which every client was selected. part.: mean"
        " share of clients that upload in a round."
    )
    return Table("overview", "Overview", header, rows, note)


def checkpoints(groups: Sequence[Group]) -> Table:
    """Accuracy after 15 % and 50 % of the rounds, of the single round and of a window around it, and at the end."""
    columns: dict[str, Measure] = {
        "15 %": measures.accuracy_after(0.15),
        "around 15 %": measures.accuracy_around(0.15),
        "50 %": measures.accuracy_after(0.5),
        "around 50 %": measures.accuracy_around(0.5),
        FINAL: measures.final_accuracy(),
        LAST: measures.last_accuracy,
    }
    rows = [[group.name, show_seeds(group), *(show_accuracy(group, m) for m in columns.values())] for group in groups]
    note = "Single rounds are noisy; 'around' is the mean of eleven rounds centred on the checkpoint."
    return Table("checkpoints", "Accuracy at checkpoints", ["run", "seeds", *columns], rows, note)


def selections(groups: Sequence[Group]) -> Table:
    """The distribution of the clients' numbers of selections, as means over seeds."""
    rows = []
    for group in groups:
        counts = [np.array(run.selections, dtype=np.float64) for run in group.complete]
        if not counts:
            continue
        spread = [np.mean([of(c) for c in counts]) for of in (np.min, np.median, np.max, measures.gini)]
        never = np.mean([(c == 0).sum() for c in counts])
        reached = show_median_reached(group, measures.rounds_to_cover(), lambda value: f"{value:.0f}")
        rows.append([group.name, reached, f"{never:.3g}", *(f"{v:.3g}" for v in spread[:-1]), f"{spread[-1]:.3f}"])
    header = ["run", "covered after", "never", "min", "median", "max", "Gini"]
    note = "never: clients that were not selected at all. min to Gini are over clients' numbers of selections."
    return Table("selections", "How often clients were selected", header, rows, note)


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
        [title, name, str(difference.strata), *show_interval(difference), *_p_cells(difference, after)]
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
    return [*p_values, str(difference.num), f"{difference.detectable:.4f}"]


def targets(panels: Sequence[Panel]) -> Table:
    """Rounds and bytes until a run first reaches the mean final accuracy of the reference."""
    rows = []
    for panel in panels:
        level = estimate_measure(panel.reference(REFERENCE), measures.final_accuracy())
        if level is None:
            continue
        for line, group in panel.lines.items():
            rounds = show_median_reached(group, measures.rounds_to(level.mean), lambda value: f"{value:.0f}")
            volume = show_median_reached(group, measures.bytes_to(level.mean), show_bytes)
            rows.append([panel.title, line, f"{level.mean:.4f}", rounds, volume])
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
        level = estimate_measure(reference, measures.final_accuracy())
        if level is None or not all(_is_simulated(group) for group in panel.lines.values()):
            continue
        for share in LEVELS:
            measure = measures.simulated_seconds_to(share * level.mean)
            slowest = median_reached(reference, measure)
            for line, group in panel.lines.items():
                shown = show_median_reached(group, measure, show_seconds)
                rounds = show_median_reached(
                    group, measures.rounds_to(share * level.mean), lambda value: f"{value:.0f}"
                )
                speed_up = _show_ratio(slowest, median_reached(group, measure))
                rows.append([panel.title, line, f"{share * level.mean:.4f}", f"{share:.0%}", shown, speed_up, rounds])
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
        runs = group.complete
        if not _is_simulated(group):
            continue
        totals = {
            name: _mean(runs, name)
            for name in ("simulated_seconds", "simulated_seconds_ask", "simulated_seconds_train")
        }
        count = runs[0].num_rounds
        late = float(np.mean([sum(len(record["late"]) for record in run.records) for run in runs])) / count
        measured = float(np.mean([run.records[-1]["wall_seconds"] for run in runs])) if _has_wall(runs) else None
        shown = "-" if measured is None else show_seconds(measured)
        times = [show_seconds(value) for value in (*totals.values(), totals["simulated_seconds"] / count)]
        rows.append([group.name, str(count), shown, *times, f"{late:.2f}"])
    header = ["run", "rounds", "measured", "simulated", "ask", "train", "a round", "late a round"]
    note = (
        "Means over seeds of whole runs. measured: this machine's computing time, all phases. ask: questions before the"
        " selection; train: from the selection until the server went on; the rest of the simulated time are rounds in"
        " which no client could be reached. late: selected clients whose updates did not arrive in time."
    )
    return Table("simulated_phases", "Simulated time by phase", header, rows, note)


def _show_ratio(reference: float | None, own: float | None) -> str:
    return "-" if reference is None or not own else f"{reference / own:.2f}"


def _is_simulated(group: Group) -> bool:
    return bool(group.complete) and all(measures.is_simulated(run) for run in group.complete)


def _mean(runs: Sequence[Run], name: str) -> float:
    return float(np.mean([run.series(name).sum() for run in runs]))


def _has_wall(runs: Sequence[Run]) -> bool:
    return all(run.records[-1].get("wall_seconds") is not None for run in runs)


BYTES = ("bytes_down", "bytes_up")
SAMPLES = ("train_samples", "forward_samples")
PHASE_SECONDS = tuple(f"seconds_{phase}" for phase in PHASES)


def costs(groups: Sequence[Group]) -> Table:
    """What the runs cost as they are, and what of it the start-up and each later round take."""
    columns: dict[str, tuple[Measure, Callable[[float], str]]] = {
        "time": (total_cost(*PHASE_SECONDS), show_seconds),
        "down": (total_cost("bytes_down"), show_bytes),
        "up": (total_cost("bytes_up"), show_bytes),
        "samples": (total_cost(*SAMPLES), lambda value: f"{value:,.0f}"),
        "one-time bytes": (one_time_cost(*BYTES), show_bytes),
        "one-time time": (one_time_cost(*PHASE_SECONDS), _show_signed_seconds),
        "bytes a round": (cost_a_round(*BYTES), show_bytes),
        "time a round": (cost_a_round(*PHASE_SECONDS), show_seconds),
    }
    rows = []
    for group, runs in _groups_with_records(groups, (*SAMPLES, *PHASE_SECONDS)):
        start = runs[0].start_up_rounds
        cells = [_show_mean_of_all(runs, measure, show) for measure, show in columns.values()]
        rows.append([group.name, str(runs[0].num_rounds), "-" if start is None else str(start), *cells])
    note = (
        "Means over seeds of whole runs. samples: those that clients trained on or passed forward. one-time: what the"
        " start-up rounds cost beyond as many later ones. a round: mean of the rounds after the start-up. '-' where a"
        " run ended within its start-up. Times mean something only if runs did not share their machine."
    )
    return Table("costs", "What the runs cost", ["run", "rounds", "start-up rounds", *columns], rows, note)


def phases(groups: Sequence[Group]) -> Table:
    """Seconds of whole runs by phase."""
    rows = []
    for group, runs in _groups_with_records(groups, PHASE_SECONDS):
        spent = [_show_mean_of_all(runs, total_cost(*n), show_seconds) for n in (PHASE_SECONDS, *zip(PHASE_SECONDS))]
        rows.append([group.name, str(runs[0].num_rounds), *spent])
    note = "Means over seeds of whole runs. Times mean something only if runs did not share their machine."
    return Table("phases", "Time by phase", ["run", "rounds", "total", *PHASES], rows, note)


def selection_times(groups: Sequence[Group]) -> Table:
    """Milliseconds per round by phase, and the time of the server's selection relative to that of training."""
    rows = []
    for group, runs in _groups_with_records(groups, PHASE_SECONDS):
        spent = {phase: 1e3 * float(np.mean([_mean_after_first_round(run, phase) for run in runs])) for phase in PHASES}
        share = spent["select"] / spent["train"] if spent["train"] else float("nan")
        worst = 1e3 * max(float(run.series("seconds_select").max()) for run in runs)
        shown = [f"{value:.1f}" for value in (*spent.values(), sum(spent.values()))]
        rows.append([group.name, *shown, f"{share:.0%}", f"{worst:.0f}"])
    note = (
        "Means over all rounds but the first. select: what the server computes; ask: what clients compute to answer its"
        " questions; train: local training, whoever asked for it. worst: the longest selection of a round, the first"
        " included."
    )
    header = ["run", *PHASES, "all", "select / train", "worst select"]
    return Table("selection_times", "Milliseconds a round", header, rows, note)


def _show_signed_seconds(value: float) -> str:
    return ("-" if value < 0 else "") + show_seconds(abs(value))


def _show_mean_of_all(runs: Sequence[Run], measure: Measure, show: Callable[[float], str]) -> str:
    """The mean over all runs as text; '-' if one of them does not have it."""
    values = [value for run in runs if (value := measure(run)) is not None]
    return show(float(np.mean(values))) if len(values) == len(runs) else "-"


def _groups_with_records(groups: Sequence[Group], names: Sequence[str]) -> Iterator[tuple[Group, list[Run]]]:
    """Groups that have finished runs with records of the quantities `names`, and these runs."""
    for group in groups:
        if runs := [run for run in group.complete if run.records and run.records[0].keys() >= set(names)]:
            yield group, runs


def _mean_after_first_round(run: Run, phase: str) -> float:
    """Mean seconds of a phase in all rounds but the first."""
    values = run.series(f"seconds_{phase}")
    return float(values[1:].mean() if len(values) > 1 else values.mean())
