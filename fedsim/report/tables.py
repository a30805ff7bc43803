"""The tables of a report: results, accuracy by client, paired differences, times and traffic, the simulated clock.

A column of a table with a row a group is its name and what makes the cell of a group.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from fedsim.core.record import AGGREGATES, FINAL_WINDOW, KEY, PHASES
from fedsim.results import measures
from fedsim.results.curves import is_recorded
from fedsim.results.groups import REFERENCE, Group, Panel
from fedsim.results.measures import (
    PHASE_SECONDS,
    Measure,
    cost_a_round,
    find_measure,
    one_time_cost,
    total_cost,
    values_by_seed,
    values_of,
)
from fedsim.results.runs import Run, Seeds
from fedsim.results.statistics import (
    UNIT,
    Difference,
    half_width_in_sd,
    holm,
    paired_values,
    pooled,
    sign_flip_test,
)
from fedsim.results.table import (
    Format,
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

Cells = Callable[[Group], str]
Columns = Mapping[str, Cells]


def _table(name: str, title: str, groups: Sequence[Group], columns: Columns, note: str) -> Table:
    rows = [[group.name, *(cell(group) for cell in columns.values())] for group in groups]
    return Table(name, title, ["run", *columns], rows, note)


def _accuracy(measure: Measure) -> Cells:
    """The mean of a measure between 0 and 1 with its interval, which is cut there."""
    return lambda group: show_estimate(estimate_measure(group, measure, UNIT))


def _mean(measure: Measure, form: Format) -> Cells:
    """The mean over the runs that have the measure."""
    return lambda group: number(float(np.mean(found)) if (found := values_of(group, measure)) else None, form)


def _mean_of_all(measure: Callable[..., float | None], form: Format, *names: str) -> Cells:
    """The mean of a cost in the sum of recorded quantities; '-' if one of the runs does not have it."""

    def cell(group: Group) -> str:
        values = values_of(group, lambda run: measure(run, *names))
        return number(float(np.mean(values)) if len(values) == len(group.complete) else None, form)

    return cell


def _reached(measure: Measure) -> Cells:
    return lambda group: show_median_reached(group, measure)


def _rounds(group: Group) -> str:
    return number(group.complete[0].num_rounds)


def _with_records(groups: Sequence[Group], names: Sequence[str]) -> list[Group]:
    """The groups that have finished runs, all with records of the quantities `names`."""
    return [group for group in groups if group.complete and is_recorded(group.complete, names)]


def _never_selected(run: Run) -> float:
    return float((run.selections == 0).sum())


def clients(groups: Sequence[Group]) -> Table:
    """Mean, spread and ends of the distribution over clients, as means over seeds, of runs that measured them."""
    columns: Columns = {
        "seeds": show_seeds,
        "measured on": lambda group: str(group.runs[0].config[KEY]),
        **{name.replace("_", " "): _accuracy(find_measure(f"{KEY}_{name}")) for name in AGGREGATES},
        "clients never selected": _mean(_never_selected, ".3g"),
    }
    note = (
        f"Accuracy of the global model on each client, the mean of the last {FINAL_WINDOW} rounds of a run, with its"
        " 95 % interval over seeds; every client counts once. std: standard deviation over clients. worst and best"
        " tenth: mean of the tenth of the clients with the lowest and the highest accuracy. never selected: mean of the"
        " clients that had not been selected by then, in runs that had any. measured on: labels: test accuracy of each"
        " class, weighted by the client's labels; test: the client's own test samples; holdout, train: its own samples"
        " of that kind."
    )
    measured = [group for group in groups if group.complete and group.runs[0].config.get(KEY)]
    return _table("clients", "Accuracy by client", measured, columns, note)


FINAL, LAST = f"final accuracy (last {FINAL_WINDOW})", "last round"
"""What tables call the two: the mean of the last rounds, which everything is compared by, and the last one alone."""


def overview(groups: Sequence[Group]) -> Table:
    """The results and costs of every group, as means over seeds."""
    columns: Columns = {
        "seeds": show_seeds,
        FINAL: _accuracy(measures.final_accuracy),
        LAST: _accuracy(measures.last_accuracy),
        "fluct.": _mean(measures.fluctuation, ".3f"),
        "covered after": _reached(measures.rounds_to_cover),
        "Gini": _mean(measures.selection_gini, ".3f"),
        "part.": _mean(measures.participation, ".3f"),
        "down": _mean(lambda run: float(run.summary["totals"]["bytes_down"]), show_bytes),
        "up": _mean(lambda run: float(run.summary["totals"]["bytes_up"]), show_bytes),
    }
    note = (
        f"Final accuracy: mean of the last {FINAL_WINDOW} rounds of a run, with its 95 % interval over seeds (Student's"
        " t, cut at 0 and 1); all comparisons use it. last round: a single evaluation. fluct.: largest distance of one"
        " of those rounds from their mean. covered after: median round by which every client was selected. part.: mean"
        " share of clients that upload in a round."
    )
    return _table("overview", "Overview", groups, columns, note)


def checkpoints(groups: Sequence[Group]) -> Table:
    """Accuracy after 15 % and 50 % of the rounds, of the single round and of a window around it, and at the end."""
    columns: Columns = {
        "seeds": show_seeds,
        "15 %": _accuracy(find_measure("accuracy@0.15")),
        "around 15 %": _accuracy(find_measure("accuracy_around@0.15")),
        "50 %": _accuracy(find_measure("accuracy@0.5")),
        "around 50 %": _accuracy(find_measure("accuracy_around@0.5")),
        FINAL: _accuracy(measures.final_accuracy),
        LAST: _accuracy(measures.last_accuracy),
    }
    note = "Single rounds are noisy; 'around' is the mean of eleven rounds centred on the checkpoint."
    return _table("checkpoints", "Accuracy at checkpoints", groups, columns, note)


def selections(groups: Sequence[Group]) -> Table:
    """The distribution of the clients' numbers of selections, as means over seeds."""
    columns: Columns = {
        "covered after": _reached(measures.rounds_to_cover),
        "never": _mean(_never_selected, ".3g"),
        "min": _mean(lambda run: float(run.selections.min()), ".3g"),
        "median": _mean(lambda run: float(np.median(run.selections)), ".3g"),
        "max": _mean(lambda run: float(run.selections.max()), ".3g"),
        "Gini": _mean(measures.selection_gini, ".3f"),
    }
    note = "never: clients that were not selected at all. min to Gini are over clients' numbers of selections."
    finished = [group for group in groups if group.complete]
    return _table("selections", "How often clients were selected", finished, columns, note)


