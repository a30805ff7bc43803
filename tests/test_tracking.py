"""Files, console and trackers; Weights & Biases is in test_wandb.py."""

import errno
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from fedsim.core.record import PHASES
from fedsim.results.files import OutputError, RunFolder, json_ready
from fedsim.results.reading import read_metrics, read_summary
from fedsim.tracking.base import RunInfo, Tracker, Trackers
from fedsim.tracking.console import ConsoleTracker
from fedsim.tracking.tables import (
    accuracy_curve,
    closing_table,
    show_bytes,
    show_seconds,
    sweep_table,
)

CONFIG = {"name": "trial", "seed": 0, "num_clients": 4, "selector": {"_target_": "x.Y"}}
TOTALS = {
    **dict.fromkeys((f"seconds_{phase}" for phase in PHASES), 1.0),
    **{"bytes_down": 2_500_000, "bytes_up": 1200, "train_samples": 1000, "forward_samples": 20},
}


def info(folder: Path, num_rounds: int = 20) -> RunInfo:
    choices = {"dataset": "digits", "partition": "iid", "model": "mlp", "selector": "random"}
    return RunInfo("trial", folder, CONFIG, choices, 0, num_rounds)


def record(round: int, accuracy: float | None = 0.5) -> dict[str, Any]:
    return {
        "round": round,
        "test_accuracy": accuracy,
        "participation_ratio": 0.25,
        "bytes_down": 100,
        "bytes_up": 10,
        "forward_samples": 3,
        "train_samples": 5,
        "wall_seconds": 1.5 * round,
        "selected": [1, 3],
    }


def summary(accuracy: float | None = 0.75, status: str = "done") -> dict[str, Any]:
    smoothed = None if accuracy is None else accuracy / 2
    return {
        "status": status,
        "rounds": 20,
        "wall_seconds": 4.0,
        "mean_participation_ratio": 0.25,
        "coverage": 1.0,
        "final_accuracy": smoothed,
        "last_accuracy": accuracy,
        "initial_accuracy": 0.1,
        "best_accuracy": 0.8,
        "totals": TOTALS,
        "engine": "batched",
    }


def test_records_come_back_and_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a" / "b", CONFIG)
    for t in (1, 2):
        folder.append({"round": t, "loss": float("nan"), "ids": np.arange(2), "x": np.float32(0.5)})
    assert read_metrics(folder.path) == [
        {"round": t, "loss": None, "ids": [0, 1], "x": 0.5} for t in (1, 2)
    ]
    text = (folder.path / "metrics.jsonl").read_text()
    (folder.path / "metrics.jsonl").write_text(text[:-5])
    assert [r["round"] for r in read_metrics(folder.path)] == [1]
    (folder.path / "metrics.jsonl").write_bytes(b'{"round": 1}\n{"round": \xff\x00')  # no text
    (folder.path / "summary.json").write_bytes(b"\xff\xfe{}")
    assert (read_metrics(folder.path), read_summary(folder.path)) == ([{"round": 1}], None)
    assert read_metrics(tmp_path / "nowhere") == []


def test_a_new_run_in_a_folder_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    old = RunFolder.create(tmp_path, CONFIG)
    old.append({"round": 1})
    old.write_summary({"status": "done"})
    old.write_text("error.txt", "no")
    RunFolder.create(tmp_path, CONFIG)
    assert {p.name for p in tmp_path.iterdir()} == {"config.yaml"}
    with pytest.raises(OutputError, match="output_dir: cannot write"):
        RunFolder.create(tmp_path / "config.yaml" / "run", CONFIG)


def test_a_summary_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(tmp_path, CONFIG)
    assert read_summary(tmp_path) is None
    folder.write_summary({"status": "done", "accuracy": np.float64(0.5), "path": tmp_path})
    assert read_summary(tmp_path) == {"status": "done", "accuracy": 0.5, "path": str(tmp_path)}

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(
        OutputError, match=r"output_dir: cannot write .*summary\.json \(No space left on device\)"
    ):
        folder.write_summary({"status": "failed"})
    assert (read_summary(tmp_path) or {})["status"] == "done"
    assert not list(tmp_path.glob("*.tmp"))


