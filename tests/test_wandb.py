"""Weights & Biases offline, absent or dead: the records are there, and can be sent again; secrets
are in no file."""

import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import wandb

from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.config.plan import Plan
from fedsim.core.errors import ConfigError
from fedsim.results.files import RunFolder
from fedsim.tracking import wandb_tracker
from fedsim.tracking.base import RunInfo
from fedsim.tracking.wandb_messages import TARGET, start_message
from fedsim.tracking.wandb_mirror import begin_run, mirror, replay
from fedsim.tracking.wandb_tracker import COMMAND, NO_KEY, WandbTracker
from tests.test_tracking import info, record, summary
from tests.wandb_toys import history_of, items, offline_records, play, processes, tracker, wait_for

pytestmark = pytest.mark.usefixtures("no_account")


def test_without_a_key_a_finished_run_lies_beside_the_files(tmp_path: Path) -> None:
    mirror = tracker()
    assert play(mirror, tmp_path / "run") == {}
    assert mirror.notice is not None
    assert "wandb login" in mirror.notice
    records = offline_records(tmp_path / "run")
    history = history_of(records)
    assert [row["round"] for row in history] == [1, 2, 3]
    assert [row["test/accuracy"] for row in history] == [0.5, 0.5, 0.5]
    assert not [name for row in history for name in row if "selected" in name]  # no lists
    (run,) = [r.run for r in records if r.HasField("run")]
    assert (run.project, run.run_group, run.job_type, run.display_name) == (
        "fedsim",
        "trial",
        "random",
        "run",
    )
    assert set(run.tags) == {"mine", "digits", "iid", "mlp"}
    assert items(run.config.update)["selector"] == {"_target_": "x.Y"}
    last = {
        k: v for r in records if r.HasField("summary") for k, v in items(r.summary.update).items()
    }
    assert (last["final_accuracy"], last["last_accuracy"], last["wall_seconds"]) == (
        0.375,
        0.75,
        4.0,
    )
    axes = {
        r.metric.name or r.metric.glob_name: r.metric.step_metric
        for r in records
        if r.HasField("metric")
    }
    assert axes == {
        "round": "",
        "*": "round",
        "accuracy/over_bytes": "total/bytes",
        "accuracy/over_samples": "total/samples",
        "accuracy/over_simulated_time": "total/simulated_time",
    }
    assert any(r.HasField("exit") and r.exit.exit_code == 0 for r in records)


def test_disabled_is_silent_and_modes_and_timeouts_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = tracker("disabled")
    assert play(mirror, tmp_path / "run") == {}
    assert mirror.notice is None
    assert not (tmp_path / "run" / "wandb").exists()
    code = "import sys, fedsim.tracking.wandb_tracker; sys.exit('wandb' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    )  # it does not import W&B itself
    monkeypatch.setenv("WANDB_MODE", "disabled")  # is heeded by `auto` alone
    assert (tracker("auto").mode, tracker("offline").mode) == ("disabled", "offline")
    with pytest.raises(ConfigError, match=r"timeout=21\.0: must be at most 20 seconds"):
        tracker(timeout=21.0)


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


def test_a_run_can_be_sent_again_from_its_files(tmp_path: Path) -> None:
    node = {"_target_": TARGET, "project": "mine", "entity": "lab", "tags": ["x"]}
    config = {
        "name": "trial",
        "seed": 3,
        "num_rounds": 2,
        "num_clients": 2,
        "tracker": {"wandb": node},
    }
    folder = RunFolder.create(tmp_path / "run", config)
    for t in (1, 2):
        folder.append(record(t))
    folder.write_summary({**summary(), "choices": {"selector": "full"}})
    start, first, second, finish = replay(tmp_path / "run", {})
    assert (start["start"]["job_type"], start["start"]["project"], start["start"]["entity"]) == (
        "full",
        "mine",
        "lab",
    )
    assert [m["log"]["round"] for m in (first, second)] == [1, 2]
    assert finish["finish"]["last_accuracy"] == 0.75


@pytest.mark.slow
def test_its_process_sends_a_killed_run_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = RunFolder.create(
        tmp_path / "my run", {"name": "trial", "seed": 3, "num_rounds": 2, "num_clients": 2}
    )
    folder.append(record(1))
    command = [*COMMAND, str(folder.path), "{}"]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
        assert [h["test/accuracy"] for h in history_of(offline_records(folder.path))] == [
            0.5
        ]  # of one record
    missing = subprocess.run(
        [*COMMAND, "nowhere", "{}"], capture_output=True, text=True, check=False
    )
    assert missing.returncode == 1
    assert "FileNotFoundError" in missing.stdout
    assert not list((tmp_path / "t").iterdir())


