import itertools

import numpy as np
import pytest

from fedsim.clients.clients import Clients
from fedsim.clients.context import Signal
from fedsim.clients.ledger import Ledger
from fedsim.selectors.entropy_greedy import EntropyGreedy, entropies
from fedsim.selectors.fedcbs import FedCBS, qcid_with_each
from fedsim.selectors.tools import collect_label_counts
from tests.toys import ToyEngine, toy_clients, toy_population

PURE = np.array([[4.0, 0], [0, 4]])


def door_of(labels: list[list[int]], *, available: list[int] | None = None, ledger: Ledger | None = None) -> Clients:
    sizes = [len(x) for x in labels]
    engine = ToyEngine(sizes)
    engine.data.y[:] = engine.data.y.new_tensor(sum(labels, []))
    needs = frozenset({Signal.LABEL_COUNTS})
    return toy_clients(sizes, needs, engine=engine, available=available, ledger=ledger)


def chosen_of(selector: FedCBS | EntropyGreedy, labels: list[list[int]], round: int = 1, seed: int = 0) -> list[int]:
    return selector.select(round, door_of(labels), np.random.default_rng(seed)).ids.tolist()


def test_qcid_by_hand() -> None:
    assert qcid_with_each(PURE[1:], PURE[0]) == pytest.approx(0, abs=1e-8)
    assert qcid_with_each(np.array([[2.0, 2]]), PURE[0])[0] == pytest.approx(0.125)
    assert qcid_with_each(PURE[:1], np.zeros(2))[0] == pytest.approx(0.5)


def test_fedcbs_draws_on_where_one_already_picked_would_balance_the_pool() -> None:
    """After 102 picks only class 0 is left; one more of class 1 or 2 would be better by a factor beyond e^709."""
    selector = FedCBS(toy_population([1] * 107, 105), exploration=10.0)
    assert len(chosen_of(selector, [[0]] * 40 + [[1]] * 34 + [[2]] * 33)) == 105


def test_entropy_by_hand_and_rotation_by_the_queue() -> None:
    assert entropies(np.array([[1.0, 1], [3, 0]])) == pytest.approx([np.log(2), 0])
    labels = [[0, 1, 2]] * 6
    selector, picked = EntropyGreedy(toy_population([3] * 6, 2), queue_length=4), []
    for t in range(6):
        picked.append(set(chosen_of(selector, labels, t + 1, t)))
    assert all(not (a & b) for a, b in itertools.pairwise(picked))
    assert len(picked[0] | picked[1] | picked[2]) == 6
    selector = EntropyGreedy(toy_population([3] * 6, 2), queue_length=3)
    first, second = chosen_of(selector, labels, 1, 1), chosen_of(selector, labels, 2, 2)
    assert set(selector.queue[1:]) == set(second)
    assert selector.queue[0] in first


def test_counts_are_asked_for_once_without_a_model_and_this_is_said_before_the_run() -> None:
    assert "how many samples of each class" in str(FedCBS(toy_population([2] * 3, 1), exploration=1.0).warning)
    labels, counts, ledger = [[0, 0, 2], [1, 1, 1], [2, 0, 0]], np.empty((3, 0), np.int64), Ledger()
    counts = collect_label_counts(counts, door_of(labels, available=[0, 2], ledger=ledger))
    assert counts.tolist() == [[2, 0, 1], [-1, -1, -1], [2, 0, 1]]
    assert (ledger.bytes_up, ledger.bytes_down, len(ledger.contacted)) == (2 * 3 * 4, 0, 0)
    counts = collect_label_counts(counts, door_of(labels, ledger=ledger))
    assert counts[1].tolist() == [0, 3, 0]
    assert ledger.bytes_up == 3 * 3 * 4


class Watched:
    """A generator that takes the likeliest, and keeps what it was asked to draw from."""

    def __init__(self) -> None:
        self.chances: list[np.ndarray] = []

    def choice(self, count: int, p: np.ndarray) -> int:
        assert len(p) == count
        self.chances.append(p)
        return int(np.argmax(p))


def test_fedcbs_draws_by_its_three_weights_in_turn() -> None:
    """The first by 1 / QCID(k) + lambda sqrt(3 ln t / (2 n_k)), the m-th by QCID(S)^(m-1) / QCID(S + k)^m."""
    labels = [[0, 0, 0, 1], [1, 1, 1, 2], [2, 2, 0, 1], [0, 0, 1, 1], [2, 2, 2, 2]]
    counts = np.array([np.bincount(x, minlength=3) for x in labels], dtype=float)

    def qcid(members: list[int]) -> float:
        shares = counts[members].sum(0) / counts[members].sum()
        return float((shares**2).sum()) - 1 / 3

    selector, watched = FedCBS(toy_population([4] * 5, 3), exploration=0.5), Watched()
    selector.pulls[:] = [0, 3, 1, 2, 5]
    selection = selector.select(7, door_of(labels), watched)  # type: ignore[arg-type]
    pulls = np.array([1, 3, 1, 2, 5])
    first = [1 / qcid([k]) for k in range(5)] + 0.5 * np.sqrt(3 * np.log(7) / (2 * pulls))
    assert watched.chances[0] == pytest.approx(first / first.sum())
    chosen: list[int] = [int(np.argmax(first))]
    for m in (2, 3):
        weights = np.array([0 if k in chosen else qcid(chosen) ** (m - 1) / qcid([*chosen, k]) ** m for k in range(5)])
        assert watched.chances[m - 1] == pytest.approx(weights / weights.sum())
        chosen.append(int(np.argmax(weights)))
    assert selection.ids.tolist() == sorted(chosen)
    assert selector.pulls.tolist() == [n + (k in chosen) for k, n in enumerate([0, 3, 1, 2, 5])]


def test_entropy_greedy_pools_what_it_has_picked_and_keeps_half_of_all_waiting() -> None:
    """Client 0 is the most even; with it, 3 evens out what 0 lacks, although 1 alone has more entropy."""
    labels = [[0, 1, 2, 0, 1, 2, 0, 1], [0, 1, 0, 1, 0, 1, 0, 1], [0] * 8, [2, 2, 2, 2, 2, 2, 2, 1]]
    for seed in range(5):
        selector = EntropyGreedy(toy_population([8] * 4, 2), queue_length=None)
        ids = chosen_of(selector, labels, 1, seed)
        assert ids == [0, 3]
        assert selector.queue == [0, 3]
        assert selector.longest == 2
    long = EntropyGreedy(toy_population([2] * 9, 3), queue_length=None)
    assert long.longest == 4
