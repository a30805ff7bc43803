import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.core.types import Cohort
from fedsim.selectors.fedabc import Cumulative, FedABC, Lambda, finite_losses, kl_divergences
from fedsim.selectors.top_loss import TopLoss
from tests.test_selector_contract import composed
from tests.test_selectors import FixedLosses
from tests.toys import picked, toy_clients, toy_cohort, toy_population

CONF = Path(__file__).parents[1] / "conf" / "selector" / "threshold"
LOG_P = torch.tensor([[[0.9, 0.1]], [[0.8, 0.2]], [[0.2, 0.8]]], dtype=torch.float64).log()
V = np.array([1.0, 2.0, 3.0])


def threshold(schedule: Any = "step", end: float = 1.1, mode: Any = "reach") -> Cumulative:
    return Cumulative(schedule=schedule, start=0.2, increment=0.1, every=2, end=end, mode=mode)


def fedabc(**more: Any) -> FedABC:
    values = {"threshold": threshold(), "kl_reduction": "mean", "self_term": True, "weights": "score"} | more
    return FedABC(toy_population([1] * 3, 1, 20), **values)


def test_divergences_by_hand() -> None:
    d = kl_divergences(LOG_P, "mean")
    assert d[0] == pytest.approx([0, 0.018345, 0.572863], abs=1e-6)
    assert kl_divergences(LOG_P, "sum") == pytest.approx(2 * d)
    assert (d >= 0).all()
    assert d[0, 2] != pytest.approx(d[2, 0], abs=1e-3)
    log_p = torch.randn(4, 7, 5, dtype=torch.float64).log_softmax(2)  # of many samples: their mean
    expected = (log_p[1].exp() * (log_p[1] - log_p[3])).sum() / 7 / 5
    assert kl_divergences(log_p, "mean")[1, 3] == pytest.approx(float(expected))
    p = torch.tensor([[[0.5, 0.5]], [[1.0, 0.0]]], dtype=torch.float64)  # a probability of zero counts as 1e-8
    assert kl_divergences(p.log(), "sum")[0, 1] == pytest.approx(0.5 * np.log(0.5 / 1e-8) + 0.5 * np.log(0.5))


def test_scores_by_hand() -> None:
    s = fedabc().scores(V, kl_divergences(LOG_P, "mean"))
    assert s == pytest.approx([1.828697, 1.879335, 2.228139], abs=1e-6)
    assert s / s.sum() == pytest.approx([0.30806, 0.31659, 0.37535], abs=1e-5)
    s = fedabc().scores(V, kl_divergences(LOG_P, "sum"))
    assert s / s.sum() == pytest.approx([0.28720, 0.30086, 0.41193], abs=1e-5)


def test_identical_models_share_the_mean_loss_and_without_the_self_term_the_others_mean() -> None:
    assert fedabc().scores(V, np.zeros((3, 3))) == pytest.approx([2, 2, 2])
    assert fedabc(self_term=False).scores(V, np.zeros((3, 3))) == pytest.approx([2.5, 2, 1.5])
    assert fedabc(self_term=False).scores(V[:1], np.zeros((1, 1))) == V[:1]  # who is alone has itself


@pytest.mark.parametrize(("tau", "count"), [(0.2, 1), (0.5, 2), (0.7, 3)])
def test_the_fewest_clients_that_reach_the_threshold(tau: float, count: int) -> None:
    rule = Cumulative(schedule="step", start=tau, increment=0, every=1, end=1.1, mode="reach")
    assert rule.count(np.array([0.37535, 0.31659, 0.30806]), 3, 20) == count


@pytest.mark.parametrize(("mode", "with_first", "without"), [("reach", 0.68, 0.64), ("exceed", 0.755, 0.72)])
def test_participation_with_equal_scores_is_the_published_one(mode: str, with_first: float, without: float) -> None:
    """selectors.md 2.12: reaching gives 68% with round 0 full (the paper's 32% fewer), exceeding 75.5%."""
    rule = threshold(mode=mode)
    taken = [rule.count(np.full(10, 0.1), t, 20) / 10 for t in range(1, 20)]
    assert np.mean([1, *taken]) == pytest.approx(with_first, abs=0.006)
    first = rule.count(np.full(10, 0.1), 0, 20) / 10
    assert np.mean([first, *taken]) == pytest.approx(without, abs=0.006)


@pytest.mark.parametrize(("schedule", "end"), [("linear", 1.0941), ("convex", 1.9772), ("concave", 0.8595)])
def test_schedules_are_matched_at_a_mean_threshold_of_68_percent(schedule: str, end: float) -> None:
    rule = threshold(schedule, end)
    taus = [1.0] + [min(1.0, rule.tau(t, 20)) for t in range(1, 20)]
    assert np.mean(taus) == pytest.approx(0.68, abs=0.002)
    assert rule.tau(0, 20) == pytest.approx(0.2)
    assert rule.tau(19, 20) == pytest.approx(end)


