"""AFL, DELTA, LEFL, Fed-CBS, FedEntOpt and optimal client sampling: examples by hand, and their
requests to clients."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsim.clients.clients import Clients
from fedsim.clients.context import Signal
from fedsim.clients.ledger import Ledger
from fedsim.core.types import Params
from fedsim.selectors import lefl as lefl_module
from fedsim.selectors import optimal_sampling
from fedsim.selectors.afl import AFL
from fedsim.selectors.base import Selector
from fedsim.selectors.delta import Delta, redistribute_mass
from fedsim.selectors.entropy_greedy import EntropyGreedy, entropies
from fedsim.selectors.fedcbs import FedCBS, qcid_with_each
from fedsim.selectors.label_counts import collect_label_counts
from fedsim.selectors.lefl import LEFL
from fedsim.selectors.optimal_sampling import (
    OptimalSampling,
    aggregated_probabilities,
    exact_probabilities,
)
from fedsim.selectors.ward import ward_linkage
from tests.clocks import fixed_clock
from tests.toys import (
    ToyEngine,
    picked,
    selection_of,
    shipped,
    toy_clients,
    toy_cohort,
    toy_population,
)


def mean_weights(selector: Selector) -> np.ndarray:
    """Return the mean aggregation weight of each client over 4000 selections."""
    total = np.zeros(selector.population.num_clients)
    for seed in range(4000):
        selection = selection_of(selector, seed=seed)
        assert selection.weights is not None
        total[selection.ids] += selection.weights
    return total / 4000


# --- AFL


def afl(n: int, k: int, sizes: list[int] | None = None, **changes: Any) -> AFL:
    """Return `selector=afl` without excluded clients and with equal initial values."""
    values = {"alpha1": 0.0, "init": "equal"} | changes
    return shipped("afl", toy_population(sizes or [1] * n, k), **values)


def probabilities(values: list[float], **changes: Any) -> np.ndarray:
    selector = afl(len(values), 1, **changes)
    return selector.probabilities(np.array(values), np.random.default_rng(0))


def test_probabilities_are_a_softmax_of_the_values_that_are_not_excluded() -> None:
    """Of eight values the six lowest are excluded."""
    values = [100.0, 200, 300, 400]
    assert probabilities(values) == pytest.approx(scipy.special.softmax(0.01 * np.array(values)))
    eight = probabilities([10, 40, 20, 30, 80, 60, 70, 50], alpha1=0.75)
    expected = np.zeros(8)
    expected[[4, 6]] = scipy.special.softmax([0.8, 0.7])
    assert eight == pytest.approx(expected)
    equal = probabilities([10, 40, 20, 30], alpha1=0.5, alpha2=0.0)
    assert equal == pytest.approx([0, 0.5, 0, 0.5])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_ranks_lowest(value: float) -> None:
    """It is the first to be excluded."""
    assert probabilities([value, 1.0], alpha1=0.5).tolist() == [0, 1]
    expected = [0, 0, 0, 0, *scipy.special.softmax([0.04, 0.05])]
    assert probabilities([1, 2, 3, value, 4, 5], alpha1=0.75) == pytest.approx(expected)


@pytest.mark.parametrize("alpha2", [0.0, 0.01])
def test_a_value_that_is_not_finite_and_not_excluded_has_no_probability(alpha2: float) -> None:
    values = [np.nan, np.nan, 1.0, 1.0, np.inf, -np.inf]
    assert probabilities(values, alpha1=0.2, alpha2=alpha2) == pytest.approx([0, 0, 0.5, 0.5, 0, 0])
    assert probabilities([np.nan, np.inf], alpha1=0.5) == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(("n", "k", "by_value"), [(40, 5, 4), (40, 10, 9), (8, 4, 2)])
def test_a_tenth_of_the_cohort_is_uniform_or_more_if_too_few_are_left(
    n: int, k: int, by_value: int
) -> None:
    """An extreme softmax draws the highest values, and alpha3 = 0.1 leaves one place for chance. Of
    8 clients two are left for three draws by value."""
    selector = afl(n, k, alpha1=0.75, alpha2=20.0)
    highest = set(range(n - by_value, n))
    others: set[int] = set()
    for seed in range(30):
        selector.values = np.arange(float(n))
        chosen = set(picked(selector, 2, seed))
        assert highest <= chosen
        assert len(chosen) == k
        others |= chosen - highest
    assert min(others) < 30  # also excluded clients


def test_clients_are_as_likely_as_the_papers_two_draws_make_them() -> None:
    """N = 5, K = 2, alpha1 = 0.4, alpha3 = 0.5: the two lowest are excluded from the first draw,
    which is a softmax of the others. The second draw is uniform over the four that are left."""
    values = np.array([3.0, 1.0, 2.0, 5.0, 4.0])
    by_value = np.zeros(5)
    by_value[[0, 3, 4]] = scipy.special.softmax(0.5 * values[[0, 3, 4]])
    counts = np.zeros(5)
    for seed in range(1000):
        selector = afl(5, 2, alpha1=0.4, alpha2=0.5, alpha3=0.5)
        selector.values = values.copy()
        counts[picked(selector, 2, seed)] += 1
    expected = by_value + (1 - by_value) / 4
    assert counts / 1000 == pytest.approx(expected, abs=4 * np.sqrt(0.25 / 1000))


SIZES = [4, 9, 16, 25]
MEAN_POSITIONS = np.array([1.5, 8.0, 20.5, 41.0])
"""The toy's losses for clients of these sizes."""


