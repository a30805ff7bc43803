"""Reports of what is rare and yet legal: paths in brackets, a screen that nobody reads, names with dots."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedsim.report.__main__ import main
from fedsim.report.groups import sort_key
from fedsim.report.tables.table import Table
from tests.report_toys import write_run


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"dataset": {"path": "/d/a"}}, {"dataset": {"path": "/d/b"}}),
        ({"engine": {"_target_": "a"}}, {"engine": {"_target_": "b"}}),
    ],
    ids=["path", "engine"],
)
def test_against_tells_groups_apart_whose_configs_compare_as_equal(first: Any, second: Any, tmp_path: Path) -> None:
    folder, earlier = tmp_path / "now", tmp_path / "earlier.json"
    for name, accuracy, changed in (("a", 0.9, first), ("b", 0.3, second)):
        for seed in range(2):
            write_run(folder / name, [accuracy] * 2, [[0], [1]], seed=seed, **changed)
    assert main([str(folder), "--no-figures"]) == 0
    earlier.write_bytes((folder / "report" / "summary.json").read_bytes())
    assert main([str(folder), "--no-figures", "--against", str(earlier)]) == 0
    rows = (folder / "report" / "against.csv").read_text().splitlines()[1:]
    assert [row.split(",")[2:4] for row in rows] == [["+0.0000", "0.0000"]] * 2


def test_cells_in_brackets_are_no_markup() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(Table("x", "of [b]", ["run[/b]"], [["path=/[mnist]/v1"], ["a[/b]c"]], "a [note]").rich())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(part in text for part in ("of [b]", "run[/b]", "path=/[mnist]/v1", "a[/b]c", "a [note]"))


def test_the_report_is_written_though_nobody_reads_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    write_run(tmp_path, [0.5, 0.6], [[0], [1]])
    monkeypatch.setattr("sys.stdout", Closed())
    main([str(tmp_path), "--no-figures"])
    assert (tmp_path / "report" / "report.html").is_file()


def test_numbers_in_scientific_notation_are_sorted_by_value() -> None:
    assert sorted(["lr=0.001", "lr=1e-05", "lr=0.1", "lr=1e+20"], key=sort_key) == [
        "lr=1e-05",
        "lr=0.001",
        "lr=0.1",
        "lr=1e+20",
    ]


def test_the_page_has_the_whole_name_of_its_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "alpha0.1", [0.5, 0.6], [[0], [1]])
    main([str(tmp_path / "alpha0.1"), "--no-figures"])
    assert "<title>alpha0.1" in (tmp_path / "alpha0.1" / "report" / "report.html").read_text()


def test_an_archive_may_have_any_name(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", [0.5, 0.6], [[0], [1]])
    assert main([str(tmp_path / "runs"), "--no-figures", "--archive", str(tmp_path / "runs.pq")]) == 0
    assert main([str(tmp_path / "runs.pq"), "--no-figures"]) == 0
    assert (tmp_path / "report" / "summary.json").is_file()
