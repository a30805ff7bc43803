"""The outcome of a run: how it ended, as `execute` returns it and as the run's folder records it.

A plan (`fedsim.config.plan.Plan`) is the checked description of one run. A run has ended for good
(it is `final`) if its status is done, reached or diverged: the same command does not run it again.
To claim a run means to lock its folder, so that no other process runs it at the same time
(`claimed`).

`fedsim.running.experiment` makes outcomes. `fedsim.jobs` and the commands read them from folders
(`outcome_on_file`) to skip runs that have ended. This module therefore needs no PyTorch.

In this module, `folder` is the folder of the run's results. `place` is the folder in which the run
works: the same one, or the folder of a replacement if it overwrites a finished result
(`worked_in`).
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
"""The `when` of an error before the first round (`ended_by`)."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    `status` is one of these:
    - `done`, `reached` (the accuracy `stop_at`), `diverged`: the run has ended for good.
    - `failed`: an error ended it, or its files are missing or damaged.
    - `interrupted`: Ctrl-C or a `Watch` stopped it. `preempted`: a signal of a cluster stopped it.
    - `changed`: it has ended for good, but the user's code has changed since. Only a folder can
      record this.
    - `data`, `config`: an error of that kind kept a job from its first round. `held`: another
      process is running the job. Only `fedsim.jobs` uses these three.

    `summary` is the content of summary.json. It is empty if no such file was written; for an error,
    it may have the key `error` only. `skipped` is true if the run had ended before, so that nothing
    was run. `cause` is the exception that ended the run in this process. `fedsim.jobs` keeps it
    only for errors before the first round.
    """

    status: str
    summary: Mapping[str, Any]
    skipped: bool = False
    cause: BaseException | None = None

    @property
    def final(self) -> bool:
        """True if the run has ended for good: the same command does not run it again."""
        return self.status in FINAL

    @property
    def damaged(self) -> bool:
        """True if the summary says that the run has ended for good, but its files are not whole."""
        return self.status == "failed" and self.summary.get("status") in FINAL


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
    """Return the outcome that the folder of a planned run records: `outcome_in` for a plan."""
    return outcome_in(plan.folder, plan.config, overwrite=plan.settings.overwrite)


def outcome_in(place: Path, config: Mapping[str, Any], *, overwrite: bool) -> Outcome:
    """Return the outcome that the folder `place` records of the run with this config.

    - Without a summary, the status is `failed`, and the outcome's summary is empty.
    - If the run has ended for good but a file is missing or damaged, the status is `failed`, and
      `error` names the file.
    - If the user's code has changed since the run ended for good, the status is `changed`. With
      `overwrite` the result is replaced anyway, so that its code does not matter.
    - Otherwise the status is that of the summary.
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
    """Return the folder in which a run works until it has ended for good.

    This is `folder`, which records the outcome `recorded`. If a finished result is to be
    overwritten, it is another folder, that of the replacement. The old result then stays until the
    new one is complete.
    """
    return files.replacement_of(folder) if overwrite and recorded.final else folder


@contextmanager
def claimed(folder: Path, config: Mapping[str, Any], *, overwrite: bool) -> Iterator[Path | None]:
    """Claim the run with this config: hold the lock of its `folder` within this context.

    Yields the folder in which to run it (`worked_in`). When the context ends, a complete
    replacement takes the place of the earlier result. Yields None if there is nothing to run,
    because another process has ended the run since the caller looked. Raises `HeldError` if another
    process holds the lock.
    """

    def recorded_in(place: Path) -> Outcome:
        return outcome_in(place, config, overwrite=overwrite)

    with files.owned(folder):
        # 1. A replacement that was complete when its process was killed counts as this run.
        replacement = files.replacement_of(folder)
        if recorded_in(replacement).final:
            files.replace_folder(folder)
            yield None
            return
        # 2. A result of earlier user code is moved away. There may be one of the present code,
        #    which then takes its place.
        recorded = recorded_in(folder)
        if recorded.status == "changed":
            _set_aside(folder, config, recorded)
            recorded = recorded_in(folder)
        if recorded.final and not overwrite:
            yield None
            return
        # 3. The caller runs it.
        place = worked_in(folder, recorded, overwrite=overwrite)
        yield place
        # 4. A complete replacement takes the place of the earlier result.
        if place != folder and recorded_in(place).final:
            files.replace_folder(folder)


def _set_aside(folder: Path, config: Mapping[str, Any], recorded: Outcome) -> None:
    """Move the result `recorded` of earlier user code out of `folder`.

    The caller holds the lock of the folder.
    """
    earlier_digits = files.code_digits(recorded.summary)
    digits = files.code_digits({"code": user_code(config)})
    new_folder = files.set_aside(folder, earlier_digits, digits)
    reason = recorded.summary["error"]
    warn(f"fedsim: {folder}: {reason}; that result is kept in {new_folder.name}\n")


def ended_by(error: BaseException, config: Mapping[str, Any], place: Path, when: str) -> Outcome:
    """Return the outcome of a run in the folder `place` that raised `error`.

    `when` names the round, or is `BEFORE_ROUND_1`. The text of a `FedsimError` explains the error.
    The traceback of any other error is written into the folder, or printed if that fails.
    """
    if isinstance(error, KeyboardInterrupt):
        return Outcome("interrupted", {"error": "Ctrl-C"}, cause=error)
    if isinstance(error, OutputError):  # the summary, which has its text, may be lost, too
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

    It is the innermost call in the user's code, or in any code if the user's code is not involved.
    """
    location = ""
    user_location = ""
    for frame, line in traceback.walk_tb(error.__traceback__):  # from the outermost call on
        code = frame.f_code
        location = f", {Path(code.co_filename).name}, line {line}, in {code.co_name}"
        module = str(frame.f_globals.get("__name__", "builtins"))
        if module == "__main__" or is_user_module(module):
            user_location = location
    return user_location or location
