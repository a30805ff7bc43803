"""A trial of one way of training against another, before it is used on a machine."""

import numpy as np
import torch

from fedsim.engine.backend import TrainingResult, Workload
from fedsim.engine.device import Precision
from fedsim.engine.model import has_dropout
from fedsim.engine.schedule import Schedule

TOLERANCE = {"float32": 0.02, "tf32": 0.05, "bf16": 0.2}
"""Tolerance of the first losses and changes, relative to their size. Rounding is far below it, and
a wrong kernel far above."""


def trial_schedule(workload: Workload) -> Schedule:
    """Return two short steps of two clients. The data must not be empty."""
    positions = np.arange(16).reshape(2, 2, 4) % len(workload.data.x)
    keys = np.arange(4).reshape(2, 2) if has_dropout(workload.model) else None
    crops = positions.astype(np.uint8)  # any crops; they count if samples are augmented
    return Schedule(positions, np.array([[4, 4], [4, 3]]), keys, lr=0.01, crops=crops)


def agree(
    actual: TrainingResult, expected: TrainingResult, schedule: Schedule, precision: Precision
) -> bool:
    """Return whether two results are the same up to rounding.

    Expected results that are not finite say nothing.
    """

    def values(result: TrainingResult) -> tuple[torch.Tensor, torch.Tensor]:
        changes = torch.cat([result.delta[name].flatten().cpu() for name in expected.delta])
        return torch.as_tensor(result.losses[schedule.mask]), changes

    for right, tried in zip(values(expected), values(actual), strict=True):
        close = (right - tried).norm() <= TOLERANCE[precision] * right.norm()
        if right.isfinite().all() and not close:
            return False
    return True
