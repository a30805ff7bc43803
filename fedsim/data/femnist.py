"""FEMNIST with its writers: the Hub's by-writer set, or LEAF's JSON files."""

import json
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fedsim.data.base import Dataset, LoadedData, Samples
from fedsim.data.cache import digest
from fedsim.data.parquet import Parquet
from fedsim.errors import DataError, between, check

HUB = "https://huggingface.co/api/datasets/flwrlabs/femnist/parquet/default/train"
"""Answers with a JSON list of the addresses of the set's parquet files."""
NUM_DIGITS = 10
"""Classes 0-9 are digits, then capital and small letters, 62 in all."""


class Femnist(Dataset):
    """`source: hub` reads <data_dir>/femnist/*.parquet, fetched from the Hub where there is a network; a fixed random
    `test_fraction` of all images is the test set. `source: leaf` reads <data_dir>/femnist/{train,test}/*.json as LEAF
    writes them (`test_fraction` has no effect). `classes: digits` keeps the ten digits. Owners are the writers.
    """

    def __init__(
        self,
        data_dir: Path,
        cache_dir: Path,
        *,
        source: Literal["hub", "leaf"],
        classes: Literal["all", "digits"],
        test_fraction: float,
        mean: list[float],
        std: list[float],
    ) -> None:
        super().__init__(data_dir, cache_dir)
        check(between("test_fraction", test_fraction, 0, 1, open_high=True))
        self.source, self.classes, self.test_fraction = source, classes, test_fraction
        self.mean, self.std = mean, std

    def load(self) -> LoadedData:
        data = self._load_hub() if self.source == "hub" else self._load_leaf()
        return data if self.classes == "all" else only_digits(data)

    def _load_hub(self) -> LoadedData:
        folder = self.data_dir / "femnist"
        if not list(folder.glob("*.parquet")):
            fetch_hub(folder)
        return Parquet(
            self.data_dir,
            self.cache_dir,
            path=str(folder.absolute()),
            image_column="image",
            label_column="character",
            client_column="writer_id",
            test_fraction=self.test_fraction,
            size=None,
            mean=self.mean,
            std=self.std,
        ).load()

    def _load_leaf(self) -> LoadedData:
        parts = [read_leaf(self.data_dir / "femnist" / split) for split in ("train", "test")]
        (train, writers), (test, _) = parts
        _, owners = np.unique(np.array(writers), return_inverse=True)
        fingerprint = digest({"train": train.x, "y": train.y, "test": test.x, "owners": torch.as_tensor(owners)})
        mean, std = tuple(self.mean), tuple(self.std)
        return LoadedData(train, test, 62, mean, std, f"femnist leaf {fingerprint}", owners.astype(np.int64))


def read_leaf(folder: Path) -> tuple[Samples, list[str]]:
    """The samples of all JSON files of a LEAF split, and the writer of each. Pixels 0..1 become 0..255."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise DataError(f"dataset.source=leaf: no JSON file in {folder}; put LEAF's files of this split there")
    pixels, labels, writers = [], [], []
    for file in files:
        try:
            users = json.loads(file.read_text())["user_data"]
            for writer, samples in users.items():
                pixels.append(np.asarray(samples["x"], dtype=np.float64).reshape(-1, 1, 28, 28))
                labels.append(np.asarray(samples["y"], dtype=np.int64))
                writers += [writer] * len(labels[-1])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{file} is not a sound LEAF file ({type(error).__name__}: {error})") from error
    x = torch.as_tensor(np.round(np.concatenate(pixels) * 255).clip(0, 255), dtype=torch.uint8)
    return Samples(x, torch.as_tensor(np.concatenate(labels))), writers


def only_digits(data: LoadedData) -> LoadedData:
    """The samples of the ten digits."""
    train, test = data.train.y < NUM_DIGITS, data.test.y < NUM_DIGITS
    return replace(
        data,
        train=Samples(data.train.x[train], data.train.y[train]),
        test=Samples(data.test.x[test], data.test.y[test]),
        num_classes=NUM_DIGITS,
        fingerprint=f"{data.fingerprint} digits",
        owners=None if data.owners is None else data.owners[train.numpy()],
    )


def _get(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=60) as answer:
        content: bytes = answer.read()
    return content


def fetch_hub(folder: Path, get: Callable[[str], bytes] = _get) -> None:
    """Fetch the Hub's parquet files into `folder`, complete or not at all."""
    try:
        contents = [get(address) for address in json.loads(get(HUB))]
    except (OSError, ValueError) as error:
        raise DataError(
            f"data_dir: no parquet file in {folder}, and fetching flwrlabs/femnist failed ({error}). Put the Hub's "
            "parquet files there, or use dataset.source=leaf with LEAF's files"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(contents):
        temporary = folder / f"train-{number:05d}.tmp"
        temporary.write_bytes(content)
        temporary.rename(temporary.with_suffix(".parquet"))