def test_values_are_root_n_times_loss_and_only_the_selected_report_later() -> None:
    selector = afl(4, 2, SIZES, init="query")
    first = Ledger()
    picked(selector, ledger=first)
    assert (first.bytes_up, first.forward_samples) == (4 * 4, sum(SIZES))
    assert first.contacted == {0, 1, 2, 3}
    assert selector.values == pytest.approx(np.sqrt(SIZES) * MEAN_POSITIONS)
    second = Ledger()
    ids = picked(selector, 2, 1, ledger=second)
    assert second.contacted == set(ids)
    assert second.forward_samples == sum(SIZES[i] for i in ids)


def test_a_client_that_cannot_be_reached_in_round_1_is_asked_when_it_first_can() -> None:
    selector = afl(4, 1, SIZES, init="query")
    asked = []
    for round, available in enumerate(([0, 1], [2, 3], [0, 1, 2, 3]), 1):
        ledger = Ledger()
        picked(selector, round, round, ledger=ledger, available=available)
        asked.append(ledger.contacted)
    assert asked[:2] == [{0, 1}, {2, 3}]
    assert len(asked[2]) == 1  # the selected client
    assert (selector.values > 0).all()


# --- DELTA

SERVER: Any = None


def delta(sizes: list[int], k: int, diversity: float = 1.0, variance: float = 0.0) -> Delta:
    return Delta(toy_population(sizes, k), diversity=diversity, variance=variance)


def test_participants_share_their_mass_by_their_distances_from_the_mean_gradient() -> None:
    """The mean gradient is -(1, 0): distances 2, 1, 1. Client 3 keeps its mass."""
    selector = delta([1] * 4, 2)
    selector._drawn = np.array([0, 1, 2])
    selector._spreads = np.zeros(3)
    selector.observe(1, toy_cohort([0, 1, 2], [1, 1, 1], [[3, 0], [0, 0], [0, 0]]), SERVER)
    assert selector.probabilities == pytest.approx([0.75 * 0.5, 0.75 * 0.25, 0.75 * 0.25, 0.25])


@pytest.mark.parametrize("scores", [[0.0, 1.0], [np.nan, 1.0]])
def test_mass_stays_where_scores_cannot_divide_it(scores: list[float]) -> None:
    mass = np.array([0.2, 0.3])
    assert redistribute_mass(mass, np.array(scores)) is mass


def test_draws_are_unbiased() -> None:
    selector = delta([1, 2, 3, 4], 2)
    selector.probabilities = np.array([0.4, 0.3, 0.2, 0.1])
    assert mean_weights(selector) == pytest.approx([0.1, 0.2, 0.3, 0.4], rel=0.08)


