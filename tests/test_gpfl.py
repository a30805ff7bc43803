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
)
from fedsim.selectors.gpfl_official import GPFLOfficial, reward_sign
from fedsim.selectors.gradient_projection import Metric, project
from tests.clocks import fixed_clock
from tests.toys import (
    ToyEngine,
    picked,
    selection_of,
    shipped,
    toy_clients,
    toy_cohort,
    toy_components,
    toy_population,
    toy_run,
)

# Three local directions and the global direction g, whose length is sqrt(20) / 3.
DELTA = {"w": torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, -2.0]])}
G = {"w": torch.tensor([4 / 3, 2 / 3])}
C = [20 / math.sqrt(20), 4 / math.sqrt(20), -4 / math.sqrt(20)]
"""Their projections: products 20/3, 4/3 and -4/3, divided by the length."""


def gpfl(n: int = 3, k: int = 1, exploration: Exploration | None = None, **changes: Any) -> GPFL:
    """Return `selector=gpfl` with alpha = 0.2 for n clients of one sample, and `changes`."""
    population = toy_population([1] * n, k, 100)
    return shipped("gpfl", population, exploration=exploration or Fixed(value=0.2), **changes)


def softmax(c: Any) -> NDArray[np.float64]:
    return scipy.special.softmax(c)


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("projection", C),
        ("dot", [20 / 3, 4 / 3, -4 / 3]),
        # the lengths of the local directions are 5, 1 and 2
        ("cosine", [C[0] / 5, C[1], C[2] / 2]),
    ],
)
def test_projections_by_hand(metric: Metric, expected: list[float]) -> None:
    assert project(DELTA, G, metric, per_tensor=False) == pytest.approx(expected)


def test_a_projection_ignores_the_length_of_g_but_not_that_of_the_local_direction() -> None:
    assert project(DELTA, {"w": 7 * G["w"]}, "projection", per_tensor=False) == pytest.approx(C)
    longer = {"w": 3 * DELTA["w"]}
    assert project(longer, G, "projection", per_tensor=False) == pytest.approx(3 * np.array(C))


@pytest.mark.parametrize(
    ("metric", "per_tensor", "first"),
    [
        ("dot", False, 7),  # 3 x 1 + (0, 4) . (1, 1)
        ("projection", False, 7 / math.sqrt(3)),
        ("cosine", False, 7 / math.sqrt(3 * 25)),
        ("projection", True, (3 + 4 / math.sqrt(2)) / 2),  # the mean of both tensors
    ],
)
def test_several_tensors_are_one_vector_or_averaged(
    metric: Metric, per_tensor: bool, first: float
) -> None:
    """The second direction is twice the first one."""
    local = {"a": torch.tensor([[3.0], [6.0]]), "b": torch.tensor([[0.0, 4.0], [0.0, 8.0]])}
    g = {"a": torch.tensor([1.0]), "b": torch.tensor([1.0, 1.0])}
    second = first if metric == "cosine" else 2 * first
    assert project(local, g, metric, per_tensor=per_tensor) == pytest.approx([first, second])
    zero = {name: torch.zeros_like(tensor) for name, tensor in g.items()}
    assert not project(local, zero, metric, per_tensor=per_tensor).any()


@pytest.mark.parametrize(
    ("switches", "accuracy", "loss", "factor"),
    [
        ({}, 0.52, 1.0, 2 * np.exp(0.02)),
        ({}, 0.45, 1.0, 2 * np.exp(-0.05)),
        ({"factor": "centred"}, 0.52, 1.0, np.exp(0.02)),
        ({"tie_sign": "intent"}, 0.5, 0.7, np.exp(0.3)),  # equal accuracy: a falling loss counts
        ({"tie_sign": "literal"}, 0.5, 0.7, np.exp(-0.3)),
    ],
)
def test_rewards_are_softmax_shares_times_the_factor_of_the_selected(
    switches: dict[str, Any], accuracy: float, loss: float, factor: float
) -> None:
    selector = gpfl(**switches)
    selector.evaluation_before = Evaluation(accuracy=0.5, loss=1.0)
    selector.evaluation_after = Evaluation(accuracy, loss)
    selector.projections = np.array(C)
    selector.selected = np.array([2])
    selector._add_rewards()
    assert selector.reward_sum == pytest.approx(softmax(C) * [1, 1, factor])