@pytest.mark.parametrize(("status", "code"), [("done", 0), ("failed", 1), (None, 1)])
def test_a_run_that_is_not_done_ends_with_code_1(
    status: str | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: its messages break off."""
    run = MagicMock()
    monkeypatch.setattr("fedsim.tracking.wandb_mirror.begin_run", lambda start: (run, "done"))
    messages: list[dict[str, Any]] = [{"start": {}}, {"log": {"round": 1}}]
    mirror(messages if status is None else [*messages, {"finish": {"status": status}}])
    run.finish.assert_called_once_with(exit_code=code)


def test_modules_of_the_working_folder_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "numpy", "yaml", "wandb", "dataclasses", "fedsim"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    monkeypatch.setenv("PYTHONPATH", ".")
    subprocess.run([*COMMAND, "nowhere", "{}"], cwd=tmp_path, capture_output=True, check=False)
    assert not (tmp_path / "marker").exists()
    subprocess.run(
        [sys.executable, "-c", "import fedsim"], cwd=tmp_path, check=False
    )  # negative control
    assert (tmp_path / "marker").exists()


def begun(
    monkeypatch: pytest.MonkeyPatch, folder: Path, mode: Any, report: str
) -> tuple[WandbTracker, Any]:
    """A run with, in place of the mirror process, what it is sent and what it reports."""
    pipe = MagicMock(finish=MagicMock(return_value=report))
    monkeypatch.setattr(wandb_tracker, "MirrorProcess", lambda: pipe)
    made = tracker(mode, timeout=20.0)
    made.start(info(folder))
    return made, pipe


def piped(
    monkeypatch: pytest.MonkeyPatch, folder: Path, mode: Any, report: str
) -> tuple[WandbTracker, Any]:
    made, pipe = begun(monkeypatch, folder, mode, report)
    made.finish(summary())
    return made, pipe


@pytest.mark.parametrize("online", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_wandb_finds_server_and_key_by_its_own_settings(
    online: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mode `auto` is W&B's own, but offline without a key for the host; here its server refuses
    at once."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    settings = tmp_path / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text(f"[default]\nbase_url = http://127.0.0.1:{port}\n")
    host = f"127.0.0.1:{port if online else 1}"
    (tmp_path / "netrc").write_text(f"machine {host} login user password {'0123456789' * 4}\n")
    code = (
        "import os, sys; from fedsim.tracking.wandb_mirror import begin_run\n"
        "start = dict.fromkeys(('project', 'entity', 'group', 'job_type', 'name', 'tags', 'config'))\n"
        "run, report = begin_run({**start, 'mode': 'auto', 'folder': sys.argv[1], 'timeout': 1.0})\n"
        "print('REPORT', report, flush=True); os._exit(0)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert ("REPORT could not go online" in done.stdout) == online, done.stdout + done.stderr
    assert (f"REPORT {NO_KEY}" in done.stdout) == (not online)
    assert list(tmp_path.glob("wandb/offline-run-*"))


def test_a_missing_key_is_told_once_in_two_lines_and_later_failures_are_counted_though_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [
        piped(monkeypatch, tmp_path, "auto", report)[0]
        for report in ("done", NO_KEY, NO_KEY, "done")
    ]
    assert [(one.notice is not None, one.num_degraded) for one in made] == [
        (told, 0) for told in (0, 1, 0, 0)
    ]
    assert max(map(len, str(made[1].notice).splitlines())) <= 80
    assert "`wandb login` sends them online; tracker.wandb.mode=disabled" in str(made[1].notice)
    ended = "its process ended early (exit code {})"
    first_failed, later = (
        piped(monkeypatch, tmp_path, "offline", ended.format(code))[0] for code in (-9, 1)
    )
    assert (first_failed.num_degraded, later.num_degraded, later.notice) == (1, 1, None)
    assert f"fedsim sync {tmp_path} sends it" in str(first_failed.notice)


def test_a_dead_server_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 s for the first run; the ends of those that had begun before wait for 2 s; later ones do
    not try."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(wandb_tracker.time, "monotonic", lambda: clock.now)
    reports = ("could not go online (no route)", *["no answer within 2 s"] * 2)
    runs = [begun(monkeypatch, tmp_path, "auto", report) for report in reports]  # side by side
    for (one, pipe), limit in zip(runs, (20.0, 2.0, 2.0), strict=True):
        one.finish(summary())
        clock.now += 12
        pipe.finish.assert_called_once_with(limit)
        assert one.num_degraded == 1

    later, pipe = piped(monkeypatch, tmp_path, "auto", "done")
    assert pipe.send.call_args_list[0].args[0]["start"]["mode"] == "offline"
    assert later.num_degraded == 1
    assert "the server did not answer an earlier run, so this one is logged offline" in str(
        later.notice
    )
    assert f"fedsim sync {tmp_path} sends it" in str(later.notice)
    asked, _ = piped(monkeypatch, tmp_path, "offline", "done")
    assert (asked.num_degraded, asked.notice) == (0, None)

    clock.now += 3600
    again, pipe = piped(monkeypatch, tmp_path, "auto", "done")
    assert pipe.send.call_args_list[0].args[0]["start"]["mode"] == "auto"
    pipe.finish.assert_called_once_with(20.0)
    assert (again.num_degraded, wandb_tracker.SERVER.is_dead) == (0, False)


def test_where_going_online_fails_the_run_is_logged_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def init(mode: str, **_: Any) -> Any:
        tried.append(mode)
        if mode == "online":
            raise RuntimeError("no route\nto host")
        return MagicMock()

    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(Settings=MagicMock(model_fields={}), init=init)
    )
    start = dict.fromkeys(("project", "entity", "group", "job_type", "name", "tags", "config"))
    (tmp_path / "wandb" / "offline-run-of-a-killed-process").mkdir(parents=True)
    _, report = begin_run({**start, "mode": "online", "folder": str(tmp_path), "timeout": 1.0})
    assert tried == ["online", "offline"]
    assert report == "could not go online (RuntimeError: no route), so it is logged offline"
    assert not (tmp_path / "wandb").exists()


def test_links_in_place_of_wandb_s_folder_and_id_are_neither_followed_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []

    def init(**options: Any) -> Any:
        used.append(options["id"])
        return MagicMock()

    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(Settings=MagicMock(model_fields={}), init=init)
    )
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.mkdir()
    folder.mkdir()
    (victim / "token").write_text("not-for-the-server")
    (folder / "wandb").symlink_to(victim)
    (folder / "wandb.id").symlink_to(victim / "token")
    start = dict.fromkeys(("project", "entity", "group", "job_type", "name", "tags", "config"))
    begin_run({**start, "mode": "offline", "folder": str(folder), "timeout": 1.0})
    assert not (folder / "wandb").is_symlink()
    assert (folder / "wandb.id").read_text().strip() == used[0] != "not-for-the-server"
    assert (victim / "token").read_text() == "not-for-the-server"
    assert len(list(victim.iterdir())) == 1


# --- names, by the rules of W&B's client (wandb.Settings) and its server ---


def composed(words: Sequence[str]) -> list[Plan]:
    with search_path():
        return check_jobs(compose_jobs(words, multirun=False))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["tracker.wandb.project='a/b'"],
            r"tracker\.wandb\.project='a/b': must have 1 to 128 characters, none of",
        ),
        (
            [f"tracker.wandb.project={'p' * 129}"],
            r"tracker\.wandb\.project='p+': must have 1 to 128 characters",
        ),
        (
            ["tracker.wandb.entity='team/project'"],
            r"tracker\.wandb\.entity='team/project': must have 1 to 128",
        ),
        (
            [f"tracker.wandb.tags=[ok,{'t' * 65}]"],
            r"tracker\.wandb\.tags='t+': must have 1 to 64 characters",
        ),
        (["tracker.wandb.tags=['']"], r"tracker\.wandb\.tags='': must have 1 to 64 characters"),
    ],
)
def test_names_that_wandb_does_not_take_are_rejected_before_the_run(
    words: list[str], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        composed(words)
    composed([*words, "tracker.wandb.mode=disabled"])


def test_the_environment_names_project_entity_group_and_tags_unless_the_user_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = ("project", "entity", "group", "tags")

    def names(*words: str) -> list[Any]:
        (plan,) = composed([*words, "tracker.wandb.mode=offline"])
        message = start_message(
            RunInfo("trial", Path("run"), {}, {}, 0, 1), plan.config["tracker"]["wandb"], "auto", 1
        )
        return [message[key] for key in keys]

    assert names() == ["fedsim", None, "trial", []]
    for name, value in {
        "PROJECT": "mine",
        "ENTITY": "lab",
        "RUN_GROUP": "night",
        "TAGS": "a,b",
    }.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    assert names() == ["mine", "lab", "night", ["a", "b"]]
    typed = ["other", "they", "day", ["c"]]
    assert (
        names(
            *(
                f"tracker.wandb.{k}={v if k != 'tags' else '[c]'}"
                for k, v in zip(keys, typed, strict=True)
            )
        )
        == typed
    )
    monkeypatch.setenv("WANDB_PROJECT", "a/b")
    with pytest.raises(
        ConfigError, match=r"project='a/b': .*\n.*also where the variable WANDB_PROJECT has it"
    ):
        names()


def test_names_that_fedsim_chooses_are_shortened_to_what_wandb_takes(tmp_path: Path) -> None:
    long = "my_model_" * 20
    choices = {"dataset": "digits", "model": long, "selector": f"{long}1"}
    told = RunInfo(long, tmp_path / f"{long}-s0", {}, choices, 0, 1)
    message = start_message(told, {"tags": ["mine"]}, "offline", 1.0)
    assert message["tags"][:2] == ["mine", "digits"]
    assert message["tags"][2].startswith("my_model_my_model_")
    lengths = [len(message[key]) for key in ("group", "name", "job_type")] + [
        len(message["tags"][2])
    ]
    assert lengths == [128, 128, 64, 64]
    assert message["group"] != message["name"]
    wandb.Settings(
        project="fedsim", run_group=message["group"], run_tags=message["tags"]
    )  # its own checks
