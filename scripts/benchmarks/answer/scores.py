"""Accuracies, gains and prices of the selection benchmark, version 1, from its scored runs.

The input has one row for each evaluated round of each run, as `read_submissions` returns it. Runs
are told apart by `KEYS`. `accuracy` is a share, `bytes` and `seconds` are sums since the first
round. Round 0 is the model before training. It says only that there is a run.

Accuracies and gains that are returned are in per cent and in percentage points. A run that diverged
has the accuracy of a guess throughout.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from fedsim.benchmark.rules import (
    FIRST_GROUP,
    HORIZONS,
    SCHEDULES,
    SEEDS,
    STRATA,
    draw_settings,
)
from fedsim.results.labels import REFERENCE

REGIME = ["schedule", "num_rounds"]
KEYS = ["setting", "method", *REGIME, "seed"]
PAIR = ["setting", *REGIME, "seed"]
"""A run has these in common with the run of random selection that it is compared with."""
NO_METHODS = ("full", "clairvoyant")
"""Selectors that serve as references: full participation, and the search for good cohorts. They are
neither tested nor ranked."""
WINDOW, NUM_EVALUATED = 20, 4
"""The final accuracy is a mean over the last 20 rounds, of which four are evaluated."""
DATA = {stratum.name: stratum.data for stratum in STRATA}
FIRST_BLOCK = {draw.name: DATA[draw.stratum] for draw in draw_settings()}
"""The data of each sampled setting. All tests are over these; other settings vary one thing in a
base."""
ROUNDING = 1e-9


def in_results(rounds: pd.DataFrame, methods: Sequence[str] = FIRST_GROUP) -> pd.DataFrame:
    """Return the rows of the settings in which each of the `methods` has all its scored runs."""
    num_runs = all_runs(rounds).groupby(["setting", "method"]).size().unstack(fill_value=0)
    of_methods = num_runs.reindex(columns=list(methods), fill_value=0)
    is_complete = (of_methods == len(SCHEDULES) * len(HORIZONS) * len(SEEDS)).all(axis="columns")
    return rounds[is_complete[rounds["setting"]].to_numpy()]


def sampled(rounds: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the first block."""
    return rounds[rounds["setting"].isin(FIRST_BLOCK)]


def all_runs(rounds: pd.DataFrame) -> pd.DataFrame:
    """Return each run's status, and the accuracy of a guess in per cent, by `KEYS`."""
    runs = rounds.groupby(KEYS)[["status", "num_classes"]].first()
    return runs.assign(guess=100 / runs["num_classes"])


def with_failures(shares: pd.Series, rounds: pd.DataFrame) -> pd.Series:
    """Return accuracies in per cent of all runs, from those of some as shares.

    Runs that diverged, or that have no share, have the accuracy of a guess.
    """
    runs = all_runs(rounds)
    accuracies = 100 * shares.reindex(runs.index)
    return accuracies.where(runs["status"] == "done").fillna(runs["guess"]).rename("accuracy")


def finals(rounds: pd.DataFrame) -> pd.Series:
    """Return each run's final accuracy: the mean over the evaluated ones of its last 20 rounds.

    Raises `ValueError` for a run that is done but has no such round.
    """
    is_last = rounds["round"] > rounds["num_rounds"] - WINDOW
    means = rounds[is_last].groupby(KEYS)["accuracy"].mean()
    done = rounds[rounds["status"] == "done"].groupby(KEYS).size().index
    if missing := sorted(set(done) - set(means.index)):
        raise ValueError(f"runs without an accuracy in their last {WINDOW} rounds: {missing}")
    return with_failures(means, rounds)


def best_rounds(rounds: pd.DataFrame) -> pd.Series:
    """Return the highest accuracy of each run."""
    trained = rounds[rounds["round"] > 0]
    return with_failures(trained.groupby(KEYS)["accuracy"].max(), rounds)


def totals_of_random(rounds: pd.DataFrame, cost: str) -> pd.Series:
    """Return the cost of a whole run of random selection, by `PAIR`."""
    return rounds[rounds["method"] == REFERENCE].groupby(PAIR)[cost].max()


def at_budget(rounds: pd.DataFrame, cost: str, share: float = 1.0) -> pd.Series:
    """Return each run's accuracy in the last evaluated round within a budget.

    The budget is a share of the cost of random selection in all, in `bytes`, `seconds` or rounds
    (`round`). If no evaluated round fits, it is the accuracy of a guess.
    """
    budgets = rounds.join((share * totals_of_random(rounds, cost)).rename("budget"), on=PAIR)
    is_within = budgets[cost] <= budgets["budget"] * (1 + ROUNDING)
    affordable = budgets[is_within & (budgets["round"] > 0)].sort_values("round")
    return with_failures(affordable.groupby(KEYS)["accuracy"].last(), rounds)


def price(rounds: pd.DataFrame, cost: str) -> pd.Series:
    """Return what each run spends until random selection's final accuracy, as a share of the cost
    of random selection in all; inf if the run does not reach it.

    Like the final accuracy, what reaches it is a mean over the evaluated ones of 20 rounds.
    """
    runs = all_runs(rounds).index
    rounds = rounds[rounds["round"] > 0].sort_values([*KEYS, "round"])
    means = 100 * rounds.groupby(KEYS)["accuracy"].rolling(NUM_EVALUATED).mean()
    smoothed = means.droplevel(list(range(len(KEYS))))  # the rows of `rounds`
    targets = finals(rounds).xs(REFERENCE, level="method").rename("target")
    totals = totals_of_random(rounds, cost).rename("total")
    targeted = rounds.assign(smoothed=smoothed).join(targets, on=PAIR).join(totals, on=PAIR)
    is_reached = targeted["smoothed"] >= targeted["target"] - ROUNDING
    reached = targeted[is_reached & (targeted["status"] == "done")]
    shares = reached.assign(share=reached[cost] / reached["total"]).groupby(KEYS)["share"].first()
    return shares.reindex(runs, fill_value=np.inf)


def gains(accuracies: pd.Series, baseline: Sequence[str] = (REFERENCE,)) -> pd.DataFrame:
    """Return gains over random selection: rows by (method, schedule, num_rounds, setting), a column
    for each seed.

    A gain is the difference to the mean of the `baseline`. It is nan if one of these runs is
    missing.
    """
    by_method = accuracies.unstack("method")
    of_baseline = by_method[list(baseline)].mean(axis="columns", skipna=False)
    differences = by_method.drop(columns=list(baseline)).sub(of_baseline, axis=0)
    return as_table(differences.stack().rename("gain"))


def as_table(values: pd.Series) -> pd.DataFrame:
    """Return values by `KEYS` with a column for each seed."""
    return (
        values.reorder_levels(["method", *REGIME, "setting", "seed"]).unstack("seed").sort_index()
    )


def schedule_gains(accuracies: pd.Series) -> pd.DataFrame:
    """Return how much more accurate random selection is under other schedules than at a constant
    rate, after as many rounds. Rows and columns are those of `gains`."""
    of_random = as_table(accuracies).loc[[REFERENCE]]
    constant = of_random.xs("constant", level="schedule")
    return of_random.drop("constant", level="schedule").sub(constant)


def over_regimes(table: pd.DataFrame) -> pd.DataFrame:
    """Return the mean over regimes by (method, setting), where a method has run in all of them."""
    means = table.groupby(["method", "setting"]).mean()
    num_regimes = len(table.index.droplevel(["method", "setting"]).unique())
    is_complete = table.dropna().groupby(["method", "setting"]).size() == num_regimes
    return means[is_complete.reindex(means.index, fill_value=False)]
