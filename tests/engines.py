"""Engines on a backend each, as tests build them."""

from typing import Any

from torch import nn

from fedsim.engine.backend import Workload
from fedsim.engine.batched.backend import BatchedBackend
from fedsim.engine.choose import choose_backend
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine
from fedsim.engine.model.adapt import has_dropout
from fedsim.engine.native.backend import NativeBackend
from fedsim.engine.reference.backend import ReferenceBackend
from fedsim.engine.schedule import LocalWork, Schedule, make_schedule
from fedsim.optimizers.base import LocalOptimizer
from fedsim.rng import Streams
from fedsim.types import Ids


def workload(
    model: nn.Module, data: ClientData, work: LocalWork, optimizer: LocalOptimizer, rounds: int = 0
) -> Workload:
    return Workload(model, data, optimizer, rounds * work.median_steps(data.train))


def batched(
    model: nn.Module,
    data: ClientData,
    work: LocalWork,
    optimizer: LocalOptimizer,
    streams: Streams,
    *,
    rounds: int = 0,
    **switches: Any,
) -> Engine:
    task = workload(model, data, work, optimizer, rounds)
    chosen = {"precision": "float32", "chunk_size": "auto", "compile": False} | switches
    return Engine(BatchedBackend(task, **chosen), task, work, streams)


def reference(
    model: nn.Module, data: ClientData, work: LocalWork, optimizer: LocalOptimizer, streams: Streams, **switches: Any
) -> Engine:
    task = workload(model, data, work, optimizer)
    return Engine(ReferenceBackend(task, **{"precision": "float32", "workers": 1} | switches), task, work, streams)


def native(
    model: nn.Module, data: ClientData, work: LocalWork, optimizer: LocalOptimizer, streams: Streams, **switches: Any
) -> Engine:
    task = workload(model, data, work, optimizer)
    return Engine(NativeBackend(task, **{"workers": 1} | switches), task, work, streams)


def auto(
    model: nn.Module,
    data: ClientData,
    work: LocalWork,
    optimizer: LocalOptimizer,
    streams: Streams,
    *,
    rounds: int = 0,
    **switches: Any,
) -> Engine:
    task = workload(model, data, work, optimizer, rounds)
    return Engine(choose_backend(task, **{"precision": "float32", "compile": "auto"} | switches), task, work, streams)


def schedule_of(engine: Engine, ids: Ids, round: int, lr: float = 0.1) -> Schedule:
    """What the engine's backend is given for these clients."""
    dropout = has_dropout(engine.workload.model)
    return make_schedule(engine.data.train, engine.work, engine._streams, round, ids, lr, dropout=dropout)
