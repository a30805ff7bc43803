"""What a report says of methods over settings (`fedsim.results.ranking`): tables, and a sentence at its head."""

import math
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from fedsim.core.record import KEY
from fedsim.report.tables import MORE, make_table
from fedsim.results.asks import CLASSES
from fedsim.results.curves import is_recorded
from fedsim.results.measures import BYTES, SAMPLES, SIMULATED, accuracy_by_bytes, measured
from fedsim.results.ranking import (
    FEW_BLOCKS,
    Comparison,
    critical_difference,
    friedman,
    mean_cost,
    wins,
)
from fedsim.results.statistics import Ratio
from fedsim.results.table import Cell, Table, Values, median_reached, number, show_interval, show_median_reached, show_p

COSTS = {"bytes": BYTES, "samples": SAMPLES, "simulated time": SIMULATED}
NONE_BETTER = "random: none is better beyond chance"
SITUATIONS = {
    "nothing": ("nothing can be asked of clients", ("nothing",)),
    "losses": ("losses are cheap", ("nothing", "losses")),
    "updates": ("updates or gradients of clients that are not chosen are cheap", ("nothing", "losses", "updates")),
    "label counts": ("clients may tell their label counts", ("nothing", "label counts")),
    "speeds": ("clients tell how fast they are", ("nothing", "speeds")),
}
"""Of a class: when its methods can be used, and the classes that can be used then."""


def _show_ratio(value: Ratio | None) -> str:
    if value is None:
        return "-"
    if value.interval is None:
        return "not defined"
    low, high = value.interval
    return Cell(f"{value.value:+.2f} [{low:+.2f}, {high:+.2f}]", value.value)


def _show_share(values: Values) -> str:
    return show_median_reached(values, "{:.2f}".format)


def over_settings(found: Comparison) -> Table:
    """A row for each method, best first."""
    rows = []
    for method, rank in found.ranks.items():
        cells = ["reference", "", "", "", ""]
        if (verdict := found.verdicts.get(method)) is not None:
            lead = verdict.difference
            told = show_interval(lead) if lead else ["-", ""]
            cells = [verdict.word, *told, show_p(verdict.p_value), show_p(verdict.p_equal)]
        ranks = number(rank, ".2f"), number(found.class_ranks[method], ".2f")
        share = "" if method == found.reference else _show_ratio(found.possible(method))
        rows.append([method, found.classes[method], *ranks, *cells, share, _show_share(found.spent(method, BYTES))])
    header = ["method", "asks for", "mean rank", "in its class", "against random", "difference", "95 % interval"]
    header += ["p (Holm)", "p of equality (Holm)", "share of the possible gain", "bytes to random's final"]
    return make_table("settings", header, rows, tests=_tests(found))


def _tests(found: Comparison) -> str:
    """Friedman's test and the critical difference in words."""
    settings, p_value = len(found.panels), friedman(found.means)
    p = "all are equal" if math.isnan(p_value) else f"p {show_p(p_value)}"
    few = f", which {settings} settings are too few to rely on" if settings < FEW_BLOCKS else ""
    difference = critical_difference(len(found.methods), settings)
    return f"Friedman's test of all ranks being equal over {settings} settings: {p}{few}. Critical difference of mean \
ranks (Nemenyi, 5 %): {difference:.2f}."


def win_matrix(found: Comparison) -> Table:
    shares, (chances, lows, highs) = wins(found.blocks)
    at = {method: found.methods.index(method) for method in found.ranks}
    rows = [
        [
            row,
            *(
                Cell(f"{shares[i, j]:.2f}; {chances[i, j]:.2f} [{lows[i, j]:.2f}, {highs[i, j]:.2f}]", chances[i, j])
                if i != j
                else ""
                for j in at.values()
            ),
        ]
        for row, i in at.items()
    ]
    return make_table("wins", ["method", *at], rows)


