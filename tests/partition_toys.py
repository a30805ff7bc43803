"""Partitions built from the YAML files, and small sets of labels for them to divide."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.random import default_rng

from fedsim.config.build import instantiate
from fedsim.partitions.base import Labelled, Partition

FOLDER = Path(__file__).parents[1] / "conf" / "partition"
CHOICES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def build(choice: str, **values: Any) -> Partition:
    """Build the partition of conf/partition/<choice>.yaml with some other values."""
    node = yaml.safe_load((FOLDER / f"{choice}.yaml").read_text())
    return instantiate(node | values, Partition, "partition")


def split(
    choice: str, data: Labelled, num_clients: int, seed: int = 0, **values: Any
) -> list[np.ndarray]:
    """Return the positions of each client by the partition that `build` returns."""
    return build(choice, **values).split(data, num_clients, default_rng(seed))


def labelled(*class_sizes: int) -> Labelled:
    """Return labels ordered by class: class_sizes[c] samples of class c."""
    num_classes = len(class_sizes)
    return Labelled(np.repeat(np.arange(num_classes), class_sizes), num_classes)


def balanced(per_class: int, num_classes: int = 10) -> Labelled:
    """Return `per_class` samples of each class in random order, with 60 random owners."""
    labels = default_rng(0).permutation(labelled(*[per_class] * num_classes).labels)
    owners = default_rng(1).integers(60, size=len(labels))
    return Labelled(labels, num_classes, owners)


def histograms(data: Labelled, parts: Iterable[np.ndarray]) -> np.ndarray:
    """Return the number of samples of each class that each client holds [N, C]."""
    return np.stack([np.bincount(data.labels[part], minlength=data.num_classes) for part in parts])


def sizes(parts: Iterable[np.ndarray]) -> list[int]:
    """Return the number of samples of each client."""
    return [len(part) for part in parts]


def lists(parts: Iterable[np.ndarray]) -> list[list[int]]:
    """Return the positions of each client as lists, which == compares."""
    return [part.tolist() for part in parts]
