"""The metered door between server and clients. A selector sees its clients through this and nothing else.

The first contact of a client with a model version charges one download; each answer charges its upload and the samples
passed. Asking for a signal that the selector does not declare raises. Neither data set, engine nor config is reachable.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.cohort import Cohort, Ids, Params, Population
from fedsim.engine.base import Engine, Trained
from fedsim.errors import FedsimError
from fedsim.ledger import SCALAR_BYTES, Ledger
from fedsim.streams import Purpose


class Signal(StrEnum):
    """What a selector may ask for; it declares its own in `Selector.needs`."""

    LOSSES = "losses"
    """Losses of clients at the current global model, before training."""
    TRAINING_LOSS = "training_loss"
    """Each participant sends its own mean training loss along with its update."""
    GRADIENTS = "gradients"
    """Gradients of clients at the current global model."""
    TRAINING = "training"
    """Local training of clients whose models may stay with them."""
    VALIDATION = "validation"
    """Accuracy and loss on the server's own labelled validation split."""
    PUBLIC = "public"
    """Predictions of uploaded models on the server's public samples without labels."""
    TEST = "test"
    """Accuracy on the test set: a method that asks for it selects by the data it is judged on."""


class UndeclaredSignalError(FedsimError):
    """A selector asked for a signal that is not in its `needs`."""


def require(signal: Signal, needs: frozenset[Signal]) -> None:
    """Raise unless `signal` is declared."""
    if signal not in needs:
        raise UndeclaredSignalError(
            f"the selector asked for '{signal}' without declaring it; add Signal.{signal.name} to its `needs`"
        )


@dataclass(frozen=True)
class RoundTerms:
    """What holds for one round: its number (1-based), local learning rate, who can be reached, what may be asked."""

    round: int
    lr: float
    available: Ids
    needs: frozenset[Signal]


