"""`fedsim show`: the jobs of a command line, what is there of them, and estimates; nothing is run or written."""

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsim.commands.dispatch import answer
from fedsim.commands.show import JobStatus, estimates, status_of
from fedsim.commands.show import run as show
from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.config.plan import Plan
from fedsim.core.errors import ConfigError
from fedsim.jobs.cli import run as run_jobs
from fedsim.results.files import owned, read_summary, replace_folder, replacement_of

QUICK = ("num_rounds=4", "local.epochs=1", "tracker=files_only", "num_clients=6", "cohort_size=2", "engine=sequential")
Show = Callable[..., list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Show:
    def call(*words: str) -> list[dict[str, Any]]:
        capsys.readouterr()
        assert show([*words, *QUICK, "--json"]) == 0
        found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        return found

    return call


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def plan_of(*words: str) -> Plan:
    with search_path():
        (plan,) = check_jobs(compose_jobs([*words, *QUICK], multirun=False))
    return plan


def stop_after(rounds: int, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """Run a job with a checkpoint in every round, and kill it after some."""
    from fedsim.rounds.loop import Simulation

    real = Simulation.step

    def step(self: Simulation) -> Any:
        if self.round == rounds:
            raise KeyboardInterrupt
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "step", step)
        with pytest.raises(KeyboardInterrupt):
            run_jobs([*words, *QUICK, "checkpoint.every=1"])


def test_a_dry_run_shows_every_job_and_writes_nothing(shown: Show, tmp_path: Path) -> None:
    found = shown("-m", "selector=random,power_of_choice", "seed=0,1")
    assert [(job["state"], job["round"], job["num_rounds"]) for job in found] == [("new", 0, 4)] * 4
    assert [Path(job["folder"]).name.split("-")[3:5] for job in found] == [
        [selector, seed] for selector in ("random", "power_of_choice") for seed in ("s0", "s1")
    ]
    assert files(tmp_path) == set()


def test_what_is_done_and_what_is_half_done_is_seen(
    shown: Show, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_jobs(["seed=0", *QUICK])
    stop_after(3, monkeypatch, "seed=1")
    before = files(tmp_path)
    found = shown("-m", "seed=0,1,2")
    assert [(job["state"], job["round"]) for job in found] == [("done", 4), ("partial", 3), ("new", 0)]
    again = shown("-m", "seed=0,1,2", "overwrite=true")
    assert [(job["state"], job["round"]) for job in again] == [("again", 0), ("interrupted", 0), ("new", 0)]
    assert files(tmp_path) == before
    measured = read_summary(Path(found[0]["folder"]))
    assert measured is not None
    for job, rounds in zip(found, (0, 1, 4), strict=True):
        assert job["estimate"]["bytes_down"] == measured["totals"]["bytes_down"] / 4 * rounds
        assert job["estimate"]["seconds"] == pytest.approx(measured["wall_seconds"] / 4 * rounds)
        assert job["estimate"]["measured"]


def test_bytes_of_what_never_ran_are_k_models_both_ways_and_time_is_not_known(shown: Show) -> None:
    (job,) = shown("selector=random")
    assert (job["estimate"]["seconds"], job["estimate"]["measured"]) == (None, False)
    run_jobs(["selector=random", *QUICK])
    summary = read_summary(Path(job["folder"]))
    assert summary is not None
    assert job["estimate"]["bytes_down"] == summary["totals"]["bytes_down"]
    assert job["estimate"]["bytes_up"] == summary["totals"]["bytes_up"]


def test_rounds_of_other_configs_are_not_taken_for_its_own(shown: Show) -> None:
    run_jobs(["seed=0", *QUICK])
    for word in ("local.batch_size=7", "optimizer.lr=0.2"):
        (job,) = shown("seed=1", word)
        assert job["estimate"]["seconds"] is None, word
    (job,) = shown("seed=1", "partition_seed=5", "checkpoint.every=2")
    assert job["estimate"]["seconds"] > 0


def test_damaged_records_are_no_reason_to_fail(shown: Show) -> None:
    run_jobs(["seed=0", *QUICK])
    (done,) = shown("seed=0")
    (Path(done["folder"]) / "config.yaml").write_text("{")
    (other,) = shown("seed=1")
    assert other["estimate"]["seconds"] is None


def test_models_whose_data_are_unknown_have_no_size(tmp_path: Path) -> None:
    plan = plan_of("dataset=parquet", f"dataset.path={tmp_path}")
    (cost,) = estimates([plan], [JobStatus("new", 0)])
    assert (cost.bytes_down, cost.seconds) == (None, None)


@pytest.mark.parametrize("dataset", ["digits", "fashion_mnist", "emnist", "cifar100", "femnist", "femnist_generated"])
def test_models_of_known_data_have_a_size(dataset: str) -> None:
    (cost,) = estimates([plan_of(f"dataset={dataset}", "partition=iid", "model=logistic")], [JobStatus("new", 1)])
    pixels, classes = {
        "digits": (64, 10),
        "fashion_mnist": (784, 10),
        "emnist": (784, 47),
        "cifar100": (3072, 100),
        "femnist": (784, 62),
        "femnist_generated": (784, 10),
    }[dataset]
    assert cost.bytes_up == 4 * (pixels + 1) * classes * 2 * 3  # floats, two clients, three rounds to come


def test_a_job_of_another_process_is_running(shown: Show) -> None:
    plan = plan_of("seed=0")
    with owned(plan.folder):
        found = status_of(plan)
        (job,) = shown("seed=0")
    assert (found.state, job["state"]) == ("running", "running")
    assert f"process {os.getpid()} on" in found.note


def test_a_failed_job_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fedsim.rounds.loop import Simulation

    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "step", lambda self: 1 / 0)
        run_jobs(["seed=0", *QUICK])
    capsys.readouterr()
    assert show(["seed=0", *QUICK]) == 0
    page = capsys.readouterr().out
    assert "failed     0/4" in page
    assert "ZeroDivisionError: division by zero" in page


def test_a_complete_replacement_counts_as_done() -> None:
    run_jobs(["seed=0", *QUICK])
    plan = plan_of("seed=0", "overwrite=true")
    replacement_of(plan.folder).parent.mkdir(parents=True)
    plan.folder.rename(replacement_of(plan.folder))
    assert status_of(plan) == JobStatus("done", 4)
    replace_folder(plan.folder)
    assert status_of(plan).state == "again"


def test_mistakes_are_told_as_a_run_tells_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        show(["selector=gfpl"])
    assert answer(["show", "selector=gfpl", "seed=-1"]) == 2
    assert "selector='gfpl': is not a choice" in capsys.readouterr().err
    for words in (["--cfg", "job"], ["--info"], ["--experimental-rerun", "x"], ["--jsn"]):
        with pytest.raises(SystemExit) as end:
            answer(["show", *words])
        assert end.value.code == 2, words
    assert "it takes the words of a run" in capsys.readouterr().err
    (tmp_path / "there").write_text("a file")
    assert answer(["show", "output_dir=there"]) == 2
    assert "output_dir" in capsys.readouterr().err


def test_the_page_says_what_the_experiment_is_and_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert show(["preset=pncs_queue", "scale=small", "seed=0,1", "selector=random"]) == 0
    page = capsys.readouterr().out
    assert "PNCS, Fig. 1: the length of the queue, 0, 2, 4 and 6, K = 2 of 10." in page
    assert "not known" in page
    for line in page.splitlines():
        assert len(line) <= 80 or " " not in line.strip(), line


def test_many_jobs_are_cut_off_unless_all_are_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.commands.show.MOST_SHOWN", 2)
    pages = []
    for more in ([], ["--all"]):
        assert show(["-m", "seed=range(3)", *QUICK, *more]) == 0
        pages.append(capsys.readouterr().out)
    assert "and 1 more (--all shows them)" in pages[0]
    assert [page.count("\nnew ") for page in pages] == [2, 3]
    assert all("12 to run of 12" in page for page in pages)


def test_a_selector_of_the_users_own_is_found_in_the_working_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is not on Python's path, as for the command `fedsim`."""
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(tmp_path))])
    (tmp_path / "conf" / "selector").mkdir(parents=True)
    (tmp_path / "conf" / "selector" / "mine.yaml").write_text("_target_: shown_lab.Mine\nmode: uniform\n")
    (tmp_path / "shown_lab.py").write_text("from fedsim.selectors.random import Random\nclass Mine(Random): pass\n")
    assert answer(["show", "selector=mine", "--config-dir", "conf"]) == 0
    assert "digits-shards-mlp-mine-s0-" in capsys.readouterr().out


def test_the_command_with_the_missing_flag_has_the_folder_of_own_choices() -> None:
    Path("mine/selector").mkdir(parents=True)
    Path("mine/selector/own.yaml").write_text("_target_: fedsim.selectors.random.Random\nmode: uniform\n")
    with pytest.raises(ConfigError) as caught:
        show(["--config-dir", "mine", "selector=own", "seed=0,1"])
    (remedy,) = [problem.remedy for problem in caught.value.problems]
    assert remedy == "fedsim -m --config-dir mine selector=own seed=0,1"
    assert show(shlex.split(remedy)[1:]) == 0
