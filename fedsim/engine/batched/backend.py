"""All selected clients as one tensor program: models stacked on a client axis, one forward and backward for all."""

import os
from collections.abc import Sequence
from itertools import islice
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.engine.batched.chunks import Piece, chunks, starting_models
from fedsim.engine.batched.compiled import Compile, worth_compiling
from fedsim.engine.batched.gradients import StackedGradients
from fedsim.engine.batched.programs import Differentiated, Program, WrittenOut
from fedsim.engine.batched.steps import feed, loss_statistics
from fedsim.engine.engine import ClientData, Engine, LocalWork, Request, Trained, concatenate
from fedsim.engine.keys import step_keys
from fedsim.engine.model.adapt import refuse_hidden_randomness
from fedsim.engine.precision import Precision
from fedsim.engine.schedule import StackedBatches, round_batches, stack_batches
from fedsim.errors import check, rule
from fedsim.optimizers.base import LocalOptimizer
from fedsim.rng import Streams
from fedsim.types import Stack

MEMORY_SHARE = 0.2
"""Share of the device's memory that `chunk_size: auto` lets the stacked models of one chunk take."""


CACHED_BYTES = 4 * 2**20
"""Stacked models of several requests in one chunk on a CPU: beyond, products wait for memory (docs/performance.md)."""


class BatchedEngine(Engine):
    """torch.func's vmap over clients. Ragged clients are padded and masked; rows that finish early drop off.

    `chunk_size`: clients trained at once; `auto` takes what fits. On running out of memory it is halved and the chunk
    redone, with the same batches. `compile` is for models that are differentiated: chains of linear layers are written
    out, and compiling gains nothing there.
    """

    def __init__(
        self,
        model: nn.Module,
        data: ClientData,
        work: LocalWork,
        optimizer: LocalOptimizer,
        streams: Streams,
        *,
        precision: Precision,
        chunk_size: int | Literal["auto"],
        compile: Compile,
    ) -> None:
        check(rule(chunk_size == "auto" or chunk_size >= 1, "chunk_size", chunk_size, "must be auto or >= 1"))
        super().__init__(model, data, work, optimizer, streams, precision)
        self.chunk_size = _rows_that_fit(model, data.x.device) if chunk_size == "auto" else chunk_size
        self.gradients = StackedGradients(model, data.x.device, precision)
        if len(data.x):
            refuse_hidden_randomness(model, data.x)
            self.gradients.try_out(data.x, data.y)
        if self.chain is None and worth_compiling(compile, work.total_steps(data.train)):
            self.gradients.compile()

    @property
    def description(self) -> str:
        if not self.gradients.compiled:
            return "batched"
        failures = [c.failure for c in self.gradients.compiled if c.failure is not None]
        return f"batched, not compiled: {failures[0]}" if failures else "batched, compiled"

    @property
    def common_clients(self) -> int:
        """As many as fit into the memory of a GPU, or into the cache of a CPU."""
        if self.gradients.compiled:  # which may add in another order for other shapes
            return 1
        if self.data.x.is_cuda:
            return self.chunk_size
        return max(1, min(self.chunk_size, CACHED_BYTES // max(_model_bytes(self.model), 1)))

    def train_all(self, requests: Sequence[Request]) -> list[Trained]:
        """All rows in chunks of `chunk_size`, those of several requests together where that changes no bit."""
        cut = [request.cut(self.chunk_size) for request in requests]
        pieces = [Piece(part, round_batches(part)) for parts in cut for part in parts]
        done: dict[int, Trained] = {}
        for chunk in chunks(pieces, self.common_clients):
            done |= zip(map(id, chunk), self._train_if_it_fits(chunk), strict=True)
        results = iter([done[id(piece)] for piece in pieces])
        return [concatenate(list(islice(results, len(parts)))) for parts in cut]

    def _train_if_it_fits(self, chunk: list[Piece]) -> list[Trained]:
        """Running out of memory, in smaller chunks; raises for one client."""
        rows = sum(len(piece.batches) for piece in chunk)
        try:
            return self._train_chunk(chunk)
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
        if self.data.x.is_cuda:  # by now, what the attempt held is free
            torch.cuda.empty_cache()
        self.chunk_size = rows // 2
        return self.train_all([piece.request for piece in chunk])

    def _train_chunk(self, chunk: list[Piece]) -> list[Trained]:
        batches = stack_batches([b for piece in chunk for b in piece.batches])
        program = self._program(starting_models([piece.request for piece in chunk], batches.order), chunk[0].request.lr)
        losses = [program.step(b) for b in feed(self.data, batches, self._dropout_keys(chunk, batches))]
        mean_loss, rms_loss = loss_statistics(losses, batches.counts)
        back = np.argsort(batches.order, kind="stable")
        momentum = program.momentum()
        trained = Trained(
            delta=_in_order(program.delta(), back),
            loss=mean_loss[back],
            rms_loss=rms_loss[back],
            steps=batches.steps[back],
            samples=batches.counts.sum(0)[back],
            momentum=None if momentum is None else _in_order(momentum, back),
        )
        return trained.split([len(piece.batches) for piece in chunk])

    def _program(self, start: Stack, lr: float) -> Program:
        if self.chain is not None:
            return WrittenOut(self.chain, self.optimizer, start, lr)
        return Differentiated(self.gradients, self.optimizer, start, lr)

    def _dropout_keys(self, chunk: list[Piece], batches: StackedBatches) -> Tensor | None:
        if not self.gradients.dropouts:
            return None
        steps, requests = len(batches.positions), [piece.request for piece in chunk]
        keys = [step_keys(r.engine.streams, r.round, r.ids, steps) for r in requests]
        return torch.as_tensor(np.concatenate(keys, axis=1)[:, batches.order], device=self.data.x.device)


def _in_order(stack: Stack, rows: NDArray[np.int64]) -> Stack:
    """`stack` with its rows in the order `rows`, without a copy where they are so already."""
    if (rows[:-1] < rows[1:]).all():
        return stack
    return {name: value[torch.as_tensor(rows, device=value.device)] for name, value in stack.items()}


def _rows_that_fit(model: nn.Module, device: torch.device) -> int:
    """Clients whose models, gradients, optimiser state and results fit into a share of the device's whole memory.

    The whole and not the free memory, so that a run on the same machine is always cut alike.
    """
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, int(memory * MEMORY_SHARE / (6 * max(_model_bytes(model), 1))))


def _model_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
