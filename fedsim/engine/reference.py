"""Every client by itself in plain PyTorch: what other backends are tested against."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fedsim.core.errors import check
from fedsim.core.flat import real_dtype, to_device
from fedsim.core.types import Params
from fedsim.engine.backend import TrainingResult, Workload, workers_problem
from fedsim.engine.device import Precision, autocast
from fedsim.engine.model import for_sequential, keyed_dropouts, refuse_hidden_randomness, traveling
from fedsim.engine.schedule import Schedule
from fedsim.engine.torch_backend import TorchBackend


class ClientTrainer:
    """A copy of the model that trains one client after another. Not for two threads at once."""

    def __init__(
        self, workload: Workload, layout: torch.memory_format, precision: Precision
    ) -> None:
        self.data, self.optimizer = workload.data, workload.optimizer
        self.model = for_sequential(workload.model).to(self.data.x.device)
        self.layout, self.precision = layout, precision
        self.dropouts = list(keyed_dropouts(self.model).values())
        self.tensors = traveling(self.model)
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        own = {
            name: buffer for name, buffer in self.model.named_buffers() if name not in self.tensors
        }
        self.counters = list(
            own.values()
        )  # what no client gets, such as the number of BatchNorm's batches
        self.counters_before = [buffer.clone() for buffer in self.counters]

    def train(
        self, params: Params, schedule: Schedule, losses: NDArray[Any]
    ) -> tuple[Params, Params]:
        """Train from `params` by the `schedule` of one client; its samples' losses go into `losses`
        [S, B]. Returns w_k - w, and the optimiser's momentum buffers, empty for one without."""
        with torch.no_grad():
            torch._foreach_copy_(
                list(self.tensors.values()), [params[name] for name in self.tensors]
            )
            if self.counters:
                torch._foreach_copy_(self.counters, self.counters_before)
        optimizer = self.optimizer.torch_optimizer(list(self.trained.values()), schedule.lr)
        self._steps(schedule, optimizer, losses)
        delta = {name: tensor.detach() - params[name] for name, tensor in self.tensors.items()}
        return delta, self._momentum(optimizer)

    @torch.enable_grad()  # whatever the caller computes with
    def _steps(
        self, schedule: Schedule, optimizer: torch.optim.Optimizer, losses: NDArray[Any]
    ) -> None:
        device = self.data.x.device
        positions = to_device(torch.as_tensor(schedule.positions[0]), device)
        keys = (
            None if schedule.keys is None else to_device(torch.as_tensor(schedule.keys[0]), device)
        )
        each: list[Tensor] = []
        for step, count in enumerate(schedule.counts[0].tolist()):
            if keys is not None:
                for layer in self.dropouts:
                    layer.key.copy_(keys[step])
                    layer.calls = 0
            values = self._losses(positions[step, :count])
            optimizer.zero_grad(set_to_none=True)
            values.mean().backward()
            for parameter in (p for p in self.trained.values() if p.grad is None):
                parameter.grad = torch.zeros_like(
                    parameter
                )  # without one, torch leaves out weight decay
            if schedule.correction:
                grads = {
                    name: p.grad.unsqueeze(0)
                    for name, p in self.trained.items()
                    if p.grad is not None
                }
                schedule.correction.add_to(
                    grads, {name: self.trained[name].unsqueeze(0) for name in grads}
                )
            optimizer.step()
            each.append(values.detach())
        if each:
            _, steps, width = schedule.positions.shape
            losses[:steps, :width][schedule.mask[0]] = (
                torch.cat(each).cpu().numpy()
            )  # one copy for all steps

    def _losses(self, chosen: Tensor) -> Tensor:
        x = self.data.x.index_select(0, chosen).contiguous(memory_format=self.layout)
        with autocast(self.precision, x.device):
            output = self.model(x)
        return F.cross_entropy(output.to(real_dtype(x)), self.data.y[chosen], reduction="none")

    def _momentum(self, optimizer: torch.optim.Optimizer) -> Params:
        if not optimizer.defaults.get("momentum"):
            return {}
        buffers = {n: optimizer.state[p].get("momentum_buffer") for n, p in self.trained.items()}
        return {
            n: torch.zeros_like(self.trained[n]) if b is None else b for n, b in buffers.items()
        }


class ReferenceBackend(TorchBackend):
    """Clients one after another, or, on a CPU, `workers` at a time on one core each (`auto`: as
    many as torch has threads; one on a GPU)."""

    def __init__(
        self,
        workload: Workload,
        *,
        precision: Precision,
        workers: int | Literal["auto"],
        deterministic: bool | None = None,
    ) -> None:
        check(workers_problem(workers))
        super().__init__(workload, precision, deterministic)
        count = (
            (1 if self.data.x.is_cuda else torch.get_num_threads())
            if workers == "auto"
            else workers
        )
        self._trainers = [ClientTrainer(workload, self.layout, precision) for _ in range(count)]
        self._pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
        if len(self.data.x):
            refuse_hidden_randomness(workload.model, self.data.x)

    @property
    def description(self) -> str:
        count = len(self._trainers)
        return "sequential" if count == 1 else f"sequential, {count} clients at a time"

    def train(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        """Clients who would leave a thread without work at the end are trained one by one by the
        caller's thread, with all of torch's threads. (torch's operations release the global
        interpreter lock: threads do run in parallel.)"""
        losses = torch.zeros(schedule.positions.shape, dtype=real_dtype(self.data.x)).numpy()
        count, workers = len(schedule), len(self._trainers)
        side_by_side = count - count % workers if workers > 1 else 0
        done: dict[int, tuple[Params, Params]] = {}

        def train_clients(trainer: ClientTrainer, queue: Iterator[int]) -> None:
            for row in queue:
                done[row] = trainer.train(
                    start[row], schedule.rows(slice(row, row + 1)), losses[row]
                )

        with self.passes:
            if side_by_side:
                list(
                    self._pool.map(train_clients, self._trainers, repeat(iter(range(side_by_side))))
                )
            train_clients(self._trainers[0], iter(range(side_by_side, count)))
        delta, momentum = (
            {name: torch.stack([model[name] for model in models]) for name in models[0]}
            for models in zip(*(done[row] for row in range(count)), strict=True)
        )
        return TrainingResult(delta, losses, momentum or None)
