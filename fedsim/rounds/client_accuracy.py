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
class OnOwnSamples:
    """A measurement of the accuracy of each of N clients on samples of its own.

    `clients` [n] has the client of each sample; the number N stands for no client. The samples are
    those at `positions` [n] in the engine's data, which costs a pass over them, or the test samples
    (None).
    """

    num_clients: int
    clients: Ints
    positions: Ints | None = None

    @property
    def samples(self) -> Ints:
        """The number of samples of each client [N]."""
        return np.bincount(self.clients, minlength=self.num_clients)[: self.num_clients]

    def measure(self, engine: Engine, params: Params, test_hits: Bools) -> Floats:
        """Return the accuracy of `params` on each client [N]; nan for one without samples.

        `test_hits` says which test samples the model classifies correctly.
        """
        hits = test_hits
        if self.positions is not None:
            has_samples = len(self.positions) > 0
            hits = engine.hits(params, self.positions) if has_samples else np.empty(0, np.bool_)
        correct = np.bincount(self.clients, hits, self.num_clients)[: self.num_clients]
        return _divided(correct, self.samples)


@dataclass(frozen=True)
class ByLabels:
    """A measurement that weighs the test accuracy of each of C classes by its share in the client's
    training samples.

    `counts` [N, C] are the clients' numbers of training samples of each class, and 0 for classes
    that the test set lacks. The accuracy is that expected on test samples with the client's
    distribution of labels.
    """

    counts: Ints
    test_labels: Ints

    @property
    def samples(self) -> Ints:
        """The number of training samples that count, of each client [N]."""
        return self.counts.sum(1)

    def measure(self, engine: Engine, params: Params, test_hits: Bools) -> Floats:
        """Return the accuracy of each client [N], as `OnOwnSamples.measure`."""
        num_classes = self.counts.shape[1]
        correct = np.bincount(self.test_labels, test_hits, num_classes)
        accuracies = _divided(correct, np.bincount(self.test_labels, minlength=num_classes))
        # A class without test samples has the accuracy nan, which becomes 0.
        return _divided((self.counts * np.nan_to_num(accuracies)).sum(1), self.samples)


ClientAccuracy = OnOwnSamples | ByLabels


def client_accuracy(
    measured_on: MeasuredOn,
    division: Division,
    test_labels: Ints,
    owners: Owners,
    test_owners: Owners,
) -> ClientAccuracy:
    """Return the measurement that the config key `client_accuracy` names.

    `owners` are those of the training samples, `test_owners` those of the test samples. Raises
    `ConfigError` for `test` if test samples do not belong to clients.
    """
    if measured_on == "labels":
        num_classes = division.histograms.shape[1]
        is_tested = np.bincount(test_labels, minlength=num_classes) > 0
        return ByLabels(division.histograms * is_tested, test_labels)
    if measured_on == "test":
        clients = _clients_of_test_samples(division, owners, test_owners)
        return OnOwnSamples(len(division.train), clients)
    evaluated = division.holdout if measured_on == "holdout" else division.train
    positions = ClientPositions.of(evaluated)
    clients = np.repeat(np.arange(len(positions)), positions.sizes)
    return OnOwnSamples(len(positions), clients, positions.flat)


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
    for client, positions in enumerate(division.train):
        its_owners = np.unique(owners[positions]).tolist()
        if len(its_owners) > 1 or not client_of.keys().isdisjoint(its_owners):
            raise _no_client_accuracy(
                "needs clients that hold the samples of one owner each, and different owners",
                "partition=natural gives such clients",
            )
        client_of.update(dict.fromkeys(its_owners, client))
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


def _divided(totals: Floats | Ints, counts: Ints) -> Floats:
    """Return totals / counts, nan where the count is 0."""
    shares = np.full(len(counts), np.nan)
    np.divide(totals, counts, out=shares, where=counts > 0)
    return shares
