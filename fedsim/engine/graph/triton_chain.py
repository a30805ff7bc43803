"""Chains of linear layers as two Triton kernels a step (`triton_kernels`), where there is Triton and a GPU."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedsim.engine.backend import Workload
from fedsim.engine.graph.optimizers import FlatOptimizer
from fedsim.engine.graph.program import StepProgram
from fedsim.engine.graph.state import State
from fedsim.engine.graph.tables import StepTables
from fedsim.engine.graph.triton_layout import ChainLayout, Tiles, chain_layout
from fedsim.engine.model.chain import Chain
from fedsim.optimizers.adam import Adam
from fedsim.optimizers.base import LocalOptimizer
from fedsim.optimizers.sgd import SGD

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
        layout = chain_layout(workload.chain, state.layout)
        tiles = Tiles.of(layout) if tiles is None else tiles
        options = {"PRECISION": products, "num_stages": tiles.stages, "enable_fp_fusion": True}
        common = layout.constants() | self._common(layout) | options
        forward = layout.dropout_constants() | self._forward() | tiles.of_forward()
        update = layout.blocks(tiles.block) | self._update() | tiles.of_update()
        _, rows, batch = tables.losses.shape
        self.forward = Launch(kernels.forward, (rows, -(-batch // tiles.samples)), common | forward)
        self.update = Launch(kernels.update, (rows, update["BLOCKS"][-1]), common | update)

    @property
    def launches(self) -> int:
        return 2

    def step(self, *, full: bool) -> None:
        with torch.cuda.device_of(self.state.flat):  # Triton launches on the current device
            self.forward()
            self.update()

    def _common(self, layout: ChainLayout) -> dict[str, Any]:
        """What both kernels take: samples, tables, parameters, and the buffers between the two."""
        flat, fields = self.state.flat, self.tables.all
        _, rows, batch = self.tables.losses.shape
        return {
            "x": self.workload.data.x.flatten(1).contiguous(),
            "positions": fields.positions,
            "counts": fields.counts,
            "step": self.tables.step,
            "flat": flat,
            "hidden": flat.new_zeros(rows, batch, layout.hidden[-1]),
            "slopes": flat.new_zeros(rows, batch, layout.slopes[-1]),
            "R": rows,
            "B": batch,
            "P": flat.stride(0),
            "stride": fields.positions.stride(0),
        }

    def _forward(self) -> dict[str, Any]:
        return {"y": self.workload.data.y, "keys": self.tables.all.keys, "losses": self.tables.losses}

    def _update(self) -> dict[str, Any]:
        first, second = [*self.optimizer.buffers, None, None][:2]
        rule, rates = _rule(self.workload.optimizer)
        return {"scalars": self.tables.all.scalars, "first": first, "second": second, "RULE": rule, **rates}


def unfit(workload: Workload) -> str | None:
    """Why `TritonChain` cannot train `workload`, or None if it can."""
    model, data = workload.model, workload.data
    return _unfit_model(workload.chain, model) or _unfit_optimizer(workload.optimizer) or _unfit_data(data.x)


def _unfit_model(chain: Chain | None, model: nn.Module) -> str | None:
    if chain is None or not chain.is_linear:
        return "the model is no chain of linear layers"
    if len(chain.links) > MAX_LAYERS:
        return f"the model has {len(chain.links)} layers, more than {MAX_LAYERS}"
    shapes = {name: value.shape for name, value in model.named_parameters()}
    widest = max(shapes[link.weight][0] for link in chain.links)
    return f"a layer has {widest} outputs, more than {MAX_WIDTH}" if widest > MAX_WIDTH else None


def _unfit_optimizer(rule: LocalOptimizer) -> str | None:
    return None if type(rule) in (SGD, Adam) else f"there is no kernel for {type(rule).__name__}"


def _unfit_data(x: Tensor) -> str | None:
    if x.dtype != torch.float32:
        return f"the samples are {str(x.dtype).removeprefix('torch.')}, not float32"
    if not len(x):
        return "there are no samples"
    if type(x) is not Tensor:  # without memory of its own, such as a FakeTensor
        return f"the samples are a {type(x).__name__}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    return None if _interpreted() else _unfit_device(x.device)


def _interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


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


def _rule(rule: LocalOptimizer) -> tuple[str, dict[str, float]]:
    """The name and the constants of the optimiser's rule, as `triton_kernels.update` takes them."""
    if isinstance(rule, Adam):
        name = "adamw" if rule.decoupled else "adam"
        beta1, beta2, eps = rule.beta1, rule.beta2, rule.eps
    else:
        assert isinstance(rule, SGD)
        name = "nesterov" if rule.nesterov else "momentum" if rule.momentum else "sgd"
        beta1, beta2, eps = rule.momentum, 0.0, 0.0
    rates = {"beta1": beta1, "fresh1": 1 - beta1, "beta2": beta2, "fresh2": 1 - beta2, "eps": eps}
    return name, {"decay": rule.weight_decay, **rates}
