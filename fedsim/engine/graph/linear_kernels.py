"""Passes of chains of linear layers as Triton kernels: a launch for each layer and direction.

They compute what `fedsim.engine.linear_passes` computes, with ReLU, dropout, loss and sums of the
biases inside the products. For R clients, batches of B samples and a layer of I inputs and O
outputs, everything is row after row in memory:

    x, slope of the input    [R, B, I]      of each sample
    output, slope            [R, B, O]      its slope is the gradient of the loss at the output
    weight                   [R, O, I]
    bias                     [R, O]

Weights, biases and their gradients are views of rows of ModelBuffers: client r begins at r *
`stride`, the width of a row.

A program computes a tile of one client's result: axis 0 of the grid is the client, axes 1 and 2 are
tiles. It adds in an order that does not depend on the other clients, so a client gets the same bits
in any company. Products are `tf32x3` (as exact as float32: three products of tf32) or `tf32`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedsim.core.types import Stack
from fedsim.engine.chain import ChainLayer, LayerChain
from fedsim.engine.graph.recorder import SideStream
from fedsim.engine.stacked import StackedBatch
from fedsim.engine.training_layers import GOLDEN, MAX_CALLS, MIX_1, MIX_2

MAX_CLASSES = 128
"""One program holds all logits of a sample, for the softmax, and its registers are few."""
TILES: dict[str, dict[str, int]] = {
    "hidden": {"TILE": 16, "DEPTH": 64, "num_warps": 2},
    "loss": {"TILE": 16, "DEPTH": 32, "num_warps": 4},
    "slope": {"TILE": 16, "DEPTH": 32, "num_warps": 1},
    "gradient": {"TILE": 16, "DEPTH": 32, "num_warps": 1},
}
"""The table has the options of each kernel: the side of a tile of results, the length of the block
of products that is added at a time, and the number of warps. The loss has tiles of samples only."""
_GOLDEN = tl.constexpr(GOLDEN)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)


@triton.jit
def _tile(pointer, rows, columns, num_rows, num_columns, row_stride, column_stride):
    """Load a tile of a matrix, with zeros outside of it."""
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    offsets = rows[:, None] * row_stride + columns[None, :] * column_stride
    return tl.load(pointer + offsets, mask=inside, other=0.0)


@triton.jit
def _outputs(
    x,
    weight,
    bias,
    samples,
    outputs,
    num_samples,
    num_inputs,
    num_outputs,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return a tile [samples, outputs] of x weight^T + bias for one client."""
    total = tl.zeros((samples.shape[0], outputs.shape[0]), tl.float32)
    for first in range(0, num_inputs, DEPTH):
        inputs = first + tl.arange(0, DEPTH)
        left = _tile(x, samples, inputs, num_samples, num_inputs, num_inputs, 1)
        right = _tile(weight, inputs, outputs, num_inputs, num_outputs, 1, num_inputs)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    if bias is not None:
        total += tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0)[None, :]
    return total


@triton.jit
def _mix(z):
    """`mix` of training_layers."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def hidden_kernel(
    x, weight, bias, keys, output,
    num_samples, num_inputs, num_outputs, stride, salt, dropped, scale,
    TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """output = relu(dropout(x weight^T + bias)).

    An element is dropped with probability `dropped` / 2^24, and none if there are no `keys`.
    """
    client = tl.program_id(0).to(tl.int64)
    samples = tl.program_id(1) * TILE + tl.arange(0, TILE)
    outputs = tl.program_id(2) * TILE + tl.arange(0, TILE)
    if bias is not None:
        bias += client * stride
    x += client * num_samples * num_inputs
    total = _outputs(
        x,
        weight + client * stride,
        bias,
        samples,
        outputs,
        num_samples,
        num_inputs,
        num_outputs,
        DEPTH,
        PRECISION,
    )
    if keys is not None:
        element = samples[:, None].to(tl.int64) * num_outputs + outputs[None, :]
        bits = _mix(_mix(tl.load(keys + client) + salt) + element * _GOLDEN)
        kept = ((bits >> 40) & 0xFFFFFF) >= dropped
        total = tl.where(kept, total * scale, 0.0)
    inside = (samples < num_samples)[:, None] & (outputs < num_outputs)[None, :]
    offsets = (client * num_samples + samples[:, None]) * num_outputs + outputs[None, :]
    total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(output + offsets, total, mask=inside)


@triton.jit
def loss_kernel(
    x, weight, bias, labels, sample_weights, slope, losses,
    num_samples, num_inputs, num_outputs, stride, weights_stride,
    TILE: tl.constexpr, CLASSES: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The last layer: logits x weight^T + bias, losses = cross-entropy, and its weighted slope.

    The slope is zero for weights of zero, also if logits are not finite.
    """
    client = tl.program_id(0).to(tl.int64)
    samples = tl.program_id(1) * TILE + tl.arange(0, TILE)
    classes = tl.arange(0, CLASSES)
    if bias is not None:
        bias += client * stride
    x += client * num_samples * num_inputs
    logits = _outputs(
        x,
        weight + client * stride,
        bias,
        samples,
        classes,
        num_samples,
        num_inputs,
        num_outputs,
        DEPTH,
        PRECISION,
    )
    logits = tl.where((classes < num_outputs)[None, :], logits, -float("inf"))
    logits -= tl.max(logits, 1)[:, None]
    exponentials = tl.exp(logits)
    total = tl.sum(exponentials, 1)
    inside = samples < num_samples
    label = tl.load(labels + client * num_samples + samples, mask=inside, other=0)
    is_label = classes[None, :] == label[:, None]
    loss = tl.log(total) - tl.sum(tl.where(is_label, logits, 0.0), 1)
    tl.store(losses + client * num_samples + samples, loss, mask=inside)
    factor = tl.load(sample_weights + client * weights_stride + samples, mask=inside, other=0.0)
    probabilities = exponentials / total[:, None]
    result = tl.where(is_label, probabilities - 1.0, probabilities) * factor[:, None]
    result = tl.where(factor[:, None] > 0, result, 0.0)
    offsets = (client * num_samples + samples[:, None]) * num_outputs + classes[None, :]
    tl.store(slope + offsets, result, mask=inside[:, None] & (classes < num_outputs)[None, :])


