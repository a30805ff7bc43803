"""What a report says first: what was compared, and which method is best in each setting, by paired
differences.

The lead over the next is tested by a two-sided paired t-test, corrected over settings by Holm's
method; that the data chose the two is not corrected for. The lead over random selection is one of
`pairs`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedsim.papers.published import ALPHA
from fedsim.report.tables import to_references
from fedsim.results.groups import CEILING, Group, Panel
from fedsim.results.measures import final_lead, mean_final, preferences
from fedsim.results.ranking import Comparison
from fedsim.results.runs import Run
from fedsim.results.statistics import MIN_SEEDS, Difference, holm
from fedsim.results.table import show_interval, show_p

MOST = 8
"""Values of a fact, and settings, that are listed; of more, their number is told."""

MOST_DRAWN = 60
"""Lines of figures and curves, of all panels together."""


def header_facts(runs: Sequence[Run]) -> dict[str, str]:
    """The facts on the runs of a page, as texts by their names; those that no run has are left
    out."""
    seeds = sorted({run.seeds for run in runs})
    cohorts = {run.config["cohort_size"] for run in runs if "cohort_size" in run.config}
    statuses = ", ".join(
        f"{count} {status}" for status, count in Counter(run.status for run in runs).items()
    )
    environments = [
        ", ".join(f"{name} {value}" for name, value in run.summary.get("environment", {}).items())
        for run in runs
    ]
    facts = {
        "data set": listed(run.choices.get("dataset") for run in runs),
        "partition": listed(run.choices.get("partition") for run in runs),
        "model": listed(run.choices.get("model") for run in runs),
        "clients (N)": listed(sorted({run.num_clients for run in runs})),
        "clients a round (K)": listed(sorted(cohorts, key=lambda size: (str(type(size)), size))),
        "rounds": listed(sorted({run.num_rounds for run in runs})),
        "seeds": listed(seeds if any(one.own for one in seeds) else [one.seed for one in seeds]),
        "runs": f"{len(runs)} ({statuses})",
        "commit": listed(sorted({run.commit[:10] for run in runs if run.commit is not None})),
        "environment": "; ".join(sorted({*environments} - {""})),
    }
    return {name: text for name, text in facts.items() if text}


def listed(values: Iterable[Any]) -> str:
    """The values that differ; consecutive integers as a range."""
    found = [value for value in dict.fromkeys(values) if value is not None]
    if (
        len(found) > 2
        and isinstance(found[0], int)
        and found == list(range(found[0], found[-1] + 1))
    ):
        return f"{found[0]} to {found[-1]}"
    shown = ", ".join(map(str, found[:MOST]))
    return shown if len(found) <= MOST else f"{shown} and {len(found) - MOST} more"


def headline(
    panels: Sequence[Panel], most: int | None = MOST, over: Comparison | None = None
) -> list[str]:
    """A line on what was compared, one on methods `over` settings, and one on the best of each
    setting, of at most so many, that has several lines."""
    runs = [run for panel in panels for group in panel.lines.values() for run in group.runs]
    facts, num_seeds = header_facts(runs), len({run.seeds for run in runs})
    names = listed(line for panel in panels for line in panel.lines)
    where = " · ".join(facts[name] for name in ("data set", "partition", "model") if name in facts)
    settings = f" in {len(panels)} settings" if len(panels) > 1 else ""
    seeds = f"{num_seeds} seed{'s' * (num_seeds > 1)} ({facts['seeds']})"
    found = best(panels)
    shown = found[:most]
    left = len(found) - len(shown)
    more = [f"and {left} more settings (all of them: fedsim report --all)"] if left else []
    first = (
        f"{names} on {where}{settings}: {seeds}, rounds: {facts['rounds']}, runs: {facts['runs']}"
    )
    return [
        first,
        *([over_settings(over)] if over else []),
        *shown,
        *more,
        *codes(panels),
        *imperfect_chosen(panels),
    ]


def codes(panels: Sequence[Panel]) -> list[str]:
    """A sentence on runs by several versions of the user's code, if there are any."""
    versions: dict[str, list[str]] = {}
    for group in [
        group for panel in panels for group in panel.lines.values() if "code" in group.labels
    ]:
        versions.setdefault(group.labels["code"], []).append(
            f"{group.name}, seeds {listed(r.seed for r in group.runs)}"
        )
    told = "; ".join(f"{code} ({listed(lines)})" for code, lines in versions.items())
    return (
        [
            f"several versions of your code are compared, not averaged: {told}; --where code=... takes one"
        ]
        if told
        else []
    )


