"""All selected clients as one tensor program: models stacked on a client axis, one forward and backward for all."""

import os
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

from fedsim.cohort import Ids, Params, Stack
from fedsim.engine.base import ClientData, Engine, LocalWork, Trained
from fedsim.engine.batches import StackedBatches, round_batches, stack_batches
from fedsim.engine.keys import step_keys
from fedsim.engine.layers import for_batched, keyed_dropouts, masked_norms
from fedsim.engine.params import buffer_names, trained_names
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
        chunk_size: int | Literal["auto"],
    ) -> None:
        check(rule(chunk_size == "auto" or chunk_size >= 1, "chunk_size", chunk_size, "must be auto or >= 1"))
        super().__init__(model, data, work, optimizer, streams)
        self.template = for_batched(model).train()
        self.chunk_size = _rows_that_fit(model, data.x.device) if chunk_size == "auto" else chunk_size
        self.trained = trained_names(self.template)
        self.buffers = buffer_names(self.template)
        self.keys = [name for name, _ in keyed_dropouts(self.template)]
        self.masks = masked_norms(self.template)
        self._gradients = self._make_gradients()
        load_transforms()

    @property
    def description(self) -> str:
        return "batched"

    def train(self, params: Params, ids: Ids, round: int, lr: float) -> Trained:
        parts: list[Trained] = []
        done = 0
        while done < len(ids):
            chunk = ids[done : done + self.chunk_size]
            try:
                parts.append(self._train_chunk(params, chunk, round, lr))
                done += len(chunk)
            except torch.OutOfMemoryError:
                if len(chunk) == 1:
                    raise
                self.chunk_size = len(chunk) // 2
                if self.data.x.is_cuda:
                    torch.cuda.empty_cache()
        return _concatenate(parts)

    def _train_chunk(self, params: Params, ids: Ids, round: int, lr: float) -> Trained:
        batches = stack_batches(round_batches(self.data, self.work, self.streams, round, ids))
        stack = {name: value.expand(len(ids), *value.shape).clone() for name, value in params.items()}
        losses = self._run_steps(stack, batches, self._dropout_keys(batches, round, ids), lr)
        back = np.argsort(batches.order, kind="stable")
        rows = torch.as_tensor(back, device=self.data.x.device)
        with np.errstate(invalid="ignore"):
            mean_loss = losses.sum(0).cpu().numpy() / batches.steps
        return Trained(
            delta={name: value.sub_(params[name])[rows] for name, value in stack.items()},
            loss=mean_loss[back],
            steps=batches.steps[back],
            samples=batches.counts.sum(0)[back],
        )

    def _dropout_keys(self, batches: StackedBatches, round: int, ids: Ids) -> Tensor | None:
        if not self.keys:
            return None
        keys = step_keys(self.streams, round, ids[batches.order], len(batches.positions))
        return torch.as_tensor(keys, device=self.data.x.device)

    def _run_steps(self, stack: Stack, batches: StackedBatches, keys: Tensor | None, lr: float) -> Tensor:
        """Train `stack` in place; the mean loss of each step and row [S, K], 0 where a row has finished."""
        device, dtype = self.data.x.device, self.data.x.dtype
        positions = torch.as_tensor(batches.positions, device=device)
        num_steps, num_rows, _ = positions.shape
        losses = torch.zeros(num_steps, num_rows, dtype=torch.float64, device=device)
        state = self.optimizer.init({name: stack[name] for name in self.trained})
        for step in range(num_steps):
            counts = batches.counts[step]
            rows, width = int((counts > 0).sum()), int(counts.max())
            live = {name: value[:rows] for name, value in stack.items()}
            weights = _sample_weights(counts[:rows], width, dtype, device) if self._needs_mask(counts[:rows]) else None
            extra = self._context(weights, rows, width, None if keys is None else keys[step, :rows])
            x, y = self._gather(positions[step, :rows, :width])
            grads, loss = self._gradients(live, extra, x, y, weights)
            losses[step, :rows] = loss
            self.optimizer.step({name: live[name] for name in self.trained}, grads, state, lr)
        return losses

    def _needs_mask(self, counts: np.ndarray[Any, Any]) -> bool:
        return bool(counts.min() < counts.max())

    def _gather(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        flat = positions.reshape(-1)
        x = self.data.x.index_select(0, flat).view(*positions.shape, *self.data.x.shape[1:])
        return x, self.data.y.index_select(0, flat).view(positions.shape)

    def _context(self, weights: Tensor | None, rows: int, width: int, keys: Tensor | None) -> Stack:
        """Per-row buffers that are not part of the model: dropout keys and BatchNorm masks."""
        extra: Stack = {}
        if keys is not None:
            extra |= dict.fromkeys(self.keys, keys)
        if self.masks:
            ones = torch.ones(rows, width, dtype=self.data.x.dtype, device=self.data.x.device)
            mask = ones if weights is None else (weights > 0).to(ones.dtype)
            extra |= dict.fromkeys(self.masks, mask)
        return extra

    def _make_gradients(self) -> Callable[[Stack, Stack, Tensor, Tensor, Tensor | None], tuple[Stack, Tensor]]:
        """Gradients and losses of all rows; running statistics in the stack are updated in place."""

        def loss(trained: Params, rest: Params, x: Tensor, y: Tensor, weights: Tensor | None) -> tuple[Tensor, Params]:
            everything = {**trained, **rest}
            output = functional_call(self.template, everything, (x,))
            statistics = {name: everything[name] for name in self.buffers}
            if weights is None:
                return F.cross_entropy(output, y), statistics
            return (F.cross_entropy(output, y, reduction="none") * weights).sum(), statistics

        per_row = grad_and_value(loss, has_aux=True)
        full = vmap(lambda p, r, x, y: per_row(p, r, x, y, None))
        ragged = vmap(per_row)

        def gradients(stack: Stack, extra: Stack, x: Tensor, y: Tensor, weights: Tensor | None) -> tuple[Stack, Tensor]:
            trained = {name: stack[name] for name in self.trained}
            rest = {name: stack[name] for name in self.buffers} | extra
            arguments = (trained, rest, x, y)
            grads, (values, statistics) = full(*arguments) if weights is None else ragged(*arguments, weights)
            for name in self.buffers:
                stack[name].copy_(statistics[name])
            return grads, values

        return gradients


def load_transforms() -> None:
    """Make torch load what its first vmap needs (seconds, once a process), so that no round is charged for it."""
    label = torch.zeros(1, dtype=torch.long)
    vmap(grad_and_value(lambda x: F.cross_entropy(functional_call(nn.Identity(), {}, (x,)), label)))(
        torch.zeros(1, 1, 2)
    )


def _sample_weights(counts: np.ndarray[Any, Any], width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1 / count for the valid samples of each row and 0 for padding [rows, width]."""
    valid = np.arange(width) < counts[:, None]
    return torch.as_tensor(valid / counts[:, None], dtype=dtype, device=device)


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


def _concatenate(parts: list[Trained]) -> Trained:
    if len(parts) == 1:
        return parts[0]
    return Trained(
        delta={name: torch.cat([p.delta[name] for p in parts]) for name in parts[0].delta},
        loss=np.concatenate([p.loss for p in parts]),
        steps=np.concatenate([p.steps for p in parts]),
        samples=np.concatenate([p.samples for p in parts]),
    )
