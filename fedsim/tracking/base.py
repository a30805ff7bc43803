"""Trackers mirror a run's records. The files are the truth; a tracker may be absent, slow or dead without hurting."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunInfo:
    """What a tracker may know of a run. `config` is resolved and holds no secrets; `choices` maps group to choice."""

    name: str
    run_id: str
    folder: Path
    config: Mapping[str, Any]
    choices: Mapping[str, str]
    seed: int
    num_rounds: int


class Tracker:
    """Called in the order start, log (once a round), finish. Every method may be left out."""

    def start(self, info: RunInfo) -> None:
        """The run begins; its folder exists and holds config.yaml."""

    def log(self, record: Mapping[str, Any]) -> None:
        """One round's record, the same mapping that was written to metrics.jsonl."""

    def message(self, text: str) -> None:
        """One line for a person (a warning, what `auto` chose)."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run has ended (`summary["status"]`: done, diverged, failed, interrupted)."""