def test_json_ready_leaves_only_plain_values() -> None:
    value = json_ready(
        {"a": (1, np.int64(2)), "b": {"c": float("inf")}, 3: Path("x"), "d": np.array([[1.5]])}
    )
    assert json.loads(json.dumps(value, allow_nan=False)) == {
        "a": [1, 2],
        "b": {"c": None},
        "3": "x",
        "d": [[1.5]],
    }
    assert json_ready([torch.tensor(0.5), torch.tensor([1, 2]), torch.tensor(float("nan"))]) == [
        0.5,
        [1, 2],
        None,
    ]


class Listener(Tracker):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def start(self, info: RunInfo) -> None:
        self.heard.append("start")

    def log(self, record: Mapping[str, Any]) -> None:
        self.heard.append(f"log {record['round']}")

    def message(self, text: str) -> None:
        self.heard.append(text)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.heard.append(summary["status"])


class OutOfInk(Tracker):
    def log(self, record: Mapping[str, Any]) -> None:
        raise RuntimeError("out of ink")


class Unmakable(Tracker):
    def __init__(self) -> None:
        raise ConnectionError("nobody there")


class Exiting(Tracker):
    def finish(self, summary: Mapping[str, Any]) -> None:
        raise SystemExit(1)


class Modifying(Tracker):
    def log(self, record: Mapping[str, Any]) -> None:
        assert isinstance(record, dict)
        record["selected"].clear()
        record["round"] = 7


class Noticing(Tracker):
    notice = "no key"
    num_degraded = 2


def heard_next_to(
    cls: type[Tracker], folder: Path, names: Sequence[str] = ("x", "listener")
) -> tuple[list[str], dict[str, Any]]:
    """Return what a tracker hears next to x, which is of class `cls`, and which trackers are
    degraded. `names` is the order in which both are made."""
    listener = Listener()
    trackers = Trackers(names, lambda name: cls() if name == "x" else listener)
    trackers.start(info(folder))
    trackers.log(record(1))
    trackers.log(record(2))
    trackers.finish(summary())
    return listener.heard, trackers.degraded


@pytest.mark.parametrize(
    ("cls", "error", "position"),
    [
        (Unmakable, "ConnectionError: nobody there", 1),
        (OutOfInk, "RuntimeError: out of ink", 1),
        (Exiting, "SystemExit: 1", 3),
    ],
)
def test_a_tracker_that_fails_is_reported_once_and_does_not_disturb_the_others(
    cls: type[Tracker], error: str, position: int, tmp_path: Path
) -> None:
    heard, degraded = heard_next_to(cls, tmp_path)
    message = heard.pop(position)
    assert message == f"tracker.x failed and is skipped from here on: {error}"
    assert heard == ["start", "log 1", "log 2", "done"]
    assert degraded == {"x": error}


@pytest.mark.parametrize("cls", [Unmakable, OutOfInk, Exiting])
def test_a_tracker_that_fails_is_reported_once_to_those_before_it(
    cls: type[Tracker], tmp_path: Path
) -> None:
    heard, _ = heard_next_to(cls, tmp_path, names=("listener", "x"))
    assert heard[0] == "start"
    assert len([text for text in heard if text.startswith("tracker.x failed")]) == 1


class Fragile(Tracker):
    """A tracker that cannot take messages."""

    def __init__(self) -> None:
        self.num_logged = 0

    def message(self, text: str) -> None:
        raise OSError("no messages")

    def log(self, record: Any) -> None:
        self.num_logged += 1


def test_a_tracker_that_fails_at_a_message_in_between_is_skipped_at_once(tmp_path: Path) -> None:
    """OutOfInk fails in `log`, and its message makes the next tracker fail before its turn."""
    fragile = Fragile()
    trackers = Trackers(["ink", "fragile"], lambda name: OutOfInk() if name == "ink" else fragile)
    trackers.start(info(tmp_path))
    trackers.log(record(1))
    trackers.log(record(2))
    assert fragile.num_logged == 0
    assert trackers.degraded["fragile"] == "OSError: no messages"


def test_a_tracker_that_modifies_a_record_does_not_disturb_the_others(tmp_path: Path) -> None:
    heard, degraded = heard_next_to(Modifying, tmp_path)
    assert heard == ["start", "log 1", "log 2", "done"]
    assert degraded == {}


