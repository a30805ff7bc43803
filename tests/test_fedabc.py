"""FedABC, and the selection by loss that it is compared with."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch

from fedsim.core.errors import ConfigError
from fedsim.selectors.fedabc import Cumulative, FedABC, Lambda, finite_losses
from fedsim.selectors.predictions import kl_divergences
from fedsim.selectors.top_loss import TopLoss
from tests.test_selector_contract import composed
from tests.test_selectors import FixedLosses
from tests.toys import picked, selection_of, shipped, toy_cohort, toy_population

CONF = Path(__file__).parents[1] / "conf" / "selector" / "threshold"
LOG_P = torch.tensor([[[0.9, 0.1]], [[0.8, 0.2]], [[0.2, 0.8]]], dtype=torch.float64).log()
"""Predictions of three clients on one sample of two classes."""
LOSSES = np.array([1.0, 2.0, 3.0])


def threshold(
    schedule: Any = "step", end: float = 1.1, mode: Any = "reach", **changes: Any
) -> Cumulative:
    """Return the paper's threshold, with `changes`."""
    values = {"start": 0.2, "increment": 0.1, "every": 2} | changes
    return Cumulative(schedule=schedule, end=end, mode=mode, **values)


def fedabc(n: int = 3, **changes: Any) -> FedABC:
    """Return `selector=fedabc` for n clients of one sample and 20 rounds."""
    values = {"threshold": threshold()} | changes
    return shipped("fedabc", toy_population([1] * n, 1, 20), **values)


def test_divergences_by_hand() -> None:
    """With probabilities p, sum p_k ln(p_k / p_j). The mean over two classes is half of it. It is
    not symmetric."""
    p = LOG_P[:, 0].exp().numpy()
    by_hand = [[(p[k] * np.log(p[k] / p[j])).sum() for j in range(3)] for k in range(3)]
    assert kl_divergences(LOG_P, "sum") == pytest.approx(np.array(by_hand))
    assert kl_divergences(LOG_P, "mean") == pytest.approx(np.array(by_hand) / 2)


def test_divergences_of_many_samples_are_their_mean() -> None:
    log_p = torch.randn(4, 7, 5, dtype=torch.float64).log_softmax(2)
    expected = (log_p[1].exp() * (log_p[1] - log_p[3])).sum() / 7 / 5
    assert kl_divergences(log_p, "mean")[1, 3] == pytest.approx(float(expected))


def test_a_probability_of_zero_counts_as_1e_8() -> None:
    p = torch.tensor([[[0.5, 0.5]], [[1.0, 0.0]]], dtype=torch.float64)
    expected = 0.5 * np.log(0.5 / 1e-8) + 0.5 * np.log(0.5)
    assert kl_divergences(p.log(), "sum")[0, 1] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("self_term", "losses", "scores"),
    [
        (True, [1.0, 2.0, 3.0], [2, 2, 2]),  # the mean loss
        (False, [1.0, 2.0, 3.0], [2.5, 2, 1.5]),  # the mean of the others' losses
        (False, [1.0], [1]),  # a single client has only itself
    ],
)
def test_scores_of_clients_with_identical_models(
    self_term: bool, losses: list[float], scores: list[float]
) -> None:
    divergences = np.zeros((len(losses), len(losses)))
    ours = fedabc(self_term=self_term).scores(np.array(losses), divergences)
    assert ours == pytest.approx(scores)


@pytest.mark.parametrize(
    ("reduction", "shares"),
    [("mean", [0.30806, 0.31659, 0.37535]), ("sum", [0.28720, 0.30086, 0.41193])],
)
def test_scores_of_different_clients(reduction: str, shares: list[float]) -> None:
    """S_k = sum_j softmax(-d_k)_j v_j, divided by their sum."""
    scores = fedabc().scores(LOSSES, kl_divergences(LOG_P, reduction))
    assert scores / scores.sum() == pytest.approx(shares, abs=1e-5)


def test_losses_that_are_not_finite_count_as_the_largest_finite_one() -> None:
    assert finite_losses(np.array([1.0, np.nan, 3.0, np.inf])).tolist() == [1, 3, 3, 3]
    assert finite_losses(np.array([np.nan])).tolist() == [0]


