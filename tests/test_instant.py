"""Which commands answer without importing PyTorch, and the parameters of classes as their source
tells them."""

import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from fedsim.config.declared import stand_in
from fedsim.core.disk import conf_dir
from fedsim.jobs.cli import run

HEAVY = ("torch", "torchvision", "scipy", "pandas", "sympy", "sklearn", "matplotlib", "triton")
PROGRAM = f"""
import json, sys
from fedsim.run import main

for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as end:
        print("\\nLOADED", end.code, *sorted(set({HEAVY}) & sys.modules.keys()))
"""
"""Runs command lines in one process. Prints after each its exit code and the heavy packages that
the process has imported so far."""


def loaded_after(*commands: str) -> list[str]:
    """Run command lines in one new process. Return the exit code and the heavy packages after
    each."""
    words = json.dumps([command.split() for command in commands])
    program = [sys.executable, "-c", PROGRAM, words]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    return [line.removeprefix("LOADED ") for line in lines if line.startswith("LOADED ")]


QUESTIONS = {
    "--help": 0,
    "--version": 0,
    "list": 0,
    "list gpfl": 0,
    "--cfg job preset=gpfl_rho": 0,
    "sync --dry-run .": 0,
}
MISTAKES = {
    "selctor=random": 2,
    "selector=randm": 2,
    "num_rounds=x": 2,
    "optimizer.lr=-1 selector=gpfl selector.exploration.rho=x": 2,
    "-m selector=random,oort selector.clip=7": 2,
}
"""Exit codes by command line."""


@pytest.mark.usefixtures("empty_folder")
def test_questions_and_mistakes_are_answered_without_pytorch() -> None:
    commands = QUESTIONS | MISTAKES
    answers = dict(zip(commands, loaded_after(*commands), strict=True))
    assert answers == {command: str(code) for command, code in commands.items()}


@pytest.mark.usefixtures("empty_folder")
def test_a_run_and_its_report_import_only_what_they_need() -> None:
    """The selector pncs needs no SciPy."""
    (after_run,) = loaded_after("num_rounds=1 tracker=files_only selector=pncs")
    assert after_run == "0 torch"
    (after_report,) = loaded_after("report outputs/default --no-figures")
    assert not {"matplotlib", "torch"} & set(after_report.split())


def test_heads_on_cached_features_do_not_import_torchvision() -> None:
    code = "import sys, fedsim.models.heads; sys.exit('torchvision' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_only_selectors_that_need_scipy_import_it() -> None:
    files = (conf_dir().parent / "fedsim" / "selectors").glob("*.py")
    importing = re.compile(r"^(import|from) (scipy|fedsim\.selectors\.ward)\b", re.MULTILINE)
    names = {file.stem for file in files if importing.search(file.read_text())}
    assert names == {"ward", "hics", "lefl", "optics", "pair_study"}


SWEEP = "-m num_rounds=1 tracker=files_only selector=random,gpfl seed=0,1"


@pytest.mark.usefixtures("empty_folder")
def test_jobs_that_have_ended_are_reported_without_pytorch() -> None:
    assert run(SWEEP.split()) == 0
    commands = SWEEP, f"{SWEEP} hydra/launcher=lanes", f"show {SWEEP}"
    # The sweep's table has intervals of Student's t: scipy, and neither pandas nor torch.
    assert loaded_after(*commands) == ["0 scipy"] * 3


@pytest.mark.slow
@pytest.mark.usefixtures("empty_folder")
def test_jobs_that_have_ended_are_reported_without_pytorch_unless_something_is_amiss() -> None:
    assert run(SWEEP.split()) == 0
    without_pytorch = {
        "show --json num_rounds=1 tracker=files_only selector=gpfl": "0",
        f"{SWEEP} tracker=default tracker.wandb.timeout=-1": "2",
        f"{SWEEP} +model.nothing=null": "2",  # which the hash does not show
        f"{SWEEP} hydra/launcher=joblib": "0 scipy",  # for the intervals of its table
    }
    assert loaded_after(*without_pytorch) == list(without_pytorch.values())
    assert "torch" in loaded_after(f"{SWEEP} device=cuda")[0]
    next(Path("outputs/default").glob("*random-s0*/model.safetensors")).write_bytes(b"")
    assert "torch" in loaded_after(SWEEP)[0]


@pytest.mark.usefixtures("empty_folder")
def test_show_lists_the_jobs_before_it_imports_pytorch() -> None:
    hook = (
        "import sys\n"
        "def note(event, arguments):\n"
        "    if event == 'import' and arguments[0] == 'torch':\n"
        "        print('TORCH')\n"
        "sys.addaudithook(note)\n"
    )
    words = json.dumps([f"show {SWEEP}".split()])
    program = [sys.executable, "-c", hook + PROGRAM, words]
    page = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    before, jobs, after = page.partition("jobs    4: 4 new")
    assert jobs
    assert "TORCH" not in before
    assert "TORCH" in after


TARGETS = sorted(
    {
        t
        for p in conf_dir().rglob("*.yaml")
        for t in re.findall(r"_target_: (fedsim\.[\w.]+)", p.read_text())
    }
)


def parameters_of(cls: Any, keyword_only: bool = True) -> Mapping[str, tuple[Any, list[str]]]:
    """Annotation and ranges of each keyword-only parameter; of other objects (parts in parts) that
    they are objects."""
    hints = get_type_hints(cls.__init__ if isinstance(cls, type) else cls)
    rules = getattr(cls, "__parameters__", {})
    names = [p.name for p in inspect.signature(cls).parameters.values() if p.kind is p.KEYWORD_ONLY]
    plain = {name: hints[name] if "fedsim" not in str(hints[name]) else object for name in names}
    return {name: (plain[name], [str(rule) for rule in rules.get(name, [])]) for name in names}


def test_source_tells_the_parameters_of_classes() -> None:
    told = {target: cls for target in TARGETS if (cls := stand_in(target)) is not None}
    assert len(told) == len(TARGETS)
    for target, cls in told.items():
        module, _, name = target.rpartition(".")
        if (
            "jobs" not in module and "running" not in module
        ):  # launchers are built from nodes of Hydra
            assert parameters_of(cls) == parameters_of(
                getattr(importlib.import_module(module), name)
            ), target
