"""Verdicts are for runs that follow a preset, by their configs; a folder's name says nothing."""

import csv
import html
import json
from pathlib import Path

import pytest
import yaml

from fedsim.config.compose import compose_jobs, search_path
from fedsim.config.plan import with_one_amount_of_work
from fedsim.papers.evidence import Evidence
from fedsim.papers.judge import Judgement, correct_all, judge_all, judge_publication, verdicts_by_id
from fedsim.papers.protocol import Cases
from fedsim.papers.published import RULES, Number, Publication
from fedsim.results.files import json_ready
from fedsim.results.runs import read_runs
from tests.report_toys import groups_of, make_report, write_run

TABLE2 = ("preset=gpfl_table2_fmnist", "cell=gpfl_2spc")
NUMBER = Number("t/x/y", "", {"selector": "gpfl"}, "final_accuracy", 0.5, 0.1)


def write_runs(
    folder: Path, *words: str, accuracy: float = 0.5, seeds: int = 5, covered_after: int = 30
) -> None:
    """Write runs whose configs are those that `words` compose, with made-up records.

    Their accuracy is constant, and 0.01 higher at each further seed. All clients have been selected
    after round `covered_after`.
    """
    with search_path():
        (job,) = compose_jobs([*words, "seed=0"], multirun=True)
    config = json_ready(with_one_amount_of_work(job.config))
    num_rounds = config["num_rounds"]
    coverage = [min(number / covered_after, 1.0) for number in range(1, num_rounds + 1)]
    columns = {"coverage": coverage, "participation_ratio": [0.1] * num_rounds}
    name = "-".join(words).replace("=", "_").replace("/", "_")
    for seed in range(seeds):
        run = write_run(
            folder / name,
            [accuracy + 0.01 * seed] * num_rounds,
            [[number % 10] for number in range(num_rounds)],
            seed=seed,
            columns=columns,
            summary={"choices": job.choices, "start_up_rounds": 0},
        )
        (run / "config.yaml").write_text(yaml.safe_dump({**config, "seed": seed}))


def judged_in(folder: Path) -> dict[str, Judgement]:
    """Return the judgements on the runs below a folder by id."""
    by_id = {}
    for _, judgements in correct_all(judge_all(read_runs(folder))):
        by_id.update({judged.printed.id: judged for judged in judgements})
    return by_id


def test_runs_of_the_preset_are_judged(tmp_path: Path) -> None:
    """The paper prints 0.7346 for gpfl and 0.6497 for random, and that gpfl covers all clients
    early."""
    write_runs(tmp_path, *TABLE2, "selector=gpfl", accuracy=0.73, seeds=10)
    write_runs(tmp_path, *TABLE2, "selector=random", accuracy=0.4, seeds=10)
    judged = judged_in(tmp_path)
    assert judged["gpfl.t2/gpfl/2SPC 100 %"].verdict == "reproduced"
    assert judged["gpfl.t2/random/2SPC 100 %"].verdict == "not reproduced"
    assert judged["gpfl.cover.gpfl"].verdict == "reproduced"
    assert judged["gpfl.cover.random"].verdict == "not reproduced"


def test_a_claim_about_runs_that_are_missing_is_not_judged(tmp_path: Path) -> None:
    write_runs(tmp_path, *TABLE2, "selector=gpfl", seeds=1)
    gain = judged_in(tmp_path)["gpfl.gain.2SPC.gpfl"]
    missing = "no runs of random, power_of_choice_d10, fedcor"
    assert (gain.verdict, gain.detail) == ("not judged", missing)


def test_a_smaller_size_says_nothing_about_absolute_values(tmp_path: Path) -> None:
    finals = {"gpfl": 0.7, "fedcor": 0.5, "random": 0.4, "power_of_choice_d10": 0.4}
    for selector, accuracy in finals.items():
        words = (*TABLE2, "scale=small", f"selector={selector}")
        write_runs(tmp_path, *words, accuracy=accuracy, covered_after=1000)
    judged = judged_in(tmp_path)
    numbers = [judged[name].verdict for name in judged if name.startswith("gpfl.t2/")]
    assert set(numbers) <= {"not judged"}
    assert judged["gpfl.cover.fedcor"].verdict == "not judged"
    assert judged["gpfl.tail.gpfl"].detail == "another size than the paper's"
    gain = judged["gpfl.gain.2SPC.gpfl"]
    assert gain.verdict == "direction only"
    assert "by its sign alone" in gain.detail


