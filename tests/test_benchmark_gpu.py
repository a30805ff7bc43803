"""The script with the figures of a GPU runs, in its small form on a CPU, and leaves what it finds as it goes."""

import json
from pathlib import Path

import pytest

from scripts.benchmarks.gpu import command as benchmark_gpu
from scripts.benchmarks.gpu.command import SECTIONS, Bench, run, table_of
from tests.pretended_cuda import PretendedCard


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


@pytest.mark.slow
def test_what_is_for_a_gpu_alone_runs_on_a_pretended_one(tmp_path: Path) -> None:
    with PretendedCard():
        bench = Bench(tmp_path, "cuda", shrink=300, budget=1000.0, cases=["W1"])
        rows = run(bench, ["environment", "latencies", "engines", "loop"])
    assert not [row for row in rows if "error" in row]
    by_engine = {row["case"]: row for row in rows if row["section"] == "engines"}
    assert by_engine["W1, graph"]["ran"] == "graph, linear layers, CUDA graphs"
    assert by_engine["W1, graph, tf32"]["difference"] < 1e-4


def test_a_section_that_fails_or_comes_too_late_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(bench: Bench) -> None:
        raise ValueError("no such figure")

    monkeypatch.setitem(benchmark_gpu.SECTIONS, "loop", broken)
    (failed,) = run(Bench(tmp_path, "cpu", shrink=300, budget=1000.0), ["loop"])
    assert (failed["case"], failed["error"]) == ("failed", "ValueError: no such figure")
    (late,) = run(Bench(tmp_path, "cpu", shrink=300, budget=-1.0), ["loop"])
    assert (late["case"], late["reason"]) == ("left out", "--budget -1 s is spent")
