"""The metered door between server and clients. A selector sees its clients through this and nothing else.

The first contact of a client with a model version charges one download; each answer charges its upload and the samples
passed. Asking for a signal that the selector does not declare raises. Neither data set, engine nor config is reachable.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from fedsim.cohort import Cohort, Ids, Params, Population
from fedsim.engine.base import Engine
from fedsim.errors import FedsimError
from fedsim.ledger import SCALAR_BYTES, Ledger
from fedsim.streams import Purpose


class Signal(StrEnum):
    """What a selector may ask for; it declares its own in `Selector.needs`."""

    LOSSES = "losses"
    """Losses of clients at the current global model, before training."""
    TRAINING_LOSS = "training_loss"
    """Each participant sends its own mean training loss along with its update."""
    VALIDATION = "validation"
    """Accuracy and loss on the server's own labelled validation split."""


class UndeclaredSignalError(FedsimError):
    """A selector asked for a signal that is not in its `needs`."""


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
        self._model_bytes = sum(t.numel() * t.element_size() for t in params.values())

    @property
    def available(self) -> Ids:
        """Clients that can be reached this round and have data, ascending."""
        return self._terms.available

    def losses(self, ids: Ids) -> NDArray[np.float64]:
        """Mean cross-entropy of the current model on all local (evaluation) samples of each client [len(ids)]."""
        return self._report_losses(ids, [self._engine.data.evaluate[i] for i in ids])

    def batch_losses(self, ids: Ids) -> NDArray[np.float64]:
        """The same on one random mini-batch of the local batch size per client, drawn afresh every round [len(ids)]."""
        return self._report_losses(ids, [self._batch(i) for i in ids])

    def collect(self, ids: Ids) -> Cohort:
        """Train `ids` locally and receive their updates."""
        self._contact(ids)
        trained = self._engine.train(self._params, ids, self._terms.round, self._terms.lr)
        self._ledger.trained.update(map(int, ids))
        self._ledger.uploaded.update(map(int, ids))
        self._ledger.train_samples += int(trained.samples.sum())
        self._ledger.bytes_up += len(ids) * self._model_bytes
        if Signal.TRAINING_LOSS in self._terms.needs:
            self._ledger.bytes_up += len(ids) * SCALAR_BYTES
        return Cohort(ids, self._population.sizes[ids], self._params, trained.delta, trained.loss, trained.steps)

    def _report_losses(self, ids: Ids, positions: list[NDArray[np.int64]]) -> NDArray[np.float64]:
        self._require(Signal.LOSSES)
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

    def _require(self, signal: Signal) -> None:
        if signal not in self._terms.needs:
            raise UndeclaredSignalError(
                f"the selector asked for '{signal}' without declaring it; add Signal.{signal.name} to its `needs`"
            )
