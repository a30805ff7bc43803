"""`fedsim sync`: which runs wait for W&B, and what is said of those that it cannot send."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsim.commands import sync
from fedsim.commands.dispatch import answer
from fedsim.results.files import is_free, owned
from fedsim.running.process import STOP
from fedsim.tracking import wandb_tracker
from fedsim.tracking.wandb_messages import TARGET
from fedsim.tracking.wandb_mirror import replay
from fedsim.tracking.wandb_tracker import WandbTracker

Fake = Callable[[str], None]


@pytest.fixture(autouse=True)
def _no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """In place of W&B's process, Python code; `folder` is its argument."""

    def install(code: str) -> None:
        start = "import sys, os, pathlib, time; folder = sys.argv[1]\n"
        monkeypatch.setattr(wandb_tracker, "COMMAND", (sys.executable, "-P", "-c", start + code))

    return install


SEND = """
for old in pathlib.Path(folder, 'wandb').glob('offline-run-*'): old.rmdir()
print('done')
"""


WANDB = {"wandb": {"_target_": TARGET, "mode": "auto", "project": "fedsim"}}


def finished(name: str, offline: bool = True, tracker: Any = WANDB, **summary: Any) -> Path:
    """The folder of a run that has ended, with or without a record of W&B's that is offline."""
    folder = Path("outputs/default") / name
    (folder / "wandb").mkdir(parents=True)
    if offline:
        (folder / "wandb" / "offline-run-1").mkdir()
    config = {"name": "default", "seed": 0, "num_rounds": 1, "num_clients": 2, "tracker": tracker}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "summary.json").write_text(json.dumps({"status": "done", "trackers": {}, **summary}))
    return folder


def test_runs_wait_that_are_offline_or_whose_mirror_failed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    offline, failed = finished("offline"), finished("failed", offline=False, trackers={"wandb": 1})
    finished("online", offline=False)
    held = finished("held")
    (finished("not_ended") / "summary.json").unlink()
    finished(".replacements/half_done")
    with owned(held):
        assert sync.waiting([Path("outputs")]) == [failed, offline]
    assert sync.waiting([offline, Path("outputs"), offline]) == [offline, failed, held]
    assert answer(["sync", "--dry-run"]) == 0
    assert "3 runs below outputs to be sent" in capsys.readouterr().out


OWN = {"mine": {"_target_": "my_lab.Remote", "host": "nowhere"}}


def test_runs_do_not_wait_whose_other_trackers_failed() -> None:
    failed = {"mine": "ConnectionError: no server at nowhere"}
    disabled = {"wandb": {**WANDB["wandb"], "mode": "disabled"}}
    finished("online", offline=False, tracker={**WANDB, **OWN}, trackers=failed)
    finished(
        "disabled", offline=False, tracker={**disabled, **OWN}, trackers={**failed, "wandb": 1}
    )
    finished("named_so", offline=False, tracker={"wandb": OWN["mine"]}, trackers={"wandb": 1})
    (finished("damaged", offline=False, trackers=failed) / "config.yaml").write_text("- {")
    assert f"{WandbTracker.__module__}.{WandbTracker.__qualname__}" == TARGET
    renamed = {"to_the_lab": WANDB["wandb"]}
    other_name = finished(
        "other_name", offline=False, tracker=renamed, trackers={**failed, "to_the_lab": 1}
    )
    assert sync.waiting([Path("outputs")]) == [other_name]


