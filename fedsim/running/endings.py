"""How exceptions end a run, what it survives, and who is told of its rounds."""

import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path

from fedsim.config.plan import Plan
from fedsim.core.errors import DivergedError, FedsimError
from fedsim.core.record import Record
from fedsim.core.types import Population
from fedsim.results.files import ERROR, OutputError, RunFolder
from fedsim.running.outcome import Outcome, keep_traceback, tell_unwritten
from fedsim.tracking.base import SweepPosition

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
            tell_unwritten(reason)
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


TEXTS = {
    "dropped_updates": "updates that hold a nan or infinity are left out of the average",
    "nonfinite_reports": "clients report losses that are nan or infinity",
    "rounds_with_too_few_clients": "fewer clients than cohort_size are available; those there take part",
    "rounds_without_clients": "no client takes part; the model stays as it is",
    "empty_clients": "clients hold no training samples and never take part",
}


class Incidents:
    """`adaptive`: the selector decides how many clients take part, so that fewer than K are no incident."""

    def __init__(self, population: Population, adaptive: bool, tell: Callable[[str], None]) -> None:
        self._expected = 1 if adaptive else min(population.cohort_size, int((population.sizes > 0).sum()))
        self._empty = int((population.sizes == 0).sum())
        self._tell = tell
        self._told: set[str] = set()
        self._tell_first("before round 1", {"empty_clients": self._empty})

    def see(self, record: Record) -> None:
        """Tell what `record` is the first to show."""
        self._tell_first(f"round {record.round}", self._of(record))

    def counts(self, records: Sequence[Record]) -> dict[str, int]:
        """How much of each kind there was in all `records` of the run."""
        found = [self._of(record) for record in records]
        return {name: sum(one.get(name, 0) for one in found) for name in TEXTS} | {"empty_clients": self._empty}

    def _of(self, record: Record) -> dict[str, int]:
        count = len(record.selected)
        return {
            "dropped_updates": record.dropped_updates,
            "nonfinite_reports": record.nonfinite_reports,
            "rounds_with_too_few_clients": int(0 < count < self._expected),
            "rounds_without_clients": int(not count),
        }

    def _tell_first(self, when: str, found: dict[str, int]) -> None:
        for name, count in found.items():
            if count and name not in self._told:
                self._told.add(name)
                self._tell(f"{when}: {TEXTS[name]} (counted in summary.json as incidents.{name})")


class Watch:
    """The one to whom a run is told. This one does nothing. `sweep`: where the run stands in its sweep."""

    sweep: SweepPosition | None = None

    def setting_up(self) -> AbstractContextManager[None]:
        """Within it, all that the run needs before its first round is made."""
        return nullcontext()

    def round_ended(self, record: Record) -> str | None:
        """The record of a round that is in the run's files. Returns why the run is to end here, or None to go on."""
        return None


UNWATCHED = Watch()
