"""Where a chain of linear layers lies in memory for its Triton kernels, and how it is cut into tiles."""

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedsim.engine.graph.layout import Layout
from fedsim.engine.model.chain import Chain
from fedsim.engine.model.layers import _CALLS, _GOLDEN

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
        """The rule of `fedsim.engine.model.layers.dropout_mask`, for each layer."""
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

    def of_forward(self) -> dict[str, int]:
        return {"T": self.samples, "K": self.inputs, "num_warps": self.forward_warps}

    def of_update(self) -> dict[str, int]:
        return {"T": self.summed, "num_warps": self.update_warps}


def chain_layout(chain: Chain, layout: Layout) -> ChainLayout:
    """The chain's tensors as they lie in the rows of `layout`."""
    slots, links = {slot.name: slot for slot in layout.slots}, chain.links
    return ChainLayout(
        widths=(slots[links[0].weight].shape[1], *(slots[link.weight].shape[0] for link in links)),
        weights=tuple(slots[link.weight].first for link in links),
        biases=tuple(-1 if link.bias is None else slots[link.bias].first for link in links),
        dropouts=tuple((link.dropout, link.rate) for link in links),
    )


def _cumulated(sizes: list[int] | tuple[int, ...]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(sizes, initial=0))
