"""The tables that scripts/reproduction makes for the docs, on made-up runs."""

import re
from pathlib import Path

import pytest

from fedsim.results.frames import runs_frame
from fedsim.results.runs import read_runs
from scripts.reproduction import pages, tables
from scripts.reproduction.shipped import RESULTS, Shipped
from tests.test_report_archive import write_table_2


@pytest.fixture
def toy(tmp_path: Path) -> Shipped:
    """Return three runs of random selection and three of gpfl, seeds 0 to 2, in the setting 2SPC of
    GPFL's Table II. gpfl diverged at seed 1. The folder of the runs is called toy."""
    write_table_2(tmp_path)
    return Shipped({RESULTS / "toy": runs_frame(read_runs(tmp_path))})


@pytest.mark.parametrize(("folder", "is_judged"), [("toy", False), ("gpfl_table2_fmnist", True)])
def test_runs_are_judged_if_their_folder_has_the_name_of_a_preset(
    toy: Shipped, folder: str, is_judged: bool
) -> None:
    shipped = Shipped({RESULTS / folder: toy.frames[RESULTS / "toy"]})
    assert bool(shipped.judgements(RESULTS / folder)) == is_judged


def test_a_page_is_filled_again_to_the_same_text(toy: Shipped) -> None:
    page = "before\n<!-- table: accuracy toy -->\n| old |\n<!-- end of table -->\nafter\n"
    filled = pages.fill(page, toy)
    assert "| old |" not in filled
    assert re.search(r"\| random \| 0\.\d{3} \[", filled)
    assert pages.fill(filled, toy) == filled


def test_differences_are_means_over_common_seeds(toy: Shipped) -> None:
    table = pages.make_table(["differences", "toy"], toy)
    [row] = [line for line in table.splitlines() if line.startswith("| gpfl |")]
    runs = toy.frames[RESULTS / "toy"]  # the index is the seed
    accuracies = runs.pivot(columns="method", values="final_accuracy")
    gains = (accuracies["gpfl"] - accuracies["random"]).dropna()
    assert len(gains) == 2  # of three seeds, gpfl diverged at one
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
def test_a_table_of_a_report_has_the_columns_and_rows_that_the_marker_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], lines: list[str]
) -> None:
    (tmp_path / "toy").mkdir()
    text = 'run,time a round,"up, down"\nrandom,1 s,2 MB\ngpfl,3 s,4 MB\n'
    (tmp_path / "toy" / "costs.csv").write_text(text)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    table = pages.make_table(["from_report", "toy", "costs", *words], Shipped({}))
    assert table.splitlines() == lines


def test_a_table_becomes_csv() -> None:
    table = "| a | b |\n| --- | --- |\n| +0.1 [0, 1], p 1 | x |"
    assert pages.as_csv(table) == 'a,b\n"+0.1 [0, 1], p 1",x\n'
