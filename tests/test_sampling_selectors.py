"""AFL, DELTA, LEFL, Fed-CBS, FedEntOpt and optimal client sampling: examples by hand, and what they
ask for."""

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
from fedsim.selectors import lefl as lefl_module
from fedsim.selectors import optimal_sampling
from fedsim.selectors.afl import AFL
from fedsim.selectors.delta import Delta, redistribute_mass
from fedsim.selectors.entropy_greedy import EntropyGreedy, entropies
from fedsim.selectors.fedcbs import FedCBS, qcid_with_each
from fedsim.selectors.lefl import LEFL
from fedsim.selectors.optimal_sampling import (
    OptimalSampling,
    aggregated_probabilities,
    exact_probabilities,
)
from fedsim.selectors.tools import collect_label_counts
from fedsim.selectors.ward import ward_linkage
from tests.clocks import fixed_clock
from tests.toys import ToyEngine, picked, selection_of, toy_clients, toy_cohort, toy_population

# --- AFL ---


def afl(
    n: int,
    k: int,
    alpha1: float = 0.0,
    alpha2: float = 0.01,
    alpha3: float = 0.1,
    init: str = "equal",
) -> AFL:
    return AFL(toy_population([1] * n, k), alpha1=alpha1, alpha2=alpha2, alpha3=alpha3, init=init)  # type: ignore[arg-type]


def probabilities(values: list[float], **more: float) -> np.ndarray:
    return afl(len(values), 1, **more).probabilities(np.array(values), np.random.default_rng(0))  # type: ignore[arg-type]


def test_probabilities_of_values_by_hand() -> None:
    assert probabilities([100, 200, 300, 400]) == pytest.approx(
        [0.03206, 0.08714, 0.23688, 0.64391], abs=1e-5
    )
    p = probabilities([10, 40, 20, 30, 80, 60, 70, 50], alpha1=0.75)
    assert np.flatnonzero(p).tolist() == [4, 6]
    assert p[[6, 4]] == pytest.approx([0.47502, 0.52498], abs=1e-5)
    assert probabilities([10, 40, 20, 30], alpha1=0.5, alpha2=0.0) == pytest.approx(
        [0, 0.5, 0, 0.5]
    )


def test_a_value_that_is_not_finite_ranks_lowest_and_has_no_probability_though_it_is_kept() -> None:
    for value in (np.nan, np.inf, -np.inf):
        assert probabilities([value, 1.0], alpha1=0.5).tolist() == [0, 1]
        p = probabilities([1, 2, 3, value, 4, 5], alpha1=0.75)
        assert p == pytest.approx([0, 0, 0, 0, 0.4975, 0.5025], abs=1e-5)
    for alpha2 in (0.0, 0.01):
        p = probabilities([np.nan, np.nan, 1.0, 1.0, np.inf, -np.inf], alpha1=0.2, alpha2=alpha2)
        assert p == pytest.approx([0, 0, 0.5, 0.5, 0, 0])
    assert probabilities([np.nan, np.inf], alpha1=0.5) == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(("n", "k", "by_value"), [(40, 5, 4), (40, 10, 9), (8, 4, 2)])
def test_a_tenth_of_the_cohort_is_uniform_and_more_where_too_few_are_left(
    n: int, k: int, by_value: int
) -> None:
    """With an extreme softmax those drawn by value are the highest; alpha3 = .1 leaves one place
    for chance. Of 8 clients two are left for three picks by value."""
    selector, top, others = afl(n, k, alpha1=0.75, alpha2=20.0), set(range(n - by_value, n)), set()
    for seed in range(30):
        selector.values = np.arange(float(n))
        chosen = set(picked(selector, 2, seed))
        assert top <= chosen
        assert len(chosen) == k
        others |= chosen - top
    assert min(others) < 30  # also the suppressed ones