class Clients:
    """A door on one version of the model. Opening it costs nothing: nobody has been contacted yet."""

    def __init__(
        self, engine: Engine, population: Population, terms: RoundTerms, params: Params, ledger: Ledger
    ) -> None:
        self._engine = engine
        self._population = population
        self._terms = terms
        self._params = params
        self._ledger = ledger
        self._holders: set[int] = set()
        self._uploaded: set[int] = set()
        self._trained: list[Trained] = []
        self._where: dict[int, tuple[int, int]] = {}
        self._model_bytes = sum(t.numel() * t.element_size() for t in params.values())

    @property
    def available(self) -> Ids:
        """Clients that can be reached this round and have data, ascending."""
        return self._terms.available

    @property
    def lr(self) -> float:
        """The local learning rate of this round, which the server sets."""
        return self._terms.lr

    @property
    def params(self) -> Params:
        """The model that this door is on; the server's own. Not to be modified."""
        return self._params

    def broadcast(self, params: Params) -> "Clients":
        """A door on another model in the same round (a what-if), with the same ledger."""
        return Clients(self._engine, self._population, self._terms, params, self._ledger)

    # --- questions ---------------------------------------------------------------------------------------------

    def losses(self, ids: Ids) -> NDArray[np.float64]:
        """Mean cross-entropy of the current model on all local (evaluation) samples of each client [len(ids)]."""
        return self._report_losses(ids, [self._engine.data.evaluate[i] for i in ids])

    def batch_losses(self, ids: Ids) -> NDArray[np.float64]:
        """The same on one random mini-batch of the local batch size per client, drawn afresh every round [len(ids)]."""
        return self._report_losses(ids, [self._batch(i) for i in ids])

    def gradients(self, ids: Ids, *, batch: bool = False, layers: Sequence[str] | None = None) -> Iterator[Tensor]:
        """The gradient of each client's mean training loss at the current model, flat [D], client after client.

        On all its training samples, or on one fresh mini-batch. `layers` picks the parameters whose names begin so.
        Charges D numbers up and one training pass; the model is evaluated as in testing (no dropout).
        """
        require(Signal.GRADIENTS, self._terms.needs)
        self._contact(ids)
        positions = [self._batch(i) if batch else self._engine.data.train[i] for i in ids]
        for gradient, used in zip(
            self._engine.client_gradients(self._params, positions, self._names(layers)), positions, strict=True
        ):
            self._ledger.bytes_up += gradient.numel() * gradient.element_size()
            self._ledger.train_samples += len(used)
            yield gradient

    def gradient_norms(self, ids: Ids) -> NDArray[np.float64]:
        """Euclidean norm of each client's full gradient [len(ids)]: one number up and one training pass each."""
        require(Signal.GRADIENTS, self._terms.needs)
        self._contact(ids)
        positions = [self._engine.data.train[i] for i in ids]
        norms = [float(g.norm()) for g in self._engine.client_gradients(self._params, positions, None)]
        self._ledger.train_samples += sum(map(len, positions))
        self._ledger.bytes_up += len(ids) * SCALAR_BYTES
        return np.array(norms)

    def train(self, ids: Ids) -> None:
        """Train `ids` locally (those that have not trained on this model yet); their models stay with them."""
        require(Signal.TRAINING, self._terms.needs)
        self._train(ids)

    def update_norms(self, ids: Ids) -> NDArray[np.float64]:
        """Euclidean norm of the update of each client, after training [len(ids)]: one number up each."""
        self.train(ids)
        self._ledger.bytes_up += len(ids) * SCALAR_BYTES
        return np.array([float(torch.cat([d.flatten() for d in self._delta(i)]).norm()) for i in ids])

    def updates(self, ids: Ids, layers: Sequence[str] | None = None) -> Iterator[Tensor]:
        """w_k - w of each client after training, flat [D], of the `layers` named: D numbers up each."""
        self.train(ids)
        for i in ids:
            names = self._names(layers)
            chosen = self._delta(i) if names is None else self._delta(i, names)
            update = torch.cat([d.flatten() for d in chosen])
            self._ledger.bytes_up += update.numel() * update.element_size()
            yield update

    def collect(self, ids: Ids) -> Cohort:
        """Train whoever of `ids` has not trained on this model yet, and receive all their updates.

        An update is uploaded once; collecting it again is free.
        """
        self._train(ids)
        new = {int(i) for i in ids} - self._uploaded
        self._uploaded |= new
        self._ledger.uploaded.update(new)
        numbers = SCALAR_BYTES if Signal.TRAINING_LOSS in self._terms.needs else 0
        self._ledger.bytes_up += len(new) * (self._model_bytes + numbers)
        sizes = self._population.sizes[ids]
        part, rows = self._rows(ids)
        return Cohort(
            ids=ids,
            sizes=sizes,
            start=self._params,
            delta=part.delta if rows is None else {n: d[torch.as_tensor(rows)] for n, d in part.delta.items()},
            loss=part.loss if rows is None else part.loss[rows],
            steps=part.steps if rows is None else part.steps[rows],
        )

    # --- behind the door ---------------------------------------------------------------------------------------

    def _train(self, ids: Ids) -> None:
        new = np.array([i for i in ids if int(i) not in self._where], dtype=np.int64)
        self._contact(new)
        if not len(new):
            return
        trained = self._engine.train(self._params, new, self._terms.round, self._terms.lr)
        self._where |= {int(i): (len(self._trained), row) for row, i in enumerate(new)}
        self._trained.append(trained)
        self._ledger.trained.update(map(int, new))
        self._ledger.train_samples += int(trained.samples.sum())

    def _rows(self, ids: Ids) -> tuple[Trained, NDArray[np.int64] | None]:
        """What `ids` have trained and in which rows it is (None: in all, in this order)."""
        places = [self._where[int(i)] for i in ids]
        if len({part for part, _ in places}) > 1:
            self._merge()
            places = [self._where[int(i)] for i in ids]
        trained = self._trained[places[0][0]]
        rows = np.array([row for _, row in places], dtype=np.int64)
        whole = len(rows) == len(trained.steps) and bool((rows == np.arange(len(rows))).all())
        return trained, None if whole else rows

    def _merge(self) -> None:
        """All that was trained at this door as one."""
        offsets = np.cumsum([0, *(len(t.steps) for t in self._trained)])
        self._where = {i: (0, int(offsets[part]) + row) for i, (part, row) in self._where.items()}
        parts = self._trained
        merged = Trained(
            delta={name: torch.cat([p.delta[name] for p in parts]) for name in parts[0].delta},
            loss=np.concatenate([p.loss for p in parts]),
            steps=np.concatenate([p.steps for p in parts]),
            samples=np.concatenate([p.samples for p in parts]),
        )
        self._trained = [merged]

    def _delta(self, client: int, names: Iterable[str] | None = None) -> list[Tensor]:
        part, row = self._where[int(client)]
        delta = self._trained[part].delta
        return [delta[name][row] for name in (delta if names is None else names)]

    def _names(self, layers: Sequence[str] | None) -> list[str] | None:
        if layers is None:
            return None
        names = [n for n in self._params if any(n == p or n.startswith(f"{p}.") for p in layers)]
        if not names:
            raise FedsimError(
                f"selector.layers={list(layers)}: the model has no such layer; it has {list(self._params)}"
            )
        return names

    def _report_losses(self, ids: Ids, positions: list[NDArray[np.int64]]) -> NDArray[np.float64]:
        require(Signal.LOSSES, self._terms.needs)
        self._contact(ids)
        losses = self._engine.losses(self._params, positions)
        self._ledger.forward_samples += sum(map(len, positions))
        self._ledger.bytes_up += len(ids) * SCALAR_BYTES
        self._ledger.nonfinite_reports += int((~np.isfinite(losses)).sum())
        return losses

    def _batch(self, client: int) -> NDArray[np.int64]:
        positions = self._engine.data.evaluate[client]
        rng = self._engine.streams.generator(Purpose.LOSS_BATCH, self._terms.round, int(client))
        return rng.permutation(positions)[: self._engine.work.batch_size]

    def _contact(self, ids: Iterable[int]) -> None:
        new = {int(i) for i in ids} - self._holders
        self._holders |= new
        self._ledger.download(new, self._model_bytes)
