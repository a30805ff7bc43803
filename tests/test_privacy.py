"""Private runs: epsilon against dp-accounting and by hand, runs without an epsilon, Poisson
cohorts, and rounds in which no update arrives.

docs/privacy.md says what the numbers promise. N is the number of clients, K that of a cohort, z the
noise multiplier and T the number of rounds.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.stats
import torch

from fedsim.clients.clients import Clients
from fedsim.clients.local_algorithms import FedProx, LocalAlgorithm
from fedsim.config.build import instantiate
from fedsim.config.compose import compose_jobs, search_path
from fedsim.core.errors import ConfigError
from fedsim.core.exact import normal
from fedsim.core.rng import Streams
from fedsim.core.types import Cohort, Population, Selection
from fedsim.results.reading import read_metrics, read_summary
from fedsim.rounds.aggregators import Aggregator, FedAvg
from fedsim.rounds.availability import Always, BySize, SineOfDay
from fedsim.rounds.loop import Simulation
from fedsim.rounds.privacy import Accountant, why_no_epsilon
from fedsim.rounds.robust import DPFedAvg
from fedsim.running.assembly import build
from fedsim.selectors.base import Sampling, Selector
from fedsim.selectors.full import Full
from fedsim.selectors.power_of_choice import PowerOfChoice
from fedsim.selectors.random import Poisson, Random
from tests.clocks import fixed_clock
from tests.run_toys import Run, folders, plan_of, refused
from tests.toys import (
    NobodyIn,
    ToyEngine,
    chances,
    picked,
    toy_cohort,
    toy_components,
    toy_params,
    toy_population,
)

pytest.importorskip("dp_accounting")

START = {"w": torch.tensor([1.0, -2.0, 0.5])}
CONF = Path(__file__).parents[1] / "conf" / "selector"

# --- epsilon ---

Setting = tuple[int, int, float, int, float]
"""N, K, z, T and delta."""
EPSILONS: dict[Setting, tuple[float, float, float]] = {
    (20, 5, 1.0, 50, 1e-5): (14.0, 46.4, 49.7),
    (100, 10, 1.0, 200, 1e-5): (11.0, 45.4, 51.0),
    (100, 5, 1.0, 50, 1e-5): (3.18, 13.9, 14.6),
    (100, 10, 2.0, 50, 1e-5): (1.84, 5.15, 5.54),
    (1000, 20, 0.8, 100, 1e-6): (3.91, 21.0, 21.6),
}
"""For each setting: the epsilon of Poisson sampling by Rényi divergences (Opacus's accountant),
which bounds it from above; an epsilon that some inputs reach with K of N clients, which bounds
theirs from below; and the proven epsilon of K of N clients."""
every_setting = pytest.mark.parametrize("setting", EPSILONS, ids=str)


def epsilon_of(sampling: Sampling, num: int, k: int, z: float, rounds: int, delta: float) -> float:
    return Accountant(sampling, z).epsilon([k / num] * rounds, delta)


def by_dp_accounting(
    num: int, k: int, z: float, rounds: int, delta: float, interval: float = 1e-3
) -> float:
    """Return the epsilon of Poisson sampling if one client is added or removed."""
    import dp_accounting

    event = dp_accounting.PoissonSampledDpEvent(k / num, dp_accounting.GaussianDpEvent(z))
    neighbours = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = dp_accounting.pld.PLDAccountant(neighbours, value_discretization_interval=interval)
    return float(accountant.compose(event, rounds).get_epsilon(delta))


@every_setting
def test_epsilon_of_poisson_cohorts_is_that_of_dp_accounting(setting: Setting) -> None:
    epsilon = epsilon_of(Sampling.POISSON, *setting)
    assert epsilon == pytest.approx(by_dp_accounting(*setting), rel=3e-3)
    by_renyi, _, _ = EPSILONS[setting]
    assert 0.8 * by_renyi < epsilon < by_renyi


@every_setting
def test_epsilon_of_k_of_n_clients_is_not_below_one_that_inputs_reach(setting: Setting) -> None:
    """One client is exchanged for another. All other clients send -C, and it sends C or -C. So the
    sum of a round lies at -K C, or with probability q at 2 C more: these are the two distributions
    of Poisson sampling at a sensitivity of 2 C."""
    num, k, z, rounds, delta = setting
    reached = by_dp_accounting(num, k, z / 2, rounds, delta)
    assert reached == pytest.approx(EPSILONS[setting][1], rel=4e-3)
    assert reached < epsilon_of(Sampling.FIXED_SIZE, *setting) < 1.15 * reached


def losses(distribution: Any) -> tuple[Any, Any, float]:
    """Return the cells of a distribution of losses, their probabilities, and that of an infinite
    loss."""
    dense = distribution.to_dense_pmf()
    return dense._lower_loss + np.arange(len(dense._probs)), dense._probs, dense._infinity_mass


@every_setting
def test_epsilon_of_k_of_n_clients_is_the_proven_one(setting: Setting) -> None:
    """Zhu, Dong and Wang 2022, theorem 11, bounds the losses of a round in which clients are
    exchanged. Above 0 they are as with the client against without it, below 0 as without it against
    with it, and the remaining probability is at 0."""
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld import privacy_loss_distribution as pld

    num, k, z, rounds, delta = setting
    width = 5e-3
    one_round = pld.from_gaussian_mechanism(
        z / 2, sampling_prob=k / num, value_discretization_interval=width
    )
    with_client, above, infinite = losses(one_round._pmf_remove)
    without_client, below, _ = losses(one_round._pmf_add)
    lowest = min(without_client.min(), 0)
    both = np.zeros(with_client.max() - lowest + 1)
    both[with_client[with_client > 0] - lowest] = above[with_client > 0]
    both[without_client[without_client < 0] - lowest] = below[without_client < 0]
    both[-lowest] = 1 - infinite - both.sum()
    dominating = pld_pmf.DensePLDPmf(width, lowest, both, infinite, True)
    proven = pld.PrivacyLossDistribution(dominating).self_compose(rounds)
    proven_epsilon = proven.get_epsilon_for_delta(delta)
    assert proven_epsilon == pytest.approx(EPSILONS[setting][2], rel=4e-3)
    epsilon = epsilon_of(Sampling.FIXED_SIZE, *setting)
    assert epsilon == pytest.approx(proven_epsilon, rel=4e-3)
    # clients can bring about half the rounds of one kind and half of the other, which is not worse
    half = rounds // 2
    mixed = one_round._pmf_remove.to_dense_pmf().self_compose(half)
    mixed = mixed.compose(one_round._pmf_add.to_dense_pmf().self_compose(rounds - half))
    assert mixed.get_epsilon_for_delta(delta) < epsilon


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Return delta of two normal distributions mu apart (Balle and Wang 2018, theorem 8)."""
    cdf = scipy.stats.norm.cdf
    return float(cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * cdf(-mu / 2 - epsilon / mu))


@pytest.mark.parametrize(
    ("sampling", "moved"), [(Sampling.ALL, 1), (Sampling.POISSON, 1), (Sampling.FIXED_SIZE, 2)]
)
@pytest.mark.parametrize("z", [0.7, 3.0, 40.0])
def test_epsilon_of_all_clients_by_formula(sampling: Sampling, moved: int, z: float) -> None:
    """Ten rounds without random selection are one with sqrt(10) times the distance."""
    mu = moved * math.sqrt(10) / z
    expected = scipy.optimize.brentq(lambda e: gaussian_delta(e, mu) - 1e-5, 0.0, 300.0)
    assert epsilon_of(sampling, 20, 20, z, 10, 1e-5) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("z", [1.0, 2.0])
def test_epsilon_of_one_round_of_k_of_n_clients_by_integration(z: float) -> None:
    """5 of 20 clients take part. All send -1, but one may send 1, in units of C: the sum is -5, or
    -3 with probability q. Poisson sampling's epsilon does not hold."""
    density = scipy.stats.norm(scale=z).pdf
    q = 5 / 20

    def delta(epsilon: float) -> float:
        def excess(x: float) -> float:
            without_client = density(x + 5)
            with_client = (1 - q) * density(x + 5) + q * density(x + 3)
            return max(with_client - math.exp(epsilon) * without_client, 0.0)

        points = [-5, -3, 0, 3, 5]
        return float(scipy.integrate.quad(excess, -40, 40, limit=500, points=points)[0])

    exact = epsilon_of(Sampling.FIXED_SIZE, 20, 5, z, 1, 1e-3)
    too_small = epsilon_of(Sampling.POISSON, 20, 5, z, 1, 1e-3)
    assert delta(exact) == pytest.approx(1e-3, rel=0.02)
    assert delta(too_small) > 5e-3


@pytest.mark.parametrize(
    ("k", "num", "z", "rounds"), [(10, 1000, 4.0, 300), (10, 10_000, 1.0, 100), (5, 20, 0.05, 9)]
)
def test_rounding_of_losses_adds_less_than_a_hundredth(
    k: int, num: int, z: float, rounds: int
) -> None:
    finer = 1e-4 if z >= 1 else 0.1
    expected = by_dp_accounting(num, k, z, rounds, 1e-6, interval=finer)
    epsilon = epsilon_of(Sampling.POISSON, num, k, z, rounds, 1e-6)
    assert epsilon == pytest.approx(expected, rel=0.01)


def test_epsilon_does_not_depend_on_what_was_composed_before() -> None:
    rates = [0.25, 0.5, 0.25, 1.0]
    accountant = Accountant(Sampling.FIXED_SIZE, 1.5)
    epsilons = [accountant.epsilon(rates[:count], 1e-3) for count in range(5)]
    assert epsilons[0] == 0
    assert epsilons == sorted(set(epsilons))
    assert accountant.epsilon(rates[:2], 1e-3) == epsilons[2]  # after a return to a checkpoint
    assert Accountant(Sampling.FIXED_SIZE, 1.5).epsilon(rates, 1e-3) == epsilons[4]


# --- runs with and without an epsilon ---

SAMPLING = {
    "random": Sampling.FIXED_SIZE,
    "random_control": Sampling.FIXED_SIZE,
    "poisson": Sampling.POISSON,
    "full": Sampling.ALL,
}


def test_which_shipped_selectors_say_how_they_draw() -> None:
    choices = sorted(path.stem for path in CONF.glob("*.yaml"))
    with search_path():
        jobs = compose_jobs([f"selector={','.join(choices)}"], multirun=True)
    population = toy_population([5] * 200, 5)
    declared = {}
    for job in jobs:
        selector = instantiate(job.config["selector"], Selector, "selector", population)
        if selector.sampling is not None:
            declared[job.choices["selector"]] = selector.sampling
    assert declared == SAMPLING


class OwnSelect(Random):
    """Draws in its own way, and does not say how."""

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        return Selection(clients.available[:2])


class OwnSize(Random):
    def cohort_size(self, clients: Clients) -> int:
        return 1


class Declared(OwnSelect):
    sampling = Sampling.FIXED_SIZE


class Renamed(Random):
    """Draws as random does."""


OWN_SELECTORS = [
    (OwnSelect, None),
    (OwnSize, None),
    (Declared, Sampling.FIXED_SIZE),
    (Renamed, Sampling.FIXED_SIZE),
]


@pytest.mark.parametrize(("cls", "sampling"), OWN_SELECTORS)
def test_a_users_selector_has_an_epsilon_only_if_it_says_how_it_draws(
    cls: type[Random], sampling: Sampling | None
) -> None:
    assert cls(toy_population([1] * 20, 5), mode="uniform").sampling is sampling


class Combining(LocalAlgorithm):
    def combine(self, cohort: Cohort, training: Any) -> Cohort:
        return cohort


POPULATION = toy_population([1] * 20, 5)
RANDOM = Random(POPULATION, mode="uniform")
POISSON = Poisson(POPULATION)
PLAIN = LocalAlgorithm()
ALWAYS = Always()
OVER_SELECTION = fixed_clock(20, 5, over_selection=1.5)


@pytest.mark.parametrize("selector", [RANDOM, POISSON, Full(POPULATION)])
def test_runs_with_an_epsilon(selector: Selector) -> None:
    deadline = fixed_clock(20, 5, deadline=3.0)
    assert why_no_epsilon(selector, PLAIN, None, ALWAYS) is None
    assert why_no_epsilon(selector, FedProx(mu=0.1), deadline, ALWAYS) is None


def test_over_selection_of_a_fixed_number_of_clients_has_an_epsilon() -> None:
    assert why_no_epsilon(RANDOM, PLAIN, OVER_SELECTION, ALWAYS) is None


NO_EPSILON = [
    (
        PowerOfChoice(POPULATION, num_candidates=10, estimate="full", schedule="constant"),
        PLAIN,
        None,
        "PowerOfChoice uses losses, which have no noise",
    ),
    (
        Random(POPULATION, mode="size"),
        PLAIN,
        None,
        "Random does not say that it draws clients with equal chances",
    ),
    (RANDOM, Combining(), None, "Combining combines updates before they are clipped"),
    (
        RANDOM,
        PLAIN,
        fixed_clock(20, 5, presence=(10, [[[0, 5]]] * 20)),
        "training times, and with them how much data clients hold",
    ),
    (
        POISSON,
        PLAIN,
        OVER_SELECTION,
        "an update that arrives keeps another one from counting",
    ),
    (
        Full(POPULATION),
        PLAIN,
        OVER_SELECTION,
        "an update that arrives keeps another one from counting",
    ),
]


def test_absence_that_depends_on_data_has_no_epsilon() -> None:
    by_size = BySize(beta=0.5, favours="large")
    reason = why_no_epsilon(RANDOM, PLAIN, None, by_size)
    assert reason == "BySize lets clients be reached by what data they hold"
    assert why_no_epsilon(RANDOM, PLAIN, None, SineOfDay(beta=0.5, period=24)) is None


@pytest.mark.parametrize(("selector", "algorithm", "clock", "reason"), NO_EPSILON)
def test_runs_without_an_epsilon(selector: Any, algorithm: Any, clock: Any, reason: str) -> None:
    assert reason in (why_no_epsilon(selector, algorithm, clock, ALWAYS) or "")


# --- the mechanism ---


def dp(**values: Any) -> DPFedAvg:
    values = {"clip": 2.0, "noise_multiplier": 1.5, "delta": 1e-3, "denominator": None} | values
    return DPFedAvg(frozenset(), **values)


def private(selector: Selector = RANDOM, **values: Any) -> DPFedAvg:
    """Return an aggregator that is ready for its first round."""
    server = dp(**values)
    server.begin(selector, START)
    server.account(selector, PLAIN, None, ALWAYS)
    return server


def in_round(
    server: DPFedAvg, round: int, selected: int = 5, available: int = 20, seed: int = 0
) -> DPFedAvg:
    context = SimpleNamespace(round=round, streams=Streams(seed), available=np.arange(available))
    server.begin_round(context, np.arange(selected))  # type: ignore[arg-type]
    return server


def step(server: DPFedAvg, cohort: Cohort, weights: Any = None) -> Any:
    return (server.aggregate(dict(START), cohort, weights)["w"] - START["w"]).numpy()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise is zero."""
    monkeypatch.setattr("fedsim.rounds.robust.normal", lambda rng, count: np.zeros(count))


DIVISORS = [(RANDOM, None, 5), (POISSON, None, 5), (Full(POPULATION), None, 20), (RANDOM, 10, 10)]


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(("selector", "denominator", "divisor"), DIVISORS)
def test_a_step_is_the_clipped_sum_over_the_expected_number_of_clients(
    selector: Selector, denominator: int | None, divisor: int
) -> None:
    """(3, 4, 0) of length 5 becomes (1.2, 1.6, 0) of length 2. Two clients have arrived."""
    cohort = toy_cohort([0, 1], [1, 9], [[3.0, 4.0, 0.0], [0.0, 1.0, 0.0]])
    server = in_round(private(selector, denominator=denominator), 1)
    ignored_weights = np.array([7.0, 7.0])
    expected = np.array([1.2, 1.6 + 1, 0.0]) / divisor
    assert step(server, cohort, ignored_weights) == pytest.approx(expected, abs=1e-6)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("cls", [partial(Random, mode="uniform"), Full])
def test_with_over_selection_the_divisor_is_the_number_of_updates_that_count(cls: Any) -> None:
    """Of 8 selected clients, or of all, the first 5 count."""
    server = dp()
    selector = cls(toy_population([1] * 20, 8))
    server.begin(selector, START)
    server.account(selector, PLAIN, OVER_SELECTION, ALWAYS)
    cohort = toy_cohort([0, 1], [1, 9], [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    assert step(in_round(server, 1), cohort) == pytest.approx([0.2, 0.2, 0.0], abs=1e-6)


def noise_of(round: int, seed: int = 0) -> torch.Tensor:
    start = {"w": torch.zeros(200, 100), "v": torch.zeros(7)}
    zeros = {"w": torch.zeros(1, 200, 100), "v": torch.zeros(1, 7)}
    cohort = replace(toy_cohort([0], [1], [[0.0]]), delta=zeros)
    return in_round(private(), round, seed=seed).aggregate(start, cohort, None)["w"]


def test_noise_has_the_stated_deviation() -> None:
    """z C / K."""
    assert noise_of(3).std().item() == pytest.approx(1.5 * 2 / 5, rel=0.03)


def test_noise_depends_on_seed_and_round() -> None:
    assert torch.equal(noise_of(3), noise_of(3))
    assert not torch.equal(noise_of(3), noise_of(4))
    assert not torch.equal(noise_of(3), noise_of(3, seed=1))


def test_normal_numbers_are_normal() -> None:
    assert [len(normal(np.random.default_rng(0), count)) for count in (0, 1, 2)] == [0, 1, 2]
    numbers = normal(np.random.default_rng(1), 200_000)
    assert scipy.stats.kstest(numbers, "norm").pvalue > 0.01


RATES = [
    (RANDOM, [5 / 20, 5 / 10, 5 / 5]),  # K / available
    (POISSON, [5 / 20] * 3),
    (Full(POPULATION), [1.0] * 3),
]


@pytest.mark.parametrize(("selector", "rates"), RATES)
def test_sampling_rates(selector: Selector, rates: list[float]) -> None:
    cohort = toy_cohort([0, 1], [1, 1], [[1.0, 0.0, 0.0]] * 2)
    server = private(selector)
    for t, available in enumerate([20, 10, 5], start=1):
        step(in_round(server, t, available=available), cohort)
    assert server.state_dict() == {"rates": rates}
    resumed = private(selector)
    resumed.load_state_dict(server.state_dict())
    assert resumed.epsilon_spent == server.epsilon_spent


# --- Poisson cohorts ---


def test_poisson_cohorts_are_of_independent_clients_with_probability_k_over_n() -> None:
    """6 clients, K = 2. Tolerances are four standard deviations."""
    selector = Poisson(toy_population([1, 9, 1, 9, 1, 1], 2))
    num = 800
    deviation = math.sqrt(1 / 3 * 2 / 3 / num)
    assert chances(selector, num) == pytest.approx([1 / 3] * 6, abs=4 * deviation)
    cohorts = [picked(selector, seed=seed) for seed in range(num)]
    sizes = np.bincount([len(ids) for ids in cohorts], minlength=7)
    expected = scipy.stats.binom.pmf(np.arange(7), 6, 1 / 3) * num
    sizes[5] += sizes[6]  # too rare to be tested alone
    expected[5] += expected[6]
    assert scipy.stats.chisquare(sizes[:6], expected[:6]).pvalue > 0.01
    together = np.mean([{1, 3} <= set(ids) for ids in cohorts])
    assert together == pytest.approx(1 / 9, abs=4 * math.sqrt(1 / 9 * 8 / 9 / num))


def test_a_clients_chance_does_not_depend_on_who_else_is_available() -> None:
    selector = Poisson(toy_population([1] * 8, 4))
    available = [0, 3, 4, 6]
    for seed in range(50):
        of_all = picked(selector, seed=seed)
        expected = [client for client in of_all if client in available]
        assert picked(selector, seed=seed, available=available) == expected


def run_of(
    selector: Selector, server: Aggregator, broken: Sequence[int] = (), **components: Any
) -> Simulation:
    engine = ToyEngine([1] * selector.population.num_clients)
    engine.broken = set(broken)
    parts = toy_components(engine, selector.population, selector, **components)
    return Simulation(replace(parts, aggregator=server), toy_params())


def small_population() -> Population:
    """Return six clients of whom one takes part on average, for 20 rounds."""
    return toy_population([1] * 6, 1, 20)


def test_a_private_round_without_an_update_adds_the_noise_and_counts() -> None:
    run = run_of(Poisson(small_population()), dp())
    records = []
    for _ in range(20):
        before = run.params["w"]
        record = run.step()
        records.append(record)
        assert (run.params["w"] != before).all()
        assert run.observed == bool(record.selected)
        if not record.selected:
            assert record.train_loss is None
            assert (record.participation_ratio, record.bytes_up, record.trained) == (0, 0, 0)
    assert {len(record.selected) for record in records} >= {0, 1, 2}
    epsilons = [record.epsilon or 0.0 for record in records]
    assert epsilons == sorted(set(epsilons))  # every round costs
    assert epsilons[-1] == Accountant(Sampling.POISSON, 1.5).epsilon([1 / 6] * 20, 1e-3)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("server", [dp(), FedAvg(frozenset(), weighting="uniform")])
def test_without_noise_a_round_without_an_update_keeps_the_model(server: Any) -> None:
    run = run_of(Poisson(small_population()), server)
    selected = [0]
    while selected:
        before = run.params["w"]
        selected = run.step().selected
    assert torch.equal(run.params["w"], before)


def test_a_private_run_resumes_exactly_from_any_round() -> None:
    def results(records: Any) -> list[Any]:
        return [(record.selected, record.epsilon, record.test_loss) for record in records]

    expected = results(run_of(Poisson(small_population()), dp()))
    run = run_of(Poisson(small_population()), dp())
    for count in range(1, 20):
        run.step()
        resumed = run_of(Poisson(small_population()), dp())
        resumed.load_state_dict(run.state_dict())
        assert results(resumed) == expected[count:]


EVERYBODY = Random(toy_population([1] * 6, 6, 3), mode="uniform")


def epsilon_after(rounds: int) -> float:
    return Accountant(Sampling.FIXED_SIZE, 1.5).epsilon([1.0] * rounds, 1e-3)


def test_a_private_round_in_which_no_update_is_finite_counts() -> None:
    run = run_of(EVERYBODY, dp(), broken=range(6))
    records = list(run)
    assert [record.dropped_updates for record in records] == [6] * 3
    assert [record.epsilon for record in records] == [epsilon_after(t) for t in (1, 2, 3)]
    assert run.params["w"].isfinite().all()


def test_a_private_round_in_which_all_updates_are_late_counts() -> None:
    run = run_of(EVERYBODY, dp(), simulated_clock=fixed_clock(6, 6, deadline=0.5))
    records = list(run)
    assert [len(record.late or ()) for record in records] == [6] * 3
    assert records[-1].epsilon == epsilon_after(3)


def test_a_private_round_in_which_no_client_is_available_does_not_count() -> None:
    run = run_of(EVERYBODY, dp(), availability=NobodyIn({1, 3}))
    expected = [epsilon_after(rounds) for rounds in (0, 1, 1)]
    assert [record.epsilon for record in run] == expected


@pytest.mark.parametrize("engine", ["sequential", "native"])
def test_engines_agree_on_cohorts_of_any_size(fedsim: Run, tmp_path: Path, engine: str) -> None:
    words = (
        "selector=poisson",
        "aggregator=dp_fedavg",
        "aggregator.noise_multiplier=0.01",
        "cohort_size=1",
        "num_rounds=12",
        "num_clients=6",
    )
    for name in ("batched", engine):
        assert fedsim(*words, f"engine={name}", f"name={name}") == 0
    batched, records = (read_metrics(folder) for folder in folders(tmp_path))
    assert {0, 1, 2} <= {len(record["selected"]) for record in batched}
    for expected, record in zip(batched, records, strict=True):
        assert record["selected"] == expected["selected"]
        assert record["epsilon"] == expected["epsilon"]
        assert record["test_loss"] == pytest.approx(expected["test_loss"], rel=1e-3)


# --- what the user sees ---

SCREEN = (
    "aggregator=dp_fedavg",
    "tracker=default",
    "tracker.wandb.mode=disabled",
    "tracker.console.progress=false",
)
EXCHANGED = "epsilon is that of exchanging one client for another"
ADDED = "epsilon is that of adding or removing one client"


@pytest.mark.parametrize(
    ("selector", "words"), [("random", EXCHANGED), ("poisson", ADDED), ("full", ADDED)]
)
def test_epsilon_is_in_records_summary_and_on_the_screen(
    fedsim: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], selector: str, words: str
) -> None:
    assert fedsim(*SCREEN, f"selector={selector}") == 0
    (folder,) = folders(tmp_path)
    spent = [record["epsilon"] for record in read_metrics(folder)]
    assert 0 < spent[0] < spent[1] < spent[2] == (read_summary(folder) or {})["epsilon"]
    screen = capsys.readouterr().out
    assert screen.count(words) == 1
    assert f"epsilon {spent[-1]:.4g} of each client" in screen


@pytest.mark.parametrize(
    "selector", ["power_of_choice", "round_robin", "md aggregator.denominator=5"]
)
def test_no_epsilon_is_recorded_if_clients_do_not_have_equal_chances(
    fedsim: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], selector: str
) -> None:
    assert fedsim(*SCREEN, *f"selector={selector}".split()) == 0
    (folder,) = folders(tmp_path)
    assert not any("epsilon" in record for record in read_metrics(folder))
    assert "epsilon" not in (read_summary(folder) or {})
    screen = capsys.readouterr().out
    assert (screen.count("no epsilon is recorded: "), screen.count("epsilon")) == (1, 1)


def test_runs_that_are_not_private_have_no_epsilon(fedsim: Run, tmp_path: Path) -> None:
    assert fedsim("selector=poisson") == 0
    (folder,) = folders(tmp_path)
    assert not any("epsilon" in record for record in read_metrics(folder))


REJECTED = {
    "aggregator=dp_fedavg aggregator.delta=1e-13 num_rounds=11": "aggregator.delta=1e-13: must be at least 1.1e-13",
    "aggregator=dp_fedavg aggregator.delta=0.05": "aggregator.delta=0.05: must be below 1 / num_clients = 0.05",
    "aggregator=dp_fedavg selector=md": "aggregator.denominator=None: must be given for MultinomialRandom, which",
    "aggregator=dp_fedavg aggregator.noise_multiplier=0.001": "noise_multiplier=0.001: must be >= 0.01",
    "aggregator=dp_fedavg stop_at=0.9": "stop_at=0.9: must be null for a private aggregator",
    "aggregator=dp_fedavg local_algorithm=scaffold": "must not be private with Scaffold",
}


@pytest.mark.parametrize("words", REJECTED)
def test_a_config_that_does_not_fit_is_rejected_before_the_run(
    fedsim: Run, tmp_path: Path, words: str
) -> None:
    assert REJECTED[words] in refused(fedsim, tmp_path, *words.split())


def test_private_runs_need_a_model_without_running_statistics() -> None:
    norms = ["model=logistic", "model._target_=tests.goldens.Norms"]
    message = r"DPFedAvg'.* running statistics such as 1\.running_mean: var"
    with search_path(), pytest.raises(ConfigError, match=message):
        build(plan_of("aggregator=dp_fedavg", *norms))


def test_private_runs_need_their_package(
    fedsim: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.rounds.robust.find_spec", lambda name: None)
    message = refused(fedsim, tmp_path, "aggregator=dp_fedavg")
    assert "pip install 'fedsim-selection[privacy]'" in message
