"""Runs that are sent to Weights & Biases offline, and what is read of its files."""

import json
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from wandb.proto import wandb_internal_pb2 as pb

from fedsim.results.files import RunFolder
from fedsim.tracking.base import Trackers
from fedsim.tracking.wandb_tracker import WandbTracker
from tests.test_tracking import info, record, summary

linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="finds processes through /proc"
)


def processes(home: Path) -> dict[str, int]:
    """Those that were started with this HOME: `mirror`, and W&B's own service as `service`."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"HOME={home}\0".encode() in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes()
                if b"wandb" in command:
                    found["mirror" if b"wandb_mirror" in command else "service"] = int(folder.name)
    return found


HANG = 600.0
"""Seconds after which something that hangs is given up; nothing takes that long on any machine."""


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def tracker(mode: Any = "auto", timeout: float | None = None) -> WandbTracker:
    """One that waits for W&B at most `timeout` seconds at its end; None: as long as that takes on a
    busy machine."""
    limit = 20.0 if timeout is None else timeout
    made = WandbTracker(mode=mode, project="fedsim", entity=None, tags=["mine"], timeout=limit)
    made.timeout = HANG if timeout is None else timeout
    return made


def play(tracker: WandbTracker, folder: Path, num_rounds: int = 3) -> dict[str, Any]:
    RunFolder.create(folder, {"name": "trial", "seed": 0, "num_rounds": num_rounds})
    trackers = Trackers(["wandb"], lambda name: tracker)
    trackers.start(info(folder))
    for t in range(1, num_rounds + 1):
        trackers.log({**record(t), "selected": [1, 2], "test_loss": None})
    trackers.finish(summary())
    return trackers.degraded


def read_offline(path: Path) -> Iterator[pb.Record]:
    """The records of a .wandb file: a LevelDB log (32 KiB blocks; checksum, length, type) after a
    7-byte header."""
    content, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            one = pb.Record()
            one.ParseFromString(parts)
            parts = b""
            yield one


def items(entries: Any) -> dict[str, Any]:
    return {e.key or "/".join(e.nested_key): json.loads(e.value_json) for e in entries}


def offline_records(folder: Path) -> list[pb.Record]:
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    return list(read_offline(file))


def history_of(records: list[pb.Record]) -> list[dict[str, Any]]:
    return [items(r.history.item) for r in records if r.HasField("history")]
