"""Trackers receive the records of a run, and show or send them. Its files are the authoritative
record: a tracker may be absent, slow or failing without affecting the run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class SweepPosition:
    """A job is `number` of `total` in its sweep, counted from 1. `remaining_seconds`: what the rest
    of the sweep will take; None where that is not known."""

    number: int
    total: int
    remaining_seconds: Callable[[], float | None]


@dataclass(frozen=True)
class RunInfo:
    """Information about a run for its trackers.

    `folder` is where its files are while it runs, `final_folder` where they will be then (None: the
    same). `choices` maps config groups to the choices made; `alone` is false if several runs of a
    sweep progress side by side in one process; `sweep` says which job of a sweep it is (None: it is
    the only one).
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

    @property
    def results(self) -> Path:
        """Where the run's files will be when it has ended."""
        return self.final_folder or self.folder


class Tracker:
    """Methods are called in the order start, log (once per round), finish; message at any time. All
    are optional.

    `notice`: a line for the user after `start` or `finish`, which is shown once; `num_degraded`:
    how often this tracker could not do its work.
    """

    notice: str | None = None
    num_degraded: int = 0

    def start(self, info: RunInfo) -> None:
        """The run's folder exists and contains config.yaml."""

    def log(self, record: Mapping[str, Any]) -> None:
        """That of one round, as in metrics.jsonl."""

    def replay(self, record: Mapping[str, Any]) -> None:
        """The record of a round that an earlier process ran, whose run this one goes on with; by
        default as `log`."""
        self.log(record)

    def message(self, text: str) -> None:
        """One line of text for the user."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run has ended; `summary["status"]` is its outcome."""


class Trackers:
    """Several trackers as one. One that raises an error is told of once and left out; the run
    continues."""

    def __init__(self, makers: Mapping[str, Callable[[], Tracker]]) -> None:
        self._trackers: dict[str, Tracker] = {}
        self._failed: dict[str, str] = {}
        self._shown: set[str | None] = {None}
        self._trackers = self._each(lambda make: make(), makers)

    def start(self, info: RunInfo) -> None:
        not_made = list(self._failed)
        self._each(lambda t: t.start(info))
        for name in not_made:
            self._tell_of(name)
        self._show_notices()

    def log(self, record: Mapping[str, Any]) -> None:
        self._each(lambda t: t.log(record))

    def replay(self, record: Mapping[str, Any]) -> None:
        self._each(lambda t: t.replay(record))

    def message(self, text: str) -> None:
        self._each(lambda t: t.message(text))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Let each end its work. A signal that is raised meanwhile leaves those degraded that have
        not ended it."""
        ended: list[Tracker] = []

        def end(tracker: Tracker) -> None:
            tracker.finish(summary)
            ended.append(tracker)

        try:
            self._each(end)
        except BaseException as signal:
            broken_off = f"{type(signal).__name__} before it had ended its work"
            self._failed |= {
                name: broken_off for name, t in self._trackers.items() if t not in ended
            }
            raise
        self._show_notices()

    @property
    def degraded(self) -> dict[str, Any]:
        """Trackers that could not do all of their work, by name: the number of failures, or the
        fatal error."""
        counts = self._each(lambda t: t.num_degraded)
        return {**{name: count for name, count in counts.items() if count}, **self._failed}

    def _show_notices(self) -> None:
        for notice in self._each(lambda t: t.notice).values():
            if notice not in self._shown:
                self._shown.add(notice)
                self.message(str(notice))

    def _each(
        self, call: Callable[[Any], Any], parts: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """What `call` returns for each tracker, or each of `parts`, that raises no error."""
        found = {}
        for name, part in list((self._trackers if parts is None else parts).items()):
            try:
                found[name] = call(part)
            except (Exception, SystemExit) as error:  # a user's tracker may fail in any way
                self._trackers.pop(name, None)
                self._failed[name] = f"{type(error).__name__}: {error}"
                self._tell_of(name)
        return found

    def _tell_of(self, name: str) -> None:
        self.message(f"tracker.{name} failed and is left out from here on: {self._failed[name]}")
