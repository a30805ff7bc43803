"""The software that runs the jobs of a sweep in other processes (`fedsim.jobs.tasks`): joblib, Ray
and submitit.

joblib: processes of this machine, which take one job after another. One that is killed takes the
others with it: their jobs are lost, too, and those that wait are run in new ones. Ray (ray.io): a
task whose process dies is run again, and goes on from the checkpoints in the folders. submitit:
processes of this machine, or tasks of Slurm; one that is asked to end by a time limit or a
preemption is saved and requeued (`fedsim.jobs.task_worker.SubmittedTask`).
"""

import math
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import chdir, contextmanager, suppress
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import joblib  # type: ignore[import-untyped]
from joblib.externals.loky import get_reusable_executor  # type: ignore[import-untyped]

from fedsim.config.build import construct
from fedsim.config.plan import Plan
from fedsim.core.disk import num_cores
from fedsim.core.errors import ConfigError, FedsimError, Problem, check, rule
from fedsim.core.parameters import Count, CountOrZero, NonNegative, Problems, parameters
from fedsim.jobs.task_worker import SubmittedTask, WorkerTask
from fedsim.jobs.tasks import TaskLauncher, imported, in_words
from fedsim.results.files import is_free, refuse_links
from fedsim.running.outcome import Outcome
from fedsim.running.process import STOP

POLL_SECONDS = 0.5
"""Between two looks at the tasks and at the records of their jobs."""
IDLE_SECONDS = 15
"""After which a process of joblib without a job ends, also where the command was killed."""


@parameters
class JoblibJobs(TaskLauncher):
    """The launcher `joblib` (conf/hydra/launcher/joblib.yaml). `n_jobs`: processes; -1: as many as
    there are cores."""

    n_jobs: int

    how = "in processes of joblib"

    def problems(self) -> Problems:
        yield rule(
            self.n_jobs != 0,
            "n_jobs",
            self.n_jobs,
            "must not be 0",
            "-1: as many as there are cores",
        )

    @property
    def tasks_at_a_time(self) -> int:
        return int(joblib.effective_n_jobs(self.n_jobs))

    @contextmanager
    def connected(self, place: Path) -> Iterator[None]:
        try:
            yield
        finally:
            self._pool().shutdown(kill_workers=True)

    def _pool(self) -> Any:
        """The pool of processes; another one where one of them was killed."""
        threads = os.environ.get("OMP_NUM_THREADS") or str(
            max(1, joblib.cpu_count() // self.tasks_at_a_time)
        )
        variables = {"OMP_NUM_THREADS": threads}
        return get_reusable_executor(
            max_workers=self.tasks_at_a_time, timeout=IDLE_SECONDS, env=variables
        )

    def begin(self, groups: Sequence[Sequence[Plan]], since: float) -> Sequence[Any]:
        pool = self._pool()
        return [pool.submit(WorkerTask(plans, since, {}, quiet=True)) for plans in groups]

    def ended(self, running: Mapping["Future[Any]", Sequence[Plan]]) -> Sequence[Any]:
        return list(wait(running, POLL_SECONDS, FIRST_COMPLETED).done)

    def outcomes(self, task: "Future[Any]") -> Sequence[Outcome]:
        return list(task.result())

    def ask_to_end(self, running: Sequence[Any]) -> None:
        for pid in list(self._pool()._processes or ()):
            with suppress(OSError):
                os.kill(pid, signal.SIGTERM)


OBJECT_STORE = 100 * 2**20
"""Bytes of shared memory for Ray on this machine: configs and outcomes are all that goes through
it."""
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    "RAY_worker_niceness": "0",
}
"""No reports to Ray's makers; the worker's Python is this one under `uv run`, too; no warning about
GPUs; processes of tasks have the priority of this one, which Ray lowers by 15 else."""
CARRIED = ("FEDSIM_", "OMP_", "WANDB_", "XDG_CACHE_HOME")
"""Beginnings of the names of variables of the environment that tasks are given; keys
(WANDB_API_KEY) are not."""


