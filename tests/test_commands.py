"""`fedsim --help`, `--version`, `list`, and what is said to words that are no command."""

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fedsim
from fedsim.commands.catalogue import Catalogue
from fedsim.commands.dispatch import COMMANDS, answer
from fedsim.running.exits import exit_code

ROOT = Path(__file__).parents[1]
Ask = Callable[..., str]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ask:
    """What a command line prints in a terminal of 80 columns and an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words: str, code: int = 0) -> str:
        assert answer(words) == code
        printed = capsys.readouterr()
        assert (printed.err == "") == (code == 0)
        page = printed.err if code else printed.out
        for line in [] if "--json" in words or code else page.splitlines():
            assert len(line) <= 80 or " " not in line.strip(), (
                line
            )  # a word may be longer than a line
        return page

    return call


def test_help_says_on_one_screen_what_there_is(ask: Ask) -> None:
    for words in (["--help"], ["seed=3", "-h"], ["help"]):
        page = ask(*words)
        assert f"fedsim {fedsim.__version__} compares client selection methods" in " ".join(
            page.split()
        )
        width = max(map(len, COMMANDS))
        assert all(f"  {name:<{width}}  {about}" in page for name, (_, about) in COMMANDS.items())
        assert all("/" in name or f"\n  {name} " in page for name in Catalogue().names)
        assert len(page.splitlines()) <= 50
    assert ask("--version") == f"fedsim {fedsim.__version__}\n"


def test_all_groups_are_listed_with_whole_words(ask: Ask) -> None:
    assert (
        "how the jobs of a sweep are run: one after another where nothing is chosen (5)"
        in " ".join(ask("list").split())
    )
    assert json.loads(ask("list", "--json"))["preset"]["choices"][0] == "benchmark_tuning"
    for name in Catalogue().names:
        assert ask("list", name).startswith(f"{name}: ")
    spoken = {
        "partitions": "partition",
        "sketches": "selector/sketch",
        "schedule": "optimizer/schedule",
    }
    for word, group in spoken.items():
        assert ask("list", word).startswith(f"{group}: ")


def test_selectors_are_listed_with_idea_source_questions_and_cost(ask: Ask) -> None:
    page = ask("list", "selectors")
    assert "  random           Random selection: K clients with equal probability.\n" in page
    words = " ".join(page.split())
    assert "Cho et al. 2022 · asks loss of d candidates · server sees losses · adds" in words
    assert "server sees losses · adds (d-K) B down, 4 d up · also called pow-d" in words
    assert "\n      variants adapow_d, cpow_d" in page
    assert len(page.splitlines()) < 170
    assert all(choice in page for choice in Catalogue().group("selector").choices)


def test_one_choice_is_shown_with_its_values_and_docstring(ask: Ask) -> None:
    assert ask("show", "scaffold") == ask("list", "scaffold")
    page = ask("list", "selectors", "pncs_q2", "gpfl")
    assert "  selector.queue_length=2 " in page
    assert (
        "length of the queue of selected clients" in page
    )  # the comment of the choice that it builds on
    assert "Choices\n  selector/sketch=identity" in page
    assert "  1. All clients report a gradient at the current model." in page  # of the module
    assert "Selects the K clients with the lowest mean pairwise similarity" in page  # of the class
    found = json.loads(ask("list", "selectors", "--json"))["cpow_d"]
    assert (found["builds_on"], found["fields"]["source"]) == ("power_of_choice", "Cho et al. 2022")
    assert found["values"]["selector.estimate"]["value"] == "batch"
    page = ask("list", "preset", "gpfl_alpha")
    assert "  optimizer.schedule.milestones=[150, 300]\n" in page
    assert "Sweeps over\n  cell=gpfl_2spc\n" in page
    assert "one cell" not in page  # which is of the experiment that it builds on


def test_a_choice_is_found_by_its_other_names(ask: Ask) -> None:
    for words in (["GPFL"], ["Selectors", "GPFL"]):
        assert ask("list", *words) == ask("list", "selector", "gpfl")
    assert (
        ask("list", "dataset", "fmnist")
        == ask("list", "F-MNIST")
        == ask("list", "dataset", "fashion_mnist")
    )


def test_the_command_for_a_choice_of_ones_own_names_its_folder(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "mine/selector/exploration").mkdir(parents=True)
    for name in ("mine/selector/own.yaml", "mine/selector/exploration/own.yaml"):
        (tmp_path / name).write_text("_target_: fedsim.selectors.random.Random\n")
    page = ask("list", "selector", "own", "--config-dir", "mine")
    assert page.split("To choose it")[1].split() == [
        "fedsim",
        "selector=own",
        "--config-dir",
        "mine",
    ]
    page = ask("list", "selector/exploration", "own", "--config-dir", "mine")
    assert page.split("To choose it")[1].split()[-2:] == ["--config-dir", "mine"]


def test_a_choice_is_explained_without_its_group(ask: Ask) -> None:
    page = ask("list", "fedabc")
    assert page == ask("list", "selector", "fedabc")
    assert "\nTo choose it\n  fedsim selector=fedabc server.public_samples=100\n" in page
    assert "conf/selector/fedabc.yaml\n" in page
    assert "\nVariants\n  gpfl_alpha0  GPFL without" in ask("list", "gpfl")
    assert "discount of a client per selection since the last virtual round; in [0," in " ".join(
        ask("list", "fedcor").split()
    )
    assert [*json.loads(ask("list", "linear", "--json"))] == [
        "selector/exploration=linear",
        "selector/threshold=linear",
    ]
    assert ask("list", "fmnist").startswith("dataset=fashion_mnist\n")
    assert " also called fmnist, f-mnist," in ask("list", "dataset")


def test_own_choices_and_classes_are_listed_and_not_imported(ask: Ask, tmp_path: Path) -> None:
    """A selector of the user's own, as in the README, and one that builds on a shipped choice."""
    folder = tmp_path / "mine" / "selector"
    folder.mkdir(parents=True)
    (folder / "median.yaml").write_text("_target_: my_lab.Median\nquantile: 0.5   # in [0, 1]\n")
    (folder / "slow_gpfl.yaml").write_text(
        "# GPFL, slowly.\ndefaults:\n  - gpfl\n  - _self_\nrho: 1\n"
    )
    (tmp_path / "my_lab.py").write_text(
        'class Median:\n    """Selects the middle. More.\n\n    - An item\n      of two lines."""\n'
    )
    page = ask("list", "selectors", "--config-dir", "mine")
    assert "  median           Selects the middle.\n" in page
    assert "variants gpfl_alpha0, gpfl_cosine, slow_gpfl" in page
    page = ask("list", "selectors", "median", "-cd", "mine")
    assert "  selector.quantile=0.5  in [0, 1]\n" in page
    assert "my_lab.Median\n  Selects the middle. More.\n\n  - An item of two lines." in page
    assert "my_lab" not in sys.modules


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["list", "selecters"],
            "list: selecters is no group of the config; did you mean selector?",
        ),
        (["list", "zzz"], "list: zzz is no group of the config; `fedsim list` has them all"),
        (
            ["list", "selector", "gfpl"],
            "list: gfpl is not a choice of selector; did you mean gpfl?",
        ),
        (["list", "--config-dir", "nowhere"], "--config-dir='nowhere': must be an existing folder"),
        (["list", "selectors", "--config-dir", "mine"], "broken.yaml"),
    ],
)
def test_what_is_not_there_or_damaged_is_told(
    ask: Ask, words: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "mine" / "selector").mkdir(parents=True)
    (tmp_path / "mine" / "selector" / "broken.yaml").write_text("_target_: [1]\nx: [")
    assert message in ask(*words, code=2)


