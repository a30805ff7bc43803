"""The round loop of a run over nodes of Flower."""

from dataclasses import replace

import numpy as np

from fedsim.clients.clients import Clients
from fedsim.clients.context import RoundContext
from fedsim.core.arrays import Bools
from fedsim.core.record import Record
from fedsim.core.types import Cohort, Ids, Params, Selection, Weights, keep_rows
from fedsim.flower.engine import RemoteEngine
from fedsim.rounds.arrivals import Arrivals
from fedsim.rounds.loop import Components, Simulation


class Deployment(Simulation):
    """The round loop over nodes: only connected clients are available, and silent ones are late."""

    def __init__(
        self, components: Components, params: Params, engine: RemoteEngine, is_secure: bool
    ) -> None:
        """`is_secure`: the server gets a secure sum of the updates."""
        super().__init__(components, params)
        self.engine = engine
        self.is_secure = is_secure

    def step(self) -> Record:
        """Run the next round, and return its record with what was measured on the network."""
        nodes = self.engine.nodes
        nodes.wait_for_any()
        nodes.bytes_down = nodes.bytes_up = 0
        self.engine.silent.clear()
        record = super().step()
        silent = self.engine.silent.intersection(record.selected)
        if record.test_accuracy is not None and np.isnan(record.test_accuracy):
            record = replace(record, test_accuracy=None, test_loss=None)  # nobody evaluated
        return replace(
            record,
            late=sorted(silent.union(record.late or ())),
            wire_bytes_down=nodes.bytes_down,
            wire_bytes_up=nodes.bytes_up,
        )

    def _context(self, t: int) -> RoundContext:
        context = super()._context(t)
        connected = np.array(list(self.engine.nodes.node_of), np.int64)
        return replace(context, available=np.intersect1d(context.available, connected))

    def _select(self, t: int, clients: Clients, available: Ids) -> Selection:
        """Select, and give the engine the weights of a secure sum."""
        selection = super()._select(t, clients, available)
        if self.is_secure:
            sizes = self.components.population.sizes[selection.ids]
            if self.components.aggregator.weighting == "uniform":
                sizes = np.ones_like(sizes)
            weights = sizes if selection.weights is None else selection.weights
            self.engine.weights = np.asarray(weights, np.float64)
        return selection

    def _arrivals(
        self,
        context: RoundContext,
        cohort: Cohort,
        weights: Weights,
        is_new: Bools,
        asking_seconds: float,
    ) -> Arrivals:
        """Take out the silent clients; the simulator decides about the others."""
        answered = ~np.isin(cohort.ids, list(self.engine.silent))
        context.ledger.uploaded.difference_update(cohort.ids[~answered].tolist())
        if not answered.any():
            return Arrivals(late=cohort.ids)
        if not answered.all():
            cohort, weights = keep_rows(cohort, weights, answered)
        return super()._arrivals(context, cohort, weights, is_new[answered], asking_seconds)