def over_settings(over: Comparison) -> str:
    """How many methods are better than random selection, controls apart; the best of each class;
    who is left out."""
    words = {over.reference: "the reference"} | {
        name: str(one) for name, one in over.verdicts.items()
    }
    told = [f"{name}: {method} ({words[method]})" for name, method in over.best.items()]
    num = len(over.verdicts) - len(over.controls)
    count = f"{len(over.better)} of {num} methods are better than {over.reference} beyond chance"
    left = listed(f"{name} ({settings})" for name, settings in over.left_out.items())
    more = f"; finished in fewer settings, and left out: {left}" if left else ""
    return f"over {len(over.panels)} settings {count}; best by what they ask for: {'; '.join(told)}{more}"


def best(panels: Sequence[Panel]) -> list[str]:
    """A sentence for each panel that has finished runs of at least two lines."""
    methods = [
        (panel, [one for one in _by_accuracy(panel) if one[2].choices.get("selector") != CEILING])
        for panel in panels
    ]
    ranked = [(panel, lines) for panel, lines in methods if len(lines) > 1]
    leads = [final_lead(lines[0][2], lines[1][2]) for _, lines in ranked]
    corrected_p = holm([np.nan if lead is None else lead.p_value for lead in leads])
    over_reference = {
        (panel, line): {name: (lead, p)} for panel, line, name, lead, p in to_references(panels)
    }
    sentences = []
    for (panel, ((mean, name, _), (_, second, _), *_)), lead, p in zip(
        ranked, leads, corrected_p, strict=True
    ):
        others = {second: (lead, p), **over_reference.get((panel, name), {})}
        told = "; ".join(f"over {other}: {_verdict(*found)}" for other, found in others.items())
        sentences.append(
            f"{panel.title}: best is {name}, {mean:.4f}; its lead {told}".removeprefix(": ")
        )
    return sentences


def imperfect_chosen(panels: Sequence[Panel]) -> list[str]:
    """A sentence on which lines choose imperfect clients more often than their share, if any have
    such clients."""
    told: dict[str, list[str]] = {}
    for setting, line, choices, clients, _, p_value in sorted(
        preferences(panels), key=lambda one: np.nan_to_num(one[-1], nan=2)
    ):
        verdict = (
            "too few seeds to tell"
            if np.isnan(p_value)
            else f"{'not ' * (p_value >= ALPHA)}beyond chance"
        )
        shares = f"{choices.mean:.2f} of the choices, {clients:.2f} of the clients"
        told.setdefault(verdict, []).append(
            f"{setting} {line}".strip() + f" ({shares}, p {_equal(p_value)} by Holm)"
        )
    parts = [f"{verdict}: {listed(lines)}" for verdict, lines in told.items()]
    return (
        [f"imperfect clients are chosen more often than their share, {'; '.join(parts)}"]
        if parts
        else []
    )


def drawn_lines(panels: Sequence[Panel]) -> list[Panel]:
    """The panels with those of their lines that have finished runs; of more than `MOST_DRAWN` the
    most accurate of each panel, and the reference."""
    found = [
        Panel(panel.title, {name: g for name, g in panel.lines.items() if g.complete})
        for panel in panels
    ]
    panels = [panel for panel in found if panel.lines]
    if sum(len(panel.lines) for panel in panels) <= MOST_DRAWN:
        return panels
    share, fewer = max(2, MOST_DRAWN // len(panels)), []
    for panel in panels[: MOST_DRAWN // share]:
        kept = {
            panel.name_of(panel.reference),
            *(name for _, name, _ in _by_accuracy(panel)[: share - 1]),
        }
        fewer.append(
            Panel(panel.title, {name: group for name, group in panel.lines.items() if name in kept})
        )
    return fewer


def _by_accuracy(panel: Panel) -> list[tuple[float, str, Group]]:
    """Mean final accuracy, name and group of the lines that have it, from the highest to the
    lowest."""
    lines = [
        (mean, name, group)
        for name, group in panel.lines.items()
        if (mean := mean_final(group)) is not None
    ]
    return sorted(lines, key=lambda line: -line[0])


def _verdict(lead: Difference | None, p_value: float) -> str:
    """A difference, its own interval and p-value, and whether it is beyond chance by the corrected
    p-value."""
    if lead is None or lead.num < MIN_SEEDS:
        return f"too few seeds in common to tell ({MIN_SEEDS} are needed)"
    beyond = "beyond chance" if p_value < ALPHA and lead.mean > 0 else "not beyond chance"
    alone = f"{' '.join(show_interval(lead))} (p {_equal(lead.p_value)}, {lead.num} pairs)"
    return f"{alone}, {beyond} (p {_equal(p_value)} by Holm)"


def _equal(p_value: float) -> str:
    p = show_p(p_value)
    return p if p.startswith("<") else f"= {p}"
