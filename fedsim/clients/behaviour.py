"""Imperfect clients: clients with wrong labels, and clients that send falsified updates.

A config chooses one behaviour in its group `clients`. The engine's data use `labels`, and `Clients`
calls the other methods when clients train or answer. Selectors are not informed.

Imperfect clients are the first ones of all clients in a random order. At one seed, every behaviour
has the same imperfect clients, and a smaller share of clients is part of a larger one. The order
and everything that imperfect clients do have random streams of their own. The partition, the first
model and the batches are therefore those of the run with honest clients.
"""

from abc import ABC, abstractmethod
from dataclasses import field, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor

from fedsim.core.arrays import Bools
from fedsim.core.errors import rule
from fedsim.core.exact import length
from fedsim.core.flat import split_flat
from fedsim.core.parameters import Positive, Problems, Share, parameters
from fedsim.core.rng import Purpose, Streams
from fedsim.core.types import Cohort, Ids, Stack
from fedsim.partitions.division import Division


class ClientBehaviour:
    """The interface of the config group `clients`. In this class all clients are honest."""

    imperfect: Ids = np.empty(0, np.int64)
    """Ids of the imperfect clients, ascending."""

    def labels(self, y: Tensor, division: Division) -> Tensor:
        """Return the labels by which clients train and report losses, accuracies and label counts.

        Called once, before the run. `y` [n] are the true labels, which must not be modified: other
        runs share them, and the server's samples and `client_accuracy` use them.
        """
        return y

    def sent(self, trained: Cohort, round: int) -> Cohort:
        """Return the updates that clients send in place of the `trained` ones.

        `Clients` also computes everything else from the returned updates: parts, norms, public
        labels, gradients at the trained model.
        """
        return trained

    def sent_gradient(self, gradient: Tensor, round: int, client: int) -> Tensor:
        """Return the vector that a client sends in place of a gradient [D]. If it only reports the
        gradient's norm, it reports the norm of this vector."""
        return gradient

    def works(self, ids: Ids) -> Bools:
        """Return which of these clients train, and are charged for it [len(ids)]."""
        return np.ones(len(ids), np.bool_)


HONEST = ClientBehaviour()
"""The behaviour of runs without imperfect clients."""


@parameters
class Imperfect(ClientBehaviour):
    """A `share` of the clients (rounded to whole ones) is imperfect; the others are honest."""

    num_clients: int = field(kw_only=False)
    num_classes: int = field(kw_only=False)
    streams: Streams = field(kw_only=False)
    share: Share

    def problems(self) -> Problems:
        """Yield a problem if the share rounds to no client at all."""
        # `not share > 0` and not `share <= 0`: nan is out of range, which is another problem
        is_possible = not self.share > 0 or round(self.share * self.num_clients) > 0
        text = f"is less than one of {self.num_clients} clients"
        yield rule(is_possible, "share", self.share, text, "raise it, or choose clients=honest")

    def __post_init__(self) -> None:
        order = self.streams.generator(Purpose.IMPERFECT).permutation(self.num_clients)
        self.imperfect = np.sort(order[: round(self.share * self.num_clients)])


@parameters
class LabelNoise(Imperfect):
    """A share `noise_rate` of an imperfect client's samples has wrong labels, unknown to the
    client.

    This share (rounded to whole samples) applies to the samples that the client trains on, and to
    those that it holds out and reports its loss on. (With `test_on=holdout`, accuracies are
    measured on the held-out samples with their right labels.) `kind`: with `symmetric` a wrong
    label is any other class with equal probability; with `pair` it is the next class, c + 1 mod C
    (Han et al. 2018, "Co-teaching", section 4).

    There each label is flipped with a probability; here the share is exact, and the wrong labels of
    a lower rate are among those of a higher one. In FedCorr (Xu et al. 2022), too, only a share of
    the clients is noisy, but each draws its own rate; here all have the same.
    """

    noise_rate: Share
    kind: Literal["symmetric", "pair"]

    def problems(self) -> Problems:
        """Yield a problem if there is no other class for a wrong label."""
        yield from super().problems()
        text = f"needs two classes or more, and the data set has {self.num_classes}"
        remedy = "choose clients=honest, or another data set"
        yield rule(self.num_classes > 1, "kind", self.kind, text, remedy)

    def labels(self, y: Tensor, division: Division) -> Tensor:
        """Return a copy of `y` with the wrong labels of imperfect clients."""
        labels = y.cpu().numpy().copy()
        for part, positions in enumerate((division.train, division.holdout)):
            rngs = self.streams.generators(Purpose.LABEL_NOISE, part, last=self.imperfect)
            for client, rng in zip(self.imperfect.tolist(), rngs, strict=True):
                order = rng.permutation(positions[client])
                num_wrong = round(self.noise_rate * len(order))
                wrong = order[:num_wrong]
                steps = np.ones(num_wrong, np.int64)
                if self.kind == "symmetric":
                    # A draw for every sample: the wrong labels of a lower rate then keep their
                    # values at a higher rate.
                    steps = rng.integers(1, self.num_classes, len(order))[:num_wrong]
                labels[wrong] = (labels[wrong] + steps) % self.num_classes
        return torch.tensor(labels, device=y.device)


