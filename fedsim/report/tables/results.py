"""Tables of the results of runs: accuracies, selections, paired differences, costs to a target accuracy."""

import math
from collections.abc import Sequence

import numpy as np

from fedsim.report import measures
from fedsim.report.groups import REFERENCE, Group
from fedsim.report.measures import Measure
from fedsim.report.panels import Panel
from fedsim.report.statistics import Difference, holm, paired, reach_in_sd
from fedsim.report.tables.formatting import (
    estimate_of,
    seeds_of,
    show_estimate,
    show_interval,
    show_mean,
    show_p,
    show_reached,
    total_of,
)
from fedsim.report.tables.table import Table
from fedsim.report.verdicts.judge import values_of
from fedsim.tracking.console import show_bytes


def overview(groups: Sequence[Group]) -> Table:
    """What every group came to and what it cost, means over seeds."""
    header = ["run", "seeds", "final accuracy", "last 10", "fluct.", "covered after", "Gini", "part.", "down", "up"]
    rows = [
        [
            group.name,
            seeds_of(group),
            show_estimate(estimate_of(group, measures.final_accuracy())),
            show_mean(estimate_of(group, measures.final_accuracy(10))),
            show_mean(estimate_of(group, measures.fluctuation())),
            show_reached(group, measures.rounds_to_cover(), lambda value: f"{value:.0f}"),
            show_mean(estimate_of(group, measures.selection_gini)),
            show_mean(estimate_of(group, measures.mean_participation)),
            *(show_bytes(total_of(group, name)) for name in ("bytes_down", "bytes_up")),
        ]
        for group in groups
    ]
    note = (
        "Final accuracy: mean of the last 11 evaluations, with its 95 % interval over seeds (Student's t). fluct.:"
        " largest distance of one of them from their mean. covered after: median round by which every client was"
        " selected."
    )
    return Table("overview", "Overview", header, rows, note)


def checkpoints(groups: Sequence[Group]) -> Table:
    """Accuracy after 15 % and 50 % of the rounds, single and around, and at the end."""
    columns: dict[str, Measure] = {
        "15 %": measures.accuracy_after(0.15),
        "around 15 %": measures.accuracy_around(0.15),
        "50 %": measures.accuracy_after(0.5),
        "around 50 %": measures.accuracy_around(0.5),
        "last 11": measures.final_accuracy(),
    }
    rows = [
        [group.name, seeds_of(group), *(show_estimate(estimate_of(group, m)) for m in columns.values())]
        for group in groups
    ]
    note = "Single rounds are noisy; 'around' is the mean of eleven rounds centred on the checkpoint."
    return Table("checkpoints", "Accuracy at checkpoints", ["run", "seeds", *columns], rows, note)


def selections(groups: Sequence[Group]) -> Table:
    """How often clients were selected, means over seeds."""
    rows = []
    for group in groups:
        counts = [np.array(run.selections, dtype=np.float64) for run in group.complete]
        if not counts:
            continue
        spread = [np.mean([of(c) for c in counts]) for of in (np.min, np.median, np.max, measures.gini)]
        never = np.mean([(c == 0).sum() for c in counts])
        reached = show_reached(group, measures.rounds_to_cover(), lambda value: f"{value:.0f}")
        rows.append([group.name, reached, f"{never:.3g}", *(f"{v:.3g}" for v in spread[:-1]), f"{spread[-1]:.3f}"])
    header = ["run", "covered after", "never", "min", "median", "max", "Gini"]
    note = "never: clients that were not selected at all. min to Gini are over clients' numbers of selections."
    return Table("selections", "How often clients were selected", header, rows, note)


def pairs(panels: Sequence[Panel]) -> Table:
    """Every line of a panel against its reference, at equal seeds; Holm's correction over the whole table."""
    compared = [
        (panel.title, f"{line} - {panel.name_of(reference)}", _final_difference(group, reference))
        for panel in panels
        for reference in [panel.reference(REFERENCE)]
        for line, group in panel.lines.items()
        if group is not reference
    ]
    together = holm([math.nan if found is None else found.p_value for _, _, found in compared])
    rows = [
        [title, name, *(["-"] + [""] * 6 if found is None else _pair_cells(found, after))]
        for (title, name, found), after in zip(compared, together, strict=True)
    ]
    header = ["", "difference of final accuracy", "mean", "95 % interval"]
    header += ["p", "p (Holm)", "p (sign flips)", "pairs", "detectable"]
    return Table("pairs", "Paired differences at equal seeds", header, rows, PAIRS_NOTE)


PAIRS_NOTE = (
    "Intervals and p: Student's t. Holm: corrected for all comparisons of this table. Sign flips: without"
    " assumptions, but n pairs cannot give less than 2 / 2^n, so that fewer than six never fall below .05."
    " detectable: the true difference that as many pairs would show in 80 % of cases; smaller ones cannot be told"
    f" from none here. With n pairs an interval reaches {reach_in_sd(3):.1f} (n = 3), {reach_in_sd(5):.1f} (5) or"
    f" {reach_in_sd(10):.1f} (10) standard deviations to each side; fewer than 3 pairs decide nothing."
)


def _final_difference(group: Group, reference: Group) -> Difference | None:
    return paired(values_of(group, "final_accuracy"), values_of(reference, "final_accuracy"))


def _pair_cells(found: Difference, corrected: float) -> list[str]:
    p_values = [show_p(p) for p in (found.p_value, corrected, found.p_flips)]
    return [*show_interval(found), *p_values, str(found.num), f"{found.detectable:.4f}"]


def targets(panels: Sequence[Panel]) -> Table:
    """Rounds and bytes until the reference's mean final accuracy is first reached."""
    rows = []
    for panel in panels:
        level = estimate_of(panel.reference(REFERENCE), measures.final_accuracy())
        if level is None:
            continue
        for line, group in panel.lines.items():
            rounds = show_reached(group, measures.rounds_to(level.mean), lambda value: f"{value:.0f}")
            volume = show_reached(group, measures.bytes_to(level.mean), show_bytes)
            rows.append([panel.title, line, f"{level.mean:.4f}", rounds, volume])
    header = ["", "run", "target", "rounds", "bytes both ways"]
    note = (
        "Target: the mean final accuracy of the panel's reference. Medians over all finished runs; those that never get"
        " there count as beyond."
    )
    return Table("targets", "To a target accuracy", header, rows, note)
