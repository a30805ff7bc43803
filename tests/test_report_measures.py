"""Measures and tables of reports, by hand: accuracies, costs, selections, clients, the simulated
clock."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.report.command import with_window
from fedsim.report.curves import AXES, spent_until
from fedsim.report.tables import by_group, pairs
from fedsim.report.targets import targets
from fedsim.results import measures
from fedsim.results.files import CLIENTS
from fedsim.results.measures import find_measure, is_recorded
from fedsim.results.runs import Run, read_runs
from tests.report_toys import frame_of, only_run, rows_of, seconds, write_partition, write_run

NAN = math.nan
FOUR_ROUNDS = {
    "accuracy@0.5": 0.5,
    "accuracy@0.75": NAN,  # not evaluated
    "accuracy@0.1": NAN,  # before the first round
    "final_accuracy": 0.3,
    "fluctuation": 0.2,
    "steadiness": -0.2,
    "gain_after@0.5": 0,  # the same window of eleven rounds
    "rounds_to_cover": 3,
    "rounds_to_cover@0.5": 1,
    "rounds_to@0.5": 2,
    "rounds_to@0.6": NAN,
    "bytes_until@0.3": 120,  # 6 uploads at 20 bytes both ways: shorter than a window of 11 rounds
    "bytes_until@0.5": NAN,
    "participation": 6 / 16,
    "participation_rise": 3 / 8 - 3 / 8,
    "fewest_selections": 1,
    "mean_selections": 6 / 4,
    "most_selections": 3,
    "peak_selections": 1,
    "peak_height": 3,
    "speed": NAN,  # how long it took to start is not recorded
    "selection_overhead": 2 / 3,  # two of five phases, a second each
    "samples_mean": NAN,  # no partition
    "total:seconds_train": 4,
}


def test_measures_by_hand(tmp_path: Path) -> None:
    """Four rounds, of which the third is not evaluated. Clients are selected 1, 3, 1 and 1
    times."""
    write_run(tmp_path, [0.1, 0.5, None, 0.3], [[0, 1], [1], [2, 3], [1]])
    run = only_run(tmp_path)
    assert run.selections.tolist() == [1, 3, 1, 1]
    values = {name: find_measure(name)(run) for name in FOUR_ROUNDS}
    assert values == pytest.approx(FOUR_ROUNDS, nan_ok=True)
    assert measures.accuracy_around(run, 0.5, width=3) == pytest.approx((0.1 + 0.5) / 2)


def test_measures_of_halves_and_windows(tmp_path: Path) -> None:
    """Accuracy rises by 0.01 a round. All four clients are selected in the last of 40 rounds, two
    before."""
    accuracies = [0.01 * t for t in range(1, 41)]
    write_run(tmp_path, accuracies, [[0, 1]] * 39 + [[0, 1, 2, 3]])
    run = only_run(tmp_path)
    assert measures.gain_after(run, 0.5) == pytest.approx(0.35 - 0.20)
    # Means of as many rounds are subtracted: 36 to 40 and 18 to 22, or 37 to 40 and 19 to 22.
    for window, gain in ((1, 0.40 - 0.20), (5, 0.38 - 0.20), (4, 0.385 - 0.205)):
        (shown,) = with_window([run], window)
        assert measures.gain_after(shown, 0.5) == pytest.approx(gain)
    assert measures.participation_rise(run) == pytest.approx(0.5 / 20)
    assert find_measure("peak_selections")(run) == 20.5  # two clients 40 times, two once


def test_sizes_of_clients(tmp_path: Path) -> None:
    path = write_run(tmp_path, [0.1], [[0]])
    write_partition(path, [[2, 0], [3, 3]])
    sizes = {"num_clients": 2, "samples_total": 8, "samples_mean": 4, "samples_deviation": 2}
    run = only_run(tmp_path)
    assert {name: find_measure(name)(run) for name in sizes} == sizes


def test_a_run_without_rounds_has_no_measures(tmp_path: Path) -> None:
    write_run(tmp_path, [], [], summary={"start_up_rounds": 0})
    run = only_run(tmp_path)
    for name in ("seconds_200", "participation_rise", "final_accuracy", "total:bytes_up"):
        assert math.isnan(find_measure(name)(run))


def run_with_start_up(folder: Path, start_up_rounds: int) -> Run:
    """Return a run of five rounds, in which each phase takes 10, 4, 1, 2 and 3 seconds."""
    write_run(
        folder,
        [0.1] * 5,
        [[0], [1], [2], [3], [0]],
        columns=seconds(10.0, 4.0, 1.0, 2.0, 3.0),
        summary={"start_up_rounds": start_up_rounds},
    )
    return only_run(folder)


def test_missing_rounds_cost_the_mean_after_the_start_up(tmp_path: Path) -> None:
    """Two rounds of start-up take 14 s, and the others 2 s on average."""
    run = run_with_start_up(tmp_path, 2)
    assert measures.cost_of_rounds(run, ["seconds_train"]) == 10 + 4 + 198 * 2.0
    assert find_measure("speed")(run) == -5 * (14 + 198 * 2)
    assert find_measure("choosing_seconds_200")(run) == 2 * (14 + 198 * 2)


@pytest.mark.parametrize(
    ("start_up_rounds", "start_up_cost", "cost_a_round"),
    [
        (1, 9.0, 1.5),  # rounds 1 to 3, of which clients could be reached only in round 3
        (3, 9.0, 1.5),
        (4, 10.0, 2.0),  # a start-up that is counted from round 1
        (0, 0.0, 2.4),
    ],
)
def test_a_start_up_includes_the_first_round_with_clients(
    start_up_rounds: int, start_up_cost: float, cost_a_round: float, tmp_path: Path
) -> None:
    write_run(
        tmp_path,
        [0.1] * 5,
        [[], [], [2], [3], [0]],
        columns={"train_samples": [0, 0, 9, 1, 2]},
        summary={"start_up_rounds": start_up_rounds},
    )
    run = only_run(tmp_path)
    assert measures.start_up_cost(run, ["train_samples"]) == start_up_cost
    assert measures.cost_a_round(run, ["train_samples"]) == cost_a_round


def test_a_run_whose_clients_could_never_be_reached_is_all_start_up(tmp_path: Path) -> None:
    write_run(tmp_path, [0.1] * 2, [[], []], summary={"start_up_rounds": 1})
    assert math.isnan(find_measure("start_up:bytes_up")(only_run(tmp_path)))


def test_without_a_start_up_missing_rounds_cost_the_mean_of_all(tmp_path: Path) -> None:
    run = run_with_start_up(tmp_path, 0)
    assert measures.cost_of_rounds(run, ["seconds_train"]) == 200 * 4.0


def test_a_run_that_is_all_start_up_says_nothing_of_missing_rounds(tmp_path: Path) -> None:
    run = run_with_start_up(tmp_path, 5)
    assert math.isnan(measures.cost_of_rounds(run, ["seconds_train"]))
    assert measures.cost_of_rounds(run, ["seconds_train"], rounds=3) == 15


WITHOUT_CLOCK = {"simulated": "-", "simulated a round": "-"}
WHOLE_RUN = {
    "run": "random",
    "server sees": "losses",
    "rounds": "4",
    "time": "20.0 s",
    "down": "144 B",
    "up": "16 B",
    "samples": "2,428",
    **WITHOUT_CLOCK,
}


@pytest.mark.parametrize(
    ("start_up_rounds", "parts"),
    [
        (2, ["2", "140 B", "10.0 s", "10 B", "5.0 s"]),
        (0, ["0", "0 B", "0 ms", "40 B", "5.0 s"]),
        (4, ["4", "-", "-", "-", "-"]),  # ended within its start-up
        (None, ["-", "-", "-", "-", "-"]),
    ],
)
def test_costs_of_whole_runs_have_their_start_up_apart(
    start_up_rounds: int | None, parts: Sequence[str], tmp_path: Path
) -> None:
    """The rounds cost 90, 50, 10 and 10 bytes and 607 samples, and each of five phases a second."""
    columns = {"bytes_down": [86, 46, 6, 6], "bytes_up": [4] * 4}
    columns |= {"train_samples": [600] * 4, "forward_samples": [7] * 4}
    summary = {"start_up_rounds": start_up_rounds, "server_sees": "losses"}
    write_run(tmp_path, [0.1] * 4, [[0], [1], [2], [3]], columns=columns, summary=summary)
    (row,) = rows_of(by_group("costs", frame_of(tmp_path)))
    names = ["start-up rounds", "start-up bytes", "start-up time", "bytes a round", "time a round"]
    assert row == {**WHOLE_RUN, **dict(zip(names, parts, strict=True))}


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("fedsim.selectors.oort.Oort", "losses"),
        ("fedsim.selectors.md.MD", "only sums"),
        ("my_lab.Nearest", "unknown"),
        (None, "unknown"),
    ],
)
def test_the_class_of_an_earlier_run_says_what_the_server_sees(
    target: str | None, expected: str, tmp_path: Path
) -> None:
    write_run(tmp_path, [0.1], [[0]], selector={"_target_": target})
    (row,) = rows_of(by_group("costs", frame_of(tmp_path)))
    assert row["server sees"] == expected


def test_the_final_accuracy_is_the_mean_of_the_last_rounds_and_stands_before_the_last_round(
    tmp_path: Path,
) -> None:
    """random: ten rounds of 0.55 and one of 0.5; gpfl: ten of 0.45 and one of 0.6. The last round
    ranks them otherwise than the mean."""
    for selector, level, last in (("random", 0.55, 0.5), ("gpfl", 0.45, 0.6)):
        accuracies = [0.0] * 5 + [level] * 10 + [last]
        write_run(tmp_path, accuracies, [[0]] * 16, choices={"selector": selector})
    frame = frame_of(tmp_path)
    for name in ("overview", "checkpoints"):
        table = by_group(name, frame)
        header = list(table.texts)
        assert header.index("final accuracy (last 11)") < header.index("last accuracy")
        random, gpfl = rows_of(table)
        assert (random["final accuracy (last 11)"], random["last accuracy"]) == ("0.5455", "0.5000")
        assert (gpfl["final accuracy (last 11)"], gpfl["last accuracy"]) == ("0.4636", "0.6000")
    assert rows_of(pairs(frame)) == []  # one seed each


@pytest.mark.parametrize(
    ("selected", "expected"),
    [([0, 1, 2, 3], 0.0), ([0, 0, 0, 0], 0.75), ([0, 1, 1, 1], 0.625)],
)
def test_the_gini_coefficient(selected: Sequence[int], expected: float, tmp_path: Path) -> None:
    """Selections 1, 1, 1, 1; 4, 0, 0, 0; and 1, 3, 0, 0, of which all pairs differ by 20 in sum:
    20 / (2 * 16 * mean 1)."""
    write_run(tmp_path, [0.5] * 4, [[client] for client in selected])
    gini = find_measure("selection_gini")
    assert gini(only_run(tmp_path)) == pytest.approx(expected)


def test_the_table_of_selections_and_an_accuracy_whose_interval_ends_at_1(tmp_path: Path) -> None:
    """Selections 1, 3, 0, 0 and 1, 2, 1, 1: means over both runs, Gini 10 / 16 and 3 / 20."""
    write_run(tmp_path, [0.99, 1.0, 0.98], [[0, 1], [1], [1]])
    write_run(tmp_path, [0.99, 1.0, 1.0], [[0, 1], [2, 3], [1]], seed=1)
    (row,) = rows_of(by_group("selections", frame_of(tmp_path)))
    assert row == {
        "run": "random",
        "covered after": "2 (1/2)",
        "never": "1",
        "min": "0.5",
        "median": "0.75",
        "max": "2.5",
        "Gini": f"{(10 / 16 + 3 / 20) / 2:.3f}",
    }
    (row,) = rows_of(by_group("overview", frame_of(tmp_path)))
    assert row["final accuracy (last 11)"].endswith(", 1.0000]")


def write_measured(folder: Path, accuracies: list[float], mean: float, **config: Any) -> None:
    """Write a run of two rounds, the first without an evaluation; clients 2 and 3 are never
    selected."""
    aggregates = {"mean": mean, "std": 0.1, "worst_tenth": 0.2, "best_tenth": 0.9}
    columns = {f"client_accuracy_{name}": [None, value] for name, value in aggregates.items()}
    columns["client_accuracy_never_selected"] = [None, None]
    run = {"client_accuracy": "labels", "columns": columns, **config}
    path = write_run(folder, [None, 0.5], [[0], [1]], **run)
    np.savez(path / CLIENTS, accuracy=np.array(accuracies))


def with_clients(folder: Path) -> None:
    """Write random selection with accuracies of its clients at two seeds, and gpfl without."""
    write_measured(folder, [0.9, 0.1, 0.5, 0.3], 0.4, seed=0)
    write_measured(folder, [0.2, 0.2, np.nan, 0.8], 0.6, seed=1)
    write_run(folder, [None, 0.5], [[0], [1]], choices={"selector": "gpfl"})


def test_accuracies_by_client(tmp_path: Path) -> None:
    with_clients(tmp_path)
    frame = frame_of(tmp_path)
    (row,) = rows_of(by_group("clients", frame[frame["group"] == "random"]))
    assert (row["run"], row["seeds"], row["measured on"]) == ("random", "2", "labels")
    assert row["mean"].startswith("0.5000 [")
    assert (row["never selected"], row["clients never selected"]) == ("-", "2")
    runs = {(run.choices["selector"], run.seed): run for run in read_runs(tmp_path)}
    assert find_measure("client_accuracy_mean")(runs["random", 1]) == 0.6
    assert math.isnan(find_measure("client_accuracy_never_selected")(runs["random", 1]))
    assert math.isnan(find_measure("client_accuracy_mean")(runs["gpfl", 0]))


def test_a_config_key_with_the_title_of_a_measure_has_a_column_of_its_own(tmp_path: Path) -> None:
    for std in (0.3, 0.4):
        for share in (0.2, 0.5):
            folder = tmp_path / f"{std} {share}"
            write_measured(folder, [0.9, 0.1, 0.5, 0.3], 0.4, clients={"std": std, "share": share})
    rows = rows_of(by_group("clients", frame_of(tmp_path)))
    assert [row["clients.std"] for row in rows] == ["0.3", "0.4", "0.3", "0.4"]
    assert [row["share"] for row in rows] == ["0.2", "0.2", "0.5", "0.5"]
    assert {row["std"] for row in rows} == {"0.1000"}


ACCURACIES = [0.2, 0.4, 0.9, 0.9, 0.9]
LATE = [[1], [], [0, 1], [], []]


def write_simulated(
    folder: Path, spent: list[float], accuracies: list[float] = ACCURACIES, **config: Any
) -> Path:
    """Write a run of five rounds that take so many simulated seconds, a quarter of them for
    questions."""
    columns = {
        "simulated_seconds": spent,
        "simulated_time": np.cumsum(spent).tolist(),
        "simulated_seconds_ask": [seconds / 4 for seconds in spent],
        "simulated_seconds_train": [3 * seconds / 4 for seconds in spent],
        "late": LATE,
        "wall_seconds": [1.0, 2.0, 3.0, 4.0, 5.0],
    }
    return write_run(folder, accuracies, [[0, 1]] * 5, columns=columns, **config)


def test_simulated_seconds_until_an_accuracy_and_a_round(tmp_path: Path) -> None:
    """Means of two rounds: 0.3, 0.65 and 0.9 from round 2 on."""
    write_simulated(tmp_path / "with", [10, 20, 30, 40, 50], final_window=2)
    write_run(tmp_path / "without", ACCURACIES, [[0]] * 5, seed=1, final_window=2)
    timed, untimed = read_runs(tmp_path)
    assert find_measure("simulated_until@0.3")(timed) == 10 + 20
    assert find_measure("simulated_until@0.5")(timed) == 10 + 20 + 30
    assert math.isnan(find_measure("simulated_until@0.95")(timed))
    assert math.isnan(find_measure("simulated_until@0.3")(untimed))
    minutes = np.array([10, 30, 60, 100, 150]) / 60
    assert spent_until([timed], "simulated") == pytest.approx(minutes)
    assert is_recorded([timed], AXES["simulated"].names)
    assert not is_recorded([timed, untimed], AXES["simulated"].names)


def test_the_table_of_times_has_both_clocks(tmp_path: Path) -> None:
    write_simulated(tmp_path, [10, 20, 30, 40, 50])
    (row,) = rows_of(by_group("times", frame_of(tmp_path)))
    phases = ("select", "ask", "train", "aggregate", "evaluate")
    assert row == {
        "run": "random",
        "rounds": "5",
        "time": "25.0 s",
        **dict.fromkeys(phases, "5.0 s"),
        "longest select": "1.0 s",
        "simulated": "2.5 min",
        "simulated ask": "37.5 s",
        "simulated train": "1.9 min",
        "late a round": "0.60",
    }


def test_tables_of_runs_without_a_simulated_clock_show_none(tmp_path: Path) -> None:
    write_run(tmp_path, ACCURACIES, [[0]] * 5)
    frame = frame_of(tmp_path)
    for row in rows_of(targets(frame)):
        assert (row["simulated time"], row["times as fast"]) == ("-", "-")
    assert not [name for name in by_group("times", frame).shown if "simulated" in name]


def test_targets_by_hand(tmp_path: Path) -> None:
    """Single rounds have 0.9 from the third one on, and means of two rounds from the fourth one on.
    The reference gets there after 100 s, and the other method after 50 s or never."""
    write_simulated(tmp_path, [10, 20, 30, 40, 50], final_window=2)
    for seed, accuracies in enumerate((ACCURACIES, [0.2, 0.3, 0.3, 0.3, 0.3])):
        fast = {"seed": seed, "choices": {"selector": "fast"}, "final_window": 2}
        write_simulated(tmp_path, [5, 10, 15, 20, 25], accuracies, **fast)
    *_, random, fast = rows_of(targets(frame_of(tmp_path)))
    target = {"": "", "target": "0.9000", "of the reference's final": "100%"}
    assert random == {
        "run": "random",
        **target,
        "rounds": "4",
        "bytes both ways": "160 B",
        "time": "20.0 s",
        "simulated time": "1.7 min",
        "times as fast": "1.00",
    }
    assert fast == {
        "run": "fast",
        **target,
        "rounds": "4 (1/2)",
        "bytes both ways": "160 B (1/2)",
        "time": "20.0 s (1/2)",
        "simulated time": "50.0 s (1/2)",
        "times as fast": "2.00",
    }
    levels = [row["target"] for row in rows_of(targets(frame_of(tmp_path)))[::2]]
    assert levels == ["0.8100", "0.8550", "0.9000"]  # 90, 95 and 100 %
