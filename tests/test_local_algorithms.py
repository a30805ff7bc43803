"""Local algorithms: by hand, in limits in which they are plain averaging, and in whole runs."""

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
from fedsim.core.arrays import Floats
from fedsim.core.errors import ConfigError
from fedsim.core.rng import Streams
from fedsim.core.types import Cohort, Correction, Ids, Params, Selection
from fedsim.engine.data import ClientData
from fedsim.engine.model import initial
from fedsim.engine.optimizers import SGD, Constant
from fedsim.engine.schedule import LocalWork
from fedsim.models.mlp import Logistic
from fedsim.rounds.aggregators import Aggregator, FedAvg
from fedsim.rounds.checks import AggregationError
from fedsim.rounds.loop import Simulation
from fedsim.running.assembly import build
from fedsim.selectors.full import Full
from fedsim.selectors.random import Random
from tests.checkpoint_toys import through_a_file
from tests.engines import batched, graph, native, reference
from tests.run_toys import Run, plan_of
from tests.test_checkpoint import without_seconds
from tests.test_lanes import LANES, results
from tests.test_simulation import Scripted
from tests.toys import ToyEngine, toy_cohort, toy_components, toy_params, toy_population

CONF = Path(__file__).parents[1] / "conf" / "local_algorithm"
CHOICES = sorted(path.stem for path in CONF.glob("*.yaml"))
EQUAL = FedAvg(frozenset(), weighting="uniform")
BY_SIZE = FedAvg(frozenset(), weighting="by_size")
TARGETS = torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64)
"""b_k of the clients 0, 1 and 2."""


class Quadratic(ToyEngine):
    """Client k minimises (w - b_k)^2 / 2 by gradient descent: two steps for up to 4 samples, four
    for up to 8."""

    def train(
        self,
        params: Params,
        ids: Ids,
        round: int,
        lr: float,
        start: Any = None,
        correction: Correction | None = None,
    ) -> Cohort:
        cohort = super().train(params, ids, round, lr)
        correction = correction or Correction()
        updates = []
        for row, (client, steps) in enumerate(zip(ids, cohort.steps, strict=True)):
            w = params["w"].clone()
            shift = 0.0 if correction.shift is None else correction.shift["w"][row]
            for _ in range(steps):
                w -= lr * (w - TARGETS[client] + correction.pull * w + shift)
            if client in self.broken:
                w *= torch.nan
            updates.append(w - params["w"])
        return replace(cohort, delta={"w": torch.stack(updates)})

    def client_gradients(
        self, params: Params, positions: Sequence[Any], names: Any = None
    ) -> Iterator[Tensor]:
        for samples in positions:
            yield params["w"] - TARGETS[self.owner[samples[0]]]


def simulate(
    algorithm: LocalAlgorithm,
    *selections: Any,
    sizes: Sequence[int] = (4, 4),
    rounds: int = 2,
    aggregator: Aggregator = EQUAL,
) -> Simulation:
    """Return a run from w = 0 with learning rate 1/2, in which a plain step gives (w + b_k) / 2.

    Without `selections`, all clients take part in every round.
    """
    population = toy_population(sizes, 2, rounds)
    everybody = list(range(len(sizes)))
    selector = Scripted(population, selections or [everybody])
    selector.adaptive = True
    components = replace(
        toy_components(Quadratic(sizes), population, selector, learning_rate=lambda t: 0.5),
        local_algorithm=algorithm,
        eval_every=rounds,
        aggregator=aggregator,
    )
    return Simulation(components, {"w": torch.zeros(2, dtype=torch.float64)})


def models(simulation: Simulation) -> list[float]:
    """Run all rounds and return w after each."""
    return [float(simulation.params["w"][0]) for _ in simulation]


def first_entries(vectors: dict[int, Tensor]) -> list[float]:
    return [float(vector[0]) for vector in vectors.values()]


def first_entry(vector: Tensor | None) -> float:
    assert vector is not None
    return float(vector[0])


def test_plain_training() -> None:
    """After two steps w_k = w / 4 + 3 b_k / 4; the mean of the b_k is 3."""
    assert models(simulate(LocalAlgorithm())) == [0.75 * 3, 0.25 * 2.25 + 0.75 * 3]


