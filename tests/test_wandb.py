"""Weights & Biases offline, absent, silent and dead: the records are there, or the run does not notice."""

import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb.proto import wandb_internal_pb2 as pb

from fedsim.errors import ConfigError
from fedsim.tracking import Trackers
from fedsim.tracking.files import RunFolder, json_ready
from fedsim.tracking.wandb_tracker import WandbTracker, has_key, resolve_mode
from tests.test_tracking import info, record, summary


@pytest.fixture(autouse=True)
def _no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))


def tracker(mode: Any = "auto", timeout: float = 20.0) -> WandbTracker:
    return WandbTracker(mode=mode, project="fedsim", entity=None, tags=["mine"], timeout=timeout)


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
    import json

    return {e.key or "/".join(e.nested_key): json.loads(e.value_json) for e in entries}


def test_without_a_key_a_finished_run_lies_beside_the_files(tmp_path: Path) -> None:
    mirror = tracker()
    assert mirror.mode == "offline"
    assert play(mirror, tmp_path / "run") == {}
    assert mirror.notice is not None
    assert "wandb login" in mirror.notice
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    records = list(read_offline(file))
    history = [items(r.history.item) for r in records if r.HasField("history")]
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
    import subprocess

    code = "import sys, fedsim.tracking.wandb_tracker; sys.exit('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_key_turns_it_on_and_wandb_mode_replaces_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_api_key_is_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "0123456789abcdef" * 2 + "01234567"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    play(tracker("offline"), tmp_path / "run")
    files = [p for p in (tmp_path / "run").rglob("*") if p.is_file()]
    assert len(files) > 1
    assert not [p for p in files if secret.encode() in p.read_bytes()]


@pytest.mark.slow
def test_a_server_that_never_answers_delays_by_no_more_than_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    accepted: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                accepted.append(listener.accept()[0])
            except OSError:
                return

    threading.Thread(target=accept, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    started = time.monotonic()
    degraded = play(tracker(timeout=8.0), tmp_path / "run")
    elapsed = time.monotonic() - started
    listener.close()
    assert accepted
    assert elapsed < 10
    offline = list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert degraded or offline  # it fell back in time, or was given up


def test_the_death_of_its_process_is_counted_and_nothing_else(tmp_path: Path) -> None:
    mirror = tracker()
    trackers = Trackers({"wandb": mirror})
    trackers.start(info(tmp_path))
    assert mirror._process is not None
    mirror._process.kill()
    mirror._process.wait()
    for t in range(1, 2000):
        trackers.log(record(t))
    trackers.finish(summary())
    assert "its process was killed" in trackers.degraded["wandb"]


def test_a_mirror_that_hangs_is_given_up_and_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    start = subprocess.Popen
    monkeypatch.setattr(
        "fedsim.tracking.wandb_tracker.subprocess.Popen",
        lambda command, **kw: start([sys.executable, "-c", "import time; time.sleep(60)"], **kw),
    )
    mirror = tracker(timeout=0.5)
    started = time.monotonic()
    mirror.start(info(tmp_path))
    process = mirror._process
    for t in range(1, 3000):
        mirror.log(json_ready(record(t)))
    assert time.monotonic() - started < 2
    with pytest.raises(RuntimeError, match=r"did not answer within 0\.5 s; nothing is lost: python -m"):
        mirror.finish(summary())
    assert process is not None
    assert process.poll() is not None


def test_a_timeout_longer_than_twenty_seconds_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"timeout=21\.0: must be at most 20 seconds"):
        tracker(timeout=21.0)


def test_a_run_can_be_sent_again_from_its_files(tmp_path: Path) -> None:
    from fedsim.tracking.wandb_mirror import replay

    folder = RunFolder.create(tmp_path / "run", {"name": "trial", "seed": 3, "num_rounds": 2})
    for t in (1, 2):
        folder.append(record(t))
    folder.write_summary({**summary(), "choices": {"selector": "full"}})
    start, first, second, finish = replay(tmp_path / "run")
    assert start["start"]["job_type"] == "full"
    assert [m["log"]["round"] for m in (first, second)] == [1, 2]
    assert finish["finish"]["final_accuracy"] == 0.75
