"""The tracker for Weights & Biases (W&B).

A separate process (`wandb_mirror`) communicates with W&B, so that W&B can neither stop nor delay
nor change a run. A run keeps its W&B id in its folder: what a later process sends of it goes to the
same run of W&B.
"""

import hashlib
import json
import math
import os
import queue
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedsim.core.disk import remove_folder, write_atomically
from fedsim.core.errors import Problem, check, positive, rule
from fedsim.core.text import command
from fedsim.results.files import WANDB_ID, json_ready
from fedsim.tracking.base import RunInfo, Tracker

QUIET = {
    "console": "off",
    "silent": True,
    "disable_git": True,
    "disable_job_creation": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "save_code": False,
    "x_save_requirements": False,
}
"""Settings with which W&B records only the run: no terminal output, code, machine or repository."""


def begin_run(start: dict[str, Any]) -> tuple[Any, str]:
    """The W&B run of a run's folder, offline if it cannot be online, and `done` or the reason of
    that. In the modes `auto` and `LATER`, W&B decides by its own settings."""
    remove_folder(Path(start["folder"]) / "wandb")
    kept, report, file = None, "done", Path(start["folder"]) / WANDB_ID
    with suppress(OSError, ValueError):  # what a link leads to is not sent as an id
        kept = None if file.is_symlink() else file.read_text(encoding="utf-8").strip() or None
    by_settings = start["mode"] in ("auto", LATER)
    try:
        run = _begin(start, None if by_settings else start["mode"], kept)
    except Exception as error:
        if start["mode"] == "offline":
            raise
        absent = by_settings and type(error).__name__ == "UsageError" and "configured" in str(error)
        report = NO_KEY if absent else f"{NOT_ONLINE} ({one_line(error)}), so it is logged offline"
        # W&B does not give the id again that has just failed, so that a kept one stays for when the
        # run is sent.
        run = (
            _begin(start, "offline", None)
            if kept is None
            else _init(start, "offline", secrets.token_hex(6))
        )
    if start["mode"] == LATER and run.disabled:
        run, report = (
            _begin(start, "offline", kept),
            "W&B's settings say disabled; `wandb enabled` changes that",
        )
    run.define_metric("round")
    run.define_metric("*", step_metric="round")
    return run, report


def _begin(start: dict[str, Any], mode: Any, kept: str | None) -> Any:
    """The run of W&B with the id `kept`, or one with a new id if there is none, or if that run was
    deleted."""
    import wandb

    if kept is not None:
        try:
            return _init(start, mode, kept, resume="allow")
        except wandb.errors.CommError as error:
            if "previously created and deleted" not in str(error):
                raise
    wandb_id = secrets.token_hex(6)
    with suppress(OSError):  # a full disk; the run is sent all the same
        write_atomically(Path(start["folder"]) / WANDB_ID, f"{wandb_id}\n".encode())
    return _init(start, mode, wandb_id)


def _init(start: dict[str, Any], mode: Any, wandb_id: str, resume: Any = None) -> Any:
    import wandb

    quiet = {k: v for k, v in QUIET.items() if k in wandb.Settings.model_fields}
    options = {
        k: start[k] for k in ("project", "entity", "group", "job_type", "name", "tags", "config")
    }
    settings = wandb.Settings(init_timeout=0.6 * start["timeout"], **quiet)
    return wandb.init(
        mode=mode,
        dir=start["folder"],
        id=wandb_id,
        resume=resume,
        reinit="create_new",
        settings=settings,
        **options,
    )


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")


START = f"""
import os, sys
del sys.argv[1]
here = os.getcwd()
sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here] + [{str(Path(__file__).parents[2])!r}]
from fedsim.tracking.wandb_mirror import main
main()
"""
COMMAND = (sys.executable, "-P", "-c", START, "fedsim.tracking.wandb_mirror")
"""Nothing is imported from the working folder, in which a file may be called like a module
(json.py). The last word names the process for those who look for it."""
NO_ANSWER = "no answer within"
NOT_INHERITED = ("WANDB_RUN_ID", "WANDB_RESUME")
"""They would merge all jobs of a sweep into one W&B run."""


