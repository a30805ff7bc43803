"""Finished runs, read back from their folders."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from fedsim.config.moved import with_paths_now
from fedsim.errors import FedsimError
from fedsim.partitions.division import Division
from fedsim.tracking.files import CONFIG, REPLACEMENTS, SUMMARY, read_metrics, read_summary

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run: its folder, config (as saved) and summary."""

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def status(self) -> str:
        return str(self.summary["status"])

    @property
    def choices(self) -> Mapping[str, str]:
        """The choice made in each config group."""
        choices: Mapping[str, str] = self.summary["choices"]
        return choices

    @property
    def num_clients(self) -> int:
        return int(self.config["num_clients"])

    @property
    def num_rounds(self) -> int:
        """Number of rounds that were configured."""
        return int(self.config["num_rounds"])

    @property
    def start_up_rounds(self) -> int | None:
        """Number of initial rounds whose cost differs from that of later ones; None if it was not recorded."""
        value: int | None = self.summary.get("start_up_rounds")
        return value

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The records of its rounds, as in metrics.jsonl."""
        return read_metrics(self.folder)

    def series(self, name: str) -> Floats:
        """A recorded number of every round, [T]; nan if it was not measured."""
        values = [np.nan if r[name] is None else r[name] for r in self.records]
        return np.array(values, dtype=np.float64)

    @cached_property
    def selections(self) -> NDArray[np.int64]:
        """Number of selections of each client, [N]."""
        chosen = [i for r in self.records for i in r["selected"]]
        return np.bincount(np.array(chosen, dtype=np.int64), minlength=self.num_clients)

    def division(self) -> Division | None:
        """The division of the training set; None if it was not saved."""
        path = self.folder / "partition.npz"
        return Division.load(path) if path.is_file() else None


def read_runs(folder: Path) -> list[Run]:
    """All runs below `folder` that have ended, sorted by path. Raises `FedsimError` if there are none."""
    paths = [path for path in sorted(folder.rglob(SUMMARY)) if REPLACEMENTS not in path.parts]
    runs = [run for path in paths if (run := _read(path.parent)) is not None]
    if not runs:
        raise FedsimError(f"{folder}: no finished run below it (a run's folder holds {CONFIG} and {SUMMARY})")
    return runs


def _read(folder: Path) -> Run | None:
    summary = read_summary(folder)
    try:
        config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return None
    if summary is None or not isinstance(config, Mapping) or "choices" not in summary:
        return None
    return Run(folder, with_paths_now(config), summary)


def complete(runs: Iterable[Run]) -> list[Run]:
    """The runs that reached their last round."""
    return [run for run in runs if run.status == "done"]
