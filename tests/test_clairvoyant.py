import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

from fedsim.clients.ledger import Ledger
from fedsim.config.compose import compose_jobs, make_plan, search_path
from fedsim.core.errors import ConfigError
from fedsim.core.types import Cohort, Evaluation, Params
from fedsim.rounds.loop import Simulation
from fedsim.running.assembly import build
from fedsim.selectors.clairvoyant import Clairvoyant
from tests.toys import ToyEngine, picked, toy_population


class Near(ToyEngine):
    """The loss is the distance of the first number w from `target`, nan above `limit`. Client i
    sends (i - w) / 2, or nan if it is in `always`, or in `breaking` and w >= 1."""

    def __init__(
        self,
        target: float,
        sizes: list[int],
        always: Any = (),
        breaking: Any = (),
        limit: float = 9,
    ) -> None:
        super().__init__(sizes)
        self.target, self.always, self.breaking, self.limit = target, always, breaking, limit

    def train(self, params: Params, *more: Any, **named: Any) -> Cohort:
        self.broken = {*self.always, *(self.breaking if params["w"][0] >= 1 else ())}
        return super().train(params, *more, **named)

    def evaluate(self, params: Params, *more: Any) -> Evaluation:
        w = float(params["w"][0])
        return Evaluation(accuracy=0.0, loss=abs(w - self.target) if w <= self.limit else np.nan)


def clairvoyant(sizes: list[int], cohort_size: int, **more: Any) -> Clairvoyant:
    values = {
        "max_cohorts": 300,
        "cohorts": 1,
        "candidates": 1,
        "swaps": 0,
        "horizon": 1,
        "average": "uniform",
    }
    return Clairvoyant(toy_population(sizes, cohort_size), **(values | more))


def test_by_hand() -> None:
    """Averages of pairs of 0..3 are (i + j) / 4: 3 / 4 of both {0, 3} and {1, 2}. Growing begins at
    i / 4, with 3."""
    engine = Near(0.75, [1] * 4)
    found = {tuple(picked(clairvoyant([1] * 4, 2), seed=seed, engine=engine)) for seed in range(20)}
    assert found == {(0, 3), (1, 2)}
    grown = [
        picked(clairvoyant([1] * 4, 2, max_cohorts=1, candidates=4), seed=s, engine=engine)
        for s in range(20)
    ]
    assert grown.count([0, 3]) > 15  # else the random cohort was as good
    sizes = [
        2,
        1,
        1,
        4,
    ]  # by size {0, 3} gives 4 x 1.5 / 6 = 1, {2, 3} 7 / 5, {1, 2} .75; uniformly {1, 3} gives 1
    assert picked(clairvoyant(sizes, 2, average="by_size"), engine=Near(1.0, sizes)) == [0, 3]
    assert picked(clairvoyant(sizes, 2), engine=Near(1.0, sizes)) == [1, 3]


def test_two_rounds_ahead_by_hand_and_what_they_cost() -> None:
    """At i / 2 and then i / 4 + j / 2, 1 twice is .3 and .05 from .8; 2 is .2 from it, and then no
    nearer than .2."""
    sizes, ledger = [1, 2, 3, 4], Ledger()
    choose = partial(picked, engine=Near(0.8, sizes))
    assert choose(clairvoyant(sizes, 1)) == [2]
    assert choose(clairvoyant(sizes, 1, horizon=2), round=10) == [2]  # the last round
    assert choose(clairvoyant(sizes, 1, horizon=2), ledger=ledger) == [1]
    assert (
        ledger.bytes_down == ledger.bytes_up == 8 * 4 * (1 + 4)
    )  # all, in this round and in one after each
    assert (ledger.train_samples, ledger.server_forward_samples) == (2 * 10 * (1 + 4), 4 + 16)
    choose(clairvoyant(sizes, 1, horizon=3), ledger=(ledger := Ledger()))
    assert (ledger.train_samples, ledger.server_forward_samples) == (
        2 * 10 * (1 + 4 + 16),
        4 + 16 + 64,
    )


