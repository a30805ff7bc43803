"""Local training of one client in plain PyTorch: torch.optim's optimisers and torch's layers on real batches."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fedsim.engine.backend import Workload
from fedsim.engine.model.adapt import for_sequential, keyed_dropouts
from fedsim.engine.model.parameters import traveling
from fedsim.engine.precision import Precision, autocast
from fedsim.engine.schedule import Schedule
from fedsim.flat import real_dtype, to_device
from fedsim.types import Params


class ClientTrainer:
    """A copy of the model that trains one client after another. Not for two threads at once."""

    def __init__(self, workload: Workload, layout: torch.memory_format, precision: Precision) -> None:
        self.data, self.optimizer = workload.data, workload.optimizer
        self.model = for_sequential(workload.model).to(self.data.x.device)
        self.layout, self.precision = layout, precision
        self.dropouts = [layer for _, layer in keyed_dropouts(self.model)]
        self.tensors = traveling(self.model)
        own = {name: buffer for name, buffer in self.model.named_buffers() if name not in self.tensors}
        self.counters = list(own.values())  # what no client gets, such as the number of BatchNorm's batches
        self.counters_before = [buffer.clone() for buffer in self.counters]

    def train(self, params: Params, schedule: Schedule, losses: NDArray[Any]) -> tuple[Params, Params]:
        """Train from `params` by the `schedule` of one client; its samples' losses go into `losses` [S, B].

        Returns w_k - w, and the optimiser's momentum buffers, empty for one without.
        """
        with torch.no_grad():
            torch._foreach_copy_(list(self.tensors.values()), [params[name] for name in self.tensors])
            if self.counters:
                torch._foreach_copy_(self.counters, self.counters_before)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = self.optimizer.torch_optimizer(trained, schedule.lr)
        self._steps(schedule, optimizer, losses)
        delta = {name: tensor.detach() - params[name] for name, tensor in self.tensors.items()}
        return delta, self._momentum(optimizer)

    @torch.enable_grad()  # whatever the caller computes with
    def _steps(self, schedule: Schedule, optimizer: torch.optim.Optimizer, losses: NDArray[Any]) -> None:
        device = self.data.x.device
        positions = to_device(torch.as_tensor(schedule.positions[0]), device)
        keys = None if schedule.keys is None else to_device(torch.as_tensor(schedule.keys[0]), device)
        each: list[Tensor] = []
        for step, count in enumerate(schedule.counts[0].tolist()):
            if keys is not None:
                self._set_keys(keys[step])
            values = self._losses(positions[step, :count])
            optimizer.zero_grad(set_to_none=True)
            values.mean().backward()
            _with_zeros(optimizer)
            optimizer.step()
            each.append(values.detach())
        if each:
            _, steps, width = schedule.positions.shape
            losses[:steps, :width][schedule.mask[0]] = torch.cat(each).cpu().numpy()  # one copy for all steps

    def _set_keys(self, key: Tensor) -> None:
        for layer in self.dropouts:
            layer.key.copy_(key)
            layer.calls = 0

    def _losses(self, chosen: Tensor) -> Tensor:
        """Cross-entropies of the samples at these positions."""
        x = self.data.x.index_select(0, chosen).contiguous(memory_format=self.layout)
        with autocast(self.precision, x.device):
            output = self.model(x)
        return F.cross_entropy(output.to(real_dtype(x)), self.data.y[chosen], reduction="none")

    def _momentum(self, optimizer: torch.optim.Optimizer) -> Params:
        """SGD's momentum buffers, zero before a first step."""
        if not optimizer.defaults.get("momentum"):
            return {}
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        buffers = {n: optimizer.state[p].get("momentum_buffer") for n, p in trained.items()}
        return {n: torch.zeros_like(trained[n]) if b is None else b for n, b in buffers.items()}


def _with_zeros(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that the pass did not use their gradient, zero: without one, torch leaves out weight decay."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
