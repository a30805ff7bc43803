"""The values that travel through a round. Frozen; none of them holds the config, the engine or the
data set.

Legend: N clients, K of them in a cohort, P parameters; axis 0 of a Stack is the client.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from fedsim.core.arrays import Bools, Floats, Ints
from fedsim.core.errors import DivergedError
from fedsim.core.flat import to_device

Ids = Ints
"""Client ids: unique and ascending."""
Params = dict[str, Tensor]
"""One model: parameters and floating-point buffers by name (what clients and server send each
other)."""
Stack = dict[str, Tensor]
"""K models: the tensors of `Params`, each with a leading client axis."""


@dataclass(frozen=True)
class Correction:
    """What is added to the gradient of the batch's mean loss in each local step of client k, before
    the optimiser sees it: pull w + shift_k, where w is the client's present model. For SGD `pull`
    is weight decay.

    `shift` has a tensor [K, ...] on the device for each trained parameter, by name; None adds
    nothing. FedProx (Li et al. 2020): pull mu, shift -mu w_global. SCAFFOLD (Karimireddy et al.
    2020): shift c - c_k.
    """

    pull: float = 0.0
    shift: Stack | None = None

    @property
    def kind(self) -> tuple[float, bool]:
        """Clients whose corrections agree in it can be trained in one call."""
        return self.pull, self.shift is not None

    def __bool__(self) -> bool:
        """Whether anything is added."""
        return self.kind != (0.0, False)

    def rows(self, rows: slice | Ints) -> "Correction":
        """That of the clients at `rows`, in this order."""
        if self.shift is None:
            return self
        device = next(iter(self.shift.values())).device
        index = rows if isinstance(rows, slice) else to_device(torch.as_tensor(rows), device)
        return replace(self, shift={name: value[index] for name, value in self.shift.items()})

    @staticmethod
    def concat(parts: Sequence["Correction"]) -> "Correction":
        """All clients of `parts`, which agree in their kind, in order."""
        shifts = [part.shift for part in parts if part.shift is not None]
        joined = (
            {name: torch.cat([shift[name] for shift in shifts]) for name in shifts[0]}
            if shifts
            else None
        )
        return replace(parts[0], shift=joined)

    @torch.no_grad()
    def add_to(self, grads: Stack, params: Stack) -> None:
        """Add it, in place, to the gradients of the first clients, whose present models are
        `params`."""
        slopes = list(grads.values())
        if self.pull:
            torch._foreach_add_(slopes, [params[name] for name in grads], alpha=self.pull)
        if self.shift is not None:
            torch._foreach_add_(
                slopes, [self.shift[name][: len(slope)] for name, slope in grads.items()]
            )


UNCORRECTED = Correction()


@dataclass(frozen=True)
class Population:
    """All that the server knows for free: training samples n_k [N], the cohort size K and the
    number of rounds T."""

    sizes: Ints
    cohort_size: int
    num_rounds: int

    def __post_init__(self) -> None:
        sizes = self.sizes.view()
        sizes.setflags(write=False)  # the aggregator's weights are of them, too
        object.__setattr__(self, "sizes", sizes)

    @property
    def num_clients(self) -> int:
        return len(self.sizes)

    @property
    def shares(self) -> Floats:
        """p_k = n_k / n, [N]."""
        return self.sizes / self.sizes.sum()


@dataclass(frozen=True)
class Selection:
    """What a selector returns: ids, and aggregation weights [K] only where the method defines them:
    w <- w + sum_k weights_k (w_k - w). They need not sum to one; running statistics are averaged by
    the weights divided by their sum.
    """

    ids: Ids
    weights: Floats | None = None


@dataclass(frozen=True)
class Cohort:
    """The updates of K clients after local training, from the engine to the aggregator.

    `delta` is w_k - w per tensor [K, ...]; `loss` [K] is the mean over local steps of the batch's
    mean training loss, None for selectors that do not declare `Signal.TRAINING_LOSS`; `rms_loss`
    [K] the root of the mean squared loss of all samples passed, None without `Signal.SQUARED_LOSS`;
    `steps` [K] counts local optimiser steps; `trained` names the tensors that training changes (the
    others are running statistics). `durations` [K] are seconds of a simulated clock, if any.
    `finite` [K] says whose update is, None where that is not known yet. `samples` [K], passed
    forward and backward, and `momentum`, the optimiser's last buffers [K, ...], if any, are not
    shown to selectors.
    """

    ids: Ids
    sizes: Ints
    start: Params
    delta: Stack
    loss: Floats | None
    rms_loss: Floats | None
    steps: Ints
    trained: Sequence[str]
    durations: Floats | None = None
    finite: Bools | None = None
    samples: Ints | None = None
    momentum: Stack | None = None

    @property
    def updates(self) -> Tensor:
        """w_k - w over all trained tensors, flat [K, P]."""
        return torch.cat([self.delta[name].flatten(1) for name in self.trained], dim=1)

    def rows(self, rows: Ints | Bools) -> "Cohort":
        """The clients at `rows`, in this order, or those that a mask [K] names."""
        rows = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        index = to_device(torch.as_tensor(rows), next(iter(self.delta.values())).device)
        picked: dict[str, Any] = {}
        for name in BY_CLIENT:
            value = getattr(self, name)
            if value is not None:
                picked[name] = (
                    {n: v[index] for n, v in value.items()}
                    if isinstance(value, dict)
                    else value[rows]
                )
        return replace(self, **picked)

    @staticmethod
    def concat(parts: Sequence["Cohort"]) -> "Cohort":
        """All clients of `parts`, which have started from one model, in order. What is None in a
        part becomes None."""
        joined: dict[str, Any] = {}
        for name in BY_CLIENT:
            values = [getattr(part, name) for part in parts]
            if any(value is None for value in values):
                joined[name] = None
            elif isinstance(values[0], dict):
                joined[name] = {n: torch.cat([value[n] for value in values]) for n in values[0]}
            else:
                joined[name] = np.concatenate(values)
        return replace(parts[0], **joined)


BY_CLIENT = (
    "ids",
    "sizes",
    "delta",
    "loss",
    "rms_loss",
    "steps",
    "durations",
    "finite",
    "samples",
    "momentum",
)
"""Fields of a `Cohort` whose axis 0 is the client."""
Weights = Floats | None


def keep_rows(cohort: Cohort, weights: Weights, keep: Bools) -> tuple[Cohort, Weights]:
    """The clients that `keep` [K] names, at least one; the weights of these are scaled to keep
    their sum."""
    if weights is not None:
        total, weights = weights.sum(), weights[keep]
        weights = weights * (total / weights.sum()) if weights.sum() != 0 else weights
    return cohort.rows(keep), weights


def drop_nonfinite(cohort: Cohort, weights: Weights) -> tuple[Cohort, Weights, int]:
    """As `keep_rows`, of the updates without nan and infinity, and how many the others were. Raises
    `DivergedError` if no update is left."""
    keep = cohort.finite
    if keep is None:
        # the sum of a row is finite exactly where all its entries are (or so large that their sum
        # is not)
        sums = torch.stack(
            [delta.reshape(len(delta), -1).sum(1) for delta in cohort.delta.values()]
        )
        keep = sums.isfinite().all(0).cpu().numpy()
    if keep.all():
        return cohort, weights, 0
    if not keep.any():
        raise DivergedError(
            "every update of the round holds a nan or infinity: a lower optimizer.lr may help"
        )
    return *keep_rows(cohort, weights, keep), int((~keep).sum())


def empty_cohort(start: Params, trained: Sequence[str]) -> Cohort:
    """Return the cohort of a round in which no update arrives."""
    none = np.empty(0, np.int64)
    delta = {name: value.new_empty(0, *value.shape) for name, value in start.items()}
    return Cohort(none, none, start, delta, loss=None, rms_loss=None, steps=none, trained=trained)


@dataclass(frozen=True)
class Exchange:
    """What each of n clients receives, computes and sends in one exchange with the server, all
    int64 [n]."""

    ids: Ids
    bytes_down: Ints
    forward_samples: Ints
    train_samples: Ints
    bytes_up: Ints


@dataclass(frozen=True)
class Evaluation:
    """Accuracy in [0, 1] and mean cross-entropy over a labelled set."""

    accuracy: float
    loss: float


Positions = Ints


class ClientPositions(Sequence[Positions]):
    """A sequence of N arrays, which are consecutive parts of `flat` [n], of the lengths `sizes`
    [N]."""

    def __init__(self, flat: Positions, sizes: Ints) -> None:
        self.flat, self.sizes = flat, sizes
        self.ends: Ints = np.cumsum(sizes)

    @classmethod
    def of(cls, arrays: Sequence[Positions]) -> "ClientPositions":
        """`arrays` as they are if they are in one array already, else a copy."""
        if isinstance(arrays, ClientPositions):
            return arrays
        sizes = np.array([len(own) for own in arrays], dtype=np.int64)
        return cls(np.concatenate([np.empty(0, np.int64), *arrays]), sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, client: int) -> Positions: ...
    @overload
    def __getitem__(self, client: slice) -> list[Positions]: ...
    def __getitem__(self, client: int | slice) -> Positions | list[Positions]:
        if isinstance(client, slice):
            return [self[row] for row in range(*client.indices(len(self)))]
        end = self.ends[client]
        return self.flat[end - self.sizes[client] : end]

    def __iter__(self) -> Iterator[Positions]:
        return iter([self.flat[a:b] for a, b in pairwise([0, *self.ends.tolist()])])

    def rows(self, ids: Ints) -> "ClientPositions":
        """Those of the clients `ids`, in this order."""
        if np.array_equal(ids, np.arange(len(self))):
            return self
        sizes = self.sizes[ids]
        where = np.repeat(self.ends[ids] - np.cumsum(sizes), sizes)
        where += np.arange(len(where))
        return ClientPositions(self.flat[where], sizes)

    def first(self, counts: Ints) -> tuple["ClientPositions", "ClientPositions"]:
        """The first `counts` [N] of each, and the rest of each."""
        within = np.arange(len(self.flat)) - np.repeat(self.ends - self.sizes, self.sizes)
        head = within < np.repeat(counts, self.sizes)
        return ClientPositions(self.flat[head], counts), ClientPositions(
            self.flat[~head], self.sizes - counts
        )


def sizes_of(arrays: Sequence[Positions]) -> Ints:
    """The length of each [N]."""
    return ClientPositions.of(arrays).sizes


def positions_of(arrays: Sequence[Positions], ids: Ints) -> ClientPositions:
    """The arrays of the clients `ids`, in this order."""
    return ClientPositions.of(arrays).rows(ids)
