"""Recognise models that are plain chains of layers, by tracing them.

fedsim computes such models faster than torch's automatic differentiation (fedsim/engine/native and
fedsim/engine/linear_passes.py). Each traced operation becomes a letter, and so a model becomes a
word. The regular expression `CHAIN` accepts the words of chains: "crpfl" is a convolution, a ReLU,
a max pooling, a flattening and a linear layer.
"""

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn


@dataclass(frozen=True)
class ChainLayer:
    """A linear layer, or a convolution of stride 1.

    - `weight` and `bias`: the names of its parameters; `bias` is None for a layer without bias.
    - `dropout` and `rate`: the number and the rate of the dropout after the layer. The rate is 0 if
      no dropout follows.
    - `kernel` and `padding`: the side of a convolution's kernel and its padding, in pixels. The
      kernel of a linear layer is 0.
    - `pool`: whether 2 x 2 max pooling follows a convolution.
    """

    weight: str
    bias: str | None
    dropout: int = 0
    rate: float = 0.0
    kernel: int = 0
    padding: int = 0
    pool: bool = False

    @property
    def scale(self) -> float:
        """Factor on what the dropout keeps; 0 if it keeps nothing."""
        return 1 / (1 - self.rate) if self.rate < 1 else 0.0


@dataclass(frozen=True)
class LayerChain:
    """A model that applies its `layers` one after another.

    1. Convolutions, if the model has any. Each is followed by pooling (if `pool`), a ReLU, and
       dropout in training (if `rate` is not 0).
    2. The samples are flattened to vectors.
    3. Linear layers. All but the last one are followed by dropout in training and a ReLU.

    `flattens_late` says that the model flattens only after a linear layer, or several. Then it is
    this chain for samples that are vectors. Of samples with more axes, the linear layers before the
    flattening transform the last axis.
    """

    layers: Sequence[ChainLayer]
    flattens_late: bool = False

    @property
    def is_linear(self) -> bool:
        return not any(layer.kernel for layer in self.layers)


CHAIN = re.compile("(c(p?(d?r|rd)|rpd?))*(l(d?r|rd))*l")
"""The letters of chains (see `_letter`), without those of flattening."""


def find_chain(model: nn.Module) -> LayerChain | None:
    """Return the chain of layers that `model` is, or None if it is anything else.

    A chain has convolutions, if any, and then linear layers, with a ReLU between any two of them.
    All are trained, and each is used once. Max pooling may follow a convolution and dropout either
    kind of layer, before or after the ReLU, because the order does not matter. Dropout follows
    pooling: before it, the order does matter. Convolutions have square kernels, stride 1, and zero
    padding narrower than the kernel. Flatten, Identity and Dropout of rate 0 count as nothing.

    The forward pass is the same in training and eval mode, and all layers change their mode with
    the model's. No part of the pass is without gradients (`torch.no_grad`). Nothing has hooks, or a
    `forward` that was set on the object, because a trace does not see them.
    """
    if any(_has_hooks(layer) for layer in model.modules()):
        return None
    try:
        nodes = _trace(model, training=True)
        nodes_in_eval_mode = _trace(model, training=False)
    except Exception:  # Tracing a user's model may fail in any way.
        return None
    operations = [_operation(node) for node in nodes]
    if operations != [_operation(node) for node in nodes_in_eval_mode] or not _is_a_line(nodes):
        return None

    modules = dict(model.named_modules())
    letters = ""
    called: list[tuple[str, nn.Module]] = []
    for node in nodes[1:-1]:
        layer = modules.get(str(node.target)) if node.op == "call_module" else None
        letters += _letter(node, layer)
        if layer is not None:
            called.append((str(node.target), layer))
    if not CHAIN.fullmatch(letters.replace("f", "")) or not _flattens_between(letters):
        return None
    layers = _chain_layers(model, called)
    if not _are_whole_model(layers, model, called):
        return None
    before, flattening, _ = letters.partition("f")
    return LayerChain(layers, flattens_late="l" in before and flattening != "")


def _trace(model: nn.Module, *, training: bool) -> list[fx.Node]:
    """Return the operations of the model's forward pass in a mode. Raises `_NoChainError` for a
    layer that stays in the other mode."""
    copied = copy.deepcopy(model)
    copied.train(training)
    if any(layer.training != training for layer in copied.modules()):
        raise _NoChainError
    with torch.enable_grad():  # the caller may have switched gradients off
        return list(_GradientTracer().trace(copied).nodes)


class _NoChainError(Exception):
    """The model does something that a chain does not."""


class _GradientTracer(fx.Tracer):
    """A tracer that rejects operations for which the model switches gradients off."""

    def create_node(self, *arguments: Any, **options: Any) -> fx.Node:
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            raise _NoChainError
        return super().create_node(*arguments, **options)


