"""Which samples a client sees in which step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.engine.engine import LocalWork
from fedsim.engine.schedule import ClientBatches, client_batches, stack_batches
from fedsim.rng import Purpose, Streams


def batches_of(size: int, work: LocalWork, client: int = 0) -> ClientBatches:
    positions = np.arange(100, 100 + size)
    return client_batches(positions, work, Streams(0).generator(Purpose.TRAIN, 1, client))


def seen(batches: ClientBatches) -> list[list[int]]:
    return [row[:count].tolist() for row, count in zip(batches.positions, batches.counts, strict=True)]


@pytest.mark.parametrize(("size", "lengths"), [(1, [1]), (3, [3]), (4, [4]), (9, [4, 4, 1]), (12, [4, 4, 4]), (0, [])])
def test_an_epoch_is_cut_into_batches_of_which_the_last_may_be_short(size: int, lengths: list[int]) -> None:
    assert batches_of(size, LocalWork(2, None, 4)).counts.tolist() == 2 * lengths


@given(size=st.integers(1, 30), epochs=st.integers(1, 4), width=st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_each_epoch_passes_every_sample_once(size: int, epochs: int, width: int) -> None:
    work = LocalWork(epochs, None, width)
    batches = batches_of(size, work)
    assert len(batches) == work.num_steps(size)
    passes = np.array(sum(seen(batches), [])).reshape(epochs, size)
    assert all(sorted(one) == list(range(100, 100 + size)) for one in passes.tolist())


def test_epochs_are_shuffled_anew() -> None:
    passes = np.array(sum(seen(batches_of(20, LocalWork(3, None, 20))), [])).reshape(3, 20)
    assert len({tuple(one) for one in passes.tolist()}) == 3


@given(size=st.integers(1, 30), steps=st.integers(1, 20), width=st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_a_number_of_steps_is_the_beginning_of_enough_epochs(size: int, steps: int, width: int) -> None:
    some, many = batches_of(size, LocalWork(None, steps, width)), batches_of(size, LocalWork(steps, None, width))
    assert seen(some) == seen(many)[:steps]


def test_a_client_without_samples_makes_no_steps() -> None:
    assert len(batches_of(0, LocalWork(None, 5, 4))) == 0


def test_batches_depend_on_seed_round_and_client() -> None:
    positions, work = np.arange(50), LocalWork(1, None, 50)
    orders = {
        tuple(client_batches(positions, work, Streams(s).generator(Purpose.TRAIN, t, k)).positions[0])
        for s in range(2)
        for t in range(2)
        for k in range(2)
    }
    assert len(orders) == 8


def test_stacked_rows_finish_from_the_end_and_say_whose_they_are() -> None:
    clients = [batches_of(size, LocalWork(1, None, 4), client) for client, size in enumerate([3, 9, 0, 5])]
    stacked = stack_batches(clients)
    assert stacked.order.tolist() == [1, 3, 0, 2]
    assert stacked.steps.tolist() == [3, 2, 1, 0]
    assert stacked.counts.tolist() == [[4, 4, 3, 0], [4, 1, 0, 0], [1, 0, 0, 0]]
    for row, client in enumerate(stacked.order):
        valid = [p[:n].tolist() for p, n in zip(stacked.positions[:, row], stacked.counts[:, row], strict=True) if n]
        assert valid == seen(clients[client])


def test_padding_repeats_a_sample_of_the_same_client() -> None:
    """So that another client's non-finite sample cannot reach it."""
    stacked = stack_batches([batches_of(9, LocalWork(1, None, 4))])
    assert set(stacked.positions.ravel()) <= set(range(100, 109))


def test_the_stack_is_no_wider_than_the_largest_batch() -> None:
    clients = [batches_of(size, LocalWork(1, None, 64)) for size in (3, 7)]
    assert stack_batches(clients).positions.shape == (1, 2, 7)