def possible_gains(found: Comparison) -> Table:
    """A row for each method, a column for each setting; none without a ceiling."""
    others = [method for method in found.ranks if method != found.reference and found.ceiling]
    rows = [
        [method, *(_show_ratio(found.possible(method, at)) for at in (*range(len(found.panels)), None))]
        for method in others
    ]
    return make_table("possible", ["method", *(panel.title for panel in found.panels), "all settings"], rows)


def costs(found: Comparison) -> Table:
    recorded = _recorded(found)
    areas = found.mean_over_settings(
        lambda own, other: _mean(measured(own, [partial(accuracy_by_bytes, budget=mean_cost(other, BYTES))])[0])
    )
    worst = found.mean_over_settings(lambda own, _: _mean(measured(own, [f"{KEY}_worst_tenth"])[0]))
    rows = []
    for method in found.ranks:
        spent = [_show_share(found.spent(method, COSTS[n], more)) for n in recorded for more in (0.0, MORE)]
        means = [number(None if math.isnan(one[method]) else one[method], ".4f") for one in (areas, worst)]
        rows.append([method, found.classes[method], *spent, *means])
    targets = [f"{name} to {target}" for name in recorded for target in ("random's final", f"{MORE} more")]
    return make_table("settings_costs", ["method", "asks for", *targets, "area over bytes", "worst tenth"], rows)


def bytes_of_random(found: Comparison) -> Mapping[str, float]:
    """The bytes of a method's runs as multiples of those of random selection, mean over settings."""
    return found.mean_over_settings(lambda own, other: mean_cost(own, BYTES) / mean_cost(other, BYTES))


def _mean(values: Values) -> float:
    return float(np.mean([math.nan if value is None else value for value in values]))


def _recorded(found: Comparison) -> list[str]:
    """Names of the costs that all runs of all methods have."""
    runs = [run for method in found.methods for group in found.groups(method) for run in group.complete]
    return [name for name, of in COSTS.items() if is_recorded(runs, of)]


def advice(found: Comparison) -> Table:
    """Which one should I use? What the corrected tests support, for what is known or cheap."""
    rows = [[situation, ", ".join(names) or NONE_BETTER, basis] for situation, names, basis in _advised(found)]
    return make_table("advice", ["if", "use", "of those that are better than random beyond chance"], rows)


def _advised(found: Comparison) -> Iterator[tuple[str, list[str], str]]:
    for name, (situation, usable) in SITUATIONS.items():
        if name in found.classes.values():
            yield situation, [one for one in found.better if found.classes[one] in usable][:3], "the best by mean rank"
    for name, situation in (("bytes", "traffic is dear"), ("simulated time", "devices are slow")):
        if name in _recorded(found):
            spent = {method: median_reached(found.spent(method, COSTS[name])) for method in found.better}
            reached = {method: value for method, value in spent.items() if value is not None and value < math.inf}
            names = sorted(reached, key=reached.__getitem__)[:1]
            yield situation, names, f"the least {name} to the final accuracy of random selection"
    if (imperfect := found.imperfect()) is not None:
        yield "some clients are imperfect (wrong labels, say)", imperfect.better[:3], "in settings with such clients"


def sentence(found: Comparison) -> str:
    """How many methods are better than random selection, and the best of each class."""
    best: dict[str, str] = {}
    for method in found.ranks:
        best.setdefault(found.classes[method], method)
    told = [f"{name}: {best[name]} ({_word(found, best[name])})" for name in sorted(best, key=_order)]
    better, others = len(found.better), len(found.methods) - 1
    many = f"over {len(found.panels)} settings {better} of {others} methods are better than {found.reference}"
    return f"{many} beyond chance; best by what they ask of clients: {'; '.join(told)}"


def _order(name: str) -> int:
    return [*CLASSES, name].index(name)


def _word(found: Comparison, method: str) -> str:
    return "the reference" if method == found.reference else found.verdicts[method].word


def settings_tables(found: Comparison | None) -> tuple[list[Table], list[Table]]:
    """Those at the head of a report, and the others; none if there is nothing to compare."""
    if found is None:
        return [], []
    return [over_settings(found), advice(found)], [win_matrix(found), possible_gains(found), costs(found)]
