"""Damaged records of runs: they are left out of a report with a line each, and run again; never a traceback."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsim.core.errors import FedsimError
from fedsim.report.__main__ import main
from fedsim.results.files import CONFIG, METRICS, SUMMARY, read_metrics, read_summary
from fedsim.results.runs import read_runs

RECORD = {
    "round": 1,
    "selected": [0],
    "test_accuracy": 0.5,
    "participation_ratio": 0.5,
    "coverage": 0.5,
    "bytes_down": 1,
    "bytes_up": 1,
}


def write_run(folder: Path, *, summary: str | None = None, metrics: str | None = None, config: Any = None) -> Path:
    """A finished run of one round, parts of it replaced."""
    folder.mkdir(parents=True)
    sound = {"status": "done", "choices": {"selector": "random"}}
    (folder / SUMMARY).write_text(json.dumps(sound) if summary is None else summary)
    (folder / METRICS).write_text(json.dumps(RECORD) + "\n" if metrics is None else metrics)
    numbers = {"seed": 0, "num_clients": 2, "num_rounds": 1}
    (folder / CONFIG).write_text(yaml.safe_dump(numbers) if config is None else config)
    return folder


@pytest.mark.parametrize("text", ["{}", '"done"', "[]", "5", "", '{"status": 5}', "{", "[" * 100_000])
def test_a_summary_that_is_none_counts_as_absent(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "sound")
    damaged = write_run(tmp_path / "damaged", summary=text)
    assert read_summary(damaged) is None
    assert [run.folder.name for run in read_runs(tmp_path)] == ["sound"]
    assert f"left out {damaged}: summary.json is not that of a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"metrics": ""}, r"metrics.jsonl holds 0 of 1 rounds"),
        ({"metrics": '{"round": 1, "sel'}, r"metrics.jsonl holds 0 of 1 rounds"),
        ({"metrics": "5\n"}, r"metrics.jsonl holds 0 of 1 rounds"),
        ({"metrics": '{"round": 1}\n'}, "metrics.jsonl holds lines that are not records of rounds"),
        ({"config": "- 1"}, "config.yaml is not that of a run"),
        ({"config": "seed: x"}, "config.yaml is not that of a run"),
        ({"config": "{"}, "config.yaml cannot be read"),
    ],
)
def test_a_report_over_damaged_runs_alone_is_one_line_each_and_an_error(
    tmp_path: Path, parts: dict[str, str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "damaged", **parts)
    with pytest.raises(FedsimError, match="no finished run below it"):
        read_runs(tmp_path)
    assert main([str(tmp_path), "--no-figures"]) == 3
    assert reason in capsys.readouterr().err


def test_a_torn_last_line_is_left_out_and_the_rest_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics=json.dumps(RECORD) + '\n{"round": 2, "selec')
    assert [record["round"] for record in read_metrics(folder)] == [1]
    assert len(read_runs(tmp_path)) == 1