def test_clients_are_as_likely_as_the_papers_two_draws_make_them() -> None:
    """N = 5, K = 2, alpha1 = .4, alpha3 = .5: the two lowest are out of the first draw, which takes
    one of the others by a softmax; the second takes one of the four that are left, each as
    likely."""
    values = np.array([3.0, 1.0, 2.0, 5.0, 4.0])
    by_value = np.zeros(5)
    by_value[[0, 3, 4]] = scipy.special.softmax(0.5 * values[[0, 3, 4]])
    counts = np.zeros(5)
    for seed in range(1000):
        selector = afl(5, 2, alpha1=0.4, alpha2=0.5, alpha3=0.5)
        selector.values = values.copy()
        counts[picked(selector, 2, seed)] += 1
    assert counts / 1000 == pytest.approx(
        by_value + (1 - by_value) / 4, abs=4 * np.sqrt(0.25 / 1000)
    )


def test_values_are_root_n_times_loss_and_only_the_selected_report() -> None:
    sizes = [4, 9, 16, 25]
    selector = AFL(toy_population(sizes, 2), alpha1=0.0, alpha2=0.01, alpha3=0.1, init="query")
    ledger = Ledger()
    picked(selector, ledger=ledger)
    assert (ledger.bytes_up, ledger.forward_samples, len(ledger.contacted)) == (
        4 * 4,
        sum(sizes),
        4,
    )
    mean_positions = np.array([1.5, 8.0, 20.5, 41.0])  # the toy's losses
    assert selector.values == pytest.approx(np.sqrt(sizes) * mean_positions)
    ledger = Ledger()
    ids = picked(selector, 2, 1, ledger=ledger)
    assert ledger.contacted == set(ids)
    assert ledger.forward_samples == sum(sizes[i] for i in ids)


def test_a_client_that_cannot_be_reached_in_round_1_is_asked_when_it_first_can() -> None:
    sizes = [4, 9, 16, 25]
    selector = AFL(toy_population(sizes, 1), alpha1=0.0, alpha2=0.01, alpha3=0.1, init="query")
    asked = []
    for round, available in enumerate(([0, 1], [2, 3], [0, 1, 2, 3]), 1):
        ledger = Ledger()
        picked(selector, round, round, ledger=ledger, available=available)
        asked.append(ledger.contacted)
    assert asked[:2] == [{0, 1}, {2, 3}]
    assert len(asked[2]) == 1  # the selected one
    assert (selector.values > 0).all()


# --- DELTA ---

SERVER: Any = None


def delta(sizes: list[int], k: int, diversity: float = 1.0, variance: float = 0.0) -> Delta:
    return Delta(toy_population(sizes, k), diversity=diversity, variance=variance)


def test_only_those_that_took_part_share_their_mass_anew_and_where_scores_give_none_it_stays() -> (
    None
):
    selector = delta([1] * 4, 2)
    selector._ids, selector._spreads = np.array([0, 1, 2]), np.zeros(3)
    selector.observe(1, toy_cohort([0, 1, 2], [1, 1, 1], [[3, 0], [0, 0], [0, 0]]), SERVER)
    # mean gradient -(1, 0): distances 2, 1, 1
    assert selector.probabilities == pytest.approx([0.75 * 0.5, 0.75 * 0.25, 0.75 * 0.25, 0.25])
    mass = np.array([0.2, 0.3])
    for scores in ([0.0, 1.0], [np.nan, 1.0]):
        assert redistribute_mass(mass, np.array(scores)) is mass


def test_draws_are_unbiased() -> None:
    sizes, total = [1, 2, 3, 4], np.zeros(4)
    selector = delta(sizes, 2)
    selector.probabilities = np.array([0.4, 0.3, 0.2, 0.1])
    for s in range(4000):
        selection = selection_of(selector, seed=s)
        assert selection.weights is not None
        total[selection.ids] += selection.weights
    assert total / 4000 == pytest.approx(np.array(sizes) / 10, rel=0.08)


