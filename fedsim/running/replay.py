"""A replay: several methods choose, round after round, on the models of one run.

`fedsim replay` makes a `Replay` for each seed and calls `play` once a round. A method is a selector
with its parameters. The lead is a run of random selection; all methods choose on its models. Each
method is a simulation of its own plan. Before a round it takes over the lead's state: its model,
the states of its aggregator and local algorithm, and its simulated time. Then it asks, selects,
trains and observes as in a run of its own. Its selector keeps its state, and its model is
discarded.

A choice is judged by the validation loss of the model that it makes. It is compared with the losses
of other cohorts, the compared cohorts, which are random or all that there are. A client trains once
a round, even if several methods or cohorts select it (`TrainsOnce`).
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
"""If there are at most this many cohorts, the compared cohorts are all of them."""


class TrainsOnce(Engine):
    """An engine that remembers the training results of a round.

    Results are kept within one round and learning rate. The key of a result is the client, the kind
    of the correction, and digests of the global model, of the model that the client starts from,
    and of the correction's shift.

    It shares all attributes with `engine`, such as the backend and the clients' data. Therefore
    `engine` must be an `Engine` itself, not of a subclass, and its attributes are not replaced
    afterwards.
    """

    def __init__(self, engine: Engine) -> None:
        vars(self).update(vars(engine))
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
        """Train as `Engine.train` does, but no client twice with the same arguments.

        The updates are copies, so that a caller may change them.
        """
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
            new_correction = None if correction is None else correction.rows(new_rows)
            trained = super().train(params, ids[new_rows], round, lr, starts, new_correction)
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
    """A selector that selects the clients `ids`, or all available ones if `ids` is None.

    The judge of a replay sets `ids` before each round (`Replay.play`).
    """

    adaptive = True  # it may select any number of clients
    ids: Ids | None = None

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        return Selection(clients.available if self.ids is None else self.ids)


class Replay:
    """The replay of one seed.

    `lead_plan` is the plan of a run of random selection. `method_plans` are plans by name that
    differ from it in their selector only. The compared cohorts of a round are `num_cohorts` random
    cohorts of the size K of the lead's cohorts. They are all cohorts of this size if there are at
    most `num_cohorts` of them, or at most `MAX_ENUMERATED`. For this comparison all available
    clients train in every round.
    """

    def __init__(self, lead_plan: Plan, method_plans: Mapping[str, Plan], num_cohorts: int) -> None:
        experiment = build(lead_plan)
        self.lead = experiment.simulation
        # The test samples are those of the lead, which `test_on` may have chosen.
        data = replace(prepare(lead_plan), test=self.lead.components.server_data.test)
        self.num_cohorts = num_cohorts
        self.engine = TrainsOnce(self.lead.components.engine)
        self.lead.components = replace(self.lead.components, engine=self.engine)
        self.methods = {name: self._follower(plan) for name, plan in method_plans.items()}
        # The judge makes the models of given cohorts. It is a follower that selects them (`Fixed`).
        self._judge_selector = Fixed(self.lead.components.population)
        self._judge = self._follower(lead_plan)
        self._judge.components = replace(self._judge.components, selector=self._judge_selector)
        self._histograms = experiment.division.histograms
        validation = data.labelled(experiment.division.validation)
        self._validation = (validation.x, validation.y)
        self._client_losses: list[Floats] = []  # [N] each, at the lead's model of each round

    def _follower(self, plan: Plan) -> Simulation:
        """Return a simulation of `plan` that trains by the lead's engine and is not evaluated.

        A simulation evaluates on the test set every `eval_every` rounds and in its last round. Here
        both are the round after the lead's last one, which is never played.
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

        - `chosen`: the clients that the method selects, and `clients` their number.
        - `loss`: the validation loss of the model that this choice makes.
        - `percentile`: the share of the compared cohorts that have a lower loss [%].
        - `best`, `worst`: the lowest and the highest loss of the compared cohorts.
        - `available`: the number of available clients.
        - `drawn`: the number of clients in a compared cohort.
        - `bytes_asked`: the bytes that the method's questions cost: those of its round, minus the
          bytes of the lead's round per selected client times the number of its own clients.

        Raises `FedsimError` if a method fails.
        """
        client_losses = self.engine.losses(self.lead.params, self.engine.data.evaluate)
        self._client_losses.append(client_losses)
        # 1. Measure the losses of the compared cohorts. First, the judge selects all available
        #    clients, so that they train in one call and their results are remembered.
        self._judge_selector.ids = None
        judge_record, _ = self._step(self._judge)
        available = judge_record.selected
        cohorts = self._compared_cohorts(np.array(available, np.int64))
        compared_losses = []
        for cohort in cohorts:
            self._judge_selector.ids = cohort
            _, loss = self._step(self._judge)
            compared_losses.append(loss)
        # 2. Play the round of each method.
        steps = {name: self._step(simulation) for name, simulation in self.methods.items()}
        # 3. Play the round of the lead. It comes last, because all others start from its model.
        lead_record = self.lead.step()
        lead_bytes = lead_record.bytes_down + lead_record.bytes_up
        bytes_per_client = lead_bytes / max(len(lead_record.selected), 1)
        # 4. Make the rows.
        rows = []
        for name, (record, loss) in steps.items():
            num_selected = len(record.selected)
            random_bytes = bytes_per_client * num_selected
            rows.append(
                {
                    "round": record.round,
                    "selector": name,
                    "chosen": record.selected,
                    "clients": num_selected,
                    "loss": loss,
                    "percentile": 100 * float(np.mean(np.array(compared_losses) < loss)),
                    "best": min(compared_losses),
                    "worst": max(compared_losses),
                    "available": len(available),
                    "drawn": len(cohorts[0]),
                    "seconds_select": record.seconds_select,
                    "bytes_asked": int(record.bytes_down + record.bytes_up - random_bytes),
                }
            )
        return rows, lead_record

    def _step(self, simulation: Simulation) -> tuple[Record, float]:
        """Play a round of a simulation, which first takes over the lead's state.

        Returns its record, and the validation loss of the model that the round makes. Raises
        `DivergedError` if the loss is nan or infinite, because it cannot be compared.
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

    def _compared_cohorts(self, available: Ids) -> list[Ids]:
        """Return the compared cohorts of a round, each [K], or fewer than K if fewer are available.

        All cohorts are returned if there are few, otherwise random ones.
        """
        components = self.lead.components
        size = min(components.population.cohort_size, len(available))
        if math.comb(len(available), size) <= max(MAX_ENUMERATED, self.num_cohorts):
            return [np.array(ids, np.int64) for ids in itertools.combinations(available, size)]
        rng = components.streams.generator(Purpose.REPLAY, self.lead.round + 1)
        cohorts = []
        for _ in range(self.num_cohorts):
            cohorts.append(np.sort(rng.choice(available, size, replace=False)))
        return cohorts

    def clients(self) -> dict[str, Floats]:
        """Return properties of the N clients, each [N], by name. Call it after the last round.

        - `size`: number of training samples.
        - `label entropy`: entropy of the labels [nats], nan for a client without samples.
        - `loss`: loss at the lead's models, the mean over rounds.
        - `imperfect`: 1 for imperfect clients (config group `clients`), 0 for others.
        - `speed`: samples that the device passes forward in a second, with a simulated clock only.
        """
        components = self.lead.components
        with np.errstate(invalid="ignore"):  # 0 / 0 for clients without samples
            label_entropy = entropy(self._histograms, axis=1)
        properties = {
            "size": self._histograms.sum(1).astype(float),
            "label entropy": label_entropy,
            "loss": np.mean(self._client_losses, 0),
        }
        imperfect = components.behaviour.imperfect
        if len(imperfect):
            all_ids = np.arange(len(self._histograms))
            properties["imperfect"] = np.isin(all_ids, imperfect).astype(float)
        if components.simulated_clock is not None:
            properties["speed"] = 1 / components.simulated_clock.devices.forward
        return properties
