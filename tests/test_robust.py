"""Robust and private aggregators, and MIFA, against independent computations."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch

from fedsim.config.compose import search_path
from fedsim.core.errors import ConfigError
from fedsim.core.exact import normal
from fedsim.core.rng import Streams
from fedsim.core.types import Cohort
from fedsim.results.files import read_metrics, read_summary
from fedsim.rounds.aggregators import MIFA, Aggregator, FedAdam, FedAvg, FedAvgM
from fedsim.rounds.robust import ORDERS, DPFedAvg, GeometricMedian, Krum, NormClipping, TrimmedMean
from fedsim.running.assembly import build
from fedsim.selectors.power_of_choice import PowerOfChoice
from fedsim.selectors.random import Random
from tests.run_toys import Run, folders, plan_of, refused
from tests.toys import toy_cohort, toy_population

START = {"w": torch.tensor([1.0, -2.0, 0.5])}
NONE = frozenset[str]()
MEAN, MEDIAN, TRIMMED = FedAvg(NONE, weighting="uniform"), TrimmedMean(NONE, share=0.5), TrimmedMean(NONE, share=0.2)
KRUM, CENTRE = Krum(NONE, f=1, m=1), GeometricMedian(NONE, weighting="uniform", iterations=20, smoothing=1e-6)
CLIPPING = NormClipping(NONE, weighting="uniform", norm=2.0)


def updates(num: int, seed: int = 0, **more: Any) -> Cohort:
    rows = np.random.default_rng(seed).normal(size=(num, 3)).astype(np.float32)
    return toy_cohort(range(num), range(1, num + 1), rows.tolist(), **more)


def step(server: Aggregator, cohort: Cohort, weights: Any = None) -> np.ndarray[Any, Any]:
    """What it adds to the model."""
    return (server.aggregate(dict(START), cohort, weights)["w"] - START["w"]).numpy()


@pytest.mark.parametrize("num", [1, 2, 5, 8])
def test_medians_and_trimmed_means_are_those_of_numpy_and_scipy(num: int) -> None:
    cohort = updates(num)
    rows = cohort.delta["w"].numpy()
    assert step(MEDIAN, cohort, np.arange(num) + 1.0) == pytest.approx(np.median(rows, axis=0), abs=1e-6)
    for share in (0.0, 0.2, 0.25, 0.4):
        trimmed = step(TrimmedMean(NONE, share=share), cohort)
        assert trimmed == pytest.approx(scipy.stats.trim_mean(rows, share, axis=0), abs=1e-6)


@pytest.mark.parametrize(("num", "f", "m", "fits"), [(5, 1, 1, 1), (9, 2, 3, 2), (9, 3, None, 3), (6, 3, 2, 1)])
def test_krum_is_its_definition_and_takes_the_largest_f_that_fits(num: int, f: int, m: int | None, fits: int) -> None:
    for seed in range(20):
        cohort = updates(num, seed)
        rows, near = cohort.delta["w"].double().numpy(), num - fits - 2
        scores = [sum(sorted(((a - b) ** 2).sum() for b in np.delete(rows, i, 0))[:near]) for i, a in enumerate(rows)]
        chosen = sorted(range(num), key=scores.__getitem__)[: m or near]
        assert step(Krum(NONE, f=f, m=m), cohort) == pytest.approx(rows[chosen].mean(0), abs=1e-6)


def test_krum_breaks_ties_by_the_lower_id_and_takes_running_statistics_of_the_chosen() -> None:
    square = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, -1.0, 0.0]]
    cohort = toy_cohort([2, 3, 5, 7], [1] * 4, square)
    cohort.delta["v"] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    server = Krum(frozenset({"v"}), f=0, m=2)
    result = server.aggregate(START | {"v": torch.zeros(())}, cohort, None)
    assert (result["w"].tolist(), result["v"].item()) == ([1.5, -1.5, 0.5], 1.5)
    assert step(KRUM, cohort.rows(np.array([0, 1]))).tolist() == square[0]  # of two, there is no other rule


def test_the_geometric_median_has_the_least_sum_of_distances() -> None:
    cohort, weights = updates(7), np.array([1.0, 2.0, 3.0, 1.0, 1.0, 2.0, 4.0])
    rows = cohort.delta["w"].double().numpy()
    for given, used in ((None, np.arange(1.0, 8.0)), (weights, weights)):  # by size; of a selector
        best = scipy.optimize.minimize(lambda v, a=used: a @ np.linalg.norm(rows - v, axis=1), rows.mean(0), tol=1e-12)
        server = GeometricMedian(NONE, weighting="by_size", iterations=300, smoothing=1e-6)
        assert step(server, cohort, given) == pytest.approx(best.x, abs=1e-4)


def test_updates_are_clipped_and_running_statistics_in_their_own_right() -> None:
    cohort = toy_cohort([0, 1], [1, 3], [[3.0, 4.0, 0.0], [0.0, 1.0, 0.0]])
    cohort.delta["v"] = torch.tensor([-8.0, 1.0])
    server = NormClipping(frozenset({"v"}), weighting="by_size", norm=2.0)
    result = server.aggregate(START | {"v": torch.zeros(())}, cohort, np.array([1.0, 3.0]))
    assert (result["w"] - START["w"]).tolist() == pytest.approx([1.2, 1.6 + 3, 0.0])
    assert result["v"].item() == pytest.approx((-2 + 3 * 1) / 4)


@pytest.mark.parametrize("server", [MEDIAN, TRIMMED, KRUM, Krum(NONE, f=1, m=None), CENTRE, CLIPPING])
def test_a_hostile_update_moves_the_mean_and_not_the_others(server: Aggregator) -> None:
    cohort = updates(7)
    cohort.delta["w"][3] = 1e6
    assert np.abs(step(MEAN, cohort)).min() > 1e5
    assert np.abs(step(server, cohort)).max() < 3


def test_which_aggregators_are_means() -> None:
    assert [kind.is_mean for kind in (FedAvg, FedAvgM, FedAdam)] == [True] * 3
    assert not any(kind.is_mean for kind in (TrimmedMean, Krum, GeometricMedian, NormClipping, DPFedAvg, MIFA))


@pytest.mark.parametrize("weighting", ["uniform", "by_size"])
def test_mifa_by_hand_over_three_rounds_with_absences(weighting: Any) -> None:
    sizes = [1, 1, 2, 4]
    server = MIFA(frozenset({"v"}), weighting=weighting)
    server.begin(Random(toy_population(sizes, 2), mode="uniform"), START)
    assert "MIFA keeps the latest update of each of 4 clients, 0.0 MB" in server.warning
    deltas = {1: ([0, 2], [4.0, 8.0], 1.0), 2: ([0], [2.0], 1.0), 3: ([3], [6.0], 0.5)}
    # the latest of each at its learning rate: (4, -, 8, -), (2, -, 8, -), (2/2, -, 8/2, 6)
    expected = {"uniform": [12 / 2, 10 / 2, 11 / 3], "by_size": [20 / 3, 18 / 3, (1 + 2 * 4 + 4 * 6) / 7]}
    for t, (ids, values, lr) in deltas.items():
        cohort = toy_cohort(ids, [sizes[i] for i in ids], [[x] * 3 for x in values])
        cohort.delta["v"] = torch.tensor(values)
        server.begin_round(SimpleNamespace(lr=lr), cohort.ids)  # type: ignore[arg-type]
        after = server.aggregate(START | {"v": torch.zeros(())}, cohort, np.full(len(ids), 9.0))
        assert (after["w"] - START["w"]).tolist() == pytest.approx([expected[weighting][t - 1]] * 3, abs=1e-6)
        own = np.average(values, weights=cohort.sizes if weighting == "by_size" else None)
        assert after["v"].item() == pytest.approx(own)  # of this round alone


def private(num: int = 20, cohort_size: int = 5, **values: Any) -> DPFedAvg:
    pytest.importorskip("opacus")
    values = {"clip": 2.0, "noise_multiplier": 1.5, "delta": 1e-3, "denominator": None} | values
    server = DPFedAvg(NONE, **values)
    server.begin(Random(toy_population([1] * num, cohort_size), mode="uniform"), START)
    return server


def in_round(server: DPFedAvg, round: int, selected: int = 5, available: int = 20, seed: int = 0) -> DPFedAvg:
    context = SimpleNamespace(round=round, streams=Streams(seed), available=np.arange(available))
    server.begin_round(context, np.arange(selected))  # type: ignore[arg-type]
    return server


def test_private_steps_are_clipped_sums_over_a_fixed_denominator() -> None:
    cohort = toy_cohort([0, 1], [1, 9], [[3.0, 4.0, 0.0], [0.0, 1.0, 0.0]])  # two of five have arrived
    for denominator, divisor in ((None, 5), (10, 10)):
        server = in_round(private(noise_multiplier=1e-9, denominator=denominator), 1)
        expected = np.array([1.2, 1.6 + 1, 0.0]) / divisor
        assert step(server, cohort, np.array([7.0, 7.0])) == pytest.approx(expected, abs=1e-6)


def test_private_noise_has_the_stated_deviation_and_is_the_same_for_a_seed_and_a_round() -> None:
    start = {"w": torch.zeros(200, 100), "v": torch.zeros(7)}
    cohort = replace(toy_cohort([0], [1], [[0.0]]), delta={n: torch.zeros(1, *t.shape) for n, t in start.items()})

    def noise(round: int, seed: int = 0) -> torch.Tensor:
        return in_round(private(), round, seed=seed).aggregate(start, cohort, None)["w"]

    assert noise(3).std().item() == pytest.approx(1.5 * 2 / 5, rel=0.03)
    assert torch.equal(noise(3), noise(3))
    assert not any(torch.equal(noise(3), other) for other in (noise(4), noise(3, seed=1)))


def test_normal_numbers_are_normal() -> None:
    assert [len(normal(np.random.default_rng(0), count)) for count in (0, 1, 2)] == [0, 1, 2]
    numbers = normal(np.random.default_rng(1), 200_000)
    assert scipy.stats.kstest(numbers, "norm").pvalue > 0.01


def test_epsilon_is_the_librarys_over_rounds_with_several_rates() -> None:
    server = private()
    from opacus.accountants import RDPAccountant

    assert server.epsilon_spent == 0
    accountant, cohort = RDPAccountant(), updates(2)
    for t, available in enumerate([20, 20, 10, 20, 5], 1):
        in_round(server, t, available=available).aggregate(START, cohort, None)
        accountant.step(noise_multiplier=1.5, sample_rate=5 / available)
        assert server.epsilon_spent == pytest.approx(accountant.get_epsilon(1e-3, alphas=ORDERS), rel=1e-9)
    assert server.state_dict() == {"rounds_by_rate": {0.25: 3, 0.5: 1, 1.0: 1}}


def test_epsilon_by_hand_where_all_take_part() -> None:
    """Rounds of a Gaussian mechanism: T a / (2 z^2) at each order a; to epsilon by Balle et al., 2020, theorem 21."""
    server, a = private(num=5), np.array(ORDERS)
    for t in range(1, 11):
        in_round(server, t, available=5).aggregate(START, updates(5), None)
    expected = 10 * a / (2 * 1.5**2) + np.log((a - 1) / a) - (np.log(1e-3) + np.log(a)) / (a - 1)
    assert server.epsilon_spent == pytest.approx(expected.min(), rel=1e-9)


def test_selections_that_are_not_uniform_are_told_by_what_they_ask() -> None:
    server, population = private(), toy_population([1] * 20, 5)
    assert server.warning is None
    asks = PowerOfChoice(population, num_candidates=10, estimate="full", schedule="constant")
    told = {asks: "PowerOfChoice asks clients for losses", Random(population, mode="size"): "Random draws otherwise"}
    for selector, words in told.items():
        server.begin(selector, START)
        assert (server.warning or "").partition("; ")[2] == f"{words}: it does not hold for its choices"


def test_epsilon_is_in_records_summary_and_on_the_screen(
    fedsim: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("opacus")
    words = ["aggregator=dp_fedavg", "tracker=default", "tracker.wandb.mode=disabled"]
    assert fedsim(*words, "selector=power_of_choice", "tracker.console.progress=false") == 0
    (folder,) = folders(tmp_path)
    spent = [record["epsilon"] for record in read_metrics(folder)]
    assert 0 < spent[0] < spent[1] < spent[2] == (read_summary(folder) or {})["epsilon"]
    screen = capsys.readouterr().out
    assert screen.count("PowerOfChoice asks clients for losses") == 1
    assert f"epsilon {spent[-1]:.4g} of each client" in screen
    assert fedsim("name=other") == 0
    assert not any("epsilon" in record for record in read_metrics(folders(tmp_path)[-1]))


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "aggregator=krum cohort_size=4": "aggregator.f=1: needs 2 f + 3 = 5 updates a round, and there are 4 (cohort_size)"
    "\n    set cohort_size=5 or more, or aggregator.f=0",
    "aggregator=krum cohort_size=4 system=tiers system.over_selection=1.5": "and there are 4",
    "aggregator=multi_krum aggregator.m=6": "aggregator.m=6: must be at most 5, the updates of a round (cohort_size)",
    "aggregator=trimmed_mean cohort_size=4": "aggregator.share=0.2: must be at least 1 / 4, or it trims none",
    "aggregator=trimmed_mean aggregator.weighting=by_size": "aggregator.weighting: is not a known key",
    "aggregator=dp_fedavg aggregator.delta=0.05": "aggregator.delta=0.05: must be below 1 / num_clients = 0.05",
    "aggregator=dp_fedavg selector=full": "aggregator.denominator=None: must be given for Full, which decides how many",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_go_together_is_refused_before_the_run(fedsim: Run, tmp_path: Path, words: str) -> None:
    if "dp_fedavg" in words:
        pytest.importorskip("opacus")
    assert REFUSED[words] in refused(fedsim, tmp_path, *words.split())


def test_private_runs_need_their_package_and_a_model_without_running_statistics(
    fedsim: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opacus")
    norms = ["model=logistic", "model._target_=tests.goldens.Norms"]
    with search_path(), pytest.raises(ConfigError, match=r"DPFedAvg'.* running statistics, as 1\.running_mean: var"):
        build(plan_of("aggregator=dp_fedavg", *norms))
    monkeypatch.setattr("fedsim.rounds.robust.find_spec", lambda name: None)
    assert "pip install 'fedsim-selection[privacy]'" in refused(fedsim, tmp_path, "aggregator=dp_fedavg")
