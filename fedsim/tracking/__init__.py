"""Trackers: they receive the records of a run, which are also written to its files, and show or send them."""

from collections.abc import Callable, Mapping
from typing import Any

from fedsim.tracking.base import RunInfo, Tracker

__all__ = ["RunInfo", "Tracker", "Trackers"]


class Trackers:
    """Several trackers as one.

    If a tracker raises an error, this is reported once, the tracker is removed, and the run continues.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self._failed: dict[str, str] = {}
        self._shown: set[str | None] = {None}

    @classmethod
    def made_by(cls, makers: Mapping[str, Callable[[], Tracker]]) -> "Trackers":
        """The trackers that `makers` return. Of one that raises an error the others are told at the start."""
        made, failed = {}, {}
        for name, make in makers.items():
            try:
                made[name] = make()
            except (Exception, SystemExit) as error:  # a user's tracker may fail in any way
                failed[name] = f"{type(error).__name__}: {error}"
        trackers = cls(made)
        trackers._failed.update(failed)
        return trackers

    def start(self, info: RunInfo) -> None:
        not_made = list(self._failed)
        self._call_each(lambda t: t.start(info))
        for name in not_made:
            self._tell_of(name)
        self._show_notices()

    def log(self, record: Mapping[str, Any]) -> None:
        self._call_each(lambda t: t.log(record))

    def replay(self, record: Mapping[str, Any]) -> None:
        self._call_each(lambda t: t.replay(record))

    def message(self, text: str) -> None:
        self._call_each(lambda t: t.message(text))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Let each end its work. A signal that is raised meanwhile leaves those degraded that have not ended it."""
        ended: list[Tracker] = []

        def end(tracker: Tracker) -> None:
            tracker.finish(summary)
            ended.append(tracker)

        try:
            self._call_each(end)
        except BaseException as signal:
            broken_off = f"{type(signal).__name__} before it had ended its work"
            self._failed |= {name: broken_off for name, t in self._trackers.items() if t not in ended}
            raise
        self._show_notices()

    @property
    def degraded(self) -> dict[str, Any]:
        """Trackers that could not do all of their work, by name: the number of failures, or the fatal error."""
        counts: dict[int, int] = {}
        self._call_each(lambda t: counts.update({id(t): t.num_degraded}))
        found = {name: counts[id(t)] for name, t in self._trackers.items()}
        return {**{name: count for name, count in found.items() if count}, **self._failed}

    def _show_notices(self) -> None:
        notices: list[str | None] = []
        self._call_each(lambda t: notices.append(t.notice))
        for notice in notices:
            if notice not in self._shown:
                self._shown.add(notice)
                self.message(str(notice))

    def _call_each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except (Exception, SystemExit) as error:
                del self._trackers[name]
                self._failed[name] = f"{type(error).__name__}: {error}"
                self._tell_of(name)

    def _tell_of(self, name: str) -> None:
        self.message(f"tracker.{name} failed and is left out from here on: {self._failed[name]}")
