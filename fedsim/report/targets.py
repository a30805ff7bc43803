"""What runs spend until they reach a target accuracy: a table, and the fastest method.

A run reaches a target when the mean of a window, that of the final accuracy, is at least the target
(`fedsim.core.record.reaches`). Runs with `stop_at` end there. Their final accuracies are near it,
so the fewest rounds and bytes tell which method is the best.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

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

SHARES_OF_FINAL = (0.9, 0.95, 1.0)
"""Targets as shares of the reference's mean final accuracy, if neither the user nor the runs name
any."""


class Expense(NamedTuple):
    """Something that runs spend until they reach a target.

    Its `measure` needs the recorded `quantities`, and takes the target as its argument. `show`
    writes the median over runs.
    """

    measure: str
    quantities: Sequence[str]
    show: Format


ROUNDS, SENT, WALL_TIME, SIMULATED_TIME = "rounds", "bytes both ways", "time", "simulated time"
EXPENSES: Mapping[str, Expense] = {
    ROUNDS: Expense("rounds_until", (), show_reached),
    SENT: Expense("bytes_until", BYTES, partial(show_reached, show_number=show_bytes)),
    WALL_TIME: Expense(
        "seconds_until", PHASE_SECONDS, partial(show_reached, show_number=show_seconds)
    ),
    SIMULATED_TIME: Expense(
        "simulated_until", SIMULATED, partial(show_reached, show_number=show_seconds)
    ),
}
"""The expenses by the heads of their columns."""


class Race(NamedTuple):
    """The methods of a setting whose runs end at the same `target`.

    `lines` has their finished runs. `ranking` has the methods from the fewest rounds until the
    target to the most.
    """

    setting: str
    target: float
    lines: Lines
    ranking: Sequence[str]


def section(material: Material) -> Section:
    """Return the fastest methods, and the table, which is printed if targets are named."""
    runs = material.frame
    table = targets(runs, material.targets)
    is_named = bool(material.targets) or _has_targets(runs)
    lines = first_lines(fastest(runs), is_full=material.is_full)
    return Section([table], brief=[table] if is_named else [], lines=lines)


def _has_targets(runs: pd.DataFrame) -> bool:
    """Return whether some runs end at a target (`stop_at`)."""
    return len(without_target(runs)) < len(runs)


def targets(runs: pd.DataFrame, accuracies: Sequence[float] = ()) -> Table:
    """Return rounds and costs until the mean of a window reaches a target accuracy.

    The targets are the `accuracies`. If there are none, they are the accuracies at which runs of a
    setting end (`stop_at`). Otherwise they are `SHARES_OF_FINAL` of the final accuracy of the
    setting's reference. A setting whose reference is not finished then has no targets.
    """
    rows: list[list[Any]] = []
    races = []  # the setting and the target of each row
    for setting, members in by_setting(runs).items():
        lines = by(members, "method")
        reference = lines[main_reference(lines)]
        for target, share in _targets_of(members, reference, accuracies):
            reference_time = _median_spent(reference, SIMULATED_TIME, target)
            for method, line in lines.items():
                medians = {name: _median_spent(line, name, target) for name in EXPENSES}
                times_as_fast = _times_as_fast(reference_time, medians[SIMULATED_TIME])
                rows.append([setting, method, target, share, *medians.values(), times_as_fast])
                races.append((setting, target))
    formats: dict[str, Format] = {"target": ".4f", "of the reference's final": ".0%"}
    formats.update({name: expense.show for name, expense in EXPENSES.items()})
    formats["times as fast"] = ".2f"
    ended = ""
    if _has_targets(runs):
        ended = " A run that stop_at ended does not reach more than that."
    table = make_table("targets", ["", "run", *formats], rows, formats, runs, ended=ended)
    best = {}
    for name in EXPENSES:
        if name != WALL_TIME:  # depends on the machine
            best[name] = best_places(table.values[name], races, lowest=True)
    return replace(table, best=best)


def _targets_of(
    members: pd.DataFrame, reference: pd.DataFrame, accuracies: Sequence[float]
) -> list[tuple[float, float | None]]:
    """Return the targets of a setting (see `targets`).

    Each comes with its share of the final accuracy of the reference, or None if it is not defined
    as such a share.
    """
    if accuracies:
        return [(target, None) for target in accuracies]
    ends: list[tuple[float, float | None]] = []
    for target in by_target(members):
        if target is not None:
            ends.append((target, None))
    if ends:
        return ends
    final = float(reference["final_accuracy"].mean())
    return [] if math.isnan(final) else [(share * final, share) for share in SHARES_OF_FINAL]


def _median_spent(rows: pd.DataFrame, name: str, target: float) -> Median | None:
    """Return the median over finished runs of one of `EXPENSES`.

    None without finished runs, or if one of them did not record the quantities.
    """
    expense = EXPENSES[name]
    finished = finished_rows(rows)
    if not is_recorded(list(finished["run"]), expense.quantities):
        return None
    return median_reached(measured(finished, f"{expense.measure}@{target!r}").tolist())


def _median_or_inf(rows: pd.DataFrame, name: str, target: float) -> float:
    """Return the median over finished runs of one of `EXPENSES`.

    It is inf if more than half of the runs do not reach the target, or if it is not known.
    """
    spent = _median_spent(rows, name, target)
    return math.inf if spent is None else spent.median


def _times_as_fast(reference_time: Median | None, time: Median | None) -> float | None:
    """Return the median time of the reference divided by that of a method.

    None if one of them is not known, is 0, or never reaches the target.
    """
    if reference_time is None or time is None:
        return None
    medians = reference_time.median, time.median
    if not all(math.isfinite(median) and median > 0 for median in medians):
        return None
    return reference_time.median / time.median


def fastest(runs: pd.DataFrame) -> list[str]:
    """Return a sentence for each setting with runs that end at a target (`stop_at`): which method
    reaches it in the fewest rounds, and in the fewest bytes.

    The rounds that it saves are tested against the next method and the reference. All differences
    to the fastest method of a setting are corrected together, over all settings.
    """
    races = _races(runs)
    saved: dict[tuple[str, float, str], Difference | None] = {}
    for race in races:
        first, *others = race.ranking
        for method in others:
            difference = _rounds_saved(race.lines[first], race.lines[method], race.target)
            saved[race.setting, race.target, method] = difference
    corrected = dict(zip(saved, corrected_alike(list(saved.values())), strict=True))
    sentences = []
    for race in races:
        first, *others = race.ranking
        verdicts = {}
        for method in others:
            key = race.setting, race.target, method
            verdicts[method] = show_lead(saved[key], *corrected[key], digits=1)
            if not _both_reach(race.lines[first], race.lines[method], race.target):
                verdicts[method] = "not tested, because not all runs reach it"
        sentences.append(_on_the_fastest(race, verdicts))
    return sentences


def _races(runs: pd.DataFrame) -> list[Race]:
    """Return the races of at least two methods. Clairvoyant selection takes part in none."""
    races = []
    for setting, rows in by_setting(finished_rows(runs)).items():
        for target, members in by_target(rows).items():
            lines = {
                method: line
                for method, line in by(members, "method").items()
                if selector_of(line) != CEILING
            }
            if target is not None and len(lines) > 1:
                races.append(Race(setting, target, lines, _by_rounds(lines, target)))
    return races


def _by_rounds(lines: Lines, target: float) -> list[str]:
    """Return the methods from the fewest rounds until `target` to the most: by the median, then by
    the mean, in which runs that do not reach it count with all rounds."""

    def key(method: str) -> tuple[float, float]:
        rows = lines[method]
        all_rounds = pd.Series([run.num_rounds for run in rows["run"]], rows.index)
        mean = float(_rounds_until(rows, target).fillna(all_rounds).mean())
        return _median_or_inf(rows, ROUNDS, target), mean

    return sorted(lines, key=key)


def _on_the_fastest(race: Race, verdicts: Mapping[str, str]) -> str:
    """Return a sentence on the fastest method of a race. `verdicts` tells the rounds that it saves
    over each other method."""
    first, second = race.ranking[:2]
    place = f"{race.setting}: " if race.setting else ""
    rounds = _median_or_inf(race.lines[first], ROUNDS, race.target)
    if math.isinf(rounds):
        return f"{place}no method reaches {race.target:g} in half of its runs"
    compared = [second]
    reference = main_reference(race.lines)
    if reference not in (first, second):
        compared.append(reference)
    saved = "; ".join(f"over {method}: {verdicts[method]}" for method in compared)
    return (
        f"{place}fewest rounds to {race.target:g}: {first}, {rounds:g} (median)"
        f"{_fewest_bytes(race)}; rounds saved {saved}"
    )


def _rounds_until(rows: pd.DataFrame, target: float) -> pd.Series:
    """Return the number of rounds until each run reaches `target`; nan if it does not."""
    return measured(rows, f"{EXPENSES[ROUNDS].measure}@{target!r}")


def _both_reach(first: pd.DataFrame, rows: pd.DataFrame, target: float) -> bool:
    """Return whether all runs of two methods reach `target`."""
    lines = (first, rows)
    return all(bool(_rounds_until(line, target).notna().all()) for line in lines)


def _rounds_saved(first: pd.DataFrame, rows: pd.DataFrame, target: float) -> Difference | None:
    """Return the rounds of `rows` until `target` minus those of `first`, paired by seed.

    None if a run does not reach it, because the others would be the faster ones. None also with
    fewer than two common seeds.
    """
    if not _both_reach(first, rows, target):
        return None
    return pooled([paired(_rounds_until(rows, target), _rounds_until(first, target))])


def _fewest_bytes(race: Race) -> str:
    """Return which method needs the fewest bytes until the target, next to the bytes of the fastest
    method; empty if no method reaches it or bytes were not recorded."""
    first = race.ranking[0]
    medians = {name: _median_or_inf(rows, SENT, race.target) for name, rows in race.lines.items()}
    least = min(medians, key=lambda name: medians[name])
    if math.isinf(medians[least]):
        return ""
    bytes_of_first = show_bytes(medians[first])
    if medians[first] == medians[least]:
        return f"; fewest bytes: {first}, too, {bytes_of_first}"
    return f"; fewest bytes: {least}, {show_bytes(medians[least])} ({first}: {bytes_of_first})"
