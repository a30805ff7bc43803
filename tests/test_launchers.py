"""Jobs in processes that a launcher of Hydra starts: they heed signals, and may be killed."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.config.words import plugins
from fedsim.core.errors import ConfigError, DataError, FedsimError, Problem
from fedsim.core.record import Record
from fedsim.jobs.cli import run
from fedsim.jobs.launched import LaunchedJob
from fedsim.jobs.sweep import Attempts
from fedsim.results.files import MODEL, NEWEST, owned, read_metrics, read_summary
from fedsim.rounds.loop import Simulation
from fedsim.running.process import StopRequests
from tests.run_toys import shell

WORDS = ("num_rounds=4", "local.epochs=1", "tracker=files_only", "num_clients=6", "cohort_size=2")


@pytest.fixture
def stop(stop: StopRequests, monkeypatch: pytest.MonkeyPatch) -> StopRequests:
    """Signals of a process of its own, whose handler is called by hand."""
    monkeypatch.setattr(stop, "install", lambda: None)
    return stop


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], str]:
    """Run job number `num` of three seeds as a process of a launcher would; errors that it tells are raised."""
    with search_path():
        plans = check_jobs(compose_jobs([*WORDS, "seed=0,1,2"], multirun=True))

    def fail(error: FedsimError) -> None:
        raise error

    job = LaunchedJob(plans, Attempts(), fail)
    job.parent = -1

    def call(num: int) -> str:
        node = SimpleNamespace(job=OmegaConf.create({"num": num}))
        monkeypatch.setattr(HydraConfig, "get", lambda: node)
        return job(DictConfig({}))

    return call


def summaries(place: str = "outputs") -> dict[str, Any]:
    return {p.parent.name.split("-")[4]: json.loads(p.read_text()) for p in Path(place).glob("*/*/summary.json")}


def test_a_job_that_is_asked_to_end_is_saved_and_its_process_begins_no_other(
    stop: StopRequests, worker: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Simulation.step

    def asked(self: Simulation) -> Record:
        if self.round == 1:
            stop.handle(signal.SIGTERM)
        return step(self)

    assert worker(0) == "done"
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "step", asked)
        assert worker(1) == "preempted"
    assert worker(2) == "preempted"
    assert {seed: (s["status"], s["rounds"]) for seed, s in summaries().items()} == {
        "s0": ("done", 4),
        "s1": ("preempted", 2),
    }
    stop.handle(signal.SIGTERM)  # between two jobs it ends nothing: the launcher would lose the others


def test_a_refused_job_is_told_by_its_process(
    stop: StopRequests, worker: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(plan: Any) -> Any:
        raise DataError("no data")

    monkeypatch.setattr("fedsim.running.experiment.build", refuse)
    with pytest.raises(DataError, match="no data"):
        worker(0)


def words_of_other(*more: str) -> list[str]:
    """The words of a sweep that Hydra launches, in this process."""
    plugins()  # loads the module
    Path("my_conf/hydra/launcher").mkdir(parents=True, exist_ok=True)
    target = "_target_: hydra._internal.core_plugins.basic_launcher.BasicLauncher\n"
    Path("my_conf/hydra/launcher/other.yaml").write_text(target)
    return [*WORDS, "-m", "seed=0,1", "hydra.verbose=false", "--config-dir", "my_conf", "hydra/launcher=other", *more]


def test_a_launcher_that_breaks_is_told_and_the_same_command_goes_on(
    stop: StopRequests, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of_other()

    def broken(self: Any, *_: Any, **__: Any) -> Any:
        raise RuntimeError("a worker was killed\nand much more")

    monkeypatch.setattr(sys, "argv", ["fedsim"])
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["hydra._internal.core_plugins.basic_launcher"].BasicLauncher, "launch", broken)
        assert run(words) == 1
    printed = capsys.readouterr()
    assert "the launcher has failed (RuntimeError: a worker was killed); the same command goes on" in printed.out
    assert "Traceback" not in printed.err
    assert run(words) == 0
    assert {seed: s["status"] for seed, s in summaries().items()} == {"s0": "done", "s1": "done"}


@pytest.fixture
def elsewhere(stop: StopRequests, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Hydra's jobs know of the command what was pickled for them, as in a process of joblib, and nothing is known of
    them here. The set is of numbers of jobs whose process dies before it reports."""
    call, dying = LaunchedJob.__call__, set[int]()

    def in_a_worker(self: LaunchedJob, config: DictConfig) -> str:
        copy = pickle.loads(pickle.dumps(self))
        copy.parent = -1
        if HydraConfig.get().job.num in dying:
            copy.reports = Path("nowhere")
        return call(copy, config)

    monkeypatch.setattr(LaunchedJob, "__call__", in_a_worker)
    monkeypatch.setattr(sys, "argv", ["fedsim"])
    return dying


