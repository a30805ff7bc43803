"""Print what changes the selection benchmark's answer: horizon, budget, and which settings it
speaks for.

    uv run python scripts/benchmark.py gains
    uv run python scripts/benchmark.py gains --runs FOLDER_OR_PARQUET ... --methods fedcor,refl

Every number of docs/benchmark.md that `fedsim report` does not print comes from here.

- A setting is a file of conf/cell/: a data set, a partition, and what else it has. A method is a selector.
- A gain is a method's accuracy minus that of `random` at the same setting and seed, in percentage points.
- Rounds count from 1. Bytes are those of all clients in both directions.
- A run that diverged ends early. Its final accuracy is that of a guess among ten classes.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from rich.console import Console
from scipy import stats

RUNS = Path(__file__).parents[2] / "docs" / "results" / "selection_benchmark"
COLUMNS = [
    "choice.cell",
    "choice.selector",
    "seed",
    "round",
    "test_accuracy",
    "bytes_down",
    "bytes_up",
]
ROUNDS, WINDOW = 200, 11
HORIZONS = (50, 100, 150, 200)
GUESS = 0.1  # the accuracy of a guess
KEYS = ["setting", "method", "seed"]
DISTINCT = [
    f"{data}_{skew}"
    for data in ("cifar", "fmnist")
    for skew in ("shards_1", "shards_2", "dir_01", "dir_05", "iid", "sizes")
]
"""Settings whose division of the data among clients no other setting has; the other twelve vary one
thing in these."""
DEVELOPMENT = ("cifar_shards_1", "cifar_dir_05", "cifar_sizes")
TUNED, TUNED_SEEDS = ("afl", "fedcbs", "gpfl", "hics", "oort", "power_of_choice"), range(6)


def read_rounds(paths: Sequence[Path]) -> pd.DataFrame:
    """Return one row for each round of each run: setting, method, seed, round, accuracy, cumulative
    bytes."""
    tables = [pq.read_table(path, columns=COLUMNS).to_pandas() for path in paths]
    rounds = pd.concat(tables, ignore_index=True)
    rounds = rounds.rename(columns={"choice.cell": "setting", "choice.selector": "method"})
    rounds[["setting", "method"]] = rounds[["setting", "method"]].astype(str)
    rounds = rounds.drop_duplicates([*KEYS, "round"]).sort_values([*KEYS, "round"])
    sent = rounds["bytes_down"] + rounds["bytes_up"]
    rounds["bytes"] = sent.groupby([rounds[key] for key in KEYS]).cumsum()
    return rounds[[*KEYS, "round", "test_accuracy", "bytes"]]


def accuracies(rounds: pd.DataFrame, last_round: int = ROUNDS) -> pd.Series:
    """Return each run's accuracy in per cent: the mean of the `WINDOW` rounds up to `last_round`.

    Runs that ended before that round have diverged.
    """
    reached = rounds.groupby(KEYS)["round"].max()
    window = rounds[(rounds["round"] <= last_round) & (rounds["round"] > last_round - WINDOW)]
    means = window.groupby(KEYS)["test_accuracy"].mean().reindex(reached.index)
    return 100 * means.where(reached >= last_round, GUESS)


def best_accuracies(rounds: pd.DataFrame) -> pd.Series:
    """Return the highest accuracy of each run's rounds, in per cent, also of those that diverged
    later."""
    return 100 * rounds.groupby(KEYS)["test_accuracy"].max()


def accuracies_at_equal_bytes(rounds: pd.DataFrame) -> pd.Series:
    """Return each run's accuracy in the last `WINDOW` rounds that fit into the bytes that random
    selection sends in all at its setting and seed; that of a guess where no round does."""
    totals = rounds[rounds["method"] == "random"].groupby(["setting", "seed"])["bytes"].max()
    budgets = rounds.merge(totals.rename("budget").reset_index(), on=["setting", "seed"])
    within = budgets[budgets["bytes"] <= budgets["budget"]]
    last = within.groupby(KEYS).tail(WINDOW)
    means = last.groupby(KEYS)["test_accuracy"].mean()
    every_run = pd.MultiIndex.from_frame(rounds[KEYS].drop_duplicates())
    return 100 * means.reindex(every_run, fill_value=GUESS)


def gains(accuracies_of_runs: pd.Series) -> pd.DataFrame:
    """Return gains over random selection as a table [(method, setting), seed]; seeds that a method
    lacks are nan."""
    by_method = accuracies_of_runs.unstack("method")
    differences = by_method.drop(columns="random").sub(by_method["random"], axis=0)
    long = differences.stack().rename_axis(["setting", "seed", "method"])
    return long.reorder_levels(["method", "setting", "seed"]).unstack("seed").sort_index()


def interval(sample: np.ndarray) -> tuple[float, float, float, float]:
    """Return the mean, the 95 % interval of Student's t, and the two-sided p."""
    mean, error = sample.mean(), stats.sem(sample)
    half = stats.t.ppf(0.975, len(sample) - 1) * error
    return mean, mean - half, mean + half, float(stats.ttest_1samp(sample, 0).pvalue)


