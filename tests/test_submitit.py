"""The launchers `submitit_local` and `submitit_slurm`: their config, and what they tell submitit and Slurm."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from fedsim.config import hydra_node
from fedsim.config.words import plugins
from fedsim.core.errors import ConfigError
from fedsim.jobs.cli import run
from fedsim.jobs.submitit_launcher import LocalJobs, SlurmJobs, SubmititJobs, _last_of_trace, launcher_of
from tests.test_ray import WORDS

pytest.importorskip("submitit")


def node_of(name: str, /, **given: Any) -> dict[str, Any]:
    """The node hydra.launcher with the plugin's parameters and ours."""
    plugins()
    registered: Any = OmegaConf.to_container(ConfigStore.instance().repo["hydra"]["launcher"][f"{name}.yaml"].node)
    return {**registered, **given}


@pytest.mark.parametrize("name", ["submitit_local", "submitit_slurm"])
def test_commands_paths_and_words_that_are_not_plain_are_refused(name: str) -> None:
    assert not hydra_node._launcher(node_of(name))
    assert not hydra_node._launcher(node_of(name, cpus_per_task=4, jobs_per_task=8, mem_per_gpu="8G", exclude="n[1-3]"))
    bad = {"submitit_folder": "/tmp", "setup": ["touch marker"], "additional_parameters": {"wrap": "touch marker"}}
    bad |= {"name": "a\ntouch marker", "comment": "--wrap=x", "x": {"_target_": "os.system"}, "mem_per_cpu": "1 $(x)"}
    for key, value in bad.items():
        (problem,) = hydra_node._launcher(node_of(name, **{key: value}))
        assert problem is not None
        assert problem.key == f"launcher.{key}"


@pytest.mark.parametrize(
    ("cls", "given", "expected"),
    [
        (LocalJobs, {"jobs_per_task": 0}, "hydra.launcher.jobs_per_task=0: must be >= 1"),
        (LocalJobs, {"max_in_flight": 0}, "hydra.launcher.max_in_flight=0: must be >= 1"),
        (LocalJobs, {"nodes": 2}, "hydra.launcher.nodes=2: must be 1"),
        (LocalJobs, {"jobs_per_task": "many"}, "hydra.launcher.jobs_per_task='many': must be an integer"),
        (SlurmJobs, {"tasks_per_node": 2}, "hydra.launcher.tasks_per_node=2: must be 1"),
        (SlurmJobs, {"max_num_timeout": -1}, "hydra.launcher.max_num_timeout=-1: must be >= 0"),
        (SlurmJobs, {"timeout_min": 2}, "hydra.launcher.signal_delay_s=120: must be < timeout_min, which is 120 s"),
    ],
)
def test_values_are_checked(cls: type[SubmititJobs], given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        launcher_of(node_of(f"submitit_{cls.cluster}", **given), cls)
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("hydra/launcher=submitit_local", "hydra.launcher.gpus_per_node=1"), "gpus_per_node=1: needs a GPU"),
        (("hydra/launcher=submitit_local", "hydra.launcher.gpus_per_node=1", "device=cuda"), "device='cuda': needs a"),
        (("hydra/launcher=submitit_slurm", "device=cuda"), "must be > 0 for device=cuda"),
        (("hydra/launcher=submitit_slurm", "hydra.launcher.gres=gpu:2"), "gpus_per_node=1: needs a GPU"),
        (("hydra/launcher=submitit_slurm", "hydra.launcher.gres=gpu:2", "device=cuda"), "on a slurm cluster?"),
    ],
)
def test_what_is_missing_is_told_before_anything_is_submitted(
    words: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError) as error:
        run(["-m", "seed=0,1", *WORDS, *words])
    assert expected in str(error.value)
    assert not (tmp_path / "outputs").exists()


def test_what_sbatch_refuses_is_told_in_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("srun", "sbatch"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpi' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match="could not be submitted: sbatch: error: invalid partition specified: gpi"):
        run(["-m", "seed=0,1", *WORDS, "hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpi"])


def test_parameters_of_the_plugin_go_to_submitit_and_ours_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "srun").touch(mode=0o755)  # which submitit looks for
    monkeypatch.setenv("PATH", str(tmp_path))
    given = {"mem_gb": 16, "partition": "gpu", "mem_per_gpu": "8G", "max_num_timeout": 7, "jobs_per_task": 8}
    launcher = launcher_of(node_of("submitit_slurm", **given), SlurmJobs)
    executor = launcher._executor(tmp_path)._executor
    assert executor.max_num_timeout == 7
    assert executor.parameters["mem"] == "16GB"
    assert {k: executor.parameters[k] for k in ("partition", "mem_per_gpu", "job_name", "time", "nodes")} == {
        "partition": "gpu",
        "mem_per_gpu": "8G",
        "job_name": "fedsim",
        "time": 60,
        "nodes": 1,
    }


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The lines of the script that submitit makes of parameters."""
    (tmp_path / "srun").touch(mode=0o755)  # which submitit looks for
    monkeypatch.setenv("PATH", str(tmp_path))

    def lines(**given: Any) -> list[str]:
        executor = launcher_of(node_of("submitit_slurm", **given), SlurmJobs)._executor(tmp_path)._executor
        text: str = executor._make_submission_file_text("python", "")
        return text.splitlines()

    return lines


@pytest.mark.parametrize(("cores", "told"), [(4, True), (None, False)])
def test_srun_is_told_the_cores_of_a_task(cores: int | None, told: bool, script: Callable[..., list[str]]) -> None:
    """Since Slurm 22.05 it does not take them from `sbatch`: the threads of a task would share one core."""
    (line,) = (line for line in script(cpus_per_task=cores) if line.startswith("srun "))
    assert ("--cpus-per-task=4" in line.split()) == told
    assert line.endswith(" python")


@pytest.mark.parametrize(
    ("given", "hidden"),
    [({}, True), ({"gpus_per_node": 1}, False), ({"gpus_per_task": 1}, False), ({"gres": "gpu:a100:1"}, False)],
)
def test_gpus_are_hidden_from_a_task_of_slurm_that_asks_for_none(
    given: dict[str, Any], hidden: bool, script: Callable[..., list[str]]
) -> None:
    """Else device=auto, checked on a machine without one, would be another device on a node with one."""
    lines = script(**given)
    (srun,) = (number for number, line in enumerate(lines) if line.startswith("srun "))
    assert ("export CUDA_VISIBLE_DEVICES=" in lines[:srun]) == hidden


def test_of_a_traceback_the_last_line_is_told() -> None:
    line = "-" * 22
    assert _last_of_trace(f"Job failed:\n{line}\nTraceback\n  File x\nValueError: y\n\n{line}\nlogs") == "ValueError: y"
    assert _last_of_trace("no result") == "no result"
