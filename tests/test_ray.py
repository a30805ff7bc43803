"""The launcher `ray`: jobs as tasks of Ray, whose processes may be killed, and whose folders tell what was done."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.config.plan import Plan
from fedsim.core.errors import ConfigError, DataError, FedsimError, Problem
from fedsim.jobs.cli import run
from fedsim.jobs.overwriting import result_of
from fedsim.jobs.ray_launcher import RayJobs, _place
from fedsim.jobs.sweep import Attempts
from fedsim.jobs.task_worker import Job, Report, run_jobs
from fedsim.jobs.tasks import SeenRecords, outcome_of
from fedsim.results.files import ERROR, MODEL, read_metrics, read_summary
from fedsim.running.outcome import Outcome

WORDS = ("num_rounds=3", "local.epochs=1", "tracker=files_only", "num_clients=6", "cohort_size=2")
HANG = 500


def jobs(**given: Any) -> RayJobs:
    values = {"address": None, "num_cpus": 1.0, "num_gpus": 0.0, "max_retries": 3}
    return RayJobs(**{**values, "jobs_per_task": 1, "max_in_flight": None, **given})


def plans_of(*words: str) -> list[Plan]:
    with search_path():
        return check_jobs(compose_jobs([*WORDS, *words], multirun=True))


def sent(plan: Plan) -> Job:
    """As Ray sends it: plain data."""
    job = Job(config=plan.config, choices=plan.choices, folder=str(plan.folder), replaces=result_of(plan))
    result: Job = json.loads(json.dumps(job))
    return result


# --- without Ray -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("hydra.launcher.num_gpus=1.5",), "hydra.launcher.num_gpus=1.5"),
        (("hydra.launcher.address=other:6379",), "hydra.launcher.address='other:6379'"),
        (("hydra.launcher.max_retries=-1",), "hydra.launcher.max_retries=-1"),
        (("hydra.launcher.jobs_per_task=0",), "hydra.launcher.jobs_per_task=0"),
        (("hydra.launcher.max_in_flight=0",), "hydra.launcher.max_in_flight=0"),
        (("hydra.launcher.num_gpus=0.5", "device=auto"), "hydra.launcher.num_gpus=0.5: needs a GPU"),
    ],
)
def test_mistakes_are_told_before_ray_is_started(
    words: tuple[str, ...], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError) as error:
        run(["-m", "seed=0,1", *WORDS, "hydra/launcher=ray", *words])
    assert key in str(error.value)
    assert not (tmp_path / "outputs").exists()


def test_a_ray_that_does_not_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class BusyRay(ModuleType):
        def init(self, **_: Any) -> None:
            raise Exception("The current node timed out during startup.")

    monkeypatch.chdir(tmp_path)
    plans = plans_of("seed=0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr("fedsim.jobs.ray_launcher.SETTINGS", {})
    monkeypatch.setitem(sys.modules, "ray", BusyRay("ray"))
    with pytest.raises(FedsimError, match="Ray has not started: The current node timed out during startup"):
        jobs().run(Attempts(), plans)


def test_a_task_runs_what_was_sent_as_plain_data_and_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plans = plans_of("seed=0,1")
    expected = [Report(folder=str(p.folder), status="done", skipped=False, error=None, refused=False) for p in plans]
    assert run_jobs([sent(plan) for plan in plans]) == expected  # two in a task train together
    assert run_jobs([sent(plans[0])]) == [{**expected[0], "skipped": True}]
    check_jobs_equal(tmp_path, plans)


def check_jobs_equal(place: Path, plans: list[Plan]) -> None:
    """What the task has left is what the jobs leave one after another."""
    assert run(["-m", "seed=0,1", *WORDS, "output_dir=whole"]) == 0
    assert [result(f) for f in folders(place / "outputs")] == [result(f) for f in folders(place / "whole")]
    assert len(plans) == 2


def test_a_job_of_another_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (plan,) = plans_of("seed=0")
    with pytest.raises(RuntimeError, match="is fedsim the same"):
        run_jobs([{**sent(plan), "folder": "outputs/default/other"}])
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (DataError("no data"), "data", 3),
        (ConfigError([Problem("model", "mine", "does not fit")]), "config", 2),
        (FedsimError("no room"), "failed", 1),
    ],
)
def test_what_refuses_a_job_in_a_task_is_told_here_and_has_its_exit_code(
    error: FedsimError, status: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def refuse(plan: Any) -> Any:
        raise error

    monkeypatch.setattr("fedsim.running.experiment.build", refuse)
    (plan,) = plans_of("seed=0")
    (report,) = run_jobs([sent(plan)])
    attempts = Attempts()
    attempts.ends_elsewhere(plan, *outcome_of(plan, report, None))
    assert attempts.ended[plan.folder].status == status
    assert [(found.exit_code, str(found)) for found in attempts.refused] == [(code, str(error))]


def test_a_task_without_a_report_has_done_what_its_folder_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan, other = plans_of("seed=0,1")
    Attempts().run(plan)
    reason = "its process was killed"
    assert outcome_of(plan, None, reason)[0].status == "done"
    assert outcome_of(other, None, reason)[0] == Outcome("failed", {"error": reason})
    assert f"{other.folder}: {reason}; the same command goes on" in capsys.readouterr().out


def test_a_job_that_another_process_has_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (plan,) = plans_of("seed=0")
    attempts = Attempts()
    report = Report(folder=str(plan.folder), status="held", skipped=False, error=None, refused=False)
    attempts.ends_elsewhere(plan, *outcome_of(plan, report, None))
    assert (attempts.held, attempts.ended) == ({plan.folder: plan}, {})
    attempts.run_held(attempts.run_in_turn)
    assert attempts.ended[plan.folder].status == "done"


def test_rounds_are_counted_once_in_records_that_grow_and_are_cut(tmp_path: Path) -> None:
    seen = SeenRecords()
    lines = [json.dumps({"round": r, "test_accuracy": 0.5}) + "\n" for r in range(1, 5)]
    assert seen.new(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:3])[:-4])
    assert [r["round"] for r in seen.new(tmp_path)] == [1, 2]
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:3]))
    assert [r["round"] for r in seen.new(tmp_path)] == [3]
    (tmp_path / "metrics.jsonl").write_text(lines[0])  # by a task that goes on from a checkpoint
    assert seen.new(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:2]))
    assert [r["round"] for r in seen.new(tmp_path)] == [2]


def test_keys_stay_here_and_gpus_are_hidden_from_tasks_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("FEDSIM_DATA", "there")
    environment = _place(jobs())["environment"]
    assert environment["FEDSIM_DATA"] == "there"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "secret" not in environment.values()
    assert "CUDA_VISIBLE_DEVICES" not in _place(jobs(num_gpus=0.5))["environment"]


# --- Ray on this machine, where it is installed ----------------------------------------------------------------------

LAB = """
import time
from pathlib import Path
from fedsim.selectors.random import Random

