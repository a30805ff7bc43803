"""Partitions of every kind: disjoint, seeded, and distributed as they say."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.core.errors import ConfigError, DataError
from fedsim.partitions.base import Labelled
from tests.partition_toys import CHOICES, SMALL, balanced, build, histograms, split


@pytest.mark.parametrize("choice", CHOICES)
def test_parts_are_disjoint_seeded_and_within_the_data(choice: str) -> None:
    data = balanced(120)
    one, again, other = (
        split(choice, data, 50, seed, **SMALL.get(choice, {})) for seed in (0, 0, 1)
    )
    everything = np.concatenate(one)
    assert len(one) == 50
    assert len(np.unique(everything)) == len(everything)
    assert everything.min() >= 0
    assert everything.max() < len(data.labels)
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    if not choice.startswith(("shards", "natural")):
        assert (
            len(np.concatenate(split(choice, balanced(117), 51, **SMALL.get(choice, {})))) == 1170
        )
    if choice != "natural":
        with pytest.raises(
            DataError, match=r"num_clients=30: .* and there are 20; lower num_clients"
        ):
            split(choice, balanced(2), 30)


def test_dirichlet_client_has_equal_sizes_and_dirichlet_class_respects_its_minimum() -> None:
    data = balanced(100)
    assert {len(p) for p in split("dirichlet_client", data, 30)} == {33, 34}
    assert min(len(p) for p in split("dirichlet_class", data, 10, alpha=0.1, min_size=20)) >= 20
    with pytest.raises(DataError, match=r"partition\.min_size=90: not reached .* alpha=0\.1"):
        split("dirichlet_class", data, 10, alpha=0.1, min_size=90, max_tries=3)


def test_balancing_gives_a_full_client_no_more_by_hand() -> None:
    """12 samples of 3 clients: after the first class client 0 holds 4 of 4. The last draw leaves
    the others nothing."""
    data = Labelled(np.repeat([0, 1, 2], 4), 3, None)
    for is_balanced, expected in (
        (False, [[4, 2, 4], [0, 1, 0], [0, 1, 0]]),
        (True, [[4, 0, 0], [0, 2, 2], [0, 2, 2]]),
    ):
        draws = iter(np.array([[1.0, 0.0, 0.0], [0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]))
        rng: Any = SimpleNamespace(
            permutation=np.array, dirichlet=lambda alpha, draws=draws: next(draws)
        )
        parts = build("dirichlet_class", balanced=is_balanced, min_size=0).split(data, 3, rng)
        assert histograms(data, parts).tolist() == expected


@pytest.mark.parametrize("law", ["lognormal", "powerlaw"])
@pytest.mark.parametrize(
    ("strength", "min_size"), [(0.001, 1), (0.001, 7), (1.0, 20), (30.0, 1), (1000.0, 7)]
)
def test_quantity_skew_uses_all_samples_and_keeps_the_minimum(
    law: str, strength: float, min_size: int
) -> None:
    parts = split("quantity_skew", balanced(50), 20, law=law, skew=strength, min_size=min_size)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(500))
    assert min(map(len, parts)) >= min_size
    if (
        strength == {"lognormal": 1000.0, "powerlaw": 0.001}[law]
    ):  # which leaves nearly all to one client
        assert sorted(map(len, parts))[:-1] == [min_size] * 19


def test_natural_clients_are_owners() -> None:
    data = balanced(60)
    parts = split("natural", data, 40, min_samples=1)
    assert data.owners is not None
    owners = [np.unique(data.owners[p]) for p in parts]
    assert all(len(o) == 1 for o in owners)
    assert all(len(p) == (data.owners == o[0]).sum() for p, o in zip(parts, owners, strict=True))
    assert {len(p) for p in split("natural", data, 40, min_samples=5, cap=3)} == {3}
    first = split("natural", data, 40, min_samples=5, cap=3, keep="first")
    assert all(
        sorted(p) == np.flatnonzero(data.owners == data.owners[p[0]])[:3].tolist() for p in first
    )
    with pytest.raises(DataError, match="num_clients=70: only 60 of 60 owners"):
        split("natural", data, 70, min_samples=1)
    with pytest.raises(DataError, match=r"dataset\.client_column"):
        split("natural", Labelled(data.labels, 10), 3)


@pytest.mark.parametrize(
    ("choice", "key", "value"),
    [
        *(("shards", "shards_per_client", 0), ("natural", "min_samples", 0), ("natural", "cap", 0)),
        *(
            ("dirichlet_qp", "alpha", 0.0),
            ("dirichlet_class", "alpha", -1.0),
            ("dirichlet_qp", "retries", -1),
        ),
        *(("dirichlet_client", "alpha", float("inf")), ("dirichlet_class", "max_tries", 0)),
        *(("quantity_skew", "skew", 0.0), ("quantity_skew", "min_size", 0)),
    ],
)
def test_values_out_of_range_are_refused_with_their_key(
    choice: str, key: str, value: float
) -> None:
    with pytest.raises(ConfigError, match=rf"partition\.{key}=.* must (be|lie)"):
        build(choice, **{key: value})


# --- shards --------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from(["drop", "spread"]),
    st.integers(0, 99),
)
def test_shards_of_any_shape(
    num_clients: int, s: int, pure: bool, leftover: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(4, size=int(rng.integers(50, 200)))
    data = Labelled(labels, 4)
    values: dict[str, Any] = {"shards_per_client": s, "pure": pure, "leftover": leftover}
    if pure and num_clients * s < 4:
        with pytest.raises(DataError, match=r"partition\.pure=true"):
            split("shards", data, num_clients, seed, **values)
        return
    parts = split("shards", data, num_clients, seed, **values)
    everything = np.concatenate(parts)
    assert len(np.unique(everything)) == len(everything)
    if leftover == "spread":
        assert len(everything) == len(labels)
    if pure:
        assert all(len(np.unique(labels[p])) <= s for p in parts)
    elif leftover == "drop":
        assert {len(p) for p in parts} == {len(labels) // (num_clients * s) * s}


def test_a_rare_class_has_one_pure_shard_at_least() -> None:
    data = Labelled(np.repeat(np.arange(4), (1, 1, 1, 97)), 4)
    parts = split("shards", data, 4, shards_per_client=1, pure=True)
    assert sorted(len(part) for part in parts) == [1, 1, 1, 97]


@pytest.mark.parametrize(("per_class", "size"), [(6000, 600), (5000, 500)])
@pytest.mark.parametrize("choice", ["shards_1", "shards_2"])
def test_shards_of_the_papers_have_their_sizes_and_labels(
    choice: str, per_class: int, size: int
) -> None:
    """selectors.md 4.1: FMNIST 600 per client, CIFAR-10 500, as one shard or as two halves."""
    data = balanced(per_class)
    parts = split(choice, data, 100)
    assert {len(p) for p in parts} == {size}
    assert len(np.unique(np.concatenate(parts))) == 10 * per_class
    counts = histograms(data, parts)
    shards = int(choice[-1])
    assert set(counts.ravel()) == {0, size // shards, size}
    assert (counts > 0).sum(1).max() == shards