def fail(monkeypatch: pytest.MonkeyPatch, *seeds: int) -> None:
    """Let jobs raise in their third round."""
    step = Simulation.step

    def failing(self: Simulation) -> Record:
        if self.round == 2 and self.components.streams.seed in seeds:
            raise ZeroDivisionError("mine")
        return step(self)

    monkeypatch.setattr(Simulation, "step", failing)


def test_an_overwrite_that_fails_elsewhere_does_not_pass_for_its_old_result(
    elsewhere: set[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of_other()
    assert run(words) == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:
        fail(patch, 0, 1)
        assert run([*words, "overwrite=true"]) == 1
    printed = capsys.readouterr().out
    assert not re.search(r"\d ± ", printed)
    assert "next: fedsim report" not in printed
    assert "the same command goes on with 2 jobs that are not done" in printed
    with monkeypatch.context() as patch:
        fail(patch, 0)
        assert run([*words, "overwrite=true"]) == 1
    assert run([*words, "overwrite=true"]) == 0


@pytest.mark.parametrize("more", [[], ["overwrite=true"]])
def test_a_job_whose_process_has_died_elsewhere_has_failed_unless_its_result_is_there(
    more: list[str], elsewhere: set[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of_other(*more)
    assert run(words) == 0
    elsewhere.update([0, 1])
    with monkeypatch.context() as patch:
        fail(patch, 0)
        assert run(words) == (1 if more else 0)
    assert ("the same command goes on with the one that is not done" in capsys.readouterr().out) == bool(more)


def test_what_refuses_jobs_elsewhere_is_told_once_and_is_the_exit_code(
    elsewhere: set[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(plan: Any) -> Any:
        raise DataError("no data") if plan.settings.seed else ConfigError([Problem("model", "mine", "does not fit")])

    words = words_of_other()
    with monkeypatch.context() as patch:
        fail(patch, 0, 1)
        assert run(words) == 1
        patch.setattr("fedsim.running.experiment.build", refuse)
        capsys.readouterr()
        assert run(words) == 2
    printed = capsys.readouterr()
    assert printed.err.count("no data") == printed.err.count("model='mine': does not fit") == 1
    assert printed.err.count("concerns 1 of 2 jobs") == 2
    assert run(words) == 0


def test_a_job_that_another_process_has_is_waited_for_and_replaced_here(
    elsewhere: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = words_of_other()
    assert run(words) == 0
    before = {seed: s["wall_seconds"] for seed, s in summaries().items()}
    (folder,) = Path("outputs/default").glob("*-s0-*")
    for dying in ([], [0]):
        elsewhere.clear()
        elsewhere.update(dying)
        holder = owned(folder)
        holder.__enter__()
        with monkeypatch.context() as patch:
            patch.setattr("fedsim.jobs.sweep.time.sleep", lambda _, held=holder: held.__exit__(None, None, None))
            assert run([*words, "overwrite=true"]) == 0
        after = {seed: s["wall_seconds"] for seed, s in summaries().items()}
        assert all(after[seed] != before[seed] for seed in ("s0", "s1"))
        before = after


PASSING_ON = """
import signal, subprocess, sys
from fedsim.running.process import Preempted, StopRequests, ask_children_to_end

def raises(act, *args):
    try:
        act(*args)
    except Preempted:
        return True
    return False

stop = StopRequests()
with stop.working(), stop.passed_on():
    assert raises(stop.handle, signal.SIGTERM), "without children it is as elsewhere"
stop = StopRequests()
sleeper = [sys.executable, "-c", "import time; time.sleep(1800)"]
job, other = subprocess.Popen(sleeper), subprocess.Popen(sleeper, start_new_session=True)
try:
    with stop.working(), stop.passed_on():
        assert not raises(stop.handle, signal.SIGUSR1), "noted: the job's process is asked, and waited for"
        assert job.wait() == -signal.SIGTERM
        assert other.poll() is None
        assert raises(stop.raise_if_asked)
    assert not ask_children_to_end()
finally:
    job.kill()
    other.kill()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_signals_are_passed_on_to_the_processes_of_jobs_and_to_no_other() -> None:
    """In a process that has no other children, which would be asked to end, too."""
    done = subprocess.run([sys.executable, "-c", PASSING_ON], check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


# --- joblib's launcher, where it is installed ----------------------------------------------------------------------

SLOW = """
import time
from pathlib import Path
from fedsim.selectors.random import Random

class Slow(Random):
    def select(self, round, clients, rng):
        if Path("slow").exists():
            time.sleep(0.2)
        return super().select(round, clients, rng)
"""
HANG = 1800


def result(folder: Path) -> Any:
    records = [{k: v for k, v in r.items() if "seconds" not in k} for r in read_metrics(folder)]
    return records, (read_summary(folder) or {})["status"], (folder / MODEL).read_bytes()


def folders(place: Path) -> list[Path]:
    return sorted(p.parent for p in place.glob("*/*/config.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "number", "code"),
    [
        ("parent", signal.SIGTERM, 75),
        ("all", signal.SIGINT, 130),  # as a terminal does
        ("worker", signal.SIGUSR1, 75),
        ("worker", signal.SIGKILL, 1),  # as the out-of-memory killer does
    ],
)
def test_a_sweep_of_joblibs_processes_is_stopped_or_struck_and_the_same_command_goes_on(
    who: str, number: int, code: int, tmp_path: Path
) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    (tmp_path / "my_lab.py").write_text(SLOW)
    (tmp_path / "slow").touch()
    words = ["-m", "seed=0,1,2", *WORDS, "num_rounds=150", "checkpoint.every=2", "selector._target_=my_lab.Slow"]
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    command = [sys.executable, "-m", "fedsim.run", *words]
    process = subprocess.Popen(
        [*command, *launcher],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    try:
        while sum(len(read_metrics(folder)) > 3 for folder in folders(tmp_path / "outputs")) < 2:
            assert process.poll() is None
            time.sleep(0.1)
        workers = [json.loads(p.read_text())["pid"] for p in tmp_path.glob("outputs/*/.locks/*.holder.json")]
        for pid in {"parent": [process.pid], "all": [*workers, process.pid], "worker": workers[:1]}[who]:
            os.kill(pid, number)
        if who == "worker":
            (tmp_path / "slow").unlink()
        output, errors = process.communicate(timeout=HANG)
    finally:
        process.kill()
    assert process.returncode == code, output + errors
    assert "Traceback" not in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    struck = [folder for folder in folders(tmp_path / "outputs") if (folder / NEWEST).exists()]
    assert len(struck) >= (2 if who in ("parent", "all") else 1)
    if code == 1:
        assert "the launcher has failed (TerminatedWorkerError: " in output
    else:
        assert {(read_summary(f) or {})["status"] for f in struck} == {"interrupted" if code == 130 else "preempted"}
    (tmp_path / "slow").unlink(missing_ok=True)
    for more in (launcher, ["output_dir=whole"]):
        done = subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert [result(f) for f in folders(tmp_path / "outputs")] == [result(f) for f in folders(tmp_path / "whole")]


FAILS = """
from pathlib import Path
from fedsim.selectors.random import Random

class Fails(Random):
    def select(self, round, clients, rng):
        if Path("broken").exists() and round == 3:
            raise KeyError("mine")
        return super().select(round, clients, rng)
"""


@pytest.mark.slow
def test_how_jobs_of_joblibs_processes_end_is_not_read_from_their_old_results(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    (tmp_path / "my_lab.py").write_text(FAILS)
    words = [*WORDS, "-m", "seed=0,1", "selector._target_=my_lab.Fails", "checkpoint.every=1"]
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    assert shell(tmp_path, *words, *launcher).returncode == 0
    (tmp_path / "broken").touch()
    failed = shell(tmp_path, *words, *launcher, "overwrite=true")
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert not re.search(r"\d ± ", failed.stdout)
    assert failed.stdout.count("its traceback: ") == 2
    assert shell(tmp_path, *words, *launcher, "output_dir=other").returncode == 1
    for checkpoint in tmp_path.glob("other/*/*/checkpoint*"):
        checkpoint.write_bytes(b"")
    refused = shell(tmp_path, *words, *launcher, "output_dir=other")
    assert refused.returncode == 3, refused.stdout + refused.stderr
    assert refused.stderr.count("concerns 1 of 2 jobs") == 2
