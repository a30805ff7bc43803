"""scikit-learn's handwritten digits: real data that need neither network nor files."""

import numpy as np
import torch
from numpy.typing import NDArray

from fedsim.data.base import Dataset, LoadedData, Samples
from fedsim.data.cache import digest

TEST_SHARE = 0.2
MEAN, STD = 0.3053, 0.3759
"""Of all pixels, scaled to [0, 1]."""


class Digits(Dataset):
    """1,797 images of 8x8 pixels, 10 classes; a fixed fifth of each class is the test set."""

    def load(self) -> LoadedData:
        from sklearn.datasets import load_digits

        source = load_digits()
        x = torch.as_tensor(np.round(source.images * (255 / 16)), dtype=torch.uint8)[:, None]
        y = torch.as_tensor(source.target, dtype=torch.int64)
        rng = np.random.default_rng(0)  # part of the data set, not of a run
        test = np.concatenate([_first_share(rng.permutation(np.flatnonzero(source.target == c))) for c in range(10)])
        train = np.setdiff1d(np.arange(len(y)), test)
        fingerprint = digest({"x": x, "y": y})
        return LoadedData(
            Samples(x[train], y[train]), Samples(x[test], y[test]), 10, (MEAN,), (STD,), f"digits {fingerprint}"
        )


def _first_share(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    return positions[: round(TEST_SHARE * len(positions))]
