import numpy as np
import pytest

from fedsim.availability import Always, Bernoulli, Intermittent
from fedsim.errors import ConfigError
from fedsim.streams import Purpose, Streams


def rng(t: int) -> np.random.Generator:
    return Streams(0).generator(Purpose.AVAILABILITY, t)


def test_always_is_everybody() -> None:
    assert Always().available(1, 5, rng(1)).all()


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


@pytest.mark.parametrize("probability", [0.0, 1.1])
def test_a_probability_out_of_range_is_refused(probability: float) -> None:
    with pytest.raises(ConfigError, match=r"probability=.* must lie in \(0, 1\]"):
        Bernoulli(probability=probability)