LEVEL_MARGIN = 0.02
LEVEL_NOTE = f"level: p-value of equivalence within +-{LEVEL_MARGIN} (two one-sided tests, not corrected)."
P_HEADER = ["p", "p (Holm)", "level", "pairs", "detectable"]


def pairs(panels: Sequence[Panel]) -> Table:
    """Paired differences of every line of a panel to its reference; Holm's correction is over the whole table."""
    compared: list[tuple[str, str, Difference | None]] = [
        (panel.title, f"{line} - {panel.name_of(reference)}", pooled([_final_by_seed(group, reference)]))
        for panel in panels
        for line, group in panel.lines.items()
        if (reference := _reference(panel, group)) is not group
    ]
    corrected_p = holm([math.nan if difference is None else difference.p_value for _, _, difference in compared])
    rows: list[list[str]] = []
    for (title, name, difference), after in zip(compared, corrected_p, strict=True):
        cells = ["-"] + [""] * (2 + len(P_HEADER))
        if difference is not None:
            flips = show_p(sign_flip_test(difference.values))
            cells = [*show_interval(difference), flips, *_p_cells(difference, after)]
        rows.append([title, name, *cells])
    if all(difference is None for _, _, difference in compared):  # nothing to pair, as with one seed
        rows = []
    header = ["", "difference of final accuracy", "mean", "95 % interval", "p (sign flips)", *P_HEADER]
    note = (
        "Intervals and p: Student's t. Holm: corrected for all comparisons of this table. Sign flips: without"
        " assumptions, but n pairs cannot give less than 2 / 2^n, so that fewer than six never fall below .05."
        " detectable: the true difference that as many pairs would show in 80 % of cases; smaller ones cannot be told"
        f" from none here. With n pairs an interval reaches {half_width_in_sd(3):.1f} (n = 3),"
        f" {half_width_in_sd(5):.1f} (5) or {half_width_in_sd(10):.1f} (10) standard deviations to each side; fewer"
        f" than 3 pairs decide nothing. {LEVEL_NOTE}"
    )
    return Table("pairs", "Paired differences at equal seeds", header, rows, note)


def _final_by_seed(group: Group, reference: Group) -> dict[Seeds, float]:
    return paired_values(values_by_seed(group, "final_accuracy"), values_by_seed(reference, "final_accuracy"))


def _reference(panel: Panel, group: Group) -> Group:
    """What a line of a panel is compared with: random selection in its setting, or else the first line.

    The first line, too, where all lines are random selection, as in a sweep over aggregators.
    """
    nothing_else = all(line.choices.get("selector") == REFERENCE for line in panel.lines.values())
    found = None if nothing_else else panel.reference_of(group, REFERENCE)
    return found or panel.reference(REFERENCE)


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


