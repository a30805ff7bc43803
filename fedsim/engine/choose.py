"""The backend that fits model, device and length of the run, by a fixed rule: a repeated run is the same run."""

from torch import nn

from fedsim.engine.backend import Backend, Workload
from fedsim.engine.batched.backend import BatchedBackend
from fedsim.engine.batched.compiled import Compile, warn_not_compiled, worth_compiling
from fedsim.engine.native.backend import NativeBackend, unfit
from fedsim.engine.native.library import NotCompiledError, library
from fedsim.engine.precision import Precision
from fedsim.engine.reference.backend import ReferenceBackend
from fedsim.errors import ConfigError

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
WORTH_STEPS = {"linear": 2_000, "convolutional": 200}
"""Local steps of a run, one client's, from which on C pays: compiling takes 2 s, once a machine; a step of ten MLPs of
workload W1 on two cores is some .8 ms shorter, one of a client of W2 some 5 ms of a core (docs/performance.md)."""


def choose_backend(workload: Workload, *, precision: Precision, compile: Compile) -> Backend:
    """`native` for what it can train, in runs long enough to compile for; else `sequential` for convolutional models on
    a CPU, where grouped convolutions are slow, and for models that cannot run batched; `batched` otherwise."""
    convolutional = any(isinstance(m, _CONVOLUTIONS) for m in workload.model.modules())
    on_cpu = workload.data.x.device.type == "cpu"
    reason = "no convolutions" if not convolutional else "convolutions on a CPU" if on_cpu else "a GPU"
    backend: Backend
    try:
        if _native_pays(workload, precision, compile, WORTH_STEPS["convolutional" if convolutional else "linear"]):
            backend = NativeBackend(workload, workers="auto")
            backend.reason = reason
            return backend
    except NotCompiledError as error:
        warn_not_compiled(str(error))
        reason += f", not compiled: {error}"
    if convolutional and on_cpu:
        backend = ReferenceBackend(workload, precision=precision, workers="auto")
    else:
        backend, reason = _batched_if_it_can(workload, precision, compile, reason)
    backend.reason = reason
    return backend


def _native_pays(workload: Workload, precision: Precision, compile: Compile, enough: int) -> bool:
    """Raises `NotCompiledError` where it would pay and cannot be compiled."""
    if precision != "float32" or unfit(workload) or not worth_compiling(compile, workload.total_steps, enough):
        return False
    library(workload.data.x.dtype)
    return True


def _batched_if_it_can(workload: Workload, precision: Precision, compile: Compile, reason: str) -> tuple[Backend, str]:
    try:
        return BatchedBackend(workload, precision=precision, chunk_size="auto", compile=compile), reason
    except ConfigError as error:
        return ReferenceBackend(workload, precision=precision, workers="auto"), error.problems[0].rule
