"""Faults in a user's selector, aggregator or availability model: named with the round, and without
any effect."""

import random
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.clients.clients import Clients
from fedsim.clients.context import Signal
from fedsim.clients.local_algorithms import LocalAlgorithm
from fedsim.clients.server import Server
from fedsim.core.errors import DivergedError, FedsimError
from fedsim.core.types import Cohort, Params, Selection
from fedsim.rounds.aggregators import Aggregator, FedAvg
from fedsim.rounds.availability import Availability
from fedsim.rounds.checks import AggregationError, AvailabilityError, SelectionError
from fedsim.rounds.loop import Simulation
from fedsim.selectors.base import Selector
from tests.toys import ToyEngine, toy_components, toy_params, toy_population

SIZES = [1, 2, 3, 4]


class Faulty(Selector):
    """Selects clients 1 and 3; in round 2 it does what it is told in `select` or `observe`."""

    def __init__(
        self,
        population: Any,
        on_select: Callable[..., Any] | None,
        on_observe: Callable[..., Any] | None,
    ):
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
    aggregator: Aggregator | None = None,
) -> Simulation:
    engine, population = ToyEngine(SIZES), toy_population(SIZES, 2, 2)
    selector = Faulty(population, on_select, on_observe)
    parts = toy_components(engine, population, selector, availability=availability)
    return Simulation(replace(parts, aggregator=aggregator or parts.aggregator), toy_params())


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
        (None, r"must return a fedsim\.core\.types\.Selection, not None"),
        ([1, 3], r"must return a fedsim\.core\.types\.Selection, not list \[1, 3\]"),
        (Selection([1, 3]), "must return ids as a one-dimensional int64 array, not list"),  # type: ignore[arg-type]
        (
            Selection(np.array([1, 3]), [0.5, 0.5]),  # type: ignore[arg-type]
            r"must return weights as an array with one finite number per id, not list \[0\.5, 0\.5\]",
        ),
        (
            Selection(np.array([1, 3]), np.array(["a", "b"])),
            "must return weights .* one finite number per id",
        ),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_selection_names_selector_and_round(answer: Any, reason: str) -> None:
    broken_in_round_two(
        simulate(lambda clients: answer), SelectionError, f"round 2: Faulty {reason}"
    )


def test_a_question_that_is_not_declared_names_selector_and_round() -> None:
    reason = r"round 2: Faulty: .*asked for 'losses' without declaring it; add Signal\.LOSSES to its `needs`"
    broken_in_round_two(
        simulate(lambda clients: clients.losses(clients.available)), SelectionError, reason
    )
    reason = "round 2: Faulty: .*asked for 'validation' without declaring it"
    broken_in_round_two(
        simulate(on_observe=lambda server: server.validate({})), SelectionError, reason
    )


def through_numpy(params: Params) -> None:
    params["w"].numpy()[:] = 7


def without_history(params: Params) -> None:
    params["w"].data.mul_(2).sub_(1)


IN_PLACE: list[Callable[[Params], Any]] = [
    lambda params: params["w"][:1].mul_(2).sub_(1),
    lambda params: params.update(w=torch.ones(2)),
    lambda params: params.clear(),
    through_numpy,
    without_history,
]


def both(clients: Clients) -> Params:
    """Updates that have arrived with two questions."""
    clients.updates(np.array([1]))
    return clients.updates(clients.available)


LENT_IN_SELECT: list[Callable[[Clients], Params]] = [
    lambda clients: clients.params,
    lambda clients: clients.updates(np.array([1, 3])),
    lambda clients: clients.updates(clients.available),
    both,
    lambda clients: clients.collect(np.array([1, 3])).delta,
    lambda clients: clients.collect(np.array([1, 3])).start,
    lambda clients: clients.momentum_buffers(clients.available),
]


