"""The lock of a run's folder: held by a live process it keeps others out, left by a dead one it does not."""

import errno
import os
import socket
import subprocess
import sys
from contextlib import nullcontext
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


def test_the_lock_of_a_process_that_is_killed_is_taken_over(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(HeldError, match="another process is running this"), owned(folder):
            pass
    finally:
        process.kill()
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


@pytest.mark.filterwarnings("ignore:flock not supported")
@pytest.mark.parametrize("who", ["dead", "alive", "of another host"])
def test_without_flock_the_lock_of_a_dead_process_is_taken_over_and_any_other_respected(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a file with number and host of its process is the lock. Of another host it cannot be known whether the
    process lives."""

    def missing(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", missing)
    (tmp_path / LOCKS).mkdir()
    host = "another-host" if who == "of another host" else socket.gethostname()
    (tmp_path / LOCKS / "run.lock").write_text(f"{os.getppid() if who == 'alive' else dead.pid}\n{host}\n")
    taken = nullcontext() if who == "dead" else pytest.raises(HeldError, match="another process is running this")
    with taken, owned(tmp_path / "run"):
        pass
