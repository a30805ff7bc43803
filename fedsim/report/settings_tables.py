"""The tables of a report over settings: ranks and verdicts, advice, wins, possible gains, costs."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from fedsim.core.record import CLIENT_ACCURACY
from fedsim.report.headline import listed
from fedsim.report.looks import Look
from fedsim.report.sections import Material, Section
from fedsim.report.table import (
    MISSING,
    Table,
    median_reached,
    show_interval,
    show_p,
    show_reached,
)
from fedsim.report.tables import MORE, make_table
from fedsim.results.frames import measured
from fedsim.results.measures import BYTES, SPENT, accuracy_by_bytes
from fedsim.results.ranking import AT_SERVER, Comparison, mean_cost, rank_tests, wins
from fedsim.results.statistics import UNIT, Estimate, Median, estimate, pooled_values

FEW = 10
"""With fewer settings the distribution of Friedman's statistic is not yet that of chi squared."""
IF_ASKED = {
    "nothing": "nothing can be asked of clients",
    "losses": "losses are cheap",
    "label counts": "clients may tell their label counts",
    "updates": "updates or gradients of everybody are cheap",
    "speeds": "clients tell how fast they are",
}
"""The case in which methods that ask something of clients can be used, by what they ask."""
MOST_ADVISED = 3
"""Largest number of methods that are advised in a case."""


def section(material: Material) -> Section:
    """Return the tables over settings, if there are several."""
    comparison = material.comparison
    if comparison is None:
        return Section()
    ranking = ranks_table(comparison)
    advice = advice_table(comparison)
    others = [wins_table(comparison), possible_table(comparison), costs_table(comparison)]
    return Section(
        [ranking, advice, *others],
        brief=[ranking, advice],
        lines=[over_settings(comparison)],
        plots=lambda: _plots(comparison, material.looks),
        place="overview",
    )


def _plots(comparison: Comparison, looks: Mapping[str, Look]) -> list[Any]:
    from fedsim.report.settings_figures import settings_plots  # here: it imports matplotlib

    return settings_plots(comparison, looks)


def over_settings(comparison: Comparison) -> str:
    """Return a sentence: how many methods are better than random selection, the best method of each
    class, and the methods that are left out. Controls do not count."""
    verdicts = {method: str(lead) for method, lead in comparison.leads.items()}
    verdicts[comparison.reference] = "the reference"
    best_of_class = "; ".join(
        f"{kind}: {method} ({verdicts[method]})" for kind, method in comparison.best.items()
    )
    num_methods = len(comparison.leads) - len(comparison.controls)
    text = (
        f"over {len(comparison.settings)} settings {len(comparison.better)} of {num_methods} "
        f"methods are better than {comparison.reference} beyond chance; best by what they ask for: "
        f"{best_of_class}"
    )
    left_out = listed(f"{method} ({num})" for method, num in comparison.left_out.items())
    return f"{text}; finished in fewer settings, and left out: {left_out}" if left_out else text


def ranks_table(comparison: Comparison) -> Table:
    """Return ranks, and verdicts against random selection."""
    rows = []
    for method, ranks in comparison.ranks.items():
        row: list[Any] = [method, comparison.classes[method], *ranks]
        lead = comparison.leads.get(method)
        if lead is None:
            row += ["reference", *[""] * 8]
        else:
            row.append(str(lead))
            gain = lead.difference
            row += (
                [MISSING, "", "", ""]
                if gain is None
                else [gain.num, gain.mean, gain.interval, gain.p_value]
            )
            row += [lead.corrected, lead.p_value, lead.p_equal, comparison.possible(method)]
        row.append(median_reached(comparison.spent(method, BYTES)))
        rows.append(row)
    header = ["method", "asks for", "rank", "in its class", "verdict", "seeds", "to random"]
    header += [
        "95 % interval",
        "p",
        "interval (Holm)",
        "p (Holm)",
        "p equal (Holm)",
        "of possible gain",
        "bytes",
    ]
    formats = {
        "rank": ".2f",
        "in its class": ".2f",
        "to random": "+.4f",
        "95 % interval": show_interval,
        "interval (Holm)": show_interval,
        "p": show_p,
        "p (Holm)": show_p,
        "p equal (Holm)": show_p,
        "of possible gain": show_ratio,
        "bytes": show_share,
    }
    p_value, critical = rank_tests(comparison.means)
    friedman = f"p {show_p(p_value) or 'not defined'}"
    num = len(comparison.settings)
    if num < FEW:
        friedman += f"; {num} settings are too few to rely on it"
    numbers = {"friedman": friedman, "difference": f"{critical:.2f}"}
    return make_table("settings", header, rows, formats, **numbers)


def advice_table(comparison: Comparison) -> Table:
    """Return which methods to use in which case."""
    none = f"{comparison.reference}: none is better beyond chance"
    rows = []
    for case, methods, criterion in _cases(comparison):
        rows.append([case, ", ".join(methods[:MOST_ADVISED]) or none, criterion])
    return make_table("advice", ["if", "use", "by"], rows)


