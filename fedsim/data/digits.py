"""scikit-learn's handwritten digits: real data that need no download."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from fedsim.core.arrays import Floats
from fedsim.data.base import ImageSet, LoadedData
from fedsim.data.cache import digest

NUM_CLASSES = 10
TEST_SHARE = 0.2


def read_table() -> Floats:
    """Return a row for each image [1797, 65]: 64 pixels in 0..16 and the label.

    The file of scikit-learn is read directly, because importing scikit-learn takes a second.
    """
    spec = find_spec("sklearn")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0])
    return np.loadtxt(folder / "datasets" / "data" / "digits.csv.gz", delimiter=",")


class Digits(ImageSet):
    """1,797 images of 8x8 pixels in 10 classes; a fixed fifth of each class is the test set."""

    def form(self) -> tuple[tuple[int, ...], int]:
        """Return the shape of an image and the number of classes."""
        return (1, 8, 8), NUM_CLASSES

    def load(self) -> LoadedData:
        """Return the data, with pixels scaled to 0..255."""
        table = read_table()
        pixels, labels = table[:, :-1], table[:, -1]
        images = np.round(pixels * (255 / 16))
        x = torch.as_tensor(images, dtype=torch.uint8).view(-1, 1, 8, 8)
        y = torch.as_tensor(labels, dtype=torch.int64)
        rng = np.random.default_rng(0)  # fixed: the split belongs to the data set, not to a run
        test_parts = []
        for label in range(NUM_CLASSES):
            positions = rng.permutation(np.flatnonzero(labels == label))
            test_parts.append(positions[: round(TEST_SHARE * len(positions))])
        test = np.concatenate(test_parts)
        train = np.setdiff1d(np.arange(len(y)), test)
        tensors = {"train_x": x[train], "train_y": y[train], "test_x": x[test], "test_y": y[test]}
        fingerprint = f"digits {digest({'x': x, 'y': y})}"
        return LoadedData.of(tensors, NUM_CLASSES, self.mean, self.std, fingerprint)
