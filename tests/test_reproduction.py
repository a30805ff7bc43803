"""The shipped runs give the shipped tables, and the pages of the reproduction hold what the scripts
make of them."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from fedsim.commands.verify import differences
from fedsim.results import measures
from fedsim.results.archive import read_archive, write_archive
from fedsim.results.groups import group_runs
from fedsim.results.measures import values_by_seed
from fedsim.results.runs import Run, read_runs
from scripts.reproduction import pages as reproduction
from scripts.reproduction import ship as ship_results
from scripts.reproduction import tables as reproduction_tables
from scripts.reproduction.shipped import RESULTS, Shipped
from tests.report_toys import make_report
from tests.test_report_archive import published_runs

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="the results are not in this copy")
ARCHIVES = sorted(RESULTS.glob("*/*.parquet"))
SOME_FOLDERS = [
    pytest.param(path, marks=() if path.name == "gpfl_rho_code" else pytest.mark.slow)
    for path in dict.fromkeys(archive.parent for archive in ARCHIVES)
]
"""One by default; all of them take some minutes of a core."""
PAGES = reproduction.pages() if RESULTS.is_dir() else []
FROM_RUNS_ALONE = ("overview", "pairs", "selections", "times")
"""Tables without verdicts, whose corrections are over all presets of a paper."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shipped", SOME_FOLDERS, ids=lambda path: path.name)
def test_the_shipped_runs_of_a_preset_give_its_shipped_tables(
    shipped: Path, tmp_path: Path
) -> None:
    assert (
        make_report(
            [*map(str, sorted(shipped.glob("*.parquet"))), "--to", str(tmp_path), "--no-figures"]
        )
        == 0
    )
    for name in FROM_RUNS_ALONE:
        if name == "overview" or (shipped / f"{name}.csv").is_file():
            assert (tmp_path / f"{name}.csv").read_bytes() == (
                shipped / f"{name}.csv"
            ).read_bytes(), name
    made, recorded = (
        json.loads((folder / "summary.json").read_text())["groups"]
        for folder in (tmp_path, shipped)
    )
    assert made == recorded


