"""The jobs of a sweep as tasks of Ray (ray.io), on this machine or on a cluster.

A task whose process dies is run again by Ray, and goes on from the checkpoints in the folders.
"""

import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.config.plan import Plan
from fedsim.core.errors import ConfigError, FedsimError, Problem, at_least, check, rule
from fedsim.jobs.task_worker import Job, Place, run_task, this_place
from fedsim.jobs.tasks import LostTaskError, TaskLauncher, gpu_problem, imported
from fedsim.running.outcome import Outcome
from fedsim.running.process import STOP

POLL_SECONDS = 0.5
"""Between two looks at the tasks and at the records of their jobs."""
OBJECT_STORE = 100 * 2**20
"""Bytes of shared memory for Ray on this machine: configs and outcomes are all that goes through it."""
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    "RAY_worker_niceness": "0",
}
"""No reports to Ray's makers; the worker's Python is this one under `uv run`, too; no warning about GPUs; processes of
tasks have the priority of this one, which Ray lowers by 15 else."""
CARRIED = ("FEDSIM_", "OMP_", "WANDB_", "XDG_CACHE_HOME")
"""Beginnings of the names of variables of the environment that tasks are given; keys (WANDB_API_KEY) are not."""


@dataclass(kw_only=True)
class RayJobs(TaskLauncher):
    """The launcher `ray` (conf/hydra/launcher/ray.yaml). Tasks are known by the references to their results.

    `address`: None for a Ray of its own on this machine, or `auto` for a cluster. `num_cpus`, `num_gpus`: of each task,
    in cores and GPUs. `max_retries`: of a task whose process dies. `max_in_flight`: tasks at a time, None for as many
    as there are resources for.
    """

    address: str | None
    num_cpus: float
    num_gpus: float
    max_retries: int
    max_in_flight: int | None

    how = "as tasks of Ray"

    def problems(self) -> Sequence[Problem | None]:
        whole = self.num_gpus <= 1 or float(self.num_gpus).is_integer()
        host = "the variable RAY_ADDRESS names the cluster for auto"
        return (
            rule(self.address in (None, "auto"), "address", self.address, "must be null or auto", host),
            at_least("num_cpus", self.num_cpus, 0),
            at_least("num_gpus", self.num_gpus, 0),
            rule(whole, "num_gpus", self.num_gpus, "must be <= 1 or whole", "tasks share a GPU with 0.5, say"),
            at_least("max_retries", self.max_retries, 0),
            None if self.max_in_flight is None else at_least("max_in_flight", self.max_in_flight, 1),
        )

    @property
    def tasks_at_a_time(self) -> int | None:
        return self.max_in_flight

    def device_problem(self, plan: Plan) -> Problem | None:
        return gpu_problem("hydra.launcher.num_gpus", self.num_gpus, plan.settings.device)

    @contextmanager
    def connected(self, place: Path) -> Iterator[None]:
        """With Ray started on this machine or found; disconnected, and ended if it was started, at the end."""
        for key, value in SETTINGS.items():
            os.environ.setdefault(key, value)
        keys = any(key.startswith("RAY_AUTH_") for key in os.environ)
        if self.address is None and not keys:  # Ray leaves one in ~ else
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        ray = imported("ray", "ray", "ray")
        own = {"include_dashboard": False, "object_store_memory": OBJECT_STORE} if self.address is None else {}
        try:
            ray.init(address=self.address or "local", log_to_driver=False, logging_level="error", **own)
        except ConnectionError as error:
            remedy = "`ray start` starts one; set RAY_ADDRESS, and RAY_AUTH_MODE=token if it asks for a token"
            problem = Problem("hydra.launcher.address", self.address, "no cluster answers", remedy)
            raise ConfigError([problem]) from error
        except Exception as error:  # Ray's own for a machine that is too busy has no class
            raise FedsimError(f"Ray has not started: {_last_line(error)} The same command tries again.") from error
        try:
            STOP.install()  # Ray has handlers of its own
            there = ray.cluster_resources()
            wanted = (("num_cpus", self.num_cpus, "CPU"), ("num_gpus", self.num_gpus, "GPU"))
            check(*(_too_few(key, value, name, there.get(name, 0)) for key, value, name in wanted))
            self._ray, self._asked = ray, False
            yield
        finally:
            with suppress(KeyboardInterrupt):
                ray.shutdown()

    def begin(self, groups: Sequence[Sequence[Job]]) -> Sequence[Any]:
        resources = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "max_retries": self.max_retries}
        task, place = self._ray.remote(run_task).options(**resources, retry_exceptions=False), self._place()
        return [task.remote(place, jobs) for jobs in groups]

    def ended(self, running: Mapping[Any, Sequence[Plan]]) -> Sequence[Any]:
        ready, _ = self._ray.wait(list(running), timeout=POLL_SECONDS)
        return ready

    def ask_to_end(self, running: Sequence[Any]) -> None:
        """Ray interrupts what runs, as Ctrl-C does, and forgets what has not begun."""
        if not self._asked:
            for task in running:
                self._ray.cancel(task, force=False)
        self._asked = True

    def outcomes(self, task: Any) -> Sequence[Outcome]:
        try:
            return self._ray.get(task)
        except self._ray.exceptions.TaskCancelledError:
            raise LostTaskError("asked to end") from None
        except self._ray.exceptions.RayError as reason:
            text = f"its task of Ray has failed ({type(reason).__name__}: {_last_line(reason)})"
            raise LostTaskError(text) from None

    def _place(self) -> Place:
        """What a task needs to know of this process. Without a GPU of its own, it is shown none."""
        environment = {key: v for key, v in os.environ.items() if key.startswith(CARRIED) and not key.endswith("_KEY")}
        return this_place(environment if self.num_gpus else {**environment, "CUDA_VISIBLE_DEVICES": ""})


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[-1] if "Traceback" in str(error) else lines[0]


def _too_few(key: str, wanted: float, name: str, there: float) -> Problem | None:
    """The problem where a task asks for more than there is: it would wait for ever."""
    text = f"must be <= {there:g}: Ray finds no more {name}s"
    return rule(wanted <= there or math.isclose(wanted, there), f"hydra.launcher.{key}", wanted, text)
