"""Intervals, tests and ranks of gains over sampled settings and seeds.

A table of gains has a row for each setting and a column for each seed, in percentage points.
"""

import math
from collections.abc import Mapping

import pandas as pd

from fedsim.core.arrays import Floats
from fedsim.results.ranking import mean_ranks, rank_tests
from fedsim.results.statistics import LEVEL, holm, t_quantile, t_tail
from scripts.benchmarks.answer.scores import CEILING, FIRST_BLOCK, REGIME, finals


def crossed_mean(values: Floats) -> dict[str, float]:
    """Return the mean over settings and seeds [S, R], with its 95 % interval and p-value.

    gain = mean + setting + seed + rest, where all but the mean are random. The mean squares MS of
    the two-way table estimate the variance of the mean: (MS of settings + MS of seeds - MS of the
    rest) / (S R). The last two cannot cancel more than there is: the variance is at least that of
    settings alone, and of seeds alone. Degrees of freedom are Satterthwaite's (1946). With fewer
    than two settings or seeds, only the mean is not nan.
    """
    num_settings, num_seeds = values.shape
    mean = float(values.mean())
    variance = df = math.nan
    if num_settings > 1 and num_seeds > 1:
        of_settings = values.mean(1, keepdims=True) - mean
        of_seeds = values.mean(0, keepdims=True) - mean
        rest = values - mean - of_settings - of_seeds
        dfs = (num_settings - 1, num_seeds - 1, (num_settings - 1) * (num_seeds - 1))
        ms_settings = num_seeds * float((of_settings**2).sum()) / dfs[0]
        ms_seeds = num_settings * float((of_seeds**2).sum()) / dfs[1]
        ms_rest = float((rest**2).sum()) / dfs[2]
        candidates = [
            (ms_settings, dfs[0]),
            (ms_seeds, dfs[1]),
            _satterthwaite((ms_settings, ms_seeds, -ms_rest), dfs),
        ]
        mean_square, df = max(candidates)
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


def _satterthwaite(terms: tuple[float, ...], dfs: tuple[int, ...]) -> tuple[float, float]:
    """Return a sum of signed mean squares, and the degrees of freedom that it is treated with."""
    total = sum(terms)
    spread = sum(term**2 / df for term, df in zip(terms, dfs, strict=True))
    return total, total**2 / spread if spread else math.nan


def intervals(table: pd.DataFrame) -> pd.DataFrame:
    """Return each method's mean gain in each regime with its interval; a row for each.

    `table` has rows by (method, schedule, num_rounds, setting). A setting counts if the method has
    all seeds there. `p_holm` is corrected over all rows except those of the ceiling.
    """
    rows = {}
    for key, of_method in table.groupby(["method", *REGIME]):
        complete = of_method.dropna().to_numpy()
        if len(complete):
            rows[key] = crossed_mean(complete)
    result = pd.DataFrame(rows).T.rename_axis(["method", *REGIME])
    is_tested = result.index.get_level_values("method") != CEILING
    result.loc[is_tested, "p_holm"] = holm(result.loc[is_tested, "p"].tolist())
    return result


def ranks(rounds: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return mean ranks (rows are methods, columns regimes), and the tests of each regime.

    The tests are Friedman's p-value and Nemenyi's critical difference, with the number of settings.
    Methods that have not run in all settings are not ranked.
    """
    means = finals(rounds).groupby(["setting", "method", *REGIME]).mean()
    by_method = means.unstack("method").drop(columns=CEILING, errors="ignore")
    by_method = by_method.dropna(axis="columns")
    mean_ranks_of, tests = {}, {}
    for regime, rows in by_method.groupby(REGIME):
        accuracies = rows.to_numpy().round(12)
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
