"""FedCor and its Gaussian process, against dense matrices, autograd, and the schedule of its
code."""

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import multivariate_normal
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, WhiteKernel
from sklearn.gaussian_process.kernels import Kernel as SklearnKernel

from fedsim.clients.ledger import Ledger
from fedsim.config.build import instantiate
from fedsim.core.types import Params
from fedsim.rounds.availability import Availability
from fedsim.selectors import fedcor as module
from fedsim.selectors.fedcor import FedCor, greedy_selection
from fedsim.selectors.gaussian_process import (
    DenseProcess,
    Kernel,
    KernelParameters,
    LowRankCovariance,
    LowRankProcess,
    Objective,
    make_process,
)
from tests.test_selector_contract import composed
from tests.toys import ToyEngine, picked, shipped, toy_clients, toy_population, toy_run


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def dense_falls(
    sigma: Any, shares: Any, discounts: Any, count: int
) -> tuple[list[int], list[np.ndarray]]:
    """Return the picks of Eq. 13, written out on the whole covariance, and the falls at each pick.

    The lowest position comes first among ties.
    """
    c = sigma.copy()
    chosen: list[int] = []
    all_falls = []
    for _ in range(count):
        with np.errstate(invalid="ignore", divide="ignore"):
            falls = discounts / np.sqrt(c.diagonal()) * (c @ shares)
        falls[chosen] = -np.inf
        all_falls.append(falls)
        j = int(np.argmax(falls))
        c = c - np.outer(c[:, j], c[j]) / c[j, j]
        chosen.append(j)
    return chosen, all_falls


# Clients 0 and 1 are strongly correlated, clients 2 and 3 weakly. All have share 1/4.
SIGMA = np.array([[1, 0.9, 0, 0], [0.9, 1, 0, 0], [0, 0, 1, 0.2], [0, 0, 0.2, 1]])
FACTOR = np.linalg.cholesky(SIGMA - 1e-6 * np.eye(4)).T
SHARES = np.full(4, 0.25)


def pick(discounts: Any = (1, 1, 1, 1), seed: int = 0, **options: Any) -> list[int]:
    """Return two picks of fedsim's low-rank form."""
    covariance = LowRankCovariance(FACTOR, 1e-3)
    return greedy_selection(
        covariance, SHARES, np.array(discounts), 2, rng(seed), **options
    ).tolist()


def test_the_rule_by_hand_never_takes_a_correlated_pair() -> None:
    """First (1 + 0.9) / 4 and (1 + 0.2) / 4. After client 0 the variance of client 1 is 0.19, and
    its fall sqrt(0.19) / 4."""
    _, falls = dense_falls(SIGMA, SHARES, np.ones(4), 2)
    assert falls[0] == pytest.approx([0.475, 0.475, 0.3, 0.3])
    assert falls[1][1:] == pytest.approx([0.10897, 0.3, 0.3], abs=1e-5)
    for seed in range(20):
        first, second = pick(seed=seed)
        assert first in (0, 1)
        assert second in (2, 3)


def test_discounts_by_hand() -> None:
    """0.475 / 2 is below 0.3, and below client 3's sqrt(0.96) / 4 after client 2."""
    discounts = [0.5, 0.5, 1, 1]
    _, falls = dense_falls(SIGMA, SHARES, np.array(discounts), 2)
    assert falls[0] == pytest.approx([0.2375, 0.2375, 0.3, 0.3])
    assert falls[1][3] == pytest.approx(0.24495, abs=1e-5)
    assert pick(discounts) == [2, 3]


def test_picks_may_be_random() -> None:
    assert len({tuple(pick(seed=s, epsilon=1.0)) for s in range(40)}) == 6  # all pairs of four