def test_a_proximal_term() -> None:
    """mu = 1: w - ((w - b_k) + (w - w_t)) / 2 = (b_k + w_t) / 2 after any number of steps."""
    assert models(simulate(FedProx(mu=1.0))) == [3 / 2, 3 / 2 + 1.5 / 2]


def test_control_variates_of_option_2() -> None:
    """c_k+ = c_k - c + (x - y_k) / (K eta) with K eta = 2 / 2.

    Round 1: y = (0.75, 3.75), c_k = -y_k, c = -2.25. Round 2 begins at x = 2.25. c - c_k =
    (-1.5, 1.5), so each step halves the distance to b_k - (c - c_k) = (2.5, 3.5): y = (2.4375,
    3.1875).
    """
    algorithm = Scaffold(option="II", server_lr=1.0)
    assert models(simulate(algorithm)) == [2.25, (2.4375 + 3.1875) / 2]
    variates = [-0.75 + 2.25 + (2.25 - 2.4375), -3.75 + 2.25 + (2.25 - 3.1875)]
    assert first_entries(algorithm.variates) == variates
    assert first_entry(algorithm.mean) == sum(variates) / 2


def test_the_servers_learning_rate_multiplies_the_update() -> None:
    assert models(simulate(Scaffold(option="II", server_lr=2.0), rounds=1)) == [2 * 2.25]


def test_control_variates_of_option_1() -> None:
    """c_k = x - b_k = (-1, -5), c = -3: both clients go from 2.25 to 3, the minimum of the mean, by
    3/4 of the way. Two epochs and the gradient pass 3 x 4 samples each."""
    simulation = simulate(Scaffold(option="I", server_lr=1.0))
    assert simulation.step().train_samples == 2 * 3 * 4
    assert models(simulation) == [2.25 + 0.75 * 0.75]


def test_variates_of_some_of_the_clients() -> None:
    """Round 1: y_0 = 0.75, c_0 = -0.75, c = -0.75 / 2. Round 2: client 1 goes from 0.75 to 5 +
    0.375 by 3/4 of the way."""
    algorithm = Scaffold(option="II", server_lr=1.0)
    end = 0.25 * 0.75 + 0.75 * 5.375
    assert models(simulate(algorithm, [0], [1])) == [0.75, end]
    new_variate = 0.375 + 0.75 - end
    assert first_entry(algorithm.mean) == -0.375 + new_variate / 2


def test_control_variates_by_size() -> None:
    """Sizes 4 and 8, so p = (1/3, 2/3), and two and four steps: y = (3/4, 15/16 of 5 = 4.6875),
    c_k = -y_k / (K / 2)."""
    algorithm = Scaffold(option="II", server_lr=1.0)
    (model,) = models(simulate(algorithm, sizes=(4, 8), rounds=1, aggregator=BY_SIZE))
    assert model == pytest.approx((0.75 + 2 * 4.6875) / 3)
    assert first_entries(algorithm.variates) == [-0.75, -4.6875 / 2]
    assert first_entry(algorithm.mean) == pytest.approx((-0.75 - 2 * 4.6875 / 2) / 3)


def test_dynamic_regularisation() -> None:
    """alpha = 1. Round 1: w_k = (0.5, 2.5), g_k = -w_k, h = -1.5, w = 1.5 + 1.5. Round 2: a step
    leads to (b_k + g_k + 3) / 2 = (1.75, 2.75), g = (0.75, -2.25), h = -1.5 + 1.5 / 2, w = 2.25 +
    0.75: the minimum, kept."""
    algorithm = FedDyn(alpha=1.0)
    assert models(simulate(algorithm)) == [3.0, 3.0]
    assert first_entries(algorithm.gradients) == [0.75, -2.25]


def test_dynamic_regularisation_of_some_of_the_clients() -> None:
    """h is divided by all clients. Round 1: w_0 = 0.5, h = -0.25. Round 2: w_1 = (5 + 0.75) / 2 =
    2.875, h = -0.25 - (2.875 - 0.75) / 2."""
    algorithm = FedDyn(alpha=1.0)
    first = 0.5 + 0.25
    second = 2.875 + 0.25 + (2.875 - 0.75) / 2
    assert models(simulate(algorithm, [0], [1])) == [first, second]
    assert list(algorithm.gradients) == [0, 1]


