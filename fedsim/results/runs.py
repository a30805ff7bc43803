"""Finished runs, read back from their folders, or from an archive: a small Parquet file to publish.

An archive has one row a round of a run: `run` (its number), `seed`, `engine`, `commit` and a column `choice.<group>`
for each config group, then the columns of metrics.jsonl, seconds and losses in single precision. The first row of a run
also has, as JSON, its `TOLD`; a run that ended before its first round is that row alone.
"""

import io
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from numpy.typing import NDArray

from fedsim.core.configs import IRRELEVANT, LOADER, by_meaning, flat
from fedsim.core.disk import unwritable, write_atomically
from fedsim.core.errors import FedsimError, printable
from fedsim.results.files import (
    CLIENTS,
    CONFIG,
    IMPERFECT,
    METRICS,
    PARTITION,
    REPLACEMENTS,
    SUMMARY,
    OutputError,
    code_digits,
    json_ready,
    read_metrics,
    read_summary,
    with_new_names,
)

Floats = NDArray[np.float64]
NUMERIC = {int, float, bool, type(None)}
NUMBERS = ("seed", "num_clients", "num_rounds")
"""Keys of every run's config."""
RECORDED = {"round", "selected", "test_accuracy", "participation_ratio", "coverage", "bytes_down", "bytes_up"}
"""Keys of every record."""


class ReportError(FedsimError):
    """There are no runs to report, or they cannot be read or compared (exit code 3)."""

    exit_code = 3


class Seeds(NamedTuple):
    seed: int
    partition_seed: int
    init_seed: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Seeds":
        """The seeds in a config: those of partition and first model are `seed` unless numbers of their own are set."""
        own = [config.get(name) for name in cls._fields]
        return cls(*(one if isinstance(one, int) else int(config["seed"]) for one in own))

    @property
    def own(self) -> dict[str, int]:
        """Those other than `seed`, by their keys, that differ from it."""
        return {name: value for name, value in self._asdict().items() if value != self.seed}

    def __str__(self) -> str:
        """`3 partition_seed=7`."""
        return " ".join([str(self.seed), *(f"{name}={value}" for name, value in self.own.items())])


