"""Local steps of convolutional networks for all clients at once, by Triton kernels.

A step has about three launches for each layer, whatever the number of clients. The head of
convolution_kernels.py describes the kernels and their memory.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from fedsim.core.types import Stack
from fedsim.engine.backend import Workload
from fedsim.engine.chain import ChainLayer
from fedsim.engine.device import Precision
from fedsim.engine.graph import convolution_kernels as kernels
from fedsim.engine.graph.buffers import ALIGNMENT, round_up_to
from fedsim.engine.graph.recorder import SideStream
from fedsim.engine.graph.steps import RecordableSteps
from fedsim.engine.stacked import StackedBatch

PRODUCTS = {"float32": "tf32x3", "tf32": "tf32", "bf16": "bf16"}
"""Kinds of products in the kernels, by precision."""
PIECE = 4
"""Images are stored with a multiple of so many channels, which a kernel loads in one piece."""
BLOCK = 128
"""Numbers that a program of `add_parts` adds."""
PARTS_AT_A_TIME = 4
"""Number of parts that a program of `add_parts` loads at a time."""
PART_PROGRAMS = 300
"""Maximum number of programs for a client's gradient of a weight, if it has several parts."""
MAX_PARTS = 128
"""Maximum number of parts of a weight's gradient."""
FEW_CHANNELS = 4
"""Up to so many channels, a first layer with pooling may load only patches of winners."""
SMALLEST_SIDE = 16
"""Smallest side of a tile that Triton multiplies."""


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a layer, with a square kernel, and the precision of its products."""

    height: int
    width: int
    channels: int
    outputs: int
    side: int = 1
    padding: int = 0
    pool: bool = False
    precision: Precision = "float32"
    is_first: bool = False

    @property
    def patch(self) -> int:
        """Count of the inputs from which a pixel of the output is computed."""
        return self.side**2 * self.channels

    @property
    def full_size(self) -> tuple[int, int]:
        """Height and width of the output before pooling."""
        border = 2 * self.padding - self.side + 1
        return self.height + border, self.width + border

    @property
    def out_size(self) -> tuple[int, int]:
        """Height and width of the output after pooling."""
        height, width = self.full_size
        return (height // 2, width // 2) if self.pool else (height, width)

    @property
    def pooled_slopes(self) -> bool:
        """True if slopes are stored after pooling, for `weight_gradient_of_winners`.

        Other layers store them before pooling, so that their gradients are those without pooling.
        In bf16, products with all patches take less time than additions with those of winners.
        """
        few_channels = self.is_first and self.channels <= FEW_CHANNELS
        return self.pool and few_channels and self.precision != "bf16"

    @property
    def slope_size(self) -> tuple[int, int]:
        """Height and width of the slopes."""
        return self.out_size if self.pooled_slopes else self.full_size

    @property
    def parts(self) -> int:
        """Number of parts of the weight's gradient, a power of two.

        With more parts, there is work for more processors of the GPU, but also more to add. A part
        has at least four pixels of each sample, or two if products are fast. The number does not
        depend on the clients, because it determines the order of additions.
        """
        pixels = math.prod(self.slope_size) // (4 if self.precision == "float32" else 2)
        programs = PART_PROGRAMS // weight_tiles(self, weight_tile(self))
        parts = max(1, min(MAX_PARTS, programs, pixels))
        return int(2 ** (parts.bit_length() - 1))


@dataclass(frozen=True)
class Tile:
    """The sides of the tiles in a kernel, and options of Triton's compiler."""

    ROWS: int
    COLUMNS: int
    DEPTH: int
    num_warps: int = 4
    num_stages: int = 3


# These tiles were among the fastest of many on an H200, in float32 and bf16. A product in float32
# is three products in tf32, which need more registers. So its tiles are smaller.


