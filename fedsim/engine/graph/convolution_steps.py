"""Local steps of convolutional networks for all clients at once, by Triton kernels.

A step has about three launches for each layer, whatever the number of clients. The head of
convolution_kernels.py describes the kernels and their memory.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from fedsim.core.types import Stack
from fedsim.engine.backend import Workload
from fedsim.engine.chain import ChainLayer
from fedsim.engine.data import ClientData
from fedsim.engine.device import Precision
from fedsim.engine.graph import convolution_kernels as kernels
from fedsim.engine.graph.buffers import ALIGNMENT, ModelBuffers, ScheduleTable, round_up_to
from fedsim.engine.graph.recorder import SideStream
from fedsim.engine.graph.steps import RecordableSteps
from fedsim.engine.optimizers import RecordableOptimizer
from fedsim.engine.stacked import StackedBatch

PRODUCTS = {"float32": "tf32x3", "tf32": "tf32", "bf16": "bf16"}
"""Kinds of products in the kernels, by precision."""
PIECE = 4
"""Images are stored with a multiple of so many channels, which a kernel loads in one piece."""
BLOCK = 128
"""Numbers that a program of `add_parts` adds."""
PARTS_AT_A_TIME = 8
"""Number of parts that a program of `add_parts` loads at a time."""
PART_PROGRAMS = 256
"""Number of programs for a client's gradient of a weight, which determines the number of parts."""
MAX_PARTS = 128
"""Maximum number of parts of a weight's gradient."""
FEW_CHANNELS = 4
"""Up to so many channels, a layer with pooling loads only patches of winners for its gradient."""
SMALLEST_SIDE = 16
"""Smallest side of a tile that Triton multiplies."""


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a layer: its input, its output after pooling, and its square kernel."""

    height: int
    width: int
    channels: int
    out_height: int
    out_width: int
    outputs: int
    side: int = 1
    padding: int = 0
    pool: bool = False

    @property
    def patch(self) -> int:
        """Count of the inputs from which a pixel of the output is computed."""
        return self.side**2 * self.channels

    @property
    def out_pixels(self) -> int:
        return self.out_height * self.out_width

    @property
    def has_few_channels(self) -> bool:
        """True if the gradient of the weight needs only the patches of pooling's winners."""
        return self.pool and self.channels <= FEW_CHANNELS

    @property
    def parts(self) -> int:
        """Number of parts of the weight's gradient, a power of two.

        With more parts, there is work for more processors of the GPU. The number does not depend
        on the clients, because it determines the order of additions.
        """
        programs = triton.cdiv(PART_PROGRAMS, weight_tiles(self, weight_tile(self)))
        return min(
            MAX_PARTS, triton.next_power_of_2(programs), triton.next_power_of_2(self.out_pixels)
        )


@dataclass(frozen=True)
class Tile:
    """The sides of the tiles in a kernel, and options of Triton's compiler."""

    ROWS: int
    COLUMNS: int
    DEPTH: int
    num_warps: int = 4
    num_stages: int = 3


def forward_tile(shape: LayerShape) -> Tile:
    """Return the tile of output pixels by outputs."""
    depth = 32 if shape.channels % 32 == 0 else SMALLEST_SIDE
    if shape.pool:
        return Tile(64, _side(shape.outputs, 32), depth)
    rows = 32 if shape.out_pixels > 1 else 16
    return Tile(rows, _side(shape.outputs, 64), depth)


def input_tile(shape: LayerShape) -> Tile:
    """Return the tile of input pixels by channels."""
    rows = 128 if shape.out_pixels > 16 else 64 if shape.out_pixels > 1 else 16
    depth = 32 if shape.outputs % 32 == 0 else SMALLEST_SIDE
    return Tile(rows, _side(shape.channels, 64), depth)


def weight_tile(shape: LayerShape) -> Tile:
    """Return the tile of numbers of a patch by outputs."""
    columns = _side(shape.outputs, 32 if shape.has_few_channels else 64)
    if shape.has_few_channels:
        return Tile(triton.next_power_of_2(shape.side * shape.channels), columns, 8)
    rows = 64 if shape.channels % 64 == 0 else 32
    depth = 16 if shape.pool else 32
    return Tile(rows, columns, depth)


def weight_tiles(shape: LayerShape, tile: Tile) -> int:
    """Return the number of tiles of the weight's gradient."""
    rows = shape.side if shape.has_few_channels else triton.cdiv(shape.patch, tile.ROWS)
    return rows * triton.cdiv(shape.outputs, tile.COLUMNS)


def _side(count: int, largest: int) -> int:
    """Return the side of a tile for `count` numbers."""
    return min(max(triton.next_power_of_2(count), SMALLEST_SIDE), largest)


