"""The jobs of a command in processes that a launcher of Hydra starts (joblib), which report how they ended."""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from omegaconf import DictConfig

from fedsim.config.plan import Plan
from fedsim.core.errors import FedsimError
from fedsim.jobs.sweep import Attempts
from fedsim.jobs.task_worker import Report, report_of
from fedsim.jobs.tasks import environment, outcome_of
from fedsim.results.files import is_free
from fedsim.running.outcome import Outcome, outcome_on_file
from fedsim.running.process import STOP
from fedsim.tracking.tables import tell_line

NO_REPORT = "its process has ended before it was run, or while it was"


class LaunchedJob:
    """The task that Hydra's launcher runs for each job, in this process or (joblib) in others.

    Hydra composes the job's config again; what is run is the plan that was checked, of the job's number in the sweep:
    conf/ may have been edited since, which must not change the jobs of a sweep that are still to come.

    `reports`: the folder for reports of other processes, None if there is none; `tell` is told of the errors that those
    cannot report.
    """

    def __init__(self, plans: Sequence[Plan], attempts: Attempts, tell: Callable[[FedsimError], None]) -> None:
        self.plans, self.attempts, self.tell = plans, attempts, tell
        self.parent = os.getpid()
        self.reports: Path | None = None

    def __call__(self, config: DictConfig) -> str:
        from hydra.core.hydra_config import HydraConfig
        from omegaconf import OmegaConf

        job = HydraConfig.get().job
        number = 0 if OmegaConf.is_missing(job, "num") else job.num
        plan = self.plans[number]
        if os.getpid() == self.parent:
            return self.attempts.run_next(plan).status
        # Asked to end, the process saves its round and begins no other job. The exception that stops jobs in the
        # command's own process would make joblib kill the other processes at once.
        STOP.defer_always()
        if STOP.status is None:
            self.attempts.progress.estimates = False  # other processes run other jobs
            self.attempts.run(plan)
        report = report_of(self.attempts, plan.folder, STOP.status or "failed")
        refused, self.attempts.refused = self.attempts.refused, []
        try:
            if self.reports is None:
                raise FileNotFoundError
            (self.reports / f"{number}.json").write_text(json.dumps(report), encoding="utf-8")
        except OSError:
            for error in refused:
                self.tell(error)
        return report["status"]

    def ended(self, number: int) -> tuple[Outcome, FedsimError | None]:
        """How a job of another process ended, and what has refused it: by its report, or by its folder without one."""
        plan = self.attempts.overwriting.as_found(self.plans[number])
        assert self.reports is not None
        try:
            report: Report = json.loads((self.reports / f"{number}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            on_file = outcome_on_file(plan)
            if on_file.final and not plan.settings.overwrite:
                return on_file, None
            return Outcome("failed" if is_free(plan.folder) else "held", {"error": NO_REPORT}), None
        return outcome_of(plan, report, None)


def run_launched(launch: Callable[[LaunchedJob], None], job: LaunchedJob) -> None:
    """Let a launcher run all jobs, in processes of its own, and record how they ended.

    If it breaks, as joblib does when one of its processes is killed, this is told; the same command goes on.
    """
    with tempfile.TemporaryDirectory(prefix="fedsim-", ignore_cleanup_errors=True) as place:
        job.reports = Path(place)
        raised = environment({"HYDRA_FULL_ERROR": "1"})  # else Hydra prints errors and exits
        with STOP.passed_on(), raised:
            try:
                launch(job)
            except Exception as error:
                STOP.raise_if_asked()
                if os.environ.get("FEDSIM_DEBUG") == "1":
                    raise
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                goes_on = "the same command goes on with the jobs that have not ended"
                tell_line(f"the launcher has failed ({reason}); {goes_on}")
        STOP.raise_if_asked()
        for number, plan in enumerate(job.plans):
            if plan.folder not in job.attempts.ended and plan.folder not in job.attempts.held:
                job.attempts.take(plan, *job.ended(number))
