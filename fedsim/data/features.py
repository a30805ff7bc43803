"""Features of a frozen backbone (a network that is not trained), computed once for a data set and
cached.

A run whose model trains on features (models/backbone.py) replaces its images by them. Shapes: n
samples, D features, b images of a batch.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from fedsim.core.errors import DataError
from fedsim.data.base import LoadedData, Samples
from fedsim.data.cache import load_or_build

BATCH_SIZE = 64
"""Images that pass the backbone at a time."""


@runtime_checkable
class TrainsOnFeatures(Protocol):
    """A model whose input is the output of a frozen backbone instead of the images."""

    def backbone_key(self) -> str:
        """Return a text that identifies everything that the features depend on.

        Raises `DataError` if that is unknown.
        """

    def load_backbone(self, data_dir: Path) -> nn.Module:
        """Return the module that maps uint8 images [b, C, H, W] to features [b, D].

        It is called only if the features are not cached. Its weights are in a file that the model
        names, or in `data_dir`. Raises `DataError` if there are none.
        """


def extract(
    data: LoadedData,
    model: TrainsOnFeatures,
    data_dir: Path,
    cache_dir: Path,
    device: torch.device,
    code: str | None = None,
) -> LoadedData:
    """Return `data` with float32 features [n, D] in place of the images.

    The features are read from the cache, or computed on `device`. `code` identifies the user's
    classes, on which the features depend, too; None: there are none. Raises `DataError` if the
    images are not uint8.
    """
    train_x, test_x = data.train.x, data.test.tensor
    if train_x.dtype != torch.uint8:
        raise DataError(
            f"a frozen backbone needs images of type uint8; the data set has {train_x.dtype}"
        )
    facts = [data.fingerprint, model.backbone_key()]
    if code:
        facts.append(code)
    fingerprint = hashlib.sha256(" ".join(facts).encode()).hexdigest()

    def build() -> dict[str, Tensor]:
        backbone = model.load_backbone(data_dir).eval().to(device)
        return {
            "train": _run_backbone(backbone, data.train.tensor, device, "train"),
            "test": _run_backbone(backbone, test_x, device, "test"),
        }

    features = load_or_build(cache_dir / f"features-{fingerprint[:32]}.safetensors", build)
    return replace(
        data,
        train=Samples(features["train"], data.train.y),
        test=Samples(features["test"], data.test.y),
        mean=None,
        std=None,
        fingerprint=fingerprint,
    )


@torch.no_grad()
def _run_backbone(backbone: nn.Module, images: Tensor, device: torch.device, split: str) -> Tensor:
    """Return the features [n, D] of `images` on the CPU, and show progress on the terminal."""
    batches = track(
        images.split(BATCH_SIZE),
        f"features of {split} images on {device}",
        console=Console(stderr=True),
    )
    return torch.cat([backbone(batch.to(device)).float().cpu() for batch in batches])
