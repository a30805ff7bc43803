"""The jobs of a sweep as tasks of software that runs them in other processes.

A task runs one job, or several side by side (`fedsim.jobs.task_worker`), in the folders that they
have here, which must be on a file system that all machines see.
"""

import importlib
import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from fedsim.config.plan import Plan
from fedsim.core.disk import open_regular
from fedsim.core.errors import ConfigError, Problem, check, rule
from fedsim.core.parameters import Count, parameters
from fedsim.jobs.sweep import Attempts, Lanes, to_come
from fedsim.results.reading import METRICS, OF_RECORD, DamagedError, has_kinds, parse_json
from fedsim.running.outcome import Outcome, outcome_on_file
from fedsim.running.process import STOP
from fedsim.tracking.tables import print_line

TAIL = 2**18
"""Bytes at the end of a job's records in which the latest one is looked for."""


@parameters
class TaskLauncher(ABC):
    """A launcher that runs jobs as tasks. `jobs_per_task`: jobs that train together in a task."""

    jobs_per_task: Count

    how: ClassVar[str]
    """How the jobs are run, in words for the terminal."""
    ask_seconds: ClassVar[float] = math.inf
    """Between two times that tasks are asked to end."""

    @property
    def tasks_at_a_time(self) -> int | None:
        """None for all."""
        return None

    @property
    def gpus(self) -> tuple[str, float] | None:
        """The parameter that gives each task its GPUs, and how many; None where it has those of
        this machine."""
        return None

    @abstractmethod
    @contextmanager
    def connected(self, place: Path) -> Iterator[None]:
        """Within it, tasks can be started. `place`: the folder of the runs' folders."""
        yield

    @abstractmethod
    def begin(self, groups: Sequence[Sequence[Plan]], since: float) -> Sequence[Any]:
        """Start a task for each group of jobs; they are known by what is returned. `since`: as for
        `Overwriting`."""

    @abstractmethod
    def ended(self, running: Mapping[Any, Sequence[Plan]]) -> Sequence[Any]:
        """Those that have ended; returns after some seconds at the latest, whether there are any or
        not."""

    @abstractmethod
    def outcomes(self, task: Any) -> Sequence[Outcome]:
        """How the jobs of a task that has ended did. Raises what says why that is not known."""

    @abstractmethod
    def ask_to_end(self, running: Sequence[Any]) -> None:
        """Let tasks finish and save their rounds, and those not begun that have not."""

    def run(self, attempts: Attempts, plans: Sequence[Plan]) -> None:
        """Run jobs as tasks, and record in `attempts` how they ended. Raises `ConfigError` before
        any is run.

        Asked to end by a signal, it asks all tasks to end and waits until they are saved, then
        raises KeyboardInterrupt or `Preempted`; a second Ctrl-C does not wait. A folder that comes
        twice is run once.
        """
        plans = list({plan.folder: attempts.overwriting.as_found(plan) for plan in plans}.values())
        left = to_come(plans)
        attempts.run_in_turn(
            [plan for plan in plans if plan not in left]
        )  # which returns what is on file
        if not left:
            return
        if self.gpus is not None:
            check(*dict.fromkeys(gpu_problem(*self.gpus, plan.settings.device) for plan in left))
        with STOP.deferred(), self.connected(left[0].folder.parent):
            _Sweep(self, attempts, left).run()
        STOP.raise_if_asked()


