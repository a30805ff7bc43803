"""Partitions of every kind: parts are disjoint, depend on the seed, and have the right sizes."""

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from fedsim.core.errors import ConfigError, DataError
from fedsim.partitions.base import Labelled
from tests.partition_toys import (
    CHOICES,
    balanced,
    build,
    histograms,
    labelled,
    lists,
    sizes,
    split,
)

FOR_SMALL_CLIENTS: dict[str, dict[str, Any]] = {
    "dirichlet_class": {"min_size": 1},
    "dirichlet_01": {"min_size": 1},
    "dirichlet_05": {"min_size": 1},
    "natural": {"min_samples": 1},
}


def split_small(choice: str, per_class: int, num_clients: int, seed: int = 0) -> list[np.ndarray]:
    """Split ten balanced classes, and let clients have a single sample."""
    values = FOR_SMALL_CLIENTS.get(choice, {})
    return split(choice, balanced(per_class), num_clients, seed, **values)


def require_disjoint(parts: list[np.ndarray], num_samples: int) -> int:
    """Check that no position occurs twice or is out of range; return how many there are."""
    positions = np.concatenate(parts)
    assert len(np.unique(positions)) == len(positions)
    assert positions.min() >= 0
    assert positions.max() < num_samples
    return len(positions)


@pytest.mark.parametrize("choice", CHOICES)
def test_parts_are_disjoint_and_depend_on_the_seed(choice: str) -> None:
    parts = split_small(choice, 120, 50)
    assert len(parts) == 50
    require_disjoint(parts, 1200)
    assert lists(split_small(choice, 120, 50)) == lists(parts)
    assert lists(split_small(choice, 120, 50, seed=1)) != lists(parts)


@pytest.mark.parametrize(
    "choice", [name for name in CHOICES if not name.startswith(("shards", "natural"))]
)
def test_all_samples_are_used(choice: str) -> None:
    parts = split_small(choice, 117, 51)
    assert require_disjoint(parts, 1170) == 1170


@pytest.mark.parametrize("choice", [name for name in CHOICES if name != "natural"])
def test_more_clients_than_samples_are_rejected(choice: str) -> None:
    with pytest.raises(DataError, match=r"num_clients=30: .* and there are 20; lower num_clients"):
        split(choice, balanced(2), 30)


@pytest.mark.parametrize(
    ("choice", "key", "value"),
    [
        ("shards", "shards_per_client", 0),
        ("natural", "min_samples", 0),
        ("natural", "cap", 0),
        ("dirichlet_qp", "alpha", 0.0),
        ("dirichlet_qp", "retries", -1),
        ("dirichlet_class", "alpha", -1.0),
        ("dirichlet_class", "max_tries", 0),
        ("dirichlet_client", "alpha", float("inf")),
        ("quantity_skew", "skew", 0.0),
        ("quantity_skew", "min_size", 0),
    ],
)
def test_values_out_of_range_are_rejected_with_their_key(
    choice: str, key: str, value: float
) -> None:
    with pytest.raises(ConfigError, match=rf"partition\.{key}=.* must (be|lie)"):
        build(choice, **{key: value})


# --- Dirichlet -----------------------------------------------------------------------------------


def test_dirichlet_client_has_equal_sizes() -> None:
    assert set(sizes(split("dirichlet_client", balanced(100), 30))) == {33, 34}


@pytest.mark.parametrize(
    ("is_balanced", "expected"),
    [
        (False, [[4, 2, 4], [0, 1, 0], [0, 1, 0]]),
        # Client 0 is full with its 4 of 12 samples after class 0. The last draw gives it all of
        # class 2; as it gets none, the others share the class equally.
        (True, [[4, 0, 0], [0, 2, 2], [0, 2, 2]]),
    ],
)
def test_balancing_gives_a_full_client_no_more_samples(
    is_balanced: bool, expected: list[list[int]]
) -> None:
    data = labelled(4, 4, 4)
    draws = np.array([[1.0, 0.0, 0.0], [0.5, 0.25, 0.25], [1.0, 0.0, 0.0]])
    rng = Mock(wraps=default_rng(0), dirichlet=Mock(side_effect=draws))
    partition = build("dirichlet_class", balanced=is_balanced, min_size=0)
    assert histograms(data, partition.split(data, 3, rng)).tolist() == expected


