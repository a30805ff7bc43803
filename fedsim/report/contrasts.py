"""Comparisons of methods with random selection, and the choice of the runs that figures show.

A report groups its runs in two steps. A *setting* is everything but the method and the seed: data
set, partition, model and so on. A *method* is a selector with its parameters. The frame of runs
(`fedsim.results.frames`) has a row for each run, and the seeds as its index. Each method of a
setting is one line of a figure, so `lines` maps the methods of a setting to their runs.

The *reference* of a method is what it is compared with: random selection where a setting has it, or
the method that the user names (`fedsim.report.presentation`).
*Imperfect clients* have wrong labels or send false updates (config group `clients`).

The tables, the headline and the figures of a report call this module with all of its runs.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from fedsim.results.frames import by, by_setting, finished_rows, measured, reference_of
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
"""Maximum number of lines in the figures of a report, over all settings together."""
MIN_LINES_PER_SETTING = 2
"""Minimum number of lines for which a setting is shown: its reference and its best method."""
Lines = Mapping[str, pd.DataFrame]
"""The runs of a setting by method."""


class Contrast(NamedTuple):
    """Final accuracy of a method minus that of its reference, paired by seed.

    `difference` is None if the two methods share fewer than two seeds. `p_holm` and `corrected` are
    the p-value and the interval of the difference, both corrected by Holm's method over all
    contrasts of a report (`statistics.corrected_alike`); nan without a difference.
    """

    setting: str
    method: str
    reference: str
    difference: Difference | None
    p_holm: float = math.nan
    corrected: tuple[float, float] = (math.nan, math.nan)


class Preference(NamedTuple):
    """The share of imperfect clients among a method's choices, next to their share of all clients.

    - `chosen_share` holds one number for each seed: the share of the method's choices that were
      imperfect clients. It estimates their mean.
    - `client_share` is the number of imperfect clients divided by the number of clients.
    - `p_value` is small if the method chose imperfect clients more often than by chance: a
      one-sided test against `client_share`. It is nan with fewer than `MIN_SEEDS` seeds.
    - `p_holm` is `p_value` corrected by Holm's method over all methods and settings of a report.
    """

    setting: str
    method: str
    chosen_share: Estimate
    client_share: float
    p_value: float
    p_holm: float = math.nan


def main_reference(lines: Lines) -> str:
    """Return the reference of a whole setting: its first reference, or without any its first
    method.

    One without finished runs is taken only if none has any.
    """
    candidates = _references(lines) or list(lines)
    for method in candidates:
        if len(finished_rows(lines[method])):
            return method
    return candidates[0]


def choose_reference(lines: Lines, method: str) -> str:
    """Return the method of a setting that `method` is compared with.

    A setting may have several references, for example random selection with different cohort sizes.
    Then it is the one whose config is most like that of `method`. A reference is its own reference
    if other methods are there to compare with it. If all methods are references, or none is, they
    are compared with the main reference.
    """
    references = _references(lines)
    if len(references) == len(lines):
        return main_reference(lines)
    return reference_of(lines, method, references) or main_reference(lines)


def _references(lines: Lines) -> list[str]:
    """Return the methods of a setting that others are compared with."""
    return [method for method, rows in lines.items() if rows["is_reference"].iloc[0]]


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
    return corrected_by_holm(contrasts)


def corrected_by_holm(contrasts: Sequence[Contrast]) -> list[Contrast]:
    """Return the contrasts with `p_holm` and `corrected`, by Holm's method over all of them."""
    corrections = corrected_alike([contrast.difference for contrast in contrasts])
    corrected = []
    for contrast, (p, interval) in zip(contrasts, corrections, strict=True):
        corrected.append(contrast._replace(p_holm=p, corrected=interval))
    return corrected


def preferences(runs: pd.DataFrame) -> list[Preference]:
    """Return the preferences of all methods in settings with imperfect clients.

    Methods without finished runs are skipped.
    """
    preferred = []
    for setting, rows in by_setting(runs).items():
        for method, members in by(rows, "method").items():
            # These measures are nan if a run is not finished, or if no client is imperfect.
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

    Each method of a setting is a line. If there are more than `MAX_LINES` lines in all, each
    setting gets an equal number of them: one for its main reference, the others for its most
    accurate methods. If that leaves fewer than `MIN_LINES_PER_SETTING`, only the first settings
    are shown.
    """
    finished = finished_rows(runs)
    settings = by_setting(finished)
    lines = {setting: by(rows, "method") for setting, rows in settings.items()}
    if sum(map(len, lines.values())) <= MAX_LINES:
        return finished
    lines_per_setting = max(MIN_LINES_PER_SETTING, MAX_LINES // len(lines))
    num_settings = MAX_LINES // lines_per_setting
    shown = []
    for setting in list(lines)[:num_settings]:
        reference = main_reference(lines[setting])
        others = [method for method in by_accuracy(lines[setting]) if method != reference]
        shown_methods = [reference, *others[: lines_per_setting - 1]]
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
