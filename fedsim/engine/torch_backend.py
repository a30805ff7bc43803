"""Gradients of one model on the samples of many clients at once, for a GPU: torch.func's vmap over padded batches.

Passes of one model in eval mode by PyTorch, for all backends that train with it.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fedsim.core.errors import check
from fedsim.core.flat import real_dtype, to_device
from fedsim.core.types import Params
from fedsim.engine.backend import Backend, Workload
from fedsim.engine.data import ClientData
from fedsim.engine.device import (
    Precision,
    activation_bytes,
    autocast,
    passes_in,
    precision_problem,
    prepare,
    rows_that_fit,
    samples_that_fit,
    tell,
)
from fedsim.engine.model import is_convolutional, layout_for, recurrent_in_training, traveling


@dataclass(frozen=True)
class JointGradients:
    """The model in eval mode, and the samples. At most `most_samples` of each list pass at once."""

    model: nn.Module
    data: ClientData
    precision: Precision
    most_samples: int

    def __call__(self, params: Params, positions: Sequence[NDArray[np.int64]], names: Sequence[str]) -> Tensor:
        """The gradients of the mean cross-entropy over each list of positions, in the parameters `names` [K, D]; zeros
        for an empty list."""
        chosen = {name: params[name] for name in names}
        rest = {name: value for name, value in params.items() if name not in chosen}
        x, y, device = self.data.x, self.data.y, self.data.x.device
        where, weights = padded(positions)
        total: Tensor | None = None
        for part, shares in zip(
            to_device(torch.as_tensor(where), device).split(self.most_samples, dim=1),
            to_device(torch.as_tensor(weights, dtype=real_dtype(x)), device).split(self.most_samples, dim=1),
            strict=True,
        ):
            samples = x.index_select(0, part.reshape(-1)).view(*part.shape, *x.shape[1:])
            found = self._stacked(chosen, rest, samples, y[part], shares)
            flat = torch.cat([found[name].flatten(1) for name in names], dim=1)
            total = flat if total is None else total.add_(flat)
        assert total is not None
        filled = np.array([len(own) > 0 for own in positions])
        if filled.all():
            return total
        return torch.where(to_device(torch.as_tensor(filled), device).unsqueeze(1), total, 0)

    def _stacked(self, chosen: Params, rest: Params, x: Tensor, y: Tensor, weights: Tensor) -> Params:
        def loss(chosen: Params, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
            with autocast(self.precision, self.data.x.device):
                output: Tensor = functional_call(self.model, {**chosen, **rest}, (x,))
            each = F.cross_entropy(output.to(real_dtype(x)), y, reduction="none")
            return (each * weights).sum()

        result: Params = vmap(grad(loss), in_dims=(None, 0, 0, 0))(chosen, x, y, weights)
        return result


def padded(positions: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The lists as rows [K, W], W >= 1, and weights [K, W]: 1 / length within a list, 0 behind its end, where its own
    first position is repeated, so that a sample that is not finite stays with its list."""
    lengths = np.array([len(own) for own in positions])
    width = max(int(lengths.max()), 1)
    where = np.zeros((len(positions), width), np.int64)
    for row, own in zip(where, positions, strict=True):
        row[: len(own)] = own
        row[len(own) :] = own[0] if len(own) else 0
    return where, (np.arange(width) < lengths[:, None]) / np.maximum(lengths, 1)[:, None]


EVALUATION_BATCH = 1000
"""Samples in one forward pass on a CPU, and at least on a GPU, which takes as many as fit into its memory."""
MOST = 0.7
"""Share of all samples from which on it is faster to pass all of them in their order than to gather some."""


