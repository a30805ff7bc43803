"""Tensors of a model, or of a stack of models, as one flat buffer: one operation in place of one
for each tensor."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.exact import weighted_sum


def flat_rows(stack: dict[str, Tensor]) -> Tensor:
    """The K models of `stack` as rows [K, D]: a view where the tensors lie side by side in one
    buffer, else a copy."""
    tensors = list(stack.values())
    width = sum(t[0].numel() for t in tensors)
    if _are_columns(tensors, width):
        first = tensors[0]
        return first.as_strided((len(first), width), (width, 1), first.storage_offset())
    return torch.cat([t.reshape(len(t), -1) for t in tensors], dim=1)


def _are_columns(tensors: Sequence[Tensor], width: int) -> bool:
    first, place = tensors[0], tensors[0].storage_offset()
    for tensor in tensors:
        together = (
            tensor.untyped_storage()._cdata == first.untyped_storage()._cdata
            and tensor.dtype == first.dtype
        )
        in_place = tensor.storage_offset() == place and (
            len(tensor) == 1 or tensor.stride(0) == width
        )
        if not (together and in_place and tensor[0].is_contiguous()):
            return False
        place += tensor[0].numel()
    return True


def as_columns(stack: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same models, on a GPU as columns of one buffer, of which `flat_rows` is a view."""
    if not any(value.is_cuda for value in stack.values()):
        return stack
    return split_flat(flat_rows(stack), {name: value[0] for name, value in stack.items()})


def split_flat(flat: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parts of `flat` [..., D], named and, but for the dimensions in front, shaped as the
    tensors of `like`; they share its memory."""
    parts = flat.split([value.numel() for value in like.values()], dim=-1)
    ahead = flat.shape[:-1]
    return {
        name: part.view(ahead + value.shape)
        for (name, value), part in zip(like.items(), parts, strict=True)
    }


def weighted_sums(
    stack: dict[str, Tensor], weights: NDArray[np.floating], like: dict[str, Tensor]
) -> dict[str, Tensor]:
    """sum_k weights_k times the k-th row of each tensor, shaped as those of `like`; on a GPU in one
    product."""
    if any(value.is_cuda for value in stack.values()):
        flat = flat_rows(stack)
        row = to_device(torch.as_tensor(weights, dtype=flat.dtype), flat.device)
        return split_flat(weighted_sum(flat, row), {name: like[name] for name in stack})
    row = torch.as_tensor(weights)
    return {name: weighted_sum(value, row.to(value.dtype)) for name, value in stack.items()}


def add_models(params: dict[str, Tensor], changes: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sum of two models."""
    new = torch._foreach_add(list(params.values()), [changes[name] for name in params])
    return dict(zip(params, new, strict=True))


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values` of the CPU on `device`; on a GPU through pinned memory, so that the host does not
    wait for the copy."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def real_dtype(samples: Tensor) -> torch.dtype:
    """Of losses and weights of `samples`: theirs, or torch's default where they are not real (ids
    of tokens)."""
    return samples.dtype if samples.is_floating_point() else torch.get_default_dtype()
