"""The command `fedsim report`, on runs that are made up or made small, and its comparison with an earlier report."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fedsim.core.errors import FedsimError
from fedsim.jobs.cli import run as fedsim_run
from fedsim.report.__main__ import main
from fedsim.results.runs import read_runs
from fedsim.results.table import Table
from tests.report_toys import two_methods


def test_the_report_command_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_methods(tmp_path / "outputs" / "gpfl_table2_fmnist")
    assert main(["gpfl_table2_fmnist", "--output-dir", str(tmp_path / "outputs")]) == 0
    target = tmp_path / "outputs" / "gpfl_table2_fmnist" / "report"
    names = {p.name for p in target.iterdir()}
    assert {"report.html", "tables.md", "summary.json", "overview.tex", "overview.csv", "figures"} <= names
    assert {"accuracy_rounds.png", "accuracy_rounds.pdf", "coverage.png"} <= {
        p.name for p in (target / "figures").iterdir()
    }
    page = (target / "report.html").read_text()
    assert "data:image/png;base64," in page
    assert 'src="http' not in page
    assert str(tmp_path) not in page
    rows = list(csv.reader((target / "pairs.csv").open()))
    assert rows[1][1:3] == ["gpfl - random", "+0.0500"]  # the mean over both rounds, as the window is longer
    assert json.loads((target / "summary.json").read_text())["groups"][1]["seeds"]["0"]["final_accuracy"] == 0.45
    assert "gpfl - random" in capsys.readouterr().out


def against(folder: Path, earlier: Path) -> tuple[int, list[list[str]]]:
    """The exit code and the rows of the comparison of the runs in `folder` with an earlier summary."""
    table = folder / "report" / "against.csv"
    table.unlink(missing_ok=True)
    code = main([str(folder), "--no-figures", "--against", str(earlier)])
    return code, list(csv.reader(table.open()))[1:] if table.is_file() else []


def test_a_report_compares_itself_with_an_earlier_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_methods(tmp_path / "now")
    assert main([str(tmp_path / "now"), "--no-figures"]) == 0
    values = json.loads((tmp_path / "now" / "report" / "summary.json").read_text())
    values["groups"][1]["seeds"]["1"]["final_accuracy"] -= 0.03
    values["groups"][1]["made_by"]["1"] = {"engine": "batched, 1 thread", "commit": "0123456789abcdef"}
    values["verdicts"]["gone"] = "reproduced"
    (tmp_path / "earlier.json").write_text(json.dumps(values))
    capsys.readouterr()
    code, rows = against(tmp_path / "now", tmp_path / "earlier.json")
    assert code == 0
    unknown = "not recorded"
    assert rows[0] == ["random", "3", "+0.0000", "0.0000", *[unknown] * 4]
    engines = f"batched, 1 thread, {unknown}"
    assert rows[1] == ["gpfl", "3", "+0.0100", "0.0300", unknown, unknown, engines, f"0123456789, {unknown}"]
    assert "Verdicts that are gone: gone." in " ".join(capsys.readouterr().out.split())


def test_a_comparison_of_nothing_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_methods(tmp_path / "now")
    assert main([str(tmp_path / "now"), "--no-figures"]) == 0
    values = json.loads((tmp_path / "now" / "report" / "summary.json").read_text())
    for change in (other_seeds, other_config):
        earlier = json.loads(json.dumps(values))
        for group in earlier["groups"]:
            change(group)
        (tmp_path / "earlier.json").write_text(json.dumps(earlier))
        capsys.readouterr()
        assert against(tmp_path / "now", tmp_path / "earlier.json") == (3, [])
        told = capsys.readouterr()
        assert "--against: nothing to compare" in told.err
        assert "Verdicts that differ" not in told.out


def other_seeds(group: dict[str, Any]) -> None:
    group["seeds"] = {f"1{seed}": values for seed, values in group["seeds"].items()}


def other_config(group: dict[str, Any]) -> None:
    group["config"] = "0"


def test_a_folder_without_runs_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 3
    assert "no finished run" in capsys.readouterr().err
    two_methods(tmp_path / "runs")
    assert main([str(tmp_path / "runs"), "--no-figures", "--against", str(tmp_path / "absent.json")]) == 3
    assert "--against" in capsys.readouterr().err
    assert main(["nonsense", "--output-dir", str(tmp_path)]) == 3
    assert "neither a folder nor a preset" in capsys.readouterr().err
    with pytest.raises(FedsimError):
        read_runs(tmp_path / "empty")


def test_the_report_of_real_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["-m", "selector=random,gpfl", "seed=0,1", "num_rounds=3", "tracker=files_only", "eval_every=2"]
    monkeypatch.setattr(sys, "argv", ["fedsim", *words])
    assert fedsim_run(words) == 0
    assert main(["outputs/default"]) == 0
    assert (tmp_path / "outputs/default/report/figures/partitions.png").stat().st_size > 1000


def test_latex_and_markdown_escape_what_they_must() -> None:
    table = Table("t", "T", ["a|b", "c_d"], [["50 %", "1 ± 2"]], "note")
    assert r"| a\|b | c_d |" in table.markdown()
    assert r"50 \% & 1 $\pm$ 2 \\" in table.latex()
    assert r"c\_d" in table.latex()
