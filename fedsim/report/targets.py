"""What runs spend until they reach a target accuracy: a table, and the fastest method.

A run reaches a target when the mean of a window, that of the final accuracy, is at least the target
(`fedsim.core.record.reaches`). Runs with `stop_at` end there. Their final accuracies are near it,
so the fewest rounds and bytes tell which method is the best.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd

from fedsim.report.contrasts import Lines, main_reference
from fedsim.report.headline import first_lines, show_lead
from fedsim.report.sections import Material, Section
from fedsim.report.table import Format, Table, best_places, median_reached, show_reached
from fedsim.report.tables import make_table
from fedsim.results.frames import (
    by,
    by_setting,
    by_target,
    finished_rows,
    measured,
    selector_of,
    without_target,
)
from fedsim.results.labels import CEILING
from fedsim.results.measures import BYTES, PHASE_SECONDS, SIMULATED, is_recorded
from fedsim.results.statistics import Difference, Median, corrected_alike, paired, pooled
from fedsim.tracking.tables import show_bytes, show_seconds

SHOW_BYTES = partial(show_reached, show_number=show_bytes)
SHOW_SECONDS = partial(show_reached, show_number=show_seconds)
LEVELS = (0.9, 0.95, 1.0)
"""Targets as shares of the reference's mean final accuracy, if no others are named."""
UNTIL: Mapping[str, tuple[str, Sequence[str], Format]] = {
    "rounds": ("rounds_until", (), show_reached),
    "bytes both ways": ("bytes_until", BYTES, SHOW_BYTES),
    "time": ("seconds_until", PHASE_SECONDS, SHOW_SECONDS),
    "simulated time": ("simulated_until", SIMULATED, SHOW_SECONDS),
}
"""Measures of what runs spend until they reach a target, the quantities that they need, and how
they are shown."""


def section(material: Material) -> Section:
    """Return the fastest methods, and the table, which is printed if targets are named."""
    runs = material.frame
    table = targets(runs, material.targets)
    is_named = bool(material.targets) or len(without_target(runs)) < len(runs)
    lines = first_lines(fastest(runs), is_full=material.is_full)
    return Section([table], brief=[table] if is_named else [], lines=lines)


def targets(runs: pd.DataFrame, accuracies: Sequence[float] = ()) -> Table:
    """Return rounds and costs until the mean of a window reaches a target accuracy.

    The targets are the `accuracies`. Without them they are those at which runs of a setting end
    (`stop_at`), or otherwise `LEVELS` of the mean final accuracy of the setting's reference.
    Settings whose reference is not finished have none of the latter.
    """
    rows: list[list[Any]] = []
    panels = []  # the setting and the target of each row
    for setting, members in by_setting(runs).items():
        lines = by(members, "method")
        reference = lines[main_reference(lines)]
        for target, share in _targets_of(members, reference, accuracies):
            reference_seconds = _reach(reference, "simulated time", target)
            for method, line in lines.items():
                medians = [_reach(line, name, target) for name in UNTIL]
                times_as_fast = _times_as_fast(reference_seconds, medians[-1])
                rows.append([setting, method, target, share, *medians, times_as_fast])
                panels.append((setting, target))
    formats: dict[str, Format] = {"target": ".4f", "of the reference's final": ".0%"}
    formats.update({name: form for name, (*_, form) in UNTIL.items()})
    formats["times as fast"] = ".2f"
    has_ended = len(without_target(runs)) < len(runs)
    ended = " A run that stop_at ended does not reach more than that." if has_ended else ""
    table = make_table("targets", ["", "run", *formats], rows, formats, runs, ended=ended)
    compared = [name for name in UNTIL if name != "time"]
    best = {name: best_places(table.values[name], panels, lowest=True) for name in compared}
    return replace(table, best=best)


def _targets_of(
    members: pd.DataFrame, reference: pd.DataFrame, accuracies: Sequence[float]
) -> list[tuple[float, float | None]]:
    """Return the targets of a setting (`targets`), each with its share of the final accuracy of the
    reference if it is defined by that."""
    if accuracies:
        return [(target, None) for target in accuracies]
    goals = [(target, None) for target in by_target(members) if target is not None]
    if goals:
        return list(goals)
    final = float(reference["final_accuracy"].mean())
    return [] if math.isnan(final) else [(share * final, share) for share in LEVELS]


def _reach(line: pd.DataFrame, name: str, target: float) -> Median | None:
    """Return the median over finished runs of a measure in `UNTIL`; None without finished runs, or
    if one of them did not record its quantities."""
    measure, names, _ = UNTIL[name]
    finished = finished_rows(line)
    if not is_recorded(list(finished["run"]), names):
        return None
    return median_reached(measured(finished, f"{measure}@{target!r}"))


