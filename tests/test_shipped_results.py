"""The runs in docs/results give the tables that are shipped with them, and pages are up to date.

docs/results has a folder for each preset that we ran: archives of its runs (`*.parquet`), tables
made from them (`*.csv`), and a summary.json. Some pages have tables made from several folders
(scripts/reproduction/pages.py).
"""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedsim.results.archive import read_archive
from scripts.reproduction import pages
from scripts.reproduction.shipped import RESULTS
from tests.report_toys import make_report

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="the results are not in this copy")
ARCHIVES = sorted(RESULTS.glob("*/*.parquet"))
FOLDERS = [
    pytest.param(path, marks=() if path.name == "gpfl_rho_code" else pytest.mark.slow)
    for path in sorted({archive.parent for archive in ARCHIVES})
]
"""The folders of presets. One is tested by default, because all take some minutes of a core."""
PAGES = pages.pages() if RESULTS.is_dir() else []
TABLES_OF_ONE_FOLDER = ("overview", "pairs", "selections", "times")
"""Tables that are made from the runs of one folder. Tables of verdicts are not: their p-values are
corrected for the number of tests in all presets of a paper."""
DIVERGED = "fashion_mnist-shards_2-mlp-fedabc-s2-7803815e"
"""The folder name of the only shipped run that diverged: FedABC's selection with SCAFFOLD's
training. docs/benchmark_v0.md mentions it."""
MEGABYTE = 1e6


# --- runs ---


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_the_runs_of_a_folder_give_its_tables_and_its_summary(folder: Path, tmp_path: Path) -> None:
    archives = [str(path) for path in sorted(folder.glob("*.parquet"))]
    assert make_report([*archives, "--to", str(tmp_path), "--no-figures"]) == 0
    shipped_tables = [name for name in TABLES_OF_ONE_FOLDER if (folder / f"{name}.csv").is_file()]
    assert "overview" in shipped_tables
    for name in shipped_tables:
        table = f"{name}.csv"
        assert (tmp_path / table).read_bytes() == (folder / table).read_bytes(), name
    new_summary = json.loads((tmp_path / "summary.json").read_text())
    shipped_summary = json.loads((folder / "summary.json").read_text())
    assert new_summary["groups"] == shipped_summary["groups"]


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_run_is_undamaged_has_ended_and_names_its_engine_and_commit(archive: Path) -> None:
    damaged: list[str] = []  # `read_archive` adds the names of damaged runs
    runs = read_archive(archive, damaged)
    assert runs
    assert damaged == []
    for run in runs:
        assert run.status == ("diverged" if run.folder.name == DIVERGED else "done")
        assert run.summary["engine"]
        assert len(run.summary["revision"]["commit"]) == 40
        assert not run.summary["revision"]["dirty"]


def test_the_groups_of_all_summaries_have_seeds() -> None:
    """`made_by` is in some summaries. It says for each seed which commit ran it."""
    paths = sorted(RESULTS.glob("*/summary.json"))
    assert paths
    for path in paths:
        for group in json.loads(path.read_text())["groups"]:
            assert group["seeds"], path
            if "made_by" in group:
                assert set(group["made_by"]) == set(group["seeds"]), path


# --- sizes ---


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_results_stay_small() -> None:
    """Who clones the repository downloads them. They were 42 MB before the benchmark's version 1,
    which may add 12."""
    of_benchmark = size_of(RESULTS / "benchmark_v1")
    assert of_benchmark < 12 * MEGABYTE
    assert size_of(RESULTS) - of_benchmark < 42 * MEGABYTE


def test_the_source_distribution_has_the_pages_but_not_the_results() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    sdist = tomllib.loads(text)["tool"]["hatch"]["build"]["targets"]["sdist"]
    assert "/docs/results" in sdist["exclude"]
    size_of_pages = size_of(ROOT / "docs") - size_of(RESULTS)
    assert size_of_pages < 2 * MEGABYTE


# --- pages ---


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_markers_of_a_page_name_makers_and_folders_that_exist(page: Path) -> None:
    """A marker is `<!-- table: MAKER WORD ... -->`.

    A word with = is an option, such as `rows=4`. Any other is the name of a folder, which may
    continue with a colon and the name of a claim. After the maker `from_report`, the first word is
    a folder, the second a table in it, and the others are columns.
    """
    text = page.read_text(encoding="utf-8")
    markers = [marker["words"].split() for marker in pages.TABLE.finditer(text)]
    assert len(markers) == text.count("<!-- table:") == text.count("<!-- end of table -->")
    for maker, *words in markers:
        assert maker in pages.MAKERS
        if maker == "from_report":
            folder, table, *_columns = words
            assert (RESULTS / folder / f"{table}.csv").is_file(), words
            continue
        for word in words:
            folder, _, _claim = word.partition(":")
            if "=" not in word:
                assert (RESULTS / folder / "summary.json").is_file(), word


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_markers_of_a_page_are_filled(page: Path) -> None:
    """The maker `regret_and_accuracy` makes a sentence with Kendall's tau, and all others make a
    table."""
    for marker in pages.TABLE.finditer(page.read_text(encoding="utf-8")):
        maker = marker["words"].split()[0]
        expected = "tau" if maker == "regret_and_accuracy" else "| --- |"
        assert expected in marker[0], maker


def test_the_folder_of_tables_has_those_that_the_script_makes() -> None:
    assert {path.stem for path in (RESULTS / "tables").iterdir()} == set(pages.TABLE_FILES)
    makers = {words.split()[0] for words in pages.TABLE_FILES.values()}
    assert makers <= pages.MAKERS.keys()


@pytest.mark.slow
def test_pages_and_the_folder_of_tables_are_up_to_date() -> None:
    """It takes some minutes of a core, because the runs of all presets are judged."""
    assert run_script("pages", "--check") == ""


@pytest.mark.slow
def test_the_verdicts_of_all_folders_are_up_to_date() -> None:
    """For a verdict that changes, the script prints the former and "now ..."; for a claim that is
    no longer judged, "no claims any more"."""
    output = run_script("verdicts")
    assert "| all |" in output  # the table of totals, at the end
    assert ", now " not in output
    assert "no claims any more" not in output


def run_script(name: str, *words: str) -> str:
    """Run scripts/reproduction/NAME.py and return what it prints."""
    command = [sys.executable, "-m", f"scripts.reproduction.{name}", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
