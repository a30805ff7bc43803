"""Clients' devices: how fast they compute, their bandwidths, and when they can be reached.

The simulated clock (clients/system.py) draws devices by a `DeviceModel` once a run, one for each of
N clients. docs/system.md describes the columns of a table of devices, a CSV file with one row for
each device. A table may use the names of FedScale's traces in place of fedsim's (Lai et al.,
"FedScale: Benchmarking Model and System Performance of Federated Learning at Scale", ICML 2022).
"""

import csv
import math
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
}
"""Columns of speeds, and FedScale's names for them. FedScale has one bandwidth for both
directions."""
PRESENCE = ("active", "inactive", "finish_time")
"""Columns that say when a device can be reached; a table has all of them or none."""
SHORTEST_PRESENCE = 1e-6
"""Seconds before the end of an interval from which a client counts as gone."""
Sigma = Annotated[float, Interval(ge=0, le=10)]
"""The standard deviation of the logarithm of a log-normal number."""


@dataclass(frozen=True)
class Presence:
    """The times at which clients can be reached, in seconds after the run's start.

    `intervals[i]`, float64 [J, 2], are the J intervals [start, end) of client i. They are
    ascending, disjoint and within [0, periods[i]], and repeat after the client's period.
    """

    intervals: Sequence[Floats]
    periods: Floats

    def of(self, rows: Ints) -> "Presence":
        """Return the presence of `rows`, in this order; a row may occur several times."""
        return Presence([self.intervals[row] for row in rows], self.periods[rows])

    def remaining(self, now: float) -> Floats:
        """Return the seconds from `now` until each client leaves [N]: 0 if it cannot be reached,
        infinity if it never leaves."""
        seconds = np.zeros(len(self.periods))
        for client, period in enumerate(self.periods.tolist()):
            seconds[client] = _remaining(self.intervals[client], period, now % period)
        # `now` is a rounded sum. A round that ends because its clients leave may therefore end
        # slightly before their interval does. If they could still be reached, the next round
        # would select them and end at once, and the clock would stop.
        tolerance = max(SHORTEST_PRESENCE, 4 * math.ulp(now))
        return np.where(seconds > tolerance, seconds, 0.0)


def _remaining(intervals: Floats, period: float, now: float) -> float:
    """Return the seconds until a client leaves; `now` lies in [0, period).

    An interval at the end of a period continues in the next period, if that begins with an
    interval. A client whose only interval is the whole period never leaves.
    """
    index = int(np.searchsorted(intervals[:, 0], now, side="right")) - 1
    if index < 0 or now >= intervals[index, 1]:
        return 0.0
    end = float(intervals[index, 1])
    continues = end >= period and intervals[0, 0] <= 0  # in the first interval of the next period
    if not continues:
        return end - now
    first_end = float(intervals[0, 1])
    return np.inf if first_end >= period else end - now + first_end


@dataclass(frozen=True)
class Devices:
    """The devices of N clients, with an entry for each client in all arrays [N].

    `forward` is the number of seconds to pass a sample through the model; `down` and `up` are
    bandwidths in bytes per second. `presence` says when each client can be reached; None: always.
    """

    forward: Floats
    down: Floats
    up: Floats
    presence: Presence | None = None

    @classmethod
    def from_speeds(cls, speeds: Floats, presence: Presence | None = None) -> "Devices":
        """Return devices from speeds [N, 3] in the order and units of `SPEEDS`."""
        ms_per_sample, down_kbps, up_kbps = speeds.T
        return cls(
            ms_per_sample / 1000,
            down_kbps * BYTES_PER_KILOBIT,
            up_kbps * BYTES_PER_KILOBIT,
            presence,
        )

    def of(self, rows: Ints) -> "Devices":
        """Return the devices of `rows`, in this order; a row may occur several times."""
        presence = None if self.presence is None else self.presence.of(rows)
        return Devices(self.forward[rows], self.down[rows], self.up[rows], presence)


def read_table(path: Path) -> tuple[Devices, Ids | None]:
    """Return the devices in a CSV file, and the clients' ids [rows]; None: there is no such column.

    Raises `ConfigError` with the first line at fault.
    """
    try:
        modified = path.stat().st_mtime_ns
        if not path.is_file():
            raise OSError("it is no regular file")
        return _read(path, modified)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _error(path, f"cannot be read as a CSV file ({error})") from error