def _order(kind: str) -> tuple[int, str]:
    """Return the key by which classes of methods are sorted: by what they ask first."""
    first = re.split("[,;]", kind)[0]
    names = list(IF_ASKED)
    return names.index(first) if first in names else len(names), kind


def _cases(comparison: Comparison) -> list[tuple[str, list[str], str]]:
    """Return the rows of the advice: a case, the methods to use in it, and what they are sorted by.

    Only methods with the verdict "better" are advised.
    """
    cases = []
    for kind in sorted(set(comparison.classes.values()), key=_order):
        asked, _, at_server = kind.partition(AT_SERVER)
        words = [IF_ASKED[name] for name in asked.split(", ") if name in IF_ASKED]
        if not words:
            continue
        if at_server:
            words.append(f"the server holds {at_server}")
        allowed = ("nothing", kind)
        methods = [name for name in comparison.better if comparison.classes[name] in allowed]
        cases.append(("; ".join(words), methods, "mean rank"))
    for cost, case in (("bytes", "traffic is dear"), ("simulated time", "devices are slow")):
        medians = {}
        for name in (comparison.reference, *comparison.better):
            reached = median_reached(comparison.spent(name, SPENT[cost]))
            medians[name] = reached.median if reached else math.inf
        if comparison.spent(comparison.reference, SPENT[cost]):
            cheapest = min(medians, key=lambda name: medians[name] or math.inf)
            methods = [cheapest] if comparison.better else []
            cases.append((case, methods, f"least {cost} to random's final accuracy"))
    if imperfect := comparison.imperfect():
        case = "labels are noisy, or clients otherwise imperfect"
        cases.append((case, imperfect.better, "mean rank in such settings"))
    return cases


def wins_table(comparison: Comparison) -> Table:
    """Return how often each method beats each other one."""
    nums = sorted({block.shape[1] for block in comparison.blocks})
    if not nums[0]:
        return make_table("wins", [], [], seeds="0")
    shares, (chances, lows, highs) = wins(comparison.blocks)
    places = {method: comparison.methods.index(method) for method in comparison.ranks}
    rows = []
    for method, i in places.items():
        row: list[Any] = [method]
        for j in places.values():
            cell = chances[i, j].item(), lows[i, j], highs[i, j], shares[i, j]
            row.append("" if i == j else cell)
        rows.append(row)
    seeds = f"{nums[0]} to {nums[-1]}" if len(nums) > 1 else str(nums[0])
    return make_table(
        "wins", ["method", *places], rows, dict.fromkeys(places, _show_win), seeds=seeds
    )


def _show_win(cell: tuple[float, float, float, float]) -> str:
    chance, low, high, share = cell
    return f"{share:.2f}; {chance:.2f} [{low:.2f}, {high:.2f}]"


def possible_table(comparison: Comparison) -> Table:
    """Return the shares of the possible gain, by setting and over all."""
    settings = {title: slice(at, at + 1) for at, title in enumerate(comparison.settings)}
    settings["all"] = slice(None)
    rows = []
    for method in comparison.leads if comparison.ceiling else ():
        shares = [comparison.possible(method, part) for part in settings.values()]
        rows.append([method, *shares])
    return make_table("possible", ["method", *settings], rows, dict.fromkeys(settings, show_ratio))


def costs_table(comparison: Comparison) -> Table:
    """Return what methods spend until they reach accuracies of random selection."""
    targets = {
        f"{kind} to {target}": (names, above)
        for kind, names in SPENT.items()
        for target, above in (("random's final", 0.0), (f"{MORE:g} more", MORE))
    }
    rows = []
    for method in comparison.ranks:
        row: list[Any] = [method, comparison.classes[method]]
        row += [median_reached(comparison.spent(method, *target)) for target in targets.values()]
        areas, worst = [], []
        for lines in comparison.settings.values():
            budget = mean_cost(lines[comparison.reference], BYTES)
            runs = lines[method]
            area = [accuracy_by_bytes(run, budget) for run in runs["run"]]
            areas.append(pd.Series(area, runs.index).dropna())
            worst.append(measured(runs, f"{CLIENT_ACCURACY}_worst_tenth").dropna())
        rows.append([*row, _pooled_mean(areas), _pooled_mean(worst)])
    header = ["method", "asks for", *targets, "area over bytes", "worst tenth"]
    return make_table("settings_costs", header, rows, dict.fromkeys(targets, show_share))


def _pooled_mean(strata: Sequence[pd.Series]) -> Estimate | None:
    return estimate(list(pooled_values(strata)), UNIT)


def show_share(reached: Median | None) -> str:
    """Return a median share of what random selection spends."""
    return show_reached(reached, "{:.2f}".format)


def show_ratio(ratio: tuple[float, float, float] | None) -> str:
    """Return a ratio with its interval."""
    if ratio is None:
        return MISSING
    return "not defined" if math.isnan(ratio[0]) else "{:+.2f} [{:+.2f}, {:+.2f}]".format(*ratio)
