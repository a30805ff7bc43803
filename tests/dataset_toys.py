"""Small data sets on disk, and data sets built from the YAML files as the command line builds
them."""

import hashlib
import io
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torchvision
import yaml
from PIL import Image

from fedsim.config.build import instantiate
from fedsim.data.base import Dataset, LoadedData

FOLDER = Path(__file__).parents[1] / "conf" / "dataset"


def build(choice: str, data_dir: Path, cache_dir: Path | None = None, **values: Any) -> Dataset:
    """Build the data set of conf/dataset/<choice>.yaml with some other values."""
    node = yaml.safe_load((FOLDER / f"{choice}.yaml").read_text())
    cache_dir = cache_dir or data_dir / "cache"
    return instantiate(node | values, Dataset, "dataset", data_dir, cache_dir)


def load_parquet(place: Path, **values: Any) -> LoadedData:
    """Load the parquet files at a place, half of them as test set unless `values` say otherwise."""
    folder = place.parent if place.is_file() else place
    values = {"path": str(place), "test_fraction": 0.5} | values
    return build("parquet", folder, folder.parent / "cache", **values).load()


def check_sound(data: LoadedData) -> None:
    """Check the types and shapes that every data set of images must have."""
    for samples in (data.train, data.test):
        assert samples.x.dtype == torch.uint8
        assert samples.y.dtype == torch.int64
        assert len(samples.x) == len(samples.y) > 0
        assert set(samples.y.tolist()) <= set(range(data.num_classes))
    assert data.test.x.shape[1:] == data.train.x.shape[1:]
    assert data.mean is not None
    assert data.std is not None
    assert len(data.mean) == len(data.std) == data.train.x.shape[1]
    assert data.owners is None or data.owners.shape == (len(data.train),)


def encoded(pixels: np.ndarray) -> bytes:
    """Return the pixels [H, W] or [H, W, 3] as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def random_pixels(count: int, *, grey: bool = False, seed: int = 0, side: int = 6) -> np.ndarray:
    """Return random images of 6x6 pixels [count, 6, 6] or [count, 6, 6, 3]."""
    shape = (count, side, side) if grey else (count, side, side, 3)
    return np.random.default_rng(seed).integers(256, size=shape).astype(np.uint8)


def table(
    count: int, *, grey: bool = False, seed: int = 0, side: int = 6, **columns: Any
) -> pa.Table:
    """Return a table in the Hub's layout: `random_pixels`, and labels 0, 1, 2, 0, ..."""
    pixels = random_pixels(count, grey=grey, seed=seed, side=side)
    images = pa.array([{"bytes": encoded(image), "path": None} for image in pixels])
    labels = [number % 3 for number in range(count)]
    return pa.table({"img": images, "label": labels, **columns})


def write_table(path: Path, count: int, **options: Any) -> Path:
    """Write a `table` to a file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table(count, **options), path)
    return path


def write_leaf(folder: Path, split: str, users: dict[str, Any], number: int = 0) -> None:
    """Write a file of LEAF with these users: their images and labels, as {"x": ..., "y": ...}."""
    (folder / split).mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(user["y"]) for user in users.values()],
        "user_data": users,
    }
    (folder / split / f"all_data_{number}.json").write_text(json.dumps(content))


class Hostile:
    """An object that creates the file `marker` when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


# --- MNIST and CIFAR in torchvision's layout -----------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    """Return an IDX file of unsigned bytes: the format of MNIST."""
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_mnist(
    raw: Path, names: tuple[str, str] = ("train", "t10k"), first_label: int = 0
) -> np.ndarray:
    """Write 20 training and 6 test images with labels 0, 1, 2, ...; return the training images."""
    raw.mkdir(parents=True, exist_ok=True)
    pixels = random_pixels(26, grey=True, side=28)
    for name, images in zip(names, (pixels[:20], pixels[20:]), strict=True):
        labels = np.arange(len(images)) % 10 + first_label
        (raw / f"{name}-images-idx3-ubyte").write_bytes(idx(images))
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(idx(labels))
    return pixels[:20]


def write_cifar(data_dir: Path, name: str, label_key: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write files of four images each, and put their checksums into torchvision's lists.

    Return torchvision's class.
    """
    kind = getattr(torchvision.datasets, name)
    folder = data_dir / kind.base_folder
    folder.mkdir()
    pixels = random_pixels(4, side=32).reshape(4, 3072)

    def write(file: str, content: dict[str, Any]) -> str:
        pickled = pickle.dumps(content)
        (folder / file).write_bytes(pickled)
        return hashlib.md5(pickled).hexdigest()

    for split in ("train_list", "test_list"):
        files = []
        for number, (file, _) in enumerate(getattr(kind, split)):
            content = {"data": pixels + number, label_key: [3, 1, 0, number]}
            files.append([file, write(file, content)])
        monkeypatch.setattr(kind, split, files)
    names_of_classes = {kind.meta["key"]: ["a"] * 10}
    checksum = write(kind.meta["filename"], names_of_classes)
    monkeypatch.setattr(kind, "meta", kind.meta | {"md5": checksum})
    return kind
