"""What the server sees of single clients, and `secure_aggregation=true`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsim.clients.clients import Clients
from fedsim.clients.context import HIDDEN_SIGNALS, Signal, UndeclaredSignalError
from fedsim.clients.server import Server
from fedsim.config.compose import search_path
from fedsim.core.errors import ConfigError
from fedsim.core.types import Cohort, Selection
from fedsim.rounds.checks import SelectionError
from fedsim.rounds.loop import Simulation
from fedsim.selectors.base import Selector
from tests.test_commands_catalogue import METHODS
from tests.test_plan import plan_of
from tests.test_selector_contract import CHOICES, UNEQUAL, build, results, simulation, whole
from tests.toys import toy_clients, toy_population, toy_run

SECURE = "secure_aggregation=true"
PERMITTED = {
    "only sums": {
        "aocs",
        "clustered1",
        "f3ast",
        "full",
        "md",
        "poisson",
        "random",
        "random_control",
        "refl",
        "round_robin",
    },
    "label counts": {"entropy_greedy", "fedcbs", "fedgs", "flips"},
    "times": {"fedcs", "fedcs_sequential", "tifl_uniform"},
}
"""The selectors that secure aggregation permits, by what the server sees of single clients."""
ALL_PERMITTED = sorted(set.union(*PERMITTED.values()))
OF_SINGLE_CLIENTS = [
    "accuracies",
    "batch_losses",
    "collect",
    "gradient_norms",
    "gradient_spreads",
    "gradients",
    "gradients_after_training",
    "losses",
    "momentum_buffers",
    "public_labels",
    "updates",
]
"""Requests of which each client's answer reaches the server."""


def words_of(choice: str) -> list[str]:
    """Return the words with which a selector can run."""
    needs = build(choice, toy_population(UNEQUAL, 3)).needs
    words = [f"selector={choice}", "server.public_samples=100"]
    if needs & {Signal.RESOURCES, Signal.RESPONSE_TIMES}:
        words.append("system=lognormal")
    return words


def problems(*words: str) -> str:
    with search_path(), pytest.raises(ConfigError) as caught:
        plan_of(*words)
    return str(caught.value)


# --- selectors -------------------------------------------------------------------------------------


def test_what_the_server_sees_decides() -> None:
    for sees, choices in PERMITTED.items():
        named = {choice for choice in CHOICES if METHODS[choice].fields["sees"] == sees}
        assert named == choices


