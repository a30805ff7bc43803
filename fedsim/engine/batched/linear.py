"""Chains of linear layers with the forward and backward pass written out over stacked clients.

The same mathematics as automatic differentiation, in fewer and larger operations. Weights are stored transposed
[R, in, out], so that no product needs a transposed weight. For SGD without momentum the update is part of the product
that gives the gradient, W <- (1 - lr decay) W - lr h^T d, so that no gradient of a weight is ever stored.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.engine.batched.steps import StackedBatch
from fedsim.engine.model.chain import Chain, Link
from fedsim.engine.model.layers import dropout_mask
from fedsim.types import Stack


@dataclass
class StackedLayer:
    """Weight [R, in, out] and bias [R, 1, out] of R clients."""

    weight: Tensor
    bias: Tensor | None

    def rows(self, count: int) -> "StackedLayer":
        """The first `count` clients; shares memory."""
        if count == len(self.weight):
            return self
        return StackedLayer(self.weight[:count], None if self.bias is None else self.bias[:count])

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return torch.bmm(x, self.weight)
        return torch.baddbmm(self.bias, x, self.weight)


Update = Callable[[int, StackedLayer, Tensor, Tensor], None]
"""Called with a layer's number, the layer, its input [R, B, in] and the gradient at its output [R, B, out]."""


class StackedChain:
    """R models of a chain of linear layers, starting from copies of `start` [R, ...]."""

    def __init__(self, chain: Chain, start: Stack) -> None:
        self.chain = chain
        self.layers = [_stacked(link, start) for link in chain.links]
        self.minus_one = -torch.ones_like(self.layers[0].weight[:1, :1, :1])

    @torch.no_grad()
    def step(self, batch: StackedBatch, update: Update) -> Tensor:
        """Forward and backward of the batch's leading rows; `update` is called from the last layer to the first, each
        time after the layer's weights were needed for the last time. Returns the samples' losses [rows, width]."""
        layers = [layer.rows(len(batch.x)) for layer in self.layers]
        inputs = [batch.x.flatten(2)]
        for layer, link in zip(layers[:-1], self.chain.links, strict=False):
            inputs.append(_activate(layer.forward(inputs[-1]), link, batch.keys))
        losses, grad = self._cross_entropy(layers[-1].forward(inputs[-1]), batch)
        for number in range(len(layers) - 1, -1, -1):
            layer, given = layers[number], inputs[number]
            below = self._below(number, layer, given, grad)
            update(number, layer, given, grad)
            grad = below
        return losses

    def _cross_entropy(self, output: Tensor, batch: StackedBatch) -> tuple[Tensor, Tensor]:
        """The samples' losses [rows, width], and the gradient of their weighted sum at the logits [rows, width, C].
        Overwrites `output`.

        Written out, because torch's softmax over a short last axis takes twice as long.
        """
        index = batch.y.unsqueeze(2)
        output.sub_(output.amax(2, keepdim=True))
        chosen = output.gather(2, index)
        powers = output.exp_()
        total = powers.sum(2, keepdim=True)
        grad = powers.div_(total).scatter_add_(2, index, self.minus_one.expand(index.shape))
        grad.mul_(1 / batch.y.shape[1] if batch.weights is None else batch.weights.unsqueeze(2))
        return total.log_().sub_(chosen).squeeze(2), grad

    def _below(self, number: int, layer: StackedLayer, given: Tensor, grad: Tensor) -> Tensor:
        """The gradient at the output of the layer below; where an input is positive, its dropout has kept and scaled
        it."""
        if not number:
            return grad
        below: Tensor = torch.ops.aten.threshold_backward(torch.bmm(grad, layer.weight.transpose(1, 2)), given, 0)
        link = self.chain.links[number - 1]
        return below.mul_(link.scale) if link.rate else below

    def named(self, values: list[StackedLayer]) -> Stack:
        """Values that lie as `layers` do, by name and in the layout of `torch.nn.Linear`."""
        result: Stack = {}
        for link, layer in zip(self.chain.links, values, strict=True):
            result[link.weight] = layer.weight.transpose(1, 2)
            if link.bias is not None and layer.bias is not None:
                result[link.bias] = layer.bias.squeeze(1)
        return result


def sgd_update(lr: float, decay: float) -> Update:
    """Plain SGD in place: w <- (1 - lr decay) w - lr gradient."""
    keep = 1 - lr * decay

    def update(number: int, layer: StackedLayer, x: Tensor, grad: Tensor) -> None:
        layer.weight.baddbmm_(x.transpose(1, 2), grad, beta=keep, alpha=-lr)
        if layer.bias is not None:
            layer.bias.mul_(keep).sub_(grad.sum(1, keepdim=True), alpha=lr)

    return update


def gradients_into(found: Stack) -> Update:
    """Gradients by the numbers of their layers, laid out as the layers are."""

    def update(number: int, layer: StackedLayer, x: Tensor, grad: Tensor) -> None:
        found[f"{number}.weight"] = torch.bmm(x.transpose(1, 2), grad)
        if layer.bias is not None:
            found[f"{number}.bias"] = grad.sum(1, keepdim=True)

    return update


def _stacked(link: Link, start: Stack) -> StackedLayer:
    weight = _copied(start[link.weight].transpose(1, 2))
    return StackedLayer(weight, None if link.bias is None else _copied(start[link.bias].unsqueeze(1)))


def _copied(value: Tensor) -> Tensor:
    return value.clone(memory_format=torch.contiguous_format)


def _activate(x: Tensor, link: Link, keys: Tensor | None) -> Tensor:
    if link.rate and keys is not None:
        x.mul_(dropout_mask(keys, link.dropout, 0, x.shape[1:], link.rate).to(x.dtype)).mul_(link.scale)
    return x.relu_()
