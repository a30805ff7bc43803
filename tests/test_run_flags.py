"""Flags of the command line, and the config that `--cfg job` prints."""

from pathlib import Path

import pytest
import yaml

from fedsim.jobs.cli import run
from tests.run_toys import Run, folders, shell


@pytest.mark.parametrize(
    "line",
    [
        "-m selector=random,full seed=3 name=x",
        "selector=random,full -m seed=3 name=x",
        "selector=random,full seed=3 name=x --multirun",
        "name=x --config-dir {own} selector=random,full --multirun seed=3 --config-name=config",
    ],
)
def test_flags_may_stand_anywhere(fedsim: Run, tmp_path: Path, line: str) -> None:
    own = tmp_path / "own"
    own.mkdir()
    assert fedsim(*line.format(own=own).split()) == 0
    run_folders = folders(tmp_path)
    assert [f.name.split("-")[3:5] for f in run_folders] == [["full", "s3"], ["random", "s3"]]
    assert {f.parent.name for f in run_folders} == {"x"}


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("name=x --cfg=job --resolve data_dir=${name}", "data_dir: x"),
        ("-c job data_dir=${name}", "data_dir: ${name}"),
        ("preset=gpfl_alpha --cfg job scale=small", "num_rounds: 100"),
        ("preset=gpfl_alpha --cfg job scale=small", "name: gpfl_alpha_small"),
        ("preset=gpfl_alpha --cfg job scale=small num_rounds=7", "num_rounds: 7"),
        ("-cp own --cfg job -cn mine -cd own/more", "key: value"),
        ("--cfg job selector=gpfl", "_target_: fedsim.selectors.gpfl.GPFL"),
    ],
)
def test_a_config_is_printed(
    tmp_path: Path,
    line: str,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "more").mkdir(parents=True)
    (tmp_path / "own" / "mine.yaml").write_text("key: value\n")
    assert run(line.split()) == 0
    printed = capsys.readouterr()
    assert text in printed.out
    assert not printed.err


@pytest.mark.parametrize("line", ["-m --cfg job", "--resolve", "--cfg hydra"])
def test_flags_that_do_not_go_together_are_reported(fedsim: Run, line: str) -> None:
    with pytest.raises(SystemExit) as caught:
        fedsim(*line.split())
    assert caught.value.code == 2


def test_printing_a_config_writes_nothing(tmp_path: Path) -> None:
    result = shell(tmp_path, "--cfg", "job", "selector=full")
    assert yaml.safe_load(result.stdout)["selector"]["_target_"] == "fedsim.selectors.full.Full"
    assert not list(tmp_path.iterdir())
