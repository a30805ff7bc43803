"""The launchers: whichever runs the jobs of a sweep, they end alike, heed signals and may be killed."""

import json
import os
import pickle
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedsim.core.errors import ConfigError, DataError, FedsimError, Problem
from fedsim.core.record import Record
from fedsim.jobs.cli import run
from fedsim.jobs.ray_launcher import RayJobs
from fedsim.jobs.sweep import Attempts
from fedsim.jobs.task_worker import run_jobs
from fedsim.jobs.tasks import new_records
from fedsim.results.files import ERROR, read_summary
from fedsim.rounds.loop import Simulation
from fedsim.running.outcome import Outcome
from fedsim.running.process import StopRequests
from tests import slurm_stand_in
from tests.launcher_toys import (
    HANG,
    LAB,
    WORDS,
    Sweep,
    folders,
    going,
    none_left,
    pid_of_job,
    plans_of,
    result,
    sent,
    statuses,
)

LIBRARIES = {"ray": "ray", "submitit_local": "submitit", "submitit_slurm": "submitit"}
ELSEWHERE = ("joblib", "ray", "submitit_local", "submitit_slurm")


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the selectors of `LAB`."""
    (tmp_path / "my_lab.py").write_text(LAB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_lab", raising=False)
    return tmp_path


# --- the config ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launcher", "words", "told"),
    [
        ("lanes", ("hydra.launcher.max_lanes=0",), "hydra.launcher.max_lanes=0: must be >= 1"),
        ("joblib", ("hydra.launcher.n_jobs=0",), "hydra.launcher.n_jobs=0: must not be 0"),
        ("joblib", ("hydra.launcher.jobs_per_task=0",), "hydra.launcher.jobs_per_task=0: must be >= 1"),
        ("ray", ("hydra.launcher.num_gpus=1.5",), "hydra.launcher.num_gpus=1.5"),
        ("ray", ("hydra.launcher.address=other:6379",), "hydra.launcher.address='other:6379'"),
        ("ray", ("hydra.launcher.max_retries=-1",), "hydra.launcher.max_retries=-1"),
        ("ray", ("hydra.launcher.max_in_flight=0",), "hydra.launcher.max_in_flight=0"),
        ("ray", ("hydra.launcher.num_gpus=0.5", "device=auto"), "hydra.launcher.num_gpus=0.5: needs a GPU"),
        ("submitit_local", ("hydra.launcher.max_in_flight=0",), "hydra.launcher.max_in_flight=0: must be >= 1"),
        ("submitit_local", ("hydra.launcher.nodes=2",), "hydra.launcher.nodes=2: must be 1"),
        ("submitit_local", ("hydra.launcher.jobs_per_task=a",), "hydra.launcher.jobs_per_task: must be a number"),
        ("submitit_local", ("hydra.launcher.jobs_per_task=1.5",), "jobs_per_task=1.5: must be an integer"),
        ("submitit_local", ("hydra.launcher.gpus_per_node=1",), "gpus_per_node=1: needs a GPU"),
        ("submitit_local", ("hydra.launcher.gpus_per_node=1", "device=cuda"), "device='cuda': needs a"),
        ("submitit_slurm", ("hydra.launcher.max_num_timeout=-1",), "max_num_timeout=-1: must be >= 0"),
        ("submitit_slurm", ("hydra.launcher.timeout_min=2",), "signal_delay_s=120: must be < timeout_min, which is"),
        ("submitit_slurm", ("device=cuda",), "must be > 0 for device=cuda"),
        ("submitit_slurm", ("hydra.launcher.gres=gpu:2",), "gpus_per_node=1: needs a GPU"),
        ("submitit_slurm", ("hydra.launcher.gres=gpu:2", "device=cuda"), "on a slurm cluster?"),
    ],
)
def test_mistakes_are_told_before_anything_is_started(
    launcher: str, words: tuple[str, ...], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if launcher.startswith("submitit"):
        pytest.importorskip("submitit")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError) as error:
        run(["-m", "seed=0,1", *WORDS, f"hydra/launcher={launcher}", *words])
    assert told in str(error.value)
    assert not (tmp_path / "outputs").exists()


def test_a_launcher_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf/hydra/launcher").mkdir(parents=True)
    (tmp_path / "conf/hydra/launcher/other.yaml").write_text("_target_: os.system\n")
    with pytest.raises(ConfigError, match=r"hydra.launcher._target_='os.system': must be the class of a launcher"):
        run(["-m", "seed=0,1", *WORDS, "--config-dir", "conf", "hydra/launcher=other"])


# --- a task ----------------------------------------------------------------------------------------------------------


def test_a_task_runs_what_was_sent_as_plain_data_and_returns_how_it_ended(lab: Path) -> None:
    plans = plans_of("seed=0,1")
    assert [outcome.status for outcome in run_jobs([sent(plan) for plan in plans])] == ["done", "done"]  # in lanes
    (again,) = run_jobs([sent(plans[0])])
    assert (again.status, again.skipped) == ("done", True)
    assert run(["-m", "seed=0,1", *WORDS, "output_dir=whole"]) == 0
    assert [result(f) for f in folders(lab / "outputs")] == [result(f) for f in folders(lab / "whole")]
    with pytest.raises(RuntimeError, match="is fedsim the same"):
        run_jobs([{**sent(plans[0]), "folder": "outputs/default/other"}])


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (DataError("no data"), "data", 3),
        (ConfigError([Problem("model", "mine", "does not fit")]), "config", 2),
        (FedsimError("no room"), "failed", 1),
    ],
)
def test_what_refuses_a_job_in_a_task_is_told_here_and_has_its_exit_code(
    error: FedsimError, status: str, code: int, lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(plan: Any) -> Any:
        raise error

    monkeypatch.setattr("fedsim.running.experiment.build", refuse)
    (plan,) = plans_of("seed=0")
    attempts = Attempts()
    attempts.ends(plan, *pickle.loads(pickle.dumps(run_jobs([sent(plan)]))))
    assert attempts.ended[plan.folder].status == status
    assert [(found.exit_code, str(found)) for found in attempts.refused] == [(code, str(error))]


def test_a_job_that_another_process_has_is_looked_at_again(lab: Path) -> None:
    (plan,) = plans_of("seed=0")
    attempts = Attempts()
    attempts.ends(plan, Outcome("held", {}))
    assert (attempts.held, attempts.ended) == ({plan.folder: plan}, {})
    attempts.run_held(attempts.run_in_turn)
    assert attempts.ended[plan.folder].status == "done"


def test_a_task_that_is_asked_to_end_saves_its_job_and_its_process_begins_no_other(
    stop: StopRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "install", lambda: None)
    step = Simulation.step

    def asked(self: Simulation) -> Record:
        if self.round == 1:
            stop.handle(signal.SIGTERM)
        return step(self)

    monkeypatch.setattr(Simulation, "step", asked)
    stop.defer_always()
    first, second = ([sent(plan)] for plan in plans_of("seed=0,1"))
    assert [run_jobs(jobs)[0].status for jobs in (first, second)] == ["preempted"] * 2
    assert [(read_summary(folder) or {})["rounds"] for folder in folders(Path("outputs"))] == [2]
    stop.handle(signal.SIGTERM)  # between two jobs it ends nothing


def test_rounds_are_counted_once_in_records_that_grow(tmp_path: Path) -> None:
    lines = [json.dumps({"round": r, "selected": [0] * 5000}) + "\n" for r in range(1, 6)]
    assert new_records(tmp_path, 0) == []
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:3])[:-4])
    assert [r["round"] for r in new_records(tmp_path, 0)] == [1, 2]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert [r["round"] for r in new_records(tmp_path, 3)] == [4, 5]
    assert new_records(tmp_path, 5) == []


# --- Ray without Ray -------------------------------------------------------------------------------------------------


def ray_jobs(**given: Any) -> RayJobs:
    values = {"address": None, "num_cpus": 1.0, "num_gpus": 0.0, "max_retries": 3}
    return RayJobs(**{**values, "jobs_per_task": 1, "max_in_flight": None, **given})


def test_a_ray_that_does_not_start_is_told(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class BusyRay(ModuleType):
        def init(self, **_: Any) -> None:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr("fedsim.jobs.ray_launcher.SETTINGS", {})
    monkeypatch.setitem(sys.modules, "ray", BusyRay("ray"))
    with pytest.raises(FedsimError, match="Ray has not started: The current node timed out during startup"):
        ray_jobs().run(Attempts(), plans_of("seed=0"))


def test_keys_stay_here_and_gpus_are_hidden_from_tasks_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("FEDSIM_DATA", "there")
    environment = ray_jobs()._place()["environment"]
    assert (environment["FEDSIM_DATA"], environment["CUDA_VISIBLE_DEVICES"]) == ("there", "")
    assert "secret" not in environment.values()
    assert "CUDA_VISIBLE_DEVICES" not in ray_jobs(num_gpus=0.5)._place()["environment"]


# --- whole sweeps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "launcher", ["basic", "joblib", pytest.param("submitit_local", marks=pytest.mark.slow), "lanes"]
)
def test_jobs_that_are_done_fail_or_are_refused_are_told_alike(
    launcher: str, lab: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if launcher in LIBRARIES:
        pytest.importorskip(LIBRARIES[launcher])
    (lab / "raises").touch()
    targets = "selector._target_=my_lab.Slow,my_lab.Raises,my_lab.Refuses"
    words = ["-m", *WORDS, "selector=random", targets, f"hydra/launcher={launcher}"]
    words += ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    assert run(words) == 1
    told = capfd.readouterr()
    assert statuses(lab) == {"done": 1, "failed": 1}
    assert "failed · selector._target_=my_lab.Raises · ValueError: on purpose" in " ".join(told.out.split())
    assert "fedsim: no data\n    concerns 1 of 3 jobs\n" in told.err
    assert "the same command goes on with 2 jobs that are not done" in told.out
    (error,) = lab.rglob(ERROR)
    assert "ValueError: on purpose" in error.read_text()
    (lab / "raises").unlink()
    assert run(words) == 3
    told = capfd.readouterr()
    assert statuses(lab) == {"done": 2}
    assert "1 have ended before" in told.out


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., Sweep]:
    """A sweep by a launcher, with two tasks at a time; one of Slurm's tasks are killed in the end."""

    def make(launcher: str, *words: str) -> Sweep:
        made = Sweep(tmp_path, "num_rounds=60", *words, "selector._target_=my_lab.Slow", launcher=launcher)
        key = {"joblib": "n_jobs", "submitit_slurm": "array_parallelism"}.get(launcher, "max_in_flight")
        made.launcher.append(f"hydra.launcher.{key}=2")
        if launcher == "submitit_slurm":
            slurm_stand_in.install(tmp_path / "slurm")
            made.environment["PATH"] = f"{tmp_path / 'slurm'}:{os.environ['PATH']}"
        return made

    return make


