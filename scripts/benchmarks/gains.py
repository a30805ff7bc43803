"""Print what changes the selection benchmark's answer: horizon, budget, and choice of settings.

    uv run python scripts/benchmark.py gains
    uv run python scripts/benchmark.py gains --runs FOLDER_OR_PARQUET ... --methods fedcor,refl

Every number of docs/benchmark_v0.md that `fedsim report` does not print comes from here.

- A setting is a file of conf/cell/: a data set, a partition, and what else it has. A method is a
  selector.
- A gain is a method's accuracy minus that of `random` in the same setting at the same seed, in
  percentage points.
- Rounds count from 1. Bytes are those of all clients in both directions.
- A run that diverged ends early. Its final accuracy is that of a guess among ten classes.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
from rich.console import Console
from scipy import stats

from fedsim.core.arrays import Floats
from fedsim.core.record import FINAL_WINDOW
from fedsim.results.ranking import rank_tests
from fedsim.results.statistics import holm
from scripts.benchmarks.processes import ROOT

RESULTS = ROOT / "docs" / "results"
RENAMED = {"choice.cell": "setting", "choice.selector": "method"}
KEYS = ["setting", "method", "seed"]
NUM_ROUNDS = 200
HORIZONS = (50, 100, 150, 200)
GUESS = 0.1
"""Accuracy of a guess among ten classes."""
DISTINCT = [
    f"{data}_{skew}"
    for data in ("cifar", "fmnist")
    for skew in ("shards_1", "shards_2", "dir_01", "dir_05", "iid", "sizes")
]
"""Settings whose partition no other setting has. The other twelve vary one thing in these."""
DEVELOPMENT = ("cifar_shards_1", "cifar_dir_05", "cifar_sizes")
TUNED = ("afl", "fedcbs", "gpfl", "hics", "oort", "power_of_choice")
TUNED_SEEDS = list(range(6))
METHODS = "entropy_greedy,fedcbs,fedcor,clustered2,fl_dp3s,refl"


# --- accuracies of runs ---


def read_rounds(paths: Sequence[Path]) -> pd.DataFrame:
    """Return one row for each round of each run.

    The columns are setting, method, seed, round, test_accuracy and the cumulative bytes.
    """
    columns = [*RENAMED, "seed", "round", "test_accuracy", "bytes_down", "bytes_up"]
    tables = [pq.read_table(path, columns=columns).to_pandas() for path in paths]
    rounds = pd.concat(tables, ignore_index=True).rename(columns=RENAMED)
    rounds[["setting", "method"]] = rounds[["setting", "method"]].astype(str)
    rounds = rounds.drop_duplicates([*KEYS, "round"]).sort_values([*KEYS, "round"])
    rounds["bytes"] = rounds["bytes_down"] + rounds["bytes_up"]
    rounds["bytes"] = rounds.groupby(KEYS)["bytes"].cumsum()
    return rounds[[*KEYS, "round", "test_accuracy", "bytes"]]


def accuracies(rounds: pd.DataFrame, last_round: int = NUM_ROUNDS) -> pd.Series:
    """Return each run's accuracy in per cent: the mean of the 11 rounds up to `last_round`.

    A run that ended before that round has diverged.
    """
    ends = rounds.groupby(KEYS)["round"].max()
    in_window = rounds["round"].between(last_round - FINAL_WINDOW + 1, last_round)
    means = rounds[in_window].groupby(KEYS)["test_accuracy"].mean().reindex(ends.index)
    return 100 * means.where(ends >= last_round, GUESS)


def best_accuracies(rounds: pd.DataFrame) -> pd.Series:
    """Return the highest accuracy of each run in per cent, also of runs that diverged later."""
    return 100 * rounds.groupby(KEYS)["test_accuracy"].max()


def accuracies_at_equal_bytes(rounds: pd.DataFrame) -> pd.Series:
    """Return each run's accuracy at the bytes that random selection sends in all.

    It is the mean of the last 11 rounds that fit into the bytes of random selection in the same
    setting at the same seed. If no round fits, it is the accuracy of a guess.
    """
    of_random = rounds[rounds["method"] == "random"]
    totals = of_random.groupby(["setting", "seed"])["bytes"].max().rename("budget")
    budgets = rounds.join(totals, on=["setting", "seed"])
    affordable = budgets[budgets["bytes"] <= budgets["budget"]]
    means = affordable.groupby(KEYS).tail(FINAL_WINDOW).groupby(KEYS)["test_accuracy"].mean()
    all_runs = pd.MultiIndex.from_frame(rounds[KEYS].drop_duplicates())
    return 100 * means.reindex(all_runs, fill_value=GUESS)


# --- gains and their statistics ---


def gains(accuracies_of_runs: pd.Series) -> pd.DataFrame:
    """Return gains over random selection: rows by (method, setting), columns by seed.

    Seeds that a method lacks are nan.
    """
    by_method = accuracies_of_runs.unstack("method")
    differences = by_method.drop(columns="random").sub(by_method["random"], axis=0)
    long = differences.stack().rename_axis(["setting", "seed", "method"])
    return long.reorder_levels(["method", "setting", "seed"]).unstack("seed").sort_index()


def interval(sample: Floats) -> dict[str, float]:
    """Return the mean, the 95 % interval of Student's t, and the two-sided p-value."""
    test = stats.ttest_1samp(sample, 0)
    low, high = test.confidence_interval(0.95)
    return {"gain": sample.mean(), "low": low, "high": high, "p": test.pvalue}


