"""Trackers receive the records of a run, and show or send them.

A record is the row of metrics.jsonl of a round. `fedsim.running.experiment` creates a `Trackers`
for each run and calls its methods. The files of a run are the authoritative record. A tracker may
be absent, slow or failing without an effect on the run.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedsim.core.errors import check, rule


@dataclass(frozen=True)
class SweepPosition:
    """A job's position in its sweep: it is `number` of `total`, from 1.

    `remaining_seconds` returns what the rest of the sweep will take; None if that is not known.
    """

    number: int
    total: int
    remaining_seconds: Callable[[], float | None]


@dataclass(frozen=True)
class RunInfo:
    """Information about a run for its trackers.

    The run's files are in `folder` while it runs, and in `final_folder` after it has ended (None:
    the same). The two differ for a run that replaces an earlier result.
    `choices` maps config groups to the choices made. `alone` is false if several runs of a sweep
    progress at the same time in one process. `sweep` is None for a run that is no job of a sweep.
    `swept` names a job by the values that the command swept over; it is empty for other runs.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    choices: Mapping[str, str]
    seed: int
    num_rounds: int
    alone: bool = True
    final_folder: Path | None = None
    sweep: SweepPosition | None = None
    swept: str = ""

    @property
    def results(self) -> Path:
        """The folder of the run's files after it has ended."""
        return self.final_folder or self.folder

    @property
    def label(self) -> str:
        """The run's name among others: `gpfl alpha=0.5 s1` in a sweep, otherwise its folder's."""
        return self.swept or self.results.name


class Tracker:
    """A base class whose methods do nothing.

    They are called in this order: `start`, `replay` (once for each round of earlier processes),
    `log` (once for each round), `finish`; `message` at any time. `notice` is a line for the user,
    which is read after `start` and `finish` and shown once. `num_degraded` counts how often this
    tracker could not do its work; it goes to summary.json.
    """

    notice: str | None = None
    num_degraded: int = 0

    def start(self, info: RunInfo) -> None:
        """Start; the run's folder exists and contains config.yaml."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Receive the record of a round, as in metrics.jsonl."""

    def replay(self, record: Mapping[str, Any]) -> None:
        """Receive the record of a round that an earlier process of a resumed run has run."""
        self.log(record)

    def message(self, text: str) -> None:
        """Receive one line of text for the user."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """End, because the run has ended; `summary["status"]` is its outcome."""


def _copy_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a record, whose values are numbers, texts, and lists of them."""
    return {name: copy.copy(value) for name, value in record.items()}


def require(package: str, extra: str) -> None:
    """Raise `ConfigError` if a tracker's `package` is not installed. It is not imported.

    `extra` is the extra of fedsim that installs it.
    """
    text = f"needs the package {package}, which is not installed"
    remedy = f"pip install 'fedsim-selection[{extra}]'"
    check(rule(find_spec(package) is not None, "", ..., text, remedy))


class Trackers:
    """Several trackers as one. `make` makes each by its name in the config.

    It has the methods of a tracker, and passes each call on. Each tracker gets its own copy of a
    record or summary, which it may modify. A tracker that raises an error is reported once and
    skipped from then on; the run continues.
    """

    def __init__(self, names: Iterable[str], make: Callable[[str], Tracker]) -> None:
        self._trackers: dict[str, Tracker] = {}
        self._errors: dict[str, str] = {}
        self._notices: set[str] = set()
        for name in names:
            try:
                self._trackers[name] = make(name)
            except (Exception, SystemExit) as error:
                self._errors[name] = _in_words(error)  # `start` reports it

    def start(self, info: RunInfo) -> None:
        """Start all trackers, and report those that could not be made."""
        not_made = list(self._errors)
        self._each(lambda tracker: tracker.start(info))
        for name in not_made:
            self._report(name)
        self._show_notices()

    def log(self, record: Mapping[str, Any]) -> None:
        """Pass on the record of a round."""
        self._each(lambda tracker: tracker.log(_copy_of(record)))

    def replay(self, record: Mapping[str, Any]) -> None:
        """Pass on the record of a round of an earlier process."""
        self._each(lambda tracker: tracker.replay(_copy_of(record)))

    def message(self, text: str) -> None:
        """Pass on a line of text."""
        self._each(lambda tracker: tracker.message(text))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """End all trackers. A tracker that a signal keeps from its end counts as failed."""
        ended: list[Tracker] = []

        def end(tracker: Tracker) -> None:
            tracker.finish(copy.deepcopy(summary))
            ended.append(tracker)

        try:
            self._each(end)
        except BaseException as signal:
            for name, tracker in self._trackers.items():
                if tracker not in ended:
                    reason = f"{type(signal).__name__} before it had ended its work"
                    self._errors[name] = reason
            raise
        self._show_notices()

    @property
    def degraded(self) -> dict[str, Any]:
        """The trackers that could not do all of their work, by name, for summary.json.

        The value is the number of failures, or the error of a tracker that was skipped.
        """
        counts = self._each(lambda tracker: tracker.num_degraded)
        return {name: count for name, count in counts.items() if count} | self._errors

    def _show_notices(self) -> None:
        for notice in self._each(lambda tracker: tracker.notice).values():
            if notice is not None and notice not in self._notices:
                self._notices.add(notice)
                self.message(notice)

    def _each(self, call: Callable[[Tracker], Any]) -> dict[str, Any]:
        """Return what `call` returns for each tracker. Skip a tracker from then on if it raises."""
        results = {}
        for name, tracker in list(self._trackers.items()):
            if name not in self._trackers:  # it failed when another one's failure was reported
                continue
            try:
                results[name] = call(tracker)
            except (Exception, SystemExit) as error:  # a user's tracker may fail in any way
                self._trackers.pop(name, None)
                self._errors[name] = _in_words(error)
                self._report(name)
        return results

    def _report(self, name: str) -> None:
        self.message(f"tracker.{name} failed and is skipped from here on: {self._errors[name]}")


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