@pytest.mark.parametrize(("name", "percent"), [("step", 68), ("linear", 72), ("convex", 71), ("concave", 73)])
def test_participation_that_the_files_of_thresholds_state(name: str, percent: int) -> None:
    """Ten clients of equal scores, 20 rounds, the first one full: counts round up what the threshold is on average."""
    values = composed("fedabc", f"selector/threshold={name}")["threshold"]
    rule = Cumulative(**{key: value for key, value in values.items() if key != "_target_"})
    counts = [10] + [rule.count(np.full(10, 0.1), t, 20) for t in range(1, 20)]
    assert sum(counts) == 2 * percent
    text = (CONF / f"{name}.yaml").read_text()
    assert re.findall(r"(\d+) %", text) == [str(percent)]


def test_lambda_lets_more_in_as_eta_grows() -> None:
    rule = Lambda(strength=0.4, growth=0.5)
    shares = np.array([0.5, 0.3, 0.2])
    assert [rule.count(shares, t, 20) for t in (0, 1, 3)] == [1, 2, 3]


def test_losses_that_are_not_finite_count_as_the_largest() -> None:
    assert finite_losses(np.array([1.0, np.nan, 3.0, np.inf])).tolist() == [1, 3, 3, 3]
    assert finite_losses(np.array([np.nan])).tolist() == [0]


def test_a_round_weighs_the_selected_by_their_scores() -> None:
    selector = fedabc(threshold=Cumulative(schedule="step", start=0.5, increment=0, every=1, end=1, mode="reach"))
    selector.predictions = {i: LOG_P[i] for i in range(3)}
    first, second = (toy_clients([1] * 3, selector.needs, engine=FixedLosses([1.0, 2.0, 3.0]), round=t) for t in (1, 2))
    assert selector.select(1, first, np.random.default_rng(0)).ids.tolist() == [0, 1, 2]
    selection = selector.select(2, second, np.random.default_rng(0))
    assert selection.ids.tolist() == [1, 2]
    assert selection.weights == pytest.approx(np.array([1.879335, 2.228139]) / (1.879335 + 2.228139))


class FixedPredictions:
    """A server at which the uploaded models have these log-probabilities on the public samples."""

    def __init__(self, log_p: torch.Tensor) -> None:
        self.log_p = log_p

    def predict_public(self, cohort: Cohort) -> torch.Tensor:
        return self.log_p


def test_predictions_that_are_nan_are_not_kept_and_leave_the_scores_of_the_others() -> None:
    """An update may be finite and the model so far off that its outputs are not; client 2 has no earlier ones."""
    selector, cohort, broken = fedabc(), toy_cohort([0, 1, 2], [1] * 3, [[0, 0]] * 3), LOG_P.clone()
    broken[2] = torch.nan
    selector.observe(1, cohort, FixedPredictions(broken))  # type: ignore[arg-type]
    found = selector._divergences(np.arange(3))
    assert found[:2, :2] == pytest.approx(kl_divergences(LOG_P[:2], "mean"))
    assert not found[2].any()
    assert not found[:, 2].any()
    for log_p in (LOG_P, LOG_P * torch.nan):
        selector.observe(1, cohort, FixedPredictions(log_p))  # type: ignore[arg-type]
    assert selector._divergences(np.arange(3)) == pytest.approx(kl_divergences(LOG_P, "mean"))


def test_no_predictions_are_kept_but_the_latest_of_each_client() -> None:
    """A row of a cohort's tensor would keep all of that tensor."""
    selector = fedabc()
    for round, ids in enumerate(([0, 1, 2], [1, 2], [2]), start=1):
        cohort = toy_cohort(ids, [1] * len(ids), [[0, 0]] * len(ids))
        selector.observe(round, cohort, FixedPredictions(torch.zeros(len(ids), 5, 2)))  # type: ignore[arg-type]
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in selector.predictions.values()}
    assert sum(held.values()) == 3 * 5 * 2 * 4


def top_loss(**more: Any) -> TopLoss:
    values: dict[str, Any] = {"count": 2, "match": None, "first_round_full": True} | more
    return TopLoss(toy_population([1] * 4, 2, 3), **values)


def picked_by_loss(selector: TopLoss, losses: list[float], rounds: int) -> list[list[int]]:
    engine = FixedLosses(losses)
    return [picked(selector, t, engine=engine) for t in range(1, rounds + 1)]


def test_top_loss_takes_the_highest_and_those_that_are_not_finite_last() -> None:
    assert picked_by_loss(top_loss(), [0.5, 2.0, 1.0, 2.0], 2) == [[0, 1, 2, 3], [1, 3]]  # full at first
    assert picked_by_loss(top_loss(first_round_full=False), [np.inf, 1.0, np.nan, 2.0], 1) == [[1, 3]]


def test_top_loss_takes_one_client_at_least_and_all_at_most() -> None:
    for count in (1, 4):
        assert top_loss(count=count).count == count
    for count in (0, 5):
        with pytest.raises(ValueError, match=rf"count={count}: must lie in \[1, num_clients=4\]"):
            top_loss(count=count)


def test_top_loss_can_match_another_runs_participation(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"uploaded": n}) + "\n" for n in (4, 3, 1)))
    selector = top_loss(match=str(tmp_path), first_round_full=False)  # of exactly as many rounds
    assert picked_by_loss(selector, [0.5, 2.0, 1.0, 3.0], 3) == [[0, 1, 2, 3], [1, 2, 3], [3]]
    with pytest.raises(ValueError, match=r"match='nowhere': must be the folder of a run with at least num_rounds=3"):
        top_loss(match="nowhere")
