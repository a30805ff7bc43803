"""The first lines of a report: what was compared, and which method is best in each setting.

The lead of the best method over the next one is tested by a two-sided paired t-test, corrected over
settings by Holm's method. The test does not correct for the fact that the same data chose these two
methods. The lead over random selection is the one in the table `pairs`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from fedsim.core.configs import leaves
from fedsim.core.record import short_run_warning
from fedsim.report.contrasts import (
    Contrast,
    Lines,
    Preference,
    by_accuracy,
    corrected_by_holm,
    lead_over,
    mean_accuracy,
    preferences,
    to_references,
)
from fedsim.report.sections import Material, Section
from fedsim.report.table import show_p, show_result
from fedsim.results.frames import (
    by,
    by_setting,
    finished_rows,
    first_run,
    selector_of,
    without_target,
)
from fedsim.results.grouping import relevant
from fedsim.results.labels import CEILING
from fedsim.results.measures import BYTES, UPLOADS, cut, total_cost
from fedsim.results.ranking import cost_multiple
from fedsim.results.runs import Run
from fedsim.results.statistics import (
    ALPHA,
    MIN_SEEDS,
    Difference,
    paired,
    pooled,
)

NOT_COMPARED = ("selector", "engine", "device")
"""Keys that differ between methods, or that change results by rounding errors only."""
MAX_LISTED = 8
"""Number of values of a fact, and of settings, that are listed. Of more, the number is given."""


def header_facts(runs: Sequence[Run]) -> dict[str, str]:
    """Return facts on the runs, as texts by their names, without facts that no run has."""
    seeds: list[Any] = sorted({run.seeds for run in runs})
    if not any(run_seeds.own for run_seeds in seeds):  # one number tells all of a run's seeds
        seeds = [run_seeds.seed for run_seeds in seeds]
    cohorts = {run.config["cohort_size"] for run in runs if "cohort_size" in run.config}
    counts = Counter(run.status for run in runs)
    statuses = ", ".join(f"{count} {status}" for status, count in counts.items())
    environments = set()
    for run in runs:
        environment = run.summary.get("environment")
        if environment:
            environments.add(", ".join(f"{name} {value}" for name, value in environment.items()))
    facts = {
        "data set": listed(run.dataset for run in runs),
        "partition": listed(run.choices.get("partition") for run in runs),
        "model": listed(run.choices.get("model") for run in runs),
        "clients (N)": listed(sorted({run.num_clients for run in runs})),
        "clients a round (K)": listed(sorted(cohorts)),
        "rounds": listed(sorted({run.num_rounds for run in runs})),
        "seeds": listed(seeds),
        "runs": f"{len(runs)} ({statuses})",
        "commit": listed(sorted({run.commit[:10] for run in runs if run.commit is not None})),
        "environment": "; ".join(sorted(environments)),
    }
    return {name: text for name, text in facts.items() if text}


def listed(values: Iterable[Any]) -> str:
    """Return each distinct value once, as text; None does not count.

    Consecutive integers are a range. Of more than `MAX_LISTED` values, the number of the others is
    given.
    """
    distinct = [value for value in dict.fromkeys(values) if value is not None]
    if len(distinct) > 2 and isinstance(distinct[0], int):
        first, last = distinct[0], distinct[-1]
        if distinct == list(range(first, last + 1)):
            return f"{first} to {last}"
    shown = ", ".join(map(str, distinct[:MAX_LISTED]))
    num_hidden = len(distinct) - MAX_LISTED
    return f"{shown} and {num_hidden} more" if num_hidden > 0 else shown


def opening(material: Material) -> Section:
    """Return a line on what was compared."""
    runs = material.frame
    facts = header_facts(list(runs["run"]))
    settings = by_setting(runs)
    methods = listed(method for rows in settings.values() for method in by(rows, "method"))
    where = [facts[name] for name in ("data set", "partition", "model") if name in facts]
    num_settings = f" in {len(settings)} settings" if len(settings) > 1 else ""
    num_seeds = len(set(runs.index))
    seeds = f"{num_seeds} seed{'s' * (num_seeds > 1)} ({facts['seeds']})"
    line = (
        f"{methods} on {' · '.join(where)}{num_settings}: {seeds}, rounds: {facts['rounds']}, "
        f"runs: {facts['runs']}"
    )
    lines = [line, *warnings(list(runs["run"]))]
    if keys := unequal_keys(runs):
        lines.append(
            f"methods differ in more than their selectors: {listed(keys)} (report.html lists how)"
        )
    return Section(lines=lines)


def unequal_keys(runs: pd.DataFrame) -> list[str]:
    """Return the keys in which methods of the same setting differ, besides those of their selectors
    and those that are part of the names of all of them."""
    unequal = set()
    for rows in by_setting(runs).values():
        in_all_names = set.intersection(*(set(labels) for labels in rows["labels"]))
        expected = {*NOT_COMPARED, *in_all_names}
        values: dict[str, set[str]] = {}
        for members in by(rows, "method").values():
            for key, value in leaves(relevant(first_run(members).config)):
                values.setdefault(key.removesuffix("._target_"), set()).add(str(value))
        for key, texts in values.items():
            if len(texts) > 1 and not _is_below(key, expected):
                unequal.add(key)
    return sorted(unequal)


def _is_below(key: str, names: Iterable[str]) -> bool:
    """Return whether a dotted key is one of the `names`, or below one of them in the config."""
    return any(f"{key}.".startswith(f"{name}.") for name in names)


def warnings(runs: Sequence[Run]) -> list[str]:
    """Return sentences on runs whose final accuracy means something else than usual."""
    on_lengths = {short_run_warning(run.num_rounds, run.final_window) for run in runs}
    lines = sorted(filter(None, on_lengths))
    if any(run.config.get("stop_at") for run in runs):
        lines.append(
            "runs with stop_at end when they reach it: their final accuracies are near it, so "
            "methods are compared by rounds and costs"
        )
    return lines


def conclusions(material: Material) -> Section:
    """Return a line on the best of each setting that has several methods, and further findings."""
    lines = first_lines(best(material.frame), is_full=material.is_full)
    return Section(lines=[*lines, *codes(material.frame), *imperfect_chosen(material.frame)])


def first_lines(lines: list[str], *, is_full: bool) -> list[str]:
    """Return the first `MAX_LISTED` of `lines` on a setting each, and a line with the number of the
    others. If the report `is_full`, return all of them."""
    num_hidden = 0 if is_full else len(lines) - MAX_LISTED
    if num_hidden <= 0:
        return lines
    hidden = f"and {num_hidden} more settings (all of them: fedsim report --all)"
    return [*lines[:MAX_LISTED], hidden]


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


def best(runs: pd.DataFrame) -> list[str]:
    """Return a sentence for each setting that has finished runs of at least two methods.

    It is about the method of highest mean final accuracy (clairvoyant selection does not count),
    and its leads over the next method and over its reference. Runs that end at a target are
    compared by `fedsim.report.targets`.
    """
    comparable = without_target(runs)
    lines_by_setting: dict[str, Lines] = {}
    leads = []  # over the next method, one for each setting
    for setting, rows in by_setting(comparable).items():
        lines = by(rows, "method")
        methods = [name for name in by_accuracy(lines) if selector_of(lines[name]) != CEILING]
        if len(methods) > 1:
            first, second = methods[:2]
            lead = lead_over(lines[first], lines[second])
            leads.append(Contrast(setting, first, second, lead))
            lines_by_setting[setting] = lines
    leads_over_references = {}
    for contrast in to_references(comparable):
        leads_over_references[contrast.setting, contrast.method] = contrast
    sentences = []
    for over_next in corrected_by_holm(leads):
        setting, method = over_next.setting, over_next.method
        over_reference = leads_over_references.get((setting, method))
        sentences.append(_on_the_best(lines_by_setting[setting], over_next, over_reference))
    return sentences


def _on_the_best(lines: Lines, over_next: Contrast, over_reference: Contrast | None) -> str:
    """Return a sentence on the best method of a setting, from its leads over the next method and
    over its reference. The latter is None if it is the reference itself."""
    method = over_next.method
    verdicts = {over_next.reference: verdict_on(over_next)}
    cost = ""
    if over_reference is not None:
        reference = over_reference.reference
        # If the next method is the reference, this replaces the verdict above, so that the sentence
        # and the table `pairs` have the same interval and p-value.
        verdicts[reference] = verdict_on(over_reference)
        cost = cost_of_lead(
            finished_rows(lines[method]), finished_rows(lines[reference]), reference
        )
    shown = "; ".join(f"over {name}: {verdict}" for name, verdict in verdicts.items())
    place = f"{over_next.setting}: " if over_next.setting else ""
    remark = _on_missing_runs(lines, method)
    mean = f"{mean_accuracy(lines[method]):.4f}"
    return f"{place}best is {method}, {mean}{remark}{cost}; its lead {shown}"


def _on_missing_runs(lines: Lines, method: str) -> str:
    """Return how many runs of a method diverged, and that it has fewer finished runs than others;
    empty without either."""
    remarks = []
    num_diverged = int((lines[method]["status"] == "diverged").sum())
    if num_diverged:
        remarks.append(f"{num_diverged} of {len(lines[method])} runs diverged")
    num_finished = len(finished_rows(lines[method]))
    most_finished = max(len(finished_rows(rows)) for rows in lines.values())
    if num_finished + num_diverged < most_finished:
        remarks.append(f"over {num_finished} seeds, while others have up to {most_finished}")
    return f" ({'; '.join(remarks)})" if remarks else ""


def cost_of_lead(method_rows: pd.DataFrame, reference_rows: pd.DataFrame, reference: str) -> str:
    """Return what a method spends as multiples of its `reference`, and whether it is ahead of the
    reference at equal bytes.

    Empty if both spend the same (rounded to 0.1), if they did not record it, or if the reference
    spent nothing.
    """
    clients = cost_multiple(method_rows, reference_rows, UPLOADS)
    sent = cost_multiple(method_rows, reference_rows, BYTES)
    if math.isnan(clients) or math.isnan(sent):
        return ""
    shown_clients, shown_bytes = f"{clients:.1f}", f"{sent:.1f}"
    if shown_clients == shown_bytes == "1.0":
        return ""
    cheaper = f"{reference}'s" if sent >= 1 else "its own"
    verdict = _at_equal_bytes(method_rows, reference_rows, reference)
    return (
        f", with {shown_clients} times the clients and {shown_bytes} times the bytes of "
        f"{reference}; at {cheaper} bytes {verdict}"
    )


def _at_equal_bytes(method_rows: pd.DataFrame, reference_rows: pd.DataFrame, reference: str) -> str:
    """Return whether a method is ahead of its `reference` at equal bytes, with the difference.

    The budget is the number of bytes of the cheapest run of both. The test is not corrected for the
    number of settings.
    """
    all_runs = [*method_rows["run"], *reference_rows["run"]]
    budget = min(total_cost(run, BYTES) for run in all_runs)

    def accuracy_at_budget(run: Run) -> float:
        accuracy, _ = cut(run, budget, BYTES)
        return accuracy

    at_budget = [rows["run"].map(accuracy_at_budget) for rows in (method_rows, reference_rows)]
    lead = pooled([paired(*at_budget)])
    if lead is None or lead.num < MIN_SEEDS:
        verdict = "there are too few seeds to tell"
    elif lead.p_value >= ALPHA:
        verdict = f"it is not told apart from {reference}"
    else:
        verdict = "it is ahead" if lead.mean > 0 else "it is behind"
    return verdict if lead is None else f"{verdict} ({show_result(lead)})"


def imperfect_chosen(runs: pd.DataFrame) -> list[str]:
    """Return a sentence on which methods choose imperfect clients more often than their share, if
    there are such clients."""
    by_verdict: dict[str, list[str]] = {}
    for preference in sorted(preferences(runs), key=_sort_by_p):
        p = preference.p_holm
        verdict = "beyond chance" if p < ALPHA else "not beyond chance"
        if math.isnan(p):
            verdict = "too few seeds to tell"
        shares = (
            f"{preference.chosen_share.mean:.2f} of the choices, "
            f"{preference.client_share:.2f} of the clients"
        )
        name = f"{preference.setting} {preference.method}".strip()
        by_verdict.setdefault(verdict, []).append(f"{name} ({shares}, p {_equal(p)} by Holm)")
    if not by_verdict:
        return []
    shown = "; ".join(f"{verdict}: {listed(names)}" for verdict, names in by_verdict.items())
    return [f"imperfect clients are chosen more often than their share, {shown}"]


def _sort_by_p(preference: Preference) -> tuple[bool, float]:
    """Return a sort key that puts unknown p-values last."""
    return math.isnan(preference.p_holm), preference.p_holm


def verdict_on(contrast: Contrast) -> str:
    """Return the difference of a contrast with its verdict (`show_lead`)."""
    return show_lead(contrast.difference, contrast.p_holm, contrast.corrected)


def show_lead(
    lead: Difference | None, p_holm: float, corrected: tuple[float, float], digits: int = 4
) -> str:
    """Return a lead, its interval and p-value, and whether it is beyond chance.

    `p_holm` and `corrected` are the p-value and the interval, corrected by Holm's method. Numbers
    have `digits` digits after the point.
    """
    if lead is None or lead.num < MIN_SEEDS:
        return f"too few seeds in common to tell ({MIN_SEEDS} are needed)"
    verdict = "not beyond chance"
    if p_holm < ALPHA:
        verdict = "beyond chance" if lead.mean > 0 else "behind it beyond chance"
    by_holm = f"p {_equal(p_holm)}, p and interval by Holm, {lead.num} pairs"
    low, high = corrected
    ends = f"[{low:+.{digits}f}, {high:+.{digits}f}]"
    return f"{lead.mean:+.{digits}f} {ends} ({by_holm}), {verdict}"


def _equal(p_value: float) -> str:
    """Return what follows the letter p: "= 0.023" or "< .001"."""
    text = show_p(p_value)
    return text if text.startswith("<") else f"= {text}"
