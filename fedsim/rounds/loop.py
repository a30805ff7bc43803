"""The round loop: federated averaging with a selector, an aggregator and a ledger of costs.

`Simulation._round` is one round from top to bottom. It only calls the components of a run, checks
what they return, and records what the round cost.
"""

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
from fedsim.clients.ledger import Ledger
from fedsim.clients.local_algorithms import LocalAlgorithm, LocalTraining
from fedsim.clients.local_results import GuardedTensors
from fedsim.clients.phase_timer import PhaseTimer
from fedsim.clients.server import Server, ServerData
from fedsim.clients.system import SimulatedClock
from fedsim.core.arrays import Bools, Floats
from fedsim.core.errors import DivergedError
from fedsim.core.record import Record
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
    raise_fault,
    selection_fault,
)
from fedsim.rounds.client_accuracy import ClientAccuracy, aggregates
from fedsim.selectors.base import Selector


@dataclass(frozen=True)
class Components:
    """The components of a simulation. The dataclass is frozen; stateful components still change.

    `learning_rate` gives the local learning rate of a round (from 1). `first_model` gives the model
    from which a client trains in the first round in which clients can be reached; None: the
    server's. `client_accuracy` measures the accuracy client by client at evaluations; None: it is
    not measured. `now` is the clock of the host, in seconds; `simulated_clock` is that of the
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
    simulated_clock: SimulatedClock | None = None
    behaviour: ClientBehaviour = HONEST
    local_algorithm: LocalAlgorithm = field(default_factory=LocalAlgorithm)


@dataclass(frozen=True)
class Arrivals:
    """The part of a cohort's updates that reaches the server.

    `cohort` has the updates that arrive in time and are finite; None: there are none. `weights` are
    the selector's, scaled to keep their sum. `late` are clients whose updates do not arrive in
    time, or not among the first that count. `seconds` is the simulated time from the request until
    the server continues. `num_dropped` counts updates with nan or infinity. `train_loss` is the
    mean over all updates in time.
    """

    late: Ids
    cohort: Cohort | None = None
    weights: Weights = None
    seconds: float = 0.0
    num_dropped: int = 0
    train_loss: float | None = None


class Simulation:
    """A run: iterating over it runs round after round and yields their records.

    `observed` says whether the selector's `observe` was called in the latest round; it is not if no
    update arrived. Raises `SelectionError` on a faulty selection, and `DivergedError` if no finite
    update arrives; the state is then that of the last good round.
    """

    def __init__(self, components: Components, params: Params) -> None:
        self.components = components
        self.params = params
        selector, aggregator = components.selector, components.aggregator
        aggregator.begin(selector, params)
        aggregator.account(selector, components.local_algorithm, components.simulated_clock)
        self.round = 0
        self.wall_seconds = 0.0
        self.simulated_time = 0.0
        self.observed = False
        self.started = False
        """Whether clients could be reached in some round."""
        self.covered: Bools = np.zeros(components.population.num_clients, dtype=bool)
        """Clients that have been selected at least once [N]."""

    def __iter__(self) -> Iterator[Record]:
        while self.round < self.components.population.num_rounds:
            yield self.step()

    def step(self) -> Record:
        """Run the next round and return its record."""
        try:
            return self._round(self.round + 1)
        except UndeclaredSignalError as error:
            name = type(self.components.selector).__name__
            raise SelectionError(f"round {self.round + 1}: {name}: {error}") from error

    def _round(self, t: int) -> Record:
        """Run round `t`. The state of the simulation changes only after step 6, when no component
        can reject the round any more."""
        components = self.components

        # 1. Who is available
        context = self._context(t)
        timer = context.timer
        first_model = None if self.started else components.first_model
        clients = Clients(components.engine, context, self.params, first_model)

        # 2. Select. The questions to clients have taken this long on the simulated clock.
        timer.enter("select")
        selection = self._select(t, clients, context.available)
        asking_seconds = 0.0 if context.round_clock is None else context.round_clock.elapsed

        # 3. Train
        timer.enter("train")
        cohort = clients.collect(selection.ids) if len(selection.ids) else None

        # 4. What arrives
        timer.enter("aggregate")
        arrivals = Arrivals(late=selection.ids)
        if cohort is not None:
            arrivals = self._arrivals(context, cohort, selection.weights, asking_seconds)

        # 5. Aggregate. A private aggregator adds its noise even if no update arrives.
        params = self.params
        is_private = components.aggregator.is_private
        if arrivals.cohort is not None or (is_private and len(context.available)):
            params = self._aggregate(context, selection.ids, arrivals)

        # 6. Observe
        if arrivals.cohort is not None:
            timer.enter("select")
            self._observe(context, arrivals.cohort, params)

        self.params = params
        self.round = t
        self.observed = arrivals.cohort is not None
        self.started |= len(context.available) > 0
        self.covered[selection.ids] = True

        # 7. Evaluate
        timer.enter("evaluate")
        evaluation, client_accuracies = None, None
        if t % components.eval_every == 0 or t == components.population.num_rounds:
            evaluation, client_accuracies = self.measure()

        # 8. Record
        return self._record(
            context, selection, asking_seconds, arrivals, evaluation, client_accuracies
        )

    def _context(self, t: int) -> RoundContext:
        """Find out which clients are available in round `t`, and return the round's context."""
        components = self.components
        num_clients = components.population.num_clients
        rng = components.streams.generator(Purpose.AVAILABILITY, t)
        mask = components.availability.available(t, num_clients, rng)
        check_available(components.availability, t, mask, num_clients)
        round_clock = None
        if components.simulated_clock is not None:
            present = components.simulated_clock.present(self.simulated_time)
            if present is not None:
                mask = mask & present
            round_clock = components.simulated_clock.round(t, self.simulated_time)
        return RoundContext(
            round=t,
            lr=components.learning_rate(t),
            available=np.flatnonzero(mask & (components.population.sizes > 0)),
            needs=components.selector.needs,
            streams=components.streams,
            is_first=not self.started,
            ledger=Ledger(),
            timer=PhaseTimer(components.server_data.test.x.device, components.now),
            public=components.server_data.public,
            validation=components.server_data.validation,
            round_clock=round_clock,
            behaviour=components.behaviour,
            local_algorithm=components.local_algorithm,
        )

    def _select(self, t: int, clients: Clients, available: Ids) -> Selection:
        if not len(available):
            return Selection(available)
        selector = self.components.selector
        available = available.copy()  # the selector might modify its own
        rng = self.components.streams.generator(Purpose.SELECT, t)
        selection = selector.select(t, clients, rng)
        expected = None if selector.adaptive else selector.cohort_size(clients)
        fault = selection_fault(selection, available, expected)
        raise_fault(SelectionError, selector, t, fault)
        check_unmodified(selector, t, *clients.modified)
        return selection

    def _arrivals(
        self, context: RoundContext, cohort: Cohort, weights: Weights, asking_seconds: float
    ) -> Arrivals:
        """Return what arrives of the updates for which the server asks `asking_seconds` after the
        start of the round."""
        late, seconds = cohort.ids[:0], 0.0
        clock = self.components.simulated_clock
        if clock is not None and context.round_clock is not None:
            assert cohort.durations is not None
            in_time, seconds = context.round_clock.wait_for_updates(
                cohort.ids, cohort.durations, asking_seconds, clock.num_counted
            )
            late = cohort.ids[~in_time]
            # an update with a duration of 0 was at the server before it asked
            was_sent_now = cohort.durations > 0
            context.ledger.uploaded.difference_update(cohort.ids[~in_time & was_sent_now].tolist())
            if not in_time.any():
                return Arrivals(late, seconds=seconds)
            if len(late):
                cohort, weights = keep_rows(cohort, weights, in_time)
        train_loss = mean_loss(cohort)
        try:
            finite, weights, num_dropped = drop_nonfinite(cohort, weights)
        except DivergedError:
            if not self.components.aggregator.is_private:
                raise
            # a private run continues: its end would disclose something about a client
            return Arrivals(
                late, seconds=seconds, num_dropped=len(cohort.ids), train_loss=train_loss
            )
        return Arrivals(late, finite, weights, seconds, num_dropped, train_loss)

    def _aggregate(self, context: RoundContext, selected: Ids, arrivals: Arrivals) -> Params:
        """Return the next global model. The aggregator may work on its copy of the present one."""
        t = context.round
        aggregator = self.components.aggregator
        aggregator.begin_round(context, selected)
        cohort = arrivals.cohort
        if cohort is None:
            cohort = empty_cohort(self.params, self.components.engine.trained)
        guarded = GuardedTensors(cohort.delta)
        if len(cohort.ids):
            cohort = self._combine(context, cohort, arrivals.weights)
            check_combined(self.components.local_algorithm, t, cohort, guarded.modified)
            guarded.add(cohort.delta)
        start = {name: torch.empty_like(value) for name, value in self.params.items()}
        torch._foreach_copy_(
            list(start.values()), list(self.params.values())
        )  # one launch on a GPU
        params = aggregator.aggregate(start, replace(cohort, start=start), arrivals.weights)
        check_model(aggregator, t, params, self.params, guarded.modified)
        return {name: params[name] for name in self.params}

    def _combine(self, context: RoundContext, cohort: Cohort, weights: Weights) -> Cohort:
        """Return the updates that the local algorithm makes for the aggregator."""
        engine = self.components.engine
        aggregator = self.components.aggregator
        population = self.components.population

        def gradients() -> Tensor:
            with context.timer("train"):
                positions = [engine.data.train[i] for i in cohort.ids]
                return torch.stack(list(engine.client_gradients(self.params, positions)))

        def averaging_weights() -> Floats:
            used = aggregator.weights(cohort) if weights is None else weights
            return aggregator.averaging_weights(cohort, used)

        def scales() -> Floats:
            if aggregator.weighting == "uniform":
                return np.ones(len(cohort.ids))
            return cohort.sizes / population.sizes.mean()

        training = LocalTraining(
            lr=context.lr,
            optimizer=engine.workload.optimizer,
            num_clients=population.num_clients,
            scales=scales,
            weights=averaging_weights,
            gradients=gradients,
        )
        return self.components.local_algorithm.combine(cohort, training)

    def _observe(self, context: RoundContext, cohort: Cohort, params: Params) -> None:
        """Show the selector the updates, with the training losses that it has declared, and the new
        model."""
        components = self.components
        selector = components.selector
        server = Server(components.engine, components.server_data, context, params)
        observed = replace(
            cohort,
            loss=cohort.loss if Signal.TRAINING_LOSS in selector.needs else None,
            rms_loss=cohort.rms_loss if Signal.SQUARED_LOSS in selector.needs else None,
        )
        selector.observe(context.round, observed, server)
        check_unmodified(selector, context.round, server.modified)

    def measure(self) -> tuple[Evaluation, Floats | None]:
        """Evaluate the global model on the test set, and on each client [N]; None if that is not
        measured."""
        components = self.components
        test = components.server_data.test
        if components.client_accuracy is None:
            return components.engine.evaluate(self.params, test.x, test.y), None
        evaluation, hits = components.engine.evaluate_samples(self.params, test.x, test.y)
        accuracies = components.client_accuracy.measure(
            components.engine, self.params, hits.cpu().numpy()
        )
        return evaluation, accuracies

    def evaluate(self) -> Evaluation:
        """Evaluate the global model on the test set."""
        return self.measure()[0]

    def _record(
        self,
        context: RoundContext,
        selection: Selection,
        asking_seconds: float,
        arrivals: Arrivals,
        evaluation: Evaluation | None,
        client_accuracies: Floats | None,
    ) -> Record:
        """Add up the round's wall time and simulated time, and return its record."""
        components = self.components
        ledger = context.ledger
        seconds = context.timer.seconds
        self.wall_seconds += sum(seconds.values())
        record = Record(
            round=context.round,
            test_accuracy=None if evaluation is None else evaluation.accuracy,
            test_loss=None if evaluation is None else evaluation.loss,
            train_loss=arrivals.train_loss,
            participation_ratio=len(ledger.uploaded) / components.population.num_clients,
            contacted=len(ledger.contacted),
            trained=len(ledger.trained),
            uploaded=len(ledger.uploaded),
            bytes_down=ledger.bytes_down,
            bytes_up=ledger.bytes_up,
            forward_samples=ledger.forward_samples,
            train_samples=ledger.train_samples,
            server_forward_samples=ledger.server_forward_samples,
            seconds_select=seconds["select"],
            seconds_ask=seconds["ask"],
            seconds_train=seconds["train"],
            seconds_aggregate=seconds["aggregate"],
            seconds_evaluate=seconds["evaluate"],
            wall_seconds=self.wall_seconds,
            selected=selection.ids.tolist(),
            coverage=float(self.covered.mean()),
            nonfinite_reports=ledger.nonfinite_reports,
            dropped_updates=arrivals.num_dropped,
            epsilon=components.aggregator.epsilon_spent,
        )
        if components.simulated_clock is not None:
            round_seconds = asking_seconds + arrivals.seconds
            if not len(context.available):
                round_seconds = components.simulated_clock.system.idle_seconds
            self.simulated_time += round_seconds
            record = replace(
                record,
                simulated_seconds=round_seconds,
                simulated_seconds_ask=asking_seconds,
                simulated_seconds_train=arrivals.seconds,
                simulated_time=self.simulated_time,
                late=arrivals.late.tolist(),
            )
        if client_accuracies is not None:
            measures = aggregates(client_accuracies, self.covered)
            record = replace(
                record,
                client_accuracy_mean=measures["mean"],
                client_accuracy_std=measures["std"],
                client_accuracy_worst_tenth=measures["worst_tenth"],
                client_accuracy_best_tenth=measures["best_tenth"],
                client_accuracy_never_selected=measures["never_selected"],
            )
        return record

    def state_dict(self) -> dict[str, Any]:
        """Return everything that persists between rounds. Random streams are keyed, so there is no
        generator in it."""
        components = self.components
        state = {
            "round": self.round,
            "started": self.started,
            "wall_seconds": self.wall_seconds,
            "covered": self.covered.copy(),
            "params": {name: value.clone() for name, value in self.params.items()},
            "selector": components.selector.state_dict(),
            "aggregator": components.aggregator.state_dict(),
            "local_algorithm": components.local_algorithm.state_dict(),
        }
        if components.simulated_clock is not None:
            state["simulated_time"] = self.simulated_time
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned; the next round is then the same."""
        components = self.components
        self.round = state["round"]
        self.started = state["started"]
        self.wall_seconds = state["wall_seconds"]
        self.covered = state["covered"].copy()
        self.params = {name: value.clone() for name, value in state["params"].items()}
        if components.simulated_clock is not None:
            self.simulated_time = state["simulated_time"]
        components.selector.load_state_dict(state["selector"])
        components.aggregator.load_state_dict(state["aggregator"])
        components.local_algorithm.load_state_dict(state["local_algorithm"])


def mean_loss(cohort: Cohort) -> float | None:
    """Return the mean of the cohort's finite training losses; None if there are none."""
    if cohort.loss is None:
        return None
    finite = cohort.loss[np.isfinite(cohort.loss)]
    return float(finite.mean()) if len(finite) else None
