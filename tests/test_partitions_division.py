"""Divisions between clients and server: every sample in one place, saved and read, each drawn by
streams of its own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.rng import Purpose, Streams
from fedsim.partitions.base import Indices, Labelled, Partition
from fedsim.partitions.division import Division, ServerSplit, divide
from fedsim.partitions.iid import IID, Natural

DATA = Labelled(np.random.default_rng(0).permutation(np.repeat(np.arange(10), 50)), 10)


def served(validation: float = 0.0, public: int = 0, stratified: bool = False) -> ServerSplit:
    return ServerSplit(
        validation_fraction=validation, public_samples=public, public_stratified=stratified
    )


NOTHING = served()


def division(
    server: ServerSplit = NOTHING, holdout: float = 0.0, seed: int = 0, **values: Any
) -> Division:
    return divide(DATA, IID(), 7, Streams(seed, **values), server, holdout)


def test_a_public_set_has_its_share_of_every_class_and_a_holdout_of_every_client() -> None:
    d = division(served(0.1, 60, stratified=True), holdout=0.2)
    rest = np.bincount(np.delete(DATA.labels, d.validation), minlength=10)
    assert (
        abs(np.bincount(DATA.labels[d.public], minlength=10) - rest / rest.sum() * 60) < 1
    ).all()
    assert all(
        len(h) == round(0.2 * (len(h) + len(t))) for t, h in zip(d.train, d.holdout, strict=True)
    )
    labels = DATA.labels[division(served(0, 100, stratified=True)).public]
    assert (np.bincount(labels) == 10).all()
    assert (np.diff(labels) < 0).any(), "they are ordered by label"
    d = divide(Labelled(np.arange(10), 10), IID(), 10, Streams(0), NOTHING, 0.9)
    assert [len(t) for t in d.train] == [1] * 10, "one sample is left to train on"


def test_the_server_cannot_keep_everything() -> None:
    with pytest.raises(
        DataError, match=r"take 50 and 450 of 500 training samples and leave none .* lower one"
    ):
        division(served(0.1, 450))


def test_another_public_set_leaves_validation_alone_and_seeds_are_their_own() -> None:
    small, large = (division(served(0.1, public)) for public in (0, 90))
    assert np.array_equal(small.validation, large.validation)
    assert division(seed=1, partition_seed=5).hash == division(seed=2, partition_seed=5).hash
    assert division(seed=1).hash != division(seed=2).hash


def test_a_saved_division_comes_back_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    d = division(served(0.1, 20), holdout=0.3)
    path, saved = tmp_path / "partition.npz", d.to_bytes()
    path.write_bytes(saved)
    again = Division.load(path)
    assert again.hash == d.hash
    assert all(np.array_equal(a, b) for a, b in zip(d.train, again.train, strict=True))
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["train"] = arrays["train"][::-1].copy()
    np.savez(path, **arrays)
    with pytest.raises(DataError, match="does not match its hash"):
        Division.load(path)
    for damaged in (
        b"",
        b"<html>",
        saved[: len(saved) // 2],
        saved[:300] + bytes(50) + saved[350:],
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"partition\.npz: cannot be read as a saved partition"):
            Division.load(path)


def test_a_server_may_leave_one_sample_and_no_less() -> None:
    assert divide(DATA, IID(), 1, Streams(0), served(0.5, 249), 0).sizes.tolist() == [1]
    rule = r"server\.validation_fraction=0\.5, server\.public_samples=250: take 250 and 250 of 500 .* lower one of them"
    with pytest.raises(DataError, match=rule):
        divide(DATA, IID(), 1, Streams(0), served(0.5, 250), 0)
    for value, told in ((1.0, r"=1\.0: must lie in \[0, 1\)"), (float("nan"), "=nan")):
        with pytest.raises(ConfigError, match=f"validation_fraction{told}"):
            served(value)
    with pytest.raises(ConfigError, match="public_samples=-1: must be"):
        served(0.0, -1)


@settings(max_examples=40, deadline=None)
@given(
    st.floats(0, 0.5),
    st.integers(0, 200),
    st.booleans(),
    st.floats(0, 0.99),
    st.integers(1, 40),
    st.integers(0, 99),
)
def test_every_sample_has_one_place_whatever_is_taken_out(
    validation: float, public: int, stratified: bool, holdout: float, num_clients: int, seed: int
) -> None:
    server = served(validation, public, stratified)
    d = divide(DATA, IID(), num_clients, Streams(seed), server, holdout)
    everything = np.concatenate([*d.train, *d.holdout, d.validation, d.public])
    assert np.array_equal(np.sort(everything), np.arange(500))
    assert (len(d.validation), len(d.public)) == (round(validation * 500), public)
    assert d.sizes.min() >= 1
    assert np.array_equal(d.histograms.sum(1), d.sizes)
    assert divide(DATA, IID(), num_clients, Streams(seed), server, holdout).hash == d.hash


def test_owners_follow_their_samples_past_the_servers_split() -> None:
    owners = np.random.default_rng(1).integers(8, size=500)
    data = Labelled(DATA.labels, 10, owners)
    d = divide(
        data, Natural(min_samples=1, cap=None, keep="random"), 8, Streams(0), served(0.2, 30), 0.1
    )
    held = [np.concatenate([t, h]) for t, h in zip(d.train, d.holdout, strict=True)]
    assert [set(owners[p]) for p in held] == [{i} for i in range(8)]
    assert len(np.concatenate(held)) == 500 - 100 - 30


class Given(Partition):
    """Returns what it is made with."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> Any:
        return self.parts


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ([[0, 1], [1, 2]], "2 arrays of 4 positions, 3 of them different"),
        ([[0, 1]], "it returned 1 arrays"),
        *(
            (parts, "2 positions, 1 of them different and in that range")
            for parts in ([[0], [500]], [[0], [-1]])
        ),
        ([[0.0], [1.0]], r"it returned one of float64 with the shape \(1,\)"),
        ([[0], [[1, 2]]], r"it returned one of int64 with the shape \(1, 2\)"),
        *(([[True], [False]], "it returned one of bool"), (None, "it returned one of object")),
    ],
)
def test_a_partition_of_ones_own_that_breaks_its_promise_is_refused(parts: Any, fault: str) -> None:
    with pytest.raises(DataError, match=rf"partition: Given\.split must return 2 arrays .*{fault}"):
        divide(DATA, Given(parts), 2, Streams(0), NOTHING, 0.0)


