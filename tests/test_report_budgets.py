"""Reports at equal costs, to target accuracies, over another window, and of runs with `stop_at`."""

import io
import itertools
import json
import re
from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fedsim.core.record import reaches
from fedsim.papers.sections import verdicts
from fedsim.report.command import with_window
from fedsim.report.headline import best, warnings
from fedsim.report.sections import Material
from fedsim.report.table import Bold, Table, make_frame
from fedsim.report.tables import budgets, by_group, pairs
from fedsim.report.targets import fastest, targets
from fedsim.results.frames import runs_frame
from fedsim.results.measures import final_accuracy, rounds_until
from fedsim.results.runs import ReportError, read_runs
from tests.report_toys import (
    change_run,
    frame_of,
    make_report,
    only_run,
    rows_of,
    write_run,
)

PAIR, ALL = [0, 1], [0, 1, 2, 3]
"""The clients of a round. Each of them costs 20 bytes: a round costs 40 or 80."""


@pytest.fixture
def costly(tmp_path: Path) -> Path:
    """Return a folder with three seeds of random selection and of all clients.

    All clients cost twice the bytes of random selection. At its total of 160 bytes they are in
    round 2, and behind.
    """
    for seed in range(3):
        write_run(
            tmp_path, [value + 0.01 * seed for value in (0.1, 0.2, 0.3, 0.4)], [PAIR] * 4, seed=seed
        )
        accuracies = [value + 0.012 * seed for value in (0.1, 0.2, 0.8, 0.9)]
        write_run(tmp_path, accuracies, [ALL] * 4, seed=seed, choices={"selector": "full"})
    return tmp_path


def test_methods_are_compared_at_the_bytes_of_the_cheapest_run(costly: Path) -> None:
    """Means over all four rounds, and over the two of `full` that 160 bytes pay. Seeds differ by
    0.01 and 0.012, so intervals reach 4.3027 / sqrt(3) times that to each side."""
    random, full = rows_of(budgets(frame_of(costly)))
    assert random["all rounds"] == random["at equal bytes"] == "0.2600 [0.2352, 0.2848]"
    assert (random["bytes"], random["rounds (bytes)"]) == ("160 B", "4")
    assert full["all rounds"] == "0.5120 [0.4822, 0.5418]"
    assert full["at equal bytes"] == "0.1620 [0.1322, 0.1918]"
    assert (full["bytes"], full["rounds (bytes)"]) == ("160 B", "2")
    assert full["at equal simulated time"] == "-"  # there is no simulated clock


def test_simulated_time_is_a_budget_of_its_own(tmp_path: Path) -> None:
    """Both send the same. In the 3 s of random selection the slow method has one round."""
    for selector, seconds in (("random", 1.0), ("slow", 2.0)):
        columns = {"simulated_seconds": [seconds] * 3}
        write_run(
            tmp_path, [0.1, 0.2, 0.6], [PAIR] * 3, columns=columns, choices={"selector": selector}
        )
    random, slow = rows_of(budgets(frame_of(tmp_path)))
    assert (random["at equal simulated time"], random["rounds (simulated time)"]) == ("0.3000", "3")
    assert (slow["at equal simulated time"], slow["rounds (simulated time)"]) == ("0.1000", "1")
    assert (slow["simulated time"], slow["at equal bytes"]) == ("3.0 s", "-")


def test_methods_of_equal_costs_need_no_such_table(tmp_path: Path) -> None:
    for selector in ("random", "gpfl"):
        write_run(tmp_path, [0.1, 0.2], [PAIR] * 2, choices={"selector": selector})
    assert not len(budgets(frame_of(tmp_path)).values)


def test_the_verdict_says_what_the_best_method_costs(costly: Path) -> None:
    """The differences at 160 bytes are -0.1, -0.098 and -0.096."""
    (sentence,) = best(frame_of(costly))
    assert sentence.startswith(
        "best is full, 0.5120, with 2.0 times the clients and 2.0 times the bytes of random; at "
        "random's bytes it is behind (-0.0980 [-0.1030, -0.0930]); its lead over random: +0.2520 "
    )
    assert sentence.endswith("p and interval by Holm, 3 pairs), beyond chance")


