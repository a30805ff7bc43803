"""How runs end, as it is returned and as it is on file, what a summary has of their records, and
who is told of them. Needs no PyTorch."""

import hashlib
import json
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.config.plan import Plan
from fedsim.config.user_code import changed_since, is_users
from fedsim.core.disk import read_regular
from fedsim.core.errors import DataError, FedsimError
from fedsim.core.record import LAST_FIELDS, TOTAL_FIELDS, Record, mean_of_last
from fedsim.results import files
from fedsim.results.files import MODEL, OutputError, RunFolder
from fedsim.results.reading import (
    FINAL,
    METRICS,
    SUMMARY,
    DamagedError,
    Rounds,
    check_rounds,
    read_metrics,
    read_summary,
)
from fedsim.tracking.base import SweepPosition


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `done`, `diverged`, `failed`, `interrupted`, `preempted`; before its first
    round also `data`, `config`, `held` (by another process). `changed`: it has an end, which other
    code of the user's has reached. `skipped`: an earlier run did so; `cause`: the exception that
    has ended it in this process, of a command's jobs only one that has kept it from its first
    round."""

    status: str
    summary: Mapping[str, Any]
    skipped: bool = False
    cause: BaseException | None = None

    @property
    def final(self) -> bool:
        """The same command does not run it again."""
        return self.status in FINAL


def outcome_on_file(plan: Plan, place: Path | None = None) -> Outcome:
    """What its folder (or `place`) says of a run; `failed` where there is no summary, or one of an
    end whose files are not whole, which are then named in `error`; `changed` where other code of
    the user's has made it, and it is not to be replaced."""
    folder = place or plan.folder
    summary = read_summary(folder)
    if summary is None:
        return Outcome("failed", {})
    if summary["status"] in FINAL:
        if fault := _fault_of(folder, plan.config, summary):
            return Outcome("failed", {**summary, "error": fault})
        if not plan.settings.overwrite and (modules := changed_since(summary, plan.config)):
            return Outcome(
                "changed",
                {**summary, "error": f"the code of {modules} has changed since it was run"},
            )
    return Outcome(summary["status"], summary)


