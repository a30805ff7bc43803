"""GPFL, as the paper describes it and as its authors' code runs it."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch
from numpy.typing import NDArray

from fedsim.clients.context import Signal
from fedsim.clients.server import Server
from fedsim.core.errors import DivergedError, FedsimError
from fedsim.core.record import Record
from fedsim.core.types import Cohort, Evaluation, Ids, Params
from fedsim.selectors.gpfl import (
    GPFL,
    Decreasing,
    Exploration,
    Fixed,
    Linear,
    Triangular,
    projections,
)
from fedsim.selectors.gpfl_official import GPFLOfficial, reward_sign
from tests.clocks import fixed_clock
from tests.toys import (
    ToyEngine,
    picked,
    selection_of,
    toy_clients,
    toy_cohort,
    toy_components,
    toy_population,
    toy_run,
)

DELTA = {"w": torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, -2.0]])}
G = {"w": torch.tensor([4 / 3, 2 / 3])}


def gpfl(n: int = 3, k: int = 1, exploration: Exploration | None = None, **more: Any) -> GPFL:
    values: dict[str, Any] = {
        **{"metric": "projection", "local_direction": "per_lr", "global_direction": "previous"},
        **{
            "server_momentum": 0.9,
            "per_tensor": False,
            "softmax_over": "all",
            "reward_average": "rounds",
        },
        **{
            "rank_by": "gpcb",
            "factor": "literal2",
            "tie_sign": "intent",
            "reward_eval": "validation",
        },
        **{
            "init": "all_clients",
            "cover_rounds": 4,
            "init_aggregate": "topk",
            "weights": "aggregator",
        },
    }
    return GPFL(
        toy_population([1] * n, k, 100),
        exploration=exploration or Fixed(value=0.2),
        **(values | more),
    )


def test_projections_by_hand() -> None:
    c = projections(DELTA, G, "projection", False)
    assert c == pytest.approx([4.47214, 0.89443, -0.89443], abs=1e-5)
    assert np.exp(c) / np.exp(c).sum() == pytest.approx([0.96842, 0.02706, 0.00452], abs=1e-5)
    assert projections(DELTA, {"w": 7 * G["w"]}, "projection", False) == pytest.approx(
        c
    )  # the scale of g is ignored
    assert projections({"w": 3 * DELTA["w"]}, G, "projection", False) == pytest.approx(3 * c)
    cosine = projections(DELTA, G, "cosine", False)
    assert projections({"w": 3 * DELTA["w"]}, G, "cosine", False) == pytest.approx(cosine)
    assert abs(cosine).max() <= 1
    assert projections(DELTA, G, "dot", False) == pytest.approx([20 / 3, 4 / 3, -4 / 3])


def test_several_tensors_are_one_vector_or_averaged_and_zero_directions_give_zero() -> None:
    delta = {"a": torch.tensor([[3.0], [6.0]]), "b": torch.tensor([[0.0, 4.0], [0.0, 8.0]])}
    g = {"a": torch.tensor([1.0]), "b": torch.tensor([1.0, 1.0])}
    assert projections(delta, g, "dot", False) == pytest.approx([7, 14])
    assert projections(delta, g, "projection", False) == pytest.approx(
        np.array([7, 14]) / math.sqrt(3)
    )
    assert projections(delta, g, "cosine", False) == pytest.approx([7 / math.sqrt(75)] * 2)
    assert projections(delta, g, "projection", True) == pytest.approx(
        (np.array([1, 2]) * (3 + 4 / math.sqrt(2))) / 2
    )
    assert not projections(
        delta, {n: torch.zeros_like(d) for n, d in g.items()}, "projection", False
    ).any()


@pytest.mark.parametrize(
    ("switches", "after", "factor"),
    [
        ({}, (0.52, 1.0), 2.04040),
        ({}, (0.45, 1.0), 1.90246),
        ({"factor": "centred"}, (0.52, 1.0), 1.02020),
        (
            {"tie_sign": "intent"},
            (0.5, 0.7),
            np.exp(0.3),
        ),  # with equal accuracy a falling loss is a reward
        ({"tie_sign": "literal"}, (0.5, 0.7), np.exp(-0.3)),
    ],
)
def test_rewards_by_hand(
    switches: dict[str, Any], after: tuple[float, float], factor: float
) -> None:
    """Softmax shares of all, times the factor for the selected; and the bonus."""
    selector = gpfl(**switches)
    selector.previous, selector.last = Evaluation(0.5, 1.0), Evaluation(*after)
    selector.projections, selector.selected = (
        projections(DELTA, G, "projection", False),
        np.array([2]),
    )
    selector._add_rewards()
    assert selector.reward_sum == pytest.approx([0.96842, 0.02706, 0.00452 * factor], abs=1e-5)
    assert selector.reward_factor() == pytest.approx(factor, abs=1e-5)
    selector = gpfl(4)  # alpha = .2, sum of pulls = 100
    selector.pulls = np.array([1.0, 4.0, 9.0, 86.0])
    assert selector.gpcb(2)[:3] == pytest.approx([0.60697, 0.30349, 0.20232], abs=1e-5)


@pytest.mark.parametrize(
    ("schedule", "num_rounds", "expected"),
    [
        (Linear(rho=2.0, reference=None), 100, {1: 0.02, 50: 1.0, 100: 2.0}),
        (Linear(rho=1.0, reference=500), 800, {800: 1.6}),  # a number of rounds
        (Linear(rho=1.0, reference=0.625), 800, {800: 1.6}),  # a share of them
        (Linear(rho=0.5, reference=1.0), 160, {4: 2.0}),
        (Decreasing(rho=2.0), 4, {1: 2.0, 2: 1.5, 4: 0.5}),
        (Triangular(peak=100), 500, {50: 0.5, 100: 1.0, 300: 0.5}),
        (Triangular(peak=4), 99, {1: 0.25, 3: 0.75, 4: 1.0, 12: 0.5}),
    ],
)
def test_exploration_schedules(
    schedule: Exploration, num_rounds: int, expected: dict[int, float]
) -> None:
    assert {t: schedule.alpha(t, num_rounds) for t in expected} == pytest.approx(expected)


# --- the authors' code


def official(
    sizes: list[int], k: int = 3, warmup: int = 4, average: Any = None, peak: int = 100
) -> GPFLOfficial:
    values: dict[str, Any] = {
        "warmup": warmup,
        "exploration": Triangular(peak=peak),
        "reward_eval": "test",
    }
    return GPFLOfficial(toy_population(sizes, k, 100), **values, average=average)


def test_coverage_takes_exactly_the_warm_up_and_ties_go_to_the_higher_id() -> None:
    selector = official([2] * 10)
    found = [picked(selector, t, t) for t in range(1, 5)]
    assert [len(p) for p in found] == [3, 3, 3, 1]
    assert sorted(sum(found, [])) == list(range(10))
    assert "test set" in str(selector.warning)
    selector = official([2] * 5, 2)
    selector.pulls[:] = 1
    assert picked(selector, 9) == [3, 4]
    for average, weights in (
        (None, [0.125, 0.25, 0.625]),
        ("aggregator", None),
    ):  # all are selected in round 1
        found = selection_of(official([1, 2, 5], 3, 1, average, 10)).weights
        assert (None if found is None else found.tolist()) == weights


@pytest.mark.parametrize(
    ("accuracy", "loss", "expected"),
    [(0.6, 9, 1), (0.4, 0, -1), (0.5, 0.9, 0.5), (0.5, 1.1, -0.5), (0.5, 1.0, 0)],
)
def test_the_verdict(accuracy: float, loss: float, expected: float) -> None:
    assert reward_sign(Evaluation(0.5, 1.0), Evaluation(accuracy, loss)) == expected
    for before, after in (
        (2.0, np.nan),
        (np.nan, 2.0),
        (np.inf, np.inf),
        (np.nan, np.nan),
    ):  # not to be compared
        assert reward_sign(Evaluation(0.5, before), Evaluation(0.5, after)) == 0
    assert reward_sign(Evaluation(0.5, np.inf), Evaluation(0.5, 2.0)) == 0.5


class FixedScores:
    """A server whose evaluations are given, one for each pass that is asked for."""

    def __init__(self, scores: list[tuple[float, float]]) -> None:
        self.scores = scores[::-1]
        self.params: Params = {}

    def test(self, params: Params) -> Evaluation:
        return Evaluation(*self.scores.pop())


ALPHAS: dict[str, tuple[Exploration, Callable[[int], float]]] = {
    "triangular": (
        Triangular(peak=100),
        lambda step: step / 100 if step < 100 else 200 / (step + 100),
    ),
    "linear": (Linear(rho=0.5, reference=None), lambda step: 0.5 * step / 200),
    "little": (Fixed(value=0.02), lambda step: 0.02),
    "none": (Fixed(value=0.0), lambda step: 0.0),
}


class PublishedRule:
    """The authors' rule for n clients, rewritten with lists and counters; rounds are counted from
    0."""

    def __init__(self, n: int, k: int, alpha: Callable[[int], float]) -> None:
        self.k, self.alpha, self.count = k, alpha, 0
        self.rewards: list[list[float]] = [[0.0] for _ in range(n)]
        self.times = [0] * n
        self.last = (0.0, 1e6)

    def choice(self) -> list[int]:
        weight = self.alpha(self.count)
        bonus = [
            weight * (2 * np.log(self.count) / m) ** 0.5 if weight else 0.0 for m in self.times
        ]
        index = [sum(r) / len(r) + b for r, b in zip(self.rewards, bonus, strict=True)]
        return sorted(np.argsort(index)[::-1][: self.k].tolist())

    def learn(
        self, ids: Ids, moves: NDArray[np.float64], trained: list[slice], score: tuple[float, float]
    ) -> None:
        step = moves.mean(0)
        c = np.array(
            [np.mean([m[p] @ step[p] / np.linalg.norm(step[p]) for p in trained]) for m in moves]
        )
        gain, fall = score[0] - self.last[0], self.last[1] - score[1]
        sign = np.sign(gain) if gain != 0 else np.sign(fall) / 2
        for i, share in zip(ids, np.exp(c) / np.exp(c).sum(), strict=True):
            self.rewards[i].append(share * sign)
            self.times[i] += 1
        self.last, self.count = score, self.count + 1


@pytest.mark.parametrize("exploration", list(ALPHAS))
def test_selections_of_200_rounds_equal_those_of_the_published_rule(exploration: str) -> None:
    """Over random updates (two trained tensors, and running statistics, which must play no part)
    and given accuracies that rise, fall and stay. The blocks of the warm-up are random: they are
    only checked to be new and complete."""
    n, k, warmup, num_rounds = 20, 3, 5, 200
    schedule, alpha = ALPHAS[exploration]
    population, random = toy_population([2] * n, k, num_rounds), np.random.default_rng(7)
    selector = GPFLOfficial(
        population, warmup=warmup, exploration=schedule, reward_eval="test", average=None
    )
    rule, drift = (
        PublishedRule(n, k, alpha),
        random.normal(0, 1, (n, 11)),
    )  # each client's own direction
    accuracies, losses = random.integers(5, 9, num_rounds) / 10, random.random(200).tolist()
    scores = list(zip(accuracies.tolist(), losses, strict=True))
    server = FixedScores(scores)
    for t in range(1, num_rounds + 1):
        ids = np.array(picked(selector, t, t))
        if t > warmup:
            assert ids.tolist() == rule.choice(), t
        else:
            assert [rule.times[i] for i in ids] == [0] * (n // warmup)
        moves = drift[ids] + random.normal(0, 0.3, (len(ids), 11))
        moves[:, 8:] *= 100
        selector.observe(t, cohort_of(ids, moves, server), server)  # type: ignore[arg-type]
        rule.learn(ids, moves, [slice(0, 6), slice(6, 8)], scores[t - 1])
    assert not server.scores


def cohort_of(ids: Ids, moves: NDArray[np.float64], server: FixedScores) -> Cohort:
    """Updates of two trained tensors and a buffer; the server's model becomes their mean."""
    shapes = {"a": (2, 3), "b": (2,), "running": (3,)}
    parts = torch.tensor(moves).split([6, 2, 3], dim=1)
    delta = {
        name: p.reshape(len(ids), *s) for (name, s), p in zip(shapes.items(), parts, strict=True)
    }
    server.params = {name: d.mean(0) for name, d in delta.items()}
    ones = np.ones(len(ids), np.int64)
    return Cohort(
        ids,
        ones,
        {name: 0 * d[0] for name, d in delta.items()},
        delta,
        None,
        None,
        ones,
        ["a", "b"],
    )


