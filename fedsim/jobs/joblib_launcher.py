"""The jobs of a sweep in processes of this machine, which take one after another: joblib's pool, loky.

A process that is killed takes the others with it: their jobs are lost, too, and those that wait are run in new ones.
"""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import joblib  # type: ignore[import-untyped]
from joblib.externals.loky import get_reusable_executor  # type: ignore[import-untyped]

from fedsim.config.plan import Plan
from fedsim.core.errors import Problem, rule
from fedsim.jobs.task_worker import Job, run_task, this_place
from fedsim.jobs.tasks import LostTaskError, TaskLauncher
from fedsim.running.outcome import Outcome

POLL_SECONDS = 0.5
"""Between two looks at the tasks and at the records of their jobs."""
IDLE_SECONDS = 15
"""After which a process without a job ends, also where the command was killed."""


@dataclass(kw_only=True)
class JoblibJobs(TaskLauncher):
    """The launcher `joblib` (conf/hydra/launcher/joblib.yaml). `n_jobs`: processes; -1: as many as there are cores."""

    n_jobs: int

    how = "in processes of joblib"

    def problems(self) -> Sequence[Problem | None]:
        return [rule(self.n_jobs != 0, "n_jobs", self.n_jobs, "must not be 0", "-1: as many as there are cores")]

    @property
    def tasks_at_a_time(self) -> int:
        return int(joblib.effective_n_jobs(self.n_jobs))

    @contextmanager
    def connected(self, place: Path) -> Iterator[None]:
        self._asked = False
        try:
            yield
        finally:
            self._pool().shutdown(kill_workers=True)

    def _pool(self) -> Any:
        """The pool of processes; another one where one of them was killed."""
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, joblib.cpu_count() // self.tasks_at_a_time))
        variables = {"OMP_NUM_THREADS": threads, "PYTHONSAFEPATH": "1"}  # nothing is imported from the working folder
        return get_reusable_executor(max_workers=self.tasks_at_a_time, timeout=IDLE_SECONDS, env=variables)

    def begin(self, groups: Sequence[Sequence[Job]]) -> Sequence[Any]:
        pool, place = self._pool(), this_place({})
        return [pool.submit(run_task, place, jobs) for jobs in groups]

    def ended(self, running: Mapping["Future[Any]", Sequence[Plan]]) -> Sequence[Any]:
        return list(wait(running, POLL_SECONDS, FIRST_COMPLETED).done)

    def outcomes(self, task: "Future[Any]") -> Sequence[Outcome]:
        try:
            found: Sequence[Outcome] = task.result()
        except Exception as error:
            text = f"its process has failed ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
            raise LostTaskError(text) from None
        return found

    def ask_to_end(self, running: Sequence[Any]) -> None:
        if not self._asked:
            for pid in list(self._pool()._processes or ()):
                with suppress(OSError):
                    os.kill(pid, signal.SIGTERM)
        self._asked = True
