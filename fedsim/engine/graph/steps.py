"""Step programs that can be recorded. They work on the buffers of `fedsim.engine.graph.buffers`.

A step program makes one local step of one or more clients. For a chain of linear layers, one
program trains all clients at once, by the passes that the batched engine uses. For every other
model, each client has a program in plain PyTorch, and recordings of the programs run side by side.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.core.flat import real_dtype
from fedsim.core.types import Params
from fedsim.engine.backend import Workload
from fedsim.engine.chain import LayerChain
from fedsim.engine.data import ClientData, samples_at
from fedsim.engine.device import Precision, autocast
from fedsim.engine.graph.buffers import ModelBuffers, ScheduleTable
from fedsim.engine.linear_passes import forward_and_backward, layers_of, write_gradients
from fedsim.engine.optimizers import SGD, RecordableOptimizer, clip
from fedsim.engine.stacked import StackedBatch
from fedsim.engine.training_copies import (
    for_batched,
    for_sequential,
    reject_if_it_fails,
    reject_mixed_samples,
)
from fedsim.engine.vmapped import FunctionalModule

SGDKernel = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Updates parameters by gradients, counts and scalars (`sgd_step` in update_kernels.py)."""


@dataclass(eq=False, repr=False)
class RecordableSteps(ABC):
    """Local steps of `clients`, by the `table` and on the `models`.

    `step` is recorded once and replayed many times. So it must not make the host wait. In Python,
    it must not depend on the content of a tensor or on a learning rate. And it allocates no tensor
    that a later step needs. The attributes `params` to `shift` are views of the clients' rows of
    `models`.
    """

    has_full_form = False
    """True if a step in which all batches are full is computed in another way than other steps."""

    data: ClientData
    table: ScheduleTable
    models: ModelBuffers
    optimizer: RecordableOptimizer
    clients: slice

    def __post_init__(self) -> None:
        models, clients = self.models, self.clients
        self.params = models.params[clients]
        self.statistics = models.statistics[clients]
        self.grads = models.grads[clients]
        self.state = [buffer[clients] for buffer in models.state]
        self.shift = None if models.shift is None else models.shift[clients]
        self.sgd_kernel: SGDKernel | None = None

    @torch.no_grad()
    def step(self, *, full: bool) -> None:
        """Make the table's next step, in place.

        Clients with a count of 0 in the table do not change. `full` says that all counts are B; it
        is True only if `has_full_form`.
        """
        # Views of a single step have a leading axis of length 1.
        fields = {name: view[0] for name, view in self.table.next_step(self.clients).items()}
        positions, scalars = fields["positions"], fields["scalars"]
        live = (fields["counts"] > 0).unsqueeze(1)
        x, y = self.data.batch(positions, fields.get("crops")), samples_at(self.data.y, positions)
        batch = StackedBatch(x, y, fields["weights"], fields["keys"])
        losses = self.compute_gradients(batch, live, full=full)
        self.table.end_step(self.clients, losses)
        if self.shift is not None:
            self.grads.addcmul_(self.params, fields["pull"]).add_(self.shift)
        grads = self.grads
        if self.optimizer.max_grad_norm is not None:
            grads = grads.clone()
            clip({"all": grads}, self.optimizer.max_grad_norm)
            grads.masked_fill_(self.grads == 0, 0)  # The gaps stay 0, even if the norm is nan.
        if self.sgd_kernel is not None:
            self.sgd_kernel(self.params, grads, fields["counts"], scalars)
        else:
            self.optimizer.recorded_step(self.params, grads, self.state, live, scalars)

    def use_sgd_kernel(self) -> None:
        """Update by a Triton kernel, if the optimiser is SGD without momentum."""
        if isinstance(self.optimizer, SGD) and not self.optimizer.momentum:
            from fedsim.engine.graph.update_kernels import sgd_step  # needs Triton

            self.sgd_kernel = sgd_step

    @abstractmethod
    def compute_gradients(self, batch: StackedBatch, live: Tensor, *, full: bool) -> Tensor:
        """Write the gradients of the mean losses to `grads`, and new values to `statistics`.

        `live` [R, 1] is False for clients that make no step. Their statistics must stay; their
        gradients do not matter. Returns the samples' losses [R, B].
        """


GradientKernels = Callable[[StackedBatch], Tensor]
"""Writes the gradients of a batch of all clients, and returns the losses [R, B]."""


