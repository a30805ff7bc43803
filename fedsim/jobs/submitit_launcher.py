"""The jobs of a sweep as tasks that submitit starts: processes of this machine, or tasks of Slurm.

The choices and parameters are those of Hydra's plugin for submitit (`fedsim.config.words`). A task that is
asked to end by a time limit or a preemption is saved and requeued (`fedsim.jobs.task_worker.SubmittedTask`).
"""

import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from fedsim.config.build import construct
from fedsim.config.plan import Plan
from fedsim.core.errors import ConfigError, Problem, at_least, rule
from fedsim.jobs.task_worker import Job, SubmittedTask, this_place
from fedsim.jobs.tasks import LostTaskError, TaskLauncher, gpu_problem, imported
from fedsim.results.files import is_free
from fedsim.running.outcome import Outcome

LATE_SECONDS = 15.0
"""How long the result of a task that has ended may take to be seen on a file system of several machines."""
ASK_SECONDS = 10.0
"""Between two times that Slurm is asked about tasks that are to end."""
FOLDER = ".submitit"
"""Of the scripts, logs and pickles of submitit, beside the runs of the sweep."""
TOLD_AT_ONCE = "a task would be asked to end as soon as it begins"


@dataclass(kw_only=True)
class SubmititJobs(TaskLauncher):
    """What `submitit_local` and `submitit_slurm` have in common. Tasks are known by submitit's jobs.

    `parameters`: those of Hydra's plugin, for submitit.
    """

    parameters: Mapping[str, Any] = field(default_factory=dict)

    cluster: ClassVar[str]
    """submitit's name of it."""
    poll_seconds: ClassVar[float]
    """Between two looks at the tasks and at the records of their jobs."""

    def problems(self) -> Sequence[Problem | None]:
        one = "a job of fedsim runs in one process"
        given = {key: self.parameters.get(key, 1) for key in ("nodes", "tasks_per_node")}
        return [rule(value == 1, key, value, "must be 1", one) for key, value in given.items()]

    @property
    def num_gpus(self) -> int:
        """Of a task."""
        return int(self.parameters.get("gpus_per_node") or 0)

    @property
    def num_threads(self) -> int:
        """Cores of a task."""
        return int(self.parameters.get("cpus_per_task") or 1)

    def device_problem(self, plan: Plan) -> Problem | None:
        return gpu_problem("hydra.launcher.gpus_per_node", self.num_gpus, plan.settings.device)

    @contextmanager
    def connected(self, place: Path) -> Iterator[None]:
        self._executor = self.executor(place / FOLDER)
        self._ended_at: dict[Any, float] = {}
        yield

    def executor(self, folder: Path, limits: Mapping[str, Any] = MappingProxyType({}), **added: Any) -> Any:
        """submitit's, with files in a subfolder of this command: process numbers come again.

        `limits`: arguments of its constructor; `added`: parameters of this cluster that the plugin lacks.
        """
        submitit = imported("submitit", f"submitit_{self.cluster}", "slurm")
        shared = submitit.AutoExecutor._typed_parameters()
        given = {k if k in shared else f"{self.cluster}_{k}": v for k, v in self.parameters.items()}
        given |= {f"{self.cluster}_{key}": value for key, value in added.items()}
        command = f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
        try:
            executor = submitit.AutoExecutor(cluster=self.cluster, folder=folder / command, **limits)
            executor.update_parameters(**given)
        except RuntimeError as error:
            remedy = "start the command on a machine of the cluster, or take hydra/launcher=submitit_local"
            raise ConfigError([Problem("hydra/launcher", f"submitit_{self.cluster}", str(error), remedy)]) from error
        except (AssertionError, NameError, TypeError, ValueError) as error:
            raise ConfigError([Problem("hydra.launcher", ..., f"is refused by submitit: {error}")]) from error
        return executor

    def begin(self, groups: Sequence[Sequence[Job]]) -> Sequence[Any]:
        variables = {"PYTHONSAFEPATH": "1"}  # nothing is imported from the working folder before fedsim
        variables |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(self.num_threads)}
        before = dict(os.environ)
        os.environ.update(variables)  # for processes that are started now
        try:
            return self._executor.submit_array([SubmittedTask(this_place({}), group) for group in groups])
        except (OSError, RuntimeError) as error:  # of `sbatch`, say
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            problem = Problem("hydra.launcher", ..., f"could not be submitted: {reason}", "change its parameters")
            raise ConfigError([problem]) from error
        finally:
            os.environ.clear()
            os.environ.update(before)

    def ended(self, running: Mapping[Any, Sequence[Plan]]) -> Sequence[Any]:
        time.sleep(self.poll_seconds)
        return [task for task in running if task.paths.result_pickle.exists() or self.is_lost(task, running[task])]

    def is_lost(self, task: Any, plans: Sequence[Plan]) -> bool:
        """Whether a task has ended, and its result has not come for some time."""
        if not task.done():  # perhaps again: Slurm has requeued it
            self._ended_at.pop(task, None)
            return False
        return time.monotonic() - self._ended_at.setdefault(task, time.monotonic()) > LATE_SECONDS

    def outcomes(self, task: Any) -> Sequence[Outcome]:
        log = next((file for file in (task.paths.stderr, task.paths.stdout) if file.exists()), task.paths.folder)
        if not task.paths.result_pickle.exists():
            raise LostTaskError(f"its task {task.job_id} has ended without a report ({task.state}; see {log})")
        error = task.exception()
        if error is not None:
            raise LostTaskError(f"its task {task.job_id} has failed ({_last_of_trace(str(error))}; see {log})")
        found: Sequence[Outcome] = task.result()
        return found


