"""Clustered sampling and HiCS."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import softmax as scipy_softmax
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics.pairwise import cosine_similarity

from fedsim.core.errors import FedsimError
from fedsim.core.types import Cohort
from fedsim.selectors import hics as hics_module
from fedsim.selectors.clustered import (
    ClusteredBySimilarity,
    ClusteredBySize,
    angular_distances,
    clusters_within_capacity,
    fill_bins,
)
from fedsim.selectors.hics import HiCS, class_updates, entropy, output_layer
from fedsim.selectors.similarity import inner_products
from fedsim.selectors.ward import cut_tree, ward_linkage
from tests.toys import (
    chances,
    picked,
    selection_of,
    shipped,
    toy_clients,
    toy_cohort,
    toy_population,
)

SERVER: Any = None


def by_size(sizes: list[int], k: int) -> ClusteredBySize:
    return ClusteredBySize(toy_population(sizes, k))


def by_similarity(
    sizes: list[int], k: int, distance: Any = "cosine", ward_on: Any = "distances"
) -> ClusteredBySimilarity:
    return ClusteredBySimilarity(toy_population(sizes, k), distance=distance, ward_on=ward_on)


def test_bins_are_filled_one_after_another_by_hand() -> None:
    """Client 1 fills the first gap of 0.3, and the rest goes into the next bin."""
    bins = np.array([[0.7, 0, 0], [0.5, 0, 0]])
    filled = fill_bins(bins, masses=np.array([0, 0.5, 0.3]), order=np.array([1, 2]))
    np.testing.assert_allclose(filled, [[0.7, 0.3, 0], [0.5, 0.2, 0.3]])


def test_distributions_by_size_by_hand() -> None:
    """Masses 2 n_i / 10 are 1, 0.6, 0.2 and 0.2."""
    sizes = [5, 3, 1, 1]
    distributions = by_size(sizes, 2).distributions(toy_clients(sizes, frozenset()))
    np.testing.assert_allclose(distributions, [[1, 0, 0, 0], [0, 0.6, 0.2, 0.2]])


def test_angles_by_hand() -> None:
    """In right angles: 1 from (1, 0) to (0, 2), 2 to (-3, 0), and 0 to the zero vector."""
    vectors = torch.tensor([[1.0, 0], [0, 2], [-3, 0], [0, 0]])
    right_angles = angular_distances(inner_products([vectors])) / (np.pi / 2)
    expected = [[0, 1, 2, 0], [1, 0, 1, 0], [2, 1, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(right_angles, expected, atol=1e-7)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=14), st.integers(1, 8), st.integers(0, 1000)
)
def test_both_are_unbiased_by_construction(sizes: list[int], k: int, seed: int) -> None:
    clients = toy_clients(sizes, frozenset())
    similar = by_similarity(sizes, k)
    rows = np.random.default_rng(seed).standard_normal((len(sizes), 2)).tolist()
    similar.observe(1, toy_cohort(list(range(len(sizes))), sizes, rows), SERVER)
    for selector in (by_size(sizes, k), similar):
        r = selector.distributions(clients)
        np.testing.assert_allclose(r.sum(1), 1, atol=1e-7)
        np.testing.assert_allclose(r.sum(0), k * np.array(sizes) / sum(sizes), atol=1e-7)
        selection = selector.select(1, clients, np.random.default_rng(seed))
        assert selection.weights is not None
        assert selection.weights.sum() == pytest.approx(1)


def test_ward_on_rows_takes_the_table_as_points() -> None:
    """0, 1 and 3 on a line: the first two are 1 apart, their rows (0, 1, 3) and (1, 0, 2)
    sqrt(3)."""
    table = np.array([[0.0, 1, 3], [1, 0, 2], [3, 2, 0]])
    assert ward_linkage(table)[0].tolist() == [0, 1, 1, 2]
    assert ward_linkage(table, "rows")[0] == pytest.approx([0, 1, np.sqrt(3), 2])
    assert ward_linkage(table[:1, :1], "rows").shape == ward_linkage(table[:1, :1]).shape == (0, 4)


LINE = [[x, 0.0] for x in (0, 6, 10, 13, 20, 21)]


@pytest.mark.parametrize(
    ("distance", "ward_on", "updates", "groups"),
    [
        (
            "cosine",
            "distances",
            [[1, 0], [0, 1], [-1, 0.1], [1, 0.1], [0.1, 1], [-1, 0]],
            {(0, 3), (1, 4), (2, 5)},
        ),
        # which three are alike depends on the reading
        ("l2", "distances", LINE, {(2, 3, 4), (0, 1, 5)}),
        ("l2", "rows", LINE, {(1, 2, 3), (0, 4, 5)}),
    ],
)
def test_like_updates_share_a_distribution(
    distance: str, ward_on: str, updates: Any, groups: set[Any]
) -> None:
    selector = by_similarity([1] * 6, len(groups), distance, ward_on)
    clients = toy_clients([1] * 6, frozenset())
    before_any_update = selector.distributions(clients)
    np.testing.assert_allclose(before_any_update.sum(0), len(groups) / 6)
    selector.observe(1, toy_cohort(list(range(6)), [1] * 6, updates), SERVER)
    assert {tuple(np.flatnonzero(row)) for row in selector.distributions(clients)} == groups


@pytest.mark.parametrize("distance", ["cosine", "l1", "l2"])
def test_products_kept_row_by_row_equal_those_of_all(distance: Any) -> None:
    sizes = [1] * 8
    selector, random = by_similarity(sizes, 3, distance), np.random.default_rng(0)
    for t in range(6):
        ids = np.sort(random.choice(8, 3, replace=False))
        selector.observe(
            t, toy_cohort(ids.tolist(), [1] * 3, random.standard_normal((3, 2)).tolist()), SERVER
        )
    assert selector.updates is not None
    whole = by_similarity(sizes, 3, distance)
    whole.updates, whole.products = selector.updates, inner_products([selector.updates])
    np.testing.assert_allclose(
        selector._distances(np.arange(8)), whole._distances(np.arange(8)), atol=1e-6
    )


@pytest.mark.parametrize("distance", ["cosine", "l2"])
def test_updates_whose_squares_overflow_float32_are_far_and_nothing_breaks(
    distance: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of many long vectors are float32, in which the squares of clients 2, 3 and 4 are
    infinite."""
    monkeypatch.setattr("fedsim.selectors.similarity.MAX_FLOAT64_PRODUCTS", 0)
    selector = by_similarity([1] * 6, 2, distance)
    points = [[1.0, 0], [2.0, 0], [1e20, 0], [1e20, 1e20], [-1e20, 0], [3.0, 0.1]]
    selector.observe(1, toy_cohort(list(range(6)), [1] * 6, points), SERVER)
    apart = selector._distances(np.arange(6))
    assert np.isfinite(apart).all()
    assert apart[2:5, [0, 1, 5]].min() > apart[np.ix_([0, 1, 5], [0, 1, 5])].max()
    rows = selector.distributions(toy_clients([1] * 6, frozenset()))
    np.testing.assert_allclose(rows.sum(1), 1)


