"""Faults in a user's selector or availability model: named with the round, and they never reach the server's model."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.availability import Availability
from fedsim.checks import AvailabilityError, SelectionError
from fedsim.communication.clients import Clients
from fedsim.communication.server import Server
from fedsim.selectors.base import Selector
from fedsim.simulation import Simulation
from fedsim.types import Cohort, Selection
from tests.toys import ToyEngine, toy_components, toy_params, toy_population

SIZES = [1, 2, 3, 4]


class Faulty(Selector):
    """Selects clients 1 and 3; in round 2 it does what it is told in `select` or `observe`."""

    def __init__(self, population: Any, on_select: Callable[..., Any] | None, on_observe: Callable[..., Any] | None):
        super().__init__(population)
        self.on_select, self.on_observe = on_select, on_observe

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Any:
        sound = Selection(np.array([1, 3]))
        return self.on_select(clients) if self.on_select and round == 2 else sound

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        if self.on_observe and round == 2:
            self.on_observe(server)


class Returns(Availability):
    """All clients in round 1, then what it is told."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> Any:
        return self.answer if round == 2 else np.ones(num_clients, bool)


def simulate(
    on_select: Callable[..., Any] | None = None,
    on_observe: Callable[..., Any] | None = None,
    availability: Availability | None = None,
) -> Simulation:
    engine, population = ToyEngine(SIZES), toy_population(SIZES, 2, 2)
    parts = toy_components(engine, population, Faulty(population, on_select, on_observe), availability=availability)
    return Simulation(parts, toy_params())


def broken_in_round_two(run: Simulation, error: type[Exception], reason: str) -> None:
    """Round 2 stops with `reason`, and the model is that of round 1."""
    run.step()
    before = {name: value.clone() for name, value in run.params.items()}
    with pytest.raises(error, match=reason):
        run.step()
    assert run.round == 1
    assert all(torch.equal(run.params[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, r"must return a fedsim\.types\.Selection, not None"),
        ([1, 3], r"must return a fedsim\.types\.Selection, not list \[1, 3\]"),
        (np.array([1, 3]), r"must return a fedsim\.types\.Selection, not ndarray"),
        (Selection([1, 3]), "must return ids as a one-dimensional int64 array, not list"),  # type: ignore[arg-type]
        (Selection(None), "must return ids as a one-dimensional int64 array, not None"),  # type: ignore[arg-type]
        (
            Selection(np.array([1, 3]), [0.5, 0.5]),  # type: ignore[arg-type]
            r"must return weights as an array with one finite number per id, not list \[0\.5, 0\.5\]",
        ),
        (Selection(np.array([1, 3]), np.array(["a", "b"])), "must return weights .* one finite number per id"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_selection_names_selector_and_round(answer: Any, reason: str) -> None:
    broken_in_round_two(simulate(lambda clients: answer), SelectionError, f"round 2: Faulty {reason}")


def test_a_question_that_is_not_declared_names_selector_and_round() -> None:
    reason = r"round 2: Faulty: .*asked for 'losses' without declaring it; add Signal\.LOSSES to its `needs`"
    broken_in_round_two(simulate(lambda clients: clients.losses(clients.available)), SelectionError, reason)
    reason = "round 2: Faulty: .*asked for 'validation' without declaring it"
    broken_in_round_two(simulate(on_observe=lambda server: server.validate({})), SelectionError, reason)


def in_place(lender: Any) -> Selection:
    lender.params["w"].add_(1)
    return Selection(np.array([1, 3]))


def through_numpy(lender: Any) -> Selection:
    lender.params["w"].numpy()[:] = 7
    return Selection(np.array([1, 3]))


def without_history(lender: Any) -> Selection:
    lender.params["w"].data.mul_(2).sub_(1)
    return Selection(np.array([1, 3]))


def another_tensor(lender: Any) -> Selection:
    lender.params["w"] = torch.ones(2)
    return Selection(np.array([1, 3]))


@pytest.mark.parametrize("modify", [in_place, through_numpy, without_history, another_tensor])
@pytest.mark.parametrize("when", ["on_select", "on_observe"])
def test_a_selector_that_modifies_the_model_is_named_and_has_no_effect(modify: Any, when: str) -> None:
    broken_in_round_two(simulate(**{when: modify}), SelectionError, "round 2: Faulty modified the model's w in place")


def test_a_selector_may_read_the_model_and_work_on_a_copy_of_it() -> None:
    def copying(lender: Any) -> Selection:
        mine = {name: value.clone().add_(1) for name, value in lender.params.items()}
        assert not torch.equal(mine["w"], lender.params["w"])
        return Selection(np.array([1, 3]))

    untouched, run = simulate(), simulate(copying, copying)
    assert [r.test_accuracy for r in run] == [r.test_accuracy for r in untouched]


def test_the_clients_of_a_round_cannot_be_changed() -> None:
    def absent(clients: Clients) -> Selection:
        clients.available[0] = 9
        return Selection(np.array([1, 9]))

    broken_in_round_two(simulate(absent), SelectionError, r"round 2: Faulty selected clients .* not available.*\[9\]")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (np.array([0, 2]), r"must return .* each of the 4 clients, not ndarray array\(\[0, 2\]\); np\.isin\("),
        (np.array([0, 1, 1, 0]), r"must return a mask of booleans .*not ndarray array\(\[0, 1, 1, 0\]\)"),
        (np.ones(3, bool), "must return .* one entry for each of the 4 clients"),
        ([True] * 4, "must return a mask of booleans .*not list"),
        (None, "must return a mask of booleans .*not None"),
    ],
)
def test_an_availability_model_that_returns_no_mask_is_named(answer: Any, reason: str) -> None:
    broken_in_round_two(simulate(availability=Returns(answer)), AvailabilityError, f"round 2: Returns {reason}")
