"""Finished runs, read back from their folders.

A `Run` has everything that a run's folder or an archive holds. Its files are checked when it is
read: damaged runs are skipped with a line.
"""

import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedsim.core.arrays import Floats, Ints
from fedsim.core.configs import IRRELEVANT_KEYS, canonical, leaves
from fedsim.core.errors import FedsimError
from fedsim.core.text import printable
from fedsim.results.files import CLIENTS, IMPERFECT, PARTITION, REPLACEMENTS, code_digits
from fedsim.results.reading import (
    CONFIG,
    FINAL,
    MOST_BYTES_OF_ROUNDS,
    SUMMARY,
    DamagedError,
    Rounds,
    check_config,
    check_rounds,
    check_summary,
    content_of,
    parse_json,
    read_config,
    read_metrics,
    window_of,
)


class ReportError(FedsimError):
    """There are no runs to report, or they cannot be read or compared (exit code 3)."""

    exit_code = 3


class Seeds(NamedTuple):
    """The seeds of a run. Methods are compared at equal seeds."""

    seed: int
    partition_seed: int
    init_seed: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Seeds":
        """Return the seeds in a config: those of partition and first model are `seed` unless they
        are set to numbers."""
        seed = int(config["seed"])
        values = [config.get(name) for name in cls._fields]
        return cls(*(value if isinstance(value, int) else seed for value in values))

    @property
    def own(self) -> dict[str, int]:
        """The seeds that differ from `seed`, by their config keys."""
        return {name: value for name, value in self._asdict().items() if value != self.seed}

    def __str__(self) -> str:
        """Return the seeds as text: `3 partition_seed=7`."""
        return " ".join([str(self.seed), *(f"{name}={value}" for name, value in self.own.items())])


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run: its folder, config (as saved) and summary.

    A run of an archive has no files. Its `folder` is the former name, and `archived` holds its
    records as `rows` (a pyarrow table) and `rounds`, and the columns of the archive that describe a
    whole run. `archived` is empty for a run with a folder.
    """

    folder: Path
    config: Mapping[str, Any] = field(repr=False)
    summary: Mapping[str, Any] = field(repr=False)
    archived: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def seed(self) -> int:
        return int(self.config["seed"])

    @cached_property
    def seeds(self) -> Seeds:
        return Seeds.of(self.config)

    @cached_property
    def status(self) -> str:
        return str(self.summary["status"])

    @cached_property
    def choices(self) -> Mapping[str, str]:
        """The choices of config groups."""
        return self.summary["choices"]

    @cached_property
    def dataset(self) -> str | None:
        """The name of the data set. Data at a path have the name `dataset.name`, or otherwise the
        last part of the path. Other data have the name of the choice."""
        node = self.config.get("dataset")
        if isinstance(node, Mapping) and node.get("path"):
            return str(node.get("name") or Path(str(node["path"])).name or node["path"])
        return self.choices.get("dataset")

    @cached_property
    def num_clients(self) -> int:
        return int(self.config["num_clients"])

    @cached_property
    def num_rounds(self) -> int:
        """The number of rounds in the config. A run that diverged, or ended at `stop_at`, has fewer
        records."""
        return int(self.config["num_rounds"])

    @cached_property
    def final_window(self) -> int:
        """The number of last rounds over which the final accuracy is a mean."""
        return window_of(self.config)

    @cached_property
    def start_up_rounds(self) -> int | None:
        """The number of initial rounds whose cost differs from that of later rounds; None if it was
        not recorded."""
        return self.summary.get("start_up_rounds")

    @cached_property
    def commit(self) -> str | None:
        return (self.summary.get("revision") or {}).get("commit")

    @cached_property
    def own_classes(self) -> list[str]:
        """The user's classes in its config, by their paths."""
        config = {k: value for k, value in self.config.items() if k not in IRRELEVANT_KEYS}
        values = leaves(canonical(config))
        targets = [str(value) for key, value in values if key.endswith("_target_")]
        return [target for target in targets if "." in target]

    @cached_property
    def code(self) -> str | None:
        """Digits that stand for the version of the user's code.

        `unknown` if the run does not record it, as in earlier versions. None if the run uses no
        code of the user.
        """
        return code_digits(self.summary) or ("unknown" if self.own_classes else None)

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records of all rounds, read anew each time."""
        return self.archived["rows"].to_pylist() if self.archived else read_metrics(self.folder)

    @cached_property
    def rounds(self) -> Rounds:
        """The records of all rounds as arrays."""
        if self.archived:
            return self.archived["rounds"]
        return Rounds.of(read_metrics(self.folder, whole=self.status in FINAL))

    @property
    def columns(self) -> Mapping[str, Floats]:
        """The recorded numbers of every round by name, [T] each; nan where one was not measured."""
        return self.rounds.columns

    @cached_property
    def selections(self) -> Ints:
        """The number of selections of each client, [N]."""
        return np.bincount(self.rounds.chosen[1], minlength=self.num_clients)

    @cached_property
    def histograms(self) -> Ints | None:
        """Training samples of each client by class, [N, C]; None if the partition was not saved."""
        return self._saved("histograms", PARTITION, "histograms", np.int64, 2)

    @cached_property
    def client_accuracies(self) -> Floats | None:
        """The final model's accuracy on each client, [N], nan where there is none; None if it was
        not measured."""
        return self._saved("client_accuracies", CLIENTS, "accuracy", np.float64)

    @cached_property
    def imperfect(self) -> Ints | None:
        """The ids of the imperfect clients; None if all are honest."""
        return self._saved("imperfect", IMPERFECT, "clients", np.int64)

    def check(self) -> None:
        """Raise `DamagedError` unless config, summary and rounds are those of one run."""
        summary = check_summary(self.summary)
        if "choices" not in summary:
            raise DamagedError(f"{SUMMARY} is not that of a run")
        check_rounds(self.rounds, check_config(self.config), summary)

    def _saved(
        self, column: str, file: str, name: str, dtype: type[Any], dimensions: int = 1
    ) -> Any:
        """Return the `column` of an archive, or the values `name` in a file of arrays or JSON; None
        if they are missing (as in early archives) or damaged."""
        path = self.folder / file
        try:
            if self.archived:
                saved = self.archived.get(column)
            elif not path.exists():
                saved = None
            elif file == IMPERFECT:
                saved = parse_json(content_of(path), file, is_large=True)[name]
            else:
                content = io.BytesIO(content_of(path, MOST_BYTES_OF_ROUNDS))
                saved = np.load(content, allow_pickle=False)[name]
            if saved is None:
                return None
            values = np.asarray(saved, dtype)
            if values.ndim != dimensions or len(values) > self.num_clients:
                raise DamagedError(f"{name} are not those of {self.num_clients} clients")
            return values
        except Exception as error:  # damaged files fail in zipfile, zlib and numpy in many ways
            tell_left_out(path, error)
            return None


def read_runs(folder: Path, left_out: list[str] | None = None, names: str = "") -> list[Run]:
    """Return all runs below `folder` that have ended, sorted by path, without damaged ones.

    `left_out` as in `read_source`. `names` is a pattern of the names of the runs' folders; all if
    it is empty. Raises `ReportError` if there are none.
    """
    runs = []
    for path in sorted(folder.rglob(f"{names}/{SUMMARY}" if names else SUMMARY)):
        run_folder = path.parent
        if REPLACEMENTS in path.parts or not (run_folder / CONFIG).exists():
            continue  # an incomplete replacement, or a summary of something else
        try:
            summary = parse_json(content_of(path), SUMMARY)
            run = Run(run_folder, read_config(run_folder), summary)
            run.check()
            runs.append(run)
        except DamagedError as error:
            tell_left_out(run_folder, f"{error}; the command of the run runs it again", left_out)
    if not runs:
        raise ReportError(
            f"{folder}: no finished run below it (a run's folder holds {CONFIG} and {SUMMARY})"
        )
    return runs


def tell_left_out(path: Path, reason: object, left_out: list[str] | None = None) -> None:
    """Report what is left out and why: as a line on stderr, or in the list `left_out` if there is
    one."""
    text = printable(f"left out {path}: {reason}")
    if left_out is None:
        sys.stderr.write(f"fedsim: {text}\n")
    else:
        left_out.append(text)
