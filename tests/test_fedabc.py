import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch

from fedsim.selectors.fedabc import Cumulative, FedABC, Lambda, finite_losses, kl_divergences
from fedsim.selectors.top_loss import TopLoss
from tests.test_selector_contract import composed
from tests.test_selectors import FixedLosses
from tests.toys import picked, selection_of, toy_cohort, toy_population

CONF = Path(__file__).parents[1] / "conf" / "selector" / "threshold"
LOG_P = torch.tensor([[[0.9, 0.1]], [[0.8, 0.2]], [[0.2, 0.8]]], dtype=torch.float64).log()
V = np.array([1.0, 2.0, 3.0])


def threshold(schedule: Any = "step", end: float = 1.1, mode: Any = "reach") -> Cumulative:
    return Cumulative(schedule=schedule, start=0.2, increment=0.1, every=2, end=end, mode=mode)


def fedabc(**more: Any) -> FedABC:
    values = {
        "threshold": threshold(),
        "kl_reduction": "mean",
        "self_term": True,
        "weights": "score",
    } | more
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
    p = torch.tensor(
        [[[0.5, 0.5]], [[1.0, 0.0]]], dtype=torch.float64
    )  # a probability of zero counts as 1e-8
    assert kl_divergences(p.log(), "sum")[0, 1] == pytest.approx(
        0.5 * np.log(0.5 / 1e-8) + 0.5 * np.log(0.5)
    )


def test_scores_by_hand() -> None:
    assert fedabc().scores(V, np.zeros((3, 3))) == pytest.approx(
        [2, 2, 2]
    )  # identical models: the mean loss
    assert fedabc(self_term=False).scores(V, np.zeros((3, 3))) == pytest.approx([2.5, 2, 1.5])
    assert (
        fedabc(self_term=False).scores(V[:1], np.zeros((1, 1))) == V[:1]
    )  # who is alone has itself
    assert finite_losses(np.array([1.0, np.nan, 3.0, np.inf])).tolist() == [1, 3, 3, 3]
    assert finite_losses(np.array([np.nan])).tolist() == [0]
    s = fedabc().scores(V, kl_divergences(LOG_P, "mean"))
    assert s == pytest.approx([1.828697, 1.879335, 2.228139], abs=1e-6)
    assert s / s.sum() == pytest.approx([0.30806, 0.31659, 0.37535], abs=1e-5)
    s = fedabc().scores(V, kl_divergences(LOG_P, "sum"))
    assert s / s.sum() == pytest.approx([0.28720, 0.30086, 0.41193], abs=1e-5)


def test_thresholds_by_hand() -> None:
    for tau, count in ((0.2, 1), (0.5, 2), (0.7, 3)):  # the fewest clients that reach it
        rule = Cumulative(schedule="step", start=tau, increment=0, every=1, end=1.1, mode="reach")
        assert rule.count(np.array([0.37535, 0.31659, 0.30806]), 3, 20) == count
    for schedule, end in (
        ("linear", 1.0941),
        ("convex", 1.9772),
        ("concave", 0.8595),
    ):  # 68 % on average
        rule = threshold(schedule, end)
        assert np.mean([1.0] + [min(1.0, rule.tau(t, 20)) for t in range(1, 20)]) == pytest.approx(
            0.68, abs=0.002
        )
        assert (rule.tau(0, 20), rule.tau(19, 20)) == pytest.approx((0.2, end))
    shares = np.array([0.5, 0.3, 0.2])  # more and more of them exceed .4 / (1 + t / 2)
    assert [Lambda(strength=0.4, growth=0.5).count(shares, t, 20) for t in (0, 1, 3)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("mode", "with_first", "without"), [("reach", 0.68, 0.64), ("exceed", 0.755, 0.72)]
)
def test_participation_with_equal_scores_is_the_published_one(
    mode: str, with_first: float, without: float
) -> None:
    """selectors.md 2.12: reaching gives 68% with round 0 full (the paper's 32% fewer), exceeding
    75.5%."""
    rule = threshold(mode=mode)
    taken = [rule.count(np.full(10, 0.1), t, 20) / 10 for t in range(1, 20)]
    assert np.mean([1, *taken]) == pytest.approx(with_first, abs=0.006)
    first = rule.count(np.full(10, 0.1), 0, 20) / 10
    assert np.mean([first, *taken]) == pytest.approx(without, abs=0.006)


@pytest.mark.parametrize(
    ("name", "percent"), [("step", 68), ("linear", 72), ("convex", 71), ("concave", 73)]
)
def test_participation_that_the_files_of_thresholds_state(name: str, percent: int) -> None:
    """Ten clients of equal scores, 20 rounds, the first one full: counts round up what the
    threshold is on average."""
    values = composed("fedabc", f"selector/threshold={name}")["threshold"]
    rule = Cumulative(**{key: value for key, value in values.items() if key != "_target_"})
    counts = [10] + [rule.count(np.full(10, 0.1), t, 20) for t in range(1, 20)]
    assert sum(counts) == 2 * percent
    text = (CONF / f"{name}.yaml").read_text()
    assert re.findall(r"(\d+) %", text) == [str(percent)]


