"""Partitions of every kind: disjoint, seeded, and distributed as they say."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.core.errors import ConfigError, DataError
from fedsim.partitions.base import Labelled, largest_remainder
from tests.partition_toys import CHOICES, SMALL, balanced, build, histograms, skew, split


@pytest.mark.parametrize("choice", CHOICES)
def test_parts_are_disjoint_seeded_and_within_the_data(choice: str) -> None:
    data = balanced(120)
    one, again, other = (split(choice, data, 50, seed, **SMALL.get(choice, {})) for seed in (0, 0, 1))
    everything = np.concatenate(one)
    assert len(one) == 50
    assert len(np.unique(everything)) == len(everything)
    assert everything.min() >= 0
    assert everything.max() < len(data.labels)
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("choice", [c for c in CHOICES if not c.startswith(("shards", "natural"))])
def test_all_samples_are_used(choice: str) -> None:
    data = balanced(117)
    assert len(np.concatenate(split(choice, data, 51, **SMALL.get(choice, {})))) == 1170


@pytest.mark.parametrize(
    ("choice", "alphas"),
    [
        ("dirichlet_class", (0.05, 0.5, 5.0, 500.0)),
        ("dirichlet_client", (0.05, 0.5, 5.0, 500.0)),
        ("dirichlet_qp", (0.2, 2.0, 20.0, 2000.0)),
    ],
)
def test_heterogeneity_falls_as_alpha_grows(choice: str, alphas: tuple[float, ...]) -> None:
    data = balanced(200)
    extra = {"min_size": 0} if choice == "dirichlet_class" else {}
    skews = [
        np.mean([skew(data, split(choice, data, 40, seed, alpha=a, **extra)) for seed in range(3)]) for a in alphas
    ]
    assert all(a > b + 0.02 for a, b in itertools.pairwise(skews)), skews


def test_dirichlet_client_has_equal_sizes_and_dirichlet_class_respects_its_minimum() -> None:
    data = balanced(100)
    assert {len(p) for p in split("dirichlet_client", data, 30)} == {33, 34}
    assert min(len(p) for p in split("dirichlet_class", data, 10, alpha=0.1, min_size=20)) >= 20
    with pytest.raises(DataError, match=r"partition\.min_size=90: not reached .* alpha=0\.1"):
        split("dirichlet_class", data, 10, alpha=0.1, min_size=90, max_tries=3)


class Scripted:
    """A generator that shuffles nothing and whose Dirichlet draws are given."""

    def __init__(self, *draws: list[float]) -> None:
        self.draws = iter(draws)

    def permutation(self, x: np.ndarray) -> np.ndarray:
        return x

    def dirichlet(self, alpha: np.ndarray) -> np.ndarray:
        return np.array(next(self.draws))


@pytest.mark.parametrize(
    ("balanced", "expected"), [(False, [[4, 2, 4], [0, 1, 0], [0, 1, 0]]), (True, [[4, 0, 0], [0, 2, 2], [0, 2, 2]])]
)
def test_balancing_gives_a_full_client_no_more_by_hand(balanced: bool, expected: list[list[int]]) -> None:
    """12 samples of 3 clients: after the first class client 0 holds 4 of 4. The last draw leaves the others nothing."""
    data = Labelled(np.repeat([0, 1, 2], 4), 3, None)
    rng: Any = Scripted([1.0, 0.0, 0.0], [0.5, 0.25, 0.25], [1.0, 0.0, 0.0])
    parts = build("dirichlet_class", balanced=balanced, min_size=0).split(data, 3, rng)
    assert histograms(data, parts).tolist() == expected


@pytest.mark.parametrize("seed", range(5))
def test_balanced_clients_had_room_before_the_last_class_they_got(seed: int) -> None:
    data, n = balanced(100), 20
    for on in (True, False):
        counts = histograms(data, split("dirichlet_class", data, n, seed, alpha=0.3, balanced=on, min_size=1))
        assert counts.sum() == len(data.labels)
        last = [np.flatnonzero(c)[-1] for c in counts]
        before = np.array([c[:i].sum() for c, i in zip(counts, last, strict=True)])
        assert (before < len(data.labels) / n).all() == on


def test_writers_with_too_few_samples_are_left_out() -> None:
    owners = np.repeat([7, 3, 5], [4, 9, 10])
    data = Labelled(np.zeros(23, np.int64), 1, owners)
    parts = split("natural", data, 2, min_samples=9)
    assert [owners[p].tolist() for p in parts] == [[3] * 9, [5] * 10]
    with pytest.raises(DataError, match=r"num_clients=3: only 2 of 3 owners have partition\.min_samples=9"):
        split("natural", data, 3, min_samples=9)


def test_quantity_skew_keeps_labels_and_varies_sizes() -> None:
    data = balanced(1000)
    even, uneven = (split("quantity_skew", data, 20, skew=s) for s in (0.01, 1.5))
    assert np.std([len(p) for p in even]) < 10 < 200 < np.std([len(p) for p in uneven])
    heavy, light = (
        np.max([len(p) for p in split("quantity_skew", data, 20, law="powerlaw", skew=s)]) for s in (1.0, 100.0)
    )
    assert heavy > 2 * light


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["lognormal", "powerlaw"]), st.sampled_from([0.001, 0.1, 1.0, 30.0, 1000.0]), st.integers(1, 20))
def test_quantity_skew_of_any_strength_uses_all_samples_and_keeps_the_minimum(
    law: str, strength: float, min_size: int
) -> None:
    parts = split("quantity_skew", balanced(50), 20, law=law, skew=strength, min_size=min_size)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(500))
    assert min(map(len, parts)) >= min_size


def test_an_extreme_skew_leaves_nearly_all_to_one_client() -> None:
    for law, strength in (("lognormal", 1000.0), ("powerlaw", 0.001)):
        sizes = sorted(len(p) for p in split("quantity_skew", balanced(50), 20, law=law, skew=strength))
        assert sizes == [1] * 19 + [481]


def test_natural_clients_are_owners() -> None:
    data = balanced(60)
    parts = split("natural", data, 40, min_samples=1)
    assert data.owners is not None
    owners = [np.unique(data.owners[p]) for p in parts]
    assert all(len(o) == 1 for o in owners)
    assert all(len(p) == (data.owners == o[0]).sum() for p, o in zip(parts, owners, strict=True))
    assert {len(p) for p in split("natural", data, 40, min_samples=5, cap=3)} == {3}
    first = split("natural", data, 40, min_samples=5, cap=3, keep="first")
    assert all(sorted(p) == np.flatnonzero(data.owners == data.owners[p[0]])[:3].tolist() for p in first)
    with pytest.raises(DataError, match="num_clients=70: only 60 of 60 owners"):
        split("natural", data, 70, min_samples=1)
    with pytest.raises(DataError, match=r"dataset\.client_column"):
        split("natural", Labelled(data.labels, 10), 3)


@pytest.mark.parametrize("choice", [c for c in CHOICES if c != "natural"])
def test_more_clients_than_samples_is_an_error(choice: str) -> None:
    with pytest.raises(DataError, match=r"num_clients=30: .* and there are 20; lower num_clients"):
        split(choice, balanced(2), 30)


@pytest.mark.parametrize(
    ("choice", "values"),
    [
        ("shards", {"shards_per_client": 0}),
        ("dirichlet_qp", {"alpha": 0.0}),
        ("dirichlet_class", {"alpha": -1.0}),
        ("dirichlet_client", {"alpha": float("inf")}),
        ("dirichlet_qp", {"retries": -1}),
        ("dirichlet_class", {"max_tries": 0}),
        ("quantity_skew", {"skew": 0.0}),
        ("quantity_skew", {"min_size": 0}),
        ("natural", {"min_samples": 0}),
        ("natural", {"cap": 0}),
    ],
)
def test_values_out_of_range_are_refused_with_their_key(choice: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"partition\.{next(iter(values))}=.* must (be|lie)"):
        build(choice, **values)


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=20), st.integers(0, 1000))
def test_largest_remainder_sums_and_stays_within_one_of_the_quota(shares: list[float], total: int) -> None:
    counts = largest_remainder(np.array(shares), total)
    assert counts.sum() == total
    assert (abs(counts - np.array(shares) / sum(shares) * total) < 1 + 1e-6).all()
