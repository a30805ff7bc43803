"""Features of a frozen backbone, computed once per data set and kept."""

import hashlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from rich.progress import track
from torch import Tensor, nn

from fedsim.data.base import LoadedData, Samples
from fedsim.data.cache import load_or_build

BATCH = 128


class Extractor(nn.Module):
    """A frozen backbone: uint8 images [b, C, H, W] to features [b, D]. `fingerprint` names all that decides them."""

    fingerprint: str


@runtime_checkable
class TrainsOnFeatures(Protocol):
    """A model that is only a head. It trains on what its `extractor` makes of the images."""

    def extractor(self, data_dir: Path) -> Extractor:
        """The frozen backbone, with its weights. Raises `DataError` if they are not to be had."""


def extract(
    data: LoadedData, model: TrainsOnFeatures, data_dir: Path, cache_dir: Path, device: torch.device
) -> LoadedData:
    """`data` with features in place of images, from the cache where they are known already."""
    extractor = model.extractor(data_dir).eval().to(device)
    fingerprint = hashlib.sha256(f"{data.fingerprint} {extractor.fingerprint}".encode()).hexdigest()
    path = cache_dir / f"features-{fingerprint[:32]}.safetensors"
    found = load_or_build(path, lambda: {s: _run(extractor, getattr(data, s).x, device, s) for s in ("train", "test")})
    return replace(
        data,
        train=Samples(found["train"], data.train.y),
        test=Samples(found["test"], data.test.y),
        mean=None,
        std=None,
        fingerprint=fingerprint,
    )


@torch.no_grad()
def _run(extractor: Extractor, images: Tensor, device: torch.device, split: str) -> Tensor:
    start = time.perf_counter()
    first = extractor(images[:BATCH].to(device)).cpu()
    estimate = (time.perf_counter() - start) * len(images) / BATCH
    rest = images[BATCH:].split(BATCH) if len(images) > BATCH else ()
    text = f"features of {len(images)} {split} images (about {estimate / 60:.0f} min, kept for later runs)"
    batches = track(rest, text, disable=estimate < 10)
    return torch.cat([first, *(extractor(b.to(device)).cpu() for b in batches)])