@dataclass(frozen=True)
class Rounds:
    """What is kept of the records of T rounds.

    `columns`: numbers by name, [T] each, nan where one was not measured, and of lists (`late`) how long they are;
    `chosen`: rounds, from 0, and the clients selected in them, [2, M]. `are_whole`: whether no record lacks anything.
    """

    num: int
    columns: Mapping[str, Floats]
    chosen: NDArray[np.int32]
    are_whole: bool = True

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> "Rounds":
        names = dict.fromkeys(chain.from_iterable(records))
        whole = all(record.keys() >= RECORDED for record in records)
        return cls.of_columns({name: [record.get(name) for record in records] for name in names}, whole)

    @classmethod
    def of_columns(cls, found: Mapping[str, Sequence[Any]], are_whole: bool = True) -> "Rounds":
        columns: dict[str, Floats] = {} if found else defaultdict(lambda: np.empty(0))
        for name, values in found.items():
            kinds = {*map(type, values)}
            if kinds <= NUMERIC or kinds == {list}:
                columns[name] = np.array([*map(len, values)] if kinds == {list} else values, np.float64)
        num, selected = len(next(iter(found.values()), ())), found["selected"] if found and are_whole else ()
        rounds, clients = np.repeat(np.arange(len(selected)), [*map(len, selected)]), [*chain.from_iterable(selected)]
        return cls(num, columns, np.array([rounds, clients], np.int32), are_whole)


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run: its folder, config (as saved) and summary.

    Of one that was read from an archive, `folder` is the name that it had, and `archived` its `rows` [T] and `TOLD`.
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
        """Number of initial rounds whose cost differs from that of later ones; None if it was not recorded."""
        return self.summary.get("start_up_rounds")

    @cached_property
    def commit(self) -> str | None:
        return (self.summary.get("revision") or {}).get("commit")

    @cached_property
    def own_classes(self) -> list[str]:
        """The user's classes in its config, by their paths."""
        values = flat(by_meaning({k: v for k, v in self.config.items() if k not in IRRELEVANT}))
        return [str(value) for key, value in values if key.endswith("_target_") and "." in str(value)]

    @cached_property
    def code(self) -> str | None:
        """Digits that stand for the user's code in it, or `unknown`, as of earlier runs; None if there is none."""
        return code_digits(self.summary) or ("unknown" if self.own_classes else None)

    @property
    def records(self) -> list[dict[str, Any]]:
        """All that was recorded, read anew each time."""
        return self.archived["rows"].to_pylist() if self.archived else read_metrics(self.folder)

    @cached_property
    def rounds(self) -> Rounds:
        return Rounds.of_columns(self.archived["rows"].to_pydict()) if self.archived else Rounds.of(self.records)

    @property
    def columns(self) -> Mapping[str, Floats]:
        """The recorded numbers of every round by name, [T] each; nan where one was not measured."""
        return self.rounds.columns

    def series(self, name: str) -> Floats:
        """A recorded number of every round, [T]; nan where it was not measured."""
        return self.columns[name]

    @cached_property
    def selections(self) -> NDArray[np.int64]:
        """Number of selections of each client, [N]."""
        return np.bincount(self.rounds.chosen[1], minlength=self.num_clients)

    @cached_property
    def histograms(self) -> NDArray[np.int64] | None:
        """Training samples of each client by class, [N, C]; None if the partition was not saved."""
        return self._saved("histograms", PARTITION, "histograms", np.int64)

    @cached_property
    def client_accuracies(self) -> Floats | None:
        """The final model's accuracy on each client, [N], nan where there is none; None if it was not measured."""
        return self._saved("client_accuracies", CLIENTS, "accuracy", np.float64)

    @cached_property
    def imperfect(self) -> NDArray[np.int64] | None:
        """Ids of the imperfect clients; None if all are honest."""
        return self._saved("imperfect", IMPERFECT, "clients", np.int64)

    def _saved(self, told: str, file: str, name: str, dtype: type[Any]) -> Any:
        """What an archive tells, or what a file of arrays or JSON has as `name`; None if it is not there (as in earlier
        archives) or damaged."""
        path = self.folder / file
        try:
            if self.archived:
                found = self.archived.get(told)
            elif file == IMPERFECT:
                found = json.loads(path.read_bytes())[name] if path.is_file() else None
            else:
                found = np.load(path, allow_pickle=False)[name] if path.is_file() else None
            return None if found is None else np.asarray(found, dtype)
        except Exception as error:  # a damaged file fails in zipfile, zlib or numpy, each in its own way
            _tell_left_out(path, error)
            return None


def read_runs(folder: Path) -> list[Run]:
    """All runs below `folder` that have ended, sorted by path; those whose files cannot be used are told on stderr.
    Raises `ReportError` if there are none."""
    runs = []
    for path in sorted(folder.rglob(SUMMARY)):
        if REPLACEMENTS not in path.parts and (path.parent / CONFIG).is_file():  # else a summary of something else
            try:
                runs.append(_read(path.parent))
            except ReportError as error:
                _tell_left_out(path.parent, error)
    if not runs:
        raise ReportError(f"{folder}: no finished run below it (a run's folder holds {CONFIG} and {SUMMARY})")
    return runs


def _tell_left_out(path: Path, error: Exception) -> None:
    sys.stderr.write(printable(f"fedsim report: left out {path}: {error}") + "\n")


def _read(folder: Path) -> Run:
    summary = read_summary(folder)
    if summary is None or not isinstance(summary.get("choices"), Mapping):
        raise ReportError(f"{SUMMARY} is not that of a run")
    try:
        config = yaml.load((folder / CONFIG).read_text(encoding="utf-8"), LOADER)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ReportError(f"{CONFIG} cannot be read ({' '.join(str(error).split())[:100]})") from error
    if not isinstance(config, Mapping) or not all(isinstance(config.get(key), int) for key in NUMBERS):
        raise ReportError(f"{CONFIG} is not that of a run")
    run = Run(folder, config, summary)
    if run.status == "done" and run.rounds.num < run.num_rounds:
        found = f"{run.rounds.num} of {run.num_rounds} rounds"
        raise ReportError(f"{METRICS} holds {found}; run it again with overwrite=true")
    if not run.rounds.are_whole:
        raise ReportError(f"{METRICS} holds lines that are not records of rounds")
    return run


