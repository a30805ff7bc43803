"""Checks that the files of a run that has ended are all there and undamaged.

`fedsim.running.outcome` calls `fault_of` before it skips a run. A sweep may look at the same run
many times, so the files are read again only after they have changed.
"""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedsim.core.disk import open_regular
from fedsim.results.files import MODEL
from fedsim.results.reading import (
    CONFIG,
    METRICS,
    SUMMARY,
    DamagedError,
    Rounds,
    check_rounds,
    read_config,
    read_metrics,
)

Signature = tuple[int, int, int]
"""A file's inode, its size [bytes] and the time of its last change [ns]."""
_whole_files: dict[Path, list[Signature | None]] = {}
"""The signatures of files that were found to be whole, by run folder.

Each list has the signatures of the summary, the config, the records and the model.
"""
SETTLED_SECONDS = 2.0
"""Signatures are remembered only for files that have not changed for this long.

A file that changes twice within one tick of the file system's clock keeps its signature.
"""
HEADER_START, MAX_HEADER = 8, 100_000_000
"""Format of safetensors: where the JSON of the header begins, and its maximum size, in bytes."""


def fault_of(folder: Path, config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Return which file of a run that has ended is missing or damaged; empty if none is.

    Files that have not changed since they were found to be whole are not read again.
    """
    signatures = [_signature(folder / name) for name in (SUMMARY, CONFIG, METRICS, MODEL)]
    if _whole_files.get(folder) == signatures:
        return ""
    try:
        if signatures[1] is None:
            return f"{CONFIG} is missing"
        read_config(folder)
        records = read_metrics(folder, whole=True)
        check_rounds(Rounds.of(records), config, summary)
        # A run that diverged in round 1 has no records, and then no file for them.
        if signatures[-1] is None or not is_whole_model(folder / MODEL):
            return f"{MODEL} is missing or cut short"
    except OSError as error:
        return f"{MODEL} cannot be read ({error.strerror})"
    except DamagedError as error:
        return str(error)
    latest_change = max(signature[2] for signature in signatures if signature is not None)
    if time.time() - latest_change / 1e9 > SETTLED_SECONDS:  # the change is in ns
        _whole_files[folder] = signatures
    return ""


def _signature(path: Path) -> Signature | None:
    """Return the signature of a file; None if it is missing."""
    with suppress(OSError):
        stat = path.stat()
        return stat.st_ino, stat.st_size, stat.st_mtime_ns
    return None


def is_whole_model(path: Path) -> bool:
    """Return whether a file of safetensors is as long as its header says.

    Raises OSError if it cannot be read.
    """
    with open_regular(path) as file:
        header_size = int.from_bytes(file.read(HEADER_START), "little")
        if header_size > MAX_HEADER:
            return False
        try:
            header = json.loads(file.read(header_size))
            header.pop("__metadata__", None)
            end = max(tensor["data_offsets"][1] for tensor in header.values())
            return bool(os.fstat(file.fileno()).st_size == HEADER_START + header_size + end)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return False
