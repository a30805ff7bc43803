"""The accuracy of the global model client by client, which the simulator measures for the record.

No client is asked and nothing is charged, no random number is drawn, and no selector is given any of it. What is called
fairness in federated learning is measured by the spread of these accuracies (Li et al. 2020, "Fair resource allocation
in federated learning", section 4: mean, worst and best tenth, variance over clients).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import ConfigError, Problem
from fedsim.core.record import KEY, MeasuredOn
from fedsim.core.types import Params
from fedsim.engine.engine import Engine
from fedsim.partitions.division import Division

Floats = NDArray[np.float64]


class ClientAccuracy(ABC):
    """A way to measure the accuracy of each of N clients.

    `samples` [N]: on how many samples it rests; the accuracy of a client with none is nan.
    """

    samples: NDArray[np.int64]

    @abstractmethod
    def measure(self, engine: Engine, params: Params, test_hits: NDArray[np.bool_]) -> Floats:
        """The accuracy of `params` on each client [N]; `test_hits` says which test samples it classifies correctly."""


class ByLabels(ClientAccuracy):
    """The test accuracy of each class, weighted by the share of that class in the client's training samples.

    This is the accuracy to be expected on test samples with the client's distribution of labels. Classes that the test
    set lacks are left out. Costs no pass of its own.
    """

    def __init__(self, histograms: NDArray[np.int64], test_labels: NDArray[np.int64]) -> None:
        """`histograms` [N, C]: the clients' training samples by label."""
        self.labels = test_labels
        tested = np.bincount(test_labels, minlength=histograms.shape[1]) > 0
        self.counts = histograms * tested
        self.samples = self.counts.sum(1)

    def measure(self, engine: Engine, params: Params, test_hits: NDArray[np.bool_]) -> Floats:
        by_class = np.nan_to_num(_rates(self.labels, test_hits, self.counts.shape[1]))
        return _divided((self.counts * by_class).sum(1), self.samples)


class OnTestSamples(ClientAccuracy):
    """The test samples that belong to the client, where the data set says whose they are. Costs no pass of its own."""

    def __init__(self, clients: NDArray[np.int64], num_clients: int) -> None:
        """`clients` [n_test]: whose each test sample is; `num_clients` stands for nobody's."""
        self.clients, self.num_clients = clients, num_clients
        self.samples = np.bincount(clients, minlength=num_clients + 1)[:num_clients]

    def measure(self, engine: Engine, params: Params, test_hits: NDArray[np.bool_]) -> Floats:
        return _rates(self.clients, test_hits, self.num_clients + 1)[: self.num_clients]


class OnOwnSamples(ClientAccuracy):
    """The client's own samples, training or held-out ones. Costs a pass over all of them."""

    def __init__(self, positions: Sequence[NDArray[np.int64]]) -> None:
        """`positions`: of each client's samples in the engine's data."""
        self.samples = np.array([len(own) for own in positions], dtype=np.int64)
        self.positions = np.concatenate([np.empty(0, np.int64), *positions])
        self.clients = np.repeat(np.arange(len(positions)), self.samples)

    def measure(self, engine: Engine, params: Params, test_hits: NDArray[np.bool_]) -> Floats:
        if not len(self.positions):
            return np.full(len(self.samples), np.nan)
        return _rates(self.clients, engine.hits(params, self.positions), len(self.samples))


@dataclass(frozen=True)
class Samples:
    """What is known of the samples: labels of the test set [n_test]; owners of training and test samples, if any."""

    test_labels: NDArray[np.int64]
    owners: NDArray[np.int64] | None
    test_owners: NDArray[np.int64] | None


def client_accuracy(measured_on: MeasuredOn, division: Division, samples: Samples) -> ClientAccuracy:
    """The way to measure that the config key `client_accuracy` names.

    Raises `ConfigError` for `test` where test samples do not belong to clients.
    """
    if measured_on == "labels":
        return ByLabels(division.histograms, samples.test_labels)
    if measured_on == "test":
        return OnTestSamples(_clients_of_test_samples(division, samples), len(division.train))
    return OnOwnSamples(division.holdout if measured_on == "holdout" else division.train)


def _clients_of_test_samples(division: Division, samples: Samples) -> NDArray[np.int64]:
    """The client whose owner each test sample has [n_test]; the number of clients where there is none."""
    owners, test_owners = samples.owners, samples.test_owners
    if owners is None or test_owners is None:
        raise _refused("needs a data set that says whose each test sample is", "client_accuracy=labels fits all data")
    found = [np.unique(owners[own]).tolist() for own in division.train]
    client_of = {own[0]: client for client, own in enumerate(found) if own}
    if any(len(own) > 1 for own in found) or len(client_of) < sum(map(len, found)):
        told = "needs clients that hold the samples of one owner each, and no two of them of the same"
        raise _refused(told, "partition=natural gives such clients")
    return np.array([client_of.get(owner, len(found)) for owner in test_owners.tolist()], dtype=np.int64)


def _refused(rule: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(KEY, "test", rule, remedy)])


def aggregates(accuracies: Floats, selected: NDArray[np.bool_]) -> dict[str, float | None]:
    """`AGGREGATES` of the clients' accuracies [N], without those that are nan; None of no client.

    Every client counts once, whatever its size. `std` has the divisor N; a tenth is rounded up to whole clients;
    `never_selected` is the mean over those that are not `selected` [N] so far.
    """
    known = np.isfinite(accuracies)
    values = np.sort(accuracies[known])
    tenth = -(-len(values) // 10)
    return {
        "mean": _mean(values),
        "std": float(values.std()) if len(values) else None,
        "worst_tenth": _mean(values[:tenth]),
        "best_tenth": _mean(values[len(values) - tenth :]),
        "never_selected": _mean(accuracies[known & ~selected]),
    }


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None


def _rates(groups: NDArray[np.int64], hits: NDArray[np.bool_], count: int) -> Floats:
    """The share of `hits` in each of `count` groups; nan in an empty one."""
    return _divided(np.bincount(groups, hits, count), np.bincount(groups, minlength=count))  # type: ignore[arg-type]


def _divided(totals: Floats, counts: NDArray[np.int64]) -> Floats:
    shares = np.full(len(counts), np.nan)
    np.divide(totals, counts, out=shares, where=counts > 0)
    return shares