META = b"fedsim.runs"
FORMAT = 1
TOLD = ("folder", "config", "summary", "histograms", "imperfect", "client_accuracies")
"""Columns with what holds for a whole run; earlier archives lack the last two."""
PLACES = ("data_dir", "cache_dir", "output_dir")
"""Keys that name folders of the machine: left out, as archives are published."""
KINDS = {"run": pa.int32(), "seed": pa.int64(), **dict.fromkeys(("engine", "commit", *TOLD), pa.string())}


def write_archive(runs: Sequence[Run], root: Path, path: Path) -> None:
    """Write `runs`, whose folders are below `root`, to the file `path`. Raises `OutputError` where it cannot."""
    rows = [row for number, run in enumerate(runs) for row in _rows(number, run, root)]
    records = list(dict.fromkeys(name for run in runs for record in run.records for name in record))
    groups = sorted({f"choice.{group}" for run in runs for group in run.choices})
    names = ["run", "seed", "engine", "commit", *groups, *records, *TOLD]
    table = pa.table({name: pa.array([row.get(name) for row in rows], _kind(name)) for name in names})
    table = table.replace_schema_metadata({META: json.dumps({"format": FORMAT, "records": records}).encode()})
    single = [name for name in names if table[name].type == pa.float32()]
    coded, file = [name for name in names if name not in single], io.BytesIO()
    pq.write_table(
        table, file, compression="zstd", compression_level=19, use_dictionary=coded, use_byte_stream_split=single
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, file.getvalue())
    except OSError as error:
        raise OutputError(unwritable("--archive", path, error)) from error


def _rows(number: int, run: Run, root: Path) -> list[dict[str, Any]]:
    told = {
        "folder": (run.folder.relative_to(root) if run.folder.is_relative_to(root) else run.folder).as_posix(),
        "config": {key: value for key, value in run.config.items() if key not in PLACES},
        "summary": dict(run.summary),
        "histograms": None if run.histograms is None else run.histograms.tolist(),
        "client_accuracies": json_ready(run.client_accuracies),
        "imperfect": json_ready(run.imperfect),
    }
    whole = {"run": number, "seed": run.seed, "engine": run.summary.get("engine"), "commit": run.commit}
    whole |= {f"choice.{group}": choice for group, choice in run.choices.items()}
    first, *others = [{**whole, **record} for record in run.records or [{}]]
    return [first | {key: json.dumps(value) for key, value in told.items()}, *others]


def _kind(name: str) -> pa.DataType | None:
    """The type of a column; None: what its values say."""
    if name.startswith("seconds_") or name == "wall_seconds" or name.endswith("_loss"):
        return pa.float32()
    return KINDS.get(name, pa.string() if name.startswith("choice.") else None)


def read_archive(path: Path) -> list[Run]:
    """The runs in the file `path`. Raises `ReportError` if it is not an archive of runs."""
    try:
        table = pq.read_table(path)
        meta = json.loads((table.schema.metadata or {}).get(META, b"null"))
        if not isinstance(meta, Mapping) or meta.get("format") != FORMAT:
            raise ReportError(f"{path}: not an archive of runs (fedsim report <folder> --archive writes one)")
        runs: list[Run] = []
        records, first = table.select(meta["records"]), 0
        for length in np.bincount(table["run"].to_numpy()).tolist():
            told = {key: json.loads(table[key][first].as_py()) for key in TOLD if key in table.column_names}
            rounds = 0 if records["round"][first].as_py() is None else length
            told["rows"] = records.slice(first, rounds)
            runs.append(Run(Path(told["folder"]), told["config"], with_new_names(told["summary"]), told))
            first += length
        return runs
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{path}: cannot be read as an archive of runs ({error})") from error
