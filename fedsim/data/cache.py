"""An on-disk cache of tensors that are costly to compute, verified at every read and rebuilt if
damaged; checksums of the source files of data sets."""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedsim.core.disk import memory_of_machine
from fedsim.core.errors import DataError, Problem, rule

FORMAT = "1"
LITTER = ("__MACOSX", "Thumbs.db", "desktop.ini")
"""Names that systems leave in folders, besides those that begin with a dot."""


def load_or_build(path: Path, build: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors stored in `path`; if there are none, those returned by `build`, which are then
    stored there. One process builds while others wait. Raises `DataError` if a file has to be
    written there and cannot."""
    if (cached := _read(path)) is not None:
        return cached
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if (tensors := _read(path)) is None:
                tensors = build()
                _write(path, tensors)
            return tensors
    except (OSError, SafetensorError) as error:
        remedy = "make room there, or choose another folder with cache_dir or FEDSIM_CACHE"
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cache_dir: cannot write {path} ({reason}); {remedy}") from error


def load_or_generate(
    dataset: Any, name: str, version: int, build: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """The tensors of generated data, which are functions of the generator's version and
    `parameters_key`."""
    key = digest({"key": parameters_key(version, dataset)})
    return load_or_build(dataset.cache_dir / f"{name}-{key[:32]}.safetensors", build)


def parameters_key(version: int, dataset: Any) -> Tensor:
    """The bytes [b] uint8 that tell generated data apart: the generator's version and the data
    set's parameters, except those that do not determine the data."""
    names = sorted(
        f.name for f in fields(dataset) if f.kw_only and f.name not in ("mean", "std", "hold")
    )
    text = json.dumps([version, *((name, getattr(dataset, name)) for name in names)])
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


class SourceFiles:
    """The source files of a data set below `root`, each read as a whole.

    Their checksum is that of the bytes that were read, and so of the data that are made of them.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sums: dict[Path, str] = {}

    def read(self, path: Path) -> bytes:
        """Return the content of a file.

        Raises `DataError` if it cannot be read, or is not what it was when it was read before.
        """
        require_memory(stat_of(path).st_size, str(path))
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror or error})") from error
        checksum = hashlib.sha256(content).hexdigest()
        if self.sums.setdefault(path, checksum) != checksum:
            raise DataError(
                f"{path} changed while it was read; run again when nothing writes to it"
            )
        return content

    @property
    def sha256(self) -> str:
        """The SHA-256 (hexadecimal) of all files that were read.

        That of a lone file's content, else of the list that sha256sum prints of paths relative to
        the root: (cd ROOT && sha256sum FILES...) | sha256sum.
        """
        if len(self.sums) == 1:
            return next(iter(self.sums.values()))
        names = sorted((path.relative_to(self.root).as_posix(), path) for path in self.sums)
        listed = "".join(f"{self.sums[path]}  {name}\n" for name, path in names)
        return hashlib.sha256(os.fsencode(listed)).hexdigest()


def load_or_decode(
    prefix: Path,
    root: Path,
    files: Sequence[Path],
    facts: object,
    decode: Callable[[SourceFiles], dict[str, Tensor]],
) -> tuple[dict[str, Tensor], str]:
    """Return what `decode` makes of the files below `root`, and the checksum of the files that it
    read.

    Both are stored in a file whose name begins with `prefix`, and made again if the path, size or
    modification time of a file changes. Links are followed: what the place of a link itself says
    (its name, a class, a split) must be among the `facts`.
    """
    stats = [
        (str(file.resolve()), found.st_size, found.st_mtime_ns)
        for file in files
        if (found := stat_of(file))
    ]
    key = hashlib.sha256(repr((facts, stats)).encode()).hexdigest()

    def build() -> dict[str, Tensor]:
        sources = SourceFiles(root)
        tensors = decode(sources)
        content = list(bytes.fromhex(sources.sha256))
        return {**tensors, "content": torch.tensor(content, dtype=torch.uint8)}

    tensors = load_or_build(prefix.with_name(f"{prefix.name}-{key[:32]}.safetensors"), build)
    return tensors, tensors.pop("content").numpy().tobytes().hex()


def digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 (hexadecimal) over the names, types, shapes and values of `tensors`."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        sha.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _read(path: Path) -> dict[str, Tensor] | None:
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError):
        return None
    return tensors if metadata == {"format": FORMAT, "sha256": digest(tensors)} else None


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    temporary = path.with_name(
        f"{path.name}.tmp"
    )  # one writer at a time; a file left by a killed one is replaced
    temporary.unlink(missing_ok=True)  # perhaps a link
    try:
        metadata = {"format": FORMAT, "sha256": digest(tensors)}
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata
        )
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def stat_of(path: Path) -> os.stat_result:
    """Raises `DataError` for what is no regular file, nor a link to one: to read a named pipe may
    never end."""
    if not path.is_file():
        raise DataError(
            f"{path} is no regular file, nor a link to one; remove it, or put the file itself there"
        )
    return path.stat()


def visible(folder: Path, pattern: str) -> list[Path]:
    """The files below a folder that are not hidden, sorted."""
    return sorted(file for file in folder.glob(pattern) if not is_hidden(file.relative_to(folder)))


def is_hidden(path: Path) -> bool:
    """Return whether a relative path has a part that systems and editors leave behind, and hide."""
    return any(part.startswith(".") or part in LITTER for part in path.parts)


def require_memory(need: float, what: str, most: float = math.inf) -> None:
    """Raise `DataError` if `need` bytes for `what` are more than `most`, or than the machine
    has."""
    most = min(most, memory_of_machine())
    if need > most:
        fault = f"{what}: needs {need / 1e9:,.1f} GB of memory, and may need {most / 1e9:,.1f} GB"
        raise DataError(
            f"{fault}; use smaller data, a smaller dataset.size, or a machine with more memory"
        )


def sha256_problem(expected: str | None) -> Problem | None:
    """The problem of a `sha256` that is neither None nor a checksum, or None."""
    sound = expected is None or re.fullmatch(r"[0-9a-f]{64}", expected) is not None
    remedy = "sha256sum prints that of a file; a run's summary.json has that of its data under data.sha256"
    return rule(
        sound, "sha256", expected, "must be null or 64 hexadecimal digits in lower case", remedy
    )


def require_sha256(expected: str | None, found: str, where: str) -> None:
    """Raise `DataError` unless the checksum `found` of the files at `where` is the `expected` one
    (None: any)."""
    if expected is not None and found != expected:
        remedy = "they are damaged or of another version: fetch them again, or give this checksum if it is meant"
        raise DataError(f"dataset.sha256={expected}: the files of {where} have {found}; {remedy}")
