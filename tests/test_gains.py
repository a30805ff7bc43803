"""The numbers of docs/benchmark_v0.md that scripts/benchmarks/gains.py prints, for a few runs."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from scripts.benchmarks import gains


def rounds_of(runs: dict[tuple[str, str, int], list[tuple[float, int]]]) -> pd.DataFrame:
    """Return rows as `read_rounds` does, from each run's accuracies and cumulative bytes."""
    rows = []
    for (setting, method, seed), records in runs.items():
        for number, (accuracy, sent) in enumerate(records, 1):
            rows.append((setting, method, seed, number, accuracy, sent))
    return pd.DataFrame(rows, columns=[*gains.KEYS, "round", "test_accuracy", "bytes"])


def test_the_final_accuracy_is_the_mean_of_eleven_rounds() -> None:
    records = [(0.5, t) for t in range(1, 190)] + [(0.8, t) for t in range(190, 201)]
    rounds = rounds_of({("s", "random", 0): records})
    assert gains.accuracies(rounds)["s", "random", 0] == pytest.approx(80)


def test_a_run_that_diverged_counts_with_the_accuracy_of_a_guess() -> None:
    rounds = rounds_of({("s", "full", 0): [(0.5, t) for t in range(1, 61)]})
    assert gains.accuracies(rounds)["s", "full", 0] == pytest.approx(10)
    assert gains.accuracies(rounds, 50)["s", "full", 0] == pytest.approx(50)


def test_at_equal_bytes_an_expensive_method_is_judged_by_an_earlier_round() -> None:
    """Random selection sends 20 bytes in all. fedcor sends 4 a round, and so has five rounds."""
    cheap = [(0.7, t) for t in range(1, 21)]
    expensive = [(0.01 * t, 4 * t) for t in range(1, 21)]
    never = [(0.9, 100 * t) for t in range(1, 21)]
    rounds = rounds_of(
        {("s", "random", 0): cheap, ("s", "fedcor", 0): expensive, ("s", "full", 0): never}
    )
    accuracies = gains.accuracies_at_equal_bytes(rounds)
    assert accuracies["s", "random", 0] == pytest.approx(70)
    assert accuracies["s", "fedcor", 0] == pytest.approx(3)  # the mean of 1 to 5 %
    assert accuracies["s", "full", 0] == pytest.approx(10)  # not one round fits


def test_gains_are_paired_and_intervals_are_over_seeds_or_over_settings() -> None:
    accuracies = {
        ("a", "random", 0): 50.0,
        ("a", "other", 0): 53.0,
        ("a", "random", 1): 60.0,
        ("a", "other", 1): 62.0,
        ("b", "random", 0): 70.0,
        ("b", "other", 0): 70.0,
        ("b", "random", 1): 70.0,
        ("b", "other", 1): 72.0,
    }
    index = pd.MultiIndex.from_tuples(accuracies, names=gains.KEYS)
    table = gains.gains(pd.Series(list(accuracies.values()), index))
    assert table.loc["other", "a"].tolist() == [3, 2]
    assert table.loc["other", "b"].tolist() == [0, 2]
    fixed, sampled = gains.over_seeds(table).loc["other"], gains.over_settings(table).loc["other"]
    assert fixed["gain"] == sampled["gain"] == 1.75
    assert fixed["p"] == pytest.approx(stats.ttest_1samp([1.5, 2.0], 0).pvalue)
    assert sampled["p"] == pytest.approx(stats.ttest_1samp([2.5, 1.0], 0).pvalue)


def test_nemenyis_critical_difference_is_that_of_demsars_table() -> None:
    """Demsar (2006) has q = 2.343 for three methods at 5 %. Of ten settings: 2.343 sqrt(3 * 4 / (6
    * 10)) = 1.048."""
    rng = np.random.default_rng(0)
    names = [(f"s{s}", m, 0) for s in range(10) for m in ("a", "b", "c")]
    values = pd.Series(rng.random(30), pd.MultiIndex.from_tuples(names, names=gains.KEYS))
    ranks, _, critical = gains.ranks(values)
    assert critical == pytest.approx(1.048, abs=1e-3)
    assert ranks.sum() == pytest.approx(6)
