"""Hydra's ways: those that are kept do what they say; the others are refused."""

from pathlib import Path

import pytest

import fedsim
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError
from fedsim.jobs.cli import run


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
