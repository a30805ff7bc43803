"""Every choice in conf/selector/ keeps the contract of selectors.

All choices are run once. Tests with further runs take only `KINDS`: the other choices differ by a
value only, and tests/test_goldens.py compares all of them to the last bit.
"""

import contextlib
import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.clients.context import CLOCK_SIGNALS, Signal
from fedsim.config.build import instantiate
from fedsim.config.compose import compose_jobs, search_path
from fedsim.core.record import Record
from fedsim.core.types import Population
from fedsim.rounds.checks import SelectionError, selection_fault
from fedsim.rounds.loop import Simulation
from fedsim.selectors.base import Selector
from fedsim.selectors.candidates import clients_to_try
from tests.checkpoint_toys import through_a_file
from tests.clocks import fixed_clock
from tests.toys import ToyEngine, toy_clients, toy_components, toy_params, toy_population

FOLDER = Path(__file__).parents[1] / "conf" / "selector"
CHOICES = sorted(p.stem for p in FOLDER.glob("*.yaml"))
VARIANTS = {
    "adapow_d",
    "aocs",
    "cpow_d",
    "divfl_no_overhead",
    "fedcs_sequential",
    "hics_code",
    "oort_code",
    "pncs_each",
    "pncs_gradient",
    "rpow_d",
    "tifl_uniform",
    "ucb_shapley",
}
"""Choices that build on another one, but make other requests, keep other state or start
differently."""


def names_its_class(choice: str) -> bool:
    return "\n_target_: " in (FOLDER / f"{choice}.yaml").read_text(encoding="utf-8")


KINDS = [choice for choice in CHOICES if choice in VARIANTS or names_its_class(choice)]
every_choice = pytest.mark.parametrize("choice", CHOICES)
every_kind = pytest.mark.parametrize("choice", KINDS)


@functools.cache
def nodes(choices: str, *more: str) -> dict[str, dict[str, Any]]:
    with search_path():
        jobs = compose_jobs([f"selector={choices}", *more], multirun=True)
    return {job.choices["selector"]: dict(job.config["selector"]) for job in jobs}


def composed(choice: str, *more: str) -> dict[str, Any]:
    """Return the config of a selector, as a sweep over all choices composes it."""
    return nodes(choice if more else ",".join(CHOICES), *more)[choice]


def node_of(choice: str, population: Population) -> dict[str, Any]:
    """Return the config of a choice, changed such that it fits a small population and model."""
    node = copy.deepcopy(composed(choice))
    num_clients = population.num_clients
    if node.get("num_candidates") is not None:
        at_least_k = max(node["num_candidates"], population.cohort_size)
        node["num_candidates"] = min(at_least_k, num_clients)
    for key in ("count", "num_tiers"):
        if node.get(key) is not None:
            node[key] = min(node[key], num_clients)
    if node.get("probabilities") is not None and "num_tiers" in node:
        node["probabilities"] = node["probabilities"][: node["num_tiers"]]
    if node.get("layers") is not None:
        node["layers"] = ["w"]  # the model's only layer
    if node.get("source") == "weight":
        node["source"] = "bias"  # it is a vector
    if "warmup" in node:
        node["warmup"] = 3  # of 12 rounds
    if "first_steps" in node:
        node |= {"interval": 2, "first_steps": 20, "refit_steps": 5}
    return node


def build(choice: str, population: Population) -> Selector:
    return instantiate(node_of(choice, population), Selector, "selector", population)


def simulation(
    choice: str,
    sizes: Sequence[int],
    cohort_size: int,
    num_rounds: int = 12,
    broken: frozenset[int] = frozenset(),
) -> Simulation:
    population = toy_population(sizes, cohort_size, num_rounds)
    engine = ToyEngine(sizes)
    engine.broken = set(broken)
    selector = build(choice, population)
    clock = fixed_clock(len(sizes), cohort_size) if selector.needs & CLOCK_SIGNALS else None
    parts = toy_components(
        engine, population, selector, validation=True, num_public=3, simulated_clock=clock
    )
    return Simulation(parts, toy_params())


def results(run: Simulation) -> list[dict[str, Any]]:
    return [_without_seconds(r) for r in run]


def _without_seconds(record: Record) -> dict[str, Any]:
    return {k: v for k, v in record.as_dict().items() if "seconds" not in k}


