"""Layers that take the place of torch's dropout and BatchNorm in training.

A client's result must not depend on the clients that train next to it, nor on padding. A dropout
mask is therefore a function of (seed, round, client, step, layer, element) only, and a BatchNorm
can leave out padded samples. An element is its place in the layer's input. So padding changes
dropout masks if the batch is not the first axis.
"""

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

GOLDEN = -7046029254386353131
"""2^64 divided by the golden ratio, as a signed integer."""
MIX_1 = -4658895280553007687
MIX_2 = -7723592293110705685
"""MIX_1 and MIX_2 are SplitMix64's multipliers, as signed integers."""
MAX_CALLS = 2**20
"""More applications of one layer in a step than there will ever be."""


def mix(z: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser (Steele, Lea and Flood, 2014) to int64 numbers.

    The arithmetic wraps, as it would with unsigned numbers.
    """
    z = (z ^ ((z >> 30) & (2**34 - 1))) * MIX_1
    z = (z ^ ((z >> 27) & (2**37 - 1))) * MIX_2
    return z ^ ((z >> 31) & (2**33 - 1))


def dropout_mask(keys: Tensor, layer: int, calls: int, shape: Sequence[int], p: float) -> Tensor:
    """Return what a dropout layer of rate `p` keeps of an input of `shape`, for each of `keys`.

    `calls` numbers the layer's applications within a step. The shape is [*keys.shape, *shape].
    """
    salt = (1 + calls + layer * MAX_CALLS) * GOLDEN
    salt = (salt + 2**63) % 2**64 - 2**63  # as an int64 holds it
    element = torch.arange(math.prod(shape), device=keys.device).view(*shape)
    start = mix(keys + salt)
    start = start.view(*start.shape, *[1] * len(shape))
    bits = mix(start + element * GOLDEN)
    return ((bits >> 40) & (2**24 - 1)) >= round(p * 2**24)


class KeyedDropout(nn.Module):
    """Inverted dropout whose mask is a function of `key` and `calls`.

    The engine sets `key`, an int64 scalar, for each step. `calls` counts the applications within a
    step, and the engine resets it to 0 before each step.
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


class MaskedBatchNorm(nn.Module):
    """BatchNorm over the samples that `mask` [batch] marks, as torch's layer on these samples.

    One value per channel counts as a batch of variance zero. (torch rejects it in training.) In
    eval mode, in which a model may keep the layer, running statistics are used and stay.
    """

    running_mean: Tensor
    running_var: Tensor
    mask: Tensor

    def __init__(self, source: nn.BatchNorm1d | nn.BatchNorm2d) -> None:
        super().__init__()
        assert source.running_mean is not None
        assert source.running_var is not None
        assert source.momentum is not None
        self.eps = source.eps
        self.momentum = source.momentum
        self.weight = source.weight
        self.bias = source.bias
        self.register_buffer("running_mean", source.running_mean)
        self.register_buffer("running_var", source.running_var)
        self.register_buffer("mask", torch.ones_like(source.running_mean[:1]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        by_channel = (1, -1) + (1,) * (x.dim() - 2)
        if self.training:
            mask = self.mask.view(-1, *(1,) * (x.dim() - 1))
            axes = [0, *range(2, x.dim())]
            count = self.mask.sum() * (x[0, 0].numel())
            mean = (x * mask).sum(axes) / count
            centred = x - mean.view(by_channel)
            var = (centred.square() * mask).sum(axes) / count
            with torch.no_grad():
                unbiased = var * count / (count - 1).clamp(min=1)
                self.running_mean = torch.lerp(self.running_mean, mean.detach(), self.momentum)
                self.running_var = torch.lerp(self.running_var, unbiased.detach(), self.momentum)
        else:
            centred = x - self.running_mean.view(by_channel)
            var = self.running_var
        y = centred * torch.rsqrt(var + self.eps).view(by_channel)
        weight, bias = self.weight, self.bias
        return y if weight is None else y * weight.view(by_channel) + bias.view(by_channel)


class LenientBatchNorm(nn.BatchNorm2d):
    """torch's BatchNorm, for inputs of any number of axes.

    One value per channel counts as a batch of variance zero. (torch rejects it in training.)
    """

    @staticmethod
    def like(source: nn.BatchNorm1d | nn.BatchNorm2d) -> nn.Module:
        """Return a copy of the layer `source` that is lenient."""
        layer = copy.deepcopy(source)
        layer.__class__ = LenientBatchNorm
        return layer

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any number of axes."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or x[:, 0].numel() > 1:
            return super().forward(x)
        with torch.no_grad():
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
            if self.running_mean is not None and self.running_var is not None:
                share = self.momentum
                if share is None:  # torch then takes the mean over all batches.
                    share = 1 / int(self.num_batches_tracked or 1)
                mean = x.flatten().to(self.running_mean.dtype)
                self.running_mean.lerp_(mean, share)
                self.running_var.lerp_(torch.zeros_like(self.running_var), share)
        zeros = x - x
        if not self.affine:
            return zeros
        by_channel = (1, -1) + (1,) * (x.dim() - 2)
        return zeros * self.weight.view(by_channel) + self.bias.view(by_channel)


def keyed_dropouts(model: nn.Module) -> dict[str, KeyedDropout]:
    """Return the KeyedDropout layers of a model, by the name of their key buffer."""
    layers = {}
    for name, layer in model.named_modules():
        if isinstance(layer, KeyedDropout):
            layers[_buffer(name, "key")] = layer
    return layers


def masked_norms(model: nn.Module) -> list[str]:
    """Return the names of the mask buffers of a model's MaskedBatchNorm layers."""
    names = []
    for name, layer in model.named_modules():
        if isinstance(layer, MaskedBatchNorm):
            names.append(_buffer(name, "mask"))
    return names


def _buffer(layer_name: str, buffer: str) -> str:
    return f"{layer_name}.{buffer}" if layer_name else buffer
