"""Constructors of users: fedsim passes the first parameters by position, a YAML's values go to the others by name."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fedsim.api.parts import BASES
from fedsim.config.build import construct, inspect_node, resolve
from fedsim.config.compose import compose_jobs, search_path
from fedsim.config.plan import make_plan
from fedsim.config.typecheck import PASSED
from fedsim.core.errors import ConfigError
from tests.run_toys import ROOT, shell


def test_a_positional_parameter_that_nobody_passes_is_told_before_the_run(tmp_path: Path) -> None:
    source = "class Mine(Random):\n    def __init__(self, n, k):\n        self.k = k\n"
    (tmp_path / "my_lab.py").write_text("from fedsim.selectors.random import Random\n\n" + source)
    (tmp_path / "conf/selector").mkdir(parents=True)
    (tmp_path / "conf/selector/mine.yaml").write_text("_target_: my_lab.Mine\n")
    words = ("--config-dir", "conf", "selector=mine", "num_rounds=1", "tracker=files_only")
    ended = shell(tmp_path, *words, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (ended.returncode, (tmp_path / "outputs").exists()) == (2, False)
    assert "selector.k: is missing; Mine needs it\n" in ended.stderr
    assert "Traceback" not in ended.stderr


class Alone:
    def __init__(self, q: float, *, r: int = 1) -> None: ...


class Nothing:
    def __init__(self, *, r: int = 1) -> None: ...


class Strict:
    def __init__(self, population: Any, q: float, /, *, r: int = 1) -> None: ...


class Sound:
    def __init__(self, population: Any, more: int = 3, *rest: Any, r: int = 1) -> None: ...


def build(given: Any, key: str, **values: Any) -> None:
    construct(given, values, key, *[None] * len(PASSED.get(key, ())))


@pytest.mark.parametrize(
    ("made", "key", "values", "message"),
    [
        (Alone, "partition", {}, "partition.q: is missing; Alone needs it"),
        (Nothing, "dataset", {}, "dataset: Nothing must take .*: data_dir, cache_dir "),
        (Strict, "selector", {}, "selector: Strict must take .*: population .*'q'"),
        (Sound, "selector", {"population": 3}, "selector.population: is not a known key"),
        (Sound, "selector", {"more": "x"}, "selector.more='x': must be an integer"),
    ],
)
def test_a_signature_is_compared_with_what_fedsim_passes(made: Any, key: str, values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + message):
        build(made, key, **values)


def test_defaults_and_further_positional_parameters_do_no_harm() -> None:
    build(Sound, "selector", r=2, more=4)
    build(Alone, "partition", q=1.0)
    construct(nn.Sequential, {}, "model", nn.Flatten(), nn.Flatten())


class Width(nn.Linear):
    def __init__(self, input_shape: Any, num_classes: int, width: int) -> None: ...


def test_a_model_that_is_not_built_before_the_run_is_compared_as_well() -> None:
    with pytest.raises(ConfigError, match=r"model\.width: is missing"):
        inspect_node({"_target_": f"{__name__}.Width"}, nn.Module, "model")


@pytest.mark.parametrize("group", sorted(PASSED))
def test_what_fedsim_passes_is_what_the_shipped_classes_take(group: str) -> None:
    with search_path():
        (job,) = compose_jobs([], multirun=False)
    parameters = inspect.signature(resolve(job.config[group], object, group)).parameters.values()
    assert tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD) == PASSED[group]
    assert make_plan(job.config, job.choices)


def test_the_table_of_contributing_has_every_part_and_what_it_is_passed() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [\w ]+ \| `conf/(\w+)/` \| `([\w.]+)` \| (.+?) \|", text, re.MULTILINE)
    bases = {group: f"{base.__module__}.{base.__qualname__}" for group, base in BASES.items()}
    assert {group: base.replace("torch.nn.Module", bases["model"]) for group, base, _ in rows} == bases
    passed = {group: tuple(re.findall(r"\w+", names)) for group, _, names in rows if names != "none"}
    assert passed == {group: PASSED[group] for group in bases if group in PASSED}
