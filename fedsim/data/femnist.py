"""FEMNIST with its writers, from the Hugging Face Hub or from LEAF's JSON files."""

import json
import shutil
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

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
"""A JSON list of the URLs of the data set's parquet files."""
HUB_BYTES = 210_000_000
"""Approximate size of the data set's parquet files."""
NUM_CLASSES = 62
"""Number of labels: first the digits, then the capital letters, then the lower-case letters."""
NUM_DIGITS = 10
PARSE_ERRORS = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""Errors of parsing a file that is not LEAF's."""


@parameters
class Femnist(ImageSet):
    """Handwritten characters, grey, 28x28 pixels; owners are the writers.

    LEAF stores floats in which 1 is white paper and 0 is ink. They are converted to 255 and 0,
    which is dark on light, the inverse of MNIST. The Hub's images are used as they are.
    """

    source: Literal["hub", "leaf"]
    """`hub` reads the parquet files below <data_dir>/femnist, which are downloaded from the Hub if
    they are absent. `leaf` reads LEAF's JSON files in <data_dir>/femnist/{train,test}; the test
    set has the test samples of all writers."""
    classes: Literal["all", "digits"]
    """`digits` keeps only the ten digits."""
    test_fraction: Annotated[float, Interval(ge=0, lt=1)]
    """The fixed random share of all images that is the test set of the Hub's data."""
    sha256: str | None = None
    """The checksum that the files must have (see `SourceFiles.sha256`); None accepts any."""

    def problems(self) -> Problems:
        yield from super().problems()
        yield sha256_problem(self.sha256)

    @property
    def _folder(self) -> Path:
        return self.data_dir / "femnist"

    @property
    def _leaf_folders(self) -> tuple[Path, Path]:
        return self._folder / "train", self._folder / "test"

    def source_problem(self) -> Problem | None:
        if self.source == "hub":
            return source_problem(self._folder, self.data_dir, self.missing, HUB_BYTES)
        return reading_problem("data_dir", self.data_dir, [self._folder, *self._leaf_folders])

    def missing(self) -> list[str]:
        """Name the files that would be downloaded."""
        if self.source == "leaf" or any(self._folder.rglob("*.parquet")):
            return []
        return ["*.parquet of flwrlabs/femnist (or dataset.source=leaf)"]

    def absent(self) -> list[str]:
        if self.source == "hub":
            return []
        empty = [folder for folder in self._leaf_folders if not visible(folder, "*.json")]
        return [f"LEAF's JSON files in {folder.absolute()}" for folder in empty]

    def form(self) -> tuple[tuple[int, ...], int]:
        return (1, 28, 28), NUM_CLASSES if self.classes == "all" else NUM_DIGITS

    def load(self) -> LoadedData:
        data = self._load_hub() if self.source == "hub" else self._load_leaf()
        return data if self.classes == "all" else _keep_digits(data)

    def _load_hub(self) -> LoadedData:
        require_files(
            self._folder, self.data_dir, self.missing, lambda: _fetch_hub(self.data_dir), HUB_BYTES
        )
        parquet = Parquet(
            self.data_dir,
            self.cache_dir,
            path=str(self._folder.absolute()),
            image_column="image",
            label_column="character",
            client_column="writer_id",
            size=None,
            test_fraction=self.test_fraction,
            mean=self.mean,
            std=self.std,
            sha256=self.sha256,
        )
        return parquet.load()

    def _load_leaf(self) -> LoadedData:
        self.require_present("dataset.source=leaf")
        train_files, test_files = (visible(folder, "*.json") for folder in self._leaf_folders)

        def read(sources: SourceFiles) -> dict[str, Tensor]:
            tensors, writers = read_leaf_split(sources, train_files, "train")
            test_tensors, test_writers = read_leaf_split(sources, test_files, "test")
            tensors |= test_tensors
            tensors["numbers"] = torch.as_tensor(numbers_in(writers, test_writers))
            return tensors

        facts = [[file.name for file in files] for files in (train_files, test_files)]
        tensors, sha256 = load_or_decode(
            self.cache_dir / "femnist-leaf-2",
            self._folder,
            [*train_files, *test_files],
            facts,
            read,
        )
        require_sha256(self.sha256, sha256, f"dataset.source=leaf in {self._folder}")
        training_numbers = tensors.pop("numbers")  # of the writers of the test split
        fingerprint = f"femnist leaf {digest(tensors)}"
        tensors["test_owners"] = training_numbers[tensors["test_owners"]]
        return LoadedData.of(tensors, NUM_CLASSES, self.mean, self.std, fingerprint, sha256=sha256)


