"""Any model by automatic differentiation, one client after another or side by side on streams.

Each client's pass is the plain one of PyTorch: ordinary convolutions and, on full batches, ordinary BatchNorm, where
vmap makes grouped convolutions and BatchNorm of many small passes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedsim.engine.backend import Workload
from fedsim.engine.batched.steps import StackedBatch
from fedsim.engine.graph.linear import gathered
from fedsim.engine.graph.optimizers import FlatOptimizer
from fedsim.engine.graph.program import StepProgram
from fedsim.engine.graph.recorder import side_by_side
from fedsim.engine.graph.state import State
from fedsim.engine.graph.tables import Tables
from fedsim.engine.model.adapt import for_batched, for_sequential, keyed_dropouts, masked_norms
from fedsim.engine.precision import Precision, autocast
from fedsim.types import Params, Stack

LAUNCHES_A_LAYER = 12
"""About how many kernels the forward and backward pass of a layer are, cuDNN's changes of layout counted."""


class OneByOne(StepProgram):
    """A client's pass on views of its row of the flat buffers. Full batches take torch's BatchNorm, others the one
    with masks."""

    def __init__(
        self,
        workload: Workload,
        tables: Tables,
        state: State,
        optimizer: FlatOptimizer,
        *,
        precision: Precision,
        layout: torch.memory_format,
        streams: Sequence[torch.cuda.Stream],
    ) -> None:
        """Raises `ConfigError` naming a layer that cannot be trained on padded batches."""
        super().__init__(workload, tables, state, optimizer)
        device = workload.data.x.device
        self.precision, self.layout, self.streams = precision, layout, streams
        masked = _Template(for_batched(workload.model).to(device))
        self.two_forms = bool(masked.masks)
        self._masked = masked
        self._full = _Template(for_sequential(workload.model).to(device)) if self.two_forms else masked
        self._leaves = [
            {name: view[row].detach().requires_grad_() for name, view in state.views.items()}
            for row in range(len(state))
        ]

    @property
    def launches(self) -> int:
        layers = sum(1 for m in self._masked.module.modules() if not list(m.children()))
        return len(self.state) * LAUNCHES_A_LAYER * layers

    def step(self, *, full: bool) -> None:
        template = self._full if full else self._masked
        row = self.tables.row
        batch = gathered(self.workload, row)
        moved = self.state.statistics.clone()
        side = self._side_inputs(template, batch) | self.state.statistics_layout.views(moved)
        losses: list[Tensor] = [batch.x] * len(self.state)

        def train(client: int) -> None:
            losses[client] = self._gradient(template, client, batch, {n: v[client] for n, v in side.items()})

        side_by_side(self.streams, [lambda client=client: train(client) for client in range(len(self.state))])
        self._finish(torch.stack(losses), moved, row.counts[0], row.scalars[0])

    @torch.no_grad()
    def _finish(self, losses: Tensor, moved: Tensor, counts: Tensor, scalars: Tensor) -> None:
        self.tables.write_losses(losses)
        live = (counts > 0).unsqueeze(1)
        if moved.numel():
            torch.where(live, moved, self.state.statistics, out=self.state.statistics)
        self.optimizer.update(self.state.flat, self.state.grads, live, scalars)

    def _side_inputs(self, template: "_Template", batch: StackedBatch) -> Stack:
        """Per-client buffers that are not part of the model: dropout keys and BatchNorm's masks."""
        side: Stack = {}
        if template.keys and batch.keys is not None:
            side |= dict.fromkeys(template.keys, batch.keys)
        if template.masks and batch.weights is not None:
            side |= dict.fromkeys(template.masks, (batch.weights > 0).to(batch.x.dtype))
        return side

    def _gradient(self, template: "_Template", client: int, batch: StackedBatch, side: Params) -> Tensor:
        """The gradient of a client's mean loss into its row of `state.grads`; running statistics in `side` are updated
        in place. Returns the samples' losses [B]."""
        assert batch.weights is not None
        leaves = self._leaves[client]
        x = batch.x[client].contiguous(memory_format=self.layout)
        tensors = leaves | side
        with torch.enable_grad():
            with autocast(self.precision, x.device):
                output = template(tensors, x).to(x.dtype)
            each = F.cross_entropy(output, batch.y[client], reduction="none")
            total = (each * batch.weights[client]).sum()
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            parts = self.state.layout.parts(dict(zip(leaves, found, strict=True)))
            torch.cat(parts, out=self.state.grads[client])
            replaced = [name for name in self.state.statistics_views if tensors[name] is not side[name]]
            if replaced:
                torch._foreach_copy_([side[n] for n in replaced], [tensors[n].detach() for n in replaced])
        return each.detach()


class _Template:
    """A module whose tensors are passed in; frozen parameters are its own."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module.requires_grad_(False)
        dropouts = dict(keyed_dropouts(module))
        self.keys, self.dropouts = list(dropouts), list(dropouts.values())
        self.masks = masked_norms(module)

    def __call__(self, tensors: Params, x: Tensor) -> Tensor:
        """Running statistics are updated in place, or replaced in `tensors`."""
        for layer in self.dropouts:
            layer.calls = 0
        output: Tensor = functional_call(self.module, tensors, (x,))
        return output