# --- switches of the paper reading, in whole runs


def run(
    num_rounds: int = 6, sizes: list[int] | None = None, k: int = 2, **switches: Any
) -> tuple[GPFL, list[Record]]:
    sizes = sizes or [2] * 8
    selector = gpfl(len(sizes), k, **switches)
    selector.population = toy_population(sizes, k, num_rounds)
    return selector, list(toy_run(selector, validation=True))


def test_round_1_without_everybody_covers_new_clients_by_index_or_in_random_blocks() -> None:
    selector, records = run(init="none")
    assert records[0].trained == 2
    assert sorted(sum((r.selected for r in records[:4]), [])) == list(range(8))
    assert selector.pulls.sum() == 6 * 2
    selector, records = run(init="cover", cover_rounds=3)
    assert [len(r.selected) for r in records] == [3, 3, 2, 2, 2, 2]
    assert sorted(sum((r.selected for r in records[:3]), [])) == list(range(8))
    assert (
        np.count_nonzero(selector.projections) >= 5
    )  # all but those of round 1, before any global direction


def test_round_1_may_average_everybody_or_nobody() -> None:
    for init_aggregate, selected in (("all", list(range(8))), ("none", [])):
        selector, records = run(init_aggregate=init_aggregate, num_rounds=1)
        assert (records[0].selected, records[0].uploaded) == (selected, 8)
        assert selector.pulls.tolist() == [1] * 8
    assert run(init_aggregate="none")[1][-1].coverage > 0


