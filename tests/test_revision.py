"""Runs record the commit of fedsim's own checkout, and None wherever there is none to record."""

import os
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsim.config.compose import compose_jobs, search_path
from fedsim.config.plan import make_plan
from fedsim.results.files import read_summary
from fedsim.running import experiment
from fedsim.running import provenance as module
from fedsim.running.provenance import own_revision, revision
from fedsim.tracking.wandb_mirror import mirror

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.invalid")
    command = ["git", *identity, "-c", "commit.gpgsign=false", "-c", "core.hooksPath=/dev/null", *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """`fedsim/` with one file, committed in a repository of its own."""
    folder = tmp_path / "checkout" / "fedsim"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("one = 1\n")
    (folder.parent / "README.md").write_text("one\n")
    git(folder.parent, "init", "-q")
    git(folder.parent, "add", ".")
    git(folder.parent, "commit", "-q", "-m", "one")
    return folder


@needs_git
def test_a_clean_checkout_is_its_commit(package: Path) -> None:
    assert revision(package) == {"commit": git(package, "rev-parse", "HEAD"), "dirty": False}


@needs_git
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("file", ["fedsim/__init__.py", "README.md"])
def test_a_change_of_any_tracked_file_makes_it_dirty(package: Path, file: str, staged: bool) -> None:
    before = git(package, "rev-parse", "HEAD")
    (package.parent / file).write_text("changed = 2\n")
    if staged:
        git(package.parent, "add", file)
    assert revision(package) == {"commit": before, "dirty": True}
    git(package.parent, "commit", "-q", "-a", "-m", "two")
    after = git(package, "rev-parse", "HEAD")
    assert after != before
    assert revision(package) == {"commit": after, "dirty": False}


@needs_git
def test_a_deleted_file_makes_it_dirty(package: Path) -> None:
    (package.parent / "README.md").unlink()
    assert revision(package) == {"commit": git(package, "rev-parse", "HEAD"), "dirty": True}


@needs_git
def test_untracked_files_do_not_count(package: Path) -> None:
    (package / "mine.py").write_text("")
    (package.parent / "notes.txt").write_text("")
    assert revision(package) == {"commit": git(package, "rev-parse", "HEAD"), "dirty": False}


@needs_git
def test_nothing_is_written_into_the_repository(package: Path) -> None:
    """`git status` renews the index where a file's time has changed, unless it takes no lock."""
    os.utime(package / "__init__.py", (0, 0))
    index = package.parent / ".git" / "index"
    before = index.read_bytes(), index.stat().st_mtime_ns
    assert revision(package) == {"commit": git(package, "rev-parse", "HEAD"), "dirty": False}
    assert (index.read_bytes(), index.stat().st_mtime_ns) == before


@needs_git
def test_a_package_that_the_surrounding_repository_does_not_track_has_no_revision(package: Path) -> None:
    """As a wheel that is installed below another project's working tree."""
    installed = package.parent / ".venv" / "lib" / "fedsim"
    shutil.copytree(package, installed)
    assert revision(installed) is None
    (package.parent / ".gitignore").write_text(".venv/\n")
    assert revision(installed) is None


@needs_git
def test_variables_of_a_git_hook_do_not_lead_elsewhere(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = revision(package)
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    assert expected is not None
    assert revision(package) == expected


@needs_git
def test_a_repository_without_a_commit_has_none(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    assert revision(tmp_path) is None


@needs_git
def test_no_repository(package: Path, tmp_path: Path) -> None:
    bare = tmp_path / "elsewhere" / "fedsim"
    shutil.copytree(package, bare)
    assert revision(bare) is None


@needs_git
def test_no_git_and_no_folder(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert revision(package / "not there") is None
    monkeypatch.setenv("PATH", str(package))
    assert revision(package) is None


@needs_git
def test_a_git_that_does_not_answer_is_left_alone(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if what it started keeps its output open: `sleep` outlives the script that is killed."""
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nsleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(fake.parent), prepend=os.pathsep)
    monkeypatch.setattr(module, "TIMEOUT", 0.2)
    started = time.monotonic()
    assert revision(package) is None
    assert time.monotonic() - started < 30


@needs_git
def test_a_comparison_that_takes_too_long_leaves_the_commit(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = git(package, "rev-parse", "HEAD")
    fake, real = tmp_path / "bin" / "git", shutil.which("git")
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\ncase "$*" in *status*) exit 1;; esac\nexec {real} "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(fake.parent), prepend=os.pathsep)
    assert revision(package) == {"commit": commit, "dirty": None}


@needs_git
def test_a_checkout_that_belongs_to_another_user_has_its_commit(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code runs already: git's care for what a repository may have it run comes late."""
    commit = git(package, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert revision(package) == {"commit": commit, "dirty": False}


@needs_git
def test_it_is_read_once_per_process(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGE", package)
    own_revision.cache_clear()
    try:
        first = own_revision()
        (package / "__init__.py").write_text("two = 2\n")
        assert own_revision() == first == {"commit": git(package, "rev-parse", "HEAD"), "dirty": False}
    finally:
        own_revision.cache_clear()


@pytest.mark.parametrize("recorded", [{"commit": "0" * 40, "dirty": True}, None])
def test_a_runs_summary_has_it_as_it_was_before_the_rounds(
    recorded: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answers = iter([recorded])
    monkeypatch.setattr(experiment, "own_revision", lambda: next(answers))
    with search_path():
        (job,) = compose_jobs(["num_rounds=1", "local.epochs=1", "tracker=files_only"], multirun=False)
    plan = make_plan(job.config, job.choices)
    assert experiment.execute(plan).status == "done"
    summary = read_summary(plan.folder)
    assert summary is not None
    assert summary["revision"] == recorded


def test_weights_and_biases_has_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimpleNamespace(summary={}, finish=lambda exit_code: None)
    monkeypatch.setattr("fedsim.tracking.wandb_mirror.begin_run", lambda start: (run, "done"))
    recorded = {"commit": "0" * 40, "dirty": False}
    mirror([{"start": {}}, {"finish": {"status": "done", "revision": recorded}}])
    assert run.summary["revision"] == recorded
