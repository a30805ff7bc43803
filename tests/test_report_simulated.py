"""Reports of runs on a simulated clock: times to accuracies by hand, and none of it for runs without such a clock."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.report.page import config_differences
from fedsim.report.tables import simulated_phases, time_to_accuracy
from fedsim.results import measures
from fedsim.results.curves import AXES, is_recorded, spent_until
from fedsim.results.groups import group_runs, make_panels
from fedsim.results.runs import read_archive, read_runs, write_archive
from tests.report_toys import write_run

ACCURACIES = [0.2, 0.4, 0.9, 0.9, 0.9]


def write_simulated(folder: Path, seconds: list[float], late: list[list[int]] | None = None, **more: Any) -> Path:
    """A run of five rounds that take so many simulated seconds, a quarter of them for questions."""
    path = write_run(folder, more.pop("accuracies", ACCURACIES), [[0, 1]] * 5, **more)
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for position, (record, spent) in enumerate(zip(records, seconds, strict=True)):
        record |= {
            "simulated_seconds": spent,
            "simulated_time": sum(seconds[: position + 1]),
            "wall_seconds": position + 1.0,
        }
        record |= {"simulated_seconds_ask": spent / 4, "simulated_seconds_train": 3 * spent / 4}
        record |= {"late": late[position] if late else []}
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_measures_by_hand(tmp_path: Path) -> None:
    write_simulated(tmp_path / "with", [10, 20, 30, 40, 50])
    write_run(tmp_path / "without", ACCURACIES, [[0]] * 5, seed=1)
    one, plain = read_runs(tmp_path)
    assert measures.simulated_seconds_to(one, 0.4) == 30
    assert measures.find_measure("simulated_seconds_to@0.5")(one) == 60
    assert measures.simulated_seconds_to(one, 0.95) is None
    assert measures.simulated_seconds_to(plain, 0.4) is None
    assert spent_until([one], "simulated") == pytest.approx(np.array([10, 30, 60, 100, 150]) / 60)
    assert not is_recorded([one, plain], AXES["simulated"].names)
    assert is_recorded([one], AXES["simulated"].names)


def test_time_to_accuracy_by_hand(tmp_path: Path) -> None:
    """The reference's final accuracy is (.2 + .4 + 3 x .9) / 5 = .66: it is there after 60 s, the other after 30 or
    never."""
    write_simulated(tmp_path, [10, 20, 30, 40, 50])
    fast = {"selector": "fast"}
    write_simulated(tmp_path, [5, 10, 15, 20, 25], choices=fast)
    write_simulated(tmp_path, [5, 10, 15, 20, 25], choices=fast, seed=1, accuracies=[0.2, 0.3, 0.3, 0.3, 0.3])
    table = time_to_accuracy(make_panels(group_runs(read_runs(tmp_path))))
    assert table.rows[-2:] == [
        ["", "random", "0.6600", "100%", "60.0 s", "1.00", "3"],
        ["", "fast", "0.6600", "100%", "30.0 s (1/2)", "2.00", "3 (1/2)"],
    ]
    assert [row[2] for row in table.rows[::2]] == ["0.5940", "0.6270", "0.6600"]


def test_simulated_time_stands_beside_the_measured(tmp_path: Path) -> None:
    write_simulated(tmp_path, [8, 8, 8, 8, 8], [[1], [], [0, 1], [], []])
    (row,) = simulated_phases(group_runs(read_runs(tmp_path))).rows
    assert row == ["random", "5", "5.0 s", "40.0 s", "10.0 s", "30.0 s", "8.0 s", "0.60"]


def test_runs_without_a_clock_have_no_such_tables(tmp_path: Path) -> None:
    write_run(tmp_path, ACCURACIES, [[0]] * 5)
    groups = group_runs(read_runs(tmp_path))
    assert not time_to_accuracy(make_panels(groups)).rows
    assert not simulated_phases(groups).rows


def test_runs_from_before_the_clock_are_those_without_one(tmp_path: Path) -> None:
    """Seeds 0 and 1 of one experiment, of which one was run before there was a group `system`."""
    write_run(tmp_path, ACCURACIES, [[0]] * 5)
    write_run(tmp_path, ACCURACIES, [[0]] * 5, seed=1, choices={"system": "none"})
    (group,) = group_runs(read_runs(tmp_path))
    assert len(group.runs) == 2
    write_simulated(tmp_path, [1, 1, 1, 1, 1], lr=0.3, choices={"system": "tiers"}, system={"latency": 0.1})
    groups = group_runs(read_runs(tmp_path))
    assert [group.labels["system"] for group in groups] == ["none", "tiers"]
    assert {row[0] for row in config_differences(groups).rows} == {group.name for group in groups}


def test_an_archive_keeps_simulated_times(tmp_path: Path) -> None:
    write_simulated(tmp_path / "runs", [10.1, 20, 30, 40, 50], [[1], [], [0, 1], [], []])
    write_run(tmp_path / "runs", ACCURACIES, [[0]] * 5, seed=1)
    runs = read_runs(tmp_path / "runs")
    write_archive(runs, tmp_path / "runs", tmp_path / "x.parquet")
    timed, plain = read_archive(tmp_path / "x.parquet")
    assert timed.series("simulated_seconds").tolist() == [10.1, 20, 30, 40, 50]
    assert [record["late"] for record in timed.records] == [[1], [], [0, 1], [], []]
    assert not measures.is_simulated(plain)