def test_a_running_sum_gives_the_bits_of_exact_ones() -> None:
    """Against the definition, which adds up a row of N numbers before and after each client."""
    rng = np.random.default_rng(0)
    for num, count in ((300, 7), (50, 20), (9, 3)):
        sizes = rng.integers(1, 40, num).astype(float)
        masses = np.minimum(count * sizes / sizes.sum(), 1.0)
        start = np.zeros((count, num))
        start[0, 0] = start[2, 1] = 0.4
        order, expected, row = rng.permutation(num), start.copy(), 0
        for client in order:
            left = masses[client]
            while left > 1e-9 and row < count:
                poured = max(min(1 - expected[row].sum(), left), 0)
                expected[row, client] += poured
                left -= poured
                row += int(expected[row].sum() >= 1 - 1e-9)
        assert np.array_equal(fill_bins(start.copy(), masses, order), expected)


def test_clusters_are_the_largest_within_a_mass_of_one() -> None:
    points = np.array([0.0, 0.1, 5.0, 5.1, 5.2])
    tree = ward_linkage(np.abs(points[:, None] - points[None]))
    clusters = clusters_within_capacity(tree, np.full(5, 0.4))
    assert sorted(map(tuple, clusters)) in ([(0, 1), (2,), (3, 4)], [(0, 1), (2, 3), (4,)])
    assert [tuple(c) for c in clusters_within_capacity(tree, np.full(5, 0.2))] == [(0, 1, 2, 3, 4)]
    assert len(set(cut_tree(tree, 2))) == 2


