from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.selectors.clustered import (
    ClusteredBySimilarity,
    ClusteredBySize,
    angular_distances,
    clusters_within_capacity,
    fill_bins,
)
from fedsim.selectors.similarity import inner_products
from fedsim.selectors.tools import cut_tree, ward_linkage
from tests.toys import toy_clients, toy_cohort, toy_population

SERVER: Any = None


def by_size(sizes: list[int], k: int) -> ClusteredBySize:
    return ClusteredBySize(toy_population(sizes, k))


def by_similarity(
    sizes: list[int], k: int, distance: Any = "cosine", ward_on: Any = "distances"
) -> ClusteredBySimilarity:
    return ClusteredBySimilarity(toy_population(sizes, k), distance=distance, ward_on=ward_on)


def test_bins_and_angles_by_hand() -> None:
    poured = fill_bins(np.array([[0.7, 0, 0], [0.5, 0, 0]]), np.array([0, 0.5, 0.3]), np.array([1, 2]))
    np.testing.assert_allclose(poured, [[0.7, 0.3, 0], [0.5, 0.2, 0.3]])  # goes on in the next gap
    table = angular_distances(inner_products([torch.tensor([[1.0, 0], [0, 2], [-3, 0], [0, 0]])]))
    np.testing.assert_allclose(table[:3, :3], np.pi / 2 * np.array([[0, 1, 2], [1, 0, 1], [2, 1, 0]]), atol=1e-7)
    assert not table[3].any()
    sizes = [5, 3, 1, 1]
    rows = by_size(sizes, 2).distributions(toy_clients(sizes, frozenset()))
    np.testing.assert_allclose(rows, [[1, 0, 0, 0], [0, 0.6, 0.2, 0.2]])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=14), st.integers(1, 8), st.integers(0, 1000))
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
    """0, 1 and 3 on a line: the first two are 1 apart, their rows (0, 1, 3) and (1, 0, 2) sqrt(3)."""
    table = np.array([[0.0, 1, 3], [1, 0, 2], [3, 2, 0]])
    assert ward_linkage(table)[0].tolist() == [0, 1, 1, 2]
    assert ward_linkage(table, "rows")[0] == pytest.approx([0, 1, np.sqrt(3), 2])
    assert ward_linkage(table[:1, :1], "rows").shape == ward_linkage(table[:1, :1]).shape == (0, 4)


LINE = [[x, 0.0] for x in (0, 6, 10, 13, 20, 21)]


@pytest.mark.parametrize(
    ("distance", "ward_on", "updates", "groups"),
    [
        ("cosine", "distances", [[1, 0], [0, 1], [-1, 0.1], [1, 0.1], [0.1, 1], [-1, 0]], {(0, 3), (1, 4), (2, 5)}),
        ("l2", "distances", LINE, {(2, 3, 4), (0, 1, 5)}),  # which three are alike depends on the reading
        ("l2", "rows", LINE, {(1, 2, 3), (0, 4, 5)}),
    ],
)
def test_like_updates_share_a_distribution(distance: str, ward_on: str, updates: Any, groups: set[Any]) -> None:
    selector, clients = by_similarity([1] * 6, len(groups), distance, ward_on), toy_clients([1] * 6, frozenset())
    np.testing.assert_allclose(selector.distributions(clients).sum(0), len(groups) / 6)  # before any update
    selector.observe(1, toy_cohort(list(range(6)), [1] * 6, updates), SERVER)
    assert {tuple(np.flatnonzero(row)) for row in selector.distributions(clients)} == groups


@pytest.mark.parametrize("distance", ["cosine", "l1", "l2"])
def test_products_kept_row_by_row_equal_those_of_all(distance: Any) -> None:
    sizes = [1] * 8
    selector, random = by_similarity(sizes, 3, distance), np.random.default_rng(0)
    for t in range(6):
        ids = np.sort(random.choice(8, 3, replace=False))
        selector.observe(t, toy_cohort(ids.tolist(), [1] * 3, random.standard_normal((3, 2)).tolist()), SERVER)
    assert selector.updates is not None
    whole = by_similarity(sizes, 3, distance)
    whole.updates, whole.products = selector.updates, inner_products([selector.updates])
    np.testing.assert_allclose(selector._distances(np.arange(8)), whole._distances(np.arange(8)), atol=1e-6)


@pytest.mark.parametrize("distance", ["cosine", "l2"])
def test_updates_whose_squares_overflow_float32_are_far_and_nothing_breaks(
    distance: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of many long vectors are float32, in which the squares of clients 2, 3 and 4 are infinite."""
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
