"""Engines on a backend each, as tests build them."""

from collections.abc import Callable
from typing import Any

from torch import nn

from fedsim.core.rng import Streams
from fedsim.core.types import Ids
from fedsim.engine.backend import Backend, Workload
from fedsim.engine.batched import BatchedBackend
from fedsim.engine.choose import choose_backend
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine
from fedsim.engine.graph.backend import GraphBackend
from fedsim.engine.model import has_dropout
from fedsim.engine.native.backend import NativeBackend
from fedsim.engine.optimizers import LocalOptimizer
from fedsim.engine.reference import ReferenceBackend
from fedsim.engine.schedule import LocalWork, Schedule, make_schedule


def engines_on(backend: Callable[..., Backend], **defaults: Any) -> Callable[..., Engine]:
    """What builds an engine on a backend, from a model, its data, and how it is trained for so many
    `rounds`."""

    def build(
        model: nn.Module,
        data: ClientData,
        work: LocalWork,
        optimizer: LocalOptimizer,
        streams: Streams,
        *,
        rounds: int = 0,
        **switches: Any,
    ) -> Engine:
        task = Workload(model, data, optimizer, rounds * work.median_steps(data.train))
        return Engine(backend(task, **defaults | switches), task, work, streams)

    return build


batched = engines_on(BatchedBackend, precision="float32", chunk_size="auto", compile=False)
reference = engines_on(ReferenceBackend, precision="float32", workers=1)
graph = engines_on(GraphBackend, precision="float32", chunk_size="auto")
native = engines_on(NativeBackend, workers=1)
auto = engines_on(choose_backend, precision="float32", compile="auto")


def schedule_of(engine: Engine, ids: Ids, round: int, lr: float = 0.1) -> Schedule:
    """What the engine's backend is given for these clients."""
    dropout = has_dropout(engine.workload.model)
    return make_schedule(
        engine.data.train, engine.work, engine._streams, round, ids, lr, dropout=dropout
    )
