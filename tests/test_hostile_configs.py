"""Configs from a stranger: they run nothing, import nothing, and write nowhere else.

Each would leave a marker file without its check. Negative controls come last: with a check switched
off, what it prevents does happen.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from fedsim.config import build, compose
from fedsim.config.build import resolve
from fedsim.config.compose import compose_jobs, search_path
from fedsim.config.hydra_node import SecretError, environment_variable
from fedsim.config.typecheck import not_imported
from fedsim.core.errors import ConfigError
from fedsim.jobs.cli import hand_to_hydra, run
from fedsim.selectors.base import Selector
from tests.run_toys import ROOT

QUICK = ("num_rounds=1", "local.epochs=1", "tracker=files_only")
CALLBACKS = (
    "fedsim.engine.native.library._run",
    "torch.utils.collect_env.run",
    "distutils.spawn.spawn",
    "numpy.load",
)
QUESTIONS = ((), ("-m",), ("--cfg", "job"), ("--cfg", "hydra"), ("--info", "all"))

Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """The error of a command line in an empty folder, which must write nothing there but what was
    there before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedsim"])

    def call(*words: str) -> str:
        before = set(tmp_path.rglob("*"))
        with pytest.raises(ConfigError) as caught:
            run(
                [
                    *words,
                    *(
                        w
                        for w in QUICK
                        if not any(word == f"{w.split('.')[0]}=5" for word in words)
                    ),
                ]
            )
        assert set(tmp_path.rglob("*")) == before, "something was written"
        return str(caught.value)

    return call


def write(tmp_path: Path, name: str, text: str) -> str:
    """A file of a folder for `--config-dir`, whose path is returned."""
    path = tmp_path / "conf_of_a_stranger" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(tmp_path / "conf_of_a_stranger")


def preset(hydra: str) -> str:
    return f"# @package _global_\nhydra:\n{hydra}"


@contextmanager
def unprotected(monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        for name in ("check_node", "check_words"):
            patch.setattr(f"fedsim.config.diagnosis.{name}", lambda _: None)
        patch.setattr("fedsim.config.compose.check_words", lambda _: None)
        yield


def composed(*words: str, folder: str | None = None) -> dict[str, Any]:
    with search_path(folder):
        return compose_jobs(words, multirun=False)[0].config


# --- Hydra's node ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "question",
    [pytest.param(q, marks=[] if q in QUESTIONS[::3] else pytest.mark.slow) for q in QUESTIONS],
)
def test_callbacks_are_never_built(
    refused: Refused, tmp_path: Path, question: tuple[str, ...]
) -> None:
    marker = tmp_path / "marker"
    for target in CALLBACKS:
        node = f"  callbacks:\n    x:\n      _target_: {target}\n      command: [touch, {marker}]\n"
        folder = write(tmp_path, "preset/bad.yaml", preset(node))
        assert "hydra.callbacks.x._target_: must not be set" in refused(
            "--config-dir", folder, "preset=bad", *question
        )
        word = f"+hydra.callbacks.x={{_target_: {target}, command: [touch, '{marker}']}}"
        assert "hydra.callbacks.x: must not be set" in refused(word, *question)


HYDRA = {
    "job:\n    env_set: {CC: 'touch marker', PATH: /tmp}": "hydra.job.env_set",
    "job:\n    chdir: true": "hydra.job.chdir",
    "run: {dir: '${output_dir}/mine'}": "hydra.run.dir: must not be set",
    "sweep: {dir: ../elsewhere}": "hydra.sweep.dir: must not be set",
    "output_subdir: mine": "hydra.output_subdir",
    "job_logging: {handlers: {f: {class: logging.FileHandler, filename: marker}}}": "hydra.job_logging.handlers.f",
    "hydra_logging: {handlers: {f: {(): os.system, command: touch marker}}}": "hydra.hydra_logging.handlers.f.()",
    "runtime: {output_dir: /tmp/elsewhere}": "hydra.runtime.output_dir",
    "launcher: {_target_: subprocess.Popen}": "hydra.launcher._target_='subprocess.Popen': must be the class",
    "launcher: {nested: {_target_: os.system, command: touch marker}}": "nested",
    "launcher: {setup: [touch marker]}": "setup",
    "sweeper: {_target_: os.system}": "hydra.sweeper._target_",
    "mode: MULTIRUN\n  sweeper: {params: {+hydra.callbacks.x._target_: os.system}}": "hydra.callbacks.x._target_",
}


@pytest.mark.parametrize(
    "word",
    [
        *(
            "hydra.searchpath=[pkg://this]",
            "+hydra.job.env_set.PATH=/tmp",
            "hydra.job_logging.root={}",
        ),
        *(
            "hydra.hydra_logging.version=2",
            "hydra.runtime.output_dir=/tmp",
            "hydra.callbacks={}",
            "hydra.job.name=x",
        ),
        *(
            "hydra.sweep.dir=/tmp/elsewhere",
            "hydra.run.dir=outputs/x",
            "hydra.output_subdir=x",
            "hydra.sweep.subdir=x",
        ),
        *("hydra={}", "+hydra.callbacks.x._target_=a,b"),
    ],
)
def test_overrides_of_the_rest_are_refused_too(refused: Refused, word: str) -> None:
    assert word.lstrip("+").split("=")[0] in refused(word)
    assert word.lstrip("+").split("=")[0] in refused("-m", word)


