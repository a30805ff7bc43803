"""Where a chain of linear layers lies in memory for its Triton kernels, and how it is cut into tiles."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

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
        """Where the inputs of layers 1, 2, ... begin in a sample's row of hidden values; the last entry is its width."""
        return _cumulated([0, *self.padded[1:-1]])

    @cached_property
    def slopes(self) -> tuple[int, ...]:
        """Where the gradients at the outputs of layers 0, 1, ... begin in a sample's row; the last entry is its width."""
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

    def dropout_constants(self) -> dict[str, Any]:
        """The rule of `fedsim.engine.model.layers.dropout_mask`, for each layer."""
        return {
            "SALTS": tuple((1 + number * _CALLS) * _GOLDEN % 2**64 for number, _ in self.dropouts),
            "FLOORS": tuple(round(rate * 2**24) for _, rate in self.dropouts),
            "SCALES": tuple(1 / (1 - rate) if rate < 1 else 0.0 for _, rate in self.dropouts),
        }


def layout_of(chain: Chain, shapes: Mapping[str, torch.Size]) -> ChainLayout:
    """The layout where the tensors of `shapes` lie one after another, in this order."""
    begins = dict(zip(shapes, _cumulated([shape.numel() for shape in shapes.values()]), strict=False))
    links = chain.links
    return ChainLayout(
        widths=(shapes[links[0].weight][1], *(shapes[link.weight][0] for link in links)),
        weights=tuple(begins[link.weight] for link in links),
        biases=tuple(-1 if link.bias is None else begins[link.bias] for link in links),
        dropouts=tuple((link.dropout, link.rate) for link in links),
    )


def _cumulated(sizes: list[int] | tuple[int, ...]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(sizes, initial=0))