UNEQUAL = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@functools.cache
def whole(choice: str) -> list[dict[str, Any]]:
    """Twelve rounds of three of ten clients."""
    return results(simulation(choice, UNEQUAL, 3))


@every_choice
def test_selections_are_well_formed(choice: str) -> None:
    """The simulation rejects malformed selections, and requests that `needs` does not declare."""
    adaptive = build(choice, toy_population(UNEQUAL, 3)).adaptive
    assert len(whole(choice)) == 12
    assert all(record["selected"] or adaptive for record in whole(choice))


class Hidden:
    """Samples of the server that nobody may read."""

    x = torch.zeros(1)  # the simulation asks for its device

    def __getattr__(self, name: str) -> None:
        raise LookupError("samples of the server were read")

    def __len__(self) -> int:
        raise LookupError("samples of the server were read")


SAMPLES = {Signal.VALIDATION: "validation", Signal.PUBLIC: "public", Signal.TEST: "test"}
"""Signals for samples of the server, with the fields of `ServerData` that hold them."""


@pytest.mark.parametrize("signal", SAMPLES)
@every_choice
def test_samples_of_the_server_are_read_only_if_they_are_declared(
    choice: str, signal: Signal
) -> None:
    run = simulation(choice, UNEQUAL, 3)
    server_data = replace(run.components.server_data, **{SAMPLES[signal]: Hidden()})
    run.components = replace(run.components, server_data=server_data, eval_every=12)
    reads_it = signal in run.components.selector.needs
    with pytest.raises(LookupError) if reads_it else contextlib.nullcontext():
        for record in whole(choice)[:11]:
            assert run.step().selected == record["selected"]


@every_choice
def test_a_request_for_samples_of_the_server_must_be_declared(choice: str) -> None:
    run = simulation(choice, UNEQUAL, 3)
    selector = run.components.selector
    makes_it = selector.needs & SAMPLES.keys()
    selector.needs -= SAMPLES.keys()
    undeclared = pytest.raises(SelectionError, match="without declaring it")
    with undeclared if makes_it else contextlib.nullcontext():
        list(run)


@every_kind
@pytest.mark.parametrize(
    ("sizes", "cohort_size"),
    [(UNEQUAL, 1), (UNEQUAL, 10), ([2] * 10, 4), ([7], 1), ([0, 0, 5, 0, 3, 1], 2), ([0, 4, 0], 2)],
    ids=["K=1", "K=N", "equal", "N=1", "some without data", "fewer with data than K"],
)
def test_selections_are_well_formed_at_the_borders(
    choice: str, sizes: list[int], cohort_size: int
) -> None:
    run = simulation(choice, sizes, cohort_size)
    records = list(run)
    assert len(records) == 12
    assert all(record.selected or run.components.selector.adaptive for record in records)


@every_kind
def test_a_run_continues_from_a_state_taken_in_its_middle(choice: str) -> None:
    """Steps of the first run after that must not reach the second one."""
    first, second = simulation(choice, UNEQUAL, 3), simulation(choice, UNEQUAL, 3)
    before = [_without_seconds(first.step()) for _ in range(5)]
    parts = first.components
    saved = through_a_file(first.state_dict(), parts.selector, parts.aggregator)
    second.load_state_dict(saved)
    before.append(_without_seconds(first.step()))
    assert before == whole(choice)[:6]
    assert results(second) == whole(choice)[5:]


@every_kind
def test_a_client_with_broken_reports_and_updates_does_not_stop_the_run(
    choice: str,
) -> None:
    run = simulation(choice, UNEQUAL, 3, broken=frozenset({5}))
    records = list(run)
    assert torch.isfinite(run.params["w"]).all()
    assert sum(r.dropped_updates for r in records) == sum(5 in r.selected for r in records)


@every_kind
@pytest.mark.parametrize("present", [[0, 2, 4, 6, 8], [7], [1, 9]])
def test_absent_clients_are_not_selected(choice: str, present: list[int]) -> None:
    population = toy_population(UNEQUAL, 3)
    selector = build(choice, population)
    clock = fixed_clock(len(UNEQUAL)).round(1, 0.0)
    clients = toy_clients(UNEQUAL, selector.needs, available=present, round_clock=clock)
    selection = selector.select(1, clients, np.random.default_rng(0))
    expected = None if selector.adaptive else min(3, len(present))
    assert selection_fault(selection, np.array(present), expected) is None


