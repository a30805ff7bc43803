"""Runs the jobs of a command in this process: one after another, or in lanes.

A job is a run of the command, described by a plan. Lanes are runs that train together in common
batches (`fedsim.running.lanes`). `fedsim.jobs.cli`, `fedsim search` and the tasks of other
processes create an `Attempts`, which keeps the outcome of each job. A job is held if another
process is running it. The command waits for held jobs after the others have ended.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim.config.plan import Plan
from fedsim.core.errors import ConfigError, DataError, FedsimError
from fedsim.core.parameters import Count, parameters
from fedsim.core.record import Record
from fedsim.jobs.narration import Narration
from fedsim.jobs.overwriting import Overwriting
from fedsim.jobs.progress import Progress
from fedsim.results.files import HeldError, is_free
from fedsim.running.outcome import Outcome, Watch, outcome_on_file
from fedsim.running.process import STOP
from fedsim.tracking.console import lanes_progress, time_left
from fedsim.tracking.tables import print_if_slow, print_line

if TYPE_CHECKING:
    from fedsim.running.lanes import Lane

POLL_SECONDS = 1.0
"""Time between two looks at the locks of jobs that other processes are running."""
MAX_NAMED = 5
"""A message names at most this many jobs one by one."""
STATUSES_OF_ERRORS = {ConfigError.exit_code: "config", DataError.exit_code: "data"}
"""Statuses of jobs that an error kept from running rounds, by the exit code of this error."""
SHARED = ("dataset", "model", "optimizer", "local", "engine", "device", "data_dir", "cache_dir")
"""Runs can be in one group of lanes if they agree in these keys of the config."""

OnRound = Callable[[Plan, Record], str | None]
"""A function that is called after every round of every job.