def start_process(*words: str, stdin: int, without: Sequence[str] = ()) -> "subprocess.Popen[str]":
    """The process that communicates with W&B, in an environment without the variables `without`."""
    environment = {k: v for k, v in os.environ.items() if k not in (*NOT_INHERITED, *without)}
    streams: dict[str, Any] = {
        "stdin": stdin,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
        "text": True,
    }
    environment |= {"WANDB_ERROR_REPORTING": "false", "PYTHONSAFEPATH": "1"}
    # in a session of its own: Ctrl-C goes to the run only
    return subprocess.Popen([*COMMAND, *words], env=environment, start_new_session=True, **streams)


class MirrorProcess:
    """Sends messages to the child process from a thread, so that only `finish` waits for it."""

    def __init__(self) -> None:
        self._temporary = tempfile.mkdtemp(prefix="fedsim-wandb-")
        self.child = start_process("--pipe", self._temporary, stdin=subprocess.PIPE)
        self._queue: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        self._queue.put(message)

    def finish(self, seconds: float) -> str:
        """Wait at most `seconds` for the child to end, kill it if it has not, and return its
        report: `done` or a description of the failure."""
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
            while (message := self._queue.get()) is not None:
                pipe.write(json.dumps(message) + "\n")
                pipe.flush()


def kill_with_children(process: "subprocess.Popen[str]") -> None:
    """Kill a process that has not ended, and its children: W&B's service, which runs in a session
    of its own."""
    if process.poll() is not None:
        return
    listings = Path(f"/proc/{process.pid}/task").glob(
        "*/children"
    )  # Linux; elsewhere the service watches its parent
    with suppress(OSError):
        children = [int(pid) for listing in listings for pid in listing.read_text().split()]
        for pid in children:
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()


MAX_SECONDS = 20.0
NO_KEY, NOT_ONLINE = "no API key", "could not go online"
"""How reports of runs begin that are offline for that reason, and (NO_ANSWER) of a process that was
given up."""
LATER = "later"
"""The mode of a run that is sent later: as `auto`, but never without a record."""
TARGET = "fedsim.tracking.wandb_tracker.WandbTracker"
RETRY_SECONDS = 3600.0
"""A server that did not answer is left alone for so long."""
LEAST_SECONDS = 2.0
"""What the ends of other runs wait for it, whose record may be offline and has to be closed."""


@dataclass
class WandbServer:
    """What the runs of this process know of W&B's server: when it last did not answer
    (`time.monotonic()`), minus infinity if it did since; and the kinds of notices that have been
    given, each once a process."""

    failed: float = -math.inf
    told: set[str] = field(default_factory=set)

    @property
    def is_dead(self) -> bool:
        return time.monotonic() - self.failed < RETRY_SECONDS


SERVER = WandbServer()
Mode = Literal["auto", "online", "offline", "disabled"]


class WandbTracker(Tracker):
    """Makes one W&B run of each run: group = the run's name, job_type = its selector, step =
    `round`.

    `mode: auto` is what W&B itself would do by its settings (environment, netrc, files), but
    offline without an API key. The run waits for W&B only at its end, for at most `timeout`
    seconds; failures are then reported and counted. Once the server has not answered, later runs of
    the process are logged offline at once.
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
        self.mode = (
            "disabled" if mode == "auto" and os.environ.get("WANDB_MODE") == "disabled" else mode
        )
        self.project, self.entity, self.group, self.tags, self.timeout = (
            project,
            entity,
            group,
            tags,
            timeout,
        )
        check(
            *(() if self.mode == "disabled" else name_problems(vars(self))),
            positive("timeout", timeout),
            rule(
                timeout <= MAX_SECONDS,
                "timeout",
                timeout,
                f"must be at most {MAX_SECONDS:g} seconds",
            ),
        )
        self._process: MirrorProcess | None = None

    def start(self, info: RunInfo) -> None:
        if self.mode == "disabled":
            return
        self._folder = info.results
        self._mode = "offline" if SERVER.is_dead else self.mode
        self._process = MirrorProcess()
        self._process.send({"start": start_message(info, vars(self), self._mode, self.timeout)})

    def log(self, record: Mapping[str, Any]) -> None:
        if self._process is not None:
            self._process.send({"log": scalars(record)})

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self._process is None:
            return
        self._process.send({"finish": json_ready(summary)})
        online = self._mode != "offline"
        report = self._process.finish(
            min(self.timeout, LEAST_SECONDS) if online and SERVER.is_dead else self.timeout
        )
        self._process = None
        if online and report == "done":
            SERVER.failed = -math.inf
        elif online and report.startswith((NOT_ONLINE, NO_ANSWER)):
            SERVER.failed = time.monotonic()
        elif report == "done" and self.mode != "offline":
            report = "the server did not answer an earlier run, so this one is logged offline"
        kind = report.partition(" (")[0]
        self.num_degraded += kind not in ("done", NO_KEY)
        if kind == "done" or kind in SERVER.told:
            return
        SERVER.told.add(kind)
        if kind == NO_KEY:
            remedy = "`wandb login` sends them online; tracker.wandb.mode=disabled: without W&B"
            self.notice = f"W&B: {NO_KEY}, so runs are logged offline, in the folder wandb of each\n     ({remedy})"
        else:
            self.notice = f"W&B: {report}; nothing is lost: {command('fedsim', 'sync', str(self._folder))} sends it"


def mirrors_in(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The nodes of this tracker in a run's config by name, disabled ones last."""
    nodes = config.get("tracker")
    named = nodes.items() if isinstance(nodes, Mapping) else ()
    found = [
        (name, n) for name, n in named if isinstance(n, Mapping) and n.get("_target_") == TARGET
    ]
    return dict(sorted(found, key=lambda item: item[1].get("mode") == "disabled"))


