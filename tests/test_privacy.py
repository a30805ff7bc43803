"""Private runs: epsilon against dp-accounting and by hand, who has none, Poisson cohorts, and
rounds of nobody.

docs/privacy.md says what the numbers promise. N clients, K of them a round, noise multiplier z, T
rounds.
"""

import math
from dataclasses import replace
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
from fedsim.rounds.aggregators import FedAvg
from fedsim.rounds.availability import Availability
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

# --- epsilon ----------------------------------------------------------------------------------------------------------

ROWS = {
    (20, 5, 1.0, 50, 1e-5): (14.0, 46.4, 49.7),
    (100, 10, 1.0, 200, 1e-5): (11.0, 45.4, 51.0),
    (100, 5, 1.0, 50, 1e-5): (3.18, 13.9, 14.6),
    (100, 10, 2.0, 50, 1e-5): (1.84, 5.15, 5.54),
    (1000, 20, 0.8, 100, 1e-6): (3.91, 21.0, 21.6),
}
"""By N, K, z, T and delta: the epsilon of Poisson sampling by Rényi divergences, which bound it
from above; that of K of N clients; and the bound that is proven for it (docs/privacy.md)."""
every_row = pytest.mark.parametrize("row", ROWS, ids=str)


def epsilon_of(sampling: Sampling, num: int, k: int, z: float, rounds: int, delta: float) -> float:
    return Accountant(sampling, z).epsilon([k / num] * rounds, delta)


def by_dp_accounting(
    num: int, k: int, z: float, rounds: int, delta: float, interval: float = 1e-3
) -> float:
    """The epsilon of Poisson sampling, for a client more or less."""
    import dp_accounting

    event = dp_accounting.PoissonSampledDpEvent(k / num, dp_accounting.GaussianDpEvent(z))
    neighbours = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = dp_accounting.pld.PLDAccountant(neighbours, value_discretization_interval=interval)
    return float(accountant.compose(event, rounds).get_epsilon(delta))


@every_row
def test_epsilon_of_poisson_cohorts_is_dp_accountings(
    row: tuple[int, int, float, int, float],
) -> None:
    found = epsilon_of(Sampling.POISSON, *row)
    assert found == pytest.approx(by_dp_accounting(*row), rel=3e-3)
    assert (
        0.8 * ROWS[row][0] < found < ROWS[row][0]
    )  # Opacus's accountant, which takes Rényi divergences


@every_row
def test_epsilon_of_k_of_n_clients_is_that_of_half_the_noise_multiplier(row: Any) -> None:
    """One client is exchanged for another. All others send -C and it sends C or -C, so that the sum of a round lies at
    -K C, or with probability q at 2 C more: the two distributions of Poisson sampling at a sensitivity of 2 C."""
    num, k, z, rounds, delta = row
    found = epsilon_of(Sampling.FIXED_SIZE, *row)
    assert found == pytest.approx(by_dp_accounting(num, k, z / 2, rounds, delta), rel=3e-3)
    assert found == pytest.approx(ROWS[row][1], rel=4e-3)


def losses(distribution: Any) -> tuple[Any, Any, float]:
    """The cells of a distribution of losses, their probabilities, and that of an infinite loss."""
    dense = distribution.to_dense_pmf()
    return dense._lower_loss + np.arange(len(dense._probs)), dense._probs, dense._infinity_mass


