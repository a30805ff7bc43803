"""Verdicts are for runs that follow a preset, by their configs; a folder's name says nothing."""

import csv
import html
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fedsim.config.compose import compose_jobs, search_path
from fedsim.config.plan import with_one_amount_of_work
from fedsim.papers.examine import Evidence
from fedsim.papers.judge import Judged, correct, examine, examine_all, verdicts_by_id
from fedsim.papers.protocol import Cases
from fedsim.papers.published import RULES, Claim, Number, Publication, publications
from fedsim.results.files import json_ready
from fedsim.results.runs import read_runs
from tests.report_toys import groups_of, make_report, write_run


def run_of(
    folder: Path, *words: str, accuracy: float = 0.5, seeds: int = 5, covered_after: int = 30
) -> None:
    """Made-up records of runs whose configs are what the command `words` composes."""
    with search_path():
        (job,) = compose_jobs([*words, "seed=0"], multirun=True)
    config = json_ready(with_one_amount_of_work(job.config))
    rounds = config["num_rounds"]
    coverage = [min(t / covered_after, 1.0) for t in range(1, rounds + 1)]
    columns = {"coverage": coverage, "participation_ratio": [0.1] * rounds}
    selected = [[t % 10] for t in range(rounds)]
    for seed in range(seeds):
        path = folder / "-".join(words).replace("=", "_").replace("/", "_")
        summary = {"choices": job.choices, "start_up_rounds": 0}
        run = write_run(
            path,
            [accuracy + 0.01 * seed] * rounds,
            selected,
            seed=seed,
            columns=columns,
            summary=summary,
        )
        (run / "config.yaml").write_text(yaml.safe_dump({**config, "seed": seed}))


def judged(folder: Path) -> dict[str, Judged]:
    return {
        one.printed.id: one for _, some in correct(examine_all(read_runs(folder))) for one in some
    }


TABLE2 = ("preset=gpfl_table2_fmnist", "cell=gpfl_2spc")


def test_runs_of_the_preset_are_judged(tmp_path: Path) -> None:
    run_of(tmp_path, *TABLE2, "selector=gpfl", accuracy=0.73, seeds=10)
    run_of(tmp_path, *TABLE2, "selector=random", accuracy=0.4, seeds=10)
    found = judged(tmp_path)
    assert found["gpfl.t2/gpfl/2SPC 100 %"].verdict == "reproduced"
    assert found["gpfl.t2/random/2SPC 100 %"].verdict == "not reproduced"
    assert found["gpfl.cover.gpfl"].verdict == "reproduced"
    assert found["gpfl.cover.random"].verdict == "not reproduced"
    gain = found["gpfl.gain.2SPC.gpfl"]  # needs power-of-choice and FedCor, too
    assert (gain.verdict, gain.detail) == ("not judged", "no runs of power_of_choice_d10, fedcor")


def test_a_smaller_size_says_nothing_about_absolute_values(tmp_path: Path) -> None:
    for selector, accuracy in (
        ("gpfl", 0.7),
        ("fedcor", 0.5),
        ("random", 0.4),
        ("power_of_choice_d10", 0.4),
    ):
        run_of(
            tmp_path,
            *TABLE2,
            "scale=small",
            f"selector={selector}",
            accuracy=accuracy,
            covered_after=1000,
        )
    found = judged(tmp_path)
    assert not any(
        name.startswith("gpfl.t2/") for name, one in found.items() if one.verdict != "not judged"
    )
    assert found["gpfl.cover.fedcor"].verdict == "not judged"
    assert found["gpfl.tail.gpfl"].verdict == "not judged"
    assert found["gpfl.tail.gpfl"].detail == "another size than the paper's"
    assert found["gpfl.gain.2SPC.gpfl"].verdict == "direction only"
    assert "by its sign alone" in found["gpfl.gain.2SPC.gpfl"].detail


def test_a_rival_that_differs_from_the_preset_does_not_count(tmp_path: Path) -> None:
    for selector in ("gpfl", "random", "power_of_choice_d10"):
        run_of(
            tmp_path, *TABLE2, f"selector={selector}", accuracy=0.7 if selector == "gpfl" else 0.4
        )
    run_of(tmp_path, *TABLE2, "selector=fedcor", "selector.warmup=3", accuracy=0.4)
    gain = judged(tmp_path)["gpfl.gain.2SPC.gpfl"]
    assert gain.verdict == "not judged"
    assert "selector.warmup=3 (preset: 15)" in gain.detail


