"""Hydra's ways: those that are kept do what they say, through a launcher of Hydra, too; the others are refused."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError

import fedsim
from fedsim.config.compose import ConfigDir
from fedsim.config.sources import CheckedFolder
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError
from fedsim.jobs.cli import run
from fedsim.running.process import StopRequests

FEW = ("tracker=files_only", "cache_dir=cache")


@pytest.fixture
def through_hydra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Run a command by a launcher of Hydra; how its runs ended."""
    monkeypatch.chdir(tmp_path)
    fresh = StopRequests()
    monkeypatch.setattr(fresh, "install", lambda: None)
    for module in ("running.experiment", "jobs.sweep", "jobs.launched", "jobs.cli", "running.process"):
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


def test_hydra_launches_under_the_rules_of_all_configs(through_hydra: Callable[..., list[str]], tmp_path: Path) -> None:
    """What Hydra composes again, it composes with the restricted resolver, and reads as the check did."""
    looked: list[tuple[bool, bool]] = []
    with pytest.MonkeyPatch.context() as patch:
        read = CheckedFolder.load_config
        patch.setattr(CheckedFolder, "load_config", lambda *a, **k: looked.append(state()) or read(*a, **k))
        through_hydra("num_rounds=1", "scale=debug")
    assert set(looked) == {(True, True)}
    assert state() == (False, False)


def state() -> tuple[bool, bool]:
    try:
        OmegaConf.create({"a": "${oc.env:NO_SECRET,1}"}).a  # noqa: B018
    except InterpolationResolutionError:
        return True, ConfigDir.active
    return False, ConfigDir.active


def test_a_glob_is_launched_by_hydra(through_hydra: Callable[..., list[str]]) -> None:
    words = ("-m", "scale=debug", "selector=glob(r*)", "seed=range(2,0,-1)", "num_rounds=1")
    assert through_hydra(*words) == [f"None {s} {seed}" for s in ("random", "round_robin", "rpow_d") for seed in (1, 2)]


def test_the_config_of_a_job_that_would_be_refused_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        run(["num_rounds=-1", "--cfg", "job", "selector=gpffl", "seed=0,1"])
    assert {p.key for p in caught.value.problems} == {"selector", "seed"}
    with pytest.raises(ConfigError) as caught:
        run(["num_rounds=many", "--cfg", "job", "+typo=1"])
    assert {p.key for p in caught.value.problems} == {"num_rounds", "typo"}
    assert not capsys.readouterr().out


def test_a_file_that_a_shipped_one_would_hide_is_refused(tmp_path: Path) -> None:
    (tmp_path / "selector").mkdir()
    mine, shipped = tmp_path / "selector" / "random.yaml", conf_dir() / "selector" / "random.yaml"
    (tmp_path / "selector" / "my_random.yaml").write_text("_target_: fedsim.selectors.random.Random\nmode: size\n")
    mine.write_text(shipped.read_text())  # hides nothing that matters
    (plan,) = fedsim.compose(["selector=my_random"], config_dir=tmp_path)
    assert plan.config["selector"]["mode"] == "size"
    mine.write_text(shipped.read_text().replace("uniform", "size"))
    with pytest.raises(ConfigError, match=r"selector/random\.yaml': is hidden by .*, which differs\n    rename it"):
        fedsim.compose(["selector=my_random"], config_dir=tmp_path)
    with pytest.raises(ConfigError, match="is hidden by"):
        run(["--config-dir", str(tmp_path), "--cfg", "job"])
