"""Compression of what clients send."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.clients.compression import (
    Compressor,
    Coordinates,
    CountSketch,
    Gaussian,
    Identity,
    Int8,
    TopK,
)
from fedsim.clients.context import Signal
from fedsim.clients.ledger import Ledger
from fedsim.core.errors import ConfigError, FedsimError
from fedsim.core.rng import Purpose, Streams
from tests.toys import toy_clients

VECTOR = torch.tensor([3.0, -1.0, 0.5, -4.0, 0.0])
SIZES_AND_BYTES = [
    (Identity(), 5, 5 * 4),
    (TopK(size=3), 5, 5 * 4),  # 3 numbers and their positions are more than the whole vector
    (Coordinates(size=3), 3, 3 * 4),
    (Gaussian(size=3), 3, 3 * 4),
    (CountSketch(size=3), 3, 3 * 4),
    (Int8(), 5, 5),
]
COMPRESSORS = [compressor for compressor, _, _ in SIZES_AND_BYTES]


@pytest.mark.parametrize(("compressor", "length", "num_bytes"), SIZES_AND_BYTES)
def test_lengths_and_bytes(compressor: Compressor, length: int, num_bytes: int) -> None:
    assert len(compressor.compress(VECTOR, 1)) == length
    assert compressor.num_bytes(len(VECTOR)) == num_bytes


def test_topk_keeps_the_largest() -> None:
    assert TopK(size=2).compress(VECTOR, 0).tolist() == [3, 0, 0, -4, 0]


def test_int8_keeps_all_entries_within_a_step_of_a_127th_of_the_largest() -> None:
    expected = [round(127 * value / 4) for value in VECTOR.tolist()]
    assert Int8().compress(VECTOR, 0).tolist() == expected
    assert not Int8().compress(torch.zeros(3), 0).any()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**40))
def test_a_seed_fixes_the_compression_for_every_client(seed: int) -> None:
    for compressor in COMPRESSORS:
        compressed = compressor.compress(VECTOR, seed)
        torch.testing.assert_close(compressor.compress(VECTOR.clone(), seed), compressed)
        scale = 1 if isinstance(compressor, Int8) else 2
        torch.testing.assert_close(compressor.compress(2 * VECTOR, seed), scale * compressed)


def assert_mean(samples: list[float], expected: float) -> None:
    """Four standard deviations of the mean."""
    tolerance = 4 * np.std(samples) / np.sqrt(len(samples))
    assert abs(np.mean(samples) - expected) < tolerance


@pytest.mark.parametrize("kind", [Gaussian, CountSketch])
def test_inner_products_are_unbiased(kind: type[Gaussian | CountSketch]) -> None:
    x, y = torch.randn(2, 40, generator=torch.Generator().manual_seed(0)).double()
    sketch = kind(size=20)
    products = [float(sketch.compress(x, s) @ sketch.compress(y, s)) for s in range(4000)]
    assert_mean(products, float(x @ y))


def test_sums_of_powers_over_coordinates_are_unbiased_up_to_their_number() -> None:
    x = torch.randn(40, generator=torch.Generator().manual_seed(0)).double()
    sketch = Coordinates(size=10)
    sums = [40 / 10 * float((sketch.compress(x, s) ** 4).sum()) for s in range(4000)]
    assert_mean(sums, float((x**4).sum()))


def test_clients_are_charged_for_the_compressed_vector() -> None:
    ledger = Ledger()
    needs = frozenset({Signal.GRADIENTS, Signal.TRAINING, Signal.UPDATES})
    clients = toy_clients([2, 2], needs, ledger=ledger)
    gradients = list(clients.gradients(clients.available, compressor=Coordinates(size=1)))
    assert [len(gradient) for gradient in gradients] == [1, 1]
    assert ledger.bytes_up == 2 * 4
    updates = clients.updates(clients.available, compressor=TopK(size=1))
    assert {name: matrix.shape for name, matrix in updates.items()} == {"sketch": (2, 2)}
    assert ledger.bytes_up == 2 * 4 + 2 * (4 + 4)


def test_all_clients_of_a_round_use_the_seed_of_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def compress(self: Coordinates, vector: torch.Tensor, seed: int) -> torch.Tensor:
        seeds.append(seed)
        return vector[:1]

    monkeypatch.setattr(Coordinates, "compress", compress)
    for t in (1, 2):
        clients = toy_clients([2, 2], frozenset({Signal.GRADIENTS}), round=t)
        list(clients.gradients(clients.available, compressor=Coordinates(size=1)))
    first, second = (Streams(0).key(Purpose.SKETCH, t) for t in (1, 2))
    assert seeds == [first, first, second, second]


def test_a_size_of_0_and_a_projection_of_more_than_1_gib_are_rejected() -> None:
    with pytest.raises(ConfigError, match="size=0: must be >= 1"):
        TopK(size=0)
    with pytest.raises(FedsimError, match=r"takes 4\.0 GiB.*countsketch"):
        Gaussian(size=2**10).compress(torch.zeros(2**20), 0)


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_the_updates_of_no_clients_are_empty(compressor: Compressor) -> None:
    ledger = Ledger()
    needs = frozenset({Signal.TRAINING, Signal.UPDATES})
    clients = toy_clients([2, 2], needs, ledger=ledger)
    of_nobody = clients.updates(np.empty(0, np.int64), compressor=compressor)
    assert ledger.bytes_up == 0
    of_all = clients.updates(clients.available, compressor=compressor)
    for name, matrix in of_all.items():
        assert of_nobody[name].shape == (0, *matrix.shape[1:])
        assert of_nobody[name].dtype == matrix.dtype
