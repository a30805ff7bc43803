"""The outcome of a run: how it ended, as `execute` returns it and as the run's folder records it.

A plan (`fedsim.config.plan.Plan`) is the checked description of one run. A run has ended for good
(it is `final`) if its status is done, reached or diverged: the same command does not run it again.
To claim a run means to lock its folder, so that no other process runs it at the same time
(`claimed`).

`fedsim.running.experiment` makes outcomes. `fedsim.jobs` and the commands read them from folders
(`outcome_on_file`) to skip runs that have ended. This module therefore needs no PyTorch.

In it, `folder` is a run's own folder, and `place` the folder that holds the files in question: the
run's own, or with `overwrite=true` perhaps that of its replacement (`worked_in`).
"""

import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.config.plan import Plan
from fedsim.config.user_code import changed_since, user_code
from fedsim.config.user_modules import is_user_module
from fedsim.core.errors import FedsimError
from fedsim.core.record import Record
from fedsim.results import files
from fedsim.results.files import OutputError, RunFolder
from fedsim.results.reading import FINAL, read_summary
from fedsim.results.wholeness import fault_of
from fedsim.running.exits import warn
from fedsim.tracking.base import SweepPosition

BEFORE_ROUND_1 = "before round 1"
"""The `when` of errors that come before the first round (`ended_by`)."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    `status` is one of these:
    - `done`, `reached` (the accuracy `stop_at`), `diverged`: the run has ended for good.
    - `failed`: an error ended it, or its files are missing or damaged.
    - `interrupted`: Ctrl-C or a `Watch` stopped it. `preempted`: a signal of a cluster stopped it.
    - `data`, `config`: `fedsim.jobs` uses these for errors of that kind before the first round.
    - `held`: another process is running it (`fedsim.jobs` only).
    - `changed`: it has ended for good, but the user's code has changed since
      (`outcome_in` only).

    `summary` is the content of summary.json, or only its key `error`, or empty without a summary.
    `skipped` is true if the run had ended before, and nothing was run. `cause` is the exception
    that ended the run in this process. `fedsim.jobs` keeps it only for errors before the first
    round.
    """

    status: str
    summary: Mapping[str, Any]
    skipped: bool = False
    cause: BaseException | None = None

    @property
    def final(self) -> bool:
        """True if the run has ended for good: the same command does not run it again."""
        return self.status in FINAL


class Watch:
    """A base class for objects that observe a run, such as the progress of a sweep.

    `execute` calls `setting_up` once and then `round_ended` after every round. The methods of this
    class do nothing. `sweep` is the position of the run in its sweep, None outside of a sweep.
    """

    sweep: SweepPosition | None = None

    def setting_up(self) -> AbstractContextManager[None]:
        """Return a context in which everything is built that the run needs before round 1."""
        return nullcontext()

    def round_ended(self, record: Record) -> str | None:
        """Return why the run is to stop after this round, which is in its files, or None."""
        return None


def outcome_on_file(plan: Plan) -> Outcome:
    """Return the outcome that the folder of a planned run records (`outcome_in`).

    The commands and `fedsim.jobs` call this, which have the plans of many runs.
    """
    return outcome_in(plan.folder, plan.config, overwrite=plan.settings.overwrite)


def outcome_in(place: Path, config: Mapping[str, Any], *, overwrite: bool) -> Outcome:
    """Return the outcome that the folder `place` records of the run with this config.

    - Without a summary it is `failed`, with an empty summary.
    - If the run has ended for good but a file is missing or damaged, it is `failed`, and `error`
      names the file.
    - If the user's code has changed since, it is `changed`. With `overwrite` the result is replaced
      anyway, so that its code does not matter.
    - Otherwise it has the status of the summary.
    """
    summary = read_summary(place)
    if summary is None:
        return Outcome("failed", {})
    if summary["status"] not in FINAL:
        return Outcome(summary["status"], summary)
    fault = fault_of(place, config, summary)
    if fault:
        return Outcome("failed", {**summary, "error": fault})
    modules = "" if overwrite else changed_since(summary, config)
    if modules:
        error = f"the code of {modules} has changed since it was run"
        return Outcome("changed", {**summary, "error": error})
    return Outcome(summary["status"], summary)


