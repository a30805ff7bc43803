"""Convolutions of R clients with weights of their own, computed in the fastest of three ways.

- `grouped`: one convolution in which each client is a group. There are few launches, but cuDNN's
  kernels for groups can be slow.
- `channels last`: the same, on images whose channels lie next to each other in memory. cuDNN's
  kernels for tensor cores need that layout, and otherwise transpose inputs and outputs.
- `one by one`: a convolution for each client.

Which way is fastest depends on the layer, the precision and the card. All are timed in the first
steps on a GPU, before any is recorded, and the choice is remembered (choices.py). On a CPU it is
always `grouped`.

`ClientConv2d` takes the place of nn.Conv2d in a model that torch.func.vmap maps over the clients.
Within the rules for vmap, images are [B, R, C, H, W], and weights and biases have R first. A
grouped convolution takes and returns images as [B, R * C, H, W] without a copy. A slope is the
gradient of the loss with respect to an output.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.engine.device import Precision
from fedsim.engine.graph.choices import fastest

Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Stride, padding and dilation of a convolution."""
Gradients = tuple[Tensor | None, Tensor, Tensor | None]
"""Gradients of a convolution's input, weight and bias; None if not needed."""
NUM_TIMED = 4
"""Number of calls in one timed graph."""
NUM_REPLAYS = 3
"""Number of replays of it. The shortest time is kept."""


def use_client_convolutions(module: nn.Module, precision: Precision) -> nn.Module:
    """Replace the plain convolutions of a training copy in place, by changing their class.

    Returns the module.
    """
    for layer in module.modules():
        plain = type(layer) is nn.Conv2d and layer.groups == 1
        if plain and layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
            layer.__class__ = ClientConv2d
            assert isinstance(layer, ClientConv2d)
            layer.in_bf16 = precision == "bf16"
    return module


class ClientConv2d(nn.Conv2d):
    """A convolution that computes all clients in the fastest way under vmap.

    Autocast does not convert the inputs of a function with a gradient of its own. So the layer
    converts them to bfloat16 itself if it is `in_bf16`.
    """

    in_bf16: bool

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.in_bf16:
            input, weight = input.bfloat16(), weight.bfloat16()
            bias = None if bias is None else bias.bfloat16()
        geometry = (self.stride, self.padding, self.dilation)
        output: Tensor = ClientConvolution.apply(input, weight, bias, geometry)
        return output


class ClientConvolution(torch.autograd.Function):
    """F.conv2d, with a rule of its own for vmap."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        return F.conv2d(x, weight, bias, *geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.geometry = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # Weights are always trained.
        needed = (ctx.needs_input_grad[0], True, ctx.has_bias)
        gradients = ConvolutionGradients.apply(slope, x, weight, needed, ctx.geometry)
        return *gradients, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Sequence[int | None],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
    ) -> tuple[Tensor, int]:
        x = with_clients(x, in_dims[0], info.batch_size, axis=1)
        weight = with_clients(weight, in_dims[1], info.batch_size, axis=0)
        if bias is not None:
            bias = with_clients(bias, in_dims[2], info.batch_size, axis=0)
        return convolve(x, weight, bias, geometry), 1


class ConvolutionGradients(torch.autograd.Function):
    """The gradients of F.conv2d, with a rule of its own for vmap. Has no gradients itself."""

    @staticmethod
    def forward(
        slope: Tensor, x: Tensor, weight: Tensor, needed: Sequence[bool], geometry: Geometry
    ) -> Gradients:
        return _aten_gradients(slope, x, weight, needed, geometry, groups=1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
        """Keep nothing."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Sequence[int | None],
        slope: Tensor,
        x: Tensor,
        weight: Tensor,
        needed: Sequence[bool],
        geometry: Geometry,
    ) -> tuple[Gradients, tuple[int | None, ...]]:
        slope = with_clients(slope, in_dims[0], info.batch_size, axis=1)
        x = with_clients(x, in_dims[1], info.batch_size, axis=1)
        weight = with_clients(weight, in_dims[2], info.batch_size, axis=0)
        gradients = convolution_gradients(slope, x, weight, needed, geometry)
        return gradients, (1 if needed[0] else None, 0, 0 if needed[2] else None)


def with_clients(value: Tensor, dim: int | None, num_clients: int, axis: int) -> Tensor:
    """Return a tensor with the clients' axis at `axis`, from one with it at `dim` or nowhere."""
    if dim is None:
        value, dim = value.unsqueeze(0).expand(num_clients, *value.shape), 0
    return value.movedim(dim, axis)


# --- the ways ------------------------------------------------------------------------------------


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """Return the outputs [B, R, O, H', W'] of inputs [B, R, C, H, W].

    Weights are [R, O, C, h, w], and the bias is [R, O] or None.
    """
    ways: dict[str, Callable[[], Tensor]] = {
        "grouped": lambda: _grouped_convolution(x.flatten(1, 2), weight, bias, geometry),
        "channels last": lambda: _grouped_convolution(_to_channels_last(x), weight, bias, geometry),
        "one by one": lambda: _convolutions_one_by_one(x, weight, bias, geometry),
    }
    return ways[_choose_way("forward", x, weight, geometry, ways)]()


