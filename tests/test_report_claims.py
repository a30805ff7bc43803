"""Verdicts on published claims of each form, on made-up runs."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsim.papers.judge import Judgement, correct_all, judge_publication
from fedsim.papers.protocol import Cases
from fedsim.papers.published import Claim, Publication, publications
from fedsim.report.tables import pooled_pairs
from tests.report_toys import change_run, frame_of, groups_of, rows_of, two_methods, write_run

GPFL, RANDOM, FEDABC = ({"selector": name} for name in ("gpfl", "random", "fedabc"))
FINAL, COVER, MOST = "final_accuracy", "rounds_to_cover", "most_selections"
YES, NO, BY_DIRECTION, NONE = "reproduced", "not reproduced", "direction only", "not judged"
NO_RUNS = "no runs"


def judge(cases: Cases, *claims: Claim) -> list[Judgement]:
    """Return the judgements on the claims of a paper that has no others."""
    publication = Publication("x", "t", "s", [], [], [], claims)
    ((_, judged),) = correct_all([(publication, judge_publication(publication, cases))])
    return judged


def verdict(folder: Path, about: Mapping[str, str], measure: str, **form: Any) -> str:
    """Return the verdict on a claim that is the only one of its paper."""
    judged = judge(Cases(groups_of(folder)), Claim("a", "", "", about, measure, **form))
    return judged[0].verdict if judged else NO_RUNS


@pytest.fixture(scope="module")
def six_seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """random and gpfl at six seeds: two rounds, final accuracies 0.40 to 0.45 and 0.45 to 0.50.

    gpfl covers all four clients in round 2. random selects clients 0 and 1 twice, and never covers
    them.
    """
    folder = tmp_path_factory.mktemp("six_seeds")
    two_methods(folder, seeds=6)
    return folder


@pytest.mark.parametrize(
    ("expected", "about", "measure", "form"),
    [
        (YES, GPFL, COVER, {"at_most": 2}),
        (NO, GPFL, COVER, {"at_most": 1}),
        (NO, RANDOM, COVER, {"at_most": 2}),
        (YES, RANDOM, COVER, {"at_least": 3}),
        (YES, RANDOM, MOST, {"at_least": 2}),
        (NO_RUNS, {"selector": "fedcor"}, FINAL, {"at_least": 0.1}),
    ],
)
def test_bounds(
    expected: str, about: dict[str, str], measure: str, form: dict[str, Any], six_seeds: Path
) -> None:
    assert verdict(six_seeds, about, measure, **form) == expected


@pytest.mark.parametrize(
    ("about", "measure", "form"),
    [
        (RANDOM, COVER, {"at_least": 80}),
        (RANDOM, COVER, {"at_most": 3}),
        (RANDOM, MOST, {"at_least": 3}),
        (RANDOM, MOST, {"at_most": 2}),
        (RANDOM, "accuracy@0.1", {"at_most": 2}),  # before the first round
        (GPFL, COVER, {"value": 2, "tolerance": 1}),  # the median may be 3
    ],
)
def test_runs_that_end_before_a_bound_say_nothing_about_it(
    about: dict[str, str], measure: str, form: dict[str, Any], six_seeds: Path
) -> None:
    """The runs have two rounds."""
    assert verdict(six_seeds, about, measure, **form) == NONE


@pytest.mark.parametrize(
    ("expected", "about", "form"),
    [
        (YES, GPFL, {"gain": 0.05, "others": ["random"]}),
        (BY_DIRECTION, GPFL, {"gain": 0.2, "others": ["random"]}),
        (NONE, GPFL, {"gain": 0.06, "others": ["fedcor"]}),  # not run
        (NONE, GPFL, {"gain": 0.06, "others": ["random", "fedcor"]}),
        (NO, GPFL, {"level_with": 0.01, "others": ["random"]}),
        (YES, RANDOM, {"level_with": 0.2, "others": ["gpfl"]}),
        (YES, RANDOM, {"not_worse_by": 0.06, "others": ["gpfl"]}),
        (NO, RANDOM, {"not_worse_by": 0.04, "others": ["gpfl"]}),
    ],
)
def test_comparisons(
    expected: str, about: dict[str, str], form: dict[str, Any], six_seeds: Path
) -> None:
    """gpfl is 0.05 above random at each seed."""
    assert verdict(six_seeds, about, FINAL, **form) == expected


@pytest.mark.parametrize(
    ("expected", "measure", "form"),
    [
        (YES, FINAL, {"value": 0.47, "tolerance": 0.03}),
        (NO, COVER, {"value": 1, "tolerance": 0.5}),
        ("undecided", COVER, {"value": 1, "tolerance": 1}),  # 2 is at the tolerance
    ],
)
def test_values(expected: str, measure: str, form: dict[str, Any], six_seeds: Path) -> None:
    """gpfl's mean final accuracy is 0.475, and it covers all clients in round 2."""
    assert verdict(six_seeds, GPFL, measure, **form) == expected