class Slow(Random):
    def select(self, round, clients, rng):
        if Path("slow").exists():
            time.sleep(0.2)
        return super().select(round, clients, rng)

class Raises(Random):
    def select(self, round, clients, rng):
        if Path("raises").exists() and round == 2:
            raise ValueError("on purpose")
        return super().select(round, clients, rng)
"""


def result(folder: Path) -> Any:
    records = [{k: v for k, v in r.items() if "seconds" not in k} for r in read_metrics(folder)]
    return folder.name, records, (read_summary(folder) or {})["status"], (folder / MODEL).read_bytes()


def folders(place: Path) -> list[Path]:
    return sorted(p.parent for p in place.glob("*/*/config.yaml"))


def pid_of_job(folder: Path) -> int:
    """Of the process that is running it."""
    (holder,) = (folder.parent / ".locks").glob(f"{folder.name}*.holder.json")
    pid: int = json.loads(holder.read_text())["pid"]
    return pid


def left_of(session: int) -> list[str]:
    """Names of the processes in a session that are not zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        state, _, _, of_session = rest.split()[:4]
        if int(of_session) == session and state != "Z":
            found.append(name)
    return found


def none_left(session: int) -> bool:
    """Waits for processes that end a moment after their parent."""
    for _ in range(900):  # agents of a killed Ray look for it every few seconds
        if not left_of(session):
            return True
        time.sleep(0.2)
    raise AssertionError(f"processes are left: {left_of(session)}")


