"""Reading results: each file of a run is checked here, or rejected by a `DamagedError`.

Reports, searches, resuming and the skipping of finished jobs all read a run's folder, an archive or
a reference through this file. It imports no pandas, so that finished jobs are skipped quickly.
"""

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import yaml
from numpy.typing import NDArray

from fedsim.core.arrays import Floats
from fedsim.core.configs import YAML_LOADER, leaves
from fedsim.core.disk import read_regular
from fedsim.core.errors import FedsimError
from fedsim.core.record import FINAL_WINDOW, LAST_FIELDS, TOTAL_FIELDS, Record, mean_of_last

CONFIG, METRICS, SUMMARY = "config.yaml", "metrics.jsonl", "summary.json"
FINAL = ("done", "diverged")
"""Statuses of runs that have an end. The same command resumes all other runs."""
MOST_BYTES = 2**24
"""Size up to which a config or summary is read."""
MOST_BYTES_OF_ROUNDS = 2**29
"""Size up to which files are read that grow with the rounds or the clients."""
MAX_NODES, MAX_DEPTH, LARGEST_INT = 1_000_000, 64, 2**63
SURROGATE = re.compile("[\ud800-\udfff]")
SUSPICIOUS = re.compile(r"&|^[ ?:-]{100}", re.MULTILINE)
"""A YAML text in which this is not found, and that has few brackets, has no aliases and is not
deep."""
TOLERANCE = 1e-5
"""Relative tolerance of totals: archives have losses and seconds in single precision."""


class DamagedError(FedsimError):
    """A file is not as a run leaves it (exit code 3)."""

    exit_code = 3


