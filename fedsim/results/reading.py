"""Readers and checks of a run's files. A file that no run can have written raises `DamagedError`.

Everything that reads results uses this file: reports, searches, resuming, the skipping of finished
jobs. Files may come from other people. So hostile files are rejected, too: huge ones, deeply nested
ones, and those with YAML aliases that multiply them. The module imports no pandas, so that finished
jobs are skipped quickly.

A record is the line of one round in metrics.jsonl. Its fields are those of `fedsim.core.record.
Record`. Checks compare the types of JSON values (`Kinds`) with the annotations there.
"""

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
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
FINISHED = ("done", "reached")
"""Statuses of runs that reached their last round, or the accuracy at which they stop (`stop_at`).
They have a final accuracy."""
FINAL = (*FINISHED, "diverged")
"""Statuses of runs that have ended. The same command resumes a run with any other status."""
MOST_BYTES = 2**24
"""Largest size in bytes of a config or summary that is read."""
MOST_BYTES_OF_ROUNDS = 2**29
"""Largest size in bytes of files that grow with the rounds or the clients."""
MAX_NODES, MAX_DEPTH, LARGEST_INT = 1_000_000, 64, 2**63
"""Limits of the plain values in a file: number of values, nesting, and size of integers."""
SURROGATE = re.compile("[\ud800-\udfff]")
"""Halves of surrogate pairs: JSON can hold single ones, which cannot be written as UTF-8."""
SUSPICIOUS = re.compile(r"&|^[ ?:-]{100}", re.MULTILINE)
"""Signs of YAML anchors, or of deep nesting without brackets.

A text without such signs and with few brackets needs no slow check of its events.
"""
TOLERANCE = 1e-5
"""Relative and absolute tolerance of totals, because archives have losses and seconds in single
precision."""


class DamagedError(FedsimError):
    """A file has contents that no run writes (exit code 3)."""

    exit_code = 3


def content_of(path: Path, max_bytes: int = MOST_BYTES) -> bytes:
    """Return the bytes of a regular file of at most `max_bytes` bytes. Raises `DamagedError` if it
    cannot be read."""
    try:
        return read_regular(path, max_bytes)
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read ({error.strerror or error})") from error


def parse_json(text: str | bytes, name: str, *, is_large: bool = False) -> Any:
    """Return the values in a JSON text, checked by `plain` unless `is_large`.

    Raises `DamagedError`, whose message has the `name` of the file.
    """
    try:
        value = json.loads(text)
        return value if is_large else plain(value, name)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{name} is no JSON ({error})") from error


def parse_yaml(text: str, name: str) -> Any:
    """Return the values in a YAML text, checked by `plain`.

    Raises `DamagedError`, whose message has the `name` of the file, also for aliases.
    """
    try:
        if SUSPICIOUS.search(text) or text.count("[") + text.count("{") > MAX_DEPTH:
            _check_events(text)
        return plain(yaml.load(text, YAML_LOADER), name)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())[:100]
        raise DamagedError(f"{name} is no YAML of a run ({reason})") from error