def test_models_may_weigh_by_gp() -> None:
    for t, weights in ((1, "by_gp"), (2, "by_gp"), (1, "aggregator")):
        selector = gpfl(weights=weights, k=2)
        selector.projections = projections(DELTA, G, "projection", False)
        selector.previous = selector.last = Evaluation(0.5, 1.0)
        selection = selection_of(selector, t)
        c = selector.projections[selection.ids]
        assert selection.weights == (
            None if weights == "aggregator" else pytest.approx(np.exp(c) / np.exp(c).sum())
        )


@pytest.mark.parametrize(
    ("direction", "passes", "value"), [("momentum_buffer", 2, -10), ("full_gradient", 3, None)]
)
def test_directions_that_are_sent_besides_the_update_are_charged(
    direction: Any, passes: int, value: float | None
) -> None:
    _, records = run(local_direction=direction)
    assert [r.server_forward_samples for r in records] == [
        2,
        1,
        1,
        1,
        1,
        1,
    ]  # the first model once more
    model = 2 * 4
    assert (records[0].bytes_up, records[0].train_samples) == (2 * 8 * model, passes * 2 * 8)
    for r in records[1:]:
        assert (r.bytes_up, r.train_samples) == (2 * 2 * model, passes * 2 * 2)
    if value is not None:  # the toy's buffers are ten times its updates, and a buffer points uphill
        plain, buffered = (
            run(local_direction=how, num_rounds=1)[0] for how in ("update", "momentum_buffer")
        )
        assert buffered.projections == pytest.approx(value * plain.projections)
        engine = ToyEngine([2, 2])
        train = engine.train
        engine.train = lambda *args: replace(train(*args), momentum=None)  # type: ignore[method-assign]
        clients = toy_clients([2, 2], frozenset({Signal.TRAINING}), engine=engine)
        with pytest.raises(FedsimError, match=r"set optimizer=sgd optimizer\.momentum=0\.9"):
            clients.momentum_buffers(clients.available)