def _pooled(panels: Sequence[Panel]) -> Iterator[tuple[str, Difference]]:
    """The differences of lines that all panels have, where they are to the same line everywhere."""
    for line in panels[0].lines:
        if all(line in panel.lines for panel in panels):
            references = [_reference(panel, panel.lines[line]) for panel in panels]
            names = {panel.name_of(reference) for panel, reference in zip(panels, references, strict=True)}
            strata = [_final_by_seed(p.lines[line], other) for p, other in zip(panels, references, strict=True)]
            difference = pooled(strata)
            if len(names) == 1 and line not in names and difference is not None:
                yield f"{line} - {names.pop()}", difference


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
        reference, lines = panel.reference(REFERENCE), panel.lines
        level = estimate_measure(reference, measures.final_accuracy)
        if level is None or len(_with_records(list(lines.values()), ["simulated_seconds"])) < len(lines):
            continue
        for share in LEVELS:
            target = share * level.mean
            measure = partial(measures.simulated_seconds_to, target=target)
            slowest = median_reached(reference, measure)
            for line, group in lines.items():
                shown = show_median_reached(group, measure, show_seconds)
                rounds = show_median_reached(group, partial(measures.rounds_to, target=target))
                own = median_reached(group, measure)
                speed_up = number(slowest / own, ".2f") if own and slowest and max(own, slowest) < math.inf else "-"
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

    def a_round(run: Run) -> float:
        return total_cost(run, "simulated_seconds") / run.num_rounds

    def late_a_round(run: Run) -> float:
        return sum(len(record["late"]) for record in run.records) / run.num_rounds

    columns: Columns = {
        "rounds": _rounds,
        "measured": _mean_of_all(lambda run: run.records[-1].get("wall_seconds"), show_seconds),
        "simulated": _mean_of_all(total_cost, show_seconds, "simulated_seconds"),
        "ask": _mean_of_all(total_cost, show_seconds, "simulated_seconds_ask"),
        "train": _mean_of_all(total_cost, show_seconds, "simulated_seconds_train"),
        "a round": _mean_of_all(a_round, show_seconds),
        "late a round": _mean_of_all(late_a_round, ".2f"),
    }
    note = (
        "Means over seeds of whole runs. measured: this machine's computing time, all phases. ask: questions before the"
        " selection; train: from the selection until the server went on; the rest of the simulated time are rounds in"
        " which no client could be reached. late: selected clients whose updates did not arrive in time."
    )
    timed = _with_records(groups, ["simulated_seconds"])
    return _table("simulated_phases", "Simulated time by phase", timed, columns, note)


BYTES = ("bytes_down", "bytes_up")
SAMPLES = ("train_samples", "forward_samples")


def costs(groups: Sequence[Group]) -> Table:
    """What the runs cost as they are, and what of it the start-up and each later round take."""
    columns: Columns = {
        "rounds": _rounds,
        "start-up rounds": lambda group: number(group.complete[0].start_up_rounds),
        "time": _mean_of_all(total_cost, show_seconds, *PHASE_SECONDS),
        "down": _mean_of_all(total_cost, show_bytes, "bytes_down"),
        "up": _mean_of_all(total_cost, show_bytes, "bytes_up"),
        "samples": _mean_of_all(total_cost, ",.0f", *SAMPLES),
        "one-time bytes": _mean_of_all(one_time_cost, show_bytes, *BYTES),
        "one-time time": _mean_of_all(one_time_cost, _show_signed_seconds, *PHASE_SECONDS),
        "bytes a round": _mean_of_all(cost_a_round, show_bytes, *BYTES),
        "time a round": _mean_of_all(cost_a_round, show_seconds, *PHASE_SECONDS),
    }
    note = (
        "Means over seeds of whole runs. samples: those that clients trained on or passed forward. one-time: what the"
        " start-up rounds cost beyond as many later ones. a round: mean of the rounds after the start-up. '-' where a"
        " run ended within its start-up. Times mean something only if runs did not share their machine."
    )
    return _table("costs", "What the runs cost", _with_records(groups, (*SAMPLES, *PHASE_SECONDS)), columns, note)


def _show_signed_seconds(value: float) -> str:
    return ("-" if value < 0 else "") + show_seconds(abs(value))


def phases(groups: Sequence[Group]) -> Table:
    """Seconds of whole runs by phase."""
    columns: Columns = {
        "rounds": _rounds,
        "total": _mean_of_all(total_cost, show_seconds, *PHASE_SECONDS),
        **{phase: _mean_of_all(total_cost, show_seconds, f"seconds_{phase}") for phase in PHASES},
    }
    note = "Means over seeds of whole runs. Times mean something only if runs did not share their machine."
    return _table("phases", "Time by phase", _with_records(groups, PHASE_SECONDS), columns, note)


def selection_times(groups: Sequence[Group]) -> Table:
    """Milliseconds per round by phase, and the time of the server's selection relative to that of training."""
    rows = []
    for group in _with_records(groups, PHASE_SECONDS):
        runs = group.complete
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


def _mean_after_first_round(run: Run, phase: str) -> float:
    values = run.series(f"seconds_{phase}")
    return float(values[1:].mean() if len(values) > 1 else values.mean())


def all_tables(groups: Sequence[Group], panels: Sequence[Panel]) -> list[Table]:
    """All of these tables."""
    results = [overview(groups), checkpoints(groups)]
    results += [table(panels) for table in (pairs, pooled_pairs, targets, time_to_accuracy)]
    spent = (selections, clients, costs, phases, simulated_phases, selection_times)
    return [*results, *(table(groups) for table in spent)]
