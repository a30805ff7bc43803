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
from fedsim.selectors.fedcor import FedCor
from fedsim.selectors.gaussian_process import (
    DenseProcess,
    Kernel,
    LowRank,
    Objective,
    Parameters,
    Process,
    greedy_selection,
    make_process,
)
from tests.test_selector_contract import composed
from tests.toys import ToyEngine, picked, toy_clients, toy_population, toy_run


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def dense_falls(
    sigma: Any, shares: Any, discounts: Any, count: int
) -> tuple[list[int], list[np.ndarray]]:
    """The selection rule written out on the whole covariance, lowest position first among ties."""
    c, chosen, gains = sigma.copy(), [], []
    for _ in range(count):
        with np.errstate(invalid="ignore", divide="ignore"):
            gain = discounts / np.sqrt(c.diagonal()) * (c @ shares)
        gain[chosen] = -np.inf
        gains.append(gain.copy())
        j = int(np.argmax(gain))
        c = c - np.outer(c[:, j], c[j]) / c[j, j]
        chosen.append(j)
    return chosen, gains


SIGMA = np.array([[1, 0.9, 0, 0], [0.9, 1, 0, 0], [0, 0, 1, 0.2], [0, 0, 0.2, 1]])
FACTOR = np.linalg.cholesky(SIGMA - 1e-6 * np.eye(4)).T


def pick(discounts: Any = (1, 1, 1, 1), seed: int = 0, **more: Any) -> list[int]:
    random = np.random.default_rng(seed)
    return greedy_selection(
        LowRank(FACTOR, 1e-3), np.full(4, 0.25), np.array(discounts), 2, random, **more
    ).tolist()


def test_the_rule_by_hand_never_takes_a_correlated_pair() -> None:
    _, gains = dense_falls(SIGMA, np.full(4, 0.25), np.ones(4), 2)
    assert gains[0] == pytest.approx([0.475, 0.475, 0.3, 0.3])
    assert gains[1][1:] == pytest.approx([0.10897, 0.3, 0.3], abs=1e-5)
    for seed in range(20):
        first, second = pick(seed=seed)
        assert first in (0, 1)
        assert second in (2, 3)
    discounts = [0.5, 0.5, 1, 1]
    _, gains = dense_falls(SIGMA, np.full(4, 0.25), np.array(discounts), 2)
    assert gains[0] == pytest.approx([0.2375, 0.2375, 0.3, 0.3])
    assert gains[1][3] == pytest.approx(0.24495, abs=1e-5)
    assert pick(discounts) == [2, 3]


