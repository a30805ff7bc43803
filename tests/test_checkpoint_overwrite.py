"""What is finished is not lost: runs that are overwritten, and jobs that end before their first
round."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsim.jobs.cli import run
from fedsim.results.reading import read_summary
from fedsim.running.assembly import build
from tests.checkpoint_toys import EVERY, WORDS, Killed, folder_in, result

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_an_overwrite_that_dies_loses_nothing_and_goes_on(killed: Any, rounds: list[int]) -> None:
    assert run([*WORDS, EVERY]) == 0
    folder = folder_in("outputs")
    old, stamps = result(folder), {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    killed("overwrite=true", EVERY)
    assert {p: p.stat().st_mtime_ns for p in folder.iterdir()} == stamps
    rounds.clear()
    assert run([*WORDS, EVERY]) == 0
    assert not rounds
    assert run([*WORDS, EVERY, "overwrite=true"]) == 0
    assert rounds == [5, 6, 7, 8]
    assert result(folder) == old
    assert (folder / "summary.json").stat().st_mtime_ns != stamps[folder / "summary.json"]
    assert {p.name for p in folder.parent.iterdir()} == {folder.name, ".locks"}


@pytest.mark.parametrize("words", [[], ["overwrite=true"]])
def test_an_overwrite_that_dies_while_it_takes_its_place_is_complete_afterwards(
    words: list[str], rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(list(WORDS)) == 0
    folder = folder_in("outputs")
    old = json.loads((folder / "summary.json").read_text())
    rename = Path.rename

    def dying(self: Path, target: Path) -> Path:
        if target == folder.relative_to(Path()) or target == folder:
            raise Killed
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dying)
        with pytest.raises(Killed):
            run([*WORDS, "overwrite=true"])
    rounds.clear()
    assert run([*WORDS, *words]) == 0
    assert not rounds
    assert result(folder)[1]["last_accuracy"] == old["last_accuracy"]
    assert {p.name for p in folder.parent.iterdir()} == {folder.name, ".locks"}


def test_what_another_process_finishes_while_this_one_builds_is_not_run_again(
    rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(plan: Any) -> Any:
        monkeypatch.setattr("fedsim.running.experiment.build", build)
        assert run(list(WORDS)) == 0
        return build(plan)

    monkeypatch.setattr("fedsim.running.experiment.build", slowly)
    assert run(list(WORDS)) == 0
    assert rounds == list(range(1, 9))


# --- what a user's class raises between building it and the first round, or after the last one ---

LAUNCHERS = pytest.mark.parametrize("launcher", ["basic", "lanes"])
AROUND = """
from fedsim.selectors.random import Random

def mine(*_, **__):
    raise ValueError("mine")

def ends(*_, **__):
    raise SystemExit(0)

class Fine(Random):
    pass

class Warning(Fine):
    warning = property(mine)

class Adaptive(Fine):
    adaptive = property(mine)

class StartUp(Fine):
    start_up_rounds = property(mine)

class Saves(Fine):
    state_dict = mine

class Loads(Fine):
    load_state_dict = mine

class Raises(Fine):
    def __init__(self, population, *, mode):
        raise KeyError("mine")

class Exits(Fine):
    def __init__(self, population, *, mode):
        ends()

class Late(Fine):
    select = ends
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_lab.py").write_text(AROUND)
    monkeypatch.syspath_prepend(str(tmp_path))


def by_class() -> dict[str, Path]:
    """The folders of the runs, by the class of their selectors."""
    found = {}
    for path in Path("outputs").glob("*/*/config.yaml"):
        found[yaml.safe_load(path.read_text())["selector"]["_target_"].rpartition(".")[2]] = (
            path.parent
        )
    return found


@LAUNCHERS
def test_a_selector_that_raises_before_round_1_ends_its_own_job(
    launcher: str, lab: None, rounds: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["Warning", "Adaptive", "StartUp", "Saves", "Raises", "Exits", "Late"]
    targets = ",".join(f"my_lab.{name}" for name in [*names, "Fine"])
    words = ["-m", "selector=random", f"selector._target_={targets}", f"hydra/launcher={launcher}"]
    assert run([*(w for w in WORDS if "selector" not in w), *words]) == 1
    folders = by_class()
    assert sorted(rounds) == [1, *range(1, 9)]  # the first of `Late`
    ends = [str((read_summary(folders[name]) or {}).get("status")) for name in [*names, "Fine"]]
    assert ends == [*["None"] * 6, "failed", "done"]
    errors = [(folders[name] / "error.txt").read_text().splitlines()[-1] for name in names]
    assert errors == [*["ValueError: mine"] * 4, "KeyError: 'mine'", *["SystemExit: 0"] * 2]
    told = capsys.readouterr()
    assert told.err.count(" failed: ValueError: mine (before round 1") == 4
    assert told.err.count(" (before round 1") == 6
    assert "8 jobs" in told.out


@LAUNCHERS
def test_a_selector_that_cannot_load_its_state_ends_its_own_job_and_loses_nothing(
    launcher: str, lab: None, killed: Any, rounds: list[int]
) -> None:
    killed("selector=random", "selector._target_=my_lab.Loads", EVERY)
    folder = folder_in("outputs")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    words = [
        "-m",
        "selector._target_=my_lab.Loads,my_lab.Fine",
        f"hydra/launcher={launcher}",
        EVERY,
    ]
    assert run([*WORDS, "selector=random", *words]) == 1
    error = (folder / "error.txt").read_text()
    assert "ValueError: mine" in error
    assert {
        path.name: path.read_bytes() for path in folder.iterdir() if path.name != "error.txt"
    } == before
    assert (read_summary(by_class()["Fine"]) or {})["status"] == "done"
    Path("my_lab.py").write_text(AROUND.replace("load_state_dict = mine", "pass"))
    sys.modules.pop("my_lab")
    rounds.clear()
    mended = [
        *WORDS,
        "selector=random",
        "selector._target_=my_lab.Loads",
        EVERY,
        "checkpoint.other_code=true",
    ]
    assert run(mended) == 0
    assert rounds == [5, 6, 7, 8]
    assert not (folder / "error.txt").exists()


def test_what_is_raised_after_the_last_round_is_a_failure_that_keeps_the_rounds(
    rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: Any) -> None:
        raise ValueError("mine")

    with monkeypatch.context() as patch:
        patch.setattr("fedsim.running.experiment.client_accuracies", raises)
        assert run([*WORDS, EVERY]) == 1
    summary = read_summary(folder_in("outputs")) or {}
    assert (summary["status"], summary["rounds"]) == ("failed", 8)
    assert summary["error"].startswith(
        "ValueError: mine (after the last round, test_checkpoint_overwrite.py, line "
    )  # and no round
    assert "ValueError: mine" in (folder_in("outputs") / "error.txt").read_text()
    rounds.clear()
    assert run([*WORDS, EVERY]) == 0
    assert rounds == [7, 8]
