"""Tables of the results of runs: accuracies, selections, paired differences, costs to a target accuracy."""

import math
from collections.abc import Sequence

import numpy as np

from fedsim.report import measures
from fedsim.report.groups import REFERENCE, Group
from fedsim.report.measures import Measure
from fedsim.report.named_measures import values_by_seed
from fedsim.report.panels import Panel
from fedsim.report.runs import Seeds
from fedsim.report.statistics import Difference, half_width_in_sd, holm, paired_values, pooled
from fedsim.report.tables.formatting import (
    estimate_measure,
    mean_total,
    show_accuracy,
    show_interval,
    show_mean,
    show_median_reached,
    show_p,
    show_seeds,
)
from fedsim.report.tables.table import Table
from fedsim.tracking.final_accuracy import FINAL_WINDOW
from fedsim.tracking.tables import show_bytes

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
