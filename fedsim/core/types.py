"""The values that the engine, the clients, selectors, aggregators and the round loop pass to each
other. They are frozen, and hold neither the config nor the engine nor the data set.

In shapes, N is the number of all clients, K the number of clients of the cohort (the clients that
are selected in a round), and P the number of parameters. w is the server's model and w_k the model
that client k has trained. n_k is the number of training samples of client k. Axis 0 of a `Stack` is
the client.
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
"""One model: its parameters and floating-point buffers by name. The server and clients send each
other these."""
Stack = dict[str, Tensor]
"""K models: the tensors of `Params`, each with a leading client axis."""
Weights = Floats | None
"""A selector's weights of the K updates; None: it gives none, and the aggregator uses its own."""


@dataclass(frozen=True)
class Correction:
    """A vector that client k adds to the gradient of the batch's mean loss in each local step:
    pull x v + shift_k, with v the client's present model. The optimiser sees the sum.

    A local algorithm makes it, and the engine applies it. For SGD, `pull` has the same effect as
    weight decay. `shift` has a tensor [K, ...] on the device for each trained parameter, by name;
    None adds nothing. FedProx (Li et al. 2020) has pull mu and shift -mu w. SCAFFOLD (Karimireddy
    et al. 2020) has shift c - c_k.
    """

    pull: float = 0.0
    shift: Stack | None = None

    @property
    def kind(self) -> tuple[float, bool]:
        """The pull, and whether there is a shift. The engine can train clients in one call if their
        corrections have the same kind."""
        return self.pull, self.shift is not None

    def __bool__(self) -> bool:
        """Return whether anything is added."""
        return self.kind != (0.0, False)

    def rows(self, rows: slice | Ints) -> "Correction":
        """Return the correction of the clients at `rows`, in this order."""
        if self.shift is None:
            return self
        device = next(iter(self.shift.values())).device
        index = rows if isinstance(rows, slice) else to_device(torch.as_tensor(rows), device)
        return replace(self, shift={name: value[index] for name, value in self.shift.items()})

    @staticmethod
    def concat(parts: Sequence["Correction"]) -> "Correction":
        """Return the correction of all clients of `parts`, which must agree in their kind."""
        shifts = [part.shift for part in parts if part.shift is not None]
        if not shifts:
            return replace(parts[0], shift=None)
        joined = {name: torch.cat([shift[name] for shift in shifts]) for name in shifts[0]}
        return replace(parts[0], shift=joined)

    @torch.no_grad()
    def add_to(self, grads: Stack, params: Stack) -> None:
        """Add the correction, in place, to the gradients `grads` [k, ...] of the first k clients.

        `params` [k, ...] are their present models. The other clients have no more steps to make.
        """
        gradients = list(grads.values())
        if self.pull:
            torch._foreach_add_(gradients, [params[name] for name in grads], alpha=self.pull)
        if self.shift is not None:
            shifts = [self.shift[name][: len(gradient)] for name, gradient in grads.items()]
            torch._foreach_add_(gradients, shifts)


UNCORRECTED = Correction()


@dataclass(frozen=True)
class Population:
    """The facts that the server knows from the start: the numbers of training samples n_k [N] as
    `sizes`, the cohort size K and the number of rounds."""

    sizes: Ints
    cohort_size: int
    num_rounds: int

    def __post_init__(self) -> None:
        # a view that selectors cannot write to: the aggregator's weights depend on the sizes
        sizes = self.sizes.view()
        sizes.setflags(write=False)
        object.__setattr__(self, "sizes", sizes)  # the class is frozen

    @property
    def num_clients(self) -> int:
        """The number N of clients."""
        return len(self.sizes)

    @property
    def shares(self) -> Floats:
        """p_k = n_k / n [N], with n the sum of all n_k."""
        return self.sizes / self.sizes.sum()


@dataclass(frozen=True)
class Selection:
    """The return value of a selector: ids, and weights [K] only if the method defines them.

    The next model is w + sum_k weights_k (w_k - w). The weights need not sum to one. Running
    statistics are averaged by the weights divided by their sum.
    """

    ids: Ids
    weights: Weights = None


