"""A cache of tensors on disk, and checks of the source files of data sets.

Data sets decode their tensors by `load_or_decode`, generate them by `load_or_generate`, or build
them in another way by `load_or_build`. Tensors are stored in safetensors files, whose names hold a
hash of everything that the tensors depend on. Every read verifies a checksum over the tensors; a
damaged file is made again.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
"""The version of the files' format; files of another version are made again."""
LITTER = ("__MACOSX", "Thumbs.db", "desktop.ini")
"""Names of files that systems leave in folders. Names that begin with a dot are litter, too."""
NOT_GENERATING = ("mean", "std", "hold", "augment")
"""Parameters of generated data sets that do not change the generated tensors. Every other parameter
changes the names of files in the cache."""


def load_or_build(path: Path, build: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors in the file `path`; without a sound file, build and store them first.

    One process builds while others wait. Raises `DataError` if the file cannot be written.
    """
    cached = _read(path)
    if cached is not None:
        return cached
    with _errors_of_writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{path}.lock").acquire()
    with lock:
        tensors = _read(path)  # another process may have built them
        if tensors is None:
            tensors = build()
            with _errors_of_writing(path):
                _write(path, tensors)
        return tensors


@contextmanager
def _errors_of_writing(path: Path) -> Iterator[None]:
    """Raise errors in the block, which writes the file `path` of the cache, as `DataError`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        remedy = "make room there, or choose another folder with cache_dir or FEDSIM_CACHE"
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cache_dir: cannot write {path} ({reason}); {remedy}") from error


def load_or_generate(
    dataset: Any, name: str, version: int, build: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the tensors of a generated data set from the cache, or by `build`.

    The name of the file begins with `name`. `version` is the version of the generator.
    """
    key = digest({"key": parameters_key(version, dataset)})
    return load_or_build(dataset.cache_dir / f"{name}-{key[:32]}.safetensors", build)


def parameters_key(version: int, dataset: Any) -> Tensor:
    """Return what generated tensors depend on, as bytes [b] uint8 for `digest`.

    It is the version of the generator, and the data set's parameters except `NOT_GENERATING`.
    """
    names = {field.name for field in fields(dataset) if field.kw_only}
    values = [(name, getattr(dataset, name)) for name in sorted(names.difference(NOT_GENERATING))]
    text = json.dumps([version, *values])
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


class SourceFiles:
    """The source files of a data set below the folder `root`. Each is read as a whole.

    `sums` has the SHA-256 of each file that was read. It covers the same bytes as the data.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sums: dict[Path, str] = {}

    def read(self, path: Path) -> bytes:
        """Return the content of a file.

        Raises `DataError` if the file cannot be read, or has changed since it was last read.
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

        For a single file, it is the checksum of its content. For several files, it is the checksum
        of the list that sha256sum prints for paths relative to the root, sorted:
        `(cd ROOT && sha256sum FILES...) | sha256sum`.
        """
        if len(self.sums) == 1:
            return next(iter(self.sums.values()))
        names = sorted((path.relative_to(self.root).as_posix(), path) for path in self.sums)
        listing = "".join(f"{self.sums[path]}  {name}\n" for name, path in names)
        return hashlib.sha256(os.fsencode(listing)).hexdigest()


def load_or_decode(
    prefix: Path,
    root: Path,
    files: Sequence[Path],
    facts: object,
    decode: Callable[[SourceFiles], dict[str, Tensor]],
) -> tuple[dict[str, Tensor], str]:
    """Return the tensors that `decode` makes of the files below `root`, and the files' checksum.

    Both are cached in a file whose path begins with `prefix`. They are made again if the `facts`
    differ, or if a source file has another path, size, inode, time of modification or time of
    change. (Archives restore the time of modification, so it is not enough.) Links are resolved in
    these paths. So if the tensors depend on the name of a link (a class, a split), the `facts` must
    have it.
    """
    stats = []
    for file in files:
        stat = stat_of(file)
        times = (stat.st_mtime_ns, stat.st_ctime_ns)
        stats.append((str(file.resolve()), stat.st_size, stat.st_ino, times))
    key = hashlib.sha256(repr((facts, stats)).encode()).hexdigest()

    def build() -> dict[str, Tensor]:
        sources = SourceFiles(root)
        tensors = decode(sources)
        checksum = bytes.fromhex(sources.sha256)
        tensors["content"] = torch.tensor(list(checksum), dtype=torch.uint8)
        return tensors

    tensors = load_or_build(prefix.with_name(f"{prefix.name}-{key[:32]}.safetensors"), build)
    checksum = tensors.pop("content").numpy().tobytes().hex()
    return tensors, checksum


def digest(tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 (hexadecimal) of the names, types, shapes and values of `tensors`."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        sha.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _read(path: Path) -> dict[str, Tensor] | None:
    """Return the tensors in the file; None if it is absent, damaged or of another format."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError):
        return None
    return tensors if metadata == _metadata(tensors) else None


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file of the cache completely or not at all; the caller holds its lock."""
    # Only this process writes, so a temporary file here is one of a killed process, or a link.
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, temporary, _metadata(tensors))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _metadata(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return the metadata that a sound file with these tensors has."""
    return {"format": FORMAT, "sha256": digest(tensors)}


def stat_of(path: Path) -> os.stat_result:
    """Return the size and times of a regular file, or of the one that a link leads to.

    Raises `DataError` for anything else: reading a named pipe, for example, may never end.
    """
    if not path.is_file():
        raise DataError(
            f"{path} is no regular file, nor a link to one; remove it, or put the file itself there"
        )
    return path.stat()


def visible(folder: Path, pattern: str) -> list[Path]:
    """Return the files below `folder` that match `pattern` and are not hidden, sorted."""
    return sorted(file for file in folder.glob(pattern) if not is_hidden(file.relative_to(folder)))


def is_hidden(path: Path) -> bool:
    """Return whether a file or a folder on the relative path is hidden or litter."""
    return any(part.startswith(".") or part in LITTER for part in path.parts)


def require_memory(need: float, what: str, limit: float = math.inf) -> None:
    """Raise `DataError` if `need` bytes exceed `limit`, or the memory of the machine.

    The message says that `what`, a file or a data set, needs them.
    """
    limit = min(limit, memory_of_machine())
    if need > limit:
        raise DataError(
            f"{what}: needs {need / 1e9:,.1f} GB of memory, and may use {limit / 1e9:,.1f} GB; "
            "use smaller data, a smaller dataset.size, or a machine with more memory"
        )


def sha256_problem(expected: str | None) -> Problem | None:
    """Return the problem with a parameter `sha256` that is neither None nor a checksum."""
    return rule(
        expected is None or re.fullmatch(r"[0-9a-f]{64}", expected) is not None,
        "sha256",
        expected,
        "must be null or 64 hexadecimal digits in lower case",
        "sha256sum prints the checksum of a file; a run's summary.json has the checksum of its "
        "data under data.sha256",
    )


def require_sha256(expected: str | None, actual: str, where: str) -> None:
    """Raise `DataError` if the files at `where` have another checksum than the `expected` one.

    None accepts any checksum.
    """
    if expected is not None and actual != expected:
        raise DataError(
            f"dataset.sha256={expected}: the files of {where} have {actual}; they are damaged or "
            "of another version: fetch them again, or give this checksum if it is meant"
        )