def test_a_notice_is_shown_once_and_failures_are_counted(tmp_path: Path) -> None:
    heard, degraded = heard_next_to(Noticing, tmp_path)
    assert heard == ["start", "no key", "log 1", "log 2", "done"]
    assert degraded == {"x": 2}


def console(width: int = 100, terminal: bool = False) -> Any:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False)


def shown(console: Any) -> str:
    return str(console.file.getvalue())


CLOSING = (
    "0.3750  mean of the last 11 rounds",
    "last accuracy 0.7500",
    "2.5 MB down, 1.2 kB up",
    "1,000 trained",
)
SCREENS = [
    (True, False, 10, ("round 20/20  test accuracy 0.2000", *CLOSING)),
    (True, True, None, ("20/20", "━", " 0.2000  ", "   round  2  ", *CLOSING[1:])),
    (False, False, 0, CLOSING),
]


@pytest.mark.parametrize(("progress", "terminal", "lines", "parts"), SCREENS)
def test_a_run_is_followed_by_some_ten_lines_or_a_bar_and_ends_with_a_table(
    progress: bool, terminal: bool, lines: int | None, parts: tuple[str, ...], tmp_path: Path
) -> None:
    tracker = ConsoleTracker(progress=progress)
    tracker.console = console(terminal=terminal)
    tracker.start(info(tmp_path))
    for t in range(1, 21):
        tracker.log(record(t, None if t % 2 else t / 100))
    tracker.finish(summary())
    text = shown(tracker.console)
    assert lines is None or text.count("test accuracy") == lines
    assert ("█" in text) == terminal
    assert not [part for part in (*parts, str(tmp_path)) if part not in text]


def test_a_line_says_of_which_round_its_accuracy_is(tmp_path: Path) -> None:
    tracker = ConsoleTracker(progress=True)
    tracker.console = console()
    tracker.start(info(tmp_path, num_rounds=4))
    for t in range(1, 5):
        tracker.log(record(t, None if t % 2 else t / 10))
    assert shown(tracker.console).splitlines()[1:] == [
        "  round 1/4  test accuracy -",
        "  round 2/4  test accuracy 0.2000",
        "  round 3/4  test accuracy 0.2000 (round 2)",
        "  round 4/4  test accuracy 0.4000",
    ]


def test_the_curve_of_a_run_has_its_rounds_and_its_lowest_and_highest_accuracy() -> None:
    blank, full = " " * 8, "█" * 8
    assert accuracy_curve({2: 0.1, 4: 0.5, 5: 0.9}, 80).splitlines() == [
        f"  0.9000  {blank}{blank}{full}",
        *[f"          {blank}{blank}{full}"] * 2,
        f"          {blank}{'▁' * 8}{full}",
        *[f"          {blank}{full}{full}"] * 3,
        f"  0.1000  {'▁' * 8}{full}{full}",
        f"   round  2{5:>23}",
    ]
    long = accuracy_curve({t: min(t, 300) / 1000 for t in range(1, 601)}, 50).splitlines()
    assert {len(line) for line in long} == {50}
    assert long[0].count("█") == 20
    assert accuracy_curve({1: 0.5, 2: 0.5}, 10).splitlines()[-2:] == [
        f"  0.5000  {'▁' * 16}",
        f"   round  1{2:>15}",
    ]


def test_the_closing_table_of_a_short_run_with_a_clock_and_accuracies_of_clients() -> None:
    screen, clients = (
        console(120),
        {"mean": 0.5, "worst_tenth": 0.25, "std": 0.125, "never_selected": 0.75},
    )
    more = {"client_accuracy": clients, "simulated_seconds": 9000.0, "late_updates": 1234}
    screen.print(closing_table({**summary(), "rounds": 3, **more}))
    told = "mean 0.5000, worst tenth 0.2500, standard deviation 0.1250, never selected 0.7500"
    for part in ("mean of the last 3 rounds", told, "2.5 h, 1,234 updates too late"):
        assert part in shown(screen)


