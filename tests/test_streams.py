"""Keyed random streams."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedsim.core.rng import Purpose, Streams

small = st.integers(0, 50)


@given(small, small, small)
def test_a_stream_depends_only_on_its_key(seed: int, round: int, client: int) -> None:
    streams = Streams(seed)
    expected = streams.generator(Purpose.TRAIN, round, client).random(3)
    streams.generator(Purpose.TRAIN, round, client).random(100)
    assert np.array_equal(streams.generator(Purpose.TRAIN, round, client).random(3), expected)


@given(
    st.integers(0, 2**63 - 1),
    st.lists(st.integers(0, 2**40), max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_the_streams_of_many_clients_are_those_of_each(
    seed: int, key: list[int], client: int
) -> None:
    streams = Streams(seed)
    clients = [client, 0, 1]
    together = streams.generators(Purpose.TRAIN, *key, last=np.array(clients))
    for generator, last in zip(together, clients, strict=True):
        alone = streams.generator(Purpose.TRAIN, *key, last)
        assert generator.bit_generator.state == alone.bit_generator.state
    keys = streams.keys(Purpose.DROPOUT, *key, last=np.array(clients))
    assert keys.tolist() == [streams.key(Purpose.DROPOUT, *key, last) for last in clients]


def test_neighbouring_seeds_rounds_and_clients_share_no_stream() -> None:
    keys = list(itertools.product(range(3), Purpose, range(3), range(3)))
    draws = {
        Streams(seed).generator(purpose, round, client).integers(2**62)
        for seed, purpose, round, client in keys
    }
    assert len(draws) == len(keys)


def test_partition_and_initial_model_may_have_seeds_of_their_own() -> None:
    streams = Streams(seed=1, partition_seed=7, init_seed=8)
    assert streams.key(Purpose.PARTITION) == Streams(7).key(Purpose.PARTITION)
    assert streams.key(Purpose.INIT) == Streams(8).key(Purpose.INIT)
    assert streams.key(Purpose.SELECT, 1) == Streams(1).key(Purpose.SELECT, 1)


def test_keys_are_known_numbers() -> None:
    """A change here changes every published result: it must be deliberate."""
    assert Streams(0).key(Purpose.TRAIN, 1, 2) == 6775611746057050632
