"""Weights & Biases offline, absent, silent and dead: the records are there, or the run does not notice."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from wandb.proto import wandb_internal_pb2 as pb

from fedsim.errors import ConfigError
from fedsim.tracking import Trackers
from fedsim.tracking.files import RunFolder
from fedsim.tracking.mirror_process import COMMAND
from fedsim.tracking.wandb_mirror import begin_run, mirror, replay
from fedsim.tracking.wandb_mode import has_key, resolve_mode
from fedsim.tracking.wandb_tracker import WandbTracker
from tests.test_tracking import info, record, summary

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes through /proc")


@pytest.fixture(autouse=True)
def _no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))


def processes(home: Path) -> dict[str, int]:
    """Those that were started with this HOME: `mirror`, and W&B's own service as `service`."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"HOME={home}\0".encode() in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes()
                if b"wandb" in command:
                    found["mirror" if b"wandb_mirror" in command else "service"] = int(folder.name)
    return found


HANG = 600.0
"""Seconds after which something that hangs is given up; nothing takes that long on any machine."""


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def tracker(mode: Any = "auto", timeout: float | None = None) -> WandbTracker:
    """One that waits for W&B at most `timeout` seconds at its end; None: as long as that takes on a busy machine."""
    limit = 20.0 if timeout is None else timeout
    made = WandbTracker(mode=mode, project="fedsim", entity=None, tags=["mine"], timeout=limit)
    made.timeout = HANG if timeout is None else timeout
    return made


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """For how long, at most, this process waits for another, time after time."""
    found: list[float | None] = []
    wait = subprocess.Popen.wait

    def told(process: Any, timeout: float | None = None) -> int:
        found.append(timeout)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", told)
    return found


def play(tracker: WandbTracker, folder: Path, num_rounds: int = 3) -> dict[str, Any]:
    RunFolder.create(folder, {"name": "trial", "seed": 0, "num_rounds": num_rounds})
    trackers = Trackers({"wandb": tracker})
    trackers.start(info(folder))
    for t in range(1, num_rounds + 1):
        trackers.log({**record(t), "selected": [1, 2], "test_loss": None})
    trackers.finish(summary())
    return trackers.degraded


def read_offline(path: Path) -> Iterator[pb.Record]:
    """The records of a .wandb file: a LevelDB log (32 KiB blocks; checksum, length, type) after a 7-byte header."""
    content, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            one = pb.Record()
            one.ParseFromString(parts)
            parts = b""
            yield one


def items(entries: Any) -> dict[str, Any]:
    return {e.key or "/".join(e.nested_key): json.loads(e.value_json) for e in entries}


def offline_records(folder: Path) -> list[pb.Record]:
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    return list(read_offline(file))


def history_of(records: list[pb.Record]) -> list[dict[str, Any]]:
    return [items(r.history.item) for r in records if r.HasField("history")]


def test_without_a_key_a_finished_run_lies_beside_the_files(tmp_path: Path) -> None:
    mirror = tracker()
    assert mirror.mode == "offline"
    assert play(mirror, tmp_path / "run") == {}
    assert mirror.notice is not None
    assert "wandb login" in mirror.notice
    records = offline_records(tmp_path / "run")
    history = history_of(records)
    assert [h["round"] for h in history] == [1, 2, 3]
    assert [h["test_accuracy"] for h in history] == [0.5] * 3
    assert [h["participation_ratio"] for h in history] == [0.25] * 3
    assert [h["wall_seconds"] for h in history] == [1.5, 3.0, 4.5]
    assert "selected" not in history[0]
    (run,) = [r.run for r in records if r.HasField("run")]
    assert (run.project, run.run_group, run.job_type, run.display_name) == ("fedsim", "trial", "random", "run")
    assert set(run.tags) == {"mine", "digits", "iid", "mlp"}
    assert items(run.config.update)["selector"] == {"_target_": "x.Y"}
    last = {k: v for r in records if r.HasField("summary") for k, v in items(r.summary.update).items()}
    assert last["final_accuracy"] == 0.75
    assert last["wall_seconds"] == 4.0
    metrics = [r.metric for r in records if r.HasField("metric")]
    assert any(m.glob_name == "*" and (m.step_metric == "round" or m.step_metric_index) for m in metrics)
    assert any(r.HasField("exit") and r.exit.exit_code == 0 for r in records)