def test_a_run_is_locked_while_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the same command, which goes on with a run that was preempted, would send it at the same
    time."""
    first, held = finished("a"), finished("b")
    monkeypatch.setattr(sync, "_send", lambda folder, _: "free" if is_free(folder) else "done")
    with owned(held):
        reasons = dict(sync.send([first, held], {}))
    assert "another process is running this now" in reasons[held]
    assert reasons[first] == "done"
    assert is_free(first)


def test_one_that_cannot_be_sent_is_named_with_its_reason_and_waits(
    mirror: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror("if folder.endswith('a'): sys.exit(print('CommError: 404'))" + SEND)
    first, second = finished("a", offline=False, trackers={"wandb": 1}), finished("b")
    assert answer(["sync"]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"  not sent  {first}",
        "            CommError: 404",
        f"  sent      {second}",
        "1 of 2 sent",
    ]
    assert sync.waiting([Path("outputs")]) == [first]
    mirror(SEND)
    said = {
        "": "1 of 1 sent",
        "default": "0 runs below outputs/default to be sent",
        "default/b --again": "1 of 1 sent",
    }
    for words, last in said.items():
        assert answer(["sync", *f"outputs/{words}".split()]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == last


def test_what_keeps_runs_back_is_told(
    mirror: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mode of the environment is not taken; the settings keep b offline; c ends at once, d
    hangs."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_RUN_ID", "one")
    monkeypatch.setattr(sync, "MAX_SECONDS", 2.0)
    a = "print(sorted(k for k in os.environ if k.startswith('WANDB_')) if folder.endswith('a') else 'done')"
    mirror(f"if folder[-1] in 'ab': {a}\nif folder.endswith('d'): time.sleep(600)")
    for name in "abcd":
        finished(name)
    assert answer(["sync"]) == 1
    page = capsys.readouterr().out
    assert "['WANDB_ERROR_REPORTING']" in page
    assert "W&B's settings say offline; `wandb online` changes that" in page
    assert page.count("its process has ended, or said nothing") == 2
    assert page.splitlines()[-1] == "0 of 4 sent"


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 75)])
def test_a_signal_ends_the_process_that_sends_and_what_it_had_in_hand_still_waits(
    mirror: Fake, name: str, code: int
) -> None:
    """As W&B's process does it, the record that was there is deleted first."""
    mirror(
        "pathlib.Path(folder, 'wandb', 'offline-run-1').rmdir()\n"
        f"import signal; pathlib.Path('pid').write_text(str(os.getpid())); os.kill(os.getppid(), signal.{name})\n"
        "time.sleep(600)"
    )
    folder = finished("a")
    handler = signal.signal(getattr(signal, name), STOP.handle)
    try:
        assert answer(["sync"]) == code
    finally:
        signal.signal(getattr(signal, name), handler)
        STOP.received.clear()
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("pid").read_text()), 0)
    assert sync.waiting([Path("outputs")]) == [folder]


def test_a_missing_key_is_found_out_by_the_first_run_and_a_missing_folder_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With W&B itself; nothing is imported from the working folder."""
    Path("json.py").write_text("open('imported', 'w')")
    folders = [finished("a"), finished("b")]
    assert answer(["sync"]) == 2
    assert (
        "W&B has no API key; `wandb login`, or the variable WANDB_API_KEY"
        in capsys.readouterr().err
    )
    assert [(folder / sync.UNSENT).exists() for folder in folders] == [True, False]
    assert sync.waiting([Path("outputs")]) == folders
    assert not Path("imported").exists()
    assert answer(["sync", "nowhere"]) == 2
    assert "sync: nowhere: no such folder" in capsys.readouterr().err


def test_a_name_that_wandb_does_not_take_can_be_changed_when_the_run_is_sent(
    mirror: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was recorded by a version that did not check names. First with the process that
    sends it itself."""
    folder = finished("a", tracker={"wandb": {**WANDB["wandb"], "project": "a/b"}})
    assert answer(["sync"]) == 1
    page = " ".join(capsys.readouterr().out.split())
    assert "tracker.wandb.project='a/b': must have 1 to 128 characters" in page
    assert "--project, --entity or --tags changes it" in page
    assert answer(["sync", "--project", "c:d", "--tags", "x" * 65]) == 2
    told = capsys.readouterr().err
    assert "--project='c:d': must have 1 to 128" in told
    assert "--tags='xxx" in told
    mirror("pathlib.Path('got').write_text(sys.argv[2] + os.environ['PYTHONSAFEPATH'])" + SEND)
    assert answer(["sync", "--project", "good", "--tags", "x,y"]) == 0
    assert Path("got").read_text() == '{"project": "good", "tags": "x,y"}1'
    assert sync.waiting([folder]) == []


def test_what_a_run_is_sent_with_takes_the_place_of_its_own() -> None:
    folder = finished("a", tracker={"wandb": {**WANDB["wandb"], "project": "a/b", "tags": ["old"]}})
    start, *_ = replay(folder, {"project": "good", "tags": "x,y"})
    assert (start["start"]["project"], start["start"]["tags"]) == ("good", ["x", "y"])


def test_nothing_is_written_through_links_that_lie_in_a_run_s_folder(mirror: Fake) -> None:
    folder, victim = finished("a"), Path("victim").absolute()
    victim.write_text("of somebody else")
    for link in (folder / sync.UNSENT, folder / sync.WANDB / sync.SENT):
        link.symlink_to(victim)
    mirror(SEND)
    assert answer(["sync", "--again"]) == 0
    assert victim.read_text() == "of somebody else"
    assert not (folder / sync.WANDB / sync.SENT).is_symlink()