def test_dynamic_regularisation_by_size() -> None:
    """alpha = 1, p = (1/3, 2/3): w_k = (0.5, 2.5), h = -(0.5 + 2 * 2.5) / 3 = -11/6, and w = 11/6 +
    11/6."""
    algorithm = FedDyn(alpha=1.0)
    (model,) = models(simulate(algorithm, sizes=(4, 8), rounds=1, aggregator=BY_SIZE))
    assert model == pytest.approx(11 / 3)
    assert first_entry(algorithm.sum) == pytest.approx(-11 / 6)


def test_dynamic_regularisation_by_size_of_some_of_the_clients() -> None:
    """p_1 = 1/3 is that among all clients, although the client's weight in the round is 1."""
    run = simulate(FedDyn(alpha=1.0), [0], sizes=(4, 8), rounds=1, aggregator=BY_SIZE)
    assert models(run) == [pytest.approx(0.5 + 0.5 / 3)]


def test_dynamic_regularisation_subtracts_h_once_whatever_the_weights_add_up_to() -> None:
    """alpha = 1: w_k = (0.5, 2.5) and h = -1.5, so w = 0.5 + 0.5 * 2.5 + 1.5."""
    selection = Selection(np.array([0, 1]), np.array([1.0, 0.5]))
    assert models(simulate(FedDyn(alpha=1.0), selection, rounds=1)) == [3.25]


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
    """Return a run of six clients of unequal size and unlike labels, with five full steps a round
    and weight decay, in double precision."""
    rng = np.random.default_rng(0)
    owners = np.repeat(np.arange(6), SIZES)
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
    """Run all rounds, and return the length of the objective's gradient at the model, for each
    weighting of clients."""
    assert list(simulation)
    engine, params = simulation.components.engine, simulation.params
    gradients = torch.stack(list(engine.client_gradients(params, engine.data.train)))
    decay = DECAY * torch.cat([value.flatten() for value in params.values()])
    by_size = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
    return {
        "uniform": float((gradients.mean(0) + decay).norm()),
        "by_size": float((by_size @ gradients + decay).norm()),
    }


@pytest.mark.parametrize("cohort_size", [6, 3])
@pytest.mark.parametrize("name", CONTROLLED)
def test_the_aggregators_weighting_alone_decides_which_objective_is_minimised(
    name: str, cohort_size: int
) -> None:
    """The slope of one objective at the minimum of the other is 0.17."""
    equal = slopes(logistic_regression(CONTROLLED[name](), EQUAL, cohort_size))
    by_size = slopes(logistic_regression(CONTROLLED[name](), BY_SIZE, cohort_size))
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
    expected = logistic_regression(CONTROLLED[name](), BY_SIZE, 3, batched, rounds=3)
    simulation = logistic_regression(CONTROLLED[name](), BY_SIZE, 3, build, rounds=3)
    assert len(list(expected)) == len(list(simulation)) == 3
    for tensor, value in expected.params.items():
        torch.testing.assert_close(simulation.params[tensor], value, rtol=1e-10, atol=1e-10)


COHORT = toy_cohort([0, 1], [1, 3], [[2.0, 0.0], [4.0, 8.0]])


def training(
    weights: Floats | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
    num_clients: int = 2,
) -> LocalTraining:
    optimizer = SGD(
        lr=0.1, schedule=Constant(), momentum=momentum, nesterov=nesterov, weight_decay=0.0
    )
    return LocalTraining(
        lr=0.1,
        optimizer=optimizer,
        num_clients=num_clients,
        scales=lambda: np.ones(num_clients),
        weights=lambda: np.full(num_clients, 1 / num_clients) if weights is None else weights,
        total_weight=lambda: 1.0,
        gradients=lambda: torch.ones(2, 2),
    )


def test_a_hostile_update_reaches_the_model_through_h_even_with_the_median() -> None:
    """Therefore FedDyn rejects robust aggregators: the median is 0.5, and h adds 300 / 3."""
    updates = toy_cohort([0, 1, 2], [1, 1, 1], [[0.5, 0.0], [0.5, 0.0], [299.0, 0.0]])
    combined = FedDyn(alpha=1.0).combine(updates, training(num_clients=3))
    assert combined.delta["w"][:, 0].median() == 0.5 + 300 / 3