@pytest.mark.parametrize(
    "switches",
    [
        {"softmax_over": "selected"},
        {"reward_average": "pulls"},
        {"per_tensor": True},
        {"local_direction": "per_step"},
    ]
    + [{"global_direction": d} for d in ("same_round", "server_momentum")]
    + [{"metric": m} for m in ("cosine", "dot")]
    + [
        {"init": "none", "softmax_over": "selected", "reward_average": "pulls_plus_one"},
        {"rank_by": "gp"},
    ],
)
def test_every_switch_runs(switches: dict[str, Any]) -> None:
    selector, records = run(**switches)
    assert len(records) == 6
    assert np.isfinite(selector.reward_sum).all()


# --- the first three rounds by hand, with a learning rate that is not 1 ---
#
# Client i pulls the model w halfway to (i, -i), accuracy is w[0] and loss w[1]. From w = 0 with K = 1 of N = 3 and
# lr = 1/4: updates (0, 0), (1/2, -1/2), (1, -1), so g_i = (w - w_i) / lr = (-2i, 2i), their mean g = (-2, 2) and
# c_i = <g_i, g> / |g| = sqrt(8) i. Client 2 is selected and w = (1, -1); it stays ahead, and w = (3/2, -3/2).

ROOT8, LR = np.sqrt(8), 0.25


