"""Stacks as one buffer: a view where they lie side by side, a copy elsewhere; and what comes from a
GPU in one copy."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsim.core.errors import DivergedError
from fedsim.core.flat import as_columns, flat_rows, split_flat
from fedsim.core.types import Cohort, drop_nonfinite
from fedsim.engine.backend import fetched
from fedsim.rounds.aggregators import FedAvg
from fedsim.rounds.checks import require_finite
from tests.card_runs import order_of_torch
from tests.pretended_cuda import PretendedCard, held

BUFFER = torch.arange(36.0).view(4, 9)
COLUMNS = {"a": BUFFER[:, :6].unflatten(1, (2, 3)), "b": BUFFER[:, 6], "c": BUFFER[:, 7:]}


OTHERS: dict[str, dict[str, Tensor]] = {
    "another order": {"b": COLUMNS["b"], "a": COLUMNS["a"], "c": COLUMNS["c"]},
    "a gap": {"a": COLUMNS["a"], "c": COLUMNS["c"]},
    "a gap in a row": {"a": COLUMNS["a"][:1], "c": COLUMNS["c"][:1]},
    "a tensor of its own": {**COLUMNS, "b": COLUMNS["b"].clone()},
    "expanded": {name: value[:1].expand(4, *value.shape[1:]) for name, value in COLUMNS.items()},
    "transposed": {**COLUMNS, "a": COLUMNS["a"].transpose(1, 2)},
    "every other row": {name: value[::2] for name, value in COLUMNS.items()},
}


@pytest.mark.parametrize("stack", OTHERS.values(), ids=OTHERS.keys())
def test_all_else_is_copied(stack: dict[str, Tensor]) -> None:
    flat = flat_rows(stack)
    assert torch.equal(
        flat, torch.cat([value.reshape(len(value), -1) for value in stack.values()], 1)
    )
    assert flat.data_ptr() != BUFFER.data_ptr()


def test_columns_of_one_buffer_are_not_copied_and_have_parts_by_name() -> None:
    flat = flat_rows(COLUMNS)
    assert torch.equal(flat, BUFFER)
    assert flat.data_ptr() == BUFFER.data_ptr()
    parts = split_flat(BUFFER[1], {name: value[0] for name, value in COLUMNS.items()})
    assert all(torch.equal(parts[name], value[1]) for name, value in COLUMNS.items())


def test_columns_on_a_gpu_are_views_of_one_buffer() -> None:
    with PretendedCard() as card:
        stack = {name: value.contiguous().to("cuda") for name, value in COLUMNS.items()}
        columns = as_columns(stack)
        card.counts.reset()
        assert torch.equal(held(flat_rows(columns)), BUFFER)
        assert card.counts.launches.total() == 0
        assert all(torch.equal(held(columns[name]), value) for name, value in COLUMNS.items())
    assert as_columns(COLUMNS) is COLUMNS


def cohort(device: str, broken: float | None) -> Cohort:
    delta = {name: value.clone() for name, value in COLUMNS.items()}
    if broken is not None:
        delta["a"][2, 1, 1] = broken
    delta = {name: value.to(device) for name, value in delta.items()}
    start = {name: value[0] for name, value in COLUMNS.items()}
    losses, finite = fetched(torch.ones(4, 2, 3, device=device), delta)
    np.testing.assert_array_equal(losses, np.ones((4, 2, 3)))
    start = {name: value.to(device) for name, value in start.items()}
    ids, sizes = np.arange(4), np.array([1, 2, 3, 4])
    return Cohort(ids, sizes, start, delta, None, None, sizes, list(start), finite=finite)


@pytest.mark.parametrize("broken", [None, float("nan"), float("inf")])
def test_an_average_on_a_gpu_is_that_on_the_cpu_without_updates_that_are_not_finite(
    broken: float | None,
) -> None:
    average = FedAvg(frozenset(), weighting="by_size")
    kept, _, dropped = drop_nonfinite(cohort("cpu", broken), None)
    with order_of_torch():
        wanted = average.aggregate(kept.start, kept, None)
    with PretendedCard() as card:
        on_card = cohort("cuda", broken)
        card.counts.reset()
        kept, _, dropped_on_card = drop_nonfinite(on_card, None)
        assert card.counts.waits.total() == 0
        found = average.aggregate(kept.start, kept, None)
        require_finite(found, 1)
        card.counts.reset()
        found["b"] = torch.full_like(found["b"], -torch.inf if broken is None else broken)
        with pytest.raises(DivergedError, match="round 3"):
            require_finite(found, 3)
        assert card.counts.waits.total() == 1
        del found["b"]
    assert dropped == dropped_on_card == (0 if broken is None else 1)
    assert all(torch.equal(held(found[name]), wanted[name]) for name in found)
