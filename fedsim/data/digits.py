"""scikit-learn's handwritten digits: real data that come with the package and need no download."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from fedsim.core.arrays import Floats
from fedsim.data.base import ImageSet, LoadedData
from fedsim.data.cache import digest

TEST_SHARE = 0.2


def read_table() -> Floats:
    """Rows of 64 pixels in 0..16 and the label [1797, 65], from scikit-learn's file: to import it
    takes a second."""
    folder = Path(find_spec("sklearn").submodule_search_locations[0])  # type: ignore[union-attr, index]
    return np.loadtxt(folder / "datasets" / "data" / "digits.csv.gz", delimiter=",")


class Digits(ImageSet):
    """1,797 images of 8x8 pixels, 10 classes; a fixed fifth of each class is the test set."""

    def form(self) -> tuple[tuple[int, ...], int]:
        return (1, 8, 8), 10

    def load(self) -> LoadedData:
        *pixels, labels = read_table().T
        x = torch.as_tensor(np.round(np.stack(pixels, 1) * (255 / 16)), dtype=torch.uint8).view(
            -1, 1, 8, 8
        )
        y = torch.as_tensor(labels, dtype=torch.int64)
        rng = np.random.default_rng(0)  # fixed: the split belongs to the data set, not to a run
        shuffled = [rng.permutation(np.flatnonzero(labels == c)) for c in range(10)]
        test = np.concatenate(
            [positions[: round(TEST_SHARE * len(positions))] for positions in shuffled]
        )
        train = np.setdiff1d(np.arange(len(y)), test)
        tensors = {"train_x": x[train], "train_y": y[train], "test_x": x[test], "test_y": y[test]}
        return LoadedData.of(tensors, 10, self.mean, self.std, f"digits {digest({'x': x, 'y': y})}")
