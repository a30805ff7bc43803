import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.clients.compression import Compressor, Coordinates, CountSketch, Gaussian, Identity, Int8, TopK
from fedsim.clients.context import Signal
from fedsim.clients.ledger import Ledger
from fedsim.core.errors import ConfigError, FedsimError
from tests.toys import toy_clients

X = torch.tensor([3.0, -1.0, 0.5, -4.0, 0.0])
ALL = [Identity(), TopK(size=3), Coordinates(size=3), Gaussian(size=3), CountSketch(size=3), Int8()]


@pytest.mark.parametrize(("sketch", "expected"), list(zip(ALL, [20, 20, 12, 12, 12, 5], strict=True)))
def test_bytes(sketch: Compressor, expected: int) -> None:
    assert sketch.num_bytes(5) == expected  # of topk 3 numbers and where they are, but no more than all 5 numbers
    assert len(sketch.compress(X, 1)) == (3 if expected == 12 else 5)


def test_topk_keeps_the_largest_and_int8_keeps_all_within_a_step() -> None:
    assert TopK(size=2).compress(X, 0).tolist() == [3, 0, 0, -4, 0]
    assert Int8().compress(X, 0).tolist() == [95, -32, 16, -127, 0]
    assert not Int8().compress(torch.zeros(3), 0).any()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**40))
def test_a_seed_fixes_a_sketch_for_every_client(seed: int) -> None:
    for sketch in ALL:
        torch.testing.assert_close(sketch.compress(X, seed), sketch.compress(X.clone(), seed))
        scale = 1 if isinstance(sketch, Int8) else 2
        torch.testing.assert_close(sketch.compress(2 * X, seed), scale * sketch.compress(X, seed))


@pytest.mark.parametrize("kind", [Gaussian, CountSketch])
def test_inner_products_are_unbiased(kind: type[Gaussian | CountSketch]) -> None:
    x, y = torch.randn(2, 40, generator=torch.Generator().manual_seed(0)).double()
    sketch = kind(size=20)
    products = [float(sketch.compress(x, s) @ sketch.compress(y, s)) for s in range(4000)]
    assert abs(np.mean(products) - float(x @ y)) < 4 * np.std(products) / np.sqrt(len(products))


def test_coordinates_keep_every_power_sum_on_average() -> None:
    x = torch.randn(40, generator=torch.Generator().manual_seed(0)).double()
    sums = [float((Coordinates(size=10).compress(x, s) ** 4).sum()) * 4 for s in range(4000)]
    assert abs(np.mean(sums) - float((x**4).sum())) < 4 * np.std(sums) / np.sqrt(len(sums))


def test_the_door_charges_the_sketch_in_place_of_the_vector() -> None:
    ledger = Ledger()
    clients = toy_clients([2, 2], frozenset({Signal.GRADIENTS, Signal.TRAINING}), ledger=ledger)
    assert [len(g) for g in clients.gradients(clients.available, compressor=Coordinates(size=1))] == [1, 1]
    assert ledger.bytes_up == 2 * 4
    (sketches,) = clients.updates(clients.available, compressor=TopK(size=1)).values()
    assert sketches.shape == (2, 2)
    assert ledger.bytes_up == 2 * 4 + 2 * 8


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="size=0: must be >= 1"):
        TopK(size=0)
    with pytest.raises(FedsimError, match=r"takes 4\.0 GiB.*countsketch"):
        Gaussian(size=2**10).compress(torch.zeros(2**20), 0)
