"""Configs from a stranger run nothing, import nothing, read no secrets and write nowhere else."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from fedsim.config import build, sources, user_modules
from fedsim.config.build import resolve
from fedsim.config.compose import compose_jobs, search_path
from fedsim.config.hydra_node import SecretError, environment_variable
from fedsim.config.user_modules import not_imported
from fedsim.core.errors import ConfigError
from fedsim.jobs.cli import run
from fedsim.selectors.base import Selector
from tests.run_toys import ROOT

Rejected = Callable[..., str]


@pytest.fixture
def rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rejected:
    """Return the error of a command line in an empty folder; nothing may be written there."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> str:
        before = set(tmp_path.rglob("*"))
        with pytest.raises(ConfigError) as caught:
            run([*words, "num_rounds=1", "eval_every=1"])
        assert set(tmp_path.rglob("*")) == before, "something was written"
        return str(caught.value)

    return call


def write(tmp_path: Path, name: str, text: str) -> str:
    """Write a file of a folder for --config-dir, and return the folder."""
    folder = tmp_path / "conf_of_a_stranger"
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(folder)


def composed(*words: str, folder: str | None = None) -> dict[str, Any]:
    with search_path(folder):
        return compose_jobs(words, multirun=False)[0].config


# --- the node `hydra` ---------------------------------------------------------------------------------------------

CALLBACK = "{_target_: fedsim.engine.native.library._run, command: [touch, marker]}"


@pytest.mark.parametrize(
    ("node", "key"),
    [
        (f"callbacks: {{x: {CALLBACK}}}", "hydra.callbacks.x._target_: must not be set"),
        ("job: {env_set: {CC: 'touch marker'}}", "hydra.job.env_set.CC"),
        ("job: {chdir: true}", "hydra.job.chdir"),
        ("run: {dir: '${output_dir}/mine'}", "hydra.run.dir: must not be set"),
        ("sweep: {dir: ../elsewhere}", "hydra.sweep.dir: must not be set"),
        ("output_subdir: mine", "hydra.output_subdir"),
        ("job_logging: {handlers: {f: {filename: marker}}}", "hydra.job_logging.handlers.f"),
        ("hydra_logging: {handlers: {f: {(): os.system}}}", "hydra.hydra_logging.handlers.f.()"),
        ("runtime: {output_dir: /tmp/elsewhere}", "hydra.runtime.output_dir"),
        ("launcher: {_target_: subprocess.Popen}", "'subprocess.Popen': must be the class"),
        ("launcher: {nested: {_target_: os.system, command: touch marker}}", "nested"),
        ("launcher: {setup: [touch marker]}", "setup"),
        ("sweeper: {_target_: os.system}", "hydra.sweeper._target_"),
        (
            "{mode: MULTIRUN, sweeper: {params: {+hydra.callbacks.x._target_: os.system}}}",
            "hydra.callbacks.x._target_",
        ),
    ],
)
def test_a_file_sets_only_how_jobs_are_swept_over_and_launched(
    rejected: Rejected, tmp_path: Path, node: str, key: str
) -> None:
    text = f"# @package _global_\nhydra:\n  {node}\n"
    if node.startswith("{"):
        text = f"# @package _global_\nhydra: {node}\n"
    folder = write(tmp_path, "preset/bad.yaml", text)
    assert key in rejected("--config-dir", folder, "preset=bad")


@pytest.mark.parametrize("question", [(), ("-m",), ("--cfg", "job")])
@pytest.mark.parametrize("package", ["hydra.callbacks.x", "_global_.hydra.callbacks.x"])
def test_a_file_that_is_placed_below_hydra_is_rejected(
    rejected: Rejected, tmp_path: Path, package: str, question: tuple[str, ...]
) -> None:
    text = f"# @package {package}\n_target_: os.system\ncommand: touch marker\n"
    folder = write(tmp_path, "preset/bad.yaml", text)
    message = rejected("--config-dir", folder, "preset=bad", *question)
    assert "hydra.callbacks.x._target_: must not be set" in message


def test_a_callback_that_another_file_places_below_hydra_is_never_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra only composes for fedsim: whatever its node says, nothing is built from it."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "cell/call.yaml", "_target_: os.system\ncommand: touch marker\n")
    text = "# @package _global_\ndefaults: [/cell@hydra.callbacks.x: call]\n"
    folder = write(tmp_path, "preset/bad.yaml", text)
    composed("preset=bad", folder=folder)
    run(["--config-dir", folder, "preset=bad", "--cfg", "job"])
    assert not list(tmp_path.rglob("marker"))


@pytest.mark.parametrize(
    "word",
    [
        "hydra.searchpath=[pkg://this]",
        f"+hydra.callbacks.x={CALLBACK}",
        "+hydra.callbacks.x._target_=a,b",
        "+hydra.job.env_set.PATH=/tmp",
        "hydra.job_logging.root={}",
        "hydra.callbacks={}",
        "hydra.job.name=x",
        "hydra.sweep.dir=/tmp/elsewhere",
        "hydra.run.dir=outputs/x",
        "hydra={}",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
        "hydra/output=default",
        "hydra/sweeper=basic",
        "~hydra/help",
    ],
)
def test_an_override_sets_only_how_jobs_are_swept_over_and_launched(
    rejected: Rejected, word: str
) -> None:
    key = word.lstrip("+~").split("=")[0]
    assert f"{key}: must not be set" in rejected(word)
    assert f"{key}: must not be set" in rejected("-m", word)


