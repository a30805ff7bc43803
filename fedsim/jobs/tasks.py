"""The jobs of a sweep as tasks of software that runs them in other processes: what joblib, Ray and submitit have in
common.

A task runs one job, or several side by side (`fedsim.jobs.task_worker`), in the folders that they have here, which
must be on a file system that all machines see.
"""

import importlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from fedsim.config.plan import Plan
from fedsim.core.errors import ConfigError, Problem, at_least, check, rule
from fedsim.jobs.sweep import Attempts
from fedsim.jobs.task_worker import Job
from fedsim.results.files import METRICS
from fedsim.running.interleaving import Lanes
from fedsim.running.outcome import Outcome, outcome_on_file
from fedsim.running.process import STOP
from fedsim.tracking.console import lanes_progress, time_left
from fedsim.tracking.tables import tell_line

TAIL = 2**16
"""Bytes at the end of a job's records in which new ones are looked for."""


class LostTaskError(Exception):
    """A task has ended without outcomes; the text says why."""


@dataclass(kw_only=True)
class TaskLauncher(ABC):
    """A launcher that runs jobs as tasks, with its parameters, which are checked.

    `jobs_per_task`: jobs that train together in a task.
    """

    jobs_per_task: int

    how: ClassVar[str]
    """How the jobs are run, in words for the terminal."""

    def __post_init__(self) -> None:
        check(at_least("jobs_per_task", self.jobs_per_task, 1), *self.problems())

    @abstractmethod
    def problems(self) -> Sequence[Problem | None]:
        """What is wrong with the other parameters."""

    @property
    @abstractmethod
    def tasks_at_a_time(self) -> int | None:
        """None for all."""

    def device_problem(self, plan: Plan) -> Problem | None:
        """None if a task can run a job on its device."""
        return None

    @abstractmethod
    @contextmanager
    def connected(self, place: Path) -> Iterator[None]:
        """Within it, tasks can be started. `place`: the folder of the runs' folders."""
        yield

    @abstractmethod
    def begin(self, groups: Sequence[Sequence[Job]]) -> Sequence[Any]:
        """Start a task for each group of jobs; they are known by what is returned."""

    @abstractmethod
    def ended(self, running: Mapping[Any, Sequence[Plan]]) -> Sequence[Any]:
        """Those that have ended; returns after some seconds at the latest, whether there are any or not."""

    @abstractmethod
    def outcomes(self, task: Any) -> Sequence[Outcome]:
        """How the jobs of a task that has ended did. Raises `LostTaskError` where that is not known."""

    @abstractmethod
    def ask_to_end(self, running: Sequence[Any]) -> None:
        """Let tasks finish and save their rounds, and those not begun that have not. Called at every look from the
        first signal on."""

    def run(self, attempts: Attempts, plans: Sequence[Plan]) -> None:
        """Run jobs as tasks, and record in `attempts` how they ended. Raises `ConfigError` before any is run.

        Asked to end by a signal, it asks all tasks to end and waits until they are saved, then raises KeyboardInterrupt
        or `Preempted`; a second Ctrl-C does not wait. A folder that comes twice is run once.
        """
        plans = list({plan.folder: attempts.overwriting.as_found(plan) for plan in plans}.values())
        ended = [plan for plan in plans if outcome_on_file(plan).final and not plan.settings.overwrite]
        attempts.run_in_turn(ended)  # which returns what is on file
        left = [plan for plan in plans if plan not in ended]
        if not left:
            return
        check(*dict.fromkeys(map(self.device_problem, left)))
        with STOP.deferred(), self.connected(left[0].folder.parent):
            _Sweep(self, attempts, left).run()
        STOP.raise_if_asked()


