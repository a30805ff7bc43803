"""Statistics over several settings, against independent computations and by simulation."""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedsim.report.settings_figures import gains_plot, ranks_plot
from fedsim.report.settings_tables import wins_table
from fedsim.results.ranking import (
    Comparison,
    Lead,
    mean_ranks,
    profile,
    rank_tests,
    wins,
)
from fedsim.results.statistics import differences, ratio

RNG = np.random.default_rng(5)


def comparison_of(
    finals: Mapping[str, Sequence[Sequence[float]]], ceiling: Sequence[str] = ()
) -> Comparison:
    """Return the comparison of final accuracies [settings, seeds] by method, all of one class; nan
    where a seed was not run."""
    settings: dict[str, dict[str, pd.DataFrame]] = {}
    for method, by_setting in finals.items():
        for number, row in enumerate(by_setting):
            lines = settings.setdefault(f"setting {number}", {})
            lines[method] = pd.DataFrame({"final_accuracy": np.array(row, np.float64)})
    methods = [name for name in finals if name not in ceiling]
    comparison = Comparison(settings, methods, "random", ceiling)
    comparison.__dict__["classes"] = dict.fromkeys(methods, "nothing")
    return comparison


def test_ranks_with_ties_friedman_and_nemenyi() -> None:
    values = np.array([[0.5, 0.7, 0.7, 0.1], [0.2, 0.6, 0.4, 0.1], [0.3, 0.9, 0.5, 0.3]])
    sums = [9.5, 3.5, 5.5, 11.5]  # ranks 3 + 3 + 3.5, 1.5 + 1 + 1, 1.5 + 2 + 2, 4 + 4 + 3.5
    assert mean_ranks(values).tolist() == pytest.approx([total / 3 for total in sums])
    p_value, critical = rank_tests(values)
    of_sums = 12 * sum(total**2 for total in sums) / (3 * 4 * 5) - 3 * 3 * 5
    corrected_for_ties = of_sums / (1 - 2 * 6 / (3 * 4 * 15))
    assert p_value == pytest.approx(stats.chi2.sf(corrected_for_ties, 3))
    # q = 2.569 of Demsar's Table 5(a), for four methods
    assert critical == pytest.approx(2.569 * math.sqrt(4 * 5 / (6 * 3)), abs=1e-3)


def test_friedmans_test_is_not_defined_where_all_are_equal() -> None:
    p_value, _ = rank_tests(np.ones((3, 4)))
    assert math.isnan(p_value)


def test_a_method_with_fewer_seeds_is_ranked_by_its_gains_there_and_changes_no_other() -> None:
    """random has mean 0.4. b gains 0.2, 0, 0.1 and so 0.1; a gains 0.05 at the seeds that it has.
    Blocks have the two seeds that all have."""
    both = {"random": [[0.1, 0.2, 0.9]] * 2, "b": [[0.3, 0.2, 1.0]] * 2}
    comparison = comparison_of({**both, "a": [[0.15, 0.25, np.nan]] * 2})
    assert comparison.means.round(9).tolist() == [[0.4, 0.5, 0.45]] * 2
    assert comparison.ranks == {"b": (1, 1), "a": (2, 2), "random": (3, 3)}
    assert (comparison.means[:, :2] == comparison_of(both).means).all()
    block = [[0.1, 0.2], [0.3, 0.2], [0.15, 0.25]]
    assert [values.tolist() for values in comparison.blocks] == [block, block]


def test_methods_without_a_common_seed_are_ranked_and_have_no_table_of_wins() -> None:
    a, b = [[1.0, np.nan]] * 2, [[np.nan, 0.5]] * 2
    comparison = comparison_of({"random": np.zeros((2, 2)), "a": a, "b": b})
    assert list(comparison.ranks) == ["a", "b", "random"]
    assert wins_table(comparison).values.empty


