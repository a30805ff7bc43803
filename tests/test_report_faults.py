"""Reports of damaged records, which are left out with a line each, and of texts that are rare and
yet legal."""

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from fedsim.core.disk import read_regular, write_files
from fedsim.core.errors import FedsimError
from fedsim.report.drawing import save, style
from fedsim.report.figures import all_plots
from fedsim.report.table import Table, make_frame
from fedsim.results.files import CLIENTS, IMPERFECT, PARTITION
from fedsim.results.reading import CONFIG, METRICS, SUMMARY, read_metrics
from fedsim.results.runs import Run, read_runs
from fedsim.running.exits import print_error
from fedsim.tracking.tables import print_line
from tests.report_toys import (
    drawn_runs,
    looks_of,
    make_report,
    only_run,
    two_methods,
    write_partition,
    write_run,
)

OF_A_RECORD = {
    "round": 1,
    "selected": [0],
    "test_accuracy": 0.5,
    "participation_ratio": 0.25,
    "coverage": 0.25,
}
OF_A_RECORD |= {"bytes_down": 10, "bytes_up": 10}


def of_three_rounds(change: Callable[[list[str]], list[str]]) -> str:
    lines = [json.dumps(OF_A_RECORD | {"round": round}) for round in (1, 2, 3)]
    return "\n".join(change(lines)) + "\n"


def with_value(name: str, value: object) -> str:
    return of_three_rounds(
        lambda lines: [lines[0], json.dumps(OF_A_RECORD | {"round": 2, name: value}), lines[2]]
    )


NO_SUMMARY, NO_CONFIG = "summary.json is not that of a run", "config.yaml is not that of a run"
NO_RECORD = "metrics.jsonl holds lines that are not records of rounds"
DAMAGED = [
    *(
        (SUMMARY, text, NO_SUMMARY)
        for text in ("{}", '"done"', '{"status": 1}', '{"status": "done"}')
    ),
    *((SUMMARY, text, "summary.json is no JSON") for text in ("", "[" * 100_000)),
    *(
        (CONFIG, text, NO_CONFIG)
        for text in ("- 1", "seed: x", "{seed: true, num_clients: 4, num_rounds: 3}")
    ),
    *(
        (CONFIG, f"{{seed: 0, num_clients: 4, num_rounds: 3, {text}}}", NO_CONFIG)
        for text in ("cohort_size: [1]",)
    ),
    *(
        (CONFIG, text, "config.yaml is no YAML")
        for text in ("{", "[" * 100_000, "a: &a [*a]", "a: &a {}\nb: *a")
    ),
    *(
        (CONFIG, text, "config.yaml holds what no run writes")
        for text in ("1: 2", "a: 2020-01-01", "a: .inf", "!!set {a}")
    ),
    (METRICS, "", "metrics.jsonl holds 0 of 3 rounds"),
    (METRICS, of_three_rounds(lambda lines: ["{}"] * 3), NO_RECORD),
    (METRICS, of_three_rounds(lambda lines: lines[:2]), "metrics.jsonl holds 2 of 3 rounds"),
    (
        METRICS,
        of_three_rounds(lambda lines: [*lines, "5"]),
        "metrics.jsonl, line 4 is not a record",
    ),
    (
        METRICS,
        of_three_rounds(lambda lines: [*lines, lines[0][:9]]),
        "metrics.jsonl, line 4 is not a record",
    ),
    (
        METRICS,
        of_three_rounds(lambda lines: ["[" * 100_000, *lines]),
        "metrics.jsonl, line 1 is not a record",
    ),
    (
        METRICS,
        of_three_rounds(lambda lines: lines[::-1]),
        "metrics.jsonl has round 3 where round 1 belongs",
    ),
    (
        METRICS,
        of_three_rounds(lambda lines: [lines[0], *lines]),
        "metrics.jsonl has round 1 where round 2 belongs",
    ),
    (
        METRICS,
        of_three_rounds(lambda lines: [lines[0], lines[0], lines[2]]),
        "has round 1 where round 2 belongs",
    ),
    (
        METRICS,
        of_three_rounds(lambda lines: ['{"round": 1}', *lines[1:]]),
        f"{NO_RECORD} (selected)",
    ),
    *(
        (METRICS, with_value("test_accuracy", value), f"{NO_RECORD} (test_accuracy)")
        for value in ("0.5", True, [0.5])
    ),
    *(
        (METRICS, with_value("selected", value), f"{NO_RECORD} (selected)")
        for value in (None, 0, ["0"], [0.5], [[0]])
    ),
    (METRICS, with_value("bytes_up", 10.5), f"{NO_RECORD} (bytes_up)"),
    (METRICS, with_value("bytes_up", 10**400), "metrics.jsonl holds numbers that no run writes"),
    (METRICS, with_value("selected", [2**40]), "metrics.jsonl holds numbers that no run writes"),
    *(
        (METRICS, with_value("selected", [id]), "metrics.jsonl names clients that")
        for id in (-1, 4, 2**31 - 1)
    ),
    *(
        (METRICS, with_value("test_accuracy", value), "test_accuracy that is out of range")
        for value in (49.65, -0.1)
    ),
    (METRICS, with_value("test_accuracy", float("inf")), "test_accuracy that is out of range"),
    (METRICS, with_value("coverage", float("nan")), "coverage that is out of range"),
    (
        METRICS,
        with_value("test_accuracy", 0.6),
        "summary.json has final_accuracy=0.5, and its rounds 0.53",
    ),
    (
        METRICS,
        with_value("bytes_down", 11),
        "summary.json has totals.bytes_down=30, and its rounds 31",
    ),
]


