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
    """Forget the module `my_lab` of a test, so that the next test can import its own."""
    yield
    sys.modules.pop("my_lab", None)


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the working folder to an empty one."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fedsim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> run_toys.Run:
    """Run a command line in an empty folder, with the words of `QUICK` that it does not set itself.

    Returns the exit code, or raises the error that `main` would print.
    """
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> int:
        keys = {word.split("=")[0] for word in words}
        defaults = [word for word in run_toys.QUICK if word.split("=")[0] not in keys]
        argv = [*words, *defaults]
        monkeypatch.setattr(sys, "argv", ["fedsim", *argv])
        return run(argv)

    return call


@pytest.fixture
def stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StopRequests:
    """Replace the signals of this process by an object whose handler the test calls, in an empty
    folder."""
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
    """Return a function that runs a command which dies before a round of one seed."""
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
    """Return the list of all rounds that are run."""
    numbers: list[int] = []
    step = Simulation.step

    def noting_step(self: Simulation) -> Record:
        numbers.append(self.round + 1)
        return step(self)

    monkeypatch.setattr(Simulation, "step", noting_step)
    return numbers


@pytest.fixture
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the user unknown to W&B, with an empty home folder."""
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(wandb_tracker, "SERVER", wandb_tracker.WandbServer())


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Return the list of all timeouts with which this process waits for other processes."""
    timeouts: list[float | None] = []
    wait = subprocess.Popen.wait

    def noting_wait(process: Any, timeout: float | None = None) -> int:
        timeouts.append(timeout)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", noting_wait)
    return timeouts


@pytest.fixture
def compiled() -> None:
    """Compile the native library, or skip the test if there is no C compiler."""
    try:
        library(torch.float64)
    except NotCompiledError as error:
        pytest.skip(str(error))