def test_claims_among_the_parts_of_a_selector(tmp_path: Path) -> None:
    for seed in range(3):
        for part, accuracy in (("convex", 0.6), ("linear", 0.5)):
            choices = {"selector": "fedabc", "selector/threshold": part}
            run = {"summary": {"choices": choices}, "lr": accuracy}
            write_run(tmp_path / part, [accuracy], [[0]], seed=seed, **run)
    assert set(frame_of(tmp_path)["group"]) == {"convex", "linear"}
    about, among = {"selector/threshold": "convex"}, "selector/threshold"
    others = {"gain": 0.1, "among": among}
    assert verdict(tmp_path, about, FINAL, others=["linear"], **others) == YES
    assert verdict(tmp_path, about, FINAL, others=["linear", "concave"], **others) == NONE


def test_claims_among_numbers_of_the_config(tmp_path: Path) -> None:
    """1 and 1.0, 0.50 and 0.5 are equal."""
    for seed in range(3):
        for lr, accuracy in ((1.0, 0.6), (0.5, 0.5)):
            write_run(tmp_path, [accuracy], [[0]], seed=seed, lr=lr)
    assert verdict(tmp_path, {"lr": "1"}, FINAL, gain=0.1, others=["0.50"], among="lr") == YES


@pytest.fixture(scope="module")
def three_settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fedabc, top_loss_7 and full with 1, 2 and 5 shards a client, at three seeds.

    fedabc is 0.06, 0.02 and 0.01 above top_loss_7, and 0.001 more at seed 1. full is level with it.
    """
    folder = tmp_path_factory.mktemp("three_settings")
    for seed in range(3):
        for shards, gain in ((1, 0.06), (2, 0.02), (5, 0.01)):
            noise = 0.001 if seed == 1 else 0.0
            base = 0.5 + 0.01 * seed + 0.01 * shards
            finals = {"fedabc": base + gain + noise, "top_loss_7": base, "full": base + gain}
            for selector, final in finals.items():
                setting = {"choices": {"selector": selector}, "partition": {"shards": shards}}
                write_run(folder / str(shards), [final], [[0]], seed=seed, **setting)
    return folder


POOLED: dict[str, Any] = {"pooled_over": "partition.shards", "values": ["1", "2", "5"]}


@pytest.mark.parametrize(
    ("expected", "form"),
    [
        (YES, {"gain": 0.03, "others": ["top_loss_7"]}),
        (BY_DIRECTION, {"gain": 0.035, "others": ["top_loss_7"]}),
        (YES, {"level_with": 0.01, "all_pairs": True, "others": ["full"]}),
        (NO, {"level_with": 0.01, "all_pairs": True, "others": ["full", "top_loss_7"]}),
        (NONE, {"gain": 0.03, "others": ["full"], "pooled_over": "lr", "values": ["5"]}),
    ],
)
def test_claims_over_several_settings_are_about_the_mean_of_differences(
    expected: str, form: dict[str, Any], three_settings: Path
) -> None:
    assert verdict(three_settings, FEDABC, FINAL, **{**POOLED, **form}) == expected


def test_the_table_of_pooled_differences(three_settings: Path) -> None:
    """Means over seeds of 0.001 / 3, and of 0.03 plus that; within 0.02 of each other, and not."""
    full, top_loss = rows_of(pooled_pairs(frame_of(three_settings)))
    assert (full["difference of final accuracy"], full["mean"]) == ("full - fedabc", "-0.0003")
    assert (full["settings"], full["level"]) == ("3", "< .001")
    assert top_loss["difference of final accuracy"] == "top_loss_7 - fedabc"
    assert (top_loss["mean"], top_loss["level"]) == ("-0.0303", "0.999")


@pytest.fixture(scope="module")
def learning_rates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fedabc and top_loss_7 at three learning rates and seeds.

    Both rise by 0.3 times the rate. fedabc is 0.05, 0.02 and 0 above top_loss_7.
    """
    folder = tmp_path_factory.mktemp("learning_rates")
    for seed in range(3):
        for lr, gain in ((0.1, 0.05), (0.5, 0.02), (1.0, 0.0)):
            noise = 0.001 if seed == 1 and lr == 0.5 else 0.0
            base = 0.5 + 0.01 * seed + 0.3 * lr + noise
            for selector, final in (("fedabc", base + gain), ("top_loss_7", base)):
                write_run(folder, [final], [[0]], seed=seed, lr=lr, choices={"selector": selector})
    return folder


