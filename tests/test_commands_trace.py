"""`fedsim trace`: FedScale's pickles as a table of devices."""

import os
import pickle
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.clients.devices import read_table
from fedsim.commands.dispatch import answer
from fedsim.commands.trace import rows

CAPACITIES = {
    key: {"computation": 10.0 * (key + 1), "communication": 100 * (key + 1)} for key in range(4)
}
BEHAVIOURS = {
    7: {"active": [1, 3, 6, 9], "inactive": [2, 4, 7, 10], "finish_time": 10, "model": "M1"},
    3: {"active": [0], "inactive": [8.5], "finish_time": 20, "duration": 8.5, "model": "é"},
    5: {"active": [], "inactive": [], "finish_time": 10, "model": "M2"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with both pickles."""
    monkeypatch.chdir(tmp_path)
    save("capacity", CAPACITIES)
    save("behaviour", BEHAVIOURS)
    return tmp_path


def save(name: str, content: Any, protocol: int = 4) -> None:
    Path(name).write_bytes(pickle.dumps(content, protocol))


def trace(*words: str) -> int | None:
    return answer(["trace", *words])


@pytest.mark.usefixtures("folder")
def test_a_client_has_the_devices_that_fedscale_gives_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """FedScale's client c has capacity c mod 4, and behaviour c mod 3 in the order of the file."""
    assert trace("capacity", "behaviour", "-o", "table.csv", "--clients", "5") == 0
    assert "table.csv has 5 devices" in capsys.readouterr().out
    devices, ids = read_table(Path("table.csv"))
    assert ids is not None
    assert ids.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(devices.forward * 1000, [20, 30, 40, 10, 20])
    np.testing.assert_allclose(devices.down / 125, [200, 300, 400, 100, 200])
    assert devices.presence is not None
    starts = [intervals[:, 0].tolist() for intervals in devices.presence.intervals]
    assert starts == [[0], [], [1, 3, 6, 9], [0], []]
    assert devices.presence.periods.tolist() == [20, 10, 10, 20, 10]
    present = [bool(devices.presence.remaining(now)[2] > 0) for now in (2, 6, 8, 9, 15)]
    assert present == [False, True, False, True, False]


@pytest.mark.usefixtures("folder")
def test_capacities_alone_make_a_table() -> None:
    assert trace("capacity") == 0
    devices, _ = read_table(Path("devices.csv"))
    assert len(devices.forward) == 4
    assert devices.presence is None


@pytest.mark.usefixtures("folder")
def test_a_capacity_that_is_not_there_is_fedscales_default() -> None:
    save("capacity", {5: CAPACITIES[1]})
    assert trace("capacity") == 0
    devices, _ = read_table(Path("devices.csv"))
    np.testing.assert_allclose([devices.forward[0] * 1000, devices.up[0] / 125], [1, 1])


def intervals_of(starts: list[float], ends: list[float]) -> tuple[str, str, bool]:
    behaviour = {"active": starts, "inactive": ends, "finish_time": 10}
    ((cells, is_changed),) = rows(CAPACITIES, {0: behaviour}, 1)
    return cells[3], cells[4], is_changed


def test_intervals_that_a_table_cannot_have_are_mended() -> None:
    assert intervals_of([1, 5], [2, 9]) == ("1;5", "2;9", False)
    assert intervals_of([1, 2, 5], [2, 3, 6]) == ("1;5", "3;6", True)
    assert intervals_of([5, 1], [6, 2]) == ("1;5", "2;6", True)
    assert intervals_of([1, 4, 8], [3, 4, 12.5]) == ("1;8", "3;10", True)
    assert intervals_of([1, 2], [9, 3]) == ("1", "9", True)


@pytest.mark.usefixtures("folder")
def test_a_table_has_all_digits_of_a_trace() -> None:
    """With 16 digits the end of the interval would be 39.83418609644475, after the period."""
    period = 39.834186096444746
    save("behaviour", {0: {"active": [0.1], "inactive": [50], "finish_time": period}})
    assert trace("capacity", "behaviour") == 0
    presence = read_table(Path("devices.csv"))[0].presence
    assert presence is not None
    assert presence.intervals[0].tolist() == [[0.1, period]]
    assert presence.periods[0] == period


class Calls:
    """An object whose pickle calls a function."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


CALLS = {
    "os.system": Calls(os.system, "touch called"),
    "a class": OrderedDict(a=1),
    "NumPy": {1: {"computation": np.float64(1.0)}},
    "eval": {1: Calls(eval, "open('called', 'w')")},
}
BY_NUMBER = b"\x80\x02\x82\x01)R."
"""A call of the function with the number 1 in Python's registry of extensions."""
OLD_STYLE = b"(S'touch called'\nios\nsystem\n."
"""A call by the oldest protocol (INST)."""


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", CALLS)
def test_a_pickle_that_calls_anything_is_rejected(
    name: str, protocol: int, capsys: pytest.CaptureFixture[str]
) -> None:
    save("capacity", CALLS[name], protocol)
    assert trace("capacity") == 3
    assert "it would call" in capsys.readouterr().err
    assert not Path("called").exists()
    assert not Path("devices.csv").exists()


DAMAGED = {
    "extension": BY_NUMBER,
    "oldest protocol": OLD_STYLE,
    "text": b"client_id,computation\n",
    "empty": b"",
    "cut off": pickle.dumps(CAPACITIES)[:-5],
    "persistent id": b"Pid\n.",
    "a state of a dictionary": b"}}b.",
    "huge": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b".",
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_that_is_no_plain_pickle_is_rejected(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("capacity").write_bytes(DAMAGED[name])
    assert trace("capacity") == 3
    error = capsys.readouterr().err
    assert "capacity is no pickle of plain containers" in error or "must hold a dict" in error
    assert not Path("called").exists()


MISTAKES: dict[str, tuple[Any, Any]] = {
    "must hold a dictionary": ([1], BEHAVIOURS),
    "device 1 must be a dictionary": ({1: 2}, BEHAVIOURS),
    "capacity 0: computation=0 must be": ({0: {"computation": 0}}, BEHAVIOURS),
    "capacity 0: communication=None": ({0: {"computation": 1}}, BEHAVIOURS),
    "device 3: finish_time=nan": (CAPACITIES, {3: {"finish_time": float("nan")}}),
    "device 3: active must be a list": (CAPACITIES, {3: {"finish_time": 1, "active": "0"}}),
    "active has 1 numbers and inactive 0": (
        CAPACITIES,
        {3: {"finish_time": 9, "active": [1], "inactive": []}},
    ),
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("text", MISTAKES)
def test_what_is_no_trace_is_rejected(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    capacities, behaviours = MISTAKES[text]
    save("capacity", capacities)
    save("behaviour", behaviours)
    assert trace("capacity", "behaviour") == 3
    assert text in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_a_table_is_not_written_over(capsys: pytest.CaptureFixture[str]) -> None:
    Path("devices.csv").write_text("mine")
    assert trace("capacity") == 2
    assert "devices.csv exists already" in capsys.readouterr().err
    assert Path("devices.csv").read_text() == "mine"
    assert trace("capacity", "-o", "other.csv", "--clients", "0") == 2
    assert trace("nowhere", "-o", "other.csv") == 3