def test_an_interval_that_is_corrected_stands_next_to_the_corrected_p(costly: Path) -> None:
    """One comparison needs no correction. With a second, worse one, its p is doubled."""
    (alone,) = rows_of(pairs(frame_of(costly)))
    assert alone["interval (Holm)"] == alone["95 % interval"] == "[+0.2470, +0.2570]"
    for seed in range(3):
        accuracies = [0.3, 0.3, 0.2 + 0.1 * seed, 0.3]
        write_run(costly, accuracies, [PAIR] * 4, seed=seed, choices={"selector": "gpfl"})
    row = next(
        row
        for row in rows_of(pairs(frame_of(costly)))
        if "full" in row["difference of final accuracy"]
    )
    assert row["95 % interval"] == "[+0.2470, +0.2570]"
    assert row["interval (Holm)"] == "[+0.2448, +0.2592]"  # t(0.9875, 2) = 6.2053


def test_targets_are_reached_by_the_mean_of_a_window_in_each_setting(tmp_path: Path) -> None:
    """Means of two rounds: 0.15, 0.25, 0.35 from round 2 on, plus 0.01 for each seed."""
    for shards, selector, seed in itertools.product((2, 10), ("random", "gpfl"), range(3)):
        accuracies = [value + 0.01 * seed for value in (0.1, 0.2, 0.3, 0.4)]
        folder = tmp_path / str(shards)
        own = {"partition": {"shards": shards}, "choices": {"selector": selector}}
        write_run(folder, accuracies, [PAIR] * 4, seed=seed, final_window=2, **own)
    rows = rows_of(targets(frame_of(tmp_path), [0.25, 0.355, 0.5]))
    names = [(row[""], row["run"], row["target"]) for row in rows]
    assert len(set(names)) == 12  # two settings, two methods, three targets
    assert names[6] == ("shards=10", "random", "0.2500")
    low, middle, high = rows[6], rows[8], rows[10]
    assert (low["rounds"], low["bytes both ways"], low["time"]) == ("3", "120 B", "15.0 s")
    assert (middle["rounds"], middle["bytes both ways"]) == ("4 (2/3)", "160 B (2/3)")
    assert (high["rounds"], high["time"]) == ("never (0/3)", "never (0/3)")
    assert {row["simulated time"] for row in rows} == {"-"}


def test_a_target_may_be_reached_before_anything_is_spent(tmp_path: Path) -> None:
    """The first model of `idle` is good enough. It sends nothing, and its clock stands still."""
    nothing = {"bytes_down": [0] * 3, "bytes_up": [0] * 3, "simulated_seconds": [0.0] * 3}
    for selector, columns in (("random", {"simulated_seconds": [2.0] * 3}), ("idle", nothing)):
        choices = {"selector": selector}
        write_run(tmp_path, [0.3] * 3, [PAIR] * 3, final_window=1, columns=columns, choices=choices)
    rows = {row["run"]: row for row in rows_of(targets(frame_of(tmp_path), [0.2]))}
    columns_of_costs = ("bytes both ways", "simulated time", "times as fast")
    assert [rows["random"][name] for name in columns_of_costs] == ["40 B", "2.0 s", "1.00"]
    assert [rows["idle"][name] for name in columns_of_costs] == ["0 B", "0 ms", "-"]


@pytest.mark.parametrize("num_rounds", [3, 30])
def test_the_round_of_a_target_is_where_a_run_with_that_stop_at_ends(
    tmp_path: Path, num_rounds: int
) -> None:
    """Some rounds are not evaluated. `reaches` is what the round loop calls after each round."""
    random = np.random.default_rng(0)
    accuracies = [None if t % 5 == 3 else float(random.uniform(0, 0.5)) for t in range(num_rounds)]
    write_run(tmp_path, accuracies, [PAIR] * num_rounds, final_window=4)
    run = only_run(tmp_path)
    for target in (0.01, 0.2, 0.25, 0.3, final_accuracy(run), 0.5):
        ends = [
            end
            for end in range(1, num_rounds + 1)
            if reaches(accuracies[max(end - 4, 0) : end], target, 4, num_rounds)
        ]
        assert rounds_until(run, target) == pytest.approx(min(ends, default=nan), nan_ok=True)


