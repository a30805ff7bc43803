"""The tracker for Weights & Biases (W&B).

A separate process, the mirror process (`wandb_mirror`), communicates with W&B, so that W&B can
neither stop nor delay nor change a run. A run keeps its W&B id in its folder, so that a process
that resumes or sends it later continues the same run of W&B.
"""

import json
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedsim.core.errors import check, positive, rule
from fedsim.core.text import command
from fedsim.results.files import json_ready
from fedsim.tracking.base import RunInfo, Tracker
from fedsim.tracking.metrics import RoundMetrics
from fedsim.tracking.wandb_messages import log_message, name_problems, start_message

MAX_SECONDS = 20.0
"""Maximum of `timeout`."""
DEAD_SECONDS = 2.0
"""Maximum time that a run waits for a server that has not answered another run since it began."""
RETRY_SECONDS = 3600.0
"""Time before a server that did not answer is tried again."""
LATER = "later"
"""The mode of a run that is sent later: as `auto`, but never without a record."""

# A report says in a line how the mirror process has ended. It is one of these, or an error of W&B.
DONE = "done"
NO_KEY = "no API key"
NOT_ONLINE = "could not go online"  # the beginning of the report
NO_ANSWER = "no answer within"  # the beginning of the report

Mode = Literal["auto", "online", "offline", "disabled"]


@dataclass
class WandbServer:
    """The knowledge about W&B's server that all runs of this process share.

    `failed` is the time at which the server last did not answer (`time.monotonic()`), or minus
    infinity if it has answered since. `announced` has the kinds of failures that were printed,
    because each is printed once a process.
    """

    failed: float = -math.inf
    announced: set[str] = field(default_factory=set)

    @property
    def is_dead(self) -> bool:
        """True if the server has not answered lately, so that it is not tried again yet."""
        return time.monotonic() - self.failed < RETRY_SECONDS


SERVER = WandbServer()


class WandbTracker(Tracker):
    """A tracker that makes one W&B run of each run, with step = `round`.

    The group is the run's name, and job_type its selector. `mode: auto` is what W&B itself would do
    by its settings (environment, netrc, files), but offline without an API key. The run waits for
    W&B only at its end, for at most `timeout` seconds. Failures are then reported and counted.
    After the server has not answered, later runs of the process are logged offline from the start.
    """

    def __init__(
        self,
        *,
        mode: Mode,
        project: str,
        entity: str | None,
        tags: list[str] | str | None,
        timeout: float,
        group: str | None = None,
    ) -> None:
        is_disabled = mode == "auto" and os.environ.get("WANDB_MODE") == "disabled"
        self.mode: Mode = "disabled" if is_disabled else mode
        self.timeout = timeout
        self._labels = {"project": project, "entity": entity, "group": group, "tags": tags}
        problems = [] if self.mode == "disabled" else list(name_problems(self._labels))
        fault = f"must be at most {MAX_SECONDS:g} seconds"
        problems.append(positive("timeout", timeout))
        problems.append(rule(timeout <= MAX_SECONDS, "timeout", timeout, fault))
        check(*problems)
        self._process: MirrorProcess | None = None

    def start(self, info: RunInfo) -> None:
        if self.mode == "disabled":
            return
        self._folder = info.results
        self._metrics = RoundMetrics(info)
        mode = "offline" if SERVER.is_dead else self.mode
        self._tries_server = mode != "offline"
        self._process = MirrorProcess()
        message = start_message(info, self._labels, mode, self.timeout)
        self._process.send({"start": message})

    def log(self, record: Mapping[str, Any]) -> None:
        if self._process is not None:
            self._process.send(log_message(self._metrics, record))

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self._process is None:
            return
        # 1. Wait for the process.
        seconds = self.timeout
        if self._tries_server and SERVER.is_dead:
            seconds = min(seconds, DEAD_SECONDS)
        self._process.send({"finish": json_ready(summary)})
        report = self._process.finish(seconds)
        self._process = None
        # 2. Remember whether the server has answered.
        if self._tries_server and report == DONE:
            SERVER.failed = -math.inf
        elif self._tries_server and report.startswith((NOT_ONLINE, NO_ANSWER)):
            SERVER.failed = time.monotonic()
        elif report == DONE and self.mode != "offline":
            report = "the server did not answer an earlier run, so this one is logged offline"
        # 3. Print the first failure of its kind. The kind is the report without details.
        kind = report.partition(" (")[0]
        if kind not in (DONE, NO_KEY):
            self.num_degraded += 1
        if kind == DONE or kind in SERVER.announced:
            return
        SERVER.announced.add(kind)
        if kind == NO_KEY:
            self.notice = (
                f"W&B: {NO_KEY}, so runs are logged offline, in the folder wandb of each\n"
                "     (`wandb login` sends them online; tracker.wandb.mode=disabled: without W&B)"
            )
        else:
            remedy = command("fedsim", "sync", str(self._folder))
            self.notice = f"W&B: {report}; nothing is lost: {remedy} sends it"