@dataclass(eq=False, repr=False)
class RecordableLinearSteps(RecordableSteps):
    """Local steps of all clients at once, for a chain of linear layers.

    With `use_kernels`, Triton kernels compute the passes, in float32 or tf32.
    """

    chain: LayerChain
    _: KW_ONLY
    precision: Precision
    use_kernels: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        params, grads = self.models.views(self.params), self.models.views(self.grads)
        self.layers = layers_of(self.chain, params)
        self.layer_grads = layers_of(self.chain, grads)
        self._kernels: GradientKernels | None = None
        if self.use_kernels:
            from fedsim.engine.graph.linear_kernels import LinearKernels  # needs Triton

            self._kernels = LinearKernels(self.chain, params, grads, self.precision)
            self.use_sgd_kernel()

    def compute_gradients(self, batch: StackedBatch, live: Tensor, *, full: bool) -> Tensor:
        if self._kernels is not None:
            return self._kernels(batch)
        losses, inputs, slopes = forward_and_backward(self.chain, self.layers, batch)
        write_gradients(self.layer_grads, inputs, slopes)
        return losses


@dataclass(eq=False, repr=False)
class SingleClientSteps(RecordableSteps):
    """Local steps of one client. Full batches use torch's BatchNorm. Others have padding, and use
    `MaskedBatchNorm`, which leaves it out."""

    passes: "TrainingPasses"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.has_full_form = self.passes.full is not self.passes.masked
        views = self.models.views(self.params)
        self._leaves = {name: view[0].detach().requires_grad_() for name, view in views.items()}
        self._grads = [view[0] for view in self.models.views(self.grads).values()]

    def compute_gradients(self, batch: StackedBatch, live: Tensor, *, full: bool) -> Tensor:
        module = self.passes.full if full else self.passes.masked
        new_statistics = self.statistics.clone()
        side_inputs = module.side_inputs(batch)
        side_inputs |= self.models.views(new_statistics, first_column=self.params.shape[1])
        losses = self._pass(module, batch, {n: value[0] for n, value in side_inputs.items()})
        if new_statistics.numel():
            torch.where(live, new_statistics, self.statistics, out=self.statistics)
        return losses.unsqueeze(0)

    def _pass(self, module: FunctionalModule, batch: StackedBatch, side_inputs: Params) -> Tensor:
        """Write the gradients, update the statistics in `side_inputs`, and return the losses
        [B]."""
        assert batch.weights is not None
        x = batch.x[0].contiguous(memory_format=self.passes.layout)
        tensors = self._leaves | side_inputs
        with torch.enable_grad():
            with autocast(self.passes.precision, x.device):
                output = module(tensors, x).to(real_dtype(x))
            losses = F.cross_entropy(output, batch.y[0], reduction="none")
            total = (losses * batch.weights[0]).sum()
        leaves = list(self._leaves.values())
        grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        torch._foreach_copy_(self._grads, list(grads))
        # MaskedBatchNorm replaces its running statistics.
        replaced = [name for name, value in side_inputs.items() if tensors[name] is not value]
        if replaced:
            new_statistics = [tensors[name].detach() for name in replaced]
            torch._foreach_copy_([side_inputs[name] for name in replaced], new_statistics)
        return losses.detach()


class TrainingPasses:
    """The model's training passes, which the programs of all clients share.

    `full` has torch's BatchNorm, for batches without padding, and `masked` has `MaskedBatchNorm`.
    They are one object if the model has no BatchNorm. `layout` is the memory format of batches.
    """

    def __init__(
        self, workload: Workload, precision: Precision, layout: torch.memory_format
    ) -> None:
        """Raises `ConfigError` naming a layer that cannot be trained on padded batches."""
        device = workload.data.x.device
        self.precision: Precision = precision
        self.layout = layout
        self.masked = _functional(for_batched(workload.model).to(device))
        self.full = self.masked
        if self.masked.masks:
            self.full = _functional(for_sequential(workload.model).to(device))

    def try_out(self, x: Tensor) -> None:
        """Pass two samples of `x`, of which the second is padding.

        Raises `ConfigError` if the model cannot take padded batches. Examples are samples and
        another axis that become one before a BatchNorm, or samples that depend on each other.
        """
        module = self.masked.module
        x = x[:2].contiguous(memory_format=self.layout)
        twice_the_first = torch.cat([x[:1]] * len(x))
        mask = (torch.arange(len(x), device=x.device) < 1).to(real_dtype(x))
        tensors = {name: value.clone() for name, value in module.named_buffers()}
        tensors |= dict.fromkeys(self.masked.masks, mask)
        rejected = reject_if_it_fails(module, "cannot take padded batches")
        with rejected, torch.no_grad(), autocast(self.precision, x.device):
            first = self.masked(dict(tensors), x)[0]
            second = self.masked(dict(tensors), twice_the_first)[0]
        reject_mixed_samples(module, first.float(), second.float())


def _functional(module: nn.Module) -> FunctionalModule:
    """Make a functional module that writes none of its own tensors."""
    for layer in module.requires_grad_(False).modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.num_batches_tracked = None  # Nothing reads it if there is a momentum.
    return FunctionalModule(module)
