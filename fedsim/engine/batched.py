"""All selected clients as one tensor program: models stacked on a client axis, one forward and backward for all."""

import os
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.cohort import Ids, Params, Stack
from fedsim.engine.adapt import refuse_hidden_randomness
from fedsim.engine.base import ClientData, Engine, LocalWork, Trained, concatenate
from fedsim.engine.batches import StackedBatches, round_batches, stack_batches
from fedsim.engine.feed import feed, loss_statistics
from fedsim.engine.gradients import StackedGradients
from fedsim.engine.keys import step_keys
from fedsim.engine.precision import Precision
from fedsim.engine.programs import Differentiated, Program, WrittenOut
from fedsim.errors import check, rule
from fedsim.optimizers.base import LocalOptimizer
from fedsim.streams import Streams

MEMORY_SHARE = 0.2
"""Share of the device's memory that `chunk_size: auto` lets the stacked models of one chunk take."""


class BatchedEngine(Engine):
    """torch.func's vmap over clients. Ragged clients are padded and masked; rows that finish early drop off.

    `chunk_size`: clients trained at once; `auto` takes what fits. On running out of memory it is halved and the chunk
    redone, with the same batches.
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
    ) -> None:
        check(rule(chunk_size == "auto" or chunk_size >= 1, "chunk_size", chunk_size, "must be auto or >= 1"))
        super().__init__(model, data, work, optimizer, streams, precision)
        self.chunk_size = _rows_that_fit(model, data.x.device) if chunk_size == "auto" else chunk_size
        self.gradients = StackedGradients(model, data.x.device, precision)
        if len(data.x):
            refuse_hidden_randomness(model, data.x)
            self.gradients.try_out(data.x, data.y)

    @property
    def description(self) -> str:
        return "batched"

    def train(self, params: Params, ids: Ids, round: int, lr: float) -> Trained:
        parts: list[Trained] = []
        done = 0
        while done < len(ids):
            chunk = ids[done : done + self.chunk_size]
            part = self._train_if_it_fits(params, chunk, round, lr)
            if part is None:
                self.chunk_size = len(chunk) // 2
                continue
            parts.append(part)
            done += len(chunk)
        return concatenate(parts)

    def _train_if_it_fits(self, params: Params, ids: Ids, round: int, lr: float) -> Trained | None:
        """None if memory ran out; by the time of the return, what the attempt held is free. Raises for one client."""
        try:
            return self._train_chunk(params, ids, round, lr)
        except torch.OutOfMemoryError:
            if len(ids) == 1:
                raise
        if self.data.x.is_cuda:
            torch.cuda.empty_cache()
        return None

    def _train_chunk(self, params: Params, ids: Ids, round: int, lr: float) -> Trained:
        batches = stack_batches(round_batches(self.data, self.work, self.streams, round, ids))
        program = self._program(params, len(ids), lr)
        losses = [program.step(b) for b in feed(self.data, batches, self._dropout_keys(batches, round, ids))]
        mean_loss, rms_loss = loss_statistics(losses, batches.counts)
        back = np.argsort(batches.order, kind="stable")
        momentum = program.momentum()
        return Trained(
            delta=_in_order(program.delta(), back),
            loss=mean_loss[back],
            rms_loss=rms_loss[back],
            steps=batches.steps[back],
            samples=batches.counts.sum(0)[back],
            momentum=None if momentum is None else _in_order(momentum, back),
        )

    def _program(self, params: Params, rows: int, lr: float) -> Program:
        if self.chain is not None:
            return WrittenOut(self.chain, self.optimizer, params, rows, lr)
        return Differentiated(self.gradients, self.optimizer, params, rows, lr)

    def _dropout_keys(self, batches: StackedBatches, round: int, ids: Ids) -> Tensor | None:
        if not self.gradients.dropouts:
            return None
        keys = step_keys(self.streams, round, ids[batches.order], len(batches.positions))
        return torch.as_tensor(keys, device=self.data.x.device)


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
    model_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return max(1, int(memory * MEMORY_SHARE / (6 * max(model_bytes, 1))))
