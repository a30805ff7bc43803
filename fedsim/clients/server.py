"""The server's own samples, and what a selector may do with them.

The round loop makes one `Server` in each round with an update, after the aggregation, and passes it
to `Selector.observe`.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedsim.clients.context import LabelledSamples, RoundContext, Signal
from fedsim.core.errors import FedsimError
from fedsim.core.types import Cohort, Evaluation, Params, copied
from fedsim.engine.engine import Engine


@dataclass(frozen=True)
class ServerData:
    """The server's samples: the test set, a labelled validation split, and M public samples without
    labels [M, ...].

    `validation` and `public` are None if the config reserves none. `validation` is also None if the
    selector does not declare `Signal.VALIDATION`.
    """

    test: LabelledSamples
    validation: LabelledSamples | None = None
    public: Tensor | None = None


class Server:
    """The server in one round. Every use of its samples must be declared, and is charged."""

    def __init__(
        self, engine: Engine, data: ServerData, context: RoundContext, params: Params
    ) -> None:
        self._engine = engine
        self._data = data
        self._context = context
        self._params = params

    @cached_property
    def params(self) -> Params:
        """A copy of the global model after this round's aggregation."""
        return copied(self._params)

    def validate(self, params: Params) -> Evaluation:
        """Return accuracy and loss of `params` on the server's validation split."""
        return self._context.validate(self._engine, params)

    def test(self, params: Params) -> Evaluation:
        """Return accuracy and loss of `params` on the test set.

        This is for replications of methods whose code selects by the test set.
        """
        self._context.require(Signal.TEST)
        return self._context.evaluate(self._engine, params, self._data.test)

    def predict_public(self, cohort: Cohort) -> Tensor:
        """Return log-probabilities of each uploaded model on the public samples, float64
        [K, M, C] for K clients and C classes."""
        self._context.require(Signal.PUBLIC)
        public = self._data.public
        if public is None:
            raise FedsimError(
                "this selector needs public samples at the server: set server.public_samples"
            )
        self._context.ledger.charge_server(len(cohort.ids) * len(public))
        predictions = []
        for row in range(len(cohort.ids)):
            model = {name: w + cohort.delta[name][row] for name, w in cohort.start.items()}
            predictions.append(self._engine.predict(model, public))
        return torch.stack(predictions)
