"""Reports of damaged records, which are left out with a line each, and of texts that are rare and yet legal."""

import csv
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from fedsim.core.errors import FedsimError
from fedsim.results.files import CLIENTS, CONFIG, METRICS, SUMMARY, read_metrics, read_summary
from fedsim.results.runs import read_runs
from fedsim.results.table import Table
from fedsim.running.process import tell
from fedsim.tracking.tables import tell_line
from tests.report_toys import make_report, only_run, write_run


def test_damaged_runs_are_left_out_with_a_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [(SUMMARY, text, "summary.json is not that of a run") for text in ("{}", '"done"', "", "[" * 100_000)]
    cases += [(METRICS, text, "metrics.jsonl holds 0 of 1 rounds") for text in ('{"round": 1, "sel', "5\n")]
    cases += [(METRICS, '{"round": 1}\n', "metrics.jsonl holds lines that are not records of rounds")]
    cases += [(CONFIG, text, "config.yaml is not that of a run") for text in ("- 1", "seed: x")]
    cases += [(CONFIG, "{", "config.yaml cannot be read")]
    damaged = [write_run(tmp_path / str(number), [0.5], [[0]]) for number in range(len(cases))]
    for folder, (file, text, _) in zip(damaged, cases, strict=True):
        (folder / file).write_text(text)
        assert (read_summary(folder) is None) == (file == SUMMARY)
    assert make_report([str(tmp_path), "--no-figures"]) == 3
    told = capsys.readouterr().err
    for folder, (_, _, reason) in zip(damaged, cases, strict=True):
        assert f"left out {folder}: {reason}" in told
    assert "no finished run below it" in " ".join(told.split())
    write_run(tmp_path / "sound", [0.5], [[0]])
    assert [run.folder.parent.name for run in read_runs(tmp_path)] == ["sound"]


def test_what_is_torn_or_damaged_beside_the_records_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path, [0.5], [[0]])
    with (folder / METRICS).open("a") as file:
        file.write('{"round": 2, "selec')
    (folder / CLIENTS).write_bytes(b"PK damaged")
    assert [record["round"] for record in read_metrics(folder)] == [1]
    assert only_run(tmp_path).client_accuracies is None
    assert CLIENTS in capsys.readouterr().err


NASTY = (
    *(
        "a [b]",
        "run[/b]",
        "path=/[mnist]/v1",
        "\x1b[31mred\x1b[0m\x07",
        "two\nlines\r",
        "\x9b2J\u202ebidi",
        r"\input{/etc/passwd}",
        r"$\frac{$ & ~ # % _",
    ),
    *("=HYPERLINK(1)", "@SUM(1)", "+1+cmd|' /C calc'!A0", "-2+a", "<script>alert(1)</script>", "![p](http://x)"),
    r"a\|b | c",
)


def test_nasty_text_is_harmless_in_every_form() -> None:
    """Each string as title, header, cell and note."""
    for text in NASTY:
        table = Table("x", text, [text, "b", "c"], [[text, "c", "d"]], text)
        console = Console(file=io.StringIO(), width=200, force_terminal=False)
        console.print(table.rich())
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert "[" not in text or "\x1b" in text or shown.count(text) == 4, "cells in brackets are no markup"
        for form in (shown, table.markdown(), table.latex(), table.csv()):
            assert all(c.isprintable() or c == "\n" for c in form), text
        rows = table.markdown().splitlines()[2:5]
        assert not re.search(r"<\w|(?<!\\)\]\(", table.markdown())
        assert [len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) for row in rows] == [4, 4, 4]
        cells = list(csv.reader(io.StringIO(table.csv())))
        assert [len(row) for row in cells] == [3, 3]
        assert not any(cell[:1] in "=@+-" for row in cells for cell in row)
        title, begin, *body = table.latex().splitlines()
        assert (title[:2], begin, len(body)) == ("% ", r"\begin{tabular}{llr}", 6)
        assert "\\input" not in "".join(body)
        assert not re.search(r"(?<!\\)[$&%#_^~]", body[3].removesuffix(r" & c & d \\"))
    signed = Table("x", "t", ["a"], [["+0.1 [-0.2, 0.3]"], ["-1e-5"], ["-"], ["-3 %"], [" =1"]])
    assert signed.csv() == 'a\n"+0.1 [-0.2, 0.3]"\n-1e-5\n-\n-3 %\n\' =1\n'


def test_escapes_and_empty_columns_which_files_for_programs_keep() -> None:
    table = Table("t", "T", ["", "a|b", "a", "c_d"], [["", "50 %", "-", "1 ± 2"], ["", "y", "", "2"]], "note")
    assert table.shown.header == ["a|b", "c_d"]
    assert r"| a\|b | c_d |" in table.markdown()
    assert r"a|b & c\_d \\" in table.latex()
    assert r"50 \% & 1 $\pm$ 2 \\" in table.latex()
    assert len(table.rich().columns) == 2
    assert table.csv().splitlines()[0] == ",a|b,a,c_d"


def test_nasty_text_in_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, text in enumerate(NASTY):
        run = write_run(tmp_path / str(number), [0.5, 0.6], [[0], [1]], choices={"selector": f"s{number}"})
        summary = json.loads((run / SUMMARY).read_text())
        summary["choices"]["selector"] = text
        (run / SUMMARY).write_text(json.dumps(summary))
    assert make_report([str(tmp_path)]) == 0
    tell(FedsimError("".join(NASTY)))
    tell_line("".join(NASTY))
    printed, page = capsys.readouterr(), (tmp_path / "report" / "report.html").read_text()
    assert all(c.isprintable() or c == "\n" for c in printed.out + printed.err + page)
    assert "<script>alert" not in page


def test_the_report_is_written_though_nobody_reads_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    write_run(tmp_path / "alpha0.1", [0.5, 0.6], [[0], [1]])
    monkeypatch.setattr("sys.stdout", Closed())
    make_report([str(tmp_path / "alpha0.1"), "--no-figures"])
    text = (tmp_path / "alpha0.1" / "report" / "report.html").read_text()
    assert "<title>alpha0.1" in text  # the whole name of its folder
