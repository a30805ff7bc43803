"""scripts/reproduction/ship.py: which runs are put into docs/results, and what is kept of them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.commands.verify import differences
from fedsim.results import measures
from fedsim.results.archive import read_archive
from fedsim.results.runs import Run, read_runs
from scripts.reproduction import ship
from tests.report_toys import write_run
from tests.test_report_archive import write_table_2

MANY_RUNS = ship.MANY_RUNS[0]
ABOUT_TIME = ship.ABOUT_TIME[0]


# --- which runs ---


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of six runs. docs/results is a folder next to it."""
    monkeypatch.setattr(ship, "RESULTS", tmp_path / "docs" / "results")
    write_table_2(tmp_path / "outputs" / "toy")
    return tmp_path / "outputs" / "toy"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "docs" / "results" / "toy"


def edit_summary(run_folder: Path, old: str, new: str) -> None:
    path = run_folder / "summary.json"
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.filterwarnings("ignore")
def test_runs_of_changed_files_are_left_out(
    runs: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = next(runs.glob("0/*"))
    edit_summary(changed, '"dirty": false', '"dirty": true')
    ship.ship(runs)
    statuses = sorted(run.status for run in read_archive(target / "runs.parquet"))
    assert statuses == ["diverged", "done", "done", "done", "done"]
    assert f"left out {changed.name}: files differ from commit abc" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_a_folder_is_made_anew_with_the_tables_that_pages_name(
    runs: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target.mkdir(parents=True)
    (target / "old.csv").touch()
    (target.parents[1] / "page.md").write_text(
        "[a](results/toy/checkpoints.csv) [b](results/other/phases.csv) [c](results/toy/none.csv)\n"
        "<!-- table: from_report toy costs run -->\n<!-- end of table -->\n"
    )
    ship.ship(runs)
    always = {
        "claims.csv",
        "numbers.csv",
        "omnibus.csv",
        "overview.csv",
        "pairs.csv",
        "selections.csv",
    }
    named = {"checkpoints.csv", "costs.csv"}
    files = {path.name for path in target.iterdir()}
    assert files == {*always, *named, "runs.parquet", "summary.json"}
    message = "the pages name none.csv, which its report does not have"
    assert message in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_added_runs_replace_shipped_runs_of_the_same_folder(runs: Path, target: Path) -> None:
    new, again, *others = sorted(path.parent for path in runs.rglob("summary.json"))
    everything = {path.relative_to(runs) for path in (new, again, *others)}
    hidden = new.rename(runs.parent / "hidden")
    ship.ship(runs)
    for folder in others:
        shutil.rmtree(folder)
    hidden.rename(new)
    edit_summary(again, '"commit": "abc"', '"commit": "def"')
    ship.ship(runs, add=True)
    commits = {run.folder: run.commit for run in read_archive(target / "runs.parquet")}
    assert commits.keys() == everything
    assert [folder for folder, commit in commits.items() if commit == "def"] == [
        again.relative_to(runs)
    ]


def toy_run(name: str, commit: str = "abc") -> Run:
    summary = {"status": "done", "revision": {"commit": commit}}
    return Run(Path(name), {"seed": 0}, summary)


def test_new_runs_of_a_large_folder_get_an_archive_of_their_own() -> None:
    shipped = {"runs.parquet": [toy_run("a"), toy_run("b")]}
    new = [toy_run("b", "def"), toy_run("c")]
    archives = ship.in_archives(new, shipped, apart=True)
    names = {file: [str(run.folder) for run in runs] for file, runs in archives.items()}
    assert names == {"runs.parquet": ["a", "b"], "runs_2.parquet": ["c"]}
    assert archives["runs.parquet"][1].commit == "def"


def test_shipped_runs_do_not_tell_where_data_lay() -> None:
    config = {
        "dataset": {"path": "/home/someone/cifar10", "files": ["/data/a.npz", "b/c.npz"]},
        "num_rounds": 3,
    }
    run = ship.portable(Run(Path("toy"), config, {"data": {"file": "/data/a.npz"}}))
    assert run.config == {
        "dataset": {"path": "cifar10", "files": ["a.npz", "b/c.npz"]},
        "num_rounds": 3,
    }
    assert run.summary == {"data": {"file": "a.npz"}}


# --- what is kept of a run ---


@pytest.fixture
def thinned(tmp_path: Path) -> Callable[[str], tuple[Run, Run]]:
    """Ship a run of 13 rounds in a folder. Return it before, and thinned."""
    rounds = np.arange(1, 14)
    columns: dict[str, Any] = {
        "seconds_train": [1.0, *range(2, 13), 20.0],
        "test_loss": [1.0] * 13,
        "wall_seconds": rounds.tolist(),
        "client_accuracy_worst_tenth": (rounds / 100).tolist(),
    }
    write_run(tmp_path, [0.5] * 13, [[1]] * 13, columns=columns, summary={"start_up_rounds": 1})
    [run] = read_runs(tmp_path)

    def make(folder: str) -> tuple[Run, Run]:
        return run, ship.thin(run, folder)

    return make


Thinned = Callable[[str], tuple[Run, Run]]


@pytest.mark.parametrize("folder", ["toy", MANY_RUNS, ABOUT_TIME])
def test_losses_and_wall_times_are_left_out_and_verify_compares_the_rest(
    thinned: Thinned, folder: str
) -> None:
    run, thin = thinned(folder)
    assert {"test_loss", "wall_seconds"} & thin.records[0].keys() == set()
    assert thin.records[0]["bytes_up"] == run.records[0]["bytes_up"]
    assert differences(thin, run) == []


def test_seconds_become_means_after_the_start_up_but_for_the_slowest_round(
    thinned: Thinned,
) -> None:
    run, thin = thinned("toy")
    mean = sum(range(2, 13)) / 11
    assert [record["seconds_train"] for record in thin.records] == [1.0, *[mean] * 11, 20.0]
    for measure in (measures.total_cost, measures.start_up_cost, measures.cost_a_round):
        assert measure(thin, ["seconds_train"]) == measure(run, ["seconds_train"])


def test_seconds_keep_the_sum_of_the_first_200_rounds() -> None:
    seconds = np.random.default_rng(0).random(300)
    smoothed = ship.smooth(seconds, 20)
    for part in (slice(20), slice(200), slice(300)):
        assert smoothed[part].sum() == pytest.approx(seconds[part].sum(), rel=1e-12)
    assert smoothed.max() == seconds.max()
    assert len(np.unique(smoothed)) == 4  # three means, and the slowest round


def test_folders_about_time_keep_the_seconds_of_each_round(thinned: Thinned) -> None:
    run, thin = thinned(ABOUT_TIME)
    np.testing.assert_array_equal(thin.columns["seconds_train"], run.columns["seconds_train"])


def test_large_folders_keep_the_worst_tenth_in_the_rounds_of_the_final_accuracy(
    thinned: Thinned,
) -> None:
    run, thin = thinned(MANY_RUNS)
    assert "seconds_train" not in thin.records[0]
    worst = [record["client_accuracy_worst_tenth"] for record in thin.records]
    assert worst == [None, None, *(round / 100 for round in range(3, 14))]  # the last 11 of 13
    before, after = (measures.client_accuracy(one, "worst_tenth") for one in (run, thin))
    assert before == after
