"""Runs record the commit of fedsim's own checkout, and None wherever there is none to record."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fedsim.config.compose import search_path
from fedsim.running import experiment
from fedsim.running import provenance as module
from fedsim.running.provenance import own_revision, revision
from tests.run_toys import plan_of

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.invalid")
    command = [
        "git",
        *identity,
        "-c",
        "commit.gpgsign=false",
        "-c",
        "core.hooksPath=/dev/null",
        *words,
    ]
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


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


def head(package: Path, dirty: bool | None = False) -> dict[str, Any]:
    return {"commit": git(package, "rev-parse", "HEAD"), "dirty": dirty}


def test_a_clean_checkout_is_its_commit_whatever_is_not_tracked_and_nothing_is_written(
    package: Path,
) -> None:
    """`git status` renews the index where a file's time has changed, unless it takes no lock."""
    (package / "mine.py").write_text("")
    os.utime(package / "__init__.py", (0, 0))
    index = package.parent / ".git" / "index"
    before = index.read_bytes(), index.stat().st_mtime_ns
    assert revision(package) == head(package)
    assert (index.read_bytes(), index.stat().st_mtime_ns) == before


@pytest.mark.parametrize("how", ["changed", "staged", "deleted"])
def test_a_change_of_any_tracked_file_makes_it_dirty(package: Path, how: str) -> None:
    file = package.parent / "README.md"
    file.unlink() if how == "deleted" else file.write_text("changed\n")
    if how == "staged":
        git(package.parent, "add", "README.md")
    assert revision(package) == head(package, dirty=True)
    git(package.parent, "commit", "-q", "-a", "-m", "two")
    assert revision(package) == head(package)


def test_without_a_commit_that_tracks_the_package_there_is_none(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = (
        package.parent / ".venv" / "lib" / "fedsim"
    )  # as a wheel below another project's working tree
    new, bare = tmp_path / "new", tmp_path / "elsewhere" / "fedsim"
    for folder in (installed, new, bare):
        shutil.copytree(package, folder)
    git(new, "init", "-q")
    git(new, "add", ".")
    assert [revision(folder) for folder in (installed, new, bare, package / "not there")] == [
        None
    ] * 4
    monkeypatch.setenv("PATH", str(package))
    assert revision(package) is None


def test_variables_of_a_git_hook_do_not_lead_elsewhere_nor_does_another_owner(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's code runs already: git's care for what a repository may have it run comes
    late."""
    expected = head(package)
    git(tmp_path, "init", "-q")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / ".git" / "index"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    assert revision(package) == expected


@pytest.mark.parametrize("asked", ["", "*status*"])
def test_a_git_that_does_not_answer_is_left_alone_and_the_commit_stays_if_it_is_known(
    asked: str, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = head(package, dirty=None) if asked else None
    fake, real = tmp_path / "bin" / "git", shutil.which("git")
    fake.parent.mkdir()
    fake.write_text(
        f'#!/bin/sh\ncase "$*" in {asked or "*"}) exec sleep 60;; esac\nexec {real} "$@"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(fake.parent), prepend=os.pathsep)
    monkeypatch.setattr(module, "TIMEOUT", 1.0)
    assert revision(package) == expected


def test_it_is_read_once_per_process(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGE", package)
    own_revision.cache_clear()
    try:
        first = own_revision()
        (package / "__init__.py").write_text("two = 2\n")
        assert own_revision() == first == head(package)
    finally:
        own_revision.cache_clear()


@pytest.mark.parametrize("recorded", [{"commit": "0" * 40, "dirty": True}, None])
@pytest.mark.usefixtures("empty_folder")
def test_a_runs_summary_has_it_as_it_was_before_the_rounds(
    recorded: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([recorded])
    monkeypatch.setattr(experiment, "own_revision", lambda: next(answers))
    with search_path():
        outcome = experiment.execute(
            plan_of("num_rounds=1", "local.epochs=1", "tracker=files_only")
        )
    assert (outcome.status, outcome.summary["revision"]) == ("done", recorded)
