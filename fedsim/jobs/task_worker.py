"""Jobs in a process that other software has started: what a task of joblib, Ray or submitit runs.

`fedsim.jobs.launchers` creates a task in the process of the command. The software pickles it and
calls it in another process. That process imports this module before its environment is set. The
module therefore needs the standard library only, and plans, whose classes need NumPy and torch,
arrive as bytes.
"""

import os
import pickle
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.running.process import STOP, Preempted, tune

if TYPE_CHECKING:
    from fedsim.config.plan import Plan
    from fedsim.running.outcome import Outcome


class WorkerTask:
    """Checked jobs that run in one process, in lanes if there are several.

    They run in the folder in which the command was started. `since` is when the overwriting of jobs
    began (`fedsim.jobs.overwriting`). Results that were written later count as replaced, so that a
    task that is started again does not run them once more. `environment` has variables for the
    process. A `quiet` task prints nothing, because its output goes to the screen of the command.
    """

    def __init__(
        self,
        plans: "Sequence[Plan]",
        since: float,
        environment: Mapping[str, str],
        *,
        quiet: bool = False,
    ) -> None:
        self.work = pickle.dumps((list(plans), since))
        self.directory = str(Path.cwd())
        self.path = [entry for entry in sys.path if entry]
        self.environment = dict(environment)
        self.quiet = quiet

    def __call__(self) -> "list[Outcome]":
        """Run the jobs in a process that gets one task after another."""
        STOP.defer_always()
        return self.outcomes()

    def outcomes(self) -> "list[Outcome]":
        """Run the jobs and return how each ended; `held` means that another process is running it.

        After a stop signal, the task finishes and saves the round, and starts no other job.
        """
        os.environ.update(self.environment)
        os.chdir(self.directory)
        for entry in self.path:  # so that the user's classes are found
            if entry not in sys.path:
                sys.path.append(entry)
        tune()
        plans, since = pickle.loads(self.work)
        if not self.quiet:
            return run_jobs(plans, since)
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            return run_jobs(plans, since)


def run_jobs(plans: "Sequence[Plan]", since: float) -> "list[Outcome]":
    """Run jobs in lanes, and return how each ended, in their order."""
    from fedsim.jobs.overwriting import Overwriting
    from fedsim.jobs.sweep import Attempts, Lanes
    from fedsim.running.outcome import Outcome

    attempts = Attempts(overwriting=Overwriting(since=since))
    try:
        STOP.raise_if_asked()
        Lanes(max_lanes=len(plans)).run(attempts, plans)
    except (KeyboardInterrupt, Preempted):
        assert STOP.status is not None  # the outcomes tell the command of the signal
    held = dict.fromkeys(attempts.held, Outcome("held", {}))
    outcomes = attempts.ended | held
    not_begun = Outcome(STOP.status or "failed", {})
    return [outcomes.get(plan.folder, not_begun) for plan in plans]


class SubmittedTask(WorkerTask):
    """A task of submitit. Before a time limit or a preemption ends it, it is saved and requeued.

    The signal `JobEnvironment.USR_SIG` (USR2) announces such an end. submitit's own handler would
    requeue the task at once, in the middle of a round. This class finishes and saves the round
    first, and then calls that handler; the requeued jobs resume from their checkpoints.

    After any other signal, the task is saved and not requeued. The exception is SIGTERM on Slurm.
    Slurm sends it also when it requeues a task itself, and before it announces a preemption. Then
    the jobs run on until the announcement, or until they are killed.
    """

    def __call__(self) -> "list[Outcome]":
        """Run the jobs, and requeue them if they were preempted."""
        from submitit import JobEnvironment

        environment = JobEnvironment()
        number = getattr(signal, f"SIG{environment.USR_SIG}")
        requeue: Any = signal.getsignal(number)  # submitit's handler
        on_sigterm = signal.getsignal(signal.SIGTERM)
        STOP.defer_always()
        if environment.cluster == "slurm":
            signal.signal(signal.SIGTERM, on_sigterm)  # submitit's handler, which only logs it
        outcomes = self.outcomes()
        is_preempted = any(outcome.status == "preempted" for outcome in outcomes)
        if set(STOP.received) == {number} and is_preempted:
            try:
                requeue(number, None)  # ends the process if the task may be requeued
            except Exception as error:  # a time limit too many, or `scontrol` failed
                sys.stderr.write(f"fedsim: {type(error).__name__}: {error}\n")
        return outcomes

    def checkpoint(self) -> Any:
        """Return what is to run after the requeue: the same. submitit calls this method."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)
