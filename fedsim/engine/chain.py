"""Recognise models that are plain chains of layers, by tracing them.

fedsim computes such models faster than torch's automatic differentiation (fedsim/engine/native and
fedsim/engine/linear_passes.py). Each traced operation becomes a letter, and a chain is a word that
a regular expression accepts.
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
    """A linear layer, or a convolution of stride 1 if there is a `kernel`.

    - `weight` and `bias` are names of parameters; `bias` is None if there is none.
    - `dropout` and `rate`: number and rate of the dropout after the layer.
    - `kernel`, `padding` and `pool`: a convolution's sizes, and whether 2 x 2 pooling follows.
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
    """A model y = L_n(relu(drop(... relu(drop(L_1(flatten(x))))))), with dropout in training only.

    If there are convolutions, drop(relu(pool(conv(... drop(relu(pool(conv(x)))))))) takes the place
    of x.

    `flattens_late`: the first flattening follows a linear layer. The chain then describes the model
    on vectors only. On samples with several axes, the layers before it work along the last one.
    """

    layers: Sequence[ChainLayer]
    flattens_late: bool = False

    @property
    def is_linear(self) -> bool:
        return not any(layer.kernel for layer in self.layers)


CHAIN = re.compile("(c(p?(d?r|rd)|rpd?))*(l(d?r|rd))*l")
"""Chains as letters (see `_letter`), without flattening."""


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
    same_in_eval_mode = [*map(_operation, nodes)] == [*map(_operation, nodes_in_eval_mode)]
    if not same_in_eval_mode or not _is_a_line(nodes):
        return None

    modules = dict(model.named_modules())
    letters = ""
    called: list[tuple[str, nn.Module]] = []
    for node in nodes[1:-1]:
        layer = modules.get(str(node.target)) if node.op == "call_module" else None
        letters += _letter(node, layer)
        if layer is not None:
            called.append((str(node.target), layer))
    before, flatten, after = letters.partition("f")
    if "c" in after or "p" in after or ("c" in before and (not flatten or "l" in before)):
        return None
    if not CHAIN.fullmatch(before + after.replace("f", "")):
        return None
    layers = _chain_layers(model, called)
    return None if layers is None else LayerChain(layers, "l" in before and bool(flatten))


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


def _chain_layers(
    model: nn.Module, called: Sequence[tuple[str, nn.Module]]
) -> list[ChainLayer] | None:
    """Return the layers of a model whose letters are those of a chain.

    Returns None unless each layer is used once, and the chain has all tensors of the model, which
    are all trained.
    """
    all_dropouts = [layer for layer in model.modules() if isinstance(layer, nn.Dropout)]
    layers: list[ChainLayer] = []
    names: set[str] = set()
    used: list[nn.Module] = []
    for name, module in called:
        if isinstance(module, nn.Linear | nn.Conv2d):
            bias = None if module.bias is None else f"{name}.bias"
            layers.append(ChainLayer(f"{name}.weight", bias))
            names.add(f"{name}.weight")
            if bias is not None:
                names.add(bias)
            used.append(module)
        if isinstance(module, nn.Conv2d):
            kernel, padding = module.kernel_size[0], int(module.padding[0])
            layers[-1] = replace(layers[-1], kernel=kernel, padding=padding)
        elif isinstance(module, nn.MaxPool2d):
            layers[-1] = replace(layers[-1], pool=True)
        elif isinstance(module, nn.Dropout) and module.p:
            number = all_dropouts.index(module)  # as KeyedDropout counts them
            layers[-1] = replace(layers[-1], dropout=number, rate=module.p)
            used.append(module)
    complete = names == dict(model.named_parameters()).keys() and not list(model.buffers())
    all_trained = all(parameter.requires_grad for parameter in model.parameters())
    return layers if complete and all_trained and len(used) == len(set(used)) else None


def _has_hooks(layer: nn.Module) -> bool:
    hooks = (
        layer._forward_hooks,
        layer._forward_pre_hooks,
        layer._backward_hooks,
        layer._backward_pre_hooks,
    )
    return any(hooks) or "forward" in vars(layer)


def _operation(node: fx.Node) -> tuple[Any, ...]:
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
