"""The scripts' arithmetic, and that they run."""

import json
from pathlib import Path

import pytest
import yaml

from scripts import coverage, growth, phases, selection_scale


def test_counts() -> None:
    records = [{"selected": [0, 2]}, {"selected": [2]}]
    assert coverage.counts_of(records, 4).tolist() == [1, 0, 2, 0]


def test_rounds_to_full_coverage() -> None:
    records = [{"round": 1, "coverage": 0.5}, {"round": 2, "coverage": 1.0}, {"round": 3, "coverage": 1.0}]
    assert coverage.covered_in(records) == "2"
    assert coverage.covered_in(records[:1]) == "never (50%)"


def test_the_table_tells_runs_apart_by_what_differs(tmp_path: Path) -> None:
    for rho in (1.0, 2.0, 3.0):
        folder = tmp_path / str(rho)
        folder.mkdir()
        config = {"selector": {"_target_": "x.G", "exploration": {"rho": rho}}, "num_clients": 2, "seed": 7}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / "summary.json").write_text(json.dumps({"choices": {"selector": "gpfl"}}))
        record = {
            "round": 1,
            "selected": [0, 1],
            "coverage": 1.0,
            "test_accuracy": 0.25,
            "bytes_down": 10**6,
            "bytes_up": 10**6,
        }
        (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    table = coverage.table_of(sorted(tmp_path.iterdir()))
    assert list(table.columns[0].cells) == [f"gpfl exploration.rho={rho}" for rho in (1.0, 2.0, 3.0)]
    assert list(table.columns[-2].cells) == ["0.250"] * 3
    assert list(table.columns[-1].cells) == ["2"] * 3


@pytest.mark.parametrize("choice", ["random", "pncs", "gpfl", "divfl_no_overhead", "fedabc"])
def test_selection_is_timed_without_the_synthetic_engine(choice: str) -> None:
    result = selection_scale.measure(choice, 12)
    assert 0 < result["median_seconds"] <= result["worst_seconds"]
    assert result["peak_gib"] > 0


def test_growth_is_the_exponent_between_the_two_largest() -> None:
    found = {n: {"median_seconds": (n / 100) ** 2} for n in (10, 100, 1000)}
    assert selection_scale._growth(found, [10, 100, 1000]) == "N^2.0"
    assert selection_scale._growth({100: {"median_seconds": 1.0}}, [10, 100]) == "-"


def test_phases_leave_the_first_round_out_of_the_means_and_in_the_worst() -> None:
    records = [{f"seconds_{p}": s for p in phases.PHASES} for s in (5.0, 0.001, 0.003)]
    assert phases.row_of("x", records) == ["x", *["2.0"] * 5, "10.0", "100%", "5000"]


def test_a_case_of_growth_is_measured_apart() -> None:
    result = growth.measure_apart({**growth.USUAL, "num_clients": 20, "steps": 2}, 0.01)
    assert result["rounds"] >= 3
    assert result["seconds"] > 0
    table = growth.table_of("steps", [{**result, "seconds": 0.5, "peak_gib": 1.0}])
    assert [list(c.cells) for c in table.columns] == [["2"], ["500.00"], ["250000.0"], ["1.00"]]
