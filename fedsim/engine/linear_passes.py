"""Passes of chains of linear layers for many clients at once, written out by hand.

The mathematics is that of automatic differentiation, in fewer and larger operations. The batched
and the graph engine share it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedsim.core.types import Stack
from fedsim.engine.chain import LayerChain
from fedsim.engine.stacked import StackedBatch
from fedsim.engine.training_layers import dropout_mask

Layer = tuple[Tensor, Tensor | None]
"""Weight [R, in, out] and bias [R, 1, out] of R clients, as the matrix products take them."""


def layers_of(chain: LayerChain, stack: Stack) -> list[Layer]:
    """Return the chain's weights and biases in `stack`, or their gradients, as views."""
    layers: list[Layer] = []
    for layer in chain.layers:
        bias = None if layer.bias is None else stack[layer.bias].unsqueeze(1)
        layers.append((stack[layer.weight].mT, bias))
    return layers


@torch.no_grad()
def forward_and_backward(
    chain: LayerChain, layers: Sequence[Layer], batch: StackedBatch
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return the losses [R, B] of a batch of R clients, and what the gradients are products of.

    These are each layer's input [R, B, in], and the gradient at its output [R, B, out].
    """
    # 1. Forward pass
    inputs = [batch.x.flatten(2)]
    for (weight, bias), layer in zip(layers, chain.layers, strict=True):
        if bias is None:
            output = torch.bmm(inputs[-1], weight)
        else:
            output = torch.baddbmm(bias, inputs[-1], weight)
        if len(inputs) < len(layers):
            if layer.rate and batch.keys is not None:
                mask = dropout_mask(batch.keys, layer.dropout, 0, output.shape[1:], layer.rate)
                output.mul_(mask.to(output.dtype)).mul_(layer.scale)
            inputs.append(output.relu_())

    # 2. Cross-entropy and its gradient. (torch's softmax over a short last axis takes twice as
    # long.)
    labels = batch.y.unsqueeze(2)
    output.sub_(output.amax(2, keepdim=True))
    label_logits = output.gather(2, labels)
    exponentials = output.exp_()
    total = exponentials.sum(2, keepdim=True)
    slope = exponentials.div_(total).scatter_(2, labels, -1.0, reduce="add")
    slope.mul_(1 / batch.y.shape[1] if batch.weights is None else batch.weights.unsqueeze(2))
    losses = total.log_().sub_(label_logits).squeeze(2)

    # 3. Backward pass. Where an input is positive, its dropout has kept it.
    slopes = [slope]
    for number in range(len(layers) - 1, 0, -1):
        slope = torch.bmm(slope, layers[number][0].mT)
        slope = torch.ops.aten.threshold_backward(slope, inputs[number], 0)
        below = chain.layers[number - 1]
        if below.rate:
            slope.mul_(below.scale)
        slopes.append(slope)
    return losses, inputs, slopes[::-1]


def write_gradients(
    gradients: Sequence[Layer], inputs: Sequence[Tensor], slopes: Sequence[Tensor]
) -> None:
    """Write the gradients of weights and biases, from what `forward_and_backward` returns."""
    for (weight, bias), x, slope in zip(gradients, inputs, slopes, strict=True):
        torch.bmm(x.mT, slope, out=weight)
        if bias is not None:
            torch.sum(slope, 1, keepdim=True, out=bias)