@dataclass(kw_only=True)
class LocalJobs(SubmititJobs):
    """The launcher `submitit_local`: processes of this machine, each with another one of submitit, which waits for it
    and starts it again.

    `max_in_flight`: tasks at a time, None for as many as there are cores for.
    """

    max_in_flight: int | None

    how, cluster, poll_seconds = "as processes of submitit", "local", 0.5

    def problems(self) -> Sequence[Problem | None]:
        most = self.max_in_flight
        return [*super().problems(), None if most is None else at_least("max_in_flight", most, 1)]

    @property
    def tasks_at_a_time(self) -> int:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.max_in_flight or max(1, cores // self.num_threads)

    def begin(self, groups: Sequence[Sequence[Job]]) -> Sequence[Any]:
        """Processes that ignore the terminal's Ctrl-C, at which submitit would kill the jobs after a second."""
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return super().begin(groups)
        finally:
            signal.signal(signal.SIGINT, handler)

    def is_lost(self, task: Any, plans: Sequence[Plan]) -> bool:
        """Whether the waiting process has ended, and none is running the jobs: it may have been killed alone."""
        return bool(task.done()) and all(is_free(plan.folder) for plan in plans)

    def ask_to_end(self, running: Sequence[Any]) -> None:
        for task in running:
            if not task.done():
                os.kill(int(task.job_id), signal.SIGTERM)  # its waiting process passes it on to the one of the jobs


@dataclass(kw_only=True)
class SlurmJobs(SubmititJobs):
    """The launcher `submitit_slurm`: an array of tasks of Slurm.

    `max_num_timeout`: time limits that a task may reach and be requeued.
    """

    max_num_timeout: int

    how, cluster, poll_seconds = "as tasks of Slurm", "slurm", 2.0
    _asked_at = float("-inf")

    def problems(self) -> Sequence[Problem | None]:
        delay, limit = self.parameters.get("signal_delay_s", 0), 60 * self.parameters.get("timeout_min", math.inf)
        return [
            *super().problems(),
            at_least("max_num_timeout", self.max_num_timeout, 0),
            rule(delay < limit, "signal_delay_s", delay, f"must be < timeout_min, which is {limit:g} s", TOLD_AT_ONCE),
        ]

    @property
    def tasks_at_a_time(self) -> None:
        return None

    @property
    def num_gpus(self) -> int:
        gres = str(self.parameters.get("gres") or "")
        return max(super().num_gpus, int(self.parameters.get("gpus_per_task") or 0), int(gres.startswith("gpu")))

    def executor(self, folder: Path, limits: Mapping[str, Any] = MappingProxyType({}), **added: Any) -> Any:
        """`srun` is told the cores again: since Slurm 22.05 it does not take them from `sbatch`. A task that asks for
        no GPU is shown none, also where Slurm does not constrain devices."""
        if (cores := self.parameters.get("cpus_per_task")) is not None:
            added["srun_args"] = [f"--cpus-per-task={cores}"]
        if not self.num_gpus:
            added["setup"] = ["export CUDA_VISIBLE_DEVICES="]
        return super().executor(folder, {"slurm_max_num_timeout": self.max_num_timeout}, **added)

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


def launcher_of(node: Mapping[str, Any], cls: type[SubmititJobs]) -> SubmititJobs:
    """What the config's node `hydra.launcher` describes. Raises `ConfigError`."""
    own = {"jobs_per_task", *cls.__annotations__}
    ignored = ("_target_", "submitit_folder")
    others = {key: value for key, value in node.items() if key not in own and key not in ignored}
    values = {key: value for key, value in node.items() if key in own}
    return construct(cls, {**values, "parameters": others}, "hydra.launcher")
