"""Plain chains of linear layers, recognised in a model by tracing it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fedsim.cohort import Params


@dataclass(frozen=True)
class Chain:
    """y = L_n(relu(... relu(L_1(flatten(x))))): names of each linear layer's weight and bias (None without)."""

    layers: Sequence[tuple[str, str | None]]

    def output(self, params: Params, x: Tensor) -> Tensor:
        """Of one model [len(x), C]."""
        y = x.flatten(1)
        for number, (weight, bias) in enumerate(self.layers):
            y = F.linear(y.relu_() if number else y, params[weight], None if bias is None else params[bias])
        return y

    def gradient(self, params: Params, x: Tensor, y: Tensor) -> Params:
        """Of the sum of the cross-entropies of a few samples, by name."""
        inputs = [x.flatten(1)]
        for weight, bias in self.layers[:-1]:
            inputs.append(F.linear(inputs[-1], params[weight], None if bias is None else params[bias]).relu_())
        weight, bias = self.layers[-1]
        logits = F.linear(inputs[-1], params[weight], None if bias is None else params[bias])
        slope = logits.softmax(1)
        slope[torch.arange(len(y), device=y.device), y] -= 1
        found: Params = {}
        for number in range(len(self.layers) - 1, -1, -1):
            weight, bias = self.layers[number]
            found[weight] = slope.T @ inputs[number]
            if bias is not None:
                found[bias] = slope.sum(0)
            if number:
                slope = torch.ops.aten.threshold_backward(slope @ params[weight], inputs[number], 0)
        return found


def linear_chain(model: nn.Module) -> Chain | None:
    """The chain that `model` is in training, or None if it is anything else.

    Linear layers with a ReLU between any two, all trained, each used once; Flatten, Identity and Dropout of rate 0
    count as nothing.
    """
    try:
        graph = fx.symbolic_trace(model).graph
    except Exception:  # tracing a user's model may fail in any way
        return None
    layers: list[tuple[str, str | None]] = []
    expects_linear = True
    modules = dict(model.named_modules())
    previous: fx.Node | None = None
    for node in graph.nodes:
        if node.op == "placeholder" and previous is None:
            previous = node
            continue
        if node.op == "output" and node.args[0] is previous:
            continue
        if tuple(node.all_input_nodes) != (previous,):
            return None
        previous = node
        layer = modules.get(str(node.target)) if node.op == "call_module" else None
        if _is_nothing(node, layer):
            continue
        if _is_relu(node, layer) and not expects_linear:
            expects_linear = True
        elif isinstance(layer, nn.Linear) and type(layer) is nn.Linear and expects_linear:
            layers.append(_names(str(node.target), layer))
            expects_linear = False
        else:
            return None
    if expects_linear or len(set(layers)) < len(layers) or not _all_of(model, layers):
        return None
    return Chain(layers)


def _names(path: str, layer: nn.Linear) -> tuple[str, str | None]:
    return f"{path}.weight", None if layer.bias is None else f"{path}.bias"


def _is_nothing(node: fx.Node, layer: nn.Module | None) -> bool:
    if isinstance(layer, nn.Flatten):
        return layer.start_dim == 1 and layer.end_dim == -1
    if node.target in (torch.flatten, "flatten"):
        return node.args[1:] == (1,) and not node.kwargs
    return type(layer) is nn.Identity or (type(layer) is nn.Dropout and layer.p == 0)


def _is_relu(node: fx.Node, layer: nn.Module | None) -> bool:
    return type(layer) is nn.ReLU or node.target in (torch.relu, nn.functional.relu, "relu")


def _all_of(model: nn.Module, layers: Sequence[tuple[str, str | None]]) -> bool:
    """Whether the chain's tensors are all that the model has, and all are trained."""
    names = {name for pair in layers for name in pair if name is not None}
    parameters = dict(model.named_parameters())
    return names == set(parameters) and not list(model.buffers()) and all(p.requires_grad for p in parameters.values())