def test_updates_that_would_not_be_finite_are_foreseen() -> None:
    """Pairs lead to (i + j) / 4 and on to half of it and (k + l) / 4, or 3 / 2 if 3 alone is
    finite, 2.125 for {2, 3}: that is .875 from 1.25; .75 and 1.125 are .5 and .125 from it."""
    for breaking, expected in (
        ((), [[2, 3]]),
        ((0, 1, 2), [[0, 3], [1, 2]]),
        ((0, 1, 2, 3), [[0, 3], [1, 2]]),
    ):
        assert (
            picked(
                clairvoyant([1] * 4, 2, horizon=2), engine=Near(1.25, [1] * 4, breaking=breaking)
            )
            in expected
        )


def test_a_horizon_needs_few_cohorts() -> None:
    with pytest.raises(
        ConfigError, match=r"^horizon=2: .* of num_clients=12 clients; .* selector.max_cohorts=219"
    ):
        clairvoyant([1] * 12, 3, horizon=2, max_cohorts=219)
    clairvoyant([1] * 12, 3, horizon=2, max_cohorts=220)


@pytest.mark.parametrize("search", [{"candidates": 12}, {"swaps": 300}, {"cohorts": 3000}])
def test_each_part_of_the_search_finds_the_best_alone_within_its_passes(
    search: dict[str, int],
) -> None:
    """The larger the ids the nearer, whose best cohort is one of 220."""
    selector, ledger = clairvoyant([1] * 12, 3, max_cohorts=219, **search), Ledger()
    assert picked(selector, engine=Near(100.0, [1] * 12), ledger=ledger) == [9, 10, 11]
    passes = selector.cohorts + 3 * selector.candidates + selector.swaps
    assert ledger.server_forward_samples <= passes
    assert (
        f"12 trainings by 12 clients, who all upload, and {passes:,} validation passes"
        in selector.warning
    )


@pytest.mark.parametrize(
    "more", [{"max_cohorts": 1, "candidates": 5, "swaps": 50}, {}, {"horizon": 2}]
)
def test_updates_that_are_not_finite_fill_up_alone(more: dict[str, int]) -> None:
    sizes = [1] * 5
    selector = clairvoyant(sizes, 2, **{**more, "max_cohorts": more.get("max_cohorts", 10)})
    assert picked(selector, engine=Near(100.0, sizes, (4,))) == [2, 3]
    engine = Near(100.0, sizes, (0, 2, 3, 4))
    chosen = {tuple(picked(selector, seed=seed, engine=engine)) for seed in range(30)}
    assert chosen == {(0, 1), (1, 2), (1, 3), (1, 4)}


def test_losses_that_are_nan_rank_last() -> None:
    """That of {2, 3} is nan."""
    for more in ({}, {"max_cohorts": 1, "swaps": 50}):
        assert picked(clairvoyant([1] * 4, 2, **more), engine=Near(100.0, [1] * 4, limit=1.0)) == [
            1,
            3,
        ]


def lowest_after(
    run: Simulation, params: Params, t: int, horizon: int
) -> list[tuple[float, list[int]]]:
    """By the engine and the run's own aggregator: (sum of losses, first cohort) of sequences of
    cohorts."""
    parts, n = run.components, run.components.population.num_clients
    held: Any = parts.server_data.validation
    found, trained = [], parts.engine.train(params, np.arange(n), t, parts.learning_rate(t))
    for ids in itertools.combinations(range(n), parts.population.cohort_size):
        mine = {name: value.clone() for name, value in params.items()}
        model = parts.aggregator.aggregate(mine, trained.rows(np.array(ids)), None)
        loss = parts.engine.evaluate(model, held.x, held.y).loss
        loss += min(lowest_after(run, model, t, horizon - 1))[0] if horizon > 1 else 0
        found.append((loss, list(ids)))
    return found


@pytest.mark.parametrize(("n", "k", "horizon"), [(10, 3, 1), (4, 2, 2)])
def test_on_digits_the_choice_is_that_of_brute_force(n: int, k: int, horizon: int) -> None:
    words = [
        f"num_clients={n}",
        f"cohort_size={k}",
        "num_rounds=4",
        f"selector.horizon={horizon}",
        "local.epochs=1",
    ]
    with search_path():
        (job,) = compose_jobs(["selector=clairvoyant", "model.hidden=[8]", *words], multirun=False)
    run = build(make_plan(job.config, job.choices)).simulation
    for t in (1, 2):
        before = run.params
        assert run.step().selected == min(lowest_after(run, before, t, horizon))[1]