def _times_as_fast(reference: Median | None, seconds: Median | None) -> float | None:
    """Return the median time of the reference divided by that of a method.

    None if one of them is not known, is 0, or never reaches the target.
    """
    if reference is None or seconds is None:
        return None
    medians = reference.median, seconds.median
    if not all(math.isfinite(median) and median > 0 for median in medians):
        return None
    return reference.median / seconds.median


def fastest(runs: pd.DataFrame) -> list[str]:
    """Return a sentence for each setting with runs that end at a target (`stop_at`): which method
    reaches it in the fewest rounds, and in the fewest bytes.

    The rounds that it saves are tested against the next method and the reference. All differences
    to the fastest method of a setting are corrected together, over all settings.
    """
    raced = []
    for setting, rows in by_setting(finished_rows(runs)).items():
        for target, members in by_target(rows).items():
            lines = {
                method: line
                for method, line in by(members, "method").items()
                if selector_of(line) != CEILING
            }
            if target is not None and len(lines) > 1:
                raced.append((setting, target, lines, _by_rounds(lines, target)))
    saved = {}
    for setting, target, lines, (first, *others) in raced:
        for method in others:
            saved[setting, target, method] = _rounds_saved(lines[first], lines[method], target)
    corrected = dict(zip(saved, corrected_alike(list(saved.values())), strict=True))
    sentences = []
    for setting, target, lines, (first, *others) in raced:
        rounds = _median_until(lines[first], "rounds_until", target)
        if math.isinf(rounds):
            sentence = f"{setting}: no method reaches {target:g} in half of its runs"
            sentences.append(sentence.removeprefix(": "))
            continue
        reference = main_reference(lines)
        verdicts = {}
        for name in (others[0], *([reference] if reference != first else [])):
            lead = saved[setting, target, name]
            verdicts[name] = show_lead(lead, *corrected[setting, target, name], digits=1)
            if not (_all_reach(lines[first], target) and _all_reach(lines[name], target)):
                verdicts[name] = "not tested, because not all runs reach it"
        shown = "; ".join(f"over {name}: {verdict}" for name, verdict in verdicts.items())
        sentence = (
            f"{setting}: fewest rounds to {target:g}: {first}, {rounds:g} (median)"
            f"{_fewest_bytes(lines, target, first)}; rounds saved {shown}"
        )
        sentences.append(sentence.removeprefix(": "))
    return sentences


def _by_rounds(lines: Lines, target: float) -> list[str]:
    """Return the methods from the fewest rounds until `target` to the most: by the median, then by
    the mean, in which runs that do not reach it count with all rounds."""

    def key(method: str) -> tuple[float, float]:
        rounds = _rounds_until(lines[method], target)
        ends = [run.num_rounds for run in lines[method]["run"]]
        mean = float(rounds.fillna(pd.Series(ends, rounds.index)).mean())
        return _median_until(lines[method], "rounds_until", target), mean

    return sorted(lines, key=key)


def _median_until(rows: pd.DataFrame, measure: str, target: float) -> float:
    """Return the median of a measure with the argument `target`; inf if more than half of the runs
    lack it."""
    reached = median_reached(measured(rows, f"{measure}@{target!r}").tolist())
    return math.inf if reached is None else reached.median


def _rounds_until(rows: pd.DataFrame, target: float) -> pd.Series:
    return measured(rows, f"rounds_until@{target!r}")


def _all_reach(rows: pd.DataFrame, target: float) -> bool:
    return bool(_rounds_until(rows, target).notna().all())


def _rounds_saved(first: pd.DataFrame, rows: pd.DataFrame, target: float) -> Difference | None:
    """Return the rounds of `rows` until `target` minus those of `first`, paired by seed.

    None if a run does not reach it: the others would be the faster ones. None also with fewer than
    two common seeds.
    """
    if not (_all_reach(first, target) and _all_reach(rows, target)):
        return None
    return pooled([paired(_rounds_until(rows, target), _rounds_until(first, target))])


def _fewest_bytes(lines: Lines, target: float, first: str) -> str:
    """Return which method needs the fewest bytes until `target`, next to those of `first`; empty if
    no method reaches it or bytes were not recorded."""
    medians = {name: _median_until(rows, "bytes_until", target) for name, rows in lines.items()}
    least = min(medians, key=lambda name: medians[name])
    if math.isinf(medians[least]):
        return ""
    if medians[first] == medians[least]:
        return f"; fewest bytes: {first}, too, {show_bytes(medians[first])}"
    others = f" ({first}: {show_bytes(medians[first])})"
    return f"; fewest bytes: {least}, {show_bytes(medians[least])}{others}"
