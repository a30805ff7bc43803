"""Plain chains of layers, recognised in a model by tracing it."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn


@dataclass(frozen=True)
class Link:
    """A linear layer, or, with a `kernel`, a convolution of stride 1: names of its weight and bias (None without), the
    number and rate of the dropout behind a linear layer, and whether a 2 x 2 max pooling is behind a convolution."""

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
class Chain:
    """y = L_n(relu(drop(... relu(drop(L_1(flatten(x))))))), dropout in training only, and before it, if there are
    convolutions, relu(pool(conv(... relu(pool(conv(x))))) in place of x.

    `flattens_late`: the first to flatten stands behind a linear layer. The chain is then what the model is on vectors
    alone: of samples with several axes, the layers before it take the last one.
    """

    links: Sequence[Link]
    flattens_late: bool = False

    @property
    def is_linear(self) -> bool:
        """Whether there are no convolutions."""
        return not any(link.kernel for link in self.links)


def any_chain(model: nn.Module) -> Chain | None:
    """The chain of layers that `model` is, or None if it is anything else.

    Convolutions, if any, and then linear layers, with a ReLU between any two, all trained, each used once. A dropout
    before or behind a ReLU (which is the same) belongs to its linear layer, a max pooling before or behind a ReLU
    (which is the same) to its convolution. Convolutions have square kernels, stride 1 and a padding by zeros narrower
    than the kernel. Flatten, Identity and Dropout of rate 0 count as nothing. Nothing has hooks, or a pass put in place
    of its class's, which a trace does not see, and the pass is the same in training and in eval mode.
    """
    if any(_has_hooks(layer) for layer in model.modules()):
        return None
    try:
        traced = copy.deepcopy(model)
        nodes, in_eval_mode = (list(fx.symbolic_trace(traced.train(mode)).graph.nodes) for mode in (True, False))
    except Exception:  # tracing a user's model may fail in any way
        return None
    reader = _Reader(model)
    alike = [_called(node) for node in nodes] == [_called(node) for node in in_eval_mode]
    if not alike or not _is_a_line(nodes) or not all(reader.read(node) for node in nodes[1:-1]):
        return None
    return reader.chain()


def _has_hooks(layer: nn.Module) -> bool:
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return any(hooks) or "forward" in vars(layer)


def _called(node: fx.Node) -> tuple[Any, ...]:
    """What a node calls and with what, comparable between two traces; nodes among its arguments are their names."""
    return node.op, node.target, str(node.args), str(node.kwargs)


def _is_a_line(nodes: Sequence[fx.Node]) -> bool:
    """One input, one output, and in between each node a function of the one before it alone."""
    first, *between, last = nodes
    inputs = [tuple(node.all_input_nodes) for node in between]
    straight = inputs == [(node,) for node in [first, *between][: len(between)]]
    single = first.op == "placeholder" and last.op == "output" and last.args[0] is (between or [first])[-1]
    return straight and single and not any(node.op in ("placeholder", "output") for node in between)


class _Reader:
    """Reads the nodes of a trace one after another."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        dropouts = [m for m in model.modules() if isinstance(m, nn.Dropout)]
        self.dropouts = {layer: number for number, layer in enumerate(dropouts)}  # as the engines count them
        self.links: list[Link] = []
        self.activated = True  # the next layer may come
        self.flat = False  # seen a Flatten
        self.flattens_late = False
        self.used: set[nn.Module] = set()

    def read(self, node: fx.Node) -> bool:
        """Whether the node fits into a chain."""
        layer = self.modules.get(str(node.target)) if node.op == "call_module" else None
        if _is_nothing(node, layer):
            if not self.flat and type(layer) not in (nn.Identity, nn.Dropout):
                self.flat, self.flattens_late = True, bool(self.links) and not self.links[-1].kernel
            return True
        if layer is not None and layer in self.used and not isinstance(layer, nn.ReLU | nn.MaxPool2d):
            return False
        if layer is not None:
            self.used.add(layer)
        if type(layer) is nn.Dropout:
            return self._read_dropout(layer)
        if type(layer) is nn.Linear or type(layer) is nn.Conv2d:
            return self._read_layer(str(node.target), layer)
        if type(layer) is nn.MaxPool2d:
            return self._read_pool(layer)
        if _is_relu(node, layer) and not self.activated:
            self.activated = True
            return True
        return False

    def _read_layer(self, name: str, layer: nn.Linear | nn.Conv2d) -> bool:
        if not self.activated:
            return False
        self.activated = False
        convolved = bool(self.links) and self.links[-1].kernel > 0
        link = Link(f"{name}.weight", None if layer.bias is None else f"{name}.bias")
        if isinstance(layer, nn.Linear):
            self.links.append(link)
            return self.flat or not convolved
        if isinstance(layer.padding, str) or not _is_plain(layer, layer.padding):
            return False
        self.links.append(replace(link, kernel=layer.kernel_size[0], padding=layer.padding[0]))
        return not self.flat and (convolved or len(self.links) == 1)

    def _read_pool(self, layer: nn.MaxPool2d) -> bool:
        if not self.links or not self.links[-1].kernel or self.links[-1].pool or self.flat:
            return False
        self.links[-1] = replace(self.links[-1], pool=True)
        given = layer.kernel_size, layer.stride, layer.padding, layer.dilation
        fits = all(value in (side, (side, side)) for value, side in zip(given, (2, 2, 0, 1), strict=True))
        return fits and not layer.ceil_mode and not layer.return_indices

    def _read_dropout(self, layer: nn.Dropout) -> bool:
        if not self.links or self.links[-1].rate or self.links[-1].kernel:
            return False
        self.links[-1] = replace(self.links[-1], dropout=self.dropouts[layer], rate=layer.p)
        return True

    def chain(self) -> Chain | None:
        """What was read, if it is whole: the chain's tensors are all of the model's, and all are trained."""
        names = {name for link in self.links for name in (link.weight, link.bias) if name is not None}
        parameters = dict(self.model.named_parameters())
        trained = all(p.requires_grad for p in parameters.values())
        whole = names == set(parameters) and trained and not list(self.model.buffers())
        ends_plainly = bool(self.links) and not self.activated and not self.links[-1].rate and not self.links[-1].kernel
        return Chain(self.links, self.flattens_late) if whole and ends_plainly else None


def _is_plain(layer: nn.Conv2d, padding: tuple[int, ...]) -> bool:
    (height, width), (above, beside) = layer.kernel_size, padding
    square = height == width and above == beside < height
    return square and layer.stride == layer.dilation == (1, 1) and layer.groups == 1 and layer.padding_mode == "zeros"


def _is_nothing(node: fx.Node, layer: nn.Module | None) -> bool:
    if isinstance(layer, nn.Flatten):
        return layer.start_dim == 1 and layer.end_dim == -1
    if _calls(node, torch.flatten, "flatten"):
        return node.args[1:] == (1,) and not node.kwargs
    return type(layer) is nn.Identity or (type(layer) is nn.Dropout and layer.p == 0)


def _is_relu(node: fx.Node, layer: nn.Module | None) -> bool:
    return type(layer) is nn.ReLU or _calls(node, torch.relu, nn.functional.relu, "relu")


def _calls(node: fx.Node, *targets: Any) -> bool:
    """Whether the node calls one of these functions or methods of a tensor; a layer may have the name of one."""
    return node.op in ("call_function", "call_method") and node.target in targets
