"""Clients' devices: how fast they compute, their bandwidths, and when they can be reached.

docs/system.md has the columns of a table of devices, a CSV file with one row a device; FedScale's
names are those of Lai et al., "FedScale: Benchmarking Model and System Performance of Federated
Learning at Scale", ICML 2022.
"""

import csv
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Interval

from fedsim.core.arrays import Floats, Ints
from fedsim.core.errors import ConfigError, Problem, rule
from fedsim.core.exact import exp
from fedsim.core.parameters import Positive, Problems, parameters
from fedsim.core.types import Ids
from fedsim.partitions.base import largest_remainder

BYTES_PER_KILOBIT = 125.0
SPEEDS = {
    "ms_per_sample": "computation",
    "down_kbps": "communication",
    "up_kbps": "communication",
}  # FedScale's names
PRESENCE = ("active", "inactive", "finish_time")
Sigma = Annotated[float, Interval(ge=0, le=10)]


@dataclass(frozen=True)
class Presence:
    """For each client the intervals [start, end) in which it is there, in seconds, repeated after
    its `period`.

    `intervals[i]` is float64 [J, 2], ascending and disjoint, within [0, periods[i]].
    """

    intervals: Sequence[Floats]
    periods: Floats

    def of(self, rows: Ints) -> "Presence":
        """That of `rows`, in this order; a row may come several times."""
        return Presence([self.intervals[row] for row in rows], self.periods[rows])

    def remaining(self, now: float) -> Floats:
        """Seconds from `now` until each client leaves [N]: 0 if it is not there, infinity if it
        never leaves."""
        pairs = zip(self.intervals, self.periods.tolist(), strict=True)
        return np.array(
            [_remaining(own, period, now % period) for own, period in pairs], dtype=np.float64
        )


def _remaining(intervals: Floats, period: float, now: float) -> float:
    position = int(np.searchsorted(intervals[:, 0], now, side="right")) - 1
    if position < 0 or now >= intervals[position, 1]:
        return 0.0
    rest = float(intervals[position, 1]) - now
    if intervals[position, 1] < period or intervals[0, 0] > 0:
        return rest
    first = float(intervals[0, 1])
    return np.inf if first >= period else rest + first


@dataclass(frozen=True)
class Devices:
    """Of N clients [N]: `forward` seconds to pass a sample through the model, `down` and `up` in
    bytes per second.

    `presence` says when each can be reached; None: always.
    """

    forward: Floats
    down: Floats
    up: Floats
    presence: Presence | None = None

    def of(self, rows: Ints) -> "Devices":
        """Those of `rows`, in this order; a row may come several times."""
        presence = None if self.presence is None else self.presence.of(rows)
        return Devices(self.forward[rows], self.down[rows], self.up[rows], presence)


def devices_of(
    ms_per_sample: Floats, down_kbps: Floats, up_kbps: Floats, presence: Presence | None = None
) -> Devices:
    """Devices from arrays [N] in the units of configs."""
    return Devices(
        ms_per_sample / 1000, down_kbps * BYTES_PER_KILOBIT, up_kbps * BYTES_PER_KILOBIT, presence
    )


def read_table(path: Path) -> tuple[Devices, Ids | None]:
    """The devices in a CSV file, and whose they are. Raises `ConfigError` with the first line at
    fault."""
    try:
        modified = path.stat().st_mtime_ns
        if not path.is_file():
            raise OSError("it is no regular file")
        return _read(path, modified)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _error(path, f"cannot be read as a CSV file ({error})") from error


@lru_cache(maxsize=4)  # a sweep checks the same file once a job
def _read(path: Path, _modified: int) -> tuple[Devices, Ids | None]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        reader.fieldnames = names = [name.strip() for name in reader.fieldnames or []]
        columns = _columns(path, names)
        speeds: list[list[float]] = []
        ids: dict[int, int] = {}
        presences: list[tuple[Floats, float]] = []
        for row in reader:
            try:
                if any(row.get(None, [])):
                    raise ValueError(
                        f"has more cells than the header, {len(names)} (a comma in a cell needs quotes)"
                    )
                speeds.append([_positive(row, column) for column in columns])
                if (
                    "client_id" in names
                    and ids.setdefault(client := _id(row), reader.line_num) != reader.line_num
                ):
                    raise ValueError(f"client_id={client} is that of line {ids[client]}, too")
                if "active" in names:
                    presences.append(_intervals(row, _positive(row, "finish_time")))
            except ValueError as error:
                raise _error(path, f"line {reader.line_num}: {error}") from error
    if not speeds:
        raise _error(path, "has no row below its header")
    presence = None
    if presences:
        presence = Presence(
            [own for own, _ in presences], np.array([period for _, period in presences])
        )
    forward, down, up = np.array(speeds).T
    return devices_of(forward, down, up, presence), np.array(list(ids)) if ids else None


def _columns(path: Path, names: list[str]) -> list[str]:
    found = [key if key in names else other for key, other in SPEEDS.items()]
    missing = [
        f"{key} (or {SPEEDS[key]})"
        for key, name in zip(SPEEDS, found, strict=True)
        if name not in names
    ]
    if any(name in names for name in PRESENCE):
        missing += [name for name in PRESENCE if name not in names]
    if missing or len(set(names)) < len(names):
        fault = f"lacks the column {', '.join(missing)}" if missing else "has a column twice"
        raise _error(path, f"{fault}; it has {', '.join(names) or 'none'}")
    return found


def _positive(row: Mapping[str, Any], name: str) -> float:
    text = (row[name] or "").strip()  # None where the row is too short
    try:
        value = float(text)
    except ValueError:
        value = np.nan
    if not 0 < value < np.inf:
        raise ValueError(f"{name}={text!r} must be a finite number > 0")
    return value


