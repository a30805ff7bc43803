from contextlib import nullcontext
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
    assert abs(masks.mean() - 0.3) < 4 * np.sqrt(0.21 / 20000)
    assert not np.array_equal(masks[0], masks[1])


@pytest.mark.parametrize(("t", "half"), [(2, range(5)), (3, range(5, 11))])
def test_intermittent_halves_take_turns_minus_a_fifth(t: int, half: range) -> None:
    masks = [Intermittent(absent=0.2).available(t, 11, rng(t + 2 * i)) for i in range(30)]
    assert all(set(np.flatnonzero(m)) <= set(half) for m in masks)
    assert {int(m.sum()) for m in masks} == {len(half) - 1}
    assert set(np.flatnonzero(np.any(masks, axis=0))) == set(half)


@pytest.mark.parametrize("share", [-0.1, 0.0, 1.0, 1.1, float("nan")])
def test_shares_out_of_range_are_refused(share: float) -> None:
    with (
        pytest.raises(ConfigError, match=r"probability=.* must lie in \(0, 1\]")
        if share != 1
        else nullcontext()
    ):
        Bernoulli(probability=share)
    with (
        pytest.raises(ConfigError, match=r"absent=.* must lie in \[0, 1\)")
        if share
        else nullcontext()
    ):
        Intermittent(absent=share)


def test_the_share_of_absent_clients_is_exact() -> None:
    """0.29 * 100 is just under 29 in floats."""
    assert Intermittent(absent=0.29).available(2, 200, rng(2)).sum() == 71
    assert Intermittent(absent=0.0).available(2, 200, rng(2)).sum() == 100
    assert [Intermittent(absent=0.2).available(t, 1, rng(t)).sum() for t in (1, 2, 3)] == [1, 0, 1]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_every_choice_can_be_built_and_is_a_function_of_its_stream(file: Path) -> None:
    availability = instantiate(yaml.safe_load(file.read_text()), Availability, "availability")
    masks = [availability.available(3, 40, rng(3)) for _ in range(2)]
    assert (masks[0].shape, masks[0].dtype) == ((40,), bool)
    assert masks[0].all() if isinstance(availability, Always) else masks[0].any()
    assert np.array_equal(masks[0], masks[1])