def _to_channels_last(x: Tensor) -> Tensor:
    """Return images [B, R, C, H, W] as [B, R * C, H, W] with the channels last in memory."""
    return x.flatten(1, 2).contiguous(memory_format=torch.channels_last)


def _grouped_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    num_clients = len(weight)
    flat_bias = None if bias is None else bias.flatten()
    output = F.conv2d(x, weight.flatten(0, 1), flat_bias, *geometry, groups=num_clients)
    return output.unflatten(1, (num_clients, -1))


def _convolutions_one_by_one(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    outputs = []
    for client in range(len(weight)):
        own_bias = None if bias is None else bias[client]
        outputs.append(F.conv2d(x[:, client], weight[client], own_bias, *geometry))
    return torch.stack(outputs, 1)


def convolution_gradients(
    slope: Tensor, x: Tensor, weight: Tensor, needed: Sequence[bool], geometry: Geometry
) -> Gradients:
    """Return the gradients of inputs [B, R, C, H, W], weights and bias, as far as they are needed.

    `slope` [B, R, O, H', W'] is the gradient at the output.
    """
    ways: dict[str, Callable[[], Gradients]] = {
        "grouped": lambda: _grouped_gradients(
            slope.flatten(1, 2), x.flatten(1, 2), weight, needed, geometry
        ),
        "channels last": lambda: _grouped_gradients(
            _to_channels_last(slope), _to_channels_last(x), weight, needed, geometry
        ),
        "one by one": lambda: _gradients_one_by_one(slope, x, weight, needed, geometry),
    }
    kind = "backward" if needed[0] else "backward without input gradient"
    return ways[_choose_way(kind, x, weight, geometry, ways)]()


def _aten_gradients(
    slope: Tensor,
    x: Tensor,
    weight: Tensor,
    needed: Sequence[bool],
    geometry: Geometry,
    groups: int,
) -> Gradients:
    bias_sizes = [weight.shape[0]] if needed[2] else None
    stride, padding, dilation = geometry
    gradients: Gradients = torch.ops.aten.convolution_backward(
        slope, x, weight, bias_sizes, stride, padding, dilation, False, [0, 0], groups, list(needed)
    )
    return gradients


def _grouped_gradients(
    slope: Tensor, x: Tensor, weight: Tensor, needed: Sequence[bool], geometry: Geometry
) -> Gradients:
    num_clients = len(weight)
    of_input, of_weight, of_bias = _aten_gradients(
        slope, x, weight.flatten(0, 1), needed, geometry, groups=num_clients
    )
    if of_input is not None:
        of_input = of_input.unflatten(1, (num_clients, -1))
    if of_bias is not None:
        of_bias = of_bias.unflatten(0, (num_clients, -1))
    return of_input, of_weight.unflatten(0, (num_clients, -1)), of_bias


def _gradients_one_by_one(
    slope: Tensor, x: Tensor, weight: Tensor, needed: Sequence[bool], geometry: Geometry
) -> Gradients:
    of_inputs, of_weights, of_biases = [], [], []
    for client in range(len(weight)):
        of_input, of_weight, of_bias = _aten_gradients(
            slope[:, client], x[:, client], weight[client], needed, geometry, groups=1
        )
        of_inputs.append(of_input)
        of_weights.append(of_weight)
        of_biases.append(of_bias)
    return (
        torch.stack(of_inputs, 1) if needed[0] else None,  # type: ignore[arg-type]
        torch.stack(of_weights),
        torch.stack(of_biases) if needed[2] else None,  # type: ignore[arg-type]
    )


# --- the choice -----------------------------------------------------------------------------------


def _choose_way(
    kind: str, x: Tensor, weight: Tensor, geometry: Geometry, ways: dict[str, Callable[[], Any]]
) -> str:
    """Return the name of the way to take: on a CPU the first, on a GPU the fastest."""
    if not x.is_cuda:
        return next(iter(ways))
    precision = f"{x.dtype} {torch.backends.cudnn.conv.fp32_precision}"  # type: ignore[attr-defined]
    layer = f"{kind} {tuple(x.shape)} {tuple(weight.shape)} {geometry} {precision}"
    return fastest(
        x.device, layer, {name: partial(milliseconds, call) for name, call in ways.items()}
    )


def milliseconds(call: Callable[[], object]) -> float:
    """Return the milliseconds of one call on a GPU, as part of a CUDA graph."""
    # Libraries choose kernels and allocate memory before the capture.
    for _ in range(2):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NUM_TIMED):
            call()
    times = []
    for _ in range(NUM_REPLAYS):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / NUM_TIMED)
    return min(times)
