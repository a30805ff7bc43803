"""The processes of torchrun: what they send each other, what does not go together with them, and what goes wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.commands.dispatch import asks
from fedsim.config.compose import check_jobs
from fedsim.core.errors import ConfigError, FedsimError
from fedsim.distributed.backend import Holdings
from fedsim.distributed.links import LostRankError, Message, Others, packed, room_for, unpacked
from fedsim.engine.schedule import Schedule
from fedsim.jobs.cli import composed, run
from fedsim.results.files import read_summary
from fedsim.running.process import World, world
from fedsim.running.ranks import RANKS
from fedsim.running.ranks import check_jobs as check_for_ranks
from tests.ranks import RAGGED, WORDS, LocalLink, equal_over, ranks, run_over


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    return tmp_path


# --- messages and ranks ----------------------------------------------------------------------------------------------


def test_a_message_arrives_as_it_was_sent() -> None:
    models = [{"w": torch.arange(6.0).reshape(2, 3).T, "n": torch.tensor(True)}, {"w": torch.zeros(3, 2).double()}]
    part = Schedule(np.arange(6).reshape(1, 2, 3), np.array([[3, 0]]), None, 0.1)
    sent = Message("train", {"models": models, "part": part, "empty": np.zeros((2, 0, 0), np.int64), "name": "x"})
    head, flat = packed(sent)
    room = room_for(head, torch.device("cpu"))
    assert [(one.shape, one.dtype) for one in room] == [(one.shape, one.dtype) for one in flat]
    found = unpacked(head, flat, torch.device("cpu"))
    assert (found.kind, found.content["name"], found.content["part"].lr) == ("train", "x", 0.1)
    assert np.array_equal(found.content["part"].positions, part.positions)
    assert found.content["empty"].shape == (2, 0, 0)
    for arrived, model in zip(found.content["models"], models, strict=True):
        assert arrived.keys() == model.keys()
        for name, value in model.items():
            assert torch.equal(arrived[name], value)
            assert (arrived[name].dtype, arrived[name].stride()) == (value.dtype, value.stride())


def test_the_world_is_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert world() == World()
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(name, value)
    assert world() == World()
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert world() == World(3, 8, 1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert world() == World()


def test_commands_that_ask_are_told_apart_from_experiments() -> None:
    assert all(asks(words) for words in (["list"], ["report", "x"], ["--help"], ["help"], ["seed=1", "--version"]))
    assert not any(asks(words) for words in ([], ["seed=1"], ["-m", "seed=0,1"]))


def test_what_does_not_go_together_with_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="hydra/launcher: Lanes places jobs side by side"):
        run_over(2, [*WORDS, "-m", "seed=0,1", "hydra/launcher=lanes"])
    assert not Path("outputs").exists()
    (plan,) = check_jobs(composed([*WORDS, "num_rounds=1"])[0])
    object.__setattr__(plan.settings, "device", "cuda:1")
    with pytest.raises(ConfigError, match="device='cuda:1': is one GPU for all processes"):
        check_for_ranks([plan], {})
    object.__setattr__(plan.settings, "device", "cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="device='cuda': needs a GPU for each of 3 processes; torch sees 2"):
        check_for_ranks([plan], {})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_for_ranks([plan], {})


@pytest.mark.slow
def test_a_sweep_runs_its_jobs_one_after_another_over_all_ranks() -> None:
    kinds = equal_over(2, ["-m", *WORDS, *RAGGED, "engine=native", "num_rounds=2", "seed=0,1"])
    assert kinds.count("build") == 2
    assert len(list(Path("over2").glob("*/*/summary.json"))) == 2


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_ranks_that_have_other_jobs_or_build_something_else_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*WORDS, "engine=native"]
    RANKS.others = Others(LocalLink(2, lambda: check_jobs(composed([*words, "seed=1"])[0])))
    try:
        with pytest.raises(FedsimError, match=r"rank 1 has another list of jobs: .*; all ranks need"):
            run(words)
        RANKS.others = Others(LocalLink(2, lambda: check_jobs(composed(words)[0])))
        theirs = iter([{"engine": "batched"}])
        monkeypatch.setattr("fedsim.running.ranks.built", lambda made: next(theirs, {"engine": "native"}))
        with pytest.raises(FedsimError, match="rank 1 has another engine: 'batched', not 'native'"):
            run(words)
    finally:
        RANKS.others = None


@pytest.mark.parametrize("raising", [0, 1])
def test_what_a_rank_raises_ends_the_job_alone_and_is_kept(raising: int, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["-m", *WORDS, "engine=native", "num_rounds=2", "seed=0,1"]
    errors: list[BaseException] = [SystemExit("enough"), ZeroDivisionError("in a rank")][raising : raising + 1]
    compute = Holdings.compute

    def failing(self: Holdings, kind: str, content: Any) -> Any:
        if errors and kind == "train" and (self is link.workers[1]._held) == bool(raising):
            raise errors.pop()
        return compute(self, kind, content)

    monkeypatch.setattr(Holdings, "compute", failing)
    with ranks(2, words) as link:
        assert run(words) == 1
        assert RANKS.others is not None
        assert RANKS.others.in_step
    summaries = {s["seed"]: s for s in (read_summary(p.parent) or {} for p in Path("outputs").glob("*/*/summary.json"))}
    assert [summaries[seed]["status"] for seed in (0, 1)] == ["failed", "done"]
    assert ("rank 1 has raised" if raising else "SystemExit: enough") in summaries[0]["error"]
    (error,) = Path("outputs").glob("*/*/error.txt")
    assert ("ZeroDivisionError: in a rank" if raising else "SystemExit: enough") in error.read_text()


class Dying(LocalLink):
    """Rank 2 dies after so many messages to it."""

    left = 0

    def receive(self, rank: int) -> Message:
        self.left -= rank == 2
        if self.left < 0 and rank == 2:
            raise LostRankError(2, 3, "connection closed")
        return super().receive(rank)


def test_a_rank_that_dies_ends_the_command_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", *WORDS, *RAGGED, "engine=native", "checkpoint.every=1", "seed=0,1"]
    link = Dying(3, lambda: check_jobs(composed(words)[0]))
    link.left = 6
    RANKS.others = Others(link)
    try:
        assert run(words) == 1
        assert RANKS.others.lost is not None
        assert RANKS.end(75) == 1  # whatever torchrun, which has noticed, too, has asked this rank to do
    finally:
        RANKS.others = None
    (summary,) = (read_summary(p.parent) or {} for p in Path("outputs").glob("*/*/summary.json"))
    assert summary["error"].startswith("rank 2 of 3 has ended or cannot be reached any more (connection closed); ")
    assert "goes on from the last checkpoint" in summary["error"]
    assert "rank 2 of 3 has ended" in capsys.readouterr().err  # the second job is refused
    assert run(words) == 0