@pytest.mark.parametrize("modify", IN_PLACE)
@pytest.mark.parametrize("ask", LENT_IN_SELECT)
def test_tensors_that_clients_send_to_a_users_class_are_its_own(
    ask: Callable[[Clients], Params], modify: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Faulty, "needs", frozenset({Signal.TRAINING, Signal.UPDATES}))

    def select(clients: Clients) -> Selection:
        ask(clients)
        return Selection(np.array([1, 3]))

    def select_and_modify(clients: Clients) -> Selection:
        modify(ask(clients))
        return Selection(np.array([1, 3]))

    assert untimed(simulate(select_and_modify)) == untimed(simulate(select))


class Remembers(FedAvg):
    """Keeps the updates of the latest round."""

    def aggregate(self, params: Params, cohort: Cohort, weights: Any) -> Params:
        self.delta = cohort.delta
        return super().aggregate(params, cohort, weights)


LENT_IN_OBSERVE: list[Callable[[Cohort, Server], Params]] = [
    lambda cohort, server: cohort.start,
    lambda cohort, server: cohort.delta,
    lambda cohort, server: server.params,
]


@pytest.mark.parametrize("modify", IN_PLACE)
@pytest.mark.parametrize("lent", LENT_IN_OBSERVE)
def test_tensors_that_a_users_class_observes_are_its_own(
    lent: Callable[[Cohort, Server], Params], modify: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aggregator may keep updates, and the lead of a replay trains from the same model later."""

    def kept() -> list[list[Any]]:
        aggregator = Remembers(frozenset(), weighting="uniform")
        run = simulate(aggregator=aggregator)
        start = run.params
        run.step()
        return [tensors["w"].tolist() for tensors in (start, aggregator.delta, run.params)]

    monkeypatch.setattr(Faulty, "needs", frozenset({Signal.UPDATES}))
    untouched = kept()
    monkeypatch.setattr(
        Faulty, "observe", lambda self, round, cohort, server: modify(lent(cohort, server))
    )
    assert kept() == untouched


def test_what_a_selector_is_told_of_clients_cannot_be_changed() -> None:
    def absent(clients: Clients) -> Selection:
        clients.available[0] = 9
        return Selection(np.array([1, 9]))

    broken_in_round_two(
        simulate(absent),
        SelectionError,
        r"round 2: Faulty selected clients .* not available.*\[9\]",
    )
    with pytest.raises(ValueError, match="read-only"):
        toy_population(SIZES, 2, 2).sizes[:] = 1
    mine = np.array(SIZES)
    toy_population(mine, 2, 2)  # type: ignore[arg-type]
    mine[0] = 7  # the caller's array stays the caller's


class Own(Aggregator):
    """In round 2 it does what it is told, else it adds the mean update."""

    def __init__(self, second: Callable[[Params, Cohort, Params], Any]) -> None:
        super().__init__(frozenset(), weighting="uniform")
        self.second, self.rounds = second, 0

    def aggregate(self, params: Params, cohort: Cohort, weights: Any) -> Any:
        self.rounds += 1
        mean = self.mean_delta(cohort, weights)
        return (
            self.second(params, cohort, mean)
            if self.rounds == 2
            else {n: v + mean[n] for n, v in params.items()}
        )


def test_an_aggregator_may_work_in_place_on_the_model_that_it_is_given() -> None:
    """The selector sees the model before and the updates to it all the same."""
    seen: list[list[float]] = []

    class Sees(Faulty):
        def observe(self, round: int, cohort: Cohort, server: Server) -> None:
            seen.append([*cohort.start["w"].tolist(), *server.params["w"].tolist()])

    def adds_in_place(params: Params, cohort: Cohort, mean: Params) -> Params:
        for name, value in params.items():
            value += mean[name]
        return params

    def run(second: Any) -> list[list[float]]:
        seen.clear()
        made = simulate(aggregator=Own(second))
        made.components = replace(
            made.components, selector=Sees(made.components.population, None, None)
        )
        list(made)
        return list(seen)

    expected = run(
        lambda params, cohort, mean: {name: value + mean[name] for name, value in params.items()}
    )
    assert expected[0][2:] == expected[1][:2] != expected[1][2:]
    assert run(adds_in_place) == expected


def clips_in_place(params: Params, cohort: Cohort, mean: Params) -> Params:
    cohort.delta["w"].clamp_(-1, 1)
    return {name: value + mean[name] for name, value in params.items()}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (clips_in_place, "modified the updates' w in place, which others use, too"),
        (lambda *_: None, "must return a model, that is, a dict of tensors by name, not None"),
        (
            lambda params, *_: {},
            r"must return the tensors of `params`: it lacks \['w'\], and has \[\] besides",
        ),
        (
            lambda params, *_: {**params, "v": params["w"]},
            r"it lacks \[\], and has \['v'\] besides",
        ),
        (lambda params, *_: {"w": 1.0}, r"must return tensors: w is float 1\.0"),
        (
            lambda params, *_: {"w": params["w"].double()},
            r"w is \[2\] torch\.float64 cpu, not \[2\] torch",
        ),
        (
            lambda params, *_: {"w": params["w"][None]},
            r"w is \[1, 2\] torch\.float32 cpu, not \[2\] torch",
        ),
    ],
)
def test_an_aggregator_that_returns_no_such_model_is_named(answer: Any, reason: str) -> None:
    broken_in_round_two(
        simulate(aggregator=Own(answer)), AggregationError, f"round 2: Own .*{reason}"
    )


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            np.array([0, 2]),
            r"must return .* each of the 4 clients, not ndarray array\(\[0, 2\]\); np\.isin\(",
        ),
        (
            np.array([0, 1, 1, 0]),
            r"must return a mask of booleans .*not ndarray array\(\[0, 1, 1, 0\]\)",
        ),
        (np.ones(3, bool), "must return .* one entry for each of the 4 clients"),
        ([True] * 4, "must return a mask of booleans .*not list"),
    ],
)
def test_an_availability_model_that_returns_no_mask_is_named(answer: Any, reason: str) -> None:
    broken_in_round_two(
        simulate(availability=Returns(answer)), AvailabilityError, f"round 2: Returns {reason}"
    )


# --- questions, and arrays that fedsim still needs ---


def asks(ids: Any) -> Callable[[Clients], Selection]:
    """Return a `select` that asks the clients `ids` for losses."""

    def select(clients: Clients) -> Selection:
        clients.losses(ids)
        return Selection(np.array([1, 3]))

    return select


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (np.array([True, False, True, False]), r"not an array of bool .*np\.flatnonzero"),
        (np.array([1.0, 2.0]), "not an array of float64"),
        (np.array([[1, 2]]), r"shape \[1, 2\]"),
        (np.array([1, 2, 1]), "names a client twice"),
        (np.array([-1, 2]), r"not available this round: \[-1\]"),
        (np.array([1, 4]), r"not available this round: \[4\]"),
        (np.arange(4), r"not available this round: \[0\]"),
    ],
)
def test_a_question_is_for_different_clients_that_are_available(
    ids: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In round 2, client 0 is not available."""
    monkeypatch.setattr(Faulty, "needs", frozenset({Signal.LOSSES}))
    present = Returns(np.array([False, True, True, True]))
    run = simulate(asks(ids), availability=present)
    broken_in_round_two(run, SelectionError, f"round 2: Faulty: .*{reason}")


class Keeps(Selector):
    """Keeps what it gets in round 1, and uses it in `select` or `observe` of round 2."""

    needs = frozenset({Signal.LOSSES, Signal.VALIDATION})

    def __init__(self, population: Any, when: str, question: Callable[..., Any]) -> None:
        super().__init__(population)
        self.when, self.question = when, question

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        if round == 1:
            self.clients = clients
            self.virtual = clients.broadcast(toy_params())
        elif self.when == "select":
            self.question(self)
        return Selection(np.array([1, 3]))

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        if round == 1:
            self.server = server
        elif self.when == "observe":
            self.question(self)


LATE_QUESTIONS: list[Callable[[Keeps], Any]] = [
    lambda one: one.clients.losses(np.array([1])),
    lambda one: one.clients.send_numbers(np.array([1]), 1),
    lambda one: one.virtual.losses(np.array([1])),
    lambda one: one.clients.validate({}),
    lambda one: one.server.validate({}),
]


@pytest.mark.parametrize("question", LATE_QUESTIONS)
@pytest.mark.parametrize("when", ["select", "observe"])
def test_a_question_to_an_earlier_round_is_an_error(
    when: str, question: Callable[[Keeps], Any]
) -> None:
    """That round's record is written, so nobody would pay for the answer."""
    population = toy_population(SIZES, 2, 2)
    parts = toy_components(ToyEngine(SIZES), population, Keeps(population, when, question))
    reason = (
        "round 2: Keeps: the selector asked the `clients` or `server` of round 1, which is over"
    )
    broken_in_round_two(Simulation(parts, toy_params()), SelectionError, reason)


def test_unsigned_ids_and_lists_are_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faulty, "needs", frozenset({Signal.LOSSES}))
    run = simulate(asks(np.array([3, 1], np.uint8)))
    run.step()
    assert run.step().contacted == 2
    run = simulate(asks([3, 1]))
    run.step()
    assert run.step().contacted == 2


