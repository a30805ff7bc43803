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

from fedsim.core.types import Params
from fedsim.engine.backend import TrainingResult, Workload
from fedsim.engine.graph.backend import GraphBackend
from fedsim.engine.schedule import Schedule


class Interpreter:
    """Trains in the other process."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self.pool = pool

    def train(self, workload: Workload, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        """`schedule` by Triton's kernels."""
        arguments = pickle.dumps((workload, start, schedule))  # by value: torch's own way shares memory
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
    workload, start, schedule = pickle.loads(arguments)
    backend = GraphBackend(workload, precision="float32", chunk_size="auto", program="triton")
    return pickle.dumps(backend.train(start, schedule))
