"""The data set FEMNIST: handwritten characters, and who wrote each of them.

FEMNIST is part of LEAF, a benchmark of federated learning (Caldas et al., 2018). It is read from
the JSON files that LEAF's scripts write, or from parquet files of the Hugging Face Hub, which are
downloaded. The writers are the owners of the images: fedsim can make each writer a client.
"""

import json
import shutil
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Interval

from fedsim.core.disk import reading_problem
from fedsim.core.errors import Problem
from fedsim.core.parameters import Problems, parameters
from fedsim.data import fetch
from fedsim.data.base import ImageSet, LoadedData, Samples
from fedsim.data.cache import sha256_problem
from fedsim.data.leaf import absent_files, leaf_folders, load_leaf
from fedsim.data.parquet import Parquet

HUB_LISTING_URL = "https://huggingface.co/api/datasets/flwrlabs/femnist/parquet/default/train"
"""A JSON list of the URLs of the data set's parquet files."""
HUB_BYTES = 210_000_000
"""Approximate size of the data set's parquet files in bytes."""
NUM_CLASSES = 62
"""Number of classes: 10 digits, 26 capital letters and 26 lower-case letters, in this order."""
NUM_DIGITS = 10


@parameters
class Femnist(ImageSet):
    """Handwritten characters, grey, 28x28 pixels, dark ink on white paper; owners are the writers.

    MNIST's images are the inverse: white on black. LEAF stores floats from 0 (ink) to 1 (paper),
    which become 0 to 255. The Hub's images are stored in this form already. Before a run, fedsim
    calls `problems` and `source_problem`; then `load`.
    """

    source: Literal["hub", "leaf"]
    """`hub` reads all parquet files in <data_dir>/femnist and its subfolders, and downloads them if
    there are none. `leaf` reads LEAF's JSON files in <data_dir>/femnist/train and
    <data_dir>/femnist/test."""
    classes: Literal["all", "digits"]
    """`digits` keeps only the ten digits."""
    test_fraction: Annotated[float, Interval(ge=0, lt=1)]
    """The share of the Hub's images that is the test set. It is drawn once for all runs. LEAF's
    data have a test set, so it has no effect there."""
    sha256: str | None = None
    """The checksum that all files together must have (see `SourceFiles.sha256`); None accepts
    any."""

    def problems(self) -> Problems:
        yield from super().problems()
        yield sha256_problem(self.sha256)

    @property
    def _folder(self) -> Path:
        return self.data_dir / "femnist"

    def source_problem(self) -> Problem | None:
        """Return a problem with `data_dir`: it cannot be read, or has no room for a download."""
        if self.source == "hub":
            return fetch.source_problem(self._folder, self.data_dir, self.files_to_fetch, HUB_BYTES)
        return reading_problem(
            "data_dir", self.data_dir, [self._folder, *leaf_folders(self._folder)]
        )

    def files_to_fetch(self) -> list[str]:
        """Describe the files that `load` would download; nothing if they are there."""
        if self.source == "leaf" or any(self._folder.rglob("*.parquet")):
            return []
        return ["*.parquet of flwrlabs/femnist (or dataset.source=leaf)"]

    def absent(self) -> list[str]:
        """Describe the files that the user has to provide, and that are not there."""
        if self.source == "hub":
            return []
        return absent_files(self._folder)

    def form(self) -> tuple[tuple[int, ...], int]:
        """Return the shape of an image and the number of classes."""
        num_classes = NUM_CLASSES if self.classes == "all" else NUM_DIGITS
        return (1, 28, 28), num_classes

    def load(self) -> LoadedData:
        """Read, check and decode the images, and download them first if necessary."""
        data = self._load_hub() if self.source == "hub" else self._load_leaf()
        return data if self.classes == "all" else _keep_digits(data)

    def _load_hub(self) -> LoadedData:
        def download() -> None:
            _download_hub_files(self.data_dir)

        fetch.require_files(
            self._folder, self.data_dir, self.files_to_fetch, download, need=HUB_BYTES
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
        cache = self.cache_dir / "femnist-leaf-2"
        tensors, content, sha256 = load_leaf(self._folder, cache, self.sha256, _leaf_samples)
        fingerprint = f"femnist leaf {content}"
        return LoadedData.of(tensors, NUM_CLASSES, self.mean, self.std, fingerprint, sha256=sha256)


def _leaf_samples(samples: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the images [n, 1, 28, 28] uint8 and labels [n] of one writer.

    `samples` has lists of 784 pixels as "x", and the labels as "y". Raises one of the
    `PARSE_ERRORS` of leaf.py.
    """
    x = np.asarray(samples["x"], dtype=np.float32).reshape(-1, 1, 28, 28)
    y = np.asarray(samples["y"], dtype=np.int64)
    # NumPy cuts fractions off when it converts to integers.
    if not np.array_equal(y, np.asarray(samples["y"], dtype=np.float64)):
        raise ValueError(f"labels must be integers, found {samples['y'][:5]}")
    if len(x) != len(y):
        raise ValueError(f"a writer has {len(x)} images and {len(y)} labels")
    labels_fit = np.all((y >= 0) & (y < NUM_CLASSES))
    pixels_fit = np.all((x >= 0) & (x <= 1))  # false for nan, too
    if not (labels_fit and pixels_fit):
        raise ValueError(f"labels must lie in 0..{NUM_CLASSES - 1} and pixels in 0..1")
    return np.round(x * 255).astype(np.uint8), y


def _keep_digits(data: LoadedData) -> LoadedData:
    """Return the data without letters. Writers of letters only keep their numbers, but the test
    samples of writers without training samples have the owner -1."""
    in_train = data.train.y < NUM_DIGITS
    in_test = data.test.y < NUM_DIGITS
    owners, test_owners = data.owners, data.test_owners
    if owners is not None:
        owners = owners[in_train.numpy()]
    if test_owners is not None:
        test_owners = test_owners[in_test.numpy()]
        if owners is not None:
            test_owners = np.where(np.isin(test_owners, owners), test_owners, -1)
    return replace(
        data,
        train=Samples(data.train.tensor[in_train], data.train.y[in_train]),
        test=Samples(data.test.tensor[in_test], data.test.y[in_test]),
        owners=owners,
        test_owners=test_owners,
        num_classes=NUM_DIGITS,
        fingerprint=f"{data.fingerprint} digits",
    )


def _download_hub_files(data_dir: Path) -> None:
    """Download the Hub's parquet files into <data_dir>/femnist/hub.

    They arrive in a temporary folder, which gets its name after the last file is complete.
    """
    temporary = data_dir / ".femnist.partial"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    urls = json.loads(_download(HUB_LISTING_URL))
    for number, url in enumerate(urls):
        name = f"train-{number:05d}-of-{len(urls):05d}.parquet"
        (temporary / name).write_bytes(_download(url))
    (data_dir / "femnist").mkdir(exist_ok=True)
    temporary.rename(data_dir / "femnist" / "hub")


def _download(url: str) -> bytes:
    if not url.startswith("https://"):
        raise ValueError(f"{url!r} is not an https address")  # urllib would also open file://
    # `require_files` sets the default time after which a silent server is given up.
    with urllib.request.urlopen(url) as response:
        return response.read()
