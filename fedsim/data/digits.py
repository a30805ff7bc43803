"""scikit-learn's handwritten digits: real data that come with the package and need no download."""

import numpy as np
import torch

from fedsim.core.parameters import Problems, parameters
from fedsim.data.base import Dataset, LoadedData, normalisation_problems
from fedsim.data.cache import digest

TEST_SHARE = 0.2


@parameters
class Digits(Dataset):
    """1,797 images of 8x8 pixels, 10 classes; a fixed fifth of each class is the test set."""

    mean: list[float]
    std: list[float]

    def problems(self) -> Problems:
        return normalisation_problems(self.mean, self.std, 1)

    def form(self) -> tuple[tuple[int, ...], int]:
        return (1, 8, 8), 10

    def load(self) -> LoadedData:
        from sklearn.datasets import load_digits

        source = load_digits()
        x = torch.as_tensor(np.round(source.images * (255 / 16)), dtype=torch.uint8)[:, None]
        y = torch.as_tensor(source.target, dtype=torch.int64)
        rng = np.random.default_rng(0)  # fixed: the split belongs to the data set, not to a run
        shuffled = [rng.permutation(np.flatnonzero(source.target == c)) for c in range(10)]
        test = np.concatenate([positions[: round(TEST_SHARE * len(positions))] for positions in shuffled])
        train = np.setdiff1d(np.arange(len(y)), test)
        tensors = {"train_x": x[train], "train_y": y[train], "test_x": x[test], "test_y": y[test]}
        return LoadedData.of(tensors, 10, self.mean, self.std, f"digits {digest({'x': x, 'y': y})}")
