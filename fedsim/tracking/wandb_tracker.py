"""Weights & Biases, at arm's length: a process of its own talks to it, so that it can neither stop, hang nor change a
run. Records queue up here and are written to that process by a thread; what it cannot take in time is left out."""

import json
import netrc
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from fedsim.errors import check, positive, rule
from fedsim.tracking.base import RunInfo, Tracker
from fedsim.tracking.files import json_ready

MAX_SECONDS = 20.0


class WandbTracker(Tracker):
    """One finished W&B run for each run: group = the run's name, job_type = its selector, `round` as the step.

    `mode: auto` goes online where a key is found (WANDB_API_KEY or netrc) and else logs offline in the run's folder,
    from where `wandb sync` sends it. WANDB_MODE, where set, replaces `auto`. A run waits for W&B once, at its end,
    for at most `timeout` seconds.
    """

    def __init__(
        self,
        *,
        mode: Literal["auto", "online", "offline", "disabled"],
        project: str,
        entity: str | None,
        tags: list[str],
        timeout: float,
    ) -> None:
        check(
            rule(bool(project), "project", project, "must not be empty"),
            positive("timeout", timeout),
            rule(timeout <= MAX_SECONDS, "timeout", timeout, f"must be at most {MAX_SECONDS:g} seconds"),
        )
        self.mode = resolve_mode(mode)
        self.project, self.entity, self.tags, self.timeout = project, entity, tags, timeout
        self._by_choice = mode != "auto"
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[str] | None = None
        self._writer: threading.Thread | None = None
        self._folder: Path | None = None
        self._degraded = 0

    @property
    def notice(self) -> str | None:
        if self.mode != "offline" or self._by_choice:
            return None
        return (
            f"W&B: no API key, so this run is logged offline in {self._folder}/wandb ('wandb login' turns it on, "
            "tracker.wandb.mode=disabled off)"
        )

    @property
    def num_degraded(self) -> int:
        return self._degraded

    def start(self, info: RunInfo) -> None:
        if self.mode == "disabled":
            return
        self._folder = info.folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fedsim.tracking.wandb_mirror"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C is the run's, and its children can be ended together
        )
        self._writer = threading.Thread(target=self._write, args=(self._process,), daemon=True)
        self._writer.start()
        self._queue.put({"start": start_of_run(info, self.mode, self.project, self.entity, self.tags, self.timeout)})

    def log(self, record: Mapping[str, Any]) -> None:
        if self._process is not None:
            self._queue.put({"log": numbers(record)})

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self._process is None:
            return
        self._queue.put({"finish": json_ready(summary)})
        self._queue.put(None)
        fault = self._wait(self._process)
        self._process = None
        if fault:
            self._degraded += 1
            raise RuntimeError(f"{fault}; nothing is lost: python -m fedsim.tracking.wandb_mirror {self._folder}")

    def _write(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None
        with suppress(OSError, ValueError), process.stdin as pipe:
            while (message := self._queue.get()) is not None:
                pipe.write(json.dumps(message) + "\n")
                pipe.flush()

    def _wait(self, process: "subprocess.Popen[str]") -> str | None:
        """Why the mirror did not do all of its work, or None. It is gone when this returns."""
        try:
            process.wait(self.timeout)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"W&B did not answer within {self.timeout:g} s"
        assert process.stdout is not None
        report = process.stdout.read().strip()
        return None if report == "done" else f"W&B: {report or 'its process was killed'}"


def resolve_mode(mode: str) -> str:
    """`online`, `offline` or `disabled`."""
    if mode != "auto":
        return mode
    wanted = os.environ.get("WANDB_MODE")
    if wanted in ("online", "offline", "disabled"):
        return wanted
    return "online" if has_key() else "offline"


def has_key() -> bool:
    """Whether W&B would find an API key; the key itself is not kept."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    for path in filter(None, (os.environ.get("NETRC"), Path.home() / ".netrc", Path.home() / "_netrc")):
        with suppress(OSError, netrc.NetrcParseError):
            return host in netrc.netrc(str(path)).hosts
    return False


def start_of_run(
    info: RunInfo, mode: str, project: str, entity: str | None, tags: list[str], timeout: float
) -> dict[str, Any]:
    """What the mirror needs to begin a run."""
    return {
        "mode": mode,
        "project": project,
        "entity": entity,
        "group": info.name,
        "job_type": info.choices.get("selector", "custom"),
        "name": info.run_id,
        "tags": [*tags, *(info.choices[g] for g in ("dataset", "partition", "model") if g in info.choices)],
        "config": json_ready({**info.config, "choices": dict(info.choices)}),
        "folder": str(info.folder.absolute()),
        "timeout": timeout,
    }


def numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    """The scalars of a record that were measured."""
    return {k: v for k, v in json_ready(record).items() if isinstance(v, int | float)}
