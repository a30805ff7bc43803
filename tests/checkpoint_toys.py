"""Runs that are killed and go on: their command, what is compared of them, and damage to a
checkpoint."""

from pathlib import Path
from typing import Any

import torch

from fedsim.core.encoding import dataclasses_known_to, decode
from fedsim.results.files import MODEL
from fedsim.results.reading import read_metrics, read_summary
from fedsim.running.checkpoint_file import pack, unpack

CPU = torch.device("cpu")


def through_a_file(state: dict[str, Any], *owners: object) -> dict[str, Any]:
    """`state` as it comes out of a checkpoint that it was written to."""
    known = dataclasses_known_to(*owners)
    header, tensors = unpack(pack({}, state, known))
    found: dict[str, Any] = decode(header["content"], tensors, CPU, known)
    return found


# --- runs ---

WORDS = (
    "num_rounds=8",
    "local.epochs=1",
    "tracker=files_only",
    "num_clients=6",
    "cohort_size=2",
    "selector=oort",
)


class Killed(BaseException):
    """In place of SIGKILL: nothing catches it."""


def folder_in(place: str) -> Path:
    (found,) = (p.parent for p in Path(place).glob("*/*/config.yaml"))
    return found


def result(folder: Path) -> tuple[Any, ...]:
    """What must not depend on how often a run was killed."""
    records = [{k: v for k, v in r.items() if "seconds" not in k} for r in read_metrics(folder)]
    summary = read_summary(folder) or {}
    totals = {k: v for k, v in summary.get("totals", {}).items() if "seconds" not in k}
    kept = {
        k: v
        for k, v in summary.items()
        if k not in ("started", "wall_seconds", "totals", "revision")
    }
    return records, kept, totals, (folder / MODEL).read_bytes(), {p.name for p in folder.iterdir()}


EVERY = "checkpoint.every=2"


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
