"""How a run ended: as it is returned, as its folder records it, and by which error.

This module needs no PyTorch.
"""

import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.config.plan import Plan
from fedsim.config.user_code import changed_since, user_code
from fedsim.config.user_modules import is_user_module
from fedsim.core.errors import FedsimError
from fedsim.core.record import Record
from fedsim.results import files
from fedsim.results.files import MODEL, OutputError, RunFolder
from fedsim.results.reading import (
    FINAL,
    METRICS,
    SUMMARY,
    DamagedError,
    Rounds,
    check_rounds,
    read_metrics,
    read_summary,
)
from fedsim.tracking.base import SweepPosition

BEFORE_ROUND_1 = "before round 1"


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `done`, `diverged`, `failed`, `interrupted` or `preempted`.

    Before its first round also `data` or `config` (errors), or `held` (another process has it).
    `changed` means that it has ended, but with other code of the user's. `skipped` means that an
    earlier command ran it. `cause` is the exception that ended it in this process; of the jobs of a
    command only one that came before the first round.
    """

    status: str
    summary: Mapping[str, Any]
    skipped: bool = False
    cause: BaseException | None = None

    @property
    def final(self) -> bool:
        """The same command does not run it again."""
        return self.status in FINAL


class Watch:
    """A base class for those who observe a run. It does nothing.

    `sweep` is the position of the run in its sweep.
    """

    sweep: SweepPosition | None = None

    def setting_up(self) -> AbstractContextManager[None]:
        """Return a context in which everything is built that the run needs before round 1."""
        return nullcontext()

    def round_ended(self, record: Record) -> str | None:
        """Return why the run is to stop after this round, which is in its files, or None."""
        return None


def outcome_on_file(plan: Plan) -> Outcome:
    """Return the outcome that the folder of a run records.

    It is `failed` without a summary, and if the summary is of a run that has ended but its files
    are not whole; `error` then says which. It is `changed` if the user's code has changed since,
    unless the run is to be overwritten.
    """
    return _outcome_in(plan.folder, plan)


def _outcome_in(folder: Path, plan: Plan) -> Outcome:
    summary = read_summary(folder)
    if summary is None:
        return Outcome("failed", {})
    if summary["status"] not in FINAL:
        return Outcome(summary["status"], summary)
    fault = _fault_of(folder, plan.config, summary)
    if fault:
        return Outcome("failed", {**summary, "error": fault})
    modules = "" if plan.settings.overwrite else changed_since(summary, plan.config)
    if modules:
        error = f"the code of {modules} has changed since it was run"
        return Outcome("changed", {**summary, "error": error})
    return Outcome(summary["status"], summary)


_sound: dict[Path, list[tuple[int, int, int] | None]] = {}
"""Signatures of files that were found to be whole, by their folder."""
SETTLED_SECONDS = 2.0
"""Only older files are remembered: a second change within the clock's step would not show."""


def _fault_of(folder: Path, config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Return why the files of a run that has ended are not whole; empty if they are.

    Files that have not changed since they were found to be whole are not read again.
    """
    seen = [_signature(folder / name) for name in (SUMMARY, METRICS, MODEL)]
    if _sound.get(folder) == seen:
        return ""
    try:
        records = read_metrics(folder, whole=True)
        check_rounds(Rounds.of(records), config, summary)
        if None in seen or not files.is_whole_model(folder / MODEL):
            return f"{MODEL} is missing or cut short"
    except OSError as error:
        return f"{MODEL} cannot be read ({error.strerror})"
    except DamagedError as error:
        return str(error)
    latest_change = max(signature[2] for signature in seen if signature is not None)
    if time.time() - latest_change / 1e9 > SETTLED_SECONDS:
        _sound[folder] = seen
    return ""


def _signature(path: Path) -> tuple[int, int, int] | None:
    """Return a file's inode, size and time of its last change [ns]; None if it is missing."""
    with suppress(OSError):
        stat = path.stat()
        return stat.st_ino, stat.st_size, stat.st_mtime_ns
    return None


def worked_in(plan: Plan) -> Path:
    """Return the folder in which a run leaves its files until it ends.

    It is the run's folder, or one next to a finished result that the run is to replace.
    """
    if plan.settings.overwrite and outcome_on_file(plan).final:
        return files.replacement_of(plan.folder)
    return plan.folder


@contextmanager
def claimed(plan: Plan) -> Iterator[Outcome | Path]:
    """Hold the lock of a run's folder while the run is run.

    Yields the outcome of a run that has ended in the meantime. Otherwise yields the folder in which
    to run it; after a run that ends there, the folder takes the place of the earlier result.
    """
    with files.owned(plan.folder):
        finished = _settle(plan)
        if finished is not None:
            yield finished
            return
        place = worked_in(plan)
        yield place
        if place != plan.folder and _outcome_in(place, plan).final:
            files.replace_folder(plan.folder)


def _settle(plan: Plan) -> Outcome | None:
    """Complete what a killed process left undone in a run's folder, whose lock is held.

    Moves a result of other code of the user's out of the way. Returns the outcome of a run that has
    ended, and None if it is still to be run.
    """
    if _outcome_in(files.replacement_of(plan.folder), plan).final:
        files.replace_folder(plan.folder)  # the process was killed before this last step
        return outcome_on_file(plan)
    recorded = outcome_on_file(plan)
    if recorded.status == "changed":
        code = {"code": user_code(plan.config)}
        earlier_digits = files.code_digits(recorded.summary)
        aside = files.set_aside(plan.folder, earlier_digits, files.code_digits(code))
        error = recorded.summary["error"]
        warn(f"fedsim: {plan.folder}: {error}; that result is kept in {aside.name}\n")
        recorded = outcome_on_file(plan)
    return recorded if recorded.final and not plan.settings.overwrite else None


def ended_by(error: BaseException, config: Mapping[str, Any], place: Path, when: str) -> Outcome:
    """Return the outcome of a run in the folder `place` that raised `error`.

    `when` names the round. The traceback of an error that is no `FedsimError` is written there, and
    printed if the disk is full.
    """
    if isinstance(error, KeyboardInterrupt):
        return Outcome("interrupted", {"error": "Ctrl-C"}, cause=error)
    if isinstance(error, OutputError):
        warn(f"fedsim: {error}\n")
    if isinstance(error, FedsimError):
        return Outcome("failed", {"error": str(error)}, cause=error)
    text = "".join(traceback.format_exception(error))
    reason = f"{type(error).__name__}: {error} ({when}{_line_of(error)})"
    try:
        RunFolder(place).write_error(config, text)
    except OutputError as full:
        warn(f"{text}fedsim: {full}\n")
    if when == BEFORE_ROUND_1:  # no tracker prints it
        warn(f"fedsim: {place} failed: {reason}\n")
    return Outcome("failed", {"error": reason}, cause=error)


def _line_of(error: BaseException) -> str:
    """Return the line of the user's code that raised `error`, or of other code without any."""
    lines = list(traceback.walk_tb(error.__traceback__))
    users_lines = []
    for frame, number in lines:
        module = str(frame.f_globals.get("__name__", "builtins"))
        if module == "__main__" or is_user_module(module):
            users_lines.append((frame, number))
    for frame, number in (users_lines or lines)[-1:]:
        code = frame.f_code
        return f", {Path(code.co_filename).name}, line {number}, in {code.co_name}"
    return ""


def warn(text: str) -> None:
    """Write to stderr, which may be a file on the same full disk."""
    with suppress(OSError):
        sys.stderr.write(text)
