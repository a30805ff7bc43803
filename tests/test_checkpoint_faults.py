"""Checkpoints that are damaged or of another run, and finished runs that are damaged.

A run never resumes from what is unsound.
"""

import importlib
import json
import linecache
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from fedsim.config.compose import search_path
from fedsim.core.errors import ConfigError, FedsimError
from fedsim.jobs.cli import run
from fedsim.results.files import MODEL, NEWEST, PARTITION, PREVIOUS, TRACE, RunFolder
from fedsim.results.reading import CONFIG, METRICS, SUMMARY, read_summary
from fedsim.running.outcome import outcome_on_file
from tests.checkpoint_toys import EVERY, WORDS, damage, folder_in, result
from tests.dataset_toys import table
from tests.run_toys import plan_of

pytestmark = pytest.mark.usefixtures("empty_folder")


def lose_records(folder: Path) -> None:
    """Keep 3 records, as a power failure does that takes lines not forced to the disk."""
    lines = (folder / METRICS).read_bytes().splitlines(keepends=True)
    (folder / METRICS).write_bytes(b"".join(lines[:3]))


@pytest.mark.parametrize(
    ("harm", "is_set_aside"),
    [
        pytest.param(lambda folder: damage(folder / NEWEST), True, id="a flipped bit"),
        pytest.param(lose_records, True, id="lost records"),
        pytest.param(
            lambda folder: (folder / NEWEST).rename(folder / f"{NEWEST}.tmp"),
            False,
            id="a kill between the renames of a save",
        ),
    ],
)
def test_a_run_resumes_from_the_sound_one_of_two_checkpoints(
    harm: Callable[[Path], object],
    is_set_aside: bool,
    killed: Any,
    rounds: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run([*WORDS, "output_dir=whole"]) == 0
    killed(EVERY)
    folder = folder_in("outputs")
    harm(folder)
    rounds.clear()
    assert run([*WORDS, EVERY]) == 0
    assert rounds == [3, 4, 5, 6, 7, 8]
    message = "set aside as checkpoint.damaged.safetensors"
    assert (message in capsys.readouterr().err) == is_set_aside
    (folder / "checkpoint.damaged.safetensors").unlink(missing_ok=True)
    assert result(folder) == result(folder_in("whole"))


def test_without_a_sound_checkpoint_they_are_set_aside_and_the_run_starts_anew(
    killed: Any, rounds: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    killed(EVERY)
    folder = folder_in("outputs")
    damage(folder / NEWEST)
    (folder / PREVIOUS).write_bytes(b"")
    rounds.clear()
    assert run([*WORDS, EVERY]) == 0
    assert rounds == [1, 2, 3, 4, 5, 6, 7, 8]
    printed = capsys.readouterr().err
    for name in ("checkpoint.damaged.safetensors", "checkpoint.previous.damaged.safetensors"):
        assert (folder / name).exists()
        assert f"set aside as {name}\n" in printed


def cut_trace(trace: bytes) -> bytes:
    return trace[: len(trace) // 2]


def renumber_trace(trace: bytes) -> bytes:
    return trace.replace(b'"round": 2', b'"round": 7')


def break_trace(trace: bytes) -> bytes:
    return trace.replace(b'{"round": 2', b'["round": 2')


@pytest.mark.parametrize("harm", [cut_trace, renumber_trace, break_trace, None])
def test_a_run_whose_trace_was_damaged_starts_anew(
    harm: Callable[[bytes], bytes] | None,
    killed: Any,
    rounds: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`None` deletes the trace."""
    words = ["selector=linucb", "checkpoint.every=2"]
    assert run([*WORDS, *words, "output_dir=whole"]) == 0
    killed(*words, before=4)
    trace = folder_in("outputs") / TRACE
    if harm is None:
        trace.unlink()
    else:
        trace.write_bytes(harm(trace.read_bytes()))
    rounds.clear()
    assert run([*WORDS, *words]) == 0
    assert rounds[0] == 1
    assert "trace.jsonl" in capsys.readouterr().err
    assert trace.read_bytes() == (folder_in("whole") / TRACE).read_bytes()


def test_a_run_resumes_from_the_checkpoint_whose_trace_is_there(
    killed: Any, rounds: list[int]
) -> None:
    words = ["selector=linucb", EVERY]
    assert run([*WORDS, *words, "output_dir=whole"]) == 0
    killed(*words)
    trace = folder_in("outputs") / TRACE
    trace.write_bytes(b"".join(trace.read_bytes().splitlines(keepends=True)[:3]))
    rounds.clear()
    assert run([*WORDS, *words]) == 0
    assert rounds == [3, 4, 5, 6, 7, 8]
    assert trace.read_bytes() == (folder_in("whole") / TRACE).read_bytes()


def test_a_file_of_records_is_never_extended(tmp_path: Path) -> None:
    (tmp_path / TRACE).write_bytes(b"short")
    RunFolder(tmp_path).reopen({TRACE: 99})
    assert (tmp_path / TRACE).read_bytes() == b"short"


# --- finished runs that are damaged ---


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs of a run of 8 rounds."""
    place = tmp_path_factory.mktemp("finished") / "outputs"
    assert run([*WORDS, f"output_dir={place}"]) == 0
    return place


Lines = list[bytes]
NOISE = b"nonsense\n"
RECORDS_LOST: list[tuple[Callable[[Lines], Lines], str]] = [
    (lambda rows: [], "metrics.jsonl holds 0 of 8 rounds"),
    (lambda rows: rows[:-1], "metrics.jsonl holds 7 of 8 rounds"),
    (lambda rows: [*rows, NOISE], "metrics.jsonl, line 9 is not a record"),
    (lambda rows: [NOISE, *rows[1:]], "metrics.jsonl, line 1 is not a record"),
    (lambda rows: [b"{" + bytes(9) + b"}\n", *rows[1:]], "metrics.jsonl, line 1 is not a record"),
    (lambda rows: [*rows[:-1], rows[-1][:-9]], "metrics.jsonl, line 8 is not a record"),
    (lambda rows: [rows[0], rows[2], rows[1], *rows[3:]], "has round 3 where round 2 belongs"),
    (lambda rows: [rows[0], *rows], "has round 1 where round 2 belongs"),
    (lambda rows: [*rows, rows[-1]], "has round 8 where round 9 belongs"),
    (
        lambda rows: [rows[0].replace(b'"bytes_up": ', b'"bytes_up": 1'), *rows[1:]],
        "summary.json has totals.bytes_up=",
    ),
]


def error_on_file(finished: Path, harm: Callable[[Path], object]) -> str:
    """Return the error that is found in a copy of a finished run after `harm` to its folder."""
    shutil.copytree(finished, "outputs")
    with search_path():
        plan = plan_of(*WORDS)
    assert outcome_on_file(plan).status == "done"
    harm(plan.folder)
    outcome = outcome_on_file(plan)
    assert outcome.status == "failed"
    return str(outcome.summary["error"])


@pytest.mark.parametrize(("lose", "error"), RECORDS_LOST)
def test_records_that_a_finished_run_has_not_left_are_noticed(
    lose: Callable[[Lines], Lines], error: str, finished: Path
) -> None:
    def harm(folder: Path) -> None:
        rows = (folder / METRICS).read_bytes().splitlines(keepends=True)
        (folder / METRICS).write_bytes(b"".join(lose(rows)))

    assert error in error_on_file(finished, harm)


@pytest.mark.parametrize("num_bytes_left", [0, -9])
def test_a_model_that_is_cut_short_is_noticed(num_bytes_left: int, finished: Path) -> None:
    def harm(folder: Path) -> None:
        content = (folder / MODEL).read_bytes()
        (folder / MODEL).write_bytes(content[:num_bytes_left])

    expected = "model.safetensors is missing or cut short"
    assert error_on_file(finished, harm) == expected


@pytest.mark.parametrize(
    ("name", "error"),
    [
        (MODEL, "model.safetensors is missing or cut short"),
        (METRICS, "metrics.jsonl holds 0 of 8 rounds"),
        (CONFIG, "config.yaml is missing"),
    ],
)
def test_a_missing_file_is_noticed(name: str, error: str, finished: Path) -> None:
    assert error_on_file(finished, lambda folder: (folder / name).unlink()) == error


def test_a_damaged_config_is_noticed(finished: Path) -> None:
    error = error_on_file(finished, lambda folder: (folder / CONFIG).write_text("nonsense"))
    assert "config.yaml" in error


def test_a_resumed_run_writes_files_again_that_were_lost(killed: Any, finished: Path) -> None:
    killed(EVERY)
    folder = folder_in("outputs")
    for name in (CONFIG, PARTITION):
        (folder / name).unlink()
    assert run([*WORDS, EVERY]) == 0
    whole = next(finished.glob("*/*/config.yaml")).parent
    assert (folder / PARTITION).read_bytes() == (whole / PARTITION).read_bytes()
    assert "num_rounds: 8" in (folder / CONFIG).read_text()


def test_a_summary_that_does_not_agree_with_its_rounds_is_noticed(finished: Path) -> None:
    def harm(folder: Path) -> None:
        summary = json.loads((folder / SUMMARY).read_text())
        summary["best_accuracy"] = 49.65
        (folder / SUMMARY).write_text(json.dumps(summary))

    error = error_on_file(finished, harm)
    assert error.startswith("summary.json has best_accuracy=49.65, and its rounds 0.")


def test_a_finished_run_that_is_damaged_is_run_again(
    finished: Path, rounds: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, "outputs")
    folder = folder_in("outputs")
    whole = result(folder)
    (folder / MODEL).unlink()
    assert run(list(WORDS)) == 0
    assert rounds == [1, 2, 3, 4, 5, 6, 7, 8]
    assert "missing or cut short; it is run again" in capsys.readouterr().err
    assert result(folder) == whole
    rounds.clear()
    assert run(list(WORDS)) == 0
    assert not rounds


# --- checkpoints of another run ---


def test_a_checkpoint_of_another_config_is_rejected_by_its_keys(killed: Any) -> None:
    killed(EVERY)
    killed(EVERY, "output_dir=other", "optimizer.lr=0.5")
    (folder_in("outputs") / NEWEST).write_bytes((folder_in("other") / NEWEST).read_bytes())
    with pytest.raises(ConfigError) as caught:
        run([*WORDS, EVERY])
    assert [p.key for p in caught.value.problems] == ["optimizer.lr"]


def test_a_checkpoint_of_another_version_is_rejected(
    killed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(EVERY)
    monkeypatch.setattr("fedsim.__version__", "9.9")
    with pytest.raises(ConfigError) as caught:
        run([*WORDS, EVERY])
    assert [p.key for p in caught.value.problems] == ["fedsim"]


ROWS = (
    "dataset=parquet",
    "dataset.path=rows.parquet",
    "dataset.test_fraction=0.2",
    "partition=iid",
    EVERY,
)


def test_a_run_does_not_go_on_with_other_data(killed: Any, rounds: list[int]) -> None:
    for folder, count in (("one", 200), ("other", 240), ("moved", 200)):
        Path(folder).mkdir()
        pq.write_table(table(count, grey=True, seed=count), f"{folder}/rows.parquet")
    killed(*ROWS, "data_dir=one")
    before = {path.name: path.read_bytes() for path in folder_in("outputs").iterdir()}
    with pytest.raises(
        ConfigError, match=r"dataset='parquet \w+': is 'parquet \w+' in .*\n.*data_dir"
    ) as caught:
        run([*WORDS, *ROWS, "data_dir=other"])
    assert [p.key for p in caught.value.problems] == ["dataset", "partition"]
    assert {path.name: path.read_bytes() for path in folder_in("outputs").iterdir()} == before
    rounds.clear()
    assert run([*WORDS, *ROWS, "data_dir=moved"]) == 0  # the same data in another place
    assert rounds == [5, 6, 7, 8]


OWN = """
from fedsim.selectors.oort import Oort


class Mine(Oort):
    def select(self, round, clients, rng):
        return super().select({}, clients, rng)
"""


OF_MINE = ("selector._target_=own_selectors.Mine", EVERY)


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write the user's module with an expression for the round, and what follows the class."""

    def write(round: str, more: str = "") -> None:
        Path("own_selectors.py").write_text(OWN.format(round) + more)
        linecache.checkcache()
        sys.modules.pop("own_selectors", None)
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return write


def test_a_run_goes_on_with_other_code_of_a_users_class_only_if_told_to_and_its_summary_has_both(
    killed: Any, rounds: list[int], write: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """What else is in its file may change: a run that is asked to go on must not fail for that."""
    write("round")
    killed(*OF_MINE, before=4)
    write("round", "\n\nclass Other(Oort):\n    pass\n")
    killed(*OF_MINE)
    write("round + 0")
    told = r"code='own_selectors \w+': is 'own_selectors \w+' in .*\n.*other_code=true"
    with pytest.raises(ConfigError, match=told):
        run([*WORDS, *OF_MINE])
    capsys.readouterr()
    killed(*OF_MINE, "checkpoint.other_code=true", before=8)
    assert "your code has changed since round 4" in capsys.readouterr().err
    rounds.clear()
    assert run([*WORDS, *OF_MINE]) == 0  # it was saved with this code now
    assert rounds == [7, 8]
    earlier = (read_summary(folder_in("outputs")) or {}).get("earlier_code", [])
    assert [(e["until_round"], e["code"].split()[0]) for e in earlier] == [(4, "own_selectors")]


def test_a_selector_whose_state_cannot_be_saved_is_named_before_round_1(
    rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fedsim.selectors.oort.Oort.state_dict", lambda self: {"rng": np.random.default_rng(0)}
    )
    with pytest.raises(
        FedsimError, match=r"selector .*Oort\.rng is of type numpy.random.*; store "
    ):
        run(list(WORDS))
    assert not rounds


LAB = """
import numpy as np
from fedsim.selectors.base import Selection, Selector, parameters


@parameters
class Mine(Selector):
    state = ("memory",)
    step: int

    def __post_init__(self):
        self.memory, self.turn, self.unchanged, self.other = 0, 0, [1], None
        self.rng = np.random.default_rng(0)
        self.of_the_start = 1

    def select(self, round, clients, rng):
        self.memory += 1
        self.turn += self.step
        self.rng.random()
        if self.step:
            self.other = clients
            vars(self).pop("of_the_start", None)
        ids = (np.arange(self.cohort_size(clients)) + self.turn) % len(clients.available)
        return Selection(np.sort(ids))
"""


@pytest.mark.parametrize("step", [0, 1])
def test_an_attribute_that_changes_and_is_not_saved_is_named(
    step: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`rng` changes, too, but is of a type that no checkpoint could hold. `other` becomes so, and
    `of_the_start` is deleted."""
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("my_lab.py").write_text(LAB)
    words = ["selector=round_robin", "selector._target_=my_lab.Mine", f"+selector.step={step}"]
    assert run([*WORDS[:-1], *words]) == 0
    summary = read_summary(folder_in("outputs")) or {}
    names = [f"my_lab.Mine.{name}" for name in ("of_the_start", "other", "turn") if step]
    assert summary.get("unsaved_attributes", []) == names
    note = f"{', '.join(names)}: changed during the run and not in `state`"
    assert capsys.readouterr().err.count(note) == step


SPOILED = """
import numpy as np
from fedsim.selectors.random import Random


class Mine(Random):
    state = ("memory",)

    def __post_init__(self):
        self.memory = []

    def select(self, round, clients, rng):
        if round == 3:
            {}
        return super().select(round, clients, rng)
"""


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        (
            "self.memory = open('my_lab.py')",
            "my_lab.Mine.memory, which `state` names, cannot be copied into a checkpoint "
            "(TypeError: cannot pickle '_io.TextIOWrapper' object); store numbers,",
        ),
        (
            "del self.memory",
            "my_lab.Mine has no attribute `memory`, which `state` names; set it in __post_init__",
        ),
        (
            "self.memory.append(lambda: 1)",
            "selector my_lab.Mine.memory[0] is of type builtins.function, which a checkpoint ",
        ),
        (
            "self.memory = np.array([None])",
            "selector my_lab.Mine.memory is of type numpy.ndarray of dtype object, which a ",
        ),
    ],
)
def test_a_state_that_cannot_be_saved_is_named_with_its_class_and_attribute(
    statement: str, reason: str, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("my_lab.py").write_text(SPOILED.format(statement))
    words = ["selector=random", "selector._target_=my_lab.Mine", "checkpoint.every=1"]
    assert run([*WORDS[:-1], *words]) == 1
    assert rounds == [1, 2, 3]
    assert reason in str((read_summary(folder_in("outputs")) or {})["error"])
