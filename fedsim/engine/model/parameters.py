"""What of a model travels: trainable parameters and floating-point buffers. Frozen parameters stay where they are."""

from torch import nn

from fedsim.types import Params


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


def initial(model: nn.Module) -> Params:
    """A copy of what clients and server send each other, as the model holds it now."""
    return {name: tensor.detach().clone() for name, tensor in traveling(model).items()}
