"""Clients whose updates never arrive, or are never finite, do not bring a method to a standstill."""

from typing import Any

import numpy as np
import pytest

from fedsim.core.record import Record
from fedsim.rounds.loop import Simulation
from fedsim.selectors.tools import clients_to_try
from tests.clocks import fixed_clock
from tests.test_selector_contract import KINDS, build
from tests.toys import ToyEngine, toy_components, toy_params, toy_population

WARMING_UP = ("greedy_shapley", "hics", "hics_code", "rpow_d", "ucb_shapley")
"""Methods that at first select every client once."""
NUM_ROUNDS = 60


def rounds(choice: str, n: int, k: int, broken: frozenset[int] = frozenset(), **clock: Any) -> list[Record]:
    """The three devices of `fixed_clock` in turn: a round takes their clients 6, 11 and 21 s."""
    population, engine = toy_population([1] * n, k, NUM_ROUNDS), ToyEngine([1] * n)
    engine.broken = set(broken)
    simulated = fixed_clock(n, k, **clock)
    selector = build(choice, population)
    parts = toy_components(engine, population, selector, validation=True, num_public=3, simulated=simulated)
    return list(Simulation(parts, toy_params()))


def longest_standstill(records: list[Record]) -> int:
    """The largest number of consecutive rounds that brought no update."""
    longest = current = 0
    for record in records:
        current = 0 if record.uploaded else current + 1
        longest = max(longest, current)
    return longest


@pytest.mark.parametrize("choice", KINDS)
def test_no_method_keeps_selecting_only_clients_that_are_always_late(choice: str) -> None:
    """Clients 2, 5, 8 and 11 need 21 s, the deadline is 15 s. Random selection brings 75 updates in the last rounds."""
    records = rounds(choice, 12, 3, deadline=15.0)
    assert longest_standstill(records) < 20
    if choice in WARMING_UP:
        assert sum(not r.uploaded for r in records[20:]) <= 2
        assert sum(r.uploaded for r in records[20:]) >= 70


@pytest.mark.parametrize(("n", "k"), [(6, 1), (12, 3)])
@pytest.mark.parametrize("choice", ["oort", "oort_by_speed", "oort_code"])
def test_oort_does_not_explore_clients_that_are_always_late_for_good(choice: str, n: int, k: int) -> None:
    """A third of the clients is late; of K <= 4 places exploration has one at least while anybody is unseen."""
    records = rounds(choice, n, k, deadline=15.0)
    assert longest_standstill(records) <= 2
    assert sum(not r.uploaded for r in records[20:]) <= 4


@pytest.mark.parametrize("choice", [c for c in WARMING_UP if c != "rpow_d"])
def test_clients_with_broken_updates_are_not_selected_again_and_again(choice: str) -> None:
    """Once each in the first four rounds, and then ever more rarely, not both at once."""
    records = rounds(choice, 8, 2, frozenset({3, 5}))
    assert len(records) == NUM_ROUNDS
    dropped = np.array([r.dropped_updates for r in records])
    assert dropped[:4].sum() == 2
    assert 2 <= dropped[4:].sum() <= 10
    assert dropped.max() == 1


def tried(known: list[bool], last: list[int], round: int, ids: list[int] | None = None) -> list[int]:
    available = np.arange(len(known)) if ids is None else np.array(ids, np.int64)
    return clients_to_try(available, np.array(known), np.array(last, np.int64), round).tolist()


def test_whom_to_try_by_hand() -> None:
    assert tried([False] * 3, [0, 0, 0], 1) == [0, 1, 2]
    assert tried([True, False, False], [1, 1, 0], 2) == [2]  # those that were never selected come first
    assert tried([True, False, False], [1, 2, 1], 3) == [2]  # then one at a time, the one selected longest ago
    assert tried([True, False, False], [1, 2, 3], 3) == []  # not before the number of rounds has doubled
    assert tried([True, False, False], [1, 2, 3], 4) == [1]
    assert tried([True, False, False], [1, 4, 3], 6, ids=[0, 2]) == [2]
    assert tried([True, True], [1, 1], 9) == []
