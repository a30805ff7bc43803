"""How many seeds would decide what is open."""

import math

import pytest

from fedsim.papers.examine import Evidence
from fedsim.papers.published import Claim, Number
from fedsim.results.statistics import Median, Share, differences, estimate
from scripts.reproduction.seeds import seeds_needed

CLAIM = Claim("a", "", "", {}, "final_accuracy")


def gain(value: float = 0.0) -> Claim:
    return Claim("a", "", "", {}, "final_accuracy", gain=value)


def number(value: float) -> Number:
    return Number("a", "", {}, "final_accuracy", value, margin=0.04)


def apart(mean: float) -> Evidence:
    """Differences with this mean and a standard deviation of 1."""
    return Evidence(differences([mean - 1, mean, mean + 1]))


RUNS = Evidence(estimate([0.46, 0.5, 0.54]))


@pytest.mark.parametrize(("tests", "needed"), [(1, 6), (2, 7), (3, 7), (4, 8), (6, 8), (7, 9), (12, 9), (25, 10)])
def test_seeds_that_all_agree(tests: int, needed: int) -> None:
    assert seeds_needed(CLAIM, Evidence(Share(5, 5)), tests) == needed
    assert seeds_needed(CLAIM, Evidence(Share(0, 5)), tests) == needed
    assert 2 * tests / 2**needed < 0.05 <= 2 * tests / 2 ** (needed - 1)


def test_a_bound_that_half_of_the_runs_keep_is_never_decided() -> None:
    assert seeds_needed(CLAIM, Evidence(Share(5, 10)), 1) is None
    assert seeds_needed(CLAIM, Evidence(Share(7, 10)), 1) in range(40, 60)  # by the normal approximation 47


def test_a_gain_of_one_deviation_takes_some_ten_seeds() -> None:
    """The exact answer of the noncentral t distribution is 10."""
    assert seeds_needed(gain(), apart(1.0), 1) == seeds_needed(gain(), apart(-1.0), 1)
    assert seeds_needed(gain(), apart(1.0), 1) in (10, 11)
    assert seeds_needed(gain(), apart(1.0), 20) in range(16, 24)
    assert seeds_needed(gain(), apart(0.0), 1) is None
    assert seeds_needed(gain(1.0), apart(0.0), 1) in (10, 11)  # short of what is printed


def test_levelness_is_decided_by_the_distance_to_the_margin() -> None:
    level = Claim("a", "", "", {}, "final_accuracy", level_with=2.0)
    assert (seeds_needed(level, apart(0.5), 1) or 0) < (seeds_needed(level, apart(1.5), 1) or 0)
    assert seeds_needed(level, apart(2.0), 1) is None


def test_a_number_of_one_run_is_close_or_far_or_never_decided() -> None:
    assert seeds_needed(number(0.5), RUNS, 1) in range(7, 14)
    assert seeds_needed(number(0.7), RUNS, 1) in range(4, 10)
    assert seeds_needed(number(0.55), RUNS, 1) is None  # one more run may well be there


def test_a_median_is_decided_by_signs() -> None:
    about = Claim("a", "", "", {}, "rounds_to_cover", value=100, tolerance=20)
    assert seeds_needed(about, Evidence(Median((300.0, 400.0, math.inf), 500)), 1) == 6
    assert seeds_needed(about, Evidence(Median((95.0, 100.0, 105.0), 500)), 1) == 5
    assert seeds_needed(about, Evidence(Median((95.0, 100.0, 300.0, 300.0), 500)), 1) is None
