"""`fedsim doctor`: each thing that can be wrong is told with a remedy, and no secret is."""

import re
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from fedsim.commands import doctor, show
from fedsim.commands.dispatch import answer
from fedsim.commands.doctor import Finding
from fedsim.config.command_line import read_command_line
from fedsim.config.plan import Plan
from fedsim.core.errors import ConfigError
from fedsim.engine.native.library import NotCompiledError
from tests.dataset_toys import table
from tests.test_commands_sync import finished

SECRET = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(doctor, "library", lambda dtype: None)


def told(check: Callable[[], Iterator[Finding]]) -> list[tuple[str, str]]:
    """Level and text of what a check finds; what is not ok has a remedy."""
    found = list(check())
    assert all(one.remedy for one in found if one.level != "ok")
    return [(one.level, one.text) for one in found]


def test_where_all_is_well_it_says_so_uses_no_network_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    assert answer(["doctor"]) == 0
    page = capsys.readouterr().out
    for topic in (
        "fedsim 0",
        "packages: all",
        "torchvision",
        "device",
        "C compiler",
        "data",
        "disk",
        "W&B",
    ):
        assert f"  {topic}" in page, topic
    assert "fail" not in page
    assert page.endswith("The experiment can be run.\n")
    assert "there is an API key" in " ".join(page.split())
    assert SECRET not in page
    assert not list(Path().rglob("*"))


