"""`fedsim doctor`: each thing that can be wrong is told with a remedy, and no secret is."""

import re
import socket
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fedsim.commands import doctor, show
from fedsim.commands import doctor as experiment
from fedsim.commands import doctor as machine
from fedsim.commands import doctor as packages
from fedsim.commands import doctor as surroundings
from fedsim.commands import doctor as wandb_checks
from fedsim.commands.dispatch import answer
from fedsim.commands.doctor import Finding
from fedsim.config.plan import Plan
from fedsim.config.words import read
from fedsim.core.errors import ConfigError
from fedsim.engine.native.library import NotCompiledError
from tests.test_commands_sync import finished

SECRET = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def told(check: Callable[[], Iterator[Finding]]) -> list[tuple[str, str]]:
    """Level and text of what a check finds; what is not ok has a remedy."""
    found = list(check())
    assert all(one.remedy for one in found if one.level != "ok")
    return [(one.level, one.text) for one in found]


def installed(folder: Path, name: str, version: str, *requires: str) -> None:
    """The record of a package in a folder of Python's path."""
    place = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    place.mkdir(parents=True)
    lines = [f"Requires-Dist: {one}" for one in requires]
    (place / "METADATA").write_text(
        "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines])
    )


def test_where_all_is_well_it_says_so_uses_no_network_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(machine, "library", lambda dtype: None)
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    assert answer(["doctor"]) == 0
    page = capsys.readouterr().out
    for topic in ("fedsim 0", "packages: all", "torchvision", "threads", "device", "C compiler", "data", "disk", "W&B"):
        assert f"  {topic}" in page, topic
    assert "fail" not in page
    assert page.endswith("The experiment can be run.\n")
    assert "an API key is in the environment" in " ".join(page.split())
    assert SECRET not in page
    assert not list(Path().rglob("*"))


def test_packages_out_of_range_or_missing_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path / "old", "hydra-core", "1.2.0")
    monkeypatch.syspath_prepend(tmp_path / "old")
    found = told(packages.required)
    assert found == [("fail", "packages: hydra-core 1.2.0 is installed, fedsim needs <1.4,>=1.3.8")]
    monkeypatch.setattr(packages, "version_of", lambda name: None if name == "clarabel" else "99")
    assert ("fail", "packages: clarabel is not installed, fedsim needs >=0.9") in told(packages.required)


def test_packages_that_are_there_twice_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(packages.installed_twice) == []
    installed(tmp_path / "other", "torch", "2.14.0")
    monkeypatch.syspath_prepend(tmp_path / "other")
    ((level, text),) = told(packages.installed_twice)
    assert level == "warn"
    assert text.startswith("packages: torch is installed 2 times (")
    assert str(tmp_path / "other") in text


def test_a_torchvision_for_another_torch_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [level for level, _ in told(packages.torchvision)] == ["ok"]
    installed(tmp_path / "other", "torchvision", "0.15.2", "numpy", "torch==2.0.1")
    monkeypatch.syspath_prepend(tmp_path / "other")
    ((level, text),) = told(packages.torchvision)
    assert (level, text.startswith("torchvision 0.15.2 needs torch==2.0.1, installed is")) == ("warn", True)