@pytest.mark.parametrize(("least_fall", "count"), [(0.2, 2), (0.4, 1), (9.0, 1)])
def test_picking_stops_below_a_fall_but_not_before_the_first_pick(
    least_fall: float, count: int
) -> None:
    assert len(pick(least_fall=least_fall)) == count


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5), st.integers(3, 12), st.integers(1, 6), st.integers(0, 10_000))
def test_low_rank_selection_equals_the_dense_one(q: int, n: int, count: int, seed: int) -> None:
    random = rng(seed)
    factor, shares, discounts = random.standard_normal((q, n)), random.random(n), random.random(n)
    sigma = factor.T @ factor + 0.3**2 * np.eye(n)
    expected, _ = dense_falls(sigma, shares, discounts, min(count, n))
    for covariance in (LowRankCovariance(factor, 0.3), sigma):
        picks = greedy_selection(covariance, shares, discounts, min(count, n), rng())
        assert picks.tolist() == sorted(expected)


KERNELS = ["linear", "linear_normalised", "se"]
NOISE = 0.3
LENGTH = 2.0


def sklearn_kernel(kernel: Kernel, amplitude: float = 1.0) -> SklearnKernel:
    """Return scikit-learn's covariance of clients at the points of `points_of`."""
    signal = DotProduct(sigma_0=0.0, sigma_0_bounds="fixed")
    if kernel == "linear_normalised":
        signal = ConstantKernel(amplitude**2) * signal
    if kernel == "se":
        signal = ConstantKernel(amplitude**2) * RBF(LENGTH**0.5)
    return signal + WhiteKernel(NOISE**2)


def points_of(embedding: np.ndarray, kernel: Kernel) -> np.ndarray:
    """Return the clients as points [n, q], of length 1 for `linear_normalised`."""
    points = embedding.T
    if kernel == "linear_normalised":
        points = points / np.linalg.norm(points, axis=1)[:, None]
    return points


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_pick_has_the_largest_fall_by_scikit_learns_posterior(kernel: Kernel) -> None:
    """Section 4.2: if client k's loss falls by a_k standard deviations, the posterior mean tells
    how all other losses fall."""
    random = rng()
    n, count = 12, 4
    embedding = random.standard_normal((3, n))
    shares = random.dirichlet(np.ones(n))
    discounts = 0.95 ** random.integers(0, 4, n)
    points = points_of(embedding, kernel)
    prior = sklearn_kernel(kernel)
    chosen: list[int] = []
    for _ in range(count):
        covariance = prior(points)
        if chosen:
            # what is known of the chosen clients is exact: their noise is in the kernel
            process = GaussianProcessRegressor(prior, alpha=1e-12, optimizer=None)
            process.fit(points[chosen], np.zeros(len(chosen)))
            covariance = process.predict(points, return_cov=True)[1]
        left = [k for k in range(n) if k not in chosen]
        falls = {}
        for k in left:
            deviation = covariance[k, k] ** 0.5
            falls[k] = discounts[k] / deviation * shares[left] @ covariance[left, k]
        chosen.append(max(falls, key=falls.__getitem__))
    process = make_process(kernel, "mml", NOISE, LENGTH, 0.01)
    covariance = process.covariance({"embedding": embedding, "amplitude": np.ones(())})
    assert greedy_selection(covariance, shares, discounts, count, rng()).tolist() == sorted(chosen)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_fit_raises_scipys_likelihood_whose_slope_is_the_gradient(kernel: Kernel) -> None:
    parameters, residuals, weights = problem()
    x = parameters["embedding"]
    process = make_process(kernel, "mml", NOISE, LENGTH, 0.01)

    def likelihood(at: KernelParameters) -> float:
        covariance = sklearn_kernel(kernel, float(at["amplitude"]))(
            points_of(at["embedding"], kernel)
        )
        return float(weights @ multivariate_normal(np.zeros(7), covariance).logpdf(residuals))

    before = likelihood(parameters)
    assert likelihood(process.fit(parameters, residuals, weights, 50)) > before + 0.1
    gradient = process.gradient(parameters, residuals, weights)["embedding"]
    for i in (0, 2):
        step = np.zeros_like(x)
        step[i, 4] = 1e-6
        higher = likelihood(parameters | {"embedding": x + step})
        lower = likelihood(parameters | {"embedding": x - step})
        assert -gradient[i, 4] == pytest.approx((higher - lower) / 2e-6, rel=1e-5)