# --- clients whose updates never arrive, or are never finite, bring no method to a standstill

WARMING_UP = ("greedy_shapley", "hics", "hics_code", "rpow_d", "ucb_shapley")
"""Methods that select every client once at first."""
NUM_ROUNDS = 60


def rounds_with_silent(
    choice: str, n: int, k: int, broken: frozenset[int] = frozenset(), **clock: Any
) -> list[Record]:
    """Return 60 rounds on the three devices of `fixed_clock`, whose clients take 6, 11 and 21 s.

    The updates of `broken` clients are never finite. `clock` may set a deadline.
    """
    population = toy_population([1] * n, k, NUM_ROUNDS)
    engine = ToyEngine([1] * n)
    engine.broken = set(broken)
    simulated = fixed_clock(n, k, **clock)
    selector = build(choice, population)
    parts = toy_components(
        engine, population, selector, validation=True, num_public=3, simulated_clock=simulated
    )
    return list(Simulation(parts, toy_params()))


def longest_standstill(records: list[Record]) -> int:
    """Return the largest number of consecutive rounds without an update."""
    longest = current = 0
    for record in records:
        current = 0 if record.uploaded else current + 1
        longest = max(longest, current)
    return longest


@pytest.mark.parametrize("choice", KINDS)
def test_no_method_keeps_selecting_only_clients_that_are_always_late(choice: str) -> None:
    """Clients 2, 5, 8 and 11 need 21 s, the deadline is 15 s. Random selection brings 75
    updates."""
    records = rounds_with_silent(choice, 12, 3, deadline=15.0)
    assert longest_standstill(records) < 20
    if choice in WARMING_UP:
        assert sum(not r.uploaded for r in records[20:]) <= 2
        assert sum(r.uploaded for r in records[20:]) >= 70


@pytest.mark.parametrize(("n", "k"), [(6, 1), (12, 3)])
@pytest.mark.parametrize("choice", ["oort", "oort_by_speed", "oort_code"])
def test_oort_does_not_explore_clients_that_are_always_late_for_ever(
    choice: str, n: int, k: int
) -> None:
    """A third of the clients is late. While anybody is unseen, at least one of K places
    explores."""
    records = rounds_with_silent(choice, n, k, deadline=15.0)
    assert longest_standstill(records) <= 2
    assert sum(not r.uploaded for r in records[20:]) <= 4


@pytest.mark.parametrize("choice", [c for c in WARMING_UP if c != "rpow_d"])
def test_clients_with_broken_updates_are_not_selected_again_and_again(choice: str) -> None:
    """Once each in the first four rounds, and then ever more rarely, not both at once."""
    records = rounds_with_silent(choice, 8, 2, frozenset({3, 5}))
    assert len(records) == NUM_ROUNDS
    dropped = np.array([r.dropped_updates for r in records])
    assert dropped[:4].sum() == 2
    assert 2 <= dropped[4:].sum() <= 10
    assert dropped.max() == 1


@pytest.mark.parametrize(
    ("known", "last_tried", "round", "available", "expected"),
    [
        ([0, 0, 0], [0, 0, 0], 1, [0, 1, 2], [0, 1, 2]),
        # clients that were never selected come first
        ([1, 0, 0], [1, 1, 0], 2, [0, 1, 2], [2]),
        # then the one that was selected longest ago
        ([1, 0, 0], [1, 2, 1], 3, [0, 1, 2], [2]),
        # but not before the number of rounds has doubled
        ([1, 0, 0], [1, 2, 3], 3, [0, 1, 2], []),
        ([1, 0, 0], [1, 2, 3], 4, [0, 1, 2], [1]),
        # only available clients count
        ([1, 0, 0], [1, 4, 3], 6, [0, 2], [2]),
        ([1, 1], [1, 1], 9, [0, 1], []),
    ],
)
def test_clients_to_try_by_hand(
    known: list[int], last_tried: list[int], round: int, available: list[int], expected: list[int]
) -> None:
    ids = np.array(available, np.int64)
    found = clients_to_try(ids, np.array(known, bool), np.array(last_tried, np.int64), round)
    assert found.tolist() == expected
