"""The context of a round, which `Clients` and `Server` share, and the signals (kinds of
information) that selectors declare.

The round loop makes one `RoundContext` a round. A selector does not see it; it uses `Clients` and
`Server`, which check its declared signals here.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from torch import Tensor

from fedsim.clients.behaviour import HONEST, ClientBehaviour
from fedsim.clients.ledger import Ledger
from fedsim.clients.local_algorithms import LocalAlgorithm
from fedsim.clients.phase_timer import PhaseTimer
from fedsim.clients.system import RoundClock
from fedsim.core.arrays import Ints
from fedsim.core.errors import FedsimError
from fedsim.core.rng import Purpose, Streams
from fedsim.core.types import Cohort, Evaluation, Ids, Params, copied
from fedsim.engine.engine import Engine


class Signal(StrEnum):
    """A kind of information that a selector requests or reads, and declares in `Selector.needs`."""

    UPDATES = "updates"
    """The updates of single clients: those of the participants in `observe`, and requested ones, or
    numbers that clients compute from them."""
    LOSSES = "losses"
    """Losses of clients at the current global model, before training."""
    TRAINING_LOSS = "training_loss"
    """The mean training loss of each participant, sent along with its update."""
    SQUARED_LOSS = "squared_loss"
    """The root mean square of each participant's training losses, sent along with its update."""
    GRADIENTS = "gradients"
    """Gradients of clients at the current global model."""
    TRAINING = "training"
    """Local training of clients whose models may stay with them."""
    LABEL_COUNTS = "label_counts"
    """Each client's number of samples of each class: the server learns about people's data."""
    VALIDATION = "validation"
    """Accuracy and loss on the server's own labelled validation split."""
    PUBLIC = "public"
    """Predictions of clients' models on public samples without labels."""
    ACCURACIES = "accuracies"
    """Accuracies of clients on their own samples, at the current global model."""
    RESOURCES = "resources"
    """Each client's time to download the model, to train and to upload; needs a `system`."""
    RESPONSE_TIMES = "response_times"
    """The time that each client takes to train, as the server sees it; needs a `system`."""
    TEST = "test"
    """Accuracy on the test set: the method selects by the data that it is judged on."""


CLOCK_SIGNALS = frozenset({Signal.RESOURCES, Signal.RESPONSE_TIMES})
"""Signals that need a simulated clock."""
UNASKED_SIGNALS = frozenset({Signal.VALIDATION, Signal.TEST, Signal.UPDATES})
"""Signals that the server has without a question: no client sends them, or all participants do."""
HIDDEN_SIGNALS = frozenset(
    {
        Signal.UPDATES,
        Signal.LOSSES,
        Signal.TRAINING_LOSS,
        Signal.SQUARED_LOSS,
        Signal.GRADIENTS,
        Signal.PUBLIC,
        Signal.ACCURACIES,
    }
)
"""Signals that secure aggregation hides: everything that a client computes from a model and its
samples. The server then sees only sums over clients."""


class QuestionError(FedsimError):
    """A selector asked clients a question that it must not ask."""


class UndeclaredSignalError(QuestionError):
    """A selector requested a signal that is not in its `needs`."""


class HiddenUpdates(dict[str, Tensor]):
    """The place of updates that a selector does not declare: reading it raises an error."""

    def _hidden(self, *_: object) -> Any:
        raise UndeclaredSignalError(
            "the selector read the updates of single clients without declaring it; "
            "add Signal.UPDATES to its `needs`"
        )

    __getitem__ = __iter__ = __len__ = __contains__ = __or__ = _hidden
    get = keys = values = items = copy = _hidden


@dataclass(frozen=True)
class LabelledSamples:
    """Samples `x` [n, ...], float32, with labels `y` [n], on the device."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class RoundContext:
    """The values that are fixed for one round, and the objects that collect its costs.

    `round` counts from 1, and `lr` is the local learning rate. `available` are the clients that can
    be reached and have data. `needs` are the signals that the selector declares. `is_first` says
    that no client could be reached in an earlier round. `ledger` collects the costs, and `timer`
    the wall time. `public` holds the M public samples [M, ...], which the server and all clients
    have, and `validation` the server's validation split; None: the run has none. `round_clock` is
    the simulated clock of this round; None: time is not simulated. With `lends_copies` the selector
    gets copies of tensors: it is a class outside fedsim, which may modify what it gets.
    """

    round: int
    lr: float
    available: Ids
    needs: frozenset[Signal]
    streams: Streams
    is_first: bool
    ledger: Ledger
    timer: PhaseTimer
    public: Tensor | None = None
    validation: LabelledSamples | None = None
    round_clock: RoundClock | None = None
    behaviour: ClientBehaviour = HONEST
    local_algorithm: LocalAlgorithm = field(default_factory=LocalAlgorithm)
    lends_copies: bool = False

    def lent(self, tensors: Params) -> Params:
        """Return the tensors, or the copies of them, that the selector gets."""
        return copied(tensors) if self.lends_copies else tensors

    def require(self, *signals: Signal) -> None:
        """Raise `QuestionError` if the round is over, and `UndeclaredSignalError` unless the
        selector declares `signals`."""
        if self.ledger.is_closed:
            raise QuestionError(
                f"the selector asked the `clients` or `server` of round {self.round}, which is "
                "over; ask those of this round"
            )
        for signal in signals:
            if signal not in self.needs:
                raise UndeclaredSignalError(
                    f"the selector asked for '{signal}' without declaring it; "
                    f"add Signal.{signal.name} to its `needs`"
                )

    def visible(self, cohort: Cohort) -> Cohort:
        """Return the part of a `cohort` that the selector may see in `observe`.

        Losses are None unless it declares them. Reading updates raises `UndeclaredSignalError`
        unless it declares these.
        """
        needs = self.needs
        return replace(
            cohort.with_own_arrays(),
            start=self.lent(cohort.start),
            delta=self.lent(cohort.delta) if Signal.UPDATES in needs else HiddenUpdates(),
            loss=cohort.loss if Signal.TRAINING_LOSS in needs else None,
            rms_loss=cohort.rms_loss if Signal.SQUARED_LOSS in needs else None,
        )

    def validate(self, engine: Engine, params: Params) -> Evaluation:
        """Evaluate `params` on the server's validation split, and charge the samples to the
        server."""
        self.require(Signal.VALIDATION)
        if self.validation is None:
            raise FedsimError(
                "this selector needs a validation split at the server: "
                "set server.validation_fraction"
            )
        return self.evaluate(engine, params, self.validation)

    def evaluate(self, engine: Engine, params: Params, samples: LabelledSamples) -> Evaluation:
        """Evaluate `params` on `samples` of the server, and charge these to the server."""
        self.ledger.charge_server(len(samples.y))
        return engine.evaluate(params, samples.x, samples.y)

    def shuffled(self, positions: Ints, client: int) -> Ints:
        """Return a client's `positions` in the random order from which this round's mini-batches
        are cut."""
        rng = self.streams.generator(Purpose.LOSS_BATCH, self.round, int(client))
        return rng.permutation(positions)

    def require_round_clock(self) -> RoundClock:
        """Return the simulated clock of the round. Raises `FedsimError` if the run has none."""
        if self.round_clock is None:
            raise FedsimError(
                "this selector needs a simulated clock: set system=lognormal, for example"
            )
        return self.round_clock

    @cached_property
    def compression_seed(self) -> int:
        """The seed with which all clients compress what they send in this round."""
        return self.streams.key(Purpose.SKETCH, self.round)