@every_row
def test_epsilon_of_k_of_n_clients_lies_below_the_bound_that_is_proven(row: Any) -> None:
    """Zhu, Dong and Wang 2022, theorem 11: where clients are exchanged, a round is dominated by
    losses that are above 0 as with the client against without it, and below 0 as without it against
    with it; the rest is at 0. Half the rounds of one kind and half of the other, which clients can
    bring about, are not worse than all of the first kind."""
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld.privacy_loss_distribution import (
        PrivacyLossDistribution,
        from_gaussian_mechanism,
    )

    num, k, z, rounds, delta = row
    width = 5e-3
    round_ = from_gaussian_mechanism(
        z / 2, sampling_prob=k / num, value_discretization_interval=width
    )
    (up, above, infinite), (down, below, _) = losses(round_._pmf_remove), losses(round_._pmf_add)
    lowest = min(down.min(), 0)
    both = np.zeros(up.max() - lowest + 1)
    both[up[up > 0] - lowest] = above[up > 0]
    both[down[down < 0] - lowest] = below[down < 0]
    both[-lowest] = 1 - infinite - both.sum()
    bound = PrivacyLossDistribution(
        pld_pmf.DensePLDPmf(width, lowest, both, infinite, True)
    ).self_compose(rounds)
    found = epsilon_of(Sampling.FIXED_SIZE, *row)
    assert found < bound.get_epsilon_for_delta(delta) == pytest.approx(ROWS[row][2], rel=4e-3)
    mixed = round_._pmf_remove.to_dense_pmf().self_compose(rounds // 2)
    mixed = mixed.compose(round_._pmf_add.to_dense_pmf().self_compose(rounds - rounds // 2))
    assert mixed.get_epsilon_for_delta(delta) < found


def gaussian_delta(epsilon: float, mu: float) -> float:
    """delta of two normal distributions mu apart (Balle and Wang 2018, theorem 8)."""
    cdf = scipy.stats.norm.cdf
    return float(cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * cdf(-mu / 2 - epsilon / mu))


@pytest.mark.parametrize(
    ("sampling", "moved"), [(Sampling.ALL, 1), (Sampling.POISSON, 1), (Sampling.FIXED_SIZE, 2)]
)
@pytest.mark.parametrize("z", [0.7, 3.0, 40.0])
def test_epsilon_by_formula_where_all_take_part(sampling: Sampling, moved: int, z: float) -> None:
    """Ten rounds without chance are one with sqrt(10) times the distance."""
    mu = moved * math.sqrt(10) / z
    expected = scipy.optimize.brentq(lambda e: gaussian_delta(e, mu) - 1e-5, 0.0, 300.0)
    assert epsilon_of(sampling, 20, 20, z, 10, 1e-5) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("z", [1.0, 2.0])
def test_one_round_of_k_of_n_clients_by_integration(z: float) -> None:
    """5 of 20 clients, the others at -1 and the one at 1 or at -1, in units of C. Poisson's epsilon
    does not hold."""
    sum_of, q = scipy.stats.norm(scale=z).pdf, 5 / 20

    def delta(epsilon: float) -> float:
        def excess(x: float) -> float:
            with_it = (1 - q) * sum_of(x + 5) + q * sum_of(x + 3)
            return max(with_it - math.exp(epsilon) * sum_of(x + 5), 0.0)

        return float(scipy.integrate.quad(excess, -40, 40, limit=500, points=[-5, -3, 0, 3, 5])[0])

    assert delta(epsilon_of(Sampling.FIXED_SIZE, 20, 5, z, 1, 1e-3)) == pytest.approx(
        1e-3, rel=0.02
    )
    assert delta(epsilon_of(Sampling.POISSON, 20, 5, z, 1, 1e-3)) > 5e-3


@pytest.mark.parametrize(
    ("k", "num", "z", "rounds"), [(10, 1000, 4.0, 300), (10, 10_000, 1.0, 100), (5, 20, 0.05, 9)]
)
def test_rounding_of_losses_adds_less_than_a_hundredth(
    k: int, num: int, z: float, rounds: int
) -> None:
    expected = by_dp_accounting(num, k, z, rounds, 1e-6, interval=1e-4 if z >= 1 else 0.1)
    found = epsilon_of(Sampling.POISSON, num, k, z, rounds, 1e-6)
    assert found == pytest.approx(expected, rel=0.01)


def test_rounds_are_composed_one_by_one_whatever_was_composed_before() -> None:
    rates = [0.25, 0.5, 0.25, 1.0]
    accountant = Accountant(Sampling.FIXED_SIZE, 1.5)
    in_turn = [accountant.epsilon(rates[:count], 1e-3) for count in range(5)]
    assert in_turn[0] == 0 < in_turn[1] < in_turn[2] < in_turn[3] < in_turn[4]
    assert (
        accountant.epsilon(rates[:2], 1e-3) == in_turn[2]
    )  # a run that has gone back to a checkpoint
    assert Accountant(Sampling.FIXED_SIZE, 1.5).epsilon(rates, 1e-3) == in_turn[4]


# --- who has an epsilon -----------------------------------------------------------------------------------------------

SAMPLING = {
    **{"random": Sampling.FIXED_SIZE, "random_control": Sampling.FIXED_SIZE},
    **{"poisson": Sampling.POISSON, "full": Sampling.ALL},
}


def test_which_shipped_selectors_say_how_they_draw() -> None:
    choices = sorted(path.stem for path in CONF.glob("*.yaml"))
    with search_path():
        jobs = compose_jobs([f"selector={','.join(choices)}"], multirun=True)
    population = toy_population([5] * 200, 5)
    found = {}
    for job in jobs:
        selector = instantiate(job.config["selector"], Selector, "selector", population)
        if selector.sampling is not None:
            found[job.choices["selector"]] = selector.sampling
    assert found == SAMPLING


class OfMine(Random):
    """Draws in its own way, and says nothing of it."""

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        return Selection(clients.available[:2])


class FewerOfMine(Random):
    def cohort_size(self, clients: Clients) -> int:
        return 1


class SayingSo(OfMine):
    sampling = Sampling.FIXED_SIZE


class WithAnotherName(Random):
    """Draws as random does."""


def test_a_users_selector_has_no_epsilon_unless_it_says_how_it_draws() -> None:
    population = toy_population([1] * 20, 5)
    declared = {
        kind: kind(population, mode="uniform").sampling for kind in (OfMine, FewerOfMine, SayingSo)
    }
    assert declared == {OfMine: None, FewerOfMine: None, SayingSo: Sampling.FIXED_SIZE}
    assert WithAnotherName(population, mode="uniform").sampling is Sampling.FIXED_SIZE
    assert Random(population, mode="size").sampling is None


class Combining(LocalAlgorithm):
    def combine(self, cohort: Cohort, training: Any) -> Cohort:
        return cohort


def test_what_keeps_a_run_from_having_an_epsilon() -> None:
    population, plain, prox = toy_population([1] * 20, 5), LocalAlgorithm(), FedProx(mu=0.1)
    drawn, poisson = Random(population, mode="uniform"), Poisson(population)
    asks = PowerOfChoice(population, num_candidates=10, estimate="full", schedule="constant")
    of_size = Random(population, mode="size")
    leaving = fixed_clock(20, 5, presence=(10, [[[0, 5]]] * 20))
    over, late = fixed_clock(20, 5, over_selection=1.5), fixed_clock(20, 5, deadline=3.0)
    for selector in (drawn, poisson, Full(population)):
        assert why_no_epsilon(selector, plain, None) is None
        assert why_no_epsilon(selector, prox, late) is None
    assert why_no_epsilon(drawn, plain, over) is None
    texts = {
        "PowerOfChoice uses losses, which have no noise": why_no_epsilon(asks, plain, None),
        "Random does not say that it draws clients with equal chances": why_no_epsilon(
            of_size, plain, None
        ),
        "Combining combines updates before they are clipped": why_no_epsilon(
            drawn, Combining(), None
        ),
        "training times, and with them how much data clients hold": why_no_epsilon(
            drawn, plain, leaving
        ),
        "an update that arrives keeps another one from counting": why_no_epsilon(
            poisson, plain, over
        ),
    }
    for words, reason in texts.items():
        assert words in (reason or "")


# --- the mechanism ----------------------------------------------------------------------------------------------------


def dp(**values: Any) -> DPFedAvg:
    values = {"clip": 2.0, "noise_multiplier": 1.5, "delta": 1e-3, "denominator": None} | values
    return DPFedAvg(frozenset(), **values)


def private(selector: Selector | None = None, **values: Any) -> DPFedAvg:
    server = dp(**values)
    selector = selector or Random(toy_population([1] * 20, 5), mode="uniform")
    server.begin(selector, START)
    server.account(selector, LocalAlgorithm(), None)
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
    """Noise of zeros."""
    monkeypatch.setattr("fedsim.rounds.robust.normal", lambda rng, count: np.zeros(count))


@pytest.mark.usefixtures("silent")
def test_steps_are_clipped_sums_over_the_number_of_clients_that_is_expected() -> None:
    cohort = toy_cohort(
        [0, 1], [1, 9], [[3.0, 4.0, 0.0], [0.0, 1.0, 0.0]]
    )  # two of five have arrived
    population = toy_population([1] * 20, 5)
    divisors = {Random(population, mode="uniform"): 5, Poisson(population): 5, Full(population): 20}
    for selector, expected in divisors.items():
        for denominator, divisor in ((None, expected), (10, 10)):
            server = in_round(private(selector, denominator=denominator), 1)
            moved = np.array([1.2, 1.6 + 1, 0.0]) / divisor
            assert step(server, cohort, np.array([7.0, 7.0])) == pytest.approx(moved, abs=1e-6)


def test_noise_has_the_stated_deviation_and_is_the_same_for_a_seed_and_a_round() -> None:
    start = {"w": torch.zeros(200, 100), "v": torch.zeros(7)}
    cohort = replace(
        toy_cohort([0], [1], [[0.0]]), delta={n: torch.zeros(1, *t.shape) for n, t in start.items()}
    )

    def noise(round: int, seed: int = 0) -> torch.Tensor:
        return in_round(private(), round, seed=seed).aggregate(start, cohort, None)["w"]

    assert noise(3).std().item() == pytest.approx(1.5 * 2 / 5, rel=0.03)
    assert torch.equal(noise(3), noise(3))
    assert not any(torch.equal(noise(3), other) for other in (noise(4), noise(3, seed=1)))


def test_normal_numbers_are_normal() -> None:
    assert [len(normal(np.random.default_rng(0), count)) for count in (0, 1, 2)] == [0, 1, 2]
    numbers = normal(np.random.default_rng(1), 200_000)
    assert scipy.stats.kstest(numbers, "norm").pvalue > 0.01


def test_the_rate_of_k_clients_is_that_among_the_available_and_poissons_that_of_all() -> None:
    cohort = toy_cohort([0, 1], [1, 1], [[1.0, 0.0, 0.0]] * 2)
    population = toy_population([1] * 20, 5)
    rates = {
        Random(population, mode="uniform"): [0.25, 0.5, 1.0],
        Poisson(population): [0.25] * 3,
        Full(population): [1.0] * 3,
    }
    for selector, expected in rates.items():
        server = private(selector)
        for t, available in enumerate([20, 10, 5], 1):
            step(in_round(server, t, available=available), cohort)
        assert server.state_dict() == {"rates": expected}
        again = private(selector)
        again.load_state_dict(server.state_dict())
        assert again.epsilon_spent == server.epsilon_spent


# --- Poisson cohorts --------------------------------------------------------------------------------------------------


def test_poisson_cohorts_are_of_independent_clients_with_probability_k_over_n() -> None:
    selector = Poisson(toy_population([1, 9, 1, 9, 1, 1], 2))
    assert chances(selector, 800) == pytest.approx([1 / 3] * 6, abs=4 * math.sqrt(2 / 9 / 800))
    drawn = [picked(selector, seed=seed) for seed in range(800)]
    sizes = np.bincount([len(ids) for ids in drawn], minlength=7)
    expected = scipy.stats.binom.pmf(np.arange(7), 6, 1 / 3) * 800
    assert (
        scipy.stats.chisquare(
            [*sizes[:5], sizes[5:].sum()], [*expected[:5], expected[5:].sum()]
        ).pvalue
        > 0.01
    )
    together = sum({1, 3} <= set(ids) for ids in drawn) / 800
    assert together == pytest.approx(1 / 9, abs=4 * math.sqrt(8 / 81 / 800))


def test_nobodys_chance_depends_on_who_else_is_available() -> None:
    selector = Poisson(toy_population([1] * 8, 4))
    for seed in range(50):
        everybody = picked(selector, seed=seed)
        there = [0, 3, 4, 6]
        assert picked(selector, seed=seed, available=there) == [i for i in everybody if i in there]


class Nobody(Availability):
    """Clients are available but for some rounds."""

    def __init__(self, *rounds: int) -> None:
        self.rounds = rounds

    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> Any:
        return np.full(num_clients, round not in self.rounds)


def run_of(selector: Selector, server: Any, broken: Any = (), **more: Any) -> Simulation:
    engine = ToyEngine([1] * selector.population.num_clients)
    engine.broken = set(broken)
    parts = toy_components(engine, selector.population, selector, **more)
    return Simulation(replace(parts, aggregator=server), toy_params())


def small(num_rounds: int = 20) -> Population:
    return toy_population([1] * 6, 1, num_rounds)


def test_a_private_round_of_nobody_adds_the_noise_and_counts() -> None:
    run = run_of(Poisson(small()), dp())
    moves, records = [], []
    for _ in range(20):
        before = run.params["w"]
        records.append(run.step())
        moves.append((run.params["w"] - before).abs().min().item())
        assert run.observed == bool(records[-1].selected)
    assert {len(record.selected) for record in records} >= {0, 1, 2}
    assert min(moves) > 0
    epsilons = [record.epsilon for record in records]
    assert epsilons == sorted(set(epsilons))  # every round costs
    alone = Accountant(Sampling.POISSON, 1.5)
    assert epsilons[-1] == alone.epsilon([1 / 6] * 20, 1e-3)
    empty = next(record for record in records if not record.selected)
    assert (empty.train_loss, empty.participation_ratio, empty.bytes_up, empty.trained) == (
        None,
        0,
        0,
        0,
    )


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("private", [False, True])
def test_but_for_noise_a_round_of_nobody_leaves_the_model(private: bool) -> None:
    run = run_of(Poisson(small()), dp() if private else FedAvg(frozenset(), weighting="uniform"))
    while True:
        before = run.params["w"]
        if not run.step().selected:
            break
    assert torch.equal(run.params["w"], before)


def test_a_private_run_goes_on_exactly_from_any_round() -> None:
    records = list(run_of(Poisson(small()), dp()))
    halfway = run_of(Poisson(small()), dp())
    for count in range(1, 20):
        halfway.step()
        rest = run_of(Poisson(small()), dp())
        rest.load_state_dict(halfway.state_dict())
        found = list(rest)
        assert [(r.selected, r.epsilon, r.test_loss) for r in found] == [
            (r.selected, r.epsilon, r.test_loss) for r in records[count:]
        ]


def test_rounds_in_which_no_update_arrives_or_is_finite_count_and_those_without_clients_do_not() -> (
    None
):
    everybody = Random(toy_population([1] * 6, 6, 3), mode="uniform")
    with_nan = run_of(everybody, dp(), broken=range(6))
    records = list(with_nan)
    assert [record.dropped_updates for record in records] == [6] * 3
    assert with_nan.params["w"].isfinite().all()
    late = run_of(everybody, dp(), simulated_clock=fixed_clock(6, 6, deadline=0.5))
    assert [len(record.late or ()) for record in list(late)] == [6] * 3
    absent = run_of(everybody, dp(), availability=Nobody(1, 3))
    found = [record.epsilon for record in absent]
    expected = [
        Accountant(Sampling.FIXED_SIZE, 1.5).epsilon([1.0] * count, 1e-3) for count in range(4)
    ]
    assert [record.epsilon for record in records] == expected[1:]
    assert late.components.aggregator.epsilon_spent == expected[3]
    assert found == [expected[0], expected[1], expected[1]]


@pytest.mark.parametrize("engine", ["sequential", "native"])
def test_engines_agree_on_cohorts_of_any_size(fedsim: Run, tmp_path: Path, engine: str) -> None:
    words = [
        "selector=poisson",
        "aggregator=dp_fedavg",
        "aggregator.noise_multiplier=0.01",
        "cohort_size=1",
    ]
    words += ["num_rounds=12", "num_clients=6"]
    for name in ("batched", engine):
        assert fedsim(*words, f"engine={name}", f"name={name}") == 0
    one, other = (read_metrics(folder) for folder in folders(tmp_path))
    assert [record["selected"] for record in one] == [record["selected"] for record in other]
    assert {0, 1, 2} <= {len(record["selected"]) for record in one}
    assert [r["test_loss"] for r in one] == pytest.approx([r["test_loss"] for r in other], rel=1e-3)
    assert [r["epsilon"] for r in one] == [r["epsilon"] for r in other]


# --- what the user sees -----------------------------------------------------------------------------------------------

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
def test_no_epsilon_is_recorded_where_selections_are_not_of_equal_chances(
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


REFUSED = {
    "aggregator=dp_fedavg aggregator.delta=0.05": "aggregator.delta=0.05: must be below 1 / num_clients = 0.05",
    "aggregator=dp_fedavg selector=md": "aggregator.denominator=None: must be given for MultinomialRandom, which",
    "aggregator=dp_fedavg aggregator.noise_multiplier=0.001": "noise_multiplier=0.001: must be >= 0.01",
    "aggregator=dp_fedavg local_algorithm=scaffold": "must not be private with Scaffold",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_go_together_is_refused_before_the_run(
    fedsim: Run, tmp_path: Path, words: str
) -> None:
    assert REFUSED[words] in refused(fedsim, tmp_path, *words.split())


def test_private_runs_need_their_package_and_a_model_without_running_statistics(
    fedsim: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms = ["model=logistic", "model._target_=tests.goldens.Norms"]
    with (
        search_path(),
        pytest.raises(
            ConfigError, match=r"DPFedAvg'.* running statistics such as 1\.running_mean: var"
        ),
    ):
        build(plan_of("aggregator=dp_fedavg", *norms))
    monkeypatch.setattr("fedsim.rounds.robust.find_spec", lambda name: None)
    assert "pip install 'fedsim-selection[privacy]'" in refused(
        fedsim, tmp_path, "aggregator=dp_fedavg"
    )
