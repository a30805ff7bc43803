"""PNCS's claims on its Table I, judged on outcomes that are planted."""

import numpy as np

from fedsim.papers.pair_study import Condition, Fold, claims_table, judge_conditions, judge_runs
from fedsim.results.runs import Run

NAMES = ["cos_4", "cos_2", "norm_2 sum"]


def conditions(causes: dict[str, float], seeds: int = 5, noise: float = 0.01) -> list[Condition]:
    """Losses that are a weighted sum of features which are else independent, and some noise."""
    found = []
    for seed in range(seeds):
        for round in range(4):
            for setting in ("1", "10"):
                rng = np.random.default_rng((seed, round, int(setting)))
                features = rng.standard_normal((45, len(NAMES)))
                losses = features @ [causes.get(name, 0.0) for name in NAMES] + noise * rng.standard_normal(45)
                found.append(Condition(seed, setting, round, features, losses))
    return found


def verdicts(causes: dict[str, float], **more: float) -> dict[str, str]:
    rows = judge_conditions(NAMES, conditions(causes, **more))  # type: ignore[arg-type]
    return {row.printed.id.removeprefix("pncs.table1."): row.verdict for row in rows}


def test_all_claims_hold_where_cos_4_alone_decides() -> None:
    assert verdicts({"cos_4": 1.0}, seeds=8) == {
        "negative": "reproduced",
        "random": "reproduced",
        "random.1": "reproduced",
        "random.10": "reproduced",
        "rank": "reproduced",
        "best": "reproduced",
        "power": "reproduced",
        "smaller": "not reproduced",  # nothing is better than cos_4
        "wider": "reproduced",
    }


def test_they_fail_where_like_gradients_are_better_and_another_feature_decides() -> None:
    found = verdicts({"cos_4": -0.5, "norm_2 sum": 1.0}, seeds=12)
    assert found["negative"] == "not reproduced"
    assert found["random"] == "not reproduced"
    assert found["rank"] == "not reproduced"
    assert found["best"] == "not reproduced"
    assert found["power"] == "reproduced"  # better than cos_2, which decides nothing
    assert found["smaller"] == "reproduced"
    assert found["wider"] == "not reproduced"  # the pair picked by what decides is good in every round


def test_another_power_can_win() -> None:
    assert verdicts({"cos_2": 1.0})["power"] == "not reproduced"


def test_where_nothing_decides_nothing_is_decided_of_the_weight() -> None:
    found = verdicts({}, noise=1.0)
    assert found["negative"] == found["random"] == "undecided"


def test_too_few_seeds_and_absent_features_are_told() -> None:
    (row,) = judge_conditions(NAMES, conditions({"cos_4": 1.0}, seeds=2))
    assert (row.verdict, row.detail) == ("undecided", "2 seeds")
    (row,) = judge_conditions(["cos_3", "a", "b"], conditions({}))
    assert (row.verdict, row.detail) == ("not judged", "cos_4 was not measured")
    rows = judge_conditions(["cos_4", "a", "b"], conditions({"cos_4": 1.0}))
    assert {row.printed.id: row.verdict for row in rows}["pncs.table1.power"] == "not judged"


def test_a_fold_never_learns_from_the_seed_that_it_is_measured_on() -> None:
    made = conditions({"cos_4": 1.0}, seeds=3)
    held = [Condition(c.seed, c.setting, c.round, c.features, -c.losses) if c.seed == 1 else c for c in made]
    fold, same = (Fold.of(NAMES, some, 1) for some in (held, made))
    assert fold.alone[0].tolist() == same.alone[0].tolist()
    assert {c.seed for c in fold.held} == {1}
    assert fold.relative_losses(fold.held)[0].mean() > 0.95  # on the seed that is the other way round


def test_relative_losses_are_those_of_the_picked_pairs() -> None:
    fold = Fold.of(NAMES, conditions({"cos_4": 1.0, "cos_2": 0.5}, seeds=3), 0)
    picked = [
        [c.features[:, f].argmin() if w[0] < 0 else c.features[:, f].argmax() for c in fold.held]
        for f, w in enumerate(fold.alone)
    ]
    by_hand = [[1 - c.labels[pair] for c, pair in zip(fold.held, pairs, strict=True)] for pairs in picked]
    assert fold.relative_losses(fold.held).tolist() == by_hand


def test_claims_are_tested_seed_by_seed_and_corrected_together() -> None:
    rows = {
        row.printed.id.removeprefix("pncs.table1."): row for row in judge_conditions(NAMES, conditions({"cos_4": 1.0}))
    }
    tested = [row.evidence for row in rows.values() if row.evidence is not None]
    assert len(tested) == len(rows)
    assert all(one.ours is not None and one.ours.num == 5 for one in tested)
    assert all(one.holm_for >= one.p_for for one in tested)
    table = claims_table(list(rows.values()))
    assert (table.rows[4][2], rows["rank"].detail) == ("holds for 5 of 5 seeds [0.48, 1.00]", "rank 1 to 1 of 3")
    assert rows["rank"].verdict == "undecided"  # five seeds decide no share
    assert [row[5] for row in table.rows] == [row.verdict for row in rows.values()]


def test_runs_without_a_trace_are_not_judged(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert judge_runs([Run(tmp_path, {}, {})]) == []