class FalseUpdate(Imperfect, ABC):
    """The interface of behaviours in which imperfect clients send falsified vectors.

    They send what `falsified` returns in place of an update, a gradient, or the optimiser's
    momentum. Everything else that they report is true: losses, also of training, accuracies, label
    counts, times, and the spread of gradients.
    """

    of_buffers: ClassVar[bool] = False
    """True if running statistics are falsified, too. Usually they are not, because a falsified
    variance may be below 0."""

    @abstractmethod
    def falsified(self, vector: Tensor, round: int, client: int) -> Tensor:
        """Return what `client` sends in `round` (from 1) in place of `vector` [D], which must not
        be modified."""

    def sent(self, trained: Cohort, round: int) -> Cohort:
        """Return the cohort with falsified updates and momentum of imperfect clients."""
        rows = np.flatnonzero(np.isin(trained.ids, self.imperfect)).tolist()
        if not rows:
            return trained

        def falsify(stack: Stack) -> Stack:
            # one vector for all tensors, because `falsified` may depend on the whole length
            names = [name for name in stack if self.of_buffers or name in trained.trained]
            flat = torch.cat([stack[name].flatten(1) for name in names], 1)
            for row in rows:
                flat[row] = self.falsified(flat[row], round, int(trained.ids[row]))
            parts = split_flat(flat, {name: stack[name][0] for name in names})
            return stack | {name: part.contiguous() for name, part in parts.items()}

        momentum = None if trained.momentum is None else falsify(trained.momentum)
        # `finite` None: whether the falsified updates are finite is not known
        return replace(trained, delta=falsify(trained.delta), momentum=momentum, finite=None)

    def sent_gradient(self, gradient: Tensor, round: int, client: int) -> Tensor:
        """Return the falsified gradient of an imperfect client, and the others unchanged."""
        return self.falsified(gradient, round, client) if client in self.imperfect else gradient


@parameters
class ScaledUpdate(FalseUpdate):
    """Imperfect clients send `factor` times the update.

    A factor below 0 is sign flipping (Damaskinos et al. 2018, "Asynchronous Byzantine machine
    learning"). Above 1 it is boosting (Bhagoji et al. 2019, "Analyzing federated learning through
    an adversarial lens"; Bagdasaryan et al. 2020, "How to backdoor federated learning"), here of an
    update that was trained honestly.
    """

    factor: Annotated[float, Interval(ge=-1e6, le=1e6)]

    def falsified(self, vector: Tensor, round: int, client: int) -> Tensor:
        """Return `factor` times the vector."""
        return vector * self.factor


@parameters
class RandomUpdate(FalseUpdate):
    """Imperfect clients send independent normal numbers, drawn by round and client: the Gaussian
    attack (Blanchard et al. 2017, "Machine learning with adversaries", section 5).

    `std` is their standard deviation: 200 in the paper, whose workers send gradients. None: they
    have the norm of the true vector. Their length then does not reveal them, and an average of
    updates can still learn.
    """

    std: Positive | None

    def falsified(self, vector: Tensor, round: int, client: int) -> Tensor:
        """Return normal numbers of the vector's shape and type."""
        rng = self.streams.generator(Purpose.RANDOM_UPDATE, round, client)
        noise = torch.as_tensor(rng.standard_normal(len(vector)), device=vector.device)
        scale = length(vector) / length(noise) if self.std is None else self.std
        return (noise * scale).to(vector.dtype)


class FreeRider(FalseUpdate):
    """Imperfect clients send back the model that they received, an update of zeros: plain
    free-riders (Fraboni et al. 2021, "Free-rider attacks on model aggregation in federated
    learning").

    Free-riders are not charged for training. fedsim trains them all the same, so that the batches
    of other clients stay the same, and reports that training loss as theirs.
    """

    of_buffers: ClassVar[bool] = True

    def falsified(self, vector: Tensor, round: int, client: int) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(vector)

    def works(self, ids: Ids) -> Bools:
        """Return which of these clients are no free-riders."""
        return ~np.isin(ids, self.imperfect)
