"""The jobs of a sweep as tasks of software that runs them in other processes: what Ray and submitit have in common.

A task runs one job, or several side by side (`fedsim.jobs.task_worker`), in the folders that they have here, which
must be on a file system that all machines see. What was done is read from the folders.
"""

import importlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from fedsim.config.plan import Plan
from fedsim.core.errors import ConfigError, DataError, FedsimError, Problem, at_least, check, rule
from fedsim.jobs.overwriting import result_of
from fedsim.jobs.sweep import Attempts
from fedsim.jobs.task_worker import Job, Report
from fedsim.results.files import FINAL, METRICS
from fedsim.running.interleaving import Lanes
from fedsim.running.outcome import Outcome, outcome_in, outcome_on_file, worked_in
from fedsim.running.process import STOP
from fedsim.tracking.console import lanes_progress, time_left
from fedsim.tracking.tables import tell_line


class LostTaskError(Exception):
    """A task has ended without reports; the text says why."""


class RefusedElsewhereError(FedsimError):
    """A config that a process of the command has refused; the text is that of its `ConfigError`."""

    exit_code = ConfigError.exit_code


class Tasks(ABC):
    """The tasks of jobs, from their start to their reports.

    `jobs_per_task`: jobs that train together in a task. `max_in_flight`: tasks at a time, None for all.
    """

    how: ClassVar[str]
    """How the jobs are run, in words for the terminal."""

    def __init__(
        self, attempts: Attempts, plans: Sequence[Plan], *, jobs_per_task: int, max_in_flight: int | None
    ) -> None:
        self.attempts, self.plans = attempts, plans
        self._waiting = Lanes(max_lanes=jobs_per_task).groups(plans)
        self._running: dict[Any, list[Plan]] = {}
        self._rounds: dict[Path, int] = {plan.folder: 0 for plan in plans}
        self._max_in_flight = max_in_flight or len(plans)
        self._seen = SeenRecords()

    @abstractmethod
    def begin(self, groups: Sequence[Sequence[Job]]) -> Sequence[Any]:
        """Start a task for each group of jobs; they are known by what is returned."""

    @abstractmethod
    def ended(self, running: Sequence[Any]) -> Sequence[Any]:
        """Those that have ended; returns after a second at the latest, whether there are any or not."""

    @abstractmethod
    def reports(self, task: Any) -> Sequence[Report]:
        """Those of a task that has ended. Raises `LostTaskError` where there are none."""

    @abstractmethod
    def ask_to_end(self, running: Sequence[Any]) -> None:
        """Let tasks finish and save their rounds, and those not begin that have not. Called at every look from the
        first signal on."""

    def run(self) -> None:
        """Until all have reported; those that wait when a signal comes are not begun.

        A second Ctrl-C does not wait for those that run; they are asked to end all the same.
        """
        total = sum(plan.settings.num_rounds for plan in self.plans)
        accuracies = partial(self.attempts.progress.accuracies, [plan.folder for plan in self.plans])
        left = partial(time_left, self.attempts.progress.position(self.plans[0].folder))
        try:
            with lanes_progress(len(self.plans), total, accuracies, left, how=self.how) as show:
                while self._running or (self._waiting and STOP.status is None):
                    self._begin()
                    ready = self.ended(list(self._running)) if self._running else []
                    self._look()
                    for task in ready:
                        self._end(task, self._running.pop(task))
                    show(sum(map(len, (*self._running.values(), *self._waiting))), sum(self._rounds.values()))
                    if STOP.status is not None:
                        self.ask_to_end(list(self._running))
        except KeyboardInterrupt:
            self.ask_to_end(list(self._running))
            raise

    def _begin(self) -> None:
        free = self._max_in_flight - len(self._running)
        if STOP.status is None and free > 0 and self._waiting:
            groups, self._waiting = self._waiting[:free], self._waiting[free:]
            tasks = self.begin([[job_of(plan) for plan in group] for group in groups])
            self._running |= zip(tasks, groups, strict=True)

    def _look(self) -> None:
        """Count the rounds that are in the records of the jobs that run."""
        for plan in (plan for group in self._running.values() for plan in group):
            for record in [] if plan.settings.overwrite else self._seen.new(plan.folder):
                self._rounds[plan.folder] = record["round"]
                rounds_left = plan.settings.num_rounds - record["round"]
                self.attempts.progress.round_ended(plan.folder, rounds_left, record.get("test_accuracy"))

    def _end(self, task: Any, group: Sequence[Plan]) -> None:
        reports: dict[str, Report] = {}
        error = None
        try:
            reports = {report["folder"]: report for report in self.reports(task)}
        except LostTaskError as reason:
            error = str(reason)
        for plan in group:
            found = self.attempts.overwriting.as_found(plan)
            self.attempts.ends_elsewhere(plan, *outcome_of(found, reports.get(str(plan.folder)), error))


