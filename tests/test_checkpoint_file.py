"""The file of a checkpoint: values come back as they were, and damage is noticed."""

import collections
import re
from dataclasses import InitVar, dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.core.encoding import EncodingError, dataclasses_known_to, decode, encode
from fedsim.core.errors import DataError
from fedsim.running.checkpoint import pack, unpack
from fedsim.selectors.random import Random
from tests.checkpoint_toys import CPU, through_a_file


class Owner:
    """Its module has `Pair`."""


@dataclass(frozen=True)
class Pair:
    one: Any
    other: Any


VALUES: list[Any] = [
    *(None, True, 3, -(2**70), "text", 0.1, -0.0, float("inf"), [1, [2.5]], (1, "a"), {1, 2}, {(1, 2): {"a": None}}),
    *(collections.deque([1, 2], 4), np.float32(0.1), np.int64(-1), np.bool_(True), np.arange(6.0).reshape(2, 3).T),
    *(np.zeros(0), np.array(3), torch.ones(2, 3, dtype=torch.float64).T, torch.tensor(True), torch.zeros(0, 2)),
    Pair(np.arange(3), Pair(1, ())),
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Pair):
        return isinstance(other, Pair) and same(one.one, other.one) and same(one.other, other.other)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.strides == other.strides and np.array_equal(one, other)
    return type(one) is type(other) and bool(one == other) and repr(one) == repr(other)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_as_they_were(value: Any) -> None:
    found = through_a_file({"value": value}, Owner())["value"]
    assert same(value, found)


REFUSED = [
    *((value, "") for value in (np.random.default_rng(0), object(), np.array([None]), lambda: 0, int, 1j)),
    (np.ma.masked_array([1, 2], [True, False]), "numpy.ma.MaskedArray"),
    (np.arange(2.0).astype(">f8"), "numpy.ndarray"),
    (torch.eye(2).to_sparse(), "torch.Tensor"),
]


@pytest.mark.parametrize(("value", "told"), REFUSED)
def test_a_value_that_would_not_come_back_as_it_was_is_refused_with_its_place(value: Any, told: str) -> None:
    with pytest.raises(EncodingError, match=re.escape(f"state['a'][1] is of type {told}")):
        encode({"a": [0, value]}, {})


def test_a_class_that_the_selector_does_not_know_is_not_built() -> None:
    header, tensors = unpack(pack({}, {"a": Pair(1, 2)}, dataclasses_known_to(Owner())))
    with pytest.raises(KeyError):
        decode(header["content"], tensors, CPU, dataclasses_known_to(Random))


@dataclass
class Needy:
    """Its constructor changes what it takes, needs what is no field, and sets more than its fields."""

    terms: list[int]
    start: InitVar[int]
    total: int = field(init=False)

    def __post_init__(self, start: int) -> None:
        self.terms = [*self.terms, 0]
        self.total, self.next = sum(self.terms), start


def test_the_attributes_of_a_dataclass_come_back_whatever_its_constructor_does() -> None:
    value = Needy([1], 2)
    value.total = 7
    found = through_a_file({"value": value}, Owner())["value"]
    assert vars(found) == {"terms": [1, 0], "total": 7, "next": 2}


def test_a_dataclass_that_would_not_be_found_is_refused_with_its_place() -> None:
    @dataclass
    class Local:
        count: int

    with pytest.raises(EncodingError, match=r"state\['a'\] is of the dataclass .*Local, which a checkpoint"):
        encode({"a": Local(1)}, {}, dataclasses=dataclasses_known_to(Owner()))
    with pytest.raises(EncodingError, match=r"`from tests\.test_checkpoint_file import Pair`"):
        encode({"a": Pair(1, 2)}, {}, dataclasses=dataclasses_known_to(Random))


def test_every_flipped_bit_and_every_truncation_is_noticed() -> None:
    data = pack({"a": "0" * 64}, {"b": np.arange(20), "c": "0" * 64})
    assert unpack(data)[0]["identity"] == {"a": "0" * 64}
    for position in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(DataError):
            unpack(bytes(damaged))
    for length in (0, 7, 8, 100, len(data) // 2, len(data) - 1):
        with pytest.raises(DataError):
            unpack(data[:length])