@parameters
class RayJobs(TaskLauncher):
    """The launcher `ray` (conf/hydra/launcher/ray.yaml). Tasks are known by the references to their
    results.

    `address`: None for a Ray of its own on this machine, or `auto` for a cluster. `num_cpus`,
    `num_gpus`: of each task, in cores and GPUs. `max_retries`: of a task whose process dies.
    `max_in_flight`: tasks at a time, None for as many as there are resources for.
    """

    address: str | None
    num_cpus: NonNegative
    num_gpus: NonNegative
    max_retries: CountOrZero
    max_in_flight: Count | None

    how = "as tasks of Ray"

    def problems(self) -> Problems:
        host = "the variable RAY_ADDRESS names the cluster for auto"
        yield rule(
            self.address in (None, "auto"), "address", self.address, "must be null or auto", host
        )
        whole = self.num_gpus <= 1 or float(self.num_gpus).is_integer()
        yield rule(
            whole,
            "num_gpus",
            self.num_gpus,
            "must be <= 1 or whole",
            "tasks share a GPU with 0.5, say",
        )

    @property
    def tasks_at_a_time(self) -> int | None:
        return self.max_in_flight

    @property
    def gpus(self) -> tuple[str, float]:
        return "hydra.launcher.num_gpus", self.num_gpus

    @contextmanager
    def connected(self, place: Path) -> Iterator[None]:
        """With Ray started on this machine or found; disconnected, and ended if it was started, at
        the end."""
        for key, value in SETTINGS.items():
            os.environ.setdefault(key, value)
        keys = any(key.startswith("RAY_AUTH_") for key in os.environ)
        if self.address is None and not keys:  # Ray leaves one in ~ else
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        ray = imported("ray", "ray", "ray")
        own = (
            {"include_dashboard": False, "object_store_memory": OBJECT_STORE}
            if self.address is None
            else {}
        )
        try:
            with chdir(
                os.sep
            ):  # Ray puts the working folder before all others where workers look for modules
                ray.init(
                    address=self.address or "local",
                    log_to_driver=False,
                    logging_level="error",
                    **own,
                )
        except ConnectionError as error:
            remedy = "`ray start` starts one; set RAY_ADDRESS, and RAY_AUTH_MODE=token if it asks for a token"
            problem = Problem("hydra.launcher.address", self.address, "no cluster answers", remedy)
            raise ConfigError([problem]) from error
        except Exception as error:  # Ray's own for a machine that is too busy has no class
            raise FedsimError(
                f"Ray has not started: {in_words(error)} The same command tries again."
            ) from error
        try:
            STOP.install()  # Ray has handlers of its own
            there = ray.cluster_resources()
            asked = {"num_cpus": "CPU", "num_gpus": "GPU"}
            check(
                *(
                    _too_few(key, getattr(self, key), there.get(name, 0))
                    for key, name in asked.items()
                )
            )
            self._ray = ray
            yield
        finally:
            with suppress(KeyboardInterrupt):
                ray.shutdown()

    def begin(self, groups: Sequence[Sequence[Plan]], since: float) -> Sequence[Any]:
        resources = {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "max_retries": self.max_retries,
        }
        remote = self._ray.remote(WorkerTask.__call__).options(**resources, retry_exceptions=False)
        return [remote.remote(WorkerTask(plans, since, self._environment())) for plans in groups]

    def ended(self, running: Mapping[Any, Sequence[Plan]]) -> Sequence[Any]:
        ready, _ = self._ray.wait(list(running), timeout=POLL_SECONDS)
        return ready

    def ask_to_end(self, running: Sequence[Any]) -> None:
        """Ray interrupts what runs, as Ctrl-C does, and forgets what has not begun."""
        for task in running:
            self._ray.cancel(task, force=False)

    def outcomes(self, task: Any) -> Sequence[Outcome]:
        return list(self._ray.get(task))

    def _environment(self) -> Mapping[str, str]:
        """Variables for a task. Without a GPU of its own, it is shown none."""
        carried = {
            key: v
            for key, v in os.environ.items()
            if key.startswith(CARRIED) and not key.endswith("_KEY")
        }
        return carried if self.num_gpus else {**carried, "CUDA_VISIBLE_DEVICES": ""}


