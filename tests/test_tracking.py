"""Files, console and trackers; Weights & Biases is in test_wandb.py."""

import errno
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from fedsim.results.files import OutputError, RunFolder, json_ready, read_metrics, read_summary
from fedsim.tracking.base import RunInfo, Tracker, Trackers
from fedsim.tracking.console import ConsoleTracker
from fedsim.tracking.tables import closing_table, show_bytes, show_seconds, sweep_table

CONFIG = {"name": "trial", "seed": 0, "selector": {"_target_": "x.Y"}}
TOTALS = {
    **{f"seconds_{p}": 1.0 for p in ("select", "ask", "train", "aggregate", "evaluate")},
    "bytes_down": 2_500_000,
    "bytes_up": 1200,
    "train_samples": 1000,
    "forward_samples": 20,
}


def info(folder: Path, num_rounds: int = 20) -> RunInfo:
    choices = {"dataset": "digits", "partition": "iid", "model": "mlp", "selector": "random"}
    return RunInfo("trial", folder, CONFIG, choices, 0, num_rounds)


def record(round: int, accuracy: float | None = 0.5) -> dict[str, Any]:
    return {"round": round, "test_accuracy": accuracy, "participation_ratio": 0.25, "wall_seconds": 1.5 * round}


def summary(accuracy: float | None = 0.75, status: str = "done") -> dict[str, Any]:
    return {
        "status": status,
        "rounds": 20,
        "smoothed_accuracy": None if accuracy is None else accuracy / 2,
        "final_accuracy": accuracy,
        "initial_accuracy": 0.1,
        "best_accuracy": 0.8,
        "wall_seconds": 4.0,
        "mean_participation_ratio": 0.25,
        "coverage": 1.0,
        "totals": TOTALS,
        "engine": "batched",
    }


# --- files ---------------------------------------------------------------------------------------------------------


def test_records_come_back_and_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a" / "b", CONFIG)
    for t in (1, 2):
        folder.append({"round": t, "loss": float("nan"), "ids": np.arange(2), "x": np.float32(0.5)})
    assert read_metrics(folder.path) == [{"round": t, "loss": None, "ids": [0, 1], "x": 0.5} for t in (1, 2)]
    text = (folder.path / "metrics.jsonl").read_text()
    (folder.path / "metrics.jsonl").write_text(text[:-5])
    assert [r["round"] for r in read_metrics(folder.path)] == [1]
    assert read_metrics(tmp_path / "nowhere") == []


def test_a_new_run_in_a_folder_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    old = RunFolder.create(tmp_path, CONFIG)
    old.append({"round": 1})
    old.write_summary({"status": "done"})
    old.write_text("error.txt", "no")
    RunFolder.create(tmp_path, CONFIG)
    assert {p.name for p in tmp_path.iterdir()} == {"config.yaml"}


def test_a_summary_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(tmp_path, CONFIG)
    assert read_summary(tmp_path) is None
    folder.write_summary({"status": "done", "accuracy": np.float64(0.5), "path": tmp_path})
    assert read_summary(tmp_path) == {"status": "done", "accuracy": 0.5, "path": str(tmp_path)}

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OutputError, match=r"output_dir: cannot write .*summary\.json \(No space left on device\)"):
        folder.write_summary({"status": "failed"})
    assert read_summary(tmp_path) == {"status": "done", "accuracy": 0.5, "path": str(tmp_path)}
    assert not list(tmp_path.glob("*.tmp"))


def test_a_folder_that_cannot_be_made_names_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="output_dir: cannot write"):
        RunFolder.create(tmp_path / "file" / "run", CONFIG)


def test_json_ready_leaves_only_plain_values() -> None:
    value = json_ready({"a": (1, np.int64(2)), "b": {"c": float("inf")}, 3: Path("x"), "d": np.array([[1.5]])})
    assert json.loads(json.dumps(value, allow_nan=False)) == {"a": [1, 2], "b": {"c": None}, "3": "x", "d": [[1.5]]}
    assert json_ready([torch.tensor(0.5), torch.tensor([1, 2]), torch.tensor(float("nan"))]) == [0.5, [1, 2], None]