def test_files_that_hide_modules_are_told() -> None:
    assert [level for level, _ in told(surroundings.shadows)] == ["ok"]
    for name in ("json.py", "torch/__init__.py", "fedsim/__init__.py", "my_lab.py", "data/__init__.py"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("")
    (other, (level, text)) = told(surroundings.shadows)
    assert other == ("warn", other[1])
    assert other[1].startswith(f"another fedsim is in {Path('fedsim').resolve()}; this one is ")
    assert (level, text.startswith("working folder: json.py, torch/ would be taken")) == ("warn", True)


def test_hydra_plugins_of_the_working_folder_are_told() -> None:
    assert told(surroundings.plugins) == []
    Path("hydra_plugins").mkdir()
    assert [level for level, _ in told(surroundings.plugins)] == ["warn"]


def test_more_threads_than_cores_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1000")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    ((level, text),) = told(machine.threads)
    assert (level, "torch uses 1000 on" in text, "OMP_NUM_THREADS=1000" in text) == ("warn", True, True)


def test_a_gpu_that_torch_does_not_see_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for driver, level in ((None, "ok"), ("550.54", "warn")):
        monkeypatch.setattr(machine, "driver_version", lambda driver=driver: driver)
        assert [found for found, _ in told(machine.device)] == [level]


def test_a_missing_compiler_is_told_with_what_happens_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(dtype: torch.dtype) -> None:
        raise NotCompiledError("there is no C compiler")

    monkeypatch.setattr(machine, "library", refuse)
    ((level, text),) = told(machine.compiler)
    assert level == "warn"
    assert "(there is no C compiler); engine=auto trains in PyTorch" in text


def plans_of(*words: str) -> list[Plan]:
    plans, found = experiment.plans_of(read(words))
    assert plans, found
    return plans


def test_data_sets_that_are_there_are_named(tmp_path: Path) -> None:
    raw = tmp_path / "data" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for split in ("train", "t10k"):
        for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"):
            (raw / f"{split}-{kind}").write_text("")
    ((level, text),) = told(lambda: experiment.data(plans_of(f"data_dir={tmp_path / 'data'}")))
    assert level == "ok"
    assert ": there: fashion_mnist; fetched at first use: cifar10, cifar100, emnist, femnist," in text
    assert text.endswith(
        "; without files: digits, femnist_generated, femnist_generated_full, synthetic, text_generated"
    )


def test_a_data_dir_that_is_no_folder_fails_for_experiments_that_need_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = [f"data_dir={tmp_path / 'file'}"]
    assert [level for level, _ in told(lambda: experiment.data(plans_of(*words)))] == ["warn", "ok"]
    found = told(lambda: experiment.data(plans_of(*words, "dataset=mnist")))
    assert [level for level, _ in found] == ["warn", "ok", "fail"]


def test_folders_that_cannot_be_written_or_are_full_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    plans = plans_of(f"output_dir={tmp_path / 'file' / 'outputs'}", f"cache_dir={tmp_path / 'cache'}")
    assert [level for level, _ in told(lambda: experiment.folders(plans))] == ["fail", "ok"]
    monkeypatch.setattr(experiment, "LITTLE", 1e30)
    assert [level for level, _ in told(lambda: experiment.folders(plans_of()))] == ["warn", "warn"]


def lines(capsys: pytest.CaptureFixture[str], *words: str, code: int) -> list[str]:
    """What is said of the experiment, each line with its remedy."""
    assert answer(["doctor", *words]) == code
    page = capsys.readouterr().out.split("\n\n")[0]
    joined = [" ".join(one.split()) for one in re.split(r"\n(?=\w)", page)]
    return [one for one in joined if re.match(r"\w+ (config|data|disk):", one)]


@pytest.fixture
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "library", lambda dtype: None)


