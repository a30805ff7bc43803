"""`fedsim trace`: write FedScale's traces of devices as a table for `system=trace`.

FedScale's traces (Lai et al. 2022) are two pickles. `client_device_capacity` has the speeds of
devices, and `client_behave_trace` the times at which devices can be reached. A pickle can call any
function of Python. `PlainUnpickler` rejects one that names a function or a class, so that it can
only make dictionaries, lists, numbers and texts.

FedScale numbers its clients from 1. Its client c has the capacity with the key c mod M, for M
capacities, and the behaviour at place c mod B, for B behaviours in the order of the file. The table
has this device of client c in the row with `client_id` c - 1.
"""

import csv
import io
import math
import pickle
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from fedsim.commands.dispatch import MistakeError
from fedsim.core.disk import open_regular, write_atomically
from fedsim.core.errors import DataError

HEADER = ("client_id", "computation", "communication")
PRESENCE_HEADER = ("active", "inactive", "finish_time")
MISSING_CAPACITY = {"computation": 1.0, "communication": 1.0}
"""FedScale takes these values for keys that the file of capacities lacks."""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("capacity", type=Path, help="FedScale's client_device_capacity")
    parser.add_argument(
        "behaviour", type=Path, nargs="?", help="FedScale's client_behave_trace, if you have it"
    )
    parser.add_argument(
        "--output", "-o", type=Path, default="devices.csv", help="the table (devices.csv)"
    )
    parser.add_argument(
        "--clients", type=int, metavar="N", help="only FedScale's clients 1 to N (all devices)"
    )


def run(options: Namespace) -> int:
    output: Path = options.output
    if output.exists():
        raise MistakeError(f"{output} exists already; choose another name by --output")
    if options.clients is not None and options.clients < 1:
        raise MistakeError(f"--clients {options.clients} must be 1 or more")
    capacities = read_plain(options.capacity)
    behaviours = None if options.behaviour is None else read_plain(options.behaviour)
    count = len(capacities) if behaviours is None else len(behaviours)
    if options.clients is not None:
        count = options.clients
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(HEADER if behaviours is None else HEADER + PRESENCE_HEADER)
    num_changed = 0
    for cells, is_changed in rows(capacities, behaviours, count):
        writer.writerow(cells)
        num_changed += is_changed
    write_atomically(output, table.getvalue().encode())
    print(f"{output} has {count} devices. Use it with system=trace system.devices.path={output}")
    if num_changed:
        print(f"{num_changed} of them had intervals that were empty, overlapped or were too long")
    return 0


class PlainUnpickler(pickle.Unpickler):
    """An unpickler that makes only dictionaries, lists, tuples, sets, numbers, bytes and texts.

    Everything else needs the name of a class or function, which it rejects.
    """

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Raise `UnpicklingError` with the name that the pickle would call."""
        raise pickle.UnpicklingError(
            f"it would call {module_name}.{global_name}, and fedsim reads plain containers only"
        )


def read_plain(path: Path) -> dict[int, Mapping[str, Any]]:
    """Return the dictionary of dictionaries in a pickle at `path`. Raises `DataError`."""
    try:
        with open_regular(path) as file:
            content = unpickled(file)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DataError(f"{path} is no pickle of plain containers: {error}") from error
    if not (isinstance(content, dict) and content):
        raise DataError(f"{path} must hold a dictionary of devices, not {type(content).__name__}")
    for key, value in content.items():
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise DataError(f"{path}: device {key!r} must be a dictionary, not {kind}")
    return content


def unpickled(file: BinaryIO) -> object:
    """Return the content of a pickle that calls nothing. Raises an exception for any other."""
    return PlainUnpickler(file, encoding="latin1").load()


def rows(
    capacities: Mapping[int, Mapping[str, Any]],
    behaviours: Mapping[int, Mapping[str, Any]] | None,
    count: int,
) -> Iterator[tuple[list[Any], bool]]:
    """Yield the cells of FedScale's clients 1 to `count`, and whether their intervals had to be
    changed. Raises `DataError` for values that a table of devices cannot have."""
    presences = [] if behaviours is None else list(behaviours.items())
    for client in range(1, count + 1):
        key = client % len(capacities)
        capacity = capacities.get(key, MISSING_CAPACITY)
        cells: list[Any] = [client - 1]
        for name in HEADER[1:]:
            cells.append(_positive(capacity, name, f"capacity {key}"))
        is_changed = False
        if presences:
            device, behaviour = presences[client % len(presences)]
            period = _positive(behaviour, "finish_time", f"device {device}")
            intervals, is_changed = _intervals(behaviour, period, f"device {device}")
            cells += [";".join(repr(interval[end]) for interval in intervals) for end in (0, 1)]
            cells.append(period)
        yield cells, is_changed


def _positive(values: Mapping[str, Any], name: str, device: str) -> float:
    value = values.get(name)
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise DataError(f"{device}: {name}={value!r} must be a finite number > 0")
    return value


def _intervals(
    behaviour: Mapping[str, Any], period: float, device: str
) -> tuple[list[list[float]], bool]:
    """Return the intervals in which a device is active: ascending, disjoint and in [0, `period`].

    Also return whether they differ from those of the trace: empty ones are left out, those that
    overlap or touch are joined, and what lies outside of the period is cut off.
    """
    starts = _times(behaviour, "active", device)
    ends = _times(behaviour, "inactive", device)
    if len(starts) != len(ends):
        raise DataError(f"{device}: active has {len(starts)} numbers and inactive {len(ends)}")
    given = [list(pair) for pair in zip(starts, ends, strict=True)]
    intervals: list[list[float]] = []
    for start, end in sorted(given):
        start, end = max(start, 0), min(end, period)
        if intervals and start <= intervals[-1][1]:
            intervals[-1][1] = max(end, intervals[-1][1])
        elif start < end:
            intervals.append([start, end])
    return intervals, intervals != given


def _times(behaviour: Mapping[str, Any], name: str, device: str) -> Sequence[float]:
    times = behaviour.get(name)
    error = DataError(f"{device}: {name} must be a list of finite numbers")
    if not isinstance(times, list | tuple):
        raise error
    for time in times:
        if not isinstance(time, int | float) or not math.isfinite(time):
            raise error
    return times
