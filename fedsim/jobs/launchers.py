"""The launchers whose software runs tasks in other processes: joblib, Ray and submitit.

Each launcher is a subclass of `fedsim.jobs.tasks.TaskLauncher`. The base class calls the methods,
says what each of them does, and defines the terms task and group.

- joblib: processes of this machine that take one task after another. If one process is killed, the
  tasks of the others are lost, too. Tasks that wait are run in new processes.
- Ray (ray.io): a task whose process dies is run again, and resumes from its checkpoints.
- submitit: processes of this machine, or tasks of Slurm. A task that reaches a time limit or is
  preempted is saved and requeued (`fedsim.jobs.task_worker.SubmittedTask`).
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
from dataclasses import field, fields
from pathlib import Path
from typing import Any, ClassVar

import joblib  # type: ignore[import-untyped]
from joblib.externals.loky import get_reusable_executor  # type: ignore[import-untyped]

from fedsim.config.build import construct
from fedsim.config.hydra_node import SLURM
from fedsim.config.plan import Plan
from fedsim.core.disk import num_cores
from fedsim.core.errors import ConfigError, FedsimError, Problem, check, rule
from fedsim.core.parameters import Count, CountOrZero, NonNegative, Problems, parameters
from fedsim.jobs.task_worker import SubmittedTask, WorkerTask
from fedsim.jobs.tasks import Groups, RunningTasks, TaskLauncher, imported, in_words
from fedsim.results.files import is_free, refuse_links
from fedsim.running.outcome import Outcome
from fedsim.running.process import STOP

POLL_SECONDS = 0.5
"""Time between two looks at the tasks and at the records of their jobs."""
IDLE_SECONDS = 15
"""A process of joblib without a task ends after this time, also if the command was killed."""
OBJECT_STORE_BYTES = 100 * 2**20
"""Shared memory for Ray on this machine. Only configs and outcomes go through it."""
RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no reports to Ray's makers
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # the worker's Python is this one under `uv run`, too
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # no warning about GPUs
    "RAY_worker_niceness": "0",  # Ray would lower the priority of tasks by 15
}
"""Environment variables that Ray reads, unless the user has set them."""
CARRIED = ("FEDSIM_", "OMP_", "WANDB_", "XDG_CACHE_HOME")
"""Tasks of Ray get the environment variables whose names begin so, without keys (WANDB_API_KEY)."""
LATE_SECONDS = 15.0
"""A result of submitit may appear this long after its task has ended, on a file system of several
machines."""
FOLDER = ".submitit"
"""The folder of submitit's scripts, logs and pickles, next to the runs of the sweep."""


