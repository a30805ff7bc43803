"""Convolutions of several clients: by cuDNN, one client after another or as groups, and by Triton.

Each call is repeated in a CUDA graph. `error` is the distance from float64, relative to its norm,
for the first client. Pooling is part of Triton's kernels, and not of cuDNN's calls.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsim.engine.device import Precision, precision_context
from fedsim.engine.graph.buffers import ALIGNMENT, round_up_to
from scripts.benchmarks.gpu.workloads import Bench

PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bf16")
REPEATS = 10
"""Number of calls in a graph."""
SWEEP_SECONDS = 60.0
"""Time for tiles other than the usual ones."""


def layers() -> Iterator[tuple[str, int, int, Any]]:
    """Yield name, clients, batch and shape of each layer."""
    from fedsim.engine.graph.convolution_steps import LayerShape

    yield "W2 1", 5, 50, LayerShape(32, 32, 4, 32, 3, 0, True, is_first=True)
    yield "W2 2", 5, 50, LayerShape(15, 15, 32, 64, 3, 0, True)
    yield "W2 3", 5, 50, LayerShape(6, 6, 64, 64, 3)
    yield "W2 4", 5, 50, LayerShape(1, 1, 1024, 64)
    yield "W2 5", 5, 50, LayerShape(1, 1, 64, 10)
    yield "ResNet-20 8x8", 10, 64, LayerShape(8, 8, 64, 64, 3, 1)
    yield "ResNet-20 32x32", 10, 64, LayerShape(32, 32, 16, 16, 3, 1)


@dataclass(frozen=True)
class Layer:
    """A layer of R clients with random numbers, in float32.

    `x` [R, B, C, H, W], `weight` [R, N, C, S, S], and `bias` [R, N].
    """

    shape: Any
    x: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def random(cls, bench: Bench, clients: int, batch: int, shape: Any) -> "Layer":
        torch.manual_seed(0)
        new = partial(torch.randn, device=bench.device)
        x = new(clients, batch, shape.channels, shape.height, shape.width).relu_()
        weight = new(clients, shape.outputs, shape.channels, shape.side, shape.side)
        weight /= math.sqrt(shape.patch)
        return cls(shape, x, weight, new(clients, shape.outputs))


def convolutions(bench: Bench) -> None:
    """Put the times of a forward pass and of both gradients, by layer, way and precision."""
    begin = time.perf_counter()
    sweeps: list[tuple[str, Layer, Any]] = []
    for name, clients, batch, shape in layers():
        layer = Layer.random(bench, bench.size(clients, 2), bench.size(batch, 2), shape)
        for precision in PRECISIONS:
            if precision == "tf32" and not bench.on_gpu:
                continue
            _put_cudnn(bench, name, layer, precision)
        sweeps.append((name, layer, None))
    _put_triton(bench, [(name, layer) for name, layer, _ in sweeps], begin)


# --- cuDNN ----------------------------------------------------------------------------------------


def _put_cudnn(bench: Bench, name: str, layer: Layer, precision: Precision) -> None:
    shape = layer.shape
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x, weight, bias = (value.to(dtype) for value in (layer.x, layer.weight, layer.bias))
    output = F.conv2d(x[0], weight[0], padding=shape.padding)
    slopes = torch.randn_like(output).expand(len(x), *output.shape).contiguous()
    groups = len(x)
    as_groups = {
        "x": x.transpose(0, 1).flatten(1, 2).contiguous(),
        "slopes": slopes.transpose(0, 1).flatten(1, 2).contiguous(),
    }
    stacked = weight.flatten(0, 1)

    def backward(slopes: Tensor, x: Tensor, weight: Tensor, groups: int, mask: list[bool]) -> None:
        padding, bias_sizes = [shape.padding] * 2, [len(weight)]
        torch.ops.aten.convolution_backward(
            *(slopes, x, weight, bias_sizes, [1, 1], padding, [1, 1], False, [0, 0], groups, mask)
        )

    def forward_one_by_one() -> None:
        for one_x, one_weight, one_bias in zip(x, weight, bias, strict=True):
            F.conv2d(one_x, one_weight, one_bias, padding=shape.padding)

    def backward_one_by_one(mask: list[bool]) -> None:
        for one_slopes, one_x, one_weight in zip(slopes, x, weight, strict=True):
            backward(one_slopes, one_x, one_weight, 1, mask)

    def forward_grouped() -> None:
        F.conv2d(as_groups["x"], stacked, bias.flatten(), padding=shape.padding, groups=groups)

    def backward_grouped(mask: list[bool]) -> None:
        backward(as_groups["slopes"], as_groups["x"], stacked, groups, mask)

    input_only, weight_only = [True, False, False], [False, True, True]
    ways: dict[str, tuple[Callable[[], None], Callable[[list[bool]], None]]] = {
        "one by one": (forward_one_by_one, backward_one_by_one),
        "grouped": (forward_grouped, backward_grouped),
    }
    for way, (forward, backward_of) in ways.items():
        row: dict[str, Any] = {}
        with precision_context(precision, bench.device):
            try:
                row["forward_us"] = microseconds(bench, forward)
                row["input_us"] = microseconds(bench, partial(backward_of, input_only))
                row["weight_us"] = microseconds(bench, partial(backward_of, weight_only))
            except Exception as error:  # the other rows are worth having
                row["error"] = f"{type(error).__name__}: {error}"[:200]
        bench.put("convolutions", f"{name}, {precision}, cuDNN {way}", **row)


# --- Triton ---------------------------------------------------------------------------------------


def _put_triton(bench: Bench, named: list[tuple[str, Layer]], begin: float) -> None:
    """Put the usual tiles of all layers, and then other tiles while there is time."""
    from fedsim.engine.graph import convolution_steps as steps

    usual = {
        "forward": steps.forward_tile,
        "input": steps.input_tile,
        "weight": steps.weight_tile,
    }
    cases: list[TritonCase] = []
    for name, layer in named:
        for precision, (kind, tile_of) in product(PRECISIONS, usual.items()):
            if kind != "input" or name != "W2 1":
                shape = replace(layer.shape, precision=precision)
                typed_layer = replace(layer, shape=shape)
                cases.append(TritonCase(name, typed_layer, kind, tile_of(shape)))
    _put_cases(bench, cases)
    if not bench.on_gpu:
        return
    others: list[TritonCase] = []
    for case in cases:
        if case.layer.shape.precision == "tf32" or case.name == "W2 5":
            continue
        for tile in other_tiles(case.kind, case.layer.shape):
            if tile != case.tile:
                others.append(replace(case, tile=tile))
    # Each layer and kernel has its turn before time is up.
    chunk = 48
    order = [others[first::7] for first in range(7)]
    mixed = [case for part in order for case in part]
    for first in range(0, len(mixed), chunk):
        if time.perf_counter() - begin > 2 * SWEEP_SECONDS:
            bench.put("convolutions", "other tiles", skipped=len(mixed) - first)
            return
        _put_cases(bench, mixed[first : first + chunk])


@dataclass(frozen=True)
class TritonCase:
    """A kernel of a layer (`forward`, `input` or `weight`) with a tile."""

    name: str
    layer: Layer
    kind: str
    tile: Any
    parts: int = 0
    """Number of parts of the weight's gradient; 0 for the usual number."""


