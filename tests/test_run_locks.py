"""The lock of a run's folder: held by a live process it keeps others out, left by a dead one it does not."""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsim.jobs.cli import run
from fedsim.results.files import LOCKS, HeldError, owned

ROOT = Path(__file__).parents[1]
HOLD = """
import sys, time
from pathlib import Path
from fedsim.results.files import owned

with owned(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(3600)
"""


def holder(folder: Path) -> "subprocess.Popen[str]":
    """A process that holds the lock of `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_lock_of_a_process_that_is_killed_is_taken_over(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = holder(folder)
    try:
        with pytest.raises(HeldError, match="another process is running this"), owned(folder):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with owned(folder):
        pass


@pytest.mark.parametrize("content", ["", "4194304\nanother-host\n", "no lock at all"])
def test_a_lock_file_that_nobody_holds_is_none(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that came with the folder from another host."""
    monkeypatch.chdir(tmp_path)
    words = ["num_rounds=1", "local.epochs=1", "num_clients=6", "cohort_size=2", "tracker=files_only"]
    assert run([*words, "output_dir=first"]) == 0
    (lock,) = Path("first").rglob("*.lock")
    there = Path("second") / lock.relative_to("first")
    there.parent.mkdir(parents=True)
    there.write_text(content)
    assert run([*words, "output_dir=second"]) == 0


@pytest.fixture
def without_flock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int, str], None]:
    """A file system without flock, on which a file with number and host of its process is the lock; writes one."""
    fcntl = pytest.importorskip("fcntl")

    def missing(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", missing)

    def write(folder: Path, number: int, host: str) -> None:
        (folder.parent / LOCKS).mkdir()
        (folder.parent / LOCKS / f"{folder.name}.lock").write_text(f"{number}\n{host}\n")

    return write


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_without_flock_the_lock_of_a_dead_process_is_taken_over(
    tmp_path: Path, without_flock: Callable[[Path, int, str], None]
) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    without_flock(tmp_path / "run", dead.pid, socket.gethostname())
    with owned(tmp_path / "run"):
        pass


@pytest.mark.filterwarnings("ignore:flock not supported")
@pytest.mark.parametrize("host", ["another-host", socket.gethostname()])
def test_without_flock_the_lock_of_a_live_process_or_of_another_host_is_respected(
    host: str, tmp_path: Path, without_flock: Callable[[Path, int, str], None]
) -> None:
    """Whether a process of another host lives cannot be known from here."""
    without_flock(tmp_path / "run", os.getppid(), host)
    with pytest.raises(HeldError, match="another process is running this"), owned(tmp_path / "run"):
        pass
