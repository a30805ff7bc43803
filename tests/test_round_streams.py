"""What the round loop hands to selector and availability: the round's own stream, and its learning rate."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedsim.clients.clients import Clients
from fedsim.core.rng import Purpose, Streams
from fedsim.core.types import Selection
from fedsim.engine.optimizers import Schedule
from fedsim.rounds.availability import Availability
from fedsim.rounds.loop import Simulation
from fedsim.selectors.base import Selector
from tests.toys import Idle, ToyEngine, toy_components, toy_params, toy_population


class Watching(Selector, Availability):
    """Takes everybody, and keeps what it was handed."""

    def __init__(self, population: Any) -> None:
        super().__init__(population)
        self.selects: list[float] = []
        self.reaches: list[float] = []
        self.rates: list[float] = []
        self.offered: list[list[int]] = []

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        self.selects.append(rng.random())
        self.rates.append(clients.lr)
        self.offered.append(clients.available.tolist())
        return Selection(clients.available)

    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        self.reaches.append(rng.random())
        return np.ones(num_clients, dtype=bool)


class Falling(Schedule):
    def factor(self, round: int, num_rounds: int) -> float:
        return 1 / round + num_rounds


@pytest.fixture
def watching() -> Watching:
    sizes = [2, 0, 2]
    engine, population = ToyEngine(sizes, seed=5), toy_population(sizes, 2, 3)
    optimizer, selector = Idle(lr=0.5, schedule=Falling()), Watching(population)
    rate = lambda t: optimizer.lr_at(t, population.num_rounds)
    parts = toy_components(engine, population, selector, availability=selector, learning_rate=rate)
    list(Simulation(parts, toy_params()))
    return selector


@pytest.mark.parametrize(("kept", "purpose"), [("selects", Purpose.SELECT), ("reaches", Purpose.AVAILABILITY)])
def test_every_round_has_streams_of_its_own(watching: Watching, kept: str, purpose: Purpose) -> None:
    expected = [Streams(5).generator(purpose, t).random() for t in (1, 2, 3)]
    assert getattr(watching, kept) == expected


def test_the_learning_rate_is_the_rounds_own(watching: Watching) -> None:
    assert watching.rates == pytest.approx([0.5 * (1 / t + 3) for t in (1, 2, 3)])


def test_clients_without_data_are_not_offered(watching: Watching) -> None:
    assert watching.offered == [[0, 2]] * 3