ALL_QUESTIONS = ["losses", "updates", "update_norms", "collect", "gradient_norms", "train"]


@pytest.mark.parametrize("question", ALL_QUESTIONS)
def test_a_question_for_nobody_has_no_answers(
    question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = {Signal.LOSSES, Signal.UPDATES, Signal.TRAINING, Signal.GRADIENTS}
    monkeypatch.setattr(Faulty, "needs", frozenset(needs))
    answers = []

    def select(clients: Clients) -> Selection:
        answers.append(getattr(clients, question)(np.empty(0, np.int64)))
        return Selection(np.array([1, 3]))

    run = simulate(select)
    run.step()
    run.step()
    [answer] = answers
    if question == "updates":
        assert answer["w"].shape == (0, 2)
    elif question == "collect":
        assert len(answer.ids) == 0
    elif question != "train":
        assert answer.shape == (0,)


def untimed(run: Simulation) -> list[dict[str, Any]]:
    """Return the records of a run without the seconds that it took."""
    records = []
    for record in run:
        values = asdict(record)
        records.append({key: value for key, value in values.items() if "seconds" not in key})
    return records


def shuffles_ids(cohort: Cohort) -> None:
    cohort.ids[:] = cohort.ids[::-1].copy()


def centres_losses(cohort: Cohort) -> None:
    assert cohort.loss is not None
    cohort.loss[:] -= cohort.loss.mean()


def changes_sizes(cohort: Cohort) -> None:
    cohort.sizes[:] = 1


IN_PLACE_ON_ARRAYS = [shuffles_ids, centres_losses, changes_sizes]
Change = Callable[[Cohort], None]


def collecting(change: Change | None) -> Callable[[Clients], Selection]:
    """Return a `select` that collects all updates and changes their cohort in place."""

    def select(clients: Clients) -> Selection:
        cohort = clients.collect(clients.available)
        if change is not None:
            change(cohort)
        return Selection(np.array([1, 3]))

    return select


@pytest.mark.parametrize("change", IN_PLACE_ON_ARRAYS)
def test_changed_arrays_of_a_collected_cohort_have_no_effect(
    change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = {Signal.TRAINING, Signal.UPDATES, Signal.TRAINING_LOSS}
    monkeypatch.setattr(Faulty, "needs", frozenset(needs))
    by_size = FedAvg(weighting="by_size", buffers="average")
    records = []
    for select in (collecting(None), collecting(change)):
        records.append(untimed(simulate(select, aggregator=by_size)))
    untouched, changed = records
    assert changed == untouched


@pytest.mark.parametrize("change", IN_PLACE_ON_ARRAYS)
def test_changed_arrays_of_the_observed_cohort_have_no_effect(
    change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = {Signal.TRAINING, Signal.UPDATES, Signal.TRAINING_LOSS}
    monkeypatch.setattr(Faulty, "needs", frozenset(needs))
    untouched = untimed(simulate())
    monkeypatch.setattr(Faulty, "observe", lambda self, round, cohort, server: change(cohort))
    assert untimed(simulate()) == untouched


def test_a_selector_that_changes_its_ids_later_does_not_change_the_record() -> None:
    ids = np.array([1, 3])

    def forget(server: Server) -> None:
        ids[:] = 0

    run = simulate(lambda clients: Selection(ids), forget)
    run.step()
    assert run.step().selected == [1, 3]


def test_changed_arrays_of_an_aggregators_cohort_have_no_effect() -> None:
    def renames(params: Params, cohort: Cohort, mean: Params) -> Params:
        cohort.ids[:] = 0
        cohort.sizes[:] = 1
        return {name: value + mean[name] for name, value in params.items()}

    run = simulate(aggregator=Own(renames))
    assert [record.selected for record in run] == [[1, 3], [1, 3]]


# --- random draws ---


GLOBAL_DRAWS: list[tuple[Callable[[], Any], str]] = [
    (lambda: np.random.choice([1, 3]), "NumPy"),  # noqa: NPY002
    (lambda: np.random.normal(), "NumPy"),  # noqa: NPY002
    (lambda: np.random.seed(1), "NumPy"),  # noqa: NPY002
    (lambda: torch.randperm(3), "torch"),
    (lambda: random.sample([1, 3], 1), "Python"),
]


@pytest.mark.parametrize(("draw", "owner"), GLOBAL_DRAWS)
@pytest.mark.parametrize("method", ["select", "observe"])
def test_a_draw_from_a_global_generator_is_an_error(
    method: str, draw: Callable[[], Any], owner: str
) -> None:
    """Its state is in no checkpoint, and does not depend on the seed."""

    def drawing(_: object) -> Selection:
        draw()
        return Selection(np.array([1, 3]))

    reason = rf"round 2: Faulty drew from {owner}'s global generator in `{method}`.*with the `rng`"
    broken_in_round_two(simulate(**{f"on_{method}": drawing}), SelectionError, reason)


def test_draws_outside_of_a_selector_and_of_its_own_generators_are_no_error() -> None:
    def draws(_: object) -> Selection:
        np.random.default_rng(0).random()
        random.Random(0).random()
        torch.rand(1, generator=torch.Generator().manual_seed(0))
        return Selection(np.array([1, 3]))

    run = simulate(draws, draws)
    run.step()
    np.random.random()  # noqa: NPY002
    run.step()


# --- attributes of classes ---


@pytest.mark.parametrize("needs", [Signal.LOSSES, [Signal.LOSSES], None])
def test_needs_must_be_a_set(needs: Any) -> None:
    with pytest.raises(TypeError, match=r"Own\.needs must be a set of signals, as in frozenset"):
        type("Own", (Faulty,), {"needs": needs})


def test_state_must_be_a_tuple() -> None:
    with pytest.raises(TypeError, match=r"Own\.state must be .*: write state = \('counts',\)"):
        type("Own", (Faulty,), {"state": ("counts")})


@pytest.mark.parametrize("answer", [(1.0, None), {"w": torch.zeros(2)}])
def test_a_local_algorithm_returns_a_correction_or_none(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalAlgorithm, "correction", lambda self, ids, params: answer)
    with pytest.raises(FedsimError, match="LocalAlgorithm must return a Correction or None from"):
        simulate().step()


@pytest.mark.parametrize("weight", [0.5, 1e30])
def test_divergence_names_large_weights_of_the_selector(weight: float) -> None:
    """The updates of round 2 diverge with weights that sum to 1 or to 2e30."""
    run = simulate(lambda clients: Selection(np.array([1, 3]), np.full(2, weight)))
    run.step()
    run.components.engine.broken = {1, 3}  # type: ignore[attr-defined]
    with pytest.raises(DivergedError, match=r"a lower optimizer\.lr may help") as caught:
        run.step()
    told = "or smaller weights: those of Faulty sum to 2e+30, and for a mean they must sum to 1"
    assert (told in str(caught.value)) == (weight > 1)
