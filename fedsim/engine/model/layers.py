"""Layers whose hidden state a batched program must spell out: dropout's randomness and BatchNorm's batch.

Both engines draw dropout masks by the same counter-based rule, so that a mask depends on (seed, round, client, step,
layer, element) alone, whether clients train one by one or side by side, padded or not. An element is its place in the
layer's input, so that padding changes masks where the batch is not the first axis (sequence first): there, engines draw
other masks of the same rate for batches that are short.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed integer
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685
_CALLS = 2**20  # more applications of one layer in a step than there will ever be


def mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014) on int64; the arithmetic wraps as unsigned would."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _MIX_2
    return z ^ ((z >> 31) & (2**33 - 1))


class KeyedDropout(nn.Module):
    """Inverted dropout whose mask is a pure function of `key` (an int64 scalar that the engine supplies per step).

    `calls` counts applications within a step, so that a layer used twice draws two masks; the engine sets it back to 0
    before each step.
    """

    key: Tensor

    def __init__(self, p: float, layer: int) -> None:
        super().__init__()
        self.p = p
        self.layer = layer
        self.calls = 0
        self.scale = 1 / (1 - p) if p < 1 else 0.0
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        keep = dropout_mask(self.key, self.layer, self.calls, x.shape, self.p)
        self.calls += 1
        return x * (keep.to(x.dtype) * self.scale)


def dropout_mask(keys: Tensor, layer: int, calls: int, shape: Sequence[int], p: float) -> Tensor:
    """What the `calls`-th application of a layer keeps of an input of `shape`, for each of `keys` [...]: bool
    [..., *shape]."""
    salt = _signed((1 + calls + layer * _CALLS) * _GOLDEN)
    element = torch.arange(math.prod(shape), device=keys.device).view(*shape)
    start = mix(keys + salt)
    bits = mix(start.view(*start.shape, *[1] * len(shape)) + element * _GOLDEN)
    return ((bits >> 40) & (2**24 - 1)) >= round(p * 2**24)


def _signed(value: int) -> int:
    """`value` modulo 2^64 as an int64 would hold it."""
    return (value + 2**63) % 2**64 - 2**63


class MaskedBatchNorm(nn.Module):
    """BatchNorm over the samples that `mask` [batch] marks, for batches padded to a common length.

    Equal to torch's layer on the valid samples alone. One value per channel, which torch refuses in training, counts
    as a batch of variance zero.
    """

    running_mean: Tensor
    running_var: Tensor
    mask: Tensor

    def __init__(self, source: nn.BatchNorm1d | nn.BatchNorm2d) -> None:
        super().__init__()
        assert source.running_mean is not None
        assert source.running_var is not None
        assert source.momentum is not None
        self.eps, self.momentum = source.eps, source.momentum
        self.weight, self.bias = source.weight, source.bias
        self.register_buffer("running_mean", source.running_mean)
        self.register_buffer("running_var", source.running_var)
        self.register_buffer("mask", torch.ones_like(source.running_mean[:1]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        channels = (1, -1) + (1,) * (x.dim() - 2)
        mask = self.mask.view(-1, *(1,) * (x.dim() - 1))
        axes = [0, *range(2, x.dim())]
        count = self.mask.sum() * (x[0, 0].numel())
        mean = (x * mask).sum(axes) / count
        centred = x - mean.view(channels)
        var = (centred.square() * mask).sum(axes) / count
        with torch.no_grad():
            unbiased = var * count / (count - 1).clamp(min=1)
            self.running_mean = torch.lerp(self.running_mean, mean.detach(), self.momentum)
            self.running_var = torch.lerp(self.running_var, unbiased.detach(), self.momentum)
        y = centred * torch.rsqrt(var + self.eps).view(channels)
        return y if self.weight is None else y * self.weight.view(channels) + self.bias.view(channels)


class _LenientBatchNorm1d(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return _of_one_value(self, x) if self.training and x[:, 0].numel() == 1 else super().forward(x)


class _LenientBatchNorm2d(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return _of_one_value(self, x) if self.training and x[:, 0].numel() == 1 else super().forward(x)


def lenient(source: nn.BatchNorm1d | nn.BatchNorm2d) -> nn.Module:
    """torch's own layer, which takes one value per channel for a batch of variance zero instead of refusing it."""
    layer = copy.deepcopy(source)
    layer.__class__ = _LenientBatchNorm1d if isinstance(source, nn.BatchNorm1d) else _LenientBatchNorm2d
    return layer


def _of_one_value(layer: nn.BatchNorm1d | nn.BatchNorm2d, x: Tensor) -> Tensor:
    with torch.no_grad():
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
        if layer.running_mean is not None and layer.running_var is not None:
            share = 1 / int(layer.num_batches_tracked or 1) if layer.momentum is None else layer.momentum
            layer.running_mean.lerp_(x.flatten(), share)
            layer.running_var.lerp_(torch.zeros_like(layer.running_var), share)
    shape = (1, -1) + (1,) * (x.dim() - 2)
    zeros = x - x
    return zeros if not layer.affine else zeros * layer.weight.view(shape) + layer.bias.view(shape)


@contextmanager
def recurrent_in_training(model: nn.Module) -> Iterator[None]:
    """Recurrent layers of a model in eval mode are in training mode, which cuDNN wants for their gradients.

    They compute the same in both: those with dropout are refused.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, nn.RNNBase)]
    for layer in layers:
        layer.train()
    try:
        yield
    finally:
        for layer in layers:
            layer.eval()
