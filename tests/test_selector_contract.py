"""Every YAML of conf/selector/ keeps the contract: run over whatever lies in that folder.

All are run once; what takes a run more, only those that are no other's variant with another value
(`tests/test_goldens.py` compares all of them to the last bit).
"""

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.clients.context import OF_SYSTEM
from fedsim.config.build import instantiate
from fedsim.config.compose import compose_jobs, search_path
from fedsim.core.record import Record
from fedsim.core.types import Population
from fedsim.rounds.checks import selection_fault
from fedsim.rounds.loop import Simulation
from fedsim.selectors.base import Selector
from tests.checkpoint_toys import through_a_file
from tests.clocks import fixed_clock
from tests.toys import ToyEngine, toy_clients, toy_components, toy_params, toy_population

FOLDER = Path(__file__).parents[1] / "conf" / "selector"
CHOICES = sorted(p.stem for p in FOLDER.glob("*.yaml"))
BEHAVE_OTHERWISE = {
    *("adapow_d", "aocs", "cpow_d", "rpow_d", "divfl_no_overhead", "hics_code", "pncs_each", "pncs_gradient"),
    *("tifl_uniform", "ucb_shapley", "oort_code", "fedcs_sequential"),
}
"""Variants of a class that ask for other things, keep other state or start up otherwise."""
KINDS = [c for c in CHOICES if c in BEHAVE_OTHERWISE or "\n_target_: " in (FOLDER / f"{c}.yaml").read_text()]
every_choice = pytest.mark.parametrize("choice", CHOICES)
every_kind = pytest.mark.parametrize("choice", KINDS)


@functools.cache
def composed(choice: str, *more: str) -> dict[str, Any]:
    """The selector's node as Hydra composes it (some have groups of their own)."""
    with search_path():
        (job,) = compose_jobs([f"selector={choice}", *more], multirun=False)
    return dict(job.config["selector"])


def node_of(choice: str, population: Population) -> dict[str, Any]:
    node = copy.deepcopy(composed(choice))
    if node.get("num_candidates") is not None:  # a variant's d may not fit a population this small
        node["num_candidates"] = min(max(node["num_candidates"], population.cohort_size), population.num_clients)
    for key in ("count", "num_tiers"):
        if node.get(key) is not None:
            node[key] = min(node[key], population.num_clients)
    if node.get("num_tiers") and node["probabilities"] is not None:  # one for each tier
        node["probabilities"] = node["probabilities"][: node["num_tiers"]]
    if node.get("layers") is not None:  # nor its layers a model of one
        node["layers"] = ["w"]
    if node.get("source") == "weight":  # nor is a vector a weight matrix
        node["source"] = "bias"
    if "warmup" in node:  # reach what comes after it, in little time
        node["warmup"] = 3
    if "first_steps" in node:
        node |= {"interval": 2, "first_steps": 20, "refit_steps": 5}
    return node


def build(choice: str, population: Population) -> Selector:
    return instantiate(node_of(choice, population), Selector, "selector", population)


def simulation(
    choice: str, sizes: Sequence[int], cohort_size: int, num_rounds: int = 12, broken: frozenset[int] = frozenset()
) -> Simulation:
    population = toy_population(sizes, cohort_size, num_rounds)
    engine = ToyEngine(sizes)
    engine.broken = set(broken)
    selector = build(choice, population)
    clock = fixed_clock(len(sizes), cohort_size) if selector.needs & OF_SYSTEM else None
    parts = toy_components(engine, population, selector, validation=True, num_public=3, simulated=clock)
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
    """A malformed one is refused by the simulation, and so is a question that `needs` does not declare."""
    adaptive = build(choice, toy_population(UNEQUAL, 3)).adaptive
    assert len(whole(choice)) == 12
    assert all(record["selected"] or adaptive for record in whole(choice))


@every_kind
@pytest.mark.parametrize(
    ("sizes", "cohort_size"),
    [(UNEQUAL, 1), (UNEQUAL, 10), ([2] * 10, 4), ([7], 1), ([0, 0, 5, 0, 3, 1], 2), ([0, 4, 0], 2)],
    ids=["K=1", "K=N", "equal", "N=1", "some without data", "fewer with data than K"],
)
def test_selections_are_well_formed_at_the_borders(choice: str, sizes: list[int], cohort_size: int) -> None:
    run = simulation(choice, sizes, cohort_size)
    records = list(run)
    assert len(records) == 12
    assert all(record.selected or run.components.selector.adaptive for record in records)


@every_kind
def test_the_same_streams_give_the_same_run_and_a_state_dict_taken_in_its_middle_continues_it(choice: str) -> None:
    first, second = simulation(choice, UNEQUAL, 3), simulation(choice, UNEQUAL, 3)
    before = [_without_seconds(first.step()) for _ in range(5)]
    parts = first.components
    second.load_state_dict(through_a_file(first.state_dict(), parts.selector, parts.aggregator))
    before.append(_without_seconds(first.step()))  # what goes on in one must not reach the other
    assert before == whole(choice)[:6]
    assert results(second) == whole(choice)[5:]


@every_kind
def test_a_client_with_broken_reports_and_updates_is_dropped_and_the_run_goes_on(choice: str) -> None:
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
    clients = toy_clients(UNEQUAL, selector.needs, available=present, simulated=clock)
    selection = selector.select(1, clients, np.random.default_rng(0))
    expected = None if selector.adaptive else min(3, len(present))
    assert selection_fault(selection, np.array(present), expected) is None


@every_choice
def test_the_yaml_says_what_it_is_and_every_value_is_strict(choice: str) -> None:
    text = (FOLDER / f"{choice}.yaml").read_text()
    assert text.startswith("# ")
    node = composed(choice)
    with pytest.raises(ValueError, match="is not a known key"):
        instantiate({**node, "no_such_key": 1}, Selector, "selector", toy_population([1] * 20, 5))
