"""The launchers `submitit_local` and `submitit_slurm`: what they tell submitit and Slurm; requeued
tasks."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsim.config.hydra_node import launcher_problems
from fedsim.config.sources import load_plugins
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError
from fedsim.jobs.cli import run
from fedsim.jobs.launchers import build_submitit_launcher
from fedsim.jobs.task_worker import SubmittedTask
from fedsim.results.reading import read_metrics, read_summary
from tests import slurm_stand_in
from tests.launcher_toys import (
    HANG,
    LAB,
    WORDS,
    Sweep,
    folders,
    pid_of_job,
    plans_of,
    result,
    statuses,
)

submitit = pytest.importorskip("submitit")


def node_of(name: str, /, **given: Any) -> dict[str, Any]:
    """The node hydra.launcher."""
    return {
        **yaml.safe_load((conf_dir() / f"hydra/launcher/{name}.yaml").read_text(encoding="utf-8")),
        **given,
    }


@pytest.mark.parametrize("name", ["submitit_local", "submitit_slurm"])
def test_commands_paths_and_words_that_are_not_plain_are_refused(name: str) -> None:
    load_plugins()  # as every command does
    assert not launcher_problems(node_of(name))
    assert not launcher_problems(
        node_of(name, cpus_per_task=4, jobs_per_task=8, mem_per_gpu="8G", exclude="n[1-3]")
    )
    bad = {
        "submitit_folder": "/tmp",
        "setup": ["touch marker"],
        "additional_parameters": {"wrap": "touch marker"},
    }
    bad |= {
        "name": "a\ntouch marker",
        "comment": "--wrap=x",
        "x": {"_target_": "os.system"},
        "mem_per_cpu": "1 $(x)",
    }
    for key, value in bad.items():
        (problem,) = launcher_problems(node_of(name, **{key: value}))
        assert problem.key == f"hydra.launcher.{key}"


def test_what_sbatch_refuses_is_told_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("srun", "sbatch"):
        (tmp_path / name).write_text(
            "#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpi' >&2\nexit 1\n"
        )
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(
        ConfigError, match="could not be submitted: sbatch: error: invalid partition specified: gpi"
    ):
        run(
            [
                "-m",
                "seed=0,1",
                *WORDS,
                "hydra/launcher=submitit_slurm",
                "hydra.launcher.partition=gpi",
            ]
        )


@pytest.mark.parametrize(
    ("given", "cores", "hidden"),
    [
        ({"cpus_per_task": 4}, True, True),
        ({"gpus_per_node": 1}, False, False),
        ({"gpus_per_task": 1}, False, False),
        ({"gres": "gpu:a100:1"}, False, False),
    ],
)
def test_srun_is_told_the_cores_of_a_task_and_gpus_are_hidden_from_one_that_asks_for_none(
    given: dict[str, Any],
    cores: bool,
    hidden: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its threads would share a core (Slurm 22.05), and device=auto would be another device
    than was checked."""
    (tmp_path / "srun").touch(mode=0o755)  # which submitit looks for
    monkeypatch.setenv("PATH", str(tmp_path))
    given |= {
        "mem_gb": 16,
        "partition": "gpu",
        "mem_per_gpu": "8G",
        "max_num_timeout": 7,
        "jobs_per_task": 8,
    }
    launcher = build_submitit_launcher(node_of("submitit_slurm", **given))
    with launcher.connected(tmp_path):
        made = launcher._executor._executor
    assert made.max_num_timeout == 7
    expected = {
        "mem": "16GB",
        "partition": "gpu",
        "mem_per_gpu": "8G",
        "job_name": "fedsim",
        "time": 60,
        "nodes": 1,
    }
    assert {key: made.parameters[key] for key in expected} == expected
    lines: list[str] = made._make_submission_file_text("python", "").splitlines()
    (number,) = (number for number, line in enumerate(lines) if line.startswith("srun "))
    assert ("--cpus-per-task=4" in lines[number].split()) == cores
    assert lines[number].endswith(" python")
    assert ("export CUDA_VISIBLE_DEVICES=" in lines[:number]) == hidden


# --- tasks that are requeued ---


def wait_for_rounds(places: list[Path], rounds: int, job: Any) -> None:
    """Until each of the runs has so many."""
    while any(len(read_metrics(folder)) < rounds for folder in places):
        assert not job.paths.result_pickle.exists(), job.stderr()
        time.sleep(0.1)


@pytest.mark.slow
def test_a_preempted_task_is_requeued_and_ends_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By submitit's own signal, in a process that submitit starts; two jobs in lanes, saved on
    request alone."""
    (tmp_path / "my_lab.py").write_text(LAB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ("num_rounds=30", "checkpoint.every=null", "selector._target_=my_lab.Slow")
    plans = plans_of(*words, "seed=0,1")
    places = [plan.folder for plan in plans]
    executor = submitit.LocalExecutor(tmp_path / "submitit", max_num_timeout=0)
    executor.update_parameters(
        timeout_min=60
    )  # within its first 48 minutes the signal is taken for a preemption
    (tmp_path / "slow").touch()
    task = executor.submit(SubmittedTask(plans, time.time(), {}))
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
        outcomes = task.result()
    finally:
        task._process.kill()
    assert first != second
    assert [(outcome.status, outcome.skipped) for outcome in outcomes] == [("done", False)] * 2
    assert run(["-m", "seed=0,1", *WORDS, *words, "output_dir=whole"]) == 0
    assert [result(f) for f in folders(tmp_path / "outputs")] == [
        result(f) for f in folders(tmp_path / "whole")
    ]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Path]:
    """Where the commands in place of Slurm's will be; their tasks are killed in the end."""
    place = tmp_path / "slurm"
    yield place
    for file in place.glob("*.pid"):
        with suppress(OSError):
            os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.mark.slow
def test_an_array_of_lanes_is_requeued_by_slurm_and_killed_and_repeated(
    tmp_path: Path, slurm: Path
) -> None:
    """By commands that take the place of Slurm's (tests/slurm_stand_in.py)."""
    sweep = Sweep(
        tmp_path, "submitit_slurm", "seed=0,1,2,3,4,5", "jobs_per_task=2", "array_parallelism=2"
    )
    process = sweep.start()
    try:
        sweep.wait_for(4, process)
        first, second = (int((slurm / f"{task}.pid").read_text()) for task in ("1_0", "1_1"))
        os.kill(first, signal.SIGTERM)  # which Slurm sends before a preemption
        os.kill(first, signal.SIGUSR2)
        os.kill(second, signal.SIGKILL)
        while not slurm_stand_in.requeues(slurm):
            time.sleep(0.1)
        assert statuses(tmp_path)["preempted"] == 2
        (tmp_path / "slow").unlink()
        output, errors = process.communicate(timeout=HANG)
    finally:
        process.kill()
    assert "#SBATCH --array=0-2%2" in (slurm / "1.script").read_text()
    assert "#SBATCH --signal=USR2@120" in (slurm / "1.script").read_text()
    assert slurm_stand_in.requeues(slurm) == ["1_0"]
    assert slurm_stand_in.states_in_the_end(slurm) == {
        "1_0": "COMPLETED",
        "1_1": "FAILED",
        "1_2": "COMPLETED",
    }
    assert process.returncode == 1, output + errors
    assert output.count("1_1 has ended without a report: FAILED, see") >= 2
    assert statuses(tmp_path) == {"done": 4, "None": 2}
    sweep.check_that_it_goes_on()
    assert slurm_stand_in.states_in_the_end(slurm)["2"] == "COMPLETED"  # one task of two lanes
