"""Facts about a user's model: which tensors clients and server send, and which layers it has."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from fedsim.core.errors import Problem
from fedsim.core.types import Params
from fedsim.engine.data import ClientData


def trained_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that local training changes."""
    return [name for name, value in model.named_parameters() if value.requires_grad]


def buffer_names(model: nn.Module) -> list[str]:
    """Return the floating-point buffers of the state dict (BatchNorm's running statistics)."""
    saved = model.state_dict()
    buffers = model.named_buffers()
    return [name for name, value in buffers if name in saved and value.is_floating_point()]


def traveling(model: nn.Module) -> Params:
    """Return what clients and server send each other, by name. It shares memory with the model."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensors[name] for name in (*trained_names(model), *buffer_names(model))}


def initial(model: nn.Module) -> Params:
    """Return a copy of what clients and server send each other."""
    return {name: tensor.detach().clone() for name, tensor in traveling(model).items()}


def model_problems(model: nn.Module, data: ClientData) -> list[Problem]:
    """Return the problems that show before training: nothing to train, and outputs that are no
    logits. Errors of a forward pass are left to the engine."""
    name = type(model).__name__
    if any(isinstance(value, UninitializedParameter) for value in model.parameters()):
        text = "has a lazy layer, whose size is not known when the run begins"
        return [Problem("model", name, text, "give its size, as nn.Linear has it")]
    if not trained_names(model):
        return [Problem("model", name, "has no parameters that are trained")]
    if not len(data.x):
        return []
    copied = copy.deepcopy(model).to(data.x.device).eval()
    for samples in (data.x[:2], data.x[:1]):  # a squeeze() drops the axis of a batch of one
        try:
            with torch.no_grad():
                output = copied(samples)
        except Exception:  # a user's model may raise anything
            return []
        shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        is_logits = isinstance(output, Tensor) and output.dim() == 2 and len(output) == len(samples)
        if not (is_logits and output.shape[1] >= data.num_classes):
            text = f"must return logits [batch, num_classes={data.num_classes}], not {shape} for "
            plural = "" if len(samples) == 1 else "s"
            return [Problem("model", name, f"{text}{len(samples)} sample{plural}")]
    return []


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether the model has BatchNorm layers."""
    return any(isinstance(layer, _BatchNorm) for layer in model.modules())


def has_dropout(model: nn.Module) -> bool:
    """Return whether the model has dropout layers of a rate above 0."""
    return any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in model.modules())


def is_convolutional(model: nn.Module) -> bool:
    """Return whether the model has convolutions.

    vmap over clients makes grouped convolutions of them. On a CPU these are slower than one client
    after another.
    """
    return any(isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) for layer in model.modules())


def layout_for(model: nn.Module, x: Tensor, precision: str = "float32") -> torch.memory_format:
    """Return the memory layout for batches of `x`.

    Channels last makes convolutions 1.3 to 2 times as fast on a CPU, and 1.3 times in bf16 on a
    GPU. In float32 on a GPU they are 1.4 to 4 times as slow. Some models cannot take it, such as
    models with `view` after a convolution.
    """
    convolutional = any(isinstance(layer, nn.Conv2d) for layer in model.modules())
    if x.dim() != 4 or not len(x) or not convolutional or (x.is_cuda and precision != "bf16"):
        return torch.contiguous_format
    try:
        with torch.no_grad():
            copy.deepcopy(model).eval()(x[:2].contiguous(memory_format=torch.channels_last))
    except RuntimeError:
        return torch.contiguous_format
    return torch.channels_last
