"""Runs the jobs of a sweep as tasks of software that starts other processes.

A job is one run of the sweep. A task is what the software (joblib, Ray, submitit) runs in another
process: one job, or a group of jobs in lanes (`fedsim.jobs.task_worker`). A launcher is the choice
of the config group hydra/launcher. `fedsim.jobs.cli` calls `TaskLauncher.run`; the subclasses in
`fedsim.jobs.launchers` start tasks and get their outcomes.

This process sees the progress of jobs in the records that they write. Jobs have the same folders
here and there, which must be on a file system that all machines see.
"""

import importlib
import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from fedsim.config.plan import Plan
from fedsim.core.disk import open_regular
from fedsim.core.errors import ConfigError, Problem, check, rule
from fedsim.core.parameters import Count, parameters
from fedsim.jobs.sweep import Attempts, Lanes, plans_to_run
from fedsim.results.reading import METRICS, RECORD_KINDS, DamagedError, has_kinds, parse_json
from fedsim.running.outcome import Outcome, outcome_on_file
from fedsim.running.process import STOP
from fedsim.tracking.tables import print_line

Groups = Sequence[Sequence[Plan]]
"""Groups of jobs. The jobs of a group train together in one task."""
RunningTasks = Mapping[Any, Sequence[Plan]]
"""The tasks that run, each with its group of jobs."""
TAIL_BYTES = 2**18
"""The latest record of a job is looked for in this many bytes at the end of its records."""


@parameters
class TaskLauncher(ABC):
    """A launcher that runs jobs as tasks. `jobs_per_task` jobs train together in a task.

    `run` enters `connected`. Within it, `begin` starts tasks, `ended` tells which have ended, and
    `outcomes` is called for each of these. After a stop signal, `ask_to_end` is called. What a task
    is differs between subclasses: an object that can be a key of a dict.
    """

    jobs_per_task: Count

    how: ClassVar[str]
    """How the jobs are run, in words for the terminal."""
    ask_seconds: ClassVar[float] = math.inf
    """Seconds before tasks are asked again to stop. Infinity: they are asked once."""

    @property
    def tasks_at_a_time(self) -> int | None:
        """Maximum number of tasks at a time; None for all of them."""
        return None

    @property
    def gpus(self) -> tuple[str, float] | None:
        """The name of the parameter that gives a task its GPUs, and the number of these GPUs.

        None means that tasks use the GPUs of this machine without asking for them.
        """
        return None

    @abstractmethod
    @contextmanager
    def connected(self, place: Path) -> Iterator[None]:
        """Connect to the software within this context. `place` contains the runs' folders."""
        yield

    @abstractmethod
    def begin(self, groups: Groups, since: float) -> Sequence[Any]:
        """Start a task for each group of jobs, and return the tasks.

        `since` is when the overwriting of jobs began (`Overwriting.since`).
        """

    @abstractmethod
    def ended(self, running: RunningTasks) -> Sequence[Any]:
        """Wait some seconds at most, and return the tasks of `running` that have ended."""

    @abstractmethod
    def outcomes(self, task: Any) -> Sequence[Outcome]:
        """Return the outcomes of the jobs of a task that has ended, in the order of its jobs.

        If they are not known, raises an error that says why.
        """

    @abstractmethod
    def ask_to_end(self, running: Sequence[Any]) -> None:
        """Let running tasks finish and save their rounds, and cancel tasks that have not begun."""

    def run(self, attempts: Attempts, plans: Sequence[Plan]) -> None:
        """Run jobs as tasks, and record in `attempts` how they ended.

        After a stop signal, stops all tasks, waits until they are saved, and raises
        KeyboardInterrupt or `Preempted`. A second Ctrl-C does not wait. A folder that occurs twice
        is run once. Raises `ConfigError` before any job is run.
        """
        by_folder = {plan.folder: attempts.overwriting.without_replaced(plan) for plan in plans}
        plans = list(by_folder.values())
        plans_left = plans_to_run(plans)
        # Jobs that have ended need no task: running them here only reports them.
        ended_folders = by_folder.keys() - {plan.folder for plan in plans_left}
        attempts.run_in_turn([plan for plan in plans if plan.folder in ended_folders])
        if not plans_left:
            return
        if self.gpus is not None:
            problems = [gpu_problem(*self.gpus, plan.settings.device) for plan in plans_left]
            check(*dict.fromkeys(problems))  # each problem once
        with STOP.deferred(), self.connected(plans_left[0].folder.parent):
            _TaskSweep(self, attempts, plans_left).run()
        STOP.raise_if_asked()


