"""Which random stream decides what of a division, and what its hash is of."""

import numpy as np
import pytest

from fedsim.core.errors import DataError
from fedsim.core.rng import Purpose, Streams
from fedsim.partitions.base import Indices, Labelled, Partition
from fedsim.partitions.division import Division, ServerSplit, divide
from fedsim.partitions.iid import IID

DATA = Labelled(np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60)), 10)
SERVER = ServerSplit(validation_fraction=0.1, public_samples=45, public_stratified=False)


class Blocks(Partition):
    """Consecutive blocks, which keeps the number that it draws."""

    drawn = 0

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        self.drawn = int(rng.integers(2**60))
        return np.array_split(np.arange(len(data.labels)), num_clients)


def division(holdout: float = 0.25, server: ServerSplit = SERVER, seed: int = 3, **seeds: int) -> Division:
    return divide(DATA, Blocks(), 5, Streams(seed, **seeds), server, holdout)


def test_a_client_holds_out_by_a_stream_of_its_own() -> None:
    """A permutation by (HOLDOUT, client); the first quarter is held out."""
    d = division(server=ServerSplit(validation_fraction=0, public_samples=0, public_stratified=False))
    for i in range(5):
        own = np.arange(120 * i, 120 * (i + 1))
        shuffled = Streams(3).generator(Purpose.HOLDOUT, i).permutation(own)
        assert d.holdout[i].tolist() == shuffled[:30].tolist()
        assert d.train[i].tolist() == shuffled[30:].tolist()


def test_partition_and_server_draw_from_their_own_streams() -> None:
    partition = Blocks()
    divide(DATA, partition, 5, Streams(3), SERVER, 0.0)
    assert partition.drawn == Streams(3).generator(Purpose.PARTITION).integers(2**60)
    order = Streams(3).generator(Purpose.SERVER_SPLIT).permutation(600)
    d = division()
    first = np.concatenate([order[DATA.labels[order] == c][:6] for c in range(10)])
    assert d.validation.tolist() == sorted(first)
    assert d.public.tolist() == [i for i in order if i not in set(first)][:45]


def test_the_validation_set_has_its_share_of_every_class() -> None:
    assert np.bincount(DATA.labels[division().validation]).tolist() == [6] * 10
    d = division(server=ServerSplit(validation_fraction=0.0775, public_samples=0, public_stratified=False))
    assert len(d.validation) == round(0.0775 * 600) == 46  # 46.5, to the even number
    d = division(server=ServerSplit(validation_fraction=0.0799, public_samples=0, public_stratified=False))
    assert len(d.validation) == 48


def test_what_clients_train_on_is_what_histograms_count() -> None:
    d = division()
    for row, train in zip(d.histograms, d.train, strict=True):
        assert row.tolist() == np.bincount(DATA.labels[train], minlength=10).tolist()
    assert d.histograms.sum() == d.sizes.sum() == 600 - 60 - 45 - sum(map(len, d.holdout))


@pytest.mark.parametrize("purpose", [Purpose.PARTITION, Purpose.SERVER_SPLIT, Purpose.HOLDOUT])
def test_the_partitions_seed_is_for_all_that_divides(purpose: Purpose) -> None:
    assert Streams(1, partition_seed=7).key(purpose, 2) == Streams(7).key(purpose, 2)
    assert Streams(1, init_seed=7).key(purpose, 2) == Streams(1).key(purpose, 2)


@pytest.mark.parametrize("purpose", [p for p in Purpose if p not in (1, 2, 9, 10)])
def test_all_else_is_by_the_runs_own_seed(purpose: Purpose) -> None:
    assert Streams(1, partition_seed=7, init_seed=8).key(purpose, 2) == Streams(1).key(purpose, 2)


def test_purposes_have_the_numbers_that_published_results_were_made_with() -> None:
    assert {p.name: int(p) for p in Purpose} == {
        **{"PARTITION": 1, "INIT": 2, "SELECT": 3, "TRAIN": 4, "SKETCH": 5, "AVAILABILITY": 6, "DROPOUT": 7},
        **{
            "LOSS_BATCH": 8,
            "SERVER_SPLIT": 9,
            "HOLDOUT": 10,
            "DEVICES": 21,
            "DEVICE_VARIATION": 22,
            "ARRIVAL_ORDER": 23,
        },
    }


def test_the_hash_tells_apart_what_lies_in_other_arrays() -> None:
    """The same numbers in the same order, once as the public set and once as the validation set."""
    one, none = np.arange(3), np.empty(0, np.int64)
    common = ([np.arange(5)], [none])
    histograms = np.zeros((1, 2), np.int64)
    a, b = Division(*common, one, none, histograms), Division(*common, none, one, histograms)
    assert a.hash != b.hash


def test_a_server_may_leave_one_sample_and_no_less() -> None:
    data = Labelled(np.zeros(10, np.int64), 1)
    most, all_of_them = (ServerSplit(validation_fraction=0, public_samples=n, public_stratified=False) for n in (9, 10))
    assert divide(data, IID(), 1, Streams(0), most, 0).sizes.tolist() == [1]
    with pytest.raises(DataError, match="leave none for the clients"):
        divide(data, IID(), 1, Streams(0), all_of_them, 0)


def test_a_public_set_is_in_random_order_and_the_rest_keeps_its_own() -> None:
    d = division(holdout=0.0)
    assert d.public.tolist() != sorted(d.public)
    rest = np.concatenate(d.train)
    assert rest.tolist() == sorted(rest)