def _corrected(intervals: dict[str, dict[str, float]]) -> pd.DataFrame:
    """Return a row for each method, the highest gain first, with p-values corrected over all rows,
    reference methods included."""
    rows = pd.DataFrame(intervals).T
    rows["p_holm"] = holm(rows["p"].tolist())
    return rows.sort_values("gain", ascending=False)


def over_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """Return each method's mean gain over settings, with its interval over seeds.

    The interval holds for exactly these settings. A seed counts if a method has it in all settings.
    """
    intervals = {}
    for method, of_method in table.groupby("method"):
        intervals[method] = interval(of_method.dropna(axis="columns").mean().to_numpy())
    return _corrected(intervals)


def over_settings(table: pd.DataFrame) -> pd.DataFrame:
    """Return each method's mean gain, with its interval over settings, as if they were a sample."""
    means = table.mean(axis="columns").unstack("method")
    return _corrected({method: interval(means[method].to_numpy()) for method in means})


def ranks(accuracies_of_runs: pd.Series) -> tuple[pd.Series, float, float]:
    """Return mean ranks over settings (1 is best), Friedman's p, and Nemenyi's critical difference.

    The critical difference is at the 5 % level (Demsar, 2006).
    """
    means = accuracies_of_runs.groupby(["setting", "method"]).mean().unstack("method")
    means = means.dropna(axis="columns")
    mean_ranks = means.rank(axis="columns", ascending=False).mean().sort_values()
    friedman, critical = rank_tests(means.to_numpy())
    return mean_ranks, friedman, critical


# --- what is printed ---


class Printer:
    """Prints gains on the terminal."""

    def __init__(self) -> None:
        self.console = Console(width=110, highlight=False)

    def title(self, text: str) -> None:
        self.console.print(f"\n{text}")

    def line(self, text: str) -> None:
        self.console.print(f"  {text}")

    def values(self, values: pd.Series, digits: int = 1) -> None:
        self.line(", ".join(f"{name} {value:.{digits}f}" for name, value in values.items()))

    def gains(self, rows: pd.DataFrame, methods: Sequence[str] | None = None) -> None:
        """Print a line for each of the `methods`, or for all rows."""
        for method in rows.index if methods is None else methods:
            row = rows.loc[method]
            text = f"{method:16} {row['gain']:+6.2f} [{row['low']:+.2f}, {row['high']:+.2f}]"
            self.line(f"{text} corrected p {row['p_holm']:.3f}")


def print_horizons(out: Printer, rounds: pd.DataFrame, methods: Sequence[str]) -> None:
    out.title("Gain in the 11 rounds up to a horizon; intervals over seeds, for these settings")
    for horizon in HORIZONS:
        at_horizon = accuracies(rounds, horizon)
        at_random = at_horizon.xs("random", level="method").mean()
        out.line(f"round {horizon}, where random selection has {at_random:.1f} %")
        out.gains(over_seeds(gains(at_horizon)), methods)
    out.title("Gain of each run's best round")
    out.gains(over_seeds(gains(best_accuracies(rounds))), methods)
    out.title("Gain at the bytes that random selection sends in all")
    out.gains(over_seeds(gains(accuracies_at_equal_bytes(rounds))))


