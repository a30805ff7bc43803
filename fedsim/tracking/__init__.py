"""Records of a run: files first, then whatever mirrors them."""

from collections.abc import Callable, Mapping
from typing import Any

from fedsim.tracking.base import RunInfo, Tracker

__all__ = ["RunInfo", "Tracker", "Trackers"]


class Trackers:
    """Several trackers as one. A tracker that raises is told of once and left out from then on; the run goes on."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self._dead: dict[str, str] = {}
        self._told: set[str | None] = {None}

    def start(self, info: RunInfo) -> None:
        self._each(lambda t: t.start(info))
        self._tell_notices()

    def log(self, record: Mapping[str, Any]) -> None:
        self._each(lambda t: t.log(record))

    def message(self, text: str) -> None:
        self._each(lambda t: t.message(text))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._each(lambda t: t.finish(summary))
        self._tell_notices()

    @property
    def degraded(self) -> dict[str, Any]:
        """Trackers that could not do (all of) their work: a count, or the error that ended them."""
        counts = {name: t.num_degraded for name, t in self._trackers.items() if t.num_degraded}
        return {**counts, **self._dead}

    def _tell_notices(self) -> None:
        notices: list[str | None] = []
        self._each(lambda t: notices.append(t.notice))
        for notice in notices:
            if notice not in self._told:
                self._told.add(notice)
                self.message(str(notice))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # a user's tracker may fail in any way
                del self._trackers[name]
                self._dead[name] = f"{type(error).__name__}: {error}"
                self.message(f"tracker.{name} failed and is left out from here on: {self._dead[name]}")
