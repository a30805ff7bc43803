"""The one door through which results come back. Each file is read and checked, or rejected by a
`DamagedError`.

Whoever reads a run's folder, an archive or a reference goes through it: reports, searches,
resuming, "already done".
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
"""Statuses of runs that have an end; runs of others go on with the same command."""
MOST_BYTES, MOST_BYTES_OF_ROUNDS = 2**24, 2**29
"""Sizes up to which a config or summary is read, and files that grow with the rounds or the
clients."""
MOST_NODES, MOST_DEPTH, LARGEST_INT, LARGEST = 1_000_000, 64, 2**63, float("inf")
SURROGATE = re.compile("[\ud800-\udfff]")
SUSPICIOUS = re.compile(r"&|^[ ?:-]{100}", re.MULTILINE)
"""Without it, and with few brackets, a YAML text has no aliases and is not deep."""
ROUNDING = 1e-5
"""Relative: archives have losses and seconds in single precision."""


class DamagedError(FedsimError):
    """A file is not as a run leaves it (exit code 3)."""

    exit_code = 3


def content_of(path: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a regular file. Raises `DamagedError`."""
    try:
        return read_regular(path, most)
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read ({error.strerror or error})") from error


def parse_json(text: str | bytes, name: str, *, is_large: bool = False) -> Any:
    """The plain values in a JSON text; any, of one that `is_large`. Raises `DamagedError`, which
    calls it `name`."""
    try:
        value = json.loads(text)
        return value if is_large else plain(value, name)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{name} is no JSON ({error})") from error


def parse_yaml(text: str, name: str) -> Any:
    """The plain values in a YAML text without aliases. Raises `DamagedError`, which calls it
    `name`."""
    try:
        if SUSPICIOUS.search(text) or text.count("[") + text.count("{") > MOST_DEPTH:
            _check_events(text)
        return plain(yaml.load(text, YAML_LOADER), name)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise DamagedError(
            f"{name} is no YAML of a run ({' '.join(str(error).split())[:100]})"
        ) from error


