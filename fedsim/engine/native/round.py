"""One round's local training: what each client's call is given, and where it leaves its results."""


import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedsim.cohort import Stack
from fedsim.engine.base import ClientData, Request, Trained
from fedsim.engine.batches import round_batches
from fedsim.engine.chain import Chain
from fedsim.engine.feed import row_statistics
from fedsim.engine.keys import step_keys
from fedsim.engine.native.task import ChainCalls, Rule, Work
from fedsim.optimizers.sgd import SGD


class Round:
    """Rows are clients in the order of the request's ids; each may be trained from a thread of its own."""

    def __init__(self, chain: Chain, optimizer: SGD, data: ClientData, request: Request) -> None:
        self.calls = ChainCalls(chain, request.params)
        self.batches = round_batches(request)
        self.data = data
        self.rule = Rule(request.lr, optimizer.weight_decay, optimizer.momentum, optimizer.nesterov)
        self.delta, self.velocity = self._room(), self._room() if optimizer.momentum else None
        steps = max((len(b) for b in self.batches), default=0)
        self.keys = _keys(request, steps) if any(link.rate for link in chain.links) else None
        self.losses = np.zeros((len(self.batches), steps, request.engine.work.batch_size), data.x.numpy().dtype)

    def _room(self) -> Stack:
        return {name: value.new_zeros(len(self.batches), *value.shape) for name, value in self.calls.params.items()}

    def train(self, row: int) -> None:
        """One client."""
        batches = self.batches[row]
        steps = len(batches)
        keys = None if self.keys is None else self.keys[row, :steps]
        work = Work(self.data.x, self.data.y, batches.positions, batches.counts, self.losses[row, :steps], keys)
        self.calls.train(work, self.rule, _row(self.delta, row), None if self.velocity is None else _row(self.velocity, row))

    def trained(self) -> Trained:
        """What all of them came to."""
        counts = np.zeros(self.losses.shape[1::-1], np.int64)  # [steps, K]
        for row, batches in enumerate(self.batches):
            counts[: len(batches), row] = batches.counts
        mean_loss, rms_loss = row_statistics(self.losses.transpose(1, 0, 2).astype(np.float64), counts)
        return Trained(
            delta=self.delta,
            loss=mean_loss,
            rms_loss=rms_loss,
            steps=(counts > 0).sum(0),
            samples=counts.sum(0),
            momentum=self.velocity,
        )


def _keys(request: Request, steps: int) -> NDArray[np.int64]:
    """Of dropout [K, steps]."""
    keys = step_keys(request.engine.streams, request.round, request.ids, steps)
    return np.ascontiguousarray(keys.T)


def _row(stack: Stack, row: int) -> dict[str, Tensor]:
    return {name: value[row] for name, value in stack.items()}