def content_of(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the bytes of a regular file, at most `most`. Raises `DamagedError`."""
    try:
        return read_regular(path, most)
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read ({error.strerror or error})") from error


def parse_json(text: str | bytes, name: str, *, is_large: bool = False) -> Any:
    """Return the plain values in a JSON text; unchecked ones if it `is_large`. Raises
    `DamagedError`, which calls it `name`."""
    try:
        value = json.loads(text)
        return value if is_large else plain(value, name)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{name} is no JSON ({error})") from error


def parse_yaml(text: str, name: str) -> Any:
    """Return the plain values in a YAML text without aliases. Raises `DamagedError`, which calls it
    `name`."""
    try:
        if SUSPICIOUS.search(text) or text.count("[") + text.count("{") > MAX_DEPTH:
            _check_events(text)
        return plain(yaml.load(text, YAML_LOADER), name)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())[:100]
        raise DamagedError(f"{name} is no YAML of a run ({reason})") from error


def _check_events(text: str) -> None:
    """Raise ValueError if a YAML text has aliases, which can multiply it, or would exhaust the
    loader's stack."""
    depth = 0
    for event in yaml.parse(text, YAML_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH or isinstance(event, yaml.AliasEvent):
            raise ValueError("it has aliases, or is too deep")


def plain(value: Any, name: str) -> Any:
    """Return `value` if it is made of mappings, lists, texts, finite numbers, booleans and None,
    and neither deep nor huge. Raises `DamagedError`, which calls it `name`."""
    nodes: list[tuple[Any, int]] = [(value, 0)]
    num_nodes = 0
    while nodes:
        node, depth = nodes.pop()
        num_nodes += 1
        is_sound = depth <= MAX_DEPTH and num_nodes <= MAX_NODES and _is_plain(node)
        if not is_sound:
            raise DamagedError(f"{name} holds what no run writes")
        if isinstance(node, dict):
            nodes += [(below, depth + 1) for pair in node.items() for below in pair]
        elif isinstance(node, list):
            nodes += [(below, depth + 1) for below in node]
    return value


def _is_plain(node: Any) -> bool:
    """Return whether a node is of a plain type, apart from what it holds."""
    if isinstance(node, str):
        return node.isascii() or SURROGATE.search(node) is None
    if isinstance(node, float):
        return math.isfinite(node)
    if isinstance(node, int):
        return abs(node) < LARGEST_INT
    if isinstance(node, dict):
        return all(isinstance(key, str) for key in node)
    return node is None or isinstance(node, list)


Kinds = frozenset[type]
"""Types that a JSON value may have."""
INT, NUMBER, TEXT = Kinds({int}), Kinds({int, float}), Kinds({str})
LIST, MAPPING, NONE = Kinds({list}), Kinds({dict}), Kinds({type(None)})
OF_CONFIG: Mapping[str, Kinds] = {
    "seed": INT,
    "num_clients": INT,
    "num_rounds": INT,
    "cohort_size": INT,
    "partition_seed": INT | NONE,
    "init_seed": INT | TEXT | NONE,
    "client_accuracy": TEXT | NONE,
}
"""Types of a config's values, if they are present."""
OF_SUMMARY: Mapping[str, Kinds] = {
    "status": TEXT,
    "choices": MAPPING,
    "totals": MAPPING,
    "environment": MAPPING,
    "revision": MAPPING | NONE,
    "start_up_rounds": INT | NONE,
    "wall_seconds": NUMBER,
    "asks": TEXT | NONE,
    "engine": TEXT | NONE,
    "error": TEXT | NONE,
    "initial_accuracy": NUMBER | NONE,
    "smoothed_accuracy": NUMBER | NONE,
    "last_accuracy": NUMBER | NONE,
}
"""Types of a summary's values, if they are present."""
RECORDED = {
    "round",
    "selected",
    "test_accuracy",
    "participation_ratio",
    "coverage",
    "bytes_down",
    "bytes_up",
}
"""Keys of every record."""
SMOOTHED = "smoothed_accuracy"
"""A key that summaries of earlier versions lack."""
SHARE = re.compile("accuracy|ratio|coverage")
"""Fields of records that lie between 0 and 1."""


def _kinds_of(hint: Any) -> Kinds:
    """Return the types of JSON values that an annotation of `Record` allows."""
    kinds = Kinds()
    for part in get_args(hint) if isinstance(hint, UnionType) else (hint,):
        kinds |= NUMBER if part is float else {get_origin(part) or part}
    return kinds


OF_RECORD = {name: _kinds_of(hint) for name, hint in get_type_hints(Record).items()}
"""Types of a record's values."""


def has_kinds(values: Any, kinds: Mapping[str, Kinds]) -> bool:
    """Return whether `values` is a mapping in which the keys of `kinds` have these types, if they
    are present."""
    return isinstance(values, dict) and all(
        type(values[key]) in kinds[key] for key in kinds.keys() & values.keys()
    )


def is_mapping_of(values: Any, kinds: Kinds) -> bool:
    """Return whether `values` is a mapping to values of such types."""
    return isinstance(values, dict) and kinds.issuperset(map(type, values.values()))


def check_config(config: Any) -> dict[str, Any]:
    """Return `config` if it can be that of a run. Raises `DamagedError`."""
    required = {"seed", "num_clients", "num_rounds"}
    if not has_kinds(config, OF_CONFIG) or not config.keys() >= required:
        raise DamagedError(f"{CONFIG} is not that of a run")
    return dict(config)


def check_summary(summary: Any) -> dict[str, Any]:
    """Return `summary`, with present names, if it can be that of a run. Raises `DamagedError`.

    Earlier versions called the accuracy of the last round `final_accuracy`, which is the mean of
    the last rounds everywhere else. The key is renamed in place.
    """
    if isinstance(summary, dict) and "final_accuracy" in summary:
        summary.setdefault("last_accuracy", summary.pop("final_accuracy"))
    is_sound = (
        has_kinds(summary, OF_SUMMARY)
        and "status" in summary
        and is_mapping_of(summary.get("choices", {}), TEXT)
        and is_mapping_of(summary.get("totals", {}), NUMBER)
        and has_kinds(summary.get("revision") or {}, {"commit": TEXT | NONE})
    )
    if not is_sound:
        raise DamagedError(f"{SUMMARY} is not that of a run")
    return dict(summary)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config of a run. Raises `DamagedError`."""
    text = content_of(folder / CONFIG).decode(errors="replace")
    return check_config(parse_yaml(text, CONFIG))


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a run; None if it has not ended or cannot be read."""
    try:
        return check_summary(parse_json(content_of(folder / SUMMARY), SUMMARY))
    except DamagedError:
        return None


def read_metrics(
    folder: Path, name: str = METRICS, end: int | None = None, *, whole: bool = False
) -> list[dict[str, Any]]:
    """Return the records in a file of JSON lines, or in its first `end` bytes; none if it does not
    exist.

    They end before the first line that is no record, as where a process was killed. Raises
    `DamagedError` if the file cannot be read, and for such a line if the file must be `whole`.
    """
    path = folder / name
    content = content_of(path, MOST_BYTES_OF_ROUNDS) if path.exists() else b""
    lines = content[:end].splitlines()
    records = _records_in(b"[" + b",".join(lines) + b"]")  # all lines at once, which is faster
    if len(records) == len(lines):
        return records
    records = []
    for number, line in enumerate(lines, 1):
        record = _records_in(b"[" + line + b"]")
        if len(record) != 1:
            if whole:
                raise DamagedError(f"{name}, line {number} is not a record")
            break
        records += record
    return records


def _records_in(text: bytes) -> list[dict[str, Any]]:
    """Return the mappings in a JSON list; none if it is no such list."""
    try:
        records = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return records if all(isinstance(record, dict) for record in records) else []


@dataclass(frozen=True)
class Rounds:
    """The records of T rounds as arrays.

    `columns` has numbers by name, [T] each: nan where one was not measured, and for lists (`late`)
    their lengths. `chosen` [2, M] has rounds, from 0, and the clients selected in them.
    """

    num: int
    columns: Mapping[str, Floats]
    chosen: NDArray[np.int32]

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> "Rounds":
        """Return the arrays of records. Raises `DamagedError` if a value does not have the type of
        its field."""
        names = dict.fromkeys(chain.from_iterable(records))
        check_kinds(dict.fromkeys(names, Kinds()))
        if not all(len(record) == len(names) for record in records):
            records = [dict.fromkeys(names) | dict(record) for record in records]
        rows = map(itemgetter(*names), records) if records else ()
        values: dict[str, Sequence[Any]] = dict(zip(names, zip(*rows, strict=True), strict=True))
        check_kinds({name: _kinds_in(column) for name, column in values.items()})
        try:
            columns: dict[str, Floats] = {}
            for name, column in values.items():
                if name not in OF_RECORD:
                    continue
                if list in OF_RECORD[name]:
                    column = [None if ids is None else len(ids) for ids in column]
                columns[name] = np.array(column, np.float64)
            selected = values.get("selected", ())
            rounds = np.repeat(np.arange(len(selected)), [len(ids) for ids in selected])
            clients = list(chain.from_iterable(selected))
            chosen = np.array([rounds, clients], np.int32)
        except OverflowError as error:
            raise DamagedError(f"{METRICS} holds numbers that no run writes") from error
        return cls(len(records), columns or defaultdict(lambda: np.empty(0)), chosen)


def _kinds_in(column: Sequence[Any]) -> Kinds:
    """Return the types of values; a list of anything but integers counts as text."""
    kinds = Kinds(map(type, column))
    if kinds <= LIST | NONE:
        ids = chain.from_iterable(filter(None, column))
        if not INT.issuperset(map(type, ids)):
            return kinds | TEXT
    return kinds


def check_kinds(kinds: Mapping[str, Kinds]) -> None:
    """Raise `DamagedError` unless the columns of records have the types of their fields."""
    lacking = RECORDED - kinds.keys() if kinds else set()
    for name in (*sorted(lacking), *kinds):
        if name in lacking or not kinds[name] <= OF_RECORD.get(name, kinds[name]):
            raise DamagedError(f"{METRICS} holds lines that are not records of rounds ({name})")


def check_rounds(rounds: Rounds, config: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """Raise `DamagedError` if rounds are not those of a run with such a config and summary."""
    columns = rounds.columns
    for place in np.flatnonzero(columns["round"] != np.arange(1, rounds.num + 1))[:1]:
        number = columns["round"][place]
        raise DamagedError(f"{METRICS} has round {number:g} where round {place + 1} belongs")
    for name, column in columns.items():
        known = column[~np.isnan(column)] if type(None) in OF_RECORD[name] else column
        low = -sys.float_info.max if name.endswith("_loss") else 0.0
        high = 1.0 if SHARE.search(name) else sys.float_info.max
        if len(known) and not (known.min() >= low and known.max() <= high):
            raise DamagedError(f"{METRICS} has a {name} that is out of range")
    clients = rounds.chosen[1]
    if clients.size and not 0 <= clients.min() <= clients.max() < config["num_clients"]:
        raise DamagedError(f"{METRICS} names clients that the run does not have")
    if summary["status"] == "done" and rounds.num != config["num_rounds"]:
        raise DamagedError(f"{METRICS} holds {rounds.num} of {config['num_rounds']} rounds")
    if summary["status"] in FINAL:
        expected = {"seed": config["seed"], **_totals(rounds)}
        if SMOOTHED not in summary:
            del expected[SMOOTHED]
        _check_agreement(expected, dict(leaves(summary)))


def _totals(rounds: Rounds) -> dict[str, float | None]:
    """Return what a summary has of its rounds, by dotted key."""
    columns = rounds.columns
    accuracies = columns["test_accuracy"]
    measured = accuracies[np.isfinite(accuracies)].tolist()
    totals = {
        "rounds": rounds.num,
        SMOOTHED: mean_of_last(accuracies[-FINAL_WINDOW:].tolist()),
        "last_accuracy": measured[-1] if measured else None,
        "best_accuracy": max(measured, default=None),
    }
    for name in LAST_FIELDS:
        if name in columns and rounds.num:
            totals[name] = float(columns[name][-1])
    for name in TOTAL_FIELDS:
        if name in columns:
            totals[f"totals.{name}"] = float(columns[name].sum())
    return totals


def _check_agreement(expected: Mapping[str, float | None], summary: Mapping[str, Any]) -> None:
    """Raise `DamagedError` if a summary does not have the expected totals."""
    for key, value in expected.items():
        recorded = summary.get(key)
        if value is None or not isinstance(recorded, int | float):
            is_equal = value is recorded
        else:
            is_equal = math.isclose(value, recorded, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        if not is_equal:
            raise DamagedError(f"{SUMMARY} has {key}={recorded}, and its rounds {value}")