def test_damaged_runs_are_left_out_with_a_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each with the path and the reason, and the others are reported."""
    damaged = [
        write_run(tmp_path / str(number), [0.5] * 3, [[0]] * 3) for number in range(len(DAMAGED))
    ]
    for folder, (file, text, _) in zip(damaged, DAMAGED, strict=True):
        (folder / file).write_text(text)
    assert make_report([str(tmp_path), "--no-figures"]) == 3
    told = capsys.readouterr().err
    for folder, (_, _, reason) in zip(damaged, DAMAGED, strict=True):
        (line,) = [line for line in told.splitlines() if f"left out {folder}: " in line]
        assert reason in line
        assert line.endswith("; the command of the run runs it again")
    assert "no finished run below it" in " ".join(told.split())
    write_run(tmp_path / "sound", [0.5], [[0]])
    assert [run.folder.parent.name for run in read_runs(tmp_path)] == ["sound"]


def test_a_summary_that_contradicts_its_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = [
        ("final_accuracy", 49.65),
        ("best_accuracy", None),
        ("last_accuracy", 0.6),
        ("seed", 7),
        ("rounds", 2),
    ]
    told += [("coverage", 1.0), ("totals", {"bytes_down": 10, "bytes_up": 30, "train_samples": 15})]
    for name, value in told:
        write_run(tmp_path / name, [0.5] * 3, [[0]] * 3, summary={name: value})
    assert make_report([str(tmp_path), "--no-figures"]) == 3
    lines = capsys.readouterr().err.splitlines()
    for name, _ in told:
        assert any(f"/{name}/" in line and f"summary.json has {name}" in line for line in lines), (
            name
        )
    write_run(
        tmp_path / "interrupted", [0.5], [[0]], status="interrupted", summary={"rounds": 9}
    )  # of no end
    assert only_run(tmp_path).status == "interrupted"


def test_what_is_torn_or_damaged_beside_the_records_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path, [0.5], [[0]], status="interrupted")
    with (folder / METRICS).open("a") as file:
        file.write('{"round": 2, "selec')
    for damage in (b"PK damaged", npz(np.zeros((4, 2))), npz(np.zeros(5))):
        (folder / CLIENTS).write_bytes(damage)
        assert [record["round"] for record in read_metrics(folder)] == [1]
        assert only_run(tmp_path).client_accuracies is None
        assert f"left out {folder / CLIENTS}: " in capsys.readouterr().err
    (folder / IMPERFECT).write_text('{"clients": ["a"]}')
    assert only_run(tmp_path).imperfect is None
    assert f"left out {folder / IMPERFECT}: " in capsys.readouterr().err


def npz(accuracy: object) -> bytes:
    file = io.BytesIO()
    np.savez(file, accuracy=np.asarray(accuracy))
    return file.getvalue()


def test_pipes_devices_and_huge_files_in_place_of_a_run_s_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They neither hang a report nor fill the memory, and what is sound beside them is reported."""
    whole = write_run(tmp_path / "whole", [0.5], [[0]])
    write_partition(whole, [[1, 1]] * 4)
    for name in (CONFIG, SUMMARY, METRICS, PARTITION):
        for kind in ("pipe", "device", "huge", "folder"):
            path = shutil.copytree(whole, tmp_path / "damaged" / f"{name}-{kind}") / name
            path.unlink()
            plant(path, kind)
            run = Run(path.parent, {"num_clients": 4}, {"status": "done"})
            if name == PARTITION:
                assert run.histograms is None
            assert f"{path.parent.name}" in (
                capsys.readouterr().err if name == PARTITION else str(path)
            )
    assert make_report([str(tmp_path), "--no-figures"]) == 0
    lines = capsys.readouterr().err.splitlines()
    for name in (CONFIG, SUMMARY, METRICS):
        for kind, reason in (
            ("pipe", "no regular"),
            ("device", "no regular"),
            ("huge", "bytes"),
            ("folder", "directory"),
        ):
            (line,) = [line for line in lines if f"{name}-{kind}: {name} cannot be read" in line]
            assert reason in line
    plant(tmp_path / "a.parquet", "pipe")
    plant(tmp_path / "summary.json", "huge")
    assert make_report([str(tmp_path / "a.parquet")]) == 3
    assert (
        make_report([str(whole), "--no-figures", "--against", str(tmp_path / "summary.json")]) == 3
    )


