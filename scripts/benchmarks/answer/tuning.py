"""Summaries of the trials of tuning: the chosen values, and the cost of a wrong learning rate."""

from pathlib import Path

import pandas as pd

from fedsim.benchmark.rules import HORIZONS, RATES
from fedsim.results.labels import REFERENCE

CASE = ["method", "setting", "schedule"]
"""A method has a learning rate for each setting and schedule, and each number of rounds."""
COLLAPSE = 10
"""A rate that costs more points than this makes training collapse."""


def read_trials(folder: Path) -> pd.DataFrame:
    """Return the trials of all submissions in a folder, with their method and accuracy in per cent.

    Mean accuracies have to be rounded (`_means`) before they are compared. A trial that diverged
    has the accuracy 0, as in tuning. `point` is empty for the defaults.
    """
    frames = []
    for card in sorted(folder.glob("*.yaml")):
        path = card.with_suffix(".csv")
        if path.is_file():
            frames.append(pd.read_csv(path).assign(method=card.stem))
    if not frames:
        return pd.DataFrame()
    trials = pd.concat(frames, ignore_index=True)
    shares = pd.to_numeric(trials["final_accuracy"].replace("diverged", 0.0))
    return trials.assign(accuracy=100 * shares, point=trials["point"].fillna(""))


def _means(trials: pd.DataFrame, keys: list[str]) -> pd.Series:
    """Return mean accuracies over seeds, rounded so that rounding errors do not decide between
    equal ones."""
    return trials.groupby(keys)["accuracy"].mean().round(10)


def by_rate(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the mean accuracy over seeds with a method's defaults at the first horizon: rows by
    `CASE`, a column for each rate."""
    defaults = trials[(trials["point"] == "") & (trials["num_rounds"] == HORIZONS[0])]
    means = _means(defaults, [*CASE, "learning_rate"])
    return means.unstack("learning_rate").reindex(columns=list(RATES))


def summarise(trials: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each method.

    `same` is the share of cases in which its rate at the first horizon is that of random selection,
    and `edge` the share in which it is the lowest or the highest of all. `too_low` and `too_high`
    are how many points the next lower and the next higher rate cost, as means over cases that have
    one. `with_higher` is the number of cases that have a higher rate, and `collapses` the number in
    which it costs more than `COLLAPSE` points. `lower` is the share of cases in which longer runs
    have a lower rate. `own` is the share of settings in which a point of its own parameters was
    chosen.
    """
    accuracies = by_rate(trials)
    chosen = accuracies.idxmax(axis="columns")  # of equal ones the lowest
    of_random = chosen.xs(REFERENCE, level="method").rename("of_random")
    cases = chosen.rename("rate").to_frame().join(of_random, on=CASE[1:])
    cases["same"] = cases["rate"] == cases["of_random"]
    cases["edge"] = cases["rate"].isin([RATES[0], RATES[-1]])
    is_chosen = accuracies.columns.to_numpy() == chosen.to_numpy()[:, None]
    for name, step in (("too_low", 1), ("too_high", -1)):
        costs = accuracies - accuracies.shift(step, axis="columns")
        cases[name] = costs.where(is_chosen).max(axis="columns")  # of one value, or of none: nan
    cases["collapse"] = cases["too_high"] > COLLAPSE
    by_method = cases.groupby("method")
    summary = by_method[["same", "edge", "too_low", "too_high"]].mean()
    summary["collapses"] = by_method["collapse"].sum()
    summary["with_higher"] = by_method["too_high"].count()
    own = _share_of_own_points(trials, chosen)
    return summary.assign(lower=_share_of_lower_rates(trials, chosen), own=own)


def _share_of_lower_rates(trials: pd.DataFrame, chosen: pd.Series) -> pd.Series:
    """Return for each method the share of cases in which its rate for longer runs is below that at
    the first horizon (`chosen`)."""
    longer = trials[trials["num_rounds"] > HORIZONS[0]]
    means = _means(longer, [*CASE, "num_rounds", "learning_rate"])
    rates = means.unstack("learning_rate").idxmax(axis="columns")  # of equal ones the lowest
    first_rates = chosen.reindex(rates.index.droplevel("num_rounds")).to_numpy()
    return (rates < first_rates).groupby("method").mean()


def _share_of_own_points(trials: pd.DataFrame, chosen: pd.Series) -> pd.Series:
    """Return for each method the share of settings in which a point beats the defaults."""
    rates = chosen.xs("constant", level="schedule").rename("rate")
    is_point = (trials["schedule"] == "constant") & (trials["num_rounds"] == HORIZONS[0])
    points = trials[is_point].join(rates, on=CASE[:2])
    points = points[points["learning_rate"] == points["rate"]]
    means = _means(points, [*CASE[:2], "point"])
    best = means.groupby(CASE[:2]).max()
    of_defaults = means.xs("", level="point")
    return (best > of_defaults).groupby("method").mean()
