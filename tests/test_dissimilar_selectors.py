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
from fedsim.selectors.subset_search import least_similar_subset
from tests.toys import ToyEngine, picked, selection_of, shipped, toy_clients, toy_population


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


def pncs(n: int, k: int, **changes: Any) -> PNCS:
    """Return `selector=pncs` on full gradients, for n clients of two samples."""
    values = {"grad": "full", "sketch": Identity()} | changes
    return shipped("pncs", toy_population([2] * n, k), **values)


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


def cohorts(num_rounds: int = 12, **changes: Any) -> list[set[int]]:
    """Return the pairs that PNCS selects of ten clients, whose gradients stay the same."""
    selector = pncs(10, 2, **changes)
    return [set(picked(selector, t, t)) for t in range(1, num_rounds + 1)]


def disjoint(sets: list[set[int]], length: int) -> bool:
    """Return whether all `length` consecutive sets are disjoint."""
    for start in range(len(sets) - length + 1):
        window = sets[start : start + length]
        if len(set.union(*window)) < sum(len(members) for members in window):
            return False
    return True


@pytest.mark.parametrize(
    ("queue", "num_rounds"),
    [
        ({"queue_length": 4}, 2),  # four clients are two rounds of two
        ({"queue_length": 2, "queue_unit": "rounds"}, 2),
        ({"queue_length": 3, "queue_unit": "rounds"}, 3),
        ({"queue_length": 2, "queue_unit": "rounds", "queue_bound": "ge"}, 1),
    ],
)
def test_a_queue_bars_the_clients_of_the_last_rounds(
    queue: dict[str, Any], num_rounds: int
) -> None:
    assert disjoint(cohorts(**queue), num_rounds + 1)
    assert not disjoint(cohorts(**queue), num_rounds + 2)


def test_without_a_queue_the_same_clients_are_selected_again() -> None:
    first, *others = cohorts(queue_length=0)
    assert all(other == first for other in others)


FIVE = np.arange(5)


def waiting(on_shortage: str) -> PNCS:
    """Return PNCS for two of five clients, of which 0, 1, 2 and 3 were selected in this order."""
    selector = pncs(5, 2, on_shortage=on_shortage)
    selector.queue = [[0], [1], [2], [3]]
    return selector


def test_the_clients_that_wait_longest_are_released_if_too_few_are_left() -> None:
    rng = np.random.default_rng(0)
    selector = waiting("release_oldest")
    assert selector.eligible(FIVE, 2, rng).tolist() == [0, 4]
    assert selector.eligible(np.array([2, 3]), 2, rng).tolist() == [2, 3]


def test_random_clients_may_be_released() -> None:
    rng = np.random.default_rng(0)
    released = {waiting("random").eligible(FIVE, 2, rng).tolist()[0] for _ in range(40)}
    assert released == {0, 1, 2, 3}


def test_fewer_clients_may_be_selected_but_at_least_one() -> None:
    rng = np.random.default_rng(0)
    selector = waiting("shrink")
    assert selector.adaptive
    assert selector.eligible(FIVE, 2, rng).tolist() == [4]
    assert len(selector.eligible(FIVE[:4], 2, rng)) == 1


def test_age_is_subtracted_as_the_mean_of_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """In round 5 clients selected in rounds 4, 1 and never have ages 1, 4 and 5."""
    tables: list[np.ndarray] = []

    def watched(similarity: np.ndarray, count: int, *_: Any) -> np.ndarray:
        tables.append(similarity)
        return np.arange(count)

    monkeypatch.setattr(pncs_module, "least_similar_subset", watched)
    for weight in (0.0, 0.5):
        selector = pncs(3, 2, age_weight=weight, queue_length=0)
        selector.last_selected[:] = [4, 1, 0]
        picked(selector, 5)
    ages = np.array([1, 4, 5])
    assert tables[0] - tables[1] == pytest.approx(0.5 * (ages[:, None] + ages[None, :]) / 2)


@pytest.mark.parametrize("t", [2, 3, 4, 5, 6])
@pytest.mark.parametrize(("bound", "eligible_from"), [("gt", 5), ("ge", 4)])
def test_a_queue_in_rounds_counts_those_in_which_nobody_can_be_reached(
    bound: str, eligible_from: int, t: int
) -> None:
    """A client selected in round 1 is eligible in the next round t if t - 1 exceeds 3 (gt), or is
    at least 3 (ge)."""
    selector = pncs(10, 2, queue_length=3, queue_unit="rounds", queue_bound=bound)
    first = set(picked(selector, 1, 1))
    again = set(picked(selector, t, 1))
    assert bool(first & again) == (t >= eligible_from)


def test_a_queue_of_clients_holds_as_many_whatever_the_number_of_rounds() -> None:
    """Clients 0 and 1, and then for eleven rounds 2 and 3, because nobody else can be reached."""
    selector = pncs(6, 2, queue_length=4)
    assert picked(selector, 1, 1, available=[0, 1]) == [0, 1]
    for t in range(2, 13):
        assert picked(selector, t, t, available=[2, 3]) == [2, 3]
    assert selector.eligible(np.arange(6), 2, np.random.default_rng(0)).tolist() == [4, 5]