def _letter(node: fx.Node, layer: nn.Module | None) -> str:
    """Return c (convolution), p (max pooling), l (linear layer), d (dropout), r (ReLU) or f
    (flatten).

    What does nothing has no letter, and everything else is "?".
    """
    letter = "?"
    if isinstance(layer, nn.Flatten):
        letter = "f" if layer.start_dim == 1 and layer.end_dim == -1 else "?"
    elif _calls(node, torch.flatten, "flatten"):
        letter = "f" if node.args[1:] == (1,) and not node.kwargs else "?"
    elif type(layer) is nn.ReLU or _calls(node, torch.relu, nn.functional.relu, "relu"):
        letter = "r"
    elif type(layer) is nn.Dropout:
        letter = "d" if layer.p else ""
    elif type(layer) is nn.Conv2d:
        letter = "c" if _is_plain(layer) else "?"
    elif type(layer) is nn.MaxPool2d:
        letter = "p" if _halves(layer) else "?"
    elif type(layer) is nn.Linear:
        letter = "l"
    elif type(layer) is nn.Identity:
        letter = ""
    return letter


def _flattens_between(letters: str) -> bool:
    """Return whether pixels are flattened after all convolutions and before any linear layer."""
    before, flattening, after = letters.partition("f")
    if "c" in after or "p" in after:
        return False
    return "c" not in before or (flattening != "" and "l" not in before)


def _chain_layers(model: nn.Module, called: Sequence[tuple[str, nn.Module]]) -> list[ChainLayer]:
    """Return the layers of a model whose letters are those of a chain.

    `called` has the names and modules that the forward pass calls, in order.
    """
    all_dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    layers: list[ChainLayer] = []
    for name, module in called:
        if isinstance(module, nn.Linear | nn.Conv2d):
            bias = None if module.bias is None else f"{name}.bias"
            layer = ChainLayer(f"{name}.weight", bias)
            if isinstance(module, nn.Conv2d):
                kernel, padding = module.kernel_size[0], int(module.padding[0])
                layer = replace(layer, kernel=kernel, padding=padding)
            layers.append(layer)
        elif isinstance(module, nn.MaxPool2d):
            layers[-1] = replace(layers[-1], pool=True)
        elif isinstance(module, nn.Dropout) and module.p:
            number = all_dropouts.index(module)  # as KeyedDropout counts them
            layers[-1] = replace(layers[-1], dropout=number, rate=module.p)
    return layers


def _are_whole_model(
    layers: Sequence[ChainLayer], model: nn.Module, called: Sequence[tuple[str, nn.Module]]
) -> bool:
    """Return whether the chain of `layers` has all tensors of the model, all of which are trained,
    and each layer and dropout is used once."""
    used = []
    for _, module in called:
        has_dropout = isinstance(module, nn.Dropout) and module.p > 0
        if has_dropout or isinstance(module, nn.Linear | nn.Conv2d):
            used.append(module)
    if len(used) != len(set(used)) or list(model.buffers()):
        return False
    names = {name for layer in layers for name in (layer.weight, layer.bias) if name is not None}
    if names != dict(model.named_parameters()).keys():
        return False
    return all(parameter.requires_grad for parameter in model.parameters())


def _has_hooks(layer: nn.Module) -> bool:
    hooks = (
        layer._forward_hooks,
        layer._forward_pre_hooks,
        layer._backward_hooks,
        layer._backward_pre_hooks,
    )
    return any(hooks) or "forward" in vars(layer)


def _operation(node: fx.Node) -> tuple[Any, ...]:
    """Return what a node does, to compare it with a node of another trace."""
    return node.op, node.target, str(node.args), str(node.kwargs)


def _is_a_line(nodes: Sequence[fx.Node]) -> bool:
    """Return whether there is one input and one output, and each node uses the one before it
    only."""
    *before, output = nodes
    if output.op != "output" or output.args[0] is not before[-1]:
        return False
    for previous, node in pairwise(before):
        if node.op == "placeholder" or node.all_input_nodes != [previous]:
            return False
    return before[0].op == "placeholder"


def _is_plain(layer: nn.Conv2d) -> bool:
    height, width = layer.kernel_size
    if isinstance(layer.padding, str) or height != width:
        return False
    narrow = layer.padding[0] == layer.padding[1] < height
    zeros = layer.padding_mode == "zeros"
    return narrow and zeros and layer.stride == layer.dilation == (1, 1) and layer.groups == 1


def _halves(layer: nn.MaxPool2d) -> bool:
    """Return whether the pooling takes the maxima of 2 x 2 pixels that do not overlap."""
    two, zero, one = ((2, (2, 2)), (0, (0, 0)), (1, (1, 1)))
    return (
        layer.kernel_size in two
        and layer.stride in two
        and layer.padding in zero
        and layer.dilation in one
        and not layer.ceil_mode
        and not layer.return_indices
    )


def _calls(node: fx.Node, *targets: Any) -> bool:
    """Return whether the node calls one of these functions or tensor methods (and not a layer)."""
    return node.op in ("call_function", "call_method") and node.target in targets
