"""A replay: several methods choose, round after round, on the models of one run.

That run is the lead, and random selection leads it. Each method is a simulation of its own plan.
Before a round it takes the lead's place: its model, the states of its aggregator and local
algorithm, and its simulated time. Then it asks, selects, trains and observes as in a run of its
own. Its selector's state is kept, and its model is discarded. A client trains once a round, even if
several methods select it.
"""

import hashlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
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

MAX_ENUMERATED = 300
"""If there are at most this many cohorts, all of them are compared instead of random ones."""


class TrainsOnce(Engine):
    """An engine that remembers its results within a round.

    The key of a result is the client, the learning rate, the correction, and the contents of the
    global model and of the model that the client starts from.
    """

    def __init__(self, engine: Engine) -> None:
        vars(self).update(vars(engine))
        self._when = (0, 0.0)
        self._known: dict[tuple[int, object, bytes], Cohort] = {}

    def train(
        self,
        params: Params,
        ids: Ids,
        round: int,
        lr: float,
        start: Any = None,
        correction: Correction | None = None,
    ) -> Cohort:
        """Train as the engine does; the updates are copies."""
        if self._when != (round, lr):
            self._when = (round, lr)
            self._known = {}
        # 1. Find the clients whose results are not known.
        kind = None if correction is None else correction.kind
        shift = {} if correction is None else correction.shift or {}
        model = _digest(params)
        keys = []
        for row, client in enumerate(ids.tolist()):
            own_start = _digest({} if start is None else start[row])
            own_shift = _digest({name: value[row] for name, value in shift.items()})
            keys.append((client, kind, model + own_start + own_shift))
        rows = [row for row, key in enumerate(keys) if key not in self._known]
        # 2. Train them, and remember their results.
        if rows:
            unknown = np.array(rows, np.int64)
            starts = None if start is None else [start[row] for row in rows]
            part = None if correction is None else correction.rows(unknown)
            trained = super().train(params, ids[unknown], round, lr, starts, part)
            for position, row in enumerate(rows):
                self._known[keys[row]] = trained.rows(np.array([position]))
        return replace(Cohort.concat([self._known[key] for key in keys]), start=params)


def _digest(params: Params) -> bytes:
    digest = hashlib.sha256()
    for name, value in params.items():
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return digest.digest()


class Fixed(Selector):
    """A selector that selects the clients `ids`, or all available ones if that is None."""

    adaptive = True
    ids: Ids | None = None

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        return Selection(clients.available if self.ids is None else self.ids)


class Replay:
    """The replay of a `lead`, the plan of a run of random selection.

    `methods` are plans by name that differ from it in their selector only. What they choose is
    compared with `num_cohorts` random cohorts of the lead's size, or with all cohorts if there are
    at most 300. All clients train for that.
    """

    def __init__(self, lead: Plan, methods: Mapping[str, Plan], num_cohorts: int) -> None:
        experiment = build(lead)
        data = prepare(lead)
        self.lead = experiment.simulation
        self.num_cohorts = num_cohorts
        self.engine = TrainsOnce(self.lead.components.engine)
        self.lead.components = replace(self.lead.components, engine=self.engine)
        self.methods = {name: self._follower(plan) for name, plan in methods.items()}
        self._fixed = Fixed(self.lead.components.population)
        self._judge = self._follower(lead)
        self._judge.components = replace(self._judge.components, selector=self._fixed)
        self._histograms = experiment.division.histograms
        validation = data.labelled(experiment.division.validation)
        self._validation = (validation.x, validation.y)
        self._losses: list[Floats] = []

    def _follower(self, plan: Plan) -> Simulation:
        """Return a simulation that trains by the lead's engine.

        It is never evaluated on the test set, because its last round never comes.
        """
        simulation = build(plan).simulation
        components = simulation.components
        num_rounds = components.population.num_rounds + 1
        simulation.components = replace(
            components,
            engine=self.engine,
            population=replace(components.population, num_rounds=num_rounds),
            eval_every=num_rounds,
        )
        return simulation

    def play(self) -> tuple[list[dict[str, Any]], Record]:
        """Play one round, and return a row of choices.jsonl for each method and the lead's record.

        `bytes_asked` are those beyond what collecting as many random clients takes. Raises
        `FedsimError` if a method fails.
        """
        self._losses.append(self.engine.losses(self.lead.params, self.engine.data.evaluate))
        # 1. The validation losses after cohorts to compare with. All clients train in one call.
        self._fixed.ids = None
        available = self._step(self._judge)[0].selected
        cohorts = self._cohorts(np.array(available, np.int64))
        losses = []
        for cohort in cohorts:
            self._fixed.ids = cohort
            losses.append(self._step(self._judge)[1])
        # 2. The methods.
        steps = {name: self._step(simulation) for name, simulation in self.methods.items()}
        # 3. The lead, which goes to the next round.
        lead = self.lead.step()
        bytes_of_client = (lead.bytes_down + lead.bytes_up) / max(len(lead.selected), 1)
        rows = []
        for name, (record, loss) in steps.items():
            num_selected = len(record.selected)
            random_bytes = bytes_of_client * num_selected
            rows.append(
                {
                    "round": record.round,
                    "selector": name,
                    "chosen": record.selected,
                    "clients": num_selected,
                    "loss": loss,
                    "percentile": 100 * float(np.mean(np.array(losses) < loss)),
                    "best": min(losses),
                    "worst": max(losses),
                    "available": len(available),
                    "drawn": len(cohorts[0]),
                    "seconds_select": record.seconds_select,
                    "bytes_asked": int(record.bytes_down + record.bytes_up - random_bytes),
                }
            )
        return rows, lead

    def _step(self, simulation: Simulation) -> tuple[Record, float]:
        """Play a simulation's round from the lead's place.

        Returns its record, and the validation loss of the model that it makes.
        """
        lead = self.lead
        components = simulation.components
        simulation.round = lead.round
        simulation.params = lead.params
        simulation.started = lead.started
        simulation.simulated_time = lead.simulated_time
        components.aggregator.load_state_dict(lead.components.aggregator.state_dict())
        components.local_algorithm.load_state_dict(lead.components.local_algorithm.state_dict())
        record = simulation.step()
        return record, self.engine.evaluate(simulation.params, *self._validation).loss

    def _cohorts(self, available: Ids) -> list[Ids]:
        """Return the cohorts to compare with."""
        components = self.lead.components
        size = min(components.population.cohort_size, len(available))
        if math.comb(len(available), size) <= max(MAX_ENUMERATED, self.num_cohorts):
            return [np.array(ids, np.int64) for ids in itertools.combinations(available, size)]
        rng = components.streams.generator(Purpose.REPLAY, self.lead.round + 1)
        cohorts = range(self.num_cohorts)
        return [np.sort(rng.choice(available, size, replace=False)) for _ in cohorts]

    def clients(self) -> dict[str, Floats]:
        """Return properties of the N clients, each [N], by name.

        The loss is that of the lead's models, a mean over rounds.
        """
        components = self.lead.components
        labels = self._histograms
        with np.errstate(invalid="ignore"):  # of clients without samples
            label_entropy = entropy(labels, axis=1)
        properties = {
            "size": labels.sum(1) / 1,
            "label entropy": label_entropy,
            "loss": np.mean(self._losses, 0),
        }
        imperfect = components.behaviour.imperfect
        if len(imperfect):
            properties["imperfect"] = np.isin(np.arange(len(labels)), imperfect).astype(float)
        if components.simulated_clock is not None:
            properties["speed"] = 1 / components.simulated_clock.devices.forward
        return properties
