"""Intervals of gains over sampled settings and seeds, ranks of methods, and what changes the gains.

A gain is how much higher a method's accuracy is than that of random selection, in percentage
points. A table of gains has a row for each setting and a column for each seed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from fedsim.benchmark.rules import CONTROLS
from fedsim.core.arrays import Floats
from fedsim.results.ranking import mean_ranks, rank_tests
from fedsim.results.statistics import LEVEL, holm, t_quantile, t_tail
from scripts.benchmarks.answer.scores import FIRST_BLOCK, NO_METHODS, REGIME, finals

NUM_PERMUTATIONS = 2000


@dataclass(frozen=True)
class Squares:
    """A sum of squares of an analysis of variance, with its degrees of freedom."""

    total: float
    df: int

    @property
    def mean(self) -> float:
        """The mean square."""
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

    With fewer than two settings or seeds, or fewer than one degree of freedom, the interval and the
    p-value are nan.
    """
    num_settings, num_seeds = values.shape
    mean = float(values.mean())
    variance = df = math.nan
    if num_settings > 1 and num_seeds > 1:
        scaled_variance, df = _scaled_variance(*_all_squares(values))
        variance = scaled_variance / values.size
    error = math.sqrt(variance)
    quantile = t_quantile((1 + LEVEL) / 2, df) if df >= 1 else math.nan
    return {
        "settings": num_settings,
        "gain": mean,
        "half": quantile * error,
        "error": error,
        "df": df,
        "p": 2 * t_tail(abs(mean), error, df),
    }


def effect_of_seeds(gains: Floats) -> dict[str, float]:
    """Test whether seeds have an effect on `gains` [M, S, R] that is common to S settings.

    The statistic is the mean over M methods of F, the mean square of R seeds divided by that of the
    rest (two-way analysis of variance). The test exchanges the seeds within each setting at random,
    for all methods alike. Returns the statistic (`f`), its mean over permutations (`f_without`),
    and the p-value (`p`): about the share of permutations in which it is at least as high. S and R
    must be at least 2.
    """
    _, num_settings, num_seeds = gains.shape
    settings = np.arange(num_settings)

    def mean_f(*seeds: NDArray[np.intp]) -> float:
        """Return the statistic if column r of setting s has the value of seed `seeds[r][s]`."""
        places = np.stack(seeds, axis=1)
        values = []
        for of_method in gains:
            _, of_seeds, rest = _all_squares(of_method[settings[:, None], places])
            values.append(of_seeds.mean / rest.mean)
        return float(np.mean(values))

    result = stats.permutation_test(
        [np.full(num_settings, seed) for seed in range(num_seeds)],
        mean_f,
        permutation_type="samples",  # exchange values of the same setting
        alternative="greater",
        n_resamples=NUM_PERMUTATIONS,
        random_state=0,
    )
    without = float(np.mean(result.null_distribution))
    return {"f": float(result.statistic), "f_without": without, "p": float(result.pvalue)}


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
    is A + B - E. No variance is negative, so A and B are at least E. Estimates may violate this: if
    a mean square is below that of the rest, REML takes its variance as 0, and pools both squares to
    estimate E. The other variance is then positive if its mean square is above the pooled one. For
    example, if only B is above E, what remains of A + B - E is B.
    """
    for one, other in ((settings, seeds), (seeds, settings)):
        other_has_a_variance = other.mean > one.pooled(rest).mean
        if one.mean < rest.mean and other_has_a_variance:
            return other.mean, other.df
    # Neither has a variance: A = B = E. `crossed_mean` says why the degrees are those of settings.
    if settings.mean < rest.mean or seeds.mean < rest.mean:
        return settings.pooled(seeds).pooled(rest).mean, settings.df
    scaled_variance = settings.mean + seeds.mean - rest.mean
    spread = sum(squares.mean**2 / squares.df for squares in (settings, seeds, rest))
    if not spread:  # all values are equal
        return scaled_variance, math.nan
    return scaled_variance, scaled_variance**2 / spread


def intervals(table: pd.DataFrame) -> pd.DataFrame:
    """Return the mean gain of each group with its interval and p-value (`crossed_mean`); a row for
    each.

    `table` has rows by (method, ..., setting). Rows that differ only in the setting are a group. A
    setting counts if it has all seeds. `p_holm` is corrected over all groups of methods. Controls
    and `NO_METHODS` are not tested.
    """
    groups = [name for name in table.index.names if name != "setting"]
    rows = {}
    for key, of_group in table.groupby(groups):
        complete = of_group.dropna().to_numpy()
        if len(complete):
            rows[key] = crossed_mean(complete)
    result = pd.DataFrame.from_dict(rows, orient="index")
    result.index = pd.MultiIndex.from_tuples(result.index, names=groups)
    is_tested = ~result.index.get_level_values("method").isin([*CONTROLS, *NO_METHODS])
    result.loc[is_tested, "p_holm"] = holm(result.loc[is_tested, "p"].tolist())
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
