"""Which samples a client sees in which step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.core.rng import Streams
from fedsim.engine.schedule import LocalWork, Schedule, concatenate_schedules, make_schedule


def schedule(sizes: list[int], work: LocalWork, seed: int = 0, round: int = 1) -> Schedule:
    """Of clients that hold the samples from 100, 200, ... on."""
    positions = [np.arange(100 * (k + 1), 100 * (k + 1) + size) for k, size in enumerate(sizes)]
    return make_schedule(
        positions, work, Streams(seed), round, np.arange(len(sizes)), 0.1, dropout=False
    )


def seen(made: Schedule, row: int = 0) -> list[list[int]]:
    """The valid positions of each step of a client."""
    pairs = zip(made.positions[row], made.counts[row], strict=True)
    return [positions[:count].tolist() for positions, count in pairs if count]


@pytest.mark.parametrize(
    ("size", "lengths"), [(1, [1]), (3, [3]), (4, [4]), (9, [4, 4, 1]), (12, [4, 4, 4]), (0, [])]
)
def test_an_epoch_is_cut_into_batches_of_which_the_last_may_be_short(
    size: int, lengths: list[int]
) -> None:
    assert schedule([size], LocalWork(2, None, 4)).counts.tolist() == [2 * lengths]


@given(size=st.integers(1, 30), epochs=st.integers(1, 4), width=st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_each_epoch_passes_every_sample_once(size: int, epochs: int, width: int) -> None:
    work = LocalWork(epochs, None, width)
    made = schedule([size], work)
    assert made.steps.tolist() == [work.num_steps(size)]
    assert made.samples.tolist() == [epochs * size]
    passes = np.array(sum(seen(made), [])).reshape(epochs, size)
    assert all(sorted(one) == list(range(100, 100 + size)) for one in passes.tolist())


@given(size=st.integers(1, 30), steps=st.integers(1, 20), width=st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_a_number_of_steps_is_the_beginning_of_enough_epochs(
    size: int, steps: int, width: int
) -> None:
    some, many = (
        schedule([size], LocalWork(None, steps, width)),
        schedule([size], LocalWork(steps, None, width)),
    )
    assert seen(some) == seen(many)[:steps]
    assert some.samples.tolist() == [LocalWork(None, steps, width).num_samples(size)]


def test_batches_depend_on_seed_round_and_client() -> None:
    orders = {
        tuple(
            np.array(seen(schedule([50, 50], LocalWork(1, None, 50), seed, round), client)[0]) % 100
        )
        for seed in range(2)
        for round in range(2)
        for client in range(2)
    }
    assert len(orders) == 8
    passes = np.array(sum(seen(schedule([20], LocalWork(3, None, 20))), [])).reshape(3, 20)
    assert len({tuple(one) for one in passes.tolist()}) == 3


def test_a_client_is_scheduled_the_same_whoever_trains_beside_it() -> None:
    positions, work = [np.arange(9), np.arange(9, 12), np.arange(12, 30)], LocalWork(2, None, 4)
    make = lambda *ids: make_schedule(
        positions, work, Streams(0), 1, np.array(ids), 0.1, dropout=True
    )
    together = make(2, 0, 1)
    for row, client in enumerate([2, 0, 1]):
        alone = make(client)
        assert seen(alone) == seen(together, row)
        assert alone.keys is not None
        assert together.keys is not None
        assert alone.keys[0].tolist() == together.keys[row, : alone.steps[0]].tolist()


def test_who_has_fewer_steps_is_masked() -> None:
    made = schedule([3, 9, 0, 5], LocalWork(1, None, 4))
    assert made.counts.tolist() == [[3, 0, 0], [4, 4, 1], [0, 0, 0], [4, 1, 0]]
    assert made.steps.tolist() == [1, 3, 0, 2]
    assert made.mask.sum((1, 2)).tolist() == [3, 9, 0, 5]
    assert made.widths == (4, 4, 1)
    none = schedule([0], LocalWork(None, 5, 4))
    assert (none.positions.size, none.steps.tolist(), LocalWork(None, 5, 4).num_samples(0)) == (
        0,
        [0],
        0,
    )


def test_rows_are_cut_to_what_they_use_and_joined_row_by_row() -> None:
    made = schedule([3, 9, 0, 5], LocalWork(1, None, 4))
    some = made.rows(np.array([3, 0]))
    assert some.positions.shape == (2, 2, 4)
    assert [seen(some, 0), seen(some, 1)] == [seen(made, 3), seen(made, 0)]
    assert made.rows(slice(0, 1)).positions.shape == (1, 1, 3)
    joint = concatenate_schedules([made.rows(slice(0, 1)), some])
    assert [seen(joint, row) for row in range(3)] == [seen(made, row) for row in (0, 3, 0)]
    assert joint.lr == 0.1
    assert schedule([3, 7], LocalWork(1, None, 64)).positions.shape == (
        2,
        1,
        7,
    )  # no wider than the largest batch


def test_padding_repeats_a_sample_of_the_same_client() -> None:
    """So that another client's non-finite sample cannot reach it."""
    made = schedule([9, 5, 2], LocalWork(1, None, 4))
    assert set(made.positions[0].ravel()) <= set(range(100, 109))
    assert set(made.positions[1, :2].ravel()) <= set(range(200, 205))
    assert set(made.positions[2, 0].ravel()) <= {300, 301}