# --- HiCS ---


def hics(n: int = 6, k: int = 2, num_rounds: int = 100, **changes: Any) -> HiCS:
    """Return `selector=hics` for n clients of one sample."""
    return shipped("hics", toy_population([1] * n, k, num_rounds), **changes)


def cohort_of(delta: dict[str, torch.Tensor]) -> Cohort:
    """Return a cohort of clients 0, 1, ... with these updates by tensor."""
    num = len(next(iter(delta.values())))
    ones = np.ones(num, np.int64)
    start = {name: tensor[0] * 0 for name, tensor in delta.items()}
    return Cohort(np.arange(num), ones, start, delta, None, None, ones, list(delta))


def cohort(biases: list[list[float]]) -> Cohort:
    """Return a cohort with these updates of the output layer's bias.

    The update of its weight is the bias times (1, 2, 3), whose mean is 2.
    """
    bias = torch.tensor(biases)
    weight = bias[:, :, None] * torch.tensor([1.0, 2, 3])
    hidden = torch.zeros(len(biases), 3, 2)
    return cohort_of({"hidden.weight": hidden, "out.weight": weight, "out.bias": bias})


EVEN, ODD = [0.001, 0.001], [0.1, -0.1]
"""Updates of the bias with entropies ln 2 and, at a temperature of 0.0025, about 0."""


def test_entropies_by_hand() -> None:
    assert entropy(np.full(10, 0.1)) == pytest.approx(np.log(10))
    assert entropy(np.array([1.0, 0.0])) == 0
    selector = hics(2)
    selector.observe(1, cohort([EVEN, ODD]), SERVER)
    assert selector.entropy == pytest.approx([np.log(2), 0], abs=1e-9)


@pytest.mark.parametrize(("kept", "expected"), [("latest", 0.0), ("first", np.log(2))])
def test_a_first_update_may_be_kept_for_the_whole_run(kept: str, expected: float) -> None:
    selector = hics(2, 1, kept_update=kept)
    selector.observe(1, cohort([EVEN]), SERVER)
    before = selector.state_dict()["updates"]
    selector.observe(2, cohort([ODD, [0.2, 0.1]]), SERVER)
    assert selector.entropy[0] == pytest.approx(expected, abs=1e-9)
    assert selector.updates is not None
    assert torch.equal(selector.updates[0], before[0]) == (kept == "first")
    assert selector.updates[1].any()
    assert selector.seen.all()


@pytest.mark.parametrize("source", ["bias", "weight"])
def test_entropies_and_distances_by_scipy_and_scikit_learn(source: str) -> None:
    """arccos of the cosine of the output layer's updates, weights and bias, + 10 |H_i - H_j|."""
    n = 8
    random = np.random.default_rng(0)
    hidden = random.standard_normal((n, 3, 2))
    weight = random.standard_normal((n, 5, 3)) / 100
    bias = random.standard_normal((n, 5)) / 100
    selector = hics(n, source=source, temperature=0.01)
    delta = {"hidden.weight": hidden, "out.weight": weight, "out.bias": bias}
    tensors = {name: torch.tensor(values) for name, values in delta.items()}
    selector.observe(1, cohort_of(tensors), SERVER)
    by_class = bias if source == "bias" else weight.mean(2)
    entropies = stats.entropy(scipy_softmax(by_class / 0.01, axis=1), axis=1)
    assert selector.entropy == pytest.approx(entropies)
    layer = np.concatenate([weight.reshape(n, -1), bias], axis=1)
    angles = np.arccos(cosine_similarity(layer).clip(-1, 1))
    np.fill_diagonal(angles, 0)
    expected = angles + 10 * np.abs(entropies[:, None] - entropies[None])
    assert selector._distances(np.arange(n)) == pytest.approx(expected)


def test_the_output_layer_and_both_sources() -> None:
    both = cohort([[1.0, -1.0]])
    assert output_layer(both) == ["out.weight", "out.bias"]
    assert class_updates(both, output_layer(both), "bias").tolist() == [[1, -1]]
    assert class_updates(both, output_layer(both), "weight").tolist() == [[2, -2]]
    with pytest.raises(
        FedsimError,
        match=r"selector\.source=bias: the model's output layer has no bias; set weight",
    ):
        class_updates(both, ["out.weight"], "bias")