# --- sizes and owners ----------------------------------------------------------------------------


@pytest.mark.parametrize("law", ["lognormal", "powerlaw"])
@pytest.mark.parametrize(
    ("skew", "min_size"), [(0.001, 1), (0.001, 7), (1.0, 20), (30.0, 1), (1000.0, 7)]
)
def test_quantity_skew_uses_all_samples_and_respects_the_minimum(
    law: str, skew: float, min_size: int
) -> None:
    parts = split("quantity_skew", balanced(50), 20, law=law, skew=skew, min_size=min_size)
    assert require_disjoint(parts, 500) == 500
    assert min(sizes(parts)) >= min_size


@pytest.mark.parametrize(("law", "skew"), [("lognormal", 1000.0), ("powerlaw", 0.001)])
def test_the_largest_skew_gives_one_client_all_but_the_minimum(law: str, skew: float) -> None:
    parts = split("quantity_skew", balanced(50), 20, law=law, skew=skew, min_size=7)
    assert sorted(sizes(parts)) == [7] * 19 + [500 - 19 * 7]


def test_natural_clients_are_owners_with_all_their_samples() -> None:
    data = balanced(60)
    assert data.owners is not None
    for part in split("natural", data, 40, min_samples=1):
        owner = data.owners[part[0]]
        assert sorted(part) == np.flatnonzero(data.owners == owner).tolist()


def test_natural_clients_may_be_capped_to_their_first_samples() -> None:
    data = balanced(60)
    assert data.owners is not None
    for part in split("natural", data, 40, min_samples=5, cap=3, keep="first"):
        owner = data.owners[part[0]]
        assert sorted(part) == np.flatnonzero(data.owners == owner)[:3].tolist()


def test_natural_clients_need_owners() -> None:
    with pytest.raises(DataError, match=r"dataset\.client_column"):
        split("natural", labelled(9), 3)


# --- shards --------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from(["drop", "spread"]),
    st.integers(0, 99),
)
def test_shards_of_any_shape(
    num_clients: int, per_client: int, pure: bool, leftover: str, seed: int
) -> None:
    rng = default_rng(seed)
    labels = rng.integers(4, size=int(rng.integers(50, 200)))
    data = Labelled(labels, 4)
    partition = build("shards", shards_per_client=per_client, pure=pure, leftover=leftover)
    num_shards = num_clients * per_client
    if pure and num_shards < 4:
        with pytest.raises(DataError, match=r"partition\.pure=true"):
            partition.split(data, num_clients, rng)
        return
    parts = partition.split(data, num_clients, rng)
    num_used = require_disjoint(parts, len(labels))
    if leftover == "spread":
        assert num_used == len(labels)
    if pure:
        assert ((histograms(data, parts) > 0).sum(1) <= per_client).all()
    elif leftover == "drop":
        assert set(sizes(parts)) == {len(labels) // num_shards * per_client}


@pytest.mark.parametrize(("per_class", "size"), [(6000, 600), (5000, 500)])
@pytest.mark.parametrize(("choice", "per_client"), [("shards_1", 1), ("shards_2", 2)])
def test_shards_of_the_papers_have_their_sizes_and_labels(
    choice: str, per_client: int, per_class: int, size: int
) -> None:
    """Each of 100 clients has 600 samples of FMNIST or 500 of CIFAR-10, as in FedCor and GPFL."""
    data = balanced(per_class)
    counts = histograms(data, split(choice, data, 100))
    assert set(counts.sum(1)) == {size}
    assert (counts.sum(0) == per_class).all()
    assert set(counts.ravel()) == {0, size // per_client, size}
    assert (counts > 0).sum(1).max() == per_client