It returns why the job is to stop there, or None.
"""


def plans_to_run(plans: Iterable[Plan]) -> list[Plan]:
    """Return the plans of runs that have not ended for good, or are to be overwritten."""
    return [plan for plan in plans if plan.settings.overwrite or not outcome_on_file(plan).final]


@dataclass(eq=False)
class Attempts:
    """The attempts to run the jobs of a command, and how they ended.

    A job may be attempted twice: first it is held, and after the other process has ended it is run.
    `progress`, `screen` (None: no progress is printed) and `on_round` learn of all jobs.

    - `ended`: the outcomes of jobs that were attempted and are not held, by folder.
    - `held`: the plans of jobs that another process is running, by folder.
    - `_data_errors`: the errors of data sets, by `data_key`. Later jobs with the same data fail at
      once.
    """

    progress: Progress = field(default_factory=Progress)
    screen: Narration | None = None
    on_round: OnRound | None = None
    overwriting: Overwriting = field(default_factory=Overwriting)
    ended: dict[Path, Outcome] = field(default_factory=dict, init=False)
    held: dict[Path, Plan] = field(default_factory=dict, init=False)
    _data_errors: dict[str, DataError] = field(default_factory=dict, init=False)

    @property
    def errors(self) -> list[FedsimError]:
        """The `FedsimError`s that kept jobs from running rounds in this attempt."""
        causes = [outcome.cause for outcome in self.ended.values()]
        return [cause for cause in causes if isinstance(cause, FedsimError)]

    def run(self, plan: Plan, lane: "Lane | None" = None) -> Outcome:
        """Run a job unless it has ended, report how it ended, and return its outcome.

        Raises KeyboardInterrupt or `Preempted` if a signal stopped it outside its rounds, and
        KeyboardInterrupt after a second Ctrl-C.
        """
        plan = self.overwriting.without_replaced(plan)
        if self.screen is not None:
            self.screen.job_begins(plan)
        outcome = replace(outcome_on_file(plan), skipped=True)
        if plan.settings.overwrite or not outcome.final:
            outcome = self._execute(plan, lane)
        self.job_ended(plan, outcome)
        return outcome

    def _execute(self, plan: Plan, lane: "Lane | None") -> Outcome:
        """Run a job, and return its outcome even if an error kept it from running rounds."""
        # These modules import PyTorch, which takes time.
        from fedsim.running.assembly import data_key, is_prepared
        from fedsim.running.experiment import execute

        if self._data_errors and data_key(plan) in self._data_errors:
            return _outcome_of(self._data_errors[data_key(plan)])
        try:
            outcome = execute(plan, lane, _JobWatch(plan, self))
        except HeldError:
            return Outcome("held", {})
        except FedsimError as error:
            # Data that are prepared were read: the error is about how the job divides them.
            if isinstance(error, DataError) and not is_prepared(plan):
                self._data_errors[data_key(plan)] = error
            return _outcome_of(error)
        return replace(outcome, cause=None)  # the error's traceback would keep the run's data

    def job_ended(self, plan: Plan, outcome: Outcome) -> None:
        """Record and print the outcome of a job that this process or a task has attempted.

        A job with the status `held` has not ended: another process is running it.
        """
        self.progress.job_ended(plan.folder)
        if outcome.status == "held":
            self.held[plan.folder] = plan
            return
        self.ended[plan.folder] = outcome
        if self.screen is not None:
            self.screen.job_ended(plan, outcome)

    def cancel(self, plan: Plan) -> None:
        """Count a job as ended without running it, because a race has stopped its method."""
        self.progress.job_ended(plan.folder)
        self.overwriting.leave_out(plan)

    def run_in_turn(self, plans: Sequence[Plan]) -> None:
        """Run jobs one after another. After a signal, raises KeyboardInterrupt or `Preempted`."""
        for plan in plans:
            self.run(plan)
            STOP.raise_if_asked()

    def showing_progress(
        self, plans: Sequence[Plan], num_rounds: int, how: str
    ) -> AbstractContextManager[Callable[[int, int], None]]:
        """Show the progress of jobs that run at the same time, within this context.

        `how` says how they are run. Yields a function to call with two numbers: of runs left, and
        of rounds that have ended, out of `num_rounds`.
        """
        if self.screen is None:
            return nullcontext(lambda runs_left, round: None)
        folders = [plan.folder for plan in plans]
        return lanes_progress(
            len(plans),
            num_rounds,
            accuracies=lambda: self.progress.accuracies(folders),
            left=lambda: time_left(self.progress.position(folders[0])),
            how=how,
        )

    def run_held(self, run: Callable[[Sequence[Plan]], None]) -> None:
        """Wait for the jobs that other processes hold, and `run` each as soon as it is free.

        `run` resumes a job, or only reports it if the other process has finished it. A signal ends
        the wait by KeyboardInterrupt or `Preempted`.
        """
        printed: set[str] = set()
        while self.held:
            free = [plan for plan in self.held.values() if is_free(plan.folder)]
            for plan in free:
                del self.held[plan.folder]
            if free:
                run([self.overwriting.without_replaced(plan) for plan in free])
            else:
                _print_holders(self.held, printed)
                # A look at a lock takes less than a millisecond: do not look all the time.
                time.sleep(max(POLL_SECONDS, len(self.held) / 1000))


def _outcome_of(error: FedsimError) -> Outcome:
    """Return the outcome of a job that an error kept from running rounds."""
    status = STATUSES_OF_ERRORS.get(error.exit_code, "failed")
    return Outcome(status, {"error": str(error)}, cause=error)


@parameters
class Lanes:
    """The launcher `lanes` (conf/hydra/launcher/lanes.yaml).

    At most `max_lanes` runs train together.
    """

    max_lanes: Count

    def groups(self, plans: Sequence[Plan]) -> list[list[Plan]]:
        """Return groups of at most `max_lanes` plans that can train together.

        A folder that occurs twice is run once.
        """
        plans_by_folder = {plan.folder: plan for plan in plans}
        plans_by_shared: dict[str, list[Plan]] = {}
        for plan in plans_by_folder.values():
            shared = [plan.config.get(name) for name in SHARED]
            key = json.dumps(shared, sort_keys=True, default=str)
            plans_by_shared.setdefault(key, []).append(plan)
        groups = []
        for joint_plans in plans_by_shared.values():
            for start in range(0, len(joint_plans), self.max_lanes):
                groups.append(joint_plans[start : start + self.max_lanes])
        return groups

    def run(self, attempts: Attempts, plans: Sequence[Plan]) -> None:
        """Run jobs in lanes, after jobs that have ended were reported. A single job is run without
        lanes."""
        to_run = plans_to_run(plans)
        folders_to_run = {plan.folder for plan in to_run}
        attempts.run_in_turn([plan for plan in plans if plan.folder not in folders_to_run])
        if len(to_run) < 2:
            attempts.run_in_turn(to_run)
            return
        from fedsim.running.lanes import run_in_lanes  # imports PyTorch, which takes time

        for group in self.groups(to_run):
            num_rounds = max(plan.settings.num_rounds for plan in group)
            with attempts.showing_progress(group, num_rounds, "in lanes") as show:
                run_in_lanes([partial(attempts.run, plan) for plan in group], show)
            STOP.raise_if_asked()


class _JobWatch(Watch):
    """A watch that passes the rounds of a job on to `attempts`: its progress and its `on_round`."""

    def __init__(self, plan: Plan, attempts: Attempts) -> None:
        self.sweep = attempts.progress.position(plan.folder)
        self._plan = plan
        self._attempts = attempts

    def setting_up(self) -> AbstractContextManager[None]:
        """Return a context that prints what the first round waits for if that takes long."""
        if self._attempts.screen is None:
            return nullcontext()
        num_clients = self._plan.settings.num_clients
        return print_if_slow(f"setting up {num_clients:,} clients: their data, and the model")

    def round_ended(self, record: Record) -> str | None:
        """Count the round, and return the answer of `on_round`: why the job is to stop, or None."""
        rounds_left = self._plan.settings.num_rounds - record.round
        progress = self._attempts.progress
        progress.round_ended(self._plan.folder, rounds_left, record.test_accuracy)
        on_round = self._attempts.on_round
        return None if on_round is None else on_round(self._plan, record)


def _print_holders(held: dict[Path, Plan], printed: set[str]) -> None:
    """Print which processes hold which jobs. `printed` has the texts that were printed before.

    The text of a `HeldError` names the folder and the process that holds it.
    """
    new_texts = sorted({str(HeldError(folder)) for folder in held} - printed)
    printed.update(new_texts)
    for text in new_texts[:MAX_NAMED]:
        print_line(f"waiting for {text}")
    num_more = len(new_texts) - MAX_NAMED
    if num_more > 0:
        jobs = "1 more job" if num_more == 1 else f"{num_more} more jobs"
        print_line(f"and for {jobs} that other processes are running")
