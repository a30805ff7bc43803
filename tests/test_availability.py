"""Availability models: who can be reached in a round."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedsim.config.build import instantiate
from fedsim.config.compose import search_path
from fedsim.core.errors import ConfigError
from fedsim.core.rng import Purpose, Streams
from fedsim.rounds.availability import (
    Always,
    Availability,
    Bernoulli,
    ByLabel,
    BySize,
    Cycles,
    Independent,
    Intermittent,
    LogNormalRates,
    SineOfDay,
    day_factor,
)
from fedsim.running.assembly import build
from tests.test_plan import plan_of

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
    availability.begin(np.arange(40), np.tile(np.arange(40)[:, None], 3), rng(0))
    mask = availability.available(3, 40, rng(3))
    assert (mask.shape, mask.dtype) == ((40,), bool)
    assert mask.all() if isinstance(availability, Always) else mask.any()
    assert np.array_equal(availability.available(3, 40, rng(3)), mask)


# --- models whose probabilities depend on data, on the time, or on luck ----------------------------


LABELS = np.array([[3, 0, 0, 0], [0, 2, 2, 0], [0, 0, 0, 4], [1, 1, 1, 1], [0, 0, 0, 0]])
"""Label counts of five clients: the last one has no samples."""


def begun(model: Independent, counts: np.ndarray = LABELS) -> Independent:
    model.begin(counts.sum(1), counts, Streams(0).generator(Purpose.AVAILABILITY))
    return model


BY_LABEL = [
    ("lowest", "high", [0.4, 0.6, 1.0, 0.4]),
    ("lowest", "low", [1.0, 0.8, 0.4, 1.0]),
    ("number", "high", [0.55, 0.7, 0.55, 1.0]),
    ("number", "low", [1.0, 0.85, 1.0, 0.55]),
]


@pytest.mark.parametrize(("measure", "favours", "expected"), BY_LABEL)
def test_probabilities_by_label(measure: Any, favours: Any, expected: list[float]) -> None:
    model = begun(ByLabel(beta=0.6, measure=measure, favours=favours))
    np.testing.assert_allclose(model.probabilities(7, 5)[:4], expected)


TEN_LABELS = np.zeros((3, 10), int)
TEN_LABELS[[0, 1, 2, 2], [0, 9, 3, 4]] = 1


def test_probabilities_by_label_of_flgo() -> None:
    """L=10: YMF with beta=0.1 gives 0.9 and 1 for the labels 0 and 9. YFF with 0.2 gives 0.84."""
    lowest = begun(ByLabel(beta=0.1, measure="lowest", favours="high"), TEN_LABELS)
    number = begun(ByLabel(beta=0.2, measure="number", favours="high"), TEN_LABELS)
    np.testing.assert_allclose(lowest.probabilities(1, 3)[:2], [0.9, 1])
    np.testing.assert_allclose(number.probabilities(1, 3)[2], 0.84)


BY_SIZE = [("large", 0.7, [0.379, 0.616, 1, 0]), ("small", 0.5, [1, 0.707, 0.5, 0])]


@pytest.mark.parametrize(("favours", "beta", "expected"), BY_SIZE)
def test_probabilities_by_size(favours: Any, beta: float, expected: list[float]) -> None:
    model = begun(BySize(beta=beta, favours=favours), np.array([[50], [100], [200], [0]]))
    np.testing.assert_allclose(model.probabilities(1, 4), expected, atol=5e-4)


@pytest.mark.parametrize(("beta", "mean"), [(0.1, 0.77), (0.5, 0.23), (0.9, 0.04)])
def test_log_normal_probabilities_reach_one_and_have_a_known_mean(beta: float, mean: float) -> None:
    """FLGo's means for 100 clients."""
    means = []
    for seed in range(30):
        model = LogNormalRates(beta=beta)
        rng = Streams(seed).generator(Purpose.AVAILABILITY)
        model.begin(np.ones(100, int), np.ones((100, 1), int), rng)
        assert model.fixed.max() == 1
        means.append(model.fixed.mean())
    assert np.mean(means) == pytest.approx(mean, abs=0.02)


def test_the_sine_of_the_day_has_a_mean_of_one_half() -> None:
    factors = [day_factor(t, 24) for t in range(24)]
    assert np.mean(factors) == pytest.approx(0.5)
    assert (min(factors), max(factors)) == pytest.approx((0.101, 0.899), abs=5e-4)
    assert factors[0] == factors[23] == day_factor(24, 24) == 0.5
    model = begun(SineOfDay(beta=0.5, period=24))
    assert model.probabilities(6, 5) == pytest.approx(factors[6] * model.probabilities(0, 5) / 0.5)


def test_cycles_give_each_label_its_rounds_in_a_row() -> None:
    """FedGS: label y has its turn if y / L < r <= (y + 1) / L, with r = (1 + t mod T) / T."""
    model = begun(Cycles(beta=0.8, rounds_per_label=3))
    for t in range(1, 30):
        r = (1 + t % 12) / 12
        has_turn = np.array([y / 4 < r <= (y + 1) / 4 for y in range(4)])
        assert has_turn.sum() == 1
        expected = np.where((LABELS[:, has_turn] > 0)[:, 0], 1, 0.2)
        np.testing.assert_allclose(model.probabilities(t, 5), expected)


RATES = {
    "by_label": ByLabel(beta=0.9, measure="lowest", favours="high"),
    "by_size": BySize(beta=0.7, favours="large"),
    "lognormal": LogNormalRates(beta=0.5),
    "sine": SineOfDay(beta=0.5, period=24),
    "cycles": Cycles(beta=0.5, rounds_per_label=10),
}


@pytest.mark.parametrize("name", RATES)
def test_rates_over_10_000_rounds_are_those_of_the_formulas(name: str) -> None:
    """100 clients of each of four kinds: a kind's rate differs by less than 0.01."""
    counts = np.repeat([[9, 0, 0, 0], [0, 9, 9, 0], [0, 0, 9, 9], [0, 0, 0, 40]], 100, 0)
    model = begun(RATES[name], counts)
    num_rounds = 10_000
    present = np.zeros(400)
    expected = np.zeros(400)
    for t, stream in enumerate(rngs(num_rounds), 1):
        present += model.available(t, 400, stream)
        expected += model.probabilities(t, 400)
    rates = (present / num_rounds).reshape(4, 100).mean(1)
    formulas = (expected / num_rounds).reshape(4, 100).mean(1)
    np.testing.assert_allclose(rates, formulas, rtol=0.01)


def rngs(num_rounds: int) -> Iterator[np.random.Generator]:
    """Yield the streams of the rounds, `rng(t)`."""
    rounds = np.arange(1, num_rounds + 1)
    return Streams(0).generators(Purpose.AVAILABILITY, last=rounds)


AWAY = [
    ("availability=by_label", "availability.beta=0.9"),
    ("availability=cycles", "availability.rounds_per_label=1"),
    ("availability=sine",),
]


@pytest.mark.parametrize("words", AWAY)
def test_selectors_meet_the_same_clients(words: tuple[str, ...]) -> None:
    """Both selectors contact all available clients."""
    words = ("num_clients=12", "num_rounds=4", "local.epochs=1", "device=cpu", *words)
    contacted = []
    for selector in ("full", "top_loss"):
        with search_path():
            simulation = build(plan_of(f"selector={selector}", *words)).simulation
        contacted.append([record.contacted for record in simulation])
    assert contacted[0] == contacted[1]
    assert len(set(contacted[0])) > 1
