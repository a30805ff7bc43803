"""The native backend: chains of layers in compiled C.

Each client's whole local training is one call, on a core of its own.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedsim.core.arrays import Ints
from fedsim.core.disk import num_cores
from fedsim.core.errors import ConfigError, Problem, check
from fedsim.core.types import Params, Stack
from fedsim.engine.backend import Backend, TrainingResult, Workload, workers_problem
from fedsim.engine.model import initial, traveling
from fedsim.engine.native import calls
from fedsim.engine.native.calls import ChainCalls, SampleBatches, SgdRule
from fedsim.engine.native.library import NotCompiledError
from fedsim.engine.optimizers import SGD
from fedsim.engine.schedule import Schedule

T = TypeVar("T")
PRODUCT_ROWS = 120
"""Number of samples in one matrix product of an evaluation. Their activations stay in the cache."""
JOINT_CLIENTS = 16
"""Number of clients of several runs that are worth training in one call, for each worker."""


class NativeBackend(Backend):
    """Trains `workers` clients at a time (`auto`: as many as torch has threads).

    A client's result has the same bits whatever clients train next to it. The backend supports
    chains (`fedsim.engine.chain.find_chain`) under SGD in float32 on a CPU. It raises `ConfigError`
    for anything else, and if the C code cannot be compiled.
    """

    exact = True
    pass_size = PRODUCT_ROWS

    def __init__(self, workload: Workload, *, workers: int | Literal["auto"]) -> None:
        check(workers_problem(workers), unfit(workload))
        assert workload.chain is not None
        assert isinstance(workload.optimizer, SGD)
        self.chain = workload.chain
        self.optimizer = workload.optimizer
        self.x = workload.data.x.contiguous()
        self.y = workload.data.y
        try:
            self._calls(initial(workload.model))
        except (NotCompiledError, ValueError) as error:
            text = str(error)
            if isinstance(error, NotCompiledError):
                text = f"cannot be compiled: {error}"
            raise ConfigError([Problem("", ..., text, "engine=batched runs without C")]) from error
        self.workers = torch.get_num_threads() if workers == "auto" else workers
        self._pool = ThreadPoolExecutor(self.workers)

    @property
    def description(self) -> str:
        return f"native, {self.workers} clients at a time" if self.workers > 1 else "native"

    @property
    def max_joint_clients(self) -> int:
        return JOINT_CLIENTS * self.workers

    def joint_key(self, schedule: Schedule) -> Hashable:
        return schedule.lr, schedule.correction.kind

    def train(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        """Train K clients by the `schedule`.

        All workers take clients from one queue, so none waits for its next client. The last K mod
        `workers` clients would leave cores idle. So they share all cores instead.
        """
        count = len(start)
        optimizer, shift = self.optimizer, schedule.correction.shift
        decay = optimizer.weight_decay + schedule.correction.pull
        rule = SgdRule(schedule.lr, decay, optimizer.momentum, optimizer.nesterov)
        models = {id(params): params for params in start}
        model_calls = {key: self._calls(params) for key, params in models.items()}
        delta = _zeros(start)
        momentum = _zeros(start) if optimizer.momentum else None
        losses = np.zeros(schedule.positions.shape, self.x.numpy().dtype)
        finite = np.ones(count, dtype=bool)

        def train_client(row: int, threads: int = 1) -> None:
            if not schedule.steps[row]:
                return
            steps = slice(int(schedule.steps[row]))
            batches = SampleBatches(
                self.x,
                self.y,
                np.ascontiguousarray(schedule.positions[row, steps]),
                schedule.counts[row, steps],
                losses[row, steps],
                None if schedule.keys is None else schedule.keys[row, steps],
                threads,
            )
            client_rule = rule
            if shift is not None:
                client_shift = {name: value[row].contiguous() for name, value in shift.items()}
                client_rule = replace(rule, shift=client_shift)
            velocity = None if momentum is None else _row(momentum, row)
            chain_calls = model_calls[id(start[row])]
            finite[row] = chain_calls.train(batches, client_rule, _row(delta, row), velocity)

        on_one_core = count - count % self.workers
        queue = iter(range(on_one_core))

        def train_from_queue(_: int) -> None:
            for row in queue:
                train_client(row)

        try:
            self._in_parallel(train_from_queue, range(self.workers))
        finally:
            list(queue)  # After an interruption nobody starts another client.
        cores = min(self.workers, num_cores())
        threads = max(cores // max(count - on_one_core, 1), 1)
        list(self._pool.map(lambda row: train_client(row, threads), range(on_one_core, count)))
        return TrainingResult(delta, losses, momentum, finite)

    def gradients(
        self, params: Params, positions: Sequence[Ints], names: Sequence[str]
    ) -> Iterator[Tensor]:
        chain_calls = self._calls(params)

        def mean_gradient(chosen: Ints) -> Tensor:
            sums = {name: torch.zeros_like(value) for name, value in params.items()}
            chain_calls.gradient(_batches(self.x, self.y, chosen), sums)
            return torch.cat([sums[name].flatten() for name in names]).div_(max(len(chosen), 1))

        for first in range(0, len(positions), self.workers):
            yield from self._pool.map(mean_gradient, positions[first : first + self.workers])

    def forward(self, params: Params, x: Tensor, positions: Ints | None = None) -> Tensor:
        x = x.contiguous()
        positions = np.arange(len(x)) if positions is None else positions
        count = len(positions)
        chain_calls = self._calls(params)
        logits = x.new_empty(count, chain_calls.num_outputs)

        def pass_part(part: slice) -> None:
            chain_calls.outputs(_batches(x, None, positions[part]), logits[part])

        size = max(-(-count // self.workers), 1)
        parts = [slice(first, first + size) for first in range(0, count, size)]
        self._in_parallel(pass_part, parts)
        return logits

    def cross_entropies(self, logits: Tensor, labels: Tensor) -> Tensor:
        return calls.cross_entropies(logits.contiguous(), labels.contiguous()).double()

    def hits(self, logits: Tensor, labels: Tensor) -> Tensor:
        return calls.hits(logits.contiguous(), labels.contiguous())

    def _in_parallel(self, work: Callable[[T], None], items: Sequence[T]) -> None:
        """Call `work` on each item. The caller's thread takes the first, as it would only wait."""
        futures = [self._pool.submit(work, item) for item in items[1:]]
        if items:
            work(items[0])
        for future in futures:
            future.result()

    def _calls(self, params: Params) -> ChainCalls:
        return ChainCalls(self.chain, params, self.x.shape[1:])