def test_normalised_averaging() -> None:
    """Two and four steps: y = (3/4, 15/16 of 5 = 4.6875), tau_eff = (2 + 4) / 2."""
    run = simulate(FedNova(mu=0.0), sizes=(4, 8), rounds=1)
    assert models(run) == [(3 / 2 * 0.75 + 3 / 4 * 4.6875) / 2]


def test_normalised_averaging_with_weights_of_a_selector() -> None:
    """tau_eff = 0.25 * 2 + 0.75 * 4 = 3.5."""
    cohort = replace(COHORT, steps=np.array([2, 4]))
    combined = FedNova(mu=0.0).combine(cohort, training(np.array([0.25, 0.75])))
    assert combined.delta["w"].tolist() == [[2.0 * 3.5 / 2, 0.0], [4.0 * 3.5 / 4, 8.0 * 3.5 / 4]]


def test_the_lengths_of_normalised_averaging_are_those_of_the_papers_table() -> None:
    t, rho, alpha = np.arange(8), 0.9, 0.1 * 2
    plain = FedNova(mu=0.0)
    assert plain.norms(7, training()).tolist() == t.tolist()
    proximal = (1 - (1 - alpha) ** t) / alpha
    assert FedNova(mu=2.0).norms(7, training()) == pytest.approx(proximal)
    momentum = (t - rho * (1 - rho**t) / (1 - rho)) / (1 - rho)
    assert plain.norms(7, training(momentum=rho)) == pytest.approx(momentum)
    nesterov = rho * momentum + t  # each step is along g + rho v
    assert plain.norms(7, training(momentum=rho, nesterov=True)) == pytest.approx(nesterov)


@pytest.mark.parametrize(
    "algorithm", [FedNova(mu=0.0), Scaffold(option="II", server_lr=2.0), FedDyn(alpha=1.0)]
)
def test_running_statistics_do_not_change(algorithm: LocalAlgorithm) -> None:
    start = {"w": torch.zeros(2), "v": torch.zeros(1)}
    delta = COHORT.delta | {"v": torch.ones(2, 1)}
    cohort = replace(COHORT, delta=delta, start=start, steps=np.array([2, 4]))
    combined = algorithm.combine(cohort, training()).delta
    assert torch.equal(combined["v"], torch.ones(2, 1))
    assert not torch.equal(combined["w"], cohort.delta["w"])


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_with_one_step_of_all_clients_is_plain(option: Any) -> None:
    plain = simulate(LocalAlgorithm(), sizes=(4, 4, 4), rounds=6)
    scaffold = simulate(Scaffold(option=option, server_lr=1.0), sizes=(4, 4, 4), rounds=6)
    for simulation in (plain, scaffold):
        simulation.components.engine.work = LocalWork(epochs=None, steps=1, batch_size=4)
    assert models(scaffold) == pytest.approx(models(plain), rel=0, abs=1e-12)


@pytest.mark.parametrize("algorithm", [Scaffold(option="II", server_lr=1.0), FedDyn(alpha=1.0)])
def test_an_update_that_is_not_finite_changes_no_state(algorithm: LocalAlgorithm) -> None:
    simulation = simulate(algorithm)
    cast(Quadratic, simulation.components.engine).broken = {1}
    assert simulation.step().dropped_updates == 1
    clients = list(algorithm.state_dict()[algorithm.state[0]])
    assert clients == [0]


def modifies_updates(self: Any, cohort: Cohort, training: Any) -> Cohort:
    cohort.delta["w"].mul_(2)
    return cohort


def returns_none(self: Any, cohort: Cohort, training: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("combine", "fault"),
    [(modifies_updates, "modified the updates' w in place"), (returns_none, "`combine`, not None")],
)
def test_a_faulty_local_algorithm_is_named(
    combine: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FedProx, "combine", combine)
    with pytest.raises(AggregationError, match=f"round 1: FedProx .*{fault}"):
        simulate(FedProx(mu=1.0)).step()


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


EQUAL_STEPS = ["local.epochs=null", "local.steps=3", "optimizer.momentum=0.9"]


