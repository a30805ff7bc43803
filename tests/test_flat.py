"""Stacks as one buffer, and what comes from a GPU in one copy."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsim.core.errors import DivergedError
from fedsim.core.flat import as_columns, flat_rows, split_flat
from fedsim.core.types import Cohort, Stack, drop_nonfinite
from fedsim.engine.backend import fetched
from fedsim.rounds.aggregators import FedAvg
from fedsim.rounds.checks import require_finite
from tests.card_runs import order_of_torch
from tests.pretended_cuda import PretendedCard, held

BUFFER = torch.arange(36.0).view(4, 9)
COLUMNS = {"a": BUFFER[:, :6].unflatten(1, (2, 3)), "b": BUFFER[:, 6], "c": BUFFER[:, 7:]}
OTHERS: dict[str, Stack] = {
    "another order": {name: COLUMNS[name] for name in "bac"},
    "a gap": {name: COLUMNS[name] for name in "ac"},
    "a gap in a row": {name: COLUMNS[name][:1] for name in "ac"},
    "a tensor of its own": {**COLUMNS, "b": COLUMNS["b"].clone()},
    "expanded": {name: value[:1].expand(4, *value.shape[1:]) for name, value in COLUMNS.items()},
    "transposed": {**COLUMNS, "a": COLUMNS["a"].transpose(1, 2)},
    "every other row": {name: value[::2] for name, value in COLUMNS.items()},
}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(held(actual[name]), value) for name, value in expected.items())


@pytest.mark.parametrize("stack", OTHERS.values(), ids=OTHERS)
def test_a_stack_that_is_not_one_buffer_is_copied(stack: Stack) -> None:
    flat = flat_rows(stack)
    assert torch.equal(flat, torch.cat([value.flatten(1) for value in _2d(stack)], 1))
    assert flat.data_ptr() != BUFFER.data_ptr()


def _2d(stack: Stack) -> list[Tensor]:
    return [value.reshape(len(value), -1) for value in stack.values()]


def test_columns_of_one_buffer_are_not_copied() -> None:
    flat = flat_rows(COLUMNS)
    assert torch.equal(flat, BUFFER)
    assert flat.data_ptr() == BUFFER.data_ptr()


def test_a_row_is_split_into_tensors_by_name() -> None:
    like = {name: value[0] for name, value in COLUMNS.items()}
    assert_same(split_flat(BUFFER[1], like), {name: value[1] for name, value in COLUMNS.items()})


def test_a_stack_on_a_gpu_becomes_views_of_one_buffer() -> None:
    with PretendedCard() as card:
        columns = as_columns({n: value.contiguous().to("cuda") for n, value in COLUMNS.items()})
        card.counts.reset()
        assert torch.equal(held(flat_rows(columns)), BUFFER)
        assert card.counts.launches.total() == 0
        assert_same(columns, COLUMNS)
    assert as_columns(COLUMNS) is COLUMNS


def cohort(device: str, broken: float | None) -> Cohort:
    """Return a cohort of four clients, of which the third has an entry that is `broken`."""
    delta = {name: value.clone() for name, value in COLUMNS.items()}
    if broken is not None:
        delta["a"][2, 1, 1] = broken
    delta = {name: value.to(device) for name, value in delta.items()}
    start = {name: value[0].to(device) for name, value in COLUMNS.items()}
    losses, finite = fetched(torch.ones(4, 2, 3, device=device), delta)
    np.testing.assert_array_equal(losses, np.ones((4, 2, 3)))
    ids, sizes = np.arange(4), np.array([1, 2, 3, 4])
    return Cohort(ids, sizes, start, delta, None, None, sizes, list(start), finite=finite)


@pytest.mark.parametrize("broken", [None, float("nan"), float("inf")])
def test_an_average_on_a_gpu_drops_the_same_updates_as_on_the_cpu_without_waiting(
    broken: float | None,
) -> None:
    average = FedAvg(frozenset(), weighting="by_size")
    num_broken = 0 if broken is None else 1
    kept, _, dropped = drop_nonfinite(cohort("cpu", broken), None)
    assert dropped == num_broken
    with order_of_torch():
        expected = average.aggregate(kept.start, kept, None)
    with PretendedCard() as card:
        on_card = cohort("cuda", broken)
        card.counts.reset()
        kept, _, dropped = drop_nonfinite(on_card, None)
        assert card.counts.waits.total() == 0
        assert dropped == num_broken
        assert_same(average.aggregate(kept.start, kept, None), expected)


def test_a_model_on_a_gpu_is_checked_with_one_wait() -> None:
    with PretendedCard() as card:
        model = {"a": torch.zeros(3, device="cuda"), "b": torch.zeros(2, device="cuda")}
        require_finite(model, 1)
        card.counts.reset()
        model["b"] = torch.full_like(model["b"], -torch.inf)
        with pytest.raises(DivergedError, match="round 3"):
            require_finite(model, 3)
        assert card.counts.waits.total() == 1