def first_rounds(num_rounds: int, **switches: Any) -> GPFL:
    selector = gpfl(3, 1, **switches)
    run = toy_run(selector, validation=True, learning_rate=lambda t: LR)
    for _ in range(num_rounds):
        run.step()
    return selector


def shares(c: list[float]) -> np.ndarray:
    return np.exp(c) / np.exp(c).sum()


def test_round_1() -> None:
    selector = first_rounds(1)
    assert selector.projections == pytest.approx([0, ROOT8, 2 * ROOT8])
    assert selector.pulls.tolist() == [1, 1, 2]
    assert selector.selected.tolist() == [2]
    assert selector.direction["w"].tolist() == [-4, 4]  # (0 - w) / lr, the server's step
    assert selector.reward_sum.tolist() == [0, 0, 0]


def test_round_2_projects_on_the_step_of_round_1_and_rewards_its_selected() -> None:
    """Client 2 changes w by (1/2, -1/2), so g_2 = (-2, 2) and c_2 = sqrt(8), towards where the
    server went."""
    selector = first_rounds(2)
    assert selector.projections == pytest.approx([0, ROOT8, ROOT8])
    assert selector.pulls.tolist() == [1, 1, 3]
    assert selector.direction["w"].tolist() == [-2, 2]
    assert selector.reward_sum == pytest.approx(
        shares([0, ROOT8, 2 * ROOT8]) * [1, 1, 2 * np.exp(1.0)]
    )


def test_round_3_adds_rewards_and_their_mean_is_over_rounds() -> None:
    selector = first_rounds(3)
    first = shares([0, ROOT8, 2 * ROOT8]) * [1, 1, 2 * np.exp(1.0)]
    second = shares([0, ROOT8, ROOT8]) * [1, 1, 2 * np.exp(0.5)]
    assert selector.reward_sum == pytest.approx(first + second)
    assert selector.projections[2] == pytest.approx(ROOT8 / 2)
    bonus = 0.2 * np.sqrt(2 * np.log(6) / np.array([1, 1, 4]))
    assert selector.gpcb(4) == pytest.approx((first + second) / 3 + bonus)


@pytest.mark.parametrize(
    ("direction", "in_round_1", "in_round_2"),
    [
        ("per_lr", 2 * ROOT8, ROOT8),
        ("update", 2 * ROOT8 * LR, ROOT8 * LR),
        ("per_step", ROOT8, ROOT8 / 2),
    ],
)
def test_local_directions(direction: str, in_round_1: float, in_round_2: float) -> None:
    """A client with one sample makes two steps in its two epochs."""
    assert first_rounds(1, local_direction=direction).projections[2] == pytest.approx(in_round_1)
    assert first_rounds(2, local_direction=direction).projections[2] == pytest.approx(in_round_2)


@pytest.mark.parametrize(
    ("direction", "expected", "projection"),
    [
        ("previous", [-2, 2], ROOT8),
        ("same_round", [-2, 2], ROOT8),
        ("server_momentum", [-7.22, 7.22], ROOT8),
    ],
)
def test_global_directions(direction: str, expected: list[float], projection: float) -> None:
    """With momentum .9: (-2, 2), then .9 (-2, 2) + (-4, 4) = (-5.8, 5.8), then .9 of that + (-2,
    2)."""
    selector = first_rounds(2, global_direction=direction)
    assert selector.direction["w"].tolist() == pytest.approx(expected)
    assert selector.projections[2] == pytest.approx(projection)