@pytest.mark.parametrize("words", [[], EQUAL_STEPS], ids=["epochs", "equal steps"])
def test_fedprox_without_its_term_is_plain_to_the_bit(words: list[str]) -> None:
    plain = model_after(*words)
    assert model_after(*words, "local_algorithm=fedprox", "local_algorithm.mu=0") == plain


def test_fednova_is_plain_to_the_bit_if_all_clients_make_equal_steps() -> None:
    fednova = "local_algorithm=fednova"
    assert model_after(*EQUAL_STEPS, fednova) == model_after(*EQUAL_STEPS)
    assert model_after(fednova) != model_after()


@pytest.mark.parametrize("backend", ["batched", "sequential"])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_run_of_every_choice_resumes_exactly_and_is_charged(choice: str, backend: str) -> None:
    words = [
        *WORDS,
        f"local_algorithm={choice}",
        f"engine={backend}",
        "system=lognormal",
        "system.over_selection=2",
        "aggregator=by_size",
    ]
    whole, resumed = built(*words), built(*words)
    first = whole.step()
    resumed.load_state_dict(through_a_file(whole.state_dict()))
    rest = list(whole)
    # it resumes
    expected = [without_seconds(record) for record in rest]
    assert [without_seconds(record) for record in resumed] == expected
    for name, value in whole.params.items():
        assert torch.equal(resumed.params[name], value)
    # it is charged
    algorithm = whole.components.local_algorithm
    extra = (1, 1) if choice == "scaffold" else (0, 0)
    assert (algorithm.extra_down, algorithm.extra_up) == extra
    model_bytes = sum(value.nbytes for value in whole.params.values())
    arrived: set[int] = set()
    for record in (first, *rest):
        assert record.bytes_down == (1 + algorithm.extra_down) * model_bytes * record.trained
        arrived |= set(record.selected) - set(record.late or ())
    # it has the state of clients whose updates arrived
    clients: set[int] = set()
    for value in resumed.components.local_algorithm.state_dict().values():
        if isinstance(value, dict):
            clients |= set(value)
    assert clients == (arrived if algorithm.kept_vectors else set())
    assert arrived != set(range(6))


@pytest.mark.parametrize(
    "selector", ["power_of_choice_trained", "fedabc", "gpfl", "pncs selector.layers=[layers.1]"]
)
def test_control_variates_are_charged_once_and_change_only_for_the_selected(selector: str) -> None:
    words = [*WORDS, *f"selector={selector}".split(), "num_rounds=1"]
    run = built(*words, "local_algorithm=scaffold")
    plain = built(*words, "local_algorithm=plain").step()
    scaffold = run.step()
    assert scaffold.selected == plain.selected
    assert (scaffold.trained, scaffold.uploaded) == (plain.trained, plain.uploaded)
    size = sum(value.nbytes for value in run.params.values())
    assert scaffold.bytes_down - plain.bytes_down == size * plain.trained
    assert scaffold.bytes_up - plain.bytes_up == size * plain.uploaded
    assert list(cast(Scaffold, run.components.local_algorithm).variates) == plain.selected


def test_runs_in_lanes_are_those_that_run_alone(fedsim: Run, tmp_path: Path) -> None:
    sweep = ["-m", f"local_algorithm={','.join(CHOICES)}", "seed=0,1", "engine=batched"]
    assert fedsim(*sweep, "name=alone") == 0
    assert fedsim(*sweep, "name=lanes", LANES) == 0
    alone = results(tmp_path / "outputs" / "alone")
    assert len(alone) == 2 * len(CHOICES)
    assert results(tmp_path / "outputs" / "lanes") == alone


