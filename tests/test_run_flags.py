"""Flags of the command line, and the config that `--cfg job` prints.

fedsim composes configs with Hydra, and takes the flags that Hydra's own command line has: `-m`
(--multirun) runs a sweep, and `--cfg job` (-c) prints the config of a run in place of running it.
`--config-dir` (-cd) adds a folder of config files, `--config-path` (-cp) replaces fedsim's conf/,
and `--config-name` (-cn) replaces conf/config.yaml.

The tests start fedsim in three ways. The fixture `fedsim` runs a command in this process, in the
empty folder `tmp_path`, with three short rounds. `run` is the function behind it, without such
defaults. `shell` starts a process of its own, as a user does.
"""

from pathlib import Path

import pytest
import yaml

from fedsim.jobs.cli import run
from tests.run_toys import Run, folders, shell


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("-m selector=random,full seed=3 name=x", id="first"),
        pytest.param("selector=random,full -m seed=3 name=x", id="between overrides"),
        pytest.param("selector=random,full seed=3 name=x --multirun", id="last and long"),
        pytest.param(
            "name=x --config-dir {folder} selector=random,full --multirun seed=3 "
            "--config-name=config",
            id="flags with values, with and without =",
        ),
    ],
)
def test_flags_may_stand_anywhere(fedsim: Run, tmp_path: Path, line: str) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    assert fedsim(*line.format(folder=folder).split()) == 0
    run_folders = folders(tmp_path)
    names_without_hash = [folder.name.rpartition("-")[0] for folder in run_folders]
    assert names_without_hash == ["digits-shards-mlp-full-s3", "digits-shards-mlp-random-s3"]
    assert {folder.parent for folder in run_folders} == {tmp_path / "outputs" / "x"}


def printed_config(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what `fedsim` prints for `words`, which must be a config and nothing else."""
    assert run(words) == 0
    printed = capsys.readouterr()
    assert not printed.err
    return printed.out


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("flags", ["--cfg job", "--cfg=job", "-c job"])
def test_the_config_of_a_choice_is_printed(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = yaml.safe_load(printed_config(capsys, *flags.split(), "selector=gpfl"))
    assert config["selector"]["_target_"] == "fedsim.selectors.gpfl.GPFL"


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize(
    ("flags", "data_dir"), [(["--resolve"], "x"), ([], "${name}")], ids=["resolved", "as written"]
)
def test_an_interpolation_is_resolved_only_on_request(
    flags: list[str], data_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["name=x", "data_dir=${name}", "--cfg", "job", *flags]
    assert yaml.safe_load(printed_config(capsys, *words))["data_dir"] == data_dir


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize(
    ("override", "num_rounds"),
    [
        pytest.param([], 100, id="the key `small` of the preset"),
        pytest.param(["num_rounds=7"], 7, id="an override"),
    ],
)
def test_the_config_of_a_preset_has_the_changes_of_the_scale(
    override: list[str], num_rounds: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["preset=gpfl_alpha", "scale=small", "--cfg", "job", *override]
    config = yaml.safe_load(printed_config(capsys, *words))
    assert config["num_rounds"] == num_rounds
    assert config["name"] == "gpfl_alpha_small"


@pytest.mark.usefixtures("empty_folder")
def test_a_config_of_the_users_own_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf_of_mine" / "more").mkdir(parents=True)
    (tmp_path / "conf_of_mine" / "mine.yaml").write_text("key: value\n")
    line = "-cp conf_of_mine --cfg job -cn mine -cd conf_of_mine/more"
    assert printed_config(capsys, *line.split()) == "key: value\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-m --cfg job", "argument --cfg/-c: not allowed with argument --multirun/-m"),
        ("--resolve", "--resolve goes with --cfg"),
        ("--cfg hydra", "argument --cfg/-c: invalid choice: 'hydra'"),
    ],
)
def test_a_mistaken_flag_ends_the_command_with_code_2_and_a_message(
    fedsim: Run, line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        fedsim(*line.split())
    assert caught.value.code == 2
    assert f"fedsim: error: {message}" in capsys.readouterr().err


def test_printing_a_config_writes_no_file(tmp_path: Path) -> None:
    result = shell(tmp_path, "--cfg", "job", "selector=full")
    assert yaml.safe_load(result.stdout)["selector"]["_target_"] == "fedsim.selectors.full.Full"
    assert not list(tmp_path.iterdir())
