"""How runs end, as it is returned and as it is on file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.config.plan import Plan
from fedsim.running.checkpoint import is_whole_model
from fedsim.running.results import FINAL
from fedsim.tracking.files import METRICS, MODEL, read_summary, replacement_of


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `done`, `diverged`, `failed`, `interrupted`, `preempted`; `skipped` if an earlier run did so.

    `cause`: the exception that has ended it, in this process.
    """

    status: str
    summary: Mapping[str, Any]
    skipped: bool = False
    cause: BaseException | None = None

    @property
    def final(self) -> bool:
        """The same command does not run it again."""
        return self.status in FINAL


def outcome_on_file(plan: Plan) -> Outcome:
    """What the run's folder says of it; `failed` where there is no summary."""
    return outcome_in(plan.folder)


def worked_in(plan: Plan) -> Path:
    """Where a run that has not ended leaves its files: in its folder, or beside a finished result that it is to
    replace."""
    beside = plan.settings.overwrite and outcome_on_file(plan).final
    return replacement_of(plan.folder) if beside else plan.folder


def outcome_in(folder: Path) -> Outcome:
    """What `folder` says of the run in it; `failed` where there is no summary, or one of an end whose files are not
    whole, which are then named in `error`."""
    summary = read_summary(folder)
    if summary is None:
        return Outcome("failed", {})
    if summary["status"] in FINAL and (lost := _lost(folder, summary)):
        return Outcome("failed", {**summary, "error": lost})
    return Outcome(summary["status"], summary)


def _lost(folder: Path, summary: Mapping[str, Any]) -> str | None:
    """What is missing of the files of a run that has an end, or None."""
    try:
        lines = (folder / METRICS).read_bytes().count(b"\n")
    except FileNotFoundError:
        lines = 0
    if lines != summary.get("rounds"):
        return f"{METRICS} has {lines} of {summary.get('rounds')} rounds"
    return None if is_whole_model(folder / MODEL) else f"{MODEL} is missing or cut short"
