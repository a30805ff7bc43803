"""Divisions of made-up labels among clients, and what is measured of them."""

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fedsim.config.build import instantiate
from fedsim.partitions.base import Labelled, Partition

FOLDER = Path(__file__).parents[1] / "conf" / "partition"
CHOICES = sorted(p.stem for p in FOLDER.glob("*.yaml"))


def build(choice: str, **values: Any) -> Partition:
    node = yaml.safe_load((FOLDER / f"{choice}.yaml").read_text())
    return instantiate({**node, **values}, Partition, "partition")


def balanced(per_class: int, num_classes: int = 10) -> Labelled:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(num_classes), per_class))
    owners = np.random.default_rng(1).integers(60, size=len(labels))
    return Labelled(labels, num_classes, owners)


def split(
    choice: str, data: Labelled, num_clients: int, seed: int = 0, **values: Any
) -> list[np.ndarray]:
    return build(choice, **values).split(data, num_clients, np.random.default_rng(seed))


def histograms(data: Labelled, parts: list[np.ndarray]) -> np.ndarray:
    return np.stack([np.bincount(data.labels[p], minlength=data.num_classes) for p in parts])


SMALL: dict[str, dict[str, Any]] = {
    **{name: {"min_size": 1} for name in ("dirichlet_class", "dirichlet_01", "dirichlet_05")},
    "natural": {"min_samples": 1},
}
