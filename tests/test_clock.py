"""Rounds of three clients on the simulated clock, worked out by hand.

The toy model has 8 bytes; clients hold 1, 2 and 3 samples and train on them twice. Their devices
are `clocks.THREE`:

    seconds of client          0                 1                2
    exchange                   1                 1                1
    model down                 8 / 8 = 1         8 / 4 = 2        8 / 2 = 4
    forward on own samples     1 x .5 = .5       2 x 1 = 2        3 x 2 = 6
    training                   2 x 3 x .5 = 3    4 x 3 x 1 = 12   6 x 3 x 2 = 36
    a number up                4 / 4 = 1         4 / 2 = 2        4 / 1 = 4
    update up                  8 / 4 = 2         8 / 2 = 4        8 / 1 = 8
    all of a plain round       7                 19               49
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedsim.clients.clients import Clients
from fedsim.clients.context import Signal
from fedsim.clients.server import Server
from fedsim.core.errors import FedsimError
from fedsim.core.record import Record
from fedsim.core.rng import Purpose
from fedsim.core.types import Cohort, Ids, Selection
from fedsim.rounds.loop import Simulation
from fedsim.selectors.base import Selector
from tests.clocks import fixed_clock
from tests.toys import ToyEngine, toy_clients, toy_components, toy_params, toy_population

SIZES = [1, 2, 3]
QUESTIONS = frozenset(Signal) - {
    Signal.TRAINING_LOSS,
    Signal.SQUARED_LOSS,
}  # these two come with updates
ALL = np.arange(3)


class Asking(Selector):
    """Asks what it is told to, then selects what it is told to."""

    needs = QUESTIONS
    adaptive = True

    def __init__(self, chosen: list[int], ask: Callable[[Clients], object] | None = None) -> None:
        super().__init__(toy_population(SIZES, 3, 3))
        self.chosen, self.ask = np.array(chosen, np.int64), ask
        self.weights: np.ndarray | None = None
        self.observed: list[Cohort] = []

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        if self.ask is not None:
            self.ask(clients)
        ids: Ids = np.intersect1d(self.chosen, clients.available)
        return Selection(ids, self.weights)

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        self.observed.append(cohort)


def simulate(selector: Asking, **rules: Any) -> Simulation:
    engine = ToyEngine(SIZES)
    clock = fixed_clock(**rules)
    parts = toy_components(
        engine, selector.population, selector, simulated_clock=clock, num_public=3
    )
    return Simulation(parts, toy_params())


def first(selector: Asking, **rules: Any) -> Record:
    return simulate(selector, **rules).step()


def times(record: Record) -> tuple[float | None, float | None, float | None]:
    return record.simulated_seconds_ask, record.simulated_seconds_train, record.simulated_seconds


def test_a_plain_round_lasts_as_long_as_its_slowest_client() -> None:
    selector = Asking([0, 1, 2])
    record = first(selector)
    assert times(record) == (0, 49, 49)
    assert record.late == []
    assert selector.observed[0].durations == pytest.approx([7, 19, 49])
    assert times(first(Asking([0, 1]))) == (0, 19, 19)
    # losses: 1 + 1 + .5 + 1, 1 + 2 + 2 + 2, 1 + 4 + 6 + 4; then clients 0 and 1 train: 1 + 3 + 2, 1
    # + 12 + 4
    selector = Asking([0, 1], lambda clients: clients.losses(ALL))
    assert times(first(selector)) == (15, 17, 32)
    assert selector.observed[0].durations == pytest.approx([6, 17])
    selector = Asking(
        [0, 1], lambda clients: clients.updates(ALL)
    )  # who has sent everything is not waited for
    assert times(first(selector)) == (49, 0, 49)
    assert selector.observed[0].durations == pytest.approx([0, 0])


def test_each_question_waits_for_the_answers_to_the_one_before() -> None:
    """Losses of 0 and 1: 7 s; of 2: 15 s; label counts, 3 numbers each: 1 + 3, 1 + 6, 1 + 12."""

    def ask(clients: Clients) -> None:
        clients.losses(ALL[:2])
        clients.losses(ALL)
        clients.label_counts(ALL)

    assert times(first(Asking([0], ask))) == (7 + 15 + 13, 1 + 3 + 2, 35 + 6)


@pytest.mark.parametrize(
    ("ask", "seconds"),
    [
        (
            lambda c: list(c.gradients(ALL)),
            1 + 4 + 3 * 3 * 2 + 8,
        ),  # of client 2, the slowest throughout
        (lambda c: c.gradient_norms(ALL), 1 + 4 + 3 * 3 * 2 + 4),
        (lambda c: c.gradient_spreads(ALL), 1 + 4 + 3 * 3 * 2 + 4),
        (lambda c: c.update_norms(ALL), 1 + 4 + 36 + 4),
        (lambda c: c.updates(ALL), 1 + 4 + 36 + 8),
        (lambda c: list(c.gradients_after_training(ALL)), 1 + 4 + 36 + 3 * 3 * 2 + 8),
        (
            lambda c: list(c.public_labels(ALL)),
            1 + 4 + 36 + 3 * 2 + 3 * 3 * 4,
        ),  # 3 samples, 3 classes
        (lambda c: c.momentum_buffers(ALL[2:]), 1 + 4 + 36 + 8),
        (lambda c: c.send_numbers(ALL, 5), 1 + 20),
        (lambda c: c.batch_losses(ALL), 1 + 4 + 6 + 4),
        (lambda c: c.accuracies(ALL), 1 + 4 + 6 + 4),
        (lambda c: c.resources(ALL), 1 + 12),
        (lambda c: c.response_times(ALL), 1 + 4 + 36 + 4),
        (lambda c: c.broadcast(c.params).losses(ALL), 1 + 4 + 6 + 4),
    ],
)
def test_every_question_takes_time(ask: Callable[[Clients], object], seconds: float) -> None:
    assert first(Asking([0], ask)).simulated_seconds_ask == pytest.approx(seconds)


def test_training_that_nobody_reports_delays_the_next_answer() -> None:
    """4 of the download and 36 of training go into the answer of client 2; client 0 is never asked
    for one."""

    def ask(clients: Clients) -> None:
        clients.train(ALL[[0, 2]])
        clients.send_numbers(ALL[2:], 1)

    record = first(Asking([1], ask))
    assert times(record) == (4 + 36 + 1 + 4, 19, 45 + 19)


@pytest.mark.parametrize(
    ("chosen", "rules", "seconds", "late"),
    [
        ([0, 1], {"deadline": 20.0}, 19, []),  # a deadline that all meet is not waited for
        ([0, 1], {"deadline": 19.0}, 19, []),
        ([1, 2], {"deadline": 10.0}, 10, [1, 2]),
        ([0, 1, 2], {"over_selection": 1.5, "wanted": 2}, 19, [2]),  # the first count
        (
            [0, 1, 2],
            {"over_selection": 1.5, "wanted": 2, "deadline": 20.0},
            19,
            [2],
        ),  # just as many arrive
        ([0, 1, 2], {"over_selection": 1.5, "wanted": 2, "deadline": 10.0}, 10, [1, 2]),
        ([0, 1, 2], {"wanted": 2}, 49, []),  # without over-selection all are waited for
    ],
)
def test_who_arrives_in_time(
    chosen: list[int], rules: dict[str, Any], seconds: float, late: list[int]
) -> None:
    selector = Asking(chosen)
    run = simulate(selector, **rules)
    record = run.step()
    assert (times(record), record.late, record.uploaded) == (
        (0, seconds, seconds),
        late,
        len(chosen) - len(late),
    )
    if late == chosen:  # the model stays and nothing is observed
        assert (record.train_loss, run.params["w"].tolist(), selector.observed) == (
            None,
            [0, 0],
            [],
        )


def test_a_deadline_drops_the_late_who_are_charged() -> None:
    selector = Asking([0, 1, 2])
    run = simulate(selector, deadline=20.0)
    record = run.step()
    assert times(record) == (0, 20, 20)
    assert (record.late, record.selected) == ([2], [0, 1, 2])
    assert selector.observed[0].ids.tolist() == [0, 1]
    assert run.params["w"].tolist() == [0.25, -0.25]  # the mean of (0, 0) and (1 / 2, - 1 / 2)
    assert (record.bytes_up, record.bytes_down, record.train_samples) == (24, 24, 12)
    assert (record.contacted, record.trained, record.uploaded) == (3, 3, 2)
    assert record.train_loss == 0.5  # of clients 0 and 1; of all three it is 1
    selector.weights = np.array([0.1, 0.3, 0.6])  # those of who arrives keep their sum: .25 and .75
    run = simulate(selector, deadline=20.0)
    run.step()
    assert run.params["w"].tolist() == pytest.approx([0.75 * 0.5, -0.75 * 0.5])


def test_who_is_first_of_clients_that_take_equally_long_is_drawn() -> None:
    """By round and client: not the same clients always, and not others because of who else is
    selected."""
    clock = fixed_clock(over_selection=1.5, wanted=2)

    def arrive(round: int, ids: Ids, wanted: int) -> list[int]:
        arrived, _ = clock.round(round, 0.0).wait_for_updates(
            ids, np.full(len(ids), 5.0), 0.0, wanted
        )
        return [int(i) for i in ids[arrived]]

    firsts = [arrive(t, ALL, 2) for t in range(1, 61)]
    assert {len(one) for one in firsts} == {2}
    assert all(25 < sum(i in one for one in firsts) < 55 for i in ALL)
    for t in range(1, 61):
        (best,) = arrive(t, ALL, 1)
        assert all(
            arrive(t, np.array(sorted({best, other})), 1) == [best]
            for other in (0, 1, 2)
            if other != best
        )


def test_updates_that_the_server_had_before_it_asked_stay_uploaded() -> None:
    record = first(Asking([0, 1, 2], lambda c: c.collect(ALL)), over_selection=1.5, wanted=2)
    assert record.late is not None
    assert (len(record.late), record.uploaded, record.bytes_up) == (1, 3, 24)


def test_time_adds_up_and_a_round_without_anybody_takes_its_own() -> None:
    """Client 0 is there from 5 s on: the first round is idle, the second finds it, the third (at 67
    s) finds all."""
    presence = (100, [[[5, 100]], [[66, 100]], [[67, 99]]])
    run = simulate(Asking([0, 1]), presence=presence)
    records = [run.step() for _ in range(3)]
    assert [r.selected for r in records] == [[], [0], [0, 1]]
    assert [r.simulated_seconds for r in records] == [60, 7, 19]
    assert [r.simulated_time for r in records] == [60, 67, 86]
    assert records[0].late == []


def test_a_client_that_leaves_before_it_has_finished_is_lost_when_it_leaves() -> None:
    """Client 1 needs 19 s and leaves after 12, when the server goes on; client 0 has arrived after
    7."""
    presence = (100, [[[0, 100]], [[0, 12]], [[0, 100]]])
    record = first(Asking([0, 1]), presence=presence)
    assert times(record) == (0, 12, 12)
    assert record.late == [1]
    asked = first(
        Asking([1], lambda clients: clients.losses(ALL)), presence=presence
    )  # 15 s, when 1 has left
    assert times(asked) == (15, 0, 15)
    assert asked.late == [1]


def test_presence_goes_on_over_the_end_of_its_period() -> None:
    presence = (20, [[[0, 8], [12, 20]], [[0, 20]], [[3, 20]]])
    devices = fixed_clock(presence=presence).devices
    assert devices.presence is not None
    assert devices.presence.remaining(13).tolist() == [7 + 8, np.inf, 7]
    assert devices.presence.remaining(48).tolist() == [0, np.inf, 12]  # at 8 of the third period
    assert devices.presence.remaining(2).tolist() == [6, np.inf, 0]


def test_availability_and_presence_are_both_needed() -> None:
    run = simulate(Asking([0, 1, 2]), presence=(100, [[[0, 100]], [[0, 100]], [[50, 100]]]))
    only = SimpleNamespace(available=lambda round, num_clients, rng: np.arange(num_clients) > 0)
    run.components = replace(run.components, availability=only)  # type: ignore[arg-type]
    assert run.step().selected == [1]


def test_variation_is_a_factor_of_round_and_client_on_all_but_latency() -> None:
    run = simulate(Asking([0, 1]), variation=0.5)
    one, two = run.step(), run.step()
    streams = fixed_clock()._streams
    factors = np.exp(
        [
            [
                0.5 * streams.generator(Purpose.DEVICE_VARIATION, t, i).standard_normal()
                for i in (0, 1)
            ]
            for t in (1, 2)
        ]
    )
    assert one.simulated_seconds == pytest.approx((1 + factors[0] * [6, 18]).max())
    assert two.simulated_seconds == pytest.approx((1 + factors[1] * [6, 18]).max())
    assert one.simulated_seconds != two.simulated_seconds


def test_resources_and_response_times_are_seconds_of_each_client() -> None:
    clients = toy_clients(SIZES, QUESTIONS, round_clock=fixed_clock().round(1, 0.0))
    found = clients.resources(ALL)
    assert found.download.tolist() == [1 + 1, 1 + 2, 1 + 4]
    assert found.training.tolist() == [3, 12, 36]
    assert found.upload.tolist() == [2, 4, 8]
    assert clients.response_times(ALL).tolist() == [1 + 1 + 3 + 1, 1 + 2 + 12 + 2, 1 + 4 + 36 + 4]
    assert clients.response_times(ALL).tolist() == [2, 3, 5]  # an exchange and a number
    for question in ("resources", "response_times"):
        with pytest.raises(FedsimError, match="system=lognormal"):
            getattr(toy_clients(SIZES, QUESTIONS), question)(ALL)