def test_disabled_is_silent_and_starts_nothing(tmp_path: Path) -> None:
    mirror = tracker("disabled")
    assert play(mirror, tmp_path / "run") == {}
    assert mirror.notice is None
    assert not (tmp_path / "run" / "wandb").exists()


def test_the_tracker_itself_never_imports_wandb() -> None:
    code = "import sys, fedsim.tracking.wandb_tracker; sys.exit('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- mode ----------------------------------------------------------------------------------------------------------


def test_a_key_turns_it_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert resolve_mode("auto") == "online"
    assert resolve_mode("offline") == "offline"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.my-lab.org")
    assert resolve_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert resolve_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert resolve_mode("auto") == "disabled"


@pytest.mark.parametrize("host", [wandb.Settings().base_url.removeprefix("https://"), "api.wandb.ai"])
def test_a_key_for_wandbs_default_host_is_found(host: str, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text(f"machine {host} login user password secret\n")
    assert has_key()


def test_wandbs_own_settings_are_heeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = tmp_path / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = https://wandb.my-lab.org\n")
    (tmp_path / "netrc").write_text("machine wandb.my-lab.org login user password secret\n")
    assert resolve_mode("auto") == "online"
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nmode = offline\n")
    assert resolve_mode("auto") == "offline"
    settings.write_text("no settings")
    (tmp_path / "wandb" / "settings").write_bytes(b"\xff")
    (tmp_path / "netrc").write_text("machine")
    assert resolve_mode("auto") == "offline"


def test_only_a_missing_key_gives_the_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsim.tracking.wandb_tracker.MirrorProcess", Silent)
    for mode, hint in (("auto", True), ("offline", False)):
        mirror = tracker(mode)
        mirror.start(info(tmp_path))
        assert bool(mirror.notice) == hint
    monkeypatch.setenv("WANDB_MODE", "offline")
    mirror = tracker()
    mirror.start(info(tmp_path))
    assert mirror.notice is None


class Silent:
    def send(self, message: Any) -> None:
        pass


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
    _, report = begin_run({**start, "mode": "online", "folder": "here", "timeout": 1.0})
    assert tried == ["online", "offline"]
    assert report == "could not go online (RuntimeError: no route), so this run is logged offline in here/wandb"


# --- secrets and surroundings --------------------------------------------------------------------------------------


def test_secrets_and_foreign_run_ids_are_in_no_file_and_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, other = "0123456789abcdef" * 2 + "01234567", "hush-hush-hush"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    monkeypatch.setenv("MY_TOKEN", other)
    monkeypatch.setenv("WANDB_RUN_ID", "same-for-all")
    (tmp_path / "t").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    assert play(tracker("offline"), tmp_path / "run") == {}
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(files) > 1
    for text in (secret, other, "same-for-all"):
        assert not [p for p in files if text.encode() in p.read_bytes() or text in p.name]
    assert not list((tmp_path / "t").iterdir())
    wait_for(lambda: processes(tmp_path) == {})


# --- faults --------------------------------------------------------------------------------------------------------


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
    mirror = tracker(timeout=5.0)
    trackers = Trackers({"wandb": mirror})
    trackers.start(info(tmp_path))
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


def test_the_death_of_its_process_is_counted_and_nothing_else(tmp_path: Path) -> None:
    mirror = tracker()
    trackers = Trackers({"wandb": mirror})
    trackers.start(info(tmp_path))
    assert mirror._process is not None
    os.kill(mirror._process.pid, signal.SIGKILL)
    for t in range(1, 2000):
        trackers.log(record(t))
    trackers.finish(summary())
    assert trackers.degraded == {"wandb": 1}
    assert "W&B: its process ended early (exit code -9); nothing is lost: python -m" in str(mirror.notice)


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"), [(signal.SIGKILL, "W&B: "), (signal.SIGSTOP, "W&B: no answer within 2 s; nothing is lost")]
)
def test_wandbs_service_may_die_or_hang_in_mid_run(
    tmp_path: Path, fault: signal.Signals, told: str, waits: list[float | None]
) -> None:
    mirror = tracker(timeout=2.0)
    trackers = Trackers({"wandb": mirror})
    trackers.start(info(tmp_path))
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
        "import sys, time; from pathlib import Path; from tests.test_wandb import info, record, tracker\n"
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
    monkeypatch.setattr("fedsim.tracking.mirror_process.COMMAND", sleeper)
    mirror = tracker(timeout=0.5)
    mirror.start(info(tmp_path))
    assert mirror._process is not None
    pid = mirror._process.pid
    for t in range(1, 3000):
        mirror.log(record(t))
    assert waits == []
    assert mirror._process._child.poll() is None
    mirror.finish(summary())
    assert waits == [0.5, None]  # then it was killed
    assert mirror.num_degraded == 1
    assert "no answer within 0.5 s; nothing is lost: python -m" in str(mirror.notice)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_timeout_longer_than_twenty_seconds_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"timeout=21\.0: must be at most 20 seconds"):
        tracker(timeout=21.0)