@dataclass(frozen=True)
class Cohort:
    """K clients and their updates after local training, on the way from the engine to the
    aggregator.

    `start` is the server's model w. `delta` holds w_k - w for each tensor [K, ...]. `trained` names
    the tensors that the optimiser changes; the others are running statistics. `sizes` [K] are n_k,
    and `steps` [K] the numbers of local optimiser steps.

    `loss` [K] is the mean over local steps of the batch's mean training loss. `rms_loss` [K] is the
    root of the mean squared loss of all samples in these steps. Selectors see them only if they
    declare `Signal.TRAINING_LOSS` or `Signal.SQUARED_LOSS`; otherwise they are None.

    `durations` [K] are the seconds from the request to the arrival on the simulated clock; None
    without one. `finite` [K] says whose update is finite; None: not known yet. `samples` [K] is the
    number of samples that each client passed forward and backward, and `momentum` holds the
    optimiser's last buffers [K, ...], if it has any. Selectors see neither of the two.
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
        """Return the clients at `rows` in this order, or those that a mask [K] names."""
        if rows.dtype == np.bool_:
            rows = np.flatnonzero(rows)
        index = to_device(torch.as_tensor(rows), next(iter(self.delta.values())).device)
        changes: dict[str, Any] = {}
        for name in CLIENT_FIELDS:
            value = getattr(self, name)
            if isinstance(value, dict):
                changes[name] = {key: tensor[index] for key, tensor in value.items()}
            elif value is not None:
                changes[name] = value[rows]
        return replace(self, **changes)

    def with_own_arrays(self) -> "Cohort":
        """Return the same cohort with copies of its NumPy arrays, for a user's class that may
        modify them."""
        changes: dict[str, Any] = {}
        for name in CLIENT_FIELDS:
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                changes[name] = value.copy()
        return replace(self, **changes)

    @staticmethod
    def concat(parts: Sequence["Cohort"]) -> "Cohort":
        """Return all clients of `parts` in order. They must have started from one model.

        A field that is None in a part is None in the result.
        """
        joined: dict[str, Any] = {}
        for name in CLIENT_FIELDS:
            values = [getattr(part, name) for part in parts]
            if any(value is None for value in values):
                joined[name] = None
            elif isinstance(values[0], dict):
                joined[name] = {
                    key: torch.cat([value[key] for value in values]) for key in values[0]
                }
            else:
                joined[name] = np.concatenate(values)
        return replace(parts[0], **joined)


CLIENT_FIELDS = (
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


def keep_rows(cohort: Cohort, weights: Weights, keep: Bools) -> tuple[Cohort, Weights]:
    """Return the clients where `keep` [K] is true, and their weights. At least one client is kept.

    The weights are scaled so that their sum is that of all `weights`, unless their own sum is 0.
    """
    if weights is not None:
        total = weights.sum()
        weights = weights[keep]
        if weights.sum() != 0:
            weights = weights * (total / weights.sum())
    return cohort.rows(keep), weights


def drop_nonfinite(cohort: Cohort, weights: Weights) -> tuple[Cohort, Weights, int]:
    """Return the clients with finite updates and their weights (see `keep_rows`), and the number of
    dropped clients.

    Raises `DivergedError` if no update is finite.
    """
    keep = cohort.finite
    if keep is None:
        # One sum for each client and tensor. A row with a nan or infinity has no finite sum. A
        # finite row has one, unless its entries are so large that the sum overflows.
        sums = [delta.reshape(len(delta), -1).sum(1) for delta in cohort.delta.values()]
        keep = torch.stack(sums).isfinite().all(0).cpu().numpy()
    if keep.all():
        return cohort, weights, 0
    if not keep.any():
        raise DivergedError(
            "every update of the round holds a nan or infinity: a lower optimizer.lr may help"
        )
    kept_cohort, kept_weights = keep_rows(cohort, weights, keep)
    return kept_cohort, kept_weights, int((~keep).sum())


def copied(tensors: Stack) -> Stack:
    """Return copies of tensors, by name."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def empty_cohort(start: Params, trained: Sequence[str]) -> Cohort:
    """Return a cohort without clients (K = 0), for a round in which no update arrives."""
    nobody = np.empty(0, np.int64)
    delta = {name: value.new_empty(0, *value.shape) for name, value in start.items()}
    return Cohort(
        nobody, nobody, start, delta, loss=None, rms_loss=None, steps=nobody, trained=trained
    )


