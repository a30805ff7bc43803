"""Plain chains of layers, recognised in a model by tracing it."""

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn


@dataclass(frozen=True)
class ChainLayer:
    """A linear layer, or, with a `kernel`, a convolution of stride 1: names of its weight and bias
    (None without), the number and rate of the dropout behind a linear layer, and whether a 2 x 2
    max pooling is behind a convolution."""

    weight: str
    bias: str | None
    dropout: int = 0
    rate: float = 0.0
    kernel: int = 0
    padding: int = 0
    pool: bool = False

    @property
    def scale(self) -> float:
        """Of what the dropout keeps; where it keeps nothing, 0."""
        return 1 / (1 - self.rate) if self.rate < 1 else 0.0


@dataclass(frozen=True)
class LayerChain:
    """y = L_n(relu(drop(... relu(drop(L_1(flatten(x))))))), dropout in training only, and before
    it, if there are convolutions, relu(pool(conv(... relu(pool(conv(x))))) in place of x.

    `flattens_late`: the first to flatten stands behind a linear layer. The chain is then what the
    model is on vectors alone: of samples with several axes, the layers before it take the last one.
    """

    links: Sequence[ChainLayer]
    flattens_late: bool = False

    @property
    def is_linear(self) -> bool:
        return not any(link.kernel for link in self.links)


def any_chain(model: nn.Module) -> LayerChain | None:
    """The chain of layers that `model` is, or None if it is anything else.

    Convolutions, if any, and then linear layers, with a ReLU between any two, all trained, each
    used once. A dropout before or behind a ReLU (which is the same) belongs to its linear layer, a
    max pooling before or behind a ReLU (which is the same) to its convolution. Convolutions have
    square kernels, stride 1 and a padding by zeros narrower than the kernel. Flatten, Identity and
    Dropout of rate 0 count as nothing. Nothing has hooks, or a pass put in place of its class's,
    which a trace does not see, and the pass is the same in training and in eval mode.
    """
    if any(_has_hooks(layer) for layer in model.modules()):
        return None
    try:
        traced = copy.deepcopy(model)
        nodes, in_eval_mode = (
            list(fx.symbolic_trace(traced.train(mode)).graph.nodes) for mode in (True, False)
        )
    except Exception:  # tracing a user's model may fail in any way
        return None
    if [_called(node) for node in nodes] != [
        _called(node) for node in in_eval_mode
    ] or not _is_a_line(nodes):
        return None
    layers = dict(model.named_modules())
    called = [
        (node, layers.get(str(node.target)) if node.op == "call_module" else None)
        for node in nodes[1:-1]
    ]
    letters = "".join(_letter(node, layer) for node, layer in called)
    before, flatten, after = letters.partition("f")
    fits = CHAIN.fullmatch(before + after.replace("f", "")) and not set(after) & set("cp")
    if not fits or ("c" in before and (not flatten or "l" in before)):
        return None
    links = _links(
        model, [(str(node.target), layer) for node, layer in called if layer is not None]
    )
    return None if links is None else LayerChain(links, "l" in before and bool(flatten))


CHAIN = re.compile("(c(rp?|pr))*(l(d?r|rd))*l")
"""Letters of the layers of a chain, without flattening."""


def _letter(node: fx.Node, layer: nn.Module | None) -> str:
    """Convolution, max pooling, linear layer, dropout, ReLU, flattening; none for what does
    nothing, ? for the rest."""
    if isinstance(layer, nn.Flatten):
        return "f" if layer.start_dim == 1 and layer.end_dim == -1 else "?"
    if _calls(node, torch.flatten, "flatten"):
        return "f" if node.args[1:] == (1,) and not node.kwargs else "?"
    if type(layer) is nn.ReLU or _calls(node, torch.relu, nn.functional.relu, "relu"):
        return "r"
    if type(layer) is nn.Dropout:
        return "d" if layer.p else ""
    if type(layer) is nn.Conv2d:
        return "c" if _is_plain(layer) else "?"
    if type(layer) is nn.MaxPool2d:
        return "p" if _halves(layer) else "?"
    return {nn.Linear: "l", nn.Identity: ""}.get(type(layer), "?")


def _links(model: nn.Module, called: Sequence[tuple[str, nn.Module]]) -> list[ChainLayer] | None:
    """Of layers that are a chain by their letters; None unless each is used once, and their tensors
    are all of the model's, and all trained."""
    dropouts = [
        layer for layer in model.modules() if isinstance(layer, nn.Dropout)
    ]  # as the engines count them
    links: list[ChainLayer] = []
    for name, layer in called:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            links.append(
                ChainLayer(f"{name}.weight", None if layer.bias is None else f"{name}.bias")
            )
        if isinstance(layer, nn.Conv2d):
            links[-1] = replace(
                links[-1], kernel=layer.kernel_size[0], padding=int(layer.padding[0])
            )
        elif isinstance(layer, nn.MaxPool2d):
            links[-1] = replace(links[-1], pool=True)
        elif isinstance(layer, nn.Dropout) and layer.p:
            links[-1] = replace(links[-1], dropout=dropouts.index(layer), rate=layer.p)
    once = [
        layer
        for _, layer in called
        if isinstance(layer, nn.Linear | nn.Conv2d) or getattr(layer, "p", False)
    ]
    names = {name for link in links for name in (link.weight, link.bias) if name is not None}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    whole = names == trained == {name for name, _ in model.named_parameters()} and not list(
        model.buffers()
    )
    return links if whole and len(once) == len(set(once)) else None


def _has_hooks(layer: nn.Module) -> bool:
    hooks = (
        layer._forward_hooks,
        layer._forward_pre_hooks,
        layer._backward_hooks,
        layer._backward_pre_hooks,
    )
    return any(hooks) or "forward" in vars(layer)


def _called(node: fx.Node) -> tuple[Any, ...]:
    return node.op, node.target, str(node.args), str(node.kwargs)


def _is_a_line(nodes: Sequence[fx.Node]) -> bool:
    """One input, one output, and in between each node a function of the one before it alone."""
    first, *between, last = nodes
    inputs = [tuple(node.all_input_nodes) for node in between]
    straight = inputs == [(node,) for node in [first, *between][: len(between)]]
    single = (
        first.op == "placeholder"
        and last.op == "output"
        and last.args[0] is (between or [first])[-1]
    )
    return straight and single and not any(node.op in ("placeholder", "output") for node in between)


def _is_plain(layer: nn.Conv2d) -> bool:
    (height, width), padding = layer.kernel_size, layer.padding
    square = not isinstance(padding, str) and height == width and padding[0] == padding[1] < height
    return (
        square
        and layer.stride == layer.dilation == (1, 1)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
    )


def _halves(layer: nn.MaxPool2d) -> bool:
    given = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    fits = all(
        value in (side, (side, side)) for value, side in zip(given, (2, 2, 0, 1), strict=True)
    )
    return fits and not layer.ceil_mode and not layer.return_indices


def _calls(node: fx.Node, *targets: Any) -> bool:
    """Whether the node calls one of these functions or methods of a tensor; a layer may have the
    name of one."""
    return node.op in ("call_function", "call_method") and node.target in targets
