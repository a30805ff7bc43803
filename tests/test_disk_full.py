"""A disk that is full from some write on, for each write of a run: nothing is torn, and the same
command goes on."""

import builtins
import errno
import io
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedsim.config.compose import compose_jobs, search_path
from fedsim.core.errors import FedsimError
from fedsim.jobs.cli import run, run_jobs
from fedsim.results.files import NEWEST, TRACE, RunFolder
from fedsim.results.reading import METRICS, read_metrics, read_summary
from tests import checkpoint_toys
from tests.report_toys import make_report, two_methods

EVERY = 2
WORDS = [
    *(
        "num_rounds=6",
        "local.epochs=1",
        "tracker=files_only",
        "num_clients=6",
        "cohort_size=2",
        "model.hidden=[4]",
    ),
    *("selector=pair_study", "aggregator=fedadam", f"checkpoint.every={EVERY}", "eval_every=2"),
]
NO_ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Disk:
    """Counts what needs room below `folder`: files opened to be written, writes, forced writes,
    renames, new folders.

    The operations of `refused` fail; a write that fails does half of its work. `saved` are the
    operations that put a checkpoint in its place.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.refused = folder.absolute(), range(0)
        self.count = 0
        self.saved: list[int] = []

    def takes(self) -> bool:
        self.count += 1
        return self.count not in self.refused

    def require(self, *paths: Any) -> None:
        inside = any(self.folder in Path(os.path.abspath(path)).parents for path in paths)  # noqa: PTH100
        if inside and not self.takes():
            raise NO_ROOM

    def open(
        self, file: Any, mode: str = "r", buffering: int = -1, *more: Any, **named: Any
    ) -> Any:
        if isinstance(file, int) or not set(mode) & set("wax+") or "b" not in mode:
            return OPEN(file, mode, buffering, *more, **named)
        self.require(file)
        if self.folder not in Path(file).absolute().parents or "opener" in named:
            return OPEN(file, mode, buffering, *more, **named)
        raw = File(file, mode.replace("b", ""))
        raw.disk = self
        kind: Any = io.BufferedRandom if "+" in mode else io.BufferedWriter
        return raw if buffering == 0 else kind(raw)


class File(io.FileIO):
    disk: Disk

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.disk.takes():
            return super().write(view)
        if self.disk.count > self.disk.refused.start or len(view) < 2:
            raise NO_ROOM
        return super().write(view[: len(view) // 2])


OPEN, OPERATIONS = io.open, ("replace", "rename", "mkdir", "fsync", "open")


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.chdir(tmp_path)
    found = Disk(tmp_path)
    replace, rename, mkdir, fsync, open_number = os.replace, os.rename, os.mkdir, os.fsync, os.open

    def replacing(source: Any, target: Any) -> None:
        found.require(target)
        replace(source, target)
        if Path(target).name == NEWEST:
            found.saved.append(found.count)

    def renaming(source: Any, target: Any) -> None:
        found.require(target)
        rename(source, target)

    def making(path: Any, *more: Any, **named: Any) -> None:
        if not Path(path).exists():
            found.require(path)
        mkdir(path, *more, **named)

    def forcing(number: int) -> None:
        found.require(Path(f"/proc/self/fd/{number}").readlink())
        fsync(number)

    def opening(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            found.require(path)
        return open_number(path, flags, *more, **named)

    for module in (builtins, io):
        monkeypatch.setattr(module, "open", found.open)
    for patch, name in zip(
        (replacing, renaming, making, forcing, opening), OPERATIONS, strict=True
    ):
        monkeypatch.setattr(os, name, patch)
    return found


def attempt(jobs: list[Any]) -> tuple[int, str]:
    """The exit code, and the error if one came out."""
    try:
        return run_jobs(jobs, []), ""
    except FedsimError as error:
        return error.exit_code, str(error)


def result(folder: Path) -> Any:
    """What must not depend on where the disk was full."""
    traces = [
        {k: v for k, v in r.items() if "seconds" not in k} for r in read_metrics(folder, TRACE)
    ]
    return traces, checkpoint_toys.result(folder)


def folder_in(place: Path) -> Path | None:
    """The run's folder; None if it has not been made."""
    return next((p for p in place.glob("*/*") if not p.name.startswith(".")), None)


