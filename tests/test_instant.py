"""What answers without PyTorch in the process, and that source tells the parameters that classes
have."""

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.config.declared import stand_in
from fedsim.core.disk import conf_dir
from fedsim.jobs.prepare import has_passed
from fedsim.running.experiment import execute

HEAVY = ("torch", "scipy", "pandas", "sympy", "sklearn", "matplotlib", "triton")
PROGRAM = f"""
import sys
from fedsim.run import main
try:
    main()
finally:
    print("LOADED", *sorted(set({HEAVY}) & sys.modules.keys()))
"""


def loaded(*words: str, code: int = 0) -> str:
    """What a command has imported of what takes long."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("LOADED"))


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--help", 0),
        ("--version", 0),
        ("list", 0),
        ("list gpfl", 0),
        ("--cfg job preset=gpfl_rho", 0),
        ("sync --dry-run .", 0),
        ("selctor=random", 2),
        ("selector=randm", 2),
        ("num_rounds=x", 2),
        ("optimizer.lr=-1 selector=gpfl selector.exploration.rho=x", 2),
        ("-m selector=random,oort selector.clip=7", 2),
    ],
)
@pytest.mark.usefixtures("empty_folder")
def test_questions_and_mistakes_are_answered_without_pytorch(words: str, code: int) -> None:
    assert loaded(*words.split(), code=code) == "LOADED"


def test_a_short_run_imports_neither_compilers_nor_tables(empty_folder: Path) -> None:
    done = loaded("num_rounds=1", "tracker=files_only")
    assert not {"pandas", "sympy", "sklearn", "matplotlib"} & set(done.split())
    # features may be cached
    code = "import sys, fedsim.models.heads; sys.exit('torchvision' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not {"matplotlib", "torch"} & set(
        loaded("report", "outputs/default", "--no-figures").split()
    )


def test_of_the_selectors_only_those_that_need_scipy_import_it(empty_folder: Path) -> None:
    files = (conf_dir().parent / "fedsim" / "selectors").glob("*.py")
    importing = re.compile(r"^(import|from) (scipy|fedsim\.selectors\.ward)\b", re.MULTILINE)
    assert {file.stem for file in files if importing.search(file.read_text())} == {
        "ward",
        "hics",
        "lefl",
        "pair_study",
    }
    assert "scipy" not in loaded("num_rounds=1", "tracker=files_only", "selector=pncs").split()


SWEEP = ("-m", "num_rounds=1", "tracker=files_only", "selector=random,gpfl", "seed=0,1")


def test_jobs_that_have_ended_are_told_without_pytorch(empty_folder: Path) -> None:
    assert "torch" in loaded(*SWEEP)
    assert loaded(*SWEEP) == "LOADED"
    assert loaded(*SWEEP, "hydra/launcher=lanes") == "LOADED"
    assert loaded("show", *SWEEP) == "LOADED"


@pytest.mark.slow
def test_jobs_that_have_ended_are_told_without_pytorch_unless_something_is_amiss(
    empty_folder: Path,
) -> None:
    assert "torch" in loaded(*SWEEP)
    assert loaded(*SWEEP, "hydra/launcher=joblib") == "LOADED"
    assert loaded("show", "--json", *SWEEP[1:3], "selector=gpfl") == "LOADED"
    assert loaded(*SWEEP, "tracker=default", "tracker.wandb.timeout=-1", code=2) == "LOADED"
    assert "torch" in loaded(*SWEEP, "device=cuda", code=2)
    assert loaded(*SWEEP, "+model.nothing=null", code=2) == "LOADED"  # which the hash does not show
    summary = next(Path("outputs/default").glob("*random-s1*/summary.json"))
    summary.write_text(re.sub(r'"fedsim": ".*?"', '"fedsim": "0"', summary.read_text()))
    assert "torch" in loaded(*SWEEP)
    next(Path("outputs/default").glob("*random-s0*/model.safetensors")).write_bytes(b"")
    assert "torch" in loaded(*SWEEP)


@pytest.mark.usefixtures("empty_folder")
def test_only_what_the_folder_stands_for_has_passed_the_checks() -> None:
    with search_path():
        (plan,) = check_jobs(compose_jobs(["num_rounds=1", "tracker=files_only"], multirun=False))
    assert not has_passed(plan)
    execute(plan)
    assert has_passed(plan)
    assert not has_passed(replace(plan, settings=replace(plan.settings, overwrite=True)))
    assert not has_passed(
        replace(plan, settings=replace(plan.settings, device="cuda"))
    )  # another machine's result
    assert not has_passed(
        replace(plan, config={**plan.config, "selector": {"_target_": "my_lab.Random"}})
    )


def test_show_tells_of_jobs_before_it_imports_pytorch(empty_folder: Path) -> None:
    hook = "import sys; sys.addaudithook(lambda e, a: e == 'import' and a[0] == 'torch' and print('TORCH'))"
    words = [sys.executable, "-c", hook + PROGRAM, "show", *SWEEP]
    page = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "TORCH" not in page.partition("jobs    4: 4 new")[0]
    assert "TORCH" in page


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
