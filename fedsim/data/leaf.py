"""Data sets in the JSON files of LEAF, a benchmark of federated learning (Caldas et al., 2018).

A user of LEAF, such as a writer, is the owner of its samples: fedsim can make it a client.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.errors import DataError
from fedsim.data.base import numbers_in
from fedsim.data.cache import SourceFiles, digest, load_or_decode, require_sha256, visible

PARSE_ERRORS = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""Errors that Python and NumPy raise for a malformed file, such as labels that are infinite or a
list in place of a dictionary."""

Decoder = Callable[[dict[str, Any]], tuple[NDArray[Any], NDArray[np.int64]]]
"""A function that returns the samples [n, ...] and labels [n] of one user.

Its argument has the user's lists "x" and "y". Raises one of `PARSE_ERRORS`.
"""


def leaf_folders(folder: Path) -> tuple[Path, Path]:
    """Return the folders of the training and of the test files."""
    return folder / "train", folder / "test"


def absent_files(folder: Path) -> list[str]:
    """Describe the files that are missing below `folder`."""
    descriptions = []
    for split_folder in leaf_folders(folder):
        if not visible(split_folder, "*.json"):
            descriptions.append(f"LEAF's JSON files in {split_folder.absolute()}")
    return descriptions


def load_leaf(
    folder: Path, cache: Path, sha256: str | None, samples_of: Decoder
) -> tuple[dict[str, Tensor], str, str]:
    """Return the tensors of both splits, the digest of their content, and the files' checksum.

    `cache` begins the path of the file in the cache, and `sha256` is the checksum that the files
    must have; None accepts any. Owners of both splits have the numbers of the training users; a
    test owner without training samples is -1.
    """
    train_files, test_files = (visible(place, "*.json") for place in leaf_folders(folder))

    def decode(sources: SourceFiles) -> dict[str, Tensor]:
        tensors, train_users = _read_split(sources, train_files, "train", samples_of)
        test_tensors, test_users = _read_split(sources, test_files, "test", samples_of)
        tensors |= test_tensors
        # For each test user its number among the training users; -1 if it is not there.
        tensors["numbers"] = torch.as_tensor(numbers_in(train_users, test_users))
        return tensors

    # The cache depends on the names, because a file may be a link to another one.
    names = [[file.name for file in train_files], [file.name for file in test_files]]
    tensors, checksum = load_or_decode(cache, folder, [*train_files, *test_files], names, decode)
    require_sha256(sha256, checksum, f"dataset.source=leaf in {folder}")
    # Each split numbers its own users. The digest covers these numbers; afterwards the test split
    # takes those of the training split.
    number_in_training = tensors.pop("numbers")
    content = digest(tensors)
    tensors["test_owners"] = number_in_training[tensors["test_owners"]]
    return tensors, content, checksum


def _read_split(
    sources: SourceFiles, files: Sequence[Path], split: str, samples_of: Decoder
) -> tuple[dict[str, Tensor], NDArray[np.str_]]:
    """Return the tensors of a split of LEAF, and the sorted names of its users.

    The tensors are `<split>_x`, `<split>_y` and `<split>_owners` [n]; an owner is the position of
    the user's name among the names. A file of LEAF is {"user_data": {user: {"x": [...], "y":
    [...]}}}; its other keys are not read. Raises `DataError` if a file is malformed, if two files
    have a user, and if there is no sample.
    """
    parts = []
    labels = []
    user_of_sample: list[str] = []
    first_files: dict[str, Path] = {}
    for file in files:
        content = sources.read(file)
        try:
            for user, samples in json.loads(content)["user_data"].items():
                first_file = first_files.setdefault(user, file)
                if first_file != file:
                    raise DataError(
                        f"{first_file} and {file} both have the user {user}; move one away, or "
                        f"empty {file.parent} and preprocess the data again"
                    )
                x, y = samples_of(samples)
                parts.append(x)
                labels.append(y)
                user_of_sample += [user] * len(y)
        except PARSE_ERRORS as error:
            raise DataError(
                f"{file} is not a sound LEAF file ({type(error).__name__}: {error})"
            ) from error
    if not user_of_sample:
        raise DataError(
            f"dataset.source=leaf: no user has a sample in {', '.join(map(str, files))}"
        )
    users, owners = np.unique(np.array(user_of_sample), return_inverse=True)
    tensors = {
        f"{split}_x": torch.as_tensor(np.concatenate(parts)),
        f"{split}_y": torch.as_tensor(np.concatenate(labels)),
        f"{split}_owners": torch.as_tensor(owners.astype(np.int64)),
    }
    return tensors, users