def plant(path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(2**34)


def test_a_file_that_a_pipe_replaces_while_it_is_looked_at_does_not_hang(tmp_path: Path) -> None:
    """There is no moment between the look at a file and its opening."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is no regular file"):
        read_regular(tmp_path / "pipe", 10)


def test_references_of_other_types_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "x", [0.5], [[0]])
    assert make_report([str(tmp_path), "--no-figures"]) == 0
    sound = json.loads((tmp_path / "report" / "summary.json").read_text())
    (group,) = sound["groups"]
    groups: list[object] = [
        1,
        {},
        [],
        group | {"labels": []},
        group | {"labels": {"a": {}}},
        group | {"choices": 1},
    ]
    groups += [
        group | {"seeds": seeds}
        for seeds in ([], {"0": 1}, {"0": {}}, {"0": {"final_accuracy": "x"}})
    ]
    groups += [group | {"config": []}, group | {"made_by": {"0": 1}}]
    references = [json.dumps(sound | {"groups": [one]}) for one in groups]
    references += [
        json.dumps(sound | {"groups": 5}),
        json.dumps(sound | {"verdicts": {"a": 1}}),
        "[]",
        "[" * 100_000,
    ]
    for text in references:
        (tmp_path / "earlier.json").write_text(text)
        assert (
            make_report(
                [str(tmp_path), "--no-figures", "--against", str(tmp_path / "earlier.json")]
            )
            == 3
        ), text[:200]
        assert "not the summary.json of a report" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "earlier.json").write_text(json.dumps(sound))
    assert (
        make_report([str(tmp_path), "--no-figures", "--against", str(tmp_path / "earlier.json")])
        == 0
    )


def test_three_reports_of_one_folder_at_once(tmp_path: Path) -> None:
    """Each writes temporary files of its own; what a killed one has left is deleted when it is
    old."""
    two_methods(tmp_path)
    command = [
        sys.executable,
        "-m",
        "fedsim",
        "report",
        str(tmp_path),
        "--no-figures",
        "--archive",
        str(tmp_path / "a"),
    ]
    for folder in (tmp_path / "report",):
        folder.mkdir()
        left = folder / "tables.md.0123456789abcdef.tmp"
        left.write_text("half")
        os.utime(left, (0, 0))
        (folder / "mine.tmp").write_text("mine")
    processes = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    assert [(process.communicate()[1], process.returncode) for process in processes] == [
        (b"", 0)
    ] * 3
    assert [path.name for path in tmp_path.rglob("*.tmp")] == ["mine.tmp"]


@pytest.mark.parametrize("link", ["reports", "reports/a", "reports/a/b"])
def test_nothing_is_written_through_a_link_to_a_folder(tmp_path: Path, link: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "a" / "b").mkdir(parents=True)
    (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / link).symlink_to(elsewhere)
    with pytest.raises(OSError, match=f"{link} is a link"):
        write_files(tmp_path / "reports", {"a/b/c.txt": b"text"})
    assert not [path for path in elsewhere.rglob("*") if path.is_file()]


def test_writers_of_one_file_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Path.replace

    def meanwhile(path: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        write_files(tmp_path, {"a": b"second"})
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", meanwhile)
    write_files(tmp_path, {"a": b"first"})
    assert (tmp_path / "a").read_bytes() == b"first"


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
    *(
        "=HYPERLINK(1)",
        "@SUM(1)",
        "+1+cmd|' /C calc'!A0",
        "-2+a",
        "<script>alert(1)</script>",
        "![p](http://x)",
    ),
    r"a\|b | c",
)


def test_nasty_text_is_harmless_in_every_form() -> None:
    """Each string as title, header, cell and note."""
    for text in NASTY:
        table = Table("x", text, make_frame([text, "b", "c"], [[text, "c", "d"]]), note=text)
        console = Console(file=io.StringIO(), width=200, force_terminal=False)
        console.print(table)
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert "[" not in text or "\x1b" in text or shown.count(text) == 4, (
            "cells in brackets are no markup"
        )
        for form in (shown, table.markdown(), table.latex(), table.csv()):
            assert all(c.isprintable() or c == "\n" for c in form), text
        rows = table.markdown().splitlines()[2:5]
        assert not re.search(r"<\w|(?<!\\)\]\(", table.markdown())
        assert [len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) for row in rows] == [4, 4, 4]
        cells = list(csv.reader(io.StringIO(table.csv())))
        assert [len(row) for row in cells] == [3, 3]
        assert not any(cell[:1] in "=@+-" for row in cells for cell in row)
        _, _, caption, label, box, begin, *body = table.latex().splitlines()
        assert (label, begin) == (r"\label{tab:x}", r"\begin{tabular}{llr}")
        assert box.startswith(r"\resizebox{")
        assert body[-2:] == [r"\end{tabular}}", r"\end{table}"]
        assert len(body) == 7  # three rules, two rows, and the ends of tabular and table
        assert "\\input" not in "".join([caption, *body])
        special = r"(?<!\\)[$&%#_^~]"
        assert not re.search(special, caption)
        assert not re.search(special, body[3].removesuffix(r" & c & d \\"))
    signed = Table("x", "t", pd.DataFrame({"a": ["+0.1 [-0.2, 0.3]", "-1e-5", "-", "-3 %", " =1"]}))
    assert signed.csv() == 'a\n"+0.1 [-0.2, 0.3]"\n-1e-5\n-\n-3 %\n\' =1\n'


def test_escapes_and_empty_columns_which_files_for_programs_keep() -> None:
    table = Table(
        "t",
        "T",
        make_frame(["", "a|b", "a", "c_d"], [["", "50 %", "-", "1 ± 2"], ["", "y", "", "2"]]),
        note="note",
    )
    assert list(table.shown) == ["a|b", "c_d"]
    assert r"| a\|b | c_d |" in table.markdown()
    assert r"a\textbar{}b & c\_d \\" in table.latex()
    assert r"50 \% & 1 $\pm$ 2 \\" in table.latex()
    assert len(table.shown.columns) == 2
    assert table.csv().splitlines()[0] == ",a|b,a,c_d"


def test_no_row_begins_with_an_argument_of_latex() -> None:
    r"""LaTeX would take [32] and * at the beginning of a row for arguments of \\ or \midrule."""
    rows = [["[32]", "[16]"], ["*", "x"]]
    text = Table("t", "T", make_frame(["[a]", "b"], rows)).latex()
    assert r"{[}a] & b \\" in text
    assert r"{[}32] & {[}16] \\" in text
    assert r"{*} & x \\" in text


@pytest.fixture
def nasty_methods(tmp_path: Path) -> Path:
    """A folder with a run of each method in `NASTY`."""
    for number, text in enumerate(NASTY):
        choices = {"selector": f"s{number}"}
        run = write_run(tmp_path / str(number), [0.5, 0.6], [[0], [1]], choices=choices)
        summary = json.loads((run / SUMMARY).read_text())
        summary["choices"]["selector"] = text
        (run / SUMMARY).write_text(json.dumps(summary))
    return tmp_path


def test_nasty_text_in_a_report(nasty_methods: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_report([str(nasty_methods), "--no-figures"]) == 0
    print_error(FedsimError("".join(NASTY)))
    print_line("".join(NASTY))
    printed = capsys.readouterr()
    page = (nasty_methods / "report" / "report.html").read_text()
    for text in (printed.out, printed.err, page):
        assert text.replace("\n", "").isprintable()
    assert "<script>alert" not in page


def test_methods_with_nasty_names_are_drawn(nasty_methods: Path) -> None:
    runs = drawn_runs(nasty_methods)
    with style():
        first, *_ = all_plots(runs, looks_of(runs))
        labels = {text.get_text() for text in first.figure.legends[0].get_texts()}
        assert len(labels) == len(NASTY)
        save([first], nasty_methods)
    assert (nasty_methods / f"{first.name}.png").stat().st_size > 0


def test_the_report_is_written_though_nobody_reads_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    write_run(tmp_path / "alpha0.1", [0.5, 0.6], [[0], [1]])
    monkeypatch.setattr("sys.stdout", Closed())
    make_report([str(tmp_path / "alpha0.1"), "--no-figures"])
    text = (tmp_path / "alpha0.1" / "report" / "report.html").read_text()
    assert "<title>alpha0.1" in text  # the whole name of its folder
