"""Checkpoints that are damaged, of another run or cannot be written: a run never goes on from what
is unsound."""

import importlib
import json
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from fedsim.core.errors import ConfigError, FedsimError
from fedsim.jobs.cli import run
from fedsim.results.files import NEWEST, PREVIOUS, TRACE
from fedsim.results.reading import METRICS, SUMMARY, read_summary
from fedsim.running.checkpoint import Checkpoint, Checkpoints, pack, unpack
from tests.checkpoint_toys import EVERY, WORDS, damage, folder_in, result
from tests.dataset_toys import table

pytestmark = pytest.mark.usefixtures("empty_folder")


def torn(content: bytes) -> bytes:
    """As by a power failure, which takes lines that were not forced to the disk."""
    return b"".join(content.splitlines(keepends=True)[:3])


HARMS: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda folder: damage(folder / NEWEST),
    "lost records": lambda folder: (folder / METRICS).write_bytes(
        torn((folder / METRICS).read_bytes())
    ),
    "a kill between the renames of a save": lambda folder: (folder / NEWEST).rename(
        folder / f"{NEWEST}.tmp"
    ),
}


@pytest.mark.parametrize("harm", HARMS)
def test_of_two_checkpoints_the_sound_one_is_gone_on_from(
    harm: str, killed: Any, rounds: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*WORDS, "output_dir=whole"]) == 0
    killed(EVERY)
    HARMS[harm](folder_in("outputs"))
    rounds.clear()
    assert run([*WORDS, EVERY]) == 0
    assert rounds == [3, 4, 5, 6, 7, 8]
    assert ("set aside as checkpoint.damaged.safetensors" in capsys.readouterr().err) == (
        harm != list(HARMS)[2]
    )
    (folder_in("outputs") / "checkpoint.damaged.safetensors").unlink(missing_ok=True)
    assert result(folder_in("outputs")) == result(folder_in("whole"))


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
    told = capsys.readouterr().err
    for name in ("checkpoint.damaged.safetensors", "checkpoint.previous.damaged.safetensors"):
        assert (folder / name).exists()
        assert f"set aside as {name}\n" in told


FORGED: dict[str, list[Any]] = {
    "initial_accuracy": [1.5, True, None],
    "started": [-1.0, "now"],
    "lengths": [{METRICS: -1}, {METRICS: 1.5}, {METRICS: 10**10}, {TRACE: 1}],
    "overwrite": ["x"],
    "earlier_code": ["abc"],
    "state.round": [-1, 3.0, 10**9],
    "state.started": [1],
    "state.wall_seconds": [float("nan"), None],
    "state.covered": [np.zeros(6), np.zeros(5, dtype=bool), [True] * 6],
    "state.params": [{}, None],
    "state.selector": [[]],
    "state.aggregator": [None, {"more": 1}],
}


def test_each_field_of_a_forged_checkpoint_is_checked(
    killed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a SHA-256 that is right."""
    killed(EVERY)
    path, seen = folder_in("outputs") / NEWEST, list[Any]()
    (path.parent / PREVIOUS).unlink()
    read = Checkpoints._read
    monkeypatch.setattr(
        Checkpoints,
        "_read",
        lambda self, path: seen.append((self, read(self, path))) or seen[-1][1],
    )
    whole = path.read_bytes()
    assert run([*WORDS, EVERY]) == 0
    owner, (sound, _) = seen[0]
    params = {name: value.clone() for name, value in sound.state["params"].items()}
    next(iter(params.values())).view(-1)[0] = float("nan")
    reshaped = {name: value.reshape(-1) for name, value in sound.state["params"].items()}
    for wrong in (params, reshaped):
        assert (
            owner.fault(Checkpoint(**{**vars(sound), "state": {**sound.state, "params": wrong}}))
            == "state.params"
        )
    assert owner.fault(Checkpoint(**{**vars(sound), "initial_accuracy": 1.0})) is None
    oort = sound.state["selector"]
    wrong_states = [{}, {**oort, "more": 1}, {**oort, "duration_sum": "x"}]
    wrong_states += [
        {**oort, name: value[1:]} for name, value in oort.items() if np.shape(value) == (6,)
    ]
    assert len(wrong_states) > 3
    for name, values in (*FORGED.items(), ("state.selector", wrong_states)):
        for value in values:
            content = {**vars(sound), "state": dict(sound.state)}
            (content["state"] if "." in name else content)[name.removeprefix("state.")] = value
            assert owner.fault(Checkpoint(**content)) == name, value
    assert unpack(pack(owner.identity, vars(sound), owner.dataclasses))[0] == unpack(whole)[0]
    content = {**vars(sound), "started": -1.0}
    path.write_bytes(pack(owner.identity, content, owner.dataclasses))
    assert owner.load(overwrite=False) is None
    assert path.with_suffix(".damaged.safetensors").exists()


def test_a_finished_run_whose_files_are_not_whole_is_run_again(
    rounds: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*WORDS]) == 0
    folder = folder_in("outputs")
    whole = result(folder)
    model = folder / "model.safetensors"
    first, *others = (folder / METRICS).read_bytes().splitlines(keepends=True)
    lost = [
        (model, left, "model.safetensors is missing or cut short")
        for left in (None, model.read_bytes()[:-9])
    ]
    zeros, noise = b"{" + bytes(len(first) - 3) + b"}\n", b"nonsense\n"
    is_noise = ", line {} is not a record".format
    texts = [
        ([first, *others[:-1]], " holds 7 of 8 rounds"),
        ([first, *others, noise], is_noise(9)),
    ]
    texts += [([zeros, *others], is_noise(1)), ([noise, *others], is_noise(1))]
    texts += [([first, *others[:-1], others[-1][:-9]], is_noise(8))]
    texts += [([first, others[1], others[0], *others[2:]], " has round 3 where round 2 belongs")]
    texts += [([first, first, *others[1:]], " has round 1 where round 2 belongs")]
    texts += [([first, *others, others[-1]], " has round 8 where round 9 belongs")]
    lost += [(folder / METRICS, b"".join(rows), told) for rows, told in texts]
    for path, left, told in (*lost, (folder / METRICS, None, " holds 0 of 8 rounds")):
        path.unlink() if left is None else path.write_bytes(left)
        rounds.clear()
        assert run([*WORDS]) == 0
        assert rounds == [1, 2, 3, 4, 5, 6, 7, 8]
        printed = capsys.readouterr().err
        assert told in printed
        assert "; it is run again" in printed
        assert result(folder) == whole
    told = json.loads((folder / SUMMARY).read_text())
    (folder / SUMMARY).write_text(json.dumps({**told, "best_accuracy": 49.65}))
    assert run([*WORDS]) == 0
    assert "summary.json has best_accuracy=49.65, and its rounds 0." in capsys.readouterr().err
    records = (folder / METRICS).read_text()
    (folder / METRICS).write_text(records.replace('"bytes_up": ', '"bytes_up": 1', 1))
    assert run([*WORDS]) == 0
    assert "summary.json has totals.bytes_up=" in capsys.readouterr().err
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
    assert "going on with other code of yours than up to round 4" in capsys.readouterr().err
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
    with pytest.raises(FedsimError, match=r"\['selector'\]\['rng'\] is of type numpy.random"):
        run(list(WORDS))
    assert not rounds
