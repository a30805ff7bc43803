"""Jobs of a sweep by the command line: composed once, each for itself, under any launcher."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose

from fedsim.config.plan import make_plan
from fedsim.results.files import read_metrics, read_summary
from tests.run_toys import QUICK, Run, folders, shell

LAB = """
from torch import nn
from fedsim.selectors.full import Full

class Fails(Full):
    def select(self, round, clients, rng):
        if round == 2:
            raise KeyError("my own mistake")
        return super().select(round, clients, rng)

class Broken(nn.Module):
    def __init__(self, shape, num_classes):
        raise KeyError("cannot be built")
"""


def test_a_failing_job_leaves_its_siblings_alone_and_is_named(
    fedsim: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_lab.py").write_text(LAB)
    (tmp_path / "my_conf" / "model").mkdir(parents=True)
    (tmp_path / "my_conf" / "model" / "broken.yaml").write_text("_target_: my_lab.Broken\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    targets = "selector._target_=fedsim.selectors.full.Full,my_lab.Fails"
    assert fedsim("-m", targets, "~selector.mode", "model=logistic,broken", "--config-dir", "my_conf") == 1
    statuses = {read_summary(f)["status"]: f for f in folders(tmp_path)}  # type: ignore[index]
    assert set(statuses) == {"done", "failed"}
    assert "my own mistake" in (statuses["failed"] / "error.txt").read_text()
    assert {folder.name.split("-")[2] for folder in folders(tmp_path)} == {"logistic"}
    printed = capsys.readouterr()
    assert "failed" in printed.out
    assert "4 jobs" in printed.out
    assert "cannot be built" in printed.err
    assert fedsim("model=broken", "--config-dir", "my_conf") == 1


OUTSIDE = """
from pathlib import Path
from fedsim.core.types import Selection
from fedsim.core.errors import check, at_least
from fedsim.selectors.base import Selector

class Lowest(Selector):
    \"\"\"The clients with the lowest ids, after `skip`.\"\"\"

    def __init__(self, population, *, skip: int):
        super().__init__(population)
        check(at_least("skip", skip, 0))
        self.skip = skip
        Path("my_conf/selector/lowest.yaml").write_text("_target_: my_lab.Lowest\\nskip: 7\\nnew_key: 1\\n")

    def select(self, round, clients, rng):
        return Selection(clients.available[self.skip : self.skip + self.cohort_size(clients)])
"""


def test_a_selector_outside_the_package_is_two_files_and_editing_them_does_not_reach_later_jobs(tmp_path: Path) -> None:
    (tmp_path / "my_lab.py").write_text(OUTSIDE)
    (tmp_path / "my_conf" / "selector").mkdir(parents=True)
    own = tmp_path / "my_conf" / "selector" / "lowest.yaml"
    own.write_text("_target_: my_lab.Lowest\nskip: 2\n")
    result = shell(tmp_path, "-m", "--config-dir", "my_conf", "selector=lowest", "seed=0,1", *QUICK)
    assert result.returncode == 0, result.stderr
    assert "new_key" in own.read_text()
    for seed, folder in enumerate(folders(tmp_path)):
        assert folder.name.startswith(f"digits-shards-mlp-lowest-s{seed}-")
        assert yaml.safe_load((folder / "config.yaml").read_text())["selector"]["skip"] == 2
        assert read_metrics(folder)[0]["selected"] == [2, 3, 4, 5, 6]
    assert seed == 1


PRESET = """# @package _global_
hydra:
  mode: MULTIRUN
  sweeper:
    params:
      selector: random,gpfl
      seed: range(3)
"""


def test_jobs_are_composed_and_planned_once_also_those_of_a_preset(
    fedsim: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_conf" / "preset").mkdir(parents=True)
    (tmp_path / "my_conf" / "preset" / "mine.yaml").write_text(PRESET)
    planned: list[str] = []
    composed: list[str] = []

    def counting(config: Any, choices: Any, **more: Any) -> Any:
        planned.append(choices["selector"])
        return make_plan(config, choices, **more)

    def composing(*words: Any, **more: Any) -> Any:
        composed.append(more["overrides"])
        return compose(*words, **more)

    monkeypatch.setattr("fedsim.config.plan.make_plan", counting)
    monkeypatch.setattr("fedsim.config.diagnosis.compose", composing)
    assert fedsim("--config-dir", "my_conf", "preset=mine", "seed=0,1", "hydra.verbose=false") == 0
    assert sorted(planned) == ["gpfl", "gpfl", "random", "random"]
    assert len(composed) == 1 + 4  # what is common to all first: it says what is swept over
    assert {folder.parent.name for folder in folders(tmp_path)} == {"mine"}


def test_ctrl_c_ends_a_sweep(fedsim: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedsim.selectors.full import Full

    def interrupted(self: Any, *_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Full, "select", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fedsim("-m", "selector=random,full,md")
    statuses = {f.name.split("-")[3]: (read_summary(f) or {})["status"] for f in folders(tmp_path)}
    assert statuses == {"random": "done", "full": "interrupted"}