def test_random_picks_and_an_early_stop() -> None:
    assert len({tuple(pick(seed=s, epsilon=1.0)) for s in range(40)}) == 6  # any pair
    assert [len(pick(min_fall=fall)) for fall in (0.2, 0.4, 9.0)] == [2, 1, 1]


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5), st.integers(3, 12), st.integers(1, 6), st.integers(0, 10_000))
def test_low_rank_selection_equals_the_dense_one(q: int, n: int, count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    factor, shares, discounts = random.standard_normal((q, n)), random.random(n), random.random(n)
    sigma = factor.T @ factor + 0.3**2 * np.eye(n)
    expected, _ = dense_falls(sigma, shares, discounts, min(count, n))
    for covariance in (LowRank(factor, 0.3), sigma):
        assert greedy_selection(
            covariance, shares, discounts, min(count, n), rng()
        ).tolist() == sorted(expected)


NOISE = 0.3


def sklearn_kernel(kernel: Kernel, amplitude: float = 1.0, length: float = 2.0) -> SklearnKernel:
    """The covariance of clients at the columns of an embedding; `linear_normalised` takes columns
    of length 1."""
    if kernel == "linear":
        signal = DotProduct(sigma_0=0.0, sigma_0_bounds="fixed")
    elif kernel == "linear_normalised":
        signal = ConstantKernel(amplitude**2) * DotProduct(sigma_0=0.0, sigma_0_bounds="fixed")
    else:
        signal = ConstantKernel(amplitude**2) * RBF(length**0.5)
    return signal + WhiteKernel(NOISE**2)


@pytest.mark.parametrize("kernel", ["linear", "linear_normalised", "se"])
def test_each_pick_has_the_largest_fall_by_scikit_learns_posterior(kernel: Kernel) -> None:
    """Section 4.2: if client k's loss falls by a_k standard deviations, what the posterior mean
    says of all losses."""
    random = np.random.default_rng(0)
    n, count = 12, 4
    embedding, shares = random.standard_normal((3, n)), random.dirichlet(np.ones(n))
    discounts = 0.95 ** random.integers(0, 4, n)
    points = (
        embedding.T / np.linalg.norm(embedding, axis=0)[:, None]
        if kernel == "linear_normalised"
        else embedding.T
    )
    prior = sklearn_kernel(kernel)
    chosen: list[int] = []
    for _ in range(count):
        covariance = prior(points)
        if chosen:
            # what is known of the chosen is exact: their noise is in the kernel
            process = GaussianProcessRegressor(prior, alpha=1e-12, optimizer=None)
            process.fit(points[chosen], np.zeros(len(chosen)))
            covariance = process.predict(points, return_cov=True)[1]
        left = [k for k in range(n) if k not in chosen]
        falls = {
            k: discounts[k] / covariance[k, k] ** 0.5 * shares[left] @ covariance[left, k]
            for k in left
        }
        chosen.append(max(falls, key=falls.__getitem__))
    process = make_process(kernel, "mml", NOISE, 2.0, 0.01)
    covariance = process.covariance({"embedding": embedding, "amplitude": np.ones(())})
    assert greedy_selection(covariance, shares, discounts, count, rng()).tolist() == sorted(chosen)


@pytest.mark.parametrize("kernel", ["linear", "linear_normalised", "se"])
def test_the_fit_raises_scipys_likelihood_by_a_gradient_that_is_scikit_learns(
    kernel: Kernel,
) -> None:
    parameters, residuals, weights = problem()
    x, amplitude = parameters["embedding"], float(parameters["amplitude"])
    process = make_process(kernel, "mml", NOISE, 2.0, 0.01)

    def likelihood(at: Parameters) -> float:
        points = at["embedding"].T
        if kernel == "linear_normalised":
            points = points / np.linalg.norm(points, axis=1)[:, None]
        covariance = sklearn_kernel(kernel, float(at["amplitude"]))(points)
        return float(weights @ multivariate_normal(np.zeros(7), covariance).logpdf(residuals))

    before = likelihood(parameters)
    assert likelihood(process.fit(parameters, residuals, weights, 50)) > before + 0.1
    gradient, step = process.gradient(parameters, residuals, weights), 1e-6
    for i in (0, 2):
        moved = [
            parameters | {"embedding": x + sign * step * np.eye(3)[:, [i]] * np.eye(7)[4]}
            for sign in (1, -1)
        ]
        slope = (likelihood(moved[0]) - likelihood(moved[1])) / (2 * step)
        assert -gradient["embedding"][i, 4] == pytest.approx(slope, rel=1e-5)
    if kernel == "se":  # scikit-learn derives by the logarithm of the amplitude's square
        sklearn = GaussianProcessRegressor(
            sklearn_kernel(kernel, amplitude), alpha=0.0, optimizer=None
        )
        slopes = []
        for residual in residuals:
            sklearn.fit(x.T, residual)
            slopes.append(
                sklearn.log_marginal_likelihood(sklearn.kernel_.theta, eval_gradient=True)[1][0]
            )
        assert -gradient["amplitude"] == pytest.approx(weights @ np.array(slopes) * 2 / amplitude)


def problem(q: int = 3, n: int = 7, e: int = 4) -> tuple[Parameters, np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    parameters = {"embedding": random.standard_normal((q, n)), "amplitude": np.array(1.3)}
    return parameters, random.standard_normal((e, n)), random.random(e)


def kernel_matrix(
    kernel: Kernel, x: torch.Tensor, amplitude: torch.Tensor, length: float
) -> torch.Tensor:
    if kernel == "linear":
        return x.T @ x
    if kernel == "linear_normalised":
        return amplitude**2 * torch.nn.functional.cosine_similarity(x.T[:, None], x.T[None], dim=2)
    gram = x.T @ x
    squares = gram.diagonal()[:, None] + gram.diagonal()[None] - 2 * gram
    return amplitude**2 * torch.exp(-squares / (2 * length))


@pytest.mark.parametrize("objective", ["mml", "loo"])
@pytest.mark.parametrize("kernel", ["linear", "linear_normalised", "se"])
def test_gradients_equal_autograd_on_the_written_out_likelihood(
    kernel: Kernel, objective: Objective
) -> None:
    parameters, residuals, weights = problem()
    x = torch.tensor(parameters["embedding"], requires_grad=True)
    amplitude = torch.tensor(parameters["amplitude"], requires_grad=True)
    sigma = kernel_matrix(kernel, x, amplitude, 2.0) + 0.2**2 * torch.eye(7, dtype=torch.float64)
    r = torch.tensor(residuals)
    if objective == "mml":
        zero = torch.zeros(7, dtype=torch.float64)
        each = torch.distributions.MultivariateNormal(zero, sigma).log_prob(r)
    else:
        each = sum(_left_out(sigma, r, i) for i in range(7))  # type: ignore[assignment]
    (-(torch.tensor(weights) * each).sum()).backward()
    process = make_process(kernel, objective, 0.2, 2.0, 0.01)
    ours = process.gradient(parameters, residuals, weights)
    np.testing.assert_allclose(ours["embedding"], x.grad, rtol=1e-7, atol=1e-9)
    assert ("amplitude" in ours) == (kernel != "linear")
    if "amplitude" in ours:
        assert ours["amplitude"] == pytest.approx(float(amplitude.grad))  # type: ignore[arg-type]


def _left_out(sigma: torch.Tensor, r: torch.Tensor, i: int) -> torch.Tensor:
    """log p(r_i | the others) by conditioning the joint normal."""
    others = [j for j in range(len(sigma)) if j != i]
    solved = torch.linalg.solve(sigma[others][:, others], sigma[others, i])
    mean, variance = r[:, others] @ solved, sigma[i, i] - sigma[i, others] @ solved
    return torch.distributions.Normal(mean, variance.sqrt()).log_prob(r[:, i])


def test_the_low_rank_form_is_taken_where_it_is_exact_and_agrees_with_the_dense_one() -> None:
    parameters, residuals, weights = problem()
    for kernel in ("linear", "linear_normalised"):
        low = make_process(kernel, "mml", 0.2, 1.0, 0.01)
        dense = DenseProcess(0.2, 0.01, kernel=kernel, length=1.0, objective="mml")
        assert not isinstance(low, DenseProcess)
        fitted, expected = (p.fit(parameters, residuals, weights, 20) for p in (low, dense))
        np.testing.assert_allclose(fitted["embedding"], expected["embedding"], rtol=1e-7)
        np.testing.assert_allclose(fitted["amplitude"], expected["amplitude"], rtol=1e-7)
        np.testing.assert_allclose(
            low.covariance(fitted).diagonal(), dense.covariance(fitted).diagonal(), rtol=1e-7
        )


def test_a_fit_that_breaks_keeps_what_it_had_and_selection_goes_on_at_random() -> None:
    parameters, residuals, weights = problem()
    residuals[0, 0] = np.inf
    for process in (
        make_process("linear", "mml", 0.2, 1.0, 0.01),
        make_process("se", "loo", 0.2, 1.0, 0.01),
    ):
        fitted = process.fit(parameters, residuals, weights, 5)
        assert (fitted["embedding"] == parameters["embedding"]).all()
    broken = np.full((5, 5), np.nan)
    picks = {
        tuple(greedy_selection(broken, np.ones(5), np.ones(5), 2, np.random.default_rng(s)))
        for s in range(50)
    }
    assert len(picks) > 5


def test_fitting_equals_torchs_adam() -> None:
    random = np.random.default_rng(2)
    residuals, x = random.standard_normal((200, 6)), random.standard_normal((4, 6)) / 2
    process = Process(0.1, 0.01, kernel="linear")
    fitted = process.fit({"embedding": x}, residuals, np.ones(200), 300)["embedding"]
    leaf = torch.tensor(x, requires_grad=True)
    optimizer = torch.optim.Adam([leaf], lr=0.01)
    for _ in range(300):
        gradient = process.gradient({"embedding": leaf.detach().numpy()}, residuals, np.ones(200))
        leaf.grad = torch.tensor(gradient["embedding"])
        optimizer.step()
    np.testing.assert_allclose(fitted, leaf.detach().numpy(), rtol=1e-6, atol=1e-8)


def fedcor(n: int, k: int) -> FedCor:
    values: dict[str, Any] = {
        **{
            "dimension": 3,
            "noise": 0.01,
            "kernel": "linear",
            "length": 1.0,
            "objective": "mml",
            "epsilon": 0.0,
        },
        **{
            "least_fall": None,
            "warmup": 2,
            "interval": 3,
            "window": 100,
            "history": "rounds",
            "gamma": 0.9,
        },
        **{"beta": 0.5, "first_steps": 30, "refit_steps": 10, "warmup_steps": 0, "fit_lr": 0.01},
    }
    return FedCor(toy_population([2] * n, k, 30), **values, update_mean=True, uniform_shares=False)


def test_each_kind_of_round_asks_what_it_must_and_discounts_start_again_after_a_virtual_one() -> (
    None
):
    selector, asked = fedcor(8, 2), []
    for t in range(1, 9):
        ids = picked(selector, t, t, ledger=(ledger := Ledger()))
        asked.append(ledger.forward_samples)
        if t in (5, 8):  # what follows rounds e = 3 and 6, divisible by the interval
            assert (np.delete(selector.discounts, ids) == 1).all()
            assert selector.discounts[ids].tolist() == [0.5, 0.5]
    assert asked == [
        16,
        16,
        16,
        16,
        32,
        0,
        0,
        32,
    ]  # rounds 0..W report before, and once more after round W
    assert len(selector.changes) == 3 + 2


class TableOfLosses(ToyEngine):
    """Losses that depend on the round and on whether the model is the initial one (the toy's) or a
    virtual one."""

    round = 1

    def losses(self, params: Params, positions: Any) -> np.ndarray:
        return loss_table(self.round, virtual=bool(params["w"].any()), n=len(positions))


def loss_table(t: int, *, virtual: bool, n: int) -> np.ndarray:
    return np.random.default_rng([t, virtual]).random(n)


def fits_of(preset: str, n: int, num_rounds: int) -> list[tuple[np.ndarray, np.ndarray, int]]:
    selector = instantiate(
        composed(preset), FedCor, "selector", toy_population([2] * n, 2, num_rounds)
    )
    calls: list[tuple[np.ndarray, np.ndarray, int]] = []
    selector.process.fit = lambda p, r, w, n: (calls.append((r, w, n)), p)[1]  # type: ignore[method-assign]
    engine = TableOfLosses([2] * n)
    for engine.round in range(1, num_rounds + 1):
        clients = toy_clients([2] * n, selector.needs, engine=engine, round=engine.round)
        selector.select(engine.round, clients, np.random.default_rng(engine.round))
    return calls


def fits_of_2022(
    n: int, last: int, warmup: int, interval: int, group_size: int, gamma: float
) -> list[tuple[np.ndarray, list[float], int]]:
    """What the code of 2022 fits after rounds 0..last: its data, the weights of its sums, and its
    steps."""
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
    assert (
        len(fits)
        == len(expected)
        == values[0] + 1 + sum(e > values[0] for e in range(0, last, values[1]))
    )
    for (residuals, weights, steps), (data, theirs, their_steps) in zip(
        fits, expected, strict=True
    ):
        np.testing.assert_allclose(residuals, data, rtol=1e-12)
        assert weights.tolist() == pytest.approx(theirs)
        assert steps == their_steps


def test_the_presets_of_2023_fit_once_to_the_mean_of_all_that_they_remember() -> None:
    (first, *later) = fits_of("fedcor", 4, 140)
    assert [steps for *_, steps in (first, *later)] == [1000] + [
        100
    ] * 12  # after e = 15, 20, 30, ..., 130
    ages = np.arange(15, -1, -1)
    assert first[1].tolist() == pytest.approx((0.95**ages).tolist())
    assert first[1] @ first[0] == pytest.approx(np.zeros(4), abs=1e-12)
    assert later[0][1].tolist() == pytest.approx([*0.95 ** (ages + 5.0), 1.0])
    assert len(later[-1][1]) == 11  # e = 30 to 130


# --- where nobody is available, and where virtual updates are not finite: warm-up in rounds 1 to 3, the first fit
# before round 4 (30 steps), virtual rounds before rounds 5, 8, 11, ... (10 steps) ---


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
    """Fits as (round, observations, steps), and the rounds with a greedy selection, which none
    before a fit may be."""
    fits: list[tuple[int, int, int]] = []
    greedy: list[int] = []
    fit = selector.process.fit
    run = toy_run(selector, LossOfModel([2] * 8), availability=NobodyIn(absent))

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
    """Round e = 3 is the last of the warm-up, and divisible by the interval; the first virtual
    round follows e = 6."""
    selector = fedcor(8, 2)
    selector.warmup = 3
    assert rounds_of(selector, set(), 8, monkeypatch) == ([(5, 4, 30), (8, 5, 10)], [5, 6, 7, 8])
    selector = fedcor(8, 2)
    rounds_of(selector, {8}, 9, monkeypatch)
    assert sorted(selector.discounts.tolist()) == [0.5] * 2 + [1.0] * 6  # those of round 9 alone


def virtual_round(broken: set[int]) -> tuple[FedCor, list[int]]:
    """A selector after round 5, before which all 8 clients may be trained virtually, and the steps
    of its fits."""
    selector, steps = fedcor(8, 8), []
    selector.process.fit = lambda p, r, w, n: (steps.append(n), p)[1]  # type: ignore[method-assign]
    engine = LossOfModel([2] * 8)
    for t in range(1, 6):
        engine.broken = broken if t == 5 else set()
        clients = toy_clients([2] * 8, selector.needs, engine=engine, round=t)
        selector.select(t, clients, np.random.default_rng(t))
    return selector, steps


def test_broken_updates_of_a_virtual_round_are_left_out_of_its_model() -> None:
    """The virtual model's first number is the mean of i / 2 over the others, 25 / 14; the model's
    is 0."""
    selector, steps = virtual_round({3})
    assert selector.changes[-1] == pytest.approx(25 / 14 * np.arange(8))
    selector._add_observation(np.array([1.0, np.nan, np.inf, -np.inf]), 9)
    assert selector.changes[-1].tolist() == [1, 0, 0, 0]
    assert steps == [30, 10]
    selector, steps = virtual_round(set(range(8)))  # without any finite one there is no observation
    assert (len(selector.changes), steps) == (3, [30])


@pytest.mark.parametrize("noise", [1e-8, 1e-12])
def test_a_noise_that_is_lost_in_rounding_still_gives_a_selection_and_a_fit(noise: float) -> None:
    """After q picks nothing but the noise is left, which may come out as a variance <= 0. With
    fewer clients than dimensions F F^T is singular, and the noise does not show beside it: the last
    parameters are kept."""
    for seed in range(20):
        factor = np.random.default_rng(seed).standard_normal((3, 20))
        for covariance in (LowRank(factor, noise), factor.T @ factor + noise**2 * np.eye(20)):
            picked = greedy_selection(
                covariance, np.ones(20), np.ones(20), 10, np.random.default_rng(seed)
            )
            assert len(set(picked)) == 10
    start = {"embedding": np.ones((3, 2)), "amplitude": np.ones(())}
    for kernel, objective in (("linear", "mml"), ("linear_normalised", "mml"), ("linear", "loo")):
        fitted = make_process(kernel, objective, noise, 1.0, 0.01).fit(
            start, np.ones((1, 2)), np.ones(1), 50
        )
        assert all(np.isfinite(value).all() for value in fitted.values())
