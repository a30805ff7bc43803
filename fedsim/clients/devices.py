"""Clients' devices: how fast they compute, their bandwidths, and when they can be reached.

A table of devices is a CSV file with one row a device.

| column | what it holds |
|---|---|
| `client_id` | optional: the client that has this device, an integer >= 0; no two rows have the same |
| `ms_per_sample` or `computation` | milliseconds to pass one sample forward (FedScale: inference latency) |
| `down_kbps` and `up_kbps`, or `communication` for both | kilobits (1000 bits) per second |
| `active`, `inactive` | optional: when the device begins and ends to be reachable, seconds, as lists of equal length |
| `finish_time` | with these: the seconds after which they repeat |

`computation`, `communication`, `active`, `inactive` and `finish_time` are the names in FedScale's tables, whose
bandwidths come from MobiPerf (Lai et al., "FedScale: Benchmarking Model and System Performance of Federated Learning at
Scale", ICML 2022). A list is written `0;3600` or `[0, 3600]` (which CSV wants in quotes). Other columns are ignored.
"""

import csv
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import ConfigError, Problem, check, positive, rule
from fedsim.core.exact import exp
from fedsim.partitions.base import largest_remainder


@dataclass(frozen=True)
class Presence:
    """For each client the intervals [start, end) in which it is there, in seconds, repeated after its `period`.

    `intervals[i]` is float64 [J, 2], ascending and disjoint, within [0, periods[i]]. An interval that ends with the
    period goes on in one that begins with the next.
    """

    intervals: Sequence[NDArray[np.float64]]
    periods: NDArray[np.float64]

    def of(self, rows: NDArray[np.int64]) -> "Presence":
        """That of `rows`, in this order; a row may come several times."""
        return Presence([self.intervals[row] for row in rows], self.periods[rows])

    def remaining(self, now: float) -> NDArray[np.float64]:
        """Seconds from `now` until each client leaves [N]: 0 if it is not there, infinity if it never leaves."""
        pairs = zip(self.intervals, self.periods.tolist(), strict=True)
        return np.array([_remaining(own, period, now % period) for own, period in pairs], dtype=np.float64)


def _remaining(intervals: NDArray[np.float64], period: float, now: float) -> float:
    position = int(np.searchsorted(intervals[:, 0], now, side="right")) - 1
    if position < 0 or now >= intervals[position, 1]:
        return 0.0
    rest = float(intervals[position, 1]) - now
    if intervals[position, 1] < period or intervals[0, 0] > 0:
        return rest
    first = float(intervals[0, 1])
    return np.inf if first >= period else rest + first


ALIASES = {"ms_per_sample": "computation", "down_kbps": "communication", "up_kbps": "communication"}
PRESENCE = ("active", "inactive", "finish_time")
MOST_TOLD = 5
REMEDY = "docs/system.md has the columns"


@dataclass(frozen=True)
class DeviceTable:
    """M devices: `ms_per_sample`, `down_kbps`, `up_kbps` [M], and of tables that have them ids [M] and presence."""

    ms_per_sample: NDArray[np.float64]
    down_kbps: NDArray[np.float64]
    up_kbps: NDArray[np.float64]
    client_ids: NDArray[np.int64] | None
    presence: Presence | None


class RowError(ValueError):
    """What is wrong with a cell."""


def read_table(path: Path) -> DeviceTable:
    """The devices in a CSV file. Raises `ConfigError` with the rows and columns at fault."""
    try:
        state = path.stat()
    except OSError as error:
        raise _error(path, f"cannot be read ({error.strerror or error})") from error
    return _read(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=4)  # a sweep checks the same file once a job
def _read(path: Path, _modified: int, _size: int) -> DeviceTable:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            names = [name.strip() for name in reader.fieldnames or []]
            reader.fieldnames = names
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _error(path, f"is not a CSV file that can be read ({error})") from error
    columns = _columns(path, names)
    if not rows:
        raise _error(path, "has no row below its header")
    return _table(path, rows, columns)


def _columns(path: Path, names: list[str]) -> dict[str, str]:
    """The name in the file of each column that is read."""
    if len(set(names)) < len(names):
        raise _error(path, f"has a column twice: {', '.join(names)}")
    found = {key: key if key in names else other for key, other in ALIASES.items()}
    missing = [f"{key} (or {ALIASES[key]})" for key, name in found.items() if name not in names]
    some = [name for name in PRESENCE if name in names]
    if some and len(some) < len(PRESENCE):
        missing += [name for name in PRESENCE if name not in names]
    if missing:
        raise _error(path, f"lacks the column {', '.join(missing)}; it has {', '.join(names) or 'none'}")
    optional = {name: name for name in ("client_id", *some) if name in names}
    return found | optional


