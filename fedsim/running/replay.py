"""A replay: all methods choose, round after round, on the models of one run, the lead, which random
selection leads.

Each method is a simulation of its own plan. Before a round it is put where the lead is: at its
model, the states of its aggregator and local algorithm, and its simulated time. It then asks,
selects, trains and observes as in a run of its own, and keeps its selector's state; its model is
thrown away. A client trains once a round, whoever asks for it.
"""

import hashlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.stats import entropy

from fedsim.clients.clients import Clients
from fedsim.config.plan import Plan
from fedsim.core.arrays import Floats
from fedsim.core.record import Record
from fedsim.core.rng import Purpose
from fedsim.core.types import Cohort, Correction, Ids, Params, Selection
from fedsim.engine.engine import Engine
from fedsim.rounds.loop import Simulation
from fedsim.running.assembly import build, prepare
from fedsim.selectors.base import Selector

MOST_ENUMERATED = 300  # cohorts up to which all that there are take the place of random ones


class TrainsOnce(Engine):
    """An `engine` whose results are remembered within a round: by client, learning rate, and the
    contents of the model that updates are differences to, of the one that the client starts from,
    and of its correction."""

    def __init__(self, engine: Engine) -> None:
        vars(self).update(vars(engine))
        self._when, self._known = (0, 0.0), dict[tuple[int, object, bytes], Cohort]()

    def train(
        self,
        params: Params,
        ids: Ids,
        round: int,
        lr: float,
        start: Any = None,
        correction: Correction | None = None,
    ) -> Cohort:
        """As of the other engine; the updates are copies."""
        if self._when != (round, lr):
            self._when, self._known = (round, lr), {}
        model, shift, rows = (
            _digest(params),
            (correction and correction.shift) or {},
            range(len(ids)),
        )
        own = [
            _digest(start[n] if start else {}) + _digest({k: v[n] for k, v in shift.items()})
            for n in rows
        ]
        keys = [
            (int(i), correction and correction.kind, model + more)
            for i, more in zip(ids, own, strict=True)
        ]
        if len(
            new := np.array(
                [row for row, key in enumerate(keys) if key not in self._known], np.int64
            )
        ):
            some = correction.rows(new) if correction else None
            trained = super().train(
                params, ids[new], round, lr, [start[row] for row in new] if start else None, some
            )
            self._known |= {keys[row]: trained.rows(np.array([at])) for at, row in enumerate(new)}
        return replace(Cohort.concat([self._known[key] for key in keys]), start=params)


def _digest(params: Params) -> bytes:
    parts = (
        name.encode() + value.detach().cpu().contiguous().numpy().tobytes()
        for name, value in params.items()
    )
    return hashlib.sha256(b"".join(parts)).digest()


class Given(Selector):
    """Selects the clients `ids`, or if that is None all."""

    adaptive = True
    ids: Ids | None = None

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        return Selection(clients.available if self.ids is None else self.ids)


class Replay:
    """The `lead`, plan of a run of random selection, and the plans of `methods` by name, which
    differ from it in their selector alone. What they choose is compared with `num_cohorts` random
    cohorts of the lead's size, with all where these are at most 300; for that everybody trains."""

    def __init__(self, lead: Plan, methods: Mapping[str, Plan], num_cohorts: int) -> None:
        experiment, data = build(lead), prepare(lead)
        self.lead, self.num_cohorts, self._division = (
            experiment.simulation,
            num_cohorts,
            experiment.division,
        )
        self.engine = TrainsOnce(self.lead.components.engine)
        self.lead.components = replace(self.lead.components, engine=self.engine)
        self.methods = {name: self._beside(plan) for name, plan in methods.items()}
        self._judge, self._given = self._beside(lead), Given(self.lead.components.population)
        self._judge.components = replace(self._judge.components, selector=self._given)
        held = torch.as_tensor(self._division.validation, device=data.y.device)
        self._validation = data.samples(self._division.validation), data.y[held]
        self._losses: list[Floats] = []

    def _beside(self, plan: Plan) -> Simulation:
        """A simulation that trains by the lead's engine, and is never evaluated on the test set."""
        simulation = build(plan).simulation
        parts = simulation.components
        beyond = replace(parts.population, num_rounds=parts.population.num_rounds + 1)
        simulation.components = replace(
            parts, engine=self.engine, population=beyond, eval_every=beyond.num_rounds
        )
        return simulation

    def play(self) -> tuple[list[dict[str, Any]], Record]:
        """One round: what each method did in it, a row of choices.jsonl, and the lead's record.
        Bytes asked are those beyond what collecting as many random clients takes. Raises
        `FedsimError` where a method fails."""
        self._losses.append(self.engine.losses(self.lead.params, self.engine.data.evaluate))
        self._given.ids = None
        available = self._step(self._judge)[0].selected  # all train in one call
        cohorts, losses = self._cohorts(np.array(available, np.int64)), []
        for self._given.ids in cohorts:
            losses.append(self._step(self._judge)[1])
        compared = {
            "best": min(losses),
            "worst": max(losses),
            "available": len(available),
            "drawn": len(cohorts[0]),
        }
        done = [self._step(simulation) for simulation in self.methods.values()]
        leads, rows = self.lead.step(), []
        each = (leads.bytes_down + leads.bytes_up) / max(len(leads.selected), 1)
        for name, (own, loss) in zip(self.methods, done, strict=True):
            row = {
                "round": own.round,
                "selector": name,
                "chosen": own.selected,
                "clients": len(own.selected),
            }
            row |= {
                "loss": loss,
                "percentile": 100 * float(np.mean([other < loss for other in losses])),
                **compared,
            }
            asked = int(own.bytes_down + own.bytes_up - each * len(own.selected))
            rows.append(row | {"seconds_select": own.seconds_select, "bytes_asked": asked})
        return rows, leads

    def _step(self, simulation: Simulation) -> tuple[Record, float]:
        """A simulation's round from where the lead is, and the validation loss of the model that it
        makes."""
        lead, parts = self.lead, simulation.components
        simulation.round, simulation.params = lead.round, lead.params
        simulation.started, simulation.simulated_time = lead.started, lead.simulated_time
        parts.aggregator.load_state_dict(lead.components.aggregator.state_dict())
        parts.local_algorithm.load_state_dict(lead.components.local_algorithm.state_dict())
        record = simulation.step()
        return record, self.engine.evaluate(simulation.params, *self._validation).loss

    def _cohorts(self, available: Ids) -> list[Ids]:
        parts = self.lead.components
        size = min(parts.population.cohort_size, len(available))
        if math.comb(len(available), size) <= max(MOST_ENUMERATED, self.num_cohorts):
            return [np.array(ids, np.int64) for ids in itertools.combinations(available, size)]
        rng = parts.streams.generator(Purpose.REPLAY, self.lead.round + 1)
        return [
            np.sort(rng.choice(available, size, replace=False)) for _ in range(self.num_cohorts)
        ]

    def clients(self) -> dict[str, Floats]:
        """What clients are like, [N] by name; the loss is that at the lead's models, mean over
        rounds."""
        parts, labels = self.lead.components, self._division.histograms
        with np.errstate(invalid="ignore"):  # of clients without samples
            found = {
                "size": labels.sum(1) / 1,
                "label entropy": entropy(labels, axis=1),
                "loss": np.mean(self._losses, 0),
            }
        if len(parts.behaviour.imperfect):
            found["imperfect"] = np.isin(np.arange(len(labels)), parts.behaviour.imperfect).astype(
                float
            )
        return (
            found
            if parts.simulated_clock is None
            else found | {"speed": 1 / parts.simulated_clock.devices.forward}
        )
