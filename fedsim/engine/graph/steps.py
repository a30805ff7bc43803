"""What takes the local steps of the clients in static buffers: for chains of linear layers the
written-out passes of the batched engine, else the plain pass of PyTorch for each client by itself,
whose recordings run side by side.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.core.flat import real_dtype
from fedsim.core.types import Params
from fedsim.engine.backend import Workload
from fedsim.engine.chain import LayerChain
from fedsim.engine.data import ClientData
from fedsim.engine.device import Precision, autocast
from fedsim.engine.graph.buffers import State, Tables
from fedsim.engine.model import (
    for_batched,
    for_sequential,
    refuse_mixed_samples,
    refused_if_it_fails,
)
from fedsim.engine.optimizers import SGD, Adam
from fedsim.engine.stacked import Functional, StackedBatch, layers_of, passes, samples_at


class StepProgram(ABC):
    """Local steps of the clients `rows`, by `tables` and on `state`, on the device where these are.

    `step` is recorded once and replayed many times, so it may not make the host wait, not depend in
    Python on the content of a tensor or on a learning rate, and allocate no tensor that it needs in
    a later step.
    """

    two_forms = False
    """Whether steps whose batches are full are taken in another way (see `step`)."""

    def __init__(
        self, data: ClientData, tables: Tables, state: State, optimizer: SGD | Adam, rows: slice
    ) -> None:
        self.data, self.tables, self.state, self.optimizer, self.rows = (
            data,
            tables,
            state,
            optimizer,
            rows,
        )
        self.params, self.statistics, self.grads = (
            t[rows] for t in (state.params, state.statistics, state.grads)
        )
        self.buffers = [buffer[rows] for buffer in state.buffers]
        self.shift = None if state.shift is None else state.shift[rows]

    @torch.no_grad()
    def step(self, *, full: bool) -> None:
        """The next step in `tables`: for the rows with a count > 0, updates the parameters and
        `state.statistics` in place and writes the samples' losses before the step; of other rows,
        nothing changes. `full`: all rows have a count of B; only passed to programs with
        `two_forms`."""
        fields = {name: view[0] for name, view in self.tables.next_step(self.rows).items()}
        where, live = fields["positions"], (fields["counts"] > 0).unsqueeze(1)
        x, y = samples_at(self.data.x, where), samples_at(self.data.y, where)
        batch = StackedBatch(x, y, fields["weights"], fields["keys"])
        self.tables.end_step(self.rows, self.gradients(batch, live, full=full))
        if self.shift is not None:
            self.grads.addcmul_(self.params, fields["pull"]).add_(self.shift)
        self.optimizer.recorded_step(self.params, self.grads, self.buffers, live, fields["scalars"])

    @abstractmethod
    def gradients(self, batch: StackedBatch, live: Tensor, *, full: bool) -> Tensor:
        """The gradients of the mean losses into `grads`, new `statistics` where a row is `live` [R,
        1]. Returns the samples' losses [R, B]."""


class LinearProgram(StepProgram):
    """A chain of linear layers, with products of all clients' matrices at once."""

    def __init__(
        self,
        data: ClientData,
        tables: Tables,
        state: State,
        optimizer: SGD | Adam,
        rows: slice,
        chain: LayerChain,
    ) -> None:
        super().__init__(data, tables, state, optimizer, rows)
        self.chain, self.layers = chain, layers_of(chain, state.views(self.params))
        grads = state.views(self.grads)
        self._grads = [
            (grads[k.weight], None if k.bias is None else grads[k.bias]) for k in chain.links
        ]

    def gradients(self, batch: StackedBatch, live: Tensor, *, full: bool) -> Tensor:
        losses, inputs, slopes = passes(self.chain, self.layers, batch)
        for (weight, bias), x, slope in zip(self._grads, inputs, slopes, strict=True):
            torch.bmm(slope.transpose(1, 2), x, out=weight)
            if bias is not None:
                torch.sum(slope, 1, out=bias)
        return losses


