"""Weights & Biases offline and absent: the records are there, and can be sent again; secrets are in no file."""

import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsim.results.files import RunFolder
from fedsim.tracking.wandb_mirror import mirror, replay
from fedsim.tracking.wandb_tracker import COMMAND, TARGET
from tests.test_tracking import record, summary
from tests.wandb_toys import history_of, items, offline_records, play, processes, tracker, wait_for

pytestmark = pytest.mark.usefixtures("no_account")


def test_without_a_key_a_finished_run_lies_beside_the_files(tmp_path: Path) -> None:
    mirror = tracker()
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


# --- from the files ------------------------------------------------------------------------------------------------


def test_a_run_can_be_sent_again_from_its_files(tmp_path: Path) -> None:
    node = {"_target_": TARGET, "project": "mine", "entity": "lab", "tags": ["x"]}
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
def test_its_process_sends_a_killed_run_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with files that are called like modules."""
    (tmp_path / "t").mkdir()
    plant(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = RunFolder.create(tmp_path / "my run", {"name": "trial", "seed": 3, "num_rounds": 2})
    folder.append(record(1))
    command = [*COMMAND, str(folder.path)]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
        assert [h["test_accuracy"] for h in history_of(offline_records(folder.path))] == [0.5]  # of one record
    assert not (tmp_path / "marker").exists()
    missing = subprocess.run([*COMMAND, "nowhere"], capture_output=True, text=True, check=False)
    assert missing.returncode == 1
    assert "FileNotFoundError" in missing.stdout
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
    run = SimpleNamespace(log=lambda *_, **__: None, summary={}, finish=lambda exit_code: codes.append(exit_code))
    monkeypatch.setattr("fedsim.tracking.wandb_mirror.begin_run", lambda start: (run, "done"))
    messages: list[dict[str, Any]] = [{"start": {}}, {"log": {"round": 1}}]
    mirror(messages if status is None else [*messages, {"finish": {"status": status}}])
    assert codes == [code]


def test_the_final_accuracy_of_reports_is_in_its_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimpleNamespace(log=lambda *_, **__: None, summary={}, finish=lambda exit_code: None)
    monkeypatch.setattr("fedsim.tracking.wandb_mirror.begin_run", lambda start: (run, "done"))
    mirror([{"start": {}}, {"finish": summary(0.5)}])
    assert (run.summary["smoothed_accuracy"], run.summary["final_accuracy"]) == (0.25, 0.5)


def plant(folder: Path) -> None:
    """Files that are called like modules, and leave a marker when they are imported."""
    for name in ("json", "numpy", "yaml", "wandb", "dataclasses"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'marker')!r}, 'w')")


def test_modules_of_the_working_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path)
    command = [*COMMAND, "nowhere"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert not (tmp_path / "marker").exists()
    monkeypatch.setenv("PYTHONPATH", ".")
    (tmp_path / "fedsim.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert not (tmp_path / "marker").exists()
    subprocess.run([sys.executable, "-c", "import fedsim"], cwd=tmp_path, check=False)  # negative control
    assert (tmp_path / "marker").exists()
