"""Hydra's ways: those that are kept do what they say, through a launcher of Hydra, too; the others are refused."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsim.cli import run
from fedsim.errors import ConfigError
from fedsim.running.signals import StopRequests

FEW = ("tracker=files_only", "cache_dir=cache")


@pytest.fixture
def through_hydra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Run a command by a launcher of Hydra; how its runs ended."""
    monkeypatch.chdir(tmp_path)
    fresh = StopRequests()
    monkeypatch.setattr(fresh, "install", lambda: None)
    for module in ("running.experiment", "jobs.sweep", "jobs.launched", "cli", "running.signals"):
        monkeypatch.setattr(f"fedsim.{module}.STOP", fresh)
    (tmp_path / "my_conf/hydra/launcher").mkdir(parents=True)
    target = "_target_: hydra._internal.core_plugins.basic_launcher.BasicLauncher\n"
    (tmp_path / "my_conf/hydra/launcher/other.yaml").write_text(target)
    monkeypatch.setattr(sys, "argv", ["fedsim"])

    def command(*words: str) -> list[str]:
        assert run(["--config-dir", "my_conf", "hydra/launcher=other", *words, *FEW]) == 0
        found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("outputs/*/*/summary.json"))]
        assert {summary["status"] for summary in found} == {"done"}
        return [f"{s['choices'].get('cell')} {s['choices']['selector']} {s['seed']}" for s in found]

    return command


def test_hydra_launches_what_was_composed(through_hydra: Callable[..., list[str]]) -> None:
    preset = ("preset=gpfl_table2_fmnist", "scale=debug", "num_rounds=1")
    assert through_hydra(*preset, "cell=null", "selector=random,full") == ["None full 0", "None random 0"]
    with pytest.raises(ConfigError, match="cell=None: is no value of a sweep by this launcher of Hydra"):
        through_hydra(*preset, "cell=null,gpfl_1spc", "selector=random")


def test_a_glob_is_launched_by_hydra(through_hydra: Callable[..., list[str]]) -> None:
    words = ("-m", "scale=debug", "selector=glob(r*)", "seed=range(2,0,-1)", "num_rounds=1")
    assert through_hydra(*words) == [f"None {s} {seed}" for s in ("random", "round_robin", "rpow_d") for seed in (1, 2)]


def test_the_config_of_a_job_that_would_be_refused_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        run(["num_rounds=-1", "--cfg", "job", "+typo=1", "selector=gpffl", "seed=0,1"])
    assert {p.key for p in caught.value.problems} == {"num_rounds", "typo", "selector", "seed"}
    assert not capsys.readouterr().out
