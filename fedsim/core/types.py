"""The values that the engine, the clients, selectors, aggregators and the round loop pass to each
other. They are frozen, and hold neither the config nor the engine nor the data set.

Symbols in shapes and formulas:

- N is the number of all clients. K is the number of clients in the cohort, which are the clients
  that the selector chose for a round. P is the number of parameters of the model.
- w is the server's model, and w_k the model that client k has trained.
- n_k is the number of training samples of client k.
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
"""Ids of clients in [0, N), unique and ascending."""
Params = dict[str, Tensor]
"""A model as the server and clients send it: parameters and floating-point buffers, by name."""
Stack = dict[str, Tensor]
"""K models: the tensors of `Params`, each with a leading axis for the client [K, ...]."""
Weights = Floats | None
"""Weights [K] of the updates from the selector, or None for the aggregator's own weights."""


@dataclass(frozen=True)
class Correction:
    """A vector that client k adds to the gradient of the batch's mean loss in each local step.

    The vector is pull * v + shift_k, where v is the client's present model. The optimiser receives
    the sum. A local algorithm makes the correction, and the engine applies it. FedProx (Li et al.
    2020) has pull mu and shift -mu w. SCAFFOLD (Karimireddy et al. 2020) has shift c - c_k.

    Attributes:
        pull: With SGD, it has the same effect as weight decay.
        shift: A tensor [K, ...] on the device for each trained parameter, by name, or None for a
            shift of zero.
    """

    pull: float = 0.0
    shift: Stack | None = None

    @property
    def kind(self) -> tuple[float, bool]:
        """The pull, and whether the correction has a shift. The engine can train clients in one
        call if their corrections have the same kind."""
        return self.pull, self.shift is not None

    def __bool__(self) -> bool:
        """Return whether the correction changes gradients."""
        return self.pull != 0 or self.shift is not None

    def rows(self, rows: slice | Ints) -> "Correction":
        """Return the correction of the clients at `rows` of axis 0, in this order."""
        if self.shift is None:
            return self
        device = next(iter(self.shift.values())).device
        index = rows if isinstance(rows, slice) else to_device(torch.as_tensor(rows), device)
        return replace(self, shift={name: value[index] for name, value in self.shift.items()})

    @staticmethod
    def concat(parts: Sequence["Correction"]) -> "Correction":
        """Return the correction of all clients of `parts`, which must have the same kind."""
        shifts = [part.shift for part in parts if part.shift is not None]
        if not shifts:
            return replace(parts[0], shift=None)
        joined = {name: torch.cat([shift[name] for shift in shifts]) for name in shifts[0]}
        return replace(parts[0], shift=joined)

    @torch.no_grad()
    def add_to(self, grads: Stack, params: Stack) -> None:
        """Add the correction to the gradients `grads` [k, ...] of the first k clients, in place.

        `params` [k, ...] are the present models of these k clients. The other clients have made all
        their steps.
        """
        gradients = list(grads.values())
        if self.pull:
            torch._foreach_add_(gradients, [params[name] for name in grads], alpha=self.pull)
        if self.shift is not None:
            shifts = [self.shift[name][: len(gradient)] for name, gradient in grads.items()]
            torch._foreach_add_(gradients, shifts)


UNCORRECTED = Correction()
"""The correction of FedAvg, which changes nothing."""


@dataclass(frozen=True)
class Population:
    """The facts that the server knows from the start.

    Attributes:
        sizes: The number of training samples n_k of each client [N], read-only.
        cohort_size: The number K of clients that a round selects.
        num_rounds: The number of rounds of the run.
    """

    sizes: Ints
    cohort_size: int
    num_rounds: int

    def __post_init__(self) -> None:
        # Selectors cannot write to this view. The aggregator's weights depend on the sizes.
        sizes = self.sizes.view()
        sizes.setflags(write=False)
        object.__setattr__(self, "sizes", sizes)  # because the dataclass is frozen

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
    """The clients that a selector chose, with weights only if the method defines them.

    With weights, the next model is w + sum_k weights_k (w_k - w). They need not sum to one. Running
    statistics are averaged with the weights divided by their sum.
    """

    ids: Ids
    weights: Weights = None


