"""No room, or no permission: found before work starts, with key, path, need and what is free."""

import errno
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch

from fedsim.config.compose import compose_jobs, make_plan, search_path
from fedsim.config.plan import Plan
from fedsim.core.disk import space_problem
from fedsim.core.errors import ConfigError, DataError
from fedsim.jobs.prepare import require_room
from fedsim.results.files import MODEL
from fedsim.results.reading import METRICS, SUMMARY
from fedsim.running.assembly import build


def plan(output_dir: Path, *words: str) -> Plan:
    with search_path():
        (job,) = compose_jobs([f"output_dir={output_dir}", *words], multirun=False)
    return make_plan(job.config, job.choices)


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))


def test_too_little_room_is_told_but_of_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free(monkeypatch, 5_000_000)
    short, long = plan(tmp_path / "new"), plan(tmp_path / "new", "num_rounds=100000")
    require_room([short])
    rule = rf"output_dir='{tmp_path}/new': no room in {tmp_path}: need 10[0-9]\.\d MB, free 5\.0 MB\n.*output_dir"
    with pytest.raises(ConfigError, match=rule):
        require_room([short, long])
    assert not list(tmp_path.iterdir())
    with_free(monkeypatch, 0)
    finished = plan(tmp_path)
    finished.folder.mkdir(parents=True)
    safetensors.torch.save_file({"weight": torch.zeros(1)}, finished.folder / MODEL)
    (finished.folder / METRICS).touch()
    (finished.folder / SUMMARY).write_text(
        json.dumps({"status": "diverged", "rounds": 0, "seed": 0})
    )
    require_room([finished])
    for status in ("failed", "preempted", "interrupted"):  # it goes on
        (finished.folder / SUMMARY).write_text(json.dumps({"status": status}))
        with pytest.raises(ConfigError, match=r"need 2\.1 MB, free 0\.0 MB"):
            require_room([finished])
    with pytest.raises(ConfigError, match=r"need 2\.1 MB, free 0\.0 MB"):
        require_room([plan(tmp_path, "overwrite=true")])


def test_a_folder_that_takes_no_file_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    problem = space_problem("output_dir", tmp_path / "file" / "below", 1)
    assert problem is not None
    assert problem.rule.startswith(f"cannot write in {tmp_path / 'file'} (Not a directory)")

    read_only = Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS)))
    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    with pytest.raises(
        ConfigError, match=rf"cannot write in {tmp_path} \(Read-only file system\); need 2\.1 MB"
    ):
        require_room([plan(tmp_path)])


# --- data_dir ------------------------------------------------------------------------------------------------------


def refused_for_data_dir(tmp_path: Path, *words: str) -> str:
    """The one problem of `data_dir` that is told before any job of a sweep starts, whose first job
    is sound."""
    sound, other = (
        plan(tmp_path / "outputs"),
        plan(tmp_path / "outputs", f"data_dir={tmp_path}/data", *words),
    )
    with pytest.raises(ConfigError) as caught:
        require_room([sound, other, other])
    (problem,) = caught.value.problems
    assert problem.key == "data_dir"
    assert problem.value == f"{tmp_path}/data"
    assert not (tmp_path / "outputs").exists()
    return str(problem)


FETCHED = [["dataset=mnist"], ["dataset=emnist"], ["dataset=cifar10"], ["dataset=femnist"]]
READ = [
    *FETCHED,
    ["dataset=parquet", "dataset.path=mine"],
    ["dataset=image_folder", "dataset.path=mine"],
]
READ += [["dataset=femnist", "dataset.source=leaf"]]


def test_data_to_be_fetched_needs_a_folder_with_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free(monkeypatch, 20_000_000)
    for words in FETCHED:
        told = refused_for_data_dir(tmp_path, *words)
        assert re.search(
            r"no room in .*: need \d{2,4}\.\d MB, free 20\.0 MB\n.*another folder with data_dir",
            told,
        )
    assert not list(tmp_path.iterdir())


def test_data_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir
    (tmp_path / "data").mkdir()

    def unreadable(path: Any) -> Any:
        if (tmp_path / "data") in Path(path).parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return scandir(path)

    monkeypatch.setattr("os.scandir", unreadable)
    for words in READ:
        assert re.search(
            r"cannot read .*/data.* \(Permission denied\)", refused_for_data_dir(tmp_path, *words)
        )
    monkeypatch.undo()
    (tmp_path / "data").rmdir()
    (tmp_path / "data").write_text("")
    assert "is no folder" in refused_for_data_dir(tmp_path, "dataset=mnist")
    for words in READ[-3:-1]:
        with pytest.raises(
            DataError, match=r"path=mine: is missing .*point data_dir or FEDSIM_DATA .*/nowhere\)"
        ):
            build(plan(tmp_path, f"data_dir={tmp_path}/nowhere", *words))


def test_data_that_is_there_or_not_in_data_dir_needs_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.jobs.prepare._bytes_of", lambda plan: 0)
    with_free(monkeypatch, 0)
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in ("train-images", "train-labels", "t10k-images", "t10k-labels"):
        (raw / f"{name}-idx{3 if 'images' in name else 1}-ubyte").write_text("")
    require_room([plan(tmp_path / "outputs", f"data_dir={tmp_path}/data", "dataset=mnist")])
    require_room(
        [plan(tmp_path / "outputs", f"data_dir={raw}/train-images-idx3-ubyte", "dataset=digits")]
    )
