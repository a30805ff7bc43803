"""Uniform draws of initial models, the same on every processor."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class UniformDraws(TorchDispatchMode):
    """While it is entered, `Tensor.uniform_(a, b)` on a CPU is a + (b - a) u in float64 with torch's own u in [0, 1).

    torch rounds once where the processor has fused multiply-adds, else twice. For float32 this rounds once, too (but
    for one draw in 2^29 or so), so that models stay those of processors that have them.
    """

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.uniform_.default and not args[0].is_cuda and args[0].dtype.itemsize >= 4:
            return _uniform(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _uniform(values: Tensor, low: float = 0.0, high: float = 1.0, **kwargs: Any) -> Tensor:
    a, b = (torch.tensor(bound, dtype=values.dtype) for bound in (low, high))
    values.uniform_(0.0, 1.0, **kwargs)
    return values.copy_(values.double().mul_(b - a).add_(a))
