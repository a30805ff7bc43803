"""Chains of linear layers trained by plain SGD, with forward, backward and update written out over stacked clients.

The same mathematics as the generic gradients, in fewer and larger operations: weights lie transposed, so that every
product is a plain one, and the update is part of the product that gives the gradient,
W <- (1 - lr decay) W - lr h^T d, so that no gradient of a weight is ever stored.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.cohort import Stack
from fedsim.engine.chain import Chain


@dataclass
class StackedLayer:
    """Weight [R, in, out] and bias [R, 1, out] of R clients."""

    weight: Tensor
    bias: Tensor | None

    def rows(self, count: int) -> "StackedLayer":
        """The first `count` clients; shares memory."""
        return StackedLayer(self.weight[:count], None if self.bias is None else self.bias[:count])

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return torch.bmm(x, self.weight)
        return torch.baddbmm(self.bias, x, self.weight)

    def step(self, x: Tensor, slope: Tensor, lr: float, decay: float) -> None:
        """SGD in place from the input [R, B, in] and the loss's slope [R, B, out]."""
        keep = 1 - lr * decay
        self.weight.baddbmm_(x.transpose(1, 2), slope, beta=keep, alpha=-lr)
        if self.bias is not None:
            self.bias.mul_(keep).sub_(slope.sum(1, keepdim=True), alpha=lr)


class FusedChain:
    """R stacked models of a chain. Trains in place; `stack` gives them back by name."""

    def __init__(self, chain: Chain, stack: Stack) -> None:
        self.chain = chain
        self.layers = [
            StackedLayer(
                stack[weight].transpose(1, 2).contiguous(), None if bias is None else stack[bias].unsqueeze(1).clone()
            )
            for weight, bias in chain.layers
        ]
        self.num_rows = len(self.layers[0].weight)
        self.minus_one = -torch.ones_like(self.layers[0].weight[:1, :1, :1])

    def step(self, x: Tensor, y: Tensor, weights: Tensor | None, lr: float, decay: float) -> Tensor:
        """One SGD step of the first R rows: x [R, B, ...], y [R, B], weights [R, B] (None: 1 / B).

        Returns the samples' losses before the step [R, B].
        """
        layers = self.layers if len(x) == self.num_rows else [layer.rows(len(x)) for layer in self.layers]
        inputs = [x.flatten(2)]
        for layer in layers[:-1]:
            inputs.append(layer.forward(inputs[-1]).relu_())
        log_p = torch.log_softmax(layers[-1].forward(inputs[-1]), dim=2)
        index = y.unsqueeze(2)
        losses = log_p.gather(2, index).squeeze(2).neg_()
        slope = log_p.exp_().scatter_add_(2, index, self.minus_one.expand(index.shape))
        slope.mul_(1 / x.shape[1] if weights is None else weights.unsqueeze(2))
        for number in range(len(layers) - 1, -1, -1):
            layer, given = layers[number], inputs[number]
            below = torch.bmm(slope, layer.weight.transpose(1, 2)) if number else None
            layer.step(given, slope, lr, decay)
            if below is not None:
                slope = torch.ops.aten.threshold_backward(below, given, 0)
        return losses

    def stack(self) -> Stack:
        """The models by name, in the layout of `torch.nn.Linear`."""
        result: Stack = {}
        for (weight, bias), layer in zip(self.chain.layers, self.layers, strict=True):
            result[weight] = layer.weight.transpose(1, 2)
            if bias is not None and layer.bias is not None:
                result[bias] = layer.bias.squeeze(1)
        return result