# argv[1] only names the process, for those who look for it in the list of processes.
START = f"""
import os, sys
del sys.argv[1]
here = os.getcwd()
sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
sys.path.append({str(Path(__file__).parents[2])!r})
from fedsim.tracking.wandb_mirror import main
main()
"""
COMMAND = (sys.executable, "-P", "-c", START, "fedsim.tracking.wandb_mirror")
"""The command of the process that communicates with W&B.

It imports nothing from the working folder, in which a file may have a module's name (json.py).
"""
NOT_INHERITED = ("WANDB_RUN_ID", "WANDB_RESUME")
"""Environment variables that would merge all jobs of a sweep into one W&B run."""


def start_process(*words: str, stdin: int, without: Sequence[str] = ()) -> "subprocess.Popen[str]":
    """Start the mirror process with the arguments `words` (`wandb_mirror.main`).

    The process does not get the environment variables `without`.
    """
    environment = dict(os.environ)
    for name in (*NOT_INHERITED, *without):
        environment.pop(name, None)
    environment["WANDB_ERROR_REPORTING"] = "false"
    environment["PYTHONSAFEPATH"] = "1"
    return subprocess.Popen(
        [*COMMAND, *words],
        env=environment,
        start_new_session=True,  # Ctrl-C goes to the run only
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


class MirrorProcess:
    """The mirror process of a run. A thread writes messages to it, so that only `finish` waits."""

    def __init__(self) -> None:
        self._temporary = tempfile.mkdtemp(prefix="fedsim-wandb-")
        self.child = start_process("--pipe", self._temporary, stdin=subprocess.PIPE)
        self._queue: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, without waiting until the process has read it."""
        self._queue.put(message)

    def finish(self, seconds: float) -> str:
        """Wait at most `seconds` for the process to end, kill it if it has not, and return its
        report."""
        self._queue.put(None)
        assert self.child.stdout is not None
        try:
            code = self.child.wait(seconds)
            with self.child.stdout as output:
                return output.read().strip() or f"its process ended early (exit code {code})"
        except subprocess.TimeoutExpired:
            return f"{NO_ANSWER} {seconds:.3g} s"
        finally:
            kill_with_children(self.child)
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _write(self) -> None:
        """Write the messages of the queue to the process, up to the end mark None."""
        assert self.child.stdin is not None
        with suppress(OSError, ValueError), self.child.stdin as pipe:
            while True:
                message = self._queue.get()
                if message is None:
                    return
                pipe.write(json.dumps(message) + "\n")
                pipe.flush()


def kill_with_children(process: "subprocess.Popen[str]") -> None:
    """Kill a process that has not ended, and W&B's service, which runs in a session of its own.

    The service is found on Linux. Elsewhere it watches its parent.
    """
    if process.poll() is not None:
        return
    with suppress(OSError):
        for children in Path(f"/proc/{process.pid}/task").glob("*/children"):
            for pid in children.read_text().split():
                os.kill(int(pid), signal.SIGKILL)
    process.kill()
    process.wait()
