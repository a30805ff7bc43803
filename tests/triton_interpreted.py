"""A process in which Triton's kernels run in its interpreter, on a CPU. Another one than that of the tests, because
Triton decides between interpreter and compiler when it is imported."""

import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from fedsim.engine.backend import TrainingResult, Workload
from fedsim.engine.graph.optimizers import flat_optimizer
from fedsim.engine.graph.recorder import Eager
from fedsim.engine.graph.state import State
from fedsim.engine.graph.tables import Tables
from fedsim.engine.graph.trainer import Trainer
from fedsim.engine.graph.triton_chain import TritonChain, unfit
from fedsim.engine.schedule import Schedule
from fedsim.types import Params


class Interpreter:
    """Trains in the other process."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self.pool = pool

    def train(
        self, workload: Workload, start: Sequence[Params], schedule: Schedule, *, room: tuple[int, int] = (0, 0)
    ) -> TrainingResult:
        """`schedule` by `TritonChain`, on buffers with room for so many more clients and steps."""
        arguments = pickle.dumps((workload, start, schedule, room))  # by value: torch's own way shares memory
        result: TrainingResult = pickle.loads(self.pool.submit(_train, arguments).result())
        return result


@contextmanager
def interpreter(cache: Path) -> Iterator[Interpreter]:
    """One for as long as the context lasts."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            patch.setenv("TRITON_CACHE_DIR", str(cache))
            pool.submit(torch.set_num_threads, 1).result()
        yield Interpreter(pool)


def _train(arguments: bytes) -> bytes:
    workload, start, schedule, room = pickle.loads(arguments)
    assert unfit(workload) is None
    clients, steps = (size + more for size, more in zip(schedule.counts.shape, room, strict=True))
    like = workload.data.x
    state = State.of(workload.model, clients, like)
    optimizer = flat_optimizer(workload.optimizer, state.flat)
    tables = Tables(steps, clients, schedule.positions.shape[2], optimizer.num_scalars, like)
    program = TritonChain(workload, tables, state, optimizer)
    trained = Trainer(tables, state, optimizer, [program]).train(start, schedule, Eager("in the interpreter"))
    losses = trained.losses.transpose(0, 1).numpy()
    momentum = None if trained.momentum is None else state.named(trained.momentum, trained.statistics)
    return pickle.dumps(TrainingResult(state.named(trained.parameters, trained.statistics), losses, momentum))
