"""Tasks of lanes of `submitit_local` and `submitit_slurm` that are requeued, killed and repeated."""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedsim.jobs.cli import run
from fedsim.jobs.submitit_worker import Announcement, SubmittedTask
from fedsim.jobs.task_worker import this_place
from fedsim.results.files import ERROR, is_free, read_metrics, read_summary
from fedsim.running.process import StopRequests
from tests import slurm_stand_in
from tests.test_ray import HANG, LAB, WORDS, Sweep, folders, none_left, pid_of_job, plans_of, result, sent

submitit = pytest.importorskip("submitit")


# --- one task --------------------------------------------------------------------------------------------------------


def test_a_task_is_requeued_where_nothing_but_the_announcement_has_asked_it_to_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = StopRequests()
    monkeypatch.setattr(stop, "install", lambda: None)
    monkeypatch.setattr("fedsim.jobs.submitit_worker.STOP", stop)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")

    def refuse(number: int, frame: Any) -> None:
        raise submitit.core.utils.UncompletedJobError("timed-out too many times")

    before = signal.signal(signal.SIGUSR2, refuse)
    try:
        announcement = Announcement()
        assert not announcement.alone
        os.kill(os.getpid(), signal.SIGUSR2)
        assert announcement.alone
        assert stop.status == "preempted"
        announcement.requeue()
        assert "timed-out too many times" in capsys.readouterr().err
        stop.handle(signal.SIGTERM)
        assert not announcement.alone
    finally:
        signal.signal(signal.SIGUSR2, before)


def wait_for_rounds(places: list[Path], rounds: int, job: Any) -> None:
    """Until each of the runs has so many."""
    while any(len(read_metrics(folder)) < rounds for folder in places):
        assert not job.paths.result_pickle.exists(), job.stderr()
        time.sleep(0.1)


