"""What the losses of local training come to, by hand."""

import numpy as np
import pytest

from fedsim.engine.engine import mean_losses
from fedsim.engine.schedule import Schedule

COUNTS = np.array([[3, 1], [2, 0], [0, 0]])
LOSSES = np.array(
    [[[1.0, 2.0, 6.0], [5.0, np.nan, np.inf]], [[4.0, 2.0, 100.0], [7.0, 7.0, 7.0]], [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]]
)
"""Of three clients in two steps of at most three samples; what stands behind the counts means nothing."""


def schedule(counts: np.ndarray, width: int) -> Schedule:
    return Schedule(np.zeros((*counts.shape, width), np.int64), counts, None, 0.1)


def test_losses_by_hand() -> None:
    """Means over steps of the means of batches: (9/3 + 5) / 2 and 3. Squares over all samples: 1, 4, 36, 25 and 16,
    4."""
    means = mean_losses(LOSSES, schedule(COUNTS, 3))
    assert means[0][:2].tolist() == pytest.approx([4.0, 3.0])
    assert means[1][:2].tolist() == pytest.approx([np.sqrt(66 / 4), np.sqrt(20 / 2)])
    assert np.isnan([means[0][2], means[1][2]]).all()
    assert schedule(COUNTS, 3).steps.tolist() == [2, 1, 0]
    assert schedule(COUNTS, 3).samples.tolist() == [4, 2, 0]


def test_padding_changes_no_bit() -> None:
    """A client's losses are the same however many steps and samples the others have."""
    rng = np.random.default_rng(0)
    losses, counts = rng.random((1, 11, 13)), np.full((1, 11), 13)
    alone = mean_losses(losses, schedule(counts, 13))
    padded = np.pad(losses, [(0, 0), (0, 9), (0, 7)], constant_values=3.0)
    beside = mean_losses(padded, schedule(np.pad(counts, [(0, 0), (0, 9)]), 20))
    assert [mean[0] for mean in alone] == [mean[0] for mean in beside]
