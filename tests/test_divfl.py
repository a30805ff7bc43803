from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsim.clients.ledger import Ledger
from fedsim.selectors import divfl as divfl_module
from fedsim.selectors.divfl import DivFL, cluster_shares, lazy_greedy, plain_greedy
from fedsim.selectors.similarity import euclidean_distances, inner_products
from tests.toys import ToyEngine, picked, selection_of, toy_population

Greedy = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]


def pairwise_distances(points: torch.Tensor) -> np.ndarray:
    return euclidean_distances(inner_products([points]))


LINE = pairwise_distances(torch.tensor([[0.0], [1.0], [5.0], [6.0], [20.0]]))


def g(distances: np.ndarray, chosen: np.ndarray) -> float:
    return float(distances[:, chosen].min(1).sum())


def divfl(n: int, k: int, **more: Any) -> DivFL:
    values: dict[str, Any] = {"mode": "ideal", "greedy": "lazy", "share": 0.1, "weights": "gamma"}
    return DivFL(toy_population([1] * n, k), **(values | more))


def test_points_on_a_line_by_hand() -> None:
    order = plain_greedy(LINE, 3, np.random.default_rng(0))
    assert order[:2].tolist() == [2, 4]  # the points 5, 20, then 0 or 1
    assert order[2] in (0, 1)
    assert [g(LINE, order[: i + 1]) for i in range(3)] == [25, 10, 2]
    assert cluster_shares(LINE, order).tolist() == pytest.approx([2 / 5, 1 / 5, 2 / 5])
    assert g(LINE, plain_greedy(LINE, 5, np.random.default_rng(0))) == 0


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 15), st.integers(1, 15), st.booleans())
@example(0, 15, 15, False)  # every gain is a tie in the end
def test_lazy_equals_plain_and_gains_shrink(seed: int, n: int, count: int, grid: bool) -> None:
    """On a small grid many points coincide, and many distances are equal."""
    random = np.random.default_rng(seed)
    points = torch.tensor(random.integers(0, 3, (n, 2)) / 3 if grid else random.standard_normal((n, 3)))
    distances, count = pairwise_distances(points), min(n, count)
    plain, lazy = (f(distances, count, np.random.default_rng(0)) for f in (plain_greedy, lazy_greedy))
    assert plain.tolist() == lazy.tolist()
    falls = -np.diff([g(distances, plain[: i + 1]) for i in range(count)])
    assert (falls >= -1e-9).all()
    assert (np.diff(falls) <= 1e-9).all()


@pytest.mark.parametrize("greedy", [plain_greedy, lazy_greedy])
def test_of_two_clients_nearest_to_each_other_either_is_chosen(greedy: Greedy) -> None:
    """The points 0 and 1 lower G by as much; an order by position would always take 0."""
    last = [int(greedy(LINE, 3, np.random.default_rng(seed))[2]) for seed in range(200)]
    assert set(last) == {0, 1}
    assert 70 <= last.count(0) <= 130


@pytest.mark.parametrize("greedy", ["plain", "lazy", "stochastic"])
def test_gradients_whose_squares_overflow_float32_leave_a_selection(
    greedy: Literal["plain", "lazy", "stochastic"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of many long vectors are float32, in which the squares of clients 2 and 3 are infinite."""

    class Huge(ToyEngine):
        def client_gradients(self, params: Any, positions: Sequence[Any], names: Any) -> Iterator[torch.Tensor]:
            table = torch.tensor([[1.0, 0], [2, 0], [1e20, 0], [-1e20, 0], [3, 0], [5, 0]])
            return (table[int(p[0])] for p in positions)

    monkeypatch.setattr("fedsim.selectors.similarity.MAX_FLOAT64_PRODUCTS", 0)
    selector = divfl(6, 3, greedy=greedy, share=1.0)
    assert {2, 3} <= set(picked(selector, engine=Huge([1] * 6)))  # far from all others


def test_a_weight_is_the_share_of_those_nearest_to_its_client() -> None:
    """The toy's gradient of client i is (i + 1, -i^2 / 7); whoever was picked first is not the lowest id."""
    for n in range(4, 12):
        selection = selection_of(divfl(n, 2))
        vectors = np.array([[i + 1, -i * i / 7] for i in range(n)])
        apart = np.linalg.norm(vectors[:, None] - vectors[None, selection.ids], axis=2)
        assert selection.weights == pytest.approx(np.bincount(apart.argmin(1), minlength=2) / n)


@pytest.mark.parametrize(("mode", "expected"), [("ideal", [3, 4, 4]), ("no_overhead", [3, 2, 2])])
def test_who_sends_a_gradient_in_later_rounds(mode: str, expected: list[int]) -> None:
    """Client 3 can be reached from round 2 on: without overhead it sends its own, and the selected send theirs."""
    selector, sent = divfl(4, 2, mode=mode), []
    for t, available in ((1, [0, 1, 2]), (2, range(4)), (3, range(4))):
        ledger = Ledger()
        chosen = picked(selector, t, available=available, ledger=ledger)
        sent.append(ledger.bytes_up // 8)
        assert ledger.train_samples == sent[-1]
        if mode == "no_overhead" and t == 2:
            assert sent[-1] == 2 + (3 not in chosen)
            sent[-1] = 2
    assert sent == expected


def test_stochastic_greedy_draws_its_share_of_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []
    spy = lambda apart, count, rng, few: (seen.append(few), np.arange(count))[1]
    monkeypatch.setattr(divfl_module, "plain_greedy", spy)
    for n, share in ((10, 0.5), (10, 0.1), (100, 0.29)):  # .29 * 100 is 28.999999999999996 in floating point
        picked(divfl(n, 3, greedy="stochastic", share=share))
    assert seen == [5, 3, 29]  # never fewer than K