@pytest.mark.parametrize("choice", ALL_PERMITTED)
def test_a_permitted_selector_never_sees_an_update_or_a_loss(
    choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same clients are selected if all that it must not see is out of reach."""

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("the server sees a single client")

    expected = whole(choice)
    for name in OF_SINGLE_CLIENTS:
        monkeypatch.setattr(Clients, name, forbidden)
    update_norms = Clients.update_norms

    def only_sums(clients: Clients, ids: Any, *, only_sum: bool = False) -> Any:
        assert only_sum
        return update_norms(clients, ids, only_sum=True)

    monkeypatch.setattr(Clients, "update_norms", only_sums)
    observe = Simulation._observe
    losses: list[Any] = []

    def watched(run: Simulation, context: Any, cohort: Cohort, params: Any) -> None:
        visible = context.visible(cohort)
        with pytest.raises(UndeclaredSignalError):
            visible.updates.sum()
        losses.extend([visible.loss, visible.rms_loss])
        observe(run, context, cohort, params)

    monkeypatch.setattr(Simulation, "_observe", watched)
    assert results(simulation(choice, UNEQUAL, 3)) == expected
    assert losses
    assert set(losses) == {None}


def test_all_other_selectors_need_what_is_hidden() -> None:
    population = toy_population(UNEQUAL, 3)
    for choice in CHOICES:
        is_permitted = not build(choice, population).needs & HIDDEN_SIGNALS
        assert is_permitted == (choice in ALL_PERMITTED), choice


ONE_OF_EACH = {METHODS[choice].fields["sees"]: choice for choice in CHOICES}


@pytest.mark.parametrize("sees", ONE_OF_EACH)
def test_the_switch_permits_or_rejects_before_round_1(sees: str) -> None:
    choice = ONE_OF_EACH[sees]
    if choice in ALL_PERMITTED:
        with search_path():
            assert plan_of(*words_of(choice), SECURE).settings.secure_aggregation
        return
    message = problems(*words_of(choice), SECURE)
    hidden = [word for word in sees.split(", ") if word not in ("times", "label counts")]
    assert f"selector='{choice}': needs {', '.join(hidden)} of single clients" in message
    assert "fedsim list selectors" in message


def test_without_the_switch_nothing_is_rejected() -> None:
    with search_path():
        plan_of("selector=gpfl", "aggregator=krum")
        plan_of("selector=gpfl", "secure_aggregation=false")


# --- what a selector of a user's reads -------------------------------------------------------------


class Reads(Selector):
    """Reads something in `observe` that it does not declare."""

    read: Callable[[Cohort], Any]

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        return Selection(clients.available[:2])

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        type(self).read(cohort)


READINGS: dict[str, Callable[[Cohort], Any]] = {
    "one tensor": lambda cohort: cohort.delta["w"],
    "all of them": lambda cohort: cohort.updates,
    "their names": lambda cohort: list(cohort.delta),
    "items": lambda cohort: cohort.delta.items(),
    "get": lambda cohort: cohort.delta.get("w"),
    "a copy": lambda cohort: dict(cohort.delta),
    "merged": lambda cohort: {**cohort.delta},
    "some clients": lambda cohort: cohort.rows(np.array([0])),
    "number": lambda cohort: len(cohort.delta),
}


@pytest.mark.parametrize("name", READINGS)
def test_undeclared_updates_cannot_be_read(name: str) -> None:
    read = READINGS[name]
    run = toy_run(
        type("Reading", (Reads,), {"read": staticmethod(read)})(toy_population([2] * 4, 2))
    )
    with pytest.raises(SelectionError, match=r"round 1: Reading: .*Signal\.UPDATES"):
        run.step()
    declared = type("Declared", (Reads,), {"read": staticmethod(read), "needs": UPDATES})
    toy_run(declared(toy_population([2] * 4, 2))).step()


UPDATES = frozenset({Signal.UPDATES})
REQUESTS: dict[str, Callable[[Clients], Any]] = {
    "updates": lambda clients: clients.updates(clients.available),
    "update_norms": lambda clients: clients.update_norms(clients.available),
    "momentum_buffers": lambda clients: clients.momentum_buffers(clients.available),
    "collect": lambda clients: clients.collect(clients.available),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_updates_cannot_be_requested_without_declaring_them(name: str) -> None:
    clients = toy_clients([2, 2], frozenset({Signal.TRAINING}))
    with pytest.raises(UndeclaredSignalError, match=r"Signal\.UPDATES"):
        REQUESTS[name](clients)


def test_a_norm_for_a_sum_needs_no_updates() -> None:
    clients = toy_clients([2, 2], frozenset({Signal.TRAINING}))
    assert len(clients.update_norms(clients.available, only_sum=True)) == 2


def test_hidden_signals_are_all_that_clients_compute() -> None:
    of_server = {Signal.VALIDATION, Signal.TEST}
    not_computed = {Signal.LABEL_COUNTS, Signal.RESOURCES, Signal.RESPONSE_TIMES}
    stays_there = {Signal.TRAINING}
    assert set(Signal) - HIDDEN_SIGNALS == of_server | not_computed | stays_there


# --- aggregators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["krum", "median", "mifa", "norm_clipping"])
def test_aggregators_of_single_updates_are_rejected(choice: str) -> None:
    message = problems(f"aggregator={choice}", SECURE)
    assert f"aggregator='{choice}': needs more than the mean of the updates" in message


@pytest.mark.parametrize("choice", ["by_size", "uniform", "fedadam", "fedavgm", "dp_fedavg"])
def test_means_are_permitted(choice: str) -> None:
    with search_path():
        plan_of(f"aggregator={choice}", SECURE)
