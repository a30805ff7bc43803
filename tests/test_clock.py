"""Rounds of three clients on the simulated clock, worked out by hand.

The toy model has 8 bytes; clients hold 1, 2 and 3 samples and train on them twice. Their devices
are `clocks.THREE`:

    seconds of client          0                 1                2
    exchange                   1                 1                1
    model down                 8 / 8 = 1         8 / 4 = 2        8 / 2 = 4
    forward on its samples     1 x 0.5 = 0.5     2 x 1 = 2        3 x 2 = 6
    training                   2 x 3 x 0.5 = 3   4 x 3 x 1 = 12   6 x 3 x 2 = 36
    a number up                4 / 4 = 1         4 / 2 = 2        4 / 1 = 4
    update up                  8 / 4 = 2         8 / 2 = 4        8 / 1 = 8
    all of a plain round       7                 19               49
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedsim.clients.clients import Clients
from fedsim.clients.context import Signal
from fedsim.clients.server import Server
from fedsim.core.arrays import Bools, Floats
from fedsim.core.errors import FedsimError
from fedsim.core.record import Record
from fedsim.core.rng import Purpose, Streams
from fedsim.core.types import Cohort, Selection
from fedsim.rounds.availability import Availability
from fedsim.rounds.loop import Simulation
from fedsim.selectors.base import Selector
from tests.clocks import fixed_clock
from tests.toys import ToyEngine, toy_clients, toy_components, toy_params, toy_population

SIZES = [1, 2, 3]
QUESTIONS = frozenset(Signal) - {Signal.TRAINING_LOSS, Signal.SQUARED_LOSS}
"""All signals but those that come with updates."""
ALL = np.arange(3)
Ask = Callable[[Clients], object]


class Asking(Selector):
    """A selector that first calls `ask` with the clients, and then selects the available of the
    `chosen`."""

    needs = QUESTIONS
    adaptive = True

    def __init__(self, chosen: list[int], ask: Ask | None = None) -> None:
        super().__init__(toy_population(SIZES, 3, 3))
        self.chosen = np.array(chosen, np.int64)
        self.ask = ask
        self.weights: Floats | None = None
        self.observed: list[Cohort] = []

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        if self.ask is not None:
            self.ask(clients)
        return Selection(np.intersect1d(self.chosen, clients.available), self.weights)

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        self.observed.append(cohort)


def simulate(selector: Asking, **rules: Any) -> Simulation:
    components = toy_components(
        ToyEngine(SIZES),
        selector.population,
        selector,
        simulated_clock=fixed_clock(**rules),
        num_public=3,
    )
    return Simulation(components, toy_params())


def first(selector: Asking, **rules: Any) -> Record:
    return simulate(selector, **rules).step()


def assert_seconds(record: Record, *, ask: float, train: float) -> None:
    assert record.simulated_seconds_ask == pytest.approx(ask)
    assert record.simulated_seconds_train == pytest.approx(train)
    assert record.simulated_seconds == pytest.approx(ask + train)


@pytest.mark.parametrize(("chosen", "seconds"), [([0, 1, 2], 49), ([0, 1], 19)])
def test_a_plain_round_lasts_as_long_as_its_slowest_client(
    chosen: list[int], seconds: float
) -> None:
    selector = Asking(chosen)
    record = first(selector)
    assert_seconds(record, ask=0, train=seconds)
    assert record.late == []
    assert selector.observed[0].durations == pytest.approx([7, 19, 49][: len(chosen)])


def test_the_model_that_a_question_has_brought_is_not_downloaded_again() -> None:
    """Client 2 reports its loss after 1 + 4 + 6 + 4 s. Then clients 0 and 1 train: 1 + 3 + 2 and
    1 + 12 + 4."""
    selector = Asking([0, 1], lambda clients: clients.losses(ALL))
    assert_seconds(first(selector), ask=15, train=17)
    assert selector.observed[0].durations == pytest.approx([6, 17])


def test_the_server_does_not_wait_for_clients_that_have_sent_their_updates() -> None:
    selector = Asking([0, 1], lambda clients: clients.updates(ALL))
    assert_seconds(first(selector), ask=49, train=0)
    assert selector.observed[0].durations == pytest.approx([0, 0])


def test_each_question_waits_for_the_answers_to_the_one_before() -> None:
    """Losses of 0 and 1 take 7 s, that of 2 takes 15 s, and label counts (3 numbers) 1 + 12 s."""

    def ask(clients: Clients) -> None:
        clients.losses(ALL[:2])
        clients.losses(ALL)
        clients.label_counts(ALL)

    assert_seconds(first(Asking([0], ask)), ask=7 + 15 + 13, train=1 + 3 + 2)


GRADIENT = 3 * 3 * 2
"""Seconds of a training pass of client 2, the slowest in all questions, over its three samples."""
SECONDS = {
    "gradients": (lambda c: list(c.gradients(ALL)), 1 + 4 + GRADIENT + 8),
    "norms": (lambda c: c.gradient_norms(ALL), 1 + 4 + GRADIENT + 4),
    "spreads": (lambda c: c.gradient_spreads(ALL), 1 + 4 + GRADIENT + 4),
    "update norms": (lambda c: c.update_norms(ALL), 1 + 4 + 36 + 4),
    "updates": (lambda c: c.updates(ALL), 1 + 4 + 36 + 8),
    "late gradients": (
        lambda c: list(c.gradients_after_training(ALL)),
        1 + 4 + 36 + GRADIENT + 8,
    ),
    "public labels": (  # 3 samples, and 3 classes for each
        lambda c: list(c.public_labels(ALL)),
        1 + 4 + 36 + 3 * 2 + 3 * 3 * 4,
    ),
    "momentum": (lambda c: c.momentum_buffers(ALL[2:]), 1 + 4 + 36 + 8),
    "numbers": (lambda c: c.send_numbers(ALL, 5), 1 + 5 * 4),
    "batch losses": (lambda c: c.batch_losses(ALL), 1 + 4 + 6 + 4),
    "accuracies": (lambda c: c.accuracies(ALL), 1 + 4 + 6 + 4),
    "resources": (lambda c: c.resources(ALL), 1 + 3 * 4),
    "response times": (lambda c: c.response_times(ALL), 1 + 4 + 36 + 4),
    "virtual round": (lambda c: c.broadcast(c.params).losses(ALL), 1 + 4 + 6 + 4),
}


@pytest.mark.parametrize("question", SECONDS)
def test_every_question_takes_time(question: str) -> None:
    ask, seconds = SECONDS[question]
    assert first(Asking([0], ask)).simulated_seconds_ask == pytest.approx(seconds)


def test_a_question_after_the_aggregation_takes_time() -> None:
    """Clients 0 and 1 train. Then the selector asks client 2 for its loss, as above."""

    class AskingLater(Asking):
        def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
            self.clients = clients
            return super().select(round, clients, rng)

        def observe(self, round: int, cohort: Cohort, server: Server) -> None:
            self.clients.losses(ALL[2:])

    simulation = simulate(AskingLater([0, 1]))
    assert_seconds(simulation.step(), ask=15, train=19)
    assert simulation.simulated_time == 34


def test_training_that_nobody_reports_delays_the_next_answer() -> None:
    """The answer of client 2 takes 4 s for the download and 36 s for training in addition. Client 0
    is never asked for an answer."""

    def ask(clients: Clients) -> None:
        clients.train(ALL[[0, 2]])
        clients.send_numbers(ALL[2:], 1)

    assert_seconds(first(Asking([1], ask)), ask=4 + 36 + 1 + 4, train=19)


OVER = {"over_selection": 1.5, "num_counted": 2}
ARRIVALS: list[tuple[list[int], dict[str, Any], float, list[int]]] = [
    ([0, 1], {"deadline": 20.0}, 19, []),  # all meet the deadline, so it is not waited for
    ([0, 1], {"deadline": 19.0}, 19, []),
    ([1, 2], {"deadline": 10.0}, 10, [1, 2]),
    ([0, 1, 2], OVER, 19, [2]),  # the first two count
    ([0, 1, 2], {**OVER, "deadline": 20.0}, 19, [2]),
    ([0, 1, 2], {**OVER, "deadline": 10.0}, 10, [1, 2]),  # only one arrives
    ([0, 1, 2], {"num_counted": 2}, 49, []),  # without over-selection all are waited for
]


@pytest.mark.parametrize(("chosen", "rules", "seconds", "late"), ARRIVALS)
def test_who_arrives_in_time(
    chosen: list[int], rules: dict[str, Any], seconds: float, late: list[int]
) -> None:
    record = first(Asking(chosen), **rules)
    assert_seconds(record, ask=0, train=seconds)
    assert record.late == late
    assert record.uploaded == len(chosen) - len(late)


def test_if_nobody_arrives_the_model_stays_and_nothing_is_observed() -> None:
    selector = Asking([1, 2])
    run = simulate(selector, deadline=10.0)
    assert run.step().train_loss is None
    assert run.params["w"].tolist() == [0, 0]
    assert selector.observed == []


def test_a_late_update_is_charged_but_not_used() -> None:
    selector = Asking([0, 1, 2])
    run = simulate(selector, deadline=20.0)
    record = run.step()
    assert_seconds(record, ask=0, train=20)
    assert (record.late, record.selected) == ([2], [0, 1, 2])
    assert selector.observed[0].ids.tolist() == [0, 1]
    assert run.params["w"].tolist() == [0.25, -0.25]  # the mean of (0, 0) and (1/2, -1/2)
    assert record.train_loss == (0 + 1) / 2
    assert (record.bytes_up, record.bytes_down, record.train_samples) == (24, 24, 12)
    assert (record.contacted, record.trained, record.uploaded) == (3, 3, 2)


def test_the_weights_of_updates_in_time_keep_their_sum() -> None:
    """0.1 and 0.3 are scaled to 0.25 and 0.75; client 0 does not move the model."""
    selector = Asking([0, 1, 2])
    selector.weights = np.array([0.1, 0.3, 0.6])
    run = simulate(selector, deadline=20.0)
    run.step()
    assert run.params["w"].tolist() == pytest.approx([0.75 * 0.5, -0.75 * 0.5])


def first_of_equals(t: int, ids: list[int], num_counted: int) -> list[int]:
    """Return who arrives first of clients that take equally long in round `t`."""
    clock = fixed_clock(over_selection=1.5).round(t, 0.0)
    seconds = np.full(len(ids), 5.0)
    arrived, _ = clock.wait_for_updates(np.array(ids), seconds, 0.0, num_counted)
    return np.array(ids)[arrived].tolist()


def test_who_is_first_of_clients_that_take_equally_long_changes_with_the_round() -> None:
    """Each is among the first two in 40 of 60 rounds, with a standard deviation of 3.7."""
    times_first = np.zeros(3)
    for t in range(60):
        arrived = first_of_equals(t, [0, 1, 2], 2)
        assert len(arrived) == 2
        times_first[arrived] += 1
    assert times_first.min() > 25
    assert times_first.max() < 55


def test_who_is_first_does_not_depend_on_who_else_is_selected() -> None:
    for t in range(60):
        (best,) = first_of_equals(t, [0, 1, 2], 1)
        for other in {0, 1, 2} - {best}:
            assert first_of_equals(t, sorted([best, other]), 1) == [best]


def test_updates_that_the_server_had_before_it_asked_stay_uploaded() -> None:
    record = first(Asking([0, 1, 2], lambda clients: clients.collect(ALL)), **OVER)
    assert record.late is not None
    assert (len(record.late), record.uploaded, record.bytes_up) == (1, 3, 24)


def test_time_adds_up_and_a_round_without_clients_takes_idle_seconds() -> None:
    """Round 1 is idle: client 0 can be reached from 5 s on, client 1 from 66 s on. Round 2 begins
    at 60 s, and round 3 at 67 s."""
    presence = (100, [[[5, 100]], [[66, 100]], [[67, 99]]])
    records = list(simulate(Asking([0, 1]), presence=presence))
    assert [record.selected for record in records] == [[], [0], [0, 1]]
    assert [record.simulated_seconds for record in records] == [60, 7, 19]
    assert [record.simulated_time for record in records] == [60, 67, 86]
    assert records[0].late == []


UNTIL_12 = (100, [[[0, 100]], [[0, 12]], [[0, 100]]])
"""Client 1 leaves after 12 s."""


def test_the_update_of_a_client_that_leaves_is_lost_and_the_server_continues() -> None:
    """Client 0 arrives after 7 s; client 1 would need 19 s."""
    record = first(Asking([0, 1]), presence=UNTIL_12)
    assert_seconds(record, ask=0, train=12)
    assert record.late == [1]


def test_a_client_that_has_left_during_a_question_is_not_waited_for() -> None:
    record = first(Asking([1], lambda clients: clients.losses(ALL)), presence=UNTIL_12)
    assert_seconds(record, ask=15, train=0)
    assert record.late == [1]


REMAINING = [
    (13, [7 + 8, np.inf, 7]),  # client 0 stays over the end of the period
    (48, [0, np.inf, 12]),  # 8 s into the third period
    (2, [6, np.inf, 0]),
]


@pytest.mark.parametrize(("now", "remaining"), REMAINING)
def test_presence_repeats_after_its_period(now: float, remaining: list[float]) -> None:
    presence = (20, [[[0, 8], [12, 20]], [[0, 20]], [[3, 20]]])
    devices = fixed_clock(presence=presence).devices
    assert devices.presence is not None
    assert devices.presence.remaining(now).tolist() == remaining


@pytest.mark.parametrize("start", [0.0, 1e4, 1e7, 1e9, 1e12])
@pytest.mark.parametrize(
    ("interval", "period"), [([0, 30.3], 86.4), ([0.1, 0.7], 1.1), ([5, 86.4], 86.4)]
)
def test_a_client_has_left_at_the_end_of_its_interval_however_it_is_rounded(
    interval: list[float], period: float, start: float
) -> None:
    """The server waits until the client leaves, as in a round in which its update is late."""
    clock = fixed_clock(1, presence=(period, [[interval]]))
    presence = clock.devices.presence
    assert presence is not None
    rng = np.random.default_rng(0)
    middle = sum(interval) / 2
    for _ in range(500):
        begin = start + period * int(rng.integers(1000)) + middle * rng.random()
        end = begin + float(presence.remaining(begin)[0])
        assert clock.present(end) == [False]


def test_the_clock_does_not_stop_if_all_clients_leave() -> None:
    """Every training takes 301 s, so that the client leaves before. Its interval and the idle
    rounds last 30.3 s and 60 s, and the sum of many rounds is rounded."""
    slow = {"forward": [100.0], "down": [1.0], "up": [1.0]}
    run = simulate(Asking([0]), presence=(86.4, [[[0, 30.3]]] * 3), devices=slow)
    records = [run.step() for _ in range(200)]
    for record in records:
        assert record.simulated_seconds is not None
        assert record.simulated_seconds > 1e-6
    assert sum(len(record.selected) for record in records) > 50


class WithoutClient0(Availability):
    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> Bools:
        return np.arange(num_clients) > 0


def test_a_client_must_be_both_available_and_present() -> None:
    run = simulate(Asking([0, 1, 2]), presence=(100, [[[0, 100]], [[0, 100]], [[50, 100]]]))
    run.components = replace(run.components, availability=WithoutClient0())
    assert run.step().selected == [1]


def test_variation_is_a_factor_of_round_and_client_on_everything_but_latency() -> None:
    """Without variation, clients 0 and 1 take 1 + 6 and 1 + 18 s."""
    records = list(simulate(Asking([0, 1]), variation=0.5))
    for record in records:
        seconds = []
        for client, work in ((0, 6), (1, 18)):
            rng = Streams(0).generator(Purpose.DEVICE_VARIATION, record.round, client)
            seconds.append(1 + np.exp(0.5 * rng.standard_normal()) * work)
        assert record.simulated_seconds == pytest.approx(max(seconds))
    assert records[0].simulated_seconds != records[1].simulated_seconds


def test_resources_are_seconds_of_each_client() -> None:
    clients = toy_clients(SIZES, QUESTIONS, round_clock=fixed_clock().round(1, 0.0))
    resources = clients.resources(ALL)
    assert resources.download.tolist() == [1 + 1, 1 + 2, 1 + 4]
    assert resources.training.tolist() == [3, 12, 36]
    assert resources.upload.tolist() == [2, 4, 8]


def test_response_times_are_seconds_until_each_client_has_trained_and_answered() -> None:
    clients = toy_clients(SIZES, QUESTIONS, round_clock=fixed_clock().round(1, 0.0))
    times = clients.response_times(ALL)
    assert times.tolist() == [1 + 1 + 3 + 1, 1 + 2 + 12 + 2, 1 + 4 + 36 + 4]
    assert clients.response_times(ALL).tolist() == [1 + 1, 1 + 2, 1 + 4]  # only the answer


@pytest.mark.parametrize("question", [Clients.resources, Clients.response_times])
def test_questions_about_time_need_a_simulated_clock(question: Callable[..., Any]) -> None:
    with pytest.raises(FedsimError, match="system=lognormal"):
        question(toy_clients(SIZES, QUESTIONS), ALL)