@parameters
class JoblibJobs(TaskLauncher):
    """The launcher `joblib` (conf/hydra/launcher/joblib.yaml) with `n_jobs` processes.

    -1 means as many processes as there are cores.
    """

    n_jobs: int

    how = "in processes of joblib"

    def problems(self) -> Problems:
        remedy = "-1: as many as there are cores"
        yield rule(self.n_jobs != 0, "n_jobs", self.n_jobs, "must not be 0", remedy)

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
        """Return joblib's pool of processes. After a process was killed, it is a new pool."""
        num_processes = self.tasks_at_a_time
        threads = str(max(1, joblib.cpu_count() // num_processes))
        variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or threads}
        return get_reusable_executor(num_processes, timeout=IDLE_SECONDS, env=variables)

    def begin(self, groups: Groups, since: float) -> Sequence[Any]:
        pool = self._pool()
        return [pool.submit(WorkerTask(plans, since, {}, quiet=True)) for plans in groups]

    def ended(self, running: RunningTasks) -> Sequence[Any]:
        return list(wait(running, POLL_SECONDS, FIRST_COMPLETED).done)

    def outcomes(self, task: "Future[Any]") -> Sequence[Outcome]:
        return list(task.result())

    def ask_to_end(self, running: Sequence[Any]) -> None:
        for pid in list(self._pool()._processes or ()):  # loky has no public list of them
            with suppress(OSError):
                os.kill(pid, signal.SIGTERM)


@parameters
class RayJobs(TaskLauncher):
    """The launcher `ray` (conf/hydra/launcher/ray.yaml). A task is the reference to its result.

    `address` is None for a Ray of its own on this machine, or `auto` for a cluster. `num_cpus` and
    `num_gpus` are the cores and GPUs of each task. A task whose process dies is run again at most
    `max_retries` times. `max_in_flight` is the maximum number of tasks at a time, None for as many
    as there are resources for.
    """

    address: str | None
    num_cpus: NonNegative
    num_gpus: NonNegative
    max_retries: CountOrZero
    max_in_flight: Count | None

    how = "as tasks of Ray"

    def problems(self) -> Problems:
        remedy = "the variable RAY_ADDRESS names the cluster for auto"
        is_known = self.address in (None, "auto")
        yield rule(is_known, "address", self.address, "must be null or auto", remedy)
        is_share_or_whole = self.num_gpus <= 1 or float(self.num_gpus).is_integer()
        remedy = "tasks share a GPU with 0.5, for example"
        yield rule(is_share_or_whole, "num_gpus", self.num_gpus, "must be <= 1 or whole", remedy)

    @property
    def tasks_at_a_time(self) -> int | None:
        return self.max_in_flight

    @property
    def gpus(self) -> tuple[str, float]:
        return "hydra.launcher.num_gpus", self.num_gpus

    @contextmanager
    def connected(self, place: Path) -> Iterator[None]:
        """Start or find Ray. A Ray that was started here ends with the context."""
        self._ray = self._started_ray()
        try:
            STOP.install()  # Ray has installed handlers of its own
            available = self._ray.cluster_resources()
            check(
                _too_few("num_cpus", self.num_cpus, available.get("CPU", 0)),
                _too_few("num_gpus", self.num_gpus, available.get("GPU", 0)),
            )
            yield
        finally:
            with suppress(KeyboardInterrupt):  # a second Ctrl-C must not leave processes behind
                self._ray.shutdown()

    def _started_ray(self) -> Any:
        """Start Ray here, or connect to the cluster, and return the module `ray`.

        Raises `ConfigError` if no cluster answers, and `FedsimError` if Ray does not start.
        """
        for key, value in RAY_VARIABLES.items():
            os.environ.setdefault(key, value)
        options: dict[str, Any] = {}
        if self.address is None:
            options["include_dashboard"] = False
            options["object_store_memory"] = OBJECT_STORE_BYTES
            if not any(key.startswith("RAY_AUTH_") for key in os.environ):
                # Otherwise Ray leaves a key in the home folder.
                os.environ["RAY_AUTH_MODE"] = "token"
                os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        ray = imported("ray", "ray", "ray")
        address = self.address or "local"
        try:
            with chdir(os.sep):  # Ray's workers import modules from the working folder first
                ray.init(address=address, log_to_driver=False, logging_level="error", **options)
        except ConnectionError as error:
            remedy = (
                "`ray start` starts one; set RAY_ADDRESS, and RAY_AUTH_MODE=token if it needs a "
                "token"
            )
            fault = "no cluster answers"
            key = "hydra.launcher.address"
            raise ConfigError([Problem(key, self.address, fault, remedy)]) from error
        except Exception as error:  # Ray's error for a machine that is too busy has no class
            fault = f"Ray has not started: {in_words(error)}"
            raise FedsimError(f"{fault} The same command tries again.") from error
        return ray

    def begin(self, groups: Groups, since: float) -> Sequence[Any]:
        environment = self._environment()
        remote = self._ray.remote(WorkerTask.__call__).options(
            num_cpus=self.num_cpus,
            num_gpus=self.num_gpus,
            max_retries=self.max_retries,
            retry_exceptions=False,
        )
        return [remote.remote(WorkerTask(plans, since, environment)) for plans in groups]

    def ended(self, running: RunningTasks) -> Sequence[Any]:
        return self._ray.wait(list(running), timeout=POLL_SECONDS)[0]

    def ask_to_end(self, running: Sequence[Any]) -> None:
        """Interrupt running tasks, as Ctrl-C does, and cancel tasks that have not begun."""
        for task in running:
            self._ray.cancel(task, force=False)

    def outcomes(self, task: Any) -> Sequence[Outcome]:
        return list(self._ray.get(task))

    def _environment(self) -> dict[str, str]:
        """Return the environment variables for a task. GPUs are hidden if it asks for none."""
        variables = {}
        for key, value in os.environ.items():
            if key.startswith(CARRIED) and not key.endswith("_KEY"):
                variables[key] = value
        if not self.num_gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ""
        return variables


@parameters
class SubmititJobs(TaskLauncher):
    """The base of `submitit_local` and `submitit_slurm`. A task is a `submitit.Job`.

    `parameters` are those keys of the launcher's config that are parameters of submitit.
    """

    parameters: Mapping[str, Any] = field(default_factory=dict)

    cluster: ClassVar[str]
    """submitit's name of the kind of cluster."""
    poll_seconds: ClassVar[float]
    """Time between two looks at the tasks, as `POLL_SECONDS`."""

    def problems(self) -> Problems:
        for key in ("nodes", "tasks_per_node"):
            value = self.parameters.get(key, 1)
            yield rule(value == 1, key, value, "must be 1", "a job of fedsim runs in one process")

    @property
    def gpus(self) -> tuple[str, float]:
        per_node = int(self.parameters.get("gpus_per_node") or 0)
        per_task = int(self.parameters.get("gpus_per_task") or 0)
        num_gpus = max(per_node, per_task)
        resources = str(self.parameters.get("gres")).split(",")  # such as license:1,gpu:a100:2
        if not num_gpus and any(resource.startswith("gpu") for resource in resources):
            num_gpus = 1  # or more: fedsim only asks whether there are any
        return "hydra.launcher.gpus_per_node", num_gpus

    @property
    def num_threads(self) -> int:
        """The number of cores of a task."""
        return int(self.parameters.get("cpus_per_task") or 1)

    def added(self) -> Mapping[str, Any]:
        """Return parameters of submitit that follow from others."""
        return {}

    def executor_options(self) -> Mapping[str, Any]:
        """Return arguments for the constructor of submitit's executor."""
        return {}

    @contextmanager
    def connected(self, place: Path) -> Iterator[None]:
        """Create submitit's executor, with which `begin` submits tasks."""
        self._executor = self._new_executor(place)
        # When each task was first seen to have ended without a result (`time.monotonic()`).
        self._ended_at: dict[Any, float] = {}
        yield

    def _new_executor(self, place: Path) -> Any:
        """Return submitit's executor, whose files are in a new folder in `place`.

        The folder is named by the time and the number of this process, because numbers of processes
        occur again. Raises `ConfigError` if submitit or the cluster is missing, or if submitit
        rejects a parameter.
        """
        choice = f"submitit_{self.cluster}"
        submitit = imported("submitit", choice, "slurm")
        folder = place / FOLDER / f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
        refuse_links(folder.parent)
        # The names of all other parameters begin with that of the cluster.
        common_names = submitit.AutoExecutor._typed_parameters()
        parameters = {}
        for key, value in (*self.parameters.items(), *self.added().items()):
            name = key if key in common_names else f"{self.cluster}_{key}"
            parameters[name] = value
        try:
            executor = submitit.AutoExecutor(
                folder, cluster=self.cluster, **self.executor_options()
            )
            executor.update_parameters(**parameters)
        except RuntimeError as error:
            remedy = (
                "start the command on a machine of the cluster, or use "
                "hydra/launcher=submitit_local"
            )
            raise ConfigError([Problem("hydra/launcher", choice, str(error), remedy)]) from error
        except (AssertionError, NameError, TypeError, ValueError) as error:
            fault = f"is rejected by submitit: {error}"
            raise ConfigError([Problem("hydra.launcher", ..., fault)]) from error
        return executor

    def begin(self, groups: Groups, since: float) -> Sequence[Any]:
        tasks = [SubmittedTask(plans, since, {}) for plans in groups]
        # Processes that are started here inherit the environment, and Slurm's tasks get a copy.
        variable = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = variable or str(self.num_threads)
        try:
            return self._executor.submit_array(tasks)
        except (OSError, RuntimeError) as error:  # of `sbatch`, whose last line says why
            lines = str(error).strip().splitlines() or [type(error).__name__]
            fault = f"could not be submitted: {lines[-1]}"
            remedy = "change its parameters"
            raise ConfigError([Problem("hydra.launcher", ..., fault, remedy)]) from error
        finally:
            del os.environ["OMP_NUM_THREADS"]
            if variable is not None:
                os.environ["OMP_NUM_THREADS"] = variable

    def ended(self, running: RunningTasks) -> Sequence[Any]:
        time.sleep(self.poll_seconds)
        ended = []
        for task, plans in running.items():
            if task.paths.result_pickle.exists() or self._is_lost(task, plans):
                ended.append(task)
        return ended

    def _is_lost(self, task: Any, plans: Sequence[Plan]) -> bool:
        """Return whether a task without a result is lost.

        It is lost if, for `LATE_SECONDS`, submitit has said that it has ended and no process has
        held its jobs. Before, Slurm may requeue it, or its result may still appear.
        """
        if not task.done() or not all(is_free(plan.folder) for plan in plans):
            self._ended_at.pop(task, None)
            return False
        now = time.monotonic()
        return now - self._ended_at.setdefault(task, now) > LATE_SECONDS

    def outcomes(self, task: Any) -> Sequence[Outcome]:
        paths = task.paths
        if paths.result_pickle.exists():
            return list(task.result())
        logs = [file for file in (paths.stderr, paths.stdout) if file.exists()]
        log = logs[0] if logs else paths.folder
        raise RuntimeError(f"{task.job_id} has ended without a report: {task.state}, see {log}")


@parameters
class LocalJobs(SubmititJobs):
    """The launcher `submitit_local`: processes of this machine.

    For each task submitit starts a second process, which waits for the task and starts it again if
    needed. `max_in_flight` is the maximum number of tasks at a time, None for as many as there are
    cores for.
    """

    max_in_flight: Count | None

    how = "as processes of submitit"
    cluster = "local"
    poll_seconds = POLL_SECONDS
    ask_seconds = 0.0  # at each look: a task may not have installed its handlers before

    @property
    def tasks_at_a_time(self) -> int:
        return self.max_in_flight or max(1, num_cores() // self.num_threads)

    def begin(self, groups: Groups, since: float) -> Sequence[Any]:
        """Start processes that ignore Ctrl-C, which the terminal sends to all of them.

        submitit would otherwise kill their jobs a second later. Children inherit that a signal is
        ignored.
        """
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return super().begin(groups, since)
        finally:
            signal.signal(signal.SIGINT, handler)

    def ask_to_end(self, running: Sequence[Any]) -> None:
        for task in running:
            if not task.done():
                # submitit's waiting process, whose number this is, passes the signal on.
                os.kill(int(task.job_id), signal.SIGTERM)


@parameters
class SlurmJobs(SubmititJobs):
    """The launcher `submitit_slurm`: an array of tasks of Slurm.

    A task that reaches its time limit is requeued at most `max_num_timeout` times.
    """

    max_num_timeout: CountOrZero

    how = "as tasks of Slurm"
    cluster = "slurm"
    poll_seconds = 2.0
    ask_seconds = 10.0

    def problems(self) -> Problems:
        yield from super().problems()
        delay = self.parameters.get("signal_delay_s", 0)
        limit = 60 * self.parameters.get("timeout_min", math.inf)
        fault = f"must be < timeout_min, which is {limit:g} s"
        reason = "otherwise a task is asked to end as soon as it begins"
        yield rule(delay < limit, "signal_delay_s", delay, fault, reason)

    def added(self) -> Mapping[str, Any]:
        """Return parameters that give `srun` the cores, and that hide GPUs from a task without any.

        Since Slurm 22.05 `srun` does not take the number of cores from `sbatch`. And not every
        installation of Slurm keeps a task from GPUs that it did not ask for.
        """
        parameters = {}
        cores = self.parameters.get("cpus_per_task")
        if cores is not None:
            parameters["srun_args"] = [f"--cpus-per-task={cores}"]
        if not self.gpus[1]:
            parameters["setup"] = ["export CUDA_VISIBLE_DEVICES="]
        return parameters

    def executor_options(self) -> Mapping[str, Any]:
        return {"slurm_max_num_timeout": self.max_num_timeout}

    def ask_to_end(self, running: Sequence[Any]) -> None:
        """Cancel tasks that wait, and let the others save their jobs without being requeued."""
        if not running:
            return
        # USR1 is not the signal of a time limit or preemption (`SubmittedTask`).
        task_ids = [task.job_id for task in running]
        for option in ("--state=PENDING", "--signal=USR1"):
            with suppress(OSError):
                subprocess.run(
                    ["scancel", option, *task_ids], check=False, stderr=subprocess.DEVNULL
                )
        running[0].get_info(mode="force")  # updates submitit's states of all tasks


def _too_few(key: str, requested: float, available: float) -> Problem | None:
    """Return a problem if a task would wait forever, because Ray has less than it asks for."""
    is_enough = requested <= available or math.isclose(requested, available)
    fault = f"must be <= {available:g}: Ray finds no more"
    return rule(is_enough, f"hydra.launcher.{key}", requested, fault)


def build_submitit_launcher(node: Mapping[str, Any]) -> SubmititJobs:
    """Return the launcher `LocalJobs` or `SlurmJobs` that the config's `hydra.launcher` describes.

    Keys that are fields of the class become its fields. All others become `parameters` for
    submitit. Raises `ConfigError`.
    """
    cls = SlurmJobs if node["_target_"] == SLURM else LocalJobs
    names = {parameter.name for parameter in fields(cls)} - {"parameters"}
    values: dict[str, Any] = {}
    submitit_parameters: dict[str, Any] = {}
    for key, value in node.items():
        if key in names:
            values[key] = value
        elif key != "_target_":
            submitit_parameters[key] = value
    values["parameters"] = submitit_parameters
    return construct(cls, values, "hydra.launcher")