def test_the_gradient_of_the_amplitude_is_scikit_learns() -> None:
    """scikit-learn derives by the logarithm of the amplitude's square."""
    parameters, residuals, weights = problem()
    amplitude = float(parameters["amplitude"])
    process = GaussianProcessRegressor(sklearn_kernel("se", amplitude), alpha=0.0, optimizer=None)
    slopes = []
    for residual in residuals:
        process.fit(parameters["embedding"].T, residual)
        _, slope = process.log_marginal_likelihood(process.kernel_.theta, eval_gradient=True)
        slopes.append(slope[0])
    ours = make_process("se", "mml", NOISE, LENGTH, 0.01).gradient(parameters, residuals, weights)
    assert -ours["amplitude"] == pytest.approx(weights @ np.array(slopes) * 2 / amplitude)


def problem() -> tuple[KernelParameters, np.ndarray, np.ndarray]:
    """Return parameters of 7 clients in 3 dimensions, 4 observations and their weights."""
    random = rng(1)
    parameters = {"embedding": random.standard_normal((3, 7)), "amplitude": np.array(1.3)}
    return parameters, random.standard_normal((4, 7)), random.random(4)


def left_out(sigma: torch.Tensor, residuals: torch.Tensor, i: int) -> torch.Tensor:
    """Return log p(r_i | the others) by conditioning the joint normal."""
    others = [j for j in range(len(sigma)) if j != i]
    solved = torch.linalg.solve(sigma[others][:, others], sigma[others, i])
    mean = residuals[:, others] @ solved
    variance = sigma[i, i] - sigma[i, others] @ solved
    return torch.distributions.Normal(mean, variance.sqrt()).log_prob(residuals[:, i])