def test_parts_may_be_of_any_integers_and_the_rows_of_one_array() -> None:
    cases: list[tuple[Any, list[list[int]]]] = [
        (
            [np.arange(5, dtype=np.uint16), np.array([])],
            [[0, 1, 2, 3, 4], []],
        ),  # the empty one of floats
        (np.arange(6).reshape(2, 3), [[0, 1, 2], [3, 4, 5]]),
    ]
    for parts, expected in cases:
        found = divide(DATA, Given(parts), 2, Streams(0), NOTHING, 0.0)
        assert [part.tolist() for part in found.train] == expected
        assert [part.dtype for part in found.train] == [np.int64, np.int64]


# --- streams -------------------------------------------------------------------------------------------------------

BALANCED = Labelled(np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60)), 10)
SERVER = served(0.1, 45)


class Blocks(Partition):
    """Consecutive blocks, which keeps the number that it draws."""

    drawn = 0

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        self.drawn = int(rng.integers(2**60))
        return np.array_split(np.arange(len(data.labels)), num_clients)


def blocks(
    holdout: float = 0.25, server: ServerSplit = SERVER, seed: int = 3, **seeds: int
) -> Division:
    return divide(BALANCED, Blocks(), 5, Streams(seed, **seeds), server, holdout)


def test_a_client_holds_out_by_a_stream_of_its_own() -> None:
    """A permutation by (HOLDOUT, client), whoever else there is; the first quarter is held out."""
    d = blocks(server=NOTHING)
    for i in range(5):
        own = np.arange(120 * i, 120 * (i + 1))
        shuffled = Streams(3).generator(Purpose.HOLDOUT, i).permutation(own)
        assert d.holdout[i].tolist() == shuffled[:30].tolist()
        assert d.train[i].tolist() == shuffled[30:].tolist()


