"""The interface of a backend: it trains stacks of local models, and passes samples through one
model.

To add a backend, write a subclass of `Backend` and a YAML file in conf/engine/. Its constructor
takes the `Workload` and keyword-only, annotated parameters. Its results must equal those of the
reference backend (tests/test_engine.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.core.arrays import Bools
from fedsim.core.errors import Problem, rule
from fedsim.core.flat import flat_rows
from fedsim.core.types import Params, Positions, Stack
from fedsim.engine.chain import LayerChain, find_chain
from fedsim.engine.data import ClientData
from fedsim.engine.optimizers import LocalOptimizer
from fedsim.engine.schedule import Schedule

MAX_WORKERS = 256
"""Maximum number of threads of a backend. Each of them may hold a copy of the model."""


def workers_problem(workers: int | Literal["auto"]) -> Problem | None:
    """Return the problem of the config value `workers`, or None."""
    valid = workers == "auto" or 1 <= workers <= MAX_WORKERS
    return rule(valid, "workers", workers, f"must be auto or lie in [1, {MAX_WORKERS}]")


@dataclass(frozen=True)
class Workload:
    """The model, data and optimiser that a backend is built for.

    `total_steps` is roughly the number of local steps that a client would make if it took part in
    all rounds. It decides what is worth doing in long runs only, such as compiling.
    """

    model: nn.Module
    data: ClientData
    optimizer: LocalOptimizer
    total_steps: int = 0

    @cached_property
    def chain(self) -> LayerChain | None:
        """The model as a chain of layers, or None if it is no chain on samples of this shape."""
        chain = find_chain(self.model)
        sample_shape = self.data.x.shape[1:]
        several_axes = sample_shape.numel() != self.data.x.shape[-1]
        if chain is not None and chain.flattens_late and several_axes:
            return None
        return chain

    def linear_chain(self, precision: str) -> LayerChain | None:
        """Return the chain if fedsim computes its passes itself, otherwise None.

        These are chains of linear layers only, and not in bfloat16.
        """
        if self.chain is None or not self.chain.is_linear or precision == "bf16":
            return None
        return self.chain


@dataclass(frozen=True)
class TrainingResult:
    """The outcome of the local training of K clients, with S steps of at most B samples.

    - `delta` [K, ...]: the trained model minus the model that the client started from, for each
      tensor that clients send, on the device.
    - `losses` [K, S, B]: each sample's loss before the step in which it was used. Values outside of
      the schedule's mask mean nothing.
    - `momentum` [K, ...]: the optimiser's last momentum buffers, None if it has none.
    - `finite` [K]: whether a client's `delta` has neither nan nor infinity. None if the backend
      does not know.
    """

    delta: Stack
    losses: NDArray[Any]
    momentum: Stack | None
    finite: Bools | None = None

    def rows(self, rows: slice) -> "TrainingResult":
        """Return the results of some clients, without a copy."""
        delta = {name: value[rows] for name, value in self.delta.items()}
        momentum = None
        if self.momentum is not None:
            momentum = {name: value[rows] for name, value in self.momentum.items()}
        finite = None
        if self.finite is not None:
            finite = self.finite[rows]
        return TrainingResult(delta, self.losses[rows], momentum, finite)


class Backend(ABC):
    """An implementation of the engine: batched, sequential, graph or native."""

    reason: str | None = None
    """Why `choose_backend` chose this backend; None if the user did."""
    exact: bool = False
    """True if the backend gives the same bits on every processor."""
    pass_size: int = 1
    """Number of samples in one forward pass. `forward` gives the same bits in parts if the samples
    are cut at multiples of it."""
    fewest_clients: int = 1
    """Smallest number of clients in a call of `train` from which a client's result no longer
    depends on the number of clients."""
    buffer_size: int | None = None
    """Size of the buffer for samples that are made on demand; None if all are in memory. `train`
    splits a call that needs more samples."""

    def num_passed_in_order(self, num_positions: int, x: Tensor) -> int:
        """Return how many samples of `x`, from position 0 on, `forward` passes through the model
        when it needs the logits at `num_positions` positions.

        It passes all samples in order if it needs most of them, because that is faster than to
        gather some. It returns 0 if it passes only the samples at the positions.
        """
        return 0

    @property
    @abstractmethod
    def description(self) -> str:
        """A few words for the summary on what runs."""

    @abstractmethod
    def train(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        """Train K models by the `schedule`.

        Model k starts from `start[k]`, which does not change. Several entries may be one object.
        """

    @abstractmethod
    def forward(self, params: Params, x: Tensor, positions: Positions | None = None) -> Tensor:
        """Return the logits of `params` in eval mode for `x` [n, ...], or for its rows `positions`.

        The shape is [n, C] or [len(positions), C], with C classes.
        """

    def cross_entropies(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return -log p(label) of each sample, float64 [n], by `logits` [n, C]."""
        return F.cross_entropy(logits.double(), labels, reduction="none")

    def hits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return whether each sample's highest logit is its label's, bool [n] on their device.

        The first of several equal logits counts.
        """
        return logits.argmax(1) == labels

    @abstractmethod
    def gradients(
        self, params: Params, positions: Sequence[Positions], names: Sequence[str]
    ) -> Iterator[Tensor]:
        """Yield the gradient of the mean cross-entropy in eval mode for each list of positions.

        A gradient is flat [D], in the parameters `names` in their order. An empty list gives zeros.
        """

    @property
    def max_joint_clients(self) -> int:
        """Number of clients of several runs that are worth training in one call.

        1 means that training runs together gains nothing.
        """
        return 1

    def joint_key(self, schedule: Schedule) -> Hashable:
        """Return a key: schedules with equal keys may be trained in one call with the same bits.

        By default, products of matrices of one shape give the same bits for any number of clients
        from two on.
        """
        if len(schedule) < 2:
            return object()
        return schedule.lr, schedule.widths, schedule.correction.kind


class ForwardingBackend(Backend):
    """The base of backends that do their work by calls of another one, `backend`."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.reason = backend.reason
        self.exact = backend.exact
        self.fewest_clients = backend.fewest_clients

    def cross_entropies(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.backend.cross_entropies(logits, labels)

    def hits(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.backend.hits(logits, labels)


def fetched(losses: Tensor, delta: Stack) -> tuple[NDArray[Any], Bools | None]:
    """Return `losses` and `finite` of a `TrainingResult`.

    From a GPU, both come in one copy, because the host waits for each copy. On a CPU, `finite` is
    None.
    """
    if not losses.is_cuda:
        return losses.numpy(), None
    # The sum of a row is finite if all its entries are, unless they are so large that it overflows.
    sums = flat_rows(delta).sum(1)
    values = torch.cat([losses.flatten(), sums.to(losses.dtype)]).cpu().numpy()
    count = losses.numel()
    return values[:count].reshape(losses.shape), np.isfinite(values[count:])


def concatenate_results(parts: Sequence[TrainingResult], schedule: Schedule) -> TrainingResult:
    """Join the results of consecutive parts of a `schedule`.

    A part may have fewer steps and narrower batches than the schedule.
    """
    losses = np.zeros(schedule.positions.shape, parts[0].losses.dtype)
    first = 0
    for part in parts:
        rows, steps, width = part.losses.shape
        losses[first : first + rows, :steps, :width] = part.losses
        first += rows
    finite = [part.finite for part in parts if part.finite is not None]
    momenta = [part.momentum for part in parts if part.momentum is not None]
    return TrainingResult(
        _concatenate([part.delta for part in parts]),
        losses,
        _concatenate(momenta) if momenta else None,
        np.concatenate(finite) if len(finite) == len(parts) else None,
    )


def _concatenate(stacks: Sequence[Stack]) -> Stack:
    return {name: torch.cat([stack[name] for stack in stacks]) for name in stacks[0]}
