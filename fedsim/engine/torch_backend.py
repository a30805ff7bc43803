"""Passes of one model in eval mode by PyTorch, for all backends that train with it."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsim.core.errors import check, rule
from fedsim.core.flat import real_dtype, to_device
from fedsim.core.types import Params
from fedsim.engine.backend import Backend, TrainingResult, Workload, concatenate_results
from fedsim.engine.device import (
    Precision,
    activation_bytes,
    autocast,
    is_out_of_memory,
    model_bytes,
    passes_in,
    precision_problem,
    prepare,
    rows_that_fit,
    samples_that_fit,
    tell,
)
from fedsim.engine.model import is_convolutional, layout_for, recurrent_in_training, traveling
from fedsim.engine.schedule import Positions, Schedule
from fedsim.engine.stacked import joint_gradients

Found = TypeVar("Found")

EVALUATION_BATCH = 1000
"""Samples in one forward pass on a CPU, and at least on a GPU, which takes as many as fit into its
memory."""
MOST = 0.7
"""Share of all samples from which on it is faster to pass all of them in their order than to gather
some."""
SMALL, MANY = 64, 1000
"""A CPU computes the gradients of several clients at once where none has more samples, and as many
are asked for: what that takes is imported in a second."""
CACHED_BYTES = 4 * 2**20
"""Stacked models of several runs in one call on a CPU: beyond, products wait for memory
(docs/performance.md)."""


class TorchBackend(Backend):
    """Keeps a copy of the model in eval mode, into which parameters are copied before they are
    used.

    `chunk_size`: clients whose batches are padded and stacked, in training and, on a GPU, for their
    gradients; `auto` takes what fits. On running out of memory it is halved and the chunk repeated.
    1 in backends whose models need not be able to take padded batches.
    """

    def __init__(
        self,
        workload: Workload,
        precision: Precision,
        deterministic: bool | None = None,
        chunk_size: int | Literal["auto"] = 1,
    ) -> None:
        x = workload.data.x
        check(
            rule(
                chunk_size == "auto" or chunk_size >= 1,
                "chunk_size",
                chunk_size,
                "must be auto or >= 1",
            ),
            precision_problem(precision, x.device),
        )
        prepare(x.device, deterministic)
        self.passes = passes_in(precision, x.device)
        self.data, self.optimizer, self.precision = workload.data, workload.optimizer, precision
        self.model = copy.deepcopy(workload.model).to(x.device).eval()
        self.layout = layout_for(self.model, x, precision)
        self._tensors = traveling(self.model)
        self.activations, self.pass_size = 0, EVALUATION_BATCH
        if x.is_cuda:
            self.activations = activation_bytes(self.model, x)
            self.pass_size = samples_that_fit(self.activations, x.device, EVALUATION_BATCH)
        self.chunk_size = (
            rows_that_fit(self.model, x.device) if chunk_size == "auto" else chunk_size
        )
        self._counts_activations = (
            chunk_size == "auto" and x.is_cuda
        )  # a CPU trains what has large ones one by one
        self.joint = not is_convolutional(self.model)

    @property
    def max_joint_clients(self) -> int:
        """As many as fit into the memory of a GPU, or into the cache of a CPU."""
        cached = max(1, CACHED_BYTES // max(model_bytes(self.model), 1))
        return self.chunk_size if self.data.x.is_cuda else min(self.chunk_size, cached)

    def train(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        """By `_train_chunk`, for as many clients at once as fit."""
        size = (
            self._that_fit(schedule.positions.shape[2])
            if self._counts_activations
            else self.chunk_size
        )
        if len(schedule) <= size:
            found = self._if_it_fits(lambda: self._train_chunk(start, schedule), len(schedule))
            return self.train(start, schedule) if found is None else found
        cuts = [slice(first, first + size) for first in range(0, len(schedule), size)]
        return concatenate_results(
            [self.train(start[cut], schedule.rows(cut)) for cut in cuts], schedule
        )

    def _train_chunk(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        raise NotImplementedError

    def _that_fit(self, width: int) -> int:
        """Clients at once, with the activations of batches of `width`."""
        return min(
            self.chunk_size, rows_that_fit(self.model, self.data.x.device, self.activations * width)
        )

    def _if_it_fits(
        self, compute: Callable[[], Found], count: int, what: str = "clients"
    ) -> Found | None:
        """What `compute` returns for `count` clients at once; None where memory ran out: chunks are
        then halved."""
        try:
            with self.passes:
                return compute()
        except RuntimeError as error:
            if count == 1 or not is_out_of_memory(error):
                raise
        self.chunk_size = half = count // 2
        tell(f"engine.chunk_size: out of memory with {count} {what} at once; going on with {half}")
        self._free_memory()  # by now, what the attempt held is free
        return None

    def _free_memory(self) -> None:
        if self.data.x.is_cuda:
            torch.cuda.empty_cache()

    def passed_in_order(self, count: int, x: Tensor) -> int:
        return len(x) if count >= MOST * len(x) else 0

    def forward(self, params: Params, x: Tensor, positions: Positions | None = None) -> Tensor:
        with torch.no_grad(), self.passes:
            self._load(params)
            chosen = None if positions is None else to_device(torch.as_tensor(positions), x.device)
            if chosen is not None and not self.passed_in_order(len(chosen), x):
                return torch.cat([self._logits(x[part]) for part in chosen.split(self.pass_size)])
            logits = torch.cat([self._logits(part) for part in x.split(self.pass_size)])
            return logits if chosen is None else logits[chosen]

    def gradients(
        self, params: Params, positions: Sequence[Positions], names: Sequence[str]
    ) -> Iterator[Tensor]:
        done, longest = 0, max(map(len, positions), default=0)
        while done < len(positions):
            some = positions[done : done + self._lists_that_fit(len(positions), longest)]
            alone = len(some) == 1
            found = (
                [self._gradient(params, some[0], names)]
                if alone
                else self._joint_gradients(params, some, names)
            )
            done += len(found)
            yield from found

    def _lists_that_fit(self, count: int, longest: int) -> int:
        on_cpu = not self.data.x.is_cuda
        if not self.joint or self.chunk_size == 1 or (on_cpu and (longest > SMALL or count < MANY)):
            return 1
        return self.max_joint_clients if on_cpu else self._that_fit(min(longest, EVALUATION_BATCH))

    def _joint_gradients(
        self, params: Params, positions: Sequence[Positions], names: Sequence[str]
    ) -> Sequence[Tensor]:
        """Of several lists at once; none where that cannot be: fewer are tried then."""
        task = self.model, self.data, self.precision, params, positions, names, EVALUATION_BATCH
        try:
            found = self._if_it_fits(lambda: joint_gradients(*task), len(positions), "gradients")
            return [] if found is None else found.unbind()
        except RuntimeError as error:  # of an operation that vmap does not know
            reason = str(error).strip().partition("\n")[0]
            tell(
                f"gradients of one client after another, which is slower and else the same: {reason}"
            )
            self.joint = False
        self._free_memory()
        return []

    def _gradient(self, params: Params, chosen: Positions, names: Sequence[str]) -> Tensor:
        self._load(params)  # again for each: the caller may have used the model in between
        wanted = [self._tensors[name] for name in names]
        total = [torch.zeros_like(value) for value in wanted]
        for part in to_device(torch.as_tensor(chosen), self.data.x.device).split(EVALUATION_BATCH):
            with torch.enable_grad(), self.passes, recurrent_in_training(self.model):
                logits = self._logits(self.data.x.index_select(0, part))
                loss = F.cross_entropy(logits, self.data.y[part], reduction="sum")
                found = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
            torch._foreach_add_(total, list(found))
        torch._foreach_div_(total, max(len(chosen), 1))
        return torch.cat([t.flatten() for t in total])

    def _logits(self, x: Tensor) -> Tensor:
        with autocast(self.precision, x.device):
            return self.model(x.contiguous(memory_format=self.layout)).to(real_dtype(x))

    @torch.no_grad()
    def _load(self, params: Params) -> None:
        torch._foreach_copy_(list(self._tensors.values()), [params[name] for name in self._tensors])
