"""A user's code that changed: what counts as a change, and what each command does about results of
other code."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fedsim import load_rounds, load_runs, run_experiment
from fedsim.commands import show, verify
from fedsim.config import user_code as module
from fedsim.config.user_code import changed_since, user_code
from fedsim.core.errors import ConfigError
from fedsim.core.record import Record
from fedsim.jobs.cli import run
from fedsim.results.archive import write_archive
from fedsim.results.reading import read_summary
from fedsim.results.runs import read_runs
from fedsim.rounds.loop import Simulation
from tests.checkpoint_toys import Killed
from tests.launcher_toys import plans_of, sent
from tests.report_toys import make_report
from tests.run_toys import shell

LAB = """
import numpy as np
import tools
import pack.inner as inner
from helpers import RATE, by_loss
from fedsim.selectors.base import Selection, Selector, Signal, ascending

SIGN = 1
SIZES = {}
for name in ("one", "two"):
    SIZES[name] = hidden(name) if "hidden" in globals() else 0


class Other(Selector):
    def select(self, round, clients, rng):
        return unused()


def unused():
    return None


class Mine(by_loss(Selector)):
    needs = frozenset({Signal.LOSSES})

    def select(self, round, clients, rng):
        from late import nothing

        losses = SIGN * RATE * clients.losses(clients.available) + nothing() + tools.zero() + inner.ZERO
        order = np.argsort(losses, kind="stable")[: self.cohort_size(clients)]
        return Selection(ascending(clients.available[order]))
"""
HELPERS = """
from stars import *

RATE = 1.0


def by_loss(base):
    return star(base)


def other():
    return 1
