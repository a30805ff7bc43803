"""PNCS and DivFL, which compare gradients of all pairs of clients."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from sklearn.metrics.pairwise import cosine_similarity

from fedsim.clients.compression import Identity, Int8, TopK
from fedsim.clients.ledger import Ledger
from fedsim.core.errors import ConfigError
from fedsim.selectors import base
from fedsim.selectors import divfl as divfl_module
from fedsim.selectors import pncs as pncs_module
from fedsim.selectors.divfl import DivFL, cluster_shares, lazy_greedy, plain_greedy
from fedsim.selectors.pncs import NORM_ORDERS, PNCS
from fedsim.selectors.similarity import (
    PowerSimilarity,
    euclidean_distances,
    inner_products,
    similarities,
)
from fedsim.selectors.tools import least_similar_subset
from tests.toys import ToyEngine, picked, selection_of, toy_clients, toy_population


def table(*vectors: tuple[float, ...], p: float = 4.0) -> np.ndarray:
    return similarities([torch.tensor(vectors)], p)


X, Y = (2.0, 1.0, 0.0), (1.0, -1.0, 1.0)
READINGS = {
    "signed_power": {1: 0.138071, 2: 0.258199, 3: 0.351881, 4: 0.420084},
    "polar": {1: 0, 2: 0.258199, 3: 0.381607, 4: 0.450236},
    "dot_over_norms": {1: 0.111111, 2: 0.258199, 3: 0.333333, 4: 0.374203},
    "even_power": {2: 0.258199, 4: 0.700140},
}


@pytest.mark.parametrize(
    ("reading", "p"), [(r, p) for r, values in READINGS.items() for p in values]
)
def test_readings_by_hand(reading: PowerSimilarity, p: float) -> None:
    assert similarities([torch.tensor([X, Y])], p, reading)[0, 1] == pytest.approx(
        READINGS[reading][p], abs=1e-6
    )


@pytest.mark.parametrize(
    "reading", ["signed_power", "polar", "dot_over_norms", "even_power", "semi"]
)
def test_every_reading_is_symmetric_ignores_scale_and_is_a_cosine_at_two(
    reading: PowerSimilarity,
) -> None:
    x = torch.randn(6, 9, generator=torch.Generator().manual_seed(0)).double()
    cosine = torch.nn.functional.cosine_similarity(x[:, None], x[None], dim=2)
    np.testing.assert_allclose(similarities([x], 2.0, reading), cosine, atol=1e-12)
    four = similarities([x[:, :4], x[:, 4:]], 4.0, reading)
    np.testing.assert_allclose(four, four.T, atol=1e-12)
    rescaled = similarities([x * torch.arange(1, 7)[:, None]], 4.0, reading)
    assert np.allclose(rescaled, four, atol=1e-12) == (reading != "polar")
    assert (similarities([x * 0], 4.0, reading) == 0).all()


def test_the_semi_inner_product_is_averaged_and_zero_coordinates_count_as_nothing() -> None:
    x, y = np.array(X), np.array(Y)
    norm = lambda v: (np.abs(v) ** 4).sum() ** 0.25
    one = (np.sign(x) * np.abs(x) ** 3 * y).sum() / (norm(x) ** 3 * norm(y))
    other = (np.sign(y) * np.abs(y) ** 3 * x).sum() / (norm(y) ** 3 * norm(x))
    assert similarities([torch.tensor([X, Y])], 4.0, "semi")[0, 1] == pytest.approx(
        (one + other) / 2
    )
    with warnings.catch_warnings(action="error"):
        found = similarities([torch.tensor([[1.0, 0, 2], [1, 1, 0], [0, 0, 0]])], 0.5, "semi")
    first, second = (1 + np.sqrt(2)) ** 2, 4.0  # their norms
    assert found[0, 1] == pytest.approx(
        (1 / (first**-0.5 * second) + 1 / (second**-0.5 * first)) / 2
    )
    assert found.diagonal() == pytest.approx([1, 1, 0])
    assert not found[2].any()


@pytest.mark.parametrize("p", [1.0, 3.0, 4.0, 6.0])
def test_readings_by_scikit_learn_and_numpys_norms(p: float) -> None:
    x = np.random.default_rng(0).standard_normal((7, 30)) * np.arange(1, 8)[:, None]
    raised = np.sign(x) * np.abs(x) ** (p / 2)
    assert similarities([torch.tensor(x)], p) == pytest.approx(cosine_similarity(raised))
    norms = np.linalg.norm(x, ord=p, axis=1)
    lengths = np.outer(norms, norms)
    assert similarities([torch.tensor(x)], p, "dot_over_norms") == pytest.approx(x @ x.T / lengths)
    sums = np.linalg.norm(x[:, None] + x[None], ord=p, axis=2)
    differences = np.linalg.norm(x[:, None] - x[None], ord=p, axis=2)
    assert similarities([torch.tensor(x)], p, "polar") == pytest.approx(
        (sums**2 - differences**2) / (4 * lengths)
    )


def test_opposites_scales_zeros_and_tiny_numbers() -> None:
    s = table((1.0, 0), (0.0, 1), (-1.0, 0), (1.0, 1), (0.0, 0), (1e-12, 0), (-2.0, -2))
    assert s[0, 2] == -1
    assert s[0, 3] == pytest.approx(0.70711, abs=1e-5)
    assert (s[4] == 0).all()
    assert s[0, 5] == 1
    assert s[3, 6] == pytest.approx(-1)


def symmetric(seed: int, size: int) -> np.ndarray:
    values = np.random.default_rng(seed).uniform(-1, 1, (size, size))
    return (values + values.T) / 2


def pair_sum(similarity: NDArray[np.float64], chosen: NDArray[np.int64]) -> float:
    """Sum of the similarities over the pairs of the positions `chosen`."""
    return float(sum(similarity[i, j] for i, j in itertools.combinations(chosen, 2)))


def test_the_best_pair_and_the_tied_triples_by_hand() -> None:
    s = table((1.0, 0), (0.0, 1), (-1.0, 0), (1.0, 1))
    assert sorted(least_similar_subset(s, 2, "exact", 0, np.random.default_rng(0))) == [0, 2]
    triples = {
        tuple(sorted(least_similar_subset(s, 3, "exact", 0, np.random.default_rng(i))))
        for i in range(30)
    }
    assert triples == {(0, 1, 2), (0, 2, 3)}
    assert pair_sum(s, np.array([0, 1, 2])) / 3 == pytest.approx(-1 / 3)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 9), st.integers(2, 5))
def test_exact_is_the_minimum_and_greedy_with_swaps_never_below_it(
    seed: int, size: int, count: int
) -> None:
    s, count = symmetric(seed, size), min(count, size)
    rng = np.random.default_rng(seed)
    exact, greedy = (least_similar_subset(s, count, how, 2, rng) for how in ("exact", "greedy"))
    best = min(pair_sum(s, np.array(c)) for c in itertools.combinations(range(size), count))
    assert pair_sum(s, exact) == pytest.approx(best)
    assert pair_sum(s, greedy) >= best - 1e-12
    assert len(set(greedy)) == count
    if count == 2:
        assert pair_sum(s, greedy) == pytest.approx(best)


def test_swaps_only_ever_help() -> None:
    for seed in range(30):
        s, rng = symmetric(seed, 20), np.random.default_rng(0)
        without, with_swaps = (
            pair_sum(s, least_similar_subset(s, 5, "greedy", n, rng)) for n in (0, 5)
        )
        assert with_swaps <= without + 1e-12


def test_one_client_is_the_least_alike_on_average_not_counting_its_likeness_to_itself() -> None:
    for s, expected in (
        (table((1.0, 0.1), (1.0, 0.2), (-1.0, 0.1), (1.0, 0)), 2),
        (np.array([[5.0, 0, 1], [0, 0, 2], [1, 2, 0]]), 0),
    ):
        assert least_similar_subset(s, 1, "auto", 0, np.random.default_rng(0)).tolist() == [
            expected
        ]


def test_of_several_lowest_pairs_each_is_begun_with() -> None:
    similarity = np.ones((5, 5))
    for i, j in ((0, 3), (1, 4), (1, 2)):
        similarity[i, j] = similarity[j, i] = -1.0
    drawn = (
        least_similar_subset(similarity.copy(), 2, "greedy", 0, np.random.default_rng(s))
        for s in range(40)
    )
    assert {tuple(sorted(pair.tolist())) for pair in drawn} == {(0, 3), (1, 4), (1, 2)}


def pncs(n: int, k: int, **more: Any) -> PNCS:
    values: dict[str, Any] = {
        **{"p": 4.0, "grad": "full", "layers": None, "layer_agg": "mean", "queue_length": 4},
        **{"queue_unit": "clients", "search": "auto", "swap_passes": 2, "age_weight": 0.0},
        **{
            "similarity": "signed_power",
            "sketch": Identity(),
            "queue_bound": "gt",
            "on_shortage": "release_oldest",
        },
    }
    return PNCS(toy_population([2] * n, k), **(values | more))


class DrawnGradients(ToyEngine):
    """Client i reports row i of the gradients drawn for the round."""

    def __init__(self, n: int, length: int) -> None:
        super().__init__([2] * n)
        self.gradients = np.random.default_rng(0).standard_normal((n, length))

    def client_gradients(self, params: Any, positions: Any, names: Any = None) -> Any:
        for p in positions:
            yield torch.tensor(self.gradients[self.owner[p[0]]])


def test_ten_rounds_equal_a_search_through_all_subsets_by_scikit_learns_cosine() -> None:
    """Section V-C: the K clients outside the queue whose mean similarity over pairs is lowest; they
    join the queue."""
    n, k, queue_length = 9, 3, 4
    selector, queue = pncs(n, k, queue_length=queue_length, p=3.0), []
    engine = DrawnGradients(n, 20)
    for t in range(1, 11):
        engine.gradients = np.random.default_rng(t).standard_normal((n, 20))
        table = cosine_similarity(np.sign(engine.gradients) * np.abs(engine.gradients) ** 1.5)
        waiting = queue[-queue_length:]
        free = [i for i in range(n) if i not in waiting]
        best = min(itertools.combinations(free, k), key=lambda c: pair_sum(table, np.array(c)))
        chosen = picked(selector, t, t, engine=engine)
        assert chosen == list(best)
        # clients of one round enter the queue in a random order, which decides who of them leaves
        # it first
        queue += [i for batch in selector.queue for i in batch if i in chosen]


def history(k: int = 2, rounds: int = 12, **values: Any) -> list[set[int]]:
    selector = pncs(10, k, **values)
    return [set(picked(selector, t, t)) for t in range(1, rounds + 1)]


def test_a_queue_bars_those_that_were_selected_last() -> None:
    for values in (
        {},
        {"queue_length": 2, "queue_unit": "rounds"},
    ):  # four clients are two rounds of two
        found = history(**values)
        assert all(
            not (a & b) and not (a & c)
            for a, b, c in zip(found, found[1:], found[2:], strict=False)
        )
    assert len(set(map(frozenset, history(queue_length=0)))) == 1
    found = history(queue_length=3, queue_unit="rounds")
    assert all(len(set().union(*found[i : i + 4])) == 8 for i in range(9))
    found = history(queue_length=2, queue_unit="rounds", queue_bound="ge")
    assert all(not (a & b) for a, b in itertools.pairwise(found))
    assert any(a & c for a, c in zip(found, found[2:], strict=False))


def test_if_too_few_are_left_the_longest_waiting_or_any_are_released_or_fewer_selected() -> None:
    rng, waiting = np.random.default_rng(0), [[0], [1], [2], [3]]
    longest, any_of, fewer = (
        pncs(5, 2, on_shortage=how) for how in ("release_oldest", "random", "shrink")
    )
    longest.queue, any_of.queue, fewer.queue = waiting, waiting, waiting
    assert longest.eligible(np.arange(5), 2, rng).tolist() == [0, 4]
    assert longest.eligible(np.array([2, 3]), 2, rng).tolist() == [2, 3]
    assert {any_of.eligible(np.arange(5), 2, rng).tolist()[0] for _ in range(40)} == {0, 1, 2, 3}
    assert fewer.adaptive
    assert fewer.eligible(np.arange(5), 2, rng).tolist() == [4]
    assert len(fewer.eligible(np.arange(4), 2, rng)) == 1


def test_age_counts_by_the_mean_of_a_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[np.ndarray] = []

    def watched(similarity: np.ndarray, count: int, *_: Any) -> np.ndarray:
        tables.append(similarity)
        return np.arange(count)

    monkeypatch.setattr(pncs_module, "least_similar_subset", watched)
    for weight in (0.0, 0.5):
        selector = pncs(3, 2, age_weight=weight, queue_length=0)
        selector.last_round[:] = [4, 1, 0]
        picked(selector, 5)
    ages = np.array([1, 4, 5])
    assert tables[0] - tables[1] == pytest.approx(0.5 * (ages[:, None] + ages[None, :]) / 2)


def test_a_queue_in_rounds_counts_those_in_which_nobody_can_be_reached() -> None:
    """Selected in round t = 1, a client is eligible again when t' - 1 exceeds (gt), or is (ge),
    3."""
    for (bound, barred), t in itertools.product((("gt", [1, 2, 3]), ("ge", [1, 2])), range(2, 7)):
        selector = pncs(10, 2, queue_length=3, queue_unit="rounds", queue_bound=bound)
        first, again = (set(picked(selector, round, 1)) for round in (1, t))
        assert bool(first & again) == (t - 1 not in barred)


def test_a_queue_of_clients_holds_as_many_whatever_the_number_of_rounds() -> None:
    """Clients 0 .. 2K - 1, and then for ten rounds the second half of them, who alone can be
    reached."""
    k = 2
    selector = pncs(6, k, queue_length=2 * k)
    for t in range(1, 13):
        who = np.arange(k) + (k if t > 1 else 0)
        assert picked(selector, t, t, available=who.tolist()) == who.tolist()
    assert selector.eligible(np.arange(6), k, np.random.default_rng(0)).tolist() == list(
        range(2 * k, 6)
    )


class TwoLayers(ToyEngine):
    """Client i reports (1, 0) or (-1, 0) in a layer of two numbers and the number i in one of its
    own."""

    def __init__(self, n: int) -> None:
        super().__init__([2] * n)
        self.trained = ["a", "b"]

    def client_gradients(self, params: Any, positions: Any, names: Any) -> Any:
        for i in range(len(positions)):
            layers = {"a": [(-1.0) ** i, 0.0], "b": [float(i)]}
            yield torch.tensor([v for name in names or layers for v in layers[name]])


def layer_tables(layers: Any, how: str, ledger: Ledger | None = None) -> np.ndarray:
    selector = pncs(4, 2, layers=layers, layer_agg=how, p=2.0)
    params = {"a": torch.zeros(2), "b": torch.zeros(1)}
    clients = toy_clients(
        [2] * 4, selector.needs, engine=TwoLayers(4), ledger=ledger, params=params
    )
    return selector._similarities(clients)


def test_layers_are_averaged_weighted_or_joined_and_asked_for_once() -> None:
    ledger = Ledger()
    tables = {how: layer_tables(["a", "b"], how, ledger)[1] for how in ("mean", "params", "concat")}
    assert tables["mean"][2:].tolist() == pytest.approx([(-1 + 1) / 2, 1])
    assert tables["params"][2] == pytest.approx((2 * -1 + 1) / 3)
    assert tables["concat"][2] == pytest.approx((-1 + 2) / np.sqrt(2 * 5))
    assert (ledger.train_samples, ledger.bytes_up) == (3 * 2 * 4, 3 * 4 * 3 * 4)
    for how in ("mean", "params"):  # each layer by itself is every layer that the model trains
        assert layer_tables("each", how).tolist() == layer_tables(["a", "b"], how).tolist()


def test_a_batch_gradient_is_of_one_batch() -> None:
    for grad, samples in (("full", 2 * 6), ("batch", 2 * 4)):
        ledger, selector = Ledger(), pncs(2, 1, grad=grad)
        selector.select(
            1, toy_clients([6, 6], selector.needs, ledger=ledger), np.random.default_rng(0)
        )
        assert ledger.train_samples == samples


def test_weights_and_bias_of_a_layer_are_one_layer_without_the_layers_inside_it() -> None:
    clients = toy_clients([2] * 3, frozenset())
    names = [
        "body.1.weight",
        "body.1.bias",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
    ]
    clients.layer_names = lambda layers: names  # type: ignore[method-assign]
    expected = [
        ["body.1.weight", "body.1.bias"],
        ["attention.in_proj_weight"],
        ["attention.out_proj.weight"],
    ]
    assert pncs(3, 2, layers="each")._groups(clients) == expected


def test_what_cannot_be_combined_or_held_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """C(100, 10) is 1.7 10^13; C(100, 5), 75 million, take 11 GiB."""
    for n, k, values, message in (
        (
            5,
            2,
            {"p": 3.0, "similarity": "even_power"},
            r"p=3\.0: must be even for similarity=even_power",
        ),
        (
            5,
            2,
            {"layers": ["a", "b"], "sketch": TopK(size=3)},
            r"layer_agg='mean': must be concat where a sketch",
        ),
        (
            5,
            2,
            {"layers": "each", "sketch": TopK(size=3)},
            r"layer_agg='mean': must be concat where a sketch",
        ),
        (5, 2, {"layers": []}, "layers=.*: must be null or name at least one layer"),
        (
            5,
            2,
            {"similarity": "polar", "sketch": Int8()},
            "similarity='polar': depends on the lengths of the vectors",
        ),
        (100, 10, {"search": "exact"}, "search='exact': holds all subsets of cohort_size=10"),
    ):
        with pytest.raises(ConfigError, match=message):
            pncs(n, k, **values)
    pncs(5, 2, layers=["a"], sketch=TopK(size=3))
    for k, search in ((5, "exact"), (10, "auto"), (10, "greedy"), (1, "exact"), (100, "exact")):
        pncs(100, k, search=search)
    monkeypatch.setattr(base, "MAX_BYTES", 16 * 5**2)
    pncs(5, 2, similarity="even_power")
    with pytest.raises(ConfigError, match="compares all pairs of num_clients=5"):
        pncs(5, 2, similarity="dot_over_norms")


@pytest.mark.parametrize("similarity", ["polar", "dot_over_norms", "semi"])
def test_norms_that_would_overflow_are_refused(similarity: Any) -> None:
    for p in (0.02, 1024.0):
        with pytest.raises(
            ConfigError,
            match=rf"must lie in \[0\.1, 512\] for similarity={similarity}: norms overfl",
        ):
            pncs(5, 2, p=p, similarity=similarity)
        pncs(5, 2, p=p, similarity="signed_power")
    many = [torch.full((2, 1_000_000), 0.5).index_fill(0, torch.tensor([1]), 0.25)]
    for border in NORM_ORDERS:
        assert pncs(5, 2, p=border, similarity=similarity).p == border
        assert np.isfinite(similarities(many, border, similarity)).all()


# --- DivFL ---

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
    assert {
        int(f(LINE, 3, np.random.default_rng(s))[2])
        for f in (plain_greedy, lazy_greedy)
        for s in range(40)
    } == {
        0,
        1,
    }
    assert cluster_shares(LINE, order).tolist() == pytest.approx([2 / 5, 1 / 5, 2 / 5])
    assert g(LINE, plain_greedy(LINE, 5, np.random.default_rng(0))) == 0


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 15), st.integers(1, 15), st.booleans())
@example(0, 15, 15, False)  # every gain is a tie in the end
def test_lazy_equals_plain_and_gains_shrink(seed: int, n: int, count: int, grid: bool) -> None:
    """On a small grid many points coincide, and many distances are equal."""
    random = np.random.default_rng(seed)
    points = torch.tensor(
        random.integers(0, 3, (n, 2)) / 3 if grid else random.standard_normal((n, 3))
    )
    distances, count = pairwise_distances(points), min(n, count)
    plain, lazy = (
        f(distances, count, np.random.default_rng(0)) for f in (plain_greedy, lazy_greedy)
    )
    assert plain.tolist() == lazy.tolist()
    falls = -np.diff([g(distances, plain[: i + 1]) for i in range(count)])
    assert (falls >= -1e-9).all()
    assert (np.diff(falls) <= 1e-9).all()


def test_each_pick_is_the_best_addition_by_brute_force_and_the_set_near_the_best_of_all() -> None:
    """G by scipy's distances. Facility location is submodular: of the fall of G from the first pick
    on, greedy leaves at most the share 1/e of what the best set of as many clients in all achieves
    (Nemhauser et al. 1978)."""
    for seed in range(20):
        points = np.random.default_rng(seed).standard_normal((9, 4))
        distances = cdist(points, points)
        order = lazy_greedy(
            pairwise_distances(torch.tensor(points)), 4, np.random.default_rng(0)
        ).tolist()
        for place, client in enumerate(order):
            kept = order[:place]
            costs = {i: distances[:, [*kept, i]].min(1).sum() for i in range(9) if i not in kept}
            assert costs[client] == pytest.approx(min(costs.values()))
        best = min(distances[:, list(c)].min(1).sum() for c in itertools.combinations(range(9), 4))
        start = 2 * distances.sum(0).max()  # the cost of an empty set, as in the published code
        assert start - g(distances, np.array(order)) >= (1 - 1 / np.e) * (start - best)


def test_a_weight_is_the_share_of_those_nearest_to_its_client() -> None:
    """The toy's gradient of client i is (i + 1, -i^2 / 7); whoever was picked first is not the
    lowest id."""
    for n in range(4, 12):
        selection = selection_of(divfl(n, 2))
        vectors = np.array([[i + 1, -i * i / 7] for i in range(n)])
        apart = np.linalg.norm(vectors[:, None] - vectors[None, selection.ids], axis=2)
        assert selection.weights == pytest.approx(np.bincount(apart.argmin(1), minlength=2) / n)


@pytest.mark.parametrize(("mode", "expected"), [("ideal", [3, 4, 4]), ("no_overhead", [3, 2, 2])])
def test_who_sends_a_gradient_in_later_rounds(mode: str, expected: list[int]) -> None:
    """Client 3 can be reached from round 2 on: without overhead it sends its own, and the selected
    send theirs."""
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
    for n, share in (
        (10, 0.5),
        (10, 0.1),
        (100, 0.29),
    ):  # .29 * 100 is 28.999999999999996 in floating point
        picked(divfl(n, 3, greedy="stochastic", share=share))
    assert seen == [5, 3, 29]  # never fewer than K
