"""The jobs of a sweep as tasks that submitit starts: processes of this machine, or tasks of Slurm.

The choices and parameters are those of Hydra's plugin for submitit (`fedsim.config.submitit_options`). A task that is
asked to end by a time limit or a preemption is saved and requeued (`fedsim.jobs.submitit_worker`).
"""

import importlib
import math
import os
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fedsim.config.build import construct
from fedsim.config.plan import Plan
from fedsim.errors import ConfigError, Problem, at_least, check, rule
from fedsim.jobs.submitit_tasks import LocalTasks, SlurmTasks
from fedsim.jobs.sweep import Attempts
from fedsim.jobs.tasks import Tasks, run_as_tasks

FOLDER = ".submitit"
"""Of the scripts, logs and pickles of submitit, beside the runs of the sweep."""
TOLD_AT_ONCE = "a task would be asked to end as soon as it begins"


@dataclass(frozen=True, kw_only=True)
class SubmititJobs:
    """What the launchers `submitit_local` and `submitit_slurm` have in common.

    `jobs_per_task`: jobs that train together in a task. `parameters`: those of the plugin, for submitit.
    """

    jobs_per_task: int
    parameters: Mapping[str, Any] = field(default_factory=dict)

    cluster: ClassVar[str]
    """submitit's name of it."""

    def __post_init__(self) -> None:
        one = "a job of fedsim runs in one process"
        check(
            at_least("jobs_per_task", self.jobs_per_task, 1),
            *(
                rule(self.parameters.get(key, 1) == 1, key, self.parameters.get(key), "must be 1", one)
                for key in ("nodes", "tasks_per_node")
            ),
        )

    def run(self, attempts: Attempts, plans: Sequence[Plan]) -> None:
        """Run jobs as tasks of submitit (`run_as_tasks`)."""

        def begun(left: Sequence[Plan]) -> AbstractContextManager[Tasks]:
            return nullcontext(self.tasks(self._executor(left[0].folder.parent / FOLDER), attempts, left))

        run_as_tasks(attempts, plans, ("gpus_per_node", self.num_gpus), begun)

    @property
    def num_gpus(self) -> int:
        """GPUs of a task."""
        return int(self.parameters.get("gpus_per_node") or 0)

    @property
    def num_threads(self) -> int:
        """Cores of a task."""
        return int(self.parameters.get("cpus_per_task") or 1)

    @property
    def limits(self) -> Mapping[str, Any]:
        """Arguments of the constructor of submitit's executor."""
        return {}

    @property
    def added(self) -> Mapping[str, Any]:
        """Parameters of submitit's for this cluster that the plugin lacks."""
        return {}

    @abstractmethod
    def tasks(self, executor: Any, attempts: Attempts, plans: Sequence[Plan]) -> Tasks:
        """Those of `plans`."""

    def _executor(self, folder: Path) -> Any:
        """submitit's, with files in a subfolder of this command: process numbers come again."""
        submitit = _submitit(self.cluster)
        shared = submitit.AutoExecutor._typed_parameters()
        given = {k if k in shared else f"{self.cluster}_{k}": v for k, v in self.parameters.items()}
        given |= {f"{self.cluster}_{key}": value for key, value in self.added.items()}
        limits = {f"{self.cluster}_{key}": value for key, value in self.limits.items()}
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


@dataclass(frozen=True, kw_only=True)
class LocalJobs(SubmititJobs):
    """The launcher `submitit_local`. `max_in_flight`: tasks at a time, None for as many as there are cores for."""

    max_in_flight: int | None

    cluster = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        check(None if self.max_in_flight is None else at_least("max_in_flight", self.max_in_flight, 1))

    def tasks(self, executor: Any, attempts: Attempts, plans: Sequence[Plan]) -> Tasks:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        at_a_time = self.max_in_flight or max(1, cores // self.num_threads)
        shape = {"num_threads": self.num_threads, "jobs_per_task": self.jobs_per_task, "max_in_flight": at_a_time}
        return LocalTasks(executor, attempts, plans, **shape)


@dataclass(frozen=True, kw_only=True)
class SlurmJobs(SubmititJobs):
    """The launcher `submitit_slurm`. `max_num_timeout`: time limits that a task may reach and be requeued."""

    max_num_timeout: int

    cluster = "slurm"

    def __post_init__(self) -> None:
        super().__post_init__()
        delay, limit = self.parameters.get("signal_delay_s", 0), 60 * self.parameters.get("timeout_min", math.inf)
        check(
            at_least("max_num_timeout", self.max_num_timeout, 0),
            rule(delay < limit, "signal_delay_s", delay, f"must be < timeout_min, which is {limit:g} s", TOLD_AT_ONCE),
        )

    @property
    def num_gpus(self) -> int:
        gres = str(self.parameters.get("gres") or "")
        return max(super().num_gpus, int(self.parameters.get("gpus_per_task") or 0), int(gres.startswith("gpu")))

    @property
    def limits(self) -> Mapping[str, Any]:
        return {"max_num_timeout": self.max_num_timeout}

    @property
    def added(self) -> Mapping[str, Any]:
        """`srun` is told the cores again: since Slurm 22.05 it does not take them from `sbatch`. A task that asks for
        no GPU is shown none, also where Slurm does not constrain devices."""
        cores = self.parameters.get("cpus_per_task")
        cores_again = {} if cores is None else {"srun_args": [f"--cpus-per-task={cores}"]}
        return cores_again if self.num_gpus else {**cores_again, "setup": ["export CUDA_VISIBLE_DEVICES="]}

    def tasks(self, executor: Any, attempts: Attempts, plans: Sequence[Plan]) -> Tasks:
        return SlurmTasks(executor, attempts, plans, num_threads=self.num_threads, jobs_per_task=self.jobs_per_task)


def launcher_of(node: Mapping[str, Any], cls: type[SubmititJobs]) -> SubmititJobs:
    """What the config's node `hydra.launcher` describes. Raises `ConfigError`."""
    own = {key for each in (SubmititJobs, cls) for key in each.__annotations__ if key != "parameters"}
    ignored = ("_target_", "submitit_folder")
    others = {key: value for key, value in node.items() if key not in own and key not in ignored}
    values = {key: value for key, value in node.items() if key in own}
    return construct(cls, {**values, "parameters": others}, "hydra.launcher")


def _submitit(cluster: str) -> Any:
    try:
        return importlib.import_module("submitit")
    except ImportError as error:
        remedy = "pip install 'fedsim-selection[slurm]', or hydra/launcher=lanes"
        raise ConfigError([Problem("hydra/launcher", f"submitit_{cluster}", "is not installed", remedy)]) from error