class OneByOne(StepProgram):
    """One client's passes. Full batches take torch's BatchNorm, others the one with masks."""

    def __init__(
        self,
        data: ClientData,
        tables: Tables,
        state: State,
        optimizer: SGD | Adam,
        rows: slice,
        passes: "Passes",
    ) -> None:
        super().__init__(data, tables, state, optimizer, rows)
        self.passes, self.two_forms = passes, passes.masked is not passes.full
        self._leaves = {
            name: view[0].detach().requires_grad_()
            for name, view in state.views(self.params).items()
        }
        self._grads = [view[0] for view in state.views(self.grads).values()]

    def gradients(self, batch: StackedBatch, live: Tensor, *, full: bool) -> Tensor:
        template = self.passes.full if full else self.passes.masked
        moved = self.statistics.clone()
        side = template.side_inputs(batch) | self.state.views(moved, self.params.shape[1])
        losses = self._gradient(template, batch, {name: value[0] for name, value in side.items()})
        if moved.numel():
            torch.where(live, moved, self.statistics, out=self.statistics)
        return losses.unsqueeze(0)

    def _gradient(self, template: Functional, batch: StackedBatch, side: Params) -> Tensor:
        assert batch.weights is not None
        x = batch.x[0].contiguous(memory_format=self.passes.layout)
        tensors = self._leaves | side
        with torch.enable_grad():
            with autocast(self.passes.precision, x.device):
                output = template(tensors, x).to(real_dtype(x))
            each = F.cross_entropy(output, batch.y[0], reduction="none")
            total = (each * batch.weights[0]).sum()
        found = torch.autograd.grad(
            total, list(self._leaves.values()), allow_unused=True, materialize_grads=True
        )
        torch._foreach_copy_(self._grads, list(found))
        replaced = [
            name for name in side if tensors[name] is not side[name]
        ]  # statistics of a masked BatchNorm
        if replaced:
            torch._foreach_copy_(
                [side[n] for n in replaced], [tensors[n].detach() for n in replaced]
            )
        return each.detach()


class Passes:
    """The model's passes, which the programs of all clients share: with BatchNorm of torch's
    (`full`) and with masks (`masked`; the same where the model has no BatchNorm). Batches lie in
    memory as `layout` says."""

    def __init__(
        self, workload: Workload, precision: Precision, layout: torch.memory_format
    ) -> None:
        """Raises `ConfigError` naming a layer that cannot be trained on padded batches."""
        device = workload.data.x.device
        self.precision, self.layout = precision, layout
        self.masked = self.full = _functional(for_batched(workload.model).to(device))
        if self.masked.masks:
            self.full = _functional(for_sequential(workload.model).to(device))

    def try_out(self, x: Tensor) -> None:
        """Raises `ConfigError` where the model cannot take padded batches (samples and another axis
        made one before a BatchNorm, or samples that depend on each other), by a pass of two
        samples, the second as padding."""
        module, x = self.masked.module, x[:2].contiguous(memory_format=self.layout)
        twice = torch.cat([x[:1]] * len(x))
        mask = (torch.arange(len(x), device=x.device) < 1).to(real_dtype(x))
        buffers = {name: value.clone() for name, value in module.named_buffers()}
        refused = refused_if_it_fails(module, "cannot take padded batches")
        with refused, torch.no_grad(), autocast(self.precision, x.device):
            beside = [
                self.masked(buffers | dict.fromkeys(self.masked.masks, mask), some)
                for some in (x, twice)
            ]
        refuse_mixed_samples(module, beside[0][0].float(), beside[1][0].float())


def _functional(module: nn.Module) -> Functional:
    """Frozen parameters are its own, and it writes nothing of its own."""
    for layer in module.requires_grad_(False).modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.num_batches_tracked = None  # which nothing reads where there is a momentum
    return Functional(module)
