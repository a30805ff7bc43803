"""FEMNIST with its writers: from the Hugging Face Hub or from LEAF's JSON files."""

import json
import shutil
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Interval
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.disk import reading_problem
from fedsim.core.errors import DataError, Problem
from fedsim.core.parameters import Problems, parameters
from fedsim.data.base import ImageSet, LoadedData, Samples, numbers_in
from fedsim.data.cache import (
    SourceFiles,
    digest,
    load_or_decode,
    require_sha256,
    sha256_problem,
    visible,
)
from fedsim.data.fetch import require_files, source_problem
from fedsim.data.parquet import Parquet

HUB_LISTING_URL = "https://huggingface.co/api/datasets/flwrlabs/femnist/parquet/default/train"
HUB_BYTES = 210_000_000
"""A JSON list of the URLs of the data set's parquet files, and roughly what these need."""
NUM_CLASSES, NUM_DIGITS = 62, 10
"""Labels: first the digits, then the capital letters, then the lower-case letters."""


@parameters
class Femnist(ImageSet):
    """Handwritten characters, grey, 28x28 pixels; owners are the writers.

    `source: hub` reads the parquet files below <data_dir>/femnist, which are downloaded from the
    Hub if absent; a fixed random `test_fraction` of all images is the test set. `source: leaf`
    reads LEAF's JSON files in <data_dir>/femnist/{train,test} (`test_fraction` has no effect); the
    test samples of all writers are pooled. `classes: digits` keeps only the ten digits.

    LEAF stores floats in which 1 is white paper and 0 is ink; they are converted to 255 and 0,
    which is dark on light, the inverse of MNIST. The Hub's images are used as they are. `sha256`:
    as in `FromPath`.
    """

    source: Literal["hub", "leaf"]
    classes: Literal["all", "digits"]
    test_fraction: Annotated[float, Interval(ge=0, lt=1)]
    sha256: str | None = None

    def problems(self) -> Problems:
        yield from super().problems()
        yield sha256_problem(self.sha256)

    @property
    def _folder(self) -> Path:
        return self.data_dir / "femnist"

    def source_problem(self) -> Problem | None:
        if self.source == "hub":
            return source_problem(self._folder, self.data_dir, self.missing, HUB_BYTES)
        return reading_problem(
            "data_dir", self.data_dir, [self._folder, self._folder / "train", self._folder / "test"]
        )

    def missing(self) -> list[str]:
        found = self.source == "leaf" or any(self._folder.rglob("*.parquet"))
        return [] if found else ["*.parquet of flwrlabs/femnist (or dataset.source=leaf)"]

    def absent(self) -> list[str]:
        folders = (
            [self._folder / split for split in ("train", "test")] if self.source == "leaf" else []
        )
        return [
            f"LEAF's JSON files in {folder.absolute()}"
            for folder in folders
            if not visible(folder, "*.json")
        ]

    def form(self) -> tuple[tuple[int, ...], int]:
        return (1, 28, 28), NUM_CLASSES if self.classes == "all" else NUM_DIGITS

    def load(self) -> LoadedData:
        data = self._load_hub() if self.source == "hub" else self._load_leaf()
        return data if self.classes == "all" else _keep_digits(data)

    def _load_hub(self) -> LoadedData:
        require_files(
            self._folder, self.data_dir, self.missing, lambda: _fetch_hub(self.data_dir), HUB_BYTES
        )
        own: dict[str, Any] = {
            name: getattr(self, name) for name in ("test_fraction", "mean", "std", "sha256")
        }
        own |= {
            "image_column": "image",
            "label_column": "character",
            "client_column": "writer_id",
            "size": None,
        }
        return Parquet(
            self.data_dir, self.cache_dir, path=str(self._folder.absolute()), **own
        ).load()

    def _load_leaf(self) -> LoadedData:
        self.require_present("dataset.source=leaf")
        root = self._folder
        train, test = (visible(root / split, "*.json") for split in ("train", "test"))

        def read(sources: SourceFiles) -> dict[str, Tensor]:
            tensors, writers = read_leaf_split(sources, train, "train")
            tested, test_writers = read_leaf_split(sources, test, "test")
            return {
                **tensors,
                **tested,
                "numbers": torch.as_tensor(numbers_in(writers, test_writers)),
            }

        facts = [[file.name for file in split] for split in (train, test)]
        tensors, sha256 = load_or_decode(
            self.cache_dir / "femnist-leaf-2", root, [*train, *test], facts, read
        )
        require_sha256(self.sha256, sha256, f"dataset.source=leaf in {root}")
        numbers = tensors.pop("numbers")
        fingerprint = f"femnist leaf {digest(tensors)}"
        tensors["test_owners"] = numbers[tensors["test_owners"]]
        return LoadedData.of(tensors, NUM_CLASSES, self.mean, self.std, fingerprint, sha256=sha256)