def test_every_shipped_run_names_engine_and_commit() -> None:
    diverged = (
        "fashion_mnist-shards_2-mlp-fedabc-s2-7803815e"  # with SCAFFOLD: docs/benchmark.md says so
    )
    for archive in ARCHIVES:
        for run in read_archive(archive):
            revision, status = (
                run.summary["revision"],
                "diverged" if run.folder.name == diverged else "done",
            )
            found = (
                run.status,
                bool(run.summary["engine"]),
                len(revision["commit"]),
                revision["dirty"],
            )
            assert found == (status, True, 40, False), archive


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_markers_name_makers_and_results_and_are_filled(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    tables = reproduction.tables_of(page)
    assert len(tables) == text.count("<!-- table:") == text.count("<!-- end of table -->")
    for name, *words in tables:
        assert name in reproduction.MAKERS
        if name == "from_report":
            assert (RESULTS / words[0] / f"{words[1]}.csv").is_file(), words
            words = words[:1]
        for folder in (word.partition(":")[0] for word in words if "=" not in word):
            assert any(
                (RESULTS / folder / file).is_file() for file in ("summary.json", "runs.parquet")
            ), folder
    for found in reproduction.TABLE.finditer(text):
        assert ("tau" if "regret" in found["words"] else "| --- |") in found[0], found["words"]


def test_tables_that_pages_link_to_are_made_and_written_as_csv() -> None:
    assert {path.stem for path in (RESULTS / "tables").iterdir()} == set(reproduction.TABLE_FILES)
    assert all(
        words.split()[0] in reproduction.MAKERS for words in reproduction.TABLE_FILES.values()
    )
    assert (
        reproduction._csv("| a | b |\n| --- | --- |\n| +0.1 [0, 1], p 1 | x |")
        == 'a,b\n"+0.1 [0, 1], p 1",x\n'
    )


@pytest.mark.slow
@pytest.mark.parametrize("words", [["pages", "--check"], ["verdicts"]], ids=["pages", "verdicts"])
def test_pages_and_shipped_verdicts_are_up_to_date(words: list[str]) -> None:
    """Some minutes of a core: all presets with results are composed and judged."""
    module = [sys.executable, "-m", f"scripts.reproduction.{words[0]}", *words[1:]]
    made = subprocess.run(module, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [
        line
        for line in made.stdout.splitlines()
        if ", now " in line or "no claims any more" in line
    ] == []
    assert words == ["verdicts"] or made.stdout == ""


def test_all_shipped_summaries_are_read() -> None:
    for path in sorted(RESULTS.glob("*/summary.json")):
        for group in json.loads(path.read_text())["groups"]:
            assert group["seeds"], path
            assert set(group.get("made_by", group["seeds"])) == set(group["seeds"]), path


@pytest.fixture
def toy(tmp_path: Path) -> Shipped:
    published_runs(tmp_path)
    return Shipped({RESULTS / "toy": group_runs(read_runs(tmp_path))})


def test_a_page_is_filled_again_to_the_same_text(toy: Shipped) -> None:
    """And runs in a folder that is not of a preset are not judged: somebody set them aside."""
    assert toy.groups
    assert toy.judged == {}
    page = "before\n<!-- table: accuracy toy -->\n| old |\n<!-- end of table -->\nafter\n"
    once = reproduction.fill(page, toy)
    assert "| old |" not in once
    assert re.search(r"\| random \| \.?\d?\.\d{3} \[", once)
    assert reproduction.fill(once, toy) == once
    table = reproduction.make_table(["differences", "toy"], toy)
    (gpfl,) = [line for line in table.splitlines() if line.startswith("| gpfl |")]
    final = {
        g.choices["selector"]: values_by_seed(g, "final_accuracy")
        for g in toy.groups[RESULTS / "toy"]
    }
    common = [
        final["gpfl"][seed] - final["random"][seed] for seed in final["gpfl"]
    ]  # gpfl's second run diverged
    assert f"{sum(common) / len(common):+.3f} [" in gpfl
    assert "| random |" not in table


def test_a_table_of_a_report_has_the_columns_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "costs.csv").write_text(
        'run,time a round,"up, down"\nrandom,1 s,2 MB\ngpfl,3 s,4 MB\n'
    )
    monkeypatch.setattr(reproduction_tables, "RESULTS", tmp_path)
    whole = reproduction.make_table(["from_report", "toy", "costs"], Shipped({}))
    assert whole.splitlines()[0] == "| run | time a round | up, down |"
    assert len(whole.splitlines()) == 4
    some = reproduction.make_table(
        ["from_report", "toy", "costs", "time_a_round", "run", "rows=1"], Shipped({})
    )
    assert some.splitlines() == ["| time a round | run |", "| --- | --- |", "| 1 s | random |"]


@pytest.mark.filterwarnings("ignore")
def test_shipped_folders_hold_whole_runs_of_commits_and_what_pages_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docs, runs = tmp_path / "docs", tmp_path / "outputs" / "toy"
    published_runs(runs)
    changed = next(runs.glob("0/**/summary.json"))
    changed.write_text(changed.read_text().replace('"dirty": false', '"dirty": true'))
    (docs / "results" / "toy").mkdir(parents=True)
    (docs / "results" / "toy" / "old.csv").touch()
    (docs / "page.md").write_text(
        "[a](results/toy/checkpoints.csv) [b](results/other/phases.csv) [c](results/toy/none.csv)\n"
        "<!-- table: from_report toy costs run -->\n<!-- end of table -->\n"
    )
    monkeypatch.setattr(ship_results, "RESULTS", docs / "results")
    ship_results.ship_all([runs])
    kept = sorted(path.name for path in (docs / "results" / "toy").iterdir())
    tables = ["checkpoints", "claims", "numbers", "omnibus", "costs", "overview", "selections"]
    assert kept == sorted([*(f"{name}.csv" for name in tables), "runs.parquet", "summary.json"])
    written = capsys.readouterr()
    assert [line for line in written.out.splitlines() if "left out" in line] == [
        "left out random-digits-iid-mlp-0-0.1: done, commit abc, changed files: True"
    ]
    assert "the pages name none.csv, which its report does not have" in written.err
    shipped = read_archive(docs / "results" / "toy" / "runs.parquet")
    assert sorted(run.status for run in shipped) == ["diverged", "done", "done", "done", "done"]


def test_of_many_runs_less_is_shipped_of_each_round(tmp_path: Path) -> None:
    """The thin archive keeps the final accuracies, and `fedsim verify` compares what it has."""
    record = {"selected": [1], "coverage": 0.5, "participation_ratio": 0.5, "test_accuracy": 0.5}
    record |= {"bytes_down": 0, "bytes_up": 8, "seconds_train": 2.0, "test_loss": 1.0}
    rows = [{"round": r, **record, "client_accuracy_worst_tenth": r / 100} for r in range(1, 14)]
    config = {"seed": 0, "num_clients": 2, "num_rounds": 13}
    summary = {
        "status": "done",
        "choices": {},
        "seed": 0,
        "rounds": 13,
        "totals": {"bytes_down": 0, "bytes_up": 104},
    }
    summary |= {"last_accuracy": 0.5, "best_accuracy": 0.5, "coverage": 0.5}
    whole = Run(tmp_path / "run", config, summary, {"rows": pa.Table.from_pylist(rows)})
    write_archive([ship_results.thin(whole)], tmp_path, tmp_path / "thin.parquet")
    [thin] = read_archive(tmp_path / "thin.parquet")
    assert [one["client_accuracy_worst_tenth"] for one in thin.records] == [
        None,
        None,
        *(r / 100 for r in range(3, 14)),
    ]
    assert thin.records[2] == {
        k: v for k, v in rows[2].items() if k not in ("seconds_train", "test_loss")
    }
    assert measures.client_accuracy(thin, "worst_tenth") == measures.client_accuracy(
        whole, "worst_tenth"
    )
    assert differences(thin, whole) == []
    rows[7]["bytes_up"] = 9
    told = differences(thin, replace(whole, archived={"rows": pa.Table.from_pylist(rows)}))
    assert told[0] == "differs from round 8 on: bytes_up 8, now 9"


def test_shipped_runs_do_not_say_where_data_lay() -> None:
    config = {
        "dataset": {"path": "/home/someone/cifar10", "files": ["/data/a.npz", "b/c.npz"]},
        "num_rounds": 3,
    }
    run = ship_results.portable(
        Run(Path("toy"), config, {"status": "done", "data": {"file": "/data/a.npz"}})
    )
    assert run.config == {
        "dataset": {"path": "cifar10", "files": ["a.npz", "b/c.npz"]},
        "num_rounds": 3,
    }
    assert run.summary == {"status": "done", "data": {"file": "a.npz"}}


@pytest.mark.filterwarnings("ignore")
def test_runs_can_be_added_to_shipped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of another machine: the folder has a new run and another result of a shipped one,
    not the rest."""
    runs, archive = (
        tmp_path / "outputs" / "toy",
        tmp_path / "docs" / "results" / "toy" / "runs.parquet",
    )
    published_runs(runs)
    monkeypatch.setattr(ship_results, "RESULTS", archive.parents[1])
    summaries = sorted(runs.rglob("summary.json"))
    new, again, *others = [path.parent for path in summaries]
    hidden = new.rename(tmp_path / "new")
    ship_results.ship_all([runs])
    assert len(read_archive(archive)) == len(summaries) - 1
    for folder in others:
        shutil.rmtree(folder)
    hidden.rename(new)
    summary = again / "summary.json"
    summary.write_text(summary.read_text().replace('"commit": "abc"', '"commit": "def"'))
    ship_results.ship_all([runs], add=True)
    names = {run.folder.as_posix(): run.commit for run in read_archive(archive)}
    assert names.keys() == {path.parent.relative_to(runs).as_posix() for path in summaries}
    assert [name for name, commit in names.items() if commit == "def"] == [
        again.relative_to(runs).as_posix()
    ]
    monkeypatch.setattr(
        ship_results, "THIN", ("toy",)
    )  # new ones beside them; the file of the others stays as it is
    once, _ = archive.read_bytes(), new.parent.rename(runs / "6")
    summary.write_text(summary.read_text().replace('"commit": "def"', '"commit": null'))
    ship_results.ship_all([runs], add=True)
    assert [run.folder.name for run in read_archive(archive.with_name("runs_2.parquet"))] == [
        new.name
    ]
    ship_results.ship_all([runs], add=True)
    assert archive.read_bytes() == once