def test_presets_in_one_report_are_judged_each_by_its_own_runs(tmp_path: Path) -> None:
    """gpfl_alpha and gpfl_rho share a run and the file of claims; only one of them runs what a
    claim compares."""
    for exploration, accuracy in (("fixed_0", 0.4), ("linear", 0.5)):
        run_of(
            tmp_path / "a",
            "preset=gpfl_alpha",
            f"selector/exploration={exploration}",
            accuracy=accuracy,
        )
    for rho, accuracy in ((0.5, 0.4), (1, 0.5)):
        run_of(
            tmp_path / "b", "preset=gpfl_rho", f"selector.exploration.rho={rho}", accuracy=accuracy
        )
    assert judged(tmp_path / "a")["gpfl.fig7a.linear"].verdict == "reproduced"
    assert judged(tmp_path / "b")["gpfl.fig7a.linear"].verdict == "not judged"
    assert make_report([str(tmp_path), "--no-figures"]) == 0
    verdicts = json.loads((tmp_path / "report" / "summary.json").read_text())["verdicts"]
    assert verdicts["gpfl.fig7a.linear"] == "reproduced"
    rows = csv.DictReader((tmp_path / "report" / "claims.csv").open(encoding="utf-8"))
    assert {"Fig. 7a (gpfl_alpha)", "Fig. 7a (gpfl_rho)"} <= {row["where"] for row in rows}


def test_what_several_presets_say_of_a_number_is_told_apart(tmp_path: Path) -> None:
    printed = Number("t/x/y", "", {}, "final_accuracy", 0.5, 0.1)
    missing, found = Judged(printed, None, preset="a"), Judged(printed, Evidence(None), preset="b")
    assert verdicts_by_id([missing]) == {"t/x/y": "not judged"}
    assert verdicts_by_id([missing, found]) == {"t/x/y": found.verdict}
    assert set(verdicts_by_id([found, replace(found, preset="c")])) == {"t/x/y (b)", "t/x/y (c)"}


def test_a_number_that_several_settings_fit_is_not_judged(tmp_path: Path) -> None:
    for rho in (0.5, 1):
        run_of(tmp_path, "preset=gpfl_rho", f"selector.exploration.rho={rho}")
    number = Number("t/x/y", "", {"selector": "gpfl"}, "final_accuracy", 0.5, 0.1)
    cases = Cases(groups_of(tmp_path), "gpfl_rho")
    (one,) = examine(Publication("x", "t", "s", [], [], [number], []), cases)
    assert (one.verdict, one.detail) == (
        "not judged",
        "several runs are of selector=gpfl: rho=0.5, rho=1",
    )


def test_what_cannot_change_a_result_may_differ_and_runs_without_a_preset_are_about_no_paper(
    tmp_path: Path,
) -> None:
    free = ("engine=sequential", "device=cpu", "tracker=files_only", "output_dir=elsewhere")
    run_of(tmp_path / "a", *TABLE2, "selector=random", *free, seeds=1)
    assert list(Cases(groups_of(tmp_path / "a"), "gpfl_table2_fmnist").deviations.values()) == [[]]
    run_of(
        tmp_path / "gpfl_table2_fmnist",
        "selector=random",
        "num_rounds=2",
        "hydra.mode=MULTIRUN",
        seeds=1,
    )
    assert judged(tmp_path / "gpfl_table2_fmnist") == {}


def test_a_data_set_in_another_form_is_told(tmp_path: Path) -> None:
    words = (
        "preset=pncs_k4",
        "scale=small",
        "partition.shards_per_client=1",
        "dataset=parquet",
        "dataset.path=x",
    )
    for selector in ("pncs", "fedcor_short", "afl", "power_of_choice"):
        run_of(
            tmp_path, *words, f"selector={selector}", accuracy=0.6 if selector == "pncs" else 0.5
        )
    found = judged(tmp_path)["pncs.k4.best.1"]
    assert found.verdict == "reproduced"
    assert "dataset=parquet" in found.detail


def test_other_rounds_under_the_presets_name_are_not_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of(
        tmp_path / "gpfl_table2_fmnist",
        *TABLE2,
        "selector=gpfl",
        "num_rounds=3",
        "optimizer.lr=0.1",
        seeds=1,
    )
    assert make_report([str(tmp_path), "--no-figures"]) == 0
    short = " ".join(capsys.readouterr().out.split())
    assert "Verdicts by paper" in short
    assert not any(rule in short for rule in RULES.values())
    assert (
        html.unescape((tmp_path / "report" / "report.html").read_text()).count(RULES["holm"]) == 1
    )
    assert make_report([str(tmp_path), "--no-figures", "--all"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "num_rounds=3 (preset: 500)" in told
    assert "optimizer.lr=0.1 (preset: 0.005)" in told
    verdicts = json.loads((tmp_path / "report" / "summary.json").read_text())["verdicts"]
    assert set(verdicts.values()) == {"not judged"}
    printed = [one for p in publications() for one in (*p.numbers, *p.claims) if one.id in verdicts]
    counts = Counter((type(one), one.added_after_runs) for one in printed)
    after = " (written after runs had been seen)"
    kinds = {
        (Number, False): "numbers",
        (Number, True): "numbers" + after,
        (Claim, False): "claims",
    }
    kinds |= {(Claim, True): "claims" + after}
    rows = list(csv.reader((tmp_path / "report" / "totals.csv").open()))
    assert [row[:3] + row[-1:] for row in rows[1:]] == [
        ["GPFL", name, str(counts[kind]), str(counts[kind])]
        for kind, name in kinds.items()
        if counts[kind]
    ]
