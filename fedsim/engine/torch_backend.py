"""The bases of the backends that train with PyTorch.

`TorchBackend` has the passes of one model in eval mode. `ChunkedBackend` trains as many clients in
one call as fit into the memory.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsim.core.errors import check, rule
from fedsim.core.flat import real_dtype, to_device
from fedsim.core.types import Params, Positions
from fedsim.engine.backend import Backend, TrainingResult, Workload, concatenate_results
from fedsim.engine.device import (
    Precision,
    activation_bytes,
    autocast,
    clients_that_fit,
    is_out_of_memory,
    model_bytes,
    precision_context,
    precision_problem,
    prepare,
    samples_that_fit,
    tell,
)
from fedsim.engine.model import is_convolutional, layout_for, traveling
from fedsim.engine.schedule import Schedule
from fedsim.engine.training_copies import recurrent_in_training
from fedsim.engine.vmapped import joint_gradients

Result = TypeVar("Result")

EVALUATION_BATCH = 1000
"""Number of samples in one forward pass on a CPU. A GPU takes at least as many, and as many as fit
into its memory."""
PASS_ALL_SHARE = 0.7
"""Share of all samples from which `forward` passes all of them in order. That is then faster than
to gather those that it needs."""
JOINT_LIST_LENGTH = 64
"""A CPU computes the gradients of several lists of samples at once if no list is longer."""
JOINT_LIST_COUNT = 1000
"""Number of lists of samples from which a CPU computes gradients at once. torch then imports its
compiler, which takes a second."""
CACHED_BYTES = 4 * 2**20
"""Maximum size of the stacked models of several runs in one call on a CPU. For larger stacks,
products wait for memory (docs/performance.md)."""


class TorchBackend(Backend):
    """Evaluates models and computes gradients with PyTorch.

    It keeps a copy of the user's model in eval mode, and loads parameters into it before each use.

    - `precision_context`: the context of forward and backward passes.
    - `layout`: the memory format of batches.
    - `sample_bytes`: size of a sample and all layers' outputs for it on a GPU, where it limits what
      is computed at once; 0 on a CPU.
    """

    def __init__(
        self, workload: Workload, precision: Precision, deterministic: bool | None = None
    ) -> None:
        x = workload.data.x
        check(precision_problem(precision, x.device))
        prepare(x.device, deterministic)
        self.data = workload.data
        self.optimizer = workload.optimizer
        self.precision = precision
        self.precision_context = precision_context(precision, x.device)
        self.model = copy.deepcopy(workload.model).to(x.device).eval()
        self.layout = layout_for(self.model, x, precision)
        self._tensors = traveling(self.model)
        self.sample_bytes = 0
        self.pass_size = EVALUATION_BATCH
        if x.is_cuda:
            self.sample_bytes = activation_bytes(self.model, x)
            self.pass_size = samples_that_fit(self.sample_bytes, x.device, EVALUATION_BATCH)

    def num_passed_in_order(self, num_positions: int, x: Tensor) -> int:
        return len(x) if num_positions >= PASS_ALL_SHARE * len(x) else 0

    @torch.no_grad()
    def forward(self, params: Params, x: Tensor, positions: Positions | None = None) -> Tensor:
        with self.precision_context:
            self._load(params)
            if positions is None:
                return self._logits_in_passes(x)
            index = to_device(torch.as_tensor(positions), x.device)
            if self.num_passed_in_order(len(index), x):
                return self._logits_in_passes(x)[index]
            return torch.cat([self._logits(x[part]) for part in index.split(self.pass_size)])

    def _logits_in_passes(self, x: Tensor) -> Tensor:
        return torch.cat([self._logits(part) for part in x.split(self.pass_size)])

    def _logits(self, x: Tensor) -> Tensor:
        with autocast(self.precision, x.device):
            return self.model(x.contiguous(memory_format=self.layout)).to(real_dtype(x))

    @torch.no_grad()
    def _load(self, params: Params) -> None:
        torch._foreach_copy_(list(self._tensors.values()), [params[name] for name in self._tensors])

    def gradients(
        self, params: Params, positions: Sequence[Positions], names: Sequence[str]
    ) -> Iterator[Tensor]:
        for client_positions in positions:
            yield self._gradient(params, client_positions, names)

    def _gradient(self, params: Params, positions: Positions, names: Sequence[str]) -> Tensor:
        self._load(params)  # The caller may have used the model since the last gradient.
        trained = [self._tensors[name] for name in names]
        total = [torch.zeros_like(value) for value in trained]
        index = to_device(torch.as_tensor(positions), self.data.x.device)
        for part in index.split(EVALUATION_BATCH):
            with torch.enable_grad(), self.precision_context, recurrent_in_training(self.model):
                logits = self._logits(self.data.x.index_select(0, part))
                loss = F.cross_entropy(logits, self.data.y[part], reduction="sum")
                grads = torch.autograd.grad(
                    loss, trained, allow_unused=True, materialize_grads=True
                )
            torch._foreach_add_(total, list(grads))
        torch._foreach_div_(total, max(len(positions), 1))
        return torch.cat([value.flatten() for value in total])


class ChunkedBackend(TorchBackend):
    """Trains the clients of a call in chunks.

    `chunk_size` is the number of clients whose batches are padded and stacked, in training and, on
    a GPU, for their gradients. `auto` takes as many as fit. When memory runs out, it is halved and
    the chunk is repeated.
    """

    def __init__(
        self,
        workload: Workload,
        precision: Precision,
        deterministic: bool | None,
        chunk_size: int | Literal["auto"],
    ) -> None:
        valid = chunk_size == "auto" or chunk_size >= 1
        check(rule(valid, "chunk_size", chunk_size, "must be auto or >= 1"))
        super().__init__(workload, precision, deterministic)
        # On a CPU, models with large activations train one by one anyway.
        self._activations_limit_training = chunk_size == "auto" and self.data.x.is_cuda
        self._vmap_computes_gradients = not is_convolutional(self.model)
        if chunk_size == "auto":
            chunk_size = clients_that_fit(self.model, self.data.x.device)
        self.chunk_size = chunk_size

    @property
    def max_joint_clients(self) -> int:
        """Number of clients that fit into the memory of a GPU, or into the cache of a CPU."""
        if self.data.x.is_cuda:
            return self.chunk_size
        return min(self.chunk_size, max(1, CACHED_BYTES // max(model_bytes(self.model), 1)))

    def train(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        """Train as many clients at once as fit, by `_train_chunk`."""
        size = self.chunk_size
        if self._activations_limit_training:
            size = self._clients_that_fit(schedule.positions.shape[2])
        count = len(schedule)
        if count <= size:
            result = self._attempt(lambda: self._train_chunk(start, schedule), count)
            if result is not None:
                return result
            size = self.chunk_size
        results = []
        for first in range(0, count, size):
            rows = slice(first, first + size)
            results.append(self.train(start[rows], schedule.rows(rows)))
        return concatenate_results(results, schedule)

    @abstractmethod
    def _train_chunk(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        """Train all clients of the `schedule` at once."""

    def _clients_that_fit(self, num_samples: int) -> int:
        """Return how many clients fit at once, with the activations of `num_samples` each."""
        activations = self.sample_bytes * num_samples
        return min(self.chunk_size, clients_that_fit(self.model, self.data.x.device, activations))

    def _attempt(
        self, compute: Callable[[], Result], count: int, what: str = "clients"
    ) -> Result | None:
        """Return what `compute` returns for `count` clients at once.

        If memory runs out, set `chunk_size` to half of `count`, and return None. With a single
        client the error is raised.
        """
        try:
            with self.precision_context:
                return compute()
        except RuntimeError as error:
            if count == 1 or not is_out_of_memory(error):
                raise
        self.chunk_size = count // 2
        tell(
            f"engine.chunk_size: out of memory with {count} {what} at once; going on with "
            f"{self.chunk_size}"
        )
        self._free_memory()  # Outside of `except`, which would keep the attempt's tensors alive.
        return None

    def _free_memory(self) -> None:
        if self.data.x.is_cuda:
            torch.cuda.empty_cache()

    def gradients(
        self, params: Params, positions: Sequence[Positions], names: Sequence[str]
    ) -> Iterator[Tensor]:
        longest = max(map(len, positions), default=0)
        done = 0
        while done < len(positions):
            count = self._lists_that_fit(len(positions), longest)
            lists = positions[done : done + count]
            if len(lists) == 1:
                yield self._gradient(params, lists[0], names)
                done += 1
                continue
            gradients = self._joint_gradients(params, lists, names)
            if gradients is not None:  # Otherwise fewer lists are tried next.
                yield from gradients.unbind()
                done += len(lists)

    def _lists_that_fit(self, count: int, longest: int) -> int:
        """Return for how many of `count` lists of samples gradients are computed at once.

        `longest` is the length of the longest list.
        """
        if not self._vmap_computes_gradients or self.chunk_size == 1:
            return 1
        if self.data.x.is_cuda:
            return self._clients_that_fit(min(longest, EVALUATION_BATCH))
        worthwhile = longest <= JOINT_LIST_LENGTH and count >= JOINT_LIST_COUNT
        return self.max_joint_clients if worthwhile else 1

    def _joint_gradients(
        self, params: Params, positions: Sequence[Positions], names: Sequence[str]
    ) -> Tensor | None:
        """Return the gradients of several lists at once [K, D], or None.

        None means that memory ran out, or that vmap does not know an operation of the model. From
        then on, `_lists_that_fit` returns fewer.
        """
        compute = partial(
            joint_gradients,
            self.model,
            self.data,
            self.precision,
            params,
            positions,
            names,
            max_samples=EVALUATION_BATCH,
        )
        try:
            return self._attempt(compute, len(positions), "gradients")
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
        tell(f"gradients of one client after another (slower, same results): {reason}")
        self._vmap_computes_gradients = False
        self._free_memory()
        return None
