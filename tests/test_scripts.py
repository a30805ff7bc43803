"""The scripts' arithmetic, and that they run."""

from scripts.benchmarks import growth, selection


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
