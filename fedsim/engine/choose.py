"""The backend that fits model, device and length of the run, by a fixed rule: a repeated run is the
same run."""

from contextlib import suppress

import numpy as np
import torch

from fedsim.core.errors import ConfigError
from fedsim.engine.backend import Backend, Workload
from fedsim.engine.batched import BatchedBackend
from fedsim.engine.device import Compile, Precision, tell, warn_not_compiled, worth_compiling
from fedsim.engine.graph.backend import GraphBackend
from fedsim.engine.model import has_dropout, initial, is_convolutional
from fedsim.engine.native.backend import NativeBackend, unfit
from fedsim.engine.native.library import NotCompiledError, library
from fedsim.engine.reference import ReferenceBackend
from fedsim.engine.schedule import Schedule

WORTH_STEPS = {"linear": 2_000, "convolutional": 200}
"""Local steps of a run, one client's, from which on C pays: compiling takes 2 s, once a machine; a
step of ten MLPs of workload W1 on two cores is some .8 ms shorter, one of a client of W2 some 5 ms
of a core (docs/performance.md)."""
TOLERANCE = {"float32": 0.02, "tf32": 0.05, "bf16": 0.2}
"""Of the first losses and changes, relative to their size: rounding is far below, and a wrong
kernel far above."""


def choose_backend(
    workload: Workload, *, precision: Precision, compile: Compile, deterministic: bool | None = None
) -> Backend:
    """On a GPU, `graph` for what it can train, where its first steps agree with those of the engine
    that would train otherwise: recorded steps are the fewest launches. On a CPU, `native` for what
    it can train, in runs long enough to compile for. Else `sequential` for convolutional models on
    a CPU, where grouped convolutions are slow, and for models that cannot run batched; `batched`
    otherwise."""
    convolutional, on_gpu = is_convolutional(workload.model), workload.data.x.is_cuda
    reason = (
        ("convolutions on a GPU" if on_gpu else "convolutions on a CPU")
        if convolutional
        else "no convolutions"
    )
    if on_gpu:
        with suppress(ConfigError):
            graph = GraphBackend(
                workload, precision=precision, chunk_size="auto", deterministic=deterministic
            )
            problem = _disagreement(
                graph, _in_torch(workload, precision, False, deterministic, reason), precision
            )
            if problem is None:
                return _because("a GPU", graph)
            tell(f"engine=auto: not engine=graph, {problem}")
    elif precision == "float32" and not unfit(workload):
        enough = WORTH_STEPS["convolutional" if convolutional else "linear"]
        try:
            if worth_compiling(compile, workload.total_steps, enough):
                library(workload.data.x.dtype)
                return _because(reason, NativeBackend(workload, workers="auto"))
        except NotCompiledError as error:
            warn_not_compiled(str(error))
            reason += f", not compiled: {error}"
    return _in_torch(workload, precision, compile, deterministic, reason)


def _in_torch(
    workload: Workload,
    precision: Precision,
    compile: Compile,
    deterministic: bool | None,
    reason: str,
) -> Backend:
    """Batched where that can be; not convolutions on a CPU, and those on a GPU uncompiled."""
    convolutional = is_convolutional(workload.model)
    if workload.data.x.is_cuda or not convolutional:
        compile = False if convolutional else compile
        try:
            batched = BatchedBackend(
                workload,
                precision=precision,
                chunk_size="auto",
                compile=compile,
                deterministic=deterministic,
            )
            return _because(reason, batched)
        except ConfigError as error:
            reason = error.problems[0].rule
    one_by_one = ReferenceBackend(
        workload, precision=precision, workers="auto", deterministic=deterministic
    )
    return _because(reason, one_by_one)


def _because(reason: str, backend: Backend) -> Backend:
    backend.reason = reason
    return backend


def _disagreement(graph: GraphBackend, other: Backend, precision: Precision) -> str | None:
    """Why recorded steps are not to be trusted on this machine: None where two short steps of two
    clients give what `other` gives, up to rounding, or no finite values."""
    x, model = graph.data.x, graph.model
    if not len(x):
        return None
    positions = np.arange(16).reshape(2, 2, 4) % len(x)
    keys = np.arange(4).reshape(2, 2) if has_dropout(model) else None
    schedule = Schedule(positions, np.array([[4, 4], [4, 3]]), keys, lr=0.01)
    start = [initial(model)] * 2
    wanted = other.train(start, schedule)
    try:
        found = graph.train(start, schedule)
    except Exception as error:  # of a driver or a compiler, in ways of any version
        reason = str(error).strip().partition("\n")[0][:200]
        return f"which fails on this machine: {reason}"
    losses = [torch.as_tensor(result.losses[schedule.mask]) for result in (wanted, found)]
    changes = [
        torch.cat([result.delta[n].flatten().cpu() for n in wanted.delta])
        for result in (wanted, found)
    ]
    for right, own in (losses, changes):
        if (
            right.isfinite().all()
            and not (right - own).norm() <= TOLERANCE[precision] * right.norm()
        ):
            return "whose first steps on this machine differ from those of the other engines"
    return None
