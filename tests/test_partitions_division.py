"""The division between clients and server: every sample has one place and its own random stream."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.rng import Purpose, Streams
from fedsim.partitions.base import Indices, Labelled, Partition
from fedsim.partitions.division import Division, ServerSplit, divide
from fedsim.partitions.iid import IID
from tests.partition_toys import balanced, build, histograms, labelled, lists, sizes

DATA = balanced(60)


def take(validation: float = 0.0, public: int = 0, stratified: bool = False) -> ServerSplit:
    """Return a server that takes a validation set (a share) and a public set (a number)."""
    return ServerSplit(
        validation_fraction=validation, public_samples=public, public_stratified=stratified
    )


def divide_blocks(server: ServerSplit, holdout: float = 0.0) -> Division:
    return divide(DATA, Blocks(), 5, Streams(3), server, holdout)


def divide_iid(
    server: ServerSplit, num_clients: int = 7, holdout: float = 0.0, seed: int = 0
) -> Division:
    return divide(DATA, IID(), num_clients, Streams(seed), server, holdout)


class Blocks(Partition):
    """A partition into consecutive blocks, which remembers a number that it draws."""

    drawn = 0

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        self.drawn = int(rng.integers(2**60))
        return np.array_split(np.arange(len(data.labels)), num_clients)


# --- the server's samples and the clients' held-out samples --------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.floats(0, 0.5),
    st.integers(0, 200),
    st.booleans(),
    st.floats(0, 0.99),
    st.integers(1, 40),
    st.integers(0, 99),
)
def test_every_sample_has_one_place(
    validation: float, public: int, stratified: bool, holdout: float, num_clients: int, seed: int
) -> None:
    server = take(validation, public, stratified)
    division = divide_iid(server, num_clients, holdout, seed)
    positions = [*division.train, *division.holdout, division.validation, division.public]
    assert sorted(np.concatenate(positions)) == list(range(600))
    assert len(division.validation) == round(validation * 600)
    assert len(division.public) == public
    assert division.sizes.min() >= 1
    assert np.array_equal(division.histograms, histograms(DATA, division.train))
    assert np.array_equal(division.sizes, division.histograms.sum(1))
    assert divide_iid(server, num_clients, holdout, seed).hash == division.hash


def test_a_stratified_public_set_has_its_share_of_every_class_in_random_order() -> None:
    """The validation set leaves 55 or 56 samples of a class, whose quotas of 60 are about 6."""
    labels = DATA.labels[divide_iid(take(0.0775, 60, stratified=True)).public]
    assert np.bincount(labels).tolist() == [6] * 10
    assert (np.diff(labels) < 0).any()


@pytest.mark.parametrize(
    ("share", "counts"),
    [
        (0.0775, [5] * 6 + [4] * 4),  # 46.5 of 600 samples are rounded to the even number 46
        (0.0799, [5] * 8 + [4] * 2),  # 47.94 samples are rounded to 48
    ],
)
def test_the_validation_set_has_its_share_of_every_class(share: float, counts: list[int]) -> None:
    validation = divide_iid(take(share)).validation
    assert np.bincount(DATA.labels[validation]).tolist() == counts


def test_the_validation_set_does_not_depend_on_the_public_set() -> None:
    without = divide_iid(take(0.1)).validation
    assert divide_iid(take(0.1, 90)).validation.tolist() == without.tolist()


def test_the_server_must_leave_one_sample() -> None:
    assert divide_iid(take(0.5, 299), num_clients=1).sizes.tolist() == [1]
    values = r"server\.validation_fraction=0\.5, server\.public_samples=300"
    rule = rf"{values}: take 300 and 300 of 600 .* leave none .* lower one of them"
    with pytest.raises(DataError, match=rule):
        divide_iid(take(0.5, 300), num_clients=1)


@pytest.mark.parametrize(
    ("validation", "public", "rule"),
    [
        (1.0, 0, r"validation_fraction=1\.0: must lie in \[0, 1\)"),
        (float("nan"), 0, "validation_fraction=nan"),
        (0.0, -1, "public_samples=-1: must be"),
    ],
)
def test_a_server_split_out_of_range_is_rejected(validation: float, public: int, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        take(validation, public)


@pytest.mark.parametrize("num_samples", [1, 2, 61])
def test_every_client_holds_out_its_share_but_keeps_one_sample(num_samples: int) -> None:
    division = divide(labelled(num_samples * 10), IID(), 10, Streams(0), take(), 0.9)
    num_held_out = min(round(0.9 * num_samples), num_samples - 1)
    assert sizes(division.holdout) == [num_held_out] * 10
    assert sizes(division.train) == [num_samples - num_held_out] * 10


def test_owners_follow_their_samples_past_the_servers_split() -> None:
    owners = default_rng(1).integers(8, size=600)
    data = Labelled(DATA.labels, 10, owners)
    partition = build("natural", min_samples=1)
    division = divide(data, partition, 8, Streams(0), take(0.2, 30), 0.1)
    for client in range(8):
        assert set(owners[division.train[client]]) == {client}
        assert set(owners[division.holdout[client]]) == {client}
    num_held = division.sizes.sum() + sum(sizes(division.holdout))
    assert num_held == 600 - 120 - 30


# --- saved divisions -----------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "partition.npz"
    path.write_bytes(divide_iid(take(0.1, 20), holdout=0.3).to_bytes())
    return path


def test_a_saved_division_can_be_loaded(saved: Path) -> None:
    division = divide_iid(take(0.1, 20), holdout=0.3)
    loaded = Division.load(saved)
    assert loaded.hash == division.hash
    assert lists(loaded.train) == lists(division.train)


def test_a_changed_division_is_rejected(saved: Path) -> None:
    with np.load(saved) as file:
        arrays = dict(file)
    arrays["train"] = arrays["train"][::-1]
    np.savez(saved, **arrays)
    with pytest.raises(DataError, match="does not match its hash"):
        Division.load(saved)


def test_a_damaged_division_is_rejected(saved: Path) -> None:
    sound = saved.read_bytes()
    half = sound[: len(sound) // 2]
    zeroed = sound[:300] + bytes(50) + sound[350:]
    for damaged in (b"", b"<html>", half, zeroed):
        saved.write_bytes(damaged)
        with pytest.raises(DataError, match=r"partition\.npz: cannot be read as a saved partition"):
            Division.load(saved)


def test_the_hash_differs_if_the_same_numbers_lie_in_other_arrays() -> None:
    clients = ([np.arange(5)], [np.arange(0)])
    counts = np.zeros((1, 2), np.int64)
    public = Division(*clients, np.arange(0), np.arange(3), counts)
    validation = Division(*clients, np.arange(3), np.arange(0), counts)
    assert public.hash != validation.hash


# --- partitions of users -------------------------------------------------------------------------


class Fixed(Partition):
    """A partition that returns the `parts` of its constructor."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> Any:
        return self.parts


