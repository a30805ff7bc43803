"""Statistics of reports: by hand, and their error rates by simulation."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest

from fedsim.report.table import show_result
from fedsim.results.statistics import (
    UNIT,
    Median,
    Share,
    differences,
    estimate,
    half_width_in_sd,
    holm,
    paired,
    pooled,
    sign_flip_test,
)

NUM_TRIALS = 3000


def test_intervals_of_a_mean_by_hand() -> None:
    """Mean 0.3, standard deviation sqrt 0.02. The 97.5 % quantile of Student's t with one degree of
    freedom is 12.7062."""
    mean = estimate([0.2, 0.4])
    assert mean.mean == pytest.approx(0.3)
    reach = 12.7062 * math.sqrt(0.02)
    assert mean.interval[1] - mean.mean == pytest.approx(reach / math.sqrt(2), rel=1e-4)
    assert mean.next_interval[1] - mean.mean == pytest.approx(reach * math.sqrt(1.5), rel=1e-4)


def test_a_value_at_the_end_of_the_prediction_interval_has_p_5_percent() -> None:
    mean = estimate([0.2, 0.4])
    low, high = mean.next_interval
    assert mean.p_next(high) == pytest.approx(0.05)
    assert mean.p_next(high + 0.1, tolerance=0.1) == pytest.approx(0.05)
    assert mean.p_next(0.3) == pytest.approx(1)
    assert mean.standardised_error(high) == pytest.approx(1.96, abs=1e-3)
    assert mean.standardised_error(low) == pytest.approx(-1.96, abs=1e-3)


@pytest.mark.parametrize("value", [0.51, 0.53])
def test_equivalence_by_two_one_sided_tests(value: float) -> None:
    """The 95 % quantile of t with two degrees of freedom is 2.92; the mean is 0.01 from each
    value."""
    reach = 2.9200 * 0.02 / math.sqrt(3)
    mean = estimate([0.5, 0.52, 0.54])
    assert mean.p_equivalent(0.01 + reach, value) == pytest.approx(0.05, abs=1e-4)


def test_one_seed_has_a_mean_alone() -> None:
    mean = estimate([0.5])
    assert mean.mean == 0.5
    for value in (mean.interval[0], mean.p_next(0.4), mean.standardised_error(0.4)):
        assert math.isnan(value)
    assert estimate([]) is None


def test_paired_differences_use_common_seeds_alone() -> None:
    """0.1 and 0.2: t = 0.15 / (0.0707 / sqrt 2) = 3 with one degree of freedom; 2 of 4 sign
    patterns give a mean as far from 0."""
    first = pd.Series({"0": 0.5, "1": 0.6, "2": 0.9})
    second = pd.Series({"0": 0.4, "1": 0.4, "7": 0.0})
    lead = pooled([paired(first, second)])
    assert lead.values == pytest.approx((0.1, 0.2))
    assert lead.p_value == pytest.approx(0.2048, abs=1e-4)
    assert sign_flip_test(lead.values) == 0.5


def test_one_pair_is_no_difference() -> None:
    assert pooled([paired(pd.Series({"0": 1.0}), pd.Series({"0": 0.5}))]) is None


def test_differences_without_deviation_are_certain() -> None:
    same = differences([0.1, 0.1, 0.1])
    assert (same.p_value, same.p_above(0.0), same.p_below(0.0), same.p_above(0.1)) == (0, 0, 1, 0.5)
    assert differences([0.0, 0.0]).p_value == 1


def test_settings_are_averaged_at_each_seed_that_all_have() -> None:
    """Means 1, 2 and 3 at seeds 0, 1 and 2, whatever settings of one seed have in common."""
    first = pd.Series({"0": 0.0, "1": 1.0, "2": 4.0, "3": 9.0})
    second = pd.Series({"2": 2.0, "0": 2.0, "1": 3.0})
    mean = pooled([first, second])
    assert mean.values == (1.0, 2.0, 3.0)
    assert (mean.mean, mean.error) == (2.0, pytest.approx(3**-0.5))
    assert (mean.num, mean.df, mean.strata) == (3, 2, 2)


def test_a_setting_that_says_the_same_again_adds_nothing() -> None:
    values = pd.Series([1.0, 2.0, 3.0])
    assert pooled([values, values]).error == pooled([values]).error


def test_one_common_seed_of_settings_is_no_difference() -> None:
    assert pooled([pd.Series({"0": 0.0, "1": 1.0}), pd.Series({"1": 2.0, "2": 2.0})]) is None


def test_intervals_are_cut_where_the_quantity_ends() -> None:
    values = (0.99, 1.0, 0.98, 0.999)
    whole, cut = estimate(values), estimate(values, UNIT)
    assert whole.interval[1] > 1
    assert cut.interval == (whole.interval[0], 1.0)
    assert cut.next_interval == (whole.next_interval[0], 1.0)
    assert (cut.mean, cut.sd) == (whole.mean, whole.sd)
    low, high = whole.next_interval
    assert cut.next_half_width == whole.next_half_width == pytest.approx((high - low) / 2)
    assert cut.p_equivalent(0.02, 0.99) == whole.p_equivalent(0.02, 0.99)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 3.0], 2 / 8),
        ([1.0, -1.0], 1),
        ([1.0] * 14, 2 / 2**14),  # the largest number of pairs of which all patterns are tried
    ],
)
def test_sign_flips_by_hand(values: Sequence[float], expected: float) -> None:
    assert sign_flip_test(values) == pytest.approx(expected)


def test_many_sign_flips_are_sampled() -> None:
    assert sign_flip_test(np.ones(20)) < 0.001


@pytest.mark.parametrize(
    ("p_values", "expected"),
    [
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.5, 0.9], [1.0, 1.0]),
        ([], []),
        ([0.02, math.nan, 0.9], [0.04, math.nan, 0.9]),
    ],
)
def test_holms_correction_by_hand(p_values: Sequence[float], expected: Sequence[float]) -> None:
    assert holm(p_values) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("share", "interval"),
    [(Share(5, 5), (0.4782, 1)), (Share(0, 3), (0, 0.7076)), (Share(2, 4), (0.0676, 0.9324))],
)
def test_the_exact_interval_of_a_share(share: Share, interval: tuple[float, float]) -> None:
    assert share.interval == pytest.approx(interval, abs=1e-4)


def test_binomial_tests_of_a_share() -> None:
    """Of 2^5 outcomes, 6 have 4 or 5 successes, and 31 at most 4."""
    assert Share(4, 5).p_above(0.5) == pytest.approx(6 / 32)
    assert Share(4, 5).p_below(0.5) == pytest.approx(31 / 32)
    assert Share(0, 5).p_above(0.5) == 1


def test_half_the_width_of_an_interval_in_standard_deviations() -> None:
    assert half_width_in_sd(3) == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)


def test_a_median_of_values_that_are_partly_unknown() -> None:
    median = Median((100.0, 200.0, 300.0, 400.0, math.inf, math.inf), 500)
    assert median.median == 300
    assert median.interval == (100, math.inf)  # the order statistics 1 and 6
    assert median.p_above(150) == pytest.approx(7 / 64)  # 5 of 6 are above
    assert median.p_below(600) == pytest.approx(22 / 64)  # that two are below 600 is not known


def test_five_values_do_not_bound_their_median() -> None:
    assert Median((1.0, 2.0, 3.0, 4.0, 5.0), 9).interval == (-math.inf, math.inf)


def test_medians_and_ends_that_no_run_reached_are_shown_as_beyond_the_last_round() -> None:
    """With fewer than six runs the interval is infinite."""
    assert show_result(Median((100.0, 200.0, 300.0), 500)) == "median 200 [0, > 500]"
    assert show_result(Median((100.0, math.inf, math.inf), 500)) == "median > 500 [0, > 500]"


@pytest.mark.parametrize(
    ("draw", "too_few", "too_many"), [("normal", 0, 0), ("uniform", 0.02, 0), ("laplace", 0, 0.03)]
)
@pytest.mark.parametrize("num_seeds", [3, 5, 10])
def test_95_percent_intervals_cover_95_percent(
    num_seeds: int, draw: str, too_few: float, too_many: float
) -> None:
    """They are exact for normal differences alone. A percentile bootstrap covers 76, 84 and 90 % at
    3, 5 and 10 normal pairs, and fails this test."""
    rng = np.random.default_rng(num_seeds)
    values = getattr(rng, draw)(size=(NUM_TRIALS, num_seeds))
    true_mean = 0.5 if draw == "uniform" else 0.0
    intervals = [differences(row).interval for row in values]
    covered = np.mean([low <= true_mean <= high for low, high in intervals])
    noise = 4 * math.sqrt(0.05 * 0.95 / NUM_TRIALS)
    assert 0.95 - noise - too_few <= covered <= 0.95 + noise + too_many
