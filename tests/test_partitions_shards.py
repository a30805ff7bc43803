"""Partitions into shards: sizes and labels of each client."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.core.errors import DataError
from fedsim.partitions.base import Labelled
from tests.partition_toys import balanced, histograms, split


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 4), st.booleans(), st.sampled_from(["drop", "spread"]), st.integers(0, 99))
def test_shards_of_any_shape(num_clients: int, s: int, pure: bool, leftover: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(4, size=int(rng.integers(50, 200)))
    data = Labelled(labels, 4)
    if pure and num_clients * s < 4:
        with pytest.raises(DataError, match=r"partition\.pure=true"):
            split("shards", data, num_clients, seed, shards_per_client=s, pure=pure, leftover=leftover)
        return
    parts = split("shards", data, num_clients, seed, shards_per_client=s, pure=pure, leftover=leftover)
    everything = np.concatenate(parts)
    assert len(np.unique(everything)) == len(everything)
    if leftover == "spread":
        assert len(everything) == len(labels)
    if pure:
        assert all(len(np.unique(labels[p])) <= s for p in parts)
    elif leftover == "drop":
        assert {len(p) for p in parts} == {len(labels) // (num_clients * s) * s}


def test_one_shard_per_client_gives_one_label_each_and_n_over_10_clients_per_label() -> None:
    data = balanced(600)
    parts = split("shards", data, 100, shards_per_client=1)
    counts = histograms(data, parts)
    assert {len(p) for p in parts} == {60}
    assert ((counts > 0).sum(1) == 1).all()
    assert ((counts > 0).sum(0) == 10).all()


@pytest.mark.parametrize(("per_class", "size"), [(6000, 600), (5000, 500)])
@pytest.mark.parametrize("choice", ["shards_1", "shards_2"])
def test_shards_of_the_papers_have_their_sizes_and_labels(choice: str, per_class: int, size: int) -> None:
    """selectors.md 4.1: FMNIST 600 per client, CIFAR-10 500, as one shard or as two halves."""
    data = balanced(per_class)
    parts = split(choice, data, 100)
    assert {len(p) for p in parts} == {size}
    assert len(np.unique(np.concatenate(parts))) == 10 * per_class
    counts = histograms(data, parts)
    shards = int(choice[-1])
    assert set(counts.ravel()) == {0, size // shards, size}
    assert (counts > 0).sum(1).max() == shards


@given(st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_one_pure_shard_is_one_label_even_where_classes_are_uneven(seed: int) -> None:
    """As they are once the server has drawn its validation samples: plain shards then mix labels at the borders."""
    even = balanced(120)
    data = Labelled(even.labels[np.random.default_rng(seed).random(1200) < 0.95], 10)
    assert ((histograms(data, split("shards_1", data, 50, seed)) > 0).sum(1) == 1).all()
    assert ((histograms(data, split("shards", data, 50, seed, shards_per_client=1)) > 0).sum(1) > 1).any()


def test_two_shards_per_client_give_two_labels_or_rarely_one() -> None:
    """Both shards carry one label with probability 19 / 199 for 200 shards of 10 labels."""
    data = balanced(600)
    single = [(histograms(data, split("shards", data, 100, seed)) > 0).sum(1) == 1 for seed in range(30)]
    assert abs(np.mean(single) - 19 / 199) < 4 * np.sqrt(0.0955 * 0.9045 / 3000)


def test_a_shards_samples_are_in_random_order_inside_a_label() -> None:
    data = Labelled(np.zeros(100, np.int64), 1)
    parts = split("shards", data, 2, shards_per_client=1)
    assert not np.array_equal(np.sort(parts[0]), np.arange(50))
    assert not np.array_equal(np.sort(parts[0]), np.arange(50, 100))


def test_pure_shards_follow_the_class_sizes() -> None:
    data = Labelled(np.repeat([0, 1], [300, 100]), 2)
    counts = histograms(data, split("shards", data, 8, shards_per_client=1, pure=True))
    assert ((counts > 0).sum(0) == [6, 2]).all()
    assert set(counts.sum(1)) == {50}
