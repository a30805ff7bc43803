"""Which samples each client sees in each local step: a function of (seed, TRAIN, round, client) alone."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsim.engine.engine import LocalWork, Request
from fedsim.rng import Purpose


@dataclass(frozen=True)
class ClientBatches:
    """One client's `positions` [steps, batch_size] in the data, of which the first `counts` [steps] are valid."""

    positions: NDArray[np.int64]
    counts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.counts)


def client_batches(positions: NDArray[np.int64], work: LocalWork, rng: np.random.Generator) -> ClientBatches:
    """Consecutive shuffled epochs cut into batches; an epoch's last batch is short where the size does not divide."""
    size, width = len(positions), work.batch_size
    steps = work.num_steps(size)
    if steps == 0:
        return ClientBatches(np.zeros((0, width), np.int64), np.zeros(0, np.int64))
    per_epoch = -(-size // width)
    epochs = -(-steps // per_epoch)
    padded = np.full((epochs, per_epoch * width), positions[0])
    for epoch in range(epochs):
        padded[epoch, :size] = rng.permutation(positions)
    counts = np.full((epochs, per_epoch), width)
    counts[:, -1] = size - (per_epoch - 1) * width
    return ClientBatches(padded.reshape(-1, width)[:steps], counts.ravel()[:steps])


def round_batches(request: Request) -> list[ClientBatches]:
    """The batches of every client of a request, in the order of its ids."""
    data, work, streams = request.engine.data, request.engine.work, request.engine.streams
    rng = (streams.generator(Purpose.TRAIN, request.round, int(i)) for i in request.ids)
    return [client_batches(data.train[i], work, r) for i, r in zip(request.ids, rng, strict=True)]


def step_widths(batches: list[ClientBatches]) -> tuple[int, ...]:
    """The largest batch of each step."""
    widths = np.zeros(max((len(b) for b in batches), default=0), np.int64)
    for one in batches:
        np.maximum(widths[: len(one)], one.counts, out=widths[: len(one)])
    return tuple(widths.tolist())


@dataclass(frozen=True)
class StackedBatches:
    """Batches of K clients side by side, rows ordered by falling number of steps, so that rows drop off the end.

    `order` [K] says which client each row is; `positions` [S, K, batch]; `counts` [S, K], 0 where a row has finished;
    `steps` [K].
    """

    order: NDArray[np.int64]
    positions: NDArray[np.int64]
    counts: NDArray[np.int64]
    steps: NDArray[np.int64]


def stack_batches(batches: list[ClientBatches]) -> StackedBatches:
    """Pad the clients' batches to one index array."""
    steps = np.array([len(b) for b in batches], dtype=np.int64)
    order = np.argsort(-steps, kind="stable")
    width = max((int(b.counts.max()) for b in batches if len(b)), default=0)
    positions = np.zeros((int(steps.max(initial=0)), len(batches), width), np.int64)
    counts = np.zeros(positions.shape[:2], np.int64)
    for row, client in enumerate(order):
        done = steps[client]
        positions[:done, row] = batches[client].positions[:, :width]
        counts[:done, row] = batches[client].counts
    return StackedBatches(order, positions, counts, steps[order])
