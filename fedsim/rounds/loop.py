"""The round loop: federated averaging with a selector, an aggregator, and a ledger of what it
costs."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.behaviour import HONEST, ClientBehaviour
from fedsim.clients.clients import Clients
from fedsim.clients.context import RoundContext, Signal, UndeclaredSignalError
from fedsim.clients.ledger import Ledger, PhaseTimer
from fedsim.clients.local_algorithms import LocalAlgorithm, LocalTraining
from fedsim.clients.local_results import GuardedTensors
from fedsim.clients.server import Server, ServerData
from fedsim.clients.system import SimulatedClock
from fedsim.core.arrays import Bools, Floats
from fedsim.core.errors import DivergedError
from fedsim.core.record import CLIENT_ACCURACY, Record
from fedsim.core.rng import Purpose, Streams
from fedsim.core.types import (
    Cohort,
    Evaluation,
    Ids,
    Params,
    Population,
    Selection,
    Weights,
    drop_nonfinite,
    empty_cohort,
    keep_rows,
)
from fedsim.engine.engine import Engine
from fedsim.rounds.aggregators import Aggregator
from fedsim.rounds.availability import Availability
from fedsim.rounds.checks import (
    SelectionError,
    check_available,
    check_combined,
    check_model,
    check_unmodified,
    refuse,
    selection_fault,
)
from fedsim.rounds.client_accuracy import ClientAccuracy, aggregates
from fedsim.selectors.base import Selector


@dataclass(frozen=True)
class Arrivals:
    """What arrived of a cohort's updates (None: nothing), and their weights, scaled to keep their
    sum.

    `late`: the clients whose updates did not arrive in time, or not among the first that count.
    `seconds`: from the request until the server went on.
    """

    cohort: Cohort | None
    weights: Weights
    late: Ids
    seconds: float


@dataclass(frozen=True)
class Components:
    """What a simulation is made of. Frozen, but for what the parts with a state carry across
    rounds.

    `learning_rate` gives the local learning rate of a round (1-based); `first_model` the model from
    which a client trains in the first round in which clients can be reached (None: the server's);
    `client_accuracy` what measures the accuracy client by client at evaluations (None: nothing);
    `now` is the clock, in seconds; `simulated` that of clients' devices.
    """

    engine: Engine
    population: Population
    selector: Selector
    aggregator: Aggregator
    availability: Availability
    server_data: ServerData
    streams: Streams
    learning_rate: Callable[[int], float]
    eval_every: int
    first_model: Callable[[int], Params] | None = None
    client_accuracy: ClientAccuracy | None = None
    now: Callable[[], float] = time.perf_counter
    simulated: SimulatedClock | None = None
    behaviour: ClientBehaviour = HONEST
    local_algorithm: LocalAlgorithm = field(default_factory=LocalAlgorithm)


class Simulation:
    """Iterate over it to run: each step is one round and yields its `Record`. `observed`: the
    selector's `observe` was called in the latest round, which it is not if no update arrived.

    Raises `SelectionError` on a faulty selection and `DivergedError` when no finite update is left;
    the state is then that of the last good round.
    """

    def __init__(self, components: Components, params: Params) -> None:
        self.components = components
        self.params = params
        components.aggregator.begin(components.selector, params)
        components.aggregator.account(
            components.selector, components.local_algorithm, components.simulated
        )
        self.round = 0
        self.wall_seconds = 0.0
        self.simulated_time = 0.0
        self.observed = False
        self.started = False  # clients could be reached in some round
        self.covered: Bools = np.zeros(components.population.num_clients, dtype=bool)

    def __iter__(self) -> Iterator[Record]:
        while self.round < self.components.population.num_rounds:
            yield self.step()

    def step(self) -> Record:
        """One round, from who can be reached to the record of it."""
        try:
            return self._round(self.round + 1)
        except UndeclaredSignalError as error:
            name = type(self.components.selector).__name__
            raise SelectionError(f"round {self.round + 1}: {name}: {error}") from error

    def _round(self, t: int) -> Record:
        parts, selector = self.components, self.components.selector
        context = self._context(t)
        ledger, clock, simulated = context.ledger, context.clock, context.simulated
        clients = Clients(
            parts.engine, context, self.params, None if self.started else parts.first_model
        )
        params, cohort, weights, num_dropped = self.params, None, None, 0

        clock.enter("select")
        selection = self._select(t, clients, context.available)
        begun = simulated.asked if simulated else 0.0  # the questions are over
        clock.enter("train")
        arrived = Arrivals(None, None, selection.ids, seconds=0.0)
        if len(selection.ids):
            arrived = self._arrivals(
                clients.collect(selection.ids), selection.weights, context, begun
            )
        if arrived.cohort is not None or (parts.aggregator.is_private and len(context.available)):
            clock.enter("aggregate")
            parts.aggregator.begin_round(context, selection.ids)
            cohort, weights, num_dropped = self._finite(arrived)
            arrivals = empty_cohort(self.params, parts.engine.trained) if cohort is None else cohort
            params = self._aggregate(context, arrivals, weights)
        if cohort is not None:
            server = Server(parts.engine, parts.server_data, context, params)
            declared = replace(  # training losses reach only a selector that has them sent
                cohort,
                loss=cohort.loss if Signal.TRAINING_LOSS in selector.needs else None,
                rms_loss=cohort.rms_loss if Signal.SQUARED_LOSS in selector.needs else None,
            )
            clock.enter("select")
            selector.observe(t, declared, server)
            check_unmodified(selector, t, server.modified)

        self.started |= bool(len(context.available))
        self.params, self.round, self.observed = params, t, cohort is not None
        self.covered[selection.ids] = True
        clock.enter("evaluate")
        measured = self._evaluate(t)
        spent: dict[str, Any] = {
            f"seconds_{phase}": seconds for phase, seconds in clock.seconds.items()
        }
        self.wall_seconds += sum(spent.values())
        return Record(
            round=t,
            train_loss=mean_loss(arrived.cohort),
            participation_ratio=len(ledger.uploaded) / parts.population.num_clients,
            wall_seconds=self.wall_seconds,
            selected=selection.ids.tolist(),
            coverage=float(self.covered.mean()),
            dropped_updates=num_dropped,
            epsilon=parts.aggregator.epsilon_spent,
            **ledger.counts,
            **spent,
            **measured,
            **self._times(context, begun, arrived),
        )

    def _context(self, t: int) -> RoundContext:
        parts, population = self.components, self.components.population
        mask = parts.availability.available(
            t, population.num_clients, parts.streams.generator(Purpose.AVAILABILITY, t)
        )
        check_available(parts.availability, t, mask, population.num_clients)
        if (
            parts.simulated is not None
            and (present := parts.simulated.present(self.simulated_time)) is not None
        ):
            mask = mask & present
        return RoundContext(
            round=t,
            lr=parts.learning_rate(t),
            available=np.flatnonzero(mask & (population.sizes > 0)),
            needs=parts.selector.needs,
            streams=parts.streams,
            first=not self.started,
            ledger=Ledger(),
            clock=PhaseTimer(parts.server_data.test.x.device, parts.now),
            public=parts.server_data.public,
            validation=parts.server_data.validation,
            simulated=None
            if parts.simulated is None
            else parts.simulated.round(t, self.simulated_time),
            behaviour=parts.behaviour,
            local_algorithm=parts.local_algorithm,
        )

    def _select(self, t: int, clients: Clients, available: Ids) -> Selection:
        if not len(available):
            return Selection(available)
        selector, available = self.components.selector, available.copy()
        selection = selector.select(
            t, clients, self.components.streams.generator(Purpose.SELECT, t)
        )
        expected = None if selector.adaptive else selector.cohort_size(clients)
        refuse(SelectionError, selector, t, selection_fault(selection, available, expected))
        check_unmodified(selector, t, *clients.modified)
        return selection

    def _arrivals(
        self, cohort: Cohort, weights: Weights, context: RoundContext, begun: float
    ) -> Arrivals:
        """What arrives of the updates that the server asks for `begun` seconds after the round's
        start."""
        if context.simulated is None or self.components.simulated is None:
            return Arrivals(cohort, weights, cohort.ids[:0], seconds=0.0)
        assert cohort.durations is not None
        wanted = self.components.simulated.wanted
        in_time, seconds = context.simulated.race(cohort.ids, cohort.durations, begun, wanted)
        unsent = ~in_time & (
            cohort.durations > 0
        )  # updates that the server did not have before it asked
        context.ledger.uploaded.difference_update(cohort.ids[unsent].tolist())
        late = cohort.ids[~in_time]
        if not in_time.any():
            return Arrivals(None, None, late, seconds)
        if len(late):
            cohort, weights = keep_rows(cohort, weights, in_time)
        return Arrivals(cohort, weights, late, seconds)

    def _finite(self, arrived: Arrivals) -> tuple[Cohort | None, Weights, int]:
        """As `drop_nonfinite`. A private run goes on where no update is left (None): an end would
        tell of a client."""
        if arrived.cohort is None:
            return None, None, 0
        try:
            return drop_nonfinite(arrived.cohort, arrived.weights)
        except DivergedError:
            if not self.components.aggregator.is_private:
                raise
            return None, None, len(arrived.cohort.ids)

    def _combine(self, context: RoundContext, cohort: Cohort, weights: Weights) -> Cohort:
        """What the local algorithm makes of the updates for the aggregator."""
        engine, aggregator = self.components.engine, self.components.aggregator

        def gradients() -> Tensor:
            with context.clock("train"):
                own = [engine.data.train[i] for i in cohort.ids]
                return torch.stack(list(engine.client_gradients(self.params, own)))

        def average() -> Floats:
            return aggregator.averaging_weights(
                cohort, aggregator.weights(cohort) if weights is None else weights
            )

        population = self.components.population

        def scales() -> Floats:
            equal = aggregator.weighting == "uniform"
            return np.ones(len(cohort.ids)) if equal else cohort.sizes / population.sizes.mean()

        optimizer, num_clients = engine.workload.optimizer, population.num_clients
        training = LocalTraining(context.lr, optimizer, num_clients, scales, average, gradients)
        return self.components.local_algorithm.combine(cohort, training)

    def _aggregate(self, context: RoundContext, cohort: Cohort, weights: Weights) -> Params:
        """The aggregator is given a copy of the present model, which it may work on in place."""
        t, aggregator, updates = (
            context.round,
            self.components.aggregator,
            GuardedTensors(cohort.delta),
        )
        if len(cohort.ids):
            cohort = self._combine(context, cohort, weights)
        check_combined(self.components.local_algorithm, t, cohort, updates.modified)
        updates.add(cohort.delta)
        mine = {name: torch.empty_like(value) for name, value in self.params.items()}
        torch._foreach_copy_(
            list(mine.values()), list(self.params.values())
        )  # in one launch on a GPU
        params = aggregator.aggregate(mine, replace(cohort, start=mine), weights)
        check_model(aggregator, t, params, self.params, updates.modified)
        return {name: params[name] for name in self.params}

    def _times(self, context: RoundContext, asking: float, arrived: Arrivals) -> dict[str, Any]:
        if self.components.simulated is None:
            return {}
        idle = not len(context.available)
        seconds = (
            self.components.simulated.system.idle_seconds if idle else asking + arrived.seconds
        )
        self.simulated_time += seconds
        parts = {"": seconds, "_ask": asking, "_train": arrived.seconds}
        times = {f"simulated_seconds{part}": value for part, value in parts.items()}
        return {**times, "simulated_time": self.simulated_time, "late": arrived.late.tolist()}

    def _evaluate(self, t: int) -> dict[str, Any]:
        parts = self.components
        if t % parts.eval_every and t != parts.population.num_rounds:
            return {"test_accuracy": None, "test_loss": None}
        evaluation, accuracies = self.measure()
        of_clients = {} if accuracies is None else aggregates(accuracies, self.covered)
        found = {f"{CLIENT_ACCURACY}_{name}": value for name, value in of_clients.items()}
        return {"test_accuracy": evaluation.accuracy, "test_loss": evaluation.loss, **found}

    def measure(self) -> tuple[Evaluation, Floats | None]:
        """The global model on the test set, and its accuracy on each client [N]; None where that is
        not measured."""
        parts, test = self.components, self.components.server_data.test
        if parts.client_accuracy is None:
            return parts.engine.evaluate(self.params, test.x, test.y), None
        evaluation, hits = parts.engine.evaluate_samples(self.params, test.x, test.y)
        return evaluation, parts.client_accuracy.measure(
            parts.engine, self.params, hits.cpu().numpy()
        )

    def evaluate(self) -> Evaluation:
        """The global model on the test set."""
        return self.measure()[0]

    def state_dict(self) -> dict[str, Any]:
        """Everything that crosses rounds; random streams are keyed, so no generator is in it."""
        return {
            "round": self.round,
            "started": self.started,
            "wall_seconds": self.wall_seconds,
            "covered": self.covered.copy(),
            "params": {name: value.clone() for name, value in self.params.items()},
            "selector": self.components.selector.state_dict(),
            "aggregator": self.components.aggregator.state_dict(),
            "local_algorithm": self.components.local_algorithm.state_dict(),
            **(
                {} if self.components.simulated is None else {"simulated_time": self.simulated_time}
            ),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken."""
        self.round, self.started, self.wall_seconds = (
            state["round"],
            state["started"],
            state["wall_seconds"],
        )
        self.covered = state["covered"].copy()
        self.params = {name: value.clone() for name, value in state["params"].items()}
        if self.components.simulated is not None:
            self.simulated_time = state["simulated_time"]
        self.components.selector.load_state_dict(state["selector"])
        self.components.aggregator.load_state_dict(state["aggregator"])
        self.components.local_algorithm.load_state_dict(state["local_algorithm"])


def mean_loss(cohort: Cohort | None) -> float | None:
    """Mean training loss over the cohort's finite ones."""
    if cohort is None or cohort.loss is None:
        return None
    finite = cohort.loss[np.isfinite(cohort.loss)]
    return float(finite.mean()) if len(finite) else None
