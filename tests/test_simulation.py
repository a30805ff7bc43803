"""The round loop on an engine that can be followed by hand."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedsim.clients.clients import Clients
from fedsim.clients.context import Signal
from fedsim.clients.server import Server
from fedsim.core.errors import DivergedError, FedsimError
from fedsim.core.record import PHASES
from fedsim.core.rng import Purpose, Streams
from fedsim.core.types import Cohort, Selection, drop_nonfinite
from fedsim.rounds.availability import Availability
from fedsim.rounds.checks import SelectionError
from fedsim.rounds.loop import Simulation
from fedsim.selectors.base import Selector
from tests.toys import ToyEngine, toy_cohort, toy_components, toy_params, toy_population


class Scripted(Selector):
    """Returns what it is told, and keeps what it observes."""

    def __init__(self, population, selections):  # type: ignore[no-untyped-def]
        super().__init__(population)
        self.selections = selections
        self.observed: list[Cohort] = []

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        chosen = self.selections[(round - 1) % len(self.selections)]
        return chosen if isinstance(chosen, Selection) else Selection(np.array(chosen, np.int64))

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        self.observed.append(cohort)


class OnRounds(Availability):
    def __init__(self, rounds: set[int]) -> None:
        self.rounds = rounds

    def available(
        self, round: int, num_clients: int, rng: np.random.Generator
    ) -> NDArray[np.bool_]:
        return np.full(num_clients, round in self.rounds)


def simulate(
    selections: Sequence[object], num_rounds: int = 2, *broken: int, **components: Any
) -> Simulation:
    sizes = [1, 2, 3, 4]
    engine, population = ToyEngine(sizes), toy_population(sizes, 2, num_rounds)
    selector = Scripted(population, selections)
    engine.broken = set(broken)
    return Simulation(toy_components(engine, population, selector, **components), toy_params())


def test_two_rounds_by_hand() -> None:
    first, second = simulate([[1, 3], [2, 3]])
    assert first.test_accuracy == 1.0  # w = mean of (1/2, 3/2)
    assert second.test_accuracy == 1.75  # w = 1 + mean of ((2-1)/2, (3-1)/2)
    assert (first.participation_ratio, first.coverage, second.coverage) == (0.5, 0.5, 0.75)
    assert first.train_loss == 2.0
    assert first.selected == [1, 3]
    assert (first.bytes_down, first.bytes_up, first.train_samples) == (16, 16, 2 * (2 + 4))

    weighted = simulate([Selection(np.array([1, 3]), np.array([1.0, 1.0]))], num_rounds=1)
    assert (
        next(iter(weighted)).test_accuracy == 0.5 + 1.5
    )  # weights of the selector are used as they are


def test_evaluation_happens_every_so_often_and_at_the_end_and_wall_seconds_are_those_of_all_phases() -> (
    None
):
    records = list(simulate([[0, 1]], num_rounds=5, eval_every=2))
    assert [r.test_accuracy is not None for r in records] == [False, True, False, True, True]
    total = sum(getattr(r, f"seconds_{phase}") for r in records for phase in PHASES)
    assert records[-1].wall_seconds == pytest.approx(total)


def test_a_round_without_anybody_keeps_the_model() -> None:
    one, two, three = simulate([[1, 3]], num_rounds=3, availability=OnRounds({1, 3}))
    assert two.selected == []
    assert two.test_accuracy == one.test_accuracy != three.test_accuracy
    assert (two.uploaded, two.bytes_down, two.train_loss) == (0, 0, None)


def test_training_losses_reach_only_a_selector_that_declares_them() -> None:
    for needs in (frozenset[Signal](), frozenset({Signal.TRAINING_LOSS})):
        run = simulate([[1, 3]], num_rounds=1)
        selector: Any = run.components.selector
        selector.needs = needs
        list(run)
        assert (selector.observed[0].loss is None) == (not needs)


@pytest.mark.parametrize(
    ("selection", "reason"),
    [
        ([1, 1], "unique ids in ascending order"),
        ([3, 1], "unique ids in ascending order"),
        ([1, 9], r"not available this round: \[9\]"),
        ([1], "must return 2 clients, not 1"),
        (Selection(np.array([1, 3]), np.array([1.0, np.nan])), "one finite number per id"),
        (Selection(np.array([1, 3]), np.array([1.0])), "one finite number per id"),
        (Selection(np.array([1.0, 3.0])), "int64"),  # type: ignore[arg-type]
    ],
)
def test_a_faulty_selection_names_selector_round_and_rule(selection: object, reason: str) -> None:
    run = simulate([[0, 1], selection], num_rounds=2)
    run.step()
    with pytest.raises(SelectionError, match=rf"round 2: Scripted .*{reason}"):
        run.step()
    assert run.round == 1


def test_a_broken_update_is_dropped_and_counted() -> None:
    record = next(iter(simulate([[1, 3]], 2, 3)))
    assert record.test_accuracy == 0.5
    assert (record.uploaded, record.dropped_updates, record.train_loss) == (2, 1, 1.0)


def test_a_round_of_broken_updates_diverges_and_keeps_the_last_good_model() -> None:
    run = simulate([[0, 1], [2, 3]], 2, 2, 3)
    good = run.step().test_accuracy
    with pytest.raises(DivergedError, match=r"optimizer\.lr"):
        run.step()
    assert run.evaluate().accuracy == good


def test_dropping_keeps_the_sum_of_the_selectors_weights() -> None:
    cohort = toy_cohort([0, 1, 2], [1, 1, 1], [[1.0, 1.0], [np.inf, 0.0], [2.0, 2.0]])
    kept, weights, dropped = drop_nonfinite(cohort, np.array([0.2, 0.5, 0.3]))
    assert (kept.ids.tolist(), dropped) == ([0, 2], 1)
    assert weights == pytest.approx([0.4, 0.6])


def test_a_selector_cannot_validate_without_declaring_it() -> None:
    run = simulate([[0, 1]])
    server = Server(run.components.engine, run.components.server_data, run._context(1), run.params)
    with pytest.raises(FedsimError, match=r"Signal\.VALIDATION"):
        server.validate(run.params)


def test_clients_can_begin_round_one_from_models_of_their_own_and_no_later_round() -> None:
    """Client i begins at (4 i, 0) and moves halfway to (i, -i); the server averages what comes
    out."""
    one = simulate([[1, 2]])
    one.components = replace(
        one.components, first_model=lambda i: {"w": torch.tensor([4.0 * i, 0.0])}
    )
    one.step()
    own = torch.tensor([[(4 + 1) / 2, -1 / 2], [(8 + 2) / 2, -2 / 2]])
    assert one.params["w"].tolist() == own.mean(0).tolist()
    before = one.params["w"]
    one.step()
    expected = (before + torch.tensor([[1.0, -1.0], [2.0, -2.0]])) / 2
    assert one.params["w"].tolist() == expected.mean(0).tolist()


class Watching(Selector, Availability):
    """Takes everybody, and keeps what it was handed in each round."""

    def __init__(self, population: Any) -> None:
        super().__init__(population)
        self.selects: list[Any] = []
        self.reaches: list[float] = []

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        self.selects.append((rng.random(), clients.lr, clients.available.tolist()))
        return Selection(clients.available)

    def available(
        self, round: int, num_clients: int, rng: np.random.Generator
    ) -> NDArray[np.bool_]:
        self.reaches.append(rng.random())
        return np.ones(num_clients, dtype=bool)


def test_every_round_has_streams_and_a_learning_rate_of_its_own_and_clients_without_data_are_not_offered() -> (
    None
):
    engine, population = ToyEngine([2, 0, 2], seed=5), toy_population([2, 0, 2], 2, 3)
    watching = Watching(population)
    parts = toy_components(
        engine, population, watching, availability=watching, learning_rate=lambda t: 1 / t
    )
    list(Simulation(parts, toy_params()))
    drawn = {
        p: [Streams(5).generator(p, t).random() for t in (1, 2, 3)]
        for p in (Purpose.SELECT, Purpose.AVAILABILITY)
    }
    assert watching.selects == [(u, 1 / t, [0, 2]) for t, u in enumerate(drawn[Purpose.SELECT], 1)]
    assert watching.reaches == drawn[Purpose.AVAILABILITY]