class _Sweep:
    """Jobs that wait, in groups for a task each, those that run, by task, and the rounds of each that were seen."""

    def __init__(self, launcher: TaskLauncher, attempts: Attempts, plans: Sequence[Plan]) -> None:
        self.launcher, self.attempts, self.plans = launcher, attempts, plans
        self.waiting = Lanes(max_lanes=launcher.jobs_per_task).groups(plans)
        self.running: dict[Any, list[Plan]] = {}
        self.rounds = {plan.folder: 0 for plan in plans}

    def run(self) -> None:
        """Until all have ended; those that wait when a signal comes are not begun.

        A second Ctrl-C does not wait for those that run; they are asked to end all the same.
        """
        progress, launcher = self.attempts.progress, self.launcher
        total = sum(plan.settings.num_rounds for plan in self.plans)
        accuracies = partial(progress.accuracies, [plan.folder for plan in self.plans])
        left = partial(time_left, progress.position(self.plans[0].folder))
        try:
            with lanes_progress(len(self.plans), total, accuracies, left, how=launcher.how) as show:
                while self.running or (self.waiting and STOP.status is None):
                    self._begin()
                    ready = launcher.ended(self.running) if self.running else []
                    self._look()
                    for task in ready:
                        self._end(task, self.running.pop(task))
                    show(sum(map(len, (*self.running.values(), *self.waiting))), sum(self.rounds.values()))
                    if STOP.status is not None:
                        launcher.ask_to_end(list(self.running))
        except KeyboardInterrupt:
            launcher.ask_to_end(list(self.running))
            raise

    def _begin(self) -> None:
        free = (self.launcher.tasks_at_a_time or len(self.plans)) - len(self.running)
        if STOP.status is None and free > 0 and self.waiting:
            groups, self.waiting = self.waiting[:free], self.waiting[free:]
            tasks = self.launcher.begin([[job_of(plan, self.attempts) for plan in group] for group in groups])
            self.running |= zip(tasks, groups, strict=True)

    def _look(self) -> None:
        """Count the rounds that are in the records of the jobs that run."""
        for plan in (plan for group in self.running.values() for plan in group):
            for record in [] if plan.settings.overwrite else new_records(plan.folder, self.rounds[plan.folder]):
                self.rounds[plan.folder] = record["round"]
                rounds_left = plan.settings.num_rounds - record["round"]
                self.attempts.progress.round_ended(plan.folder, rounds_left, record.get("test_accuracy"))

    def _end(self, task: Any, group: Sequence[Plan]) -> None:
        try:
            outcomes = self.launcher.outcomes(task)
        except LostTaskError as reason:
            outcomes = [self._found(plan, str(reason)) for plan in group]
        for plan, outcome in zip(group, outcomes, strict=True):
            self.attempts.ends(plan, outcome)

    def _found(self, plan: Plan, error: str) -> Outcome:
        """How a job ended whose task is lost: the folder tells what was done before."""
        if self.attempts.overwriting.has_ended(plan):
            return outcome_on_file(plan)
        if STOP.status is None:
            tell_line(f"{plan.folder}: {error}; the same command goes on with it")
        return Outcome(STOP.status or "failed", {"error": error})


def gpu_problem(key: str, num_gpus: float, device: str) -> Problem | None:
    """None if a task with so many GPUs, the parameter `key` of its launcher, can run a job on `device`."""
    if device == "auto" and num_gpus > 0:  # `make_plan` has made cuda of it where there is a GPU
        remedy = f"where only other machines have one, set device=cuda; without any, {key}=0"
        return Problem(key, num_gpus, "needs a GPU that torch can see here", remedy)
    if device.startswith("cuda") and not num_gpus:
        text = f"must be > 0 for device={device}: GPUs are hidden from other tasks"
        return Problem(key, num_gpus, text, "set it to 1, say, or use device=cpu")
    return rule(not device.startswith("cuda:"), "device", device, "is the launcher's choice", "use device=cuda")


def imported(library: str, choice: str, extra: str) -> Any:
    """The library of the launcher `choice`. Raises `ConfigError` where it is not installed."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        remedy = f"pip install 'fedsim-selection[{extra}]', or hydra/launcher=lanes"
        raise ConfigError([Problem("hydra/launcher", choice, "is not installed", remedy)]) from error


def job_of(plan: Plan, attempts: Attempts) -> Job:
    return Job(config=plan.config, choices=plan.choices, folder=str(plan.folder), since=attempts.overwriting.since)


def new_records(folder: Path, after: int) -> list[dict[str, Any]]:
    """The records of rounds beyond `after` of a run in another process, of the last ones in its file."""
    try:
        with (folder / METRICS).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines[:-1]:  # the last one is empty, or not written to its end
        with suppress(ValueError):  # of the first, of which a part is read
            found.append(json.loads(line))
    return [record for record in found if isinstance(record, dict) and record["round"] > after]