def forward_tile(shape: LayerShape) -> Tile:
    """Return the tile of output pixels by outputs."""
    is_float32 = shape.precision == "float32"
    if shape.full_size == (1, 1):
        if is_float32:
            return Tile(16, _side(shape.outputs, 32), _depth(shape.channels, 64))
        return Tile(16, 16, _depth(shape.channels, 128), num_warps=2)
    if is_float32:
        columns = _side(shape.outputs, 64)
        num_warps = 2 if shape.pool and columns <= 32 else 4
        return Tile(32, columns, _depth(shape.channels, 32), num_warps)
    if shape.pool:
        return Tile(64, _side(shape.outputs, 64), _depth(shape.channels, 32), num_stages=2)
    return Tile(64, _side(shape.outputs, 32), _depth(shape.channels, 64))


def input_tile(shape: LayerShape) -> Tile:
    """Return the tile of input pixels by channels."""
    columns, depth = _side(shape.channels, 32), _depth(shape.outputs, 64)
    if shape.precision != "float32" and shape.height * shape.width > 64:
        return Tile(128, columns, depth, num_stages=2)
    return Tile(64, columns, depth)


def weight_tile(shape: LayerShape) -> Tile:
    """Return the tile of numbers of a patch by outputs."""
    if shape.pooled_slopes:
        rows = triton.next_power_of_2(shape.side * shape.channels)
        return Tile(rows, _side(shape.outputs, 32), 8)
    columns = _side(shape.outputs, 64)
    if shape.precision != "float32":
        return Tile(64, columns, 64, num_stages=2)
    if shape.full_size == (1, 1):
        return Tile(32, columns, 64, num_stages=2)
    return Tile(32, columns, 32)


def weight_tiles(shape: LayerShape, tile: Tile) -> int:
    """Return the number of tiles of the weight's gradient."""
    rows = shape.side if shape.pooled_slopes else triton.cdiv(shape.patch, tile.ROWS)
    return rows * triton.cdiv(shape.outputs, tile.COLUMNS)


def _side(count: int, largest: int) -> int:
    """Return the side of a tile for `count` numbers."""
    return min(max(triton.next_power_of_2(count), SMALLEST_SIDE), largest)


def _depth(count: int, largest: int) -> int:
    """Return the depth of a tile for patches of pixels with `count` numbers.

    It divides `count` if possible, so that a block of a patch comes from a single pixel.
    """
    return max(SMALLEST_SIDE, math.gcd(count, largest))


@dataclass(frozen=True)
class Network:
    """A chain of convolutions and linear layers, with the sizes of each layer.

    `storage` says for `ModelBuffers` how weights are stored: [S * S, C, N].
    """

    layers: Sequence[ChainLayer]
    shapes: Sequence[LayerShape]
    storage: Stack


def find_network(workload: Workload, precision: Precision) -> Network | None:
    """Return the model of the workload for the kernels, or None if they cannot train it.

    They train convolutional chains without dropout on float32 images.
    """
    chain, x = workload.chain, workload.data.x
    if chain is None or chain.is_linear or x.dim() != 4 or x.dtype != torch.float32:
        return None
    if any(layer.rate for layer in chain.layers):
        return None
    params = dict(workload.model.named_parameters())
    channels, height, width = x.shape[1:]
    stored_channels = round_up_to(PIECE, channels)
    shapes: list[LayerShape] = []
    storage: Stack = {}
    for layer in chain.layers:
        # A linear layer has a weight for each pixel that it flattens, if any.
        weight = params[layer.weight]
        outputs = len(weight)
        numbers = torch.arange(weight.numel()).view(outputs, channels, -1).permute(2, 1, 0)
        numbers = F.pad(numbers, (0, 0, 0, stored_channels - channels), value=-1)
        storage[layer.weight] = numbers
        if layer.kernel:
            shape = LayerShape(
                *(height, width, stored_channels, outputs),
                *(layer.kernel, layer.padding, layer.pool, precision),
                is_first=not shapes,
            )
        else:
            inputs = height * width * stored_channels
            shape = LayerShape(1, 1, inputs, outputs, precision=precision)
        shapes.append(shape)
        (height, width), channels = shape.out_size, outputs
        stored_channels = outputs
    return Network(chain.layers, shapes, storage)