def test_a_preempted_task_is_requeued_and_ends_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By submitit's own signal, in a process that submitit starts; two jobs in lanes, saved on request alone."""
    (tmp_path / "my_lab.py").write_text(LAB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ("num_rounds=30", "checkpoint.every=null", "selector._target_=my_lab.Slow")
    plans = plans_of(*words, "seed=0,1")
    places = [plan.folder for plan in plans]
    executor = submitit.LocalExecutor(tmp_path / "submitit", max_num_timeout=0)
    executor.update_parameters(timeout_min=60)  # within its first 48 minutes the signal is taken for a preemption
    (tmp_path / "slow").touch()
    task = executor.submit(SubmittedTask(this_place({}), [sent(plan) for plan in plans]))
    first = second = 0
    try:
        wait_for_rounds(places, 4, task)
        first = pid_of_job(places[0])
        os.kill(first, signal.SIGUSR2)
        while "Requeued job" not in (task.stdout() or "") + (task.stderr() or ""):
            assert not task.paths.result_pickle.exists(), task.result()
            time.sleep(0.1)
        saved = [len(read_metrics(folder)) for folder in places]
        assert {(read_summary(folder) or {})["status"] for folder in places} == {"preempted"}
        wait_for_rounds(places, max(saved) + 2, task)
        second = pid_of_job(places[0])
        (tmp_path / "slow").unlink()
        reports = task.result()
    finally:
        task._process.kill()
    assert first != second
    assert [(report["status"], report["skipped"]) for report in reports] == [("done", False)] * 2
    assert run(["-m", "seed=0,1", *WORDS, *words, "output_dir=whole"]) == 0
    assert [result(f) for f in folders(tmp_path / "outputs")] == [result(f) for f in folders(tmp_path / "whole")]


# --- whole sweeps ----------------------------------------------------------------------------------------------------

ONCE = """

class RaisesOnce(Slow):
    def select(self, round, clients, rng):
        if round == 2 and Path("raises").exists():
            Path("raises").unlink()
            raise ValueError("on purpose")
        while round > 4 and Path("wait").exists():
            time.sleep(0.1)
        return super().select(round, clients, rng)
"""


def statuses(place: Path) -> dict[str, int]:
    """How many jobs ended how, by their folders; `None`: no summary."""
    return dict(Counter(str((read_summary(folder) or {}).get("status")) for folder in folders(place / "outputs")))


def sweep_of(place: Path, launcher: str, *words: str) -> Sweep:
    sweep = Sweep(place, "checkpoint.every=2", *words)
    (place / "my_lab.py").write_text(LAB + ONCE)
    sweep.launcher = [f"hydra/launcher={launcher}"]
    (place / "slow").touch()
    return sweep


def going(place: Path) -> list[Path]:
    """Runs in their rounds."""
    return [f for f in folders(place / "outputs") if 3 < len(read_metrics(f)) < 20 and not read_summary(f)]


@pytest.mark.slow
def test_a_killed_worker_a_job_that_raises_and_a_killed_command_are_repeated_to_an_equal_end(tmp_path: Path) -> None:
    """12 jobs, 2 at a time."""
    seeds = f"seed={','.join(map(str, range(12)))}"
    sweep = sweep_of(tmp_path, "submitit_local", "num_rounds=40", seeds, "selector._target_=my_lab.RaisesOnce")
    sweep.launcher.append("hydra.launcher.max_in_flight=2")
    (tmp_path / "raises").touch()
    process = sweep.start()
    try:
        while not going(tmp_path):
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        os.kill(pid_of_job(going(tmp_path)[0]), signal.SIGKILL)
        (tmp_path / "slow").unlink()
        output, errors = process.communicate(timeout=4 * HANG)
    finally:
        process.kill()
    assert process.returncode == 1, output + errors
    assert "Traceback" not in errors
    assert "ValueError: on purpose" in output
    assert "has ended without a report" in output
    assert statuses(tmp_path) == {"done": 10, "failed": 1, "None": 1}
    assert sum((folder / ERROR).is_file() for folder in folders(tmp_path / "outputs")) == 1
    assert none_left(process.pid)

    (tmp_path / "wait").touch()
    killed = sweep.start()
    again = None
    try:
        while sum(not is_free(folder) for folder in folders(tmp_path / "outputs")) < 2:
            assert killed.poll() is None, killed.communicate()
            time.sleep(0.1)
        killed.kill()  # its tasks live on
        killed.wait()  # its tasks hold its pipes
        again = sweep.start()
        while len(list(tmp_path.glob(f"outputs/*/.submitit/*-{again.pid}/*_result.pkl"))) < 2:  # "held"
            assert again.poll() is None, again.communicate()
            time.sleep(0.1)
        assert statuses(tmp_path)["done"] == 10
        (tmp_path / "wait").unlink()
        output, errors = again.communicate(timeout=4 * HANG)
    finally:
        (tmp_path / "wait").unlink(missing_ok=True)
        for each in filter(None, (killed, again)):
            each.kill()
    assert again.returncode == 0, output + errors
    assert output.count("already done: ") == 2, output  # by the tasks of the other command, which were waited for
    assert statuses(tmp_path) == {"done": 12}
    assert none_left(killed.pid)
    assert none_left(again.pid)
    sweep.check_equal()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "number", "code"),
    [
        ("job", signal.SIGUSR2, 0),  # what submitit announces a time limit and a preemption with
        ("job", signal.SIGTERM, 75),
        ("command", signal.SIGTERM, 75),
        ("all", signal.SIGINT, 130),  # as a terminal does
    ],
)
def test_jobs_that_are_asked_to_end_are_saved_and_the_same_command_goes_on(
    who: str, number: int, code: int, tmp_path: Path
) -> None:
    sweep = sweep_of(tmp_path, "submitit_local", "num_rounds=60", "seed=0,1,2", "selector._target_=my_lab.Slow")
    sweep.launcher.append("hydra.launcher.max_in_flight=2")
    process = sweep.start()
    try:
        sweep.wait_for_two(process)
        if who == "all":
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid if who == "command" else pid_of_job(going(tmp_path)[0]), number)
        if who == "job":
            time.sleep(1)  # the round ends
            (tmp_path / "slow").unlink()
        output, errors = process.communicate(timeout=4 * HANG)
    finally:
        process.kill()
    assert process.returncode == code, output + errors
    assert "Traceback" not in errors
    assert none_left(process.pid)
    left = {0: {"done": 3}, 75: {"done": 2, "preempted": 1}, 130: {"preempted": 2}}[code]
    assert statuses(tmp_path) == (left if who != "command" else {"preempted": 2})
    if code:
        assert "the same command goes on" in output
    (tmp_path / "slow").unlink(missing_ok=True)
    sweep.again(*sweep.launcher)
    sweep.check_equal()


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Path]:
    """Commands in place of Slurm's; their tasks are killed in the end."""
    place = tmp_path / "slurm"
    slurm_stand_in.install(place)
    yield place
    for file in place.glob("*.pid"):
        with suppress(OSError):
            os.kill(int(file.read_text()), signal.SIGKILL)