@pytest.mark.parametrize(("tau", "count"), [(0.2, 1), (0.5, 2), (0.7, 3)])
def test_the_fewest_clients_that_reach_the_threshold_are_selected(tau: float, count: int) -> None:
    """Sums 0.375, 0.692 and 1."""
    rule = threshold(start=tau, increment=0)
    assert rule.count(np.array([0.37535, 0.31659, 0.30806]), 3, 20) == count


@pytest.mark.parametrize(
    ("schedule", "end"), [("linear", 1.0941), ("convex", 1.9772), ("concave", 0.8595)]
)
def test_thresholds_of_all_shapes_are_68_percent_on_average(schedule: str, end: float) -> None:
    rule = threshold(schedule, end)
    taus = [1.0] + [min(1.0, rule.tau(t, 20)) for t in range(1, 20)]
    assert np.mean(taus) == pytest.approx(0.68, abs=0.002)
    assert (rule.tau(0, 20), rule.tau(19, 20)) == pytest.approx((0.2, end))


@pytest.mark.parametrize(("t", "count"), [(0, 1), (1, 2), (3, 3)])
def test_the_lambda_rule_by_hand(t: int, count: int) -> None:
    """0.4 / (1 + t / 2) is 0.4, 0.27 and 0.16."""
    assert Lambda(strength=0.4, growth=0.5).count(np.array([0.5, 0.3, 0.2]), t, 20) == count


def test_equal_shares_do_not_exceed_a_lambda_that_is_their_value() -> None:
    """The shares are above 0.1 by rounding alone. So none exceeds it, and one client is selected."""
    shares = np.full(10, np.nextafter(0.1, 1))
    assert Lambda(strength=0.1, growth=0.0).count(shares, 0, 20) == 1


def test_a_threshold_of_steps_may_start_above_the_end_of_the_other_shapes() -> None:
    assert threshold(start=1.2).tau(0, 20) == 1.2
    with pytest.raises(ConfigError, match=r"end=1.1: must be >= start=1.2"):
        threshold("linear", start=1.2)


@pytest.mark.parametrize(
    ("mode", "with_first", "without"), [("reach", 0.68, 0.64), ("exceed", 0.755, 0.72)]
)
def test_participation_with_equal_scores_is_the_published_one(
    mode: str, with_first: float, without: float
) -> None:
    """The paper prints 32 % fewer participants. Reaching gives 68 % with a full round 0, exceeding
    75.5 %."""
    rule = threshold(mode=mode)
    first, *others = [rule.count(np.full(10, 0.1), t, 20) / 10 for t in range(20)]
    assert np.mean([1, *others]) == pytest.approx(with_first, abs=0.006)
    assert np.mean([first, *others]) == pytest.approx(without, abs=0.006)


@pytest.mark.parametrize(
    ("name", "percent"), [("step", 68), ("linear", 72), ("convex", 71), ("concave", 73)]
)
def test_participation_that_the_files_of_thresholds_state(name: str, percent: int) -> None:
    """Ten clients of equal scores, 20 rounds, the first one full. Numbers of clients are rounded
    up."""
    values = composed("fedabc", f"selector/threshold={name}")["threshold"]
    rule = Cumulative(**{key: value for key, value in values.items() if key != "_target_"})
    counts = [10] + [rule.count(np.full(10, 0.1), t, 20) for t in range(1, 20)]
    assert sum(counts) == 2 * percent
    text = (CONF / f"{name}.yaml").read_text()
    assert re.findall(r"(\d+) %", text) == [str(percent)]


def test_a_round_weighs_the_selected_by_their_scores() -> None:
    """Shares 0.308, 0.317 and 0.375: the last two reach 0.5. The first round is full."""
    selector = fedabc(threshold=threshold(start=0.5, increment=0))
    selector.predictions = {i: LOG_P[i] for i in range(3)}
    engine = FixedLosses(LOSSES.tolist())
    assert picked(selector, engine=engine) == [0, 1, 2]
    selection = selection_of(selector, 2, engine=engine)
    assert selection.ids.tolist() == [1, 2]
    scores = np.array([1.879335, 2.228139])
    assert selection.weights == pytest.approx(scores / scores.sum())


