"""Tensors that are costly to make, kept on disk; checked at every read and made again when anything is wrong."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedsim.errors import DataError

FORMAT = "1"


def load_or_build(path: Path, build: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors in `path`, or those of `build`, which are then kept there.

    One process builds while others wait. A file that is damaged or of another format is never used: it is rebuilt.
    A sound file is enough where the folder cannot be written.
    """
    if (sound := _read(path)) is not None:
        return sound
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            tensors = _read(path)
            if tensors is None:
                tensors = build()
                _write(path, tensors)
            return tensors
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"cache_dir: cannot write {path} ({getattr(error, 'strerror', None) or error}); choose another folder with "
            "cache_dir or FEDSIM_CACHE"
        ) from error


def digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        sha.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from error


def stamp(files: Iterable[Path], *facts: object) -> str:
    """A key that changes when one of `files` does (place, size or time of change; much cheaper than checksums)."""
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr((facts, stats)).encode()).hexdigest()


def _read(path: Path) -> dict[str, Tensor] | None:
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError):
        return None
    sound = metadata.get("format") == FORMAT and metadata.get("sha256") == digest(tensors)
    return tensors if sound else None


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    temporary = path.with_name(f"{path.name}.tmp")  # one writer at a time; the litter of a killed one is overwritten
    try:
        save_file(
            {n: t.contiguous() for n, t in tensors.items()},
            temporary,
            metadata={"format": FORMAT, "sha256": digest(tensors)},
        )
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
