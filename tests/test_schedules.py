"""Learning-rate schedules over rounds."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsim.core.errors import ConfigError
from fedsim.engine.optimizers import SGD, Constant, Cosine, Exponential, Schedule, Step


def factors(schedule: Schedule, num_rounds: int) -> list[float]:
    return [schedule.factor(t, num_rounds) for t in range(1, num_rounds + 1)]


def test_constant_stays() -> None:
    assert factors(Constant(), 4) == [1, 1, 1, 1]


def test_step_takes_effect_in_the_round_after_the_milestone() -> None:
    assert factors(Step(milestones=[3, 5], factor=0.5), 7) == [1, 1, 1, 0.5, 0.5, 0.25, 0.25]


def test_fedcors_schedule_halves_after_rounds_150_and_300_as_its_code_which_counts_from_0() -> None:
    schedule = Step(milestones=[150, 300], factor=0.5)
    published = [0.5 ** ((e >= 150) + (e >= 300)) for e in range(500)]
    assert factors(schedule, 500) == published


def test_a_step_after_round_1_and_no_milestones_at_all() -> None:
    assert factors(Step(milestones=[1], factor=0.1), 2) == [1, 0.1]
    assert factors(Step(milestones=[], factor=0.1), 2) == [1, 1]


def test_exponential_multiplies_once_a_round() -> None:
    assert factors(Exponential(gamma=0.5), 4) == [1, 0.5, 0.25, 0.125]


def test_cosine_goes_from_one_over_the_middle_to_final() -> None:
    assert factors(Cosine(final=0.2), 5) == pytest.approx(
        [1, 0.6 + 0.4 * math.sqrt(0.5), 0.6, 0.6 - 0.4 * math.sqrt(0.5), 0.2]
    )
    assert factors(Cosine(final=0.2), 1) == [1]


@given(num_rounds=st.integers(1, 60), final=st.floats(0.001, 1))
def test_cosine_never_rises_when_final_is_below_one(num_rounds: int, final: float) -> None:
    values = factors(Cosine(final=final), num_rounds)
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(values))


def test_the_optimizer_multiplies_its_rate() -> None:
    step = Step(milestones=[1], factor=0.5)
    optimizer = SGD(lr=0.4, momentum=0.0, nesterov=False, weight_decay=0.0, schedule=step)
    assert [optimizer.lr_at(t, 3) for t in (1, 2, 3)] == [0.4, 0.2, 0.2]


@pytest.mark.parametrize("milestones", [[0], [5, 3], [3, 3]])
def test_milestones_must_ascend(milestones: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"milestones=.*must be ascending rounds >= 1"):
        Step(milestones=milestones, factor=0.5)


def test_factors_must_be_positive() -> None:
    for key, build in (
        ("factor", lambda: Step(milestones=[], factor=0.0)),
        ("gamma", lambda: Exponential(gamma=-1.0)),
        ("final", lambda: Cosine(final=float("inf"))),
    ):
        with pytest.raises(ConfigError, match=rf"^{key}="):
            build()
