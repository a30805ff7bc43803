"""The tracker for Weights & Biases (W&B).

A separate process (`wandb_mirror`) communicates with W&B, so that W&B can neither stop nor delay
nor change a run. A run keeps its W&B id in its folder: what a later process sends of it goes to the
same run of W&B.
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
"""A run that began online waits so long for a server that has not answered another run."""
RETRY_SECONDS = 3600.0
"""Time before a server that did not answer is tried again."""
LATER = "later"
"""The mode of a run that is sent later: as `auto`, but never without a record."""

# Beginnings of reports of the mirror process.
NO_KEY = "no API key"
NOT_ONLINE = "could not go online"
NO_ANSWER = "no answer within"

Mode = Literal["auto", "online", "offline", "disabled"]


@dataclass
class WandbServer:
    """What the runs of this process know of W&B's server.

    `failed` is when it last did not answer (`time.monotonic()`), minus infinity if it has answered
    since. `announced` has the kinds of notices that were printed, each once a process.
    """

    failed: float = -math.inf
    announced: set[str] = field(default_factory=set)

    @property
    def is_dead(self) -> bool:
        return time.monotonic() - self.failed < RETRY_SECONDS


SERVER = WandbServer()


class WandbTracker(Tracker):
    """A tracker that makes one W&B run of each run, with step = `round`.

    The group is the run's name, and job_type its selector. `mode: auto` is what W&B itself would do
    by its settings (environment, netrc, files), but offline without an API key. The run waits for
    W&B only at its end, for at most `timeout` seconds; failures are then reported and counted.
    After the server has not answered, later runs of the process are logged offline at once.
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
        self.project = project
        self.entity = entity
        self.group = group
        self.tags = tags
        self.timeout = timeout
        problems = [] if self.mode == "disabled" else list(name_problems(vars(self)))
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
        self._mode = "offline" if SERVER.is_dead else self.mode
        self._process = MirrorProcess()
        self._process.send({"start": start_message(info, vars(self), self._mode, self.timeout)})

    def log(self, record: Mapping[str, Any]) -> None:
        if self._process is not None:
            self._process.send(log_message(self._metrics, record))

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self._process is None:
            return
        # 1. Wait for the process.
        was_online = self._mode != "offline"
        seconds = self.timeout
        if was_online and SERVER.is_dead:
            seconds = min(seconds, DEAD_SECONDS)
        self._process.send({"finish": json_ready(summary)})
        report = self._process.finish(seconds)
        self._process = None
        # 2. Note whether the server has answered.
        if was_online and report == "done":
            SERVER.failed = -math.inf
        elif was_online and report.startswith((NOT_ONLINE, NO_ANSWER)):
            SERVER.failed = time.monotonic()
        elif report == "done" and self.mode != "offline":
            report = "the server did not answer an earlier run, so this one is logged offline"
        # 3. Tell the user about the first failure of its kind.
        kind = report.partition(" (")[0]
        if kind not in ("done", NO_KEY):
            self.num_degraded += 1
        if kind == "done" or kind in SERVER.announced:
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

It imports nothing from the working folder, in which a file may have a module's name (json.py). The
last word names the process for those who look for it.
"""
NOT_INHERITED = ("WANDB_RUN_ID", "WANDB_RESUME")
"""Variables that would merge all jobs of a sweep into one W&B run."""


def start_process(*words: str, stdin: int, without: Sequence[str] = ()) -> "subprocess.Popen[str]":
    """Start the process that communicates with W&B, without the variables `without`."""
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
    """The process of a run. A thread sends it messages, so that only `finish` waits for it."""

    def __init__(self) -> None:
        self._temporary = tempfile.mkdtemp(prefix="fedsim-wandb-")
        self.child = start_process("--pipe", self._temporary, stdin=subprocess.PIPE)
        self._queue: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message soon."""
        self._queue.put(message)

    def finish(self, seconds: float) -> str:
        """Wait at most `seconds` for the process to end, and kill it if it has not.

        Returns its report: `done` or a description of the failure.
        """
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
