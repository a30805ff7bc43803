"""`fedsim show`: the jobs of a command line, what is there of them, and estimates; nothing is run
or written."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedsim.commands.dispatch import answer
from fedsim.commands.show import run as show
from fedsim.core.errors import ConfigError, DataError
from fedsim.jobs.cli import run as run_jobs
from fedsim.partitions.division import Division
from fedsim.results.files import owned
from fedsim.results.reading import read_summary
from fedsim.rounds.loop import Simulation
from fedsim.tracking.tables import show_bytes

QUICK = (
    "num_rounds=4",
    "local.epochs=1",
    "tracker=files_only",
    "num_clients=6",
    "cohort_size=2",
    "engine=sequential",
)
Show = Callable[..., list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Show:
    def call(*words: str) -> list[dict[str, Any]]:
        before = set(Path().rglob("*"))
        capsys.readouterr()
        assert show([*words, *QUICK, "--json"]) == 0
        assert set(Path().rglob("*")) == before
        found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        return found

    return call


def test_a_dry_run_shows_every_job(shown: Show) -> None:
    found = shown("-m", "selector=random,power_of_choice", "seed=0,1")
    assert [(job["state"], job["round"], job["num_rounds"]) for job in found] == [("new", 0, 4)] * 4
    names = [f"{name}-s{seed}" for name in ("random", "power_of_choice") for seed in (0, 1)]
    assert all(f"-{name}-" in job["folder"] for name, job in zip(names, found, strict=True))


def test_what_is_done_and_what_is_half_done_is_seen(
    shown: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_jobs(["seed=0", *QUICK])
    step = Simulation.step
    with monkeypatch.context() as patch:
        stop = (
            signal.default_int_handler
        )  # which a shell may have had its background processes ignore
        patch.setattr(
            Simulation,
            "step",
            lambda self: step(self) if self.round < 3 else stop(signal.SIGINT, None),
        )
        with pytest.raises(KeyboardInterrupt):
            run_jobs(["seed=1", *QUICK, "checkpoint.every=1"])
    found = shown("-m", "seed=0,1,2")
    assert [(job["state"], job["round"]) for job in found] == [
        ("done", 4),
        ("partial", 3),
        ("new", 0),
    ]
    again = shown("-m", "seed=0,1,2", "overwrite=true")
    assert [(job["state"], job["round"]) for job in again] == [
        ("again", 0),
        ("interrupted", 0),
        ("new", 0),
    ]


def test_a_job_of_another_process_is_running_and_one_that_failed_says_why(
    shown: Show, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (job,) = shown("seed=0")
    with owned(Path(job["folder"])):
        assert show(["seed=0", *QUICK]) == 0
        page = capsys.readouterr().out
    assert "running            0/4  digits-shards-mlp-random-s0-" in page
    assert f"process {os.getpid()} on" in page
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "step", lambda self: 1 / 0)
        run_jobs(["seed=0", *QUICK])
    capsys.readouterr()
    assert show(["seed=0", *QUICK]) == 0
    page = capsys.readouterr().out
    assert "failed             0/4" in page
    assert "ZeroDivisionError: division by zero" in page


def test_mistakes_are_told_as_a_run_tells_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert answer(["show", "selector=gfpl", "seed=-1"]) == 2
    assert "selector='gfpl': is not a choice" in capsys.readouterr().err
    assert answer(["show", "--jsn"]) == 2
    assert "--jsn: is not an option" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        answer(["show", "--cfg", "job"])
    assert end.value.code == 2
    assert "it takes the words of a run" in capsys.readouterr().err
    (tmp_path / "there").write_text("a file")
    assert answer(["show", "output_dir=there"]) == 2
    assert "output_dir" in capsys.readouterr().err


def test_the_page_says_what_the_experiment_is_and_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(["preset=pncs_queue", "scale=small", "seed=0,1", "selector=random"]) == 0
    page = capsys.readouterr().out
    assert "PNCS, Fig. 1: the length of the queue, 0, 2, 4 and 6, K = 2 of 10." in page
    assert "not known" in page
    for line in page.splitlines():
        assert len(line) <= 80 or " " not in line.strip(), line


def test_many_jobs_are_cut_off_unless_all_are_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.commands.show.MAX_SHOWN", 2)
    run_jobs([*QUICK, "optimizer.lr=0.1", "seed=0"])
    (folder,) = Path("outputs/default").glob("*-s0-*")
    pages = []
    for more in ([], ["--all"]):
        capsys.readouterr()
        assert show(["-m", "seed=0,1", "optimizer.lr=0.1,0.2", *QUICK, *more]) == 0
        pages.append(capsys.readouterr().out)
    assert "and 2 more (--all shows them)" in pages[0]
    assert [page.count("\nnew ") for page in pages] == [1, 3]
    for page in pages:
        assert "in outputs/default\noptimizer.lr=0.1\ndone               4/4  digits" in page
        assert "12 to run of 16" in page
        down, up = (
            3 * (read_summary(folder) or {})["totals"][way] for way in ("bytes_down", "bytes_up")
        )
        assert f"cost about {show_bytes(down)} down, {show_bytes(up)} up, and" in " ".join(
            page.split()
        )


def test_words_that_choose_a_partition_draw_who_holds_which_labels(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run has the division that was shown: 6 clients and the labels 0 to 9."""
    words = ["-m", "dataset=digits", "partition=shards,iid", *QUICK]
    assert show(words) == 0
    page = capsys.readouterr().out
    assert "partition=iid: 6 clients hold " in page
    assert "outputs/default/show/partitions.png (also .pdf, .svg and .csv)" in " ".join(
        page.split()
    )
    endings = sorted(path.suffix for path in Path("outputs/default/show").iterdir())
    assert endings == [".csv", ".pdf", ".png", ".svg"]
    drawn = pd.read_csv("outputs/default/show/partitions.csv")
    run_jobs(["dataset=digits", "partition=shards", *QUICK])
    (partition,) = Path("outputs/default").glob("*/partition.npz")
    counts = np.zeros((6, 10), int)
    rows = drawn[drawn["division"] == "partition=shards"]
    counts[rows["client"], rows["label"]] = rows["samples"]
    assert counts.tolist() == Division.load(partition).histograms.tolist()


