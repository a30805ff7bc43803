"""The jobs of a sweep as tasks that submitit starts: processes of this machine, or tasks of Slurm.

The choices and parameters are those of Hydra's plugin for submitit (`fedsim.config.words`). A task that is
asked to end by a time limit or a preemption is saved and requeued (`fedsim.jobs.submitit_worker`).
"""

import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fedsim.config.build import construct
from fedsim.config.plan import Plan
from fedsim.core.errors import ConfigError, Problem, at_least, rule
from fedsim.jobs.submitit_worker import SubmittedTask
from fedsim.jobs.sweep import Attempts
from fedsim.jobs.task_worker import Job, Report, this_place
from fedsim.jobs.tasks import LostTaskError, TaskLauncher, Tasks, environment, imported
from fedsim.results.files import is_free

LATE_SECONDS = 15.0
"""How long the result of a task that has ended may take to be seen on a file system of several machines."""
ASK_SECONDS = 10.0
"""Between two times that Slurm is asked about tasks that are to end."""
FOLDER = ".submitit"
"""Of the scripts, logs and pickles of submitit, beside the runs of the sweep."""
TOLD_AT_ONCE = "a task would be asked to end as soon as it begins"


class SubmititTasks(Tasks):
    """Tasks of submitit, known by its jobs. `executor`: submitit's."""

    poll_seconds: ClassVar[float]
    """Between two looks at the tasks and at the records of their jobs."""

    def __init__(self, executor: Any, jobs: "SubmititJobs", attempts: Attempts, plans: Sequence[Plan]) -> None:
        super().__init__(attempts, plans, jobs_per_task=jobs.jobs_per_task, max_in_flight=jobs.at_a_time)
        self.executor, self.place = executor, this_place({})
        self._environment = {"PYTHONSAFEPATH": "1"}  # nothing is imported from the working folder before fedsim
        if "OMP_NUM_THREADS" not in os.environ:
            self._environment["OMP_NUM_THREADS"] = str(jobs.num_threads)
        self._ended_at: dict[Any, float] = {}

    def begin(self, groups: Sequence[Sequence[Job]]) -> Sequence[Any]:
        try:
            with environment(self._environment):
                return self.executor.submit_array([SubmittedTask(self.place, group) for group in groups])
        except (OSError, RuntimeError) as error:  # of `sbatch`, say
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            problem = Problem("hydra.launcher", ..., f"could not be submitted: {reason}", "change its parameters")
            raise ConfigError([problem]) from error

    def ended(self, running: Sequence[Any]) -> Sequence[Any]:
        time.sleep(self.poll_seconds)
        return [task for task in running if task.paths.result_pickle.exists() or self.is_lost(task)]

    def is_lost(self, task: Any) -> bool:
        """Whether a task has ended, and its result has not come for some time."""
        if not task.done():  # perhaps again: Slurm has requeued it
            self._ended_at.pop(task, None)
            return False
        return time.monotonic() - self._ended_at.setdefault(task, time.monotonic()) > LATE_SECONDS

    def reports(self, task: Any) -> Sequence[Report]:
        log = next((file for file in (task.paths.stderr, task.paths.stdout) if file.exists()), task.paths.folder)
        if not task.paths.result_pickle.exists():
            raise LostTaskError(f"its task {task.job_id} has ended without a report ({task.state}; see {log})")
        error = task.exception()
        if error is not None:
            raise LostTaskError(f"its task {task.job_id} has failed ({_last_of_trace(str(error))}; see {log})")
        return task.result()


class LocalTasks(SubmititTasks):
    """Processes of this machine, each with another one of submitit, which waits for it and starts it again."""

    how, poll_seconds = "as processes of submitit", 0.5

    def begin(self, groups: Sequence[Sequence[Job]]) -> Sequence[Any]:
        with _ctrl_c_kept_here():
            return super().begin(groups)

    def is_lost(self, task: Any) -> bool:
        """Whether the waiting process has ended, and none is running the jobs: it may have been killed alone."""
        return bool(task.done()) and all(is_free(plan.folder) for plan in self._running[task])

    def ask_to_end(self, running: Sequence[Any]) -> None:
        for task in running:
            if not task.done():
                os.kill(int(task.job_id), signal.SIGTERM)  # its waiting process passes it on to the one of the jobs


class SlurmTasks(SubmititTasks):
    """An array of tasks of Slurm."""

    how, poll_seconds = "as tasks of Slurm", 2.0
    _asked_at = float("-inf")

    def ask_to_end(self, running: Sequence[Any]) -> None:
        """Those that wait are cancelled; the others get a signal after which they are not requeued."""
        if not running or time.monotonic() - self._asked_at < ASK_SECONDS:
            return
        self._asked_at = time.monotonic()
        names = [task.job_id for task in running]
        for how in ("--state=PENDING", "--signal=USR1"):
            with suppress(OSError):
                subprocess.run(["scancel", how, *names], check=False, stderr=subprocess.DEVNULL)
        running[0].get_info(mode="force")


def _last_of_trace(text: str) -> str:
    """The last line of the traceback that submitit puts between lines of dashes."""
    trace = re.split(r"^-{10,}$", text, flags=re.MULTILINE)[1:2] or [text]
    return (trace[0].strip().splitlines() or [""])[-1]


