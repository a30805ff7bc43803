"""Weights & Biases online or not: its settings, a missing key, a server that is dead."""

import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsim.core.errors import ConfigError
from fedsim.tracking import wandb_tracker
from fedsim.tracking.wandb_mirror import begin_run
from fedsim.tracking.wandb_tracker import NO_KEY, WandbTracker
from tests.test_tracking import info, summary
from tests.wandb_toys import tracker

pytestmark = pytest.mark.usefixtures("no_account")


# --- mode ----------------------------------------------------------------------------------------------------------


class Pipe:
    """In place of the mirror process: what it was sent, and what it reports."""

    def __init__(self, report: str = "done") -> None:
        self.report = report
        self.messages: list[Any] = []
        self.limits: list[float] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)

    def finish(self, seconds: float) -> str:
        self.limits.append(seconds)
        return self.report


def piped(monkeypatch: pytest.MonkeyPatch, folder: Path, mode: Any, report: str) -> tuple[WandbTracker, Pipe]:
    """A run with a mirror process that reports this."""
    pipe = Pipe(report)
    monkeypatch.setattr(wandb_tracker, "MirrorProcess", lambda: pipe)
    made = tracker(mode, timeout=20.0)
    made.start(info(folder))
    made.finish(summary())
    return made, pipe


@pytest.mark.parametrize(
    ("place", "online"), [("its host", True), pytest.param("another host", False, marks=pytest.mark.slow)]
)
def test_wandb_finds_server_and_key_by_its_own_settings(
    place: str, online: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mode `auto` is W&B's own, but offline without a key; here its server refuses at once."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    settings = tmp_path / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text(f"[default]\nbase_url = http://127.0.0.1:{port}\n")
    key = "0123456789" * 4
    host = f"127.0.0.1:{port}" if place == "its host" else "127.0.0.1:1"
    (tmp_path / "netrc").write_text(f"machine {host} login user password {key}\n")
    code = (
        "import os, sys; from fedsim.tracking.wandb_mirror import begin_run\n"
        "start = dict.fromkeys(('project', 'entity', 'group', 'job_type', 'name', 'tags', 'config'))\n"
        "run, report = begin_run({**start, 'mode': 'auto', 'folder': sys.argv[1], 'timeout': 1.0})\n"
        "print('REPORT', report, flush=True); os._exit(0)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert ("REPORT could not go online" in done.stdout) == online, done.stdout + done.stderr
    assert (f"REPORT {NO_KEY}" in done.stdout) == (not online)
    assert list(tmp_path.glob("wandb/offline-run-*"))


def test_wandbs_mode_is_heeded_by_auto_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert tracker("auto").mode == "disabled"
    assert tracker("offline").mode == "offline"


def test_a_missing_key_is_told_once_a_process_in_two_lines_and_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [piped(monkeypatch, tmp_path, "auto", report)[0] for report in ("done", NO_KEY, NO_KEY, "done")]
    assert [one.notice is not None for one in made] == [False, True, False, False]
    assert [one.num_degraded for one in made] == [0] * 4
    lines = str(made[1].notice).splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= 80
    assert "wandb login" in lines[1]
    assert "tracker.wandb.mode=disabled" in lines[1]


def test_later_runs_that_are_not_online_are_counted_though_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = piped(monkeypatch, tmp_path, "offline", "its process ended early (exit code -9)")
    later, _ = piped(monkeypatch, tmp_path, "offline", "its process ended early (exit code 1)")
    assert [first.num_degraded, later.num_degraded] == [1, 1]
    assert f"fedsim sync {tmp_path} sends it" in str(first.notice)
    assert later.notice is None


def test_a_dead_server_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 s for the first run; the ends of those that had begun before wait for 2 s; later ones do not try."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(wandb_tracker.time, "monotonic", lambda: clock.now)
    pipes = [Pipe("could not go online (no route)"), Pipe("no answer within 2 s"), Pipe("no answer within 2 s")]
    runs = []
    for pipe in pipes:  # side by side
        monkeypatch.setattr(wandb_tracker, "MirrorProcess", lambda pipe=pipe: pipe)
        runs.append(tracker("auto", timeout=20.0))
        runs[-1].start(info(tmp_path))

    def finish(pipe: Pipe, seconds: float) -> str:
        pipe.limits.append(seconds)
        clock.now += min(12.0, seconds)
        return pipe.report

    monkeypatch.setattr(Pipe, "finish", finish)
    for one in runs:
        one.finish(summary())
    assert [pipe.limits for pipe in pipes] == [[20.0], [2.0], [2.0]]
    assert [one.num_degraded for one in runs] == [1, 1, 1]

    later, pipe = piped(monkeypatch, tmp_path, "auto", "done")
    assert pipe.messages[0]["start"]["mode"] == "offline"
    assert later.num_degraded == 1
    assert "the server did not answer an earlier run, so this one is logged offline" in str(later.notice)
    assert f"fedsim sync {tmp_path} sends it" in str(later.notice)
    asked, _ = piped(monkeypatch, tmp_path, "offline", "done")
    assert (asked.num_degraded, asked.notice) == (0, None)

    clock.now += 3600
    again, pipe = piped(monkeypatch, tmp_path, "auto", "done")
    assert pipe.messages[0]["start"]["mode"] == "auto"
    assert pipe.limits == [20.0]
    assert again.num_degraded == 0
    assert not wandb_tracker.SERVER.is_dead


def test_where_going_online_fails_the_run_is_logged_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def init(mode: str, **_: Any) -> Any:
        tried.append(mode)
        if mode == "online":
            raise RuntimeError("no route\nto host")
        return SimpleNamespace(define_metric=lambda *_, **__: None)

    settings = type("Settings", (SimpleNamespace,), {"model_fields": {}})
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Settings=settings, init=init))
    start = dict.fromkeys(("project", "entity", "group", "job_type", "name", "tags", "config"))
    (tmp_path / "wandb" / "offline-run-of-a-killed-process").mkdir(parents=True)
    _, report = begin_run({**start, "mode": "online", "folder": str(tmp_path), "timeout": 1.0})
    assert tried == ["online", "offline"]
    assert report == "could not go online (RuntimeError: no route), so it is logged offline"
    assert not (tmp_path / "wandb").exists()


def test_a_timeout_longer_than_twenty_seconds_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"timeout=21\.0: must be at most 20 seconds"):
        tracker(timeout=21.0)