@pytest.mark.filterwarnings("error")
def test_a_reward_of_zero_times_an_infinite_factor_does_not_count() -> None:
    """The loss falls by 1000, and exp(1000) is infinite. Client 0 has a softmax share of 0."""
    selector = gpfl(tie_sign="intent")
    selector.evaluation_before = Evaluation(accuracy=0.5, loss=1001.0)
    selector.evaluation_after = Evaluation(accuracy=0.5, loss=1.0)
    selector.projections = np.array([-1000.0, 0, 0])
    selector.selected = np.array([0])
    selector._add_rewards()
    assert selector.reward_sum.tolist() == [0, 0.5, 0.5]


def test_the_bonus_by_hand() -> None:
    """0.2 sqrt(2 ln 100 / n_i) for 100 pulls in all."""
    selector = gpfl(4)
    selector.pulls = np.array([1.0, 4.0, 9.0, 86.0])
    assert selector.gpcb(2)[:3] == pytest.approx([0.60697, 0.30349, 0.20232], abs=1e-5)


@pytest.mark.parametrize(
    ("schedule", "num_rounds", "expected"),
    [
        (Linear(rho=2.0, reference=None), 100, {1: 0.02, 50: 1.0, 100: 2.0}),
        (Linear(rho=1.0, reference=500), 800, {800: 1.6}),  # a number of rounds
        (Linear(rho=1.0, reference=0.625), 800, {800: 1.6}),  # a share of all rounds
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


def official(sizes: list[int], k: int, warmup: int = 4, **changes: Any) -> GPFLOfficial:
    """Return `selector=gpfl_official` with a warm-up of `warmup` rounds."""
    population = toy_population(sizes, k, 100)
    changes = {"exploration": Triangular(peak=100)} | changes
    return shipped("gpfl_official", population, warmup=warmup, **changes)


def test_the_warm_up_selects_every_client_once() -> None:
    """Blocks of ceil(10 / 4) = 3 clients, whatever K is."""
    selector = official([2] * 10, k=2)
    blocks = [picked(selector, t, t) for t in range(1, 5)]
    assert [len(block) for block in blocks] == [3, 3, 3, 1]
    assert sorted(sum(blocks, [])) == list(range(10))


def test_the_test_set_is_announced_and_ties_go_to_the_higher_id() -> None:
    selector = official([2] * 5, k=2)
    assert "test set" in str(selector.warning)
    selector.pulls[:] = 1
    assert picked(selector, 9) == [3, 4]


def test_weights_are_shares_of_data_or_those_of_the_aggregator() -> None:
    by_size = selection_of(official([1, 2, 5], k=3, warmup=1)).weights
    assert by_size == pytest.approx([1 / 8, 2 / 8, 5 / 8])
    assert selection_of(official([1, 2, 5], k=3, warmup=1, average="aggregator")).weights is None


@pytest.mark.parametrize(
    ("accuracy", "loss_before", "loss", "expected"),
    [
        (0.6, 1.0, 9.0, 1),
        (0.4, 1.0, 0.0, -1),
        # equal accuracy
        (0.5, 1.0, 0.9, 0.5),
        (0.5, 1.0, 1.1, -0.5),
        (0.5, 1.0, 1.0, 0),
        (0.5, np.inf, 2.0, 0.5),
        # losses that cannot be compared
        (0.5, 2.0, np.nan, 0),
        (0.5, np.nan, 2.0, 0),
        (0.5, np.inf, np.inf, 0),
    ],
)
def test_the_sign_of_rewards(
    accuracy: float, loss_before: float, loss: float, expected: float
) -> None:
    assert reward_sign(Evaluation(0.5, loss_before), Evaluation(accuracy, loss)) == expected


class FixedScores:
    """A server with given evaluations, one for each test pass."""

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
    """The authors' rule for n clients, rewritten with lists. It counts rounds from 0."""

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
    """Updates are random: two trained tensors, and running statistics, which must play no part.
    Accuracies rise, fall and stay. The blocks of the warm-up are random, so they are only checked
    to be new and complete."""
    n, k, warmup, num_rounds = 20, 3, 5, 200
    schedule, alpha = ALPHAS[exploration]
    selector = official([2] * n, k, warmup, exploration=schedule)
    selector.population = toy_population([2] * n, k, num_rounds)
    rule = PublishedRule(n, k, alpha)
    random = np.random.default_rng(7)
    drift = random.normal(0, 1, (n, 11))  # each client's own direction
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
    """Return updates of two trained tensors and a buffer; the server's model becomes their mean."""
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


def run(num_rounds: int = 6, k: int = 2, **switches: Any) -> tuple[GPFL, list[Record]]:
    """Return the selector and the records of a run with eight clients of two samples."""
    selector = gpfl(8, k, **switches)
    selector.population = toy_population([2] * 8, k, num_rounds)
    return selector, list(toy_run(selector, validation=True))


def test_without_an_initialisation_new_clients_come_first() -> None:
    selector, records = run(init="none")
    assert records[0].trained == 2
    assert sorted(sum((r.selected for r in records[:4]), [])) == list(range(8))
    assert selector.pulls.sum() == 6 * 2


def test_cover_selects_blocks_of_new_clients() -> None:
    """ceil(8 / 3) = 3 clients a round. Only the 3 of round 1 have no projection: there was no
    global direction yet."""
    selector, records = run(init="cover", cover_rounds=3)
    assert [len(r.selected) for r in records] == [3, 3, 2, 2, 2, 2]
    assert sorted(sum((r.selected for r in records[:3]), [])) == list(range(8))
    assert np.count_nonzero(selector.projections) >= 5


@pytest.mark.parametrize(
    ("init_aggregate", "selected"), [("all", [0, 1, 2, 3, 4, 5, 6, 7]), ("none", [])]
)
def test_the_initialisation_may_average_everybody_or_nobody(
    init_aggregate: str, selected: list[int]
) -> None:
    selector, records = run(init_aggregate=init_aggregate)
    assert (records[0].selected, records[0].uploaded) == (selected, 8)
    assert selector.pulls.sum() == 8 + 5 * 2  # the initialisation counts once for everybody
    assert records[-1].coverage > 0


def test_models_may_be_weighted_by_projections() -> None:
    for t in (1, 2):
        selector = gpfl(weights="by_gp", k=2)
        selector.projections = np.array(C)
        selection = selection_of(selector, t)
        assert selection.weights == pytest.approx(softmax(selector.projections[selection.ids]))


@pytest.mark.parametrize(("direction", "passes"), [("momentum_buffer", 2), ("full_gradient", 3)])
def test_directions_that_are_sent_in_addition_to_the_update_are_charged(
    direction: str, passes: int
) -> None:
    """A model has 2 numbers of 4 bytes, a client 2 samples. Training passes them twice, a full
    gradient once more."""
    _, (first, *others) = run(local_direction=direction)
    assert (first.bytes_up, first.train_samples) == (8 * 2 * 8, 8 * passes * 2)
    for record in others:
        assert (record.bytes_up, record.train_samples) == (2 * 2 * 8, 2 * passes * 2)
    # the server also evaluates the initial model
    assert [r.server_forward_samples for r in (first, *others)] == [2, 1, 1, 1, 1, 1]


def test_a_momentum_buffer_is_a_gradient() -> None:
    """The toy's buffers are ten times its updates, and a gradient points against the update."""
    by_update, _ = run(1, local_direction="update")
    by_buffer, _ = run(1, local_direction="momentum_buffer")
    assert by_buffer.projections == pytest.approx(-10 * by_update.projections)


def test_momentum_buffers_need_an_optimizer_with_momentum() -> None:
    engine = ToyEngine([2, 2])
    train = engine.train
    engine.train = lambda *args: replace(train(*args), momentum=None)  # type: ignore[method-assign]
    clients = toy_clients([2, 2], frozenset({Signal.TRAINING, Signal.UPDATES}), engine=engine)
    with pytest.raises(FedsimError, match=r"set optimizer=sgd optimizer\.momentum=0\.9"):
        clients.momentum_buffers(clients.available)


@pytest.mark.parametrize(
    "switches",
    [
        {"softmax_over": "selected"},
        {"reward_average": "pulls"},
        {"per_tensor": True},
        {"global_direction": "same_round"},
        {"metric": "cosine"},
        {"metric": "dot"},
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
# Client i pulls the model w halfway to (i, -i), accuracy is w[0] and loss w[1]. K = 1 of N = 3 and
# lr = 1/4. From w = 0: updates (0, 0), (1/2, -1/2), (1, -1), so g_i = (w - w_i) / lr = (-2i, 2i),
# their mean g = (-2, 2) and c_i = <g_i, g> / |g| = sqrt(8) i. Client 2 is selected and w = (1, -1).
# It stays ahead, and w = (3/2, -3/2).

ROOT8, LR = np.sqrt(8), 0.25


def first_rounds(num_rounds: int, **switches: Any) -> GPFL:
    selector = gpfl(3, 1, **switches)
    run = toy_run(selector, validation=True, learning_rate=lambda t: LR)
    for _ in range(num_rounds):
        run.step()
    return selector


def test_round_1() -> None:
    selector = first_rounds(1)
    assert selector.projections == pytest.approx([0, ROOT8, 2 * ROOT8])
    assert selector.pulls.tolist() == [1, 1, 2]
    assert selector.selected.tolist() == [2]
    assert selector.direction["w"].tolist() == [-4, 4]  # (0 - w) / lr, the server's step
    assert selector.reward_sum.tolist() == [0, 0, 0]


def test_round_2_projects_on_the_step_of_round_1_and_rewards_its_selected() -> None:
    """Client 2 changes w by (1/2, -1/2), so g_2 = (-2, 2). The step of round 1 was along (-4, 4),
    so c_2 = sqrt(8)."""
    selector = first_rounds(2)
    assert selector.projections == pytest.approx([0, ROOT8, ROOT8])
    assert selector.pulls.tolist() == [1, 1, 3]
    assert selector.direction["w"].tolist() == [-2, 2]
    assert selector.reward_sum == pytest.approx(
        softmax([0, ROOT8, 2 * ROOT8]) * [1, 1, 2 * np.exp(1.0)]
    )


def test_round_3_adds_rewards_and_their_mean_is_over_rounds() -> None:
    selector = first_rounds(3)
    first = softmax([0, ROOT8, 2 * ROOT8]) * [1, 1, 2 * np.exp(1.0)]
    second = softmax([0, ROOT8, ROOT8]) * [1, 1, 2 * np.exp(0.5)]
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
    ("direction", "expected"),
    [
        ("previous", -2),
        ("same_round", -2),
        ("server_momentum", -7.22),  # -2, then 0.9 x -2 - 4 = -5.8, then 0.9 x -5.8 - 2
    ],
)
def test_global_directions(direction: str, expected: float) -> None:
    """All steps point along (-1, 1)."""
    selector = first_rounds(2, global_direction=direction)
    assert selector.direction["w"].tolist() == pytest.approx([expected, -expected])
    assert selector.projections[2] == pytest.approx(ROOT8)


@pytest.mark.parametrize(
    ("reward_average", "divisors"), [("pulls", [np.inf, np.inf, 3]), ("pulls_plus_one", [1, 1, 4])]
)
def test_rewards_by_pulls_do_not_count_the_initialisation(
    reward_average: str, divisors: list[float]
) -> None:
    """Client 2 was selected in all three rounds. Without a pull the mean reward is 0."""
    selector = first_rounds(3, reward_average=reward_average)
    assert selector.pulls.tolist() == [1, 1, 4]
    bonus = 0.2 * np.sqrt(2 * np.log(6) / np.array([1, 1, 4]))
    assert selector.gpcb(4) == pytest.approx(selector.reward_sum / divisors + bonus)


def test_the_weight_of_exploration_is_that_of_the_round() -> None:
    """Round 50 of 100, with rho = 1."""
    selector = gpfl(exploration=Linear(rho=1.0, reference=None))
    selector.pulls = np.array([1.0, 2.0, 3.0])
    assert selector.gpcb(50) == pytest.approx(0.5 * np.sqrt(2 * np.log(6) / selector.pulls))


def broken_rounds(num_rounds: int, broken: set[int], **switches: Any) -> GPFL:
    """Return the selector after a run of K = 2 of six clients. Updates of `broken` ones are nan."""
    engine = ToyEngine([1] * 6)
    engine.broken = broken
    selector = gpfl(6, 2, **switches)
    run = toy_run(selector, engine, validation=True)
    for _ in range(num_rounds):
        run.step()
    return selector


@pytest.mark.parametrize("direction", ["per_lr", "momentum_buffer", "per_step"])
def test_a_broken_update_in_round_1_keeps_the_projections_of_the_others(direction: str) -> None:
    """They project on the mean of five clients, which points the same way."""
    sound = broken_rounds(1, set(), local_direction=direction).projections
    hurt = broken_rounds(1, {1}, local_direction=direction).projections
    assert hurt[1] == 0
    assert np.delete(hurt, 1) == pytest.approx(np.delete(sound, 1))
    assert np.delete(hurt, [0, 1]).all()


def test_broken_updates_do_not_reach_the_accumulated_direction() -> None:
    selector = broken_rounds(8, {0}, global_direction="server_momentum")
    assert torch.isfinite(selector.direction["w"]).all()
    assert selector.projections[3:].all()


def test_without_any_sound_update_the_run_diverges() -> None:
    with pytest.raises(DivergedError, match="every update of the round"):
        broken_rounds(1, set(range(6)))


@pytest.mark.parametrize("direction", ["previous", "same_round"])
def test_projections_stay_where_the_global_direction_is_zero(direction: str) -> None:
    """|g| = 0 says nothing about a client. Setting c to 0 would put it above clients with c < 0."""
    selector = gpfl(init="none", global_direction=direction)
    selector.projections[:] = [1.0, 2.0, 3.0]
    engine = ToyEngine([1] * 3)
    context = toy_clients([1] * 3, selector.needs)._context
    data = toy_components(engine, selector.population, selector, validation=True).server_data
    server = Server(engine, data, context, {"w": torch.zeros(2)})
    selector.observe(2, toy_cohort([0, 2], [1, 1], [[0, 0], [0, 0]]), server)
    selector.observe(3, toy_cohort([0, 2], [1, 1], [[1, 1], [2, 2]]), server)
    assert selector.projections.tolist() == [1, 2, 3]


def test_a_round_in_which_nothing_arrives_multiplies_no_reward() -> None:
    """Nothing arrives in time in round 3, so that the accuracy of the model does not change."""
    selector = gpfl(6, 2)
    clock = fixed_clock(6, 2)
    run = toy_run(selector, validation=True, simulated_clock=clock)
    run.step()
    run.step()
    assert selector.reward_factor() > 2
    clock.system.deadline = 0.5
    assert run.step().uploaded == 0
    assert selector.reward_factor() == 1
    before = selector.reward_sum.copy()
    run.step()
    assert selector.reward_sum - before == pytest.approx(softmax(selector.projections))


# --- whole runs of the paper's rule, against a rewriting with lists


class Moving(ToyEngine):
    """Client i moves the model by its own vector, drawn anew every round. Accuracies repeat, losses
    do not."""

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
    """Equations 3 to 8 and Algorithm 1 for k of n clients in each of `num_rounds` rounds."""

    def __init__(self, n: int, k: int, num_rounds: int, rho: float) -> None:
        self.k = k
        self.num_rounds = num_rounds
        self.rho = rho
        self.w = np.zeros(2)
        self.rewards: list[list[float]] = [[] for _ in range(n)]
        self.times = [1] * n  # the initialisation counts for every client

    def step(self, t: int, trained: list[int]) -> NDArray[np.float64]:
        """Move the model by the mean of the clients' updates; return the server's direction."""
        before = self.w
        self.w = before + np.mean([move_of(i, t) for i in trained], axis=0)
        for i in trained:
            self.times[i] += 1
        return (before - self.w) / rate(t)

    def run(self) -> tuple[list[list[int]], set[str]]:
        """Return the clients of each round, and the branches of Equation 8 that occurred."""
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
            shares = softmax(c)  # Eq. 5
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
