"""Clients that are lost in a round (`local.drop_out`) or do only a part of their work
(`local.partial_rate`)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fedsim.clients.context import Signal
from fedsim.config.compose import search_path
from fedsim.core.errors import ConfigError
from fedsim.core.record import Record
from fedsim.core.rng import Purpose, Streams
from fedsim.engine.schedule import LocalWork
from fedsim.rounds.loop import Simulation
from fedsim.running.assembly import build
from tests.checkpoint_toys import through_a_file
from tests.test_plan import plan_of

WORDS = (
    "num_clients=12",
    "cohort_size=4",
    "num_rounds=5",
    "local.steps=4",
    "device=cpu",
    "model=logistic",
)
CLOCK = ("system=lognormal", "system.latency=0.5")


def simulation_of(*words: str) -> Simulation:
    with search_path():
        return build(plan_of(*WORDS, *words)).simulation


def lost(round: int, ids: Sequence[int], rate: float) -> list[int]:
    """Return the clients that are lost in a round, by the streams' definition."""
    draws = {i: Streams(0).generator(Purpose.LOST_CLIENTS, round, i).random() for i in ids}
    return [i for i, draw in draws.items() if draw < rate]


# --- clients that are lost -------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), CLOCK], ids=["no clock", "clock"])
@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_lost_clients_are_late_and_others_arrive(words: tuple[str, ...], rate: float) -> None:
    simulation = simulation_of(f"local.drop_out={rate}", *words)
    num_late = 0
    for record in simulation:
        assert record.late == lost(record.round, record.selected, rate)
        assert record.uploaded == 4 - len(record.late)
        assert record.trained == 4  # they were charged
        num_late += len(record.late)
    assert 0 < num_late < 20 or rate == 1


def test_all_selectors_lose_the_same_clients() -> None:
    """A client that two methods select in a round is lost in both or in none."""
    records = [
        list(simulation_of(f"selector={selector}", "local.drop_out=0.5"))
        for selector in ("random", "round_robin")
    ]
    num_common = 0
    for first, second in zip(*records, strict=True):
        common = set(first.selected) & set(second.selected)
        assert common & set(first.late or ()) == common & set(second.late or ())
        num_common += len(common)
    assert num_common


def test_a_round_without_updates_keeps_the_model() -> None:
    simulation = simulation_of("local.drop_out=1")
    before = {name: value.clone() for name, value in simulation.params.items()}
    simulation.step()
    assert all(before[name].equal(value) for name, value in simulation.params.items())


def test_an_update_that_the_server_has_is_not_lost() -> None:
    """PNCS asks all clients for their whole updates before it selects."""
    words = ("selector=pncs_each", "selector.grad=local_update", "local.drop_out=1")
    simulation = simulation_of(*words, "selector/sketch=identity", "selector.layers=null")
    assert Signal.TRAINING in simulation.components.selector.needs
    assert simulation.step().late == []


def test_a_lost_client_takes_a_part_of_its_time() -> None:
    """Without a deadline the server waits until the last client has answered or is lost."""
    full = simulation_of(*CLOCK).step()
    part = simulation_of(*CLOCK, "local.drop_out=1").step()
    assert full.simulated_seconds_train is not None
    assert part.simulated_seconds_train is not None
    assert 0 < part.simulated_seconds_train < full.simulated_seconds_train


def test_records_without_drop_out_have_no_late_clients() -> None:
    assert "late" not in simulation_of().step().as_dict()


# --- partial work ----------------------------------------------------------------------------------


def drawn(rate: float, round: int, *, once: bool = False, steps: int = 10) -> list[int]:
    work = LocalWork(None, steps, 4, rate, once)
    ids = np.arange(3000)
    return work.drawn_steps(np.full(3000, 8), Streams(5), round, ids).tolist()


def test_partial_work_has_the_steps_of_fedprox() -> None:
    """Half of the clients make max(1, U) steps, with U uniform in 0..9: one step twice as often."""
    steps = np.array(drawn(0.5, 1))
    counts = np.bincount(steps, minlength=11) / 3000
    expected = [0, 0.1, *[0.05] * 8, 0.5]
    four_deviations = 4 * np.sqrt(0.5 * 0.5 / 3000)
    np.testing.assert_allclose(counts, expected, atol=four_deviations)


def test_partial_work_is_drawn_by_round_or_once() -> None:
    assert drawn(0.5, 1) != drawn(0.5, 2)
    assert drawn(0.5, 1, once=True) == drawn(0.5, 2, once=True)
    assert drawn(1.0, 1, steps=1) == [1] * 3000
    assert drawn(0.0, 1) == [10] * 3000


def test_a_lower_rate_has_the_same_parts_for_fewer_clients() -> None:
    few = np.array(drawn(0.2, 3))
    many = np.array(drawn(0.6, 3))
    is_partial = few < 10
    assert (few[is_partial] == many[is_partial]).all()
    assert (few < 10).sum() < (many < 10).sum()


def test_work_does_not_shrink_over_rounds() -> None:
    """The draws of a round start from the full number of steps."""
    means = [np.mean(drawn(0.5, t)) for t in (1, 50)]
    assert means[1] == pytest.approx(means[0], abs=0.3)


def test_partial_work_is_charged_as_it_was_done() -> None:
    full = list(simulation_of())
    part = list(simulation_of("local.partial_rate=1"))
    for whole, partial in zip(full, part, strict=True):
        assert partial.selected == whole.selected
        assert 0 < partial.train_samples < whole.train_samples


MISTAKES = {
    ("local.drop_out=1.1",): r"local.drop_out=1.1.*must lie in \[0, 1\]",
    ("local.partial_rate=-1",): r"local.partial_rate=-1.*must lie in \[0, 1\]",
    ("local.partial_draw=client",): "needs a probability of partial work",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes(words: tuple[str, ...]) -> None:
    with search_path(), pytest.raises(ConfigError, match=MISTAKES[words]):
        plan_of(*words)


UNRELIABLE = (
    "availability=sine",
    "local.drop_out=0.4",
    "local.partial_rate=0.5",
    "local.partial_draw=client",
    "selector=oort",
)


def lines(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the records without measured times."""
    kept = []
    for record in records:
        values = record.as_dict().items()
        kept.append({key: value for key, value in values if "seconds" not in key})
    return kept


def test_a_run_resumes_with_the_same_draws() -> None:
    whole = list(simulation_of(*UNRELIABLE))
    first = simulation_of(*UNRELIABLE)
    start = [first.step(), first.step()]
    second = simulation_of(*UNRELIABLE)
    second.load_state_dict(through_a_file(first.state_dict()))
    assert lines([*start, *second]) == lines(whole)