@pytest.mark.parametrize("entry", ["override /hydra/job_logging: none", "/hydra/output: default"])
def test_a_file_chooses_in_no_group_of_hydra_except_the_launcher(
    rejected: Rejected, tmp_path: Path, entry: str
) -> None:
    text = f"# @package _global_\ndefaults: [{{{entry}}}]\n"
    folder = write(tmp_path, "preset/bad.yaml", text)
    key = entry.split("/", 1)[1].split(":")[0]
    assert f"{key}: must not be set" in rejected("--config-dir", folder, "preset=bad")


def test_a_primary_config_imports_no_packages(
    rejected: Rejected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "../planted_package/__init__.py", "open('marker', 'w').close()")
    text = "defaults: [config]\nhydra: {searchpath: ['pkg://planted_package']}\n"
    folder = write(tmp_path, "mine.yaml", text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "hydra.searchpath: must not be set" in rejected("--config-dir", folder, "-cn", "mine")

    monkeypatch.setattr(sources, "node_problems", lambda keys: [])  # the negative control
    with search_path(folder):
        compose_jobs([], multirun=False, config_name="mine")
    assert Path("marker").exists()


def test_plugins_of_hydra_in_the_working_folder_are_imported_only_if_pythonpath_names_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "mine.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    code = "import sys; sys.argv = ['fedsim', '--cfg', 'job']; from fedsim.run import main; main()"

    def prints_config(*path: Path) -> bool:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        return "cohort_size" in done.stdout

    assert prints_config(ROOT)
    assert not (tmp_path / "marker").exists()
    assert prints_config(ROOT, tmp_path)  # the negative control
    assert (tmp_path / "marker").exists()


# --- targets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        "antigravity.fly",
        "test.regrtest.x",
        "__main__.X",
        "os.system",
        "pip.__main__.x",
        "joblib.load",
        "torch.utils.collect_env.run",
        "fedsim.__main__.main",
    ],
)
def test_a_module_that_holds_no_component_is_not_imported(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported: list[str] = []
    monkeypatch.setattr("importlib.import_module", imported.append)
    with pytest.raises(ConfigError, match=r"selector\._target_"):
        resolve({"_target_": target}, Selector, "selector")
    assert not imported
    monkeypatch.setattr(build, "not_imported", lambda name: None)  # the negative control
    with pytest.raises(ConfigError):
        resolve({"_target_": target}, Selector, "selector")
    assert imported == [target.rpartition(".")[0]]


def test_modules_of_the_user_and_of_fedsim_may_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted_lab.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("planted_lab", "fedsim.selectors.random", "tests.toys"):
        assert not_imported(module) is None


def test_an_installed_package_may_be_imported_if_it_requires_fedsim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "installed package" in str(not_imported("yaml"))
    monkeypatch.setattr(user_modules, "requires", lambda name: ["numpy", "fedsim_selection>=0.1"])
    uncached = user_modules._requires_fedsim.__wrapped__
    monkeypatch.setattr(user_modules, "_requires_fedsim", uncached)
    assert not_imported("yaml") is None
    other_packages = ["fedsim-selection-tools", "fedsim-selections>=1"]
    monkeypatch.setattr(user_modules, "requires", lambda name: other_packages)
    assert "installed package" in str(not_imported("yaml"))


# --- files that are no configs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("a: &a [*a, *a]\n", id="an alias of itself"),
        pytest.param("a: " + "[" * 3000 + "]" * 3000 + "\n", id="nesting"),
        pytest.param("a: " + "{a: " * 3000 + "1" + "}" * 3000 + "\n", id="nested mappings"),
        pytest.param("a: !!python/object/apply:os.system [touch marker]\n", id="tags"),
        pytest.param("just a text\n", id="no mapping"),
        pytest.param("defaults: [../../../../../../../etc/hosts]\n", id="out of the folder"),
    ],
)
def test_a_file_that_is_no_config_is_rejected_in_a_few_lines(
    rejected: Rejected, tmp_path: Path, text: str
) -> None:
    folder = write(tmp_path, "model/bad.yaml", text)
    assert len(rejected("--config-dir", folder, "model=bad")) < 2000


# --- secrets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word",
    [
        "name=${oc.env:AWS_SECRET_ACCESS_KEY}",
        "+tracker.wandb.project=${oc.env:AWS_SECRET_ACCESS_KEY}",
        "output_dir=${oc.env:AWS_SECRET_ACCESS_KEY}",
        "data_dir=${oc.env:AWS_SECRET_ACCESS_KEY}",
        "name=${oc.decode:'${oc.env:AWS_SECRET_ACCESS_KEY}'}",
    ],
)
def test_a_config_names_no_secret_of_the_environment(
    rejected: Rejected, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted-secret")
    text = rejected(word)
    assert "AWS_SECRET_ACCESS_KEY" in text
    assert "planted" not in text


def test_without_the_resolver_of_fedsim_a_config_would_name_a_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The negative control of the test above."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted-secret")
    monkeypatch.setattr(sources, "guarded_environment", nullcontext)
    assert composed("name=${oc.env:AWS_SECRET_ACCESS_KEY}")["name"] == "planted-secret"


def test_variables_of_fedsim_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIM_MINE", "allowed")
    assert environment_variable("FEDSIM_MINE") == "allowed"
    assert environment_variable("FEDSIM_NONE", None) is None
    with pytest.raises(SecretError):
        environment_variable("AWS_SECRET_ACCESS_KEY", "a default")