@lru_cache(maxsize=4)  # a sweep checks the same file once for each job
def _read(path: Path, _modified: int) -> tuple[Devices, Ids | None]:
    """Return the same as `read_table`. The time `_modified` is a part of the cache's key."""
    speeds: list[list[float]] = []
    ids: dict[int, int] = {}  # the line of each client id, in the order of lines
    intervals: list[Floats] = []
    periods: list[float] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        names = [name.strip() for name in reader.fieldnames or []]
        reader.fieldnames = names
        columns = _columns(path, names)
        for row in reader:
            line = reader.line_num
            try:
                if any(row.get(None, [])):  # csv puts the cells without a header under None
                    raise ValueError(
                        f"has more cells than the header, {len(names)} (a comma in a cell needs "
                        "quotes)"
                    )
                if None in row.values():  # csv puts it in place of the cells that a line lacks
                    raise ValueError(f"has fewer cells than the header, {len(names)}")
                speeds.append([_positive(row, column) for column in columns])
                if "client_id" in names:
                    client = _id(row)
                    if client in ids:
                        raise ValueError(f"client_id={client} is that of line {ids[client]}, too")
                    ids[client] = line
                if "active" in names:
                    period = _positive(row, "finish_time")
                    intervals.append(_intervals(row, period))
                    periods.append(period)
            except ValueError as error:
                raise _error(path, f"line {line}: {error}") from error
    if not speeds:
        raise _error(path, "has no row below its header")
    presence = Presence(intervals, np.array(periods)) if intervals else None
    devices = Devices.from_speeds(np.array(speeds), presence)
    return devices, np.array(list(ids)) if ids else None


def _columns(path: Path, names: list[str]) -> list[str]:
    """Return the columns of speeds in a table with the columns `names`, in the order of `SPEEDS`.

    Raises `ConfigError` if a column is missing or there twice.
    """
    columns = []
    missing = []
    for fedsim_name, fedscale_name in SPEEDS.items():
        column = fedsim_name if fedsim_name in names else fedscale_name
        columns.append(column)
        if column not in names:
            missing.append(f"{fedsim_name} (or {fedscale_name})")
    if any(name in names for name in PRESENCE):
        missing += [name for name in PRESENCE if name not in names]
    table = f"it has {', '.join(names) or 'none'}"
    if missing:
        raise _error(path, f"lacks the column {', '.join(missing)}; {table}")
    if len(set(names)) < len(names):
        raise _error(path, f"has a column twice; {table}")
    return columns


def _positive(row: Mapping[str, Any], name: str) -> float:
    """Return the number in the column `name`. Raises ValueError unless it is finite and > 0."""
    text = row[name].strip()
    try:
        value = float(text)
    except ValueError:
        value = np.nan
    if not 0 < value < np.inf:
        raise ValueError(f"{name}={text!r} must be a finite number > 0")
    return value


def _id(row: Mapping[str, Any]) -> int:
    """Return the client id of a row. Raises ValueError if it is no integer >= 0."""
    text = row["client_id"].strip()
    # 18 digits always fit into 64 bits
    if not re.fullmatch(r"\d{1,18}", text):
        raise ValueError(f"client_id={text!r} must be an integer >= 0")
    return int(text)


def _intervals(row: Mapping[str, Any], period: float) -> Floats:
    """Return the intervals [J, 2] of the columns `active` (starts) and `inactive` (ends).

    Raises ValueError if they are not ascending and disjoint within the period.
    """
    starts = _numbers(row, "active")
    ends = _numbers(row, "inactive")
    if len(starts) != len(ends):
        raise ValueError(
            f"active has {len(starts)} numbers and inactive {len(ends)}; each interval needs both"
        )
    intervals = np.stack([starts, ends], 1)
    times = intervals.ravel()
    is_inside = ((times >= 0) & (times <= period)).all()
    if not ((np.diff(times) > 0).all() and is_inside):
        raise ValueError(
            f"active and inactive must rise strictly in turn, within [0, finish_time={period:g}]"
        )
    return intervals


def _numbers(row: Mapping[str, Any], name: str) -> Floats:
    """Return the list of numbers in a cell, such as `[0, 10.5]` or `0;10.5`; none for `[]`.

    Raises ValueError with the first word that is no number.
    """
    text = row[name].strip("[]() ")
    numbers = []
    for word in re.split(r"[;,\s]+", text) if text else []:
        try:
            numbers.append(float(word))
        except ValueError as error:
            raise ValueError(f"{name} must be a list of numbers, not {word!r}") from error
    return np.array(numbers, dtype=np.float64)


def _error(path: Path, reason: str) -> ConfigError:
    """Return the error of a table, with `reason` as the violated rule."""
    return ConfigError([Problem("path", str(path), reason, "docs/system.md has the columns")])


class DeviceModel(ABC):
    """The interface of models of devices. Speeds are in milliseconds to pass one sample forward,
    and bandwidths in kilobits (1000 bits) per second."""

    @abstractmethod
    def draw(self, num_clients: int, rng: np.random.Generator) -> Devices:
        """Return the devices of the clients 0 to `num_clients` - 1.

        `rng` is a random stream of the run.
        """


