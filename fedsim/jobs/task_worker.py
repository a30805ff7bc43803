"""Jobs in a process that a cluster's software has started: what a task of Ray or of submitit runs.

A task is plain data. This module is imported in the task's process before its environment is set: it needs the standard
library alone.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict


class Place(TypedDict):
    """Where the command was started: its working directory, module search path and variables of the environment."""

    directory: str
    path: list[str]
    environment: dict[str, str]


class Job(TypedDict):
    """A checked job: the config of its plan, the choices in its groups, and the folder that it had there.

    `replaces`: which result there is in that folder, None if there is none. With `overwrite=true` another one is taken:
    a task that is started again has replaced it already.
    """

    config: Mapping[str, Any]
    choices: Mapping[str, str]
    folder: str
    replaces: str | None


class Report(TypedDict):
    """How a job ended in another process. `error`: why it did before round 1, None if it began; `refused`: whether that
    is an error of the user's config or data."""

    folder: str
    status: str
    skipped: bool
    error: str | None
    refused: bool


def this_place(environment: Mapping[str, str]) -> Place:
    """Where this process runs; `environment`: the variables that tasks are given."""
    return Place(directory=str(Path.cwd()), path=[entry for entry in sys.path if entry], environment=dict(environment))


def enter(place: Place) -> None:
    """Go to `place`. To be called before NumPy and torch are imported."""
    os.environ.update(place["environment"])
    os.chdir(place["directory"])
    sys.path.extend(entry for entry in place["path"] if entry not in sys.path)
    from fedsim.running.process import tune

    tune()


def run_jobs(jobs: Sequence[Job]) -> list[Report]:
    """Run `jobs`, side by side if there are several, and report each.

    Asked to end, it finishes and saves the round, begins no other job, and reports that.
    """
    from fedsim.jobs.sweep import Attempts
    from fedsim.running.interleaving import Lanes
    from fedsim.running.process import STOP, Preempted

    plans = [_plan_of(job) for job in jobs]
    attempts = Attempts()
    attempts.progress.estimates = False
    try:
        if len(plans) == 1:
            attempts.run_in_turn(plans)
        else:
            attempts.run_in_lanes(Lanes(max_lanes=len(plans)), plans)
    except (KeyboardInterrupt, Preempted):
        assert STOP.status is not None
    return [report_of(attempts, plan.folder, STOP.status or "failed") for plan in plans]


def _plan_of(job: Job) -> Any:
    """The plan, checked again. Raises `RuntimeError` where this machine makes another job of it."""
    from fedsim.config.plan import make_plan
    from fedsim.config.words import plugins
    from fedsim.jobs.overwriting import result_of, taken

    plugins()
    plan = make_plan(job["config"], job["choices"])
    if str(plan.folder) != job["folder"]:
        raise RuntimeError(f"the job of {job['folder']} is that of {plan.folder} on this machine: is fedsim the same?")
    replaced = plan.settings.overwrite and result_of(plan) not in (None, job["replaces"])
    return taken(plan) if replaced else plan


def report_of(attempts: Any, folder: Path, status: str) -> Report:
    """How the job of `folder` ended among `attempts`. `status`: of a job that has not begun."""
    outcome = attempts.ended.get(folder)
    if folder in attempts.held or outcome is None:
        status = "held" if folder in attempts.held else status
        return Report(folder=str(folder), status=status, skipped=False, error=None, refused=False)
    error = outcome.summary["error"] if set(outcome.summary) == {"error"} else None
    refused = error is not None and error in map(str, attempts.refused)
    return Report(folder=str(folder), status=outcome.status, skipped=outcome.skipped, error=error, refused=refused)