def test_gradients_are_updates_over_lr_and_steps() -> None:
    """Updates (2, 0), (0, 0), (-2, 0) in 1, 1 and 2 steps at lr 1/2: gradients -4, 0 and 2 with the
    mean -2/3. Spreads are in the same units."""
    selector = delta([1] * 3, 3, diversity=1.0, variance=2.0)
    selector._drawn = np.arange(3)
    selector._spreads = np.array([1.0, 2.0, 3.0])
    selector._lr = 0.5
    cohort = toy_cohort([0, 1, 2], [1, 1, 1], [[2, 0], [0, 0], [-2, 0]])
    cohort.steps[:] = [1, 1, 2]
    selector.observe(1, cohort, SERVER)
    zeta = np.array([4 - 2 / 3, 2 / 3, 2 + 2 / 3])
    scores = np.sqrt(zeta**2 + 2 * np.array([1.0, 4.0, 9.0]))
    assert selector.probabilities == pytest.approx(scores / scores.sum())


def test_weights_are_draws_times_p_over_k_times_probability() -> None:
    selector = delta([1, 3], 4)
    selector.probabilities = np.array([0.5, 0.5])
    draws = np.random.default_rng(0).multinomial(4, [0.5, 0.5])
    assert selection_of(selector).weights == pytest.approx(draws * [0.25, 0.75] / (4 * 0.5))


# --- LEFL


class ThreeKinds(ToyEngine):
    """Client i predicts as kind i % 3 on every public sample."""

    KINDS = np.array([[0.9, 0.1], [0.1, 0.9], [0.5, 0.5]])

    def predict(self, params: Params, x: torch.Tensor) -> torch.Tensor:
        client = round(2 * float(params["w"][0]))  # the toy trains from 0 halfway to its id
        return torch.tensor(self.KINDS[client % 3]).log().expand(len(x), 2)


def lefl(sizes: list[int], k: int, weights: Any = "aggregator") -> LEFL:
    """Return LEFL after a first round with clients of three kinds."""
    selector = LEFL(toy_population(sizes, k), weights=weights)
    picked(selector, engine=ThreeKinds(sizes))
    return selector


NINE = [1, 2, 3] * 3
"""Sizes of three clients of each kind."""


def test_one_client_of_each_stratum_is_drawn() -> None:
    for seed in range(20):
        assert sorted(i % 3 for i in picked(lefl(NINE, 3), 2, seed)) == [0, 1, 2]


def test_strata_without_clients_are_filled_up_from_others() -> None:
    """Clients 0, 3 and 6 are of one stratum."""
    chosen = picked(lefl(NINE, 3), 2, available=[0, 1, 3, 6])
    assert 1 in chosen
    assert len(chosen) == 3


def test_data_of_strata_may_be_the_weights() -> None:
    """The strata have 3, 6 and 9 of 18 samples."""
    assert selection_of(lefl(NINE, 3), 2).weights is None
    selection = selection_of(lefl(NINE, 3, "strata"), 2)
    assert selection.weights == pytest.approx([(1 + i % 3) / 6 for i in selection.ids])


def test_newcomers_are_asked_when_they_appear() -> None:
    """Each new client passes three public samples."""
    selector = LEFL(toy_population([2] * 6, 2), weights="aggregator")
    ledger = Ledger()
    for available, num_new in (([0, 1, 2], 3), ([0, 1, 2], 0), ([0, 5], 1)):
        before = ledger.forward_samples
        picked(selector, available=available, ledger=ledger)
        assert ledger.forward_samples - before == 3 * num_new


def test_two_clients_of_one_stratum_share_its_data() -> None:
    """Strata {0, 3} with 2 + 5 samples and {1, 2, 4} with 3 + 4 + 6."""
    selector = LEFL(toy_population([2, 3, 4, 5, 6], 3), weights="strata")
    selector.strata = np.array([0, 1, 1, 0, 1])
    data = np.array([7, 13 / 2, 13 / 2])
    assert selector._stratum_shares(np.array([0, 1, 2])) == pytest.approx(data / data.sum())
    assert selector._stratum_shares(np.array([1, 2])) == pytest.approx([0.5, 0.5])


def test_strata_are_as_many_as_the_cohort_by_divergences_in_both_directions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables: list[np.ndarray] = []

    def watched(distances: np.ndarray) -> np.ndarray:
        tables.append(distances)
        return ward_linkage(distances)

    monkeypatch.setattr(lefl_module, "ward_linkage", watched)
    selector = lefl([1] * 6, 3)
    assert len(np.unique(selector.strata)) == 3
    p = ThreeKinds.KINDS
    both_ways = [[((a - b) * np.log(a / b)).sum() for b in p] for a in p]
    assert tables[0][:3, :3] == pytest.approx(np.array(both_ways) / 2, abs=1e-6)