def _table(path: Path, rows: list[tuple[int, dict[str, str | None]]], columns: Mapping[str, str]) -> DeviceTable:
    problems: list[str] = []
    values: dict[str, list[float]] = {key: [] for key in ALIASES}
    ids: dict[int, int] = {}
    intervals: list[NDArray[np.float64]] = []
    periods: list[float] = []
    for line, row in rows:
        try:
            _check_length(row)
            for key in ALIASES:
                values[key].append(_positive(row, columns[key]))
            if "client_id" in columns:
                _add_id(ids, _id(row), line)
            if "active" in columns:
                period = _positive(row, "finish_time")
                intervals.append(_intervals(row, period))
                periods.append(period)
        except RowError as error:
            problems.append(f"line {line}: {error}")
    if problems:
        more = f" (and {len(problems) - MOST_TOLD} more lines)" if len(problems) > MOST_TOLD else ""
        raise _error(path, "; ".join(problems[:MOST_TOLD]) + more)
    return DeviceTable(
        ms_per_sample=np.array(values["ms_per_sample"]),
        down_kbps=np.array(values["down_kbps"]),
        up_kbps=np.array(values["up_kbps"]),
        client_ids=np.array(list(ids), dtype=np.int64) if "client_id" in columns else None,
        presence=Presence(intervals, np.array(periods)) if "active" in columns else None,
    )


def _check_length(row: Mapping[Any, Any]) -> None:
    """Raise `RowError` for a row that is longer than the header, whose cells are likely to be in wrong columns."""
    cells, beyond = len(row) - 1, row.get(None, [])
    if any(cell.strip() for cell in beyond):
        text = f"has {cells + len(beyond)} cells, and the header {cells}"
        raise RowError(f"{text} (a comma inside a cell needs quotes)")


def _cell(row: Mapping[str, str | None], name: str) -> str:
    value = row.get(name)  # None where the row is too short
    if value is None or not value.strip():
        raise RowError(f"{name} is empty")
    return value.strip()


def _number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise RowError(f"{name}={text!r} must be a number") from None
    if not math.isfinite(value):
        raise RowError(f"{name}={text!r} must be finite")
    return value


def _positive(row: Mapping[str, str | None], name: str) -> float:
    value = _number(_cell(row, name), name)
    if value <= 0:
        raise RowError(f"{name}={value:g} must be > 0")
    return value


def _id(row: Mapping[str, str | None]) -> int:
    text = _cell(row, "client_id")
    if not re.fullmatch(r"\d{1,18}", text):
        raise RowError(f"client_id={text!r} must be an integer >= 0")
    return int(text)


def _add_id(ids: dict[int, int], client: int, line: int) -> None:
    if client in ids:
        raise RowError(f"client_id={client} is that of line {ids[client]}, too")
    ids[client] = line


def _intervals(row: Mapping[str, str | None], period: float) -> NDArray[np.float64]:
    starts, ends = _list(row, "active"), _list(row, "inactive")
    if len(starts) != len(ends):
        raise RowError(f"active has {len(starts)} numbers and inactive {len(ends)}; each interval needs both")
    pairs = np.stack([starts, ends], 1)
    times = pairs.ravel()
    if (np.diff(times) <= 0).any() or times[0] < 0 or times[-1] > period:
        raise RowError(
            f"active={starts.tolist()} inactive={ends.tolist()} must rise strictly, one interval after another, within "
            f"[0, finish_time={period:g}]"
        )
    return pairs


def _list(row: Mapping[str, str | None], name: str) -> NDArray[np.float64]:
    parts = re.split(r"[;,\s]+", _cell(row, name).strip("[]() "))
    return np.array([_number(part, name) for part in parts])


def _error(path: Path, reason: str) -> ConfigError:
    return ConfigError([Problem("path", str(path), reason, REMEDY)])


Floats = NDArray[np.float64]
BYTES_PER_KILOBIT = 125.0


@dataclass(frozen=True)
class Devices:
    """Of N clients [N]: `forward` seconds to pass a sample through the model, `down` and `up` in bytes per second.

    `presence` says when each can be reached; None: always.
    """

    forward: Floats
    down: Floats
    up: Floats
    presence: Presence | None = None


class DeviceModel(ABC):
    """The interface of models of devices.

    Subclasses take their hyper-parameters keyword-only, with type annotations and without defaults. Speeds are
    milliseconds to pass one sample forward, bandwidths kilobits (1000 bits) per second.
    """

    @abstractmethod
    def draw(self, num_clients: int, rng: np.random.Generator) -> Devices:
        """The devices of the clients 0 to `num_clients` - 1; `rng` is a random stream of the run."""


def devices_of(ms_per_sample: Floats, down_kbps: Floats, up_kbps: Floats, presence: Presence | None = None) -> Devices:
    """Devices from arrays [N] in the units of configs."""
    return Devices(ms_per_sample / 1000, down_kbps * BYTES_PER_KILOBIT, up_kbps * BYTES_PER_KILOBIT, presence)