def print_populations(out: Printer, table: pd.DataFrame, finals: pd.Series) -> None:
    distinct = table[table.index.isin(DISTINCT, level="setting")]
    for name, settings in (("24 settings", table), ("12 distinct settings", distinct)):
        out.title(f"Settings as a sample: {name}, the twelve highest gains")
        out.gains(over_settings(settings).head(12))
    mean_ranks, friedman, critical = ranks(finals)
    out.title(f"Mean ranks: Friedman's p {friedman:.1e}, critical difference {critical:.1f}")
    out.values(mean_ranks)


def print_robustness(
    out: Printer, table: pd.DataFrame, finals: pd.Series, methods: Sequence[str]
) -> None:
    settings = table.index.unique("setting")
    counts = pd.Series(0, index=list(methods))
    for setting in settings:
        rows = over_seeds(table.drop(setting, level="setting")).loc[list(methods)]
        counts += (rows["p_holm"] < 0.05) & (rows["gain"] > 0)
    out.title(f"In how many of {len(settings)} cases a gain is beyond chance without one setting")
    out.values(counts, digits=0)
    for data in ("cifar", "fmnist"):
        out.title(f"{data} alone")
        is_data = table.index.get_level_values("setting").str.startswith(data)
        out.gains(over_seeds(table[is_data]), methods)
    out.title("Gain over random_control instead of random; p corrected over these methods")
    by_method = finals.unstack("method")
    over_control = by_method[list(methods)].sub(by_method["random_control"], axis=0)
    by_seed = over_control.groupby("seed").mean()
    out.gains(_corrected({m: interval(by_seed[m].dropna().to_numpy()) for m in methods}), methods)


def print_references(out: Printer, table: pd.DataFrame, finals: pd.Series) -> None:
    at_random = finals.xs("random", level="method").groupby("setting").mean()
    out.title("Final accuracy of random selection by setting")
    out.values(at_random)
    by_setting = finals.groupby(["method", "setting"]).mean()
    above = by_setting["full"] > by_setting["clairvoyant"]
    out.title(f"full ends above clairvoyant in {above.sum()} of {len(above)} settings")
    out.title("Gains of the tuned methods' default values, in cifar's nine held-out settings")
    held_out = [s for s in at_random.index if s.startswith("cifar") and s not in DEVELOPMENT]
    defaults = table[table.index.isin(held_out, level="setting")][TUNED_SEEDS]
    out.gains(over_seeds(defaults.loc[list(TUNED)]), TUNED)


def print_schedules(out: Printer, constant: pd.Series, cosine: pd.Series) -> None:
    paired = pd.DataFrame({"constant": constant, "cosine": cosine}).dropna()
    change = (paired["cosine"] - paired["constant"]).xs("random", level="method")
    row = interval(change.groupby("seed").mean().to_numpy())
    text = f"{row['gain']:+.2f} [{row['low']:+.2f}, {row['high']:+.2f}]"
    out.title(f"A cosine schedule changes random selection's accuracy by {text}")
    for schedule in paired:
        out.title(f"Gains in these settings and seeds with a {schedule} learning rate")
        out.gains(over_seeds(gains(paired[schedule])))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shipped = sorted((RESULTS / "selection_benchmark").glob("*.parquet"))
    parser.add_argument("--runs", nargs="+", type=Path, default=shipped)
    cosine = RESULTS / "selection_benchmark_cosine" / "runs.parquet"
    parser.add_argument("--cosine", type=Path, default=cosine)
    rate = RESULTS / "selection_benchmark_rate" / "runs.parquet"
    parser.add_argument("--other-rate", type=Path, default=rate)
    parser.add_argument("--methods", default=METHODS)
    options = parser.parse_args(arguments)
    methods = options.methods.split(",")
    rounds = read_rounds(options.runs)
    num_settings = rounds.groupby("method")["setting"].nunique()
    in_all_settings = num_settings[num_settings == rounds["setting"].nunique()].index
    rounds = rounds[rounds["method"].isin(in_all_settings)]
    finals = accuracies(rounds)
    table = gains(finals)
    out = Printer()
    print_horizons(out, rounds, methods)
    print_populations(out, table, finals)
    print_robustness(out, table, finals, methods)
    print_references(out, table, finals)
    print_schedules(out, finals, accuracies(read_rounds([options.cosine])))
    out.title("Final accuracies at a learning rate of 0.02, by seed")
    at_other_rate = accuracies(read_rounds([options.other_rate])).unstack("seed")
    for (setting, method), of_seeds in at_other_rate.iterrows():
        out.line(f"{setting} {method}: {', '.join(f'{value:.1f}' for value in of_seeds.dropna())}")


if __name__ == "__main__":
    main()
