"""The file of a checkpoint: the SHA-256 of the rest, and then a file in the format of safetensors.

safetensors starts with the length of a JSON header [8 bytes, little-endian], the header, and the
tensors. The header has metadata, whose key `checkpoint` holds the JSON of the checkpoint: its
`identity` and its `content` without tensors (`fedsim.core.encoding`).

`fedsim.running.checkpoint` packs and unpacks such files. `fedsim show` reads their headers only, so
this module can be imported without PyTorch. Reading a file executes nothing.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.core.disk import read_regular
from fedsim.core.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

HASH_BYTES = 32
"""Length of a SHA-256."""


class CheckpointError(DataError):
    """A checkpoint is damaged, or cannot be read."""


def checkpoint_content(path: Path) -> bytes:
    """Return the bytes of a checkpoint file.

    Raises OSError. Models have the same format, without the SHA-256 at the beginning.
    """
    return read_regular(path, path.stat().st_size)


def header_of(content: bytes) -> dict[str, Any]:
    """Return the JSON of a checkpoint, of which `content` are the bytes of the file.

    Raises `CheckpointError` if the bytes have changed since they were written.
    """
    data = content[HASH_BYTES:]
    if hashlib.sha256(data).digest() != content[:HASH_BYTES]:
        raise CheckpointError("is damaged: its SHA-256 is not that of its content")
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    header: dict[str, Any] = json.loads(metadata["checkpoint"])
    return header


def pack(
    identity: Mapping[str, Any],
    content: Mapping[str, Any],
    dataclasses: Mapping[str, type] | None = None,
) -> bytes:
    """Return the bytes of a checkpoint file.

    `content` are the values of the checkpoint by name. `dataclasses` are the classes that it may
    contain, by dotted path.
    """
    import safetensors.torch

    from fedsim.core.encoding import encode

    tensors: dict[str, Tensor] = {}
    encoded = encode(dict(content), tensors, "checkpoint", dataclasses)
    on_cpu = {name: value.cpu().clone() for name, value in tensors.items()}
    header = json.dumps({"identity": identity, "content": encoded})
    data = safetensors.torch.save(on_cpu, {"checkpoint": header})
    return hashlib.sha256(data).digest() + data


def unpack(content: bytes) -> "tuple[dict[str, Any], dict[str, Tensor]]":
    """Return the JSON and the tensors of a checkpoint, of which `content` are the bytes.

    Raises `CheckpointError` if its bytes have changed.
    """
    import safetensors.torch

    return header_of(content), safetensors.torch.load(content[HASH_BYTES:])