class _Sweep:
    """Jobs that wait, in groups for a task each, those that run, by task, and the rounds of each
    that were seen."""

    def __init__(self, launcher: TaskLauncher, attempts: Attempts, plans: Sequence[Plan]) -> None:
        self.launcher, self.attempts, self.plans = launcher, attempts, plans
        self.waiting = Lanes(max_lanes=launcher.jobs_per_task).groups(plans)
        self.running: dict[Any, list[Plan]] = {}
        self.rounds = {plan.folder: 0 for plan in plans}
        ended = [
            plan
            for plan in plans
            if plan.settings.overwrite or outcome_on_file(plan).status == "changed"
        ]
        self.unseen = {plan.folder for plan in ended}  # their records are those of an earlier run
        self._asked_at = -math.inf

    def run(self) -> None:
        """Until all have ended; those that wait when a signal comes are not begun. A second Ctrl-C
        waits for none."""
        total = sum(plan.settings.num_rounds for plan in self.plans)
        try:
            with self.attempts.shown(self.plans, total, self.launcher.how) as show:
                while self.running or (self.waiting and STOP.status is None):
                    self._begin()
                    ready = self.launcher.ended(self.running) if self.running else []
                    self._look()
                    for task in ready:
                        self._end(task, self.running.pop(task))
                    show(
                        sum(map(len, (*self.running.values(), *self.waiting))),
                        sum(self.rounds.values()),
                    )
                    if (
                        STOP.status is not None
                        and time.monotonic() - self._asked_at >= self.launcher.ask_seconds
                    ):
                        self._asked_at = time.monotonic()
                        self.launcher.ask_to_end(list(self.running))
        except KeyboardInterrupt:
            self.launcher.ask_to_end(list(self.running))
            raise

    def _begin(self) -> None:
        free = (self.launcher.tasks_at_a_time or len(self.plans)) - len(self.running)
        if STOP.status is None and free > 0 and self.waiting:
            groups, self.waiting = self.waiting[:free], self.waiting[free:]
            self.running |= zip(
                self.launcher.begin(groups, self.attempts.overwriting.since), groups, strict=True
            )

    def _look(self) -> None:
        """Count the rounds that are in the records of the jobs that run."""
        for plan in (
            plan
            for group in self.running.values()
            for plan in group
            if plan.folder not in self.unseen
        ):
            record = latest_record(plan.folder)
            for number in range(
                self.rounds[plan.folder] + 1,
                min(record.get("round", 0), plan.settings.num_rounds) + 1,
            ):
                self.rounds[plan.folder] = number
                rounds_left = plan.settings.num_rounds - number
                self.attempts.progress.round_ended(
                    plan.folder, rounds_left, record["test_accuracy"]
                )

    def _end(self, task: Any, group: Sequence[Plan]) -> None:
        try:
            outcomes = self.launcher.outcomes(task)
        except Exception as error:
            outcomes = [
                self._found(plan, f"its task is lost ({in_words(error)})") for plan in group
            ]
        for plan, outcome in zip(group, outcomes, strict=True):
            self.attempts.ends(plan, outcome)

    def _found(self, plan: Plan, error: str) -> Outcome:
        """How a job ended whose task is lost: the folder tells what was done before."""
        if self.attempts.overwriting.has_ended(plan):
            return outcome_on_file(plan)
        if STOP.status is None:
            print_line(f"{plan.folder}: {error}; the same command goes on with it")
        return Outcome(STOP.status or "failed", {"error": error})


def gpu_problem(key: str, num_gpus: float, device: str) -> Problem | None:
    """None if a task with so many GPUs, the parameter `key` of its launcher, can run a job on
    `device`."""
    if device == "auto" and num_gpus > 0:  # `make_plan` has made cuda of it where there is a GPU
        remedy = f"where only other machines have one, set device=cuda; without any, {key}=0"
        return Problem(key, num_gpus, "needs a GPU that torch can see here", remedy)
    if device.startswith("cuda") and not num_gpus:
        text = f"must be > 0 for device={device}: GPUs are hidden from other tasks"
        return Problem(key, num_gpus, text, "set it to 1, say, or use device=cpu")
    return rule(
        not device.startswith("cuda:"),
        "device",
        device,
        "is the launcher's choice",
        "use device=cuda",
    )


def in_words(error: BaseException) -> str:
    """What an error says in a line: the last one of a traceback in it, up to a line of dashes, else
    the first."""
    before, trace, behind = str(error).partition("Traceback")
    lines = re.split(r"^-{10,}$", behind if trace else before, flags=re.MULTILINE)[
        0
    ].strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1 if trace else 0]}"


def imported(library: str, choice: str, extra: str) -> Any:
    """The library of the launcher `choice`. Raises `ConfigError` where it is not installed."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        remedy = f"pip install 'fedsim-selection[{extra}]', or hydra/launcher=lanes"
        raise ConfigError(
            [Problem("hydra/launcher", choice, "is not installed", remedy)]
        ) from error


def latest_record(folder: Path) -> dict[str, Any]:
    """The record of the latest round of a run in another process; empty before the first."""
    with suppress(OSError, DamagedError, IndexError), open_regular(folder / METRICS) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
        line = file.read(TAIL).split(b"\n")[-2]  # the last one is not written to its end
        record: dict[str, Any] = parse_json(line, METRICS)
        return (
            record
            if has_kinds(record, OF_RECORD) and {"round", "test_accuracy"} <= record.keys()
            else {}
        )
    return {}
