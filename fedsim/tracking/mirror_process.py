"""The child process that runs W&B, as used by a run: messages are queued, and waiting for the child is limited."""

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

START = f"""
import os, sys
del sys.argv[1]
here = os.getcwd()
sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here] + [{str(Path(__file__).parents[2])!r}]
from fedsim.tracking.wandb_mirror import main
main()
"""
COMMAND = (sys.executable, "-P", "-c", START, "fedsim.tracking.wandb_mirror")
"""Nothing is imported from the working folder, in which a file may be called like a module (json.py); fedsim itself is
searched for last, as it may be that folder. The last word names the process for those who look for it."""
NO_ANSWER = "no answer within"
"""How the report begins of a process that was given up."""
NOT_INHERITED = ("WANDB_RUN_ID", "WANDB_RESUME")
"""Environment variables that would merge all jobs of a sweep into one W&B run."""


class MirrorProcess:
    """Sends messages to the child process from a thread, so that only `finish` waits for the child."""

    def __init__(self) -> None:
        self._temporary = tempfile.mkdtemp(prefix="fedsim-wandb-")
        environment = {k: v for k, v in os.environ.items() if k not in NOT_INHERITED}
        self._child = subprocess.Popen(
            [*COMMAND, "--pipe", self._temporary],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment | {"WANDB_ERROR_REPORTING": "false"},
            start_new_session=True,  # Ctrl-C goes to the run only
        )
        self._queue: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message for the child."""
        self._queue.put(message)

    def finish(self, seconds: float) -> str:
        """Close the queue, wait at most `seconds` for the child to end, kill it if it has not, and return its report.

        The report is `done` or a description of the failure.
        """
        self._queue.put(None)
        assert self._child.stdout is not None
        try:
            code = self._child.wait(seconds)
            with self._child.stdout as output:
                return output.read().strip() or f"its process ended early (exit code {code})"
        except subprocess.TimeoutExpired:
            return f"{NO_ANSWER} {seconds:.3g} s"
        finally:
            kill_with_children(self._child)
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _write(self) -> None:
        assert self._child.stdin is not None
        with suppress(OSError, ValueError), self._child.stdin as pipe:
            while (message := self._queue.get()) is not None:
                pipe.write(json.dumps(message) + "\n")
                pipe.flush()


def kill_with_children(process: "subprocess.Popen[str]") -> None:
    """Kill a process that has not ended, and its children.

    W&B's service runs in its own session, so that killing the process group would not end it.
    """
    if process.poll() is not None:
        return
    listings = Path(f"/proc/{process.pid}/task").glob("*/children")  # Linux; elsewhere the service watches its parent
    with suppress(OSError):
        children = [int(pid) for listing in listings for pid in listing.read_text().split()]
        for pid in children:
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()
