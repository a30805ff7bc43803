"""Source files of data sets: that they are files, and that their content is what it should be."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedsim.data.cache import file_sha256
from fedsim.errors import DataError, Problem, rule

CONTENT = "sha256 of files"
"""Part of the keys of caches with a `content_tensor`: what that holds."""


def require_regular(paths: Iterable[Path]) -> None:
    """Raise `DataError` for a path that is no regular file, nor a link to one.

    Reading from a named pipe or a device may never end.
    """
    for path in paths:
        if not path.is_file():
            kind = "a link to nothing" if path.is_symlink() and not path.exists() else "no regular file"
            raise DataError(f"{path} is {kind}; remove it, or put the file itself there")


def sha256_of_files(root: Path, files: Sequence[Path]) -> str:
    """SHA-256 (hexadecimal) of a data set's files: of a lone file's content, else of the list that sha256sum prints.

    The list has one line for each file, sorted by path relative to `root`, so that the result does not depend on where
    the data set is: (cd ROOT && sha256sum FILES...) | sha256sum. Raises `DataError` if a file cannot be read.
    """
    return sha256_of_list({_relative(file, root): file_sha256(file) for file in files})


def content_tensor(root: Path, files: Sequence[Path]) -> Tensor:
    """The same as uint8 [32], to be stored beside what is decoded from the files."""
    return torch.tensor(list(bytes.fromhex(sha256_of_files(root, files))), dtype=torch.uint8)


def sha256_of_list(sums: Mapping[str, str]) -> str:
    """The same from the SHA-256 of each file by its relative path."""
    if len(sums) == 1:
        return next(iter(sums.values()))
    lines = "".join(f"{found}  {name}\n" for name, found in sorted(sums.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def sha256_problem(expected: str | None) -> Problem | None:
    """The problem of a `sha256` that is neither None nor a checksum, or None."""
    sound = expected is None or re.fullmatch(r"[0-9a-f]{64}", expected) is not None
    remedy = "sha256sum prints that of a file; a run's summary.json has that of its data under data.sha256"
    return rule(sound, "sha256", expected, "must be null or 64 hexadecimal digits in lower case", remedy)


def require_sha256(expected: str | None, found: str, where: str) -> None:
    """Raise `DataError` unless the checksum `found` of the files at `where` is the `expected` one (None: any)."""
    if expected is not None and found != expected:
        raise DataError(
            f"dataset.sha256={expected}: the files of {where} have {found}; they are damaged or of another version: "
            "fetch them again, or give this checksum if they are meant to be these"
        )


def _relative(file: Path, root: Path) -> str:
    return file.name if file == root else file.relative_to(root).as_posix()