def test_each_division_has_one_panel_with_a_title_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A user's group and `local.holdout_fraction` decide on divisions, too. With a seed of its own,
    the partition is the same at all seeds."""
    for name, partition in (("even", "iid"), ("uneven", "shards"), ("few", "shards")):
        file = Path(f"own/cell/{name}.yaml")
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = ["# @package _global_", "defaults:", f"  - override /partition: {partition}"]
        lines.append(f"cohort_size: {1 if name == 'few' else 3}")
        file.write_text("\n".join(lines))
    words = ["dataset=digits", "cell=even,uneven,few", "selector=random,full", "partition_seed=1"]
    words += ["local.holdout_fraction=0,0.5", "seed=0,1", "num_clients=6", "num_rounds=4"]
    assert show(["--config-dir", "own", "-m", *words]) == 0
    page = capsys.readouterr().out
    titles = []
    for cell in ("even", "uneven"):
        titles += [f"cell={cell} local.holdout_fraction={fraction}" for fraction in ("0", "0.5")]
    assert page.count("6 clients hold") == len(titles)
    assert all(f"\n{title}: 6 clients hold" in page for title in titles)
    drawn = pd.read_csv("outputs/default/show/partitions.csv")
    assert drawn["division"].unique().tolist() == titles


def test_without_data_there_is_no_picture(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise DataError("data_dir: no files")

    monkeypatch.setattr("fedsim.running.assembly.Divider.division_of", fail)
    assert show(["partition=iid", *QUICK]) == 0
    assert "no picture of who holds which labels: data_dir: no files" in capsys.readouterr().out
    assert not Path("outputs").exists()
    earlier = Path("outputs/default/show/partitions.png")
    earlier.parent.mkdir(parents=True)
    earlier.write_text("another division")
    assert show(["partition=iid", *QUICK]) == 0
    assert not earlier.exists()


def test_the_picture_needs_no_model_that_fits_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["dataset=synthetic", "dataset.num_owners=6", "partition=natural", "model=cnn", *QUICK]
    with pytest.raises(ConfigError, match="model=cnn needs images"):
        show(words)
    assert "6 clients hold" in capsys.readouterr().out
    assert Path("outputs/default/show/partitions.png").exists()


def test_equal_numbers_are_no_range(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        show(["partition=shards", "partition.shards_per_client=1", *QUICK, "num_clients=10"]) == 0
    )
    assert "of 1 to 2 labels" in " ".join(capsys.readouterr().out.split())
    assert show(["partition=iid", *QUICK]) == 0
    assert re.search(r"of 10 labels$", " ".join(capsys.readouterr().out.split()).split(" who")[0])


def test_a_run_that_ended_early_has_no_rounds_left(capsys: pytest.CaptureFixture[str]) -> None:
    """Seed 0 reaches its target in round 1 of 4."""
    early = ["stop_at=0.0", "final_window=1"]
    run_jobs([*QUICK, *early, "seed=0"])
    capsys.readouterr()
    assert show([*QUICK, *early, "seed=0"]) == 0
    page = capsys.readouterr().out
    assert "reached            1/4" in page
    assert "0 to run of 4" in page
    assert "cost" not in page
    assert show(["-m", *QUICK, *early, "seed=0,1"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "4 to run of 8" in page
    (folder,) = Path("outputs/default").glob("*-s0-*")
    down = 4 * (read_summary(folder) or {})["totals"]["bytes_down"]
    assert f"cost about {show_bytes(down)} down, " in page


def test_a_run_that_diverged_in_round_1_tells_no_cost(capsys: pytest.CaptureFixture[str]) -> None:
    explodes = [*QUICK, "optimizer.lr=1e30"]
    run_jobs([*explodes, "seed=0"])
    capsys.readouterr()
    assert show(["-m", *explodes, "seed=0,1"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "diverged 0/4" in page
    assert "cost not known until one of the jobs is done" in page
