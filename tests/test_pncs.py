import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.selectors.pncs import PNCS, similarities
from fedsim.selectors.subset import least_alike, pair_sum
from tests.toys import toy_door, toy_population


def table(*vectors: tuple[float, ...], p: float = 4.0) -> np.ndarray:
    return similarities((torch.tensor(v) for v in vectors), p)


@pytest.mark.parametrize(("p", "expected"), [(1, 0.138071), (2, 0.258199), (3, 0.351881), (4, 0.420084)])
def test_similarities_by_hand(p: float, expected: float) -> None:
    assert table((2.0, 1, 0), (1.0, -1, 1), p=p)[0, 1] == pytest.approx(expected, abs=1e-6)


def test_opposites_scales_zeros_and_tiny_numbers() -> None:
    s = table((1.0, 0), (0.0, 1), (-1.0, 0), (1.0, 1), (0.0, 0), (1e-12, 0), (-2.0, -2))
    assert s[0, 2] == -1
    assert s[0, 3] == pytest.approx(0.70711, abs=1e-5)
    assert (s[4] == 0).all()
    assert s[0, 5] == 1
    assert s[3, 6] == pytest.approx(-1)


def test_two_is_the_cosine() -> None:
    x = torch.randn(5, 9)
    expected = torch.nn.functional.cosine_similarity(x[:, None].double(), x[None].double(), dim=2)
    np.testing.assert_allclose(similarities(iter(x), 2.0), expected, atol=1e-12)


def symmetric(seed: int, size: int) -> np.ndarray:
    values = np.random.default_rng(seed).uniform(-1, 1, (size, size))
    return (values + values.T) / 2


def test_the_best_pair_and_the_tied_triples_by_hand() -> None:
    s = table((1.0, 0), (0.0, 1), (-1.0, 0), (1.0, 1))
    rng = np.random.default_rng(0)
    assert sorted(least_alike(s, 2, "exact", 0, rng)) == [0, 2]
    triples = {tuple(sorted(least_alike(s, 3, "exact", 0, np.random.default_rng(i)))) for i in range(30)}
    assert triples == {(0, 1, 2), (0, 2, 3)}
    assert pair_sum(s, np.array([0, 1, 2])) / 3 == pytest.approx(-1 / 3)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 9), st.integers(2, 5))
def test_exact_is_the_minimum_and_greedy_with_swaps_never_below_it(seed: int, size: int, count: int) -> None:
    s, count = symmetric(seed, size), min(count, size)
    rng = np.random.default_rng(seed)
    exact, greedy = (least_alike(s, count, how, 2, rng) for how in ("exact", "greedy"))
    best = min(pair_sum(s, np.array(c)) for c in itertools.combinations(range(size), count))
    assert pair_sum(s, exact) == pytest.approx(best)
    assert pair_sum(s, greedy) >= best - 1e-12
    assert len(set(greedy)) == count
    if count == 2:
        assert pair_sum(s, greedy) == pytest.approx(best)


def test_swaps_only_ever_help() -> None:
    for seed in range(30):
        s, rng = symmetric(seed, 20), np.random.default_rng(0)
        without, with_swaps = (pair_sum(s, least_alike(s, 5, "greedy", n, rng)) for n in (0, 5))
        assert with_swaps <= without + 1e-12


def test_one_client_is_the_least_alike_on_average() -> None:
    s = table((1.0, 0.1), (1.0, 0.2), (-1.0, 0.1), (1.0, 0))
    assert least_alike(s, 1, "auto", 0, np.random.default_rng(0)).tolist() == [2]


def pncs(n: int, k: int, **more: Any) -> PNCS:
    values: dict[str, Any] = {
        **{"p": 4.0, "grad": "full", "layers": None, "layer_agg": "mean", "queue_length": 4},
        **{"queue_unit": "clients", "search": "auto", "swap_passes": 2, "age_weight": 0.0},
    }
    return PNCS(toy_population([2] * n, k), **(values | more))


def history(selector: PNCS, n: int, k: int, rounds: int = 12) -> list[set[int]]:
    result = []
    for t in range(1, rounds + 1):
        door = toy_door([2] * n, selector.needs, round=t, cohort_size=k)
        result.append(set(selector.select(t, door, np.random.default_rng(t)).ids.tolist()))
    return result


def test_a_queue_of_four_clients_bars_two_rounds_of_two() -> None:
    picked = history(pncs(10, 2), 10, 2)
    assert all(not (a & b) and not (a & c) for a, b, c in zip(picked, picked[1:], picked[2:], strict=False))


def test_without_a_queue_the_same_pair_comes_again() -> None:
    assert len(set(map(frozenset, history(pncs(10, 2, queue_length=0), 10, 2)))) == 1


def test_a_queue_in_rounds_bars_all_of_them() -> None:
    picked = history(pncs(10, 2, queue_length=3, queue_unit="rounds"), 10, 2)
    for window in zip(picked, picked[1:], picked[2:], picked[3:], strict=False):
        assert len(set().union(*window)) == 8


def test_the_longest_waiting_are_released_when_too_few_are_left() -> None:
    selector = pncs(5, 2, queue_length=4)
    selector.queue = [[0], [1], [2], [3]]
    assert selector.eligible(np.arange(5), 2).tolist() == [0, 4]
    assert selector.eligible(np.array([2, 3]), 2).tolist() == [2, 3]


def test_age_brings_back_those_who_have_waited() -> None:
    never = history(pncs(10, 2, queue_length=0, age_weight=5.0), 10, 2, rounds=5)
    assert len(set().union(*never)) == 10
