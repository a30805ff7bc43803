"""What a pretended CUDA device must know of torch's functions as they are called, before they are operations.

To C++ its tensors are on the device `meta`, which autograd needs no driver for, and so some functions go wrong.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Functions(TorchFunctionMode):
    """Notes whether a function is asked for a tensor on `meta`; makes tensors of lists where C++ would leave them
    uninitialised, as on `meta`."""

    asks_for_meta = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.new_tensor and args[0].is_cuda:
            return torch.tensor(args[1], device=args[0].device, **{"dtype": args[0].dtype, **kwargs})
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_cuda:
            args = (args[0], _without_lists(args[1], args[0].device), *args[2:])
        before, asked = self.asks_for_meta, kwargs.get("device")
        self.asks_for_meta = asked is not None and torch.device(asked).type == "meta"
        try:
            return func(*args, **kwargs)
        finally:
            self.asks_for_meta = before


def _without_lists(index: Any, device: torch.device) -> Any:
    if isinstance(index, tuple):
        return tuple(_without_lists(part, device) for part in index)
    return torch.tensor(index, device=device) if isinstance(index, list) else index


def in_transform() -> bool:
    """Whether a transform of torch.func is running, within which a tensor's own device reads `meta`."""
    frame = sys._getframe(1)
    while frame is not None:
        if "_functorch" in frame.f_code.co_filename:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
