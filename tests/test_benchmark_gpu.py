"""The script with the figures of a GPU runs, in its small form on a CPU, and leaves what it finds as it goes."""

import json
from pathlib import Path

import pytest

from scripts.benchmarks.gpu.command import SECTIONS, Bench, run, table_of


@pytest.mark.slow
def test_the_small_form_leaves_a_line_for_each_figure(tmp_path: Path) -> None:
    rows = run(Bench(tmp_path, "cpu", shrink=300, budget=1000.0, cases=["W1"]), [s for s in SECTIONS if s != "native"])
    assert [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()] == rows
    assert {row["section"] for row in rows} == set(SECTIONS) - {"native"}
    assert not [row for row in rows if "error" in row]
    by_engine = {row["case"]: row for row in rows if row["section"] == "engines"}
    assert set(by_engine) == {f"W1, {e}" for e in ("sequential", "batched", "graph", "graph, bf16")}
    assert all(row["rounds_per_s"] > 0 for row in by_engine.values())
    assert by_engine["W1, graph"]["difference"] < 1e-4
    assert table_of(rows).row_count == len(rows)
