from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedsim.clients.context import LabelledSamples, RoundContext, Signal
from fedsim.clients.local_results import GuardedTensors
from fedsim.core.errors import FedsimError
from fedsim.core.types import Cohort, Evaluation, Params
from fedsim.engine.engine import Engine


@dataclass(frozen=True)
class ServerData:
    """The server's samples; `validation` is None, too, where the selector does not declare
    `Signal.VALIDATION`."""

    test: LabelledSamples
    validation: LabelledSamples | None = None
    public: Tensor | None = None


class Server:
    """The server's own samples, as a selector sees them in one round: every use is declared and
    counted."""

    def __init__(
        self, engine: Engine, data: ServerData, context: RoundContext, params: Params
    ) -> None:
        self._engine, self._data, self._context, self._params = engine, data, context, params
        self._lent = GuardedTensors()

    @cached_property
    def params(self) -> Params:
        """The global model after this round's aggregation: a copy, which is not to be modified
        either."""
        return self._lent.copy_of(self._params)

    @property
    def modified(self) -> list[str]:
        """Names of tensors in `params` that the selector has modified in place."""
        return self._lent.modified

    def validate(self, params: Params) -> Evaluation:
        """Accuracy and loss of `params` on the server's validation split (never the test set)."""
        return self._context.validate(self._engine, params)

    def test(self, params: Params) -> Evaluation:
        """Accuracy and loss of `params` on the test set, for replications of codes that select by
        it."""
        self._context.require(Signal.TEST)
        return self._context.evaluate(self._engine, params, self._data.test)

    def predict_public(self, cohort: Cohort) -> Tensor:
        """Log-probabilities of each uploaded model on the public samples, float64 [K, M, C]."""
        self._context.require(Signal.PUBLIC)
        public = self._data.public
        if public is None:
            raise FedsimError(
                "this selector needs public samples at the server: set server.public_samples"
            )
        self._context.ledger.server_forward_samples += len(cohort.ids) * len(public)
        models = (
            {n: w + cohort.delta[n][row] for n, w in cohort.start.items()}
            for row in range(len(cohort.ids))
        )
        return torch.stack([self._engine.predict(model, public) for model in models])
