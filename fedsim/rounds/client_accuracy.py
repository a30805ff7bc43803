"""The accuracy of the global model on each client, which fedsim measures for the record.

The config key `client_accuracy` says how: on test samples weighted by the client's labels, on the
test samples of the client's owner, on its held-out samples, or on its training samples. The round
loop measures at every evaluation. It contacts no client, charges nothing and draws no random
number, and selectors do not see the result.

The spread of these accuracies is what federated learning calls fairness (Li et al. 2020, "Fair
resource allocation in federated learning", section 4: mean, worst and best tenth, variance over
clients).
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
"""The owner (writer, user) of each sample [n]; None: the data set does not name owners."""


@dataclass(frozen=True)
class ClientAccuracy:
    """A way to measure the accuracy of each of N clients: the share of correct answers in each of G
    groups of samples.

    `groups` [n] holds the group of each test sample. With `positions` [n] it holds the group of
    each sample at these positions in the engine's data, which costs a pass over them. Without
    `counts`, each group belongs to the client with its number, and groups from N on to no client.
    With `counts` [N, G], the accuracy of a client is the mean over all groups, weighted by its row
    of counts. `samples` [N] is the number of samples that each accuracy rests on. The accuracy of a
    client without samples is nan.
    """

    samples: Ints
    groups: Ints
    positions: Ints | None = None
    counts: Ints | None = None

    def measure(self, engine: Engine, params: Params, test_hits: Bools) -> Floats:
        """Return the accuracy of `params` on each client [N].

        `test_hits` says which test samples the model classifies correctly.
        """
        hits = test_hits
        if self.positions is not None:
            hits = np.empty(0, np.bool_)
            if len(self.positions):
                hits = engine.hits(params, self.positions)
        num_groups = len(self.samples) if self.counts is None else self.counts.shape[1]
        correct = np.bincount(self.groups, hits, num_groups)
        totals = np.bincount(self.groups, minlength=num_groups)
        rates = _divided(correct, totals)  # type: ignore[arg-type]
        if self.counts is None:
            return rates[: len(self.samples)]  # without the group that belongs to no client
        # a group without samples has the rate nan, and a count of 0 for every client
        return _divided((self.counts * np.nan_to_num(rates)).sum(1), self.samples)


def by_labels(histograms: Ints, test_labels: Ints) -> ClientAccuracy:
    """Return the way to measure that weighs the test accuracy of each class by its share in the
    client's training samples.

    `histograms` [N, C] are the clients' numbers of training samples of each of C classes. The
    result is the expected accuracy on test samples with the client's distribution of labels.
    Classes that the test set lacks do not count.
    """
    counts = histograms * (np.bincount(test_labels, minlength=histograms.shape[1]) > 0)
    return ClientAccuracy(counts.sum(1), test_labels, counts=counts)


def client_accuracy(
    measured_on: MeasuredOn,
    division: Division,
    test_labels: Ints,
    owners: Owners,
    test_owners: Owners,
) -> ClientAccuracy:
    """Return the way to measure that the config key `client_accuracy` names.

    `owners` are those of the training samples, `test_owners` those of the test samples. Raises
    `ConfigError` for `test` if test samples do not belong to clients.
    """
    if measured_on == "labels":
        return by_labels(division.histograms, test_labels)
    if measured_on == "test":
        num_clients = len(division.train)
        clients = _clients_of_test_samples(division, owners, test_owners)
        # one more: the number of clients stands for an owner whom no client has
        counts = np.bincount(clients, minlength=num_clients + 1)
        return ClientAccuracy(counts[:num_clients], clients)
    evaluated = division.holdout if measured_on == "holdout" else division.train
    positions = ClientPositions.of(evaluated)
    clients = np.repeat(np.arange(len(positions)), positions.sizes)
    return ClientAccuracy(positions.sizes, clients, positions.flat)


def _clients_of_test_samples(division: Division, owners: Owners, test_owners: Owners) -> Ints:
    """Return for each test sample the client that has its owner [n_test].

    The number N of clients stands for an owner whom no client has. Raises `ConfigError` unless each
    client holds the samples of one owner, and no two clients those of the same.
    """
    if owners is None or test_owners is None:
        raise _no_client_accuracy(
            "needs a data set that names the owner of each test sample",
            "client_accuracy=labels fits all data",
        )
    client_of: dict[int, int] = {}
    is_unique = True
    for client, positions in enumerate(division.train):
        names = np.unique(owners[positions]).tolist()
        is_unique &= len(names) <= 1 and client_of.keys().isdisjoint(names)
        for name in names:
            client_of[name] = client
    if not is_unique:
        raise _no_client_accuracy(
            "needs clients that hold the samples of one owner each, and different owners",
            "partition=natural gives such clients",
        )
    nobody = len(division.train)
    clients = [client_of.get(owner, nobody) for owner in test_owners.tolist()]
    return np.array(clients, dtype=np.int64)


def _no_client_accuracy(rule: str, remedy: str) -> ConfigError:
    """Return the error of `client_accuracy=test` with a data set or partition that does not allow
    it."""
    return ConfigError([Problem(CLIENT_ACCURACY, "test", rule, remedy)])


def aggregates(accuracies: Floats, selected: Bools) -> dict[str, float | None]:
    """Return the `CLIENT_ACCURACY_MEASURES` of the clients' accuracies [N].

    A measure over no client is None. Clients whose accuracy is nan do not count; all others count
    once, whatever their size. `std` has the number of clients that count as its divisor. A tenth is
    rounded up to whole clients. `never_selected` is the mean over clients that the selector has not
    selected so far; `selected` [N] says which it has.
    """
    is_known = np.isfinite(accuracies)
    values = np.sort(accuracies[is_known])
    tenth = -(-len(values) // 10)  # divided and rounded up
    return {
        "mean": _mean(values),
        "std": float(values.std()) if len(values) else None,
        "worst_tenth": _mean(values[:tenth]),
        "best_tenth": _mean(values[len(values) - tenth :]),
        "never_selected": _mean(accuracies[is_known & ~selected]),
    }


def _mean(values: Floats) -> float | None:
    """Return the mean of `values`; None if there are none."""
    return float(values.mean()) if len(values) else None


def _divided(totals: Floats, counts: Ints) -> Floats:
    """Return totals / counts, nan where the count is 0."""
    shares = np.full(len(counts), np.nan)
    np.divide(totals, counts, out=shares, where=counts > 0)
    return shares
