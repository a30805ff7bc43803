"""The choice of a backend by model, device and length of the run.

The rule is fixed, so that a repeated run computes the same.
"""

from fedsim.core.errors import ConfigError
from fedsim.engine.backend import Backend, Workload
from fedsim.engine.batched import BatchedBackend
from fedsim.engine.device import Compile, Precision, tell, warn_not_compiled, worth_compiling
from fedsim.engine.graph.backend import GraphBackend
from fedsim.engine.model import initial, is_convolutional
from fedsim.engine.native.backend import NativeBackend, unfit
from fedsim.engine.native.library import NotCompiledError, library
from fedsim.engine.reference import ReferenceBackend
from fedsim.engine.trial import agree, trial_schedule

C_WORTH_STEPS = {"linear": 2_000, "convolutional": 200}
"""Number of a client's local steps in a run from which C pays, by the kind of model. Compiling
takes 2 s, once per machine. A step of ten MLPs of workload W1 on two cores is some 0.8 ms shorter,
and a step of a client of W2 some 5 ms of a core (docs/performance.md)."""


def choose_backend(
    workload: Workload, *, precision: Precision, compile: Compile, deterministic: bool | None = None
) -> Backend:
    """Return the fastest backend that can train the workload.

    - On a GPU: `graph`, because recorded steps are the fewest launches, if its first steps agree
      with the next choice.
    - On a CPU: `native`, in runs that are long enough to compile for.
    - Otherwise: `batched`. But `sequential` for convolutional models on a CPU, where grouped
      convolutions are slow, and for models that cannot run batched.
    """
    on_gpu = workload.data.x.is_cuda
    device = "a GPU" if on_gpu else "a CPU"
    convolutional = is_convolutional(workload.model)
    reason = f"convolutions on {device}" if convolutional else "no convolutions"
    if on_gpu:
        graph = _graph_backend(workload, precision, deterministic)
        if graph is not None:
            graph.reason = device
            return graph
    elif precision == "float32" and not unfit(workload):
        min_steps = C_WORTH_STEPS["convolutional" if convolutional else "linear"]
        try:
            if worth_compiling(compile, workload.total_steps, min_steps):
                library(workload.data.x.dtype)
                native = NativeBackend(workload, workers="auto")
                native.reason = reason
                return native
        except NotCompiledError as error:
            warn_not_compiled(str(error))
            reason += f", not compiled: {error}"
    return _torch_backend(workload, precision, deterministic, compile=compile, reason=reason)


def _graph_backend(
    workload: Workload, precision: Precision, deterministic: bool | None
) -> GraphBackend | None:
    """Return `graph`, or None if it cannot train the workload or its first steps cannot be
    trusted."""
    try:
        graph = GraphBackend(
            workload, precision=precision, chunk_size="auto", deterministic=deterministic
        )
    except ConfigError:
        return None
    other = _torch_backend(workload, precision, deterministic, compile=False, reason="a trial")
    problem = _disagreement(workload, graph, other, precision)
    if problem is None:
        return graph
    tell(f"engine=auto: not engine=graph, {problem}")
    return None


def _torch_backend(
    workload: Workload,
    precision: Precision,
    deterministic: bool | None,
    *,
    compile: Compile,
    reason: str,
) -> Backend:
    """Return `batched` if possible, and not for convolutions on a CPU; otherwise `sequential`.

    `reason` is recorded for the choice, unless the model cannot run batched: then the problem is.
    Convolutions on a GPU are not compiled.
    """
    convolutional = is_convolutional(workload.model)
    backend: Backend
    if workload.data.x.is_cuda or not convolutional:
        try:
            backend = BatchedBackend(
                workload,
                precision=precision,
                chunk_size="auto",
                compile=False if convolutional else compile,
                deterministic=deterministic,
            )
            backend.reason = reason
            return backend
        except ConfigError as error:
            reason = error.problems[0].rule
    backend = ReferenceBackend(
        workload, precision=precision, workers="auto", deterministic=deterministic
    )
    backend.reason = reason
    return backend


def _disagreement(
    workload: Workload, graph: GraphBackend, other: Backend, precision: Precision
) -> str | None:
    """Return why recorded steps cannot be trusted on this machine, or None if they can.

    Two clients make two short steps with both backends. Results that are not finite say nothing.
    The returned text continues a sentence about engine=graph.
    """
    if not len(workload.data.x):
        return None
    schedule = trial_schedule(workload)
    start = [initial(workload.model)] * len(schedule)
    expected = other.train(start, schedule)
    try:
        actual = graph.train(start, schedule)
    except Exception as error:  # A driver or a compiler may fail in any way.
        reason = str(error).strip().partition("\n")[0][:200]
        return f"which fails on this machine: {reason}"
    if agree(actual, expected, schedule, precision):
        return None
    return "whose first steps on this machine differ from those of the other engines"