def python(tmp_path: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )


def shell_line(folder: Path, line: str, **env: str) -> "subprocess.CompletedProcess[bytes]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(
        ["sh", "-c", line], cwd=folder, env=environment, capture_output=True, check=False
    )


def test_experiments_are_no_commands_and_a_mistyped_command_is_told_with_the_nearest_one(
    tmp_path: Path,
) -> None:
    for words in (
        [],
        ["seed=1"],
        ["-m", "seed=1"],
        ["--cfg", "job"],
        ["selector=list"],
        ["lst"],
    ):
        assert answer(words) is None
    done = python(tmp_path, "-m", "fedsim", "lst", "selectors")
    assert (done.returncode, done.stdout) == (2, "")
    assert "lst: is neither a command nor key=value" in done.stderr
    assert "a command is the first word" in done.stderr
    assert done.stderr.endswith("  did you mean `fedsim list selectors`?\n")


def test_an_override_is_no_mistyped_command(tmp_path: Path) -> None:
    done = python(tmp_path, "-m", "fedsim", "~tracker")
    assert done.returncode == 2
    assert "did you mean `fedsim" not in done.stderr


def test_run_is_no_command(tmp_path: Path) -> None:
    done = python(tmp_path, "-m", "fedsim", "run", "seed=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("  did you mean `fedsim seed=1`?\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
@pytest.mark.parametrize("words", ["--help", "list selectors", "--cfg job"])
def test_output_that_cannot_be_written(words: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -P -m fedsim {words}"
    for redirection, code, told in (
        ("> /dev/full", 1, "cannot write to the standard output (No space left on device)\n"),
        (">&-", 0, ""),
        ("> /dev/full 2> /dev/full", 1, ""),
    ):
        done = shell_line(tmp_path, f"{command} {redirection}")
        assert (done.returncode, done.stdout) == (code, b"")
        assert b"Traceback" not in done.stderr
        assert done.stderr.endswith(told.encode())
    done = shell_line(tmp_path, command, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


def test_the_reason_is_that_of_the_output_and_not_of_an_earlier_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class FullDisk(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sys.stdout", FullDisk())

    def refused() -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    assert exit_code(refused) == 1
    reason = "cannot write to the standard output (No space left on device)"
    assert capsys.readouterr().err == f"fedsim: {reason}\n"


def test_a_deleted_working_folder(tmp_path: Path) -> None:
    for words, code in (("--help", 0), ("show", 1), ("seed=1", 1)):
        (tmp_path / "gone").mkdir()
        done = shell_line(
            tmp_path, f"cd gone && rmdir ../gone && {sys.executable} -m fedsim {words}"
        )
        assert done.returncode == code
        assert b"Traceback" not in done.stderr
        assert done.stderr.endswith(
            b"the working folder was deleted; change to one that exists\n" if code else b""
        )


def test_a_rank_that_is_no_number(tmp_path: Path) -> None:
    ranks = {"RANK": "²", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = shell_line(tmp_path, f"{sys.executable} -m fedsim --version", **ranks)
    assert (done.returncode, done.stderr) == (0, b"")


def test_what_takes_time_is_imported_late(tmp_path: Path) -> None:
    """Help and lists need neither torch nor Hydra, and torch is tuned before it is imported."""
    code = (
        "import sys; from fedsim.commands.dispatch import answer\n"
        "for words in (['--help'], ['--version'], ['list'], ['list', 'selectors'], ['list', 'gpfl']):\n"
        "    assert answer(words) == 0\n"
        "sys.exit(str({'torch', 'hydra', 'omegaconf', 'numpy', 'wandb'} & set(sys.modules)))"
    )
    assert python(tmp_path, "-c", code).stderr.strip() == "set()"
    code = (
        "import sys; import fedsim.running.process as process\n"
        "process.tune = lambda: print('tuned', 'torch' in sys.modules)\n"
        "from fedsim.run import main; main()"
    )
    for words in (["search", "optimizer.lr=0.1"], ["selector=nope"]):
        done = python(tmp_path, "-c", code, *words)
        assert (done.returncode, done.stdout) == (2, "tuned False\n")
