"""Paths as users write them: `~` and variables stand for folders wherever a config or an option
names a path."""

import os
from argparse import ArgumentParser
from pathlib import Path

import pytest

from fedsim.config.compose import search_path
from fedsim.config.plan import Plan
from fedsim.core.disk import user_path
from fedsim.core.errors import ConfigError
from fedsim.data.base import Dataset
from fedsim.report.command import arguments
from tests.dataset_toys import build
from tests.run_toys import Run, plan_of, shell


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.chdir(tmp_path)


def planned(*words: str) -> Plan:
    with search_path():
        return plan_of(*words)


@pytest.mark.parametrize("written", ["~/x", "$HOME/x", "$SCRATCH/../home/x"])
def test_folders_of_a_config_are_those_that_a_shell_would_take(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(*(f"{key}='{written}'" for key in ("output_dir", "data_dir", "cache_dir")))
    places = plan.settings.output_dir, plan.data_dir, plan.cache_dir
    assert {Path(os.path.normpath(place)) for place in places} == {tmp_path / "home" / "x"}
    monkeypatch.setenv("FEDSIM_DATA", written)
    monkeypatch.setenv("FEDSIM_CACHE", written)
    plan = planned()
    assert {Path(os.path.normpath(place)) for place in (plan.data_dir, plan.cache_dir)} == {
        tmp_path / "home" / "x"
    }


def test_the_name_of_a_run_does_not_depend_on_how_its_folder_is_written(tmp_path: Path) -> None:
    written, full = planned("output_dir='~/x'"), planned(f"output_dir={tmp_path}/home/x")
    assert written.folder == full.folder
    assert written.config_hash == full.config_hash == planned().config_hash


def test_other_users_and_variables_are_rejected_and_no_secret_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    for value in ("~nobody_here/x", "$MY_TOKEN/x", "$SCRATSH/x"):
        for key in ("output_dir", "data_dir", "cache_dir"):
            with pytest.raises(
                ConfigError, match=rf"{key}=.*: must be a path \(~ and \$HOME are known, other"
            ):
                planned(f"{key}='{value}'")
    assert user_path("a$b/$MY_TOKEN") == Path("a$b/$MY_TOKEN")


def test_paths_of_data_weights_and_traces_are_read_alike(tmp_path: Path) -> None:
    (tmp_path / "home" / "set" / "train").mkdir(parents=True)
    (tmp_path / "home" / "devices.csv").write_text("ms_per_sample,down_kbps,up_kbps\n1,1,1\n")
    for path in ("~/set", "$HOME/set"):
        dataset: Dataset = build("image_folder", tmp_path, path=path)
        assert dataset.absent() == [f"test/ in {tmp_path}/home/set"]
    for path in ("~/devices.csv", "$HOME/devices.csv"):
        planned("system=trace", f"system.devices.path='{path}'", "system.devices.assign=random")
    parser = ArgumentParser()
    arguments(parser)
    assert parser.parse_args(["x", "--to=~/report"]).to == tmp_path / "home" / "report"


def test_a_run_creates_no_folder_of_that_name(fedsim: Run, tmp_path: Path) -> None:
    assert fedsim("output_dir='~/runs'", "num_rounds=1") == 0
    assert not (tmp_path / "~").exists()
    assert len(list((tmp_path / "home" / "runs").rglob("summary.json"))) == 1


def test_a_folder_whose_name_is_not_utf_8_holds_data_and_caches(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    words = (
        "dataset=synthetic",
        "dataset.num_owners=6",
        "partition=natural",
        "num_clients=6",
        "cohort_size=2",
    )
    done = shell(
        tmp_path, *words, "num_rounds=1", "tracker=files_only", FEDSIM_DATA=name, FEDSIM_CACHE=name
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "outputs").rglob("summary.json"))) == 1
