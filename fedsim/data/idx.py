"""Reader of IDX files (MNIST and similar data sets) that verifies their header, length and checksum."""

import hashlib
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedsim.errors import DataError


def read_idx(path: Path, shape: tuple[int, ...], md5: str | None = None) -> Tensor:
    """The uint8 tensor in `path`, which must have the given `shape` (-1: any length).

    Raises `DataError` with the expected and the actual value if the header, length or `md5` checksum is wrong
    (truncated files, bit errors, an HTML page in place of the data).
    """
    content = read_checked(path, md5=None)
    header = 4 + 4 * len(shape)
    magic = bytes((0, 0, 8, len(shape)))
    if content[:4] != magic:
        raise _damaged_error(
            path, f"first bytes {magic.hex()} (IDX, unsigned bytes)", content[:4].hex() or "an empty file"
        )
    if len(content) < header:
        raise _damaged_error(path, f"at least {header} bytes", f"{len(content)} bytes")
    dims = tuple(np.frombuffer(content[4:header], ">u4").tolist())
    if any(expected not in (-1, found) for expected, found in zip(shape, dims, strict=True)):
        raise _damaged_error(path, f"dimensions {_format_shape(shape)}", _format_shape(dims))
    if len(content) != header + math.prod(dims):
        raise _damaged_error(path, f"{header + math.prod(dims)} bytes", f"{len(content)} bytes")
    _check_md5(path, content, md5)
    return torch.from_numpy(np.frombuffer(bytearray(content), np.uint8, offset=header).reshape(dims))


def read_checked(path: Path, md5: str | None) -> bytes:
    """The content of `path`. Raises `DataError` if it cannot be read or its checksum is not `md5` (None: any)."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from error
    _check_md5(path, content, md5)
    return content


def _check_md5(path: Path, content: bytes, md5: str | None) -> None:
    if md5 is not None and (found := hashlib.md5(content, usedforsecurity=False).hexdigest()) != md5:
        raise _damaged_error(path, f"md5 {md5}", found)


def _damaged_error(path: Path, expected: str, found: str) -> DataError:
    return DataError(f"{path} is damaged: expected {expected}, found {found}; delete it and fetch it again")


def _format_shape(dims: tuple[int, ...]) -> str:
    return "x".join("any" if d < 0 else str(d) for d in dims)
