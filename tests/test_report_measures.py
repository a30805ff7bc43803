"""Measures and tables of reports, by hand."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedsim.report import tables as results
from fedsim.report import tables as times
from fedsim.results import measures
from fedsim.results.groups import group_runs, make_panels
from fedsim.results.runs import Run, read_runs
from tests.report_toys import PHASES, write_run


@pytest.fixture
def one(tmp_path: Path) -> Run:
    write_run(tmp_path, [0.1, 0.5, None, 0.3], [[0, 1], [1], [2, 3], [1]])
    return read_runs(tmp_path)[0]


def test_measures_by_hand(one: Run) -> None:
    assert measures.accuracy(one, 0.5) == 0.5
    assert measures.accuracy(one, 0.75) is None  # not evaluated
    assert measures.accuracy(one, 0.1) is None  # before the first round
    assert measures.accuracy_around(one, 0.5, 3) == pytest.approx(0.3)
    assert measures.final_accuracy(one, 2) == 0.3
    assert measures.final_accuracy(one) == pytest.approx(0.3)
    assert measures.fluctuation(one) == pytest.approx(0.2)
    assert measures.rounds_to_cover(one) == 3
    assert measures.rounds_to_cover(one, 0.5) == 1
    assert measures.rounds_to(one, 0.5) == 2
    assert measures.rounds_to(one, 0.6) is None
    assert measures.bytes_to(one, 0.5) == 60
    assert measures.bytes_to(one, 0.6) is None
    assert measures.participation(one) == pytest.approx(6 / 16)
    assert one.selections.tolist() == [1, 3, 1, 1]
    assert measures.find_measure("most_selections")(one) == 3
    assert measures.total_cost(one, "seconds_train") == 4
    assert measures.find_measure("steadiness")(one) == pytest.approx(-0.2)
    assert measures.gain_after(one, 0.5) == pytest.approx(0)  # the same window of eleven rounds
    assert measures.find_measure("speed")(one) is None  # how long it took to start is not recorded
    assert measures.selection_overhead(one) == pytest.approx(2 / 3)


def test_start_up_rounds_are_not_scaled(tmp_path: Path) -> None:
    path = write_run(tmp_path, [0.1] * 5, [[0], [1], [2], [3], [0]])
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for record, seconds in zip(lines, (10.0, 4.0, 1.0, 2.0, 3.0), strict=True):
        record |= {f"seconds_{phase}": seconds for phase in PHASES}
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))

    def with_start_up(rounds: int) -> Run:
        summary = json.loads((path / "summary.json").read_text()) | {"start_up_rounds": rounds}
        (path / "summary.json").write_text(json.dumps(summary))
        return read_runs(tmp_path)[0]

    assert measures.cost_of_rounds(with_start_up(2), "seconds_train") == 10 + 4 + 198 * 2.0
    assert measures.cost_of_rounds(with_start_up(0), "seconds_train") == 200 * 4.0
    assert measures.cost_of_rounds(with_start_up(5), "seconds_train") is None
    assert measures.cost_of_rounds(with_start_up(5), "seconds_train", rounds=3) == 15  # long enough as it is
    assert measures.find_measure("speed")(with_start_up(2)) == -5 * (14 + 198 * 2)


def test_costs_are_those_of_the_runs_with_one_time_parts_apart(tmp_path: Path) -> None:
    """A run of 4 rounds of which the first two, the start-up, cost 90 and 50 bytes, and the later two 10 each."""
    path = write_run(tmp_path, [0.1] * 4, [[0], [1], [2], [3]])
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for record, volume in zip(lines, (90, 50, 10, 10), strict=True):
        record |= {"bytes_down": volume - 4, "bytes_up": 4, "train_samples": 600, "forward_samples": 7}
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))

    def row(start_up: int | None) -> dict[str, str]:
        summary = json.loads((path / "summary.json").read_text()) | {"start_up_rounds": start_up}
        (path / "summary.json").write_text(json.dumps(summary))
        table = times.costs(group_runs(read_runs(tmp_path)))
        return dict(zip(table.header, table.rows[0], strict=True))

    own = {"run": "random", "rounds": "4", "time": "20.0 s", "down": "144 B", "up": "16 B", "samples": "2,428"}
    parts = {"one-time bytes": "120 B", "one-time time": "0 ms", "bytes a round": "10 B", "time a round": "5.0 s"}
    assert row(2) == {**own, "start-up rounds": "2", **parts}
    assert row(0) == {**own, "start-up rounds": "0", **parts, "one-time bytes": "0 B", "bytes a round": "40 B"}
    assert row(4) == {**own, "start-up rounds": "4", **dict.fromkeys(parts, "-")}  # ended within its start-up
    assert row(None) == {**own, "start-up rounds": "-", **dict.fromkeys(parts, "-")}
    (phases,) = times.phases(group_runs(read_runs(tmp_path))).rows
    assert phases == ["random", "4", "20.0 s", *["4.0 s"] * 5]


def test_the_final_accuracy_is_the_mean_of_the_last_rounds_and_comes_before_the_last_round(tmp_path: Path) -> None:
    """Two methods that the last round ranks otherwise than the mean of the last 11."""
    for selector, last in (("random", 0.5), ("gpfl", 0.6)):
        level = 0.55 if selector == "random" else 0.45
        accuracies: list[float | None] = [*[0.0] * 5, *[level] * 10, last]
        write_run(tmp_path, accuracies, [[0]] * 16, choices={"selector": selector})
    groups = group_runs(read_runs(tmp_path))
    names = ["final accuracy (last 11)", "last round"]
    for table in (results.overview(groups), results.checkpoints(groups)):
        positions = [list(table.header).index(name) for name in names]
        assert positions == sorted(positions)
        shown = {row[0]: [row[at] for at in positions] for row in table.rows}
        assert shown == {"random": ["0.5455", "0.5000"], "gpfl": ["0.4636", "0.6000"]}
    assert not results.pairs(make_panels(groups)).rows  # one seed each


def test_what_is_gained_after_a_share_of_the_rounds(tmp_path: Path) -> None:
    write_run(tmp_path, [0.01 * t for t in range(1, 41)], [[0]] * 40)
    assert measures.gain_after(read_runs(tmp_path)[0], 0.5) == pytest.approx(0.35 - 0.20)


def test_the_gini_coefficient() -> None:
    assert measures.gini(np.array([2.0, 2.0, 2.0])) == pytest.approx(0)
    assert measures.gini(np.array([0.0, 0.0, 0.0, 4.0])) == pytest.approx(0.75)  # 1 - 1/n
    assert measures.gini(np.array([1.0, 3.0])) == pytest.approx(0.25)  # mean |difference| 1 over twice the mean 4
    assert measures.gini(np.zeros(3)) == 0


def test_the_table_of_selections(tmp_path: Path) -> None:
    write_run(tmp_path, [0.1, 0.2, 0.3], [[0, 1], [1], [1]])
    write_run(tmp_path, [0.1, 0.2, 0.3], [[0, 1], [2, 3], [1]], seed=1)
    (row,) = results.selections(group_runs(read_runs(tmp_path))).rows
    assert row == ["random", "2 (1/2)", "1", "0.5", "0.75", "2.5", f"{(10 / 16 + 3 / 20) / 2:.3f}"]


def test_times_leave_the_first_round_out_of_the_means_and_in_the_worst(tmp_path: Path) -> None:
    path = write_run(tmp_path, [0.1, 0.2, 0.3], [[0], [1], [2]])
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for record, seconds in zip(lines, (5.0, 0.001, 0.003), strict=True):
        record |= {f"seconds_{phase}": seconds for phase in PHASES}
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    (row,) = times.selection_times(group_runs(read_runs(tmp_path))).rows
    assert row == ["random", *["2.0"] * 5, "10.0", "100%", "5000"]