def other_tiles(kind: str, shape: Any) -> Iterator[Any]:
    """Yield tiles for a kernel. Sides that are larger than the product are left out."""
    from fedsim.engine.graph.convolution_steps import Tile

    if kind == "forward" and shape.pool:
        choices = [
            *((64, 32, 32, 4, 2), (64, 64, 32, 8, 3), (64, 64, 32, 4, 2), (32, 64, 32, 4, 3)),
            *((128, 32, 32, 8, 3), (64, 32, 64, 4, 2), (64, 32, 16, 4, 4), (128, 64, 32, 8, 2)),
        ]
    elif kind == "forward":
        choices = [
            *((64, 64, 32, 4, 3), (64, 32, 32, 4, 3), (32, 32, 64, 4, 3), (16, 64, 64, 4, 3)),
            *((64, 64, 64, 4, 2), (64, 16, 64, 4, 4), (16, 16, 128, 4, 3), (128, 64, 32, 8, 3)),
            *((64, 16, 128, 4, 3), (128, 16, 16, 4, 3), (128, 16, 16, 4, 2)),
        ]
    elif kind == "input":
        choices = [
            *((64, 32, 32, 4, 3), (64, 64, 32, 4, 3), (128, 32, 32, 8, 3), (128, 64, 32, 8, 3)),
            *((64, 64, 32, 4, 2), (64, 32, 64, 4, 3), (32, 64, 32, 4, 3), (128, 16, 16, 4, 2)),
            *((64, 16, 16, 4, 3), (16, 128, 32, 4, 2)),
        ]
    else:
        choices = [
            *((64, 64, 32, 4, 3), (32, 64, 32, 4, 3), (64, 64, 16, 4, 3), (64, 64, 16, 8, 3)),
            *((32, 64, 16, 4, 4), (64, 32, 32, 4, 2), (32, 32, 32, 4, 3), (128, 64, 32, 8, 2)),
            *((64, 64, 64, 4, 2), (32, 16, 64, 4, 3), (64, 16, 64, 4, 3), (64, 64, 32, 8, 2)),
        ]
    outputs = triton_side(shape.outputs)
    for rows, columns, depth, num_warps, num_stages in choices:
        if kind == "input":
            fits = columns <= triton_side(shape.channels) and (depth <= triton_side(shape.outputs))
        elif kind == "forward":
            fits = columns <= outputs and depth <= triton_side(shape.patch)
        else:
            fits = columns <= outputs and rows <= triton_side(shape.patch)
        if fits:
            yield Tile(rows, columns, depth, num_warps, num_stages)


def triton_side(count: int) -> int:
    """Return the smallest power of two that is at least `count` and 16."""
    return max(16, 1 << (count - 1).bit_length())


