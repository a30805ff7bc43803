"""No room, or no permission: found before work starts, with key, path, need and what is free."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedsim.config.compose import compose_jobs, search_path
from fedsim.config.plan import Plan, make_plan
from fedsim.data.cache import load_or_build
from fedsim.errors import ConfigError, DataError
from fedsim.running.room import require_room, room_problem
from fedsim.tracking.files import SUMMARY


def plan(output_dir: Path, *words: str) -> Plan:
    with search_path():
        (job,) = compose_jobs([f"output_dir={output_dir}", *words], multirun=False)
    return make_plan(job.config, job.choices)


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))


def test_too_little_room_is_told_with_need_and_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 5_000_000)
    short, long = plan(tmp_path / "new"), plan(tmp_path / "new", "num_rounds=100000")
    require_room([short])
    rule = rf"output_dir='{tmp_path}/new': no room in {tmp_path}: need 10[0-9]\.\d MB, free 5\.0 MB\n.*output_dir"
    with pytest.raises(ConfigError, match=rule):
        require_room([short, long])
    assert not list(tmp_path.iterdir())


def test_what_is_finished_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 0)
    finished = plan(tmp_path)
    finished.folder.mkdir(parents=True)
    (finished.folder / SUMMARY).write_text("{}")
    require_room([finished])
    with pytest.raises(ConfigError, match=r"need 2\.1 MB, free 0\.0 MB"):
        require_room([plan(tmp_path, "overwrite=true")])


def test_a_folder_that_takes_no_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    problem = room_problem("output_dir", tmp_path / "file" / "below", 1)
    assert problem is not None
    assert problem.rule.startswith(f"cannot write in {tmp_path / 'file'} (Not a directory)")

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    with pytest.raises(ConfigError, match=rf"cannot write in {tmp_path} \(Read-only file system\); need 2\.1 MB"):
        require_room([plan(tmp_path)])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB in memory; only the superuser can make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a file system of its own cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_small_disk_is_told_before_the_first_round(small_disk: Path) -> None:
    with pytest.raises(ConfigError, match=r"no room in .*/disk: need 2\.1 MB, free 1\.0 MB"):
        require_room([plan(small_disk / "outputs")])
    assert not list(small_disk.iterdir())


def test_decoded_data_without_room_name_need_and_free_and_leave_nothing(small_disk: Path) -> None:
    with pytest.raises(DataError, match=r"cache_dir: cannot write .*; need 4\.0 MB, free \d\.\d MB\); choose another"):
        load_or_build(small_disk / "x.safetensors", lambda: {"x": torch.zeros(1_000_000)})
    assert [p.name for p in small_disk.iterdir()] in ([], ["x.safetensors.lock"])


def test_a_cache_folder_that_takes_no_file_is_found_before_anything_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def decode() -> dict[str, torch.Tensor]:
        raise AssertionError("work was done whose result cannot be kept")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(DataError, match=r"cache_dir: cannot write .*No space left on device; free .* MB\)"):
        load_or_build(tmp_path / "x.safetensors", decode)