def test_a_prediction_of_nan_counts_as_equal_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kind 2 has equal probabilities. Its clients have models that diverged in the second case."""
    tables: list[np.ndarray] = []

    def watched(distances: np.ndarray) -> np.ndarray:
        tables.append(distances)
        return ward_linkage(distances)

    monkeypatch.setattr(lefl_module, "ward_linkage", watched)
    lefl([1] * 6, 3)
    diverged = ThreeKinds.KINDS.copy()
    diverged[2] = np.nan
    monkeypatch.setattr(ThreeKinds, "KINDS", diverged)
    lefl([1] * 6, 3)
    assert tables[1] == pytest.approx(tables[0])


# --- label counts

PURE = np.array([[4.0, 0], [0, 4]])
"""Label counts of two clients with one class each."""


def clients_with(
    labels: list[list[int]], *, available: list[int] | None = None, ledger: Ledger | None = None
) -> Clients:
    """Return clients with these labels, who may be asked for their counts."""
    sizes = [len(of_client) for of_client in labels]
    engine = ToyEngine(sizes)
    engine.data.y[:] = engine.data.y.new_tensor(sum(labels, []))
    needs = frozenset({Signal.LABEL_COUNTS})
    return toy_clients(sizes, needs, engine=engine, available=available, ledger=ledger)


def chosen_of(
    selector: FedCBS | EntropyGreedy, labels: list[list[int]], round: int = 1, seed: int = 0
) -> list[int]:
    clients = clients_with(labels)
    return selector.select(round, clients, np.random.default_rng(seed)).ids.tolist()


def test_qcid_by_hand() -> None:
    """C = 2. A balanced pool has 1/2 - 1/2, a pure one 1 - 1/2, and (6, 2) 40/64 - 1/2."""
    assert qcid_with_each(PURE[1:], PURE[0]) == pytest.approx(0, abs=1e-8)
    assert qcid_with_each(PURE[:1], np.zeros(2)) == pytest.approx(0.5)
    assert qcid_with_each(np.array([[2.0, 2]]), PURE[0]) == pytest.approx(0.125)


@pytest.mark.parametrize("num_classes", [2, 5, 10])
def test_qcid_by_the_papers_double_sum_over_pairs_of_clients(num_classes: int) -> None:
    """sum_ij q_i q_j <a_i, a_j> / (sum_i q_i)^2 - 1 / C, with sizes q and label distributions a."""
    counts = np.random.default_rng(0).integers(0, 20, (6, num_classes)).astype(float)
    sizes = counts.sum(1)
    distributions = counts / sizes[:, None]
    qcid = qcid_with_each(counts[3:], counts[:3].sum(0))
    for row, client in enumerate((3, 4, 5)):
        members = [0, 1, 2, client]
        total = 0.0
        for i, j in itertools.product(members, repeat=2):
            total += sizes[i] * sizes[j] * distributions[i] @ distributions[j]
        assert qcid[row] == pytest.approx(total / sizes[members].sum() ** 2 - 1 / num_classes)


def test_fedcbs_does_not_draw_a_client_again_that_would_balance_the_pool() -> None:
    """After 102 picks only class 0 is left. One more client of class 1 or 2 would be better by a
    factor beyond e^709."""
    selector = FedCBS(toy_population([1] * 107, 105), exploration=10.0)
    assert len(chosen_of(selector, [[0]] * 40 + [[1]] * 34 + [[2]] * 33)) == 105


def test_counts_are_asked_for_once_without_a_model() -> None:
    """Each client sends three numbers of 4 bytes."""
    labels = [[0, 0, 2], [1, 1, 1], [2, 0, 0]]
    ledger = Ledger()
    unknown = np.empty((3, 0), np.int64)
    counts = collect_label_counts(unknown, clients_with(labels, available=[0, 2], ledger=ledger))
    assert counts.tolist() == [[2, 0, 1], [-1, -1, -1], [2, 0, 1]]
    assert (ledger.bytes_up, ledger.bytes_down, len(ledger.contacted)) == (2 * 3 * 4, 0, 0)
    counts = collect_label_counts(counts, clients_with(labels, ledger=ledger))
    assert counts[1].tolist() == [0, 3, 0]
    assert ledger.bytes_up == 3 * 3 * 4


def test_requests_for_label_counts_are_announced_before_the_run() -> None:
    selector = FedCBS(toy_population([2] * 3, 1), exploration=1.0)
    assert "how many samples of each class" in str(selector.warning)


class Greedy:
    """A generator that draws the likeliest position and keeps the probabilities."""

    def __init__(self) -> None:
        self.probabilities: list[np.ndarray] = []

    def choice(self, count: int, p: np.ndarray) -> int:
        assert len(p) == count
        self.probabilities.append(p)
        return int(np.argmax(p))


def test_fedcbs_draws_by_its_three_weights_in_turn() -> None:
    """The first client by 1 / QCID(k) + lambda sqrt(3 ln t / (2 m_k)), the m-th one by
    QCID(S)^(m-1) / QCID(S + k)^m."""
    labels = [[0, 0, 0, 1], [1, 1, 1, 2], [2, 2, 0, 1], [0, 0, 1, 1], [2, 2, 2, 2]]
    counts = np.array([np.bincount(of_client, minlength=3) for of_client in labels], dtype=float)

    def qcid(members: list[int]) -> float:
        shares = counts[members].sum(0) / counts[members].sum()
        return float((shares**2).sum()) - 1 / 3

    selector = FedCBS(toy_population([4] * 5, 3), exploration=0.5)
    selector.pulls[:] = [0, 3, 1, 2, 5]
    greedy: Any = Greedy()
    selection = selector.select(7, clients_with(labels), greedy)
    bonus = 0.5 * np.sqrt(3 * np.log(7) / (2 * np.array([1, 3, 1, 2, 5])))
    weights = [1 / qcid([k]) for k in range(5)] + bonus
    assert greedy.probabilities[0] == pytest.approx(weights / weights.sum())
    chosen = [int(np.argmax(weights))]
    for m in (2, 3):
        weights = np.zeros(5)
        for k in set(range(5)) - set(chosen):
            weights[k] = qcid(chosen) ** (m - 1) / qcid([*chosen, k]) ** m
        assert greedy.probabilities[m - 1] == pytest.approx(weights / weights.sum())
        chosen.append(int(np.argmax(weights)))
    assert selection.ids.tolist() == sorted(chosen)
    assert selector.pulls.tolist() == [n + (k in chosen) for k, n in enumerate([0, 3, 1, 2, 5])]


# Label counts (8, 2, 0), (0, 6, 0), (1, 1, 4), (3, 3, 3) of the clients 0 to 3.
FOUR_CLIENTS = [[0] * 8 + [1] * 2, [1] * 6, [0, 1, 2, 2, 2, 2], [0, 1, 2] * 3]


def fedentopt(sizes: list[int], k: int, queue_length: int | None) -> EntropyGreedy:
    return EntropyGreedy(toy_population(sizes, k), queue_length=queue_length)


def test_clients_in_the_queue_are_not_selected() -> None:
    """Equal clients. Three cohorts of two are six clients."""
    selector = fedentopt([3] * 6, 2, queue_length=4)
    cohorts = [set(chosen_of(selector, [[0, 1, 2]] * 6, t, t)) for t in range(1, 7)]
    for start in range(4):
        assert len(set.union(*cohorts[start : start + 3])) == 6


def test_the_queue_holds_the_latest_clients() -> None:
    selector = fedentopt([3] * 6, 2, queue_length=3)
    first = chosen_of(selector, [[0, 1, 2]] * 6, 1, 1)
    second = chosen_of(selector, [[0, 1, 2]] * 6, 2, 2)
    assert selector.queue[0] in first
    assert set(selector.queue[1:]) == set(second)


def seed_that_draws(client: int, num_clients: int) -> int:
    """Return the first seed with which FedEntOpt draws `client` first."""
    return next(s for s in range(100) if np.random.default_rng(s).integers(num_clients) == client)


def test_fedentopt_by_hand() -> None:
    """K = 3, and client 0 is drawn first. Entropies of its labels pooled with those of clients 1, 2
    and 3, in bits: 1.0000, 1.4197, 1.3838. So client 2 follows. The pool is (9, 3, 4). With clients
    1 and 3: 1.5022 and 1.5166. So client 3 follows.
    """
    pools = np.array([[8.0, 8, 0], [9, 3, 4], [11, 5, 3], [9, 9, 4], [12, 6, 7]])
    assert entropies(pools) / np.log(2) == pytest.approx(
        [1.0, 1.4197, 1.3838, 1.5022, 1.5166], abs=1e-4
    )
    assert entropies(pools) == pytest.approx(scipy.stats.entropy(pools, axis=1))
    selector = fedentopt([10, 6, 6, 9], 3, queue_length=3)
    assert chosen_of(selector, FOUR_CLIENTS, 1, seed_that_draws(0, 4)) == [0, 2, 3]
    assert selector.queue == [0, 2, 3]  # in the order in which they were selected


def test_fedentopt_draws_the_first_client_uniformly_from_those_that_do_not_wait() -> None:
    """Client 3 has the most even labels. It would always come first if the first pick were
    greedy."""
    first: Counter[int] = Counter()
    for seed in range(3000):
        selector = fedentopt([10, 6, 6, 9], 1, queue_length=1)
        selector.queue = [1]
        first.update(chosen_of(selector, FOUR_CLIENTS, 1, seed))
    assert set(first) == {0, 2, 3}
    assert scipy.stats.chisquare(list(first.values())).pvalue > 0.01


def test_fedentopt_leaves_nobody_out_under_label_skew() -> None:
    """100 clients, Dirichlet(0.1), K = 10, 200 rounds. A greedy first pick cycles through six
    cohorts here."""
    rng = np.random.default_rng(0)
    selector = fedentopt([60] * 100, 10, queue_length=None)
    cohorts = set()
    counts = [rng.multinomial(60, rng.dirichlet([0.1] * 10)) for _ in range(100)]
    selector.label_counts = np.stack(counts)
    clients = toy_clients([60] * 100, frozenset({Signal.LABEL_COUNTS}))
    for round in range(1, 201):
        chosen = selector.select(round, clients, np.random.default_rng((1, round))).ids
        cohorts.add(tuple(chosen.tolist()))
    assert len(cohorts) > 190
    assert {client for cohort in cohorts for client in cohort} == set(range(100))


def test_half_of_all_clients_wait_by_default() -> None:
    assert fedentopt([2] * 9, 3, queue_length=None).max_queued == 4


# --- optimal sampling


@pytest.mark.parametrize(
    ("u", "m", "expected"),
    [
        ((1, 2, 3, 4), 2, (0.2, 0.4, 0.6, 0.8)),
        ((1, 1, 1, 7), 2, (1 / 3, 1 / 3, 1 / 3, 1)),
        ((2, 2, 2), 1, (1 / 3,) * 3),
        # fewer than m have any norm: the others share what is left
        ((2, 0, 0), 2, (1, 1 / 2, 1 / 2)),
        # the border falls among equal ones
        ([0.1] * 100 + [0.2] * 1000, 1050, [0.5] * 100 + [1.0] * 1000),
    ],
)
def test_probabilities_by_hand(u: Any, m: int, expected: Any) -> None:
    assert exact_probabilities(np.array(u, float), m) == pytest.approx(expected)
    assert aggregated_probabilities(np.array(u, float), m, 4)[0] == pytest.approx(expected)


NORMS = np.random.default_rng(0).exponential(1, (4, 8)) ** 2


@pytest.mark.parametrize(("m", "u"), [(1, NORMS[0]), (2, NORMS[1]), (4, NORMS[2]), (6, NORMS[3])])
def test_probabilities_are_the_minimum_that_scipy_finds(m: int, u: np.ndarray) -> None:
    """The variance of the average is sum_k u_k^2 (1 - P_k) / P_k, over 0 < P_k <= 1 with at most m
    uploads expected."""

    def variance(p: np.ndarray) -> float:
        return float((u**2 * (1 - p) / p).sum())

    best = scipy.optimize.minimize(
        variance,
        np.full(8, m / 8),
        jac=lambda p: -((u / p) ** 2),
        bounds=[(1e-4, 1)] * 8,
        constraints=scipy.optimize.LinearConstraint(np.ones(8), ub=m),
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    for ours in (exact_probabilities(u, m), aggregated_probabilities(u, m, 50)[0]):
        assert ours == pytest.approx(best.x, abs=2e-3)
        assert variance(ours) <= best.fun * (1 + 1e-9)


@pytest.mark.parametrize(
    ("u", "m", "iterations", "exchanges"),
    [
        ((1, 2, 3, 4), 2, 4, 1),
        ((1, 1, 1, 7), 2, 4, 2),
        ((1, 2, 4, 8, 16, 32), 3, 1, 1),
        # 2 u / sum u is capped at 1 for the first; a second exchange finds nothing left to do
        ((10, 1, 1), 2, 1, 1),
        ((10, 1, 1), 2, 2, 2),
        ((10, 1, 1), 2, 9, 2),
    ],
)
def test_exchanges_are_counted_until_nothing_is_left_to_rescale(
    u: Any, m: int, iterations: int, exchanges: int
) -> None:
    _, num_exchanges = aggregated_probabilities(np.array(u, float), m, iterations)
    assert num_exchanges == exchanges


def test_what_a_capped_probability_leaves_is_shared_in_the_first_exchange() -> None:
    probabilities, _ = aggregated_probabilities(np.array([10.0, 1, 1]), 2, 1)
    assert probabilities == pytest.approx([1, 0.5, 0.5])


def ocs(sizes: list[int], k: int, probabilities: Any = "exact") -> OptimalSampling:
    return OptimalSampling(toy_population(sizes, k), probabilities=probabilities, iterations=4)


def test_exchanges_follow_one_another_on_the_simulated_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slowest client, 2, takes 1 + 4 + 36 s for model and training and 4 s for a norm, then 1 +
    8 s for two numbers, three times."""
    answers = np.full(3, 1 / 3), 3
    monkeypatch.setattr(optimal_sampling, "aggregated_probabilities", lambda *_: answers)
    clock = fixed_clock().round(1, 0.0)
    picked(ocs([1, 2, 3], 1, "aggregated"), round_clock=clock)
    assert clock.elapsed == 45 + 3 * 9


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=12), st.integers(1, 12))
@example([1.0] * 10 + [2.2e-311, 5e-324], 11)
@example([100.0] * 10 + [5e-324] * 2, 11)
def test_probabilities_sum_to_the_budget_and_grow_with_the_norm(
    values: list[float], m: int
) -> None:
    u = np.array(values)
    m = min(m, len(values))
    for ours in (exact_probabilities(u, m), aggregated_probabilities(u, m, 50)[0]):
        assert ours.sum() == pytest.approx(m)
        assert ((ours >= 0) & (ours <= 1 + 1e-12)).all()
        assert (np.diff(ours[np.argsort(u, kind="stable")]) >= -1e-9).all()


def test_weights_make_the_average_unbiased() -> None:
    """The update of client 0 of the toy is zero, so it never has to send it."""
    assert mean_weights(ocs([1, 2, 3, 4], 2))[1:] == pytest.approx([0.2, 0.3, 0.4], abs=0.02)


def test_the_number_of_uploads_is_random_and_k_on_average() -> None:
    uploads = [len(picked(ocs([1, 2, 3, 4], 2), seed=seed)) for seed in range(4000)]
    assert np.mean(uploads) == pytest.approx(2, abs=0.05)
    assert len(set(uploads)) > 1


def test_probabilities_grow_with_the_share_of_data_times_the_norm_of_the_update() -> None:
    """Updates of clients 1 and 2 are as 1 to 2, their shares 1/4 and 3/4: probabilities 1/7 and
    6/7, weights p / probability."""
    weights: dict[int, set[float]] = {1: set(), 2: set()}
    for seed in range(40):
        selection = selection_of(ocs([1, 1, 3], 1), seed=seed, available=[1, 2])
        assert selection.weights is not None
        for client, weight in zip(selection.ids.tolist(), selection.weights, strict=True):
            weights[client].add(round(float(weight), 6))
    assert weights == {1: {7 / 4}, 2: {7 / 8}}