def test_partition_and_server_draw_from_their_own_streams() -> None:
    partition = Blocks()
    divide(BALANCED, partition, 5, Streams(3), SERVER, 0.0)
    assert partition.drawn == Streams(3).generator(Purpose.PARTITION).integers(2**60)
    order = Streams(3).generator(Purpose.SERVER_SPLIT).permutation(600)
    d = blocks()
    first = np.concatenate([order[BALANCED.labels[order] == c][:6] for c in range(10)])
    assert d.validation.tolist() == sorted(first)
    assert d.public.tolist() == [i for i in order if i not in set(first)][:45]
    rest = np.concatenate(blocks(holdout=0.0).train)
    assert rest.tolist() == sorted(rest)


def test_the_validation_set_has_its_share_of_every_class() -> None:
    assert np.bincount(BALANCED.labels[blocks().validation]).tolist() == [6] * 10
    assert (
        len(blocks(server=served(0.0775)).validation) == round(0.0775 * 600) == 46
    )  # 46.5, to the even number
    assert len(blocks(server=served(0.0799)).validation) == 48


def test_what_clients_train_on_is_what_histograms_count() -> None:
    d = blocks()
    for row, train in zip(d.histograms, d.train, strict=True):
        assert row.tolist() == np.bincount(BALANCED.labels[train], minlength=10).tolist()
    assert d.histograms.sum() == d.sizes.sum() == 600 - 60 - 45 - sum(map(len, d.holdout))


def test_the_partitions_seed_is_for_all_that_divides_and_all_else_is_by_the_runs_own_seed() -> None:
    for purpose in (Purpose.PARTITION, Purpose.SERVER_SPLIT, Purpose.HOLDOUT):
        assert Streams(1, partition_seed=7).key(purpose, 2) == Streams(7).key(purpose, 2)
        assert Streams(1, init_seed=7).key(purpose, 2) == Streams(1).key(purpose, 2)
    for purpose in (p for p in Purpose if p not in (1, 2, 9, 10)):
        assert Streams(1, partition_seed=7, init_seed=8).key(purpose, 2) == Streams(1).key(
            purpose, 2
        )


def test_purposes_have_the_numbers_that_published_results_were_made_with() -> None:
    first = [
        "PARTITION",
        "INIT",
        "SELECT",
        "TRAIN",
        "SKETCH",
        "AVAILABILITY",
        "DROPOUT",
        "LOSS_BATCH",
        "SERVER_SPLIT",
    ]
    numbers = {name: number for number, name in enumerate([*first, "HOLDOUT"], start=1)}
    later = {"DEVICES": 21, "DEVICE_VARIATION": 22, "ARRIVAL_ORDER": 23}
    later |= {"IMPERFECT": 31, "LABEL_NOISE": 32, "RANDOM_UPDATE": 33, "PRIVACY": 34, "REPLAY": 51}
    assert {p.name: int(p) for p in Purpose} == numbers | later


def test_the_hash_tells_apart_what_lies_in_other_arrays() -> None:
    """The same numbers in the same order, once as the public set and once as the validation set."""
    one, none = np.arange(3), np.empty(0, np.int64)
    common = ([np.arange(5)], [none])
    histograms = np.zeros((1, 2), np.int64)
    a, b = Division(*common, one, none, histograms), Division(*common, none, one, histograms)
    assert a.hash != b.hash
