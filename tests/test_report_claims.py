"""The rules of the verdicts on published claims, on made-up runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsim.papers import published
from fedsim.papers.judge import judge
from fedsim.papers.protocol import Cases
from fedsim.papers.published import Claim, Publication
from fedsim.report import tables as results
from fedsim.results.groups import group_runs, make_panels
from fedsim.results.measures import find_measure
from fedsim.results.runs import read_runs
from tests.report_toys import two_methods, write_run


def test_claims_among_the_parts_of_a_selector(tmp_path: Path) -> None:
    for seed in range(3):
        for rho, part, accuracy in ((1.0, "convex", 0.6), (2.0, "linear", 0.5)):
            path = write_run(tmp_path, [accuracy], [[0]], seed=seed, lr=rho, choices={"selector": "fedabc"})
            summary = json.loads((path / "summary.json").read_text())
            summary["choices"]["selector/threshold"] = part
            (path / "summary.json").write_text(json.dumps(summary))
    assert {g.name for g in group_runs(read_runs(tmp_path))} == {"convex", "linear"}
    about, among = {"selector/threshold": "convex"}, "selector/threshold"
    assert verdicts(
        tmp_path,
        Claim("both", "", "", about, "final_accuracy", gain=0.1, others=["linear"], among=among),
        Claim("one is missing", "", "", about, "final_accuracy", gain=0.05, others=["linear", "concave"], among=among),
    ) == {"both": "reproduced", "one is missing": "not judged"}


def test_claims_among_values_that_are_numbers(tmp_path: Path) -> None:
    for seed in range(3):
        for lr, accuracy in ((1.0, 0.6), (0.5, 0.5)):
            write_run(tmp_path, [accuracy], [[0]], seed=seed, lr=lr)
    claim = Claim("a", "", "", {"lr": "1"}, "final_accuracy", gain=0.1, others=["0.50"], among="lr")
    assert verdicts(tmp_path, claim) == {"a": "reproduced"}


def verdicts(folder: Path, *claims: Claim) -> dict[str, str]:
    """The verdicts on claims, each as if it were the only one of its paper."""
    groups = group_runs(read_runs(folder))
    judged = [one for claim in claims for one in judge(Publication("x", "t", "s", [], [], [], [claim]), Cases(groups))]
    return {one.printed.id: one.verdict for one in judged}


def test_claims_against_runs(tmp_path: Path) -> None:
    two_methods(tmp_path, seeds=6)
    gpfl, random = {"selector": "gpfl"}, {"selector": "random"}
    assert verdicts(
        tmp_path,
        Claim("a", "", "", gpfl, "rounds_to_cover", at_most=2),
        Claim("b", "", "", gpfl, "rounds_to_cover", at_most=1),
        Claim("d", "", "", gpfl, "final_accuracy", gain=0.05, others=["random"]),
        Claim("e", "", "", gpfl, "final_accuracy", gain=0.06, others=["fedcor"]),  # not run
        Claim("e2", "", "", gpfl, "final_accuracy", gain=0.06, others=["random", "fedcor"]),  # one of them not run
        Claim("f", "", "", {"selector": "fedcor"}, "final_accuracy", at_least=0.1),  # not run
        Claim("g", "", "", gpfl, "final_accuracy", level_with=0.01, others=["random"]),
        Claim("h", "", "", random, "final_accuracy", level_with=0.2, others=["gpfl"]),
        Claim("i", "", "", random, "final_accuracy", not_worse_by=0.06, others=["gpfl"]),
        Claim("j", "", "", random, "final_accuracy", not_worse_by=0.04, others=["gpfl"]),
        Claim("k", "", "", gpfl, "final_accuracy", gain=0.2, others=["random"]),
        Claim("l", "", "", gpfl, "final_accuracy", value=0.47, tolerance=0.03),
        Claim("m", "", "", gpfl, "rounds_to_cover", value=1, tolerance=0.5),
        Claim("n", "", "", gpfl, "rounds_to_cover", value=5, tolerance=1),  # of two rounds
    ) == {
        "a": "reproduced",
        "b": "not reproduced",
        "d": "reproduced",
        "e": "not judged",
        "e2": "not judged",
        "g": "not reproduced",
        "h": "reproduced",
        "i": "reproduced",
        "j": "not reproduced",
        "k": "direction only",
        "l": "reproduced",
        "m": "not reproduced",
        "n": "not judged",
    }


def test_a_gain_over_several_settings_is_their_mean(tmp_path: Path) -> None:
    for seed in range(3):
        for shards, gain in ((1, 0.06), (2, 0.02), (5, 0.01)):
            for selector, more in (("fedabc", gain), ("top_loss_7", 0.0), ("full", gain)):
                accuracy = 0.5 + 0.01 * seed + 0.01 * shards + more + 0.001 * (seed == 1) * (selector == "fedabc")
                choices, partition = {"selector": selector}, {"shards": shards}
                write_run(tmp_path / str(shards), [accuracy], [[0]], seed=seed, choices=choices, partition=partition)
    about: dict[str, str] = {"selector": "fedabc"}
    over: dict[str, Any] = {"pooled_over": "partition.shards", "values": ["1", "2", "5"]}
    claims = [
        Claim("mean", "", "", about, "final_accuracy", gain=0.03, others=["top_loss_7"], **over),
        Claim("at each", "", "", about, "final_accuracy", gain=0.035, others=["top_loss_7"], **over),
        Claim("any two", "", "", about, "final_accuracy", level_with=0.01, others=["full"], all_pairs=True, **over),
        Claim(
            "any of three", "", "", about, "final_accuracy", level_with=0.01, others=["full", "top_loss_7"],
            all_pairs=True, **over
        ),
        Claim("missing", "", "", about, "final_accuracy", gain=0.03, others=["full"], pooled_over="lr", values=["5"])
    ]  # fmt: skip
    assert verdicts(tmp_path, *claims) == {
        "mean": "reproduced",
        "at each": "direction only",
        "any two": "reproduced",
        "any of three": "not reproduced",
        "missing": "not judged",
    }
    rows = results.pooled_pairs(make_panels(group_runs(read_runs(tmp_path)))).rows
    assert [row[:4] for row in rows] == [
        ["", "full - fedabc", "3", "-0.0003"],
        ["", "top_loss_7 - fedabc", "3", "-0.0303"],
    ]
    assert (rows[0][7], rows[1][7]) == ("< .001", "0.999")  # within .02 of each other, and not


def test_rows_that_were_added_after_runs_do_not_change_the_others(tmp_path: Path) -> None:
    two_methods(tmp_path)
    first = next(tmp_path.glob("gpfl-*-1-*/metrics.jsonl"))  # one difference of .09 in place of .05
    first.write_text(first.read_text().replace("0.61", "0.69"))
    claim = Claim("a", "", "", {"selector": "gpfl"}, "final_accuracy", gain=0.0, others=["random"])
    alone = judge(Publication("x", "t", "s", [], [], [], [claim]), Cases(group_runs(read_runs(tmp_path))))
    for after in (True, False):
        more = [replace(claim, id=str(i), added_after_runs=after) for i in range(9)]
        found = judge(Publication("x", "t", "s", [], [], [], [claim, *more]), Cases(group_runs(read_runs(tmp_path))))
        assert (found[0].evidence == alone[0].evidence) is after
    assert alone[0].verdict == "reproduced"
    assert found[0].verdict == "undecided"


def test_a_run_that_ends_before_a_bound_says_nothing(tmp_path: Path) -> None:
    two_methods(tmp_path, seeds=6)  # two rounds; random never covers all clients
    random = {"selector": "random"}
    assert verdicts(
        tmp_path,
        Claim("later than the end", "", "", random, "rounds_to_cover", at_least=80),
        Claim("until the end", "", "", random, "rounds_to_cover", at_most=2),
        Claim("after the end", "", "", random, "rounds_to_cover", at_most=3),
        Claim("not before the end", "", "", random, "rounds_to_cover", at_least=3),
        Claim("more than rounds", "", "", random, "most_selections", at_least=3),
        Claim("as many as rounds", "", "", random, "most_selections", at_least=2),
        Claim("at most as many as rounds", "", "", random, "most_selections", at_most=2),
        Claim("never measured", "", "", random, "accuracy@0.1", at_most=2),
    ) == {
        "later than the end": "not judged",
        "until the end": "not reproduced",
        "after the end": "not judged",
        "not before the end": "reproduced",
        "more than rounds": "not judged",
        "as many as rounds": "reproduced",
        "at most as many as rounds": "not judged",
        "never measured": "not judged",
    }


def test_claims_about_trends(tmp_path: Path) -> None:
    for seed in range(3):
        for lr, gain in ((0.1, 0.05), (0.5, 0.02), (1.0, 0.0)):
            for selector, more in (("fedabc", gain), ("top_loss_7", 0.0)):
                accuracy = 0.5 + 0.01 * seed + 0.3 * lr + more + 0.001 * (seed == 1) * (lr == 0.5)
                write_run(tmp_path, [accuracy], [[0]], seed=seed, lr=lr, choices={"selector": selector})
    about, values = {"selector": "fedabc"}, ["0.1", "0.5", "1.0"]
    minus = {"selector": "top_loss_7"}
    found = verdicts(
        tmp_path,
        Claim("rises", "", "", about, "final_accuracy", grows_with="lr", values=values),
        Claim("gap falls", "", "", about, "final_accuracy", grows_with="lr", values=values, falls=True, minus=minus),
        Claim("gap rises", "", "", about, "final_accuracy", grows_with="lr", values=values, minus=minus),
        Claim("one is missing", "", "", about, "final_accuracy", grows_with="lr", values=[*values, "5"]),
    )
    assert found == {
        "rises": "reproduced",
        "gap falls": "reproduced",
        "gap rises": "not reproduced",
        "one is missing": "not judged",
    }


def test_readings_of_a_method_and_presets_are_about_the_same_statement() -> None:
    every = [one for publication in published.publications() for one in (*publication.numbers, *publication.claims)]
    of = {one.id: one.statement for one in every}
    assert of["gpfl.t2/gpfl/2SPC 100 %"] == of["gpfl.t2/gpfl_official/2SPC 100 %"] == of["gpfl.code/gpfl/2SPC 100 %"]
    assert of["gpfl.t2/fedcor/1SPC 100 %"] == of["gpfl.code/fedcor_gpfl/1SPC 100 %"]
    assert of["gpfl.t1.cifar10/gpfl_1spc/samples"] == of["gpfl.t1.cifar10/gpfl_dir/samples"]
    assert of["gpfl.gain.1SPC.gpfl"] == of["gpfl.gain.1SPC.gpfl_official"] == of["gpfl.code.gain.1SPC.gpfl"]
    assert of["gpfl.t2.deviation/gpfl/2SPC"] != of["gpfl.t2.deviation/fedcor/2SPC"]  # both are .04
    assert of["gpfl.gain.1SPC.gpfl"] != of["gpfl.gain.2SPC.gpfl"]
    assert of["gpfl.peak.random"] != of["gpfl.peak.power_of_choice_d10"]


def test_tests_are_corrected_within_what_a_paper_says_in_one_place_of_one_quantity(tmp_path: Path) -> None:
    two_methods(tmp_path)
    first = next(tmp_path.glob("gpfl-*-1-*/metrics.jsonl"))
    first.write_text(first.read_text().replace("0.61", "0.69"))
    claim = Claim("a", "Fig. 1", "", {"selector": "gpfl"}, "final_accuracy", gain=0.0, others=["random"])
    places = [("Fig. 2", "final_accuracy"), ("Fig. 1", "mean_accuracy")] * 5
    more = [replace(claim, id=f"{i}", where=where, measure=name) for i, (where, name) in enumerate(places)]
    found = judge(Publication("x", "t", "s", [], [], [], [claim, *more]), Cases(group_runs(read_runs(tmp_path))))
    assert (found[0].tests, found[0].verdict, found[0].over_paper) == (1, "reproduced", "undecided")
    assert (found[1].tests, found[1].verdict) == (5, "undecided")


def test_everything_published_can_be_measured_and_is_about_what_presets_run() -> None:
    conf = Path(__file__).parents[1] / "conf"
    publications = published.publications()
    assert len(publications) == len(list(published.FOLDER.glob("*.yaml"))) > 20
    for publication in publications:
        assert publication.numbers or publication.claims
        for one in (*publication.numbers, *publication.claims):
            assert callable(find_measure(one.measure))
            for group, choice in one.about.items():
                assert "." in group or not (conf / group).is_dir() or (conf / group / f"{choice}.yaml").is_file(), (
                    one.id
                )
        for claim in publication.claims:
            for other in claim.others:
                assert "." in claim.among or (conf / claim.among / f"{other}.yaml").is_file(), claim.id
        for name in publication.presets:
            assert (conf / "preset" / f"{name}.yaml").is_file()
        ids = [one.id for one in (*publication.numbers, *publication.claims)]
        assert len(ids) == len(set(ids))