def test_gradients_are_updates_over_lr_and_steps() -> None:
    """Updates (2, 0), (0, 0), (-2, 0) in 1, 1 and 2 steps at lr 1/2: gradients -4, 0 and 2, mean
    -2/3; spreads count in the same units."""
    selector = delta([1] * 3, 3, diversity=1.0, variance=2.0)
    selector._ids, selector._spreads, selector._lr = np.arange(3), np.array([1.0, 2.0, 3.0]), 0.5
    cohort = toy_cohort([0, 1, 2], [1, 1, 1], [[2, 0], [0, 0], [-2, 0]])
    cohort.steps[:] = [1, 1, 2]
    selector.observe(1, cohort, SERVER)
    zeta = np.array([4 - 2 / 3, 2 / 3, 2 + 2 / 3])
    scores = np.sqrt(zeta**2 + 2 * np.array([1.0, 4.0, 9.0]))
    assert selector.probabilities == pytest.approx(scores / scores.sum())


def test_weights_are_draws_times_p_over_k_times_chance() -> None:
    sizes = [1, 3]
    selector = delta(sizes, 4)
    selector.probabilities = np.array([0.5, 0.5])
    draws = np.random.default_rng(0).multinomial(4, [0.5, 0.5])
    assert selection_of(selector).weights == pytest.approx(draws * [0.25, 0.75] / (4 * 0.5))


# --- LEFL ---


def lefl(sizes: list[int], k: int, weights: Any = "aggregator") -> LEFL:
    selector = LEFL(toy_population(sizes, k), weights=weights)
    kinds = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.5, 0.5]]).log()
    selector.predictions = {i: kinds[i % 3].expand(4, 2).clone() for i in range(len(sizes))}
    selector.strata = selector._cluster(np.arange(len(sizes)))
    return selector


def test_one_client_of_each_stratum_whose_data_may_weigh() -> None:
    sizes = [1, 2, 3] * 3
    for seed in range(20):
        assert sorted(i % 3 for i in picked(lefl(sizes, 3), 2, seed)) == [0, 1, 2]
    assert 1 in picked(
        lefl(sizes, 3), 2, available=[0, 3, 6, 1]
    )  # filled up from others: strata 1 and 2 are one each
    assert len(picked(lefl(sizes, 3), 2, available=[0, 3, 6, 1])) == 3
    assert selection_of(lefl(sizes, 3), 2).weights is None
    selection = selection_of(lefl(sizes, 3, "strata"), 2)
    assert selection.weights == pytest.approx([(1 + i % 3) / 6 for i in selection.ids])


def test_newcomers_are_asked_when_they_appear() -> None:
    selector, ledger = LEFL(toy_population([2] * 6, 2), weights="aggregator"), Ledger()
    for available, asked_now in (([0, 1, 2], 3), ([0, 1, 2], 0), ([0, 5], 1)):
        before = ledger.forward_samples
        picked(selector, available=available, ledger=ledger)
        assert ledger.forward_samples - before == 3 * asked_now


def test_two_clients_of_one_stratum_share_its_data() -> None:
    """Strata {0, 3} with 2 + 5 samples and {1, 2, 4} with 3 + 4 + 6; clients 0, 1, 2 chosen of 20
    samples in all."""
    selector = LEFL(toy_population([2, 3, 4, 5, 6], 3), weights="strata")
    selector.strata = np.array([0, 1, 1, 0, 1])
    raw = np.array([7, 13 / 2, 13 / 2])
    assert selector._stratum_shares(np.array([0, 1, 2])) == pytest.approx(raw / raw.sum())
    assert selector._stratum_shares(np.array([1, 2])) == pytest.approx([0.5, 0.5])
    assert selector._stratum_shares(np.array([0])) == pytest.approx([1.0])


