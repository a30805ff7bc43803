import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedsim.core.rng import Purpose, Streams

small = st.integers(0, 50)


@given(small, small, small)
def test_a_stream_depends_on_its_key_alone(seed: int, round: int, client: int) -> None:
    one, other = Streams(seed), Streams(seed)
    other.generator(Purpose.TRAIN, round, client).random(100)
    draws = [s.generator(Purpose.TRAIN, round, client).random(3) for s in (one, other)]
    assert np.array_equal(*draws)


@given(
    st.integers(0, 2**63 - 1),
    st.lists(st.integers(0, 2**40), max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_the_streams_of_many_clients_are_those_of_each(
    seed: int, key: list[int], client: int
) -> None:
    streams, clients = Streams(seed), np.array([client, 0, 1])
    together = streams.generators(Purpose.TRAIN, *key, last=clients)
    for found, last in zip(together, clients.tolist(), strict=True):
        assert (
            found.bit_generator.state
            == streams.generator(Purpose.TRAIN, *key, last).bit_generator.state
        )
    keys = streams.keys(Purpose.DROPOUT, *key, last=clients)
    assert keys.tolist() == [streams.key(Purpose.DROPOUT, *key, last) for last in clients.tolist()]


def test_neighbouring_seeds_and_clients_share_no_stream() -> None:
    draws = {
        (seed, purpose, a, b): Streams(seed).generator(purpose, a, b).integers(2**62)
        for seed in range(3)
        for purpose in Purpose
        for a in range(3)
        for b in range(3)
    }
    assert len(set(draws.values())) == len(draws)


def test_partition_and_initial_model_may_have_their_own_seed() -> None:
    streams = Streams(seed=1, partition_seed=7, init_seed=8)
    assert streams.key(Purpose.PARTITION) == Streams(7).key(Purpose.PARTITION)
    assert streams.key(Purpose.INIT) == Streams(8).key(Purpose.INIT)
    assert streams.key(Purpose.SELECT, 1) == Streams(1).key(Purpose.SELECT, 1)


def test_keys_are_known_numbers() -> None:
    """A change here changes every published result: it must be deliberate."""
    assert Streams(0).key(Purpose.TRAIN, 1, 2) == 6775611746057050632