@contextmanager
def _ctrl_c_kept_here() -> Iterator[None]:
    """Processes started within ignore the terminal's Ctrl-C, at which submitit would kill the jobs after a second."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@dataclass(frozen=True, kw_only=True)
class SubmititJobs(TaskLauncher):
    """What `submitit_local` and `submitit_slurm` have in common. `parameters`: those of the plugin, for submitit."""

    parameters: Mapping[str, Any] = field(default_factory=dict)

    cluster: ClassVar[str]
    """submitit's name of it."""
    tasks: ClassVar[type[SubmititTasks]]
    gpus_key = "gpus_per_node"

    def problems(self) -> Sequence[Problem | None]:
        one = "a job of fedsim runs in one process"
        given = {key: self.parameters.get(key, 1) for key in ("nodes", "tasks_per_node")}
        return [rule(value == 1, key, value, "must be 1", one) for key, value in given.items()]

    @property
    def gpus_per_task(self) -> int:
        return int(self.parameters.get("gpus_per_node") or 0)

    @property
    def num_threads(self) -> int:
        """Cores of a task."""
        return int(self.parameters.get("cpus_per_task") or 1)

    @property
    def at_a_time(self) -> int | None:
        """Tasks at a time, None for all."""
        return None

    @property
    def limits(self) -> Mapping[str, Any]:
        """Arguments of the constructor of submitit's executor."""
        return {}

    @property
    def added(self) -> Mapping[str, Any]:
        """Parameters of submitit's for this cluster that the plugin lacks."""
        return {}

    def begun(self, attempts: Attempts, plans: Sequence[Plan]) -> AbstractContextManager[Tasks]:
        return nullcontext(self.tasks(self._executor(plans[0].folder.parent / FOLDER), self, attempts, plans))

    def _executor(self, folder: Path) -> Any:
        """submitit's, with files in a subfolder of this command: process numbers come again."""
        submitit = imported("submitit", f"submitit_{self.cluster}", "slurm")
        shared = submitit.AutoExecutor._typed_parameters()
        given = {k if k in shared else f"{self.cluster}_{k}": v for k, v in self.parameters.items()}
        given |= {f"{self.cluster}_{key}": value for key, value in self.added.items()}
        command = f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
        try:
            executor = submitit.AutoExecutor(cluster=self.cluster, folder=folder / command, **self.limits)
            executor.update_parameters(**given)
        except RuntimeError as error:
            remedy = "start the command on a machine of the cluster, or take hydra/launcher=submitit_local"
            raise ConfigError([Problem("hydra/launcher", f"submitit_{self.cluster}", str(error), remedy)]) from error
        except (AssertionError, NameError, TypeError, ValueError) as error:
            raise ConfigError([Problem("hydra.launcher", ..., f"is refused by submitit: {error}")]) from error
        return executor


@dataclass(frozen=True, kw_only=True)
class LocalJobs(SubmititJobs):
    """The launcher `submitit_local`. `max_in_flight`: tasks at a time, None for as many as there are cores for."""

    max_in_flight: int | None

    cluster, tasks = "local", LocalTasks

    @property
    def at_a_time(self) -> int | None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.max_in_flight or max(1, cores // self.num_threads)


@dataclass(frozen=True, kw_only=True)
class SlurmJobs(SubmititJobs):
    """The launcher `submitit_slurm`. `max_num_timeout`: time limits that a task may reach and be requeued."""

    max_num_timeout: int

    cluster, tasks = "slurm", SlurmTasks

    def problems(self) -> Sequence[Problem | None]:
        delay, limit = self.parameters.get("signal_delay_s", 0), 60 * self.parameters.get("timeout_min", math.inf)
        return [
            *super().problems(),
            at_least("max_num_timeout", self.max_num_timeout, 0),
            rule(delay < limit, "signal_delay_s", delay, f"must be < timeout_min, which is {limit:g} s", TOLD_AT_ONCE),
        ]

    @property
    def gpus_per_task(self) -> int:
        gres = str(self.parameters.get("gres") or "")
        per_task = int(self.parameters.get("gpus_per_task") or 0)
        return max(super().gpus_per_task, per_task, int(gres.startswith("gpu")))

    @property
    def limits(self) -> Mapping[str, Any]:
        return {"slurm_max_num_timeout": self.max_num_timeout}

    @property
    def added(self) -> Mapping[str, Any]:
        """`srun` is told the cores again: since Slurm 22.05 it does not take them from `sbatch`. A task that asks for
        no GPU is shown none, also where Slurm does not constrain devices."""
        cores = self.parameters.get("cpus_per_task")
        cores_again = {} if cores is None else {"srun_args": [f"--cpus-per-task={cores}"]}
        return cores_again if self.gpus_per_task else {**cores_again, "setup": ["export CUDA_VISIBLE_DEVICES="]}


def launcher_of(node: Mapping[str, Any], cls: type[SubmititJobs]) -> SubmititJobs:
    """What the config's node `hydra.launcher` describes. Raises `ConfigError`."""
    own = {"jobs_per_task", *cls.__annotations__}
    ignored = ("_target_", "submitit_folder")
    others = {key: value for key, value in node.items() if key not in own and key not in ignored}
    values = {key: value for key, value in node.items() if key in own}
    return construct(cls, {**values, "parameters": others}, "hydra.launcher")
