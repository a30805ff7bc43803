"""Intervals of gains over sampled settings and seeds, ranks of methods, and what changes the gains.

A gain is how much higher a method's accuracy is than that of random selection, in percentage
points. A table of gains has a row for each setting and a column for each seed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd
from scipy import special

from fedsim.core.arrays import Floats
from fedsim.results.ranking import mean_ranks, rank_tests
from fedsim.results.statistics import LEVEL, holm, t_quantile, t_tail
from scripts.benchmarks.answer.scores import FIRST_BLOCK, NO_METHODS, REGIME, finals


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
    """Return the mean of `values` [S, R] over S settings and R seeds with its interval, and the
    p-value of the hypothesis that the true mean is 0.

    Each value is the mean plus three random effects: one of the setting, one of the seed, and one
    of both. Their variances are estimated by restricted maximum likelihood (REML), and degrees of
    freedom are Satterthwaite's (1946), as in the R packages lme4 and lmerTest. They differ from
    lmerTest's if neither settings nor seeds have a variance: they are S - 1 and not S R - 1. With
    S R - 1, p-values near Holm's levels are too low in simulations (tests/test_answer.py).

    With fewer than two settings or seeds, the interval and the p-value are nan.
    """
    num_settings, num_seeds = values.shape
    mean = float(values.mean())
    variance = df = math.nan
    if num_settings > 1 and num_seeds > 1:
        scaled_variance, df = _scaled_variance(*_all_squares(values))
        variance = scaled_variance / values.size
    error = math.sqrt(variance)
    return {
        "settings": num_settings,
        "gain": mean,
        "half": t_quantile((1 + LEVEL) / 2, df) * error,
        "error": error,
        "df": df,
        "p": 2 * t_tail(abs(mean), error, df),
    }


def nested_mean(values: Floats) -> dict[str, float]:
    """Return the interval and the p-value of `crossed_mean` if seeds are independent between
    settings.

    Then the means of settings are independent values, and the interval is Student's over them.
    With one setting, both are nan.
    """
    means = values.mean(1)
    df = len(means) - 1
    error = float(means.std(ddof=1)) / math.sqrt(len(means)) if df else math.nan
    return {
        "half_nested": t_quantile((1 + LEVEL) / 2, df or math.nan) * error,
        "error_nested": error,
        "p_nested": 2 * t_tail(abs(float(means.mean())), error, df or math.nan),
    }


def p_of_seeds(values: Floats) -> float:
    """Return the p-value of the hypothesis that seeds have no effect on `values` [S, R] that is
    common to all settings (an F test of a two-way analysis of variance)."""
    _, seeds, rest = _all_squares(values)
    return float(special.fdtrc(seeds.df, rest.df, seeds.mean / rest.mean))


def _all_squares(values: Floats) -> tuple[Squares, Squares, Squares]:
    """Return the squares of settings, of seeds, and of the rest."""
    num_settings, num_seeds = values.shape
    mean = values.mean()
    of_settings = values.mean(1, keepdims=True) - mean
    of_seeds = values.mean(0, keepdims=True) - mean
    rest = values - mean - of_settings - of_seeds
    return (
        Squares(num_seeds * float((of_settings**2).sum()), num_settings - 1),
        Squares(num_settings * float((of_seeds**2).sum()), num_seeds - 1),
        Squares(float((rest**2).sum()), (num_settings - 1) * (num_seeds - 1)),
    )


def _scaled_variance(settings: Squares, seeds: Squares, rest: Squares) -> tuple[float, float]:
    """Return S R times the variance of the mean, and its degrees of freedom.

    The mean square of the rest has the expectation E = var_rest, that of settings
    A = E + R var_setting, and that of seeds B = E + S var_seed. S R times the variance of the mean
    is A + B - E. No variance is negative, so A and B are at least E. If a mean square is below that
    of the rest, REML takes its variance as 0. Both squares are then pooled to estimate E. For
    example, if A = E, what remains of A + B - E is B.
    """
    for one, other in ((settings, seeds), (seeds, settings)):
        only_other_has_a_variance = other.mean > one.pooled(rest).mean
        if one.mean < rest.mean and only_other_has_a_variance:
            return other.mean, other.df
    if settings.mean < rest.mean or seeds.mean < rest.mean:  # neither has a variance: A = B = E
        return settings.pooled(seeds).pooled(rest).mean, settings.df
    scaled_variance = settings.mean + seeds.mean - rest.mean
    spread = sum(squares.mean**2 / squares.df for squares in (settings, seeds, rest))
    if not spread:  # all values are equal
        return scaled_variance, math.nan
    return scaled_variance, scaled_variance**2 / spread


def intervals(table: pd.DataFrame) -> pd.DataFrame:
    """Return the mean gain of each group with its interval and p-value (`crossed_mean` and
    `nested_mean`); a row for each.

    `table` has rows by (method, ..., setting). Rows that differ only in the setting are a group. A
    setting counts if it has all seeds. `p_holm` and `p_nested` are corrected over all groups except
    those of `NO_METHODS`.
    """
    groups = [name for name in table.index.names if name != "setting"]
    rows = {}
    for key, of_group in table.groupby(groups):
        complete = of_group.dropna().to_numpy()
        if len(complete):
            rows[key] = crossed_mean(complete) | nested_mean(complete)
    result = pd.DataFrame.from_dict(rows, orient="index")
    result.index = pd.MultiIndex.from_tuples(result.index, names=groups)
    is_tested = ~result.index.get_level_values("method").isin(NO_METHODS)
    p_nested = result.pop("p_nested")
    result.loc[is_tested, "p_holm"] = holm(result.loc[is_tested, "p"].tolist())
    result.loc[is_tested, "p_nested"] = holm(p_nested[is_tested].tolist())
    return result


def ranks(rounds: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return mean ranks (rows are methods, columns regimes), and the tests of each regime.

    The tests have a column for each regime, too: Friedman's p-value, Nemenyi's critical difference,
    and the number of settings. A method that lacks a setting or a seed in any regime is not ranked.
    """
    means = finals(rounds).unstack("seed").dropna().mean(axis="columns")
    by_method = means.unstack("method").drop(columns=list(NO_METHODS), errors="ignore")
    by_method = by_method.dropna(axis="columns")
    mean_ranks_of, tests = {}, {}
    for regime, rows in by_method.groupby(REGIME):
        accuracies = rows.to_numpy().round(12)  # so that rounding errors do not break ties
        mean_ranks_of[regime] = pd.Series(mean_ranks(accuracies), rows.columns)
        p, critical = rank_tests(accuracies)
        tests[regime] = {"friedman": p, "critical": critical, "settings": len(rows)}
    return pd.DataFrame(mean_ranks_of), pd.DataFrame(tests)


def what_changes(table: pd.DataFrame, others: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return each group's mean gain and what becomes of it under other choices; a row for each.

    `table` has rows by (..., setting). Rows that differ only in the setting are a group. The
    columns are the number of settings, the gain, the lowest and the highest gain if one setting is
    left out, the median over settings, the gain by each of the `others` (tables of gains by other
    scores), and the gain on each data set by itself.
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