def test_text_in_brackets_is_shown_as_it_is(tmp_path: Path) -> None:
    tracker = ConsoleTracker(progress=False)
    tracker.console = console(width=200)
    tracker.start(RunInfo("[bold]run", tmp_path, CONFIG, {"model": "[red]"}, 0, 1))
    tracker.message("lies in [/x] or [a]")
    tracker.finish({**summary(status="failed"), "error": "[/b] is no path", "engine": "[/]"})
    sweep_table([row("[/a]", 0, 0.5), row("[b]", 0, 0.5)], tracker.console)
    text = shown(tracker.console)
    for part in (
        "[bold]run: [red]",
        "lies in [/x] or [a]",
        "failed: [/b] is no path",
        "[/]",
        "[/a]",
    ):
        assert part in text


def row(
    selector: str, seed: int, accuracy: float | None, status: str = "done", **labels: str
) -> dict[str, Any]:
    content = summary(accuracy, status) if status != "failed" else {"error": "x"}
    labels = {"selector": selector, "model": "mlp", **labels}
    return {"labels": labels, "seed": seed, "status": status, "summary": content}


def test_a_sweeps_table_shows_what_differs_and_means_over_seeds() -> None:
    target = console()
    rows = [
        row("random", 0, 0.5),
        row("random", 1, 0.7),
        row("full", 0, 0.9),
        row("full", 1, 0.1, "diverged"),
    ]
    sweep_table(rows, target)
    text = shown(target)
    assert "model" not in text
    for part in (
        "4 jobs",
        "0.3000 [0.0000, 0.9353]  0.6000 [0.0000, 1.0000]",
        "0.4500                   0.9000",
        "1/2",
    ):  # the mean of the last rounds first
        assert part in text
    target = console(width=60)
    sweep_table(
        [row("random", 0, 0.5), row("full", 0, None, "failed")], target
    )  # which has no summary
    assert "failed" in shown(target)
    assert "interval" not in shown(target)


def test_a_sweeps_table_has_rounds_if_they_differ() -> None:
    rows = [row("random", 0, 0.5), row("random", 1, 0.7), row("full", 0, 0.9), row("full", 1, 0.9)]
    target = console()
    sweep_table(rows, target)
    assert "rounds " not in shown(target).partition("final:")[0]
    for length, one in zip((18, 21, 11, 11), rows, strict=True):
        one["summary"]["rounds"] = length
    sweep_table(rows, target := console(width=120))
    words = [line.split() for line in shown(target).splitlines()]
    heads = [line for line in words if line[:1] == ["selector"]]
    assert [line[1:4] for line in heads] == [
        ["seed", "status", "rounds"],
        ["seeds", "rounds", "final"],
    ]
    jobs = [line[3] for line in words if line[2:3] == ["done"]]
    assert jobs == ["18", "21", "11", "11"]
    means = [line[:3] for line in words if line[:2] in (["random", "2"], ["full", "2"])]
    assert means == [["random", "2", "19.5"], ["full", "2", "11"]]


def test_each_swept_key_has_a_column_under_the_word_that_was_typed() -> None:
    """`selector.alpha=0,1` sets selector.exploration.value."""
    target = console(width=120)
    rows = []
    for alpha in ("0", "0.5"):
        for lr in ("0.05", "0.1"):
            labels = {"selector.exploration.value": alpha, "optimizer.lr": lr}
            rows.append(row("gpfl", 0, 0.5, **labels))
    sweep_table(rows, target)
    words = [line.split()[:3] for line in shown(target).splitlines()]
    assert words[2] == ["alpha", "lr", "seed"]
    assert words[4:8] == [
        ["0", "0.05", "0"],
        ["0", "0.1", "0"],
        ["0.5", "0.05", "0"],
        ["0.5", "0.1", "0"],
    ]


def test_bytes_and_seconds_are_readable() -> None:
    sizes = {
        0: "0 B",
        999: "999 B",
        1000: "1 kB",
        999_600: "1 MB",
        2_567_000: "2.57 MB",
        3.2e12: "3.2 TB",
    }
    times = {0.0123: "12 ms", 12.34: "12.3 s", 600: "10.0 min", 36000: "10.0 h"}
    assert {size: show_bytes(size) for size in sizes} == sizes
    assert {seconds: show_seconds(seconds) for seconds in times} == times
