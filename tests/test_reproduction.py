"""docs/results has the runs that give its tables, and the pages have the generated tables."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedsim.results.archive import read_archive
from fedsim.results.frames import runs_frame
from fedsim.results.runs import read_runs
from scripts.reproduction import pages, tables
from scripts.reproduction.shipped import RESULTS, Shipped
from tests.report_toys import make_report
from tests.test_report_archive import write_table_2

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="the results are not in this copy")
ARCHIVES = sorted(RESULTS.glob("*/*.parquet"))
FOLDERS = [
    pytest.param(path, marks=() if path.name == "gpfl_rho_code" else pytest.mark.slow)
    for path in sorted({archive.parent for archive in ARCHIVES})
]
"""One by default. All of them take some minutes of a core."""
PAGES = pages.pages() if RESULTS.is_dir() else []
WITHOUT_VERDICTS = ("overview", "pairs", "selections", "times")
"""Tables that one folder decides. Verdicts are corrected over all presets of a paper."""
DIVERGED = "fashion_mnist-shards_2-mlp-fedabc-s2-7803815e"
"""The one shipped run that diverged, with SCAFFOLD: docs/benchmark_v0.md says so."""


# --- shipped runs ---


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_the_shipped_runs_of_a_preset_give_its_shipped_tables(folder: Path, tmp_path: Path) -> None:
    archives = [str(path) for path in sorted(folder.glob("*.parquet"))]
    assert make_report([*archives, "--to", str(tmp_path), "--no-figures"]) == 0
    for name in WITHOUT_VERDICTS:
        shipped = folder / f"{name}.csv"
        if shipped.is_file():
            assert (tmp_path / f"{name}.csv").read_bytes() == shipped.read_bytes(), name
    made, shipped = (json.loads((f / "summary.json").read_text()) for f in (tmp_path, folder))
    assert made["groups"] == shipped["groups"]


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_shipped_run_is_sound_has_ended_and_names_its_engine_and_commit(
    archive: Path,
) -> None:
    damaged: list[str] = []
    runs = read_archive(archive, damaged)
    assert runs
    assert damaged == []
    for run in runs:
        assert run.status == ("diverged" if run.folder.name == DIVERGED else "done")
        assert run.summary["engine"]
        assert len(run.summary["revision"]["commit"]) == 40
        assert not run.summary["revision"]["dirty"]


def test_all_shipped_summaries_have_seeds() -> None:
    for path in sorted(RESULTS.glob("*/summary.json")):
        for group in json.loads(path.read_text())["groups"]:
            assert group["seeds"], path
            assert set(group.get("made_by", group["seeds"])) == set(group["seeds"]), path


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_shipped_results_stay_small() -> None:
    assert size_of(RESULTS) < 45e6


def test_the_source_distribution_has_no_shipped_results() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    sdist = tomllib.loads(text)["tool"]["hatch"]["build"]["targets"]["sdist"]
    assert "/docs/results" in sdist["exclude"]
    assert size_of(ROOT / "docs") - size_of(RESULTS) < 2e6


# --- pages ---


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_markers_of_a_page_name_makers_and_results_and_are_filled(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    markers = pages.tables_of(page)
    assert len(markers) == text.count("<!-- table:") == text.count("<!-- end of table -->")
    for maker, *words in markers:
        assert maker in pages.MAKERS
        if maker == "from_report":
            assert (RESULTS / words[0] / f"{words[1]}.csv").is_file(), words
            words = words[:1]
        folders = [word.partition(":")[0] for word in words if "=" not in word]
        for folder in folders:
            assert (RESULTS / folder / "summary.json").is_file(), folder
    for filled in pages.TABLE.finditer(text):
        assert ("tau" if "regret" in filled["words"] else "| --- |") in filled[0], filled["words"]


def test_tables_that_pages_link_to_are_written() -> None:
    assert {path.stem for path in (RESULTS / "tables").iterdir()} == set(pages.TABLE_FILES)
    assert {words.split()[0] for words in pages.TABLE_FILES.values()} <= pages.MAKERS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("words", [["pages", "--check"], ["verdicts"]], ids=["pages", "verdicts"])
def test_pages_and_shipped_verdicts_are_up_to_date(words: list[str]) -> None:
    """It takes some minutes of a core, because all presets with results are composed and judged."""
    command = [sys.executable, "-m", f"scripts.reproduction.{words[0]}", *words[1:]]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for message in (", now ", "no claims any more", "not up to date"):
        assert message not in output


# --- making tables ---


@pytest.fixture
def toy(tmp_path: Path) -> Shipped:
    write_table_2(tmp_path)
    return Shipped({RESULTS / "toy": runs_frame(read_runs(tmp_path))})


def test_runs_in_a_folder_that_is_not_of_a_preset_are_not_judged(toy: Shipped) -> None:
    assert toy.frames
    assert toy.judged == {}


def test_a_page_is_filled_again_to_the_same_text(toy: Shipped) -> None:
    page = "before\n<!-- table: accuracy toy -->\n| old |\n<!-- end of table -->\nafter\n"
    filled = pages.fill(page, toy)
    assert "| old |" not in filled
    assert re.search(r"\| random \| \.?\d?\.\d{3} \[", filled)
    assert pages.fill(filled, toy) == filled


def test_differences_are_means_over_common_seeds(toy: Shipped) -> None:
    table = pages.make_table(["differences", "toy"], toy)
    [row] = [line for line in table.splitlines() if line.startswith("| gpfl |")]
    final = toy.frames[RESULTS / "toy"].pivot(columns="method", values="final_accuracy")
    gains = (final["gpfl"] - final["random"]).dropna()
    assert len(gains) == 2  # gpfl's second run diverged
    assert f"{gains.mean():+.3f} [" in row
    assert "| random |" not in table


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            [],
            [
                "| run | time a round | up, down |",
                "| --- | --- | --- |",
                "| random | 1 s | 2 MB |",
                "| gpfl | 3 s | 4 MB |",
            ],
        ),
        (
            ["time_a_round", "run", "rows=1"],
            ["| time a round | run |", "| --- | --- |", "| 1 s | random |"],
        ),
    ],
)
def test_a_table_of_a_report_has_the_columns_and_rows_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], lines: list[str]
) -> None:
    (tmp_path / "toy").mkdir()
    text = 'run,time a round,"up, down"\nrandom,1 s,2 MB\ngpfl,3 s,4 MB\n'
    (tmp_path / "toy" / "costs.csv").write_text(text)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    table = pages.make_table(["from_report", "toy", "costs", *words], Shipped({}))
    assert table.splitlines() == lines


def test_a_table_is_written_as_csv() -> None:
    table = "| a | b |\n| --- | --- |\n| +0.1 [0, 1], p 1 | x |"
    assert pages.as_csv(table) == 'a,b\n"+0.1 [0, 1], p 1",x\n'
