"""The launchers: whichever runs the jobs of a sweep, they end alike.

They heed signals, and their processes may be killed.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fedsim.config.plan import Plan
from fedsim.core.errors import ConfigError, DataError, FedsimError, Problem
from fedsim.core.record import Record
from fedsim.jobs.cli import run
from fedsim.jobs.launchers import RayJobs
from fedsim.jobs.sweep import Attempts
from fedsim.jobs.tasks import TaskLauncher, in_words, latest_record
from fedsim.results.files import ERROR
from fedsim.results.reading import read_summary
from fedsim.rounds.loop import Simulation
from fedsim.running.outcome import Outcome
from fedsim.running.process import Preempted, StopRequests
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


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the selectors of `LAB`."""
    (tmp_path / "my_lab.py").write_text(LAB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_lab", raising=False)
    return tmp_path


# --- the config ---


MISTAKES = [
    ("lanes", "max_lanes=0", "hydra.launcher.max_lanes=0: must be >= 1"),
    ("joblib", "n_jobs=0", "hydra.launcher.n_jobs=0: must not be 0"),
    ("joblib", "jobs_per_task=0", "hydra.launcher.jobs_per_task=0: must be >= 1"),
    ("ray", "num_gpus=1.5", "hydra.launcher.num_gpus=1.5"),
    ("ray", "address=other:6379", "hydra.launcher.address='other:6379'"),
    ("ray", "max_retries=-1", "hydra.launcher.max_retries=-1"),
    ("ray", "max_in_flight=0", "hydra.launcher.max_in_flight=0"),
    ("submitit_local", "max_in_flight=0", "hydra.launcher.max_in_flight=0: must be >= 1"),
    ("submitit_local", "nodes=2", "hydra.launcher.nodes=2: must be 1"),
    ("submitit_local", "jobs_per_task=a", "hydra.launcher.jobs_per_task: must be a number"),
    ("submitit_local", "jobs_per_task=1.5", "jobs_per_task=1.5: must be an integer"),
    ("submitit_local", "gpus_per_node=1", "gpus_per_node=1: needs a GPU"),
    ("submitit_slurm", "max_num_timeout=-1", "max_num_timeout=-1: must be >= 0"),
    ("submitit_slurm", "timeout_min=2", "signal_delay_s=120: must be < timeout_min, which is"),
    ("submitit_slurm", "gres=gpu:2", "gpus_per_node=1: needs a GPU"),
]
"""A launcher, a parameter of it, and the error."""
MISTAKES_WITH_A_DEVICE = [
    ("ray", "num_gpus=0.5", "auto", "hydra.launcher.num_gpus=0.5: needs a GPU"),
    ("submitit_local", "gpus_per_node=1", "cuda", "device='cuda': needs a"),
    ("submitit_slurm", "gpus_per_node=null", "cuda", "must be > 0 for device=cuda"),
    ("submitit_slurm", "gres=gpu:2", "cuda", "on a slurm cluster?"),
    ("submitit_slurm", "gres='license:1,gpu:a100:2'", "cuda", "on a slurm cluster?"),
]


@pytest.mark.parametrize(
    ("launcher", "word", "device", "error"),
    [
        *((launcher, word, None, error) for launcher, word, error in MISTAKES),
        *MISTAKES_WITH_A_DEVICE,
    ],
)
def test_mistakes_are_reported_before_anything_is_started(
    launcher: str,
    word: str,
    device: str | None,
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if launcher.startswith("submitit"):
        pytest.importorskip("submitit")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = ["-m", "seed=0,1", *WORDS, f"hydra/launcher={launcher}", f"hydra.launcher.{word}"]
    if device is not None:
        words.append(f"device={device}")
    with pytest.raises(ConfigError) as caught:
        run(words)
    assert error in str(caught.value)
    assert not (tmp_path / "outputs").exists()


# --- a task ---


def test_a_task_runs_what_was_sent_and_returns_how_it_ended(lab: Path) -> None:
    plans = plans_of("seed=0,1")
    assert [outcome.status for outcome in sent(*plans)] == ["done", "done"]  # in lanes
    (again,) = sent(plans[0])
    assert (again.status, again.skipped) == ("done", True)
    assert run(["-m", "seed=0,1", *WORDS, "output_dir=whole"]) == 0
    assert [result(f) for f in folders(lab / "outputs")] == [
        result(f) for f in folders(lab / "whole")
    ]


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
    attempts.job_ended(plan, *sent(plan))
    assert attempts.ended[plan.folder].status == status
    assert [(found.exit_code, str(found)) for found in attempts.errors] == [(code, str(error))]


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
    assert [sent(plan)[0].status for plan in plans_of("seed=0,1")] == ["preempted"] * 2
    assert [(read_summary(folder) or {})["rounds"] for folder in folders(Path("outputs"))] == [2]
    stop.handle(signal.SIGTERM)  # between two jobs it ends nothing


def test_the_latest_round_is_found_in_records_that_grow(tmp_path: Path) -> None:
    lines = [
        json.dumps({"round": r, "test_accuracy": 0.5, "selected": [0] * 5000}) + "\n"
        for r in range(1, 40)
    ]
    assert latest_record(tmp_path) == {}
    for text, latest in (("".join(lines[:3])[:-4], 2), ("".join(lines), 39)):
        (tmp_path / "metrics.jsonl").write_text(text)
        assert latest_record(tmp_path)["round"] == latest


def test_of_a_traceback_the_last_line_is_told() -> None:
    line = "-" * 22
    trace = f"Job failed:\n{line}\nTraceback\n  File x\nValueError: y\n\n{line}\nlogs"
    assert in_words(OSError(trace)) == "OSError: ValueError: y"
    assert in_words(KeyError()) == "KeyError: "


def test_keys_stay_here_and_gpus_are_hidden_from_tasks_of_ray_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {
        "address": None,
        "num_cpus": 1.0,
        "max_retries": 3,
        "jobs_per_task": 1,
        "max_in_flight": None,
    }
    without, with_gpu = (RayJobs(**values, num_gpus=number) for number in (0.0, 0.5))  # type: ignore[arg-type]
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("FEDSIM_DATA", "there")
    environment = without._environment()
    assert (environment["FEDSIM_DATA"], environment["CUDA_VISIBLE_DEVICES"]) == ("there", "")
    assert "secret" not in environment.values()
    assert "CUDA_VISIBLE_DEVICES" not in with_gpu._environment()


# --- how many tasks there are, and what a signal leaves ---


@dataclass(kw_only=True)
class Pretended(TaskLauncher):
    """Tasks that end in turn, most of them without doing anything; `lost`: one that reports
    nothing."""

    most: int | None
    lost: int | None = None
    does_them: bool = False
    begun: list[list[Path]] = field(default_factory=list)
    at_a_time: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    how = "as tasks that are pretended"

    def problems(self) -> list[None]:
        return []

    @property
    def tasks_at_a_time(self) -> int | None:
        return self.most

    @contextmanager
    def connected(self, place: Path) -> Iterator[None]:
        yield

    def begin(self, groups: Sequence[Sequence[Plan]], since: float) -> Sequence[int]:
        first = len(self.begun)
        self.begun += [[plan.folder for plan in group] for group in groups]
        if self.does_them:
            Attempts().run_in_turn([plan for group in groups for plan in group])
        return range(first, len(self.begun))

    def ended(self, running: Mapping[int, Sequence[Plan]]) -> Sequence[int]:
        self.at_a_time.append(len(running))
        return list(running)[:1]

    def outcomes(self, task: int) -> list[Outcome]:
        if task == self.lost:
            raise OSError("killed")
        return [Outcome("done", {})] * len(self.begun[task])

    def ask_to_end(self, running: Sequence[int]) -> None:
        self.asked.append(len(running))


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    monkeypatch.chdir(tmp_path)
    return plans_of("seed=0,1,2", "local.batch_size=8,16")


def test_a_task_has_jobs_that_can_train_together_and_all_begin_at_once_where_nothing_limits_them(
    plans: list[Plan],
) -> None:
    tasks, attempts = Pretended(jobs_per_task=2, most=None), Attempts()
    tasks.run(attempts, plans)
    of_batch = {plan.folder: plan.local.batch_size for plan in plans}
    assert [[of_batch[folder] for folder in group] for group in tasks.begun] == [
        [8, 8],
        [8],
        [16, 16],
        [16],
    ]
    assert tasks.at_a_time == [4, 3, 2, 1]
    assert {folder: one.status for folder, one in attempts.ended.items()} == {
        plan.folder: "done" for plan in plans
    }


def test_no_more_tasks_than_asked_for_run_at_a_time_and_one_that_is_lost_takes_no_other_along(
    plans: list[Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    tasks, attempts = Pretended(jobs_per_task=1, most=2, lost=2), Attempts()
    tasks.run(attempts, plans)
    assert tasks.at_a_time == [2, 2, 2, 2, 2, 1]
    statuses = {folder: outcome.status for folder, outcome in attempts.ended.items()}
    assert statuses == {
        folder: "failed" if n == 2 else "done" for n, (folder,) in enumerate(tasks.begun)
    }
    assert (
        "its task is lost (OSError: killed); the same command resumes it" in capsys.readouterr().out
    )

    attempts = Attempts()  # one that is lost has done what its folder says
    Pretended(jobs_per_task=1, most=None, lost=0, does_them=True).run(attempts, plans[:1])
    assert [(one.status, one.summary["rounds"]) for one in attempts.ended.values()] == [("done", 3)]


def test_tasks_are_asked_to_end_at_a_second_ctrl_c_too(
    plans: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(self: Any, running: Any) -> None:
        raise KeyboardInterrupt

    tasks = Pretended(jobs_per_task=1, most=3)
    monkeypatch.setattr(Pretended, "ended", twice)
    with pytest.raises(KeyboardInterrupt):
        tasks.run(Attempts(), plans)
    assert tasks.asked == [3]


def test_after_a_signal_no_task_begins_and_those_that_run_are_asked_to_end(
    plans: list[Plan], stop: StopRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Pretended.ended

    def in_the_first_look(self: Pretended, running: Any) -> Sequence[int]:
        stop.handle(signal.SIGTERM)
        return ended(self, running)

    monkeypatch.setattr(Pretended, "ended", in_the_first_look)
    tasks = Pretended(jobs_per_task=1, most=3)
    with stop.working(), pytest.raises(Preempted):
        tasks.run(Attempts(), plans)
    assert len(tasks.begun) == 3
    assert tasks.asked == [2]


# --- whole sweeps ---


@pytest.mark.parametrize(
    "launcher",
    [
        "basic",
        "lanes",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("joblib", "submitit_local")),
    ],
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
    assert "failed · selector._target_=my_lab.Raises · ValueError: on purpose" in " ".join(
        told.out.split()
    )
    assert "fedsim: no data\n    concerns 1 of 3 jobs\n" in told.err
    assert "the same command resumes 2 jobs that are not done" in told.out
    (error,) = lab.rglob(ERROR)
    assert "ValueError: on purpose" in error.read_text()
    (lab / "raises").unlink()
    assert run(words) == 3
    told = capfd.readouterr()
    assert statuses(lab) == {"done": 2}
    assert "1 has ended before" in told.out


WAYS = [
    ("command", signal.SIGTERM),
    ("all", signal.SIGINT),
    ("command", signal.SIGKILL),
    ("job", signal.SIGKILL),
]
AT_A_TIME = {"joblib": "n_jobs", "ray": "max_in_flight", "submitit_local": "max_in_flight"}


@pytest.mark.slow
@pytest.mark.parametrize(("who", "number"), WAYS)
@pytest.mark.parametrize("launcher", ["joblib", *LIBRARIES])
def test_a_sweep_that_is_asked_to_end_or_struck_leaves_no_process_and_the_same_command_goes_on(
    launcher: str, who: str, number: int, tmp_path: Path
) -> None:
    """A terminal sends Ctrl-C to all processes; the out-of-memory killer kills that of a job."""
    if launcher in LIBRARIES:
        pytest.importorskip(LIBRARIES[launcher])
    sweep = Sweep(
        tmp_path, launcher, "seed=0,1,2", f"{AT_A_TIME.get(launcher, 'array_parallelism')}=2"
    )
    process = sweep.start()
    try:
        sweep.wait_for(2, process)
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
        assert "the same command resumes" in output
    (tmp_path / "slow").unlink(missing_ok=True)
    sweep.check_that_it_goes_on()
    assert none_left(process.pid)
