"""Users' models as engines take them: what travels, copies that can be trained, and what cannot.

Dropout masks are counter-based: functions of (seed, round, client, step, layer, element) alone,
whether clients train one by one or side by side, padded or not. An element is its place in the
layer's input, so that padding changes masks where the batch is not the first axis.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from fedsim.core.errors import ConfigError, Problem, check
from fedsim.core.types import Params
from fedsim.engine.device import is_out_of_memory


def trained_names(model: nn.Module) -> list[str]:
    """Names of the parameters that local training changes."""
    return [name for name, p in model.named_parameters() if p.requires_grad]


def buffer_names(model: nn.Module) -> list[str]:
    """Names of the floating-point buffers of the state dict (BatchNorm's running statistics)."""
    saved = model.state_dict()
    return [name for name, b in model.named_buffers() if name in saved and b.is_floating_point()]


def traveling(model: nn.Module) -> Params:
    """What clients and server send each other, by name; shares memory with the model."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: named[name] for name in (*trained_names(model), *buffer_names(model))}


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(layer, _BatchNorm) for layer in model.modules())


def initial(model: nn.Module) -> Params:
    """A copy of what clients and server send each other, as the model holds it now."""
    return {name: tensor.detach().clone() for name, tensor in traveling(model).items()}


_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed integer
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685
_CALLS = 2**20  # more applications of one layer in a step than there will ever be


def mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014) on int64; the arithmetic wraps as
    unsigned would."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _MIX_2
    return z ^ ((z >> 31) & (2**33 - 1))


class KeyedDropout(nn.Module):
    """Inverted dropout whose mask is a pure function of `key` (an int64 scalar that the engine
    supplies per step), and of `calls`, the applications within a step, which the engine sets back
    to 0 before each."""

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
    """What the `calls`-th application of a layer keeps of an input of `shape`, for each of `keys`
    [...]: bool [..., *shape]."""
    salt = (
        (1 + calls + layer * _CALLS) * _GOLDEN + 2**63
    ) % 2**64 - 2**63  # as an int64 would hold it
    element = torch.arange(math.prod(shape), device=keys.device).view(*shape)
    start = mix(keys + salt)
    bits = mix(start.view(*start.shape, *[1] * len(shape)) + element * _GOLDEN)
    return ((bits >> 40) & (2**24 - 1)) >= round(p * 2**24)


class MaskedBatchNorm(nn.Module):
    """BatchNorm over the samples that `mask` [batch] marks, as torch's layer on these alone; one
    value per channel, which torch refuses in training, counts as a batch of variance zero."""

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
        return (
            y if self.weight is None else y * self.weight.view(channels) + self.bias.view(channels)
        )


class _LenientBatchNorm(nn.BatchNorm2d):
    def _check_input_dim(self, input: Tensor) -> None:
        """For inputs of any number of axes."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or x[:, 0].numel() > 1:
            return super().forward(x)
        with torch.no_grad():
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
            if self.running_mean is not None and self.running_var is not None:
                share = (
                    1 / int(self.num_batches_tracked or 1)
                    if self.momentum is None
                    else self.momentum
                )
                self.running_mean.lerp_(x.flatten(), share)
                self.running_var.lerp_(torch.zeros_like(self.running_var), share)
        shape = (1, -1) + (1,) * (x.dim() - 2)
        zeros = x - x
        return zeros * self.weight.view(shape) + self.bias.view(shape) if self.affine else zeros


def lenient(source: nn.BatchNorm1d | nn.BatchNorm2d) -> nn.Module:
    """torch's own layer, which takes one value per channel for a batch of variance zero instead of
    refusing it."""
    layer = copy.deepcopy(source)
    layer.__class__ = _LenientBatchNorm
    return layer


@contextmanager
def recurrent_in_training(model: nn.Module) -> Iterator[None]:
    """Recurrent layers of a model in eval mode are in training mode, which cuDNN wants for their
    gradients; without dropout, they compute the same in both."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.RNNBase)]
    for layer in layers:
        layer.train()
    try:
        yield
    finally:
        for layer in layers:
            layer.eval()


KEYED = "nn.Dropout has masks keyed by seed, round, client and step: use that instead"
ONE_BY_ONE = "engine=sequential runs it"


@contextmanager
def refused_if_it_fails(model: nn.Module, what: str) -> Iterator[None]:
    """Try out a pass of `model`: what torch raises in it is a `ConfigError` that says `what` it
    cannot do, unless there is no memory."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        rule = f"model {type(model).__name__} {what}: {reason}"
        raise ConfigError([Problem("", ..., rule, ONE_BY_ONE)]) from error


def for_batched(model: nn.Module) -> nn.Module:
    """A copy in training mode with keyed dropout and masked BatchNorm. Raises `ConfigError` naming
    unfit layers."""
    check(*_problems(model, lambda layer: _random(layer) or _coupled(layer)))
    return _adapted(model, MaskedBatchNorm)


def for_sequential(model: nn.Module) -> nn.Module:
    """A copy in training mode with keyed dropout, and BatchNorm of torch's that takes batches of
    one value. Raises `ConfigError` naming layers whose randomness is hidden."""
    check(*_problems(model, _random))
    return _adapted(model, lenient)


def refuse_mixed_samples(model: nn.Module, first: Tensor, other: Tensor) -> None:
    """Raise `ConfigError` where `first` and `other`, what a batch of a valid sample and padding
    gives for the valid one with two samples as padding, are finite and differ: the model would
    train on padding."""
    if (
        torch.isfinite(first).all()
        and torch.isfinite(other).all()
        and not torch.allclose(first, other, 1e-3, 1e-3)
    ):
        rule = f"model {type(model).__name__} mixes the samples of a batch, so that padding would change its training"
        raise ConfigError([Problem("", ..., rule, ONE_BY_ONE)])


def refuse_hidden_randomness(model: nn.Module, x: Tensor) -> None:
    """Raise `ConfigError` if two samples of `x` that pass in training mode draw from torch's global
    generator (a functional dropout, added noise), which is put back."""
    worker = for_sequential(model).to(x.device)

    def generator_state() -> Tensor:
        return torch.cuda.get_rng_state(x.device) if x.is_cuda else torch.get_rng_state()

    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        before = generator_state()
        with torch.no_grad():
            worker(x[:2])
        drew = not torch.equal(before, generator_state())
    if drew:
        rule = (
            f"model {type(model).__name__} draws from torch's global generator in its training pass"
        )
        raise ConfigError([Problem("", ..., rule, KEYED)])


def layout_for(model: nn.Module, x: Tensor, precision: str = "float32") -> torch.memory_format:
    """How batches of `x` should lie in memory: channels last for convolutions on a CPU (1.3 to 2
    times as fast) and in bf16 on a GPU (1.3 times; in float32 it is 1.4 to 4 times as slow), but
    for models that cannot take it, such as those with `view` behind a convolution."""
    convolutional = any(isinstance(m, nn.Conv2d) for m in model.modules())
    if x.dim() != 4 or not len(x) or not convolutional or (x.is_cuda and precision != "bf16"):
        return torch.contiguous_format
    with torch.no_grad():
        try:
            copy.deepcopy(model).eval()(x[:2].contiguous(memory_format=torch.channels_last))
        except RuntimeError:
            return torch.contiguous_format
    return torch.channels_last


def has_dropout(model: nn.Module) -> bool:
    return any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in model.modules())


