"""Jobs in a process that other software has started: what a task of joblib, Ray or submitit runs.

A task is plain data. This module is imported in the task's process before its environment is set: it needs the standard
library alone.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from fedsim.running.process import STOP, Preempted, tune

if TYPE_CHECKING:
    from fedsim.config.plan import Plan
    from fedsim.running.outcome import Outcome


class Place(TypedDict):
    """Where the command was started: its working directory, module search path and variables of the environment."""

    directory: str
    path: list[str]
    environment: dict[str, str]


class Job(TypedDict):
    """A checked job: the config of its plan, the choices in its groups, and the folder that it had there.

    `since`: when the command began. With `overwrite=true` a result that was written after that is taken: a task that is
    started again has replaced it already.
    """

    config: Mapping[str, Any]
    choices: Mapping[str, str]
    folder: str
    since: float


def this_place(environment: Mapping[str, str]) -> Place:
    """Where this process runs; `environment`: the variables that tasks are given."""
    return Place(directory=str(Path.cwd()), path=[entry for entry in sys.path if entry], environment=dict(environment))


def enter(place: Place) -> None:
    """Go to `place`. To be called before NumPy and torch are imported."""
    os.environ.update(place["environment"])
    os.chdir(place["directory"])
    sys.path.extend(entry for entry in place["path"] if entry not in sys.path)
    tune()


def run_task(place: Place, jobs: Sequence[Job]) -> "list[Outcome]":
    """`run_jobs` in a process that is given one task after another, all from the same place."""
    enter(place)
    STOP.defer_always()
    return run_jobs(jobs)


def run_jobs(jobs: Sequence[Job]) -> "list[Outcome]":
    """Run `jobs`, side by side if there are several, and return how each ended; `held` if another process has it.

    Asked to end, it finishes and saves the round, begins no other job, and returns that.
    """
    from fedsim.jobs.overwriting import Overwriting
    from fedsim.jobs.sweep import Attempts
    from fedsim.running.interleaving import Lanes
    from fedsim.running.outcome import Outcome

    plans = [_plan_of(job) for job in jobs]
    attempts = Attempts(overwriting=Overwriting(since=jobs[0]["since"]))
    try:
        STOP.raise_if_asked()
        if len(plans) == 1:
            attempts.run_in_turn(plans)
        else:
            attempts.run_in_lanes(Lanes(max_lanes=len(plans)), plans)
    except (KeyboardInterrupt, Preempted):
        assert STOP.status is not None
    held = dict.fromkeys(attempts.held, Outcome("held", {}))
    not_begun = Outcome(STOP.status or "failed", {})
    return [{**attempts.ended, **held}.get(plan.folder, not_begun) for plan in plans]


def _plan_of(job: Job) -> "Plan":
    """The plan, checked again. Raises `RuntimeError` where this machine makes another job of it."""
    from fedsim.config.plan import make_plan
    from fedsim.config.words import plugins

    plugins()
    plan = make_plan(job["config"], job["choices"])
    if str(plan.folder) != job["folder"]:
        raise RuntimeError(f"the job of {job['folder']} is that of {plan.folder} on this machine: is fedsim the same?")
    return plan


class SubmittedTask:
    """Jobs that run in one process, side by side if there are several. It is pickled by submitit.

    submitit announces the end of a task, by a time limit or a preemption, by the signal `JobEnvironment.USR_SIG`
    (USR2). Its own handler would requeue the task in mid-round; here the round is finished and saved first, and the
    jobs go on from their checkpoints. By any other signal the task is saved and not requeued, with one exception: Slurm
    sends SIGTERM, too, when it requeues a task itself, and before the announcement of a preemption. There the jobs work
    on until the announcement, or until they are killed.
    """

    def __init__(self, place: Place, jobs: Sequence[Job]) -> None:
        self.place, self.jobs = place, list(jobs)

    def __call__(self) -> "list[Outcome]":
        from submitit import JobEnvironment

        environment = JobEnvironment()
        number = getattr(signal, f"SIG{environment.USR_SIG}")
        requeue: Any = signal.getsignal(number)
        on_sigterm = signal.getsignal(signal.SIGTERM)
        STOP.defer_always()
        if environment.cluster == "slurm":
            signal.signal(signal.SIGTERM, on_sigterm)  # which notes it in the log
        enter(self.place)
        outcomes = run_jobs(self.jobs)
        if set(STOP.received) == {number} and any(outcome.status == "preempted" for outcome in outcomes):
            try:
                requeue(number, None)  # ends the process, unless the task may not be requeued once more
            except Exception as error:  # a time limit too many, or `scontrol` failed; the log has it
                sys.stderr.write(f"fedsim: {type(error).__name__}: {error}\n")
        return outcomes

    def checkpoint(self) -> Any:
        """What submitit calls to learn what is to be run after the requeue: the same."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)
