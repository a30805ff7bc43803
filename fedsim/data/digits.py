"""scikit-learn's handwritten digits: real data that come with the package and need no download."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedsim.core.errors import check
from fedsim.data.base import Dataset, LoadedData, Samples, normalisation_problems
from fedsim.data.cache import digest

TEST_SHARE = 0.2


class Digits(Dataset):
    """1,797 images of 8x8 pixels, 10 classes; a fixed fifth of each class is the test set."""

    def __init__(self, data_dir: Path, cache_dir: Path, *, mean: list[float], std: list[float]) -> None:
        super().__init__(data_dir, cache_dir)
        check(*normalisation_problems(mean, std, 1))
        self.mean, self.std = mean, std

    def form(self) -> tuple[tuple[int, ...], int]:
        return (1, 8, 8), 10

    def load(self) -> LoadedData:
        from sklearn.datasets import load_digits

        source = load_digits()
        x = torch.as_tensor(np.round(source.images * (255 / 16)), dtype=torch.uint8)[:, None]
        y = torch.as_tensor(source.target, dtype=torch.int64)
        rng = np.random.default_rng(0)  # fixed: the split belongs to the data set, not to a run
        test = np.concatenate([_test_positions(rng.permutation(np.flatnonzero(source.target == c))) for c in range(10)])
        train = np.setdiff1d(np.arange(len(y)), test)
        fingerprint = digest({"x": x, "y": y})
        return LoadedData(
            train=Samples(x[train], y[train]),
            test=Samples(x[test], y[test]),
            num_classes=10,
            mean=tuple(self.mean),
            std=tuple(self.std),
            fingerprint=f"digits {fingerprint}",
        )


def _test_positions(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    return positions[: round(TEST_SHARE * len(positions))]