def test_a_round_equals_the_papers_equations_by_scipy() -> None:
    """Equations 9 to 13 and 15, and the rule of section V-A, over random predictions of 6 clients
    on 40 samples."""
    n, num_classes = 6, 5
    for seed in range(20):
        random = np.random.default_rng(seed)
        predictions = scipy.special.softmax(random.normal(0, 3, (n, 40, num_classes)), axis=2)
        losses = random.exponential(1, n)
        divergences = np.zeros((n, n))
        for k in range(n):
            for j in range(n):
                by_sample = scipy.special.rel_entr(predictions[k], predictions[j]).sum(1)
                divergences[k, j] = by_sample.mean() / num_classes
        scores = scipy.special.softmax(-divergences, axis=1) @ losses
        shares = sorted(scores / scores.sum(), reverse=True)
        tau = 0.2 + 0.1 * (3 // 2)  # in round 4, which the paper counts as 3
        count = 1 + int((np.cumsum(shares) < tau).sum())
        expected = sorted(np.argsort(-scores)[:count].tolist())
        selector = fedabc(n)
        selector.predictions = {i: torch.tensor(predictions[i]).log() for i in range(n)}
        selection = selection_of(selector, 4, engine=FixedLosses(losses.tolist()))
        assert selection.ids.tolist() == expected
        assert selection.weights == pytest.approx(scores[expected] / scores[expected].sum())


def server_of(log_p: torch.Tensor) -> Any:
    """Return a server at which the uploaded models predict `log_p` on the public samples."""
    return SimpleNamespace(predict_public=lambda cohort: log_p)


COHORT = toy_cohort([0, 1, 2], [1] * 3, [[0, 0]] * 3)


def test_predictions_of_nan_leave_the_divergences_of_the_others() -> None:
    """An update may be finite, and the model so far off that its outputs are not. Client 2 has no
    earlier predictions."""
    selector = fedabc()
    broken = LOG_P.clone()
    broken[2] = torch.nan
    selector.observe(1, COHORT, server_of(broken))
    expected = np.zeros((3, 3))
    expected[:2, :2] = kl_divergences(LOG_P[:2], "mean")
    assert selector._divergences(np.arange(3)) == pytest.approx(expected)


def test_predictions_of_nan_do_not_replace_earlier_ones() -> None:
    selector = fedabc()
    for log_p in (LOG_P, LOG_P * torch.nan):
        selector.observe(1, COHORT, server_of(log_p))
    assert selector._divergences(np.arange(3)) == pytest.approx(kl_divergences(LOG_P, "mean"))


def test_a_prediction_does_not_keep_those_of_the_whole_cohort_in_memory() -> None:
    """Two numbers of 8 bytes for each client."""
    selector = fedabc()
    selector.observe(1, COHORT, server_of(LOG_P))
    for prediction in selector.predictions.values():
        assert prediction.untyped_storage().nbytes() == 2 * 8


# --- top_loss


def top_loss(**changes: Any) -> TopLoss:
    """Return `selector=top_loss` of two clients of four."""
    return shipped("top_loss", toy_population([1] * 4, 2, 3), **({"count": 2} | changes))


def test_top_loss_selects_the_highest_losses_after_a_full_round() -> None:
    selector = top_loss()
    engine = FixedLosses([0.5, 2.0, 1.0, 2.0])
    assert picked(selector, 1, engine=engine) == [0, 1, 2, 3]
    assert picked(selector, 2, engine=engine) == [1, 3]


def test_losses_that_are_not_finite_rank_last() -> None:
    engine = FixedLosses([np.inf, 1.0, np.nan, 2.0])
    assert picked(top_loss(first_round_full=False), engine=engine) == [1, 3]


def test_the_count_of_top_loss_is_at_most_all_clients() -> None:
    assert [top_loss(count=count).count for count in (1, 4)] == [1, 4]
    for count in (0, 5):
        with pytest.raises(ValueError, match=rf"count={count}: must lie in \[1, num_clients=4\]"):
            top_loss(count=count)
