"""One round's local training: what each client's call is given, and where it leaves its results."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedsim.engine.engine import ClientData, Request, Trained
from fedsim.engine.keys import step_keys
from fedsim.engine.model.chain import Chain
from fedsim.engine.native.calls import ChainCalls, Rule, Work
from fedsim.engine.schedule import round_batches
from fedsim.optimizers.sgd import SGD
from fedsim.types import Stack


class Round:
    """Rows are clients in the order of the request's ids; each may be trained from a thread of its own."""

    def __init__(self, chain: Chain, optimizer: SGD, data: ClientData, request: Request) -> None:
        self.calls = ChainCalls(chain, request.params, data.x.shape[1:])
        self.batches = round_batches(request)
        self.data = data
        self.rule = Rule(request.lr, optimizer.weight_decay, optimizer.momentum, optimizer.nesterov)
        self.delta, self.velocity = self._room(), self._room() if optimizer.momentum else None
        self.loss, self.rms_loss = np.full((2, len(self.batches)), np.nan)
        self.keys = self._keys(request) if any(link.rate for link in chain.links) else None

    def train(self, row: int, threads: int = 1) -> None:
        """One client, by so many threads."""
        batches = self.batches[row]
        if not len(batches):
            return
        losses = np.zeros(batches.positions.shape, self.data.x.numpy().dtype)
        keys = None if self.keys is None else self.keys[row, : len(batches)]
        work = Work(self.data.x, self.data.y, batches.positions, batches.counts, losses, keys, threads)
        velocity = None if self.velocity is None else _row(self.velocity, row)
        self.calls.train(work, self.rule, _row(self.delta, row), velocity)
        precise = losses.astype(np.float64)
        self.loss[row] = (precise.sum(1) / batches.counts).mean()
        self.rms_loss[row] = np.sqrt((precise**2).sum() / batches.counts.sum())

    def trained(self) -> Trained:
        """What all of them came to."""
        return Trained(
            delta=self.delta,
            loss=self.loss,
            rms_loss=self.rms_loss,
            steps=np.array([len(b) for b in self.batches], dtype=np.int64),
            samples=np.array([b.counts.sum() for b in self.batches], dtype=np.int64),
            momentum=self.velocity,
        )

    def _room(self) -> Stack:
        return {name: value.new_zeros(len(self.batches), *value.shape) for name, value in self.calls.params.items()}

    def _keys(self, request: Request) -> NDArray[np.int64]:
        """Of dropout [K, steps]."""
        steps = max((len(b) for b in self.batches), default=0)
        return np.ascontiguousarray(step_keys(request.engine.streams, request.round, request.ids, steps).T)


def _row(stack: Stack, row: int) -> dict[str, Tensor]:
    return {name: value[row] for name, value in stack.items()}
