"""Negative controls of tests/test_hostile_configs.py: with a check switched off, what it prevents does happen."""

import importlib
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from fedsim.config import build, compose, sources
from fedsim.config import hydra_node as interpolations
from fedsim.config import words as overrides
from fedsim.config.build import resolve
from fedsim.config.compose import compose_jobs, search_path
from fedsim.core.errors import ConfigError
from fedsim.selectors.base import Selector
from tests.test_hostile_configs import HYDRA, preset, unprotected, write


def composed(*words: str, folder: str | None = None) -> dict[str, Any]:
    with search_path(folder):
        return compose_jobs(words, multirun=False)[0].config


@pytest.mark.parametrize("node", [n for n in HYDRA if not n.startswith(("launcher: {nested", "launcher: {setup"))])
def test_without_the_list_hydra_is_told_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str) -> None:
    """All but what Hydra itself refuses: unknown keys of its own launcher."""
    folder = write(tmp_path, "preset/bad.yaml", preset(f"  {node}\n"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        composed("preset=bad", folder=folder)
    assert HYDRA[node] in str(caught.value)
    with unprotected(monkeypatch):
        try:
            composed("preset=bad", folder=folder)
        except ConfigError as error:
            later = str(error)  # what is swept over fails where it is composed as a job
        else:
            later = "accepted"
    assert HYDRA[node] not in later


@pytest.mark.parametrize("target", ["antigravity.fly", "os.system", "joblib.load", "fedsim.__main__.main"])
def test_without_the_check_any_module_is_imported(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(importlib, "import_module", imported.append)
    with pytest.raises(ConfigError):
        resolve({"_target_": target}, Selector, "selector")
    assert imported == []
    monkeypatch.setattr(build, "not_imported", lambda name: None)
    with pytest.raises(ConfigError):
        resolve({"_target_": target}, Selector, "selector")
    assert imported == [target.rpartition(".")[0]]


def test_without_the_check_a_search_path_imports_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted_package").mkdir()
    (tmp_path / "planted_package" / "__init__.py").write_text("open('marker', 'w').close()")
    text = "defaults: [config]\nhydra: {searchpath: ['pkg://planted_package']}\n"
    folder = write(tmp_path, "mine.yaml", text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def attempt() -> bool:
        with search_path(folder), suppress(ConfigError):
            compose_jobs([], multirun=False, config_name="mine")
        sys.modules.pop("planted_package", None)
        return Path("marker").exists()

    assert not attempt()
    monkeypatch.setattr(compose, "check_search_path", lambda *_: None)
    with unprotected(monkeypatch):
        assert attempt()


LIMITS = {
    "a long text": (f"a: {'x' * 300_000}\n", (("MAX_BYTES", sources), ("MAX_SIZE", interpolations))),
    "a list": (f"a: [{', '.join('1' for _ in range(6_000))}]\n", (("MAX_VALUES", sources),)),
    "nesting": ("a: " + "{a: " * 60 + "1" + "}" * 60 + "\n", (("MAX_DEPTH", sources),)),
    "interpolations": (
        "a0: xxxxxxxx\n" + "".join(f"a{i + 1}: ${{.a{i}}}${{.a{i}}}\n" for i in range(14)),
        (("MAX_SIZE", interpolations),),
    ),
}


@pytest.mark.parametrize("bomb", LIMITS)
def test_without_the_limits_a_small_bomb_goes_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bomb: str) -> None:
    text, limits = LIMITS[bomb]
    folder = write(tmp_path, "model/bad.yaml", text)
    with pytest.raises(ConfigError):
        composed("model=bad", folder=folder)
    for name, module in limits:
        monkeypatch.setattr(module, name, 10**9)
    sources._read_checked.cache_clear()
    config = composed("model=bad", folder=folder)
    assert len(str(config["model"])) > 250


def test_without_the_limit_a_long_word_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    word = f"name={'x' * 4_100}"
    with pytest.raises(ConfigError):
        overrides.parse([word])
    monkeypatch.setattr(overrides, "MAX_WORD", 10**9)
    assert len(overrides.parse([word])) == 1


def test_without_the_check_a_secret_is_in_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted-secret")
    words = ["name=${oc.env:AWS_SECRET_ACCESS_KEY}"]
    with pytest.raises(ConfigError):
        composed(*words)
    monkeypatch.setattr(compose, "restricted_resolvers", nullcontext)
    assert composed(*words)["name"] == "planted-secret"