@dataclass(frozen=True, kw_only=True)
class TaskLauncher(ABC):
    """A launcher that runs jobs as tasks, with its parameters checked. `jobs_per_task`: as in `Tasks`."""

    jobs_per_task: int

    gpus_key: ClassVar[str]
    """The launcher's parameter for the GPUs of a task."""

    def __post_init__(self) -> None:
        most = getattr(self, "max_in_flight", None)
        check(
            at_least("jobs_per_task", self.jobs_per_task, 1),
            None if most is None else at_least("max_in_flight", most, 1),
            *self.problems(),
        )

    @abstractmethod
    def problems(self) -> Sequence[Problem | None]:
        """What is wrong with the other parameters."""

    @property
    @abstractmethod
    def gpus_per_task(self) -> float:
        """GPUs of a task."""

    @abstractmethod
    def begun(self, attempts: Attempts, plans: Sequence[Plan]) -> AbstractContextManager[Tasks]:
        """The tasks of jobs, and what they need while they run."""

    def run(self, attempts: Attempts, plans: Sequence[Plan]) -> None:
        """Run jobs as tasks, and record in `attempts` how they ended. Raises `ConfigError` before any is run.

        Asked to end by a signal, it asks all tasks to end and waits until they are saved, then raises KeyboardInterrupt
        or `Preempted`; a second Ctrl-C does not wait. A folder that comes twice is run once.
        """
        plans = [attempts.overwriting.as_found(plan) for plan in plans]
        ended = [plan for plan in plans if outcome_on_file(plan).final and not plan.settings.overwrite]
        attempts.run_in_turn(ended)  # which returns what is on file
        left = list({plan.folder: plan for plan in plans if plan not in ended}.values())
        if not left:
            return
        check(*dict.fromkeys(map(self._device_problem, left)))
        with STOP.deferred(), self.begun(attempts, left) as tasks:
            tasks.run()
        STOP.raise_if_asked()

    def _device_problem(self, plan: Plan) -> Problem | None:
        """None if a task with so many GPUs can run a job on its device."""
        key, num_gpus, device = f"hydra.launcher.{self.gpus_key}", self.gpus_per_task, plan.settings.device
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


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Within it, variables of the environment have these values; so they have in processes started there."""
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


def job_of(plan: Plan) -> Job:
    return Job(config=plan.config, choices=plan.choices, folder=str(plan.folder), replaces=result_of(plan))


class SeenRecords:
    """The records of runs, read as they are written by other processes."""

    def __init__(self) -> None:
        self._bytes: dict[Path, int] = {}

    def new(self, folder: Path) -> list[dict[str, Any]]:
        """Those of the run in `folder` since the last look; none where they were cut to those of its checkpoint."""
        try:
            with (folder / METRICS).open("rb") as file:
                start = min(self._bytes.get(folder, 0), os.fstat(file.fileno()).st_size)
                file.seek(start)
                text = file.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._bytes[folder] = start + len(whole)
        with suppress(ValueError):
            return [json.loads(line) for line in whole.splitlines()]
        return []


def outcome_of(plan: Plan, report: Report | None, error: str | None) -> tuple[Outcome, FedsimError | None]:
    """How a job ended, and what has refused it before round 1.

    `report`: its task's; `error`: why there is none, and the folder tells what was done before.
    """
    if report is None:
        on_file = outcome_on_file(plan)
        if on_file.final and not plan.settings.overwrite:
            return on_file, None
        if STOP.status is not None:
            return Outcome(STOP.status, {"error": error}), None
        tell_line(f"{plan.folder}: {error}; the same command goes on with it")
        return Outcome("failed", {"error": error}), None
    status, reason = report["status"], report["error"]
    if reason is None:
        left = outcome_in(plan.folder if status in FINAL else worked_in(plan))
        return Outcome(status, left.summary if left.status == status else {}, report["skipped"]), None
    kinds = {"data": DataError, "config": RefusedElsewhereError}
    return Outcome(status, {"error": reason}), kinds.get(status, FedsimError)(reason) if report["refused"] else None