class Sweep:
    """A command in a session of its own, with two tasks at a time."""

    def __init__(self, place: Path, *words: str) -> None:
        (place / "my_lab.py").write_text(LAB)
        self.place = place
        self.command = [sys.executable, "-m", "fedsim.run", "-m", *WORDS, *words]
        self.launcher = ["hydra/launcher=ray", "hydra.launcher.max_in_flight=2"]
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*self.command, *self.launcher],
            cwd=self.place,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )

    def wait_for_two(self, process: "subprocess.Popen[str]") -> None:
        """Until two jobs have done some rounds."""
        while sum(len(read_metrics(folder)) > 3 for folder in folders(self.place / "outputs")) < 2:
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)

    def again(self, *more: str) -> str:
        done = subprocess.run(
            [*self.command, *more], cwd=self.place, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def check_equal(self) -> None:
        """The same as the jobs one after another in a process."""
        self.again("output_dir=whole")
        place = self.place
        assert [result(f) for f in folders(place / "outputs")] == [result(f) for f in folders(place / "whole")]


@pytest.mark.slow
def test_a_killed_worker_is_retried_and_one_that_raises_is_named_and_the_others_finish(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    words = ("num_rounds=30", "checkpoint.every=2", "seed=0,1,2,3,4,5")
    sweep = Sweep(tmp_path, *words, "selector._target_=my_lab.Slow,my_lab.Raises")
    (tmp_path / "slow").touch()
    (tmp_path / "raises").touch()
    process = sweep.start()
    try:
        while not (going := [f for f in folders(tmp_path / "outputs") if 3 < len(read_metrics(f)) < 20]):
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        os.kill(pid_of_job(going[0]), signal.SIGKILL)
        (tmp_path / "slow").unlink()
        output, errors = process.communicate(timeout=HANG)
    finally:
        process.kill()
    assert process.returncode == 1, output + errors
    assert "Traceback" not in errors
    assert output.count("ValueError: on purpose") >= 1, output
    statuses = [(read_summary(f) or {})["status"] for f in folders(tmp_path / "outputs")]
    assert (len(statuses), statuses.count("done"), statuses.count("failed")) == (12, 6, 6)
    assert sum((f / ERROR).is_file() for f in folders(tmp_path / "outputs")) == 6
    assert none_left(process.pid)
    (tmp_path / "raises").unlink()
    assert "12 jobs" in sweep.again(*sweep.launcher, "hydra.launcher.jobs_per_task=3")
    sweep.check_equal()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_sweep_whose_command_ends_leaves_no_process_and_the_same_command_goes_on(
    number: int, code: int, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    sweep = Sweep(tmp_path, "num_rounds=60", "checkpoint.every=2", "seed=0,1,2", "selector._target_=my_lab.Slow")
    (tmp_path / "slow").touch()
    process = sweep.start()
    try:
        sweep.wait_for_two(process)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        output, errors = process.communicate(timeout=HANG)
    finally:
        process.kill()
    assert process.returncode == code, output + errors
    assert "Traceback" not in errors
    assert none_left(process.pid)
    if code > 0:
        summaries = [read_summary(folder) or {} for folder in folders(tmp_path / "outputs")]
        assert {summary["status"] for summary in summaries} == {"interrupted"}
        assert "the same command goes on" in output
    (tmp_path / "slow").unlink()
    sweep.again(*sweep.launcher)
    sweep.check_equal()
