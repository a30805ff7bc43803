"""The first lines of a report: what was compared, and which method is best in each setting.

The lead over the next method is tested by a two-sided paired t-test, corrected over settings by
Holm's method. That the data chose the two is not corrected for. The lead over random selection is
one of the table `pairs`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from fedsim.report.contrasts import lead_over, main_reference, preferences, to_references
from fedsim.report.table import show_interval, show_p
from fedsim.results.frames import CEILING, by, by_setting, done, selector_of
from fedsim.results.ranking import Comparison
from fedsim.results.runs import Run
from fedsim.results.statistics import ALPHA, MIN_SEEDS, Difference, holm

MAX_LISTED = 8
"""Number of values of a fact, and of settings, that are listed. Of more, the number is given."""
MAX_DRAWN = 60
"""Number of lines of figures and curves, of all settings together."""


def header_facts(runs: Sequence[Run]) -> dict[str, str]:
    """Return facts on the runs, as texts by their names, without facts that no run has."""
    seeds = sorted({run.seeds for run in runs})
    has_more_seeds = any(run_seeds.own for run_seeds in seeds)
    cohorts = {run.config["cohort_size"] for run in runs if "cohort_size" in run.config}
    counts = Counter(run.status for run in runs)
    statuses = ", ".join(f"{count} {status}" for status, count in counts.items())
    environments = set()
    for run in runs:
        environment = run.summary.get("environment", {})
        environments.add(", ".join(f"{name} {value}" for name, value in environment.items()))
    facts = {
        "data set": listed(run.choices.get("dataset") for run in runs),
        "partition": listed(run.choices.get("partition") for run in runs),
        "model": listed(run.choices.get("model") for run in runs),
        "clients (N)": listed(sorted({run.num_clients for run in runs})),
        "clients a round (K)": listed(sorted(cohorts, key=lambda size: (str(type(size)), size))),
        "rounds": listed(sorted({run.num_rounds for run in runs})),
        "seeds": listed(seeds if has_more_seeds else [run_seeds.seed for run_seeds in seeds]),
        "runs": f"{len(runs)} ({statuses})",
        "commit": listed(sorted({run.commit[:10] for run in runs if run.commit is not None})),
        "environment": "; ".join(sorted(environments - {""})),
    }
    return {name: text for name, text in facts.items() if text}


def listed(values: Iterable[Any]) -> str:
    """Return the values that differ; consecutive integers as a range."""
    distinct = [value for value in dict.fromkeys(values) if value is not None]
    if len(distinct) > 2 and isinstance(distinct[0], int):
        first, last = distinct[0], distinct[-1]
        if distinct == list(range(first, last + 1)):
            return f"{first} to {last}"
    shown = ", ".join(map(str, distinct[:MAX_LISTED]))
    num_hidden = len(distinct) - MAX_LISTED
    return f"{shown} and {num_hidden} more" if num_hidden > 0 else shown


def headline(
    runs: pd.DataFrame, max_settings: int | None, comparison: Comparison | None = None
) -> list[str]:
    """Return a line on what was compared, one on methods over settings, and one on the best of each
    setting, of at most `max_settings`, that has several methods."""
    facts = header_facts(list(runs["run"]))
    settings = by_setting(runs)
    methods = listed(method for rows in settings.values() for method in by(rows, "method"))
    where = [facts[name] for name in ("data set", "partition", "model") if name in facts]
    num_settings = f" in {len(settings)} settings" if len(settings) > 1 else ""
    num_seeds = len(set(runs.index))
    seeds = f"{num_seeds} seed{'s' * (num_seeds > 1)} ({facts['seeds']})"
    first = (
        f"{methods} on {' · '.join(where)}{num_settings}: {seeds}, rounds: {facts['rounds']}, "
        f"runs: {facts['runs']}"
    )
    lines = [first]
    if comparison:
        lines.append(over_settings(comparison))
    sentences = best(runs)
    lines += sentences[:max_settings]
    num_hidden = len(sentences) - len(sentences[:max_settings])
    if num_hidden:
        lines.append(f"and {num_hidden} more settings (all of them: fedsim report --all)")
    return [*lines, *codes(runs), *imperfect_chosen(runs)]


def codes(runs: pd.DataFrame) -> list[str]:
    """Return a sentence on runs by several versions of the user's code, if there are any."""
    versions: dict[str, list[str]] = {}
    for rows in by_setting(runs).values():
        for group, members in by(rows, "group").items():
            if code := members["labels"].iloc[0].get("code"):
                seeds = listed(run.seed for run in members["run"])
                versions.setdefault(code, []).append(f"{group}, seeds {seeds}")
    if not versions:
        return []
    shown = "; ".join(f"{code} ({listed(groups)})" for code, groups in versions.items())
    return [
        f"several versions of your code are compared, not averaged: {shown}; "
        "--where code=... takes one"
    ]