class TorchBackend(Backend):
    """Keeps a copy of the model in eval mode, into which parameters are copied before they are used.

    `chunk_size`: clients whose batches are padded and stacked, in training and, on a GPU, for their gradients. 1 in
    backends whose models need not be able to take padded batches.
    """

    def __init__(self, workload: Workload, precision: Precision, deterministic: bool | None = None) -> None:
        check(precision_problem(precision, workload.data.x.device))
        prepare(workload.data.x.device, deterministic)
        self.data, self.optimizer, self.precision = workload.data, workload.optimizer, precision
        self.model = copy.deepcopy(workload.model).to(self.data.x.device).eval()
        self.layout = layout_for(self.model, self.data.x)
        self._tensors = traveling(self.model)
        self.activations, self.pass_size = 0, EVALUATION_BATCH
        if self.data.x.is_cuda:
            self.activations = activation_bytes(self.model, self.data.x)
            self.pass_size = samples_that_fit(self.activations, self.data.x.device, EVALUATION_BATCH)
        self._laid_out: tuple[Tensor, Tensor] | None = None
        self.chunk_size = 1
        self.joint: JointGradients | None = None
        if self.data.x.is_cuda and not is_convolutional(self.model):
            self.joint = JointGradients(self.model, self.data, precision, EVALUATION_BATCH)

    def passed_in_order(self, count: int, x: Tensor) -> int:
        return len(x) if count >= MOST * len(x) else 0

    def forward(self, params: Params, x: Tensor, positions: NDArray[np.int64] | None = None) -> Tensor:
        with torch.no_grad(), passes_in(self.precision, x.device):
            self._load(params)
            return self._forward(x, positions)

    def _forward(self, x: Tensor, positions: NDArray[np.int64] | None) -> Tensor:
        if positions is None:
            return self._in_passes(self._in_layout(x))
        chosen = to_device(torch.as_tensor(positions), x.device)
        if self.passed_in_order(len(chosen), x):
            return self._in_passes(x)[chosen]
        return _joined([self._logits(x[part]) for part in chosen.split(self.pass_size)])

    def _in_passes(self, x: Tensor) -> Tensor:
        return _joined([self._logits(part) for part in x.split(self.pass_size)])

    def _in_layout(self, x: Tensor) -> Tensor:
        """`x` as the model's batches lie in memory. On a GPU the latest result, the test set as a rule, is kept."""
        if not x.is_cuda or self.layout is torch.contiguous_format:
            return x
        if self._laid_out is None or self._laid_out[0] is not x:
            self._laid_out = x, x.contiguous(memory_format=self.layout)
        return self._laid_out[1]

    def gradients(
        self, params: Params, positions: Sequence[NDArray[np.int64]], names: Sequence[str]
    ) -> Iterator[Tensor]:
        done = 0
        while done < len(positions):
            found = self._joint_gradients(params, positions[done : done + self._lists_that_fit(positions)], names)
            if found is None:
                found = [self._gradient(params, positions[done], names)]
            done += len(found)
            yield from found

    def _lists_that_fit(self, positions: Sequence[NDArray[np.int64]]) -> int:
        """How many lists are padded to the longest and pass at once."""
        if self.joint is None or self.chunk_size == 1:
            return 1
        width = min(max(map(len, positions)), EVALUATION_BATCH)
        return min(self.chunk_size, rows_that_fit(self.model, self.data.x.device, self.activations * width))

    def _joint_gradients(
        self, params: Params, positions: Sequence[NDArray[np.int64]], names: Sequence[str]
    ) -> Sequence[Tensor] | None:
        """Of several lists at once; None where this cannot be, which is told if it was tried."""
        if self.joint is None or len(positions) == 1:
            return None
        try:
            with torch.no_grad(), passes_in(self.precision, self.data.x.device):
                return self.joint(params, positions, names).unbind()
        except torch.OutOfMemoryError:
            self.chunk_size = half = len(positions) // 2
            tell(f"engine.chunk_size: out of memory with {len(positions)} gradients at once; going on with {half}")
        except RuntimeError as error:  # of an operation that vmap does not know
            reason = str(error).strip().partition("\n")[0]
            tell(f"gradients of one client after another, which is slower and else the same: {reason}")
            self.joint = None
        torch.cuda.empty_cache()  # by now, what the attempt held is free
        return None

    def _gradient(self, params: Params, chosen: NDArray[np.int64], names: Sequence[str]) -> Tensor:
        self._load(params)  # again for each: the caller may have used the model in between
        total = [torch.zeros_like(params[name]) for name in names]
        for part in to_device(torch.as_tensor(chosen), self.data.x.device).split(EVALUATION_BATCH):
            torch._foreach_add_(total, self._sum_gradient(part, names))
        torch._foreach_div_(total, max(len(chosen), 1))
        return torch.cat([t.flatten() for t in total])

    def _sum_gradient(self, chosen: Tensor, names: Sequence[str]) -> list[Tensor]:
        """The gradient of the sum of the cross-entropies of the samples at these positions."""
        with (
            torch.enable_grad(),  # whatever the caller computes with
            passes_in(self.precision, chosen.device),
            recurrent_in_training(self.model),
        ):
            logits = self._logits(self.data.x.index_select(0, chosen))
            loss = F.cross_entropy(logits, self.data.y[chosen], reduction="sum")
            wanted = [self._tensors[name] for name in names]
            return list(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))

    def _logits(self, x: Tensor) -> Tensor:
        with autocast(self.precision, x.device):
            output: Tensor = self.model(x.contiguous(memory_format=self.layout))
        return output.to(real_dtype(x))

    @torch.no_grad()
    def _load(self, params: Params) -> None:
        torch._foreach_copy_(list(self._tensors.values()), [params[name] for name in self._tensors])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