def read_leaf_split(
    sources: SourceFiles, files: Sequence[Path], split: str
) -> tuple[dict[str, Tensor], NDArray[np.str_]]:
    """Tensors `<split>_x`, `<split>_y` and `<split>_owners` of a LEAF split, and the writers, by
    number."""
    pixels, labels, names = [], [], []
    origins: dict[str, Path] = {}
    for file in files:
        content = sources.read(file)
        try:
            for writer, samples in json.loads(content)["user_data"].items():
                other = origins.setdefault(writer, file)
                if other != file:
                    remedy = f"move one away, or empty {file.parent} and preprocess the data again"
                    raise DataError(f"{other} and {file} both have the writer {writer}; {remedy}")
                x, y = _leaf_samples(samples)
                pixels.append(x)
                labels.append(y)
                names += [writer] * len(y)
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise DataError(
                f"{file} is not a sound LEAF file ({type(error).__name__}: {error})"
            ) from error
    if not names:
        raise DataError(
            f"dataset.source=leaf: no writer has an image in {', '.join(map(str, files))}"
        )
    writers, owners = np.unique(np.array(names), return_inverse=True)
    tensors = {
        "x": np.concatenate(pixels),
        "y": np.concatenate(labels),
        "owners": owners.astype(np.int64),
    }
    return {f"{split}_{name}": torch.as_tensor(values) for name, values in tensors.items()}, writers


def _leaf_samples(samples: dict[str, list[float]]) -> tuple[np.ndarray, np.ndarray]:
    """The images [n, 1, 28, 28] and labels [n] of one writer."""
    x = np.asarray(samples["x"], dtype=np.float32).reshape(-1, 1, 28, 28)
    y = np.asarray(samples["y"], dtype=np.int64)
    if not np.array_equal(y, np.asarray(samples["y"], dtype=np.float64)):
        raise ValueError(f"labels must be integers, found {samples['y'][:5]}")
    if len(x) != len(y):
        raise ValueError(f"a writer has {len(x)} images and {len(y)} labels")
    if not (np.all((y >= 0) & (y < NUM_CLASSES)) and np.all((x >= 0) & (x <= 1))):
        raise ValueError(f"labels must lie in 0..{NUM_CLASSES - 1} and pixels in 0..1")
    return np.round(x * 255).astype(np.uint8), y


def _keep_digits(data: LoadedData) -> LoadedData:
    kept: dict[str, Any] = {"num_classes": NUM_DIGITS, "fingerprint": f"{data.fingerprint} digits"}
    for split, owners in (("train", "owners"), ("test", "test_owners")):
        samples, own = getattr(data, split), getattr(data, owners)
        is_digit = samples.y < NUM_DIGITS
        kept[split] = Samples(samples.tensor[is_digit], samples.y[is_digit])
        kept[owners] = None if own is None else own[is_digit.numpy()]
    return replace(data, **kept)


def _fetch_hub(data_dir: Path) -> None:
    """Download the Hub's parquet files into <data_dir>/femnist/hub, which is created only when all
    are complete."""
    partial = data_dir / ".femnist.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    urls = json.loads(_download(HUB_LISTING_URL))
    for number, url in enumerate(urls):
        (partial / f"train-{number:05d}-of-{len(urls):05d}.parquet").write_bytes(_download(url))
    (data_dir / "femnist").mkdir(exist_ok=True)
    partial.rename(data_dir / "femnist" / "hub")


def _download(url: str) -> bytes:
    if not url.startswith("https://"):
        raise ValueError(f"{url!r} is no https address")
    with urllib.request.urlopen(url) as response:  # `require_files` bounds the time without a byte
        return response.read()