# --- targets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        *(
            "antigravity.fly",
            "test.regrtest.x",
            "__main__.X",
            "os.system",
            "pip.__main__.x",
            "joblib.load",
        ),
        *("torch.utils.collect_env.run", "fedsim.__main__.main"),
    ],
)
def test_modules_that_hold_no_part_of_an_experiment_are_not_imported(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: without the check they are."""
    imported: list[str] = []
    monkeypatch.setattr("importlib.import_module", imported.append)
    with pytest.raises(ConfigError, match=r"selector\._target_"):
        resolve({"_target_": target}, Selector, "selector")
    assert not imported
    monkeypatch.setattr(build, "not_imported", lambda name: None)
    with pytest.raises(ConfigError):
        resolve({"_target_": target}, Selector, "selector")
    assert imported == [target.rpartition(".")[0]]


def test_own_modules_and_packages_for_fedsim_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted_lab.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not_imported("planted_lab") is None
    assert not_imported("fedsim.selectors.random") is None
    assert not_imported("tests.toys") is None
    assert "installed package" in str(not_imported("yaml"))
    monkeypatch.setattr(
        "fedsim.config.typecheck.requires", lambda name: ["numpy", "fedsim_selection>=0.1"]
    )
    monkeypatch.setattr(
        "fedsim.config.typecheck._extends_fedsim",
        not_imported.__globals__["_extends_fedsim"].__wrapped__,
    )
    assert not_imported("yaml") is None


def test_hydra_plugins_of_the_working_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "mine.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    code = "import sys; sys.argv = ['fedsim', '--cfg', 'job']; from fedsim.run import main; main()"

    def shows_config(*path: Path) -> bool:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        return "cohort_size" in done.stdout

    assert shows_config(ROOT)
    assert not (tmp_path / "marker").exists()
    assert shows_config(ROOT, tmp_path)  # the negative control: PYTHONPATH names the folder
    assert (tmp_path / "marker").exists()


# --- files that are no configs ----------------------------------------------------------------------------------------

UNSOUND = {
    "an alias of itself": "a: &a [*a, *a]\n",
    "nesting": "a: " + "[" * 3000 + "]" * 3000 + "\n",
    "nested mappings": "a: " + "{a: " * 3000 + "1" + "}" * 3000 + "\n",
    "tags": "a: !!python/object/apply:os.system [touch marker]\n",
    "no mapping": "just a text\n",
    "out of the folder": "defaults: [../../../../../../../etc/hosts]\n",
}


@pytest.mark.parametrize("name", UNSOUND)
def test_a_file_that_is_no_config_is_refused_in_a_few_lines(
    refused: Refused, tmp_path: Path, name: str
) -> None:
    folder = write(tmp_path, "model/bad.yaml", UNSOUND[name])
    assert len(refused("--config-dir", folder, "model=bad")) < 2000


# --- secrets --------------------------------------------------------------------------------------------------------


def test_a_config_names_no_secret_of_the_environment(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted-secret")
    monkeypatch.setenv("FEDSIM_MINE", "allowed")
    for key in ("name", "+tracker.wandb.project", "output_dir", "data_dir"):
        word = f"{key}=${{oc.env:AWS_SECRET_ACCESS_KEY}}"
        text = refused(word)
        assert "AWS_SECRET_ACCESS_KEY" in text
        assert "planted" not in text
    assert "AWS" in refused("name=${oc.decode:'${oc.env:AWS_SECRET_ACCESS_KEY}'}")
    assert environment_variable("FEDSIM_MINE") == "allowed"
    assert environment_variable("FEDSIM_NONE", None) is None
    with pytest.raises(SecretError):
        environment_variable("AWS_SECRET_ACCESS_KEY", "a default")
    monkeypatch.setattr(compose, "guarded_environment", nullcontext)  # the negative control
    assert composed("name=${oc.env:AWS_SECRET_ACCESS_KEY}")["name"] == "planted-secret"


# --- with the checks switched off -------------------------------------------------------------------------------------


@pytest.mark.parametrize("node", HYDRA)
def test_what_hydra_may_be_told_is_listed_and_the_rest_refused_by_name(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str
) -> None:
    """Without the list it is told all but unknown keys of its own launcher, which it refuses
    itself."""
    folder = write(tmp_path, "preset/bad.yaml", preset(f"  {node}\n"))
    assert HYDRA[node] in refused("--config-dir", folder, "preset=bad")
    if not node.startswith(("launcher: {nested", "launcher: {setup")):
        with unprotected(monkeypatch):
            try:
                later = str(composed("preset=bad", folder=folder))
            except ConfigError as error:  # what is swept over fails where it is composed as a job
                later = str(error)
        assert HYDRA[node] not in later


def test_a_primary_config_imports_no_packages(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: without the check it does."""
    (tmp_path / "planted_package").mkdir()
    (tmp_path / "planted_package" / "__init__.py").write_text("open('marker', 'w').close()")
    folder = write(
        tmp_path,
        "mine.yaml",
        "defaults: [config]\nhydra: {searchpath: ['pkg://planted_package']}\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "hydra.searchpath" in refused("--config-dir", folder, "-cn", "mine")
    assert "hydra.searchpath" in refused("--config-dir", folder, "-cn", "mine", "--cfg", "all")
    monkeypatch.setattr(compose, "check_search_path", lambda *_: None)
    with unprotected(monkeypatch), search_path(folder), suppress(ConfigError):
        compose_jobs([], multirun=False, config_name="mine")
    assert Path("marker").exists()


def test_without_the_checks_a_callback_would_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "marker"
    monkeypatch.chdir(tmp_path)
    words = [
        f"+hydra.callbacks.x={{_target_: fedsim.engine.native.library._run, command: [touch, '{marker}']}}"
    ]
    with unprotected(monkeypatch), search_path(), suppress(SystemExit):
        compose_jobs(words, multirun=False)
    with pytest.warns(UserWarning, match="Callback"), suppress(SystemExit):
        hand_to_hydra(words)
    assert marker.exists()