def divide_fixed(parts: Any) -> Division:
    return divide(DATA, Fixed(parts), 2, Streams(0), take(), 0.0)


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ([[0, 1], [1, 2]], "2 arrays of 4 positions, 3 of them different"),
        ([[0, 1]], "it returned 1 arrays"),
        ([[0], [600]], "2 positions, 1 of them different and in that range"),
        ([[0], [-1]], "2 positions, 1 of them different and in that range"),
        ([[0.0], [1.0]], r"it returned one of float64 with the shape \(1,\)"),
        ([[0], [[1, 2]]], r"it returned one of int64 with the shape \(1, 2\)"),
        ([[True], [False]], "it returned one of bool"),
        (None, "it returned one of object"),
    ],
)
def test_a_users_partition_that_breaks_the_rule_is_rejected(parts: Any, fault: str) -> None:
    with pytest.raises(DataError, match=rf"partition: Fixed\.split must return 2 arrays .*{fault}"):
        divide_fixed(parts)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([np.arange(5, dtype=np.uint16), []], [[0, 1, 2, 3, 4], []]),
        (np.arange(6).reshape(2, 3), [[0, 1, 2], [3, 4, 5]]),
    ],
)
def test_parts_may_be_any_integers_or_the_rows_of_an_array(
    parts: Any, expected: list[list[int]]
) -> None:
    division = divide_fixed(parts)
    assert lists(division.train) == expected
    assert all(part.dtype == np.int64 for part in division.train)


# --- streams -------------------------------------------------------------------------------------


def test_every_client_holds_out_by_its_own_stream() -> None:
    """A client with 120 samples shuffles them and holds out the first 30."""
    division = divide_blocks(take(), holdout=0.25)
    for client in range(5):
        block = np.arange(120 * client, 120 * (client + 1))
        shuffled = Streams(3).generator(Purpose.HOLDOUT, client).permutation(block)
        assert division.holdout[client].tolist() == shuffled[:30].tolist()
        assert division.train[client].tolist() == shuffled[30:].tolist()


def test_the_partition_draws_from_its_own_stream() -> None:
    partition = Blocks()
    divide(DATA, partition, 5, Streams(3), take(0.1, 45), 0.0)
    assert partition.drawn == Streams(3).generator(Purpose.PARTITION).integers(2**60)


def test_the_server_draws_from_its_own_stream() -> None:
    """It takes the first 6 of each class to validate, and the first 45 of the rest as public."""
    division = divide_blocks(take(0.1, 45))
    order = Streams(3).generator(Purpose.SERVER_SPLIT).permutation(600)
    by_class = [order[DATA.labels[order] == label] for label in range(10)]
    validation = np.concatenate([positions[:6] for positions in by_class])
    assert division.validation.tolist() == sorted(validation)
    public = order[~np.isin(order, validation)][:45]
    assert division.public.tolist() == public.tolist()
    remaining = np.concatenate(division.train)
    assert remaining.tolist() == sorted(remaining)


@pytest.mark.parametrize("purpose", Purpose)
def test_partition_and_init_seeds_are_for_their_purposes_only(purpose: Purpose) -> None:
    seeds = {Purpose.PARTITION: 7, Purpose.SERVER_SPLIT: 7, Purpose.HOLDOUT: 7, Purpose.INIT: 8}
    key = Streams(1, partition_seed=7, init_seed=8).key(purpose, 2)
    assert key == Streams(seeds.get(purpose, 1)).key(purpose, 2)


def test_purposes_have_the_numbers_that_published_results_were_made_with() -> None:
    numbers = {purpose.name: int(purpose) for purpose in Purpose}
    assert numbers == {
        "PARTITION": 1,
        "INIT": 2,
        "SELECT": 3,
        "TRAIN": 4,
        "SKETCH": 5,
        "AVAILABILITY": 6,
        "DROPOUT": 7,
        "LOSS_BATCH": 8,
        "SERVER_SPLIT": 9,
        "HOLDOUT": 10,
        "DEVICES": 21,
        "DEVICE_VARIATION": 22,
        "ARRIVAL_ORDER": 23,
        "PARTIAL_WORK": 24,
        "LOST_CLIENTS": 25,
        "IMPERFECT": 31,
        "LABEL_NOISE": 32,
        "RANDOM_UPDATE": 33,
        "PRIVACY": 34,
        "AUGMENT": 41,
        "REPLAY": 51,
    }