class LayerKernels:
    """A layer of R clients: its tensors (see convolution_kernels.py), and the launches on them.

    `x` [R, B, H, W, C] is the layer's input. `sums` [R, ...] receives the parts of gradients.
    """

    def __init__(
        self,
        shape: LayerShape,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sums: Tensor,
    ) -> None:
        self.shape = shape
        self.x = x
        self.weight = weight
        self.bias = bias
        self.sums = sums
        self.parts = shape.parts
        self.num_clients, self.batch = x.shape[:2]
        self.y = x.new_empty(*x.shape[:2], *shape.out_size, shape.outputs)
        # Nothing is written to pixels that pooling drops. Their slopes stay zero.
        self.slopes = x.new_zeros(*x.shape[:2], *shape.slope_size, shape.outputs)
        self.winners = torch.empty_like(self.y, dtype=torch.uint8) if shape.pool else self.y

    def forward(self, *, relu: bool, tile: Tile | None = None) -> None:
        """Compute y and the winners."""
        shape, tile = self.shape, tile or forward_tile(self.shape)
        self._launch(
            kernels.forward,
            self._grid(math.prod(shape.out_size), shape.outputs, tile),
            shape.out_size,
            *(self.x, self.weight, self.weight if self.bias is None else self.bias),
            *(self.y, self.winners, self.weight.stride(0), self.batch),
            POOL=shape.pool,
            BIAS=self.bias is not None,
            RELU=relu,
            **asdict(tile),
        )

    def input_gradient(self, x_slopes: Tensor, x_winners: Tensor, tile: Tile | None = None) -> None:
        """Compute the slopes of the layer below, which has `x_winners`, from this layer's."""
        shape, tile = self.shape, tile or input_tile(self.shape)
        x_height, x_width, x_channels = x_winners.shape[2:]
        self._launch(
            kernels.input_gradient,
            self._grid(shape.height * shape.width, shape.channels, tile),
            shape.slope_size,
            *(self.slopes, self.weight, self.x, x_winners, x_slopes),
            *(self.weight.stride(0), self.batch),
            X_HEIGHT=x_height,
            X_WIDTH=x_width,
            X_CHANNELS=x_channels,
            SLOPE_HEIGHT=x_slopes.shape[2],
            SLOPE_WIDTH=x_slopes.shape[3],
            **asdict(tile),
        )

    def weight_gradient(self, tile: Tile | None = None) -> None:
        """Compute the parts of the gradients of weight and bias."""
        shape, tile = self.shape, tile or weight_tile(self.shape)
        kernel, inputs = kernels.weight_gradient, [self.x, self.slopes]
        if shape.pooled_slopes:
            kernel, inputs = kernels.weight_gradient_of_winners, [*inputs, self.winners]
        self._launch(
            kernel,
            (weight_tiles(shape, tile), self.parts, self.num_clients),
            shape.slope_size,
            *inputs,
            *(self.sums, self.sums.stride(0), self.batch),
            **asdict(tile),
        )

    def _grid(self, pixels: int, columns: int, tile: Tile) -> tuple[int, int, int]:
        rows = triton.cdiv(self.batch * pixels, tile.ROWS)
        return rows, triton.cdiv(columns, tile.COLUMNS), self.num_clients

    def _launch(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        out_size: tuple[int, int],
        *arguments: Tensor | int,
        **options: Any,
    ) -> None:
        shape = self.shape
        kernel[grid](
            *arguments,
            HEIGHT=shape.height,
            WIDTH=shape.width,
            CHANNELS=shape.channels,
            OUT_HEIGHT=out_size[0],
            OUT_WIDTH=out_size[1],
            OUTPUTS=shape.outputs,
            SIDE=shape.side,
            PADDING=shape.padding,
            PRECISION=PRODUCTS[shape.precision],
            **options,
        )


