"""What local training came to, client by client: put together in one place, whichever backend trained."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedsim.engine.backend import TrainingResult
from fedsim.engine.schedule import Schedule
from fedsim.types import Stack


@dataclass(frozen=True)
class ClientUpdates:
    """Results of the local training of K clients.

    `delta` and `momentum` [K, ...] are on the device: w_k - w of all tensors that travel, and the optimiser's last
    momentum buffers (None where it has none). Per client [K]: `loss`, the mean over local steps of the batch's mean
    training loss; `rms_loss`, the root mean square of the losses of all samples passed (both nan without a step);
    `steps`, optimiser steps; `samples`, samples passed forward and backward.
    """

    delta: Stack
    loss: NDArray[np.float64]
    rms_loss: NDArray[np.float64]
    steps: NDArray[np.int64]
    samples: NDArray[np.int64]
    momentum: Stack | None = None

    def rows(self, rows: NDArray[np.int64]) -> "ClientUpdates":
        """Those of the clients at `rows`, in this order."""
        index = torch.as_tensor(rows)
        delta, momentum = (
            {n: v[index.to(v.device)] for n, v in (s or {}).items()} for s in (self.delta, self.momentum)
        )
        return ClientUpdates(
            delta, self.loss[rows], self.rms_loss[rows], self.steps[rows], self.samples[rows], momentum or None
        )


def client_updates(result: TrainingResult, schedule: Schedule) -> ClientUpdates:
    """The updates of the clients of `schedule`, with statistics of their losses."""
    losses = np.where(schedule.mask, result.losses, 0.0).astype(np.float64)
    counts, steps, samples = schedule.counts, schedule.steps, schedule.samples
    with np.errstate(invalid="ignore"):
        loss = _sum(_sum(losses) / np.maximum(counts, 1)) / steps
        rms_loss = np.sqrt(_sum(_sum(losses**2)) / samples)
    return ClientUpdates(result.delta, loss, rms_loss, steps, samples, result.momentum)


def _sum(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the last axis, one term after another: zeros at its end, which stand for padding, change no bit."""
    return values.cumsum(-1)[..., -1] if values.shape[-1] else np.zeros(values.shape[:-1])


def concatenate_updates(parts: Sequence[ClientUpdates]) -> ClientUpdates:
    """All clients of `parts` in order."""
    if len(parts) == 1:
        return parts[0]
    momenta = [p.momentum for p in parts if p.momentum is not None]
    return ClientUpdates(
        delta=concatenate_stacks([p.delta for p in parts]),
        loss=np.concatenate([p.loss for p in parts]),
        rms_loss=np.concatenate([p.rms_loss for p in parts]),
        steps=np.concatenate([p.steps for p in parts]),
        samples=np.concatenate([p.samples for p in parts]),
        momentum=concatenate_stacks(momenta) if momenta else None,
    )


def concatenate_stacks(stacks: Sequence[Stack]) -> Stack:
    """All models of `stacks` in order."""
    return {name: torch.cat([s[name] for s in stacks]) for name in stacks[0]}