def test_wins_by_brute_force() -> None:
    blocks = [RNG.integers(0, 4, (3, 3)) / 4, RNG.integers(0, 4, (3, 5)) / 4]
    shares, (chance, _, _) = wins(blocks)
    for row, column in itertools.product(range(3), repeat=2):
        chances, means = [], []
        for block in blocks:
            pairs = itertools.product(block[row], block[column])
            chances.append(np.mean([(a > b) + (a == b) / 2 for a, b in pairs]))
            above, below = block[row].mean(), block[column].mean()
            means.append((above > below) + (above == below) / 2)
        assert chance[row, column] == pytest.approx(np.mean(chances))
        assert shares[row, column] == pytest.approx(np.mean(means))


def test_the_interval_of_wins_draws_the_same_seeds_for_all_methods() -> None:
    blocks = [RNG.integers(0, 4, (3, 3)) / 4, RNG.integers(0, 4, (3, 5)) / 4]
    _, (_, low, high) = wins(blocks)
    resampled = []
    for _ in range(1000):
        chances = []
        for block in blocks:
            num = block.shape[1]
            drawn = block[:, RNG.integers(0, num, num)]
            chances.append((1 + np.sign(drawn[0][:, None] - drawn[2])).mean() / 2)
        resampled.append(np.mean(chances))
    expected = np.quantile(resampled, [0.025, 0.975])
    assert [low[0, 2], high[0, 2]] == pytest.approx(expected, abs=0.05)


def test_a_profile_by_hand() -> None:
    gains = [np.array([0.1, 0.2, 0.3]), np.array([-0.1, 0.2, 0.5])]
    share, low, high = profile(gains, np.array([-0.2, 0.0, 0.2, 0.4, 0.6]))
    assert share == pytest.approx([1, 5 / 6, 4 / 6, 1 / 6, 0])
    assert (low[0], high[0], low[4], high[4]) == (pytest.approx(1), pytest.approx(1), 0, 0)
    assert low[2] < share[2] < high[2]


def test_fieller_by_its_definition() -> None:
    """At the ends of the interval the t-test of above - r below is at 5 %."""
    above, below = RNG.normal(0.03, 0.01, 6), RNG.normal(0.06, 0.01, 6)
    value, *ends = ratio(above, below)
    assert value == pytest.approx(above.mean() / below.mean())
    p_values = [stats.ttest_1samp(above - end * below, 0).pvalue for end in ends]
    assert p_values == pytest.approx([0.05, 0.05])
    assert all(map(math.isnan, ratio(above, RNG.normal(0, 0.1, 6))))
    assert ratio([1.0], [2.0]) is None


def test_fiellers_interval_holds_the_true_ratio_in_95_of_100_cases() -> None:
    num_covered = 0
    for a, b in RNG.normal(0, 0.01, (1000, 2, 5)):
        _, low, high = ratio(0.03 + a, 0.1 + b + a / 2)
        num_covered += low <= 0.3 <= high
    assert num_covered / 1000 == pytest.approx(0.95, abs=0.02)


GAIN = np.array([[0.02, 0.03, 0.025, 0.03], [0.01, 0.02, 0.03, 0.02]])
SMALL = np.array([0.001, -0.001, 0.0005, 0.0002])
WIDE = np.array([0.1, -0.1, 0.1, -0.05])


def test_verdicts_and_p_values_by_scipy() -> None:
    """Holm's method multiplies the smallest of four p-values by 4, and an equal one by as much."""
    random = RNG.normal(0.5, 0.1, GAIN.shape)
    finals = {
        "random": random,
        "up": random + GAIN,
        "down": random - GAIN,
        "same": random + SMALL,
        "open": random + WIDE,
    }
    comparison = comparison_of(finals)
    leads = comparison.leads
    assert {name: lead.verdict for name, lead in leads.items()} == {
        "up": "better",
        "down": "worse",
        "same": "equal within 0.005",
        "open": "not decided",
    }
    assert comparison.better == ["up"]
    p_value = stats.ttest_1samp(GAIN.mean(0), 0).pvalue
    assert leads["up"].p_value == leads["down"].p_value == pytest.approx(4 * p_value)
    above = stats.ttest_1samp(SMALL, -0.005, alternative="greater").pvalue
    below = stats.ttest_1samp(SMALL, 0.005, alternative="less").pvalue
    assert leads["same"].p_equal == pytest.approx(4 * max(above, below))