class Uniform(DeviceModel):
    """Each of the three values of a device is drawn uniformly between two bounds; two equal bounds make all devices
    equal in it."""

    def __init__(
        self, *, ms_per_sample: tuple[float, float], down_kbps: tuple[float, float], up_kbps: tuple[float, float]
    ) -> None:
        self._bounds = {"ms_per_sample": ms_per_sample, "down_kbps": down_kbps, "up_kbps": up_kbps}
        told = "must be two positive numbers, the lower one first"
        check(*(rule(0 < low <= high < np.inf, key, [low, high], told) for key, (low, high) in self._bounds.items()))

    def draw(self, num_clients: int, rng: np.random.Generator) -> Devices:
        shares = rng.random((num_clients, 3))  # client by client: they do not depend on how many there are
        low, high = np.array(list(self._bounds.values()), dtype=np.float64).T
        return devices_of(*(low + (high - low) * shares).T)


class LogNormal(DeviceModel):
    """Each of the three values is log-normal: its `median` times exp(`sigma` z), with z standard normal.

    The three are independent of each other.
    """

    def __init__(
        self,
        *,
        ms_per_sample_median: float,
        ms_per_sample_sigma: float,
        down_kbps_median: float,
        down_kbps_sigma: float,
        up_kbps_median: float,
        up_kbps_sigma: float,
    ) -> None:
        medians = {
            "ms_per_sample_median": ms_per_sample_median,
            "down_kbps_median": down_kbps_median,
            "up_kbps_median": up_kbps_median,
        }
        sigmas = {
            "ms_per_sample_sigma": ms_per_sample_sigma,
            "down_kbps_sigma": down_kbps_sigma,
            "up_kbps_sigma": up_kbps_sigma,
        }
        check(
            *(positive(key, value) for key, value in medians.items()),
            *(rule(0 <= value <= 10, key, value, "must lie in [0, 10]") for key, value in sigmas.items()),
        )
        self._medians, self._sigmas = np.array(list(medians.values())), np.array(list(sigmas.values()))

    def draw(self, num_clients: int, rng: np.random.Generator) -> Devices:
        values = self._medians * exp(self._sigmas * rng.standard_normal((num_clients, 3)))
        return devices_of(*values.T)


class Tiers(DeviceModel):
    """A few kinds of devices; clients are put into tiers of the given `shares` at random (by largest remainder)."""

    def __init__(
        self, *, shares: list[float], ms_per_sample: list[float], down_kbps: list[float], up_kbps: list[float]
    ) -> None:
        columns = {"ms_per_sample": ms_per_sample, "down_kbps": down_kbps, "up_kbps": up_kbps}
        count = len(shares)
        check(
            rule(count > 0 and min(shares) >= 0 and 0 < sum(shares) < np.inf, "shares", shares, "must be numbers >= 0"),
            *(
                rule(len(v) == count, key, v, f"must have one value for each of the {count} shares")
                or rule(all(0 < x < np.inf for x in v), key, v, "must be positive numbers")
                for key, v in columns.items()
            ),
        )
        self._shares = np.array(shares) / sum(shares)
        self._columns = [np.array(values) for values in columns.values()]

    def draw(self, num_clients: int, rng: np.random.Generator) -> Devices:
        counts = largest_remainder(self._shares, num_clients)
        tiers = rng.permutation(np.repeat(np.arange(len(counts)), counts))
        return devices_of(*(column[tiers] for column in self._columns))


class Trace(DeviceModel):
    """The devices in the rows of a CSV file (`fedsim.clients.devices` has its columns).

    `assign: id` takes the row whose `client_id` is the client's, and needs one for each client; `random` draws a row
    for each client, with replacement.
    """

    def __init__(self, *, path: Path, assign: Literal["id", "random"]) -> None:
        check(rule(path != Path(), "path", "", "must be the path of a CSV file", "docs/system.md has its columns"))
        self.path, self.assign = path, assign
        self._table = read_table(path)
        if assign == "id" and self._table.client_ids is None:
            raise ConfigError([Problem("assign", assign, f"{path} has no column client_id", "use assign=random")])

    def draw(self, num_clients: int, rng: np.random.Generator) -> Devices:
        table = self._table
        rows = (
            self._rows(num_clients) if self.assign == "id" else rng.integers(len(table.ms_per_sample), size=num_clients)
        )
        presence = None if table.presence is None else table.presence.of(rows)
        return devices_of(table.ms_per_sample[rows], table.down_kbps[rows], table.up_kbps[rows], presence)

    def _rows(self, num_clients: int) -> NDArray[np.int64]:
        assert self._table.client_ids is not None
        places = {int(client): row for row, client in enumerate(self._table.client_ids)}
        missing = [client for client in range(num_clients) if client not in places]
        if missing:
            some = ", ".join(map(str, missing[:5])) + (" and more" if len(missing) > 5 else "")
            reason = (
                f"has no row for client {some}; num_clients={num_clients} needs the client_ids 0 to {num_clients - 1}"
            )
            raise ConfigError(
                [Problem("system.devices.path", str(self.path), reason, "use system.devices.assign=random")]
            )
        return np.array([places[client] for client in range(num_clients)], dtype=np.int64)
