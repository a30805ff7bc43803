"""`fedsim list launchers`: those of conf/, of Hydra and of its plugins, and those that an extra would add."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedsim.commands import catalogue as launchers
from fedsim.commands.catalogue import Catalogue
from fedsim.commands.dispatch import answer
from fedsim.config.compose import search_path
from fedsim.config.words import options


@dataclass
class OfAPlugin:
    """What a plugin registers."""

    _target_: str = "hydra_plugins.some_launcher.Some"
    n_jobs: int = -1
    folder: str = "${hydra.sweep.dir}/some"


def page(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert answer(["list", *words]) == code
    printed = capsys.readouterr()
    return " ".join((printed.err if code else printed.out).split())


def test_the_launchers_are_those_that_hydra_takes() -> None:
    with search_path():
        known = options("hydra/launcher")
    found = Catalogue().group("hydra/launcher")
    assert sorted(found.choices) == sorted(known)
    assert {"basic", "lanes", "ray"} <= set(known)
    assert not set(found.with_extra) & (set(known) - {"ray"})


def test_launchers_of_plugins_are_listed_and_those_of_extras_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "_registered", lambda: {"basic": OfAPlugin(), "some": OfAPlugin()})
    monkeypatch.setattr(launchers, "find_spec", lambda name: None)
    found = page(capsys, "launchers")
    for text in (
        "basic Hydra's own: the jobs one after another, in this process.",
        "lanes Runs of a sweep side by side",
        "some By Hydra's plugin some_launcher.",
        "Not installed: ray (pip install 'fedsim-selection[ray]'), "
        "submitit_local, submitit_slurm (pip install 'fedsim-selection[slurm]')",
    ):
        assert text in found, text
    assert "hydra.launcher.n_jobs=-1 hydra.launcher.folder=${hydra.sweep.dir}/some" in page(capsys, "launchers", "some")
    monkeypatch.setattr(launchers, "find_spec", lambda name: True)
    assert "[ray]" not in page(capsys, "launchers")


def test_nothing_is_said_of_extras_that_are_installed_or_of_other_groups(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("basic", "submitit_local", "submitit_slurm")
    monkeypatch.setattr(launchers, "_registered", lambda: {name: OfAPlugin() for name in names})
    monkeypatch.setattr(launchers, "find_spec", lambda name: True)
    assert "Not installed" not in page(capsys, "launchers")
    monkeypatch.setattr(launchers, "_registered", lambda: pytest.fail("Hydra is imported"))
    assert "Not installed" not in page(capsys, "selectors")


def test_the_list_of_groups_says_that_there_are_more_launchers_and_imports_no_hydra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(launchers, "_registered", lambda: pytest.fail("Hydra is imported"))
        assert "(3, and those of Hydra and its plugins)" in page(capsys)
    assert "basic" in json.loads(page(capsys, "--json"))["hydra/launcher"]["choices"]


def test_a_launcher_of_an_extra_is_told_with_its_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "_registered", dict)
    message = page(capsys, "launchers", "submitit_slurm", code=2)
    assert "submitit_slurm is not installed; pip install 'fedsim-selection[slurm]'" in message


def test_a_file_of_ones_own_goes_before_a_plugin_and_lists_as_json_have_both(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "hydra" / "launcher").mkdir(parents=True)
    (tmp_path / "hydra" / "launcher" / "mine.yaml").write_text("# My own.\nn_jobs: 3\n")
    (tmp_path / "hydra" / "launcher" / "some.yaml").write_text("# In its place.\nn_jobs: 4\n")
    monkeypatch.setattr(launchers, "_registered", lambda: {"some": OfAPlugin(), "other": OfAPlugin()})
    assert answer(["list", "launchers", "--config-dir", str(tmp_path), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["mine"]["idea"] == "My own."
    assert found["some"]["values"]["hydra.launcher.n_jobs"]["value"] == 4
    assert found["other"]["values"]["hydra.launcher.n_jobs"]["value"] == -1
    assert list(found) == sorted(found)
