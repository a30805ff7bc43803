"""Random selection that also measures every pair of clients: what PNCS, section V, chooses its similarity by."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fedsim.communication.clients import Clients
from fedsim.communication.server import Server
from fedsim.communication.signals import Signal
from fedsim.errors import check, rule
from fedsim.selectors.base import Selector, ascending
from fedsim.selectors.pncs import stacked
from fedsim.selectors.tools.pair_features import pair_features
from fedsim.types import Cohort, Params, Population, Selection


class PairStudy(Selector):
    """K clients at random. Every round all clients send their gradients, and for every pair the server takes the step
    that the pair's mean gradient would be and validates it.

    The trace of a round holds, for all N (N - 1) / 2 pairs: `pairs`, `features` by name, `accuracy` and `loss`.
    `step` is the length of that step in learning rates (PNCS prints none). Source: PNCS, section V.
    """

    needs = frozenset({Signal.GRADIENTS, Signal.VALIDATION})

    def __init__(self, population: Population, *, powers: list[float], step: float) -> None:
        super().__init__(population)
        check(
            rule(bool(powers) and all(p > 0 for p in powers), "powers", powers, "must be numbers > 0"),
            rule(step > 0, "step", step, "must be > 0"),
        )
        self.powers, self.step = powers, step
        self._seen: tuple[Params, float, list[str], np.ndarray[Any, np.dtype[np.int64]], Tensor] | None = None
        self._trace: dict[str, Any] | None = None

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids = clients.available
        gradients = stacked(clients.gradients(ids), len(ids))
        self._seen = (clients.params, clients.lr, clients.layer_names(None), ids, gradients)
        return Selection(ascending(rng.choice(ids, self.cohort_size(clients), replace=False)))

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        assert self._seen is not None
        before, lr, names, ids, gradients = self._seen
        self._seen = None
        pairs = list(itertools.combinations(range(len(ids)), 2))
        after = [server.validate(_moved(before, names, gradients[[i, j]].mean(0), self.step * lr)) for i, j in pairs]
        features = pair_features(gradients.double().cpu().numpy(), self.powers)
        self._trace = {
            "pairs": [[int(ids[i]), int(ids[j])] for i, j in pairs],
            "features": features,
            "accuracy": [e.accuracy for e in after],
            "loss": [e.loss for e in after],
        }

    @property
    def trace(self) -> Mapping[str, Any] | None:
        return self._trace


def _moved(params: Params, names: list[str], gradient: Tensor, length: float) -> Params:
    """`params` after a step against a flat gradient of the tensors `names`."""
    parts = gradient.split([params[name].numel() for name in names])
    steps = dict(zip(names, parts, strict=True))
    return {n: w - length * steps[n].view(w.shape) if n in steps else w for n, w in params.items()}