@pytest.mark.usefixtures("_no_compiler")
def test_a_config_that_is_refused_fails_with_a_line_for_each_problem(capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(capsys, "selector=gpffl", "modl=x", code=1)
    assert found == [
        "fail config: selector='gpffl': is not a choice of conf/selector/ did you mean gpfl?",
        "fail config: modl: is not a known key did you mean model?",
    ]
    assert lines(capsys, "seed=-1", code=1) == ["fail config: seed=-1: must be >= 0 correct it"]


REFUSED = {
    "-m seed=0,-1 selector=random,gpfl server.validation_fraction=0": "in a job of a sweep alone",
    "seed=0,1": "without -m",
    "selector=random selector.exploration.rho=1": "an unknown key",
    "--config-dir nowhere": "a folder that there is not",
    "--config-dir mine selector=broken": "a file of one's own",
    "output_dir=file/outputs": "a folder that cannot be written",
    "dataset=mnist data_dir=file": "a folder that is none",
    "device=cuda": "no GPU",
    "-m seed=0,1 hydra/launcher=lanes hydra.launcher.max_lanes=0": "a launcher's parameter",
    "-m seed=0,1 hydra/launcher=submitit_local hydra.launcher.jobs_per_task=0": "one of a launcher of tasks",
}


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize("words", REFUSED)
def test_what_show_refuses_the_doctor_refuses_with_the_same_words(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Path("file").write_text("")
    Path("mine/selector").mkdir(parents=True)
    Path("mine/selector/broken.yaml").write_text("a: [\n")
    with pytest.raises(ConfigError) as caught:
        show.run(words.split())
    found = [line for line in lines(capsys, *words.split(), code=1) if line.startswith("fail")]
    assert len(found) == len(caught.value.problems)
    for problem in caught.value.problems:
        assert any(" ".join(str(problem).split()) in line.replace("disk: ", "").replace("data: ", "") for line in found)


@pytest.mark.usefixtures("_no_compiler")
def test_the_words_of_a_sweep_are_judged_as_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine/selector").mkdir(parents=True)
    Path("mine/selector/own.yaml").write_text("defaults:\n  - random\n")
    words = ["--config-dir", "mine", "selector=own,md", "seed=0,1", "--multirun"]
    assert lines(capsys, *words, code=0)[0] == (
        "ok config: `fedsim --config-dir mine --multirun selector=own,md seed=0,1` is accepted, 4 jobs"
    )
    assert not Path("outputs").exists()


@pytest.mark.usefixtures("_no_compiler")
def test_a_path_that_leads_nowhere_is_told_with_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    Path("half/train/a").mkdir(parents=True)
    words = ["-m", "dataset=image_folder", "dataset.path=nowhere,half", "model=cnn", "seed=0,1", "data_dir=data"]
    found = [line for line in lines(capsys, *words, code=1) if line.startswith("fail")]
    here = Path.cwd()
    remedy = "correct it, or point data_dir or FEDSIM_DATA to the folder that has it (data_dir=data)"
    assert found == [
        f"fail data: dataset.path='nowhere': is missing train/ in {here}/nowhere or {here}/data/nowhere {remedy}",
        f"fail data: dataset.path='half': is missing test/ in {here}/half {remedy}",
    ]
    assert not Path("outputs").exists()


@pytest.mark.usefixtures("_no_compiler")
def test_nothing_is_missing_for_runs_that_are_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["dataset=parquet", "dataset.path=gone", "data_dir=data"]
    assert lines(capsys, *words, code=1)[-1].startswith(
        f"fail data: dataset.path='gone': is missing a parquet file at {Path.cwd()}/gone or {Path.cwd()}/data/gone "
    )
    monkeypatch.setattr(experiment, "outcome_on_file", lambda plan: Namespace(final=True))
    assert not [line for line in lines(capsys, *words, code=0) if "gone" in line and "config:" not in line]


@pytest.mark.usefixtures("_no_compiler")
def test_a_data_set_of_ones_own_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("own_rings.py").write_text(
        "from fedsim.data.digits import Digits\nclass Rings(Digits):\n"
        "    def absent(self):\n        return [f'rings.csv in {self.data_dir}']\n"
    )
    monkeypatch.syspath_prepend(Path.cwd())
    found = lines(capsys, "dataset._target_=own_rings.Rings", "data_dir=here", code=1)
    assert found[-1] == "fail data: data_dir='here': is missing rings.csv in here correct it, or set FEDSIM_DATA"


def test_the_key_is_found_where_wandb_finds_it_and_never_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output_dir = Path("outputs")
    assert "no API key: runs are logged offline" in told(lambda: wandb_checks.state(output_dir))[0][1]
    (tmp_path / "netrc").write_text(f"machine elsewhere.org login user password {SECRET}\n")
    assert "no API key" in told(lambda: wandb_checks.state(output_dir))[0][1]
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {SECRET}\n")
    assert told(lambda: wandb_checks.state(output_dir))[0][1].endswith(
        f"an API key is in {tmp_path / 'netrc'}; runs are sent"
    )
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai {SECRET} {SECRET}\n")  # which is no netrc
    assert "no API key" in told(lambda: wandb_checks.state(output_dir))[0][1]
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert "WANDB_MODE=disabled" in told(lambda: wandb_checks.state(output_dir))[0][1]


def test_runs_that_wait_to_be_sent_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    finished("a"), finished("b")
    assert told(lambda: wandb_checks.state(Path("outputs")))[1][0] == "ok"
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    assert told(lambda: wandb_checks.state(Path("outputs")))[1] == ("warn", "W&B: 2 runs below outputs not sent")


def test_a_check_that_breaks_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "library", lambda dtype: None)
    monkeypatch.setattr(packages, "required", lambda: 1 / 0)
    monkeypatch.setattr(doctor, "_not_importable", lambda: Finding("fail", "import: broken", "install it anew"))
    found = [(one.level, one.text) for one in doctor.findings()]
    assert ("warn", "packages: could not be checked (ZeroDivisionError: division by zero)") in found
    assert found[-1] == ("fail", "import: broken")
    assert len(found) > 4