def test_files_that_are_no_text_count_as_torn(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"round": 1}\n{"round": \xff\x00')
    (tmp_path / "summary.json").write_bytes(b"\xff\xfe{}")
    assert read_metrics(tmp_path) == [{"round": 1}]
    assert read_summary(tmp_path) is None


# --- several trackers ----------------------------------------------------------------------------------------------


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


class Broken(Tracker):
    def log(self, record: Mapping[str, Any]) -> None:
        raise RuntimeError("out of ink")


def test_a_tracker_that_fails_is_told_of_once_and_hurts_nobody(tmp_path: Path) -> None:
    listener = Listener()
    trackers = Trackers({"broken": Broken(), "listener": listener})
    trackers.start(info(tmp_path))
    for t in (1, 2):
        trackers.log(record(t))
    trackers.finish(summary())
    failure = "tracker.broken failed and is left out from here on: RuntimeError: out of ink"
    assert listener.heard == ["start", failure, "log 1", "log 2", "done"]
    assert trackers.degraded == {"broken": "RuntimeError: out of ink"}


class Counting(Tracker):
    def finish(self, summary: Mapping[str, Any]) -> None:
        raise SystemExit(1)


def test_a_tracker_that_cannot_be_made_or_raises_at_the_end_hurts_nobody(tmp_path: Path) -> None:
    def not_made() -> Tracker:
        raise ConnectionError("nobody there")

    listener = Listener()
    makers = {"absent": not_made, "counting": Counting, "listener": lambda: listener}
    trackers = Trackers.made_by(makers)
    trackers.start(info(tmp_path))
    trackers.finish(summary())
    text = "tracker.absent failed and is left out from here on: ConnectionError: nobody there"
    assert listener.heard[:2] == ["start", text]
    assert "done" in listener.heard
    assert trackers.degraded == {"absent": "ConnectionError: nobody there", "counting": "SystemExit: 1"}


class Noticing(Tracker):
    notice = "no key"
    num_degraded = 2


def test_a_notice_is_told_once_and_counters_come_with_the_trackers_name(tmp_path: Path) -> None:
    listener = Listener()
    trackers = Trackers({"quiet": Noticing(), "listener": listener})
    trackers.start(info(tmp_path))
    trackers.finish(summary())
    assert listener.heard == ["start", "no key", "done"]
    assert trackers.degraded == {"quiet": 2}


# --- console -------------------------------------------------------------------------------------------------------


def console(width: int = 100, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def play(tracker: ConsoleTracker, folder: Path, num_rounds: int = 20) -> None:
    tracker.start(info(folder, num_rounds))
    for t in range(1, num_rounds + 1):
        tracker.log(record(t, None if t % 2 else t / 100))
    tracker.finish(summary())


def test_without_a_terminal_about_ten_lines_and_a_closing_table(tmp_path: Path) -> None:
    tracker = ConsoleTracker(progress=True)
    tracker.console = console()
    play(tracker, tmp_path)
    text = shown(tracker.console)
    assert text.count("test accuracy") == 10
    assert "round 20/20  test accuracy 20.00 %" in text
    for part in (
        "37.50 %",
        "mean of the last 11 rounds",
        "last round 75.00 %",
        "25.00 %",
        "4.0 s",
        "2.5 MB down, 1.2 kB up",
        "1,000 trained on",
        str(tmp_path),
    ):
        assert part in text


def test_a_short_run_has_the_mean_of_its_rounds(tmp_path: Path) -> None:
    screen = console()
    screen.print(closing_table({**summary(), "rounds": 3}))
    assert "mean of the last 3 rounds" in shown(screen)


def test_on_a_terminal_a_bar_with_the_accuracy(tmp_path: Path) -> None:
    tracker = ConsoleTracker(progress=True)
    tracker.console = console(terminal=True)
    play(tracker, tmp_path)
    assert "20/20" in shown(tracker.console)
    assert "━" in shown(tracker.console)


def test_progress_can_be_left_out(tmp_path: Path) -> None:
    tracker = ConsoleTracker(progress=False)
    tracker.console = console()
    play(tracker, tmp_path)
    assert "round 10" not in shown(tracker.console)


def test_text_in_brackets_is_shown_as_it_is(tmp_path: Path) -> None:
    tracker = ConsoleTracker(progress=False)
    tracker.console = console(width=200)
    tracker.start(RunInfo("[bold]run", tmp_path, CONFIG, {"model": "[red]"}, 0, 1))
    tracker.message("lies in [/x] or [a]")
    tracker.finish({**summary(status="failed"), "error": "[/b] is no path", "engine": "[/]"})
    text = shown(tracker.console)
    for part in ("[bold]run: [red]", "lies in [/x] or [a]", "failed: [/b] is no path", "[/]"):
        assert part in text
    sweep_table([row("[/a]", 0, 0.5), row("[b]", 0, 0.5)], tracker.console)
    assert "[/a]" in shown(tracker.console)


def row(selector: str, seed: int, accuracy: float | None, status: str = "done") -> dict[str, Any]:
    content = summary(accuracy, status) if status != "failed" else {"error": "x"}
    return {"labels": {"selector": selector, "model": "mlp"}, "seed": seed, "status": status, "summary": content}


def test_a_sweeps_table_shows_what_differs_and_means_over_seeds() -> None:
    target = console()
    rows = [row("random", 0, 0.5), row("random", 1, 0.7), row("full", 0, 0.9), row("full", 1, 0.1, "diverged")]
    sweep_table(rows, target)
    text = shown(target)
    assert "4 jobs" in text
    assert "model" not in text
    assert "30.00 ± 7.07  60.00 ± 14.14" in text  # the mean of the last rounds first
    assert "45.00   90.00" in text
    assert "1/2" in text


@pytest.mark.parametrize("width", [70, 80, 120])
def test_a_sweeps_table_breaks_no_name_and_says_which_columns_it_leaves_out(width: int) -> None:
    target = console(width=width)
    rows = [
        {**row(selector, 0, 0.5), "labels": {"selector": selector, "partition": "dirichlet_client"}}
        for selector in ("power_of_choice_d10", "random")
    ]
    rows[1]["labels"]["partition"] = "shards_2"
    sweep_table(rows, target)
    text = shown(target)
    assert "power_of_choice_d10  dirichlet_client" in text
    assert max(map(len, text.splitlines())) <= width
    heads = next(line for line in text.splitlines() if "selector" in line)
    left_out = " ".join(text.split()).partition("left out at this width: ")[2]
    for name in ("final %", "last %", "part. %", "time", "down", "up"):
        assert (name in heads) != (name in left_out)
    assert "final %" in heads
    assert bool(left_out) == (width < 120)


def test_a_sweeps_table_lists_jobs_that_left_no_summary() -> None:
    target = console(width=60)
    sweep_table([row("random", 0, 0.5), row("full", 0, None, "failed")], target)
    assert "failed" in shown(target)
    assert "over seeds" not in shown(target)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_600, "1 MB"), (2_567_000, "2.57 MB"), (3.2e12, "3.2 TB")],
)
def test_bytes_are_readable(value: float, text: str) -> None:
    assert show_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0123, "12 ms"), (12.34, "12.3 s"), (600, "10.0 min"), (36000, "10.0 h")]
)
def test_seconds_are_readable(value: float, text: str) -> None:
    assert show_seconds(value) == text
