"""Intervals and ranks of gains over sampled settings and seeds, and what changes the gains.

A table of gains has a row for each setting and a column for each seed, in percentage points.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from fedsim.core.arrays import Floats
from fedsim.results.ranking import mean_ranks, rank_tests
from fedsim.results.statistics import LEVEL, holm, t_quantile, t_tail
from scripts.benchmarks.answer.scores import CEILING, FIRST_BLOCK, REGIME, finals


@dataclass(frozen=True)
class Squares:
    """A sum of squares of an analysis of variance, with its degrees of freedom."""

    total: float
    df: int

    @property
    def mean(self) -> float:
        return self.total / self.df

    def pooled(self, other: "Squares") -> "Squares":
        return Squares(self.total + other.total, self.df + other.df)


def crossed_mean(values: Floats) -> dict[str, float]:
    """Return the mean over settings and seeds [S, R] with its interval, and the p-value of 0.

    Each value is the mean plus three random effects: one of the setting, one of the seed, and one
    of both. The variances of the effects are estimated by restricted maximum likelihood (REML),
    and the degrees of freedom are Satterthwaite's (1946), as by lmer and lmerTest in R. Where R
    finds that neither settings nor seeds have a variance, it has S R - 1 degrees of freedom. Here
    they are S - 1, because p-values near Holm's levels would be too low otherwise. With fewer than
    two settings or seeds, the interval and the p-value are nan.
    """
    num_settings, num_seeds = values.shape
    mean = float(values.mean())
    variance = df = math.nan
    if num_settings > 1 and num_seeds > 1:
        of_settings = values.mean(1, keepdims=True) - mean
        of_seeds = values.mean(0, keepdims=True) - mean
        rest = values - mean - of_settings - of_seeds
        mean_square, df = _square_of_mean(
            Squares(num_seeds * float((of_settings**2).sum()), num_settings - 1),
            Squares(num_settings * float((of_seeds**2).sum()), num_seeds - 1),
            Squares(float((rest**2).sum()), (num_settings - 1) * (num_seeds - 1)),
        )
        variance = mean_square / values.size
    error = math.sqrt(variance)
    return {
        "settings": num_settings,
        "gain": mean,
        "half": t_quantile((1 + LEVEL) / 2, df) * error,
        "error": error,
        "df": df,
        "p": 2 * t_tail(abs(mean), error, df),
    }


def _square_of_mean(settings: Squares, seeds: Squares, rest: Squares) -> tuple[float, float]:
    """Return S R times the variance of the mean, and its degrees of freedom.

    The expected mean square of settings is that of the rest plus R times the variance of settings.
    That of seeds is alike. So if both are above the rest, S R times the variance of the mean is
    settings + seeds - rest. A variance that would be negative is 0. Then the rest is estimated from
    both sums of squares.
    """
    for one, other in ((settings, seeds), (seeds, settings)):
        if one.mean < rest.mean and other.mean > one.pooled(rest).mean:
            return other.mean, other.df
    if settings.mean < rest.mean or seeds.mean < rest.mean:  # neither has a variance
        return settings.pooled(seeds).pooled(rest).mean, settings.df
    mean_square = settings.mean + seeds.mean - rest.mean
    spread = sum(squares.mean**2 / squares.df for squares in (settings, seeds, rest))
    return mean_square, mean_square**2 / spread if spread else math.nan


def intervals(table: pd.DataFrame) -> pd.DataFrame:
    """Return the mean gain of each group with its interval and p-value; a row for each.

    `table` has rows by (method, ..., setting). Rows that differ only in the setting are a group. A
    setting counts if it has all seeds. `p_holm` is corrected over all groups except those of the
    ceiling, which is no method.
    """
    groups = [name for name in table.index.names if name != "setting"]
    rows = {}
    for key, of_group in table.groupby(groups):
        complete = of_group.dropna().to_numpy()
        if len(complete):
            rows[key] = crossed_mean(complete)
    result = pd.DataFrame.from_dict(rows, orient="index")
    result.index = pd.MultiIndex.from_tuples(result.index, names=groups)
    is_tested = result.index.get_level_values("method") != CEILING
    result.loc[is_tested, "p_holm"] = holm(result.loc[is_tested, "p"].tolist())
    return result


def ranks(rounds: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return mean ranks (rows are methods, columns regimes), and the tests of each regime.

    The tests have a column for each regime, too: Friedman's p-value, Nemenyi's critical difference,
    and the number of settings. Methods that have not run in all settings at all seeds are not
    ranked.
    """
    means = finals(rounds).unstack("seed").dropna().mean(axis="columns")
    by_method = means.unstack("method").drop(columns=CEILING, errors="ignore")
    by_method = by_method.dropna(axis="columns")
    mean_ranks_of, tests = {}, {}
    for regime, rows in by_method.groupby(REGIME):
        accuracies = rows.to_numpy().round(12)  # so that rounding errors do not break ties
        mean_ranks_of[regime] = pd.Series(mean_ranks(accuracies), rows.columns)
        p, critical = rank_tests(accuracies)
        tests[regime] = {"friedman": p, "critical": critical, "settings": len(rows)}
    return pd.DataFrame(mean_ranks_of), pd.DataFrame(tests)


def what_changes(table: pd.DataFrame, others: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return what changes mean gains, a row for each of the groups `table` is a mean over.

    `table` has rows by (..., setting). The columns are the gain, the lowest and the highest gain if
    one setting is left out, the median over settings, the gain with each of the `others` (accuracy
    scores) instead, and the gain on each data set by itself.
    """
    groups = [name for name in table.index.names if name != "setting"]
    by_setting = table.dropna().mean(axis="columns")
    grouped = by_setting.groupby(groups)
    num, total = grouped.transform("size"), grouped.transform("sum")
    without_one = ((total - by_setting) / (num - 1)).groupby(groups)
    data = by_setting.index.get_level_values("setting").map(FIRST_BLOCK)
    columns = {
        "settings": grouped.size(),
        "gain": grouped.mean(),
        "lowest": without_one.min(),
        "highest": without_one.max(),
        "median": grouped.median(),
    }
    for name, other in others.items():
        columns[name] = other.dropna().mean(axis="columns").groupby(groups).mean()
    for name, of_data in by_setting.groupby(data):
        columns[name] = of_data.groupby(groups).mean()
    return pd.DataFrame(columns)
