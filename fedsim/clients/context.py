from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from torch import Tensor

from fedsim.clients.behaviour import HONEST, ClientBehaviour
from fedsim.clients.ledger import Ledger, PhaseTimer
from fedsim.clients.local_algorithms import LocalAlgorithm
from fedsim.clients.system import RoundClock
from fedsim.core.arrays import Ints
from fedsim.core.errors import FedsimError
from fedsim.core.rng import Purpose, Streams
from fedsim.core.types import Evaluation, Ids, Params
from fedsim.engine.engine import Engine


class Signal(StrEnum):
    """A selector declares its own in `Selector.needs`."""

    LOSSES = "losses"
    """Losses of clients at the current global model, before training."""
    TRAINING_LOSS = "training_loss"
    """Each participant sends its own mean training loss along with its update."""
    SQUARED_LOSS = "squared_loss"
    """Each participant sends the root mean square of its samples' training losses along with its
    update."""
    GRADIENTS = "gradients"
    """Gradients of clients at the current global model."""
    TRAINING = "training"
    """Local training of clients whose models may stay with them."""
    LABEL_COUNTS = "label_counts"
    """How many samples of each class a client holds: it tells the server about people's data, once
    and for all."""
    VALIDATION = "validation"
    """Accuracy and loss on the server's own labelled validation split."""
    PUBLIC = "public"
    """Predictions of clients' models on public samples without labels."""
    ACCURACIES = "accuracies"
    """Accuracies of clients on their own samples, at the current global model."""
    RESOURCES = "resources"
    """Clients tell how long they take to download the model, to train and to upload; needs a
    `system`."""
    RESPONSE_TIMES = "response_times"
    """Clients train, and the server notes how long each took; needs a `system`."""
    TEST = "test"
    """Accuracy on the test set: a method that asks for it selects by the data it is judged on."""


CLOCK_SIGNALS = frozenset(
    {Signal.RESOURCES, Signal.RESPONSE_TIMES}
)  # signals that there are only on a simulated clock
SERVER_SIGNALS = frozenset({Signal.VALIDATION, Signal.TEST})  # signals that no client is asked for


class UndeclaredSignalError(FedsimError):
    """A selector asked for a signal that is not in its `needs`."""


@dataclass(frozen=True)
class LabelledSamples:
    """`x` [n, ...] float32 and `y` [n] on the device."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class RoundContext:
    """`needs`: the signals that the selector declares; `first`: whether in no earlier round clients
    could be reached; `public`: the public samples [M, ...]; `validation`: the server's split;
    `simulated`: the simulated clock."""

    round: int
    lr: float
    available: Ids
    needs: frozenset[Signal]
    streams: Streams
    first: bool
    ledger: Ledger
    clock: PhaseTimer
    public: Tensor | None = None
    validation: LabelledSamples | None = None
    simulated: RoundClock | None = None
    behaviour: ClientBehaviour = HONEST
    local_algorithm: LocalAlgorithm = field(default_factory=LocalAlgorithm)

    def require(self, *signals: Signal) -> None:
        """Raise `UndeclaredSignalError` unless the selector declares `signals`."""
        for signal in signals:
            if signal not in self.needs:
                remedy = f"add Signal.{signal.name} to its `needs`"
                raise UndeclaredSignalError(
                    f"the selector asked for '{signal}' without declaring it; {remedy}"
                )

    def validate(self, engine: Engine, params: Params) -> Evaluation:
        """Accuracy and loss of `params` on the server's validation split, whose samples are charged
        to the server."""
        self.require(Signal.VALIDATION)
        if self.validation is None:
            raise FedsimError(
                "this selector needs a validation split at the server: set server.validation_fraction"
            )
        return self.evaluate(engine, params, self.validation)

    def evaluate(self, engine: Engine, params: Params, held: LabelledSamples) -> Evaluation:
        """The same on samples that the server holds."""
        self.ledger.server_forward_samples += len(held.y)
        return engine.evaluate(params, held.x, held.y)

    def shuffled(self, positions: Ints, client: int) -> Ints:
        """A client's `positions` in a random order of this round, from which mini-batches are
        cut."""
        return self.streams.generator(Purpose.LOSS_BATCH, self.round, int(client)).permutation(
            positions
        )

    def simulated_clock(self) -> RoundClock:
        """The simulated clock. Raises `FedsimError` where there is none."""
        if self.simulated is None:
            raise FedsimError("this selector needs a simulated clock: set system=lognormal, say")
        return self.simulated

    @cached_property
    def compression_seed(self) -> int:
        """The seed that all clients use to compress what they send in this round."""
        return self.streams.key(Purpose.SKETCH, self.round)