def test_strata_are_as_many_as_the_cohort_and_of_distances_in_both_directions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables: list[np.ndarray] = []

    def watched(distances: np.ndarray) -> np.ndarray:
        tables.append(distances)
        return ward_linkage(distances)

    monkeypatch.setattr(lefl_module, "ward_linkage", watched)
    selector = lefl([1] * 6, 3)
    assert len(np.unique(selector.strata)) == 3
    p = np.array([[0.9, 0.1], [0.1, 0.9], [0.5, 0.5]])
    both_ways = [[(a * np.log(a / b)).sum() + (b * np.log(b / a)).sum() for b in p] for a in p]
    assert tables[0][:3, :3] == pytest.approx(np.array(both_ways) / 2, abs=1e-6)


# --- label counts ---

PURE = np.array([[4.0, 0], [0, 4]])


def door_of(
    labels: list[list[int]], *, available: list[int] | None = None, ledger: Ledger | None = None
) -> Clients:
    sizes = [len(x) for x in labels]
    engine = ToyEngine(sizes)
    engine.data.y[:] = engine.data.y.new_tensor(sum(labels, []))
    needs = frozenset({Signal.LABEL_COUNTS})
    return toy_clients(sizes, needs, engine=engine, available=available, ledger=ledger)


def chosen_of(
    selector: FedCBS | EntropyGreedy, labels: list[list[int]], round: int = 1, seed: int = 0
) -> list[int]:
    return selector.select(round, door_of(labels), np.random.default_rng(seed)).ids.tolist()


def test_qcid_by_hand() -> None:
    assert qcid_with_each(PURE[1:], PURE[0]) == pytest.approx(0, abs=1e-8)
    assert qcid_with_each(np.array([[2.0, 2]]), PURE[0])[0] == pytest.approx(0.125)
    assert qcid_with_each(PURE[:1], np.zeros(2))[0] == pytest.approx(0.5)


def test_qcid_by_the_papers_double_sum_over_pairs_of_clients() -> None:
    """sum_ij q_i q_j <a_i, a_j> / (sum_i q_i)^2 - 1 / C, with sizes q and label distributions a."""
    random = np.random.default_rng(0)
    for num_classes in (2, 5, 10):
        counts = random.integers(0, 20, (6, num_classes)).astype(float)
        sizes = counts.sum(1)
        distributions = counts / sizes[:, None]
        found = qcid_with_each(counts[3:], counts[:3].sum(0))
        for row, client in enumerate((3, 4, 5)):
            members = [0, 1, 2, client]
            pairs = itertools.product(members, repeat=2)
            total = sum(sizes[i] * sizes[j] * distributions[i] @ distributions[j] for i, j in pairs)
            assert found[row] == pytest.approx(total / sizes[members].sum() ** 2 - 1 / num_classes)


def test_fedcbs_draws_on_where_one_already_picked_would_balance_the_pool() -> None:
    """After 102 picks only class 0 is left; one more of class 1 or 2 would be better by a factor
    beyond e^709."""
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
    assert "how many samples of each class" in str(
        FedCBS(toy_population([2] * 3, 1), exploration=1.0).warning
    )
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
    """The first by 1 / QCID(k) + lambda sqrt(3 ln t / (2 n_k)), the m-th by QCID(S)^(m-1) / QCID(S
    + k)^m."""
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
        weights = np.array(
            [
                0 if k in chosen else qcid(chosen) ** (m - 1) / qcid([*chosen, k]) ** m
                for k in range(5)
            ]
        )
        assert watched.chances[m - 1] == pytest.approx(weights / weights.sum())
        chosen.append(int(np.argmax(weights)))
    assert selection.ids.tolist() == sorted(chosen)
    assert selector.pulls.tolist() == [n + (k in chosen) for k, n in enumerate([0, 3, 1, 2, 5])]


# Label counts (8, 2, 0), (0, 6, 0), (1, 1, 4), (3, 3, 3) of the clients 0 to 3.
FOUR_CLIENTS = [[0] * 8 + [1] * 2, [1] * 6, [0, 1, 2, 2, 2, 2], [0, 1, 2] * 3]


