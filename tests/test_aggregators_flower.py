"""Aggregators against the strategies of Flower (flwr), which others wrote. Where conventions
differ, a comment says so.

Flower aggregates models, fedsim updates: the models are the start plus the updates.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.core.types import Cohort
from fedsim.rounds.aggregators import Aggregator, FedAdam, FedAvg, FedAvgM
from fedsim.rounds.robust import DPFedAvg, Krum, NormClipping, TrimmedMean
from tests.toys import toy_cohort

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
common = pytest.importorskip("flwr.common")
strategies = pytest.importorskip("flwr.server.strategy")
NONE = frozenset[str]()
SIZES = [1, 4, 2, 7, 3, 5, 2, 6, 1]
START = np.array([1.0, -2.0, 0.5, 3.0], np.float32)
SAMPLING = {"fraction_fit": 1.0, "min_fit_clients": 1, "min_available_clients": 1}


def cohort_of(seed: int, sizes: Sequence[int] = SIZES) -> Cohort:
    rows = np.random.default_rng(seed).normal(size=(len(sizes), len(START))).astype(np.float32)
    return toy_cohort(range(len(sizes)), sizes, rows.tolist())


def parameters(model: Any) -> Any:
    return common.ndarrays_to_parameters([np.asarray(model, np.float32)])


def flowers_model(strategy: Any, cohort: Cohort, model: Any, round: int = 1) -> Any:
    """The next model of a strategy of Flower."""
    results = []
    for update, size in zip(cohort.delta["w"].numpy(), cohort.sizes.tolist(), strict=True):
        status = common.Status(common.Code.OK, "")
        result = common.FitRes(status, parameters(model + update), num_examples=size, metrics={})
        results.append((None, result))
    aggregated, _ = strategy.aggregate_fit(round, results, [])
    return common.parameters_to_ndarrays(aggregated)[0]


def our_model(server: Aggregator, cohort: Cohort, model: Any) -> Any:
    return server.aggregate({"w": torch.as_tensor(model).clone()}, cohort, None)["w"].numpy()


def same_over_rounds(server: Aggregator, strategy: Any, before: Any = lambda round: None) -> None:
    """Five rounds, each from the model of the round before."""
    ours = theirs = START
    for round in range(1, 6):
        before(round)
        cohort = cohort_of(round)
        theirs = flowers_model(strategy, cohort, theirs, round)
        ours = our_model(server, cohort, ours)
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_fedavg_weights_clients_by_their_samples_as_flowers_does() -> None:
    same_over_rounds(FedAvg(NONE, weighting="by_size"), strategies.FedAvg(**SAMPLING))


@pytest.mark.parametrize(("lr", "momentum"), [(0.5, 0.0), (1.0, 0.9), (0.3, 0.7)])
def test_server_momentum_is_flowers(lr: float, momentum: float) -> None:
    values = {"server_learning_rate": lr, "server_momentum": momentum}
    strategy = strategies.FedAvgM(**values, initial_parameters=parameters(START), **SAMPLING)
    same_over_rounds(FedAvgM(NONE, weighting="by_size", lr=lr, momentum=momentum), strategy)


def test_fedadam_is_flowers_with_the_papers_start_and_step() -> None:
    """Reddi et al. 2021, Algorithm 2, starts with v = tau^2 and steps by lr m / (sqrt(v) + tau), as
    fedsim does. Flower starts with v = 0, and multiplies the step by sqrt(1 - beta2^(t + 1)) / (1 -
    beta1^(t + 1)), Adam's correction with one round more than there were; the paper has no
    correction. Both are undone here."""
    lr, beta1, beta2, tau = 0.1, 0.9, 0.8, 0.05
    values = {"eta": lr, "beta_1": beta1, "beta_2": beta2, "tau": tau}
    strategy = strategies.FedAdam(**values, initial_parameters=parameters(START), **SAMPLING)
    strategy.v_t = [np.full_like(START, tau**2)]

    def undo_correction(round: int) -> None:
        strategy.eta = lr * (1 - beta1 ** (round + 1)) / np.sqrt(1 - beta2 ** (round + 1))

    ours = FedAdam(NONE, weighting="by_size", lr=lr, beta1=beta1, beta2=beta2, tau=tau)
    same_over_rounds(ours, strategy, undo_correction)


@pytest.mark.parametrize("num", [1, 2, 5, 8])
def test_the_median_is_flowers(num: int) -> None:
    cohort = cohort_of(num, SIZES[:num])
    expected = flowers_model(strategies.FedMedian(**SAMPLING), cohort, START)
    assert our_model(TrimmedMean(NONE, share=0.5), cohort, START) == pytest.approx(
        expected, abs=1e-6
    )


@pytest.mark.parametrize("share", [0.0, 0.12, 0.2, 0.34, 0.49])
def test_the_trimmed_mean_is_flowers(share: float) -> None:
    """Both cut floor(share K) at each end. Flower rounds 0.29 x 100 = 28.999... down to 28; fedsim
    takes 29 for it."""
    cohort = cohort_of(0)
    expected = flowers_model(strategies.FedTrimmedAvg(beta=share, **SAMPLING), cohort, START)
    assert our_model(TrimmedMean(NONE, share=share), cohort, START) == pytest.approx(
        expected, abs=1e-6
    )


@pytest.mark.parametrize(("f", "m"), [(0, 1), (1, 1), (3, 1), (1, 3), (2, 5), (3, 9)])
def test_krum_and_multi_krum_are_flowers_with_clients_of_one_size(f: int, m: int) -> None:
    """Flower weights the chosen of Multi-Krum by their samples. Blanchard et al. 2017, section 4,
    and fedsim do not."""
    keep = 0 if m == 1 else m  # Krum itself
    for seed in range(10):
        cohort = cohort_of(seed, [3] * 9)
        strategy = strategies.Krum(num_malicious_clients=f, num_clients_to_keep=keep, **SAMPLING)
        expected = flowers_model(strategy, cohort, START)
        assert our_model(Krum(NONE, f=f, m=m), cohort, START) == pytest.approx(expected, abs=1e-5)


def fixed_clipping(noise_multiplier: float, norm: float, num: int) -> Any:
    plain = strategies.FedAvg(**SAMPLING)
    strategy = strategies.DifferentialPrivacyServerSideFixedClipping(
        plain, noise_multiplier, norm, num
    )
    strategy.current_round_params = [START]
    return strategy


@pytest.mark.parametrize("norm", [0.5, 1.5, 100.0])
@pytest.mark.parametrize("sizes", [SIZES, [3] * 9])
def test_clipped_updates_are_those_of_flowers_fixed_clipping(
    norm: float, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower averages clipped updates by size. In private runs, fedsim has equal weights: the
    sensitivity of a weighted sum is that of the heaviest client, and Flower's noise is made for K
    equal ones."""
    cohort = cohort_of(1, sizes)
    expected = flowers_model(fixed_clipping(0.0, norm, 9), cohort, START)
    ours = NormClipping(NONE, weighting="by_size", norm=norm)
    assert our_model(ours, cohort, START) == pytest.approx(expected, abs=1e-5)
    if len(set(sizes)) == 1:
        monkeypatch.setattr("fedsim.rounds.robust.normal", lambda rng, count: np.zeros(count))
        private = DPFedAvg(NONE, clip=norm, noise_multiplier=1.0, delta=1e-3, denominator=9)
        private._rng, private._rate = np.random.default_rng(0), 1.0
        assert our_model(private, cohort, START) == pytest.approx(expected, abs=1e-5)


def test_private_noise_has_the_deviation_of_flowers() -> None:
    differential_privacy = pytest.importorskip("flwr.supercore.differential_privacy")
    start = {"w": torch.zeros(20_000)}
    private = DPFedAvg(NONE, clip=2.0, noise_multiplier=1.5, delta=1e-3, denominator=9)
    private._rng, private._rate = np.random.default_rng(0), 1.0
    cohort = toy_cohort([0], [1], [[0.0]])
    cohort.delta["w"] = torch.zeros(1, 20_000)
    noise = private.aggregate(start, cohort, None)["w"]
    assert noise.std().item() == pytest.approx(
        differential_privacy.compute_stdv(1.5, 2.0, 9), rel=0.02
    )