def _check_events(text: str) -> None:
    """Raise ValueError where a YAML text has aliases, which can multiply it, or would exhaust the
    loader's stack."""
    depth = 0
    for event in yaml.parse(text, YAML_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > MOST_DEPTH or isinstance(event, yaml.AliasEvent):
            raise ValueError("it has aliases, or is too deep")


def plain(value: Any, name: str) -> Any:
    """`value`, if it is made of mappings, lists, texts, finite numbers, booleans and None, and
    neither deep nor huge. Raises `DamagedError`, which calls it `name`."""
    left, count = [(value, 0)], 0
    while left:
        node, depth = left.pop()
        count += 1
        is_sound = depth <= MOST_DEPTH and count <= MOST_NODES
        if isinstance(node, dict):
            is_sound = is_sound and all(isinstance(key, str) for key in node)
            left += [(below, depth + 1) for pair in node.items() for below in pair]
        elif isinstance(node, list):
            left += [(below, depth + 1) for below in node]
        elif isinstance(node, str):
            is_sound = is_sound and (node.isascii() or SURROGATE.search(node) is None)
        elif isinstance(node, int | float):
            is_sound = (
                is_sound
                and abs(node) < LARGEST
                and (isinstance(node, float) or abs(node) < LARGEST_INT)
            )
        else:
            is_sound = is_sound and node is None
        if not is_sound:
            raise DamagedError(f"{name} holds what no run writes")
    return value


Kinds = frozenset[type]
INT, NUMBER, TEXT = Kinds({int}), Kinds({int, float}), Kinds({str})
LIST, MAPPING, NONE = Kinds({list}), Kinds({dict}), Kinds({type(None)})
OF_CONFIG: Mapping[str, Kinds] = {
    **dict.fromkeys(("seed", "num_clients", "num_rounds", "cohort_size"), INT),
    "partition_seed": INT | NONE,
    "init_seed": INT | TEXT | NONE,
    "client_accuracy": TEXT | NONE,
}
OF_SUMMARY: Mapping[str, Kinds] = {
    "status": TEXT,
    **dict.fromkeys(("choices", "totals", "environment"), MAPPING),
    "revision": MAPPING | NONE,
    "start_up_rounds": INT | NONE,
    "wall_seconds": NUMBER,
    **dict.fromkeys(("asks", "engine", "error"), TEXT | NONE),
    **dict.fromkeys(("initial_accuracy", "smoothed_accuracy", "last_accuracy"), NUMBER | NONE),
}
"""Types of values where they are there."""
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
    """The types of JSON values that an annotation of `Record` allows."""
    kinds = Kinds()
    for part in get_args(hint) if isinstance(hint, UnionType) else (hint,):
        kinds |= NUMBER if part is float else {get_origin(part) or part}
    return kinds


OF_RECORD = {name: _kinds_of(hint) for name, hint in get_type_hints(Record).items()}


def has_kinds(values: Any, kinds: Mapping[str, Kinds]) -> bool:
    """Whether `values` is a mapping in which those that `kinds` names have one of its types, if
    they are there."""
    return isinstance(values, dict) and all(
        type(values[key]) in kinds[key] for key in kinds.keys() & values.keys()
    )


def is_mapping_of(values: Any, kinds: Kinds) -> bool:
    """Whether `values` is a mapping to values of such types."""
    return isinstance(values, dict) and kinds.issuperset(map(type, values.values()))


def check_config(config: Any) -> dict[str, Any]:
    """`config`, if it can be that of a run. Raises `DamagedError`."""
    if not has_kinds(config, OF_CONFIG) or not config.keys() >= {
        "seed",
        "num_clients",
        "num_rounds",
    }:
        raise DamagedError(f"{CONFIG} is not that of a run")
    found: dict[str, Any] = config
    return found


def check_summary(summary: Any) -> dict[str, Any]:
    """`summary`, if it can be that of a run, with present names. Raises `DamagedError`.

    Earlier versions called the accuracy of the last round `final_accuracy`, which is the mean of
    the last rounds everywhere else.
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
    found: dict[str, Any] = summary
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a run. Raises `DamagedError`."""
    text = content_of(folder / CONFIG).decode(errors="replace")
    return check_config(parse_yaml(text, CONFIG))


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a run; None if it has not ended or cannot be read."""
    try:
        return check_summary(parse_json(content_of(folder / SUMMARY), SUMMARY))
    except DamagedError:
        return None


def read_metrics(
    folder: Path, name: str = METRICS, end: int | None = None, *, whole: bool = False
) -> list[dict[str, Any]]:
    """The records in a file of JSON lines, or in its first `end` bytes; none if it does not exist.
    They end before the first line that is none, as where a process was killed. Raises
    `DamagedError` where it cannot be read, and for such a line where the file is to be `whole`."""
    path = folder / name
    content = content_of(path, MOST_BYTES_OF_ROUNDS) if path.exists() else b""
    lines = content[:end].splitlines()
    records = _records_in(b"[" + b",".join(lines) + b"]")  # at once, which is faster
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
    """The mappings in a JSON list; none if it is no such list."""
    try:
        records = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return records if all(isinstance(record, dict) for record in records) else []


@dataclass(frozen=True)
class Rounds:
    """What is kept of the records of T rounds.

    `columns`: numbers by name, [T] each, nan where one was not measured, and of lists (`late`) how
    long they are; `chosen`: rounds, from 0, and the clients selected in them, [2, M].
    """

    num: int
    columns: Mapping[str, Floats]
    chosen: NDArray[np.int32]

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> "Rounds":
        """Raises `DamagedError` where a value is not of the type that its field has."""
        names = dict.fromkeys(chain.from_iterable(records))
        check_kinds(dict.fromkeys(names, Kinds()))
        if not all(len(record) == len(names) for record in records):
            records = [dict.fromkeys(names) | dict(record) for record in records]
        rows = map(itemgetter(*names), records) if records else ()
        values: dict[str, Sequence[Any]] = dict(zip(names, zip(*rows, strict=True), strict=True))
        kinds = {name: Kinds(map(type, column)) for name, column in values.items()}
        for name, kind in kinds.items():
            if kind <= LIST | NONE and not INT.issuperset(
                map(type, chain.from_iterable(filter(None, values[name])))
            ):
                kinds[name] |= TEXT
        check_kinds(kinds)
        columns: dict[str, Floats] = {}
        try:
            for name in [name for name in names if name in OF_RECORD]:
                column = values[name]
                if list in OF_RECORD[name]:
                    column = [None if ids is None else len(ids) for ids in column]
                columns[name] = np.array(column, np.float64)
            selected = values.get("selected", ())
            chosen = (
                np.repeat(np.arange(len(selected)), [*map(len, selected)]),
                [*chain.from_iterable(selected)],
            )
            return cls(
                len(records),
                columns or defaultdict(lambda: np.empty(0)),
                np.array(chosen, np.int32),
            )
        except OverflowError as error:
            raise DamagedError(f"{METRICS} holds numbers that no run writes") from error


def check_kinds(kinds: Mapping[str, Kinds]) -> None:
    """Raise `DamagedError` unless the columns of records have the types of their fields."""
    lacking = RECORDED - kinds.keys() if kinds else set()
    for name in (*sorted(lacking), *kinds):
        if name in lacking or not kinds[name] <= OF_RECORD.get(name, kinds[name]):
            raise DamagedError(f"{METRICS} holds lines that are not records of rounds ({name})")


def check_rounds(rounds: Rounds, config: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """Raise `DamagedError` where rounds are not those of a run with such a config and summary."""
    columns = rounds.columns
    for at in np.flatnonzero(columns["round"] != np.arange(1, rounds.num + 1))[:1]:
        raise DamagedError(
            f"{METRICS} has round {columns['round'][at]:g} where round {at + 1} belongs"
        )
    for name, column in columns.items():
        known = column[~np.isnan(column)] if type(None) in OF_RECORD[name] else column
        low = -sys.float_info.max if name.endswith("_loss") else 0.0
        high = 1.0 if SHARE.search(name) else sys.float_info.max
        if len(known) and not (known.min() >= low and known.max() <= high):
            raise DamagedError(f"{METRICS} has a {name} that is out of range")
    if (
        rounds.chosen.size
        and not 0 <= rounds.chosen[1].min() <= rounds.chosen[1].max() < config["num_clients"]
    ):
        raise DamagedError(f"{METRICS} names clients that the run does not have")
    if summary["status"] == "done" and rounds.num != config["num_rounds"]:
        raise DamagedError(f"{METRICS} holds {rounds.num} of {config['num_rounds']} rounds")
    if summary["status"] in FINAL:
        expected = {"seed": config["seed"], **_totals(rounds)}
        if SMOOTHED not in summary:
            expected.pop(SMOOTHED)
        _check_agreement(expected, dict(leaves(summary)))


def _totals(rounds: Rounds) -> dict[str, float | None]:
    """What a summary has of its rounds, by dotted key."""
    columns = rounds.columns
    accuracies = columns["test_accuracy"][np.isfinite(columns["test_accuracy"])].tolist()
    found = {
        "rounds": rounds.num,
        SMOOTHED: mean_of_last(columns["test_accuracy"][-FINAL_WINDOW:].tolist()),
        "last_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
    }
    for name in LAST_FIELDS:
        if name in columns and rounds.num:
            found[name] = float(columns[name][-1])
    for name in TOTAL_FIELDS:
        if name in columns:
            found[f"totals.{name}"] = float(columns[name].sum())
    return found


def _check_agreement(found: Mapping[str, float | None], told: Mapping[str, Any]) -> None:
    for key, value in found.items():
        other = told.get(key)
        if value is None or not isinstance(other, int | float):
            is_equal = value is other
        else:
            is_equal = math.isclose(value, other, rel_tol=ROUNDING, abs_tol=ROUNDING)
        if not is_equal:
            raise DamagedError(f"{SUMMARY} has {key}={other}, and its rounds {value}")
