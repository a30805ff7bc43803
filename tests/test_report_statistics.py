"""Statistics of reports: by hand, and their error rates by simulation."""

import math

import numpy as np
import pandas as pd
import pytest

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

TRIALS = 3000


def test_an_estimate_by_hand() -> None:
    found = estimate([0.2, 0.4])
    assert found.mean == pytest.approx(0.3)
    reach = 12.7062 * math.sqrt(0.02)  # t of one degree of freedom times the standard deviation
    assert found.interval[1] - found.mean == pytest.approx(reach / math.sqrt(2), rel=1e-4)
    assert found.next_interval[1] - found.mean == pytest.approx(reach * math.sqrt(1.5), rel=1e-4)
    assert found.p_next(found.next_interval[1]) == pytest.approx(0.05)
    assert found.p_next(found.next_interval[1] + 0.1, tolerance=0.1) == pytest.approx(0.05)
    assert found.p_next(0.3) == pytest.approx(1)
    assert found.standardised_error(found.next_interval[1]) == pytest.approx(1.96, abs=1e-3)
    assert found.standardised_error(found.next_interval[0]) == pytest.approx(-1.96, abs=1e-3)
    near = estimate([0.5, 0.52, 0.54])
    reach = 2.9200 * 0.02 / math.sqrt(3)  # one-sided 95 % quantile of t with two degrees of freedom
    assert near.p_equivalent(0.01 + reach, 0.51) == pytest.approx(0.05, abs=1e-4)
    assert near.p_equivalent(0.01 + reach, 0.53) == pytest.approx(0.05, abs=1e-4)
    assert estimate([]) is None
    lonely = estimate([0.5])
    assert math.isnan(lonely.interval[0])
    assert math.isnan(lonely.p_next(0.4))
    assert math.isnan(lonely.standardised_error(0.4))


def test_paired_differences_use_common_seeds_alone() -> None:
    found = pooled(
        [paired(pd.Series({0: 0.5, 1: 0.6, 2: 0.9}), pd.Series({0: 0.4, 1: 0.4, 7: 0.0}))]
    )
    assert found.mean == pytest.approx(0.15)
    assert found.num == 2
    assert sign_flip_test(found.values) == 0.5  # 2 of 4 sign patterns
    assert found.p_value == pytest.approx(
        0.2048, abs=1e-4
    )  # t = .15 / (.0707 / sqrt 2) = 3, one degree of freedom
    assert pooled([paired(pd.Series({0: 1.0}), pd.Series({0: 0.5}))]) is None
    same = differences([0.1, 0.1, 0.1])
    assert (same.p_value, same.p_above(0.0), same.p_below(0.0), same.p_above(0.1)) == (0, 0, 1, 0.5)
    assert differences([0.0, 0.0]).p_value == 1


def test_pooling_by_hand() -> None:
    """The mean over settings at each seed that both have: 1, 2 and 3, whatever settings of one seed
    have in common."""
    found = pooled(
        [pd.Series({0: 0.0, 1: 1.0, 2: 4.0, 3: 9.0}), pd.Series({2: 2.0, 0: 2.0, 1: 3.0})]
    )
    assert found.values == (1.0, 2.0, 3.0)
    assert (found.mean, found.error, found.df) == (2.0, pytest.approx(3**-0.5), 2)
    assert (found.num, found.strata) == (3, 2)
    twice = pooled([pd.Series(found.values)] * 2)
    assert twice.error == found.error  # a setting that says the same again adds nothing
    assert pooled([pd.Series({0: 0.0, 1: 1.0}), pd.Series({1: 2.0, 2: 2.0})]) is None


def test_intervals_are_cut_where_the_quantity_ends() -> None:
    values = (0.99, 1.0, 0.98, 0.999)
    plain, cut = estimate(values), estimate(values, UNIT)
    assert plain.interval[1] > 1 > cut.interval[0]
    assert (cut.interval[1], cut.next_interval[1]) == (1.0, 1.0)
    assert (cut.interval[0], cut.next_interval[0]) == (plain.interval[0], plain.next_interval[0])
    assert (cut.mean, cut.sd) == (plain.mean, plain.sd)
    half = (plain.next_interval[1] - plain.next_interval[0]) / 2
    assert cut.next_half_width == plain.next_half_width == pytest.approx(half)
    assert cut.p_equivalent(0.02, 0.99) == plain.p_equivalent(0.02, 0.99)


def test_sign_flips_and_holms_correction_by_hand() -> None:
    assert sign_flip_test(np.array([1.0, 2.0, 3.0])) == pytest.approx(2 / 8)
    assert sign_flip_test(np.array([1.0, -1.0])) == 1
    assert sign_flip_test(np.ones(20)) < 0.001
    assert (
        sign_flip_test(np.ones(14)) == 2 / 2**14
    )  # the largest number of pairs of which all patterns are tried
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []
    assert holm([0.02, math.nan, 0.9]) == pytest.approx([0.04, math.nan, 0.9], nan_ok=True)


def test_the_exact_interval_of_a_share() -> None:
    assert Share(5, 5).interval == pytest.approx((0.4782, 1), abs=1e-4)
    assert Share(0, 3).interval == pytest.approx((0, 0.7076), abs=1e-4)
    assert Share(2, 4).interval == pytest.approx((0.0676, 0.9324), abs=1e-4)
    assert Share(4, 5).p_above(0.5) == pytest.approx(6 / 32)
    assert Share(4, 5).p_below(0.5) == pytest.approx(31 / 32)
    assert Share(0, 5).p_above(0.5) == 1
    assert half_width_in_sd(3) == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)


def test_a_median_of_values_that_are_partly_unknown() -> None:
    found = Median((100.0, 200.0, 300.0, 400.0, math.inf, math.inf), 500)
    assert found.median == 300
    assert found.interval == (100, math.inf)  # the order statistics 1 and 6
    assert found.p_above(150) == pytest.approx(7 / 64)  # 5 of 6 are above
    assert found.p_below(600) == pytest.approx(22 / 64)  # that two are below 600 is not known
    assert Median((1.0, 2.0, 3.0, 4.0, 5.0), 9).interval == (-math.inf, math.inf)


@pytest.mark.parametrize("draw", ["normal", "uniform", "laplace"])
@pytest.mark.parametrize("num", [3, 5, 10])
def test_95_percent_intervals_cover_95_percent(num: int, draw: str) -> None:
    """A percentile bootstrap covers 76, 84 and 90 % at 3, 5 and 10 normal pairs, and fails this
    test."""
    rng = np.random.default_rng(num)
    values = getattr(rng, draw)(size=(TRIALS, num)) - (0.5 if draw == "uniform" else 0.0)
    found = [differences(list(row)) for row in values]
    covered = np.mean([d.interval[0] <= 0 <= d.interval[1] for d in found])
    tolerance = 4 * math.sqrt(
        0.05 * 0.95 / TRIALS
    )  # of the simulation; exact for normal differences alone
    assert 0.95 - tolerance - (0.02 if draw == "uniform" else 0) <= covered
    assert covered <= 0.95 + tolerance + (0.03 if draw == "laplace" else 0)