@dataclass(eq=False, repr=False)
class ConvolutionSteps(RecordableSteps):
    """Local steps of all clients at once, for a `Network`."""

    network: Network

    def __post_init__(self) -> None:
        super().__post_init__()
        network = self.network
        params, grads = self.models.views(self.params), self.models.views(self.grads)
        num_clients, shapes = len(self.params), network.shapes
        widths = [round_up_to(ALIGNMENT, s.parts * (s.patch + 1) * s.outputs) for s in shapes]
        self.sums = self.params.new_zeros(num_clients, sum(widths))
        self.images = self.params.new_zeros(
            *(num_clients, self.table.batch, shapes[0].height, shapes[0].width, shapes[0].channels),
            dtype=torch.bfloat16 if shapes[0].precision == "bf16" else torch.float32,
        )
        self.layers: list[LayerKernels] = []
        blocks: list[tuple[int, ...]] = []
        x, first = self.images, 0
        for layer, shape, width in zip(network.layers, shapes, widths, strict=True):
            weight, bias = params[layer.weight], None
            distance = (shape.patch + 1) * shape.outputs
            for begin, end in _runs(network.storage[layer.weight]):
                target = int(grads[layer.weight].storage_offset()) + begin
                blocks += _blocks(first + begin, distance, shape.parts, target, end - begin)
            if layer.bias is not None:
                bias = params[layer.bias]
                source = first + shape.patch * shape.outputs
                target = int(grads[layer.bias].storage_offset())
                blocks += _blocks(source, distance, shape.parts, target, shape.outputs)
            sums = self.sums[:, first : first + width]
            x = x.view(*x.shape[:2], shape.height, shape.width, shape.channels)
            self.layers.append(LayerKernels(shape, x, weight, bias, sums))
            x = self.layers[-1].y
            first += width
        self.use_sgd_kernel()
        self.side = SideStream(self.params.device)
        self.blocks = torch.tensor(blocks, dtype=torch.int32, device=self.params.device)

    def compute_gradients(self, batch: StackedBatch, live: Tensor, *, full: bool) -> Tensor:
        assert batch.weights is not None
        # 1. Forward pass
        images = batch.x.movedim(2, -1)
        self.images[..., : images.shape[-1]].copy_(images)
        last = self.layers[-1]
        for layer in self.layers:
            layer.forward(relu=layer is not last)

        # 2. Cross-entropy and its gradient
        losses = torch.empty_like(batch.weights)
        num_classes, columns = last.shape.outputs, _side(last.shape.outputs, 2**16)
        rows = max(1, 2**10 // columns)
        kernels.cross_entropy[(triton.cdiv(losses.numel(), rows),)](
            *(last.y, batch.y.contiguous(), batch.weights.contiguous(), losses, last.slopes),
            losses.numel(),
            CLASSES=num_classes,
            ROWS=rows,
            COLUMNS=columns,
        )

        # 3. Backward pass
        for below, layer in reversed(list(pairwise(self.layers))):
            with self.side.part():
                layer.weight_gradient()
            layer.input_gradient(below.slopes, below.winners)
        self.layers[0].weight_gradient()
        self.side.join()
        kernels.add_parts[len(self.blocks), len(self.params)](
            *(self.sums, self.grads, self.blocks, self.sums.stride(0), self.grads.stride(0)),
            BLOCK=BLOCK,
            PARTS=PARTS_AT_A_TIME,
        )
        return losses


def _runs(numbers: Tensor) -> list[tuple[int, int]]:
    """Return begin and end of the places between gaps in `numbers` [S * S, C, N] of a weight."""
    channels, outputs = numbers.shape[1:]
    used = int((numbers[0, :, 0] >= 0).sum())
    if used == channels:
        return [(0, numbers.numel())]
    begins = range(0, numbers.numel(), channels * outputs)
    return [(begin, begin + used * outputs) for begin in begins]


def _blocks(
    source: int, distance: int, parts: int, target: int, count: int
) -> list[tuple[int, ...]]:
    """Return the rows of the table of `add_parts` for `count` numbers after one another."""
    rows: list[tuple[int, ...]] = []
    for begin in range(0, count, BLOCK):
        length = min(BLOCK, count - begin)
        rows.append((source + begin, distance, parts, target + begin, length))
    return rows
