"""The backend that fits model, device and length of the run, by a fixed rule: a repeated run is the same run."""

from contextlib import suppress
from typing import Any

from fedsim.core.errors import ConfigError, check
from fedsim.engine.backend import Backend, Workload
from fedsim.engine.batched import BatchedBackend
from fedsim.engine.device import Compile, Precision, precision_problem, warn_not_compiled, worth_compiling
from fedsim.engine.graph.backend import GraphBackend
from fedsim.engine.model import is_convolutional
from fedsim.engine.native.backend import NativeBackend, unfit
from fedsim.engine.native.library import NotCompiledError, library
from fedsim.engine.reference import ReferenceBackend

WORTH_STEPS = {"linear": 2_000, "convolutional": 200}
"""Local steps of a run, one client's, from which on C pays: compiling takes 2 s, once a machine; a step of ten MLPs of
workload W1 on two cores is some .8 ms shorter, one of a client of W2 some 5 ms of a core (docs/performance.md)."""


def choose_backend(
    workload: Workload, *, precision: Precision, compile: Compile, deterministic: bool | None = None
) -> Backend:
    """On a GPU, `graph` for what it can train. On a CPU, `native` for what it can train, in runs long enough to compile
    for. Else `sequential` for convolutional models, as grouped convolutions are slow on CPUs and GPUs, and for models
    that cannot run batched; `batched` otherwise."""
    if workload.data.x.is_cuda:
        return _on_gpu(workload, precision, compile, deterministic)
    convolutional = is_convolutional(workload.model)
    reason = "convolutions on a CPU" if convolutional else "no convolutions"
    backend: Backend
    try:
        if _native_pays(workload, precision, compile, WORTH_STEPS["convolutional" if convolutional else "linear"]):
            backend = NativeBackend(workload, workers="auto")
            backend.reason = reason
            return backend
    except NotCompiledError as error:
        warn_not_compiled(str(error))
        reason += f", not compiled: {error}"
    if convolutional:
        backend = ReferenceBackend(workload, precision=precision, workers="auto", deterministic=deterministic)
    else:
        backend, reason = _batched_if_it_can(workload, precision, compile, deterministic, reason)
    backend.reason = reason
    return backend


def _on_gpu(workload: Workload, precision: Precision, compile: Compile, deterministic: bool | None) -> Backend:
    """Recorded steps where the model and the optimiser allow it: the fewest launches, as counted in
    docs/performance.md. Of the others, one client's convolutions after another are fewer and larger kernels than those
    of torch.func's vmap, which become grouped ones."""
    backend: Backend
    with suppress(ConfigError):
        backend = GraphBackend(
            workload, precision=precision, chunk_size="auto", program="auto", deterministic=deterministic
        )
        backend.reason = "a GPU"
        return backend
    if is_convolutional(workload.model):
        backend = ReferenceBackend(workload, precision=precision, workers="auto", deterministic=deterministic)
        backend.reason = "convolutions on a GPU"
        return backend
    backend, reason = _batched_if_it_can(workload, precision, compile, deterministic, "no convolutions")
    backend.reason = reason
    return backend


def _native_pays(workload: Workload, precision: Precision, compile: Compile, enough: int) -> bool:
    """Raises `NotCompiledError` where it would pay and cannot be compiled."""
    if precision != "float32" or unfit(workload) or not worth_compiling(compile, workload.total_steps, enough):
        return False
    library(workload.data.x.dtype)
    return True


def _batched_if_it_can(
    workload: Workload, precision: Precision, compile: Compile, deterministic: bool | None, reason: str
) -> tuple[Backend, str]:
    check(precision_problem(precision, workload.data.x.device))
    more: dict[str, Any] = {"precision": precision, "deterministic": deterministic}
    try:
        return BatchedBackend(workload, chunk_size="auto", compile=compile, **more), reason
    except ConfigError as error:
        return ReferenceBackend(workload, workers="auto", **more), error.problems[0].rule
