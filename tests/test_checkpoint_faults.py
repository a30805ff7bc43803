"""Checkpoints that are damaged, of another run or cannot be written: a run never goes on from what is unsound."""

import importlib
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from fedsim.core.errors import ConfigError, FedsimError
from fedsim.jobs.cli import run
from fedsim.results.files import METRICS, NEWEST, PREVIOUS, RunFolder, read_metrics, read_summary
from tests.checkpoint_toys import EVERY, WORDS, damage, folder_in, result
from tests.dataset_toys import table

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_of_two_checkpoints_the_sound_one_is_gone_on_from(
    killed: Any, rounds: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*WORDS, "output_dir=whole"]) == 0
    killed(EVERY)
    damage(folder_in("outputs") / NEWEST)
    rounds.clear()
    assert run([*WORDS, EVERY]) == 0
    assert rounds == [3, 4, 5, 6, 7, 8]
    assert "going on from the checkpoint before it" in capsys.readouterr().err
    assert result(folder_in("outputs")) == result(folder_in("whole"))


def test_records_that_a_power_failure_has_taken_are_made_again_from_the_checkpoint_before(
    killed: Any, rounds: list[int]
) -> None:
    killed(EVERY)
    metrics = folder_in("outputs") / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:3]))
    rounds.clear()
    assert run([*WORDS, EVERY]) == 0
    assert rounds == [3, 4, 5, 6, 7, 8]
    assert [r["round"] for r in read_metrics(metrics.parent)] == list(range(1, 9))


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
    assert {path.name for path in folder.glob("*.damaged.*")} == {
        "checkpoint.damaged.safetensors",
        "checkpoint.previous.damaged.safetensors",
    }
    assert "set aside as checkpoint.damaged.safetensors, the run starts anew\n" in capsys.readouterr().err


FORGED: dict[str, Any] = {
    "initial_accuracy": [None, "0.5", 1.5, float("nan")],
    "started": [True, "now", float("inf")],
    "overwrite": [0, None],
    "earlier_code": [{}, [1]],
    "lengths": [{METRICS: -1}, {METRICS: 1.5}, {"../victim": 0}],
    "state.round": [True, -1, 9, 4.0],
    "state.wall_seconds": [None, -1.0, float("nan")],
    "state.started": [1],
    "state.covered": [np.zeros(5, dtype=bool), np.zeros(6), [True] * 6],
    "state.params": [{}, None],
    "state.selector": [[]],
    "state.aggregator": [None],
}


