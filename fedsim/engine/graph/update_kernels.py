"""The update of plain SGD as one Triton kernel, instead of four in torch."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Numbers that a program updates."""


@triton.jit
def sgd_kernel(values, grads, counts, scalars, width, values_stride, BLOCK: tl.constexpr):
    """values = values * keep - grads * lr, in the rows of clients with samples in the step.

    `values` [R, width] has rows `values_stride` apart, and `scalars` are lr and keep.
    """
    client = tl.program_id(0)
    if tl.load(counts + client) > 0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        place = values + client.to(tl.int64) * values_stride + column
        value = tl.load(place, mask=inside, other=0.0)
        gradient = tl.load(grads + client.to(tl.int64) * width + column, mask=inside, other=0.0)
        value = value * tl.load(scalars + 1) - gradient * tl.load(scalars)
        tl.store(place, value, mask=inside)


def sgd_step(values: Tensor, grads: Tensor, counts: Tensor, scalars: Tensor) -> None:
    """Make a step of `SGD` without momentum: see `RecordableOptimizer.recorded_step`.

    `counts` [R] are the clients' samples in the step; those without any stay as they are.
    """
    num_clients, width = grads.shape
    grid = (num_clients, triton.cdiv(width, BLOCK))
    sgd_kernel[grid](values, grads, counts, scalars, width, values.stride(0), BLOCK=BLOCK)
