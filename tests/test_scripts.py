"""The scripts' arithmetic, and that they run."""

import json
from pathlib import Path

import pytest

from scripts.benchmarks import growth, selection
from scripts.benchmarks.gpu.command import SECTIONS, Bench, run, table_of


def test_selection_is_timed_without_the_synthetic_engine_and_growth_is_its_exponent() -> None:
    result = selection.measure("divfl_no_overhead", 12)
    assert 0 < result["median_seconds"] <= result["worst_seconds"]
    assert result["peak_gib"] > 0
    found = {n: {"median_seconds": (n / 100) ** 2} for n in (10, 100, 1000)}
    assert selection._growth(found, [10, 100, 1000]) == "N^2.0"


def test_a_case_of_growth_is_measured_apart() -> None:
    result = growth.measure_apart({**growth.USUAL, "num_clients": 20, "steps": 2}, 0.01)
    assert result["rounds"] >= 3
    assert result["seconds"] > 0
    table = growth.table_of("steps", [{**result, "seconds": 0.5, "peak_gib": 1.0}])
    assert [list(c.cells) for c in table.columns] == [["2"], ["500.00"], ["250000.0"], ["1.00"]]


@pytest.mark.slow
def test_the_small_form_of_the_figures_of_a_gpu_leaves_a_line_for_each_figure(
    tmp_path: Path,
) -> None:
    rows = run(
        Bench(tmp_path, "cpu", shrink=300, budget=1000.0, cases=["W1"]),
        [s for s in SECTIONS if s != "native"],
    )
    assert [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()] == rows
    assert {row["section"] for row in rows} == set(SECTIONS) - {"native"}
    assert not [row for row in rows if "error" in row]
    by_engine = {row["case"]: row for row in rows if row["section"] == "engines"}
    assert set(by_engine) == {f"W1, {e}" for e in ("sequential", "batched", "graph", "graph, bf16")}
    assert all(row["rounds_per_s"] > 0 for row in by_engine.values())
    assert by_engine["W1, graph"]["difference"] < 1e-4
    assert table_of(rows).row_count == len(rows)
