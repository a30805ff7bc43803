"""Weights & Biases silent, dead or hanging: the run does not notice, and leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import wandb

from fedsim.tracking.base import Trackers
from fedsim.tracking.wandb_tracker import COMMAND, WandbTracker
from tests.test_tracking import info, record, summary
from tests.wandb_toys import HANG, history_of, linux, offline_records, processes, tracker, wait_for

pytestmark = pytest.mark.usefixtures("no_account")


@pytest.mark.skipif(
    tuple(map(int, wandb.__version__.split(".")[:2])) < (0, 29),
    reason="older services take no offline run while the online one still tries: then it is told and counted alone",
)
@pytest.mark.slow
def test_a_server_that_never_answers_makes_the_run_offline_without_losing_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float | None]
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    accepted: list[socket.socket] = []

    def accept() -> None:
        with suppress(OSError):
            while True:
                accepted.append(listener.accept()[0])

    threading.Thread(target=accept, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    mirror, trackers = begun(tmp_path, timeout=5.0)
    for t in (1, 2, 3):
        trackers.log(record(t))
    assert waits == []
    mirror.timeout = HANG
    wait_for(lambda: list(tmp_path.glob("wandb/offline-run-*/*.wandb")))
    trackers.finish(summary())
    listener.close()
    assert accepted
    assert trackers.degraded == {"wandb": 1}
    assert "could not go online" in str(mirror.notice)
    assert [h["round"] for h in history_of(offline_records(tmp_path))] == [1, 2, 3]


def begun(folder: Path, timeout: float | None = None) -> tuple[WandbTracker, Trackers]:
    mirror = tracker(timeout=timeout)
    trackers = Trackers({"wandb": lambda: mirror})
    trackers.start(info(folder))
    return mirror, trackers


def test_the_death_of_its_process_is_counted_and_nothing_else(tmp_path: Path) -> None:
    mirror, trackers = begun(tmp_path)
    assert mirror._process is not None
    os.kill(mirror._process.child.pid, signal.SIGKILL)
    for t in range(1, 2000):
        trackers.log(record(t))
    trackers.finish(summary())
    assert trackers.degraded == {"wandb": 1}
    assert "W&B: its process ended early (exit code -9); nothing is lost: " in str(mirror.notice)


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"), [(signal.SIGKILL, "W&B: "), (signal.SIGSTOP, "W&B: no answer within 2 s; nothing is lost")]
)
def test_wandbs_service_may_die_or_hang_in_mid_run(
    tmp_path: Path, fault: signal.Signals, told: str, waits: list[float | None]
) -> None:
    mirror, trackers = begun(tmp_path, timeout=2.0)
    trackers.log(record(1))
    wait_for(lambda: list(tmp_path.glob("wandb/offline-run-*/*.wandb")))
    os.kill(processes(tmp_path)["service"], fault)
    for t in range(2, 300):
        trackers.log(record(t))
    assert waits == []
    trackers.finish(summary())
    assert waits[0] == 2.0
    assert trackers.degraded == {"wandb": 1}
    assert str(mirror.notice).startswith(told)
    wait_for(lambda: processes(tmp_path) == {})


@linux
@pytest.mark.slow
def test_a_killed_run_leaves_no_process_and_no_litter_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    code = (
        "import sys, time; from pathlib import Path; from tests.wandb_toys import info, record, tracker\n"
        "t = tracker(); t.start(info(Path(sys.argv[1]))); t.log(record(1)); time.sleep(600)"
    )
    run = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[1])
    wait_for(lambda: list(tmp_path.glob("wandb/offline-run-*/*.wandb")))
    assert list(tmp_path.glob("t/fedsim-wandb-*"))
    run.kill()
    run.wait()
    wait_for(lambda: processes(tmp_path) == {})
    assert not list(tmp_path.glob("t/fedsim-wandb-*"))
    records = offline_records(tmp_path)
    assert [h["round"] for h in history_of(records)] == [1]
    assert [r.exit.exit_code for r in records if r.HasField("exit")] == [1]


def test_a_mirror_that_hangs_is_given_up_and_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float | None]
) -> None:
    """It reads nothing, so that a run that wrote to it itself would wait until it is gone."""
    sleeper = (sys.executable, "-c", "import time; time.sleep(600)")
    assert COMMAND[0] == sleeper[0]
    monkeypatch.setattr("fedsim.tracking.wandb_tracker.COMMAND", sleeper)
    mirror = tracker(timeout=0.5)
    mirror.start(info(tmp_path))
    assert mirror._process is not None
    pid = mirror._process.child.pid
    for t in range(1, 3000):
        mirror.log(record(t))
    assert waits == []
    assert mirror._process.child.poll() is None
    mirror.finish(summary())
    assert waits == [0.5, None]  # then it was killed
    assert mirror.num_degraded == 1
    assert "no answer within 0.5 s; nothing is lost: " in str(mirror.notice)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
