"""A replay: several methods choose, round after round, on the models of one run.

`fedsim replay` makes a `Replay` for each seed and calls `play` once a round. A method is a selector
with its parameters. The lead is a run of random selection; all methods choose on its models. Each
method is a simulation of its own plan. Before a round it takes over the lead's state: its model,
the states of its aggregator and local algorithm, and its simulated time. Then it asks, selects,
trains and observes as in a run of its own. Its selector keeps its state, and its model is
discarded.

A choice is judged by the validation loss of the model that it makes, compared with those of random
cohorts. A client trains once a round, even if several methods or cohorts select it (`TrainsOnce`).
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
from fedsim.core.errors import DivergedError
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
    """An engine that remembers the training results of a round.

    Results are kept within one round and learning rate. The key of a result is the client, the kind
    of the correction, and digests of the global model, of the model that the client starts from,
    and of the correction's shift.
    """

    def __init__(self, engine: Engine) -> None:
        vars(self).update(vars(engine))  # it shares everything with `engine`, such as its backend
        self._round_and_lr = (0, 0.0)
        self._results: dict[tuple[int, object, bytes], Cohort] = {}

    def train(
        self,
        params: Params,
        ids: Ids,
        round: int,
        lr: float,
        start: Any = None,
        correction: Correction | None = None,
    ) -> Cohort:
        """Train as the engine does. The updates are copies, so that a caller may change them."""
        if self._round_and_lr != (round, lr):
            self._round_and_lr = (round, lr)
            self._results = {}
        # 1. Find the clients whose results are not known.
        kind = None if correction is None else correction.kind
        shift = {} if correction is None else correction.shift or {}
        model = _digest(params)
        keys = []
        for row, client in enumerate(ids.tolist()):
            client_start = _digest({} if start is None else start[row])
            client_shift = _digest({name: value[row] for name, value in shift.items()})
            keys.append((client, kind, model + client_start + client_shift))
        rows = [row for row, key in enumerate(keys) if key not in self._results]
        # 2. Train them, and remember the result of each as a cohort of one client.
        if rows:
            new_rows = np.array(rows, np.int64)
            starts = None if start is None else [start[row] for row in rows]
            part = None if correction is None else correction.rows(new_rows)
            trained = super().train(params, ids[new_rows], round, lr, starts, part)
            for position, row in enumerate(rows):
                self._results[keys[row]] = trained.rows(np.array([position]))
        return replace(Cohort.concat([self._results[key] for key in keys]), start=params)


def _digest(params: Params) -> bytes:
    """Return the SHA-256 of the names and values of parameters."""
    digest = hashlib.sha256()
    for name, value in params.items():
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return digest.digest()


class Fixed(Selector):
    """A selector that selects the clients `ids`, or all available ones if `ids` is None."""

    adaptive = True  # it may select any number of clients
    ids: Ids | None = None

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        return Selection(clients.available if self.ids is None else self.ids)


class Replay:
    """The replay of a `lead`, the plan of a run of random selection.

    `methods` are plans by name that differ from the lead in their selector only. Their choices are
    compared with `num_cohorts` random cohorts of the size K of the lead's cohorts. If there are at
    most `MAX_ENUMERATED` or `num_cohorts` cohorts of this size, they are compared with all of them.
    For this comparison all available clients train in every round.
    """

    def __init__(self, lead: Plan, methods: Mapping[str, Plan], num_cohorts: int) -> None:
        experiment = build(lead)
        self.lead = experiment.simulation
        # The test samples are those of the lead, which `test_on` may have chosen.
        data = replace(prepare(lead), test=self.lead.components.server_data.test)
        self.num_cohorts = num_cohorts
        self.engine = TrainsOnce(self.lead.components.engine)
        self.lead.components = replace(self.lead.components, engine=self.engine)
        self.methods = {name: self._follower(plan) for name, plan in methods.items()}
        # The judge makes a model of any cohort: it is a method that selects the cohort it is told.
        self._fixed = Fixed(self.lead.components.population)
        self._judge = self._follower(lead)
        self._judge.components = replace(self._judge.components, selector=self._fixed)
        self._histograms = experiment.division.histograms
        validation = data.labelled(experiment.division.validation)
        self._validation = (validation.x, validation.y)
        self._losses: list[Floats] = []  # of the N clients, at the lead's model of each round

    def _follower(self, plan: Plan) -> Simulation:
        """Return a simulation that trains by the lead's engine.

        It has one round more than the lead, and would be evaluated on the test set in this round
        only. The round never comes, so that no time is spent on evaluations.
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
        """Play one round. Returns a row of choices.jsonl for each method, and the lead's record.

        - `loss`: the validation loss of the model that the method's choice makes.
        - `percentile`: the share of the cohorts to compare with that have a lower loss [%].
        - `best`, `worst`: the lowest and the highest loss of these cohorts.
        - `available`: the number of available clients, and `drawn` the size of these cohorts.
        - `bytes_asked`: the bytes beyond those of collecting as many random clients.

        Raises `FedsimError` if a method fails.
        """
        self._losses.append(self.engine.losses(self.lead.params, self.engine.data.evaluate))
        # 1. The validation losses of the cohorts to compare with. The first step selects all
        #    available clients, so that they train in one call and their results are remembered.
        self._fixed.ids = None
        available = self._step(self._judge)[0].selected
        cohorts = self._cohorts(np.array(available, np.int64))
        losses = []
        for cohort in cohorts:
            self._fixed.ids = cohort
            losses.append(self._step(self._judge)[1])
        # 2. The methods. Their records and losses, by name.
        steps = {name: self._step(simulation) for name, simulation in self.methods.items()}
        # 3. The lead goes to the next round: last, because the others start from its model.
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
        """Play a round of a simulation, which first takes over the lead's state.

        Returns its record, and the validation loss of the model that the round makes. Raises
        `DivergedError` if that is nan or infinite, because it cannot be compared.
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
        loss = self.engine.evaluate(simulation.params, *self._validation).loss
        if not math.isfinite(loss):
            raise DivergedError(
                f"round {record.round}: the validation loss is {loss}: "
                "a lower optimizer.lr may help"
            )
        return record, loss

    def _cohorts(self, available: Ids) -> list[Ids]:
        """Return the cohorts of a round to compare with, each [K]: all, or random ones."""
        components = self.lead.components
        size = min(components.population.cohort_size, len(available))
        if math.comb(len(available), size) <= max(MAX_ENUMERATED, self.num_cohorts):
            return [np.array(ids, np.int64) for ids in itertools.combinations(available, size)]
        rng = components.streams.generator(Purpose.REPLAY, self.lead.round + 1)
        cohorts = range(self.num_cohorts)
        return [np.sort(rng.choice(available, size, replace=False)) for _ in cohorts]

    def clients(self) -> dict[str, Floats]:
        """Return properties of the N clients, each [N], by name. Call it after the last round.

        - `size`: number of training samples.
        - `label entropy`: entropy of the labels [nats], nan for a client without samples.
        - `loss`: loss at the lead's models, the mean over rounds.
        - `imperfect`: 1 for imperfect clients (config group `clients`), 0 for others.
        - `speed`: samples that the device passes forward in a second, with a simulated clock only.
        """
        components = self.lead.components
        labels = self._histograms
        with np.errstate(invalid="ignore"):  # 0 / 0 for clients without samples
            label_entropy = entropy(labels, axis=1)
        properties = {
            "size": labels.sum(1).astype(float),
            "label entropy": label_entropy,
            "loss": np.mean(self._losses, 0),
        }
        imperfect = components.behaviour.imperfect
        if len(imperfect):
            properties["imperfect"] = np.isin(np.arange(len(labels)), imperfect).astype(float)
        if components.simulated_clock is not None:
            properties["speed"] = 1 / components.simulated_clock.devices.forward
        return properties
