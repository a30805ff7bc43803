"""Processes that receive a stop signal save within a round, and the same command resumes them.

The exit code says which signal it was.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsim.core.record import Record
from fedsim.jobs.cli import run
from fedsim.results.files import NEWEST
from fedsim.results.reading import read_metrics, read_summary
from fedsim.rounds.loop import Simulation
from fedsim.running import process as signals
from fedsim.running.process import StopRequests
from tests.checkpoint_toys import WORDS, result

pytestmark = pytest.mark.usefixtures("stop")
HANG = 1800


@pytest.fixture
def interrupt(stop: StopRequests, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs a command, which receives signals in round 4.

    It returns the exception that ends the command.
    """
    step = Simulation.step

    def run_interrupted(*words: str, numbers: Sequence[int]) -> BaseException:
        left = list(numbers)

        def interrupted_step(self: Simulation) -> Record:
            while self.round == 3 and left:
                stop.handle(left.pop(0))
            return step(self)

        with monkeypatch.context() as patch:
            patch.setattr(Simulation, "step", interrupted_step)
            with pytest.raises((KeyboardInterrupt, signals.Preempted)) as caught:
                run([*WORDS, *words])
        stop.__init__()  # type: ignore[misc]
        return caught.value

    return run_interrupted


def folders(place: str) -> list[Path]:
    return sorted(path.parent for path in Path(place).glob("*/*/config.yaml"))


@pytest.mark.parametrize(
    ("numbers", "status", "rounds"),
    [
        ([signal.SIGTERM, signal.SIGTERM], "preempted", 4),  # clusters repeat it
        ([signal.SIGUSR1, signal.SIGTERM], "preempted", 4),
        ([signal.SIGINT], "interrupted", 4),
        ([signal.SIGINT, signal.SIGINT], "interrupted", 3),  # within the round
    ],
)
def test_a_signal_saves_after_the_round_and_the_same_command_resumes(
    numbers: list[int], status: str, rounds: int, interrupt: Any
) -> None:
    assert run([*WORDS, "output_dir=whole"]) == 0
    error = interrupt("checkpoint.every=2", numbers=numbers)
    assert isinstance(error, KeyboardInterrupt if status == "interrupted" else signals.Preempted)
    (folder,) = folders("outputs")
    summary = read_summary(folder) or {}
    assert (summary["status"], summary["rounds"]) == (status, rounds)
    assert (folder / NEWEST).exists()
    assert run([*WORDS, "checkpoint.every=2"]) == 0
    assert result(folder) == result(*folders("whole"))


def test_a_sweep_in_lanes_stops_with_all_that_runs_saved(interrupt: Any) -> None:
    words = ("-m", "seed=0,1,2", "hydra/launcher=lanes")
    assert run([*WORDS, *words, "output_dir=whole"]) == 0
    assert isinstance(interrupt(*words, numbers=[signal.SIGTERM]), signals.Preempted)
    for folder in folders("outputs"):
        summary = read_summary(folder) or {}
        assert summary["status"] == "preempted"
        assert 3 <= summary["rounds"] <= 4
    assert run([*WORDS, *words]) == 0
    assert [result(f) for f in folders("outputs")] == [result(f) for f in folders("whole")]


# --- as a cluster and a user do it ---

LONG = ("num_rounds=100000", "local.epochs=1", "num_clients=6", "cohort_size=2", "eval_every=1000")


def started(folder: Path, *words: str) -> "subprocess.Popen[str]":
    """Start a run that receives Ctrl-C.

    A shell makes jobs in the background ignore it, and fedsim respects that.
    """
    command = [sys.executable, "-m", "fedsim.run", *LONG, *words]
    return subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )


def children_of(pid: int) -> list[int]:
    children: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        children += map(int, listing.read_text().split())
    return children


def rounds_on_file(folder: Path) -> int:
    files = folder.glob("outputs/*/*/metrics.jsonl")
    return max((len(read_metrics(file.parent)) for file in files), default=0)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_a_process_that_receives_sigterm_saves_and_leaves_no_other_behind(tmp_path: Path) -> None:
    process = started(tmp_path, "tracker.wandb.mode=offline")
    try:
        while rounds_on_file(tmp_path) < 3 and process.poll() is None:
            time.sleep(0.05)
        children = children_of(process.pid)
        assert children  # W&B's
        process.terminate()
        _, errors = process.communicate(timeout=HANG)
    finally:
        process.kill()
    assert process.returncode == 75, errors
    assert "Traceback" not in errors
    (folder,) = (p.parent for p in tmp_path.glob("outputs/*/*/summary.json"))
    summary = read_summary(folder) or {}
    assert summary["status"] == "preempted"
    assert summary["rounds"] == len(read_metrics(folder)) >= 3
    assert (folder / NEWEST).exists()
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def handles(pid: int, number: int) -> bool:
    """Return whether a process has installed a handler for a signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.parametrize("seconds", [0.0, pytest.param(0.6, marks=pytest.mark.slow)])
def test_ctrl_c_is_130_without_a_traceback_however_early(seconds: float, tmp_path: Path) -> None:
    process = started(tmp_path, "tracker=files_only")
    try:
        while not handles(process.pid, signal.SIGUSR1):
            time.sleep(0.002)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=HANG)
    finally:
        process.kill()
    assert "Traceback" not in errors
    assert process.returncode == 130


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
@pytest.mark.parametrize("missing", [(0, 1, 2), pytest.param((0, 2), marks=pytest.mark.slow)])
def test_without_standard_streams_a_notice_goes_nowhere(
    missing: Sequence[int], tmp_path: Path
) -> None:
    """Otherwise the next files get the numbers 0 to 2: the lock, the records, the checkpoint."""

    def close() -> None:
        for number in missing:
            os.close(number)

    command = [sys.executable, "-m", "fedsim", *LONG, "tracker=files_only", "checkpoint.every=1"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, preexec_fn=close)  # noqa: PLW1509
    try:
        while rounds_on_file(tmp_path) < 3 and process.poll() is None:
            time.sleep(0.05)
        streams = [str(Path(f"/proc/{process.pid}/fd/{number}").readlink()) for number in missing]
        process.terminate()
        assert process.wait(HANG) == 75
    finally:
        process.kill()
    assert streams == [os.devnull] * len(missing)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 3
    assert not [path for path in files if signals.NOTICE in path.read_bytes()]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
@pytest.mark.parametrize(("user_says", "num_calls"), [(False, 3), (True, 0)])
def test_freed_memory_is_kept_unless_the_environment_says_otherwise(
    user_says: bool, num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *arguments: calls.append(arguments))
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    if user_says:
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    signals.tune()
    assert len(calls) == num_calls
