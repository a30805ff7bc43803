"""Measures and tables of reports, by hand: accuracies, costs, selections, clients, the simulated
clock."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.report import tables
from fedsim.report.page import config_differences
from fedsim.results import measures
from fedsim.results.curves import AXES, is_recorded, spent_until
from fedsim.results.files import CLIENTS
from fedsim.results.groups import make_panels
from fedsim.results.measures import find_measure
from fedsim.results.runs import Run, read_runs
from tests.report_toys import groups_of, only_run, seconds, write_partition, write_run

BY_HAND = {
    "accuracy@0.5": 0.5,
    "accuracy@0.75": None,  # not evaluated
    "accuracy@0.1": None,  # before the first round
    "final_accuracy": 0.3,
    "fluctuation": 0.2,
    "steadiness": -0.2,
    "gain_after@0.5": 0,  # the same window of eleven rounds
    "rounds_to_cover": 3,
    "rounds_to_cover@0.5": 1,
    "rounds_to@0.5": 2,
    "rounds_to@0.6": None,
    "bytes_to@0.5": 60,
    "bytes_to@0.6": None,
    "participation": 6 / 16,
    "participation_rise": 3 / 8 - 3 / 8,
    "mean_selections": 6 / 4,
    "most_selections": 3,
    "peak_selections": 1,
    "peak_height": 3,
    "speed": None,  # how long it took to start is not recorded
    "selection_overhead": 2 / 3,
    "samples_mean": None,  # no partition
}


def test_measures_by_hand(tmp_path: Path) -> None:
    write_run(tmp_path, [0.1, 0.5, None, 0.3], [[0, 1], [1], [2, 3], [1]])
    one = only_run(tmp_path)
    assert one.selections.tolist() == [1, 3, 1, 1]
    assert {name: find_measure(name)(one) for name in BY_HAND} == pytest.approx(BY_HAND)
    assert measures.accuracy_around(one, 0.5, 3) == pytest.approx(0.3)
    assert measures.total_cost(one, ["seconds_train"]) == 4


def test_other_measures_by_hand(tmp_path: Path) -> None:
    path = write_run(
        tmp_path / "a", [0.01 * t for t in range(1, 41)], [[0, 1]] * 39 + [[0, 1, 2, 3]]
    )
    write_partition(path, [[2, 0], [3, 3]])
    run = only_run(tmp_path / "a")
    assert measures.gain_after(run, 0.5) == pytest.approx(0.35 - 0.20)
    assert measures.participation_rise(run) == pytest.approx(0.5 / 20)
    assert find_measure("peak_selections")(run) == 20.5  # two clients 40 times, two once
    sizes = {"num_clients": 2, "samples_total": 8, "samples_mean": 4, "samples_deviation": 2}
    assert {name: find_measure(name)(run) for name in sizes} == sizes
    write_run(tmp_path / "b", [], [], summary={"start_up_rounds": 0})
    nothing = only_run(tmp_path / "b")
    names = ("seconds_200", "participation_rise", "final_accuracy")
    assert [find_measure(name)(nothing) for name in names] == [None] * 3


def test_start_up_rounds_are_not_scaled(tmp_path: Path) -> None:
    def run(start_up: int) -> Run:
        path = tmp_path / str(start_up)
        told = {"start_up_rounds": start_up}
        write_run(
            path,
            [0.1] * 5,
            [[0], [1], [2], [3], [0]],
            columns=seconds(10.0, 4.0, 1.0, 2.0, 3.0),
            summary=told,
        )
        return only_run(path)

    two, none, all_of_it = run(2), run(0), run(5)
    assert measures.cost_of_rounds(two, ["seconds_train"]) == 10 + 4 + 198 * 2.0
    assert measures.cost_of_rounds(none, ["seconds_train"]) == 200 * 4.0
    assert measures.cost_of_rounds(all_of_it, ["seconds_train"]) is None
    assert (
        measures.cost_of_rounds(all_of_it, ["seconds_train"], rounds=3) == 15
    )  # long enough as it is
    assert find_measure("speed")(two) == -5 * (14 + 198 * 2)
    assert find_measure("choosing_seconds_200")(two) == 2 * (14 + 198 * 2)


def test_costs_are_those_of_the_runs_with_their_start_up_apart(tmp_path: Path) -> None:
    """A run of 4 rounds of which the first two, the start-up, cost 90 and 50 bytes, and the later
    two 10 each."""
    columns = {"bytes_down": [86, 46, 6, 6], "bytes_up": [4] * 4}
    columns |= {"train_samples": [600] * 4, "forward_samples": [7] * 4}

    def row(start_up: int | None) -> dict[str, str]:
        path, told = tmp_path / str(start_up), {"start_up_rounds": start_up}
        write_run(path, [0.1] * 4, [[0], [1], [2], [3]], columns=columns, summary=told)
        table = tables.by_group("costs", groups_of(path))
        return dict(zip(table.header, table.rows[0], strict=True))

    own = {"simulated": "-", "simulated a round": "-"}  # no clock
    own |= {
        "run": "random",
        "rounds": "4",
        "time": "20.0 s",
        "down": "144 B",
        "up": "16 B",
        "samples": "2,428",
    }
    parts = {
        "start-up bytes": "140 B",
        "start-up time": "10.0 s",
        "bytes a round": "10 B",
        "time a round": "5.0 s",
    }
    assert row(2) == {**own, "start-up rounds": "2", **parts}
    nothing = {"start-up bytes": "0 B", "start-up time": "0 ms", "bytes a round": "40 B"}
    assert row(0) == {**own, "start-up rounds": "0", **parts, **nothing}
    assert row(4) == {
        **own,
        "start-up rounds": "4",
        **dict.fromkeys(parts, "-"),
    }  # ended within its start-up
    assert row(None) == {**own, "start-up rounds": "-", **dict.fromkeys(parts, "-")}
    (times,) = tables.by_group("times", groups_of(tmp_path / "2")).rows
    assert times[:8] == ["random", "4", "20.0 s", *["4.0 s"] * 5]


def test_the_final_accuracy_is_the_mean_of_the_last_rounds_and_comes_before_the_last_round(
    tmp_path: Path,
) -> None:
    """Two methods that the last round ranks otherwise than the mean of the last 11."""
    for selector, level, last in (("random", 0.55, 0.5), ("gpfl", 0.45, 0.6)):
        write_run(
            tmp_path, [*[0.0] * 5, *[level] * 10, last], [[0]] * 16, choices={"selector": selector}
        )
    groups = groups_of(tmp_path)
    for table in (tables.by_group("overview", groups), tables.by_group("checkpoints", groups)):
        final, last_round = (
            list(table.header).index(name) for name in ("final accuracy (last 11)", "last round")
        )
        assert final < last_round
        shown = {row[0]: [row[final], row[last_round]] for row in table.rows}
        assert shown == {"random": ["0.5455", "0.5000"], "gpfl": ["0.4636", "0.6000"]}
    assert not tables.pairs(make_panels(groups)).rows  # one seed each


def test_the_gini_coefficient_and_the_table_of_selections(tmp_path: Path) -> None:
    values = {(2.0, 2.0, 2.0): 0, (0.0, 0.0, 0.0, 4.0): 0.75, (1.0, 3.0): 0.25, (0.0, 0.0): 0}
    assert {one: measures.gini(np.array(one)) for one in values} == pytest.approx(values)
    write_run(tmp_path, [0.99, 1.0, 0.98], [[0, 1], [1], [1]])
    write_run(tmp_path, [0.99, 1.0, 1.0], [[0, 1], [2, 3], [1]], seed=1)
    (row,) = tables.by_group("selections", groups_of(tmp_path)).rows
    assert row == ["random", "2 (1/2)", "1", "0.5", "0.75", "2.5", f"{(10 / 16 + 3 / 20) / 2:.3f}"]
    (row,) = tables.by_group("overview", groups_of(tmp_path)).rows
    assert row[2].endswith(", 1.0000]")  # an accuracy's interval ends there


def measured(folder: Path, accuracies: list[float], mean: float, **config: Any) -> Path:
    """A run of two rounds, the first without an evaluation; clients 2 and 3 are never selected."""
    aggregates = {
        "mean": mean,
        "std": 0.1,
        "worst_tenth": 0.2,
        "best_tenth": 0.9,
        "never_selected": None,
    }
    columns = {f"client_accuracy_{name}": [None, value] for name, value in aggregates.items()}
    path = write_run(
        folder, [None, 0.5], [[0], [1]], client_accuracy="labels", columns=columns, **config
    )
    np.savez(path / CLIENTS, accuracy=np.array(accuracies))
    return path


def with_clients(folder: Path) -> None:
    """Random selection with accuracies of its clients at two seeds, and gpfl without."""
    measured(folder, [0.9, 0.1, 0.5, 0.3], 0.4, seed=0)
    measured(folder, [0.2, 0.2, np.nan, 0.8], 0.6, seed=1)
    write_run(folder, [None, 0.5], [[0], [1]], choices={"selector": "gpfl"})


def test_accuracies_by_client(tmp_path: Path) -> None:
    with_clients(tmp_path)
    table = tables.by_group(
        "clients", [group for group in groups_of(tmp_path) if group.name == "random"]
    )
    (row,) = (dict(zip(table.header, cells, strict=True)) for cells in table.rows)
    assert (row["run"], row["seeds"], row["measured on"]) == ("random", "2", "labels")
    assert row["mean"].startswith("0.5000 [")
    assert (row["never selected"], row["clients never selected"]) == ("-", "2")
    runs = {(run.choices["selector"], run.seed): run for run in read_runs(tmp_path)}
    assert find_measure("client_accuracy_mean")(runs["random", 1]) == 0.6
    assert find_measure("client_accuracy_never_selected")(runs["random", 1]) is None
    assert find_measure("client_accuracy_mean")(runs["gpfl", 0]) is None


ACCURACIES = [0.2, 0.4, 0.9, 0.9, 0.9]
LATE = [[1], [], [0, 1], [], []]


def write_simulated(
    folder: Path, spent: list[float], accuracies: list[float] = ACCURACIES, **more: Any
) -> Path:
    """A run of five rounds that take so many simulated seconds, a quarter of them for questions."""
    columns = {
        "simulated_seconds": spent,
        "simulated_time": np.cumsum(spent).tolist(),
        "late": LATE,
    }
    columns |= {
        "simulated_seconds_ask": [one / 4 for one in spent],
        "wall_seconds": [1.0, 2.0, 3.0, 4.0, 5.0],
    }
    columns |= {"simulated_seconds_train": [3 * one / 4 for one in spent]}
    return write_run(folder, accuracies, [[0, 1]] * 5, columns=columns, **more)


def test_the_simulated_clock_by_hand(tmp_path: Path) -> None:
    write_simulated(tmp_path / "with", [10, 20, 30, 40, 50])
    write_run(tmp_path / "without", ACCURACIES, [[0]] * 5, seed=1)
    one, plain = read_runs(tmp_path)
    assert find_measure("simulated_seconds_to@0.4")(one) == 30
    assert find_measure("simulated_seconds_to@0.5")(one) == 60
    assert find_measure("simulated_seconds_to@0.95")(one) is None
    assert find_measure("simulated_seconds_to@0.4")(plain) is None
    assert spent_until([one], "simulated") == pytest.approx(np.array([10, 30, 60, 100, 150]) / 60)
    assert not is_recorded([one, plain], AXES["simulated"].names)
    assert is_recorded([one], AXES["simulated"].names)
    (row,) = tables.by_group("times", groups_of(tmp_path / "with")).rows
    assert row == [
        "random",
        "5",
        "25.0 s",
        *["5.0 s"] * 5,
        "1.0 s",
        "2.5 min",
        "37.5 s",
        "1.9 min",
        "0.60",
    ]
    table = tables.by_group("costs", groups_of(tmp_path / "with"))
    costs = dict(zip(table.header, table.rows[0], strict=True))
    assert (costs["time"], costs["simulated"]) == ("25.0 s", "2.5 min")
    groups = groups_of(tmp_path / "without")
    assert {tuple(row[6:]) for row in tables.targets(make_panels(groups)).rows} == {("-", "-")}
    assert not [
        name for name in tables.by_group("times", groups).shown.header if "simulated" in name
    ]


def test_time_to_accuracy_by_hand(tmp_path: Path) -> None:
    """The reference's final accuracy is (.2 + .4 + 3 x .9) / 5 = .66: it is there after 60 s, the
    other after 30 or never."""
    write_simulated(tmp_path, [10, 20, 30, 40, 50])
    for seed, accuracies in enumerate((ACCURACIES, [0.2, 0.3, 0.3, 0.3, 0.3])):
        write_simulated(
            tmp_path, [5, 10, 15, 20, 25], accuracies, seed=seed, choices={"selector": "fast"}
        )
    table = tables.targets(make_panels(groups_of(tmp_path)))
    assert table.rows[-2:] == [
        ["", "random", "0.6600", "100%", "3", "120 B", "60.0 s", "1.00"],
        ["", "fast", "0.6600", "100%", "3 (1/2)", "120 B (1/2)", "30.0 s (1/2)", "2.00"],
    ]
    assert [row[2] for row in table.rows[::2]] == ["0.5940", "0.6270", "0.6600"]


def test_runs_from_before_the_clock_are_those_without_one(tmp_path: Path) -> None:
    """Seeds 0 and 1 of one experiment, of which one was run before there was a group `system`."""
    write_run(tmp_path, ACCURACIES, [[0]] * 5)
    write_run(tmp_path, ACCURACIES, [[0]] * 5, seed=1, choices={"system": "none"})
    (group,) = groups_of(tmp_path)
    assert len(group.runs) == 2
    write_simulated(
        tmp_path, [1, 1, 1, 1, 1], lr=0.3, choices={"system": "tiers"}, system={"latency": 0.1}
    )
    groups = groups_of(tmp_path)
    assert [group.labels["system"] for group in groups] == ["none", "tiers"]
    assert {row[0] for row in config_differences(groups)[0].rows} == {
        group.name for group in groups
    }
