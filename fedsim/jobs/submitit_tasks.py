"""Tasks that submitit starts, in processes of this machine or by Slurm: submitted, watched, asked to end."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from fedsim.config.plan import Plan
from fedsim.errors import ConfigError, Problem
from fedsim.jobs.submitit_worker import SubmittedTask
from fedsim.jobs.sweep import Attempts
from fedsim.jobs.task_worker import Job, Place, Report, this_place
from fedsim.jobs.tasks import LostTaskError, Tasks
from fedsim.tracking.files import is_free

LATE_SECONDS = 15.0
"""How long the result of a task that has ended may take to be seen on a file system of several machines."""
ASK_SECONDS = 10.0
"""Between two times that Slurm is asked about tasks that are to end."""


class SubmititTasks(Tasks):
    """Tasks of submitit, known by its jobs. `executor`: submitit's; `num_threads`: of a task."""

    poll_seconds: ClassVar[float]
    """Between two looks at the tasks and at the records of their jobs."""

    def __init__(
        self,
        executor: Any,
        attempts: Attempts,
        plans: Sequence[Plan],
        *,
        num_threads: int,
        jobs_per_task: int,
        max_in_flight: int | None = None,
    ) -> None:
        super().__init__(attempts, plans, jobs_per_task=jobs_per_task, max_in_flight=max_in_flight)
        self.executor = executor
        self.place: Place = this_place({})
        self._environment = {"PYTHONSAFEPATH": "1"}  # nothing is imported from the working folder before fedsim
        if "OMP_NUM_THREADS" not in os.environ:
            self._environment["OMP_NUM_THREADS"] = str(num_threads)
        self._ended_at: dict[Any, float] = {}

    def begin(self, groups: Sequence[Sequence[Job]]) -> Sequence[Any]:
        try:
            with _environment(self._environment):
                found: list[Any] = self.executor.submit_array([SubmittedTask(self.place, group) for group in groups])
        except (OSError, RuntimeError) as error:  # of `sbatch`, say
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            problem = Problem("hydra.launcher", ..., f"could not be submitted: {reason}", "change its parameters")
            raise ConfigError([problem]) from error
        return found

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
        found: list[Report] = task.result()
        return found


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

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._asked_at = float("-inf")

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
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables that processes started within are given."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


@contextmanager
def _ctrl_c_kept_here() -> Iterator[None]:
    """Processes started within ignore the terminal's Ctrl-C, at which submitit would kill the jobs after a second."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
