"""The accuracy of the global model client by client, which the simulator measures for the record.

No client is asked and nothing is charged, no random number is drawn, and no selector is given any
of it. What is called fairness in federated learning is measured by the spread of these accuracies
(Li et al. 2020, "Fair resource allocation in federated learning", section 4: mean, worst and best
tenth, variance over clients).
"""

from dataclasses import dataclass

import numpy as np

from fedsim.core.arrays import Bools, Floats, Ints
from fedsim.core.errors import ConfigError, Problem
from fedsim.core.record import CLIENT_ACCURACY, MeasuredOn
from fedsim.core.types import ClientPositions, Params
from fedsim.engine.engine import Engine
from fedsim.partitions.division import Division

Owners = Ints | None


@dataclass(frozen=True)
class ClientAccuracy:
    """A way to measure the accuracy of each of N clients: the share of right answers in each of G
    `groups` of samples.

    `groups` [n] are of the test samples, or of those at `positions` [n] in the engine's data, which
    costs a pass over them. A client's accuracy is that of its own group, or, where there are
    `counts` [N, G], the mean over the groups weighted by them. `samples` [N]: on how many samples
    it rests; the accuracy of a client with none is nan.
    """

    samples: Ints
    groups: Ints
    positions: Ints | None = None
    counts: Ints | None = None

    def measure(self, engine: Engine, params: Params, test_hits: Bools) -> Floats:
        """The accuracy of `params` on each client [N]; `test_hits` says which test samples it
        classifies correctly."""
        hits = test_hits
        if self.positions is not None:
            hits = (
                engine.hits(params, self.positions)
                if len(self.positions)
                else np.empty(0, np.bool_)
            )
        num_groups = len(self.samples) if self.counts is None else self.counts.shape[1]
        right = np.bincount(self.groups, hits, num_groups)
        rates = _divided(right, np.bincount(self.groups, minlength=num_groups))  # type: ignore[arg-type]
        if self.counts is None:
            return rates[: len(self.samples)]
        return _divided((self.counts * np.nan_to_num(rates)).sum(1), self.samples)


def by_labels(histograms: Ints, test_labels: Ints) -> ClientAccuracy:
    """The test accuracy of each class, weighted by the share of that class in the client's training
    samples (`histograms` [N, C]): what is to be expected on test samples with the client's
    distribution of labels. Classes that the test set lacks are left out."""
    counts = histograms * (np.bincount(test_labels, minlength=histograms.shape[1]) > 0)
    return ClientAccuracy(counts.sum(1), test_labels, counts=counts)


def client_accuracy(
    measured_on: MeasuredOn,
    division: Division,
    test_labels: Ints,
    owners: Owners,
    test_owners: Owners,
) -> ClientAccuracy:
    """The way to measure that the config key `client_accuracy` names; owners are of the training
    and test samples.

    Raises `ConfigError` for `test` where test samples do not belong to clients.
    """
    if measured_on == "labels":
        return by_labels(division.histograms, test_labels)
    if measured_on == "test":
        clients, num = _clients_of_test_samples(division, owners, test_owners), len(division.train)
        return ClientAccuracy(np.bincount(clients, minlength=num + 1)[:num], clients)
    own = ClientPositions.of(division.holdout if measured_on == "holdout" else division.train)
    return ClientAccuracy(own.sizes, np.repeat(np.arange(len(own)), own.sizes), own.flat)


def _clients_of_test_samples(division: Division, owners: Owners, test_owners: Owners) -> Ints:
    """The client whose owner each test sample has [n_test]; the number of clients where there is
    none."""
    if owners is None or test_owners is None:
        told = "needs a data set that says whose each test sample is"
        raise ConfigError(
            [Problem(CLIENT_ACCURACY, "test", told, "client_accuracy=labels fits all data")]
        )
    found = [np.unique(owners[own]).tolist() for own in division.train]
    client_of = {own[0]: client for client, own in enumerate(found) if own}
    if any(len(own) > 1 for own in found) or len(client_of) < sum(map(len, found)):
        told = (
            "needs clients that hold the samples of one owner each, and no two of them of the same"
        )
        raise ConfigError(
            [Problem(CLIENT_ACCURACY, "test", told, "partition=natural gives such clients")]
        )
    return np.array(
        [client_of.get(owner, len(found)) for owner in test_owners.tolist()], dtype=np.int64
    )


def aggregates(accuracies: Floats, selected: Bools) -> dict[str, float | None]:
    """`AGGREGATES` of the clients' accuracies [N], without those that are nan; None of no client.

    Every client counts once, whatever its size. `std` has the divisor N; a tenth is rounded up to
    whole clients; `never_selected` is the mean over those that are not `selected` [N] so far.
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


def _divided(totals: Floats, counts: Ints) -> Floats:
    shares = np.full(len(counts), np.nan)
    np.divide(totals, counts, out=shares, where=counts > 0)
    return shares