@dataclass(frozen=True)
class Network:
    """A chain of convolutions and linear layers, with the sizes of each layer.

    `storage` says for `ModelBuffers` how weights are stored: [S * S, C, N].
    """

    layers: Sequence[ChainLayer]
    shapes: Sequence[LayerShape]
    storage: Stack
    precision: Precision


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
            border = 2 * layer.padding - layer.kernel + 1
            step = 2 if layer.pool else 1
            out_height, out_width = (height + border) // step, (width + border) // step
            shape = LayerShape(
                *(height, width, stored_channels),
                *(out_height, out_width, outputs),
                *(layer.kernel, layer.padding, layer.pool),
            )
        else:
            shape = LayerShape(1, 1, height * width * stored_channels, 1, 1, outputs)
        shapes.append(shape)
        height, width, channels = shape.out_height, shape.out_width, outputs
        stored_channels = outputs
    return Network(chain.layers, shapes, storage, precision)


class LayerKernels:
    """A layer of R clients: its tensors (see convolution_kernels.py), and the launches on them.

    `x` [R, B, H, W, C] is the layer's input. `sums` [R, ...] receives the parts of gradients.
    """

    def __init__(
        self,
        shape: LayerShape,
        products: str,
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
        outside = (self.num_clients, self.batch)
        self.y = x.new_empty(*outside, shape.out_height, shape.out_width, shape.outputs)
        self.slopes = torch.empty_like(self.y)
        self.winners = torch.empty_like(self.y, dtype=torch.uint8) if shape.pool else self.y
        self._sizes = {name.upper(): value for name, value in asdict(shape).items()}
        self._sizes["PRECISION"] = products

    def forward(self, *, relu: bool, tile: Tile | None = None) -> None:
        """Compute y and the winners."""
        shape, tile = self.shape, tile or forward_tile(self.shape)
        self._launch(
            kernels.forward,
            self._grid(shape.out_pixels, shape.outputs, tile),
            *(self.x, self.weight, self.weight if self.bias is None else self.bias),
            *(self.y, self.winners, self.weight.stride(0), self.batch),
            BIAS=self.bias is not None,
            RELU=relu,
            **asdict(tile),
        )

    def input_gradient(self, x_slopes: Tensor, tile: Tile | None = None) -> None:
        """Compute the slopes of the layer below from the slopes of this layer."""
        shape, tile = self.shape, tile or input_tile(self.shape)
        self._launch(
            kernels.input_gradient,
            self._grid(shape.height * shape.width, shape.channels, tile),
            *(self.slopes, self.winners, self.weight, self.x, x_slopes),
            *(self.weight.stride(0), self.batch),
            **asdict(tile),
        )

    def weight_gradient(self, tile: Tile | None = None) -> None:
        """Compute the parts of the gradients of weight and bias."""
        shape, tile = self.shape, tile or weight_tile(self.shape)
        self._launch(
            kernels.weight_gradient_of_winners
            if shape.has_few_channels
            else kernels.weight_gradient,
            (weight_tiles(shape, tile), self.parts, self.num_clients),
            *(self.x, self.slopes, self.winners, self.sums, self.sums.stride(0), self.batch),
            **asdict(tile),
        )

    def _grid(self, pixels: int, columns: int, tile: Tile) -> tuple[int, int, int]:
        rows = triton.cdiv(self.batch * pixels, tile.ROWS)
        return rows, triton.cdiv(columns, tile.COLUMNS), self.num_clients

    def _launch(
        self, kernel: Any, grid: tuple[int, int, int], *arguments: Tensor | int, **options: Any
    ) -> None:
        kernel[grid](*arguments, **self._sizes, **options)


class ConvolutionSteps(RecordableSteps):
    """Local steps of all clients at once, for a `Network`."""

    def __init__(
        self,
        data: ClientData,
        table: ScheduleTable,
        models: ModelBuffers,
        optimizer: RecordableOptimizer,
        clients: slice,
        network: Network,
    ) -> None:
        super().__init__(data, table, models, optimizer, clients)
        products = PRODUCTS[network.precision]
        params, grads = models.views(self.params), models.views(self.grads)
        num_clients, shapes = len(self.params), network.shapes
        widths = [round_up_to(ALIGNMENT, s.parts * (s.patch + 1) * s.outputs) for s in shapes]
        self.sums = self.params.new_zeros(num_clients, sum(widths))
        self.images = self.params.new_zeros(
            *(num_clients, table.batch, shapes[0].height, shapes[0].width, shapes[0].channels),
            dtype=torch.bfloat16 if products == "bf16" else torch.float32,
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
            self.layers.append(LayerKernels(shape, products, x, weight, bias, sums))
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
        for number in range(len(self.layers) - 1, -1, -1):
            with self.side.part():
                self.layers[number].weight_gradient()
            if number:
                self.layers[number].input_gradient(self.layers[number - 1].slopes)
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