def _too_few(key: str, wanted: float, there: float) -> Problem | None:
    """A task that asks for more than there is would wait for ever."""
    text = f"must be <= {there:g}: Ray finds no more"
    return rule(
        wanted <= there or math.isclose(wanted, there), f"hydra.launcher.{key}", wanted, text
    )


LATE_SECONDS = 15.0
"""How long the result of a task that has ended may take to be seen on a file system of several
machines."""
FOLDER = ".submitit"
"""Of the scripts, logs and pickles of submitit, beside the runs of the sweep."""


@parameters
class SubmititJobs(TaskLauncher):
    """What `submitit_local` and `submitit_slurm` have in common. Tasks are known by submitit's
    jobs; `parameters` are for submitit."""

    parameters: Mapping[str, Any] = field(default_factory=dict)

    cluster: ClassVar[str]
    """submitit's name of it."""
    poll_seconds: ClassVar[float]
    """Between two looks at the tasks and at the records of their jobs."""

    def problems(self) -> Problems:
        for key in ("nodes", "tasks_per_node"):
            value = self.parameters.get(key, 1)
            yield rule(value == 1, key, value, "must be 1", "a job of fedsim runs in one process")

    @property
    def gpus(self) -> tuple[str, float]:
        others = [int(self.parameters.get(key) or 0) for key in ("gpus_per_node", "gpus_per_task")]
        return "hydra.launcher.gpus_per_node", max(
            *others, int(str(self.parameters.get("gres")).startswith("gpu"))
        )

    @property
    def num_threads(self) -> int:
        """Cores of a task."""
        return int(self.parameters.get("cpus_per_task") or 1)

    def added(self) -> Mapping[str, Any]:
        """Parameters of submitit that follow from others."""
        return {}

    @contextmanager
    def connected(self, place: Path) -> Iterator[None]:
        """With submitit's executor, whose files are in a subfolder of this command: process numbers
        come again."""
        submitit = imported("submitit", f"submitit_{self.cluster}", "slurm")
        shared = submitit.AutoExecutor._typed_parameters()
        given = {**self.parameters, **self.added()}
        folder = place / FOLDER / f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
        refuse_links(folder.parent)
        limits = getattr(self, "max_num_timeout", 0)
        try:
            self._executor = submitit.AutoExecutor(
                folder, cluster=self.cluster, slurm_max_num_timeout=limits
            )
            named = {
                key if key in shared else f"{self.cluster}_{key}": value
                for key, value in given.items()
            }
            self._executor.update_parameters(**named)
        except RuntimeError as error:
            remedy = "start the command on a machine of the cluster, or take hydra/launcher=submitit_local"
            raise ConfigError(
                [Problem("hydra/launcher", f"submitit_{self.cluster}", str(error), remedy)]
            ) from error
        except (AssertionError, NameError, TypeError, ValueError) as error:
            raise ConfigError(
                [Problem("hydra.launcher", ..., f"is refused by submitit: {error}")]
            ) from error
        self._ended_at: dict[Any, float] = {}
        yield

    def begin(self, groups: Sequence[Sequence[Plan]], since: float) -> Sequence[Any]:
        threads = os.environ.get("OMP_NUM_THREADS") or str(self.num_threads)
        with patch.dict(
            os.environ, {"OMP_NUM_THREADS": threads}
        ):  # for processes that are started now
            try:
                return self._executor.submit_array(
                    [SubmittedTask(plans, since, {}) for plans in groups]
                )
            except (OSError, RuntimeError) as error:  # of `sbatch`, say
                reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                problem = Problem(
                    "hydra.launcher",
                    ...,
                    f"could not be submitted: {reason}",
                    "change its parameters",
                )
                raise ConfigError([problem]) from error

    def ended(self, running: Mapping[Any, Sequence[Plan]]) -> Sequence[Any]:
        time.sleep(self.poll_seconds)
        return [
            task
            for task in running
            if task.paths.result_pickle.exists() or self._is_lost(task, running[task])
        ]

    def _is_lost(self, task: Any, plans: Sequence[Plan]) -> bool:
        """Whether a task has ended, or the process that waits for it, no other is running its jobs,
        and its result has not come for some time."""
        if not task.done() or not all(
            is_free(plan.folder) for plan in plans
        ):  # perhaps again: Slurm has requeued it
            self._ended_at.pop(task, None)
            return False
        return time.monotonic() - self._ended_at.setdefault(task, time.monotonic()) > LATE_SECONDS

    def outcomes(self, task: Any) -> Sequence[Outcome]:
        if not task.paths.result_pickle.exists():
            log = next(
                (file for file in (task.paths.stderr, task.paths.stdout) if file.exists()),
                task.paths.folder,
            )
            raise RuntimeError(f"{task.job_id} has ended without a report: {task.state}, see {log}")
        return list(task.result())


