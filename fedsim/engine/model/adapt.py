"""Copies of a user's model that an engine can train, and what no engine or not this engine can."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from fedsim.engine.memory import is_out_of_memory
from fedsim.engine.model.layers import KeyedDropout, MaskedBatchNorm, lenient
from fedsim.errors import ConfigError, Problem, check

KEYED = "nn.Dropout has masks keyed by seed, round, client and step: use that instead"
ONE_BY_ONE = "engine=sequential runs it"


@contextmanager
def refused_if_it_fails(model: nn.Module, what: str) -> Iterator[None]:
    """Try out a pass of `model`: what torch raises in it is a `ConfigError` that says `what` it cannot do.

    That there is no memory is no property of the model, and raised as it is.
    """
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        rule = f"model {type(model).__name__} {what}: {reason}"
        raise ConfigError([Problem("", ..., rule, ONE_BY_ONE)]) from error


def for_batched(model: nn.Module) -> nn.Module:
    """A copy in training mode with keyed dropout and masked BatchNorm. Raises `ConfigError` naming unfit layers."""
    check(*_problems(model, lambda layer: _random(layer) or _coupled(layer)))
    return _adapted(model, MaskedBatchNorm)


def for_sequential(model: nn.Module) -> nn.Module:
    """A copy in training mode with keyed dropout, and BatchNorm of torch's that takes batches of one value.

    Raises `ConfigError` naming layers whose randomness is hidden.
    """
    check(*_problems(model, _random))
    return _adapted(model, lenient)


def refuse_mixed_samples(model: nn.Module, first: Tensor, other: Tensor) -> None:
    """Raise `ConfigError` where `first` and `other`, what a batch of a valid sample and padding gives for the valid one
    with two samples as padding, differ: beside full batches, the model would train on padding.

    Nothing is said of values that are not finite.
    """
    if torch.isfinite(first).all() and torch.isfinite(other).all() and not torch.allclose(first, other, 1e-3, 1e-3):
        rule = f"model {type(model).__name__} mixes the samples of a batch, so that padding would change its training"
        raise ConfigError([Problem("", ..., rule, ONE_BY_ONE)])


def refuse_hidden_randomness(model: nn.Module, x: Tensor) -> None:
    """Pass the two first samples of `x` through a sequential copy in training mode.

    Raises `ConfigError` if that draws from torch's global generator (a functional dropout, added noise); the generator
    is put back.
    """
    worker = for_sequential(model).to(x.device)
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        before = _generator_state(x.device)
        with torch.no_grad():
            worker(x[:2])
        drew = not torch.equal(before, _generator_state(x.device))
    if drew:
        rule = f"model {type(model).__name__} draws from torch's global generator in its training pass"
        raise ConfigError([Problem("", ..., rule, KEYED)])


def layout_for(model: nn.Module, x: Tensor) -> torch.memory_format:
    """How batches of `x` should lie in memory: channels last for convolutions, 1.3 to 2 times as fast on a CPU, and
    what the tensor cores of a GPU take without a conversion.

    Not for models that cannot take it, such as those with `view` behind a convolution.
    """
    convolutional = any(isinstance(m, nn.Conv2d) for m in model.modules())
    if x.dim() != 4 or not len(x) or not convolutional:
        return torch.contiguous_format
    with torch.no_grad():
        try:
            copy.deepcopy(model).eval()(x[:2].contiguous(memory_format=torch.channels_last))
        except RuntimeError:
            return torch.contiguous_format
    return torch.channels_last


def has_dropout(model: nn.Module) -> bool:
    """Whether training draws dropout masks."""
    return any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in model.modules())


def is_convolutional(model: nn.Module) -> bool:
    """Whether there are convolutions, which torch.func's vmap over clients makes grouped ones of: slow on a CPU, and
    more and smaller kernels on a GPU than one client after another."""
    return any(isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) for layer in model.modules())


def keyed_dropouts(model: nn.Module) -> Iterator[tuple[str, KeyedDropout]]:
    """The dropout layers of an adapted model that draw masks, by the name of their key buffer."""
    for path, layer in model.named_modules():
        if isinstance(layer, KeyedDropout) and layer.p > 0:
            yield f"{path}.key" if path else "key", layer


def masked_norms(model: nn.Module) -> list[str]:
    """Names of the mask buffers of a model's MaskedBatchNorm layers."""
    return [f"{path}.mask" if path else "mask" for path, m in model.named_modules() if isinstance(m, MaskedBatchNorm)]


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _adapted(model: nn.Module, batch_norm: Callable[[nn.BatchNorm1d | nn.BatchNorm2d], nn.Module]) -> nn.Module:
    """Layers that stand at several places (a shared dropout) are replaced by one new layer at all of them."""
    model = copy.deepcopy(model)
    replaced: dict[nn.Module, nn.Module] = {}
    for path, layer in list(model.named_modules(remove_duplicate=False)):
        if layer in replaced:
            pass
        elif isinstance(layer, nn.Dropout):
            replaced[layer] = KeyedDropout(layer.p, len(replaced))
        elif isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            replaced[layer] = batch_norm(layer)
        else:
            continue
        if not path:
            return replaced[layer].train()
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, replaced[layer])
    return model.train()


def _keeps_statistics(layer: nn.BatchNorm1d | nn.BatchNorm2d) -> bool:
    return layer.track_running_stats and layer.momentum is not None


def _problems(model: nn.Module, unfit: Callable[[nn.Module], tuple[str, str] | None]) -> Iterator[Problem]:
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
    norm = isinstance(layer, _BatchNorm) and not (
        isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) and _keeps_statistics(layer)
    )
    instance = isinstance(layer, _InstanceNorm) and layer.track_running_stats
    unfit = norm or instance or isinstance(layer, nn.RNNBase)
    return ("cannot run for several clients at once", ONE_BY_ONE) if unfit else None