def test_a_round_weighs_the_selected_by_their_scores() -> None:
    selector = fedabc(
        threshold=Cumulative(schedule="step", start=0.5, increment=0, every=1, end=1, mode="reach")
    )
    selector.predictions = {i: LOG_P[i] for i in range(3)}
    assert picked(selector, engine=FixedLosses([1.0, 2.0, 3.0])) == [0, 1, 2]
    selection = selection_of(selector, 2, engine=FixedLosses([1.0, 2.0, 3.0]))
    assert selection.ids.tolist() == [1, 2]
    assert selection.weights == pytest.approx(
        np.array([1.879335, 2.228139]) / (1.879335 + 2.228139)
    )


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
                per_sample = (
                    scipy.special.rel_entr(predictions[k], predictions[j]).sum(1) / num_classes
                )
                divergences[k, j] = per_sample.mean()
        scores = scipy.special.softmax(-divergences, axis=1) @ losses
        shares = sorted(scores / scores.sum(), reverse=True)
        tau = 0.2 + 0.1 * (3 // 2)  # in round 4, which the paper counts as 3
        count = next(m for m in range(1, n + 1) if sum(shares[:m]) >= tau)
        expected = sorted(np.argsort(-scores)[:count].tolist())
        selector = FedABC(
            toy_population([1] * n, 1, 20),
            threshold=threshold(),
            kl_reduction="mean",
            self_term=True,
            weights="score",
        )
        selector.predictions = {i: torch.tensor(predictions[i]).log() for i in range(n)}
        selection = selection_of(selector, 4, engine=FixedLosses(losses.tolist()))
        assert selection.ids.tolist() == expected
        assert selection.weights == pytest.approx(scores[expected] / scores[expected].sum())


def server_of(log_p: torch.Tensor) -> Any:
    """At which the uploaded models have these log-probabilities on the public samples."""
    return SimpleNamespace(predict_public=lambda cohort: log_p)


def test_predictions_that_are_nan_are_not_kept_and_leave_the_scores_of_the_others() -> None:
    """An update may be finite and the model so far off that its outputs are not; client 2 has no
    earlier ones."""
    selector, cohort, broken = fedabc(), toy_cohort([0, 1, 2], [1] * 3, [[0, 0]] * 3), LOG_P.clone()
    broken[2] = torch.nan
    selector.observe(1, cohort, server_of(broken))
    found = selector._divergences(np.arange(3))
    assert found[:2, :2] == pytest.approx(kl_divergences(LOG_P[:2], "mean"))
    assert not found[2].any()
    assert not found[:, 2].any()
    for log_p in (LOG_P, LOG_P * torch.nan):
        selector.observe(1, cohort, server_of(log_p))
    assert selector._divergences(np.arange(3)) == pytest.approx(kl_divergences(LOG_P, "mean"))
    held = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
        for p in selector.predictions.values()
    }
    assert sum(held.values()) == 3 * 2 * 8  # and not the whole cohort's for each client


def top_loss(**more: Any) -> TopLoss:
    values: dict[str, Any] = {"count": 2, "match": None, "first_round_full": True} | more
    return TopLoss(toy_population([1] * 4, 2, 3), **values)


def picked_by_loss(selector: TopLoss, losses: list[float], rounds: int) -> list[list[int]]:
    engine = FixedLosses(losses)
    return [picked(selector, t, engine=engine) for t in range(1, rounds + 1)]


def test_top_loss_takes_the_highest_and_those_that_are_not_finite_last() -> None:
    assert picked_by_loss(top_loss(), [0.5, 2.0, 1.0, 2.0], 2) == [
        [0, 1, 2, 3],
        [1, 3],
    ]  # full at first
    assert picked_by_loss(top_loss(first_round_full=False), [np.inf, 1.0, np.nan, 2.0], 1) == [
        [1, 3]
    ]
    for count in (1, 4):
        assert top_loss(count=count).count == count
    for count in (0, 5):
        with pytest.raises(ValueError, match=rf"count={count}: must lie in \[1, num_clients=4\]"):
            top_loss(count=count)


def test_top_loss_can_match_another_runs_participation(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"uploaded": n}) + "\n" for n in (4, 3, 1))
    )
    selector = top_loss(match=str(tmp_path), first_round_full=False)  # of exactly as many rounds
    assert picked_by_loss(selector, [0.5, 2.0, 1.0, 3.0], 3) == [[0, 1, 2, 3], [1, 2, 3], [3]]
    with pytest.raises(
        ValueError, match=r"match='nowhere': must be the folder of a run with at least num_rounds=3"
    ):
        top_loss(match="nowhere")
