"""How many seeds would decide what is open."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from fedsim.papers.evidence import Evidence
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


LEVEL = Claim("a", "", "", {}, "final_accuracy", level_with=2.0)
ABOUT = Claim("a", "", "", {}, "rounds_to_cover", value=100, tolerance=20)
NEVER = (None,)
CASES = [
    (CLAIM, Evidence(Share(5, 10)), 1, NEVER),  # a bound that half of the runs keep
    (CLAIM, Evidence(Share(7, 10)), 1, range(40, 60)),  # by the normal approximation 47
    (gain(), apart(1.0), 1, (10, 11)),  # the exact answer of the noncentral t distribution is 10
    (gain(), apart(-1.0), 1, (10, 11)),
    (gain(), apart(1.0), 20, range(16, 24)),
    (gain(), apart(0.0), 1, NEVER),
    (gain(1.0), apart(0.0), 1, (10, 11)),  # short of what is printed
    (LEVEL, apart(0.5), 1, range(4, 7)),
    (LEVEL, apart(1.5), 1, range(20, 60)),  # nearer to the margin
    (LEVEL, apart(2.0), 1, NEVER),
    (number(0.5), RUNS, 1, range(7, 14)),
    (number(0.7), RUNS, 1, range(4, 10)),
    (number(0.55), RUNS, 1, NEVER),  # one more run may well be there
    (ABOUT, Evidence(Median((300.0, 400.0, math.inf), 500)), 1, (6,)),
    (ABOUT, Evidence(Median((95.0, 100.0, 105.0), 500)), 1, (5,)),
    (ABOUT, Evidence(Median((95.0, 100.0, 300.0, 300.0), 500)), 1, NEVER),
]


@pytest.mark.parametrize(("claim", "evidence", "tests", "needed"), CASES)
def test_seeds_that_would_decide(
    claim: Claim | Number, evidence: Evidence, tests: int, needed: Sequence[Any]
) -> None:
    assert seeds_needed(claim, evidence, tests) in needed


def test_seeds_that_all_agree() -> None:
    for tests, needed in ((1, 6), (2, 7), (3, 7), (4, 8), (6, 8), (7, 9), (12, 9), (25, 10)):
        assert seeds_needed(CLAIM, Evidence(Share(5, 5)), tests) == needed
        assert seeds_needed(CLAIM, Evidence(Share(0, 5)), tests) == needed
        assert 2 * tests / 2**needed < 0.05 <= 2 * tests / 2 ** (needed - 1)