REJECTED = {
    "fednova optimizer=adam": r"local_algorithm='FedNova': normalises updates of SGD.* not of Adam\n.*optimizer=sgd",
    "fednova local_algorithm.mu=11": r"local_algorithm\.mu=11\.0: must be at most 10 with optimizer\.lr=0\.1",
    "fednova local_algorithm.mu=0.1 optimizer.momentum=0.9": r"local_algorithm\.mu=0\.1: must be at most 0\.02633",
    "fednova local_algorithm.mu=0.028 optimizer.momentum=0.9 optimizer.nesterov=true": r"at most 0\.0277",
    "fednova aggregator=median": r"aggregator='median': must be a mean of .* FedNova.*\n.*by_size",
    "scaffold aggregator=dp_fedavg": r"aggregator='dp_fedavg': must not be private with Scaffold.*\n.*fedprox",
    "fednova init_seed=per_client": r"init_seed='per_client': must be null or a number for FedNova.*\n.*=null",
    "scaffold optimizer.momentum=0.9": r"local_algorithm\.option='II': .* plain SGD\n.*local_algorithm\.option=I$",
    "feddyn optimizer=adam optimizer.decoupled=true optimizer.weight_decay=1": r"FedDyn.*\n.*decoupled=false",
}
ONLY_MEANS = r"aggregator='{}': must be a plain mean for FedDyn, .*\n.*by_size"
for name in (
    "fedavgm",
    "fedadam",
    "mifa",
    "median",
    "krum",
    "geometric_median",
    "norm_clipping",
):
    REJECTED[f"feddyn aggregator={name}"] = ONLY_MEANS.format(name)
ALLOWED = [
    "scaffold local_algorithm.option=I optimizer=adam",
    "scaffold local_algorithm.option=I aggregator=fedavgm",
    "feddyn optimizer=adam",
    "feddyn aggregator=by_size",
    "fedprox aggregator=fedadam",
]


@pytest.mark.parametrize("words", REJECTED)
def test_a_config_that_makes_no_sense_is_rejected(words: str) -> None:
    with search_path(), pytest.raises(ConfigError, match=REJECTED[words]):
        plan_of(*f"local_algorithm={words}".split())


@pytest.mark.parametrize("words", ALLOWED)
def test_a_config_that_makes_sense_is_accepted(words: str) -> None:
    with search_path():
        plan_of(*f"local_algorithm={words}".split(), "init_seed=per_client")


def test_fednova_takes_a_proximal_term_with_momentum_if_no_gradient_counts_negatively() -> None:
    with search_path():
        plan_of("local_algorithm=fednova", "local_algorithm.mu=0.0263", "optimizer.momentum=0.9")
    norms = FedNova(mu=0.0263).norms(3000, training(momentum=0.9))
    assert (np.diff(norms) >= 0).all()
    assert (np.diff(FedNova(mu=0.04).norms(3000, training(momentum=0.9))) < 0).any()


@pytest.mark.parametrize("lr", [0.1, 0.3, 0.01, 0.07])
def test_the_largest_mu_that_the_message_of_fednova_names_is_accepted(lr: float) -> None:
    schedule = Constant()
    optimizer = SGD(lr=lr, schedule=schedule, momentum=0.9, nesterov=False, weight_decay=0.0)
    problem = FedNova(mu=1e6).unfit_for(optimizer)
    assert problem is not None
    largest = float(problem.rule.split("at most ")[1].split()[0])
    assert FedNova(mu=largest).unfit_for(optimizer) is None
    assert FedNova(mu=largest * 1.01).unfit_for(optimizer) is not None


def test_plain_is_no_key_of_the_config() -> None:
    with search_path():
        assert "local_algorithm" not in plan_of("local_algorithm=plain").config


@pytest.mark.parametrize("weighting", ["uniform", "by_size"])
def test_clients_without_samples_are_in_no_objective(weighting: Any) -> None:
    """Control terms are means over clients 0 to 2. The mean of the scales over these is 1."""

    class Recording(LocalAlgorithm):
        def combine(self, cohort: Cohort, training: LocalTraining) -> Cohort:
            self.seen = training.num_clients, training.scales().tolist()
            return cohort

    algorithm = Recording()
    sizes = [1, 2, 3, 0, 0]
    selector = Full(toy_population(sizes, 5, 3))
    components = toy_components(ToyEngine(sizes), selector.population, selector)
    aggregator = FedAvg(frozenset(), weighting=weighting)
    components = replace(components, local_algorithm=algorithm, aggregator=aggregator)
    Simulation(components, toy_params()).step()
    assert algorithm.seen == (3, [1, 1, 1] if weighting == "uniform" else [0.5, 1, 1.5])


def test_a_warning_of_large_states() -> None:
    scaffold = Scaffold(option="I", server_lr=1.0)
    assert "up to 9.8 GiB of" in str(scaffold.warning(num_clients=10_000, model_bytes=2**20))
    assert LocalAlgorithm().warning(num_clients=10**6, model_bytes=10**6) is None
