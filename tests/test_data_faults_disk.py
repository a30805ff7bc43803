"""Folders without room or permission are rejected before work starts.

The error has the key, the path, what is needed and what is free.
"""

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch

from fedsim.config.compose import search_path
from fedsim.config.plan import Plan
from fedsim.core.disk import space_problem
from fedsim.core.errors import ConfigError, DataError
from fedsim.jobs.prepare import check_files
from fedsim.results.files import MODEL
from fedsim.results.reading import CONFIG, METRICS, SUMMARY
from fedsim.running.assembly import build
from tests.run_toys import plan_of


def plan(output_dir: Path, *words: str) -> Plan:
    with search_path():
        return plan_of(f"output_dir={output_dir}", *words)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A disk with `free` bytes, 0 at first."""
    usage = Mock(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    return usage


# --- output_dir ----------------------------------------------------------------------------------


def test_too_little_room_for_a_sweep_is_rejected(tmp_path: Path, disk: Mock) -> None:
    disk.free = 5_000_000
    short = plan(tmp_path / "new")
    long = plan(tmp_path / "new", "num_rounds=100000")
    check_files([short])
    room = rf"no room in {tmp_path}: need 10[0-9]\.\d MB, free 5\.0 MB\n.*output_dir"
    with pytest.raises(ConfigError, match=rf"output_dir='{tmp_path}/new': {room}"):
        check_files([short, long])
    assert not list(tmp_path.iterdir())


def write_run(folder: Path, summary: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    safetensors.torch.save_file({"weight": torch.zeros(1)}, folder / MODEL)
    config = {"seed": 0, "num_clients": 20, "num_rounds": 50}
    (folder / CONFIG).write_text(json.dumps(config))  # JSON is YAML, too
    (folder / METRICS).touch()
    (folder / SUMMARY).write_text(json.dumps(summary))


@pytest.mark.usefixtures("disk")
def test_a_finished_run_needs_no_room_unless_it_is_overwritten(tmp_path: Path) -> None:
    finished = plan(tmp_path)
    write_run(finished.folder, {"status": "diverged", "rounds": 0, "seed": 0})
    check_files([finished])
    with pytest.raises(ConfigError, match=r"need 2\.1 MB, free 0\.0 MB"):
        check_files([plan(tmp_path, "overwrite=true")])


@pytest.mark.usefixtures("disk")
@pytest.mark.parametrize("status", ["failed", "preempted", "interrupted"])
def test_a_run_that_will_resume_needs_room(tmp_path: Path, status: str) -> None:
    stopped = plan(tmp_path)
    write_run(stopped.folder, {"status": status})
    with pytest.raises(ConfigError, match=r"need 2\.1 MB, free 0\.0 MB"):
        check_files([stopped])


def test_a_file_in_place_of_a_folder_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    problem = space_problem("output_dir", file / "below", 1)
    assert problem is not None
    assert problem.rule.startswith(f"cannot write in {file} (Not a directory)")


def test_a_read_only_folder_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_only = Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS)))
    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    rule = rf"cannot write in {tmp_path} \(Read-only file system\); need 2\.1 MB"
    with pytest.raises(ConfigError, match=rule):
        check_files([plan(tmp_path)])


# --- data_dir ------------------------------------------------------------------------------------

FETCHED = ["dataset=mnist", "dataset=emnist", "dataset=cifar10", "dataset=femnist"]
BY_PATH = ["dataset=parquet dataset.path=mine", "dataset=image_folder dataset.path=mine"]
LEAF = "dataset=femnist dataset.source=leaf"


def data_dir_problem(tmp_path: Path, dataset: str) -> str:
    """Return the only problem of a sweep, with `data_dir`; its first job is sound."""
    outputs = tmp_path / "outputs"
    sound = plan(outputs)
    job = plan(outputs, f"data_dir={tmp_path}/data", *dataset.split())
    with pytest.raises(ConfigError) as caught:
        check_files([sound, job, job])
    (problem,) = caught.value.problems
    assert problem.key == "data_dir"
    assert problem.value == f"{tmp_path}/data"
    assert not outputs.exists()
    return str(problem)


@pytest.mark.parametrize("dataset", FETCHED)
def test_data_to_be_fetched_need_room(tmp_path: Path, disk: Mock, dataset: str) -> None:
    disk.free = 20_000_000
    rule = r"no room in .*: need \d{2,4}\.\d MB, free 20\.0 MB\n.*another folder with data_dir"
    assert re.search(rule, data_dir_problem(tmp_path, dataset))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dataset", [*FETCHED, *BY_PATH, LEAF])
def test_a_folder_of_data_without_permission_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: str
) -> None:
    scandir = os.scandir
    data_dir = tmp_path / "data"
    data_dir.mkdir()

    def without_permission(path: Any) -> Any:
        if data_dir in Path(path).parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return scandir(path)

    monkeypatch.setattr("os.scandir", without_permission)
    rule = r"cannot read .*/data.* \(Permission denied\)"
    assert re.search(rule, data_dir_problem(tmp_path, dataset))


def test_a_file_in_place_of_data_dir_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    assert "is no folder" in data_dir_problem(tmp_path, "dataset=mnist")


@pytest.mark.parametrize("dataset", BY_PATH)
def test_an_absent_path_is_rejected(tmp_path: Path, dataset: str) -> None:
    rule = r"path=mine: is missing .*point data_dir or FEDSIM_DATA .*/nowhere\)"
    with pytest.raises(DataError, match=rule):
        build(plan(tmp_path, f"data_dir={tmp_path}/nowhere", *dataset.split()))


@pytest.mark.usefixtures("disk")
def test_data_that_need_not_be_fetched_need_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.jobs.prepare._bytes_of", lambda plan: 0)
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split in ("train", "t10k"):
        (raw / f"{split}-images-idx3-ubyte").touch()
        (raw / f"{split}-labels-idx1-ubyte").touch()
    outputs = tmp_path / "outputs"
    check_files([plan(outputs, f"data_dir={tmp_path}/data", "dataset=mnist")])
    check_files([plan(outputs, f"data_dir={raw}/train-images-idx3-ubyte", "dataset=digits")])