@dataclass(frozen=True)
class Exchange:
    """The bytes and samples of n clients in one exchange with the server, all int64 [n]."""

    ids: Ids
    bytes_down: Ints
    forward_samples: Ints
    train_samples: Ints
    bytes_up: Ints

    @property
    def has_work(self) -> Bools:
        """True for each client that receives, computes or sends anything [n]."""
        work = (self.bytes_down, self.forward_samples, self.train_samples, self.bytes_up)
        return np.any(work, axis=0)

    def of_clients(self, keep: Bools) -> "Exchange":
        """Return the exchange of only the clients where the mask `keep` [n] is true."""
        return Exchange(
            self.ids[keep],
            self.bytes_down[keep],
            self.forward_samples[keep],
            self.train_samples[keep],
            self.bytes_up[keep],
        )


@dataclass(frozen=True)
class Evaluation:
    """Accuracy in [0, 1] and mean cross-entropy over a labelled set."""

    accuracy: float
    loss: float


Positions = Ints
"""Positions of samples in a data set."""


class ClientPositions(Sequence[Positions]):
    """The positions of N clients' samples: N arrays that are consecutive parts of `flat` [n], with
    the lengths `sizes` [N]."""

    def __init__(self, flat: Positions, sizes: Ints) -> None:
        self.flat = flat
        self.sizes = sizes
        self.ends: Ints = np.cumsum(sizes)

    @classmethod
    def of(cls, arrays: Sequence[Positions]) -> "ClientPositions":
        """Return the positions in `arrays`, one array for each client. The result is a copy, unless
        `arrays` is a `ClientPositions` itself."""
        if isinstance(arrays, ClientPositions):
            return arrays
        sizes = np.array([len(array) for array in arrays], dtype=np.int64)
        return cls(np.concatenate([np.empty(0, np.int64), *arrays]), sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, client: int) -> Positions: ...
    @overload
    def __getitem__(self, client: slice) -> list[Positions]: ...
    def __getitem__(self, client: int | slice) -> Positions | list[Positions]:
        if isinstance(client, slice):
            return [self[i] for i in range(*client.indices(len(self)))]
        end = self.ends[client]
        return self.flat[end - self.sizes[client] : end]

    def __iter__(self) -> Iterator[Positions]:
        return iter([self.flat[start:end] for start, end in pairwise([0, *self.ends.tolist()])])

    def of_clients(self, ids: Ints) -> "ClientPositions":
        """Return the positions of the clients `ids`, in this order."""
        if np.array_equal(ids, np.arange(len(self))):
            return self
        # The client's start in `flat` minus its start in the result, for each sample of the result.
        # The sample's own index in the result is then added.
        sizes = self.sizes[ids]
        index = np.repeat(self.ends[ids] - np.cumsum(sizes), sizes)
        index += np.arange(len(index))
        return ClientPositions(self.flat[index], sizes)

    def split(self, counts: Ints) -> tuple["ClientPositions", "ClientPositions"]:
        """Split each client's positions: return the first `counts` [N] of them, and the others."""
        index_in_client = np.arange(len(self.flat)) - np.repeat(self.ends - self.sizes, self.sizes)
        is_first = index_in_client < np.repeat(counts, self.sizes)
        return (
            ClientPositions(self.flat[is_first], counts),
            ClientPositions(self.flat[~is_first], self.sizes - counts),
        )


def sizes_of(arrays: Sequence[Positions]) -> Ints:
    """Return the length of each array [N]."""
    return ClientPositions.of(arrays).sizes


def positions_of(arrays: Sequence[Positions], ids: Ints) -> ClientPositions:
    """Return the arrays of the clients `ids`, in this order."""
    return ClientPositions.of(arrays).of_clients(ids)
