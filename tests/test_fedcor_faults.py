"""FedCor where nobody is available in some rounds, and where updates of a virtual round are not finite.

Of the selector in tests/test_fedcor.py: warm-up in rounds 1 to 3, the first fit before round 4 (30 steps), virtual
rounds before rounds 5, 8, 11, ... (10 steps).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedsim.core.types import Params
from fedsim.rounds.availability import Availability
from fedsim.rounds.loop import Simulation
from fedsim.selectors import fedcor as module
from fedsim.selectors.fedcor import FedCor
from fedsim.selectors.gaussian_process import LowRank, greedy_selection, make_process
from tests.test_fedcor import fedcor
from tests.toys import ToyEngine, toy_clients, toy_components, toy_params


class NobodyIn(Availability):
    def __init__(self, rounds: set[int]) -> None:
        self.rounds = rounds

    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        return np.full(num_clients, round not in self.rounds)


class LossOfModel(ToyEngine):
    """A client's loss is the model's first number times the client's id."""

    def losses(self, params: Params, positions: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
        ids = np.array([self.owner[p[0]] for p in positions])
        return np.array(float(params["w"][0]) * ids)


def rounds_of(
    selector: FedCor, absent: set[int], num_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Fits as (round, observations, steps), and the rounds with a greedy selection, which none before a fit may be."""
    fits: list[tuple[int, int, int]] = []
    greedy: list[int] = []
    fit = selector.process.fit
    parts = toy_components(LossOfModel([2] * 8), selector.population, selector, availability=NobodyIn(absent))
    run = Simulation(parts, toy_params())

    def fitted(parameters: Any, residuals: Any, weights: Any, steps: int) -> Any:
        fits.append((run.round + 1, len(residuals), steps))
        found = fit(parameters, residuals, weights, steps)
        assert (found["embedding"] != parameters["embedding"]).any()
        return found

    def greedily(*args: Any, **more: Any) -> Any:
        assert fits
        greedy.append(run.round + 1)
        return greedy_selection(*args, **more)

    monkeypatch.setattr(selector.process, "fit", fitted)
    monkeypatch.setattr(module, "greedy_selection", greedily)
    for _ in range(num_rounds):
        run.step()
    return fits, greedy


@pytest.mark.parametrize(
    ("absent", "fits", "greedy"),
    [
        (set(), [(4, 3, 30), (5, 4, 10), (8, 5, 10)], [4, 5, 6, 7, 8, 9]),
        ({1}, [(4, 2, 30), (5, 3, 10), (8, 4, 10)], [4, 5, 6, 7, 8, 9]),
        ({1, 2, 3, 4}, [(6, 1, 30), (8, 2, 10)], [6, 7, 8, 9]),
        ({4}, [(5, 3, 30), (5, 4, 10), (8, 5, 10)], [5, 6, 7, 8, 9]),
        ({5, 8}, [(4, 3, 30), (6, 4, 10), (9, 5, 10)], [4, 6, 7, 9]),
        ({5, 6, 7, 8}, [(4, 3, 30), (9, 4, 10)], [4, 9]),
    ],
    ids=["always somebody", "first round", "late start", "first fit", "virtual rounds", "two of them"],
)
def test_what_was_due_while_nobody_was_there_is_done_in_the_next_round(
    absent: set[int], fits: list[tuple[int, int, int]], greedy: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rounds_of(fedcor(8, 2), absent, 9, monkeypatch) == (fits, greedy)


def test_a_virtual_round_does_not_follow_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round e = 3 is the last of the warm-up, and divisible by the interval; the first virtual round follows e = 6."""
    selector = fedcor(8, 2)
    selector.warmup = 3
    assert rounds_of(selector, set(), 8, monkeypatch) == ([(5, 4, 30), (8, 5, 10)], [5, 6, 7, 8])
    selector = fedcor(8, 2)
    rounds_of(selector, {8}, 9, monkeypatch)
    assert sorted(selector.discounts.tolist()) == [0.5] * 2 + [1.0] * 6  # those of round 9 alone


def virtual_round(broken: set[int]) -> tuple[FedCor, list[int]]:
    """A selector after round 5, before which all 8 clients may be trained virtually, and the steps of its fits."""
    selector, steps = fedcor(8, 8), []
    selector.process.fit = lambda p, r, w, n: (steps.append(n), p)[1]  # type: ignore[method-assign]
    engine = LossOfModel([2] * 8)
    for t in range(1, 6):
        engine.broken = broken if t == 5 else set()
        clients = toy_clients([2] * 8, selector.needs, engine=engine, round=t)
        selector.select(t, clients, np.random.default_rng(t))
    return selector, steps


def test_broken_updates_of_a_virtual_round_are_left_out_of_its_model() -> None:
    """The virtual model's first number is the mean of i / 2 over the others, 25 / 14; the model's is 0."""
    selector, steps = virtual_round({3})
    assert selector.changes[-1] == pytest.approx(25 / 14 * np.arange(8))
    selector._add_observation(np.array([1.0, np.nan, np.inf, -np.inf]), 9)
    assert selector.changes[-1].tolist() == [1, 0, 0, 0]
    assert steps == [30, 10]
    selector, steps = virtual_round(set(range(8)))  # without any finite one there is no observation
    assert (len(selector.changes), steps) == (3, [30])


@pytest.mark.parametrize("noise", [1e-8, 1e-12])
def test_a_noise_that_is_lost_in_rounding_still_gives_a_selection_and_a_fit(noise: float) -> None:
    """After q picks nothing but the noise is left, which may come out as a variance <= 0. With fewer clients than
    dimensions F F^T is singular, and the noise does not show beside it: the last parameters are kept."""
    for seed in range(20):
        factor = np.random.default_rng(seed).standard_normal((3, 20))
        for covariance in (LowRank(factor, noise), factor.T @ factor + noise**2 * np.eye(20)):
            picked = greedy_selection(covariance, np.ones(20), np.ones(20), 10, np.random.default_rng(seed))
            assert len(set(picked)) == 10
    start = {"embedding": np.ones((3, 2)), "amplitude": np.ones(())}
    for kernel, objective in (("linear", "mml"), ("linear_normalised", "mml"), ("linear", "loo")):
        fitted = make_process(kernel, objective, noise, 1.0, 0.01).fit(start, np.ones((1, 2)), np.ones(1), 50)
        assert all(np.isfinite(value).all() for value in fitted.values())