def pid_of_task(slurm: Path, task: str) -> int:
    return int((slurm / f"{task}.pid").read_text())


@pytest.mark.slow
def test_an_array_of_lanes_is_requeued_by_slurm_and_killed_and_repeated(tmp_path: Path, slurm: Path) -> None:
    """By commands that take the place of Slurm's (tests/slurm_stand_in.py)."""
    sweep = sweep_of(tmp_path, "submitit_slurm", "num_rounds=60", "seed=0,1,2,3,4,5", "selector._target_=my_lab.Slow")
    sweep.launcher += ["hydra.launcher.jobs_per_task=2", "hydra.launcher.array_parallelism=2"]
    sweep.environment["PATH"] = f"{slurm}:{os.environ['PATH']}"
    process = sweep.start()
    try:
        while len(going(tmp_path)) < 4:
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        os.kill(pid_of_task(slurm, "1_0"), signal.SIGTERM)  # which Slurm sends before a preemption
        os.kill(pid_of_task(slurm, "1_0"), signal.SIGUSR2)
        os.kill(pid_of_task(slurm, "1_1"), signal.SIGKILL)
        while not slurm_stand_in.requeues(slurm):
            time.sleep(0.1)
        assert statuses(tmp_path)["preempted"] == 2
        (tmp_path / "slow").unlink()
        output, errors = process.communicate(timeout=4 * HANG)
    finally:
        process.kill()
    assert "#SBATCH --array=0-2%2" in (slurm / "1.script").read_text()
    assert "#SBATCH --signal=USR2@120" in (slurm / "1.script").read_text()
    assert slurm_stand_in.requeues(slurm) == ["1_0"]
    assert slurm_stand_in.states_in_the_end(slurm) == {"1_0": "COMPLETED", "1_1": "FAILED", "1_2": "COMPLETED"}
    assert process.returncode == 1, output + errors
    assert all(
        f"job {n}/6 failed · seed={n - 1} · its task 1_1 has ended without a report (FAILED;" in output for n in (3, 4)
    )
    assert statuses(tmp_path) == {"done": 4, "None": 2}
    sweep.again(*sweep.launcher)
    assert slurm_stand_in.states_in_the_end(slurm)["2"] == "COMPLETED"  # one task of two lanes
    sweep.check_equal()


@pytest.mark.slow
def test_tasks_of_slurm_are_saved_and_not_requeued_when_the_command_is_asked_to_end(
    tmp_path: Path, slurm: Path
) -> None:
    sweep = sweep_of(tmp_path, "submitit_slurm", "num_rounds=60", "seed=0,1,2", "selector._target_=my_lab.Slow")
    sweep.launcher.append("hydra.launcher.array_parallelism=2")
    sweep.environment["PATH"] = f"{slurm}:{os.environ['PATH']}"
    process = sweep.start()
    try:
        sweep.wait_for_two(process)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=4 * HANG)
    finally:
        process.kill()
    assert process.returncode == 75, output + errors
    assert statuses(tmp_path) == {"preempted": 2}
    assert slurm_stand_in.requeues(slurm) == []
    assert slurm_stand_in.states_in_the_end(slurm) == {"1_0": "COMPLETED", "1_1": "COMPLETED", "1_2": "CANCELLED by 0"}
    (tmp_path / "slow").unlink()
    sweep.again(*sweep.launcher)
    sweep.check_equal()