def torn(folder: Path) -> bool:
    """Whether a file of records ends with a part of a line."""
    lines = [
        line
        for path in folder.glob("*.jsonl")
        for line in path.read_bytes().splitlines(keepends=True)
    ]
    return not all(line.endswith(b"}\n") and json.loads(line) for line in lines)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("lasting", "step"),
    [
        (True, 12),
        pytest.param(True, 1, marks=pytest.mark.slow),
        pytest.param(False, 1, marks=pytest.mark.slow),
    ],
)
def test_each_write_may_find_the_disk_full(
    lasting: bool,
    step: int,
    tmp_path: Path,
    disk: Disk,
    rounds: list[int],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """`lasting`: there is no room from a write on; else it alone fails. `step`: every so many of
    the writes."""
    with search_path():
        jobs = compose_jobs(WORDS, multirun=False)
    outputs = tmp_path / "outputs"
    assert attempt(jobs) == (0, "")
    whole = folder_in(outputs)
    assert whole is not None
    expected, number = result(whole), disk.count
    for n in range(1, number + 1, step):
        shutil.rmtree(outputs)
        rounds.clear()
        disk.count, disk.saved, disk.refused = 0, [], range(n, 10**9 if lasting else n + 1)
        code, error = attempt(jobs)
        disk.refused = range(0)
        if code == 0:  # the second half of a write found room, or all was written
            assert not lasting or n == number
            assert result(whole) == expected, n
            continue
        told = error + capfd.readouterr().err
        assert (code == 1 and "output_dir: cannot write " in told) or (
            code == 2 and "output_dir=" in told
        ), n
        folder, finished, saved = folder_in(outputs), len(rounds), len(disk.saved)
        if folder is not None:
            assert not torn(folder), n
            assert not list(folder.glob("*.tmp")), n
            assert len(read_metrics(folder)) in (finished, max(0, finished - 1)), n
            summary = read_summary(folder)
            assert summary is None or summary["rounds"] == len(read_metrics(folder)), n
        rounds.clear()
        assert attempt(jobs) == (0, ""), n
        assert rounds == list(range(1 + EVERY * saved, 7)), n
        assert folder is None or result(folder) == expected, n


@pytest.mark.parametrize(
    "where", ["fedsim.running.experiment.build", "fedsim.selectors.random.Random.select"]
)
def test_the_traceback_of_a_run_is_on_the_screen_where_error_txt_does_not_fit(
    where: str, disk: Disk, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def raising(*_: Any) -> None:
        disk.refused = range(disk.count + 1, 10**9)
        raise KeyError("mine")

    monkeypatch.setattr(where, raising)
    assert run([*WORDS, "selector=random"]) == 1
    errors = capfd.readouterr().err
    assert all(
        told in errors for told in ("Traceback", "KeyError: 'mine'", "output_dir: cannot write")
    )


def test_trackers_are_told_the_end_of_a_run_whose_summary_does_not_fit(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_summary = RunFolder.write_summary

    def filling(self: RunFolder, summary: Mapping[str, Any]) -> None:
        disk.refused = range(disk.count + 1, 10**9)
        write_summary(self, summary)

    monkeypatch.setattr(RunFolder, "write_summary", filling)
    given: list[Mapping[str, Any]] = []
    monkeypatch.setattr(
        "fedsim.tracking.console.ConsoleTracker.finish", lambda self, summary: given.append(summary)
    )
    assert run([*WORDS, "tracker=default", "~tracker.wandb"]) == 1
    (summary,) = given
    assert (summary["status"], summary["rounds"]) == ("failed", 6)
    assert "summary.json (No space left on device)" in summary["error"]


def test_a_report_that_does_not_fit_is_told_and_leaves_the_earlier_one_whole(
    tmp_path: Path, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    two_methods(tmp_path / "runs")
    words, place = (
        [str(tmp_path / "runs"), "--to", str(tmp_path / "report"), "--no-figures"],
        tmp_path / "report",
    )
    disk.count = 0
    assert make_report(words) == 0
    number, names = disk.count, {p.name for p in place.iterdir()}
    for n in range(2, number + 1, 17):  # the folder is there
        disk.count, disk.refused = 0, range(n, 10**9)
        assert make_report(words) == 1, n
        disk.refused = range(0)
        assert f"--to: cannot write {place} (No space left on device)" in capsys.readouterr().err, n
        assert {p.name for p in place.iterdir()} == names, n
        json.loads((place / "summary.json").read_text())


def test_of_a_line_that_does_not_fit_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Half(io.FileIO):
        def write(self, content: Any) -> int:
            return super().write(content[: len(content) // 2])

    folder = RunFolder(tmp_path)
    folder.append({"round": 1})
    before = (tmp_path / METRICS).read_bytes()
    monkeypatch.setattr("fedsim.results.files.open_no_link", lambda path, mode: Half(path, mode))
    with pytest.raises(FedsimError, match="No space left"):
        folder.append({"round": 2})
    assert (tmp_path / METRICS).read_bytes() == before