def test_a_rival_that_differs_from_the_preset_does_not_count(tmp_path: Path) -> None:
    for selector in ("gpfl", "random", "power_of_choice_d10"):
        write_runs(tmp_path, *TABLE2, f"selector={selector}")
    write_runs(tmp_path, *TABLE2, "selector=fedcor", "selector.warmup=3", accuracy=0.4)
    gain = judged_in(tmp_path)["gpfl.gain.2SPC.gpfl"]
    assert gain.verdict == "not judged"
    assert "selector.warmup=3 (preset: 15)" in gain.detail


@pytest.fixture
def two_presets(tmp_path: Path) -> Path:
    """gpfl_alpha in the folder a, and gpfl_rho in b. They share a run and the file of claims."""
    for exploration, accuracy in (("fixed_0", 0.4), ("linear", 0.5)):
        words = ("preset=gpfl_alpha", f"selector/exploration={exploration}")
        write_runs(tmp_path / "a", *words, accuracy=accuracy)
    for rho, accuracy in ((0.5, 0.4), (1, 0.5)):
        words = ("preset=gpfl_rho", f"selector.exploration.rho={rho}")
        write_runs(tmp_path / "b", *words, accuracy=accuracy)
    return tmp_path


def test_presets_are_judged_each_by_its_own_runs(two_presets: Path) -> None:
    """gpfl_rho does not run what the claim compares."""
    assert judged_in(two_presets / "a")["gpfl.fig7a.linear"].verdict == "reproduced"
    assert judged_in(two_presets / "b")["gpfl.fig7a.linear"].verdict == "not judged"


def test_a_report_of_two_presets_names_them(two_presets: Path) -> None:
    assert make_report([str(two_presets), "--no-figures"]) == 0
    report = two_presets / "report"
    verdicts = json.loads((report / "summary.json").read_text())["verdicts"]
    assert verdicts["gpfl.fig7a.linear"] == "reproduced"
    with (report / "claims.csv").open(encoding="utf-8") as file:
        places = {row["where"] for row in csv.DictReader(file)}
    assert {"Fig. 7a (gpfl_alpha)", "Fig. 7a (gpfl_rho)"} <= places


def test_methods_that_a_report_leaves_out_are_not_judged(two_presets: Path) -> None:
    """The run with rho=1 is in both presets, and counts once in tables. Each preset is judged by
    it."""
    words = [str(two_presets), "--no-figures", "--only", "linear rho=1.0"]
    assert make_report(words) == 0
    report = two_presets / "report"
    verdicts = json.loads((report / "summary.json").read_text())["verdicts"]
    assert "gpfl.fig7a.linear" in verdicts
    assert "gpfl.fig7a.plateau" not in verdicts  # about fixed_0
    with (report / "claims.csv").open(encoding="utf-8") as file:
        places = {row["where"] for row in csv.DictReader(file)}
    assert {"Fig. 7a (gpfl_alpha)", "Fig. 7a (gpfl_rho)"} <= places


def test_verdicts_of_several_presets_on_a_number_have_the_presets_names() -> None:
    unjudged = Judgement(NUMBER, None, preset="a")
    first = Judgement(NUMBER, Evidence(None), preset="b")
    second = Judgement(NUMBER, Evidence(None), preset="c")
    assert verdicts_by_id([unjudged]) == {"t/x/y": "not judged"}
    assert verdicts_by_id([unjudged, first]) == {"t/x/y": "undecided"}
    assert set(verdicts_by_id([first, second])) == {"t/x/y (b)", "t/x/y (c)"}