MAX_NAME, MAX_TAG = 128, 64
"""Most characters that W&B's server takes in the name of a project, a group or a run, and in a tag
or job type."""
NAME = r"[^/\\#?%:]{1,128}"
"""What it takes as the name of a project."""


def name_problems(node: Mapping[str, Any], prefix: str = "") -> Iterator[Problem | None]:
    """Names in a tracker's node that W&B would reject at the end of the run, and each time that the
    run is sent. The keys of the problems begin with `prefix`."""
    for key in ("project", "entity"):
        name, text = (
            node.get(key),
            r"must have 1 to 128 characters, none of / \ # ? % : (W&B's rule)",
        )
        remedy = f"choose another name, also where the variable WANDB_{key.upper()} has it"
        yield rule(name is None or bool(re.fullmatch(NAME, name)), prefix + key, name, text, remedy)
    for tag in tags_of(node):
        remedy = "shorten it, also where the variable WANDB_TAGS has it"
        yield rule(
            0 < len(tag) <= MAX_TAG,
            f"{prefix}tags",
            tag,
            "must have 1 to 64 characters (W&B's rule)",
            remedy,
        )


def tags_of(node: Mapping[str, Any]) -> list[str]:
    """The tags in a tracker's node: a list, or a text with commas between them, as in
    WANDB_TAGS."""
    tags: list[str] | str = node.get("tags") or []
    return tags.split(",") if isinstance(tags, str) else tags


def shortened(text: str, most: int) -> str:
    """`text`; if it has more than `most` characters, its beginning and a hash that tells it from
    others."""
    return (
        text
        if len(text) <= most
        else f"{text[: most - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    )


def start_message(
    info: RunInfo, node: Mapping[str, Any], mode: str, timeout: float
) -> dict[str, Any]:
    """The message from which the mirror process begins a W&B run. `node`: project, entity, group
    and tags of the tracker. Names that fedsim chooses are shortened to what W&B takes."""
    chosen = [
        info.choices[group] for group in ("dataset", "partition", "model") if group in info.choices
    ]
    return {
        "mode": mode,
        "timeout": timeout,
        "project": node.get("project", "fedsim"),
        "entity": node.get("entity"),
        "group": shortened(node.get("group") or info.name, MAX_NAME),
        "job_type": shortened(info.choices.get("selector", "custom"), MAX_TAG),
        "name": shortened(info.folder.name, MAX_NAME),
        "tags": [*tags_of(node), *(shortened(choice, MAX_TAG) for choice in chosen)],
        "config": json_ready({**info.config, "choices": dict(info.choices)}),
        "folder": os.fspath(info.folder.absolute()),
    }


def scalars(record: Mapping[str, Any]) -> dict[str, Any]:
    """The finite numbers in a record."""
    return {k: v for k, v in record.items() if isinstance(v, int | float) and math.isfinite(v)}
