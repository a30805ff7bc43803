"""Chains of linear layers as two Triton kernels a step (`triton_kernels`), where there is Triton and a GPU."""

import itertools
import os
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedsim.engine.backend import Workload
from fedsim.engine.chain import Chain
from fedsim.engine.graph.buffers import Layout, State, StepTables
from fedsim.engine.graph.optimizers import FlatOptimizer
from fedsim.engine.graph.steps import StepProgram
from fedsim.engine.model import _CALLS, _GOLDEN
from fedsim.engine.optimizers import SGD, Adam, LocalOptimizer

LEAST = 16
"""Smallest side of a tensor-core product."""


@dataclass(frozen=True)
class ChainLayout:
    """`widths`: the inputs of each layer, and the number of classes. `weights`, `biases`: where each layer's tensors
    begin in the flat parameters of a client (a bias of -1: none). `dropouts`: number and rate of the dropout behind
    each layer (rate 0: none)."""

    widths: tuple[int, ...]
    weights: tuple[int, ...]
    biases: tuple[int, ...]
    dropouts: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, chain: Chain, layout: Layout) -> "ChainLayout":
        """The chain's tensors as they lie in the rows of `layout`."""
        slots, links = {slot.name: slot for slot in layout.slots}, chain.links
        return cls(
            widths=(slots[links[0].weight].shape[1], *(slots[link.weight].shape[0] for link in links)),
            weights=tuple(slots[link.weight].first for link in links),
            biases=tuple(-1 if link.bias is None else slots[link.bias].first for link in links),
            dropouts=tuple((link.dropout, link.rate) for link in links),
        )

    @cached_property
    def padded(self) -> tuple[int, ...]:
        """Widths as powers of 2, which is what a tile has to be."""
        return tuple(max(LEAST, 1 << (width - 1).bit_length()) for width in self.widths)

    @cached_property
    def hidden(self) -> tuple[int, ...]:
        """Where the inputs of layers 1, 2, ... begin in a sample's row of hidden values, and the row's width."""
        return _cumulated([0, *self.padded[1:-1]])

    @cached_property
    def slopes(self) -> tuple[int, ...]:
        """Where the gradients at the outputs of layers 0, 1, ... begin in a sample's row, and the row's width."""
        return _cumulated(self.padded[1:])

    def constants(self) -> dict[str, Any]:
        """What both kernels are compiled for."""
        return {
            "WIDTHS": self.widths,
            "PADDED": self.padded,
            "WEIGHTS": self.weights,
            "BIASES": self.biases,
            "HIDDEN": self.hidden[:-1],
            "HIDDEN_WIDTH": self.hidden[-1],
            "SLOPES": self.slopes[:-1],
            "SLOPES_WIDTH": self.slopes[-1],
        }

    def blocks(self, size: int) -> dict[str, Any]:
        """Each layer's inputs cut into blocks of `size`, for `update`."""
        sizes = tuple(min(size, padded) for padded in self.padded[:-1])
        counts = [-(-width // size) for width, size in zip(self.widths, sizes, strict=False)]
        return {"BLOCKS": _cumulated(counts), "SIZES": sizes}

    def dropout_constants(self) -> dict[str, Any]:
        """The rule of `fedsim.engine.model.dropout_mask`, for each layer."""
        return {
            "SALTS": tuple((1 + number * _CALLS) * _GOLDEN % 2**64 for number, _ in self.dropouts),
            "FLOORS": tuple(round(rate * 2**24) for _, rate in self.dropouts),
            "SCALES": tuple(1 / (1 - rate) if rate < 1 else 0.0 for _, rate in self.dropouts),
        }


@dataclass(frozen=True)
class Tiles:
    """Sizes of tiles, warps of a program, and how many loads run ahead of their products (`stages`).

    A program of `forward` has `samples`, and takes `inputs` of the first layer at a time; one of `update` has a `block`
    of a layer's inputs, and sums over `summed` samples at a time.

    None may depend on the number of clients or on the size of a batch: the order of additions depends on all of them,
    and a client's result must not depend on its company. Chosen for an H100 (132 multiprocessors) by thought and by
    the registers that the compiler reports, never timed on a card:

    - 16 samples, the least that tensor cores take: 10 clients with batches of 64 are then 40 programs of `forward`.
      Each reads all weights of its client, 0.2 MB in W1, from the L2 cache, where all of them stay from step to step;
      larger tiles would read them less often, but leave more multiprocessors idle.
    - blocks of 64 inputs: 150 programs of `update` in that case, each with a gradient of 64 x 64 in registers.
    - 4 warps, and 8 for layers wider than 64, so that the three TF32 products of tf32x3 keep their values in registers:
      in W1, 168 of 255 in `forward` and 148 in `update`. Up to two hidden layers of 128 nothing is spilled; the forward
      pass of three and 100 classes spills 8 bytes.
    """

    samples: int = 16
    inputs: int = 64
    summed: int = 32
    block: int = 64
    forward_warps: int = 4
    update_warps: int = 4
    stages: int = 3

    @classmethod
    def of(cls, layout: ChainLayout) -> "Tiles":
        """Those for a chain."""
        if max(layout.padded[1:]) <= 64:
            return cls()
        return cls(inputs=32, block=32, forward_warps=8, update_warps=8)


def _cumulated(sizes: list[int] | tuple[int, ...]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(sizes, initial=0))


Products = Literal["tf32x3", "ieee", "tf32"]
"""How matrices are multiplied: on tensor cores as three products of TF32 parts (float32's accuracy), without tensor
cores, or on tensor cores with factors rounded to TF32 (10 bits)."""

MAX_WIDTH = 128
"""Of hidden layers and of classes: a program holds a tile of a layer's whole output in registers."""
MAX_LAYERS = 5
"""The kernels' code grows with them."""
LEAST_ARCH = 80
"""The first NVIDIA architecture with TF32 (Ampere), ten times its compute capability."""


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid, and its arguments, options of the compiler among them."""

    kernel: Any
    grid: tuple[int, int]
    arguments: dict[str, Any]

    def __call__(self) -> None:
        self.kernel[self.grid](**self.arguments)


class TritonChain(StepProgram):
    """A chain of linear layers in two launches a step, however many clients and layers: see `triton_kernels`.

    For workloads that `unfit` finds nothing against. What a client gets is the same in any company, to the last bit.
    Never run on a GPU so far: checked in Triton's interpreter, and compiled for an H100 (sm_90).
    """

    def __init__(
        self,
        workload: Workload,
        tables: StepTables,
        state: State,
        optimizer: FlatOptimizer,
        *,
        products: Products = "tf32x3",
        tiles: Tiles | None = None,
    ) -> None:
        super().__init__(workload, tables, state, optimizer)
        from fedsim.engine.graph import triton_kernels as kernels  # Triton is not everywhere

        assert workload.chain is not None
        layout = ChainLayout.of(workload.chain, state.layout)
        tiles = Tiles.of(layout) if tiles is None else tiles
        fields, blocks = tables.all, layout.blocks(tiles.block)
        _, rows, batch = tables.losses.shape
        common = layout.constants() | {
            "x": workload.data.x.flatten(1).contiguous(),
            "positions": fields.positions,
            "counts": fields.counts,
            "step": tables.step,
            "flat": state.flat,
            "hidden": state.flat.new_zeros(rows, batch, layout.hidden[-1]),
            "slopes": state.flat.new_zeros(rows, batch, layout.slopes[-1]),
            "R": rows,
            "B": batch,
            "P": state.flat.stride(0),
            "stride": fields.positions.stride(0),
            "PRECISION": products,
            "num_stages": tiles.stages,
            "enable_fp_fusion": True,
        }
        forward = layout.dropout_constants() | {
            "y": workload.data.y,
            "keys": fields.keys,
            "losses": tables.losses,
            "T": tiles.samples,
            "K": tiles.inputs,
            "num_warps": tiles.forward_warps,
        }
        first, second = [*optimizer.buffers, None, None][:2]
        update = (
            blocks
            | _rule(workload.optimizer)
            | {
                "scalars": fields.scalars,
                "first": first,
                "second": second,
                "T": tiles.summed,
                "num_warps": tiles.update_warps,
            }
        )
        self.forward = Launch(kernels.forward, (rows, -(-batch // tiles.samples)), common | forward)
        self.update = Launch(kernels.update, (rows, blocks["BLOCKS"][-1]), common | update)

    @property
    def launches(self) -> int:
        return 2

    def step(self, *, full: bool) -> None:
        with torch.cuda.device_of(self.state.flat):  # Triton launches on the current device
            self.forward()
            self.update()


def unfit(workload: Workload) -> str | None:
    """Why `TritonChain` cannot train `workload`, or None if it can."""
    if model := _unfit_model(workload.chain, workload.model):
        return model
    if type(workload.optimizer) not in (SGD, Adam):
        return f"there is no kernel for {type(workload.optimizer).__name__}"
    return _unfit_data(workload.data.x)


def _unfit_model(chain: Chain | None, model: nn.Module) -> str | None:
    if chain is None or not chain.is_linear:
        return "the model is no chain of linear layers"
    if len(chain.links) > MAX_LAYERS:
        return f"the model has {len(chain.links)} layers, more than {MAX_LAYERS}"
    shapes = {name: value.shape for name, value in model.named_parameters()}
    widest = max(shapes[link.weight][0] for link in chain.links)
    return f"a layer has {widest} outputs, more than {MAX_WIDTH}" if widest > MAX_WIDTH else None


def _unfit_data(x: Tensor) -> str | None:
    if x.dtype != torch.float32:
        return f"the samples are {str(x.dtype).removeprefix('torch.')}, not float32"
    if not len(x):
        return "there are no samples"
    if type(x) is not Tensor:  # without memory of its own, such as a FakeTensor
        return f"the samples are a {type(x).__name__}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # on any device
    return None if interpreted else _unfit_device(x.device)


def _unfit_device(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"the device is {device.type}"
    from triton.runtime import driver

    try:
        target = driver.active.get_current_target()
    except Exception as error:  # a driver or a C compiler that is missing, in ways of any version
        return f"Triton cannot use the device: {error}"
    too_old = target.backend == "cuda" and target.arch < LEAST_ARCH
    return f"the device is of sm_{target.arch}, before sm_{LEAST_ARCH}" if too_old else None


def _rule(rule: LocalOptimizer) -> dict[str, Any]:
    """The name and the constants of the optimiser's rule, as `triton_kernels.update` takes them."""
    if isinstance(rule, Adam):
        name = "adamw" if rule.decoupled else "adam"
        beta1, beta2, eps = rule.beta1, rule.beta2, rule.eps
    else:
        assert isinstance(rule, SGD)
        name = "nesterov" if rule.nesterov else "momentum" if rule.momentum else "sgd"
        beta1, beta2, eps = rule.momentum, 0.0, 0.0
    rates = {"beta1": beta1, "fresh1": 1 - beta1, "beta2": beta2, "fresh2": 1 - beta2, "eps": eps}
    return {"RULE": name, "decay": rule.weight_decay, **rates}
