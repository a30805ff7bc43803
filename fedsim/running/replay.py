"""A replay: all methods choose, round after round, on the models of one run, the lead, which random selection leads.

Each method is a simulation of its own plan. Before a round it is put where the lead is: at its model, the states of its
aggregator and its local algorithm, and its simulated time. It then asks, selects, trains and observes as in a run of
its own, and keeps its selector's state; its model is thrown away. A client trains once a round, whoever asks for it.
"""

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.stats import entropy

from fedsim.clients.clients import Clients
from fedsim.clients.server import LabelledSamples
from fedsim.config.plan import Plan
from fedsim.core.errors import DivergedError, FedsimError
from fedsim.core.record import Record
from fedsim.core.rng import Purpose
from fedsim.core.types import Cohort, Correction, Floats, Ids, Params, Selection
from fedsim.engine.engine import Engine
from fedsim.rounds.loop import Simulation
from fedsim.running.assembly import Experiment, build, prepare
from fedsim.selectors.base import Selector

MOST_ENUMERATED = 300
"""Cohorts up to which all that there are take the place of random ones."""
Row = dict[str, Any]
"""What a method did in a round: a row of choices.parquet."""


class TrainsOnce(Engine):
    """Another engine, whose results are remembered within a round: by client, learning rate, and the content of the
    model that updates are differences to, of the one that the client starts from, and of its correction."""

    def __init__(self, engine: Engine) -> None:
        vars(self).update(vars(engine))
        self._when: tuple[int, float] = 0, 0.0
        self._known: dict[tuple[int, bytes], tuple[Cohort, int]] = {}

    def train(
        self,
        params: Params,
        ids: Ids,
        round: int,
        lr: float,
        start: Sequence[Params] | None = None,
        correction: Correction | None = None,
    ) -> Cohort:
        """As of the other engine; the updates are copies."""
        if self._when != (round, lr):
            self._when, self._known = (round, lr), {}
        keys = self._keys(params, ids, start, correction)
        if len(new := np.array([row for row, key in enumerate(keys) if key not in self._known], np.int64)):
            own_start = None if start is None else [start[row] for row in new]
            own_correction = correction.rows(new) if correction else None
            trained = super().train(params, ids[new], round, lr, own_start, own_correction)
            self._known |= {keys[row]: (trained, at) for at, row in enumerate(new)}
        found = [self._known[key] for key in keys]
        parts = list({id(part): part for part, _ in found}.values())
        rows = [[row for row, (own, _) in enumerate(found) if own is part] for part in parts]
        picked = [part.rows(np.array([found[row][1] for row in own])) for part, own in zip(parts, rows, strict=True)]
        return replace(Cohort.concat(picked).rows(np.argsort([*itertools.chain(*rows)])), start=params)

    def _keys(
        self, params: Params, ids: Ids, start: Sequence[Params] | None, correction: Correction | None
    ) -> list[tuple[int, bytes]]:
        model = _digest(params)
        starts = [b""] * len(ids) if start is None else map(_digest, start)
        added = [b""] * len(ids)
        if correction:
            shift = correction.shift or {}
            of_rows = [_digest({name: value[row] for name, value in shift.items()}) for row in range(len(ids))]
            added = [f"{correction.kind}".encode() + one for one in of_rows]
        return [(int(i), model + one + more) for i, one, more in zip(ids, starts, added, strict=True)]


def _digest(params: Params) -> bytes:
    digest = hashlib.sha256()
    for name, value in params.items():
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return digest.digest()


class Given(Selector):
    """Selects the clients `ids`, or all there are if that is None; `available` were there."""

    adaptive = True
    ids: Ids | None = None
    available: Ids = np.empty(0, np.int64)

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        self.available = clients.available
        return Selection(self.available if self.ids is None else self.ids)