@pytest.mark.parametrize(("gamma", "t", "gamma_t"), [(0.0, 2, 0.0), (4.0, 1, 4.0), (4.0, 2, 2.0)])
def test_balanced_clusters_are_preferred_by_a_gamma_that_falls(
    gamma: float, t: int, gamma_t: float
) -> None:
    """T = 2: gamma_1 = 4 and gamma_2 = 2. One cluster has five clients with entropies of about 0,
    the other one client with ln 2. A cluster's probability is exp(gamma_t H) / sum."""
    selector = hics(6, 1, num_rounds=2, temperature=0.1, gamma=gamma, num_clusters=2)
    selector.observe(1, cohort([[1, -1]] * 5 + [[0, 0]]), SERVER)
    gap = np.log(2) - selector.entropy[0]
    expected = 1 / (1 + np.exp(-gamma_t * gap))
    assert chances(selector, round=t)[5] == pytest.approx(expected, abs=0.03)


def clusters(selector: HiCS, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the clusters, by client, from which a selector draws in round 2."""
    labels: list[Any] = []

    def watched(tree: Any, count: int) -> Any:
        labels.append(cut_tree(tree, count))
        return labels[0]

    monkeypatch.setattr(hics_module, "cut_tree", watched)
    picked(selector, 2)
    return labels[0].tolist()


@pytest.mark.parametrize(("num_clusters", "expected"), [(None, 2), (1, 1), (3, 3)])
def test_clusters_are_k_or_a_given_number(
    num_clusters: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    selector = hics(6, 2, num_clusters=num_clusters)
    biases = [[1, -1], [1, -0.9], [-1, 1], [-1, 0.9], [0, 0.1], [0, 0.2]]
    selector.observe(1, cohort(biases), SERVER)
    assert len(set(clusters(selector, monkeypatch))) == expected


@pytest.mark.filterwarnings("ignore:The symmetric non-negative hollow observation matrix")
def test_ward_on_rows_builds_the_tree_of_the_published_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal directions, entropies 0, 6, 10, 13, 20 and 21: the distances of points on a line. The
    published code hands the matrix of distances to scikit-learn."""
    line = np.array([0.0, 6, 10, 13, 20, 21])
    table = np.abs(line[:, None] - line[None])
    theirs = AgglomerativeClustering(3, linkage="ward").fit_predict(table)
    groups = {}
    for ward_on in ("distances", "rows"):
        selector = hics(6, 2, num_clusters=3, ward_on=ward_on, entropy_weight=1.0)
        selector.observe(1, cohort([[1, 1]] * 6), SERVER)
        selector.entropy[:] = line
        groups[ward_on] = members(clusters(selector, monkeypatch))
    assert groups["rows"] == members(theirs.tolist())
    assert groups["rows"] != groups["distances"]


def members(labels: list[int]) -> set[tuple[int, ...]]:
    return {tuple(np.flatnonzero(np.array(labels) == label)) for label in set(labels)}


@pytest.mark.parametrize(
    ("fallback", "variance", "falls"),
    [
        ("never", 0.1, False),
        ("below", 0.1, False),
        ("above", 0.1, True),
        ("below", 0.2, True),
        ("above", 0.2, False),
    ],
)
def test_the_fallback_draws_one_client_from_each_half(
    fallback: str, variance: float, falls: bool
) -> None:
    """Entropies ln 2 and about 0, half of the clients each: variance 0.12. HiCS prefers the
    balanced half e^69 to 1."""
    selector = hics(
        6, 2, gamma=100.0, temperature=0.1, fallback=fallback, fallback_variance=variance
    )
    selector.observe(1, cohort([[1, -1]] * 3 + [[0.001, 0.001]] * 3), SERVER)
    assert selector.entropy.var() == pytest.approx(0.12, abs=0.001)
    assert selector.adaptive == (fallback != "never")
    for s in range(20):
        selection = selection_of(selector, 2, s)
        balanced = int((selection.ids >= 3).sum())
        assert balanced == (1 if falls else 2)
        assert (selection.weights is None) != falls
        assert selection.weights is None or selection.weights.tolist() == [0.5, 0.5]
        assert np.flatnonzero(selector.last_tried == 2).tolist() == selection.ids.tolist()
        selector.last_tried[:] = 0
