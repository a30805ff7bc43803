"""Step programs of all clients at once, for models of any kind, through torch.func.vmap.

A recording then has as many kernels for ten clients as for one. Convolutions and BatchNorms have
rules of their own for that (client_convolutions.py and client_norms.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.engine.backend import Workload
from fedsim.engine.device import Precision
from fedsim.engine.graph.client_convolutions import use_client_convolutions
from fedsim.engine.graph.client_norms import use_client_norms
from fedsim.engine.graph.steps import RecordableSteps
from fedsim.engine.stacked import StackedBatch
from fedsim.engine.training_copies import for_batched, for_sequential
from fedsim.engine.vmapped import StackedGradients

MIN_SHARE = 0.5
"""Clients train together if at least this share of all (client, step) pairs are steps that a client
makes. The others are computed, too, and change nothing."""


class StackedPasses:
    """The gradient functions of R clients: `full` for full batches, with torch's BatchNorm, and
    `masked` for batches with padding.

    They are one object if the model has no BatchNorm.
    """

    def __init__(self, workload: Workload, precision: Precision) -> None:
        """Raises `ConfigError` if the model cannot run for several clients at once."""
        data = workload.data
        device = data.x.device
        masked = use_client_convolutions(for_batched(workload.model), precision)
        self.masked = StackedGradients(masked, device, precision)
        if len(data.x):
            self.masked.try_out(data.x, data.y)
        self.full = self.masked
        if self.masked.functional.masks:
            full = use_client_convolutions(for_sequential(workload.model), precision)
            full = use_client_norms(full)
            self.full = StackedGradients(full, device, precision)


@dataclass(eq=False, repr=False)
class StackedSteps(RecordableSteps):
    """Local steps of all clients at once."""

    passes: StackedPasses

    def __post_init__(self) -> None:
        super().__post_init__()
        self.has_full_form = self.passes.full is not self.passes.masked
        self._params = self.models.views(self.params)
        self._grads = self.models.views(self.grads)
        first_column = self.params.shape[1]
        self._statistics = self.models.views(self.statistics, first_column)

    def compute_gradients(self, batch: StackedBatch, live: Tensor, *, full: bool) -> Tensor:
        passes = self.passes.masked
        if full:
            passes = self.passes.full
            batch = StackedBatch(batch.x, batch.y, None, batch.keys)
        # torch's BatchNorm updates statistics in place only if they are contiguous.
        new_statistics = {
            name: value.clone(memory_format=torch.contiguous_format)
            for name, value in self._statistics.items()
        }
        grads, losses = passes(self._params | new_statistics, batch)
        torch._foreach_copy_(list(self._grads.values()), [grads[name] for name in self._grads])
        for name, value in self._statistics.items():
            of_client = live.view(-1, *[1] * (value.dim() - 1))
            torch.where(of_client, new_statistics[name], value, out=value)
        return losses
