"""The round loop on an engine that can be followed by hand (`ToyEngine`)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.clients.clients import Clients
from fedsim.clients.context import Signal
from fedsim.clients.server import Server
from fedsim.core.arrays import Bools
from fedsim.core.errors import DivergedError, FedsimError
from fedsim.core.rng import Purpose, Streams
from fedsim.core.types import Cohort, Population, Selection, drop_nonfinite
from fedsim.rounds.availability import Availability
from fedsim.rounds.checks import SelectionError
from fedsim.rounds.loop import Simulation
from fedsim.selectors.base import Selector
from tests.toys import (
    NobodyIn,
    ToyEngine,
    toy_cohort,
    toy_components,
    toy_params,
    toy_population,
)


class Scripted(Selector):
    """A selector that returns the given selections in turn, and keeps what it observes."""

    def __init__(self, population: Population, selections: Sequence[Any]) -> None:
        super().__init__(population)
        self.selections = selections
        self.observed: list[Cohort] = []

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        selection = self.selections[(round - 1) % len(self.selections)]
        if isinstance(selection, Selection):
            return selection
        return Selection(np.array(selection, np.int64))

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        self.observed.append(cohort)


def simulate(
    selections: Sequence[object],
    num_rounds: int = 2,
    broken: Sequence[int] = (),
    **components: Any,
) -> Simulation:
    """Return a run of four clients with 1, 2, 3 and 4 samples, two a round, from the model (0, 0).

    The accuracy of a model is its first number.
    """
    sizes = [1, 2, 3, 4]
    engine = ToyEngine(sizes)
    engine.broken = set(broken)
    population = toy_population(sizes, 2, num_rounds)
    selector = Scripted(population, selections)
    return Simulation(toy_components(engine, population, selector, **components), toy_params())


def test_two_rounds() -> None:
    """Each client moves halfway to its number, and the server averages."""
    first, second = simulate([[1, 3], [2, 3]])
    assert first.test_accuracy == (1 / 2 + 3 / 2) / 2
    assert second.test_accuracy == 1 + ((2 - 1) / 2 + (3 - 1) / 2) / 2
    assert first.train_loss == (1 + 3) / 2
    assert first.selected == [1, 3]
    assert (first.participation_ratio, first.coverage) == (2 / 4, 2 / 4)
    assert second.coverage == 3 / 4


def test_a_round_is_charged() -> None:
    (record,) = simulate([[1, 3]], num_rounds=1)
    model_bytes = 2 * 4
    assert (record.bytes_down, record.bytes_up) == (2 * model_bytes, 2 * model_bytes)
    assert record.train_samples == 2 * (2 + 4)  # two passes


def test_weights_of_the_selector_are_used_as_they_are() -> None:
    (record,) = simulate([Selection(np.array([1, 3]), np.array([1.0, 1.0]))], num_rounds=1)
    assert record.test_accuracy == 1 / 2 + 3 / 2


def test_evaluation_happens_every_so_often_and_at_the_end() -> None:
    records = list(simulate([[0, 1]], num_rounds=5, eval_every=2))
    evaluated = [record.round for record in records if record.test_accuracy is not None]
    assert evaluated == [2, 4, 5]


def test_a_record_has_the_learning_rate_of_its_round() -> None:
    records = list(simulate([[1, 3]], num_rounds=3, learning_rate=lambda t: 0.1 / t))
    assert [record.learning_rate for record in records] == [0.1, 0.1 / 2, 0.1 / 3]


def test_wall_seconds_add_up_all_phases() -> None:
    total = 0.0
    for record in simulate([[0, 1]], num_rounds=3):
        total += record.seconds_select + record.seconds_ask + record.seconds_train
        total += record.seconds_aggregate + record.seconds_evaluate
        assert record.wall_seconds == pytest.approx(total)


def test_a_round_without_clients_keeps_the_model() -> None:
    first, second, third = simulate([[1, 3]], num_rounds=3, availability=NobodyIn({2}))
    assert second.selected == []
    assert second.test_accuracy == first.test_accuracy != third.test_accuracy
    assert (second.uploaded, second.bytes_down, second.train_loss) == (0, 0, None)


@pytest.mark.parametrize("needs", [frozenset(), frozenset({Signal.TRAINING_LOSS})])
def test_a_selector_sees_training_losses_only_if_it_declares_them(needs: Any) -> None:
    run = simulate([[1, 3]], num_rounds=1)
    selector: Any = run.components.selector
    selector.needs = needs
    run.step()
    assert (selector.observed[0].loss is None) == (not needs)


FAULTY = [
    ([1, 1], "unique ids in ascending order"),
    ([3, 1], "unique ids in ascending order"),
    ([1, 9], r"not available this round: \[9\]"),
    ([1], "must return 2 clients, not 1"),
    (Selection(np.array([1, 3]), np.array([1.0, np.nan])), "one finite number per id"),
    (Selection(np.array([1, 3]), np.array([1.0])), "one finite number per id"),
    (Selection(np.array([1.0, 3.0])), "int64"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("selection", "reason"), FAULTY)
def test_a_faulty_selection_names_selector_round_and_rule(selection: object, reason: str) -> None:
    run = simulate([[0, 1], selection])
    run.step()
    with pytest.raises(SelectionError, match=rf"round 2: Scripted .*{reason}"):
        run.step()
    assert run.round == 1


def test_a_broken_update_is_dropped_and_counted() -> None:
    record = simulate([[1, 3]], broken=[3]).step()
    assert record.test_accuracy == 1 / 2  # client 1 only
    assert (record.uploaded, record.dropped_updates, record.train_loss) == (2, 1, 1.0)


def test_a_round_of_broken_updates_diverges_and_keeps_the_last_good_model() -> None:
    run = simulate([[0, 1], [2, 3]], broken=[2, 3])
    accuracy = run.step().test_accuracy
    with pytest.raises(DivergedError, match=r"optimizer\.lr"):
        run.step()
    assert run.evaluate().accuracy == accuracy


def test_dropping_keeps_the_sum_of_the_selectors_weights() -> None:
    """0.2 and 0.3 are scaled to the sum 1."""
    cohort = toy_cohort([0, 1, 2], [1, 1, 1], [[1.0, 1.0], [np.inf, 0.0], [2.0, 2.0]])
    finite, weights, num_dropped = drop_nonfinite(cohort, np.array([0.2, 0.5, 0.3]))
    assert (finite.ids.tolist(), num_dropped) == ([0, 2], 1)
    assert weights == pytest.approx([0.4, 0.6])


def test_a_selector_cannot_validate_without_declaring_it() -> None:
    run = simulate([[0, 1]])
    server = Server(run.components.engine, run.components.server_data, run._context(1), run.params)
    with pytest.raises(FedsimError, match=r"Signal\.VALIDATION"):
        server.validate(run.params)


def test_clients_begin_only_the_first_round_from_models_of_their_own() -> None:
    """Clients 1 and 2 begin at (4, 0) and (8, 0) and move halfway to (1, -1) and (2, -2)."""
    run = simulate([[1, 2]])
    run.components = replace(
        run.components, first_model=lambda client: {"w": torch.tensor([4.0 * client, 0.0])}
    )
    run.step()
    first = [((4 + 1) / 2 + (8 + 2) / 2) / 2, (-1 / 2 - 2 / 2) / 2]
    assert run.params["w"].tolist() == first
    run.step()
    second = [(first[0] + 1.5) / 2, (first[1] - 1.5) / 2]  # halfway to the mean of the targets
    assert run.params["w"].tolist() == second


class Watching(Selector, Availability):
    """A selector of all clients, and an availability model, that keep what they see."""

    def __init__(self, population: Population) -> None:
        super().__init__(population)
        self.selecting: list[Any] = []
        self.reaching: list[float] = []

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        self.selecting.append((rng.random(), clients.lr, clients.available.tolist()))
        return Selection(clients.available)

    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> Bools:
        self.reaching.append(rng.random())
        return np.ones(num_clients, dtype=bool)


def test_every_round_has_its_streams_and_learning_rate_and_offers_only_clients_with_data() -> None:
    sizes = [2, 0, 2]
    watching = Watching(toy_population(sizes, 2, 3))
    components = toy_components(
        ToyEngine(sizes, seed=5),
        watching.population,
        watching,
        availability=watching,
        learning_rate=lambda t: 1 / t,
    )
    list(Simulation(components, toy_params()))
    streams = Streams(5)
    for t in (1, 2, 3):
        draw = streams.generator(Purpose.SELECT, t).random()
        assert watching.selecting[t - 1] == (draw, 1 / t, [0, 2])
        assert watching.reaching[t - 1] == streams.generator(Purpose.AVAILABILITY, t).random()
