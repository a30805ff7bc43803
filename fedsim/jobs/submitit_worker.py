"""What a task of submitit runs, and how it is requeued: saved, and started again with the same jobs.

submitit announces the end of a task, by a time limit or a preemption, by the signal `JobEnvironment.USR_SIG` (USR2).
Its own handler would requeue the task in mid-round. Here the round is finished and saved first.

submitit's pickles name this module, which is imported before NumPy and torch are.
"""

import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from fedsim.jobs.task_worker import Job, Place, Report, enter, run_jobs
from fedsim.running.process import STOP


class SubmittedTask:
    """Jobs that run in one process, side by side if there are several. It is pickled by submitit.

    Asked to end by the signal that announces a time limit or a preemption, it finishes and saves the round, and is
    requeued; the jobs go on from their checkpoints. By any other signal it is saved and not requeued, with one
    exception: Slurm sends SIGTERM, too, when it requeues a task itself, and before the announcement of a preemption.
    There the jobs work on until the announcement, or until they are killed.
    """

    def __init__(self, place: Place, jobs: Sequence[Job]) -> None:
        self.place, self.jobs = place, list(jobs)

    def __call__(self) -> list[Report]:
        announcement = Announcement()
        enter(self.place)
        reports = run_jobs(self.jobs)
        if announcement.alone and any(report["status"] == "preempted" for report in reports):
            announcement.requeue()
        return reports

    def checkpoint(self) -> Any:
        """What submitit calls to learn what is to be run after the requeue: the same."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class Announcement:
    """The signal that announces the end of this task, taken from submitit's handler until the round is saved."""

    def __init__(self) -> None:
        from submitit import JobEnvironment

        environment = JobEnvironment()
        self._times = 0
        self._number: int = getattr(signal, f"SIG{environment.USR_SIG}")
        self._requeue: Any = signal.getsignal(self._number)
        on_sigterm = signal.getsignal(signal.SIGTERM)
        STOP.defer_always()
        signal.signal(self._number, self._come)
        if environment.cluster == "slurm":
            signal.signal(signal.SIGTERM, on_sigterm)  # which notes it in the log

    @property
    def alone(self) -> bool:
        """Whether it came, and nothing else has asked the task to end."""
        return 0 < self._times == STOP.signals

    def _come(self, number: int, frame: FrameType | None = None) -> None:
        self._times += 1
        STOP.handle(number, frame)

    def requeue(self) -> None:
        """Let submitit requeue this task, and end the process; return where it may not be requeued once more."""
        try:
            self._requeue(self._number, None)
        except Exception as error:  # a time limit too many, or `scontrol` failed; the log has it
            sys.stderr.write(f"fedsim: {type(error).__name__}: {error}\n")