"""
FILES = {
    "my_lab.py": LAB,
    "helpers.py": HELPERS,
    "tools.py": "def zero():\n    return 0\n",
    "late.py": "try:\n    from .fast import *\nexcept ImportError:\n    def nothing():\n        return 0\n",
    "stars.py": "def star(base):\n    return base\n",
    "pack/__init__.py": "import sys\n\nsys.getrecursionlimit()\n\n\ndef unused():\n    return 0\n",
    "pack/inner.py": "from .base import ZERO\n",
    "pack/base.py": "ZERO = 0\n",
    "conf/selector/mine.yaml": "_target_: my_lab.Mine\n",
}
NODE = {"selector": {"_target_": "my_lab.Mine"}}
WORDS = ("num_rounds=3", "local.epochs=1", "tracker=files_only", "num_clients=6", "cohort_size=2")
MINE = (*WORDS, "--config-dir", "conf", "selector=mine")


def forget_modules() -> None:
    """The next import reads the files again, as in a new process."""
    for name in [
        name
        for name in sys.modules
        if f"{name.partition('.')[0]}.py" in FILES or name.startswith("pack")
    ]:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture(autouse=True)
def edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Replace a text in a file of the working folder, which has `FILES`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    forget_modules()

    def edit(old: str, new: str, file: str = "my_lab.py") -> None:
        text = (tmp_path / file).read_text()
        assert text.count(old) == 1
        (tmp_path / file).write_text(text.replace(old, new))
        forget_modules()

    yield edit
    forget_modules()


FLIP = "SIGN = 1", "SIGN = -1"


def names() -> list[str]:
    """The runs' folders that are there, as what follows the seed in their names, without hashes of
    configs."""
    folders = [path.parent.name for path in Path().glob("outputs/*/*/summary.json")]
    return sorted(
        "-".join([part for part in name.split("-s", 2)[-1].split("-") if len(part) != 8])
        for name in folders
    )


def accuracy(folder: Path) -> float:
    return float((read_summary(folder) or {})["best_accuracy"])


# --- what counts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("my_lab.py", "SIGN = 1\n", "SIGN = 1  # the sign\n\n"),
        ("my_lab.py", "    needs", '    """A selector."""\n\n    needs'),
        ("my_lab.py", 'kind="stable"', "kind='stable'"),
        ("my_lab.py", "return unused()", "return 1"),
        ("my_lab.py", "\n\ndef unused", "\n\nclass New(Other):\n    pass\n\n\ndef unused"),
        (
            "my_lab.py",
            "\n\ndef unused",
            "\n\nif __name__ == '__main__':\n    unused()\n\n\ndef unused",
        ),
        ("helpers.py", "return 1", "return 2"),
        ("pack/__init__.py", "return 0", "return 1"),
        ("conf/selector/mine.yaml", "my_lab", "my_lab"),
    ],
)
def test_what_changes_nothing_that_a_class_needs_is_no_change(
    file: str, old: str, new: str, edit: Callable[..., None]
) -> None:
    before = user_code(NODE)
    edit(old, new, file)
    assert user_code(NODE) == before


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        ("my_lab.py", *FLIP, "my_lab"),
        ("my_lab.py", "losses, kind", "-losses, kind", "my_lab"),
        ("my_lab.py", "\n\nclass Other", "\n\nnp.seterr(all='raise')\n\n\nclass Other", "my_lab"),
        ("my_lab.py", "import Selection,", "import Selection, Share,", "my_lab"),
        ("helpers.py", "return star(base)", "return base", "helpers"),
        ("helpers.py", "RATE = 1.0", "RATE = -1.0", "helpers"),
        ("tools.py", "return 0", "return 1", "tools"),
        ("late.py", "return 0", "return 1", "late"),
        ("stars.py", "return base", "return base or None", "stars"),
        ("pack/base.py", "0", "1", "pack.base"),
        ("pack/__init__.py", "getrecursionlimit", "getswitchinterval", "pack"),
        ("my_lab.py", '"two"', '"two", "three"', "my_lab"),
        (
            "my_lab.py",
            "\n\nclass Other",
            "\n\nif __name__ != '__main__':\n    SIGN = 2\n\n\nclass Other",
            "my_lab",
        ),
        (
            "my_lab.py",
            "\n\nclass Other",
            "\n\nif SIGN:\n    __name__, SIZES = 'x', 1\n\n\nclass Other",
            "my_lab",
        ),
    ],
)
def test_an_edit_of_what_a_class_needs_names_its_module(
    file: str, old: str, new: str, told: str, edit: Callable[..., None]
) -> None:
    before = user_code(NODE)
    edit(old, new, file)
    assert changed_since({"code": before}, NODE) == told


def test_the_code_is_that_which_the_process_has_imported(edit: Callable[..., None]) -> None:
    """As in a sweep during which a file is edited, and in a notebook before and after a reload."""
    import my_lab  # type: ignore[import-not-found]

    before = user_code(NODE)
    Path("my_lab.py").write_text(LAB.replace(*FLIP))
    assert user_code(NODE) == before
    importlib.reload(my_lab)
    assert changed_since({"code": before}, NODE) == "my_lab"


def test_a_module_that_is_not_imported_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = Mock(side_effect=module._parse)
    monkeypatch.setattr(module, "_parse", parse)
    user_code(NODE)
    parsed = [call.args[0].name for call in parse.call_args_list]
    assert "my_lab" in parsed
    assert len(parsed) == len(set(parsed))


def test_classes_of_fedsim_trackers_and_what_is_not_there_have_no_code() -> None:
    shipped = {"_target_": "fedsim.selectors.oort.Oort"}
    elsewhere = {"_target_": "numpy.random.Generator"}
    absent = {"_target_": "my_lab_that_is_gone.Mine"}
    assert (
        user_code(
            {
                "selector": shipped,
                "tracker": NODE["selector"],
                "model": elsewhere,
                "dataset": absent,
            }
        )
        is None
    )
    Path("my_lab.py").write_text("class Mine(")
    forget_modules()
    assert user_code(NODE) is None


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_sweep_after_an_edit_runs_a_finished_seed_again_and_a_report_tells_the_versions_apart(
    edit: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 1. Another process runs seed 0. This process finds the code unchanged.
    assert shell(tmp_path, *MINE).returncode == 0
    (old,) = tmp_path.glob("outputs/default/*-s0-*")
    assert run(MINE) == 0
    assert "already done" in capsys.readouterr().out

    # 2. A sweep after the edit runs seed 0 again, and keeps its old result.
    edit(*FLIP)
    assert run([*MINE, "-m", "seed=0,1,2"]) == 0
    swept = capsys.readouterr()
    (line,) = [line for line in swept.err.splitlines() if "changed" in line]
    assert "the code of my_lab has changed since it was run; that result is kept in" in line
    assert "ended before" not in swept.out
    (kept,) = tmp_path.glob("outputs/default/*-code-*")
    old_code = kept.name[-6:]
    assert line.endswith(f" {kept.name}")
    assert names() == ["0", f"0-code-{old_code}", "1", "2"]
    assert accuracy(kept) != accuracy(old)

    # 3. A report compares the two versions, on the terminal and on its page.
    codes = {str(run.code) for run in read_runs(tmp_path / "outputs")}
    assert len(codes) == 2
    assert make_report(["outputs/default", "--no-figures"]) == 0
    terminal = capsys.readouterr().out
    page = Path("outputs/default/report/report.html").read_text()
    assert "several versions of your code are compared, not averaged: " in terminal
    assert f"{old_code} (code={old_code}, seeds 0)" in terminal
    for code in codes:
        assert f"code={code}" in terminal
        assert f"code={code}" in page


def test_without_an_edit_nothing_is_run_again_and_edits_back_and_forth_run_each_version_once(
    edit: Callable[..., None], rounds: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    for at, (old, new) in enumerate([("SIGN", "SIGN"), FLIP, FLIP[::-1], FLIP]):
        edit(old, new) if old != new else None
        rounds.clear()
        assert run(MINE) == 0
        assert rounds == ([1, 2, 3] if at < 2 else [])
        assert ("that result is kept in" in capsys.readouterr().err) == (at > 0)
        assert run(MINE) == 0
        assert "already done" in capsys.readouterr().out
    assert len(names()) == 2


@pytest.mark.parametrize(
    "launcher", ["basic", "lanes", pytest.param("joblib", marks=pytest.mark.slow)]
)
def test_jobs_of_other_code_are_run_again_by_every_launcher_and_those_of_fedsim_are_not(
    launcher: str,
    edit: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    words = (
        *WORDS,
        "--config-dir",
        "conf",
        "-m",
        "selector=random,mine",
        "seed=0,1",
        f"hydra/launcher={launcher}",
    )
    assert run(words) == 0
    before = {path: path.read_bytes() for path in Path().glob("outputs/*/*-random-*/summary.json")}
    edit(*FLIP)
    capfd.readouterr()
    assert run(words) == 0
    assert "2 have ended before" in capfd.readouterr().out
    assert {path: path.read_bytes() for path in before} == before
    assert [name[2:6] for name in names()] == ["", "", "code", "", "", "code"]
    again = [path for path in Path().glob("outputs/*/*-mine-*") if "-code-" not in path.name]
    assert all((read_summary(path) or {})["code"] == user_code(NODE) for path in again)


def test_a_replacement_that_dies_loses_nothing_and_goes_on(
    edit: Callable[..., None], killed: Any, rounds: list[int]
) -> None:
    words = (*MINE, "checkpoint.every=1")
    assert run(words) == 0
    edit(*FLIP)
    killed(*words, before=3)
    assert [name[:6] for name in names()] == ["0-code"]
    rounds.clear()
    assert run(words) == 0
    assert rounds == [3]
    assert [name[:6] for name in names()] == ["0", "0-code"]


def test_a_task_that_begins_after_an_edit_records_what_it_ran(edit: Callable[..., None]) -> None:
    """As on a cluster, where jobs wait for hours."""
    with_config = plans_of("selector=random", "~selector.mode", "selector._target_=my_lab.Mine")
    assert [outcome.skipped for outcome in sent(*with_config)] == [False]
    assert [outcome.skipped for outcome in sent(*with_config)] == [True]
    edit(*FLIP)
    (outcome,) = sent(*with_config)
    assert (outcome.skipped, outcome.summary["code"]) == (False, user_code(NODE))


def test_a_class_in_place_of_that_of_a_choice_names_the_run() -> None:
    """Otherwise reports take the run for one of random selection."""
    swap = ("~selector.mode", "selector._target_=my_lab.Mine")
    swapped, plain = plans_of(*swap)[0], plans_of("selector=random")[0]
    assert (plain.choices["selector"], swapped.choices["selector"]) == ("random", "Mine")
    assert swapped.folder.name.startswith("digits-shards-mlp-Mine-s0-")
    assert [plan.swept for plan in plans_of(*swap, "seed=0,1")] == ["Mine s0", "Mine s1"]
    (others,) = plans_of(
        "local_algorithm=fednova",
        "local_algorithm._target_=fedsim.clients.local_algorithms.FedProx",
        "aggregator._target_=fedsim.rounds.robust.NormClipping",
        "+aggregator.norm=1",
        "optimizer.schedule._target_=fedsim.engine.optimizers.Cosine",
        "+optimizer.schedule.final=0.1",
    )
    expected = {
        "local_algorithm": "FedProx",
        "aggregator": "NormClipping",
        "optimizer": "sgd",
        "optimizer/schedule": "Cosine",
    }
    assert {group: others.choices[group] for group in expected} == expected


def test_overwrite_replaces_the_result_of_other_code(edit: Callable[..., None]) -> None:
    assert run(MINE) == 0
    edit(*FLIP)
    assert run([*MINE, "overwrite=true"]) == 0
    assert names() == ["0"]


def test_a_result_that_does_not_say_its_code_counts_as_that_of_the_present_one(
    edit: Callable[..., None], rounds: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """As of earlier versions of fedsim."""
    assert run(MINE) == 0
    (path,) = Path().glob("outputs/*/*/summary.json")
    path.write_text(
        json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "code"})
    )
    edit(*FLIP)
    rounds.clear()
    capsys.readouterr()
    assert run([*MINE, "-m", "seed=0,1"]) == 0
    assert rounds == [1, 2, 3]
    assert make_report(["outputs", "--no-figures"]) == 0
    assert "unknown (code=unknown, seeds 0)" in capsys.readouterr().out


def test_show_and_verify_say_that_the_code_has_changed(
    edit: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(MINE) == 0
    edit("losses = SIGN", "losses = 1 * SIGN")
    capsys.readouterr()
    assert show.run(MINE) == 0
    told = capsys.readouterr().out
    assert "changed            0/3" in told
    assert "the code of my_lab has changed since it was run" in told
    assert verify.run(["outputs"]) == 0
    assert "the code of my_lab has changed since\n    equal, 3 rounds" in capsys.readouterr().out
    edit(*FLIP)
    assert verify.run(["outputs"]) == 1
    assert "    code: helpers " in capsys.readouterr().out


def test_from_python_the_same_call_runs_again_and_frames_tell_versions_apart(
    edit: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import my_lab

    def call() -> Any:
        return run_experiment(list(WORDS), selector=sys.modules["my_lab"].Mine)

    first = call()
    assert call().skipped
    Path("my_lab.py").write_text(LAB.replace(*FLIP))
    importlib.reload(my_lab)
    capsys.readouterr()
    second = call()
    assert (
        "the code of my_lab has changed since it was run; that result is kept in"
        in capsys.readouterr().err
    )
    assert (second.skipped, second.folder, second.final_accuracy == first.final_accuracy) == (
        False,
        first.folder,
        False,
    )
    write_archive(read_runs(Path("outputs")), Path("outputs"), tmp_path / "runs.parquet")
    for source in ("outputs", tmp_path / "runs.parquet"):
        assert load_rounds(source)["code"].nunique() == 2
        assert set(load_runs(source)["final_accuracy"]) == {
            first.final_accuracy,
            second.final_accuracy,
        }


def test_where_takes_the_runs_of_one_version_and_settings_do_not_mix_them(
    edit: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """One setting was run before an edit and one after it: a mean over settings would have both."""
    assert run([*MINE, "partition=iid"]) == 0
    edit(*FLIP)
    assert run([*MINE, "partition=shards"]) == 0
    codes = {str(one.code) for one in read_runs(Path("outputs"))}
    capsys.readouterr()
    assert make_report(["outputs", "--no-figures"]) == 0
    told = capsys.readouterr().out
    assert "several versions of your code" in told
    assert all(f"code={code}" in told for code in codes)
    assert make_report(["outputs", "--no-figures", "--where", f"code={min(codes)}"]) == 0
    assert "several versions of your code" not in capsys.readouterr().out


def test_a_run_that_went_on_with_other_code_is_a_version_of_its_own(
    edit: Callable[..., None], killed: Any
) -> None:
    words = (*MINE, "checkpoint.every=1")
    killed(*words, before=3)
    edit(*FLIP)
    with pytest.raises(ConfigError, match=r"code='.*my_lab \w+.*'.*\n.*other_code=true"):
        run(words)
    assert run([*words, "checkpoint.other_code=true"]) == 0
    assert run(words) == 0  # it is done by the present code
    assert run([*MINE, "seed=1"]) == 0
    assert len({one.code for one in read_runs(Path("outputs"))}) == 2


@pytest.mark.parametrize("renames", [1, 2])
def test_a_kill_between_the_renames_loses_nothing(
    renames: int, edit: Callable[..., None], monkeypatch: pytest.MonkeyPatch, rounds: list[int]
) -> None:
    """Before the result of the other code is moved, and before one of the present code comes
    back."""
    assert run(MINE) == 0
    edit(*FLIP)
    assert run(MINE) == 0
    edit(*FLIP[::-1])
    kept = {path.read_bytes() for path in Path().glob("outputs/*/*/summary.json")}
    rename, done = Path.rename, 0

    def dying(self: Path, target: Path) -> Path:
        nonlocal done
        done += 1
        if done == renames:
            raise Killed
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dying)
        with pytest.raises(Killed):
            run(MINE)
    assert {path.read_bytes() for path in Path().glob("outputs/*/*/summary.json")} == kept
    assert run(MINE) == 0
    edit(*FLIP)
    assert run(MINE) == 0
    assert {path.read_bytes() for path in Path().glob("outputs/*/*/summary.json")} >= kept


@pytest.mark.parametrize("choice", ["selector=mine", "selector=random"])
def test_a_run_that_fails_after_a_save_names_the_key_for_changed_code(
    choice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a checkpoint, or without a class of the user's, the same command suffices."""
    line = "after a change of your code, add checkpoint.other_code=true"

    step = Simulation.step
    for last_round in (1, 2):

        def failing(self: Simulation, last: int = last_round) -> Record:
            if self.round == last:
                raise ValueError("mine")
            return step(self)

        monkeypatch.setattr(Simulation, "step", failing)
        assert run([*MINE[:-1], choice, "checkpoint.every=2"]) == 1
        told = capsys.readouterr().out
        assert "the same command resumes it: fedsim" in told
        assert (line in told) == (last_round == 2 and choice == "selector=mine")