def test_rewards_by_pulls_leave_the_first_round_of_everybody_out() -> None:
    selector = first_rounds(3, reward_average="pulls")
    assert selector.pulls.tolist() == [1, 1, 4]
    bonus = 0.2 * np.sqrt(2 * np.log(6) / np.array([1, 1, 4]))
    assert selector.gpcb(4) == pytest.approx(np.array([0, 0, selector.reward_sum[2] / 3]) + bonus)
    plus_one = first_rounds(3, reward_average="pulls_plus_one")
    assert plus_one.gpcb(4) == pytest.approx(plus_one.reward_sum / np.array([1, 1, 4]) + bonus)
    selector = gpfl(
        3, 1, exploration=Linear(rho=1.0, reference=None)
    )  # of 100 rounds, at the round itself
    selector.pulls = np.array([1.0, 2.0, 3.0])
    assert selector.gpcb(50) == pytest.approx(0.5 * np.sqrt(2 * np.log(6) / selector.pulls))


def broken_rounds(num_rounds: int, broken: set[int], **switches: Any) -> GPFL:
    """Six clients, two of them selected; the updates of the `broken` ones are nan."""
    engine, selector = ToyEngine([1] * 6), gpfl(6, 2, **switches)
    engine.broken = broken
    run = toy_run(selector, engine, validation=True)
    for _ in range(num_rounds):
        run.step()
    return selector


@pytest.mark.parametrize(
    "switches", [{}, {"local_direction": "momentum_buffer"}, {"local_direction": "per_step"}]
)
def test_one_broken_update_in_round_1_leaves_the_projections_of_the_others(
    switches: dict[str, Any],
) -> None:
    """They are on the mean of five clients now, which points the same way."""
    sound, hurt = (
        broken_rounds(1, set(), **switches).projections,
        broken_rounds(1, {1}, **switches).projections,
    )
    assert hurt[1] == 0
    assert np.delete(hurt, 1) == pytest.approx(np.delete(sound, 1))
    assert (np.diff(np.abs(hurt[2:])) > 0).all()
    assert hurt[2] != 0
    selector = broken_rounds(8, {0}, global_direction="server_momentum")
    assert torch.isfinite(selector.direction["w"]).all()
    assert selector.projections[3:].all()
    with pytest.raises(DivergedError, match="every update of the round"):
        broken_rounds(1, set(range(6)))


@pytest.mark.parametrize("direction", ["previous", "same_round"])
def test_projections_stay_where_the_global_direction_is_zero(direction: str) -> None:
    """|g| = 0 says nothing about a client: its c stays as it is, in place of 0, which others may be
    below."""
    selector = gpfl(3, 1, init="none", global_direction=direction)
    selector.projections[:] = [1.0, 2.0, 3.0]
    engine, context = ToyEngine([1] * 3), toy_clients([1] * 3, selector.needs)._context
    data = toy_components(engine, selector.population, selector, validation=True).server_data
    server = Server(engine, data, context, {"w": torch.zeros(2)})
    selector.observe(2, toy_cohort([0, 2], [1, 1], [[0, 0], [0, 0]]), server)
    selector.observe(3, toy_cohort([0, 2], [1, 1], [[1, 1], [2, 2]]), server)
    assert selector.projections.tolist() == [1, 2, 3]


def test_a_round_in_which_nothing_arrives_multiplies_no_reward() -> None:
    """Nothing arrives in time in round 3, so that the accuracy of the model does not change."""
    selector, clock = gpfl(6, 2), fixed_clock(6, 2)
    run = toy_run(selector, validation=True, simulated_clock=clock)
    run.step()
    run.step()
    assert selector.reward_factor() > 2
    clock.system.deadline = 0.5
    assert run.step().uploaded == 0
    assert selector.reward_factor() == 1
    before = selector.reward_sum.copy()
    run.step()
    assert selector.reward_sum - before == pytest.approx(shares(selector.projections.tolist()))


# --- whole runs of the paper's rule, against a rewriting with lists


