"""Chains of layers in compiled C: each client's whole local training is one call, on a core of its
own."""

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
"""Samples in one matrix product of an evaluation, so that their activations stay in the cache."""
JOINT_CLIENTS = 16
"""Clients of several runs that are worth training in one call, for each worker."""


class NativeBackend(Backend):
    """Clients side by side, `workers` at a time (`auto`: as many as torch has threads), each the
    same to the last bit whoever trains beside it. For chains (`fedsim.engine.chain.any_chain`)
    under SGD in float32 on a CPU: raises `ConfigError` for anything else, and where the C code
    cannot be compiled.
    """

    exact = True
    pass_size = PRODUCT_ROWS

    def __init__(self, workload: Workload, *, workers: int | Literal["auto"]) -> None:
        check(workers_problem(workers), unfit(workload))
        assert workload.chain is not None
        assert isinstance(workload.optimizer, SGD)
        self.chain, self.optimizer = workload.chain, workload.optimizer
        self.x, self.y = workload.data.x.contiguous(), workload.data.y
        try:
            self._calls(initial(workload.model))
        except (NotCompiledError, ValueError) as error:
            text = (
                f"cannot be compiled: {error}"
                if isinstance(error, NotCompiledError)
                else str(error)
            )
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
        """All clients in one queue. Those who would leave cores without work at the end share all
        of them."""
        decay, shift = (
            self.optimizer.weight_decay + schedule.correction.pull,
            schedule.correction.shift,
        )
        sgd = SgdRule(schedule.lr, decay, self.optimizer.momentum, self.optimizer.nesterov)
        calls = {id(params): self._calls(params) for params in {id(p): p for p in start}.values()}
        delta = _zeros(start)
        momentum = _zeros(start) if self.optimizer.momentum else None
        losses = np.zeros(schedule.positions.shape, self.x.numpy().dtype)
        finite = np.ones(len(start), dtype=bool)

        def train_client(row: int, threads: int = 1) -> None:
            if not schedule.steps[row]:
                return
            steps = slice(int(schedule.steps[row]))
            keys = None if schedule.keys is None else schedule.keys[row, steps]
            positions, counts = (
                np.ascontiguousarray(schedule.positions[row, steps]),
                schedule.counts[row, steps],
            )
            work = SampleBatches(
                self.x, self.y, positions, counts, losses[row, steps], keys, threads
            )
            velocity = None if momentum is None else _row(momentum, row)
            own = (
                sgd
                if shift is None
                else replace(sgd, shift={n: v[row].contiguous() for n, v in shift.items()})
            )
            finite[row] = calls[id(start[row])].train(work, own, _row(delta, row), velocity)

        alone = len(start) - len(start) % self.workers
        queue = iter(range(alone))

        def train_next(_: int) -> None:
            for (
                row
            ) in queue:  # that all workers take from: nobody waits until a client is handed over
                train_client(row)

        threads = max(min(self.workers, num_cores()) // max(len(start) - alone, 1), 1)
        try:
            self._side_by_side(train_next, range(self.workers))
        finally:
            list(queue)  # after an interruption nobody begins another client
        list(self._pool.map(lambda row: train_client(row, threads), range(alone, len(start))))
        return TrainingResult(delta, losses, momentum, finite)

    def gradients(
        self, params: Params, positions: Sequence[Ints], names: Sequence[str]
    ) -> Iterator[Tensor]:
        calls = self._calls(params)
        for first in range(0, len(positions), self.workers):
            some = positions[first : first + self.workers]
            yield from self._pool.map(
                lambda chosen: self._mean_gradient(calls, chosen, names), some
            )

    def forward(self, params: Params, x: Tensor, positions: Ints | None = None) -> Tensor:
        x = x.contiguous()
        chosen = np.arange(len(x)) if positions is None else positions
        calls, num_classes = self._calls(params), len(params[self.chain.links[-1].weight])
        result = x.new_empty(len(chosen), num_classes)
        size = max(-(-len(chosen) // self.workers), 1)
        parts = [slice(first, first + size) for first in range(0, len(chosen), size)]
        self._side_by_side(
            lambda part: calls.outputs(_batches(x, None, chosen[part]), result[part]), parts
        )
        return result

    def cross_entropies(self, logits: Tensor, labels: Tensor) -> Tensor:
        return calls.cross_entropies(logits.contiguous(), labels.contiguous()).double()

    def hits(self, logits: Tensor, labels: Tensor) -> Tensor:
        return calls.hits(logits.contiguous(), labels.contiguous())

    def _side_by_side(self, work: Callable[[T], None], items: Sequence[T]) -> None:
        """`work` on each of the items: the first in this thread, which would only wait."""
        others = [self._pool.submit(work, item) for item in items[1:]]
        for item in items[:1]:
            work(item)
        for other in others:
            other.result()

    def _mean_gradient(self, calls: ChainCalls, chosen: Ints, names: Sequence[str]) -> Tensor:
        found = {name: torch.zeros_like(value) for name, value in calls.params.items()}
        calls.gradient(_batches(self.x, self.y, chosen), found)
        return torch.cat([found[name].flatten() for name in names]).div_(max(len(chosen), 1))

    def _calls(self, params: Params) -> ChainCalls:
        return ChainCalls(self.chain, params, self.x.shape[1:])


def _batches(x: Tensor, y: Tensor | None, chosen: Ints) -> SampleBatches:
    """Samples at these positions in batches of `PRODUCT_ROWS`."""
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
    """Why this backend cannot train the workload, if so."""
    remedy, chain, data = "engine=auto takes what fits", workload.chain, workload.data
    if chain is None:
        kinds = "plain convolutions, 2 x 2 max poolings and linear layers with ReLU between them"
        return Problem("", ..., f"runs chains of {kinds} alone", remedy)
    if type(workload.optimizer) is not SGD:
        return Problem(
            "", ..., f"knows optimizer=sgd alone, not {type(workload.optimizer).__name__}", remedy
        )
    outputs = len(traveling(workload.model)[chain.links[-1].weight])
    if outputs < data.num_classes:
        return Problem(
            "",
            ...,
            f"needs an output for each of {data.num_classes} classes, not {outputs}",
            remedy,
        )
    device = data.x.device
    return (
        None
        if device.type == "cpu"
        else Problem("", ..., f"runs on a CPU alone, not on {device}", remedy)
    )