def _check_events(text: str) -> None:
    """Raise ValueError if a YAML text has aliases, or is nested too deeply.

    Aliases can make a short text huge, and deep nesting exhausts the loader's stack.
    """
    depth = 0
    for event in yaml.parse(text, YAML_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH or isinstance(event, yaml.AliasEvent):
            raise ValueError("it has aliases, or is too deep")


def plain(value: Any, name: str) -> Any:
    """Return `value` if it is made of mappings, lists, texts, finite numbers, booleans and None.

    Raises `DamagedError`, whose message has the `name` of the file, for other values, and for too
    many or too deeply nested ones.
    """
    nodes: list[tuple[Any, int]] = [(value, 0)]  # still to check, each with its depth
    num_nodes = 0
    while nodes:
        node, depth = nodes.pop()
        num_nodes += 1
        is_sound = depth <= MAX_DEPTH and num_nodes <= MAX_NODES and _is_plain(node)
        if not is_sound:
            raise DamagedError(f"{name} holds what no run writes")
        if isinstance(node, dict):
            for key, item in node.items():
                nodes += [(key, depth + 1), (item, depth + 1)]
        elif isinstance(node, list):
            nodes += [(item, depth + 1) for item in node]
    return value


def _is_plain(node: Any) -> bool:
    """Return whether a node has a plain type. Items of mappings and lists are not checked."""
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
CONFIG_KINDS: Mapping[str, Kinds] = {
    "seed": INT,
    "num_clients": INT,
    "num_rounds": INT,
    "cohort_size": INT,
    "partition_seed": INT | NONE,
    "init_seed": INT | TEXT | NONE,
    "client_accuracy": TEXT | NONE,
    "final_window": INT | NONE,
}
"""Types of the config values that fedsim reads. Keys may be missing."""
SUMMARY_KINDS: Mapping[str, Kinds] = {
    "status": TEXT,
    "choices": MAPPING,
    "totals": MAPPING,
    "environment": MAPPING,
    "revision": MAPPING | NONE,
    "start_up_rounds": INT | NONE,
    "wall_seconds": NUMBER,
    "asks": TEXT | NONE,
    "server_sees": TEXT | NONE,
    "engine": TEXT | NONE,
    "error": TEXT | NONE,
    "initial_accuracy": NUMBER | NONE,
    "final_accuracy": NUMBER | NONE,
    "final_window": INT,
    "last_accuracy": NUMBER | NONE,
}
"""Types of the summary values that fedsim reads. Keys may be missing."""
REQUIRED_FIELDS = {
    "round",
    "selected",
    "test_accuracy",
    "participation_ratio",
    "coverage",
    "bytes_down",
    "bytes_up",
}
"""Fields that every record has."""
SHARE_NAME = re.compile("accuracy|ratio|coverage")
"""A part of the names of fields that lie between 0 and 1."""
UNSOUND = Kinds({object})
"""The type of a list with other items than integers. No field of a record allows it."""


def _kinds_of(hint: Any) -> Kinds:
    """Return the types of JSON values that an annotation of `Record` allows.

    `float | None` allows int, float and None; `list[int]` allows list.
    """
    kinds = Kinds()
    for part in get_args(hint) if isinstance(hint, UnionType) else (hint,):
        kinds |= NUMBER if part is float else {get_origin(part) or part}
    return kinds


RECORD_KINDS = {name: _kinds_of(hint) for name, hint in get_type_hints(Record).items()}
"""Types of each field of a record."""


def has_kinds(values: Any, kinds: Mapping[str, Kinds]) -> bool:
    """Return whether `values` is a mapping whose values have the types that `kinds` has for their
    keys. Keys may be missing, and other keys may have any value."""
    return isinstance(values, dict) and all(
        type(values[key]) in kinds[key] for key in kinds.keys() & values.keys()
    )


def is_mapping_of(values: Any, kinds: Kinds) -> bool:
    """Return whether `values` is a mapping whose values all have one of the types."""
    return isinstance(values, dict) and kinds.issuperset(map(type, values.values()))


def check_config(config: Any) -> dict[str, Any]:
    """Return a copy of `config`. Raises `DamagedError` if it cannot be the config of a run."""
    required = {"seed", "num_clients", "num_rounds"}
    if not has_kinds(config, CONFIG_KINDS) or not config.keys() >= required:
        raise DamagedError(f"{CONFIG} is not that of a run")
    return dict(config)


def check_summary(summary: Any) -> dict[str, Any]:
    """Rename keys of earlier versions in `summary`, and return a copy of it.

    Raises `DamagedError` if it cannot be the summary of a run.
    """
    if isinstance(summary, dict):
        _rename_earlier_keys(summary)
    is_sound = (
        has_kinds(summary, SUMMARY_KINDS)
        and "status" in summary
        and is_mapping_of(summary.get("choices", {}), TEXT)
        and is_mapping_of(summary.get("totals", {}), NUMBER)
        and has_kinds(summary.get("revision") or {}, {"commit": TEXT | NONE})
    )
    if not is_sound:
        raise DamagedError(f"{SUMMARY} is not that of a run")
    return dict(summary)


def _rename_earlier_keys(summary: dict[str, Any]) -> None:
    """Rename keys of earlier versions in place.

    There, `final_accuracy` was the accuracy of the last round. Later versions also had the mean
    that is now the final accuracy, as `smoothed_accuracy`.
    """
    if "final_accuracy" in summary and "last_accuracy" not in summary:
        summary["last_accuracy"] = summary.pop("final_accuracy")
    if "smoothed_accuracy" in summary:
        summary["final_accuracy"] = summary.pop("smoothed_accuracy")


def read_config(folder: Path) -> dict[str, Any]:
    """Return the checked config of a run. Raises `DamagedError`."""
    text = content_of(folder / CONFIG).decode(errors="replace")
    return check_config(parse_yaml(text, CONFIG))


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return the checked summary of a run; None if the run has not ended, or its summary is
    damaged."""
    try:
        return check_summary(parse_json(content_of(folder / SUMMARY), SUMMARY))
    except DamagedError:
        return None


def read_metrics(
    folder: Path, name: str = METRICS, end: int | None = None, *, whole: bool = False
) -> list[dict[str, Any]]:
    """Return the records in the first `end` bytes of a file of JSON lines (None: in all).

    A file that does not exist has no records. A process that is killed may leave a broken line: the
    records end before it. With `whole` a broken line raises `DamagedError`, as does a file that
    cannot be read.
    """
    path = folder / name
    content = content_of(path, MOST_BYTES_OF_ROUNDS) if path.exists() else b""
    lines = content[:end].splitlines()
    records = _records_in(b"[" + b",".join(lines) + b"]")  # all lines at once, which is faster
    if len(records) == len(lines):
        return records
    # A line is broken, or holds several records: read line by line to find it.
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
    """Return the mappings in a JSON list; none if the text is something else."""
    try:
        records = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return records if all(isinstance(record, dict) for record in records) else []


@dataclass(frozen=True)
class Rounds:
    """The records of `num` = T rounds as arrays.

    `columns` has an array [T] for each field. It is nan where a field was not measured. A list
    (`selected`, `late`) counts by its length. `chosen` [2, M] has a column for each of the M
    selections of a client in a round: the round, from 0, and the id of the client.
    """

    num: int
    columns: Mapping[str, Floats]
    chosen: NDArray[np.int32]

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> "Rounds":
        """Return the arrays of records. Raises `DamagedError` if a value does not have the type of
        its field."""
        values: dict[str, list[Any]] = {}
        for name in dict.fromkeys(chain.from_iterable(records)):  # the fields of all records
            values[name] = [record.get(name) for record in records]
        if records and not values:
            raise _not_records("they are empty")
        check_kinds({name: _kinds_in(column) for name, column in values.items()})
        try:
            columns: dict[str, Floats] = {}
            for name, column in values.items():
                if name not in RECORD_KINDS:
                    continue
                if list in RECORD_KINDS[name]:
                    column = [None if ids is None else len(ids) for ids in column]
                columns[name] = np.array(column, np.float64)
            selected = values.get("selected", ())
            rounds = np.repeat(np.arange(len(selected)), [len(ids) for ids in selected])
            clients = list(chain.from_iterable(selected))
            chosen = np.array([rounds, clients], np.int32)
        except OverflowError as error:
            raise DamagedError(f"{METRICS} holds numbers that no run writes") from error
        # Without records, every column is there and empty, so that measures need no special case.
        return cls(len(records), columns or defaultdict(lambda: np.empty(0)), chosen)


def _kinds_in(column: Sequence[Any]) -> Kinds:
    """Return the types of the values of a field; `UNSOUND` for lists with other items than
    integers."""
    kinds = Kinds(map(type, column))
    if kinds <= LIST | NONE:
        ids = chain.from_iterable(filter(None, column))  # without None and empty lists
        if not INT.issuperset(map(type, ids)):
            return UNSOUND
    return kinds


def check_kinds(kinds: Mapping[str, Kinds]) -> None:
    """Raise `DamagedError` unless all required fields are there, with types that they allow.

    `kinds` has the types of the values of each field. No fields at all (no rounds) are sound, and
    unknown fields are ignored.
    """
    missing = REQUIRED_FIELDS - kinds.keys() if kinds else ()
    if missing:
        raise _not_records(min(missing))
    for name, kinds_of_field in kinds.items():
        if name in RECORD_KINDS and not kinds_of_field <= RECORD_KINDS[name]:
            raise _not_records(name)


def _not_records(reason: str) -> DamagedError:
    return DamagedError(f"{METRICS} holds lines that are not records of rounds ({reason})")


def check_rounds(rounds: Rounds, config: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """Raise `DamagedError` if rounds cannot be those of a run with this config and summary."""
    columns = rounds.columns
    # 1. Rounds are numbered 1, 2, ...
    misplaced = np.flatnonzero(columns["round"] != np.arange(1, rounds.num + 1))
    if len(misplaced):
        place = misplaced[0]
        number = columns["round"][place]
        raise DamagedError(f"{METRICS} has round {number:g} where round {place + 1} belongs")
    # 2. Values are in their ranges. nan is out of range for a field that must be measured.
    for name, column in columns.items():
        known = column[~np.isnan(column)] if type(None) in RECORD_KINDS[name] else column
        low = -sys.float_info.max if name.endswith("_loss") else 0.0
        high = 1.0 if SHARE_NAME.search(name) else sys.float_info.max
        if len(known) and not (known.min() >= low and known.max() <= high):
            raise DamagedError(f"{METRICS} has a {name} that is out of range")
    # 3. Clients and number of rounds are those of the config, and totals those of the summary.
    clients = rounds.chosen[1]
    if clients.size and not 0 <= clients.min() <= clients.max() < config["num_clients"]:
        raise DamagedError(f"{METRICS} names clients that the run does not have")
    if summary["status"] == "done" and rounds.num != config["num_rounds"]:
        raise DamagedError(f"{METRICS} holds {rounds.num} of {config['num_rounds']} rounds")
    if summary["status"] in FINAL:
        expected: dict[str, float | None] = {"seed": config["seed"]}
        expected.update(_totals(rounds, window_of(config)))
        if "final_accuracy" not in summary:
            del expected["final_accuracy"]
        _check_agreement(expected, dict(leaves(summary)))


def window_of(values: Mapping[str, Any]) -> int:
    """Return the number of last rounds over which the final accuracy of a run is a mean, from its
    config or summary. Those of earlier versions do not hold it."""
    return values.get("final_window") or FINAL_WINDOW


def _totals(rounds: Rounds, window: int) -> dict[str, float | None]:
    """Return the values of a summary that follow from its rounds, by dotted key."""
    columns = rounds.columns
    accuracies = columns["test_accuracy"]
    measured = accuracies[np.isfinite(accuracies)].tolist()
    totals = {
        "rounds": rounds.num,
        "final_accuracy": mean_of_last(accuracies.tolist(), window),
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
    """Raise `DamagedError` if a summary (values by dotted key) does not have the expected ones."""
    for key, value in expected.items():
        recorded = summary.get(key)
        if value is None or not isinstance(recorded, int | float):
            is_equal = value is None and recorded is None
        else:
            is_equal = math.isclose(value, recorded, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        if not is_equal:
            raise DamagedError(f"{SUMMARY} has {key}={recorded}, and its rounds {value}")
