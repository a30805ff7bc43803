import itertools
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from fedsim.core.arrays import Floats
from fedsim.core.flat import split_flat
from fedsim.core.types import Cohort, Evaluation, Ids, Params, Selection
from fedsim.selectors.base import (
    Clients,
    Positive,
    Problems,
    Selector,
    Server,
    Signal,
    ascending,
    parameters,
    rule,
)
from fedsim.selectors.pncs import stack_vectors

SPARSITY_THRESHOLD = (
    1e-3  # of its vector's largest magnitude, below which an entry counts as zero for `sparsity`
)
MAX_CLIENTS = 1000  # half a million pairs, each of which is a line of the trace of every round


def pair_features(vectors: Floats, powers: list[float]) -> dict[str, list[float]]:
    """Features by name, with one value for each of the N (N - 1) / 2 pairs of `vectors` [N, D] (i <
    j, row by row).

    `powers` are the p of p-norms and of cos_p (the signed-power similarity of
    selectors.similarity). Features of each client enter as the sum and the absolute difference over
    the pair.
    """
    first, second = (
        np.array(list(itertools.combinations(range(len(vectors)), 2)), dtype=np.int64)
        .reshape(-1, 2)
        .T
    )
    features: dict[str, Floats] = {}
    for name, values in _client_features(vectors, powers).items():
        features[f"{name} sum"] = values[first] + values[second]
        features[f"{name} difference"] = np.abs(values[first] - values[second])
    features |= {
        name: table[first, second] for name, table in _pair_features(vectors, powers).items()
    }
    return {name: values.tolist() for name, values in features.items()}


def _client_features(vectors: Floats, powers: list[float]) -> dict[str, Floats]:
    with warnings.catch_warnings():  # from the moments of constant vectors
        warnings.simplefilter("ignore", RuntimeWarning)
        norms = {f"norm_{p:g}": _norm(vectors, p) for p in [*powers, np.inf]}
        largest = np.abs(vectors).max(1, keepdims=True, initial=0)
        return norms | {
            "mean": vectors.mean(1),
            "variance": vectors.var(1),
            "skewness": np.nan_to_num(stats.skew(vectors, axis=1)),
            "kurtosis": np.nan_to_num(stats.kurtosis(vectors, axis=1)),
            "sparsity": (np.abs(vectors) < SPARSITY_THRESHOLD * largest).mean(1),
        }


def _pair_features(vectors: Floats, powers: list[float]) -> dict[str, Floats]:
    centred = vectors - vectors.mean(1, keepdims=True)
    signs = np.sign(vectors)
    size = np.abs(vectors).max(1, keepdims=True, initial=0)
    scaled = np.abs(vectors / np.where(size > 0, size, 1))  # powers would underflow otherwise
    tables = {f"cos_{p:g}": _cosine(signs * scaled ** (p / 2)) for p in powers}
    for p in [*powers, np.inf]:
        tables[f"distance_{p:g}"] = np.stack([_norm(vectors - vector, p) for vector in vectors])
    return tables | {
        "inner product": vectors @ vectors.T,
        "covariance": centred @ centred.T / max(vectors.shape[1], 1),
        "correlation": _cosine(centred),
        "sign agreement": (1 + signs @ signs.T / max(vectors.shape[1], 1)) / 2,
    }


def _norm(vectors: Floats, p: float) -> Floats:
    size: Floats = np.abs(vectors).max(1, initial=0)
    if np.isinf(p):
        return size
    scale = np.where(size > 0, size, 1)
    return scale * ((np.abs(vectors) / scale[:, None]) ** p).sum(1) ** (1 / p)


def _cosine(vectors: Floats) -> Floats:
    """Cosine similarities [N, N]; 0 if one of the vectors is zero."""
    norms = np.linalg.norm(vectors, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        table: Floats = np.nan_to_num(vectors @ vectors.T / np.outer(norms, norms))
    return table


@parameters
class PairStudy(Selector):
    """Selects K clients at random and records how good every pair of clients would have been.

    In every round all clients send their gradients. For every pair the server takes a step along
    its mean gradient, of length `step` learning rates (PNCS prints no length), and validates the
    resulting model. The trace of a round holds of all pairs: `pairs`, `features` by name (see
    `pair_features`; `powers` are its p), `accuracy` and `loss`. Source: PNCS, section V.
    """

    needs = frozenset({Signal.GRADIENTS, Signal.VALIDATION})
    state = ("_trace",)

    powers: list[float]
    step: Positive

    def problems(self) -> Problems:
        powers, n = self.powers, self.population.num_clients
        yield rule(
            bool(powers) and all(p > 0 for p in powers), "powers", powers, "must be numbers > 0"
        )
        told = f"validates a model for each pair of num_clients={n} a round; must have at most {MAX_CLIENTS} clients"
        yield rule(
            n <= MAX_CLIENTS, "", ..., told, "lower num_clients: it is no method to train with"
        )

    def __post_init__(self) -> None:
        self._before: tuple[Params, float, list[str], Ids, Tensor] | None = None
        self._trace: dict[str, Any] | None = None

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids = clients.available
        gradients = stack_vectors(clients.gradients(ids), len(ids))
        self._before = (clients.params, clients.lr, clients.layer_names(None), ids, gradients)
        return Selection(ascending(rng.choice(ids, self.cohort_size(clients), replace=False)))

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        assert self._before is not None
        before, lr, names, ids, gradients = self._before
        self._before, length = None, self.step * lr
        pairs, after = list(itertools.combinations(range(len(ids)), 2)), list[Evaluation]()
        for i, j in pairs:
            mean = torch.stack([gradients[i], gradients[j]]).mean(0)
            steps = split_flat(mean, {name: before[name] for name in names})
            moved = {n: w - length * steps[n] if n in steps else w for n, w in before.items()}
            after.append(server.validate(moved))
        self._trace = {
            "pairs": [[int(ids[i]), int(ids[j])] for i, j in pairs],
            "features": pair_features(gradients.double().cpu().numpy(), self.powers),
            "accuracy": [e.accuracy for e in after],
            "loss": [e.loss for e in after],
        }

    @property
    def trace(self) -> Mapping[str, Any] | None:
        return self._trace
