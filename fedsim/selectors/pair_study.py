"""Random selection that measures how good every pair of clients would have been (PNCS, section V).

It is a study, not a method: it selects K random clients. In addition it records, for each pair of
the N available clients, features of their gradients and the accuracy after a step along both.
`fedsim.papers.pair_study` makes PNCS's Table I from the traces of such runs.
"""

import itertools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from fedsim.core.arrays import Floats
from fedsim.core.flat import split_flat
from fedsim.core.types import Cohort, Ids, Params, Selection
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

SPARSITY_THRESHOLD = 1e-3
"""Share of a vector's largest magnitude below which an entry counts as zero for `sparsity`."""
MAX_CLIENTS = 1000
"""Maximum number of clients. They make half a million pairs, and the trace of every round has all
features of each."""


def pair_features(vectors: Floats, powers: list[float]) -> dict[str, list[float]]:
    """Return features by name. Each has a value for each of the N (N - 1) / 2 pairs of vectors.

    `vectors` is [N, D]. The pairs (i, j) with i < j are ordered by i, then by j. `powers` are the p
    of the p-norms and of cos_p, the signed-power similarity of `fedsim.selectors.similarity`. A
    feature of single clients, such as a norm, becomes two features of a pair: the sum and the
    absolute difference of the two clients' values.
    """
    first, second = np.triu_indices(len(vectors), 1)
    features: dict[str, Floats] = {}
    for name, values in _client_features(vectors, powers).items():
        features[f"{name} sum"] = values[first] + values[second]
        features[f"{name} difference"] = np.abs(values[first] - values[second])
    for name, table in _tables(vectors, powers).items():
        features[name] = table[first, second]
    return {name: values.tolist() for name, values in features.items()}


def _client_features(vectors: Floats, powers: list[float]) -> dict[str, Floats]:
    """Return the features that belong to single clients, each as an array [N]."""
    largest = np.abs(vectors).max(1, keepdims=True, initial=0)
    is_small = np.abs(vectors) < SPARSITY_THRESHOLD * largest
    features = {f"norm_{p:g}": _norm(vectors, p) for p in [*powers, np.inf]}
    with warnings.catch_warnings():  # constant vectors have no higher moments
        warnings.simplefilter("ignore", RuntimeWarning)
        features["mean"] = vectors.mean(1)
        features["variance"] = vectors.var(1)
        features["skewness"] = np.nan_to_num(stats.skew(vectors, axis=1))
        features["kurtosis"] = np.nan_to_num(stats.kurtosis(vectors, axis=1))
        features["sparsity"] = is_small.mean(1)
    return features


def _tables(vectors: Floats, powers: list[float]) -> dict[str, Floats]:
    """Return the features that belong to pairs, each as a table [N, N]."""
    length = max(vectors.shape[1], 1)
    centred = vectors - vectors.mean(1, keepdims=True)
    signs = np.sign(vectors)
    largest = np.abs(vectors).max(1, keepdims=True, initial=0)
    scaled = np.abs(vectors / np.where(largest > 0, largest, 1))  # powers would underflow otherwise
    tables = {}
    for p in powers:
        tables[f"cos_{p:g}"] = _cosine(signs * scaled ** (p / 2))
    for p in [*powers, np.inf]:
        distances = [_norm(vectors - vector, p) for vector in vectors]
        tables[f"distance_{p:g}"] = np.stack(distances)
    tables["inner product"] = vectors @ vectors.T
    tables["covariance"] = centred @ centred.T / length
    tables["correlation"] = _cosine(centred)
    tables["sign agreement"] = (1 + signs @ signs.T / length) / 2
    return tables


def _norm(vectors: Floats, p: float) -> Floats:
    """Return p-norms [N]."""
    largest: Floats = np.abs(vectors).max(1, initial=0)
    if np.isinf(p):
        return largest
    scale = np.where(largest > 0, largest, 1)
    return scale * ((np.abs(vectors) / scale[:, None]) ** p).sum(1) ** (1 / p)


def _cosine(vectors: Floats) -> Floats:
    """Return cosine similarities [N, N]: 0 if one of the vectors is zero."""
    norms = np.linalg.norm(vectors, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        table: Floats = np.nan_to_num(vectors @ vectors.T / np.outer(norms, norms))
    return table


@dataclass(frozen=True)
class BeforeTraining:
    """The start of a round: the global model, and the gradients of the available clients."""

    params: Params
    lr: float
    trained: list[str]
    """Names of the trained tensors."""
    ids: Ids
    gradients: Tensor
    """The gradients [n, D] of the clients `ids` [n] by the trained tensors."""


@parameters
class PairStudy(Selector):
    """Selects K clients at random and records how good every pair of clients would have been.

    In each round all clients send their gradients. For each pair the server takes a step along the
    pair's mean gradient, and validates the model. PNCS does not say how long this step is. Here it
    is `step` learning rates long. The trace of a round has `pairs` and, for each pair, `features`
    by name (see `pair_features`), `accuracy` and `loss`. Source: PNCS, section V.
    """

    needs = frozenset({Signal.GRADIENTS, Signal.VALIDATION})
    state = ("_trace",)

    powers: list[float]  # p of the norms and similarities among the features
    step: Positive  # length of the step along a pair's mean gradient, in learning rates

    def problems(self) -> Problems:
        are_positive = bool(self.powers) and all(p > 0 for p in self.powers)
        yield rule(are_positive, "powers", self.powers, "must be numbers > 0")
        num_clients = self.population.num_clients
        text = (
            f"validates a model for each pair of num_clients={num_clients} a round; "
            f"must have at most {MAX_CLIENTS} clients"
        )
        remedy = "lower num_clients: it is no method to train with"
        yield rule(num_clients <= MAX_CLIENTS, "", ..., text, remedy)

    def __post_init__(self) -> None:
        # `select` sets this, and `observe` reads it in the same round.
        self._before_training: BeforeTraining | None = None
        self._trace: dict[str, Any] | None = None  # of the latest observed round

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids = clients.available
        gradients = stack_vectors(clients.gradients(ids), len(ids))
        self._before_training = BeforeTraining(
            clients.params, clients.lr, clients.layer_names(None), ids, gradients
        )
        return Selection(ascending(rng.choice(ids, self.cohort_size(clients), replace=False)))

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        before = self._before_training
        assert before is not None
        self._before_training = None
        layers = {name: before.params[name] for name in before.trained}
        pairs = list(itertools.combinations(range(len(before.ids)), 2))
        evaluations = []
        for i, j in pairs:
            mean_gradient = torch.stack([before.gradients[i], before.gradients[j]]).mean(0)
            moved = dict(before.params)
            for name, gradient in split_flat(mean_gradient, layers).items():
                moved[name] = layers[name] - self.step * before.lr * gradient
            evaluations.append(server.validate(moved))
        self._trace = {
            "pairs": [[int(before.ids[i]), int(before.ids[j])] for i, j in pairs],
            "features": pair_features(before.gradients.double().cpu().numpy(), self.powers),
            "accuracy": [evaluation.accuracy for evaluation in evaluations],
            "loss": [evaluation.loss for evaluation in evaluations],
        }

    @property
    def trace(self) -> Mapping[str, Any] | None:
        return self._trace