def test_each_field_of_a_forged_checkpoint_is_checked(killed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a SHA-256 that is right."""
    from fedsim.running import experiment
    from fedsim.running.checkpoint import Checkpoint, Checkpoints, pack

    killed(EVERY)
    monkeypatch.setattr(Checkpoints, "_set_aside", lambda self, damaged: told.update(damaged))
    monkeypatch.setattr(experiment, "_run_rounds", lambda *_: ("failed", "far enough", None))
    path, told = folder_in("outputs") / NEWEST, dict[Path, str]()
    files = {one: one.read_bytes() for one in path.parent.iterdir()}
    inner, seen = Checkpoints._read, list[Any]()
    monkeypatch.setattr(Checkpoints, "_read", lambda self, path: seen.append((self, inner(self, path))) or seen[-1][1])
    run([*WORDS, EVERY])
    owner, (sound, records) = seen[0]
    assert owner.fault(sound, records) is None
    for name, values in FORGED.items():
        for value in values:
            content = {**vars(sound), "state": dict(sound.state)}
            (content["state"] if "." in name else content)[name.removeprefix("state.")] = value
            for file, before in files.items():
                file.write_bytes(before)
            path.write_bytes(pack(owner.identity, content, owner.dataclasses))
            (path.parent / PREVIOUS).unlink()
            assert owner.load() is None, (name, value)
            assert told.pop(path), (name, value)
    params = {key: tensor.clone() for key, tensor in sound.state["params"].items()}
    next(iter(params.values())).view(-1)[0] = float("nan")
    forged = Checkpoint(**{**vars(sound), "state": {**sound.state, "params": params}})
    assert owner.fault(forged, records) == "state.params"
    wrong = {"selected": [6], "train_samples": "many", "late": [-1], "test_loss": float("nan"), "round": True}
    for name, value in wrong.items():
        assert owner.fault(sound, [replace(records[0], **{name: value})]) == f"round 1 of {METRICS}"


def test_a_finished_run_whose_files_are_not_whole_is_run_again(
    rounds: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*WORDS]) == 0
    folder = folder_in("outputs")
    model, metrics = folder / "model.safetensors", folder / METRICS
    whole = result(folder)
    damages = {
        "metrics.jsonl has 0 of 8 rounds": metrics.unlink,
        "metrics.jsonl has 7 of 8 rounds": lambda: metrics.write_bytes(metrics.read_bytes()[:-9]),
        "model.safetensors is missing or cut short": model.unlink,
        "model.safetensors is missing or cut short; ": lambda: model.write_bytes(model.read_bytes()[:-9]),
    }
    for told, harm in damages.items():
        harm()
        rounds.clear()
        assert run([*WORDS]) == 0
        assert rounds == [1, 2, 3, 4, 5, 6, 7, 8]
        assert f"{told.removesuffix('; ')}; it is run again" in capsys.readouterr().err
        assert result(folder) == whole
    rounds.clear()
    assert run([*WORDS]) == 0
    assert not rounds


def test_a_checkpoint_of_another_config_or_version_is_refused_by_its_keys(
    killed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(EVERY)
    killed(EVERY, "output_dir=other", "optimizer.lr=0.5")
    (folder_in("outputs") / NEWEST).write_bytes((folder_in("other") / NEWEST).read_bytes())
    with pytest.raises(ConfigError) as caught:
        run([*WORDS, EVERY])
    assert [p.key for p in caught.value.problems] == ["optimizer.lr"]
    monkeypatch.setattr("fedsim.__version__", "9.9")
    with pytest.raises(ConfigError) as caught:
        run([*WORDS, EVERY, "output_dir=other", "optimizer.lr=0.5"])
    assert [p.key for p in caught.value.problems] == ["fedsim"]


def write_rows(folder: str, count: int) -> None:
    Path(folder).mkdir()
    pq.write_table(table(count, grey=True, seed=count)[0], f"{folder}/rows.parquet")


ROWS = ("dataset=parquet", "dataset.path=rows.parquet", "dataset.test_fraction=0.2", "partition=iid", EVERY)


def test_a_run_does_not_go_on_with_other_data(killed: Any, rounds: list[int]) -> None:
    write_rows("one", 200), write_rows("other", 240), write_rows("moved", 200)
    killed(*ROWS, "data_dir=one")
    folder = folder_in("outputs")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError, match=r"dataset='parquet \w+': is 'parquet \w+' in .*\n.*data_dir") as caught:
        run([*WORDS, *ROWS, "data_dir=other"])
    assert [p.key for p in caught.value.problems] == ["dataset", "partition"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
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


def test_a_run_does_not_go_on_with_other_code_of_a_users_class(
    killed: Any, rounds: list[int], write: Callable[..., None]
) -> None:
    """What else is in its file may change: a run that is asked to go on must not fail for that."""
    write("round")
    killed(*OF_MINE)
    write("round + 0")
    with pytest.raises(
        ConfigError, match=r"code='own_selectors\.Mine \w+': is 'own_selectors\.Mine \w+' in .*\n.*other_code=true"
    ):
        run([*WORDS, *OF_MINE])
    write("round", "\n\nclass Other(Oort):\n    pass\n")
    rounds.clear()
    assert run([*WORDS, *OF_MINE]) == 0
    assert rounds == [5, 6, 7, 8]
    assert "earlier_code" not in (read_summary(folder_in("outputs")) or {})


def test_a_run_goes_on_with_other_code_if_told_to_and_its_summary_has_both(
    killed: Any, rounds: list[int], write: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    write("round")
    killed(*OF_MINE)
    capsys.readouterr()
    rounds.clear()
    write("round + 0")
    other = "checkpoint.other_code=true"
    killed(*OF_MINE, other, before=8)
    assert "going on with other code of yours than up to round 4" in capsys.readouterr().err
    assert run([*WORDS, *OF_MINE]) == 0  # it was saved with this code now
    assert rounds == [7, 8]
    earlier = (read_summary(folder_in("outputs")) or {})["earlier_code"]
    assert [(e["until_round"], e["code"].split()[0]) for e in earlier] == [(4, "own_selectors.Mine")]
    assert "other code" not in capsys.readouterr().err


def test_a_kill_between_the_two_renames_of_a_save_costs_one_checkpoint(
    killed: Any, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(EVERY)
    folder = folder_in("outputs")
    (folder / NEWEST).rename(folder / f"{NEWEST}.tmp")
    rounds.clear()
    assert run([*WORDS, EVERY]) == 0
    assert rounds[0] == 3
    assert not list(folder.glob("*.tmp"))


def test_a_selector_whose_state_cannot_be_saved_is_named_before_round_1(
    rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.selectors.oort.Oort.state_dict", lambda self: {"rng": np.random.default_rng(0)})
    with pytest.raises(FedsimError, match=r"\['selector'\]\['rng'\] is of type numpy.random"):
        run(list(WORDS))
    assert not rounds


STATE = """
import my_state
from fedsim.selectors.random import Random

class Remembers(Random):
    state = ("memory",)

    def __init__(self, population, *, mode):
        super().__init__(population, mode=mode)
        self.memory = my_state.Memory(0)

    def select(self, round, clients, rng):
        self.memory.rounds += 1
        return super().select(round, clients, rng)
"""


def test_a_dataclass_in_a_state_that_could_not_be_read_again_is_told_before_round_1(
    rounds: list[int], killed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(".")
    Path("my_state.py").write_text("from dataclasses import dataclass\n@dataclass\nclass Memory:\n    rounds: int\n")
    Path("my_lab.py").write_text(STATE)
    words = ["selector=random", "selector._target_=my_lab.Remembers", EVERY]
    with pytest.raises(FedsimError, match=r"\['memory'\] is of .*`from my_state import Memory`"):
        run([*WORDS, *words])
    assert not rounds
    assert not list(Path("outputs").glob("*/*/config.yaml"))
    sys.modules.pop("my_lab")
    Path("my_lab.py").write_text(f"from my_state import Memory\n{STATE}")
    killed(*words)
    rounds.clear()
    assert run([*WORDS, *words]) == 0
    assert rounds == [5, 6, 7, 8]
    sys.modules.pop("my_state")


# --- the disk is full ----------------------------------------------------------------------------------------------


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Files cannot grow beyond `size` bytes, as on a disk that is full: a write may do a part of its work.

    That is all files of this process: the limit is gone before pytest writes its next dot, perhaps to a file.
    """
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_that_does_not_fit_leaves_nothing_of_itself(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, {})
    folder.append({"round": 1})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with full_disk(len(before) + 5), pytest.raises(FedsimError, match=r"output_dir: cannot write .*metrics\.jsonl"):
        folder.append({"round": 2})
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_run_on_a_disk_that_fills_up_keeps_its_last_checkpoint_and_goes_on(
    rounds: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([*WORDS, "output_dir=whole", EVERY]) == 0
    write = RunFolder.write_bytes
    with ExitStack() as stack:

        def filling(self: RunFolder, name: str, content: bytes, keep_as: str | None = None) -> None:
            if name == NEWEST and len(rounds) >= 8 + 4:
                stack.enter_context(full_disk(len(content) // 2))
            write(self, name, content, keep_as)

        with monkeypatch.context() as patch:
            patch.setattr(RunFolder, "write_bytes", filling)
            assert run([*WORDS, EVERY]) == 1
    folder = folder_in("outputs")
    summary = read_summary(folder) or {}
    assert (summary["status"], summary["rounds"]) == ("failed", 4)
    assert NEWEST in summary["error"]
    assert not list(folder.glob("*.tmp"))
    rounds.clear()
    assert run([*WORDS, EVERY]) == 0
    assert rounds == [3, 4, 5, 6, 7, 8]
    assert result(folder) == result(folder_in("whole"))