WAYS = [("command", signal.SIGTERM), ("all", signal.SIGINT), ("command", signal.SIGKILL), ("job", signal.SIGKILL)]


@pytest.mark.slow
@pytest.mark.parametrize(("who", "number"), WAYS)
@pytest.mark.parametrize("launcher", ELSEWHERE)
def test_a_sweep_that_is_asked_to_end_or_struck_leaves_no_process_and_the_same_command_goes_on(
    launcher: str, who: str, number: int, sweep: Callable[..., Sweep], tmp_path: Path
) -> None:
    """A terminal sends Ctrl-C to all processes; the out-of-memory killer kills that of a job."""
    if launcher in LIBRARIES:
        pytest.importorskip(LIBRARIES[launcher])
    made = sweep(launcher, "seed=0,1,2")
    process = made.start()
    try:
        made.wait_for(2, process)
        if who == "all":
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid if who == "command" else pid_of_job(going(tmp_path)[0]), number)
        if who == "job":
            (tmp_path / "slow").unlink()
        if who == "command" and number == signal.SIGKILL:
            process.wait(timeout=HANG)  # tasks of submitit live on, and hold its pipes
            (tmp_path / "slow").unlink()
            output = errors = ""
        else:
            output, errors = process.communicate(timeout=HANG)
    finally:
        process.kill()
    struck = 0 if launcher == "ray" else 1  # Ray runs the task again
    code = {15: 75, 2: 130, 9: struck if who == "job" else -signal.SIGKILL}[number]
    assert process.returncode == code, output + errors
    assert "Traceback" not in errors
    if code > 1:
        assert set(statuses(tmp_path)) <= {"interrupted", "preempted"}
    if code > 0:
        assert "the same command goes on" in output
    (tmp_path / "slow").unlink(missing_ok=True)
    made.again(*made.launcher)
    assert none_left(process.pid)
    made.check_equal()