def test_a_number_that_several_settings_fit_is_not_judged(tmp_path: Path) -> None:
    for rho in (0.5, 1):
        write_runs(tmp_path, "preset=gpfl_rho", f"selector.exploration.rho={rho}")
    cases = Cases(groups_of(tmp_path), "gpfl_rho")
    (judged,) = judge_publication(Publication("x", "t", "s", [], [], [NUMBER], []), cases)
    detail = "several runs are of selector=gpfl: rho=0.5, rho=1"
    assert (judged.verdict, judged.detail) == ("not judged", detail)


def test_what_cannot_change_a_result_may_differ_from_the_preset(tmp_path: Path) -> None:
    free = ("engine=sequential", "device=cpu", "tracker=files_only", "output_dir=elsewhere")
    write_runs(tmp_path, *TABLE2, "selector=random", *free, seeds=1)
    cases = Cases(groups_of(tmp_path), "gpfl_table2_fmnist")
    assert list(cases.deviations.values()) == [[]]


def test_runs_without_a_preset_are_about_no_paper(tmp_path: Path) -> None:
    words = ("selector=random", "num_rounds=2", "hydra.mode=MULTIRUN")
    write_runs(tmp_path / "gpfl_table2_fmnist", *words, seeds=1)
    assert judged_in(tmp_path) == {}


def test_a_data_set_in_another_form_is_reported(tmp_path: Path) -> None:
    words = ("preset=pncs_k4", "scale=small", "partition.shards_per_client=1")
    words += ("dataset=parquet", "dataset.path=x")
    for selector in ("pncs", "fedcor_short", "afl", "power_of_choice"):
        accuracy = 0.6 if selector == "pncs" else 0.5
        write_runs(tmp_path, *words, f"selector={selector}", accuracy=accuracy)
    judged = judged_in(tmp_path)["pncs.k4.best.1"]
    assert judged.verdict == "reproduced"
    assert "dataset=parquet" in judged.detail


@pytest.fixture
def other_rounds(tmp_path: Path) -> Path:
    """A run under the preset's name with other numbers of rounds and another learning rate."""
    words = (*TABLE2, "selector=gpfl", "num_rounds=3", "optimizer.lr=0.1")
    write_runs(tmp_path / "gpfl_table2_fmnist", *words, seeds=1)
    return tmp_path


def test_the_screen_counts_verdicts_and_the_page_has_the_rules_once(
    other_rounds: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_report([str(other_rounds), "--no-figures"]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert "Verdicts by paper" in screen
    for rule in RULES.values():
        assert rule not in screen
    page = html.unescape((other_rounds / "report" / "report.html").read_text())
    assert page.count(RULES["holm"]) == 1


@pytest.mark.parametrize(
    ("of_preset", "remark"), [([500], "3 of 500 rounds"), ([3], ""), ([3, 500], ""), ([5, 500], "")]
)
def test_a_number_of_rounds_is_named_where_it_is_not_the_only_one_of_the_preset(
    of_preset: list[int], remark: str, other_rounds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [("", {"num_rounds": num_rounds}) for num_rounds in of_preset]
    monkeypatch.setattr("fedsim.papers.protocol.preset_settings", lambda preset, scale: settings)
    groups = groups_of(other_rounds)
    assert Cases(groups, "gpfl_table2_fmnist").rounds(next(iter(groups))) == remark


def test_other_rounds_under_the_presets_name_are_not_judged(
    other_rounds: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_report([str(other_rounds), "--no-figures", "--all"]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert "num_rounds=3 (preset: 500)" in screen
    assert "optimizer.lr=0.1 (preset: 0.005)" in screen
    report = other_rounds / "report"
    verdicts = json.loads((report / "summary.json").read_text())["verdicts"]
    assert set(verdicts.values()) == {"not judged"}
    with (report / "totals.csv").open(encoding="utf-8") as file:
        totals = list(csv.DictReader(file))
    assert all(row["all"] == row["not judged"] for row in totals)
    assert sum(int(row["all"]) for row in totals) == len(verdicts)
