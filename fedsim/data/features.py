"""Features of a frozen backbone, computed once per data set and cached."""

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

BATCH = 64


@runtime_checkable
class TrainsOnFeatures(Protocol):
    """A model that is trained on features: its input is the output of a frozen backbone in place of
    the images."""

    def backbone_key(self) -> str:
        """A text that identifies everything on which the features depend. Raises `DataError` if
        that is unknown."""

    def load_backbone(self, data_dir: Path) -> nn.Module:
        """The module from uint8 images [b, C, H, W] to features [b, D], with the weights that are
        in a file or in `data_dir`; called where the features are not cached yet. Raises `DataError`
        if there are none."""


def extract(
    data: LoadedData,
    model: TrainsOnFeatures,
    data_dir: Path,
    cache_dir: Path,
    device: torch.device,
    code: str | None = None,
) -> LoadedData:
    """`data` with float32 features [n, D] in place of images, computed on `device` or read from the
    cache. `code`: that of the user's classes, on which they depend, too. Raises `DataError` if the
    images are not uint8."""
    if data.train.x.dtype != torch.uint8:
        raise DataError(
            f"a frozen backbone needs images of type uint8; the data set has {data.train.x.dtype}"
        )
    decisive = " ".join(filter(None, (data.fingerprint, model.backbone_key(), code)))
    fingerprint = hashlib.sha256(decisive.encode()).hexdigest()

    def build() -> dict[str, Tensor]:
        backbone = model.load_backbone(data_dir).eval().to(device)
        return {
            split: _extract_split(backbone, getattr(data, split).x, device, split)
            for split in ("train", "test")
        }

    features = load_or_build(cache_dir / f"features-{fingerprint[:32]}.safetensors", build)
    train, test = Samples(features["train"], data.train.y), Samples(features["test"], data.test.y)
    return replace(data, train=train, test=test, mean=None, std=None, fingerprint=fingerprint)


@torch.no_grad()
def _extract_split(backbone: nn.Module, images: Tensor, device: torch.device, split: str) -> Tensor:
    shown = track(
        images.split(BATCH), f"features of {split} images on {device}", console=Console(stderr=True)
    )
    return torch.cat([backbone(batch.to(device)).float().cpu() for batch in shown])