@pytest.mark.parametrize("objective", ["mml", "loo"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_equal_autograd_on_the_written_out_likelihood(
    kernel: Kernel, objective: Objective
) -> None:
    parameters, residuals, weights = problem()
    x = torch.tensor(parameters["embedding"], requires_grad=True)
    amplitude = torch.tensor(parameters["amplitude"], requires_grad=True)
    products = x.T @ x
    if kernel == "linear_normalised":
        cosines = torch.nn.functional.cosine_similarity(x.T[:, None], x.T[None], dim=2)
        products = amplitude**2 * cosines
    if kernel == "se":
        squares = products.diagonal()[:, None] + products.diagonal()[None] - 2 * products
        products = amplitude**2 * torch.exp(-squares / (2 * LENGTH))
    sigma = products + 0.2**2 * torch.eye(7, dtype=torch.float64)
    r = torch.tensor(residuals)
    if objective == "mml":
        normal = torch.distributions.MultivariateNormal(torch.zeros(7).double(), sigma)
        likelihoods = normal.log_prob(r)
    else:
        likelihoods = torch.stack([left_out(sigma, r, i) for i in range(7)]).sum(0)
    (-(torch.tensor(weights) * likelihoods).sum()).backward()
    process = make_process(kernel, objective, 0.2, LENGTH, 0.01)
    ours = process.gradient(parameters, residuals, weights)
    np.testing.assert_allclose(ours["embedding"], x.grad, rtol=1e-7, atol=1e-9)
    assert ("amplitude" in ours) == (kernel != "linear")
    if "amplitude" in ours:
        assert ours["amplitude"] == pytest.approx(float(amplitude.grad))  # type: ignore[arg-type]


@pytest.mark.parametrize("kernel", ["linear", "linear_normalised"])
def test_the_low_rank_form_agrees_with_the_dense_one(kernel: Kernel) -> None:
    parameters, residuals, weights = problem()
    low = make_process(kernel, "mml", 0.2, 1.0, 0.01)
    dense = DenseProcess(0.2, 0.01, kernel=kernel, length=1.0, objective="mml")
    assert not isinstance(low, DenseProcess)
    fitted = low.fit(parameters, residuals, weights, 20)
    expected = dense.fit(parameters, residuals, weights, 20)
    for name in ("embedding", "amplitude"):
        np.testing.assert_allclose(fitted[name], expected[name], rtol=1e-7)
    np.testing.assert_allclose(
        low.covariance(fitted).diagonal(), dense.covariance(fitted).diagonal(), rtol=1e-7
    )


@pytest.mark.parametrize(("kernel", "objective"), [("linear", "mml"), ("se", "loo")])
def test_a_fit_to_infinity_keeps_the_parameters(kernel: Kernel, objective: Objective) -> None:
    parameters, residuals, weights = problem()
    residuals[0, 0] = np.inf
    process = make_process(kernel, objective, 0.2, 1.0, 0.01)
    fitted = process.fit(parameters, residuals, weights, 5)
    assert (fitted["embedding"] == parameters["embedding"]).all()


def test_a_covariance_of_nan_gives_random_picks() -> None:
    broken = np.full((5, 5), np.nan)
    picks = [greedy_selection(broken, np.ones(5), np.ones(5), 2, rng(s)) for s in range(50)]
    assert len({tuple(pair) for pair in picks}) > 5


def test_fitting_equals_torchs_adam() -> None:
    random = rng(2)
    residuals = random.standard_normal((200, 6))
    x = random.standard_normal((4, 6)) / 2
    process = LowRankProcess(0.1, 0.01, kernel="linear")
    fitted = process.fit({"embedding": x}, residuals, np.ones(200), 300)["embedding"]
    leaf = torch.tensor(x, requires_grad=True)
    optimizer = torch.optim.Adam([leaf], lr=0.01)
    for _ in range(300):
        gradient = process.gradient({"embedding": leaf.detach().numpy()}, residuals, np.ones(200))
        leaf.grad = torch.tensor(gradient["embedding"])
        optimizer.step()
    np.testing.assert_allclose(fitted, leaf.detach().numpy(), rtol=1e-6, atol=1e-8)


def fedcor(n: int, k: int, **changes: Any) -> FedCor:
    """Return `selector=fedcor` for n clients of two samples, with a short schedule.

    Rounds e = 0, 1, 2 are the warm-up. Virtual rounds follow e = 3, 6, 9, ...
    """
    schedule = {"warmup": 2, "interval": 3, "first_steps": 30, "refit_steps": 10}
    values = {"dimension": 3, "beta": 0.5, **schedule, **changes}
    return shipped("fedcor", toy_population([2] * n, k, 30), **values)


def test_requests_of_each_kind_of_round() -> None:
    """Eight clients have 16 samples. Warm-up rounds e = 0, 1, 2 report before them, and once more
    after the last one. Virtual rounds follow e = 3 and 6, and report twice."""
    selector = fedcor(8, 2)
    asked = []
    for t in range(1, 9):
        ledger = Ledger()
        picked(selector, t, t, ledger=ledger)
        asked.append(ledger.forward_samples)
    assert asked == [16, 16, 16, 16, 32, 0, 0, 32]
    assert len(selector.changes) == 3 + 2


def test_discounts_start_again_after_a_virtual_round() -> None:
    selector = fedcor(8, 2)
    for t in range(1, 9):
        ids = picked(selector, t, t)
        if t in (5, 8):  # selections after rounds e = 3 and 6
            assert selector.discounts[ids].tolist() == [0.5, 0.5]
            assert (np.delete(selector.discounts, ids) == 1).all()


class TableOfLosses(ToyEngine):
    """Losses depend on the round and on whether the model is the initial one or a virtual one."""

    round = 1

    def losses(self, params: Params, positions: Any) -> np.ndarray:
        return loss_table(self.round, virtual=bool(params["w"].any()), n=len(positions))


def loss_table(t: int, *, virtual: bool, n: int) -> np.ndarray:
    return np.random.default_rng([t, virtual]).random(n)


def fits_of(preset: str, n: int, num_rounds: int) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """Return the data, weights and steps of all fits of a choice in conf/selector/."""
    selector = instantiate(
        composed(preset), FedCor, "selector", toy_population([2] * n, 2, num_rounds)
    )
    calls: list[tuple[np.ndarray, np.ndarray, int]] = []
    process: Any = selector.process
    process.fit = lambda p, r, w, n: (calls.append((r, w, n)), p)[1]
    engine = TableOfLosses([2] * n)
    for engine.round in range(1, num_rounds + 1):
        clients = toy_clients([2] * n, selector.needs, engine=engine, round=engine.round)
        selector.select(engine.round, clients, np.random.default_rng(engine.round))
    return calls


def fits_of_2022(
    n: int, last: int, warmup: int, interval: int, group_size: int, gamma: float
) -> list[tuple[np.ndarray, list[float], int]]:
    """Return what the code of 2022 fits after rounds 0..last: data, weights of its sums, steps."""
    data: list[np.ndarray] = []
    result = []
    for e in range(last + 1):
        now = loss_table(e + 2, virtual=False, n=n)  # of the model after round e
        if e <= warmup:
            data.append(now - loss_table(e + 1, virtual=False, n=n))
            groups, factor, steps = data[max(e - group_size + 1, 0) : e + 1], gamma, 150
        elif e % interval == 0:
            data.append(loss_table(e + 2, virtual=True, n=n) - now)
            groups, factor, steps = data[-ceil(group_size / interval) :], gamma**interval, 100
        else:
            continue
        weights: list[float] = []
        for _ in groups:  # its sum is multiplied by the factor before each group is added
            weights = [factor * w for w in weights] + [1.0]
        result.append((np.stack(groups), weights, steps))
    return result


@pytest.mark.parametrize(
    ("preset", "values"),
    [("fedcor_2022", (15, 10, 11, 0.8)), ("fedcor_cifar_2022", (20, 50, 51, 0.97))],
)
def test_the_presets_of_2022_fit_what_its_code_fits(
    preset: str, values: tuple[int, int, int, float]
) -> None:
    n, last = 4, 101
    fits = fits_of(preset, n, last + 2)
    expected = fits_of_2022(n, last, *values)
    warmup, interval, *_ = values
    num_virtual = sum(e > warmup for e in range(0, last, interval))
    assert len(fits) == len(expected) == warmup + 1 + num_virtual
    for (residuals, weights, steps), (data, theirs, their_steps) in zip(
        fits, expected, strict=True
    ):
        np.testing.assert_allclose(residuals, data, rtol=1e-12)
        assert weights.tolist() == pytest.approx(theirs)
        assert steps == their_steps


def test_the_presets_of_2023_fit_once_to_the_mean_of_all_that_they_remember() -> None:
    """Fits after e = 15, 20, 30, ..., 130. An observation weighs 0.95^age, and is dropped after 100
    rounds."""
    fits = fits_of("fedcor", 4, 140)
    assert [steps for _, _, steps in fits] == [1000] + [100] * 12
    residuals, weights, _ = fits[0]
    ages = np.arange(15, -1, -1)
    assert weights == pytest.approx(0.95**ages)
    assert weights @ residuals == pytest.approx(np.zeros(4), abs=1e-12)
    _, weights, _ = fits[1]
    assert weights == pytest.approx([*0.95 ** (ages + 5.0), 1.0])
    _, weights, _ = fits[-1]
    assert len(weights) == 11  # e = 30 to 130


# --- nobody is available, or virtual updates are not finite
#
# Counted from 1, the warm-up is rounds 1 to 3, the first fit is before round 4 (30 steps), and
# virtual rounds are before rounds 5, 8, 11, ... (10 steps).


class NobodyIn(Availability):
    def __init__(self, rounds: set[int]) -> None:
        self.rounds = rounds

    def available(
        self, round: int, num_clients: int, rng: np.random.Generator
    ) -> NDArray[np.bool_]:
        return np.full(num_clients, round not in self.rounds)


class LossOfModel(ToyEngine):
    """A client's loss is the model's first number times the client's id."""

    def losses(self, params: Params, positions: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
        ids = np.array([self.owner[p[0]] for p in positions])
        return np.array(float(params["w"][0]) * ids)


def rounds_of(
    selector: FedCor, absent: set[int], num_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Return fits as (round, observations, steps), and the rounds with a greedy selection.

    No selection before a fit may be greedy.
    """
    fits: list[tuple[int, int, int]] = []
    greedy: list[int] = []
    fit = selector.process.fit
    run = toy_run(selector, LossOfModel([2] * 8), availability=NobodyIn(absent))

    def fitted(parameters: Any, residuals: Any, weights: Any, steps: int) -> Any:
        fits.append((run.round + 1, len(residuals), steps))
        result = fit(parameters, residuals, weights, steps)
        assert (result["embedding"] != parameters["embedding"]).any()
        return result

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
    ids=[
        "always somebody",
        "first round",
        "late start",
        "first fit",
        "virtual rounds",
        "two of them",
    ],
)
def test_what_was_due_while_nobody_was_there_is_done_in_the_next_round(
    absent: set[int],
    fits: list[tuple[int, int, int]],
    greedy: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert rounds_of(fedcor(8, 2), absent, 9, monkeypatch) == (fits, greedy)


def test_a_virtual_round_does_not_follow_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round e = 3 is the last of the warm-up, and divisible by the interval. The first virtual
    round follows e = 6."""
    selector = fedcor(8, 2, warmup=3)
    assert rounds_of(selector, set(), 8, monkeypatch) == ([(5, 4, 30), (8, 5, 10)], [5, 6, 7, 8])


def test_a_late_virtual_round_resets_the_discounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is due before round 8, in which nobody is there. The discounts are of round 9 only."""
    selector = fedcor(8, 2)
    rounds_of(selector, {8}, 9, monkeypatch)
    assert sorted(selector.discounts.tolist()) == [0.5] * 2 + [1.0] * 6


def virtual_round(broken: set[int]) -> tuple[FedCor, list[int]]:
    """Return the selector after the virtual round of all 8 clients before round 5, and the steps of
    its fits."""
    selector = fedcor(8, 8)
    steps: list[int] = []
    selector.process.fit = lambda p, r, w, n: (steps.append(n), p)[1]  # type: ignore[method-assign]
    engine = LossOfModel([2] * 8)
    for t in range(1, 6):
        engine.broken = broken if t == 5 else set()
        clients = toy_clients([2] * 8, selector.needs, engine=engine, round=t)
        selector.select(t, clients, np.random.default_rng(t))
    return selector, steps


def test_broken_updates_are_not_part_of_a_virtual_model() -> None:
    """The virtual model's first number is the mean of i / 2 over the others, 25 / 14. The model's
    is 0."""
    selector, steps = virtual_round({3})
    assert selector.changes[-1] == pytest.approx(25 / 14 * np.arange(8))
    assert steps == [30, 10]


def test_without_finite_virtual_updates_there_is_no_observation() -> None:
    selector, steps = virtual_round(set(range(8)))
    assert (len(selector.changes), steps) == (3, [30])


def test_without_finite_virtual_updates_discounts_are_not_reset() -> None:
    """All clients are selected in rounds 4 and 5, and no virtual round resets their discounts."""
    selector, _ = virtual_round(set(range(8)))
    assert selector.discounts.tolist() == [0.25] * 8


def test_changes_that_are_not_finite_count_as_0() -> None:
    selector = fedcor(4, 2)
    selector._add_observation(np.array([1.0, np.nan, np.inf, -np.inf]), 9)
    assert selector.changes[-1].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("noise", [1e-8, 1e-12])
def test_a_noise_that_is_lost_in_rounding_still_gives_a_selection(noise: float) -> None:
    """After q = 3 picks only the noise is left, which rounding may turn into a variance <= 0."""
    for seed in range(20):
        factor = rng(seed).standard_normal((3, 20))
        for covariance in (
            LowRankCovariance(factor, noise),
            factor.T @ factor + noise**2 * np.eye(20),
        ):
            picks = greedy_selection(covariance, np.ones(20), np.ones(20), 10, rng(seed))
            assert len(set(picks)) == 10


@pytest.mark.parametrize("noise", [1e-8, 1e-12])
@pytest.mark.parametrize(
    ("kernel", "objective"), [("linear", "mml"), ("linear_normalised", "mml"), ("linear", "loo")]
)
def test_a_noise_that_is_lost_in_rounding_still_gives_a_fit(
    kernel: Kernel, objective: Objective, noise: float
) -> None:
    """With fewer clients than dimensions F F^T is singular, and the noise does not show next to it.
    The last parameters are kept."""
    start = {"embedding": np.ones((3, 2)), "amplitude": np.ones(())}
    process = make_process(kernel, objective, noise, 1.0, 0.01)
    fitted = process.fit(start, np.ones((1, 2)), np.ones(1), 50)
    assert all(np.isfinite(value).all() for value in fitted.values())