class _TaskSweep:
    """The jobs of a sweep while tasks run.

    - `waiting`: groups of jobs for which no task has begun, one task for each group.
    - `running`: the group of jobs of each task that runs.
    - `num_rounds_seen`: the number of rounds of each job (by folder) that its records have shown.
    - `stale`: folders whose records are those of an earlier run when the job begins. They show
      nothing about the job, and are not read.
    """

    def __init__(self, launcher: TaskLauncher, attempts: Attempts, plans: Sequence[Plan]) -> None:
        self.launcher = launcher
        self.attempts = attempts
        self.plans = plans
        self.waiting = Lanes(max_lanes=launcher.jobs_per_task).groups(plans)
        self.running: dict[Any, list[Plan]] = {}
        self.num_rounds_seen: Counter[Path] = Counter()
        self.stale = set()
        for plan in plans:
            if plan.settings.overwrite or outcome_on_file(plan).status == "changed":
                self.stale.add(plan.folder)
        self._asked_at = -math.inf

    def run(self) -> None:
        """Run all jobs until they have ended.

        After a signal, jobs that wait do not begin. A second Ctrl-C waits for no job.
        """
        num_rounds = sum(plan.settings.num_rounds for plan in self.plans)
        try:
            with self.attempts.showing_progress(self.plans, num_rounds, self.launcher.how) as show:
                while self.running or (self.waiting and STOP.status is None):
                    self._begin()
                    ended = self.launcher.ended(self.running) if self.running else []
                    self._count_rounds()
                    for task in ended:
                        self._end(task, self.running.pop(task))
                    num_running = sum(map(len, self.running.values()))
                    num_waiting = sum(map(len, self.waiting))
                    show(num_running + num_waiting, self.num_rounds_seen.total())
                    self._pass_on_signal()
        except KeyboardInterrupt:
            self.launcher.ask_to_end(list(self.running))
            raise

    def _begin(self) -> None:
        """Begin as many tasks as may run at a time, but none after a signal."""
        max_tasks = self.launcher.tasks_at_a_time or len(self.plans)
        num_new = max_tasks - len(self.running)
        if STOP.status is None and num_new > 0 and self.waiting:
            groups = self.waiting[:num_new]
            self.waiting = self.waiting[num_new:]
            tasks = self.launcher.begin(groups, self.attempts.overwriting.since)
            self.running |= zip(tasks, groups, strict=True)

    def _pass_on_signal(self) -> None:
        """After a signal, ask the tasks to end, and again every `ask_seconds`."""
        now = time.monotonic()
        if STOP.status is not None and now - self._asked_at >= self.launcher.ask_seconds:
            self._asked_at = now
            self.launcher.ask_to_end(list(self.running))

    def _count_rounds(self) -> None:
        """Count the rounds in the records of the jobs that run."""
        for group in self.running.values():
            for plan in group:
                if plan.folder not in self.stale:
                    self._count_rounds_of(plan)

    def _count_rounds_of(self, plan: Plan) -> None:
        """Tell the progress of each round that a job has ended since the last look.

        Only the latest record is read. Its accuracy counts for all these rounds.
        """
        num_rounds = plan.settings.num_rounds
        record = latest_record(plan.folder)
        latest = min(record.get("round", 0), num_rounds)
        for number in range(self.num_rounds_seen[plan.folder] + 1, latest + 1):
            self.num_rounds_seen[plan.folder] = number
            progress = self.attempts.progress
            progress.round_ended(plan.folder, num_rounds - number, record["test_accuracy"])

    def _end(self, task: Any, group: Sequence[Plan]) -> None:
        """Record how the jobs of a task ended."""
        try:
            outcomes = self.launcher.outcomes(task)
        except Exception as error:
            reason = f"its task is lost ({in_words(error)})"
            outcomes = [self._outcome_without_task(plan, reason) for plan in group]
        for plan, outcome in zip(group, outcomes, strict=True):
            self.attempts.job_ended(plan, outcome)

    def _outcome_without_task(self, plan: Plan, error: str) -> Outcome:
        """Return the outcome of a job whose task is lost, because of `error`.

        The job may have ended before: its folder tells.
        """
        if self.attempts.overwriting.has_ended(plan):
            return outcome_on_file(plan)
        if STOP.status is None:
            print_line(f"{plan.folder}: {error}; the same command resumes it")
        return Outcome(STOP.status or "failed", {"error": error})


def gpu_problem(key: str, num_gpus: float, device: str) -> Problem | None:
    """Return why a task with `num_gpus` GPUs cannot run a job on `device`, or None if it can.

    `key` is the launcher's parameter for the number of GPUs.
    """
    if device == "auto" and num_gpus > 0:  # `make_plan` turns it into cuda if there is a GPU
        remedy = f"if only other machines have one, set device=cuda; without any, {key}=0"
        return Problem(key, num_gpus, "needs a GPU that torch can see here", remedy)
    if device.startswith("cuda") and not num_gpus:
        fault = f"must be > 0 for device={device}: GPUs are hidden from other tasks"
        return Problem(key, num_gpus, fault, "set it to 1, for example, or use device=cpu")
    has_number = device.startswith("cuda:")
    return rule(not has_number, "device", device, "is the launcher's choice", "use device=cuda")


def in_words(error: BaseException) -> str:
    """Return an error in one line.

    The software of tasks puts the traceback of the other process into the text of its errors, and
    ends it with a line of dashes (submitit). Its last line is the error there. The text of an error
    without a traceback is shown by its first line.
    """
    text, traceback, after = str(error).partition("Traceback")
    if traceback:
        text = re.split(r"^-{10,}$", after, flags=re.MULTILINE)[0]
    lines = text.strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1] if traceback else lines[0]}"


def imported(library: str, choice: str, extra: str) -> Any:
    """Import the library of the launcher `choice`, which fedsim's `extra` installs.

    Raises `ConfigError` if it is not installed.
    """
    try:
        return importlib.import_module(library)
    except ImportError as error:
        remedy = f"pip install 'fedsim-selection[{extra}]', or hydra/launcher=lanes"
        problem = Problem("hydra/launcher", choice, "is not installed", remedy)
        raise ConfigError([problem]) from error


def latest_record(folder: Path) -> dict[str, Any]:
    """Return the latest record of a run in another process; empty if there is none."""
    with suppress(OSError, DamagedError, IndexError), open_regular(folder / METRICS) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - TAIL_BYTES))
        # Every record ends with a line break. What follows the last one is empty, or a record that
        # is being written.
        line = file.read(TAIL_BYTES).split(b"\n")[-2]
        record: dict[str, Any] = parse_json(line, METRICS)
        if has_kinds(record, RECORD_KINDS) and {"round", "test_accuracy"} <= record.keys():
            return record
    return {}