@triton.jit
def input_slope_kernel(
    slope, weight, x, input_slope, num_samples, num_inputs, num_outputs, stride, scale,
    TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """input_slope = scale * (slope weight) where x > 0, otherwise 0.

    Where x > 0, ReLU and dropout have passed the element, so no mask is stored.
    """
    client = tl.program_id(0).to(tl.int64)
    samples = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inputs = tl.program_id(2) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    for first in range(0, num_outputs, DEPTH):
        outputs = first + tl.arange(0, DEPTH)
        left = _tile(
            slope + client * num_samples * num_outputs,
            samples,
            outputs,
            num_samples,
            num_outputs,
            num_outputs,
            1,
        )
        right = _tile(
            weight + client * stride, outputs, inputs, num_outputs, num_inputs, num_inputs, 1
        )
        total = tl.dot(left, right, total, input_precision=PRECISION)
    own = _tile(
        x + client * num_samples * num_inputs,
        samples,
        inputs,
        num_samples,
        num_inputs,
        num_inputs,
        1,
    )
    inside = (samples < num_samples)[:, None] & (inputs < num_inputs)[None, :]
    offsets = (client * num_samples + samples[:, None]) * num_inputs + inputs[None, :]
    tl.store(input_slope + offsets, tl.where(own > 0, total * scale, 0.0), mask=inside)


@triton.jit
def weight_gradient_kernel(
    slope, x, weight_gradient, bias_gradient, num_samples, num_inputs, num_outputs, stride,
    TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """weight_gradient = slope^T x, and bias_gradient = the sum of the slopes."""
    client = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inputs = tl.program_id(2) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    of_bias = tl.zeros((TILE,), tl.float32)
    for first in range(0, num_samples, DEPTH):
        samples = first + tl.arange(0, DEPTH)
        left = _tile(
            slope + client * num_samples * num_outputs,
            outputs,
            samples,
            num_outputs,
            num_samples,
            1,
            num_outputs,
        )
        right = _tile(
            x + client * num_samples * num_inputs,
            samples,
            inputs,
            num_samples,
            num_inputs,
            num_inputs,
            1,
        )
        total = tl.dot(left, right, total, input_precision=PRECISION)
        of_bias += tl.sum(left, 1)
    inside = (outputs < num_outputs)[:, None] & (inputs < num_inputs)[None, :]
    offsets = client * stride + outputs[:, None] * num_inputs + inputs[None, :]
    tl.store(weight_gradient + offsets, total, mask=inside)
    if bias_gradient is not None:
        # Every program along axis 2 computes the same sum. The first one writes it.
        end = tl.where(tl.program_id(2) == 0, num_outputs, 0)
        tl.store(bias_gradient + client * stride + outputs, of_bias, mask=outputs < end)


class LinearKernels:
    """The passes of a chain on views of parameters and gradients [R, ...] of ModelBuffers."""

    def __init__(self, chain: LayerChain, params: Stack, grads: Stack, precision: str) -> None:
        self._layers = chain.layers
        self._params = params
        self._grads = grads
        self._side = SideStream(grads[chain.layers[0].weight].device)
        self._precision = "tf32" if precision == "tf32" else "tf32x3"

    def __call__(self, batch: StackedBatch) -> Tensor:
        """Write the gradients of the weighted losses, and return the losses [R, B]."""
        inputs = [batch.x.flatten(2)]
        for layer in self._layers[:-1]:
            inputs.append(self._hidden_layer(layer, inputs[-1], batch.keys))
        losses, slope = self._loss_layer(inputs[-1], batch)
        slopes = [slope]  # All are kept until the side stream has read them.
        for number in reversed(range(len(self._layers))):
            layer, x = self._layers[number], inputs[number]
            with self._side.part():
                self._write_gradients(layer, x, slopes[-1])
            if number:
                slopes.append(self._input_slope(layer, slopes[-1], x, self._layers[number - 1]))
        self._side.join()
        return losses

    def _sizes(self, layer: ChainLayer) -> tuple[int, int, int]:
        """Return inputs, outputs, and the distance of two clients' weights."""
        weight = self._params[layer.weight]
        return weight.shape[2], weight.shape[1], weight.stride(0)

    def _options(self, kernel: str) -> dict[str, Any]:
        return {"PRECISION": self._precision, **TILES[kernel]}

    def _bias(self, layer: ChainLayer, stack: Stack) -> Tensor | None:
        return None if layer.bias is None else stack[layer.bias]

    def _hidden_layer(self, layer: ChainLayer, x: Tensor, keys: Tensor | None) -> Tensor:
        options = self._options("hidden")
        num_clients, num_samples, _ = x.shape
        num_inputs, num_outputs, stride = self._sizes(layer)
        output = x.new_empty(num_clients, num_samples, num_outputs)
        salt = (1 + layer.dropout * MAX_CALLS) * GOLDEN
        salt = (salt + 2**63) % 2**64 - 2**63  # as an int64 holds it
        grid = (num_clients, *_num_tiles(options, num_samples, num_outputs))
        hidden_kernel[grid](
            x, self._params[layer.weight], self._bias(layer, self._params),
            keys if layer.rate else None, output, num_samples, num_inputs, num_outputs, stride,
            salt, round(layer.rate * 2**24), layer.scale, **options,
        )  # fmt: skip
        return output

    def _loss_layer(self, x: Tensor, batch: StackedBatch) -> tuple[Tensor, Tensor]:
        """Return the losses [R, B] and the slope of the logits [R, B, O]."""
        options = self._options("loss")
        assert batch.weights is not None
        num_clients, num_samples, _ = x.shape
        layer = self._layers[-1]
        num_inputs, num_classes, stride = self._sizes(layer)
        slope = x.new_empty(num_clients, num_samples, num_classes)
        losses = x.new_empty(num_clients, num_samples)
        loss_kernel[(num_clients, *_num_tiles(options, num_samples))](
            x, self._params[layer.weight], self._bias(layer, self._params), batch.y,
            batch.weights, slope, losses, num_samples, num_inputs, num_classes, stride,
            batch.weights.stride(0), CLASSES=max(16, triton.next_power_of_2(num_classes)),
            **options,
        )  # fmt: skip
        return losses, slope

    def _input_slope(
        self, layer: ChainLayer, slope: Tensor, x: Tensor, below: ChainLayer
    ) -> Tensor:
        options = self._options("slope")
        num_clients, num_samples, num_inputs = x.shape
        _, num_outputs, stride = self._sizes(layer)
        input_slope = torch.empty_like(x)
        grid = (num_clients, *_num_tiles(options, num_samples, num_inputs))
        input_slope_kernel[grid](
            slope, self._params[layer.weight], x, input_slope, num_samples, num_inputs,
            num_outputs, stride, below.scale, **options,
        )  # fmt: skip
        return input_slope

    def _write_gradients(self, layer: ChainLayer, x: Tensor, slope: Tensor) -> None:
        options = self._options("gradient")
        num_clients, num_samples, num_inputs = x.shape
        _, num_outputs, stride = self._sizes(layer)
        grid = (num_clients, *_num_tiles(options, num_outputs, num_inputs))
        weight_gradient_kernel[grid](
            slope, x, self._grads[layer.weight], self._bias(layer, self._grads), num_samples,
            num_inputs, num_outputs, stride, **options,
        )  # fmt: skip


def _num_tiles(options: dict[str, Any], *sizes: int) -> list[int]:
    return [triton.cdiv(size, options["TILE"]) for size in sizes]
