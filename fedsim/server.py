"""What the server itself holds and a selector may ask of it (never the test set)."""

from dataclasses import dataclass

from torch import Tensor

from fedsim.clients import Signal, UndeclaredSignalError
from fedsim.cohort import Evaluation, Params
from fedsim.engine.base import Engine
from fedsim.errors import FedsimError
from fedsim.ledger import Ledger


@dataclass(frozen=True)
class Held:
    """`x` [n, ...] float32 and `y` [n] on the device."""

    x: Tensor
    y: Tensor


class Server:
    """The server's own labelled samples, as a selector sees them in one round."""

    def __init__(self, engine: Engine, validation: Held | None, needs: frozenset[Signal], ledger: Ledger) -> None:
        self._engine = engine
        self._validation = validation
        self._needs = needs
        self._ledger = ledger

    def validate(self, params: Params) -> Evaluation:
        """Accuracy and loss of `params` on the server's validation split (never the test set)."""
        if Signal.VALIDATION not in self._needs:
            raise UndeclaredSignalError(
                "the selector asked for 'validation' without declaring it; add Signal.VALIDATION to its `needs`"
            )
        if self._validation is None:
            raise FedsimError("this selector needs a validation split at the server: set server.validation_fraction")
        self._ledger.server_forward_samples += len(self._validation.y)
        return self._engine.evaluate(params, self._validation.x, self._validation.y)
