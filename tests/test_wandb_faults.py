"""Weights & Biases silent, dead or hanging: the run does not notice, and leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import wandb

from fedsim.tracking.base import Trackers
from fedsim.tracking.wandb_tracker import WandbTracker
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
    listener = socket.create_server(("127.0.0.1", 0))  # which accepts, and is silent
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
    assert trackers.degraded == {"wandb": 1}
    assert "could not go online" in str(mirror.notice)
    assert [h["round"] for h in history_of(offline_records(tmp_path))] == [1, 2, 3]


def begun(folder: Path, timeout: float | None = None) -> tuple[WandbTracker, Trackers]:
    mirror = tracker(timeout=timeout)
    trackers = Trackers(["wandb"], lambda name: mirror)
    trackers.start(info(folder))
    return mirror, trackers


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [(signal.SIGKILL, "W&B: "), (signal.SIGSTOP, "W&B: no answer within 2 s; nothing is lost")],
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
def test_a_killed_run_leaves_no_process_and_no_litter_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    code = (
        "import sys, time; from pathlib import Path; from tests.wandb_toys import info, record, tracker\n"
        "t = tracker(); t.start(info(Path(sys.argv[1]))); t.log(record(1)); time.sleep(600)"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[1]
    )
    wait_for(lambda: list(tmp_path.glob("wandb/offline-run-*/*.wandb")))
    assert list(tmp_path.glob("t/fedsim-wandb-*"))
    run.kill()
    run.wait()
    wait_for(lambda: processes(tmp_path) == {})
    assert not list(tmp_path.glob("t/fedsim-wandb-*"))
    records = offline_records(tmp_path)
    assert [h["round"] for h in history_of(records)] == [1]
    assert [r.exit.exit_code for r in records if r.HasField("exit")] == [1]


@pytest.mark.parametrize(
    ("dies", "told"), [(False, "no answer within 0.5 s"), (True, "its process ended early")]
)
def test_a_mirror_that_dies_or_hangs_is_given_up_and_gone(
    dies: bool,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    waits: list[float | None],
) -> None:
    """It reads nothing, so that a run that wrote to it itself would wait until it is gone."""
    sleeper = (sys.executable, "-c", "import time; time.sleep(600)")
    monkeypatch.setattr("fedsim.tracking.wandb_tracker.COMMAND", sleeper)
    mirror, trackers = begun(tmp_path, timeout=0.5)
    assert mirror._process is not None
    pid = mirror._process.child.pid
    if dies:
        os.kill(pid, signal.SIGKILL)
    for t in range(1, 3000):
        trackers.log(record(t))
    assert waits == []
    trackers.finish(summary())
    assert waits[0] == 0.5
    assert trackers.degraded == {"wandb": 1}
    assert f"W&B: {told}" in str(mirror.notice)
    assert "; nothing is lost: " in str(mirror.notice)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