def _batches(x: Tensor, y: Tensor | None, chosen: Ints) -> SampleBatches:
    """Return the samples at these positions in batches of `PRODUCT_ROWS`."""
    steps = -(-len(chosen) // PRODUCT_ROWS)
    positions = np.zeros((steps, PRODUCT_ROWS), np.int64)
    positions.reshape(-1)[: len(chosen)] = chosen
    counts = np.minimum(PRODUCT_ROWS, len(chosen) - PRODUCT_ROWS * np.arange(steps))
    return SampleBatches(x, y, positions, counts, np.empty(positions.shape, x.numpy().dtype))


def _zeros(start: Sequence[Params]) -> Stack:
    return {name: value.new_zeros(len(start), *value.shape) for name, value in start[0].items()}


def _row(stack: Stack, row: int) -> Params:
    return {name: value[row] for name, value in stack.items()}


def unfit(workload: Workload) -> Problem | None:
    """Return why the native backend cannot train the workload, or None if it can."""
    chain, data, optimizer = workload.chain, workload.data, workload.optimizer
    fault = ""
    if chain is None:
        fault = (
            "only runs chains of plain convolutions, 2 x 2 max poolings and linear layers with "
            "ReLU between them"
        )
    elif type(optimizer) is not SGD:
        fault = f"knows only optimizer=sgd, not {type(optimizer).__name__}"
    elif optimizer.max_grad_norm is not None:
        fault = "does not clip gradients (optimizer.max_grad_norm)"
    elif data.augment is not None:
        fault = "does not augment images (dataset.augment)"
    else:
        outputs = len(traveling(workload.model)[chain.layers[-1].weight])
        if outputs < data.num_classes:
            fault = f"needs an output for each of {data.num_classes} classes, not {outputs}"
        elif data.x.device.type != "cpu":
            fault = f"runs only on a CPU, not on {data.x.device}"
    return Problem("", ..., fault, "engine=auto takes what fits") if fault else None
