"""The tables of a report over settings: ranks and verdicts, advice, wins, shares of the possible
gain, costs."""

import math
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
"""With fewer settings the p-value of Friedman's test is not reliable: the distribution of its
statistic is not yet chi squared."""
IF_ASKED = {
    "nothing": "nothing can be asked of clients",
    "losses": "losses are cheap",
    "label counts": "clients may tell their label counts",
    "updates": "updates or gradients of everybody are cheap",
    "speeds": "clients tell how fast they are",
}
"""The case in which methods that ask something of clients can be used, by what they ask."""
MOST_ADVISED = 3
"""Maximum number of methods that are advised in a case."""


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
    header = ["method", "asks for", "rank", "in its class", "verdict", "seeds", "to random"]
    header += ["95 % interval", "p", "interval (Holm)", "p (Holm)", "p equal (Holm)"]
    header += ["of possible gain", "bytes"]
    formats = {
        "rank": ".2f",
        "in its class": ".2f",
        "to random": "+.4f",
        "95 % interval": show_interval,
        "p": show_p,
        "interval (Holm)": show_interval,
        "p (Holm)": show_p,
        "p equal (Holm)": show_p,
        "of possible gain": show_ratio,
        "bytes": show_share,
    }
    rows = []
    for method, (rank, rank_in_class) in comparison.ranks.items():
        cells: dict[str, Any] = dict.fromkeys(header, "")
        cells |= {
            "method": method,
            "asks for": comparison.classes[method],
            "rank": rank,
            "in its class": rank_in_class,
            "verdict": "reference",
            "bytes": median_reached(comparison.spent(method, BYTES)),
        }
        if method != comparison.reference:
            lead = comparison.leads[method]
            cells |= {
                "verdict": str(lead),
                "seeds": MISSING,
                "interval (Holm)": lead.corrected,
                "p (Holm)": lead.p_value,
                "p equal (Holm)": lead.p_equal,
                "of possible gain": comparison.possible(method),
            }
            if gain := lead.difference:
                cells |= {
                    "seeds": gain.num,
                    "to random": gain.mean,
                    "95 % interval": gain.interval,
                    "p": gain.p_value,
                }
        rows.append(list(cells.values()))
    p_value, critical = rank_tests(comparison.means)
    friedman = f"p {show_p(p_value) or 'not defined'}"
    num_settings = len(comparison.settings)
    if num_settings < FEW:
        friedman += f"; {num_settings} settings are too few to rely on it"
    difference = f"{critical:.2f}"
    return make_table("settings", header, rows, formats, friedman=friedman, difference=difference)


def advice_table(comparison: Comparison) -> Table:
    """Return which methods to use in which case."""
    none = f"{comparison.reference}: none is better beyond chance"
    rows = []
    for case, methods, criterion in _cases(comparison):
        rows.append([case, ", ".join(methods[:MOST_ADVISED]) or none, criterion])
    return make_table("advice", ["if", "use", "by"], rows)


def _cases(comparison: Comparison) -> list[tuple[str, list[str], str]]:
    """Return the rows of the advice: a case, the methods to use in it, and what they are sorted by.

    Only methods with the verdict "better" are advised.
    """
    cases = []
    # 1. What clients may be asked. Methods that ask nothing can be used in each case.
    for main_request in IF_ASKED:
        for kind in sorted(set(comparison.classes.values())):
            asked, _, at_server = kind.partition(AT_SERVER)
            requests = asked.split(", ")
            if requests[0] != main_request:
                continue
            conditions = [IF_ASKED[request] for request in requests]
            if at_server:
                conditions.append(f"the server holds {at_server}")
            allowed = ("nothing", kind)
            methods = [name for name in comparison.better if comparison.classes[name] in allowed]
            cases.append(("; ".join(conditions), methods, "mean rank"))
    # 2. What is dear.
    for cost, case in (("bytes", "traffic is dear"), ("simulated time", "devices are slow")):
        if comparison.spent(comparison.reference, SPENT[cost]):
            methods = [_cheapest(comparison, SPENT[cost])] if comparison.better else []
            cases.append((case, methods, f"least {cost} to random's final accuracy"))
    # 3. Imperfect clients.
    if imperfect := comparison.imperfect():
        case = "labels are noisy, or clients otherwise imperfect"
        cases.append((case, imperfect.better, "mean rank in such settings"))
    return cases