def test_another_window_needs_no_other_runs(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path, [0.1, 0.2, 0.3 + 0.2 * seed], [PAIR] * 3, seed=seed)
    assert make_report([str(tmp_path), "--window", "1", "--no-figures", "--all"]) == 0
    table = (tmp_path / "report" / "overview.csv").read_text()
    assert "final accuracy (last 1)" in table
    assert "0.4000 [" in table  # the mean of 0.3 and 0.5
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    finals = [seed["final_accuracy"] for seed in summary["groups"][0]["seeds"].values()]
    assert finals == [0.3, 0.5]


def test_runs_of_different_windows_are_compared_by_one(tmp_path: Path) -> None:
    write_run(tmp_path, [0.1, 0.3], [PAIR] * 2)
    write_run(tmp_path, [0.1, 0.5], [PAIR] * 2, lr=0.5, final_window=1)
    runs = read_runs(tmp_path)
    with pytest.raises(ReportError, match="final_window 1, 11; choose one, as in --window"):
        with_window(runs, None)
    with pytest.raises(ReportError, match="--window 0: must be"):
        with_window(runs, 0)
    frame = runs_frame(with_window(runs, 11))
    assert frame["final_accuracy"].tolist() == [0.2, 0.3]
    assert frame["group"].tolist() == ["lr=0.1", "lr=0.5"]  # the window tells no runs apart


def test_words_that_are_no_accuracies_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("80", "0", "abc", "0.5,"):
        with pytest.raises(SystemExit):
            make_report(["anything", "--target", word])
        message = f"argument --target: {word}: must be accuracies above 0 and up to 1"
        assert message in capsys.readouterr().err


def test_runs_that_ended_at_stop_at_show_their_rounds(tmp_path: Path) -> None:
    for seed, length in enumerate((3, 4)):
        write_run(
            tmp_path,
            [0.2, 0.3, 0.4, 0.5][:length],
            [PAIR] * length,
            seed=seed,
            status="reached",
            num_rounds=10,
            final_window=2,
            stop_at=0.35,
        )
    frame = frame_of(tmp_path)
    (row,) = rows_of(by_group("results", frame))
    assert (row["seeds"], row["ended after"]) == ("2", "3.5")
    assert row["final accuracy (last 2)"].startswith("0.4000 [")  # of 0.35 and 0.45
    (line,) = warnings(list(frame["run"]))
    assert line.startswith("runs with stop_at end when they reach it")


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """Return a folder with runs that ended at 0.35: `full` one or two rounds earlier, with a higher
    final accuracy and more bytes."""
    for seed in range(3):
        longest = 6 + seed % 2
        for selector, cohort, length in (("random", PAIR, longest), ("full", ALL, 5)):
            last = 0.4 if selector == "random" else 0.6
            write_run(
                tmp_path,
                [*[0.3] * (length - 1), last],
                [cohort] * length,
                seed=seed,
                status="reached",
                num_rounds=10,
                final_window=2,
                stop_at=0.35,
                choices={"selector": selector},
            )
    return tmp_path


def test_of_runs_that_end_at_a_target_the_best_has_the_fewest_rounds(ended: Path) -> None:
    frame = frame_of(ended)
    assert best(frame) == []
    (sentence,) = fastest(frame)
    # 1, 2 and 1 rounds: their mean is 1.33, and the half width 4.3027 * 0.5774 / sqrt(3).
    assert sentence == (
        "fewest rounds to 0.35: full, 5 (median); fewest bytes: random, 240 B (full: 400 B); "
        "rounds saved over random: +1.3 [-0.1, +2.8] (p = 0.057, p and interval by Holm, 3 pairs), "
        "not beyond chance"
    )
    results = by_group("results", frame)
    bold = [[isinstance(cell, Bold) for cell in row] for row in results.texts.to_numpy()]
    heads = [name for place, name in enumerate(results.texts) if any(row[place] for row in bold)]
    assert heads == ["ended after"]  # not the final accuracy
    assert [row["ended after"] for row in rows_of(results)] == ["6.333", "5"]
    random, full = rows_of(targets(frame))
    assert (random["target"], random["rounds"], full["rounds"]) == ("0.3500", "6", "5")
    assert isinstance(full["rounds"], Bold)
    assert isinstance(random["bytes both ways"], Bold)
    assert not isinstance(full["bytes both ways"], Bold)


