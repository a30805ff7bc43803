"""What is told once and counted: dropped updates, rounds with too few clients or none, clients without samples."""

from dataclasses import replace

import numpy as np

from fedsim.running.incidents import Incidents
from fedsim.types import Population
from tests.test_experiment import entry

POPULATION = Population(np.array([4, 4, 0, 4]), cohort_size=3, num_rounds=5)
FOUND = [([0, 1, 3], 0, 0), ([0, 1, 3], 2, 1), ([0], 0, 0), ([], 0, 0), ([1], 1, 0)]
RECORDS = [
    replace(entry(t + 1, 0.5), selected=selected, dropped_updates=dropped, nonfinite_reports=reports)
    for t, (selected, dropped, reports) in enumerate(FOUND)
]


def watched(adaptive: bool = False) -> tuple[Incidents, list[str]]:
    told: list[str] = []
    incidents = Incidents(POPULATION, adaptive, told.append)
    for record in RECORDS:
        incidents.see(record)
    return incidents, told


def test_each_kind_is_told_once_and_counted_over_all_rounds() -> None:
    incidents, told = watched()
    assert [(line.partition(":")[0], line.rpartition(".")[2].rstrip(")")) for line in told] == [
        ("before round 1", "empty_clients"),
        ("round 2", "dropped_updates"),
        ("round 2", "nonfinite_reports"),
        ("round 3", "rounds_with_too_few_clients"),
        ("round 4", "rounds_without_clients"),
    ]
    assert incidents.counts(RECORDS) == {
        "dropped_updates": 3,
        "nonfinite_reports": 1,
        "rounds_with_too_few_clients": 2,
        "rounds_without_clients": 1,
        "empty_clients": 1,
    }


def test_a_selector_that_decides_how_many_take_part_may_take_few() -> None:
    incidents, told = watched(adaptive=True)
    assert not any("rounds_with_too_few_clients" in line for line in told)
    assert incidents.counts(RECORDS)["rounds_with_too_few_clients"] == 0