def _id(row: Mapping[str, Any]) -> int:
    text = (row["client_id"] or "").strip()
    if not re.fullmatch(r"\d{1,18}", text):
        raise ValueError(f"client_id={text!r} must be an integer >= 0")
    return int(text)


def _intervals(row: Mapping[str, Any], period: float) -> tuple[Floats, float]:
    lists = [re.split(r"[;,\s]+", (row[name] or "").strip("[]() ")) for name in PRESENCE[:2]]
    starts, ends = (np.array(found, dtype=np.float64) for found in lists)
    if len(starts) != len(ends):
        raise ValueError(
            f"active has {len(starts)} numbers and inactive {len(ends)}; each interval needs both"
        )
    pairs = np.stack([starts, ends], 1)
    times = pairs.ravel()
    if not ((np.diff(times) > 0).all() and times[0] >= 0 and times[-1] <= period):
        raise ValueError(
            f"active and inactive must rise strictly in turn, within [0, finish_time={period:g}]"
        )
    return pairs, period


def _error(path: Path, reason: str) -> ConfigError:
    return ConfigError([Problem("path", str(path), reason, "docs/system.md has the columns")])


class DeviceModel(ABC):
    """The interface of models of devices. Speeds are milliseconds to pass one sample forward,
    bandwidths kilobits (1000 bits) per second."""

    @abstractmethod
    def draw(self, num_clients: int, rng: np.random.Generator) -> Devices:
        """The devices of the clients 0 to `num_clients` - 1; `rng` is a random stream of the
        run."""


@parameters
class Uniform(DeviceModel):
    """Each of the three values of a device is drawn uniformly between two bounds, which may be
    equal."""

    ms_per_sample: tuple[float, float]
    down_kbps: tuple[float, float]
    up_kbps: tuple[float, float]

    def problems(self) -> Problems:
        for key in SPEEDS:
            low, high = getattr(self, key)
            told = "must be two positive numbers, the lower one first"
            yield rule(0 < low <= high < np.inf, key, [low, high], told)

    def draw(self, num_clients: int, rng: np.random.Generator) -> Devices:
        shares = rng.random(
            (num_clients, 3)
        )  # client by client: they do not depend on how many there are
        low, high = np.array([self.ms_per_sample, self.down_kbps, self.up_kbps], dtype=np.float64).T
        return devices_of(*(low + (high - low) * shares).T)


@parameters
class LogNormal(DeviceModel):
    """Each of the three values is log-normal: its `median` times exp(`sigma` z), with z standard
    normal."""

    ms_per_sample_median: Positive
    ms_per_sample_sigma: Sigma
    down_kbps_median: Positive
    down_kbps_sigma: Sigma
    up_kbps_median: Positive
    up_kbps_sigma: Sigma

    def draw(self, num_clients: int, rng: np.random.Generator) -> Devices:
        medians = np.array([self.ms_per_sample_median, self.down_kbps_median, self.up_kbps_median])
        sigmas = np.array([self.ms_per_sample_sigma, self.down_kbps_sigma, self.up_kbps_sigma])
        return devices_of(*(medians * exp(sigmas * rng.standard_normal((num_clients, 3)))).T)


@parameters
class Tiers(DeviceModel):
    """A few kinds of devices; clients are put into tiers of the given `shares` at random (by
    largest remainder)."""

    shares: list[float]
    ms_per_sample: list[float]
    down_kbps: list[float]
    up_kbps: list[float]

    def problems(self) -> Problems:
        shares, count = self.shares, len(self.shares)
        possible = count > 0 and min(shares) >= 0 and 0 < sum(shares) < np.inf
        yield rule(possible, "shares", shares, "must be numbers >= 0")
        for key in SPEEDS:
            values = getattr(self, key)
            yield rule(
                len(values) == count,
                key,
                values,
                f"must have one value for each of the {count} shares",
            )
            yield rule(all(0 < x < np.inf for x in values), key, values, "must be positive numbers")

    def draw(self, num_clients: int, rng: np.random.Generator) -> Devices:
        counts = largest_remainder(np.array(self.shares) / sum(self.shares), num_clients)
        tiers = rng.permutation(np.repeat(np.arange(len(counts)), counts))
        return devices_of(
            *(
                np.array(column)[tiers]
                for column in (self.ms_per_sample, self.down_kbps, self.up_kbps)
            )
        )


@parameters
class Trace(DeviceModel):
    """The devices in the rows of a CSV file (docs/system.md has its columns). `assign: id` takes
    the row whose `client_id` is the client's; `random` draws a row for each client, with
    replacement."""

    path: Path
    assign: Literal["id", "random"]

    def problems(self) -> Problems:
        if self.path == Path():
            yield Problem(
                "path", "", "must be the path of a CSV file", "docs/system.md has its columns"
            )
        elif read_table(self.path)[1] is None and self.assign == "id":
            yield Problem(
                "assign", self.assign, f"{self.path} has no column client_id", "use assign=random"
            )

    def draw(self, num_clients: int, rng: np.random.Generator) -> Devices:
        table, ids = read_table(self.path)
        if self.assign == "random" or ids is None:
            return table.of(rng.integers(len(table.forward), size=num_clients))
        if len(missing := np.setdiff1d(np.arange(num_clients), ids)):
            told = f"has no row for client {missing[0]}; needs the client_ids 0 to num_clients - 1 = {num_clients - 1}"
            remedy = "use system.devices.assign=random"
            raise ConfigError([Problem("system.devices.path", str(self.path), told, remedy)])
        return table.of(np.argsort(ids)[np.searchsorted(np.sort(ids), np.arange(num_clients))])