class Replay:
    """The `lead`, plan of a run of random selection, and the plans of `methods` by name, which differ from it in their
    selector alone. Their cohorts are judged against `num_cohorts` random ones of as many clients as the lead selects
    (against all where these are at most 300); 0: none, and then not everybody trains."""

    def __init__(self, lead: Plan, methods: Mapping[str, Plan], num_cohorts: int) -> None:
        self.experiment: Experiment = build(lead)
        self.lead, self.num_cohorts = self.experiment.simulation, num_cohorts
        parts, held, data = self.lead.components, self.experiment.division.validation, prepare(lead)
        self.engine = TrainsOnce(parts.engine)
        self.lead.components = replace(parts, engine=self.engine)
        self.validation = LabelledSamples(data.samples(held), data.y[torch.as_tensor(held, device=data.y.device)])
        self.methods = {name: self._beside(plan) for name, plan in methods.items()}
        self._given = Given(parts.population)
        self._judge = self._beside(lead, self._given)
        self._losses: list[Floats] = []

    def _beside(self, plan: Plan, selector: Selector | None = None) -> Simulation:
        """A simulation that trains by the lead's engine, and is never evaluated on the test set."""
        simulation = build(plan).simulation
        parts = simulation.components
        beyond = replace(parts.population, num_rounds=parts.population.num_rounds + 1)
        parts = replace(parts, engine=self.engine, population=beyond, eval_every=beyond.num_rounds)
        return Simulation(replace(parts, selector=selector or parts.selector), simulation.params)

    def play(self) -> tuple[list[Row], Record]:
        """One round: what each method did in it, and the lead's record."""
        lead, round = self.lead, self.lead.round + 1
        states = _carried(lead)
        self._losses.append(self.engine.losses(lead.params, self.engine.data.evaluate))
        self._loss_of(np.empty(0, np.int64), states)  # tells who is there
        available, others = self._given.available, np.empty(0)
        if self.num_cohorts and len(available):
            self._loss_of(None, states)  # all train in one call
            others = np.array([self._loss_of(ids, states) for ids in self._cohorts(round, available)])
        done = {name: self._step(name, one, states) for name, one in self.methods.items()}
        leads = lead.step()
        each = (leads.bytes_down + leads.bytes_up) / max(len(leads.selected), 1)
        rows = []
        for name, (record, loss) in done.items():
            asked = record.bytes_down + record.bytes_up - each * len(record.selected)
            row = {
                "round": round,
                "selector": name,
                "chosen": record.selected,
                "clients": len(record.selected),
                "available": len(available),
            }
            row |= {"loss": loss, "seconds_select": record.seconds_select, "bytes_asked": int(asked)}
            if len(others):
                better = float((others < loss).mean())
                row |= {"best": others.min(), "worst": others.max(), "percentile": 100 * better}
            rows.append(row)
        return rows, leads

    def _step(self, name: str, simulation: Simulation, states: Sequence[Any]) -> tuple[Record, float]:
        """The record of a simulation's round at the lead's model, and the validation loss of the model it has led to;
        infinite where no update is finite."""
        _place(simulation, self.lead, states)
        try:
            record = simulation.step()
        except FedsimError as error:
            error.args = (f"{name}: {error}",)
            raise
        return record, self.engine.evaluate(simulation.params, self.validation.x, self.validation.y).loss

    def _loss_of(self, ids: Ids | None, states: Sequence[Any]) -> float:
        self._given.ids = ids
        self._given.available = np.empty(0, np.int64)
        try:
            return self._step("random cohorts", self._judge, states)[1]
        except DivergedError:
            return math.inf

    def _cohorts(self, round: int, available: Ids) -> list[Ids]:
        size = min(self.lead.components.population.cohort_size, len(available))
        if math.comb(len(available), size) <= max(MOST_ENUMERATED, self.num_cohorts):
            return [np.array(ids) for ids in itertools.combinations(available, size)]
        rng = self.lead.components.streams.generator(Purpose.REPLAY, round)
        return [np.sort(rng.choice(available, size, replace=False)) for _ in range(self.num_cohorts)]

    def clients(self) -> dict[str, Floats]:
        """What clients are like, [N] by name: the loss is that at the lead's models, mean over rounds; nan where a
        client has none."""
        parts, histograms = self.lead.components, self.experiment.division.histograms
        with np.errstate(invalid="ignore"):
            found = {"size": parts.population.sizes.astype(float), "label entropy": entropy(histograms, axis=1)}
        found["loss"] = np.mean(self._losses, axis=0)
        if len(imperfect := parts.behaviour.imperfect):
            found["imperfect"] = np.isin(np.arange(len(histograms)), imperfect).astype(float)
        if parts.simulated is not None:
            found["speed"] = 1 / parts.simulated.devices.forward
        return found


def _carried(simulation: Simulation) -> list[dict[str, Any]]:
    parts = simulation.components
    return [parts.aggregator.state_dict(), parts.local_algorithm.state_dict()]


def _place(simulation: Simulation, lead: Simulation, states: Sequence[Any]) -> None:
    """Put a simulation where the lead is, whose aggregator and local algorithm have the `states`."""
    simulation.round, simulation.params = lead.round, lead.params
    simulation.started, simulation.simulated_time = lead.started, lead.simulated_time
    parts = simulation.components
    for part, state in zip((parts.aggregator, parts.local_algorithm), states, strict=True):
        part.load_state_dict(state)
