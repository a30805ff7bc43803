"""Small data sets on disk, and data sets built from the YAML files as the command line builds
them."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import yaml
from PIL import Image

from fedsim.config.build import instantiate
from fedsim.data.base import Dataset, LoadedData

FOLDER = Path(__file__).parents[1] / "conf" / "dataset"


def build(choice: str, data_dir: Path, cache_dir: Path | None = None, **values: Any) -> Dataset:
    node = yaml.safe_load((FOLDER / f"{choice}.yaml").read_text())
    return instantiate(
        {**node, **values}, Dataset, "dataset", data_dir, cache_dir or data_dir / "cache"
    )


def check_sound(data: LoadedData) -> None:
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
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def table(
    n: int, *, grey: bool = False, seed: int = 0, side: int = 6, **columns: Any
) -> tuple[pa.Table, np.ndarray]:
    """A table as the Hub has them, with labels 0, 1, 2, 0, ..., and the pixels in it [n, side,
    side(, 3)]."""
    shape = (n, side, side) if grey else (n, side, side, 3)
    pixels = np.random.default_rng(seed).integers(256, size=shape).astype(np.uint8)
    images = pa.array([{"bytes": encoded(p), "path": None} for p in pixels])
    return pa.table({"img": images, "label": [i % 3 for i in range(n)], **columns}), pixels


def write_leaf(folder: Path, split: str, users: dict[str, Any], number: int = 0) -> None:
    (folder / split).mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(u["y"]) for u in users.values()],
        "user_data": users,
    }
    (folder / split / f"all_data_{number}.json").write_text(json.dumps(content))
