"""How exceptions end a run, before its rounds and later: its status, what is told, and the traceback in its folder."""

import sys
import traceback
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path

from fedsim.config.plan import Plan
from fedsim.errors import DivergedError, FedsimError
from fedsim.running.outcome import Outcome
from fedsim.running.results import keep_traceback, tell
from fedsim.tracking.files import ERROR, OutputError, RunFolder

Ending = tuple[str, str | None, BaseException | None]
"""The status of a run, its reason in words, and the exception that has ended it."""


def ended_by(reason: BaseException, folder: RunFolder) -> Ending:
    """The end of a run whose rounds, or what follows on them, have raised `reason`.

    The traceback of what is no `FedsimError` is kept in the run's folder.
    """
    if isinstance(reason, DivergedError):
        return "diverged", str(reason), reason
    if isinstance(reason, KeyboardInterrupt):
        return "interrupted", "Ctrl-C", reason
    if isinstance(reason, FedsimError):
        if isinstance(reason, OutputError):
            tell(reason)
        return "failed", str(reason), reason
    keep_traceback(partial(folder.write_text, ERROR), _traceback(reason))
    return "failed", _in_words(reason), reason


def failed_before_rounds(
    plan: Plan, place: Path, error: BaseException, lock: AbstractContextManager[None] | None = None
) -> Outcome:
    """Leave the traceback of what a user's class has raised before any round in `place`, the folder of the run.

    `lock`: that of the run's folder, to be held meanwhile; None if it is held already.
    """
    folder = RunFolder(place)

    def write(text: str) -> None:
        with lock or nullcontext():
            folder.write_error(plan.config, text)

    kept = keep_traceback(write, _traceback(error))
    where = f"    see {folder.path / ERROR}\n" if kept else ""
    with suppress(OSError):
        sys.stderr.write(f"fedsim: {plan.folder} failed before any round was run: {_in_words(error)}\n{where}")
    return Outcome("failed", {"error": _in_words(error)}, cause=error)


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
