"""The sequential backend: one client after another in plain PyTorch.

It is the reference: the other backends are tested against it.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.core.errors import check
from fedsim.core.flat import real_dtype
from fedsim.core.types import Params, Stack
from fedsim.engine.backend import TrainingResult, Workload, workers_problem
from fedsim.engine.device import Precision, autocast
from fedsim.engine.model import traveling
from fedsim.engine.schedule import Schedule
from fedsim.engine.torch_backend import TorchBackend
from fedsim.engine.training_copies import for_sequential, reject_hidden_randomness
from fedsim.engine.training_layers import keyed_dropouts


class ReferenceBackend(TorchBackend):
    """Trains one client after another; on a CPU, `workers` clients at a time on one core each.

    `workers="auto"` means as many as torch has threads, and one on a GPU.
    """

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
        if workers == "auto":
            workers = 1 if self.data.x.is_cuda else torch.get_num_threads()
        self._trainers = [ClientTrainer(workload, self.layout, precision) for _ in range(workers)]
        self._pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
        if len(self.data.x):
            reject_hidden_randomness(workload.model, self.data.x)

    @property
    def description(self) -> str:
        count = len(self._trainers)
        if count == 1:
            return "sequential"
        return f"sequential, {count} clients at a time"

    def train(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        """Train K clients by the `schedule`.

        All workers take clients from one queue. torch's operations release the global interpreter
        lock, so threads do run in parallel. The last K mod `workers` clients would leave workers
        idle. So they train one by one in the caller's thread, with all of torch's threads.
        """
        losses = torch.zeros(schedule.positions.shape, dtype=real_dtype(self.data.x)).numpy()
        count, workers = len(schedule), len(self._trainers)
        num_parallel = count - count % workers if workers > 1 else 0
        deltas: list[Params] = [{}] * count
        momenta: list[Params] = [{}] * count

        def train_clients(trainer: ClientTrainer, rows: Iterable[int]) -> None:
            for row in rows:
                client_schedule = schedule.rows(slice(row, row + 1))
                deltas[row], momenta[row] = trainer.train(start[row], client_schedule, losses[row])

        with self.precision_context:
            if num_parallel:
                queue = iter(range(num_parallel))
                # list() waits for all workers, and raises an error of one of them.
                list(self._pool.map(lambda trainer: train_clients(trainer, queue), self._trainers))
            train_clients(self._trainers[0], range(num_parallel, count))
        return TrainingResult(_stacked(deltas), losses, _stacked(momenta) or None)


class ClientTrainer:
    """A copy of the model that trains one client after another. It serves one thread at a time."""

    def __init__(
        self, workload: Workload, layout: torch.memory_format, precision: Precision
    ) -> None:
        self.data = workload.data
        self.optimizer = workload.optimizer
        self.layout = layout
        self.precision = precision
        self.model = for_sequential(workload.model).to(self.data.x.device)
        self.dropouts = list(keyed_dropouts(self.model).values())
        self.tensors = traveling(self.model)
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        # Buffers that clients do not send, such as BatchNorm's number of batches, start anew.
        buffers = self.model.named_buffers()
        self.unsent = [buffer for name, buffer in buffers if name not in self.tensors]
        self.initial_unsent = [buffer.clone() for buffer in self.unsent]
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        for layer in self.model.modules():
            for name, buffer in layer._buffers.items():
                if buffer is not None:
                    self._buffers.append((layer, name, buffer))

    def train(
        self, params: Params, schedule: Schedule, losses: NDArray[Any]
    ) -> tuple[Params, Params]:
        """Train from `params` by the `schedule` of one client.

        Writes its samples' losses to `losses` [S, B]. Returns the change of the model, and the
        optimiser's momentum buffers, empty if it has none.
        """
        with torch.no_grad():
            start = [params[name] for name in self.tensors]
            torch._foreach_copy_(list(self.tensors.values()), start)
            if self.unsent:
                torch._foreach_copy_(self.unsent, self.initial_unsent)
        optimizer = self.optimizer.torch_optimizer(list(self.trained.values()), schedule.lr)
        self._make_steps(schedule, optimizer, losses)
        delta = {name: value.detach() - params[name] for name, value in self.tensors.items()}
        return delta, self._momentum(optimizer)

    @torch.enable_grad()  # The caller may have switched gradients off.
    def _make_steps(
        self, schedule: Schedule, optimizer: torch.optim.Optimizer, losses: NDArray[Any]
    ) -> None:
        positions, keys, crops = schedule.tensors(self.data.x.device)
        batch_losses: list[Tensor] = []
        for step, count in enumerate(schedule.counts[0].tolist()):
            if keys is not None:
                for layer in self.dropouts:
                    layer.key.copy_(keys[0, step])
                    layer.calls = 0
            batch_crops = None if crops is None else crops[0, step, :count]
            values = self._losses(positions[0, step, :count], batch_crops)
            optimizer.zero_grad(set_to_none=True)
            values.mean().backward()
            self._complete_gradients(schedule)
            optimizer.step()
            self._put_buffers_back()
            batch_losses.append(values.detach())
        if batch_losses:
            _, steps, width = schedule.positions.shape
            # One copy from a GPU, because the host waits for each.
            losses[:steps, :width][schedule.mask[0]] = torch.cat(batch_losses).cpu().numpy()

    @torch.no_grad()
    def _put_buffers_back(self) -> None:
        """Give the model its first buffers again, with the values of those that replaced them.

        The forward pass of a user's layer may replace a buffer (`self.mean = ...`). But `tensors`
        and `unsent` refer to the first ones.
        """
        for layer, name, buffer in self._buffers:
            current = layer._buffers[name]
            if current is not buffer:
                assert current is not None
                buffer.copy_(current)
                layer._buffers[name] = buffer

    def _losses(self, positions: Tensor, crops: Tensor | None) -> Tensor:
        x = self.data.batch(positions, crops).contiguous(memory_format=self.layout)
        with autocast(self.precision, x.device):
            output = self.model(x)
        return F.cross_entropy(output.to(real_dtype(x)), self.data.y[positions], reduction="none")

    def _complete_gradients(self, schedule: Schedule) -> None:
        """Give unused parameters a gradient of zero, add the correction, and clip the sum."""
        for parameter in self.trained.values():
            if parameter.grad is None:  # torch would not apply weight decay.
                parameter.grad = torch.zeros_like(parameter)
        if schedule.correction:
            params: Stack = {}
            grads: Stack = {}
            for name, parameter in self.trained.items():
                assert parameter.grad is not None
                params[name] = parameter.unsqueeze(0)
                grads[name] = parameter.grad.unsqueeze(0)
            schedule.correction.add_to(grads, params)
        if self.optimizer.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.trained.values(), self.optimizer.max_grad_norm)

    def _momentum(self, optimizer: torch.optim.Optimizer) -> Params:
        if not optimizer.defaults.get("momentum"):
            return {}
        buffers = {}
        for name, parameter in self.trained.items():
            buffer = optimizer.state[parameter].get("momentum_buffer")
            buffers[name] = torch.zeros_like(parameter) if buffer is None else buffer
        return buffers


def _stacked(models: Sequence[Params]) -> Stack:
    return {name: torch.stack([model[name] for model in models]) for name in models[0]}