def _fault_of(folder: Path, config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Why the files in the folder of a run with an end are not what it left; empty if they are.
    Files that have not changed since they were found sound are not read again."""
    seen = [_signature(folder / name) for name in (SUMMARY, METRICS, MODEL)]
    if _SOUND.get(folder) == seen:
        return ""
    try:
        check_rounds(Rounds.of(read_metrics(folder, whole=True)), config, summary)
        if None in seen or not files.is_whole_model(folder / MODEL):
            return f"{MODEL} is missing or cut short"
    except OSError as error:
        return f"{MODEL} cannot be read ({error.strerror})"
    except DamagedError as error:
        return str(error)
    if time.time() - max(changed for _, _, changed in filter(None, seen)) / 1e9 > SETTLED_SECONDS:
        _SOUND[folder] = seen
    return ""


def _signature(path: Path) -> tuple[int, int, int] | None:
    """What changes with a file: inode, size, and the time of its last change in nanoseconds; None
    if it is missing."""
    with suppress(OSError):
        stat = path.stat()
        return stat.st_ino, stat.st_size, stat.st_mtime_ns
    return None


_SOUND: dict[Path, list[tuple[int, int, int] | None]] = {}
"""Signatures of files that were found sound, by their folder."""
SETTLED_SECONDS = 2.0
"""Age of a file from which on another change shows in its time."""


def worked_in(plan: Plan) -> Path:
    """Where a run leaves its files until it ends: in its folder, or beside a finished result that
    it is to replace."""
    beside = plan.settings.overwrite and outcome_on_file(plan).final
    return files.replacement_of(plan.folder) if beside else plan.folder


def ended_by(reason: BaseException, plan: Plan, place: Path, round: int = 0) -> Outcome:
    """The end of a run in the folder `place` that has raised `reason` in a `round`, or before round
    1. The traceback of what is no `FedsimError` is kept there, or on a full disk shown."""
    if isinstance(reason, KeyboardInterrupt):
        return Outcome("interrupted", {"error": "Ctrl-C"}, cause=reason)
    if isinstance(reason, OutputError):
        warn(f"fedsim: {reason}\n")
    if isinstance(reason, FedsimError):
        return Outcome("failed", {"error": str(reason)}, cause=reason)
    text, words = "".join(traceback.format_exception(reason)), f"{type(reason).__name__}: {reason}"
    when = [f"round {round}"] if 0 < round <= plan.settings.num_rounds else []
    words = f"{words} ({', '.join([*when, *_line_of(reason)])})"
    try:
        RunFolder(place).write_error(plan.config, text)
    except OutputError as full:
        warn(f"{text}fedsim: {full}\n")
    if not round:  # there are no trackers to tell it
        warn(f"fedsim: {plan.folder} failed before any round was run: {words}\n")
    return Outcome("failed", {"error": words}, cause=reason)


def _line_of(reason: BaseException) -> list[str]:
    """The line of the user's code, or of other code where there is none of it, that has raised
    `reason`."""
    lines = list(traceback.walk_tb(reason.__traceback__))
    modules = [str(frame.f_globals.get("__name__", "builtins")) for frame, _ in lines]
    own = [
        line
        for line, module in zip(lines, modules, strict=True)
        if module == "__main__" or is_users(module)
    ]
    for frame, number in (own or lines)[-1:]:
        return [f"{Path(frame.f_code.co_filename).name}, line {number}, in {frame.f_code.co_name}"]
    return []


def warn(text: str) -> None:
    """Write to stderr, which may be a file on the same disk."""
    with suppress(OSError):
        sys.stderr.write(text)


def totals_of(records: Sequence[Record], initial_accuracy: float) -> dict[str, Any]:
    """The part of a summary that follows from the records of all rounds."""
    evaluated = [r.test_accuracy for r in records if r.test_accuracy is not None]
    last = records[-1] if records else None
    simulated: dict[str, Any] = {}
    if last is not None and last.late is not None:
        late = sum(len(record.late or ()) for record in records)
        simulated = {"simulated_seconds": last.simulated_time, "late_updates": late}
    return {
        "rounds": len(records),
        "initial_accuracy": initial_accuracy,
        "smoothed_accuracy": mean_of_last([r.test_accuracy for r in records]),
        "last_accuracy": evaluated[-1] if evaluated else None,
        "best_accuracy": max(evaluated, default=None),
        "mean_participation_ratio": float(np.mean([r.participation_ratio for r in records]))
        if records
        else None,
        **{name: getattr(last, name) if last else 0.0 for name in LAST_FIELDS},
        **simulated,
        **({} if last is None or last.epsilon is None else {"epsilon": last.epsilon}),
        "totals": {name: sum(getattr(r, name) for r in records) for name in TOTAL_FIELDS},
    }


class Watch:
    """The one to whom a run is told. This one does nothing. `sweep`: where the run stands in its
    sweep."""

    sweep: SweepPosition | None = None

    def setting_up(self) -> AbstractContextManager[None]:
        """Within it, all that the run needs before its first round is made."""
        return nullcontext()

    def round_ended(self, record: Record) -> str | None:
        """The record of a round that is in the run's files. Returns why the run is to end here, or
        None to go on."""
        return None


HASH_BYTES = 32


class CheckpointError(DataError):
    """A checkpoint is damaged, or cannot be read."""


def checkpoint_content(path: Path) -> bytes:
    """The bytes of a checkpoint file. Raises OSError, and `CheckpointError` if it is not as long as
    it says."""
    if not files.is_whole_model(path, HASH_BYTES):
        raise CheckpointError("is damaged: it is not as long as its header says")
    return read_regular(path, path.stat().st_size)


def header_of(checkpoint: bytes) -> dict[str, Any]:
    """The JSON of a checkpoint file. Raises `CheckpointError` if the file is not as it was
    written."""
    digest, data = checkpoint[:HASH_BYTES], checkpoint[HASH_BYTES:]
    if hashlib.sha256(data).digest() != digest:
        raise CheckpointError("is damaged: its SHA-256 is not that of its content")
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(
        json.loads(data[8 : 8 + length])["__metadata__"]["checkpoint"]
    )
    return header
