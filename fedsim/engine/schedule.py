"""The schedule of a round: which samples each client trains on in each local step.

A schedule is fixed before the training. It depends on the seed, the round and the client only, so
all backends train on the same batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.arrays import Bools, Floats, Ints
from fedsim.core.errors import Problem, rule
from fedsim.core.flat import to_device
from fedsim.core.rng import Purpose, Streams
from fedsim.core.types import UNCORRECTED, Correction, Ids, Positions, positions_of, sizes_of
from fedsim.engine.augment import crop_numbers

MAX_POSITIONS = 2**28
"""Maximum number of positions in the schedule of a round: 2 GiB."""
KEY_STRIDE = 0x2545F4914F6CDD1D
"""Difference between the keys of consecutive steps, modulo 2^63."""


@dataclass(frozen=True)
class LocalWork:
    """The local training of a round: `steps` optimiser steps, or `epochs` passes if `steps` is
    None.

    Batches of `batch_size` samples are cut from consecutive shuffled epochs. The last batch of an
    epoch is smaller if `batch_size` does not divide the client's number of samples n_k. So
    `steps = epochs * ceil(n_k / batch_size)` is the same work as `epochs`.

    With the probability `partial_rate` a client makes only a part of its steps. That is drawn in
    each round (FedProx, Li et al. 2020), or once for each client if `partial_once`.
    """

    epochs: int | None
    steps: int | None
    batch_size: int
    partial_rate: float = 0.0
    partial_once: bool = False

    def num_steps(self, size: int) -> int:
        """Return the number of local steps of a client with `size` samples."""
        if size == 0:
            return 0
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * -(-size // self.batch_size)

    def drawn_steps(self, sizes: Ints, streams: Streams, round: int, ids: Ids) -> Ints:
        """Return the local steps of clients `ids` with `sizes` [K] samples in a `round`.

        Of S steps, partial work has max(1, floor(S u)), with a uniform u in [0, 1). The draws
        depend on (seed, PARTIAL_WORK, round, client) only, and not on the rate.
        """
        steps = np.array([self.num_steps(size) for size in sizes.tolist()], dtype=np.int64)
        if not self.partial_rate:
            return steps
        key = 0 if self.partial_once else round  # rounds count from 1
        for row, rng in enumerate(streams.generators(Purpose.PARTIAL_WORK, key, last=ids)):
            chance, part = rng.random(2)
            if chance < self.partial_rate and steps[row]:
                steps[row] = max(1, int(steps[row] * part))
        return steps

    def num_samples(self, size: int, steps: int | None = None) -> int:
        """Return how many samples a client with `size` samples passes forward and backward in
        `steps`; None: in all its steps."""
        steps_per_epoch = max(-(-size // self.batch_size), 1)
        steps = self.num_steps(size) if steps is None else steps
        epochs, remaining_steps = divmod(steps, steps_per_epoch)
        return epochs * size + min(remaining_steps * self.batch_size, size)

    def too_large(self, sizes: Ints, cohort_size: int) -> Problem | None:
        """Return the problem of a round whose schedule does not fit into memory, or None.

        `sizes` [N] are the clients' numbers of samples.
        """
        largest = int(sizes.max(initial=0))
        count = cohort_size * self.num_steps(largest) * min(self.batch_size, largest)
        key, value = "local.steps", self.steps
        if self.steps is None:
            key, value = "local.epochs", self.epochs
        text = (
            f"makes batches of {count} samples in a round for cohort_size={cohort_size} clients of "
            f"up to {largest} samples; must make at most {MAX_POSITIONS}"
        )
        remedy = "lower it, local.batch_size or cohort_size"
        return rule(count <= MAX_POSITIONS, key, value, text, remedy)

    def median_steps(self, positions: Sequence[Positions]) -> int:
        """Return the local steps in a round of a client with the median number of samples."""
        return self.num_steps(int(np.median(sizes_of(positions)))) if len(positions) else 0


@dataclass(frozen=True)
class Schedule:
    """The local training of K clients, as arrays for S steps of at most B samples.

    - `positions` [K, S, B] are rows of the data. The first `counts` [K, S] positions of a step are
      valid, and the others repeat a sample of the same client. A client with count 0 has finished.
    - `keys` [K, S] determine the dropout masks; None if the model has no dropout.
    - `lr` is the learning rate, and `correction` is added to the gradients.
    - `crops` [K, S, B] are the numbers of the samples' crops (`fedsim.engine.augment`); None if
      samples are not augmented.
    """

    positions: Ints
    counts: Ints
    keys: Ints | None
    lr: float
    correction: Correction = UNCORRECTED
    crops: NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return len(self.counts)

    @cached_property
    def steps(self) -> Ints:
        """Number of local steps of each client [K]."""
        return np.count_nonzero(self.counts, axis=1).astype(np.int64)

    @cached_property
    def samples(self) -> Ints:
        """Number of samples that each client passes forward and backward [K]."""
        return self.counts.sum(1)

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return `positions`, `keys` and `crops` on the device."""

        def on_device(array: NDArray[Any]) -> Tensor:
            return to_device(torch.as_tensor(array), device)

        keys = None if self.keys is None else on_device(self.keys)
        crops = None if self.crops is None else on_device(self.crops)
        return on_device(self.positions), keys, crops

    @property
    def mask(self) -> Bools:
        """Mask of the valid `positions` [K, S, B]."""
        return np.arange(self.positions.shape[2]) < self.counts[:, :, None]

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Size of the largest batch in each step [S]."""
        return tuple(self.counts.max(0, initial=0).tolist())

    def rows(self, rows: slice | Ints, *, padded: bool = False) -> "Schedule":
        """Return the schedule of some clients, without the steps that none of them makes.

        It has no more columns than their largest batch, unless it is `padded`: batches then have
        the shape that they have among all clients.
        """
        counts = self.counts[rows]
        steps = int(np.count_nonzero(counts.any(0)))
        width = self.positions.shape[2] if padded else int(counts.max(initial=0))
        return Schedule(
            self.positions[rows, :steps, :width],
            counts[:, :steps],
            None if self.keys is None else self.keys[rows, :steps],
            self.lr,
            self.correction.rows(rows),
            None if self.crops is None else self.crops[rows, :steps, :width],
        )


def concatenate_schedules(parts: Sequence[Schedule]) -> Schedule:
    """Join the clients of several schedules, padded to the most steps and the largest batch.

    The parts have the same learning rate and the same kind of correction.
    """
    if len(parts) == 1:
        return parts[0]
    steps = max(part.positions.shape[1] for part in parts)
    width = max(part.positions.shape[2] for part in parts)
    keys = [_padded(part.keys, steps) for part in parts if part.keys is not None]
    crops = [_padded(part.crops, steps, width) for part in parts if part.crops is not None]
    return Schedule(
        np.concatenate([_padded(part.positions, steps, width) for part in parts]),
        np.concatenate([_padded(part.counts, steps) for part in parts]),
        np.concatenate(keys) if keys else None,
        parts[0].lr,
        Correction.concat([part.correction for part in parts]),
        np.concatenate(crops) if crops else None,
    )


def _padded(array: NDArray[Any], *shape: int) -> NDArray[Any]:
    """Return `array` [K, ...] with zeros appended, so that its other axes have `shape`."""
    padded = np.zeros((len(array), *shape), array.dtype)
    padded[tuple(slice(size) for size in array.shape)] = array
    return padded


def make_schedule(
    positions: Sequence[Positions],
    work: LocalWork,
    streams: Streams,
    round: int,
    ids: Ids,
    lr: float,
    *,
    dropout: bool,
    augmented: bool = False,
) -> Schedule:
    """Make the schedule of clients `ids` in a `round`, from the `positions` of all N clients.

    The order of a client's samples depends on (seed, TRAIN, round, client) only. Its dropout masks
    depend on (seed, DROPOUT, round, client) and the step. Crops depend on (seed, AUGMENT, round,
    client), the step and the sample.
    """
    chosen = positions_of(positions, ids)
    sizes = chosen.sizes
    steps = work.drawn_steps(sizes, streams, round, ids)
    num_steps = int(steps.max(initial=0))
    width = min(work.batch_size, int(sizes.max(initial=0)))
    batches = np.zeros((len(ids), num_steps, width), np.int64)
    client_positions = list(chosen)
    with_steps = np.flatnonzero(steps)
    generators = streams.generators(Purpose.TRAIN, round, last=ids[with_steps])
    for row, rng in zip(with_steps.tolist(), generators, strict=True):
        _fill(batches[row, : steps[row]], client_positions[row], rng)
    keys = None
    if dropout:
        keys = step_keys(streams.keys(Purpose.DROPOUT, round, last=ids), num_steps)
    crops = None
    if augmented:
        client_keys = streams.keys(Purpose.AUGMENT, round, last=ids)
        crops = crop_numbers(step_keys(client_keys, num_steps), batches)
    counts = _counts(sizes, steps, work.batch_size)
    return Schedule(batches, counts, keys, lr, crops=crops)


def _counts(sizes: Ints, steps: Ints, batch_size: int) -> Ints:
    """Return the number of samples in each step [K, S], for clients with `sizes` and `steps`
    [K]."""
    sizes = sizes[:, None]
    step = np.arange(steps.max(initial=0))
    steps_per_epoch = np.maximum(-(-sizes // batch_size), 1)
    used_in_epoch = step % steps_per_epoch * batch_size
    counts = np.minimum(sizes - used_in_epoch, batch_size)
    has_step = step < steps[:, None]
    return np.where(has_step, counts, 0)


def _fill(batches: Ints, positions: Positions, rng: np.random.Generator) -> None:
    """Fill the `batches` [steps, B] of one client with shuffled epochs of its `positions`.

    An epoch takes as many whole batches as it needs. The rest of its last batch stays padding, the
    client's first position.
    """
    flat = batches.reshape(-1)
    width = batches.shape[1]
    size = len(positions)
    flat[:] = positions[0]
    for first in range(0, len(flat), -(-size // width) * width):
        if first + size <= len(flat):
            epoch = flat[first : first + size]
            epoch[:] = positions
            rng.shuffle(epoch)
        else:
            flat[first:] = rng.permutation(positions)[: len(flat) - first]


def mean_weights(counts: Ints, width: int) -> Floats:
    """Return weights [..., width] for `counts` [...]: 1 / count for valid samples, 0 for
    padding."""
    return (np.arange(width) < counts[..., None]) / np.maximum(counts, 1)[..., None]


def step_keys(keys: Ints, num_steps: int) -> Ints:
    """Return a 63-bit key for each step [K, num_steps], from the clients' keys in the round [K]."""
    strides = np.arange(num_steps, dtype=np.uint64) * np.uint64(KEY_STRIDE)
    return ((keys.astype(np.uint64)[:, None] + strides) & np.uint64(2**63 - 1)).astype(np.int64)