class TwoLayers(ToyEngine):
    """Client i reports ((-1)^i, 0) in layer a and the number i in layer b."""

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


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("mean", (-1 + 1) / 2),
        ("params", (2 * -1 + 1) / 3),  # by the sizes 2 and 1 of the layers
        ("concat", (-1 + 2) / np.sqrt(2 * 5)),  # of (-1, 0, 1) and (1, 0, 2)
    ],
)
def test_similarities_of_layers_are_averaged_weighted_or_joined(how: str, expected: float) -> None:
    """Of clients 1 and 2 the layers have cosines -1 and 1. Each client sends three numbers of 4
    bytes, once."""
    ledger = Ledger()
    assert layer_tables(["a", "b"], how, ledger)[1, 2] == pytest.approx(expected)
    assert (ledger.train_samples, ledger.bytes_up) == (2 * 4, 4 * 3 * 4)


@pytest.mark.parametrize("how", ["mean", "params"])
def test_each_layer_is_every_layer_that_the_model_trains(how: str) -> None:
    assert layer_tables("each", how).tolist() == layer_tables(["a", "b"], how).tolist()


@pytest.mark.parametrize(("grad", "num_samples"), [("full", 6), ("batch", 4)])
def test_a_batch_gradient_is_of_one_batch(grad: str, num_samples: int) -> None:
    ledger = Ledger()
    selector = pncs(2, 1, grad=grad)
    clients = toy_clients([6, 6], selector.needs, ledger=ledger)
    selector.select(1, clients, np.random.default_rng(0))
    assert ledger.train_samples == 2 * num_samples


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
    assert pncs(3, 2, layers="each")._layers(clients) == expected


SKETCH = TopK(size=3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"p": 3.0, "similarity": "even_power"}, r"p=3\.0: must be even for similarity=even_power"),
        ({"layers": ["a", "b"], "sketch": SKETCH}, "layer_agg='mean': must be concat if"),
        ({"layers": "each", "sketch": SKETCH}, "layer_agg='mean': must be concat if"),
        ({"layers": []}, "layers=.*: must be null or name at least one layer"),
        ({"similarity": "polar", "sketch": Int8()}, "similarity='polar': depends on the lengths"),
    ],
)
def test_values_that_cannot_be_combined_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pncs(5, 2, **values)


def test_a_sketch_of_one_layer_is_accepted() -> None:
    pncs(5, 2, layers=["a"], sketch=SKETCH)


def test_an_exact_search_over_too_many_subsets_is_rejected() -> None:
    """C(100, 10) is 1.7 10^13. C(100, 5), 75 million, take 11 GiB."""
    with pytest.raises(ConfigError, match="search='exact': holds all subsets of cohort_size=10"):
        pncs(100, 10, search="exact")
    for k, search in ((5, "exact"), (10, "auto"), (10, "greedy"), (1, "exact"), (100, "exact")):
        pncs(100, k, search=search)


def test_similarities_by_norms_hold_twice_as_many_tables(monkeypatch: pytest.MonkeyPatch) -> None:
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


def divfl(n: int, k: int, **changes: Any) -> DivFL:
    """Return `selector=divfl` for n clients of one sample."""
    return shipped("divfl", toy_population([1] * n, k), **changes)


def test_points_on_a_line_by_hand() -> None:
    """5 has the smallest sum of distances, 25. Then 20 lowers it to 10, and 0 or 1 to 2."""
    order = plain_greedy(LINE, 3, np.random.default_rng(0))
    assert order[:2].tolist() == [2, 4]
    assert order[2] in (0, 1)
    assert [g(LINE, order[: i + 1]) for i in range(3)] == [25, 10, 2]
    assert cluster_shares(LINE, order).tolist() == pytest.approx([2 / 5, 1 / 5, 2 / 5])
    assert g(LINE, plain_greedy(LINE, 5, np.random.default_rng(0))) == 0


@pytest.mark.parametrize("search", [plain_greedy, lazy_greedy])
def test_ties_of_gains_are_broken_at_random(search: Greedy) -> None:
    thirds = {int(search(LINE, 3, np.random.default_rng(seed))[2]) for seed in range(40)}
    assert thirds == {0, 1}


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


def gradients_sent(selector: DivFL, round: int, available: list[int]) -> tuple[int, list[int]]:
    """Return how many clients send a gradient, and which are selected."""
    ledger = Ledger()
    chosen = picked(selector, round, available=available, ledger=ledger)
    assert ledger.bytes_up == 8 * ledger.train_samples  # two numbers for a sample
    return ledger.train_samples, chosen


def test_ideally_all_clients_send_a_gradient_in_every_round() -> None:
    selector = divfl(4, 2)
    assert gradients_sent(selector, 1, [0, 1, 2])[0] == 3
    assert gradients_sent(selector, 2, [0, 1, 2, 3])[0] == 4


def test_without_overhead_new_and_selected_clients_send_a_gradient() -> None:
    """Client 3 can be reached from round 2 on."""
    selector = divfl(4, 2, mode="no_overhead")
    assert gradients_sent(selector, 1, [0, 1, 2])[0] == 3
    num_sent, chosen = gradients_sent(selector, 2, [0, 1, 2, 3])
    assert num_sent == len({3, *chosen})
    assert gradients_sent(selector, 3, [0, 1, 2, 3])[0] == 2


@pytest.mark.parametrize(("n", "share", "expected"), [(10, 0.5, 5), (10, 0.1, 3), (100, 0.29, 29)])
def test_stochastic_greedy_draws_a_share_of_all_clients_and_at_least_k(
    n: int, share: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.29 * 100 is 28.999999999999996 in floating point."""
    numbers: list[int | None] = []

    def watched(distances: Any, count: int, rng: Any, num_candidates: int | None) -> Any:
        numbers.append(num_candidates)
        return np.arange(count)

    monkeypatch.setattr(divfl_module, "plain_greedy", watched)
    picked(divfl(n, 3, greedy="stochastic", share=share))
    assert numbers == [expected]