def test_of_runs_that_end_at_a_target_final_accuracies_are_not_compared(
    ended: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_report([str(ended), "--no-figures", "--all"]) == 0
    assert "Paired differences" not in capsys.readouterr().out
    assert not (ended / "report" / "pairs.csv").exists()
    assert (ended / "report" / "targets.csv").exists()
    page = (ended / "report" / "report.html").read_text()
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings[:2] == [
        "Until the mean of a window reaches a target: medians over seeds",
        "Results: mean [95 % interval] over seeds",
    ]


def test_runs_with_and_without_a_target_are_compared_among_themselves(ended: Path) -> None:
    for selector, last in (("random", 0.4), ("full", 0.6)):
        choices = {"selector": selector}
        accuracies = [*[0.3] * 9, last]
        write_run(ended, accuracies, [PAIR] * 10, lr=0.2, final_window=2, choices=choices)
    frame = frame_of(ended)
    (sentence,) = best(frame)
    assert sentence.startswith("best is full lr=0.2 stop_at=-, 0.4500; its lead over random lr=0.2")
    (sentence,) = fastest(frame)
    assert sentence.startswith("fewest rounds to 0.35: full lr=0.1 stop_at=0.35, 5 (median)")


def test_rounds_are_not_tested_where_some_runs_do_not_reach_the_target(ended: Path) -> None:
    accuracies = [*[0.3] * 9, 0.32]
    own = {"final_window": 2, "stop_at": 0.35, "choices": {"selector": "random"}}
    write_run(ended, accuracies, [PAIR] * 10, seed=3, num_rounds=10, **own)
    (sentence,) = fastest(frame_of(ended))
    assert sentence.endswith("saved over random: not tested, because not all runs reach it")
    for path in ended.glob("full*"):
        change_run(path, lambda records: [record.update(test_accuracy=0.2) for record in records])
    for path in ended.glob("random*"):
        change_run(path, lambda records: [record.update(test_accuracy=0.2) for record in records])
    (sentence,) = fastest(frame_of(ended))
    assert sentence == "no method reaches 0.35 in half of its runs"


def test_a_checkpoint_that_a_seed_did_not_run_to_has_no_mean_over_the_others(
    tmp_path: Path,
) -> None:
    """The checkpoint at 50 % of 10 rounds is round 5. Seed 0 ended after 3 rounds, seed 1 after 6."""
    for seed, length in enumerate((3, 6)):
        write_run(
            tmp_path,
            [0.4] * length,
            [PAIR] * length,
            seed=seed,
            status="reached",
            num_rounds=10,
            final_window=2,
            stop_at=0.35,
        )
    (row,) = rows_of(by_group("checkpoints", frame_of(tmp_path)))
    assert row["15 %"].startswith("0.4000")
    assert row["50 %"] == "-"


def test_a_checkpoint_that_was_not_evaluated_has_no_accuracy(tmp_path: Path) -> None:
    """The checkpoint at 50 % of 10 rounds is round 5, and only even rounds are evaluated."""
    write_run(tmp_path, [None, 0.4] * 5, [PAIR] * 10)
    table = by_group("checkpoints", frame_of(tmp_path))
    (row,) = rows_of(table)
    assert (row["50 %"], row["around 50 %"]) == ("-", "0.4000")
    assert "or if that round was not evaluated" in table.note


def test_short_runs_are_named(tmp_path: Path) -> None:
    write_run(tmp_path, [0.1] * 6, [PAIR] * 6)
    (line,) = warnings([only_run(tmp_path)])
    assert "mean of the last 6 of only 6 rounds" in line
    (run,) = with_window([only_run(tmp_path)], 2)
    assert warnings([run]) == []


def test_the_papers_number_stands_next_to_ours_at_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPFL's Table II prints 0.6001 for random selection at 2SPC after 500 rounds."""
    choices = {"preset": "gpfl_table2_fmnist", "scale": "small", "cell": "gpfl_2spc"}
    for seed in range(2):
        write_run(tmp_path, [0.6 + 0.1 * seed] * 2, [PAIR] * 2, seed=seed, choices=choices)
    runs = read_runs(tmp_path)

    def settings(preset: str, scale: str) -> list[Any]:
        return [({}, {**runs[0].config, "num_rounds": 500 if scale == "full" else 2})]

    monkeypatch.setattr("fedsim.papers.protocol.preset_settings", settings)
    table = verdicts(Material(runs, runs_frame(runs))).brief[0]
    assert table.title.endswith("(2 of 500 rounds: not judged)")
    (row,) = rows_of(table)
    assert row == {
        "": "random 2SPC 100 %",
        "paper": "0.6001",
        "ours": "0.6500 [0.0147, 1.0000]",
        "seeds": "2",
    }


def test_notes_explain_only_columns_that_are_there(tmp_path: Path) -> None:
    write_run(tmp_path, [0.1, 0.2], [PAIR] * 2)
    table = by_group("results", frame_of(tmp_path))
    assert table.title == "Results"  # nothing is averaged over seeds
    note = "time: means something only if runs did not share their machine."
    assert table.full_note == note
    assert f"\\caption{{Results; {note}}}" in table.latex()
    columns = {"simulated_seconds": [1.0, 2.0]}
    config = {"status": "reached", "stop_at": 0.1, "lr": 0.2}
    for seed in range(2):
        write_run(tmp_path, [0.1, 0.2], [PAIR] * 2, seed=seed, columns=columns, **config)
    table = by_group("results", frame_of(tmp_path))
    assert table.title == "Results: mean [95 % interval] over seeds"
    assert table.with_spread("sd").title == "Results: mean ± standard deviation over seeds"
    stopped = "ended after: number of rounds of runs with stop_at."
    clock = "simulated: time on the clock of clients' devices."
    assert table.full_note == f"{stopped} {clock} {note}"
    overview = by_group("overview", frame_of(tmp_path))
    assert overview.full_note.startswith("final accuracy: mean of the last rounds of a run;")


def test_a_report_in_a_pipe_is_as_wide_as_columns_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, [0.1, 0.2], [PAIR] * 2)
    widths = []
    for columns in (None, "70"):
        if columns:
            monkeypatch.setenv("COLUMNS", columns)
        assert make_report([str(tmp_path), "--no-figures"]) == 0
        *lines, last = capsys.readouterr().out.splitlines()
        assert last.startswith("report in ")
        widths.append(max(map(len, lines)))
    assert widths[1] <= 70 < widths[0] <= 180


def printed(table: Table, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_wide_table_comes_in_parts_that_break_no_word(width: int) -> None:
    header = ["", "run", "final accuracy (last 11)", *(f"column-{number}" for number in range(6))]
    names = ["power_of_choice_trained_d10 of one setting", "random"]
    cells = ["0.8027 [0.7981, 0.8073]", *(f"{number},000,000" for number in range(6))]
    table = Table(
        "t", "T", make_frame(header, [["digits", name, *cells] for name in names]), note="n"
    )
    lines = printed(table, width)
    assert max(map(len, lines)) <= width
    words: Sequence[str] = " ".join(lines).split()
    for word in [*header[3:], "accuracy", "(last"]:
        assert words.count(word) == 1
    for cell in cells[1:]:
        assert words.count(cell) == 2
    assert words.count("power_of_choice_trained_d10") == words.count("digits") / 2 > 1
    assert (words[0], words[-1]) == ("T", "n")


def test_a_table_that_fits_is_one() -> None:
    table = Table("t", "T", make_frame(["", "a long head"], [["x", "1"]]))
    assert printed(table, 80)[2:5] == ["   a long head", "──────────────", "x  1          "]