def _put_cases(bench: Bench, cases: list[TritonCase]) -> None:
    """Compile the kernels on all cores, and time them one after another."""
    import triton

    runs = [_TritonRun(case) for case in cases]
    begin = time.perf_counter()
    if bench.on_gpu:
        with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for run in runs:
                run.launch(compile_only=True)
        seconds = time.perf_counter() - begin
        bench.put("convolutions", "compilation", kernels=len(runs), seconds=seconds)
    for case, run in zip(cases, runs, strict=True):
        tile = case.tile
        options = f"{tile.ROWS}/{tile.COLUMNS}/{tile.DEPTH}/{tile.num_warps}/{tile.num_stages}"
        row: dict[str, Any] = {}
        try:
            row[f"{case.kind}_us"] = microseconds(bench, run.launch)
            row["error"] = run.error()
        except Exception as error:  # a tile may need too much memory
            row["failed"] = f"{type(error).__name__}: {error}"[:120]
        precision = case.layer.shape.precision
        bench.put("convolutions", f"{case.name}, {precision}, Triton {options}", **row)


class _TritonRun:
    """The tensors of a case, and its launch."""

    def __init__(self, case: TritonCase) -> None:
        from fedsim.engine.graph.convolution_steps import LayerKernels

        class Kernels(LayerKernels):
            """Kernels that may be compiled only."""

            compile_only = False

            def _launch(self, kernel: Any, grid: Any, *arguments: Any, **options: Any) -> None:
                if self.compile_only:
                    kernel = {grid: partial(kernel.warmup, grid=grid)}
                super()._launch(kernel, grid, *arguments, **options)

        self.case = case
        layer, shape = case.layer, case.layer.shape
        dtype = torch.bfloat16 if shape.precision == "bf16" else torch.float32
        x = layer.x.permute(0, 1, 3, 4, 2).contiguous().to(dtype)
        # A client's weight and bias lie in one row, as in the buffers of the engine.
        width = layer.weight[0].numel()
        params = layer.x.new_zeros(len(x), round_up_to(ALIGNMENT, width + shape.outputs))
        weight = params[:, :width].unflatten(1, (-1, shape.outputs))
        weight.copy_(layer.weight.permute(0, 3, 4, 2, 1).flatten(1, 3))
        bias = params[:, width : width + shape.outputs].copy_(layer.bias)
        sums = layer.x.new_zeros(len(x), case.parts or shape.parts, shape.patch + 1, shape.outputs)
        self.kernels = Kernels(shape, x, weight, bias, sums.flatten(1))
        self.kernels.parts = sums.shape[1]
        self.sums = sums
        self.kernels.slopes.normal_()
        self.x_slopes = torch.empty_like(x)
        if shape.pool and case.kind != "forward":
            self.kernels.winners.copy_(torch.randint_like(self.kernels.winners, 4))

    def launch(self, compile_only: bool = False) -> None:
        self.kernels.compile_only = compile_only
        if self.case.kind == "forward":
            self.kernels.forward(relu=True, tile=self.case.tile)
        elif self.case.kind == "input":
            self.kernels.input_gradient(self.x_slopes, self.x_slopes, tile=self.case.tile)
        else:
            self.kernels.weight_gradient(tile=self.case.tile)

    def error(self) -> float:
        """Return the error of the first client."""
        layer, shape, kernels = self.case.layer, self.case.layer.shape, self.kernels
        x = layer.x[0].double().requires_grad_()
        weight = layer.weight[0].double().requires_grad_()
        output = F.conv2d(x, weight, layer.bias[0].double(), padding=shape.padding)
        if self.case.kind == "forward":
            expected = (F.max_pool2d(output, 2) if shape.pool else output).relu().detach()
            return _distance(kernels.y[0].permute(0, 3, 1, 2), expected)
        slopes = kernels.slopes[0].permute(0, 3, 1, 2).double()
        if shape.pooled_slopes:
            windows = F.one_hot(kernels.winners[0].permute(0, 3, 1, 2).long(), 4).double()
            windows = (windows * slopes.unsqueeze(-1)).unflatten(-1, (2, 2))
            full = windows.transpose(3, 4).flatten(4, 5).flatten(2, 3)
            slopes = torch.zeros_like(output)
            slopes[..., : full.shape[2], : full.shape[3]] = full
        of_x, of_weight = torch.autograd.grad((output * slopes).sum(), [x, weight])
        if self.case.kind == "input":
            return _distance(self.x_slopes[0].permute(0, 3, 1, 2), of_x * (x > 0))
        actual = self.sums[0].sum(0)[:-1].view(*of_weight.permute(2, 3, 1, 0).shape)
        return _distance(actual, of_weight.permute(2, 3, 1, 0))


def _distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


# --- time -----------------------------------------------------------------------------------------


def microseconds(bench: Bench, call: Callable[[], object]) -> float:
    """Return the median time of a call on the device, within a graph of several calls."""
    if not bench.on_gpu:
        return 1e3 * bench.milliseconds(call, 0.01)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            call()
    times: list[float] = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / REPEATS)
    return statistics.median(times[2:])