@parameters
class Uniform(DeviceModel):
    """Devices whose three speeds are drawn uniformly between two bounds, which may be equal."""

    ms_per_sample: tuple[float, float]
    down_kbps: tuple[float, float]
    up_kbps: tuple[float, float]

    def problems(self) -> Problems:
        """Yield a problem for each pair of bounds that is out of order or not positive."""
        for key in SPEEDS:
            low, high = getattr(self, key)
            text = "must be two positive numbers, the lower one first"
            yield rule(0 < low <= high < np.inf, key, [low, high], text)

    def draw(self, num_clients: int, rng: np.random.Generator) -> Devices:
        """Return devices with uniform speeds."""
        bounds = np.array([self.ms_per_sample, self.down_kbps, self.up_kbps], dtype=np.float64)
        low, high = bounds.T
        # drawn client by client, so that more clients do not change the devices of the first ones
        draws = rng.random((num_clients, 3))
        return Devices.from_speeds(low + (high - low) * draws)


@parameters
class LogNormal(DeviceModel):
    """Devices whose three speeds are log-normal: `median` times exp(`sigma` z), with z standard
    normal."""

    ms_per_sample_median: Positive
    ms_per_sample_sigma: Sigma
    down_kbps_median: Positive
    down_kbps_sigma: Sigma
    up_kbps_median: Positive
    up_kbps_sigma: Sigma

    def draw(self, num_clients: int, rng: np.random.Generator) -> Devices:
        """Return devices with log-normal speeds."""
        medians = np.array([self.ms_per_sample_median, self.down_kbps_median, self.up_kbps_median])
        sigmas = np.array([self.ms_per_sample_sigma, self.down_kbps_sigma, self.up_kbps_sigma])
        return Devices.from_speeds(medians * exp(sigmas * rng.standard_normal((num_clients, 3))))


@parameters
class Tiers(DeviceModel):
    """A few kinds of devices. Clients are put at random into tiers of the given `shares`, rounded
    by largest remainder."""

    shares: list[float]
    ms_per_sample: list[float]
    down_kbps: list[float]
    up_kbps: list[float]

    def problems(self) -> Problems:
        """Yield problems of shares and speeds, which must be one for each tier."""
        shares = self.shares
        is_possible = len(shares) > 0 and min(shares) >= 0 and 0 < sum(shares) < np.inf
        yield rule(is_possible, "shares", shares, "must be numbers >= 0")
        for key in SPEEDS:
            values = getattr(self, key)
            text = f"must have one value for each of the {len(shares)} shares"
            yield rule(len(values) == len(shares), key, values, text)
            yield rule(all(0 < x < np.inf for x in values), key, values, "must be positive numbers")

    def draw(self, num_clients: int, rng: np.random.Generator) -> Devices:
        """Return devices of the tiers, whose sizes are exact and whose clients are random."""
        counts = largest_remainder(np.array(self.shares) / sum(self.shares), num_clients)
        tiers = rng.permutation(np.repeat(np.arange(len(counts)), counts))
        speeds = np.array([self.ms_per_sample, self.down_kbps, self.up_kbps])
        return Devices.from_speeds(speeds.T[tiers])


@parameters
class Trace(DeviceModel):
    """The devices in the rows of a CSV file (docs/system.md describes its columns)."""

    path: Path
    assign: Literal["id", "random"]
    """`id`: a client has the row whose `client_id` is its id; `random`: a row is drawn for each
    client, with replacement."""

    def problems(self) -> Problems:
        """Yield a problem unless the file has what `assign` needs. Raises `ConfigError` for a bad
        file."""
        if self.path == Path():
            remedy = "docs/system.md has its columns"
            yield Problem("path", "", "must be the path of a CSV file", remedy)
        elif read_table(self.path)[1] is None and self.assign == "id":
            text = f"{self.path} has no column client_id"
            yield Problem("assign", self.assign, text, "use assign=random")

    def draw(self, num_clients: int, rng: np.random.Generator) -> Devices:
        """Return devices of the table. Raises `ConfigError` if a client has no row."""
        table, ids = read_table(self.path)
        if self.assign == "random" or ids is None:
            return table.of(rng.integers(len(table.forward), size=num_clients))
        clients = np.arange(num_clients)
        missing = np.setdiff1d(clients, ids)
        if len(missing):
            text = (
                f"has no row for client {missing[0]}; "
                f"needs the client_ids 0 to num_clients - 1 = {num_clients - 1}"
            )
            remedy = "use system.devices.assign=random"
            raise ConfigError([Problem("system.devices.path", str(self.path), text, remedy)])
        # the row of each client: its place among the sorted ids, mapped back to the table's order
        return table.of(np.argsort(ids)[np.searchsorted(np.sort(ids), clients)])
