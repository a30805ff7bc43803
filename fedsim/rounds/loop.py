"""What a round was on the simulated clock: how long it took, and whose updates arrived in time.

The round loop: federated averaging with a selector, an aggregator, and a ledger of what it costs.

There is no branch on the selector here. Everything that crosses rounds is in `Simulation.state_dict`.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.clients.clients import Clients
from fedsim.clients.context import LentParams, RoundContext, Signal
from fedsim.clients.ledger import Clock, Ledger
from fedsim.clients.local_results import Lent
from fedsim.clients.server import Server, ServerData
from fedsim.clients.system import RoundClock, SimulatedClock
from fedsim.core.record import KEY, Record
from fedsim.core.rng import Purpose, Streams
from fedsim.core.types import Cohort, Evaluation, Ids, Params, Population, Selection
from fedsim.engine.engine import Engine
from fedsim.rounds.aggregators import Aggregator
from fedsim.rounds.availability import Availability
from fedsim.rounds.checks import (
    AvailabilityError,
    SelectionError,
    availability_fault,
    drop_nonfinite,
    kept_rows,
    require_finite,
    require_model,
    require_unmodified,
    require_unmodified_updates,
    selection_fault,
    selector_named,
)
from fedsim.rounds.client_accuracy import ClientAccuracy, aggregates
from fedsim.selectors.base import Selector

Weights = NDArray[np.float64] | None


@dataclass(frozen=True)
class Arrivals:
    """What arrived of a cohort's updates (None: nothing), and their weights, scaled to keep their sum.

    `late`: the clients whose updates did not arrive in time, or not among the first that count; `unsent`: those of
    them whose updates the server did not have before it asked. `seconds`: from the request until the server went on.
    """

    cohort: Cohort | None
    weights: Weights
    late: Ids
    unsent: Ids
    seconds: float


def all_arrive(cohort: Cohort, weights: Weights) -> Arrivals:
    """Without a simulated clock."""
    return Arrivals(cohort, weights, cohort.ids[:0], cohort.ids[:0], 0.0)


def arrivals(cohort: Cohort, weights: Weights, clock: RoundClock, begun: float, wanted: int) -> Arrivals:
    """What arrives of the updates that the server asks for `begun` seconds after the round's start.

    `wanted`: how many it waits for where more are selected.
    """
    assert cohort.durations is not None
    race = clock.race(cohort.ids, cohort.durations, begun, wanted)
    late, unsent = (cohort.ids[~race.arrived & some] for some in (True, cohort.durations > 0))
    if not race.arrived.any():
        return Arrivals(None, None, late, unsent, race.seconds)
    if len(late):
        cohort, weights = kept_rows(cohort, weights, race.arrived)
    return Arrivals(cohort, weights, late, unsent, race.seconds)


@dataclass(frozen=True)
class Components:
    """What a simulation is made of. Frozen, but for what selector and aggregator carry across rounds.

    `learning_rate` gives the local learning rate of a round (1-based); `first_model` the model from which a client
    trains in the first round in which clients can be reached (None: the server's); `client_accuracy` what measures the
    accuracy client by client at evaluations (None: nothing); `now` is the clock, in seconds; `simulated` that of
    clients' devices.
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


class Simulation:
    """Iterate over it to run: each step is one round and yields its `Record`. `observed`: the selector's `observe` was
    called in the latest round, which it is not if no update arrived.

    Raises `SelectionError` on a faulty selection and `DivergedError` when no finite update is left; the state is then
    that of the last good round.
    """

    def __init__(self, components: Components, params: Params) -> None:
        self.components = components
        self.params = params
        self.round = 0
        self.wall_seconds = 0.0
        self.simulated_time = 0.0
        self.observed = False
        self.started = False  # clients could be reached in some round
        self.covered: NDArray[np.bool_] = np.zeros(components.population.num_clients, dtype=bool)

    def __iter__(self) -> Iterator[Record]:
        while self.round < self.components.population.num_rounds:
            yield self.step()

    def step(self) -> Record:
        """One round."""
        parts, t = self.components, self.round + 1
        ledger, clock = Ledger(), Clock(parts.server_data.test.x.device, parts.now)
        simulated = None if parts.simulated is None else parts.simulated.round(t, self.simulated_time)
        clients = self._clients(t, ledger, clock, simulated)
        arrived: Arrivals | None = None
        params, num_dropped = self.params, 0

        with clock("select"):
            selection = self._select(t, clients)
        begun = simulated.asked if simulated else 0.0  # the questions are over
        if len(selection.ids):
            with clock("train"):
                arrived = self._collect(clients, selection, simulated, begun)
            ledger.uploaded.difference_update(arrived.unsent.tolist())
        if arrived is not None and arrived.cohort is not None:
            with clock("aggregate"):
                kept, weights, num_dropped = drop_nonfinite(arrived.cohort, arrived.weights)
                params = self._aggregate(t, kept, weights)
                require_finite(params, t)
            server = Server(parts.engine, parts.server_data, parts.selector.needs, ledger, params)
            with clock("select"), selector_named(parts.selector, t):
                parts.selector.observe(t, self._as_declared(kept), server)
            require_unmodified(server.modified, parts.selector, t)

        self.started |= bool(len(clients.available))
        self.params, self.round, self.observed = params, t, arrived is not None and arrived.cohort is not None
        self.covered[selection.ids] = True
        with clock("evaluate"):
            evaluation, of_clients = self._evaluate(t)
        self.wall_seconds += sum(clock.seconds.values())
        trained = arrived.cohort if arrived else None
        record = self._record(ledger, clock, selection.ids, trained, evaluation, of_clients, num_dropped)
        if simulated is None:
            return record
        return self._with_times(record, begun, arrived, idle=not len(clients.available))

    def _collect(self, clients: Clients, selection: Selection, simulated: RoundClock | None, begun: float) -> Arrivals:
        """The updates of the selected, asked for `begun` simulated seconds into the round, that arrive in time."""
        cohort = clients.collect(selection.ids)
        if simulated is None:
            return all_arrive(cohort, selection.weights)
        assert self.components.simulated is not None
        return arrivals(cohort, selection.weights, simulated, begun, self.components.simulated.wanted)

    def _aggregate(self, t: int, cohort: Cohort, weights: NDArray[np.float64] | None) -> Params:
        """The next model. The aggregator is given a copy of the present one, which it may work on in place."""
        aggregator, mine, updates = self.components.aggregator, LentParams(self.params).get(), Lent(cohort.delta)
        params = aggregator.aggregate(mine, replace(cohort, start=mine), weights)
        require_model(params, self.params, updates.modified, aggregator, t)
        return {name: params[name] for name in self.params}

    def _with_times(self, record: Record, asking: float, arrived: Arrivals | None, *, idle: bool) -> Record:
        """The record with the round's simulated times; `idle`: no client could be reached."""
        assert self.components.simulated is not None
        training = arrived.seconds if arrived else 0.0
        seconds = self.components.simulated.system.idle_seconds if idle else asking + training
        self.simulated_time += seconds
        return replace(
            record,
            simulated_seconds=seconds,
            simulated_seconds_ask=asking,
            simulated_seconds_train=training,
            simulated_time=self.simulated_time,
            late=arrived.late.tolist() if arrived else [],
        )

    def _clients(self, t: int, ledger: Ledger, clock: Clock, simulated: RoundClock | None) -> Clients:
        parts = self.components
        rng = parts.streams.generator(Purpose.AVAILABILITY, t)
        mask = parts.availability.available(t, parts.population.num_clients, rng)
        if fault := availability_fault(mask, parts.population.num_clients):
            raise AvailabilityError(f"round {t}: {type(parts.availability).__name__} {fault}")
        if parts.simulated is not None and (present := parts.simulated.present(self.simulated_time)) is not None:
            mask = mask & present
        lr, available = parts.learning_rate(t), np.flatnonzero(mask & (parts.population.sizes > 0))
        context = RoundContext(t, lr, available, parts.selector.needs, parts.streams, not self.started)
        first, public = None if self.started else parts.first_model, parts.server_data.public
        return Clients(parts.engine, parts.population, context, self.params, ledger, clock, public, first, simulated)

    def _select(self, t: int, clients: Clients) -> Selection:
        if not len(clients.available):
            return Selection(clients.available)
        selector, available = self.components.selector, clients.available.copy()
        with selector_named(selector, t):
            selection = selector.select(t, clients, self.components.streams.generator(Purpose.SELECT, t))
        expected = None if selector.adaptive else selector.cohort_size(clients)
        if fault := selection_fault(selection, available, expected):
            raise SelectionError(f"round {t}: {type(selector).__name__} {fault}")
        require_unmodified(clients.modified, selector, t)
        require_unmodified_updates(clients.modified_updates, selector, t)
        return selection

    def _as_declared(self, cohort: Cohort) -> Cohort:
        """Training losses reach only a selector that has them sent."""
        needs = self.components.selector.needs
        return replace(
            cohort,
            loss=cohort.loss if Signal.TRAINING_LOSS in needs else None,
            rms_loss=cohort.rms_loss if Signal.SQUARED_LOSS in needs else None,
        )

    def _evaluate(self, t: int) -> tuple[Evaluation | None, Mapping[str, float | None]]:
        """The evaluation of the round, and the aggregates of the clients' accuracies, as far as they are measured."""
        parts = self.components
        if t % parts.eval_every and t != parts.population.num_rounds:
            return None, {}
        if parts.client_accuracy is None:
            return self.evaluate(), {}
        evaluation, accuracies = self._evaluate_clients(parts.client_accuracy)
        return evaluation, aggregates(accuracies, self.covered)

    def _evaluate_clients(self, of_clients: ClientAccuracy) -> tuple[Evaluation, NDArray[np.float64]]:
        parts, test = self.components, self.components.server_data.test
        evaluation, hits = parts.engine.evaluate_samples(self.params, test.x, test.y)
        return evaluation, of_clients.measure(parts.engine, self.params, hits.cpu().numpy())

    def client_accuracies(self) -> NDArray[np.float64] | None:
        """The accuracy of the global model on each client [N]; None where it is not measured."""
        of_clients = self.components.client_accuracy
        return None if of_clients is None else self._evaluate_clients(of_clients)[1]

    def evaluate(self) -> Evaluation:
        """The global model on the test set."""
        test = self.components.server_data.test
        return self.components.engine.evaluate(self.params, test.x, test.y)

    def _record(
        self,
        ledger: Ledger,
        clock: Clock,
        selected: Ids,
        cohort: Cohort | None,
        evaluation: Evaluation | None,
        of_clients: Mapping[str, float | None],
        num_dropped: int,
    ) -> Record:
        n = self.components.population.num_clients
        by_client: Mapping[str, Any] = {f"{KEY}_{name}": value for name, value in of_clients.items()}
        return Record(
            round=self.round,
            test_accuracy=evaluation.accuracy if evaluation else None,
            test_loss=evaluation.loss if evaluation else None,
            train_loss=mean_loss(cohort),
            participation_ratio=len(ledger.uploaded) / n,
            contacted=len(ledger.contacted),
            trained=len(ledger.trained),
            uploaded=len(ledger.uploaded),
            bytes_down=ledger.bytes_down,
            bytes_up=ledger.bytes_up,
            forward_samples=ledger.forward_samples,
            train_samples=ledger.train_samples,
            server_forward_samples=ledger.server_forward_samples,
            seconds_select=clock.seconds["select"],
            seconds_ask=clock.seconds["ask"],
            seconds_train=clock.seconds["train"],
            seconds_aggregate=clock.seconds["aggregate"],
            seconds_evaluate=clock.seconds["evaluate"],
            wall_seconds=self.wall_seconds,
            selected=selected.tolist(),
            coverage=float(self.covered.mean()),
            nonfinite_reports=ledger.nonfinite_reports,
            dropped_updates=num_dropped,
            **by_client,
        )

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
            **({} if self.components.simulated is None else {"simulated_time": self.simulated_time}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken."""
        self.round = state["round"]
        self.started = state.get("started", self.round > 0)  # of a checkpoint before there was such a flag
        self.wall_seconds = state["wall_seconds"]
        self.covered = state["covered"].copy()
        self.params = {name: value.clone() for name, value in state["params"].items()}
        if self.components.simulated is not None:
            self.simulated_time = state["simulated_time"]
        self.components.selector.load_state_dict(state["selector"])
        self.components.aggregator.load_state_dict(state["aggregator"])


def mean_loss(cohort: Cohort | None) -> float | None:
    """Mean training loss over the cohort's finite ones."""
    if cohort is None or cohort.loss is None:
        return None
    finite = cohort.loss[np.isfinite(cohort.loss)]
    return float(finite.mean()) if len(finite) else None
