"""Reports of what is rare and yet legal: paths in brackets, a screen that nobody reads, names with dots."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedsim.core.errors import FedsimError
from fedsim.report.__main__ import main
from fedsim.results.groups import sort_key
from fedsim.results.table import Table
from fedsim.running.process import tell
from fedsim.tracking.tables import tell_line
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


NASTY = (
    "\x1b[31mred\x1b[0m\x07",
    "two\nlines\r",
    "\x9b2J\u202ebidi",
    r"\input{/etc/passwd}",
    "$x^2$ & ~ # % _",
    "=HYPERLINK(1)",
    "@SUM(1)",
    "+1+cmd|' /C calc'!A0",
    "-2+a",
    "<script>alert(1)</script>",
    "![p](http://x)",
    r"a\|b | c",
)


def test_nasty_text_is_harmless_in_every_form() -> None:
    """Each string as title, header, cell and note."""
    for text in NASTY:
        table = Table("x", text, [text, "b"], [[text, "c"]], text)
        console = Console(file=io.StringIO(), width=200, force_terminal=False)
        console.print(table.rich())
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        for form in (shown, table.markdown(), table.latex(), table.csv()):
            assert all(c.isprintable() or c == "\n" for c in form), text
        rows = table.markdown().splitlines()[2:5]
        assert not re.search(r"<\w|(?<!\\)\]\(", table.markdown())
        assert [len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) for row in rows] == [3, 3, 3]
        cells = list(csv.reader(io.StringIO(table.csv())))
        assert [len(row) for row in cells] == [2, 2]
        assert not any(cell[:1] in "=@+-" for row in cells for cell in row)
        title, *body = table.latex().splitlines()
        assert title.startswith("% ")
        assert len(body) == 7
        assert "\\input" not in "".join(body)
        cell = body[4].removesuffix(r" & c \\")
        assert not re.search(r"(?<!\\)[$&%#_^~]", cell)
    signed = Table("x", "t", ["a"], [["+0.1 [-0.2, 0.3]"], ["-1e-5"], ["-"], ["-3 %"]])
    assert signed.csv() == 'a\n"+0.1 [-0.2, 0.3]"\n-1e-5\n-\n-3 %\n'


def test_nasty_text_in_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, text in enumerate(NASTY):
        run = write_run(tmp_path / str(number), [0.5, 0.6], [[0], [1]], choices={"selector": f"s{number}"})
        summary = json.loads((run / "summary.json").read_text())
        summary["choices"]["selector"] = text
        (run / "summary.json").write_text(json.dumps(summary))
    assert main([str(tmp_path), "--no-figures"]) == 0
    tell(FedsimError("".join(NASTY)))
    tell_line("".join(NASTY))
    printed = capsys.readouterr()
    assert all(c.isprintable() or c == "\n" for c in printed.out + printed.err)
    assert "<script>alert" not in (tmp_path / "report" / "report.html").read_text()


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
