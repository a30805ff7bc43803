"""Clients' devices: how fast they compute, their bandwidths, and when they can be reached."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedsim.errors import ConfigError, Problem, check, positive, rule
from fedsim.exact.elementary import exp
from fedsim.partitions.apportion import largest_remainder
from fedsim.system.presence import Presence
from fedsim.system.table import read_table

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
        check(
            *(
                rule(0 < low <= high < np.inf, key, [low, high], "must be two positive numbers, the lower one first")
                for key, (low, high) in self._bounds.items()
            )
        )

    def draw(self, num_clients: int, rng: np.random.Generator) -> Devices:
        shares = rng.random((num_clients, 3))  # client by client: they do not depend on how many there are
        columns = [
            low + (high - low) * share for (low, high), share in zip(self._bounds.values(), shares.T, strict=True)
        ]
        return devices_of(*columns)


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
    """The devices in the rows of a CSV file (`fedsim.system.table` has its columns).

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
