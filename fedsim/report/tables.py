"""The tables of a report: results, accuracy by client, paired differences, times and traffic, the simulated clock.

A column of a table with a row a group is its name and what makes the cell of a group.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import yaml

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


LEVEL_MARGIN = 0.02
"""Within which methods are told to be level with each other."""
FILLED = {"window": FINAL_WINDOW, "margin": LEVEL_MARGIN} | {
    name: half_width_in_sd(num) for name, num in (("three", 3), ("five", 5), ("ten", 10))
}
"""The numbers in the texts below tables."""
TEXTS = yaml.safe_load((Path(__file__).parent / "assets" / "tables.yaml").read_text(encoding="utf-8"))


def _table(name: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return Table(name, TEXTS[name]["title"], header, rows, TEXTS[name]["note"].format(**FILLED))


def _by_group(name: str, groups: Sequence[Group], columns: Columns) -> Table:
    rows = [[group.name, *(cell(group) for cell in columns.values())] for group in groups]
    return _table(name, ["run", *columns], rows)


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
    measured = [group for group in groups if group.complete and group.runs[0].config.get(KEY)]
    return _by_group("clients", measured, columns)


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
    return _by_group("overview", groups, columns)


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
    return _by_group("checkpoints", groups, columns)


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
    finished = [group for group in groups if group.complete]
    return _by_group("selections", finished, columns)


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
    return _table("pairs", header, rows)


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
    return _table("pooled", header, rows)


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
    return _table("targets", header, rows)


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
    return _table("time_to_accuracy", header, rows)


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
    timed = _with_records(groups, ["simulated_seconds"])
    return _by_group("simulated_phases", timed, columns)


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
    return _by_group("costs", _with_records(groups, (*SAMPLES, *PHASE_SECONDS)), columns)


def _show_signed_seconds(value: float) -> str:
    return ("-" if value < 0 else "") + show_seconds(abs(value))


def phases(groups: Sequence[Group]) -> Table:
    """Seconds of whole runs by phase."""
    columns: Columns = {
        "rounds": _rounds,
        "total": _mean_of_all(total_cost, show_seconds, *PHASE_SECONDS),
        **{phase: _mean_of_all(total_cost, show_seconds, f"seconds_{phase}") for phase in PHASES},
    }
    return _by_group("phases", _with_records(groups, PHASE_SECONDS), columns)


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
    header = ["run", *PHASES, "all", "select / train", "worst select"]
    return _table("selection_times", header, rows)


def _mean_after_first_round(run: Run, phase: str) -> float:
    values = run.series(f"seconds_{phase}")
    return float(values[1:].mean() if len(values) > 1 else values.mean())


def all_tables(groups: Sequence[Group], panels: Sequence[Panel]) -> list[Table]:
    """All of these tables."""
    results = [overview(groups), checkpoints(groups)]
    results += [table(panels) for table in (pairs, pooled_pairs, targets, time_to_accuracy)]
    spent = (selections, clients, costs, phases, simulated_phases, selection_times)
    return [*results, *(table(groups) for table in spent)]