def worked_in(folder: Path, recorded: Outcome, *, overwrite: bool) -> Path:
    """Return the folder in which a run writes its files until it has ended for good.

    It is the run's own `folder`, which records the outcome `recorded`. If this outcome is a
    finished result that is to be overwritten, it is the folder of the replacement, so that the old
    result stays until the new one is complete.
    """
    return files.replacement_of(folder) if overwrite and recorded.final else folder


@contextmanager
def claimed(
    folder: Path, config: Mapping[str, Any], *, overwrite: bool
) -> Iterator[Outcome | Path]:
    """Claim the run with this config: hold the lock of its `folder` within this context.

    Yields one of two things:
    - the outcome, if another process has ended the run since the caller looked;
    - otherwise the folder in which to run it (`worked_in`). If this is the folder of a replacement
      and the run ends there for good, it then takes the place of the earlier result.

    Raises `HeldError` if another process holds the lock.
    """
    with files.owned(folder):
        # 1. A replacement that was complete when its process was killed counts as this run.
        replacement = files.replacement_of(folder)
        if outcome_in(replacement, config, overwrite=overwrite).final:
            files.replace_folder(folder)
            yield outcome_in(folder, config, overwrite=overwrite)
            return
        # 2. A result of other code of the user's makes way, perhaps for one of the present code.
        recorded = outcome_in(folder, config, overwrite=overwrite)
        if recorded.status == "changed":
            _set_aside(folder, config, recorded)
            recorded = outcome_in(folder, config, overwrite=overwrite)
        if recorded.final and not overwrite:
            yield recorded
            return
        # 3. The caller runs it.
        place = worked_in(folder, recorded, overwrite=overwrite)
        yield place
        if place != folder and outcome_in(place, config, overwrite=overwrite).final:
            files.replace_folder(folder)


def _set_aside(folder: Path, config: Mapping[str, Any], recorded: Outcome) -> None:
    """Move the result `recorded`, made by other code of the user's, out of the way.

    The caller holds the lock of the folder.
    """
    earlier_digits = files.code_digits(recorded.summary)
    digits = files.code_digits({"code": user_code(config)})
    aside = files.set_aside(folder, earlier_digits, digits)
    warn(f"fedsim: {folder}: {recorded.summary['error']}; that result is kept in {aside.name}\n")


def ended_by(error: BaseException, config: Mapping[str, Any], place: Path, when: str) -> Outcome:
    """Return the outcome of a run in the folder `place` that raised `error`.

    `when` names the round, or is `BEFORE_ROUND_1`. A `FedsimError` explains itself. The traceback
    of any other error is written into the folder, or printed if it cannot be written.
    """
    if isinstance(error, KeyboardInterrupt):
        return Outcome("interrupted", {"error": "Ctrl-C"}, cause=error)
    if isinstance(error, OutputError):  # the summary, which names the error, may be lost, too
        warn(f"fedsim: {error}\n")
    if isinstance(error, FedsimError):
        return Outcome("failed", {"error": str(error)}, cause=error)
    text = "".join(traceback.format_exception(error))
    reason = f"{type(error).__name__}: {error} ({when}{_location_of(error)})"
    try:
        RunFolder(place).write_error(config, text)
    except OutputError as output_error:
        warn(f"{text}fedsim: {output_error}\n")
    if when == BEFORE_ROUND_1:  # trackers, which print later errors, may not have started
        warn(f"fedsim: {place} failed: {reason}\n")
    return Outcome("failed", {"error": reason}, cause=error)


def _location_of(error: BaseException) -> str:
    """Return the file, line and function that raised `error`, after a comma; empty if unknown.

    It is the innermost call in the user's own code, or in any code if the user's has no part in it.
    """
    calls = list(traceback.walk_tb(error.__traceback__))
    user_calls = []
    for frame, line in calls:
        module = str(frame.f_globals.get("__name__", "builtins"))
        if module == "__main__" or is_user_module(module):
            user_calls.append((frame, line))
    calls = user_calls or calls
    if not calls:
        return ""
    frame, line = calls[-1]
    code = frame.f_code
    return f", {Path(code.co_filename).name}, line {line}, in {code.co_name}"
