"""Availability models: who can be reached in a round."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from fedsim.config.build import instantiate
from fedsim.core.errors import ConfigError
from fedsim.core.rng import Purpose, Streams
from fedsim.rounds.availability import Always, Availability, Bernoulli, Intermittent

FILES = sorted((Path(__file__).parents[1] / "conf" / "availability").glob("*.yaml"))


def rng(t: int) -> np.random.Generator:
    return Streams(0).generator(Purpose.AVAILABILITY, t)


def test_bernoulli_has_its_probability_and_is_fresh_every_round() -> None:
    masks = np.stack([Bernoulli(probability=0.3).available(t, 100, rng(t)) for t in range(200)])
    four_deviations = 4 * np.sqrt(0.3 * 0.7 / masks.size)
    assert abs(masks.mean() - 0.3) < four_deviations
    assert not np.array_equal(masks[0], masks[1])


@pytest.mark.parametrize(("round", "half"), [(2, {0, 1, 2, 3, 4}), (3, {5, 6, 7, 8, 9, 10})])
def test_intermittent_halves_alternate_without_a_random_fifth(round: int, half: set[int]) -> None:
    """A fifth of 5 or 6 clients, rounded down, is one."""
    ever_available: set[int] = set()
    for t in range(round, round + 60, 2):
        ids = np.flatnonzero(Intermittent(absent=0.2).available(round, 11, rng(t)))
        assert len(ids) == len(half) - 1
        ever_available |= set(ids.tolist())
    assert ever_available == half


@pytest.mark.parametrize("probability", [-0.1, 0.0, 1.1, float("nan")])
def test_a_probability_out_of_range_is_rejected(probability: float) -> None:
    with pytest.raises(ConfigError, match=r"probability=.* must lie in \(0, 1\]"):
        Bernoulli(probability=probability)


@pytest.mark.parametrize("absent", [-0.1, 1.0, 1.1, float("nan")])
def test_an_absent_share_out_of_range_is_rejected(absent: float) -> None:
    with pytest.raises(ConfigError, match=r"absent=.* must lie in \[0, 1\)"):
        Intermittent(absent=absent)


EXACT_NUMBERS = [
    (0.29, 200, 2, 100 - 29),  # 0.29 * 100 is just under 29 in floating point
    (0.0, 200, 2, 100),
    (0.2, 1, 2, 0),  # the first half of one client is nobody
    (0.2, 1, 3, 1),
]


@pytest.mark.parametrize(("absent", "num_clients", "round", "available"), EXACT_NUMBERS)
def test_the_number_of_available_clients_is_exact(
    absent: float, num_clients: int, round: int, available: int
) -> None:
    mask = Intermittent(absent=absent).available(round, num_clients, rng(round))
    assert mask.sum() == available


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_choice_is_a_function_of_its_stream(file: Path) -> None:
    availability = instantiate(yaml.safe_load(file.read_text()), Availability, "availability")
    mask = availability.available(3, 40, rng(3))
    assert (mask.shape, mask.dtype) == ((40,), bool)
    assert mask.all() if isinstance(availability, Always) else mask.any()
    assert np.array_equal(availability.available(3, 40, rng(3)), mask)
