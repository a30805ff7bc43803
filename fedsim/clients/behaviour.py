"""Imperfect clients: those whose labels are wrong, and those that send something else than what
they have computed.

Who they are is drawn as one order of all clients, of which a share comes first: at a seed, every
behaviour has the same clients, and those of a smaller share are among those of a larger one. That
and all that they do is drawn from streams of its own, so that division, first model and batches are
those of the run with honest clients. No selector is told.
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
    """The interface of the group `clients`: what they train on, and what leaves them. Here all are
    honest."""

    imperfect: Ids = np.empty(0, np.int64)
    """Ids of the imperfect clients, ascending."""

    def labels(self, y: Tensor, division: Division) -> Tensor:
        """The labels by which clients train and report losses, accuracies and label counts. `y`
        [n], the true ones, is not to be modified: other runs share it, and the server's samples and
        `client_accuracy` go by it."""
        return y

    def sent(self, trained: Cohort, round: int) -> Cohort:
        """What clients send in place of their updates, whole, in part, or as what is computed of
        them: norms, public labels, gradients at the trained model."""
        return trained

    def sent_gradient(self, gradient: Tensor, round: int, client: int) -> Tensor:
        """What a client sends, or reports the norm of, in place of a gradient [D]."""
        return gradient

    def works(self, ids: Ids) -> Bools:
        """Which of these clients train, and are charged for it [len(ids)]."""
        return np.ones(len(ids), np.bool_)


HONEST = ClientBehaviour()


@parameters
class Imperfect(ClientBehaviour):
    """A `share` of the clients (rounded to whole ones) is imperfect; the others are honest."""

    num_clients: int = field(kw_only=False)
    num_classes: int = field(kw_only=False)
    streams: Streams = field(kw_only=False)
    share: Share

    def problems(self) -> Problems:
        some = not self.share > 0 or round(self.share * self.num_clients) > 0
        text, remedy = (
            f"is less than one of {self.num_clients} clients",
            "raise it, or choose clients=honest",
        )
        yield rule(some, "share", self.share, text, remedy)

    def __post_init__(self) -> None:
        order = self.streams.generator(Purpose.IMPERFECT).permutation(self.num_clients)
        self.imperfect = np.sort(order[: round(self.share * self.num_clients)])


@parameters
class LabelNoise(Imperfect):
    """A share `noise_rate` of an imperfect client's samples has wrong labels, which it does not
    know: of those that it trains on, and of those that it holds out (rounded to whole ones).

    `kind`: `symmetric`, any other class with equal probability; `pair`, the next class, c + 1 mod C
    (Han et al. 2018, "Co-teaching", section 4). There each label is flipped with a probability;
    here the share is exact, and the wrong labels of a lower rate are among those of a higher one.
    That a share of the clients is noisy is as in FedCorr (Xu et al. 2022), which draws a rate for
    each of them; here all have the same.
    """

    noise_rate: Share
    kind: Literal["symmetric", "pair"]

    def problems(self) -> Problems:
        yield from super().problems()
        text = f"needs two classes or more, and the data set has {self.num_classes}"
        yield rule(
            self.num_classes > 1,
            "kind",
            self.kind,
            text,
            "choose clients=honest, or another data set",
        )

    def labels(self, y: Tensor, division: Division) -> Tensor:
        noisy = y.cpu().numpy().copy()
        for part, own in enumerate((division.train, division.holdout)):
            draws = self.streams.generators(Purpose.LABEL_NOISE, part, last=self.imperfect)
            for client, rng in zip(self.imperfect.tolist(), draws, strict=True):
                order = rng.permutation(own[client])
                wrong = order[: round(self.noise_rate * len(order))]
                steps = (
                    rng.integers(1, self.num_classes, len(order))[: len(wrong)]
                    if self.kind == "symmetric"
                    else 1
                )
                noisy[wrong] = (noisy[wrong] + steps) % self.num_classes
        return torch.tensor(noisy, device=y.device)


class FalseUpdate(Imperfect, ABC):
    """Imperfect clients send what `falsified` makes of an update, of a gradient, or of the
    optimiser's momentum.

    All else that they report is true: losses (those of training, too), accuracies, label counts,
    times, the spread of gradients. Running statistics stay, unless `of_buffers` says else: a
    falsified variance may be below 0.
    """

    of_buffers: ClassVar[bool] = False

    @abstractmethod
    def falsified(self, vector: Tensor, round: int, client: int) -> Tensor:
        """What `client` sends in `round` (from 1) in place of `vector` [D], which is not to be
        modified."""

    def sent(self, trained: Cohort, round: int) -> Cohort:
        rows = np.flatnonzero(np.isin(trained.ids, self.imperfect))
        if not len(rows):
            return trained

        def false(stack: Stack) -> Stack:
            own = {
                name: value
                for name, value in stack.items()
                if self.of_buffers or name in trained.trained
            }
            flat = torch.cat([value.flatten(1) for value in own.values()], 1)
            for row in rows.tolist():
                flat[row] = self.falsified(flat[row], round, int(trained.ids[row]))
            parts = split_flat(flat, {name: value[0] for name, value in own.items()})
            return stack | {name: value.contiguous() for name, value in parts.items()}

        momentum = None if trained.momentum is None else false(trained.momentum)
        return replace(trained, delta=false(trained.delta), momentum=momentum, finite=None)

    def sent_gradient(self, gradient: Tensor, round: int, client: int) -> Tensor:
        return self.falsified(gradient, round, client) if client in self.imperfect else gradient


@parameters
class ScaledUpdate(FalseUpdate):
    """`factor` times the update. Below 0: sign flipping (Damaskinos et al. 2018, "Asynchronous
    Byzantine machine learning"). Above 1: boosting (Bhagoji et al. 2019, "Analyzing federated
    learning through an adversarial lens"; Bagdasaryan et al. 2020, "How to backdoor federated
    learning"), here of an update that was trained honestly."""

    factor: Annotated[float, Interval(ge=-1e6, le=1e6)]

    def falsified(self, vector: Tensor, round: int, client: int) -> Tensor:
        return vector * self.factor


@parameters
class RandomUpdate(FalseUpdate):
    """Independent normal numbers, drawn by round and client: the Gaussian attack (Blanchard et al.
    2017, "Machine learning with adversaries", section 5).

    `std`: their standard deviation, 200 in the paper, whose workers send gradients. None: scaled to
    the norm of what they take the place of, so that it does not give them away, and an average of
    updates outlives them.
    """

    std: Positive | None

    def falsified(self, vector: Tensor, round: int, client: int) -> Tensor:
        draws = self.streams.generator(Purpose.RANDOM_UPDATE, round, client).standard_normal(
            len(vector)
        )
        noise = torch.as_tensor(draws, device=vector.device)
        return (noise * (length(vector) / length(noise) if self.std is None else self.std)).to(
            vector.dtype
        )


class FreeRider(FalseUpdate):
    """The model that they were sent, which is an update of zeros: plain free-riders (Fraboni et al.
    2021, "Free-rider attacks on model aggregation in federated learning").

    They are charged no training. The simulator trains them all the same, so that the batches of
    others stay as they are, and reports that training loss as theirs.
    """

    of_buffers: ClassVar[bool] = True

    def falsified(self, vector: Tensor, round: int, client: int) -> Tensor:
        return torch.zeros_like(vector)

    def works(self, ids: Ids) -> Bools:
        return ~np.isin(ids, self.imperfect)