def is_convolutional(model: nn.Module) -> bool:
    """Whether there are convolutions: vmap over clients makes grouped ones of them, on a CPU slower
    than one by one."""
    return any(isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) for layer in model.modules())


def keyed_dropouts(model: nn.Module) -> dict[str, KeyedDropout]:
    """The dropout layers of an adapted model, by the name of their key buffer."""
    return {
        _name(path, "key"): layer
        for path, layer in model.named_modules()
        if isinstance(layer, KeyedDropout)
    }


def masked_norms(model: nn.Module) -> list[str]:
    """Names of the mask buffers of a model's MaskedBatchNorm layers."""
    return [
        _name(path, "mask")
        for path, layer in model.named_modules()
        if isinstance(layer, MaskedBatchNorm)
    ]


def _name(path: str, buffer: str) -> str:
    return f"{path}.{buffer}" if path else buffer


def _adapted(
    model: nn.Module, batch_norm: Callable[[nn.BatchNorm1d | nn.BatchNorm2d], nn.Module]
) -> nn.Module:
    """Layers that stand at several places (a shared dropout) are replaced by one new layer at all
    of them."""
    model = copy.deepcopy(model)
    replaced: dict[nn.Module, nn.Module] = {}
    for path, layer in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(layer, nn.Dropout | nn.BatchNorm1d | nn.BatchNorm2d):
            continue
        if layer not in replaced:
            number = len(replaced)
            replaced[layer] = (
                KeyedDropout(layer.p, number)
                if isinstance(layer, nn.Dropout)
                else batch_norm(layer)
            )
        if not path:
            return replaced[layer].train()
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, replaced[layer])
    return model.train()


def _problems(
    model: nn.Module, unfit: Callable[[nn.Module], tuple[str, str] | None]
) -> Iterator[Problem]:
    for path, layer in model.named_modules():
        if found := unfit(layer):
            why, remedy = found
            rule = f"model {type(model).__name__}: layer '{path}' ({type(layer).__name__}) {why}"
            yield Problem("", ..., rule, remedy)


def _random(layer: nn.Module) -> tuple[str, str] | None:
    unkeyed = isinstance(layer, _DropoutNd) and not isinstance(layer, nn.Dropout) and layer.p > 0
    inner = isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and layer.dropout > 0
    return ("draws from torch's global generator", KEYED) if unkeyed or inner else None


def _coupled(layer: nn.Module) -> tuple[str, str] | None:
    """Layers that mix the samples of a batch, among them padding, or that vmap does not know."""
    known = isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)
    norm = isinstance(layer, _BatchNorm) and not (
        known and layer.track_running_stats and layer.momentum is not None
    )
    instance = isinstance(layer, _InstanceNorm) and layer.track_running_stats
    unfit = norm or instance or isinstance(layer, nn.RNNBase)
    return ("cannot run for several clients at once", ONE_BY_ONE) if unfit else None
