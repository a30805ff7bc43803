"""The round loop: federated averaging with a selector, an aggregator and a ledger of costs.

`Simulation._round` is one round from top to bottom. It only calls the components of a run, checks
what they return, and records what the round cost. Rounds are numbered from 1; `t` is the number of
the present one. The cohort is the set of clients that the selector has selected. N is the number of
all clients.
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
from fedsim.clients.context import QuestionError, RoundContext
from fedsim.clients.ledger import Ledger
from fedsim.clients.local_algorithms import LocalAlgorithm, LocalTraining
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
from fedsim.rounds.arrivals import Arrivals, mean_loss, parts_before_loss
from fedsim.rounds.availability import Availability
from fedsim.rounds.checks import (
    GuardedTensors,
    SelectionError,
    check_available,
    check_combined,
    check_model,
    is_users,
    no_global_draws,
    raise_fault,
    selection_fault,
)
from fedsim.rounds.client_accuracy import ClientAccuracy, aggregates
from fedsim.selectors.base import Selector

LARGE_TOTAL = 100
"""If a selector's weights sum to more, a run that diverges names them as a possible cause."""


@dataclass(frozen=True)
class Components:
    """The components of a simulation. The dataclass is frozen; stateful components still change.

    `learning_rate` returns the local learning rate of a round. `eval_every` is the number of rounds
    from one evaluation to the next; fedsim also evaluates after the last round. `first_model`
    returns the initial model of a client if clients have models of their own. They train from these
    in the first round in which clients can be reached. None: they train from the server's model.
    `client_accuracy` measures the accuracy of each
    client at evaluations; None: it is not measured. `now` returns the time of the host's clock in
    seconds. `simulated_clock` measures time on the clients' devices; None: it is not simulated.
    `drop_out` is the probability that a selected client is lost before its update arrives.
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
    drop_out: float = 0.0


class Simulation:
    """A run: iterating over it runs round after round and yields their records.

    A round raises `SelectionError` if the selector is at fault, `AggregationError` if it is the
    aggregator or the local algorithm, `AvailabilityError` if it is the availability model, and
    `DivergedError` if updates arrive and none of them is finite. `round` and `params` are then
    those of the last good round.
    """

    def __init__(self, components: Components, params: Params) -> None:
        """`params` is the initial model."""
        self.components = components
        self.params = params
        """The global model after `round`."""
        selector, aggregator = components.selector, components.aggregator
        aggregator.begin(selector, params)
        clock, availability = components.simulated_clock, components.availability
        aggregator.account(selector, components.local_algorithm, clock, availability)
        self.round = 0
        """The number of the latest complete round; 0 before the first."""
        self.wall_seconds = 0.0
        """Seconds of all rounds on the host's clock."""
        self.simulated_time = 0.0
        """Seconds of all rounds on the simulated clock; 0 without one."""
        self.observed = False
        """Whether the selector's `observe` was called in the latest round. It is called unless no
        update arrived."""
        self.started = False
        """Whether clients could be reached in some round so far."""
        self.covered: Bools = np.zeros(components.population.num_clients, dtype=bool)
        """Clients that have been selected at least once [N]."""
        self.weights: Weights = None
        """The selector's weights of the latest selection."""

    @property
    def weights_are_ignored(self) -> bool:
        """True if the aggregator ignores the weights of the latest selection, and these are not
        all 1 / K."""
        if self.weights is None or not self.components.aggregator.ignores_weights:
            return False
        return not np.allclose(self.weights, 1 / len(self.weights))

    def __iter__(self) -> Iterator[Record]:
        while self.round < self.components.population.num_rounds:
            yield self.step()

    def step(self) -> Record:
        """Run the next round and return its record."""
        try:
            return self._round(self.round + 1)
        except QuestionError as error:
            name = type(self.components.selector).__name__
            raise SelectionError(f"round {self.round + 1}: {name}: {error}") from error
        except DivergedError as error:
            total = 1.0 if self.weights is None else self.weights.sum()
            if abs(total) <= LARGE_TOTAL:
                raise
            name = type(self.components.selector).__name__
            cause = f"those of {name} sum to {total:g}, and for a mean they must sum to 1"
            raise DivergedError(f"{error}, or smaller weights: {cause}") from error

    def _round(self, t: int) -> Record:
        """Run round `t`. The state of the simulation changes only after step 6, when no component
        can reject the round any more."""
        components = self.components

        # 1. Find out who is available
        context = self._context(t)
        timer = context.timer
        first_model = None if self.started else components.first_model
        clients = Clients(components.engine, context, self.params, first_model)

        # 2. Select. `asking_seconds` is the simulated time of the questions to clients. Those of
        # `observe` are added below.
        timer.enter("select")
        selection = self._select(t, clients, context.available)
        self.weights = selection.weights
        asking_seconds = _seconds_of_exchanges(context)

        # 3. Train
        timer.enter("train")
        # Some selectors collect updates before they select. Those of the others arrive only now.
        is_new = ~clients.server_has(selection.ids)
        cohort = clients.receive(selection.ids) if len(selection.ids) else None

        # 4. Find out which updates arrive
        timer.enter("aggregate")
        arrivals = Arrivals(late=selection.ids)
        if cohort is not None:
            arrivals = self._arrivals(context, cohort, selection.weights, is_new, asking_seconds)

        # 5. Aggregate. A private aggregator adds its noise even if no update arrives.
        params = self.params
        is_private = components.aggregator.is_private
        if arrivals.cohort is not None or (is_private and len(context.available)):
            params = self._aggregate(context, selection.ids, arrivals)

        # 6. Let the selector observe the updates and the new model
        if arrivals.cohort is not None:
            timer.enter("select")
            seconds_before = _seconds_of_exchanges(context)
            self._observe(context, arrivals.cohort, params)
            asking_seconds += _seconds_of_exchanges(context) - seconds_before

        self.params = params
        self.round = t
        self.observed = arrivals.cohort is not None
        self.started |= len(context.available) > 0
        self.covered[selection.ids] = True

        # 7. Evaluate
        timer.enter("evaluate")
        evaluation = None
        client_accuracies = None
        if t % components.eval_every == 0 or t == components.population.num_rounds:
            evaluation, client_accuracies = self.measure()

        # 8. Record
        return self._record(
            context, selection, asking_seconds, arrivals, evaluation, client_accuracies
        )

    def _context(self, t: int) -> RoundContext:
        """Find out which clients are available in round `t`, and return the round's context.

        Available are clients that the availability model and the simulated devices let be reached,
        and that have training samples.
        """
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
            lends_copies=is_users(components.selector),
        )

    def _select(self, t: int, clients: Clients, available: Ids) -> Selection:
        """Return the selector's selection after checking it. Raises `SelectionError`.

        Without available clients the selector is not called, and the selection is empty.
        """
        if not len(available):
            return Selection(available)
        selector = self.components.selector
        # The selector might modify `clients.available`, which is the same array.
        available = available.copy()
        rng = self.components.streams.generator(Purpose.SELECT, t)
        with no_global_draws(selector, t, "select"):
            selection = selector.select(t, clients, rng)
        expected_size = None if selector.adaptive else selector.cohort_size(clients)
        fault = selection_fault(selection, available, expected_size)
        raise_fault(SelectionError, selector, t, fault)
        return replace(selection, ids=selection.ids.copy())  # the selector may keep and modify its

    def _arrivals(
        self,
        context: RoundContext,
        cohort: Cohort,
        weights: Weights,
        is_new: Bools,
        asking_seconds: float,
    ) -> Arrivals:
        """Return the updates of the `cohort` that arrive in time and are finite.

        The server requests them `asking_seconds` after the start of the round. `is_new` [K] says
        whose update it did not have before. A client without a new update cannot be lost. Without
        a simulated clock all updates arrive in time, except those of clients that are lost.
        """
        components = self.components
        parts_done = parts_before_loss(
            components.streams, components.drop_out, context.round, cohort.ids
        )
        parts_done[~is_new] = np.inf
        is_lost = np.isfinite(parts_done)  # infinity: the client does all of its work
        arrived = ~is_lost
        seconds = 0.0
        clock = components.simulated_clock
        if clock is not None and context.round_clock is not None:
            assert cohort.durations is not None
            # `minimum`: infinity times a duration of 0 would be nan
            seconds_until_loss = cohort.durations * np.minimum(parts_done, 1)
            lost_after = np.where(is_lost, seconds_until_loss, np.inf)
            arrived, seconds = context.round_clock.wait_for_updates(
                cohort.ids, cohort.durations, asking_seconds, clock.num_counted, lost_after
            )
        late = cohort.ids[~arrived]
        if len(late):
            # `receive` has noted all as uploaded. Late updates are not, unless the server had them.
            context.ledger.uploaded.difference_update(cohort.ids[~arrived & is_new].tolist())
            if not arrived.any():
                return Arrivals(late, seconds=seconds)
            cohort, weights = keep_rows(cohort, weights, arrived)
        train_loss = mean_loss(cohort)
        try:
            finite, weights, num_dropped = drop_nonfinite(cohort, weights)
        except DivergedError:
            if not components.aggregator.is_private:
                raise
            # a private run continues: its end would disclose something about a client
            return Arrivals(
                late, seconds=seconds, num_dropped=len(cohort.ids), train_loss=train_loss
            )
        return Arrivals(late, finite, weights, seconds, num_dropped, train_loss)

    def _aggregate(self, context: RoundContext, selected: Ids, arrivals: Arrivals) -> Params:
        """Return the next global model after checking it. Raises `AggregationError` and
        `DivergedError`.

        The local algorithm first combines the updates. The aggregator gets a copy of the present
        model, which it may modify, and must not modify the updates.
        """
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
        # copies all tensors in one launch on a GPU, where `clone` would need one for each
        torch._foreach_copy_(list(start.values()), list(self.params.values()))
        params = aggregator.aggregate(
            start, replace(cohort.with_own_arrays(), start=start), arrivals.weights
        )
        check_model(aggregator, t, params, self.params, guarded.modified)
        # in the order of the present model, whatever order the aggregator returned
        return {name: params[name] for name in self.params}

    def _combine(self, context: RoundContext, cohort: Cohort, weights: Weights) -> Cohort:
        """Return the updates that the local algorithm makes for the aggregator.

        It gets functions and not their results, because these take time or a pass
        over the data, and most algorithms need none of them (see `LocalTraining`).
        """
        engine = self.components.engine
        aggregator = self.components.aggregator
        sizes = self.components.population.sizes
        sizes = sizes[sizes > 0]  # clients without samples are in no objective

        def gradients() -> Tensor:
            with context.timer("train"):
                positions = [engine.data.train[i] for i in cohort.ids]
                computed = engine.client_gradients(self.params, positions)
                sent = [
                    context.behaviour.sent_gradient(gradient, context.round, int(client))
                    for client, gradient in zip(cohort.ids, computed, strict=True)
                ]
                return torch.stack(sent)

        def raw_weights() -> Floats:
            # The selector's weights take precedence over the aggregator's.
            return aggregator.weights(cohort) if weights is None else weights

        def scales() -> Floats:
            if aggregator.weighting == "uniform":
                return np.ones(len(cohort.ids))
            return cohort.sizes / sizes.mean()  # the size relative to the mean size

        training = LocalTraining(
            lr=context.lr,
            optimizer=engine.workload.optimizer,
            num_clients=len(sizes),
            scales=scales,
            weights=lambda: aggregator.averaging_weights(cohort, raw_weights()),
            total_weight=lambda: float(raw_weights().sum()),
            gradients=gradients,
        )
        return self.components.local_algorithm.combine(cohort.with_own_arrays(), training)

    def _observe(self, context: RoundContext, cohort: Cohort, params: Params) -> None:
        """Call the selector's `observe` with the updates as they were sent and the new model.

        It sees updates and training losses only if it declares them.
        """
        components = self.components
        selector = components.selector
        server = Server(components.engine, components.server_data, context, params)
        with no_global_draws(selector, context.round, "observe"):
            selector.observe(context.round, context.visible(cohort), server)

    def measure(self) -> tuple[Evaluation, Floats | None]:
        """Return the evaluation of the global model on the test set, and its accuracy on each
        client [N]; None if the run does not measure that."""
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
        """Return the evaluation of the global model on the test set."""
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
        ledger.is_closed = True
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
            learning_rate=context.lr,
        )
        if components.simulated_clock is not None:
            round_seconds = asking_seconds + arrivals.seconds
            # a round in which nobody can be reached would take no time, and the clock would stop
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
        elif components.drop_out:
            record = replace(record, late=arrivals.late.tolist())
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
        """Return everything that persists between rounds, for a checkpoint.

        Random streams are functions of the seed and the round, so no generator is in it.
        """
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


def _seconds_of_exchanges(context: RoundContext) -> float:
    """Return the simulated seconds that the answered exchanges of a round have taken so far; 0
    without a simulated clock."""
    return 0.0 if context.round_clock is None else context.round_clock.elapsed