def _cheapest(comparison: Comparison, quantities: Sequence[str]) -> str:
    """Return the method that reaches random selection's final accuracy at the lowest median cost.

    It is random selection or a better method.
    """
    medians = {}
    for method in (comparison.reference, *comparison.better):
        reached = median_reached(comparison.spent(method, quantities))
        # A cost of 0 is that of runs without a simulated clock.
        medians[method] = reached.median if reached and reached.median else math.inf
    return min(medians, key=lambda method: medians[method])


def wins_table(comparison: Comparison) -> Table:
    """Return how often each method beats each other one."""
    num_seeds = sorted({block.shape[1] for block in comparison.blocks})
    if not num_seeds[0]:
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
    seeds = f"{num_seeds[0]} to {num_seeds[-1]}" if len(num_seeds) > 1 else str(num_seeds[0])
    formats = dict.fromkeys(places, _show_win)
    return make_table("wins", ["method", *places], rows, formats, seeds=seeds)


def _show_win(cell: tuple[float, float, float, float]) -> str:
    """Return the share of settings that are won, and the probability of improvement with its
    interval."""
    chance, low, high, share = cell
    return f"{share:.2f}; {chance:.2f} [{low:.2f}, {high:.2f}]"


def possible_table(comparison: Comparison) -> Table:
    """Return the shares of the possible gain, by setting and over all."""
    columns = {title: slice(at, at + 1) for at, title in enumerate(comparison.settings)}
    columns["all"] = slice(None)
    rows = []
    if comparison.ceiling:
        for method in comparison.leads:
            shares = [comparison.possible(method, settings) for settings in columns.values()]
            rows.append([method, *shares])
    return make_table("possible", ["method", *columns], rows, dict.fromkeys(columns, show_ratio))


def costs_table(comparison: Comparison) -> Table:
    """Return what methods spend until they reach accuracies of random selection.

    Two more columns have the area under the curve of accuracy against bytes, and the accuracy on
    the worst tenth of clients.
    """
    targets = {}  # by column: the quantities that are summed, and the accuracy above random's
    for cost, quantities in SPENT.items():
        targets[f"{cost} to random's final"] = quantities, 0.0
        targets[f"{cost} to {MORE:g} more"] = quantities, MORE
    rows = []
    for method in comparison.ranks:
        row: list[Any] = [method, comparison.classes[method]]
        for quantities, above in targets.values():
            row.append(median_reached(comparison.spent(method, quantities, above)))
        areas, worst_tenths = [], []
        for lines in comparison.settings.values():
            runs = lines[method]
            budget = mean_cost(lines[comparison.reference], BYTES)
            area = [accuracy_by_bytes(run, budget) for run in runs["run"]]
            areas.append(pd.Series(area, runs.index).dropna())
            worst_tenths.append(measured(runs, f"{CLIENT_ACCURACY}_worst_tenth").dropna())
        rows.append([*row, _pooled_mean(areas), _pooled_mean(worst_tenths)])
    header = ["method", "asks for", *targets, "area over bytes", "worst tenth"]
    return make_table("settings_costs", header, rows, dict.fromkeys(targets, show_share))


def _pooled_mean(strata: Sequence[pd.Series]) -> Estimate | None:
    """Return the mean over settings and seeds of values by seed, one series for each setting."""
    return estimate(list(pooled_values(strata)), UNIT)


def show_share(reached: Median | None) -> str:
    """Return a median share of what random selection spends."""
    return show_reached(reached, "{:.2f}".format)


def show_ratio(ratio: tuple[float, float, float] | None) -> str:
    """Return a ratio with its interval."""
    if ratio is None:
        return MISSING
    return "not defined" if math.isnan(ratio[0]) else "{:+.2f} [{:+.2f}, {:+.2f}]".format(*ratio)