def test_packages_out_of_range_or_missing_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hydra_core-1.2.0.dist-info").mkdir()
    (tmp_path / "hydra_core-1.2.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: hydra-core\nVersion: 1.2.0"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert told(doctor.packages)[1:] == [
        ("fail", "packages: hydra-core: 1.2.0 is installed, fedsim needs <1.4,>=1.3.8")
    ]
    monkeypatch.setattr(doctor, "version_of", lambda name: None if name == "clarabel" else "99")
    assert ("fail", "packages: clarabel: nothing is installed, fedsim needs >=0.9") in told(
        doctor.packages
    )


def test_what_the_machine_lacks_is_told_with_what_happens_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(dtype: torch.dtype) -> None:
        raise NotCompiledError("there is no C compiler")

    monkeypatch.setattr(doctor, "library", refuse)
    ((level, text),) = told(doctor.compiler)
    assert (level, "(there is no C compiler); engine=auto trains in PyTorch" in text) == (
        "warn",
        True,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for driver, level in ((None, "ok"), ("550.54", "warn")):
        monkeypatch.setattr(doctor, "driver_version", lambda driver=driver: driver)
        assert [found for found, _ in told(doctor.device)] == [level]
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert [found for found, _ in told(doctor.torchvision)] == ["warn"]


def plans_of(*words: str) -> list[Plan]:
    plans, found = doctor.plans_of(read_command_line(words))
    assert plans, found
    return plans


def test_folders_that_are_none_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = [f"data_dir={tmp_path / 'file'}"]
    levels = [level for level, _ in told(lambda: doctor.data(plans_of(*words)))]
    assert levels == ["warn", "ok", "ok"]
    assert [level for level, _ in told(lambda: doctor.data(plans_of(*words, "dataset=mnist")))] == [
        "warn",
        "fail",
    ]
    plans = plans_of(
        f"output_dir={tmp_path / 'file' / 'outputs'}", f"cache_dir={tmp_path / 'cache'}"
    )
    assert [level for level, _ in told(lambda: doctor.folders(plans))] == ["fail", "ok"]


def lines(capsys: pytest.CaptureFixture[str], *words: str, code: int) -> list[str]:
    """What is said of the experiment, each line with its remedy."""
    assert answer(["doctor", *words]) == code
    page = capsys.readouterr().out.split("\n\n")[0]
    joined = [" ".join(one.split()) for one in re.split(r"\n(?=\w)", page)]
    return [one for one in joined if re.match(r"\w+ (config|data|disk):", one)]


REMEDY = "correct it, or point data_dir or FEDSIM_DATA to the folder that has it (data_dir=data)"
REFUSED = {
    "selector=gpffl modl=x": "two problems",
    "-m seed=0,-1 selector=random,gpfl server.validation_fraction=0": "in a job of a sweep alone",
    "--config-dir mine selector=broken": "a file of one's own",
    "output_dir=file/outputs": "a folder that cannot be written",
    "dataset=mnist data_dir=file": "a folder that is none",
    "-m seed=0,1 hydra/launcher=lanes hydra.launcher.max_lanes=0": "a launcher's parameter",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_show_refuses_the_doctor_refuses_with_the_same_words(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").write_text("")
    Path("mine/selector").mkdir(parents=True)
    Path("mine/selector/broken.yaml").write_text("a: [\n")
    with pytest.raises(ConfigError) as caught:
        show.run(words.split())
    capsys.readouterr()  # the jobs, which are shown before that
    found = [line for line in lines(capsys, *words.split(), code=1) if line.startswith("fail")]
    assert len(found) == len(caught.value.problems)
    for problem in caught.value.problems:
        assert any(
            " ".join(str(problem).split()) in re.sub("disk: |data: ", "", line) for line in found
        )


def test_a_path_that_leads_nowhere_is_told_with_what_is_missing_unless_its_runs_are_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("half/train/a").mkdir(parents=True)
    words = [
        "-m",
        "dataset=image_folder",
        "dataset.path=nowhere,half",
        "model=cnn",
        "seed=0,1",
        "data_dir=data",
    ]
    found = [line for line in lines(capsys, *words, code=1) if line.startswith("fail")]
    here = Path.cwd()
    assert found == [
        f"fail data: dataset.path=nowhere: is missing train/ in {here}/nowhere or {here}/data/nowhere {REMEDY}",
        f"fail data: dataset.path=half: is missing test/ in {here}/half {REMEDY}",
    ]
    assert not Path("outputs").exists()
    monkeypatch.setattr("fedsim.jobs.sweep.outcome_on_file", lambda plan: Namespace(final=True))
    assert not [line for line in lines(capsys, *words, code=0) if line.startswith("fail")]


def test_data_that_are_here_must_divide_among_the_clients(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["dataset=synthetic", "dataset.num_owners=10", "partition=natural"]
    words += ["model=logistic", "data_dir=data"]
    assert lines(capsys, *words, "num_clients=20", code=1)[-2:] == [
        "fail data: num_clients=20: only 10 of 10 owners have partition.min_samples=10 training "
        "samples at most num_clients=10",
        "ok data: synthetic: all that it needs is here (data_dir=data)",
    ]
    words.append("num_clients=10")
    line = "ok data: synthetic: partition=natural: 10 clients with 19 training samples"
    assert lines(capsys, *words, code=0)[-1] == line


def test_data_that_a_run_would_download_are_not_divided(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = lines(capsys, "dataset=mnist", "data_dir=data", code=0)
    assert found[-1].startswith("ok data: mnist: the first run downloads train-images-idx3-ubyte, ")
    assert found[-1].endswith(" to data_dir=data")


def test_large_files_are_not_decoded_for_a_division(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(table(20), "train.parquet")
    words = ["dataset=parquet", "dataset.path=.", "dataset.test_fraction=0.5", "model=logistic"]
    assert " 2 clients with " in lines(capsys, *words, "num_clients=2", "cohort_size=1", code=0)[-1]
    monkeypatch.setattr(doctor, "MAX_BYTES", 10)
    line = lines(capsys, *words, code=0)[-1]
    assert line.endswith("not checked, because the data would have to be decoded")


def test_the_key_is_found_where_wandb_finds_it_and_never_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    finished("a"), finished("b")
    unsent = "W&B: 2 runs below outputs not sent"

    def state() -> list[tuple[str, str]]:
        found = told(lambda: doctor.wandb(Path("outputs")))
        assert SECRET not in str(found)
        return found

    assert "no API key: runs are logged offline" in state()[0][1]
    assert state()[1] == ("ok", unsent)
    netrc.write_text(f"machine elsewhere.org login user password {SECRET}\n")
    assert "no API key" in state()[0][1]
    netrc.write_text(f"machine api.wandb.ai {SECRET} {SECRET}\n")  # which is no netrc
    assert "no API key" in state()[0][1]
    netrc.write_text(f"machine api.wandb.ai login user password {SECRET}\n")
    assert state()[0][1].endswith("there is an API key; runs are sent")
    assert state()[1] == ("warn", unsent)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert "WANDB_MODE=disabled" in state()[0][1]


def test_a_check_that_breaks_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "driver_version", lambda: 1 / 0)
    monkeypatch.setattr(doctor, "plans_of", lambda args: ([], [Finding("fail", "config: none")]))
    found = [(one.level, one.text) for one in doctor.findings(read_command_line([]))]
    assert ("warn", "device: could not be checked (ZeroDivisionError: division by zero)") in found
    assert found[-1] == ("fail", "config: none")
    assert len(found) > 4


def test_a_parquet_folder_without_known_columns_cannot_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = table(4).rename_columns(["img", "kind"])
    pq.write_table(rows, "train.parquet")
    words = [
        "dataset=parquet",
        "dataset.path=.",
        "dataset.test_fraction=0.5",
        "model=logistic",
        "data_dir=data",
        "partition=iid",
        "num_clients=2",
        "cohort_size=2",
    ]
    told = r"fail data: dataset\.label_column=None: the columns are img, kind in train\.parquet, and none of them may"
    assert any(re.match(told, line) for line in lines(capsys, *words, code=1))
    assert not [
        line
        for line in lines(capsys, *words, "dataset.label_column=kind", code=0)
        if "fail" in line
    ]
    Path("train.parquet").write_bytes(b"<html>")
    assert any("no sound parquet file" in line for line in lines(capsys, *words, code=1))
