"""The launches of one local step of a chain of linear layers as two Triton kernels (`triton_kernels`)."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedsim.engine.graph.triton_layout import ChainLayout
from fedsim.optimizers.adam import Adam
from fedsim.optimizers.base import LocalOptimizer
from fedsim.optimizers.sgd import SGD

Products = Literal["tf32x3", "ieee", "tf32"]
"""How float32 matrices are multiplied: on tensor cores as three products of TF32 parts (float32's accuracy), without
tensor cores, or on tensor cores with factors rounded to TF32 (10 bits)."""


@dataclass(frozen=True)
class Tables:
    """What the steps of R clients read. `x` [n, D] float32 and `y` [n] int64: all samples; `positions` [S, R, B] int32:
    rows of them, of which the first `counts` [S, R] int32 are valid; `keys` [S, R] int64 of dropout, or None; `step`
    [1] int32: which step of the tables is next; `lr` [1] float32: the learning rate."""

    x: Tensor
    y: Tensor
    positions: Tensor
    counts: Tensor
    keys: Tensor | None
    step: Tensor
    lr: Tensor


@dataclass(frozen=True)
class Tiles:
    """Sizes of tiles, warps of a program, and how many loads run ahead of their products (stages).

    Chosen for an H100 by thought and by what the compiler reports; never timed on a card. 10 clients with batches of 64
    are 40 programs of `forward` and 150 of `update` on 132 multiprocessors; a forward tile of 64 samples would leave 122
    of them idle, and though 16 samples read a client's weights four times as often, they come from the L2 cache (a
    client's W1 is 0.2 MB, the cache 50 MB). A tile does not depend on the number of clients, because the order of
    additions depends on it.
    """

    samples: int = 16
    inputs: int = 64
    summed: int = 32
    block: int = 64
    forward_warps: int = 4
    update_warps: int = 4
    stages: int = 3


class ChainSteps:
    """Local steps of R clients whose flat parameters are the rows of `params` [R, P], which `step` changes in place.

    Two launches a step, however many clients and layers. `losses` [S, R, B]: every step writes the valid ones of its
    row. `first` and `second` [R, P]: the state of the optimiser, where it has any.
    """

    def __init__(
        self,
        layout: ChainLayout,
        optimizer: LocalOptimizer,
        tables: Tables,
        params: Tensor,
        losses: Tensor,
        *,
        products: Products = "tf32x3",
        tiles: Tiles | None = None,
    ) -> None:
        from fedsim.engine.graph import triton_kernels  # noqa: PLC0415  Triton is optional

        self.kernels = triton_kernels
        self.layout, self.tables, self.params, self.losses = layout, tables, params, losses
        self.products, self.tiles = products, tiles or tiles_for(layout)
        self.rule, self.rates = rule_of(optimizer)
        clients, width = tables.positions.shape[1:]
        self.hidden = params.new_zeros(clients, width, layout.hidden[-1])
        self.slopes = params.new_zeros(clients, width, layout.slopes[-1])
        self.first = torch.zeros_like(params) if self.rule != "sgd" else None
        self.second = torch.zeros_like(params) if self.rule.startswith("adam") else None
        self.debias = _debias(optimizer, len(tables.positions), params.device)

    def reset(self) -> None:
        """Set the optimiser's state to that before the first step."""
        for state in (self.first, self.second):
            if state is not None:
                state.zero_()

    def step(self) -> None:
        """Launch both kernels for the tables' step `tables.step`."""
        for kernel, grid, arguments, options in self.launches():
            kernel[grid](**arguments, **options)

    def launches(self) -> list[tuple[Any, tuple[int, int], dict[str, Any], dict[str, Any]]]:
        """Kernel, grid, arguments and options of the launches of a step, in order."""
        tables, tiles = self.tables, self.tiles
        clients, width = tables.positions.shape[1:]
        blocks, sizes = self._blocks()
        common = {
            "x": tables.x, "positions": tables.positions, "counts": tables.counts, "step": tables.step,
            "params": self.params, "hidden": self.hidden, "slopes": self.slopes,
            "R": clients, "B": width, "P": self.params.stride(0), "PRECISION": self.products,
            **self.layout.constants(),
        }  # fmt: skip
        forward = {
            "y": tables.y, "keys": tables.keys, "losses": self.losses, "T": tiles.samples, "K": tiles.inputs,
            **self.layout.dropout_constants(),
        }  # fmt: skip
        update = {
            "first": self.first, "second": self.second, "lr": tables.lr, "debias": self.debias,
            "BLOCKS": blocks, "SIZES": sizes, "RULE": self.rule, "T": tiles.summed, **self.rates,
        }  # fmt: skip
        options = {"num_stages": tiles.stages, "enable_fp_fusion": True}
        return [
            (
                self.kernels.forward,
                (clients, -(-width // tiles.samples)),
                common | forward,
                options | {"num_warps": tiles.forward_warps},
            ),
            (self.kernels.update, (clients, blocks[-1]), common | update, options | {"num_warps": tiles.update_warps}),
        ]

    def _blocks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The number of blocks of inputs before each layer and of all, and their sizes in each layer."""
        sizes = tuple(min(self.tiles.block, padded) for padded in self.layout.padded[:-1])
        blocks = [0]
        for width, size in zip(self.layout.widths, sizes, strict=False):
            blocks.append(blocks[-1] + -(-width // size))
        return tuple(blocks), sizes


def tiles_for(layout: ChainLayout) -> Tiles:
    """Tiles with which the kernels of `layout` keep all values in registers."""
    return Tiles()


def rule_of(optimizer: LocalOptimizer) -> tuple[str, dict[str, float]]:
    """The name and the constants of the optimiser's rule, as `triton_kernels.update` takes them."""
    if isinstance(optimizer, Adam):
        name, (beta1, beta2, eps) = (
            "adamw" if optimizer.decoupled else "adam",
            (optimizer.beta1, optimizer.beta2, optimizer.eps),
        )
    else:
        assert isinstance(optimizer, SGD)
        name = "nesterov" if optimizer.nesterov else "momentum" if optimizer.momentum else "sgd"
        beta1, beta2, eps = optimizer.momentum, 0.0, 0.0
    rates = {"beta1": beta1, "fresh1": 1 - beta1, "beta2": beta2, "fresh2": 1 - beta2, "eps": eps}
    return name, {"decay": optimizer.weight_decay, **rates}


def _debias(optimizer: LocalOptimizer, steps: int, device: torch.device) -> Tensor | None:
    """Adam's 1 / (1 - beta^t) of both moments for t = 1, 2, ... [steps, 2], None for other optimisers. A table, because
    1 - beta^t computed in float32 would lose four digits."""
    if not isinstance(optimizer, Adam):
        return None
    count = torch.arange(1, steps + 1, dtype=torch.float64)
    columns = [1 / (1 - beta**count) for beta in (optimizer.beta1, optimizer.beta2)]
    return torch.stack(columns, 1).to(device, torch.float32)
