"""Models, or stacks of models, as one flat buffer, so that one operation takes the place of one for
each tensor."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.exact import weighted_sum

Tensors = dict[str, Tensor]


def flat_rows(stack: Tensors) -> Tensor:
    """Return the K >= 1 models of `stack` as rows [K, D].

    The rows are a view if the tensors are consecutive columns of one buffer, otherwise a copy.
    """
    tensors = list(stack.values())
    width = sum(tensor[0].numel() for tensor in tensors)
    if _are_columns(tensors, width):
        first = tensors[0]
        return first.as_strided((len(first), width), (width, 1), first.storage_offset())
    return torch.cat([tensor.reshape(len(tensor), -1) for tensor in tensors], dim=1)


def _are_columns(tensors: Sequence[Tensor], width: int) -> bool:
    """Return whether `tensors` are consecutive columns of one buffer with rows of `width`."""
    first = tensors[0]
    offset = first.storage_offset()
    for tensor in tensors:
        same_storage = tensor.untyped_storage()._cdata == first.untyped_storage()._cdata
        in_place = tensor.storage_offset() == offset
        same_rows = len(tensor) == 1 or tensor.stride(0) == width
        if not (same_storage and tensor.dtype == first.dtype and in_place and same_rows):
            return False
        if not tensor[0].is_contiguous():
            return False
        offset += tensor[0].numel()
    return True


def as_columns(stack: Tensors) -> Tensors:
    """Return the same models; on a GPU as columns of one buffer, of which `flat_rows` is a view."""
    if not any(value.is_cuda for value in stack.values()):
        return stack
    return split_flat(flat_rows(stack), {name: value[0] for name, value in stack.items()})


def split_flat(flat: Tensor, like: Tensors) -> Tensors:
    """Split `flat` [..., D] into tensors with the names and shapes of `like`.

    They keep the leading dimensions of `flat` and share its memory.
    """
    parts = flat.split([value.numel() for value in like.values()], dim=-1)
    leading = flat.shape[:-1]
    tensors = {}
    for (name, value), part in zip(like.items(), parts, strict=True):
        tensors[name] = part.view(leading + value.shape)
    return tensors


def weighted_sums(stack: Tensors, weights: NDArray[np.floating], like: Tensors) -> Tensors:
    """Return sum_k weights_k times the k-th row of each tensor, with the shapes of `like`; on a GPU
    in one product."""
    if any(value.is_cuda for value in stack.values()):
        flat = flat_rows(stack)
        row = to_device(torch.as_tensor(weights, dtype=flat.dtype), flat.device)
        return split_flat(weighted_sum(flat, row), {name: like[name] for name in stack})
    row = torch.as_tensor(weights)
    return {name: weighted_sum(value, row.to(value.dtype)) for name, value in stack.items()}


def add_models(params: Tensors, changes: Tensors) -> Tensors:
    """Return the sum of two models."""
    sums = torch._foreach_add(list(params.values()), [changes[name] for name in params])
    return dict(zip(params, sums, strict=True))


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return `values`, which are on the CPU, on `device`.

    They reach a GPU through pinned memory, so that the host does not wait for the copy.
    """
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def real_dtype(samples: Tensor) -> torch.dtype:
    """Return the type of losses and weights of `samples`: that of the samples, or torch's default
    if they are not real (ids of tokens)."""
    return samples.dtype if samples.is_floating_point() else torch.get_default_dtype()