def seed_that_draws(client: int, num_clients: int) -> int:
    """Return the first seed with which `client` is the first client that FedEntOpt draws of
    `num_clients`."""
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
    selector = EntropyGreedy(toy_population([10, 6, 6, 9], 3), queue_length=3)
    assert chosen_of(selector, FOUR_CLIENTS, 1, seed_that_draws(0, 4)) == [0, 2, 3]
    assert selector.queue == [0, 2, 3]  # in the order in which they were selected


def test_fedentopt_draws_the_first_client_uniformly_from_those_that_do_not_wait() -> None:
    """Client 3 has the most even labels and would always come first if the first pick were greedy,
    too."""
    first = Counter()
    for seed in range(3000):
        selector = EntropyGreedy(toy_population([10, 6, 6, 9], 1), queue_length=1)
        selector.queue = [1]
        first.update(chosen_of(selector, FOUR_CLIENTS, 1, seed))
    assert set(first) == {0, 2, 3}
    assert scipy.stats.chisquare(list(first.values())).pvalue > 0.01


def test_fedentopt_leaves_nobody_out_under_label_skew() -> None:
    """100 clients, Dirichlet(0.1), K = 10, 200 rounds. A greedy first pick cycles through six
    cohorts here."""
    rng = np.random.default_rng(0)
    selector, cohorts = EntropyGreedy(toy_population([60] * 100, 10), queue_length=None), set()
    selector.counts = np.stack([rng.multinomial(60, rng.dirichlet([0.1] * 10)) for _ in range(100)])
    clients = toy_clients([60] * 100, frozenset({Signal.LABEL_COUNTS}))
    for round in range(1, 201):
        chosen = selector.select(round, clients, np.random.default_rng((1, round))).ids
        cohorts.add(tuple(chosen.tolist()))
    assert len(cohorts) > 190
    assert {client for cohort in cohorts for client in cohort} == set(range(100))


def test_half_of_all_clients_wait_by_default() -> None:
    assert EntropyGreedy(toy_population([2] * 9, 3), queue_length=None).longest == 4


# --- optimal sampling ---


@pytest.mark.parametrize(
    ("u", "m", "expected"),
    [
        ((1, 2, 3, 4), 2, (0.2, 0.4, 0.6, 0.8)),
        ((1, 1, 1, 7), 2, (1 / 3, 1 / 3, 1 / 3, 1)),
        ((2, 2, 2), 1, (1 / 3,) * 3),
        (
            (2, 0, 0),
            2,
            (1, 1 / 2, 1 / 2),
        ),  # fewer than m have any norm: the others share what is left
        (
            [0.1] * 100 + [0.2] * 1000,
            1050,
            [0.5] * 100 + [1.0] * 1000,
        ),  # whose border falls among equal ones
    ],
)
def test_probabilities_by_hand(u: Any, m: int, expected: Any) -> None:
    assert exact_probabilities(np.array(u, float), m) == pytest.approx(expected)
    assert aggregated_probabilities(np.array(u, float), m, 4)[0] == pytest.approx(expected)


def test_probabilities_are_the_minimum_that_scipy_finds() -> None:
    """Of the average's variance, sum_k u_k^2 (1 - P_k) / P_k, over 0 < P_k <= 1 with at most m
    uploads expected."""
    random = np.random.default_rng(0)
    for m in (1, 2, 4, 6):
        u = random.exponential(1, 8) ** 2
        variance = lambda p, u=u: (u**2 * (1 - p) / p).sum()
        best = scipy.optimize.minimize(
            variance,
            np.full(8, m / 8),
            jac=lambda p, u=u: -((u / p) ** 2),
            bounds=[(1e-4, 1)] * 8,
            constraints={
                "type": "ineq",
                "fun": lambda p, m=m: m - p.sum(),
                "jac": lambda p: -np.ones(8),
            },
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 1000},
        )
        for found in (exact_probabilities(u, m), aggregated_probabilities(u, m, 50)[0]):
            assert found == pytest.approx(best.x, abs=2e-3)
            assert variance(found) <= best.fun * (1 + 1e-9)


