"""The benchmarks of scripts/: their arithmetic, and that they run."""

import json
from pathlib import Path

import pytest

from scripts.benchmarks import growth, processes, selection
from scripts.benchmarks.gpu.command import SECTIONS, run
from scripts.benchmarks.gpu.workloads import Bench


def test_selection_is_timed_without_the_synthetic_engine() -> None:
    result = selection.measure("divfl_no_overhead", 12)
    assert 0 < result["median_seconds"] <= result["worst_seconds"]
    assert result["peak_gib"] > 0


@pytest.mark.parametrize(
    ("seconds", "exponent"),
    [
        ({10: 0.01, 100: 1.0, 1000: 100.0}, "N^2.0"),
        ({10: 0.0001, 100: 0.0002}, "< 1 ms"),
        ({10: 1.0}, "-"),
    ],
)
def test_growth_is_the_exponent_between_the_two_largest_sizes(
    seconds: dict[int, float], exponent: str
) -> None:
    assert processes.growth_exponent(seconds, negligible=1e-3) == exponent


def test_every_other_turn_is_reversed() -> None:
    assert list(processes.in_turns("ab", 3)) == list("abbaab")


def test_a_case_of_growth_is_measured_in_a_process_of_its_own() -> None:
    result = growth.measure_apart({**growth.USUAL, "num_clients": 20, "steps": 2}, 0.01)
    assert result["rounds"] >= 3
    assert result["seconds"] > 0


def test_growth_shows_the_time_per_unit_of_the_value_that_varies() -> None:
    rows = growth.rows_of("steps", [{"steps": 2, "seconds": 0.5, "peak_gib": 1.0}])
    assert rows == [["2", "500.00", "250000.0", "1.00"]]  # ms a round, us per step, GiB


@pytest.mark.slow
def test_a_try_out_of_the_gpu_script_leaves_a_line_for_each_measurement(tmp_path: Path) -> None:
    sections = [name for name in SECTIONS if name not in ("native", "convolutions")]
    rows = run(Bench(tmp_path, "cpu", shrink=300, budget=1000.0, cases=["W1"]), sections)
    assert [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()] == rows
    assert {row["section"] for row in rows} == set(sections)
    assert [row for row in rows if "error" in row] == []
    by_engine = {row["case"]: row for row in rows if row["section"] == "engines"}
    assert set(by_engine) == {f"W1, {e}" for e in ("sequential", "batched", "graph", "graph, bf16")}
    assert all(row["rounds_per_s"] > 0 for row in by_engine.values())
    assert by_engine["W1, graph"]["difference"] < 1e-4