@parameters
class LocalJobs(SubmititJobs):
    """The launcher `submitit_local`: processes of this machine, each with another one of submitit,
    which waits for it and starts it again.

    `max_in_flight`: tasks at a time, None for as many as there are cores for.
    """

    max_in_flight: Count | None

    how, cluster, poll_seconds, ask_seconds = "as processes of submitit", "local", 0.5, 0.0

    @property
    def tasks_at_a_time(self) -> int:
        return self.max_in_flight or max(1, num_cores() // self.num_threads)

    def begin(self, groups: Sequence[Sequence[Plan]], since: float) -> Sequence[Any]:
        """Processes that ignore the terminal's Ctrl-C, at which submitit would kill the jobs after
        a second."""
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return super().begin(groups, since)
        finally:
            signal.signal(signal.SIGINT, handler)

    def ask_to_end(self, running: Sequence[Any]) -> None:
        for task in running:
            if not task.done():
                os.kill(
                    int(task.job_id), signal.SIGTERM
                )  # its waiting process passes it on to the one of the jobs


@parameters
class SlurmJobs(SubmititJobs):
    """The launcher `submitit_slurm`: an array of tasks of Slurm.

    `max_num_timeout`: time limits that a task may reach and be requeued.
    """

    max_num_timeout: CountOrZero

    how, cluster, poll_seconds, ask_seconds = "as tasks of Slurm", "slurm", 2.0, 10.0

    def problems(self) -> Problems:
        yield from super().problems()
        delay, limit = (
            self.parameters.get("signal_delay_s", 0),
            60 * self.parameters.get("timeout_min", math.inf),
        )
        told = "a task would be asked to end as soon as it begins"
        yield rule(
            delay < limit,
            "signal_delay_s",
            delay,
            f"must be < timeout_min, which is {limit:g} s",
            told,
        )

    def added(self) -> Mapping[str, Any]:
        """`srun` is told the cores again: since Slurm 22.05 it does not take them from `sbatch`. A
        task that asks for no GPU is shown none, also where Slurm does not constrain devices."""
        cores = self.parameters.get("cpus_per_task")
        told = {} if cores is None else {"srun_args": [f"--cpus-per-task={cores}"]}
        return told if self.gpus[1] else {**told, "setup": ["export CUDA_VISIBLE_DEVICES="]}

    def ask_to_end(self, running: Sequence[Any]) -> None:
        """Those that wait are cancelled; the others get a signal after which they are not
        requeued."""
        for how in ("--state=PENDING", "--signal=USR1") if running else ():
            with suppress(OSError):
                command = ["scancel", how, *(task.job_id for task in running)]
                subprocess.run(command, check=False, stderr=subprocess.DEVNULL)
        for task in running[:1]:
            task.get_info(mode="force")


def launcher_of(node: Mapping[str, Any], cls: type[SubmititJobs]) -> SubmititJobs:
    """What the config's node `hydra.launcher` describes. Raises `ConfigError`."""
    own = {"jobs_per_task", *cls.__annotations__}
    values = {key: value for key, value in node.items() if key in own}
    others = {key: value for key, value in node.items() if key not in own and key != "_target_"}
    return construct(cls, {**values, "parameters": others}, "hydra.launcher")