def holm(p: pd.Series) -> pd.Series:
    """Return p-values corrected by Holm's method over all rows, reference methods included."""
    ordered = p.sort_values()
    factors = np.arange(len(p), 0, -1)
    corrected = np.minimum(np.maximum.accumulate(ordered * factors), 1)
    return corrected.reindex(p.index)


def over_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """Return each method's mean gain over settings, with its interval over seeds, for exactly these
    settings.

    Only seeds that a method has in all settings count.
    """
    rows = {}
    for method, part in table.groupby("method"):
        complete = part.dropna(axis="columns")
        rows[method] = (*interval(complete.mean().to_numpy()), complete.shape[1])
    found = pd.DataFrame(rows, index=["gain", "low", "high", "p", "seeds"]).T
    found["p_holm"] = holm(found["p"])
    return found


def over_settings(table: pd.DataFrame) -> pd.DataFrame:
    """Return each method's mean gain over seeds, with its interval over settings, as if they were a
    sample of all."""
    means = table.mean(axis="columns").unstack("method")
    found = pd.DataFrame(
        {m: interval(means[m].to_numpy()) for m in means}, index=["gain", "low", "high", "p"]
    ).T
    found["p_holm"] = holm(found["p"])
    return found


def ranks(accuracies_of_runs: pd.Series) -> tuple[pd.Series, float, float]:
    """Return mean ranks over settings (1 is best), Friedman's p, and Nemenyi's critical difference
    at 5 %."""
    means = (
        accuracies_of_runs.groupby(["setting", "method"])
        .mean()
        .unstack("method")
        .dropna(axis="columns")
    )
    num_settings, num_methods = means.shape
    mean_ranks = means.rank(axis="columns", ascending=False).mean().sort_values()
    friedman = stats.friedmanchisquare(*(means[method] for method in means)).pvalue
    quantile = stats.studentized_range.ppf(0.95, num_methods, np.inf) / np.sqrt(2)
    return (
        mean_ranks,
        float(friedman),
        float(quantile * np.sqrt(num_methods * (num_methods + 1) / (6 * num_settings))),
    )


def line(row: pd.Series) -> str:
    return f"{row['gain']:+6.2f} [{row['low']:+.2f}, {row['high']:+.2f}] corrected p {row['p_holm']:.3f}"


def print_rows(
    console: Console, found: pd.DataFrame, methods: Sequence[str], prefix: str = ""
) -> None:
    for method in methods:
        console.print(f"  {prefix}{method:16} {line(found.loc[method])}")


def print_horizons(console: Console, rounds: pd.DataFrame, methods: Sequence[str]) -> None:
    console.print(
        "\nGain by horizon, in the 11 rounds up to a round; intervals over seeds, for these settings"
    )
    for horizon in HORIZONS:
        values = accuracies(rounds, horizon)
        at_random = values.xs("random", level="method").mean()
        console.print(f"  random selection at round {horizon}: {at_random:.1f} %")
        print_rows(console, over_seeds(gains(values)), methods, f"round {horizon:3}  ")
    console.print("\nGain of each run's best round")
    print_rows(console, over_seeds(gains(best_accuracies(rounds))), methods)
    console.print("\nGain at the bytes that random selection sends in all")
    found = over_seeds(gains(accuracies_at_equal_bytes(rounds))).sort_values(
        "gain", ascending=False
    )
    print_rows(console, found, list(found.index))


def print_populations(console: Console, table: pd.DataFrame, finals: pd.Series) -> None:
    parts = {
        "24 settings": table,
        "12 distinct settings": table[table.index.isin(DISTINCT, level="setting")],
    }
    for name, part in parts.items():
        console.print(f"\nSettings as a sample: {name}, the twelve highest gains")
        found = over_settings(part).sort_values("gain", ascending=False).head(12)
        print_rows(console, found, list(found.index))
    mean_ranks, friedman, critical = ranks(finals)
    console.print(
        f"\nMean ranks: Friedman's p {friedman:.1e}, Nemenyi's critical difference {critical:.1f}"
    )
    console.print("  " + ", ".join(f"{method} {rank:.1f}" for method, rank in mean_ranks.items()))