def read_leaf_split(
    sources: SourceFiles, files: Sequence[Path], split: str
) -> tuple[dict[str, Tensor], NDArray[np.str_]]:
    """Return the tensors of a split of LEAF, and the names of its writers.

    The tensors are `<split>_x`, `<split>_y` and `<split>_owners`; an owner is the position of the
    writer's name. Raises `DataError`.
    """
    pixels = []
    labels = []
    names: list[str] = []
    files_of_writers: dict[str, Path] = {}
    for file in files:
        content = sources.read(file)
        try:
            for writer, samples in json.loads(content)["user_data"].items():
                first_file = files_of_writers.setdefault(writer, file)
                if first_file != file:
                    raise DataError(
                        f"{first_file} and {file} both have the writer {writer}; move one away, or "
                        f"empty {file.parent} and preprocess the data again"
                    )
                x, y = _leaf_samples(samples)
                pixels.append(x)
                labels.append(y)
                names += [writer] * len(y)
        except PARSE_ERRORS as error:
            raise DataError(
                f"{file} is not a sound LEAF file ({type(error).__name__}: {error})"
            ) from error
    if not names:
        raise DataError(
            f"dataset.source=leaf: no writer has an image in {', '.join(map(str, files))}"
        )
    writers, owners = np.unique(np.array(names), return_inverse=True)
    tensors = {
        f"{split}_x": torch.as_tensor(np.concatenate(pixels)),
        f"{split}_y": torch.as_tensor(np.concatenate(labels)),
        f"{split}_owners": torch.as_tensor(owners.astype(np.int64)),
    }
    return tensors, writers


def _leaf_samples(samples: dict[str, list[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the images [n, 1, 28, 28] uint8 and labels [n] of one writer. Raises ValueError."""
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
    """Return the data without letters."""
    in_train = data.train.y < NUM_DIGITS
    in_test = data.test.y < NUM_DIGITS
    owners, test_owners = data.owners, data.test_owners
    return replace(
        data,
        train=Samples(data.train.tensor[in_train], data.train.y[in_train]),
        test=Samples(data.test.tensor[in_test], data.test.y[in_test]),
        owners=None if owners is None else owners[in_train.numpy()],
        test_owners=None if test_owners is None else test_owners[in_test.numpy()],
        num_classes=NUM_DIGITS,
        fingerprint=f"{data.fingerprint} digits",
    )


def _fetch_hub(data_dir: Path) -> None:
    """Download the Hub's parquet files into <data_dir>/femnist/hub.

    That folder is created only after all files are complete.
    """
    partial = data_dir / ".femnist.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    urls = json.loads(_download(HUB_LISTING_URL))
    for number, url in enumerate(urls):
        name = f"train-{number:05d}-of-{len(urls):05d}.parquet"
        (partial / name).write_bytes(_download(url))
    (data_dir / "femnist").mkdir(exist_ok=True)
    partial.rename(data_dir / "femnist" / "hub")


def _download(url: str) -> bytes:
    if not url.startswith("https://"):
        raise ValueError(f"{url!r} is no https address")
    with urllib.request.urlopen(url) as response:  # `require_files` limits the time of a stall
        return response.read()
