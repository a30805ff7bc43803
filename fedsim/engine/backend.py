"""What trains stacks of local models. To add one: a subclass of `Backend`, whose constructor takes
the `Workload` and keyword-only, annotated switches, and a YAML in conf/engine/. It must equal the
reference (tests/test_engine.py)."""

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
from fedsim.core.types import Params, Stack
from fedsim.engine.chain import LayerChain, any_chain
from fedsim.engine.data import ClientData
from fedsim.engine.optimizers import LocalOptimizer
from fedsim.engine.schedule import Positions, Schedule

MAX_WORKERS = 256
"""Threads of a pool of workers, each of which may hold a copy of the model."""


def workers_problem(workers: int | Literal["auto"]) -> Problem | None:
    fits = workers == "auto" or 1 <= workers <= MAX_WORKERS
    return rule(fits, "workers", workers, f"must be auto or lie in [1, {MAX_WORKERS}]")


@dataclass(frozen=True)
class Workload:
    """What a backend is built for. `total_steps` is about how many local steps a client would make
    if it took part in all rounds of the run; for what pays only in long runs."""

    model: nn.Module
    data: ClientData
    optimizer: LocalOptimizer
    total_steps: int = 0

    @cached_property
    def chain(self) -> LayerChain | None:
        """The model as a plain chain of layers, if it is one on samples of this shape."""
        chain, shape = any_chain(self.model), self.data.x.shape
        several_axes = shape[1:].numel() != shape[-1]
        return None if chain is not None and chain.flattens_late and several_axes else chain

    def linear_chain(self, precision: str) -> LayerChain | None:
        """The chain, if it is one of linear layers alone: its passes are written out, though not in
        bfloat16."""
        return (
            self.chain
            if self.chain is not None and self.chain.is_linear and precision != "bf16"
            else None
        )


@dataclass(frozen=True)
class TrainingResult:
    """`delta` [K, ...]: w_k minus the model that client k started from, for all tensors that
    travel, on the device; `losses` [K, S, B]: every sample's loss before the step that it was used
    in (anything where the schedule's mask is false); `momentum` [K, ...]: the optimiser's last
    momentum buffers, None where it has none; `finite` [K]: which rows of `delta` hold neither a nan
    nor infinity, None where the backend leaves that to be found out (`fetched` fetches it
    together with the losses)."""

    delta: Stack
    losses: NDArray[Any]
    momentum: Stack | None
    finite: Bools | None = None

    def rows(self, rows: slice) -> "TrainingResult":
        """That of some clients, without a copy."""
        delta = {name: value[rows] for name, value in self.delta.items()}
        momentum = (
            None
            if self.momentum is None
            else {name: value[rows] for name, value in self.momentum.items()}
        )
        return TrainingResult(
            delta, self.losses[rows], momentum, None if self.finite is None else self.finite[rows]
        )


class Backend(ABC):
    """Local training of many models, and passes of one model over many samples."""

    reason: str | None = None
    """Why this backend was chosen, where `choose_backend` did so."""
    exact: bool = False
    """Whether it gives the same bits on every processor."""
    pass_size: int = 1
    """Samples that `forward` passes at once: cut at multiples of it, a pass gives the same bits in
    parts."""
    fewest_clients: int = 1
    """Clients in one call of `train` from which on what one of them gets does not depend on how
    many they are."""
    room: int | None = None
    """Samples that it holds at once, where they are made on demand: a call of `train` that needs
    more is taken in parts."""

    def passed_in_order(self, count: int, x: Tensor) -> int:
        """How many samples, from position 0 on, `forward` passes in their order where only `count`
        of those at `x` are wanted; 0: it passes the wanted ones alone."""
        return 0

    @property
    @abstractmethod
    def description(self) -> str:
        """What runs, in a few words, for the summary."""

    @abstractmethod
    def train(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        """Train K models, each from `start[k]` (not modified; entries may be one object), by
        `schedule`."""

    @abstractmethod
    def forward(self, params: Params, x: Tensor, positions: Positions | None = None) -> Tensor:
        """Logits of `params` in eval mode for `x` [n, ...], or for its rows `positions`: [n or
        len(positions), C]."""

    def cross_entropies(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-log p of the `labels` [n] by `logits` [n, C], float64, one for each sample [n]."""
        return F.cross_entropy(logits.double(), labels, reduction="none")

    def hits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Whether the highest logit, of equal ones the first, is that of the label [n], on the
        logits' device."""
        return logits.argmax(1) == labels

    @abstractmethod
    def gradients(
        self, params: Params, positions: Sequence[Positions], names: Sequence[str]
    ) -> Iterator[Tensor]:
        """For each list of positions in the workload's data, the gradient of its mean cross-entropy
        in eval mode, in the parameters `names`, flat [D] in their order; zeros for an empty
        list."""

    @property
    def max_joint_clients(self) -> int:
        """Clients of several runs that are worth training in one call (1: training them jointly
        gains nothing)."""
        return 1

    def joint_key(self, schedule: Schedule) -> Hashable:
        """Schedules with equal keys give the same bits whether they are trained in one call or each
        in its own. Here: products of matrices of one shape are the same however many there are,
        from two on."""
        return (
            (schedule.lr, schedule.widths, schedule.correction.kind)
            if len(schedule) > 1
            else object()
        )


def fetched(losses: Tensor, delta: Stack) -> tuple[NDArray[Any], Bools | None]:
    """The `losses` and `finite` of a `TrainingResult`, from a GPU in one copy, which the host waits
    for once."""
    if not losses.is_cuda:
        return losses.numpy(), None
    sums = flat_rows(delta).sum(
        1
    )  # finite exactly where all entries are, or they are so large that it is not
    values = torch.cat([losses.flatten(), sums.to(losses.dtype)]).cpu().numpy()
    return values[: losses.numel()].reshape(losses.shape), np.isfinite(values[losses.numel() :])


def concatenate_results(parts: Sequence[TrainingResult], schedule: Schedule) -> TrainingResult:
    """Consecutive parts of a schedule, each of which was trained without the steps that none of its
    clients makes."""
    losses = np.zeros(schedule.positions.shape, parts[0].losses.dtype)
    first = 0
    for part in parts:
        rows, steps, width = part.losses.shape
        losses[first : first + rows, :steps, :width] = part.losses
        first += rows
    known = [part.finite for part in parts if part.finite is not None]
    finite = np.concatenate(known) if len(known) == len(parts) else None
    delta, momentum = (
        {name: torch.cat([stack[name] for stack in stacks]) for name in stacks[0]}
        for stacks in ([part.delta for part in parts], [part.momentum or {} for part in parts])
    )
    return TrainingResult(delta, losses, momentum or None, finite)