@dataclass(frozen=True)
class Cohort:
    """K clients and their updates after local training, on the way from the engine to the
    aggregator.

    Attributes:
        ids: The clients [K].
        sizes: Their numbers n_k of training samples [K].
        start: The server's model w, with which local training began.
        delta: The updates w_k - w, for each tensor of the model [K, ...].
        loss: The mean over local steps of the batch's mean training loss [K]. Selectors see it only
            if they declare `Signal.TRAINING_LOSS`; otherwise they see None.
        rms_loss: The root of the mean squared loss of all samples in these steps [K]. Selectors see
            it only if they declare `Signal.SQUARED_LOSS`; otherwise they see None.
        steps: The numbers of local optimiser steps [K].
        trained: Names of the tensors that the optimiser changes. The others are running statistics.
        durations: The seconds from the request to the arrival on the simulated clock [K], or None
            without a clock.
        finite: Whether each update is finite [K], or None before anyone has looked.
        samples: The numbers of samples passed forward and backward [K]. Selectors never see it.
        momentum: The optimiser's last momentum buffers [K, ...], if it has any. Selectors never see
            it.
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

    def rows(self, rows: Ints) -> "Cohort":
        """Return the cohort of only the clients at `rows` of axis 0, in this order."""
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
        """Return the same cohort with copies of its NumPy arrays.

        A user's class that receives them may then modify them.
        """
        changes: dict[str, Any] = {}
        for name in CLIENT_FIELDS:
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                changes[name] = value.copy()
        return replace(self, **changes)

    @staticmethod
    def concat(parts: Sequence["Cohort"]) -> "Cohort":
        """Return all clients of `parts` in order. They must have started from the same model.

        A field that is None in any part is None in the result.
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
"""The fields of a `Cohort` whose axis 0 is the client."""


def keep_rows(cohort: Cohort, weights: Weights, keep: Bools) -> tuple[Cohort, Weights]:
    """Return the clients where the mask `keep` [K] is true (at least one), and their weights.

    The weights of these clients are scaled to the sum of all `weights`, unless they sum to 0.
    """
    if weights is not None:
        total = weights.sum()
        weights = weights[keep]
        if weights.sum() != 0:
            weights = weights * (total / weights.sum())
    return cohort.rows(np.flatnonzero(keep)), weights


def drop_nonfinite(cohort: Cohort, weights: Weights) -> tuple[Cohort, Weights, int]:
    """Return the clients with finite updates and their weights (see `keep_rows`), and the number of
    dropped clients.

    Raises `DivergedError` if no update is finite.
    """
    keep = cohort.finite
    if keep is None:
        # One sum for each client and tensor. A row that contains nan or infinity has no finite sum.
        # A finite row has a finite sum, unless its entries are so large that the sum overflows.
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
    """Return copies of the tensors, by name."""
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
    """The costs of n clients in one exchange with the server, all int64 [n].

    Attributes:
        ids: The clients.
        bytes_down: Bytes that each client receives.
        forward_samples: Samples that each client passes forward only.
        train_samples: Samples that each client passes forward and backward.
        bytes_up: Bytes that each client sends.
    """

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
    """Accuracy in [0, 1] and mean cross-entropy `loss` of a model on labelled samples."""

    accuracy: float
    loss: float


Positions = Ints
"""Positions of samples in a data set."""


class ClientPositions(Sequence[Positions]):
    """A sequence of N arrays: the positions of each client's samples.

    The arrays are consecutive parts of `flat` [n], with the lengths `sizes` [N].
    """

    def __init__(self, flat: Positions, sizes: Ints) -> None:
        self.flat = flat
        self.sizes = sizes
        self.ends: Ints = np.cumsum(sizes)

    @classmethod
    def of(cls, arrays: Sequence[Positions]) -> "ClientPositions":
        """Return `arrays`, one for each client, as `ClientPositions`.

        They are copied, unless `arrays` is a `ClientPositions` already.
        """
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
        sizes = self.sizes[ids]
        # Position i of the result comes from entry i + offset of `flat`. A client's offset is the
        # end of its part in `flat` minus the end of its part in the result.
        offsets = self.ends[ids] - np.cumsum(sizes)
        index = np.repeat(offsets, sizes)
        index += np.arange(len(index))
        return ClientPositions(self.flat[index], sizes)

    def split(self, counts: Ints) -> tuple["ClientPositions", "ClientPositions"]:
        """Return the first `counts` [N] positions of each client, and each client's other ones."""
        starts = self.ends - self.sizes
        index_in_client = np.arange(len(self.flat)) - np.repeat(starts, self.sizes)
        is_first = index_in_client < np.repeat(counts, self.sizes)
        first = ClientPositions(self.flat[is_first], counts)
        rest = ClientPositions(self.flat[~is_first], self.sizes - counts)
        return first, rest


def sizes_of(arrays: Sequence[Positions]) -> Ints:
    """Return the number of samples of each client [N]. `arrays` has its positions."""
    return ClientPositions.of(arrays).sizes


def positions_of(arrays: Sequence[Positions], ids: Ints) -> ClientPositions:
    """Return the arrays of the clients `ids`, in this order."""
    return ClientPositions.of(arrays).of_clients(ids)
