"""Comparisons of methods within a setting, and the choice of the runs that figures show.

A setting is one combination of data set, partition, model, and so on (`fedsim.results.frames`). In
figures and on the page each method of a setting is a line, so that `lines` here are the runs of a
setting by method. The reference is the method that another one is compared with: random selection
where there is one. Imperfect clients have noisy labels, for example (config group `clients`).
"""

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
from fedsim.results.statistics import (
    MIN_SEEDS,
    UNIT,
    Difference,
    Estimate,
    corrected_alike,
    holm,
    paired,
    pooled,
)

MAX_LINES = 60
"""Number of lines that figures and curves show, of all settings together."""
MIN_LINES_PER_SETTING = 2
"""A setting that figures show has at least its reference and one other line."""
Lines = Mapping[str, pd.DataFrame]
"""The runs of a setting by method."""


class Contrast(NamedTuple):
    """Final accuracy of a method minus that of its reference, paired by seed.

    `difference` is None with fewer than two common seeds. `p_holm` is its p-value by Holm's
    correction over all contrasts of a report, and `corrected` the interval that is corrected alike
    (`Mean.corrected_interval`); nan without a difference.
    """

    setting: str
    method: str
    reference: str
    difference: Difference | None
    p_holm: float = math.nan
    corrected: tuple[float, float] = (math.nan, math.nan)


class Preference(NamedTuple):
    """How often a method chose imperfect clients.

    `chosen_share` is the mean over seeds of the share of the method's choices that went to
    imperfect clients. `client_share` is the share of all clients that are imperfect.

    `p_value` is of the one-sided test of the hypothesis that `chosen_share` is at most
    `client_share`; nan with fewer than `MIN_SEEDS` seeds. `p_holm` is corrected over all methods
    and settings of a report.
    """

    setting: str
    method: str
    chosen_share: Estimate
    client_share: float
    p_value: float
    p_holm: float = math.nan


def main_reference(lines: Lines) -> str:
    """Return the first method of a setting that is random selection, otherwise the first method."""
    for method, rows in lines.items():
        if selector_of(rows) == REFERENCE:
            return method
    return next(iter(lines))


def choose_reference(lines: Lines, method: str) -> str:
    """Return the method of a setting that `method` is compared with.

    It is the random selection whose config is most like that of `method`. In a setting with random
    selection alone, or without any, it is the first method. It can be `method` itself.
    """
    if all(selector_of(rows) == REFERENCE for rows in lines.values()):
        return main_reference(lines)
    return reference_of(lines, method, REFERENCE) or main_reference(lines)


def lead_over(rows: pd.DataFrame, reference: pd.DataFrame) -> Difference | None:
    """Return final accuracy of `rows` minus that of `reference`, paired by seed; None with fewer
    than two common seeds."""
    return pooled([paired(rows["final_accuracy"], reference["final_accuracy"])])


def to_references(runs: pd.DataFrame) -> list[Contrast]:
    """Return the contrast of each method, in each setting, except those of references with
    themselves."""
    contrasts = []
    for setting, rows in by_setting(runs).items():
        lines = by(rows, "method")
        for method in lines:
            reference = choose_reference(lines, method)
            if reference != method:
                lead = lead_over(lines[method], lines[reference])
                contrasts.append(Contrast(setting, method, reference, lead))
    corrected = corrected_alike([contrast.difference for contrast in contrasts])
    return [
        contrast._replace(p_holm=p, corrected=interval)
        for contrast, (p, interval) in zip(contrasts, corrected, strict=True)
    ]


def preferences(runs: pd.DataFrame) -> list[Preference]:
    """Return the preferences of all methods in settings with imperfect clients.

    Methods without finished runs are skipped.
    """
    preferred = []
    for setting, rows in by_setting(runs).items():
        for method, members in by(rows, "method").items():
            # Both measures are nan for runs that are not finished, and without imperfect clients.
            chosen_shares = measured(members, "imperfect_choices").dropna()
            if len(chosen_shares):
                chosen_share = Estimate(tuple(chosen_shares), UNIT)
                client_share = float(measured(members, "imperfect_share").dropna().iloc[0])
                p_value = math.nan
                if chosen_share.num >= MIN_SEEDS:
                    p_value = chosen_share.p_above(client_share)
                preference = Preference(setting, method, chosen_share, client_share, p_value)
                preferred.append(preference)
    p_holm = holm([preference.p_value for preference in preferred])
    return [preference._replace(p_holm=p) for preference, p in zip(preferred, p_holm, strict=True)]


def runs_to_show(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the finished runs that figures and curves show.

    If these have more than `MAX_LINES` lines, at most the first 30 settings are shown, in their
    sorted order, each with its reference and its most accurate methods.
    """
    finished = done(runs)
    settings = by_setting(finished)
    lines = {setting: by(rows, "method") for setting, rows in settings.items()}
    if sum(map(len, lines.values())) <= MAX_LINES:
        return finished
    num_per_setting = max(MIN_LINES_PER_SETTING, MAX_LINES // len(lines))
    num_settings = MAX_LINES // num_per_setting
    shown = []
    for setting in list(lines)[:num_settings]:
        methods = lines[setting]
        shown_methods = {main_reference(methods), *by_accuracy(methods)[: num_per_setting - 1]}
        rows = settings[setting]
        shown.append(rows[rows["method"].isin(shown_methods)])
    return pd.concat(shown)


def mean_accuracy(rows: pd.DataFrame) -> float:
    """Return the mean final accuracy over seeds; nan if no run is finished."""
    return float(rows["final_accuracy"].mean())


def by_accuracy(lines: Lines) -> list[str]:
    """Return the methods that have a mean final accuracy, from the highest to the lowest."""
    means = {method: mean_accuracy(rows) for method, rows in lines.items()}
    known = [method for method, mean in means.items() if not math.isnan(mean)]
    return sorted(known, key=lambda method: -means[method])
