"""Features of a frozen backbone, computed once per data set and kept."""

import hashlib
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from fedsim.data.base import LoadedData, Samples
from fedsim.data.cache import load_or_build
from fedsim.errors import DataError

BATCH = 64
SLOW, VERY_SLOW = 10, 1800
"""Seconds of expected work from which on a person is told of it, and told what would shorten it."""


class Extractor(ABC):
    """A frozen backbone that is loaded only where its features are not known yet."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """All that decides the features. Raises `DataError` where that cannot be known."""

    @abstractmethod
    def load(self) -> nn.Module:
        """From uint8 images [b, C, H, W] to features [b, D]. Raises `DataError` if the weights are not to be had."""


@runtime_checkable
class TrainsOnFeatures(Protocol):
    """A model that is only a head. It trains on what its `extractor` makes of the images."""

    def extractor(self, data_dir: Path) -> Extractor:
        """The frozen backbone; its weights are looked for in `data_dir`."""


def extract(
    data: LoadedData, model: TrainsOnFeatures, data_dir: Path, cache_dir: Path, device: torch.device
) -> LoadedData:
    """`data` with float32 features in place of images, from the cache where they are known already."""
    if data.train.x.dtype != torch.uint8:
        raise DataError(f"a frozen backbone needs images of type uint8; the data set has {data.train.x.dtype}")
    extractor = model.extractor(data_dir)
    fingerprint = hashlib.sha256(f"{data.fingerprint} {extractor.fingerprint}".encode()).hexdigest()

    def build() -> dict[str, Tensor]:
        backbone = extractor.load().eval().to(device)
        return {split: _run(backbone, getattr(data, split).x, device, split) for split in ("train", "test")}

    found = load_or_build(cache_dir / f"features-{fingerprint[:32]}.safetensors", build)
    return replace(
        data,
        train=Samples(found["train"], data.train.y),
        test=Samples(found["test"], data.test.y),
        mean=None,
        std=None,
        fingerprint=fingerprint,
    )


@torch.no_grad()
def _run(backbone: nn.Module, images: Tensor, device: torch.device, split: str) -> Tensor:
    first, *rest = images.split(BATCH)
    start = time.perf_counter()
    features = [backbone(first.to(device)).float().cpu()]
    estimate = (time.perf_counter() - start) * len(rest)
    console = Console(stderr=True)
    if estimate >= SLOW:
        console.print(_announcement(len(images), split, device, estimate), soft_wrap=True)
    for batch in track(rest, f"{split} features", console=console, disable=estimate < SLOW):
        features.append(backbone(batch.to(device)).float().cpu())
    return torch.cat(features)


def _announcement(count: int, split: str, device: torch.device, seconds: float) -> str:
    expected = f"{seconds / 60:.0f} min" if seconds < VERY_SLOW else f"{seconds / 3600:.1f} h"
    text = f"features of {count} {split} images on {device}: about {expected}, kept for later runs"
    return text if seconds < VERY_SLOW else f"{text}; a smaller model.input_size or device=cuda is faster"