@pytest.mark.parametrize(
    ("expected", "form"),
    [
        (YES, {}),
        (YES, {"minus": {"selector": "top_loss_7"}, "falls": True}),
        (NO, {"minus": {"selector": "top_loss_7"}}),
        (NONE, {"values": ["0.1", "5"]}),
    ],
)
def test_trends(expected: str, form: dict[str, Any], learning_rates: Path) -> None:
    along = {"grows_with": "lr", "values": ["0.1", "0.5", "1.0"], **form}
    assert verdict(learning_rates, FEDABC, FINAL, **along) == expected


@pytest.fixture
def borderline(tmp_path: Path) -> tuple[Cases, Claim]:
    """A claim that is reproduced if it is alone: gains 0.05, 0.09 and 0.05 have p = 0.043."""
    two_methods(tmp_path)
    second = next(tmp_path.glob("gpfl-*-1-*"))
    change_run(second, lambda records: records[1].update(test_accuracy=0.69))
    claim = Claim("a", "Fig. 1", "", GPFL, FINAL, gain=0.0, others=["random"])
    return Cases(groups_of(tmp_path)), claim


def test_claims_in_one_place_of_one_quantity_are_corrected_together(
    borderline: tuple[Cases, Claim],
) -> None:
    cases, claim = borderline
    (alone,) = judge(cases, claim)
    assert alone.verdict == YES
    others = [replace(claim, id=str(number)) for number in range(9)]
    assert judge(cases, claim, *others)[0].verdict == "undecided"


def test_rows_added_after_runs_had_been_seen_do_not_change_the_others(
    borderline: tuple[Cases, Claim],
) -> None:
    cases, claim = borderline
    (alone,) = judge(cases, claim)
    added = [replace(claim, id=str(number), added_after_runs=True) for number in range(9)]
    assert judge(cases, claim, *added)[0].evidence == alone.evidence


def test_other_places_and_quantities_count_over_the_paper_alone(
    borderline: tuple[Cases, Claim],
) -> None:
    cases, claim = borderline
    elsewhere = [replace(claim, id=f"place {n}", where="Fig. 2") for n in range(5)]
    speed = [replace(claim, id=f"speed {n}", measure="mean_accuracy") for n in range(5)]
    first, second, *_ = judge(cases, claim, *elsewhere, *speed)
    assert (first.tests, first.verdict, first.over_paper) == (1, YES, "undecided")
    assert (second.tests, second.verdict) == (5, "undecided")


PRINTED = [
    printed
    for publication in publications()
    for printed in (*publication.numbers, *publication.claims)
]
STATEMENTS = {printed.id: printed.statement for printed in PRINTED}


def test_ids_are_unique() -> None:
    assert len(STATEMENTS) == len(PRINTED)


@pytest.mark.parametrize(
    "ids",
    [
        ("gpfl.t2/gpfl/2SPC 100 %", "gpfl.t2/gpfl_official/2SPC 100 %"),
        ("gpfl.t2/gpfl/2SPC 100 %", "gpfl.code/gpfl/2SPC 100 %"),
        ("gpfl.t2/fedcor/1SPC 100 %", "gpfl.code/fedcor_gpfl/1SPC 100 %"),
        ("gpfl.t1.cifar10/gpfl_1spc/samples", "gpfl.t1.cifar10/gpfl_dir/samples"),
        ("gpfl.gain.1SPC.gpfl", "gpfl.gain.1SPC.gpfl_official"),
        ("gpfl.gain.1SPC.gpfl", "gpfl.code.gain.1SPC.gpfl"),
    ],
)
def test_readings_of_a_method_and_presets_are_about_the_same_statement(
    ids: tuple[str, str],
) -> None:
    first, second = ids
    assert STATEMENTS[first] == STATEMENTS[second]


@pytest.mark.parametrize(
    "ids",
    [
        ("gpfl.t2.deviation/gpfl/2SPC", "gpfl.t2.deviation/fedcor/2SPC"),  # both are 0.04
        ("gpfl.gain.1SPC.gpfl", "gpfl.gain.2SPC.gpfl"),
        ("gpfl.peak.random", "gpfl.peak.power_of_choice_d10"),
    ],
)
def test_other_methods_and_settings_are_about_other_statements(ids: tuple[str, str]) -> None:
    first, second = ids
    assert STATEMENTS[first] != STATEMENTS[second]
