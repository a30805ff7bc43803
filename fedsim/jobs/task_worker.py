"""Jobs in a process that other software has started: what a task of joblib, Ray or submitit runs.

This module is imported in the task's process before its environment is set: it needs the standard
library alone, and the plans of the jobs come as bytes, whose classes need NumPy and torch.
"""

import os
import pickle
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.running.process import STOP, Preempted, tune

if TYPE_CHECKING:
    from fedsim.config.plan import Plan
    from fedsim.running.outcome import Outcome


class WorkerTask:
    """Checked jobs that run in one process, side by side if there are several, from where the
    command was started.

    `since`: when their overwriting began (`fedsim.jobs.overwriting`): a task that is started again
    has replaced what was written later. `environment`: variables that it is given. `quiet`: nothing
    is printed on the screen that it shares with others, whose lines would mix.
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
        self.directory, self.path = str(Path.cwd()), [entry for entry in sys.path if entry]
        self.environment, self.quiet = dict(environment), quiet

    def __call__(self) -> "list[Outcome]":
        """Run them in a process that is given one task after another, all from the same place."""
        STOP.defer_always()
        return self.outcomes()

    def outcomes(self) -> "list[Outcome]":
        """How each job ended; `held` if another process has it.

        Asked to end, it finishes and saves the round, begins no other job, and returns that.
        """
        os.environ.update(self.environment)
        os.chdir(self.directory)
        sys.path.extend(entry for entry in self.path if entry not in sys.path)
        tune()
        with (
            Path(os.devnull).open("w") if self.quiet else nullcontext(sys.stdout) as screen,
            redirect_stdout(screen),
        ):
            return run_jobs(*pickle.loads(self.work))


def run_jobs(plans: "Sequence[Plan]", since: float) -> "list[Outcome]":
    from fedsim.jobs.overwriting import Overwriting
    from fedsim.jobs.sweep import Attempts, Lanes
    from fedsim.running.outcome import Outcome

    attempts = Attempts(overwriting=Overwriting(since=since))
    try:
        STOP.raise_if_asked()
        Lanes(max_lanes=len(plans)).run(attempts, plans)
    except (KeyboardInterrupt, Preempted):
        assert STOP.status is not None
    held = dict.fromkeys(attempts.held, Outcome("held", {}))
    not_begun = Outcome(STOP.status or "failed", {})
    return [{**attempts.ended, **held}.get(plan.folder, not_begun) for plan in plans]


class SubmittedTask(WorkerTask):
    """A task of submitit, which announces its end, by a time limit or a preemption, by the signal
    `JobEnvironment.USR_SIG` (USR2).

    submitit's own handler would requeue it in mid-round; here the round is finished and saved
    first, and the jobs go on from their checkpoints. By any other signal the task is saved and not
    requeued, with one exception: Slurm sends SIGTERM, too, when it requeues a task itself, and
    before the announcement of a preemption. There the jobs work on until the announcement, or until
    they are killed.
    """

    def __call__(self) -> "list[Outcome]":
        from submitit import JobEnvironment

        environment = JobEnvironment()
        number = getattr(signal, f"SIG{environment.USR_SIG}")
        requeue: Any = signal.getsignal(number)
        on_sigterm = signal.getsignal(signal.SIGTERM)
        STOP.defer_always()
        if environment.cluster == "slurm":
            signal.signal(signal.SIGTERM, on_sigterm)  # which notes it in the log
        outcomes = self.outcomes()
        if set(STOP.received) == {number} and any(
            outcome.status == "preempted" for outcome in outcomes
        ):
            try:
                requeue(
                    number, None
                )  # ends the process, unless the task may not be requeued once more
            except (
                Exception
            ) as error:  # a time limit too many, or `scontrol` failed; the log has it
                sys.stderr.write(f"fedsim: {type(error).__name__}: {error}\n")
        return outcomes

    def checkpoint(self) -> Any:
        """What submitit calls to learn what is to be run after the requeue: the same."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)
