"""Fixtures that several files of tests use."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsim.core.record import Record
from fedsim.engine.native.library import NotCompiledError, library
from fedsim.jobs.cli import run
from fedsim.rounds.loop import Simulation
from fedsim.running.process import StopRequests
from fedsim.tracking import wandb_tracker
from tests import checkpoint_toys, run_toys
from tests.checkpoint_toys import Killed


@pytest.fixture(autouse=True)
def classes_of_ones_own() -> Iterator[None]:
    """A module `my_lab` that a test writes and imports is gone for the next one, which has
    another."""
    yield
    sys.modules.pop("my_lab", None)


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder is an empty one."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fedsim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> run_toys.Run:
    """Run a command line and `QUICK` in an empty folder; its code, or the error that `main` would
    print."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> int:
        argv = [
            *words,
            *(w for w in run_toys.QUICK if w.split("=")[0] not in {x.split("=")[0] for x in words}),
        ]
        monkeypatch.setattr(sys, "argv", ["fedsim", *argv])
        return run(argv)

    return call


@pytest.fixture
def stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StopRequests:
    """Signals of a process of its own, whose handler is called by hand, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    fresh = StopRequests()
    for module in (
        "running.experiment",
        "jobs.sweep",
        "jobs.tasks",
        "jobs.task_worker",
        "jobs.cli",
        "running.process",
    ):
        monkeypatch.setattr(f"fedsim.{module}.STOP", fresh)
    return fresh


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run a command that dies before a round of one seed."""
    step = Simulation.step

    def call(*words: str, before: int = 6, seed: int = 0) -> None:
        def dying(self: Simulation) -> Record:
            if self.round + 1 == before and self.components.streams.seed == seed:
                raise Killed
            return step(self)

        with monkeypatch.context() as patch:
            patch.setattr(Simulation, "step", dying)
            with pytest.raises(Killed):
                run([*checkpoint_toys.WORDS, *words])

    return call


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rounds that were run."""
    done: list[int] = []
    step = Simulation.step

    def noted(self: Simulation) -> Record:
        done.append(self.round + 1)
        return step(self)

    monkeypatch.setattr(Simulation, "step", noted)
    return done


@pytest.fixture
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whom W&B does not know, with a home folder that is empty."""
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(wandb_tracker, "SERVER", wandb_tracker.WandbServer())


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """For how long, at most, this process waits for another, time after time."""
    found: list[float | None] = []
    wait = subprocess.Popen.wait

    def told(process: Any, timeout: float | None = None) -> int:
        found.append(timeout)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", told)
    return found


@pytest.fixture
def compiled() -> None:
    """The native library; where there is no C compiler, the test is skipped."""
    try:
        library(torch.float64)
    except NotCompiledError as error:
        pytest.skip(str(error))