# --- from the files ------------------------------------------------------------------------------------------------


def test_a_run_can_be_sent_again_from_its_files(tmp_path: Path) -> None:
    node = {"project": "mine", "entity": "lab", "tags": ["x"]}
    config = {"name": "trial", "seed": 3, "num_rounds": 2, "tracker": {"wandb": node}}
    folder = RunFolder.create(tmp_path / "run", config)
    for t in (1, 2):
        folder.append(record(t))
    folder.write_summary({**summary(), "choices": {"selector": "full"}})
    start, first, second, finish = replay(tmp_path / "run")
    assert (start["start"]["job_type"], start["start"]["project"], start["start"]["entity"]) == ("full", "mine", "lab")
    assert [m["log"]["round"] for m in (first, second)] == [1, 2]
    assert finish["finish"]["final_accuracy"] == 0.75


@pytest.mark.slow
def test_the_command_that_a_fault_names_sends_a_killed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    folder = RunFolder.create(tmp_path / "run", {"name": "trial", "seed": 3, "num_rounds": 2})
    folder.append(record(1))
    command = [*COMMAND, str(folder.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    assert (done.returncode, done.stdout) == (0, f"{folder.path}: done\n")
    assert [h["test_accuracy"] for h in history_of(offline_records(folder.path))] == [0.5]
    missing = subprocess.run([*COMMAND, "nowhere"], capture_output=True, text=True, check=False)
    assert missing.returncode == 1
    assert "nowhere: FileNotFoundError" in missing.stdout
    assert not list((tmp_path / "t").iterdir())


# --- how a run ended ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code"), [("done", 0), ("failed", 1), ("diverged", 1), ("interrupted", 1), (None, 1)]
)
def test_a_run_that_is_not_done_ends_with_code_1(
    status: str | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: its messages break off."""
    codes: list[int] = []
    run = SimpleNamespace(log=lambda _: None, summary={}, finish=lambda exit_code: codes.append(exit_code))
    monkeypatch.setattr("fedsim.tracking.wandb_mirror.begin_run", lambda start: (run, "done"))
    messages: list[dict[str, Any]] = [{"start": {}}, {"log": {"round": 1}}]
    mirror(messages if status is None else [*messages, {"finish": {"status": status}}])
    assert codes == [code]


def test_modules_of_the_working_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "numpy", "yaml", "wandb", "fedsim"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    monkeypatch.setenv("PYTHONPATH", ".")
    subprocess.run([*COMMAND, "nowhere"], cwd=tmp_path, capture_output=True, check=False)
    assert not (tmp_path / "marker").exists()
    module = [sys.executable, "-m", "fedsim.tracking.wandb_mirror", "nowhere"]  # the negative control
    subprocess.run(module, cwd=tmp_path, capture_output=True, check=False)
    assert (tmp_path / "marker").exists()
