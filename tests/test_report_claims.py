"""The rules of the verdicts on published claims, on made-up runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsim.papers import published
from fedsim.papers.judge import Judged, correct, examine
from fedsim.papers.protocol import Cases
from fedsim.papers.published import Claim, Publication
from fedsim.report import tables as results
from tests.report_toys import change_run, frame_of, groups_of, rows_of, two_methods, write_run

GPFL, RANDOM, FEDABC = ({"selector": name} for name in ("gpfl", "random", "fedabc"))
FINAL, COVER, MOST = "final_accuracy", "rounds_to_cover", "most_selections"
YES, NO, BY_DIRECTION, NONE = "reproduced", "not reproduced", "direction only", "not judged"


def judge(cases: Cases, *claims: Claim) -> list[Judged]:
    publication = Publication("x", "t", "s", [], [], [], claims)
    return correct([(publication, examine(publication, cases))])[0][1]


def verdict(folder: Path, about: dict[str, str], measure: str, **form: Any) -> str | None:
    """The verdict on a claim as if it were the only one of its paper; None if there are no runs
    that it is about."""
    judged = judge(Cases(groups_of(folder)), Claim("a", "", "", about, measure, **form))
    return judged[0].verdict if judged else None


def test_claims_among_the_parts_of_a_selector_and_among_numbers(tmp_path: Path) -> None:
    for seed in range(3):
        for rho, part, accuracy in ((1.0, "convex", 0.6), (0.5, "linear", 0.5)):
            choices = {
                "selector": "fedabc",
                "dataset": "digits",
                "partition": "iid",
                "selector/threshold": part,
            }
            write_run(
                tmp_path / "parts",
                [accuracy],
                [[0]],
                seed=seed,
                lr=rho,
                summary={"choices": choices},
            )
            write_run(tmp_path / "numbers", [accuracy], [[0]], seed=seed, lr=rho)
    assert set(frame_of(tmp_path / "parts")["group"]) == {"convex", "linear"}
    about, among = {"selector/threshold": "convex"}, "selector/threshold"
    assert (
        verdict(tmp_path / "parts", about, FINAL, gain=0.1, others=["linear"], among=among) == YES
    )
    assert (
        verdict(
            tmp_path / "parts", about, FINAL, gain=0.05, others=["linear", "concave"], among=among
        )
        == NONE
    )
    assert (
        verdict(tmp_path / "numbers", {"lr": "1"}, FINAL, gain=0.1, others=["0.50"], among="lr")
        == YES
    )


def test_claims_against_runs(tmp_path: Path) -> None:
    two_methods(tmp_path, seeds=6)
    rows: list[tuple[str | None, dict[str, str], str, dict[str, Any]]] = [
        (YES, GPFL, COVER, {"at_most": 2}),
        (NO, GPFL, COVER, {"at_most": 1}),
        (YES, GPFL, FINAL, {"gain": 0.05, "others": ["random"]}),
        (NONE, GPFL, FINAL, {"gain": 0.06, "others": ["fedcor"]}),
        (NONE, GPFL, FINAL, {"gain": 0.06, "others": ["random", "fedcor"]}),  # one of them not run
        (None, {"selector": "fedcor"}, FINAL, {"at_least": 0.1}),
        (NO, GPFL, FINAL, {"level_with": 0.01, "others": ["random"]}),
        (YES, RANDOM, FINAL, {"level_with": 0.2, "others": ["gpfl"]}),
        (YES, RANDOM, FINAL, {"not_worse_by": 0.06, "others": ["gpfl"]}),
        (NO, RANDOM, FINAL, {"not_worse_by": 0.04, "others": ["gpfl"]}),
        (BY_DIRECTION, GPFL, FINAL, {"gain": 0.2, "others": ["random"]}),
        (YES, GPFL, FINAL, {"value": 0.47, "tolerance": 0.03}),
        (NO, GPFL, COVER, {"value": 1, "tolerance": 0.5}),
        (NONE, GPFL, COVER, {"value": 2, "tolerance": 1}),  # of two rounds
        ("undecided", GPFL, COVER, {"value": 1, "tolerance": 1}),
        # a run that ends before a bound says nothing: two rounds, in which random never covers all
        # clients
        (NONE, RANDOM, COVER, {"at_least": 80}),
        (NO, RANDOM, COVER, {"at_most": 2}),
        (NONE, RANDOM, COVER, {"at_most": 3}),
        (YES, RANDOM, COVER, {"at_least": 3}),
        (NONE, RANDOM, MOST, {"at_least": 3}),
        (YES, RANDOM, MOST, {"at_least": 2}),
        (NONE, RANDOM, MOST, {"at_most": 2}),
        (NONE, RANDOM, "accuracy@0.1", {"at_most": 2}),  # never measured
    ]
    for expected, about, measure, form in rows:
        assert verdict(tmp_path, about, measure, **form) == expected, (about, measure, form)


def test_a_gain_over_several_settings_is_their_mean(tmp_path: Path) -> None:
    for seed in range(3):
        for shards, gain in ((1, 0.06), (2, 0.02), (5, 0.01)):
            for selector, more in (("fedabc", gain), ("top_loss_7", 0.0), ("full", gain)):
                accuracy = (
                    0.5
                    + 0.01 * seed
                    + 0.01 * shards
                    + more
                    + 0.001 * (seed == 1) * (selector == "fedabc")
                )
                choices, partition = {"selector": selector}, {"shards": shards}
                write_run(
                    tmp_path / str(shards),
                    [accuracy],
                    [[0]],
                    seed=seed,
                    choices=choices,
                    partition=partition,
                )
    over: dict[str, Any] = {"pooled_over": "partition.shards", "values": ["1", "2", "5"]}
    level: dict[str, Any] = {"level_with": 0.01, "all_pairs": True, **over}
    assert (
        verdict(tmp_path, FEDABC, FINAL, gain=0.03, others=["top_loss_7"], **over) == YES
    )  # their mean
    assert (
        verdict(tmp_path, FEDABC, FINAL, gain=0.035, others=["top_loss_7"], **over) == BY_DIRECTION
    )
    assert verdict(tmp_path, FEDABC, FINAL, others=["full"], **level) == YES
    assert verdict(tmp_path, FEDABC, FINAL, others=["full", "top_loss_7"], **level) == NO
    assert (
        verdict(tmp_path, FEDABC, FINAL, gain=0.03, others=["full"], pooled_over="lr", values=["5"])
        == NONE
    )
    rows = rows_of(results.pooled_pairs(frame_of(tmp_path)))
    assert [
        (row["difference of final accuracy"], row["settings"], row["mean"]) for row in rows
    ] == [
        ("full - fedabc", "3", "-0.0003"),
        ("top_loss_7 - fedabc", "3", "-0.0303"),
    ]
    assert [row["level"] for row in rows] == [
        "< .001",
        "0.999",
    ]  # within .02 of each other, and not


def test_claims_about_trends(tmp_path: Path) -> None:
    for seed in range(3):
        for lr, gain in ((0.1, 0.05), (0.5, 0.02), (1.0, 0.0)):
            for selector, more in (("fedabc", gain), ("top_loss_7", 0.0)):
                accuracy = 0.5 + 0.01 * seed + 0.3 * lr + more + 0.001 * (seed == 1) * (lr == 0.5)
                write_run(
                    tmp_path, [accuracy], [[0]], seed=seed, lr=lr, choices={"selector": selector}
                )
    along: dict[str, Any] = {"grows_with": "lr", "values": ["0.1", "0.5", "1.0"]}
    gap = {**along, "minus": {"selector": "top_loss_7"}}
    assert verdict(tmp_path, FEDABC, FINAL, **along) == YES
    assert verdict(tmp_path, FEDABC, FINAL, falls=True, **gap) == YES
    assert verdict(tmp_path, FEDABC, FINAL, **gap) == NO
    assert verdict(tmp_path, FEDABC, FINAL, grows_with="lr", values=["0.1", "5"]) == NONE


def test_tests_are_corrected_within_what_a_paper_says_in_one_place_of_one_quantity(
    tmp_path: Path,
) -> None:
    """Rows that were added after runs had been seen do not change the others."""
    two_methods(tmp_path)
    first = next(tmp_path.glob("gpfl-*-1-*"))  # one difference of .09 in place of .05
    change_run(first, lambda records: records[1].update(test_accuracy=0.69))
    claim = Claim("a", "Fig. 1", "", GPFL, FINAL, gain=0.0, others=["random"])
    cases = Cases(groups_of(tmp_path))
    (alone,) = judge(cases, claim)
    for after in (True, False):
        more = [replace(claim, id=str(i), added_after_runs=after) for i in range(9)]
        found = judge(cases, claim, *more)
        assert (found[0].evidence == alone.evidence) is after
    assert (alone.verdict, found[0].verdict) == (YES, "undecided")
    places = [("Fig. 2", FINAL), ("Fig. 1", "mean_accuracy")] * 5
    more = [
        replace(claim, id=f"{i}", where=where, measure=name)
        for i, (where, name) in enumerate(places)
    ]
    found = judge(cases, claim, *more)
    assert (found[0].tests, found[0].verdict, found[0].over_paper) == (1, YES, "undecided")
    assert (found[1].tests, found[1].verdict) == (5, "undecided")


def test_readings_of_a_method_and_presets_are_about_the_same_statement() -> None:
    every = [
        one
        for publication in published.publications()
        for one in (*publication.numbers, *publication.claims)
    ]
    of = {one.id: one.statement for one in every}
    assert len(of) == len(every)
    assert (
        of["gpfl.t2/gpfl/2SPC 100 %"]
        == of["gpfl.t2/gpfl_official/2SPC 100 %"]
        == of["gpfl.code/gpfl/2SPC 100 %"]
    )
    assert of["gpfl.t2/fedcor/1SPC 100 %"] == of["gpfl.code/fedcor_gpfl/1SPC 100 %"]
    assert of["gpfl.t1.cifar10/gpfl_1spc/samples"] == of["gpfl.t1.cifar10/gpfl_dir/samples"]
    assert (
        of["gpfl.gain.1SPC.gpfl"]
        == of["gpfl.gain.1SPC.gpfl_official"]
        == of["gpfl.code.gain.1SPC.gpfl"]
    )
    assert of["gpfl.t2.deviation/gpfl/2SPC"] != of["gpfl.t2.deviation/fedcor/2SPC"]  # both are .04
    assert of["gpfl.gain.1SPC.gpfl"] != of["gpfl.gain.2SPC.gpfl"]
    assert of["gpfl.peak.random"] != of["gpfl.peak.power_of_choice_d10"]
