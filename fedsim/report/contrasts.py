"""Comparisons within a setting: each method against its reference, choices of imperfect clients
against their share, and the methods that are drawn."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd

from fedsim.results.frames import (
    REFERENCE,
    by,
    by_setting,
    done,
    measured,
    reference_of,
    selector_of,
)
from fedsim.results.statistics import MIN_SEEDS, UNIT, Difference, Estimate, holm, paired, pooled

MAX_DRAWN = 60
"""Number of lines of figures and curves, of all settings together."""
Lines = Mapping[str, pd.DataFrame]
"""The runs of a setting by method."""


class Contrast(NamedTuple):
    """The paired difference of final accuracy of a method to its reference, and its p-value by
    Holm's correction over all contrasts."""

    setting: str
    method: str
    reference: str
    difference: Difference | None
    p_holm: float


class Preference(NamedTuple):
    """The share of its `choices` that a method gave to imperfect clients, and their share of all
    `clients`.

    `p_value` is that of choosing them no more often than that, one-sided; nan below `MIN_SEEDS`.
    """

    setting: str
    method: str
    choices: Estimate
    clients: float
    p_value: float
    p_holm: float = math.nan


def main_reference(lines: Lines) -> str:
    """Return the first method that is random selection, otherwise the first."""
    return min(lines, key=lambda method: selector_of(lines[method]) != REFERENCE)


def compared_with(lines: Lines, method: str) -> str:
    """Return the reference of a method: random selection in its setting, otherwise the first
    method, also where all are random selection."""
    if all(selector_of(rows) == REFERENCE for rows in lines.values()):
        return main_reference(lines)
    return reference_of(lines, method, REFERENCE) or main_reference(lines)


def lead_over(rows: pd.DataFrame, reference: pd.DataFrame) -> Difference | None:
    """Return the mean difference of final accuracy at equal seeds."""
    return pooled([paired(rows["final_accuracy"], reference["final_accuracy"])])


def to_references(runs: pd.DataFrame) -> list[Contrast]:
    """Return the contrasts of all methods in all settings."""
    contrasts = []
    for setting, rows in by_setting(runs).items():
        lines = by(rows, "method")
        for method in lines:
            reference = compared_with(lines, method)
            if reference != method:
                lead = lead_over(lines[method], lines[reference])
                contrasts.append(Contrast(setting, method, reference, lead, math.nan))
    leads = [contrast.difference for contrast in contrasts]
    p_holm = holm([math.nan if lead is None else lead.p_value for lead in leads])
    return [contrast._replace(p_holm=p) for contrast, p in zip(contrasts, p_holm, strict=True)]


def preferences(runs: pd.DataFrame) -> list[Preference]:
    """Return the preferences of all methods in settings with imperfect clients."""
    preferred = []
    for setting, rows in by_setting(runs).items():
        for method, members in by(rows, "method").items():
            shares = measured(members, "imperfect_choices").dropna()
            if len(shares):
                choices = Estimate(tuple(shares), UNIT)
                clients = float(measured(members, "imperfect_share").dropna().iloc[0])
                p_value = choices.p_above(clients) if choices.num >= MIN_SEEDS else math.nan
                preferred.append(Preference(setting, method, choices, clients, p_value))
    p_holm = holm([preference.p_value for preference in preferred])
    return [preference._replace(p_holm=p) for preference, p in zip(preferred, p_holm, strict=True)]


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
        chosen = {main_reference(methods), *by_accuracy(methods)[: share - 1]}
        rows = settings[setting]
        drawn.append(rows[rows["method"].isin(chosen)])
    return pd.concat(drawn)


def mean_accuracy(rows: pd.DataFrame) -> float:
    return float(rows["final_accuracy"].mean())


def by_accuracy(lines: Lines) -> list[str]:
    """Return the methods that have a mean final accuracy, from the highest to the lowest."""
    means = {method: mean_accuracy(rows) for method, rows in lines.items()}
    known = [method for method, mean in means.items() if not math.isnan(mean)]
    return sorted(known, key=lambda method: -means[method])
