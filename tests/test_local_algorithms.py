"""Local algorithms: numbers by hand, limits in which they are plain averaging, and every choice in
whole runs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsim.clients.local_algorithms import (
    FedDyn,
    FedNova,
    FedProx,
    LocalAlgorithm,
    LocalTraining,
    Scaffold,
)
from fedsim.config.compose import search_path
from fedsim.core.errors import ConfigError
from fedsim.core.rng import Streams
from fedsim.core.types import Cohort, Correction, Ids, Params
from fedsim.engine.data import ClientData
from fedsim.engine.model import initial
from fedsim.engine.optimizers import SGD, Constant
from fedsim.engine.schedule import LocalWork
from fedsim.models.mlp import Logistic
from fedsim.rounds.aggregators import Aggregator, FedAvg
from fedsim.rounds.checks import AggregationError
from fedsim.rounds.loop import Simulation
from fedsim.running.assembly import build
from fedsim.selectors.random import Random
from tests.checkpoint_toys import through_a_file
from tests.engines import batched, graph, native, reference
from tests.run_toys import Run, plan_of
from tests.test_checkpoint import without_seconds
from tests.test_lanes import LANES, results
from tests.test_simulation import Scripted
from tests.toys import ToyEngine, toy_cohort, toy_components, toy_population

CHOICES = sorted(
    p.stem for p in (Path(__file__).parents[1] / "conf" / "local_algorithm").glob("*.yaml")
)
EQUAL, BY_SIZE = (FedAvg(frozenset(), weighting=weighting) for weighting in ("uniform", "by_size"))
TARGETS = torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64)


class Quadratic(ToyEngine):
    """Client k minimises (w - b_k)^2 / 2 in steps of gradient descent: two for up to 4 samples,
    four for up to 8."""

    def train(
        self, params: Params, ids: Ids, round: int, lr: float, *more: Any, **named: Any
    ) -> Cohort:
        pull, shift = (more[1] or Correction()).pull, (more[1] or Correction()).shift
        cohort, ends = super().train(params, ids, round, lr), []
        for row, (client, steps) in enumerate(zip(ids, cohort.steps, strict=True)):
            w = params["w"].clone()
            for _ in range(steps):
                w -= lr * (
                    w - TARGETS[client] + pull * w + (0.0 if shift is None else shift["w"][row])
                )
            ends.append(w - params["w"] if client not in self.broken else w * torch.nan)
        return replace(cohort, delta={"w": torch.stack(ends)})

    def client_gradients(
        self, params: Params, positions: Sequence[Any], names: Any = None
    ) -> Iterator[Tensor]:
        yield from (params["w"] - TARGETS[self.owner[own[0]]] for own in positions)


def run(
    algorithm: LocalAlgorithm,
    *selections: Any,
    sizes: Sequence[int] = (4, 4),
    rounds: int = 2,
    aggregator: Aggregator = EQUAL,
) -> Simulation:
    """A run from w = 0 with learning rate 1/2, in which w becomes (w + b_k) / 2 in a plain step;
    not begun yet."""
    population, engine = toy_population(sizes, 2, rounds), Quadratic(sizes)
    selector = Scripted(population, selections or [list(range(len(sizes)))])
    selector.adaptive = True
    parts = toy_components(engine, population, selector, learning_rate=lambda t: 0.5)
    parts = replace(parts, local_algorithm=algorithm, eval_every=rounds, aggregator=aggregator)
    return Simulation(parts, {"w": torch.zeros(2, dtype=torch.float64)})


def way(simulation: Simulation) -> list[float]:
    return [float(simulation.params["w"][0]) for _ in simulation]


def test_a_proximal_term_by_hand() -> None:
    """mu = 1: w - ((w - b_k) + (w - w_t)) / 2 = (b_k + w_t) / 2 after any number of steps."""
    assert way(run(FedProx(mu=1.0))) == [(1 + 5) / 4, (1 + 5) / 4 + 1.5 / 2]
    assert way(run(LocalAlgorithm())) == [2.25, 0.25 * 2.25 + 2.25]  # w_k = w_t / 4 + 3 b_k / 4


def test_control_variates_by_hand() -> None:
    """Option II. Round 1: y = (.75, 3.75), c_k = -y_k / (2 / 2), c = -2.25. Round 2: c - c_k =
    (-1.5, 1.5), so that each step halves the distance to b_k - (c - c_k) = (2.5, 3.5), from 2.25: y
    = (2.4375, 3.1875)."""
    algorithm = Scaffold(option="II", server_lr=1.0)
    assert way(run(algorithm)) == [2.25, (2.4375 + 3.1875) / 2]
    first, second = (
        -0.75 + 2.25 + (2.25 - 2.4375),
        -3.75 + 2.25 + (2.25 - 3.1875),
    )  # c_k - c + (x - y_k) / (K eta)
    assert [float(c[0]) for c in algorithm.variates.values()] == [first, second]
    assert float(cast(Tensor, algorithm.mean)[0]) == (first + second) / 2
    assert way(run(Scaffold(option="II", server_lr=2.0), rounds=1)) == [4.5]
    # option I: c_k = x - b_k = (-1, -5), c = -3: both go from 2.25 to 3, the minimum of the mean,
    # by 3/4 of the way
    simulation = run(Scaffold(option="I", server_lr=1.0))
    assert simulation.step().train_samples == 2 * (2 * 4 + 4)  # two epochs, and the gradient
    assert [2.25, *way(simulation)] == [2.25, 2.25 + 0.75 * 0.75]


def test_variates_of_a_part_of_the_clients_by_hand() -> None:
    """Round 1: y_0 = .75, c_0 = -.75, c = -.75 / 2. Round 2: client 1 goes from .75 to 5 + .375 by
    3/4 of the way."""
    algorithm, end = Scaffold(option="II", server_lr=1.0), 0.25 * 0.75 + 0.75 * 5.375
    assert way(run(algorithm, [0], [1])) == [0.75, end]
    assert float(cast(Tensor, algorithm.mean)[0]) == -0.375 + (0.375 + 0.75 - end) / 2


def test_dynamic_regularisation_by_hand() -> None:
    """alpha = 1. Round 1: w_k = (.5, 2.5), g_k = -w_k, h = -1.5, w = 1.5 + 1.5. Round 2: a step
    leads to (b_k + g_k + 3) / 2 = (1.75, 2.75), g = (.75, -2.25), h = -1.5 + 1.5 / 2, w = 2.25 +
    .75: the minimum, kept."""
    algorithm = FedDyn(alpha=1.0)
    assert way(run(algorithm)) == [3.0, 3.0]
    assert [float(g[0]) for g in algorithm.gradients.values()] == [0.75, -2.25]
    part = FedDyn(alpha=1.0)
    assert way(run(part, [0], [1])) == [
        0.5 + 0.25,
        (5 + 0.75) / 2 + 0.25 + (2.875 - 0.75) / 2,
    ]  # h is of both clients
    assert list(part.gradients) == [0, 1]


def test_control_variates_by_size_by_hand() -> None:
    """Sizes 4 and 8, so p = (1/3, 2/3); two and four steps: y = (3/4, 15/16 of 5), c_k = -y_k / (K
    / 2)."""
    algorithm = Scaffold(option="II", server_lr=1.0)
    assert way(run(algorithm, sizes=(4, 8), rounds=1, aggregator=BY_SIZE)) == [
        pytest.approx((0.75 + 2 * 4.6875) / 3)
    ]
    assert [float(c[0]) for c in algorithm.variates.values()] == [-0.75, -4.6875 / 2]
    assert float(cast(Tensor, algorithm.mean)[0]) == pytest.approx((-0.75 - 2 * 4.6875 / 2) / 3)


def test_dynamic_regularisation_by_size_by_hand() -> None:
    """alpha = 1, p = (1/3, 2/3): w_k = (0.5, 2.5), h = -(0.5 + 2 * 2.5) / 3 = -11/6, and w = 11/6 +
    11/6."""
    algorithm = FedDyn(alpha=1.0)
    assert way(run(algorithm, sizes=(4, 8), rounds=1, aggregator=BY_SIZE)) == [
        pytest.approx(11 / 3)
    ]
    assert float(cast(Tensor, algorithm.sum)[0]) == pytest.approx(-11 / 6)
    part = FedDyn(alpha=1.0)  # of p_1 = 1/3 of all clients, though its weight in the round is 1
    assert way(run(part, [0], sizes=(4, 8), rounds=1, aggregator=BY_SIZE)) == [
        pytest.approx(0.5 + 0.5 / 3)
    ]


CONTROLLED: dict[str, Callable[[], LocalAlgorithm]] = {
    "scaffold I": lambda: Scaffold(option="I", server_lr=1.0),
    "scaffold II": lambda: Scaffold(option="II", server_lr=1.0),
    "feddyn": lambda: FedDyn(alpha=0.3),
}
"""Algorithms that minimise the objective itself, however many steps clients make."""
SIZES = (4, 4, 8, 12, 20, 48)
DECAY = 0.1


def logistic_regression(
    algorithm: LocalAlgorithm,
    aggregator: Aggregator,
    cohort_size: int,
    build: Any = batched,
    rounds: int = 60,
) -> Simulation:
    """Six clients of unequal size and unlike labels: five full steps a round, in double precision;
    weight decay."""
    rng, owners = np.random.default_rng(0), np.repeat(np.arange(6), SIZES)
    x = rng.standard_normal((len(owners), 4))
    logits = np.einsum("ni,nij->nj", x, rng.standard_normal((6, 4, 3))[owners])
    positions = [np.flatnonzero(owners == client) for client in range(6)]
    data = ClientData(
        torch.from_numpy(x), torch.from_numpy(logits.argmax(1)), positions, positions, 3
    )
    torch.manual_seed(0)
    optimizer = SGD(lr=0.5, schedule=Constant(), momentum=0.0, nesterov=False, weight_decay=DECAY)
    work = LocalWork(epochs=None, steps=5, batch_size=max(SIZES))
    engine = build(Logistic((4,), 3).double(), data, work, optimizer, Streams(0))
    population = toy_population(SIZES, cohort_size, rounds)
    selector = Random(population, mode="uniform")
    parts = toy_components(
        ToyEngine(SIZES), population, selector, learning_rate=lambda t: 0.5, eval_every=rounds
    )
    test = replace(parts.server_data.test, x=data.x, y=data.y)
    parts = replace(parts, engine=engine, server_data=replace(parts.server_data, test=test))
    parts = replace(parts, aggregator=aggregator, local_algorithm=algorithm)
    return Simulation(parts, initial(engine.workload.model))


def slopes(simulation: Simulation) -> dict[str, float]:
    """The length of the objective's gradient at the model after all rounds, by the weighting of
    clients."""
    assert list(simulation)
    engine, params = simulation.components.engine, simulation.params
    gradients = torch.stack(
        list(engine.client_gradients(params, [engine.data.train[i] for i in range(6)]))
    )
    decay = DECAY * torch.cat([value.flatten() for value in params.values()])
    shares = {"uniform": np.full(6, 1 / 6), "by_size": np.array(SIZES) / sum(SIZES)}
    return {
        name: float((torch.as_tensor(p) @ gradients + decay).norm()) for name, p in shares.items()
    }


@pytest.mark.parametrize("cohort_size", [6, 3])
@pytest.mark.parametrize("name", CONTROLLED)
def test_the_aggregators_weighting_alone_decides_which_objective_is_minimised(
    name: str, cohort_size: int
) -> None:
    """The slope of one objective at the minimum of the other is 0.17."""
    equal, by_size = (
        slopes(logistic_regression(CONTROLLED[name](), one, cohort_size))
        for one in (EQUAL, BY_SIZE)
    )
    assert equal["uniform"] < 1e-4
    assert by_size["by_size"] < 1e-4
    assert min(equal["by_size"], by_size["uniform"]) > 0.1


@pytest.mark.parametrize(
    "algorithm", [FedProx(mu=0.1), FedNova(mu=0.0)], ids=["fedprox", "fednova"]
)
@pytest.mark.parametrize("aggregator", [EQUAL, BY_SIZE], ids=["uniform", "by_size"])
def test_fedprox_and_fednova_minimise_the_aggregators_objective_where_clients_do_not_drift(
    algorithm: LocalAlgorithm, aggregator: Aggregator
) -> None:
    simulation = logistic_regression(algorithm, aggregator, 6, rounds=150)
    simulation.components.engine.work = LocalWork(epochs=None, steps=1, batch_size=max(SIZES))
    assert slopes(simulation)[aggregator.weighting] < 1e-4


@pytest.mark.parametrize("build", [reference, native, graph], ids=["sequential", "native", "graph"])
@pytest.mark.parametrize("name", CONTROLLED)
def test_engines_agree_on_control_terms_by_size(name: str, build: Any) -> None:
    expected, other = (
        logistic_regression(CONTROLLED[name](), BY_SIZE, 3, one, 3) for one in (batched, build)
    )
    assert list(expected)
    assert list(other)
    for tensor, value in expected.params.items():
        torch.testing.assert_close(other.params[tensor], value, rtol=1e-10, atol=1e-10)


def test_a_hostile_update_reaches_the_model_through_h_whatever_the_aggregator() -> None:
    """Which is why a robust aggregator is rejected with FedDyn: the median is 0.5, and w moves by
    300 / 3 more."""
    updates = toy_cohort([0, 1, 2], [1, 1, 1], [[0.5, 0.0], [0.5, 0.0], [299.0, 0.0]])
    combined = FedDyn(alpha=1.0).combine(
        updates, replace(training(), num_clients=3, scales=lambda: np.ones(3))
    )
    assert combined.delta["w"][:, 0].median() == 0.5 + 300 / 3


def test_normalised_averaging_by_hand() -> None:
    """Two and four steps: y = (3/4, 15/16 of 5); tau_eff = 3, or (2 + 3 * 4) / 4 with a selector's
    weights."""
    assert way(run(FedNova(mu=0.0), sizes=(4, 8), rounds=1)) == [
        (3 / 2 * 0.75 + 3 / 4 * 4.6875) / 2
    ]
    weighted = FedNova(mu=0.0).combine(
        replace(COHORT, steps=np.array([2, 4])), training(np.array([0.25, 0.75]))
    )
    assert weighted.delta["w"].tolist() == [[2.0 * 3.5 / 2, 0.0], [4.0 * 3.5 / 4, 8.0 * 3.5 / 4]]


COHORT = toy_cohort([0, 1], [1, 3], [[2.0, 0.0], [4.0, 8.0]])


def training(weights: Any = 0.5, momentum: float = 0.0, nesterov: bool = False) -> LocalTraining:
    optimizer = SGD(
        lr=0.1, schedule=Constant(), momentum=momentum, nesterov=nesterov, weight_decay=0.0
    )
    return LocalTraining(
        0.1, optimizer, 2, lambda: np.ones(2), lambda: weights, lambda: torch.ones(2, 2)
    )


def test_the_lengths_of_normalised_averaging_are_those_of_the_papers_table() -> None:
    t, rho, alpha = np.arange(8), 0.9, 0.1 * 2
    assert FedNova(mu=0.0).lengths(7, training()).tolist() == t.tolist()
    assert FedNova(mu=2.0).lengths(7, training()) == pytest.approx((1 - (1 - alpha) ** t) / alpha)
    momentum = (t - rho * (1 - rho**t) / (1 - rho)) / (1 - rho)
    assert FedNova(mu=0.0).lengths(7, training(momentum=rho)) == pytest.approx(momentum)
    ahead = rho * momentum + t  # each step is along g + rho v
    assert FedNova(mu=0.0).lengths(7, training(momentum=rho, nesterov=True)) == pytest.approx(ahead)


def test_running_statistics_are_averaged_as_they_are() -> None:
    start = {"w": torch.zeros(2), "v": torch.zeros(1)}
    cohort = replace(
        COHORT, delta={**COHORT.delta, "v": torch.ones(2, 1)}, start=start, steps=np.array([2, 4])
    )
    for algorithm in (FedNova(mu=0.0), Scaffold(option="II", server_lr=2.0), FedDyn(alpha=1.0)):
        found = algorithm.combine(cohort, training()).delta
        assert torch.equal(found["v"], torch.ones(2, 1))
        assert not torch.equal(found["w"], cohort.delta["w"])


def test_full_participation_with_one_step_is_plain() -> None:
    algorithms = (
        LocalAlgorithm(),
        Scaffold(option="II", server_lr=1.0),
        Scaffold(option="I", server_lr=1.0),
    )
    runs = [run(algorithm, sizes=(4, 4, 4), rounds=6) for algorithm in algorithms]
    for simulation in runs:
        simulation.components.engine.work = LocalWork(epochs=None, steps=1, batch_size=4)
    plain, second, first = (way(simulation) for simulation in runs)
    assert second == pytest.approx(plain, rel=0, abs=1e-12)
    assert first == pytest.approx(plain, rel=0, abs=1e-12)


def test_an_update_that_is_not_finite_changes_no_state() -> None:
    for algorithm in (Scaffold(option="II", server_lr=1.0), FedDyn(alpha=1.0)):
        simulation = run(algorithm)
        cast(Quadratic, simulation.components.engine).broken = {1}
        assert simulation.step().dropped_updates == 1
        assert list(next(iter(algorithm.state_dict().values()))) == [0]


@pytest.mark.parametrize(
    ("fault", "text"), [(0, "modified the updates' w in place"), (1, "`combine`, not None")]
)
def test_faults_of_a_users_class_name_it(
    fault: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FedProx,
        "combine",
        lambda self, cohort, training: None if fault else cohort.delta["w"].mul_(2),
    )
    with pytest.raises(AggregationError, match=f"round 1: FedProx .*{text}"):
        run(FedProx(mu=1.0)).step()


WORDS = [
    "num_clients=6",
    "cohort_size=2",
    "num_rounds=3",
    "local.epochs=1",
    "tracker=files_only",
    "device=cpu",
]
WORDS += ["partition=dirichlet_class", "server.public_samples=20"]


def built(*words: str) -> Simulation:
    with search_path():
        return build(plan_of(*words)).simulation


def model_after(*words: str) -> list[list[float]]:
    simulation = built(*WORDS, *words)
    assert list(simulation)
    return [value.flatten().tolist() for value in simulation.params.values()]


def test_plain_limits_are_so_to_the_bit() -> None:
    for words in ([], ["local.epochs=null", "local.steps=3", "optimizer.momentum=0.9"]):
        plain = model_after(*words)
        assert model_after(*words, "local_algorithm=fedprox", "local_algorithm.mu=0") == plain
        assert (model_after(*words, "local_algorithm=fednova") == plain) == (
            "local.steps=3" in words
        )


@pytest.mark.parametrize("backend", ["batched", "sequential"])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_run_of_every_choice_goes_on_exactly_and_is_charged(choice: str, backend: str) -> None:
    words = [
        *WORDS,
        f"local_algorithm={choice}",
        f"engine={backend}",
        "system=lognormal",
        "system.over_selection=2",
    ]
    words += ["aggregator=by_size"]  # sizes differ
    whole, second = built(*words), built(*words)
    first = whole.step()
    second.load_state_dict(through_a_file(whole.state_dict()))
    rest = list(whole)
    assert [without_seconds(record) for record in second] == [
        without_seconds(record) for record in rest
    ]
    assert all(torch.equal(second.params[name], value) for name, value in whole.params.items())
    algorithm, model = (
        whole.components.local_algorithm,
        sum(value.nbytes for value in whole.params.values()),
    )
    assert (algorithm.extra_down, algorithm.extra_up) == (
        (1, 1) if choice == "scaffold" else (0, 0)
    )
    arrived: set[int] = set()
    for record in (first, *rest):
        assert record.bytes_down == (1 + algorithm.extra_down) * model * record.trained
        arrived |= {*record.selected} - {*(record.late or ())}
    states = [
        v for v in second.components.local_algorithm.state_dict().values() if isinstance(v, dict)
    ]
    known = {client for value in states for client in value}
    assert known == (arrived if algorithm.kept_vectors else set()) != set(range(6))


@pytest.mark.parametrize(
    "selector", ["power_of_choice_trained", "fedabc", "gpfl", "pncs selector.layers=[layers.1]"]
)
def test_control_variates_are_charged_once_and_change_for_the_selected_alone(selector: str) -> None:
    words = [*WORDS, *f"selector={selector}".split(), "num_rounds=1"]
    runs = [built(*words, f"local_algorithm={one}") for one in ("plain", "scaffold")]
    plain, other = (simulation.step() for simulation in runs)
    size = sum(value.nbytes for value in runs[0].params.values())
    assert (plain.selected, plain.trained, plain.uploaded) == (
        other.selected,
        other.trained,
        other.uploaded,
    )
    assert other.bytes_down - plain.bytes_down == size * plain.trained
    assert other.bytes_up - plain.bytes_up == size * plain.uploaded
    assert list(cast(Scaffold, runs[1].components.local_algorithm).variates) == plain.selected


def test_lanes_are_the_runs_that_they_are_alone(fedsim: Run, tmp_path: Path) -> None:
    sweep = ["-m", f"local_algorithm={','.join(CHOICES)}", "seed=0,1", "engine=batched"]
    assert fedsim(*sweep, "name=alone") == fedsim(*sweep, "name=lanes", LANES) == 0
    alone, together = (results(tmp_path / "outputs" / name) for name in ("alone", "lanes"))
    assert len(alone) == 2 * len(CHOICES)
    assert alone == together


REFUSED = {
    "fednova optimizer=adam": r"local_algorithm='FedNova': normalises updates of SGD.* not of Adam\n.*optimizer=sgd",
    "fednova local_algorithm.mu=11": r"local_algorithm\.mu=11\.0: must be at most 1 / optimizer\.lr=0\.1",
    "fednova aggregator=median": r"aggregator='median': must be a mean of .* FedNova.*\n.*by_size",
    **{
        f"feddyn aggregator={aggregator}": rf"aggregator='{aggregator}': must be a plain mean for FedDyn, .*\n.*by_size"
        for aggregator in (
            "fedavgm",
            "fedadam",
            "mifa",
            "median",
            "krum",
            "geometric_median",
            "norm_clipping",
        )
    },
    "scaffold aggregator=dp_fedavg": r"aggregator='dp_fedavg': must not be private with Scaffold.*\n.*fedprox",
    "fednova init_seed=per_client": r"init_seed='per_client': must be null or a number for FedNova.*\n.*=null",
    "scaffold optimizer.momentum=0.9": r"local_algorithm\.option='II': .* plain SGD\n.*local_algorithm\.option=I$",
    "feddyn optimizer=adam optimizer.decoupled=true optimizer.weight_decay=1": r"FedDyn.*\n.*decoupled=false",
}
ALLOWED = (
    "scaffold local_algorithm.option=I optimizer=adam",
    "feddyn optimizer=adam",
    "fedprox aggregator=fedadam",
)
ALLOWED += ("feddyn aggregator=by_size", "scaffold local_algorithm.option=I aggregator=fedavgm")


@pytest.mark.parametrize("words", REFUSED)
def test_what_makes_no_sense_is_refused(words: str) -> None:
    with search_path(), pytest.raises(ConfigError, match=REFUSED[words]):
        plan_of(*f"local_algorithm={words}".split())


def test_what_makes_sense_is_not_and_plain_leaves_the_config_as_it_was() -> None:
    with search_path():
        assert all(
            plan_of(*f"local_algorithm={words}".split(), "init_seed=per_client")
            for words in ALLOWED
        )
        assert "local_algorithm" not in plan_of("local_algorithm=plain").config
    assert "up to 9.8 GiB of" in str(Scaffold(option="I", server_lr=1.0).warning(10_000, 2**20))
    assert LocalAlgorithm().warning(10**6, 10**6) is None
