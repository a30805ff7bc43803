"""Trackers mirror a run's records. The files are the truth; a tracker may be absent, slow or dead without hurting."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunInfo:
    """What a tracker may know of a run. `config` is resolved; `choices` maps group to choice; a run that is not `alone`
    takes turns with others."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    choices: Mapping[str, str]
    seed: int
    num_rounds: int
    alone: bool = True

    @property
    def run_id(self) -> str:
        """The folder's name: unique among runs of different configs."""
        return self.folder.name


class Tracker:
    """Called in the order start, log (once a round), finish; `message` at any time. All may be left out."""

    def start(self, info: RunInfo) -> None:
        """The run begins; its folder exists and holds config.yaml."""

    def log(self, record: Mapping[str, Any]) -> None:
        """One round's record, as in metrics.jsonl."""

    def message(self, text: str) -> None:
        """One line for a person."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run has ended; `summary["status"]` says how."""

    @property
    def notice(self) -> str | None:
        """One line that this tracker has for a person after `start` or `finish` (told once), or None."""
        return None

    @property
    def num_degraded(self) -> int:
        """How often this tracker could not do its work."""
        return 0
