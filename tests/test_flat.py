"""Stacks of models as one flat buffer, and how seldom the host waits for a GPU.

A stack has a tensor [K, ...] for each name, with a row for each of K models. If its tensors are
columns of one buffer [K, D], `flat_rows` returns this buffer without a copy.

`PretendedCard` stands for a GPU: its tensors compute on the CPU, and `card.counts` counts what a
host would do. A *launch* starts a kernel, and in a *wait* the host waits until the GPU has
finished. `held(x)` is the value of a tensor x of the card, as a tensor of the CPU.
"""

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
"""Four models of nine numbers: all columns of the buffer, in order."""
NO_WHOLE_BUFFER: dict[str, Stack] = {
    "columns in another order": {name: COLUMNS[name] for name in "bac"},
    "a column is missing": {name: COLUMNS[name] for name in "ac"},
    "a column is missing, one row": {name: COLUMNS[name][:1] for name in "ac"},
    "b has a buffer of its own": {**COLUMNS, "b": COLUMNS["b"].clone()},
    "all rows are the first": {name: rows[:1].expand(rows.shape) for name, rows in COLUMNS.items()},
    "a is transposed": {**COLUMNS, "a": COLUMNS["a"].transpose(1, 2)},
    "every other row": {name: rows[::2] for name, rows in COLUMNS.items()},
}
"""Stacks that are not adjacent columns, in order, of adjacent rows of a buffer."""
SIZES = np.array([1, 2, 3, 4])
"""The numbers of samples of four clients."""


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(held(actual[name]), value) for name, value in expected.items())


# --- one buffer ---


def test_columns_of_one_buffer_are_not_copied() -> None:
    flat = flat_rows(COLUMNS)
    assert torch.equal(flat, BUFFER)
    assert flat.data_ptr() == BUFFER.data_ptr()


@pytest.mark.parametrize("stack", NO_WHOLE_BUFFER.values(), ids=NO_WHOLE_BUFFER)
def test_other_stacks_are_copied(stack: Stack) -> None:
    flat = flat_rows(stack)
    rows = [tensor.reshape(len(tensor), -1) for tensor in stack.values()]
    assert torch.equal(flat, torch.cat(rows, 1))
    flat.fill_(-1)
    assert torch.equal(BUFFER, torch.arange(36.0).view(4, 9))  # `flat` shares no memory with it


def test_a_row_is_split_into_tensors_by_name() -> None:
    like = {name: value[0] for name, value in COLUMNS.items()}
    assert_same(split_flat(BUFFER[1], like), {name: value[1] for name, value in COLUMNS.items()})


def test_a_stack_on_a_gpu_becomes_columns_of_one_buffer() -> None:
    with PretendedCard() as card:
        # Each tensor has a buffer of its own at first, so flattening them is a copy: a launch.
        stack = {name: rows.contiguous().to("cuda") for name, rows in COLUMNS.items()}
        card.counts.reset()
        flat_rows(stack)
        assert card.counts.launches.total() == 1

        columns = as_columns(stack)
        card.counts.reset()
        assert torch.equal(held(flat_rows(columns)), BUFFER)
        assert card.counts.launches.total() == 0
        assert_same(columns, COLUMNS)


def test_a_stack_on_the_cpu_keeps_its_buffers() -> None:
    stack = {name: rows.clone() for name, rows in COLUMNS.items()}
    assert as_columns(stack) is stack


# --- how seldom the host waits ---


def cohort(device: str, broken: float | None) -> Cohort:
    """Return a cohort of four clients with equal losses. If `broken` is given, an entry of client
    2's update has this value."""
    delta = {name: value.clone() for name, value in COLUMNS.items()}
    if broken is not None:
        delta["a"][2, 1, 1] = broken
    delta = {name: value.to(device) for name, value in delta.items()}
    start = {name: value[0].to(device) for name, value in COLUMNS.items()}
    _, finite = fetched(torch.ones(4, 2, 3, device=device), delta)
    return Cohort(
        ids=np.arange(4),
        sizes=SIZES,
        start=start,
        delta=delta,
        loss=None,
        rms_loss=None,
        steps=np.ones(4, np.int64),
        trained=list(start),
        finite=finite,
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_losses_are_fetched_in_their_shape(device: str) -> None:
    expected = np.arange(24.0, dtype=np.float32).reshape(4, 2, 3)
    with PretendedCard() as card:
        delta = as_columns({name: value.to(device) for name, value in COLUMNS.items()})
        losses_on_device = torch.tensor(expected, device=device)
        card.counts.reset()
        losses, _ = fetched(losses_on_device, delta)
        assert card.counts.waits.total() == (1 if device == "cuda" else 0)
    np.testing.assert_array_equal(losses, expected)


@pytest.mark.parametrize("broken", [None, float("nan"), float("inf")])
def test_updates_that_are_not_finite_are_dropped_without_waiting(broken: float | None) -> None:
    """`fetched` has brought which updates are finite to the host, together with the losses."""
    with PretendedCard() as card:
        all_clients = cohort("cuda", broken)
        card.counts.reset()
        kept, _, num_dropped = drop_nonfinite(all_clients, None)
        assert card.counts.waits.total() == 0
    remaining = [0, 1, 2, 3] if broken is None else [0, 1, 3]
    assert kept.ids.tolist() == remaining
    assert num_dropped == 4 - len(remaining)


def test_the_average_of_the_updates_that_remain_is_that_of_the_cpu() -> None:
    """Clients 0, 1 and 3 have 1, 2 and 4 samples: the average of their rows is added to row 0."""
    average = FedAvg(frozenset(), weighting="by_size")
    rows = BUFFER[[0, 1, 3]]
    by_hand = BUFFER[0] + (rows * torch.tensor([1.0, 2, 4])[:, None]).sum(0) / 7
    on_cpu, _, _ = drop_nonfinite(cohort("cpu", torch.nan), None)
    with order_of_torch():  # the CPU adds in the order of the card, so that bits are equal
        expected = average.aggregate(on_cpu.start, on_cpu, None)
    assert torch.allclose(
        flat_rows({name: value[None] for name, value in expected.items()}), by_hand
    )
    with PretendedCard():
        on_card, _, _ = drop_nonfinite(cohort("cuda", torch.nan), None)
        assert_same(average.aggregate(on_card.start, on_card, None), expected)


@pytest.mark.parametrize("broken", [None, "a", "b"])
def test_a_model_is_checked_with_one_wait(broken: str | None) -> None:
    with PretendedCard() as card:
        model = {"a": torch.zeros(3, device="cuda"), "b": torch.zeros(2, device="cuda")}
        if broken:
            model[broken] = torch.full_like(model[broken], -torch.inf)
        card.counts.reset()
        if broken:
            with pytest.raises(DivergedError, match="round 3"):
                require_finite(model, 3)
        else:
            require_finite(model, 3)
        assert card.counts.waits.total() == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_other_types_are_checked(dtype: torch.dtype) -> None:
    """A sum of large numbers of float16 is infinite in float16."""
    model = {"a": torch.full((3,), 60_000, dtype=dtype)}
    require_finite(model, 3)
    with pytest.raises(DivergedError, match="round 3"):
        require_finite({"a": model["a"] * torch.inf}, 3)
    with PretendedCard():
        require_finite({"a": torch.full((3,), 60_000, dtype=dtype, device="cuda")}, 3)