@pytest.mark.parametrize(
    ("u", "m", "iterations", "exchanges"),
    [
        ((1, 2, 3, 4), 2, 4, 1),
        ((1, 1, 1, 7), 2, 4, 2),
        ((1, 2, 4, 8, 16, 32), 3, 1, 1),
        (
            (10, 1, 1),
            2,
            1,
            1,
        ),  # 2 u / sum u is capped at 1 for the first; the others share what is left of 2
        ((10, 1, 1), 2, 2, 2),  # a second exchange finds nothing more to do
        ((10, 1, 1), 2, 9, 2),
    ],
)
def test_exchanges_are_counted_until_nothing_is_left_to_rescale(
    u: Any, m: int, iterations: int, exchanges: int
) -> None:
    chances, asked = aggregated_probabilities(np.array(u, float), m, iterations)
    assert asked == exchanges
    assert u[0] != 10 or chances == pytest.approx([1, 0.5, 0.5])


def test_exchanges_follow_one_another_on_the_simulated_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slowest client, 2: 1 + 4 + 36 s for model and training and 4 s for a norm; then 1 + 8 s
    for two numbers."""
    answers = aggregated_probabilities(np.array([1.0, 2, 3]), 1, 4)[0], 3
    monkeypatch.setattr(optimal_sampling, "aggregated_probabilities", lambda *_: answers)
    selector = OptimalSampling(
        toy_population([1, 2, 3], 1), probabilities="aggregated", iterations=4
    )
    clock = fixed_clock().round(1, 0.0)
    picked(selector, round_clock=clock)
    assert clock.elapsed == 45 + 3 * 9


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=12), st.integers(1, 12))
@example([1.0] * 10 + [2.2e-311, 5e-324], 11)
@example([100.0] * 10 + [5e-324] * 2, 11)
def test_probabilities_sum_to_the_budget_and_grow_with_the_norm(
    values: list[float], m: int
) -> None:
    u, m = np.array(values), min(m, len(values))
    for chances in (exact_probabilities(u, m), aggregated_probabilities(u, m, 50)[0]):
        assert chances.sum() == pytest.approx(m)
        assert ((chances >= 0) & (chances <= 1 + 1e-12)).all()
        assert (np.diff(chances[np.argsort(u, kind="stable")]) >= -1e-9).all()


def test_weights_make_the_average_unbiased() -> None:
    sizes, m = [1, 2, 3, 4], 2
    selector = OptimalSampling(toy_population(sizes, m), probabilities="exact", iterations=4)
    total, uploads = np.zeros(4), []
    for s in range(4000):
        selection = selection_of(selector, seed=s)
        assert selection.weights is not None
        total[selection.ids] += selection.weights
        uploads.append(len(selection.ids))
    # client 0 of the toy has an update of zero, so that it is never asked to send it
    assert total[1:] / 4000 == pytest.approx(np.array(sizes[1:]) / 10, abs=0.02)
    assert np.mean(uploads) == pytest.approx(m, abs=0.05)
    assert len(set(uploads)) > 1


def test_chances_grow_with_the_share_of_data_times_the_norm_of_the_update() -> None:
    """Updates of clients 1 and 2 are as 1 to 2, their shares 1/4 and 3/4: chances 1/7 and 6/7,
    weights p / chance."""
    selector = OptimalSampling(toy_population([1, 1, 3], 1), probabilities="exact", iterations=1)
    found: dict[int, set[float]] = {1: set(), 2: set()}
    for seed in range(40):
        selection = selection_of(selector, seed=seed, available=[1, 2])
        assert selection.weights is not None
        for client, weight in zip(selection.ids, selection.weights, strict=True):
            found[int(client)].add(round(float(weight), 6))
    assert found == {1: {1.75}, 2: {0.875}}