def test_two_seeds_are_too_few_and_nine_are_preliminary() -> None:
    assert str(Lead(differences([0.1, 0.1]), 0.0, 1.0)) == "too few seeds"
    assert str(Lead(differences([0.1] * 9), 0.0, 1.0)) == "better, preliminary"
    assert str(Lead(differences([0.1] * 10), 0.0, 1.0)) == "better"


@pytest.mark.slow
def test_better_and_equal_hold_their_level_over_all_methods() -> None:
    """Methods that are level with random selection are called better or worse in 5 % of cases at
    most; methods at the margin are called equal as rarely."""
    num_different = num_equal = 0
    for _ in range(400):
        names = ["random", "a", "b", "c", "d"]
        noise = dict(zip(names, RNG.normal(0, 0.004, (5, 2, 5)), strict=True))
        leads = comparison_of(noise).leads.values()
        num_different += any(lead.verdict in ("better", "worse") for lead in leads)
        at_margin = {name: values + 0.005 for name, values in noise.items()}
        at_margin["random"] = noise["random"]
        leads = comparison_of(at_margin).leads.values()
        num_equal += any(lead.p_equal < 0.05 for lead in leads)
    limit = stats.binom.ppf(0.999, 400, 0.05)
    assert max(num_different, num_equal) <= limit


def test_the_share_of_the_possible_gain_is_paired_and_pooled() -> None:
    random = RNG.normal(0.5, 0.1, (2, 5))
    whole = np.array([[0.1, 0.12, 0.11, 0.1, 0.12], [0.3, 0.32, 0.31, 0.3, 0.3]])
    finals = {"random": random, "a": random + whole / 4, "b": random, "top": random + whole}
    comparison = comparison_of(finals, ["top"])
    assert comparison.possible("a") == pytest.approx((0.25, 0.25, 0.25), abs=1e-6)
    assert comparison.possible("b", slice(1, 2))[0] == pytest.approx(0)
    assert "top" not in comparison.ranks
    without = comparison_of({"random": random, "a": random, "b": random})
    assert without.possible("a") is None


def test_the_diagram_joins_what_lies_within_the_critical_difference() -> None:
    """With 12 settings and 4 methods the difference is 1.35. Of ranks 1, 2.1, 3 and 3.9 there are
    three longest runs within it."""
    comparison = comparison_of({name: np.zeros((12, 2)) for name in ("random", "a", "b", "c")})
    ranks = {"a": (1.0, 1.0), "random": (2.1, 1.0), "b": (3.0, 1.0), "c": (3.9, 1.0)}
    comparison.__dict__["ranks"] = ranks
    axes = ranks_plot(comparison).figure.axes[0]
    bars = [bar.get_segments()[0][:, 0].tolist() for bar in axes.collections]
    expected = [[0.95, 2.15], [2.05, 3.05], [2.95, 3.95]]
    assert bars == [pytest.approx(ends) for ends in expected]
    names = [text.get_text().split() for text in axes.texts]
    assert names == [["a", "1.00"], ["random", "2.10"], ["3.00", "b"], ["3.90", "c"]]


@pytest.mark.filterwarnings("error")
def test_one_seed_tells_nothing_about_chance_in_the_map_of_gains() -> None:
    finals = {"random": [[0.0]] * 2, "gpfl": [[0.1]] * 2, "oort": [[0.2]] * 2}
    assert list(gains_plot(comparison_of(finals)).figure.axes[0].texts) == []
