"""Layers whose hidden state a batched program must spell out: dropout's randomness and BatchNorm's batch.

Both engines draw dropout masks by the same counter-based rule, so that a mask depends on (seed, round, client, step,
layer, element) alone, whether clients train one by one or side by side, padded or not.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fedsim.errors import ConfigError, Problem

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed integer
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


def mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014) on int64; the arithmetic wraps as unsigned would."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _MIX_2
    return z ^ ((z >> 31) & (2**33 - 1))


class KeyedDropout(nn.Module):
    """Inverted dropout whose mask is a pure function of `key` (an int64 scalar that the engine supplies per step)."""

    key: Tensor

    def __init__(self, p: float, layer: int) -> None:
        super().__init__()
        self.p = p
        self.salt = ((layer + 1) * _GOLDEN + 2**63) % 2**64 - 2**63
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        element = torch.arange(x.numel(), device=x.device).view(x.shape)
        bits = mix(mix(self.key + self.salt) + element * _GOLDEN)
        keep = ((bits >> 40) & (2**24 - 1)) >= round(self.p * 2**24)
        return x * keep / (1 - self.p)


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
        self.register_buffer("mask", torch.ones(1, dtype=source.running_mean.dtype), persistent=False)

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


def _of_one_value(layer: nn.BatchNorm1d | nn.BatchNorm2d, x: Tensor) -> Tensor:
    """A batch of variance zero: what torch's layer would do if it did not refuse one value per channel."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    with torch.no_grad():
        layer.running_mean.lerp_(x.flatten(), layer.momentum or 0)
        layer.running_var.lerp_(torch.zeros_like(layer.running_var), layer.momentum or 0)
    shape = (1, -1) + (1,) * (x.dim() - 2)
    zeros = x - x
    return zeros if not layer.affine else zeros * layer.weight.view(shape) + layer.bias.view(shape)


def for_batched(model: nn.Module) -> nn.Module:
    """A copy with keyed dropout and masked BatchNorm. Raises `ConfigError` naming a layer that cannot run batched."""
    return _swap(model, MaskedBatchNorm, "engine=sequential runs it")


def for_sequential(model: nn.Module) -> nn.Module:
    """A copy with keyed dropout and torch's own BatchNorm, lenient towards batches of one value."""
    return _swap(model, _lenient, "replace it by nn.Dropout")


def _lenient(source: nn.BatchNorm1d | nn.BatchNorm2d) -> nn.Module:
    layer = copy.deepcopy(source)
    layer.__class__ = _LenientBatchNorm1d if isinstance(source, nn.BatchNorm1d) else _LenientBatchNorm2d
    return layer


def _swap(model: nn.Module, batch_norm: object, remedy: str) -> nn.Module:
    model = copy.deepcopy(model)
    num_dropouts = 0
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.Dropout):
            replacement: nn.Module = KeyedDropout(layer.p, num_dropouts)
            num_dropouts += 1
        elif type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d) and _has_plain_statistics(layer):
            replacement = batch_norm(layer)  # type: ignore[operator]
        elif fault := _fault(layer, batched=batch_norm is MaskedBatchNorm):
            raise ConfigError([Problem("model", type(model).__name__, f"layer '{path}' ({layer}) {fault}", remedy)])
        else:
            continue
        if not path:
            return replacement
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, replacement)
    return model


def _has_plain_statistics(layer: nn.Module) -> bool:
    return bool(getattr(layer, "track_running_stats", False)) and getattr(layer, "momentum", None) is not None


def _fault(layer: nn.Module, *, batched: bool) -> str | None:
    """Why a layer cannot run: hidden randomness never can, coupling within the batch cannot side by side."""
    if isinstance(layer, nn.modules.dropout._DropoutNd) or getattr(layer, "dropout", 0.0) not in (0.0, None):
        return "draws from a global generator"
    if batched and isinstance(layer, nn.modules.batchnorm._BatchNorm | nn.RNNBase):
        return "cannot run for several clients at once"
    return None


def keyed_dropouts(model: nn.Module) -> Iterator[tuple[str, KeyedDropout]]:
    """The dropout layers of a swapped model that draw masks, by the name of their key buffer."""
    for path, layer in model.named_modules():
        if isinstance(layer, KeyedDropout) and layer.p > 0:
            yield f"{path}.key" if path else "key", layer


def masked_norms(model: nn.Module) -> list[str]:
    """Names of the mask buffers of a model's MaskedBatchNorm layers."""
    return [f"{path}.mask" if path else "mask" for path, m in model.named_modules() if isinstance(m, MaskedBatchNorm)]
