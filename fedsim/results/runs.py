"""Finished runs, read back from their folders."""

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
from fedsim.results.files import (
    CLIENTS,
    IMPERFECT,
    PARTITION,
    REPLACEMENTS,
    code_digits,
)
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
)


class ReportError(FedsimError):
    """There are no runs to report, or they cannot be read or compared (exit code 3)."""

    exit_code = 3


class Seeds(NamedTuple):
    seed: int
    partition_seed: int
    init_seed: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Seeds":
        """The seeds in a config: those of partition and first model are `seed` unless numbers of
        their own are set."""
        own = [config.get(name) for name in cls._fields]
        return cls(*(one if isinstance(one, int) else int(config["seed"]) for one in own))

    @property
    def own(self) -> dict[str, int]:
        """Those other than `seed`, by their keys, that differ from it."""
        return {name: value for name, value in self._asdict().items() if value != self.seed}

    def __str__(self) -> str:
        """`3 partition_seed=7`."""
        return " ".join([str(self.seed), *(f"{name}={value}" for name, value in self.own.items())])


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run: its folder, config (as saved) and summary.

    Of one that was read from an archive, `folder` is the name that it had, and `archived` its
    `rows` [T], `rounds` and what an archive tells of a run.
    """

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    archived: Mapping[str, Any] = field(default_factory=dict)

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
        return self.summary["choices"]

    @cached_property
    def num_clients(self) -> int:
        return int(self.config["num_clients"])

    @cached_property
    def num_rounds(self) -> int:
        return int(self.config["num_rounds"])

    @cached_property
    def start_up_rounds(self) -> int | None:
        """Number of initial rounds whose cost differs from that of later ones; None if it was not
        recorded."""
        return self.summary.get("start_up_rounds")

    @cached_property
    def commit(self) -> str | None:
        return (self.summary.get("revision") or {}).get("commit")

    @cached_property
    def own_classes(self) -> list[str]:
        """The user's classes in its config, by their paths."""
        values = leaves(
            canonical({k: v for k, v in self.config.items() if k not in IRRELEVANT_KEYS})
        )
        return [
            str(value) for key, value in values if key.endswith("_target_") and "." in str(value)
        ]

    @cached_property
    def code(self) -> str | None:
        """Digits that stand for the user's code in it, or `unknown`, as of earlier runs; None if
        there is none."""
        return code_digits(self.summary) or ("unknown" if self.own_classes else None)

    @property
    def records(self) -> list[dict[str, Any]]:
        """All that was recorded, read anew each time."""
        return self.archived["rows"].to_pylist() if self.archived else read_metrics(self.folder)

    @cached_property
    def rounds(self) -> Rounds:
        if self.archived:
            return self.archived["rounds"]
        return Rounds.of(read_metrics(self.folder, whole=self.status in FINAL))

    def check(self) -> None:
        """Raise `DamagedError` unless config, summary and rounds are those of one run."""
        summary = check_summary(self.summary)
        if "choices" not in summary:
            raise DamagedError(f"{SUMMARY} is not that of a run")
        check_rounds(self.rounds, check_config(self.config), summary)

    @property
    def columns(self) -> Mapping[str, Floats]:
        """The recorded numbers of every round by name, [T] each; nan where one was not measured."""
        return self.rounds.columns

    def series(self, name: str) -> Floats:
        """A recorded number of every round, [T]; nan where it was not measured."""
        return self.columns[name]

    @cached_property
    def selections(self) -> Ints:
        """Number of selections of each client, [N]."""
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
        """Ids of the imperfect clients; None if all are honest."""
        return self._saved("imperfect", IMPERFECT, "clients", np.int64)

    def _saved(self, told: str, file: str, name: str, dtype: type[Any], dimensions: int = 1) -> Any:
        """What an archive tells, or what a file of arrays or JSON has as `name`; None if it is not
        there (as in earlier archives) or damaged."""
        path = self.folder / file
        try:
            if self.archived:
                found = self.archived.get(told)
            elif not path.exists():
                return None
            elif file == IMPERFECT:
                found = parse_json(content_of(path), file, is_large=True)[name]
            else:
                found = np.load(
                    io.BytesIO(content_of(path, MOST_BYTES_OF_ROUNDS)), allow_pickle=False
                )[name]
            values = None if found is None else np.asarray(found, dtype)
            if values is not None and (values.ndim != dimensions or len(values) > self.num_clients):
                raise DamagedError(f"{name} are not those of {self.num_clients} clients")
            return values
        except (
            Exception
        ) as error:  # a damaged file fails in zipfile, zlib or numpy, each in its own way
            tell_left_out(path, error)
            return None


def read_runs(folder: Path, left_out: list[str] | None = None) -> list[Run]:
    """All runs below `folder` that have ended, sorted by path, without damaged ones (`left_out` as
    in `read_source`). Raises `ReportError` if there are none."""
    runs = []
    for path in sorted(folder.rglob(SUMMARY)):
        place = path.parent
        if (
            REPLACEMENTS not in path.parts and (place / CONFIG).exists()
        ):  # else a summary of something else
            try:
                run = Run(place, read_config(place), parse_json(content_of(path), SUMMARY))
                run.check()
                runs.append(run)
            except DamagedError as error:
                tell_left_out(place, f"{error}; run it again with overwrite=true", left_out)
    if not runs:
        raise ReportError(
            f"{folder}: no finished run below it (a run's folder holds {CONFIG} and {SUMMARY})"
        )
    return runs


def tell_left_out(path: Path, reason: object, left_out: list[str] | None = None) -> None:
    """Name what is left out and why, in a line on stderr or of the list `left_out`."""
    text = printable(f"left out {path}: {reason}")
    if left_out is None:
        sys.stderr.write(f"fedsim: {text}\n")
    else:
        left_out.append(text)