def print_robustness(
    console: Console, table: pd.DataFrame, finals: pd.Series, methods: Sequence[str]
) -> None:
    settings = table.index.unique("setting")
    console.print(
        f"\nEach setting left out in turn: in how many of {len(settings)} cases a gain is beyond chance (Holm)"
    )
    counts = dict.fromkeys(methods, 0)
    for setting in settings:
        found = over_seeds(table.drop(setting, level="setting"))
        for method in methods:
            counts[method] += bool(
                found.loc[method, "p_holm"] < 0.05 and found.loc[method, "gain"] > 0
            )
    console.print("  " + ", ".join(f"{method} {count}" for method, count in counts.items()))
    for data in ("cifar", "fmnist"):
        console.print(f"\n{data} alone")
        part = table[table.index.get_level_values("setting").str.startswith(data)]
        print_rows(console, over_seeds(part), methods)
    console.print("\nGain over random_control instead of random; p not corrected")
    by_method = finals.unstack("method")
    against = (
        by_method[list(methods)].sub(by_method["random_control"], axis=0).groupby("seed").mean()
    )
    for method in methods:
        mean, low, high, p = interval(against[method].dropna().to_numpy())
        console.print(f"  {method:16} {mean:+6.2f} [{low:+.2f}, {high:+.2f}] p {p:.3f}")


def print_references(console: Console, table: pd.DataFrame, finals: pd.Series) -> None:
    at_random = finals.xs("random", level="method").groupby("setting").mean()
    console.print("\nFinal accuracy of random selection by setting")
    console.print(
        "  " + ", ".join(f"{setting} {value:.1f}" for setting, value in at_random.items())
    )
    by_setting = finals.groupby(["method", "setting"]).mean()
    above = by_setting["full"] > by_setting["clairvoyant"]
    console.print(
        f"\nfull ends above clairvoyant, the search for good cohorts, in {above.sum()} of {len(above)} settings"
    )
    console.print(
        "\nGains of default values at the six seeds of the tuned ones, in cifar's nine held-out settings"
    )
    held_out = [s for s in at_random.index if s.startswith("cifar") and s not in DEVELOPMENT]
    defaults = table[table.index.isin(held_out, level="setting")][list(TUNED_SEEDS)]
    for method in TUNED:
        mean, low, high, _ = interval(defaults.loc[method].mean().to_numpy())
        console.print(f"  {method:16} {mean:+6.2f} [{low:+.2f}, {high:+.2f}]")


def print_schedules(console: Console, constant: pd.Series, cosine: pd.Series) -> None:
    paired = pd.DataFrame({"constant": constant, "cosine": cosine}).dropna()
    change = (paired["cosine"] - paired["constant"]).xs("random", level="method")
    mean, low, high, _ = interval(change.groupby("seed").mean().to_numpy())
    console.print(
        f"\nRandom selection's accuracy changes by {mean:+.2f} [{low:+.2f}, {high:+.2f}] under a cosine schedule"
    )
    for schedule in paired:
        console.print(
            f"Gains in these settings and seeds, {schedule} learning rate; intervals over seeds"
        )
        found = over_seeds(gains(paired[schedule])).sort_values("gain", ascending=False)
        print_rows(console, found, list(found.index))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", nargs="+", type=Path, default=sorted(RUNS.glob("*.parquet")))
    parser.add_argument(
        "--cosine", type=Path, default=RUNS.parent / "selection_benchmark_cosine" / "runs.parquet"
    )
    parser.add_argument(
        "--other-rate", type=Path, default=RUNS.parent / "selection_benchmark_rate" / "runs.parquet"
    )
    parser.add_argument("--methods", default="entropy_greedy,fedcbs,fedcor,clustered2,fl_dp3s,refl")
    options = parser.parse_args(arguments)
    methods = options.methods.split(",")
    console = Console(width=110, highlight=False)

    rounds = read_rounds(options.runs)
    settings_of = rounds.groupby("method")["setting"].nunique()
    everywhere = settings_of[settings_of == rounds["setting"].nunique()].index
    rounds = rounds[rounds["method"].isin(everywhere)]
    finals = accuracies(rounds)
    table = gains(finals)
    print_horizons(console, rounds, methods)
    print_populations(console, table, finals)
    print_robustness(console, table, finals, methods)
    print_references(console, table, finals)
    print_schedules(console, finals, accuracies(read_rounds([options.cosine])))
    console.print("\nFinal accuracies at a learning rate of 0.02, by seed")
    for (setting, method), of_seeds in accuracies(read_rounds([options.other_rate])).groupby(
        ["setting", "method"]
    ):
        console.print(f"  {setting} {method}: " + ", ".join(f"{value:.1f}" for value in of_seeds))


if __name__ == "__main__":
    main()
