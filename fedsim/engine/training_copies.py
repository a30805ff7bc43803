"""Copies of a user's model for training, and the models that cannot be trained that way.

The copies have the layers of `fedsim.engine.training_layers`. A model is rejected before the run
starts if its randomness is not keyed, or if padding would change its training.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from fedsim.core.errors import ConfigError, Problem, check
from fedsim.engine.device import is_out_of_memory
from fedsim.engine.model import traveling
from fedsim.engine.training_layers import KeyedDropout, LenientBatchNorm, MaskedBatchNorm

USE_KEYED_DROPOUT = "nn.Dropout has masks keyed by seed, round, client and step: use that instead"
USE_PLAIN_LAYER = "use that layer itself, and another layer for the rest"
USE_SEQUENTIAL = "engine=sequential runs it"


def for_batched(model: nn.Module) -> nn.Module:
    """Return a copy in training mode with keyed dropout and masked BatchNorm.

    Raises `ConfigError` naming layers that are random or mix the samples of a batch.
    """
    check(*_layer_problems(model, batched=True))
    return _with_training_layers(model, MaskedBatchNorm)


def for_sequential(model: nn.Module) -> nn.Module:
    """Return a copy in training mode with keyed dropout and lenient BatchNorm.

    Raises `ConfigError` naming layers whose randomness is hidden.
    """
    check(*_layer_problems(model, batched=False))
    return _with_training_layers(model, LenientBatchNorm.like)


def _with_training_layers(
    model: nn.Module, batch_norm: Callable[[nn.BatchNorm1d | nn.BatchNorm2d], nn.Module]
) -> nn.Module:
    """Replace dropout and BatchNorm in a copy.

    A layer that is used at several places, such as a shared dropout, is replaced by one new layer.
    """
    model = copy.deepcopy(model)
    replaced: dict[nn.Module, nn.Module] = {}
    for path, layer in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(layer, nn.Dropout | nn.BatchNorm1d | nn.BatchNorm2d):
            continue
        if layer not in replaced:
            if isinstance(layer, nn.Dropout):
                replaced[layer] = KeyedDropout(layer.p, layer=len(replaced))
            else:
                replaced[layer] = batch_norm(layer)
        if not path:
            return replaced[layer].train()
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, replaced[layer])
    return model.train()


def _layer_problems(model: nn.Module, *, batched: bool) -> Iterator[Problem]:
    for path, layer in model.named_modules():
        if _is_random(layer):
            fault, remedy = "draws from torch's global generator", USE_KEYED_DROPOUT
        elif _has_own_forward(layer):
            kind = "Dropout" if isinstance(layer, nn.Dropout) else "BatchNorm"
            fault, remedy = f"changes {kind}, which training replaces", USE_PLAIN_LAYER
        elif batched and _mixes_samples(layer):
            fault, remedy = "cannot run for several clients at once", USE_SEQUENTIAL
        else:
            continue
        text = f"model {type(model).__name__}: layer '{path}' ({type(layer).__name__}) {fault}"
        yield Problem("", ..., text, remedy)


def _is_random(layer: nn.Module) -> bool:
    """Return whether the layer draws from torch's global generator."""
    if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
        return layer.dropout > 0
    return isinstance(layer, _DropoutNd) and not isinstance(layer, nn.Dropout) and layer.p > 0


def _has_own_forward(layer: nn.Module) -> bool:
    """Return whether training replaces the layer, though it has a forward pass of its own."""
    if isinstance(layer, nn.Dropout):
        return type(layer).forward is not nn.Dropout.forward
    is_replaced = isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)
    return is_replaced and type(layer).forward is not _BatchNorm.forward


def _mixes_samples(layer: nn.Module) -> bool:
    """Return whether the layer mixes the samples of a batch with padding, or vmap does not know
    it."""
    if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):  # MaskedBatchNorm replaces these.
        return not layer.track_running_stats or layer.momentum is None
    if isinstance(layer, _InstanceNorm):
        return layer.track_running_stats
    return isinstance(layer, _BatchNorm | nn.RNNBase)


@contextmanager
def reject_if_it_fails(model: nn.Module, fault: str) -> Iterator[None]:
    """Turn what torch raises in a trial pass into a `ConfigError` with the model's `fault`.

    Running out of memory is no fault of the model.
    """
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        text = f"model {type(model).__name__} {fault}: {reason}"
        raise ConfigError([Problem("", ..., text, USE_SEQUENTIAL)]) from error


def reject_mixed_samples(model: nn.Module, first: Tensor, second: Tensor) -> None:
    """Raise `ConfigError` if a valid sample's result depends on padding.

    `first` and `second` are its results next to two different samples as padding. Results that are
    not finite say nothing.
    """
    finite = torch.isfinite(first).all() and torch.isfinite(second).all()
    if finite and not torch.allclose(first, second, 1e-3, 1e-3):
        text = (
            f"model {type(model).__name__} mixes the samples of a batch, so that padding would "
            "change its training"
        )
        raise ConfigError([Problem("", ..., text, USE_SEQUENTIAL)])


def reject_hidden_randomness(model: nn.Module, x: Tensor) -> None:
    """Raise `ConfigError` if a training pass draws from torch's global generator.

    That may be a functional dropout or added noise. The pass has two samples of `x`, and the
    generator is put back.
    """
    trial = for_sequential(model).to(x.device)

    def generator_state() -> Tensor:
        return torch.cuda.get_rng_state(x.device) if x.is_cuda else torch.get_rng_state()

    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        before = generator_state()
        with torch.no_grad():
            trial(x[:2])
        draws = not torch.equal(before, generator_state())
    if draws:
        text = (
            f"model {type(model).__name__} draws from torch's global generator in its training pass"
        )
        raise ConfigError([Problem("", ..., text, USE_KEYED_DROPOUT)])


def reject_hidden_state(model: nn.Module, x: Tensor) -> None:
    """Raise `ConfigError` if a training pass changes buffers that clients do not send.

    Such a buffer, for example an integer counter, would be shared by clients that train at once.
    The pass has two samples of `x`.
    """
    trial = for_batched(model).to(x.device)
    trained_with = traveling(trial)

    def hidden_buffers() -> dict[str, Tensor]:
        buffers = {}
        for name, buffer in trial.named_buffers():
            if name not in trained_with:
                buffers[name] = buffer.clone()
        return buffers

    before = hidden_buffers()
    with torch.no_grad():
        trial(x[:2])
    after = hidden_buffers()
    changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
    if changed:
        text = (
            f"model {type(model).__name__} changes the buffer {changed[0]!r} in training, which "
            "clients do not send: only floating-point buffers of the state dict are sent"
        )
        raise ConfigError([Problem("", ..., text, USE_SEQUENTIAL)])


@contextmanager
def recurrent_in_training(model: nn.Module) -> Iterator[None]:
    """Put the recurrent layers of a model in eval mode into training mode.

    cuDNN computes their gradients in training mode only. They compute the same in both modes,
    because none has dropout.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, nn.RNNBase)]
    for layer in layers:
        layer.train()
    try:
        yield
    finally:
        for layer in layers:
            layer.eval()