class Moving(ToyEngine):
    """Client i moves the model by a vector of its own, drawn anew every round. Accuracies repeat,
    losses do not."""

    def train(
        self, params: Params, ids: Ids, round: int, lr: float, *more: Any, **named: Any
    ) -> Cohort:
        trained = super().train(params, ids, round, lr)
        trained.delta["w"] = torch.tensor(
            np.array([move_of(int(i), round) for i in ids]), dtype=torch.float32
        )
        return trained

    def evaluate(self, params: Params, x: torch.Tensor, y: torch.Tensor) -> Evaluation:
        return evaluation_of(params["w"].double().numpy())


def move_of(client: int, round: int) -> NDArray[np.float64]:
    own = np.random.default_rng(client).normal(0, 1, 2)
    return own + np.random.default_rng([client, round]).normal(0, 0.5, 2)


def evaluation_of(w: NDArray[np.float64]) -> Evaluation:
    return Evaluation(
        accuracy=round(0.5 + 0.4 * np.tanh(float(w[0]) / 5), 1), loss=float(np.exp(-w[1] / 10))
    )


def rate(t: int) -> float:
    return 0.5 / t


class PaperRule:
    """Equations 3 to 8 and Algorithm 1 for n clients, k of which are selected in each of
    `num_rounds` rounds."""

    def __init__(self, n: int, k: int, num_rounds: int, rho: float) -> None:
        self.k, self.num_rounds, self.rho = k, num_rounds, rho
        self.w = np.zeros(2)
        self.rewards: list[list[float]] = [[] for _ in range(n)]
        self.times = [1] * n  # the initialisation counts for every client

    def step(self, t: int, trained: list[int]) -> NDArray[np.float64]:
        """Move the model by the mean of the selected clients' updates; the server's own
        direction."""
        before = self.w
        self.w = before + np.mean([move_of(i, t) for i in trained], axis=0)
        for i in trained:
            self.times[i] += 1
        return (before - self.w) / rate(t)

    def run(self) -> tuple[list[list[int]], set[str]]:
        """The clients that each round selects, and the branches of Equation 8 that occurred."""
        n, branches = len(self.times), set()
        local = [-move_of(i, 1) / rate(1) for i in range(n)]
        mean = np.mean(local, axis=0)
        c = [g @ mean / np.linalg.norm(mean) for g in local]  # Eq. 3
        selected = sorted(sorted(range(n), key=lambda i: -c[i])[: self.k])
        rounds, now = [selected], evaluation_of(self.w)
        direction = self.step(1, selected)
        for t in range(2, self.num_rounds + 1):
            before, now = now, evaluation_of(self.w)
            if now.accuracy != before.accuracy:  # Eq. 8
                factor = 2 * np.exp(now.accuracy - before.accuracy)
            else:
                factor = np.exp(before.loss - now.loss)
            branches.add("same" if now.accuracy == before.accuracy else "changed")
            shares = scipy.special.softmax(c)  # Eq. 5
            for i in range(n):
                self.rewards[i].append(shares[i] * (factor if i in selected else 1))
            alpha, total = self.rho * t / self.num_rounds, sum(self.times)  # Eq. 7
            bonus = [alpha * (2 * np.log(total) / m) ** 0.5 for m in self.times]
            u = [sum(r) / len(r) + b for r, b in zip(self.rewards, bonus, strict=True)]  # Eq. 6
            selected = sorted(sorted(range(n), key=lambda i: -u[i])[: self.k])
            rounds.append(selected)
            for i in selected:
                c[i] = -move_of(i, t) / rate(t) @ direction / np.linalg.norm(direction)
            direction = self.step(t, selected)
        return rounds, branches


@pytest.mark.parametrize("rho", [0.0, 0.1, 1.0])
def test_selections_of_60_rounds_equal_those_of_the_papers_equations(rho: float) -> None:
    n, k, num_rounds = 12, 3, 60
    rounds, branches = PaperRule(n, k, num_rounds, rho).run()
    assert branches == {"same", "changed"}
    selector = gpfl(n, k, exploration=Linear(rho=rho, reference=None))
    selector.population = toy_population([1] * n, k, num_rounds)
    records = list(toy_run(selector, Moving([1] * n), validation=True, learning_rate=rate))
    assert [record.selected for record in records] == rounds
