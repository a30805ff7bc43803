"""What clients have trained on one version of the model, whoever asked for it: nobody trains twice."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.engine.engine import Engine, Trained, concatenate
from fedsim.errors import FedsimError
from fedsim.types import Ids, Params, Stack

BLOCK_ENTRIES = 2**20
"""Entries of a block of rows, that it stays in the cache."""


class Workshop:
    """Results of local training from `params` in one round, kept by client.

    `first_model`: clients train from models of their own; updates are still differences to `params`.
    """

    def __init__(
        self,
        engine: Engine,
        params: Params,
        round: int,
        lr: float,
        first_model: Callable[[int], Params] | None = None,
    ) -> None:
        self._engine = engine
        self._params = params
        self._first_model = first_model
        self._round, self._lr = round, lr
        self._parts: list[Trained] = []
        self._where: dict[int, tuple[int, int]] = {}

    def missing(self, ids: Ids) -> Ids:
        """Those of `ids` that have not trained yet."""
        return np.array([i for i in ids if int(i) not in self._where], dtype=np.int64)

    def train(self, ids: Ids) -> int:
        """Train `ids`, none of which has trained; the number of samples passed forward and backward."""
        trained = self._trained(ids)
        self._where |= {int(i): (len(self._parts), row) for row, i in enumerate(ids)}
        self._parts.append(trained)
        return int(trained.samples.sum())

    def _trained(self, ids: Ids) -> Trained:
        if self._first_model is None:
            return self._engine.train(self._params, ids, self._round, self._lr)
        return concatenate([self._from_own_model(ids[row : row + 1], self._first_model) for row in range(len(ids))])

    def _from_own_model(self, one: Ids, first_model: Callable[[int], Params]) -> Trained:
        own = first_model(int(one[0]))
        trained = self._engine.train(own, one, self._round, self._lr)
        delta = {n: change + (own[n] - self._params[n]) for n, change in trained.delta.items()}
        return replace(trained, delta=delta)

    def of(self, ids: Ids) -> Trained:
        """What `ids` have trained, in this order; without a copy if that is all that was trained at once."""
        part, rows = self._rows(ids)
        whole = len(rows) == len(part.steps) and bool((rows == np.arange(len(rows))).all())
        return part if whole else part.rows(rows)

    def pieces(self, ids: Ids, names: Iterable[str]) -> dict[str, Tensor]:
        """Updates of `ids` as one matrix [len(ids), d] per tensor."""
        delta = self.of(ids).delta
        return {name: delta[name].flatten(1) for name in names}

    def model(self, client: int) -> Params:
        """The model that `client` has trained."""
        part, (row,) = self._rows(np.array([client]))
        return {name: value + part.delta[name][row] for name, value in self._params.items()}

    def momentum(self, ids: Ids) -> Stack:
        """The momentum buffers that `ids` ended with, per trained parameter [len(ids), ...]."""
        momentum = self.of(ids).momentum
        if momentum is None:
            raise FedsimError(
                "this selector needs the momentum buffers of local training, and the optimiser has none: set "
                "optimizer=sgd optimizer.momentum=0.9, say"
            )
        return momentum

    def _rows(self, ids: Ids) -> tuple[Trained, NDArray[np.int64]]:
        places = [self._where[int(i)] for i in ids]
        if len({part for part, _ in places}) > 1:
            self._merge()
            places = [self._where[int(i)] for i in ids]
        return self._parts[places[0][0]], np.array([row for _, row in places], dtype=np.int64)

    def _merge(self) -> None:
        offsets = np.cumsum([0, *(len(t.steps) for t in self._parts)])
        self._where = {i: (0, int(offsets[part]) + row) for i, (part, row) in self._where.items()}
        self._parts = [concatenate(self._parts)]


def norms(pieces: Mapping[str, Tensor]) -> NDArray[np.float64]:
    """Euclidean norm over all pieces, row by row."""
    squares = torch.zeros(len(next(iter(pieces.values()))), dtype=torch.float64)
    for piece in pieces.values():
        for rows, block in row_blocks(piece):
            squares[rows] += block.square_().sum(1).cpu()
    result: NDArray[np.float64] = squares.sqrt().numpy()
    return result


def row_blocks(matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """A large matrix in float64, some rows at a time, in one buffer that may be overwritten."""
    size = max(BLOCK_ENTRIES // max(matrix.shape[1], 1), 1)
    buffer = matrix.new_empty(min(size, len(matrix)), matrix.shape[1], dtype=torch.float64)
    for start in range(0, len(matrix), size):
        part = matrix[start : start + size]
        yield slice(start, start + len(part)), buffer[: len(part)].copy_(part)