def over_settings(comparison: Comparison) -> str:
    """Return how many methods are better than random selection, except controls, the best of each
    class, and who is left out."""
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


def best(runs: pd.DataFrame) -> list[str]:
    """Return a sentence for each setting that has finished runs of at least two methods."""
    ranked = []
    for setting, rows in by_setting(runs).items():
        lines = by(rows, "method")
        methods = [name for name in _by_accuracy(lines) if selector_of(lines[name]) != CEILING]
        if len(methods) > 1:
            ranked.append((setting, lines, methods))
    leads = [lead_over(lines[names[0]], lines[names[1]]) for _, lines, names in ranked]
    p_holm = holm([math.nan if lead is None else lead.p_value for lead in leads])
    contrasts = {(contrast.setting, contrast.method): contrast for contrast in to_references(runs)}
    sentences = []
    for (setting, lines, (first, second, *_)), lead, p in zip(ranked, leads, p_holm, strict=True):
        verdicts = {second: _verdict(lead, p)}
        if contrast := contrasts.get((setting, first)):
            verdicts[contrast.reference] = _verdict(contrast.difference, contrast.p_holm)
        shown = "; ".join(f"over {name}: {verdict}" for name, verdict in verdicts.items())
        mean = _mean_accuracy(lines[first])
        sentence = f"{setting}: best is {first}, {mean:.4f}; its lead {shown}"
        sentences.append(sentence.removeprefix(": "))
    return sentences


def imperfect_chosen(runs: pd.DataFrame) -> list[str]:
    """Return a sentence on which methods choose imperfect clients more often than their share, if
    there are such clients."""
    by_verdict: dict[str, list[str]] = {}
    for preference in sorted(
        preferences(runs), key=lambda one: (math.isnan(one.p_holm), one.p_holm)
    ):
        p = preference.p_holm
        verdict = "beyond chance" if p < ALPHA else "not beyond chance"
        if math.isnan(p):
            verdict = "too few seeds to tell"
        shares = (
            f"{preference.choices.mean:.2f} of the choices, {preference.clients:.2f} of the clients"
        )
        name = f"{preference.setting} {preference.method}".strip()
        by_verdict.setdefault(verdict, []).append(f"{name} ({shares}, p {_equal(p)} by Holm)")
    if not by_verdict:
        return []
    shown = "; ".join(f"{verdict}: {listed(names)}" for verdict, names in by_verdict.items())
    return [f"imperfect clients are chosen more often than their share, {shown}"]


def drawn_lines(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the finished runs that are drawn: of more than `MAX_DRAWN` lines the most accurate of
    each setting, and the reference."""
    settings = by_setting(done(runs))
    lines = {setting: by(rows, "method") for setting, rows in settings.items()}
    if sum(map(len, lines.values())) <= MAX_DRAWN:
        return done(runs)
    share = max(2, MAX_DRAWN // len(lines))
    drawn = []
    for setting in list(lines)[: MAX_DRAWN // share]:
        methods = lines[setting]
        kept = {main_reference(methods), *_by_accuracy(methods)[: share - 1]}
        rows = settings[setting]
        drawn.append(rows[rows["method"].isin(kept)])
    return pd.concat(drawn)


def _mean_accuracy(rows: pd.DataFrame) -> float:
    return float(rows["final_accuracy"].mean())


def _by_accuracy(lines: dict[str, pd.DataFrame]) -> list[str]:
    """Return the methods that have a mean final accuracy, from the highest to the lowest."""
    means = {method: _mean_accuracy(rows) for method, rows in lines.items()}
    known = [method for method, mean in means.items() if not math.isnan(mean)]
    return sorted(known, key=lambda method: -means[method])


def _verdict(lead: Difference | None, p_holm: float) -> str:
    """Return a difference, its own interval and p-value, and whether it is beyond chance by the
    corrected p-value."""
    if lead is None or lead.num < MIN_SEEDS:
        return f"too few seeds in common to tell ({MIN_SEEDS} are needed)"
    alone = f"p {_equal(lead.p_value)}, {lead.num} pairs"
    verdict = "beyond chance" if p_holm < ALPHA and lead.mean > 0 else "not beyond chance"
    return (
        f"{lead.mean:+.4f} {show_interval(lead)} ({alone}), {verdict} (p {_equal(p_holm)} by Holm)"
    )


def _equal(p_value: float) -> str:
    text = show_p(p_value)
    return text if text.startswith("<") else f"= {text}"
