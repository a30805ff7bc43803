"""One run divided among ranks within one process: to the last bit the run of one process; and what
goes wrong."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.commands.dispatch import asks
from fedsim.config.command_line import read_command_line
from fedsim.config.compose import check_jobs
from fedsim.config.plan import Plan
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError, FedsimError
from fedsim.core.types import Correction, Params
from fedsim.distributed import backend as divided
from fedsim.distributed.backend import Holdings, split_evenly, train_part
from fedsim.distributed.links import LostRankError, Message, empty_tensors_for, packed, unpacked
from fedsim.engine import data as engine_data
from fedsim.engine.engine import Engine
from fedsim.engine.schedule import Schedule
from fedsim.engine.torch_backend import EVALUATION_BATCH
from fedsim.jobs.cli import run
from fedsim.jobs.prepare import compose_words
from fedsim.results.reading import read_summary
from fedsim.rounds.loop import Simulation
from fedsim.running.assembly import build
from fedsim.running.process import World, world
from fedsim.running.ranks import RANKS
from fedsim.running.ranks import check_jobs as check_for_ranks
from tests.engines import schedule_of
from tests.ranks import RAGGED, WORDS, LocalLink, equal_over, ranks, result, run_over

EVEN = ("partition=iid", "local.steps=3")
"""Clients that all have the same batches: in torch, other clients beside them change no bit."""
WRITERS = (
    "dataset=femnist_generated",
    "dataset.num_writers=20",
    "partition=natural",
    "num_rounds=2",
    "local.steps=2",
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    return tmp_path


# --- equal to one process --------------------------------------------------------------------------------------------

CASES = {
    "losses": (*RAGGED, "engine=native", "selector=power_of_choice", "client_accuracy=labels"),
    "narrow_batches": (
        *RAGGED,
        "engine=native",
        "num_clients=60",
        "cohort_size=4",
        "local.batch_size=64",
    ),
    "gradients": (*RAGGED, "engine=native", "selector=divfl"),
    "momentum": (*RAGGED, "engine=sequential", "optimizer.momentum=0.9", "selector=gpfl"),
    "stacked": (*EVEN, "engine=batched", "model.dropout=0.3", "selector=grad_norm"),
    "a_model_each": (*EVEN, "engine=batched", "init_seed=per_client", "cohort_size=3"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_over_ranks_is_that_of_one_process(name: str) -> None:
    kinds = equal_over(3 if name != "gradients" else 2, WORDS, CASES[name])
    assert kinds.count("train") >= 3
    assert ("forward" in kinds) == (name in ("losses", "narrow_batches", "gradients"))
    assert ("gradients" in kinds) == (name in ("gradients", "stacked"))


@pytest.mark.parametrize("room", ["all_samples", "three_clients"])
@pytest.mark.parametrize("selector", ["random", "top_loss"])
@pytest.mark.parametrize("engine", ["sequential", "batched", "native"])
def test_samples_made_on_demand_are_divided_as_one_process_passes_them(
    engine: str, selector: str, room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`top_loss` asks all clients for their losses: most of all samples, which pass in their
    order."""
    if room == "three_clients":
        monkeypatch.setattr(engine_data, "BUFFER_BYTES", 0)
    words = (
        "dataset=synthetic",
        "dataset.num_owners=12",
        "dataset.samples_per_owner=200",
        "dataset.test_samples=1001",
    )
    kinds = equal_over(
        2, [*WORDS, *words, "cohort_size=2"], (*EVEN, f"engine={engine}", f"selector={selector}")
    )
    assert "train" in kinds
    assert (
        "forward" in kinds or room == "three_clients"
    )  # which is less than a pass, as torch's are


ENGINES = {
    "native_momentum": (*RAGGED, "engine=native", "optimizer.momentum=0.9"),
    "native_cnn": (*WRITERS, "engine=native", "model=cnn"),
    "sequential_adam": (*RAGGED, "engine=sequential", "optimizer=adam"),
    "batched_adam": (*EVEN, "engine=batched", "optimizer=adam"),
    "graph": (*EVEN, "engine=graph"),
}


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 7])
@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_over_ranks_is_that_of_one_process(name: str, count: int) -> None:
    assert "train" in equal_over(count, WORDS, ENGINES[name])


SELECTORS = sorted(path.stem for path in (conf_dir() / "selector").glob("*.yaml"))
NEEDS = {
    **dict.fromkeys(
        ("fedcs", "fedcs_sequential", "tifl", "tifl_uniform", "oort_by_speed"), "system=lognormal"
    ),
    **dict.fromkeys(
        ("greedy_shapley", "ucb_shapley", "s_fedavg"), "server.validation_fraction=0.1"
    ),
    **dict.fromkeys(("fedabc", "lefl"), "server.public_samples=40"),
    **{"gpfl": "optimizer.momentum=0.9", "pncs_two": "selector.layers=[layers.4,layers.7]"},
}


@pytest.mark.slow
@pytest.mark.parametrize("selector", SELECTORS)
def test_every_selector_over_ranks_is_that_of_one_process(selector: str) -> None:
    more = (*RAGGED, "engine=native", f"selector={selector}", NEEDS.get(selector, "seed=0"))
    calls = equal_over(2, WORDS, more)
    assert "train" in calls or selector == "gpfl_official"  # which begins with one client a round


def made(words: Sequence[str], clients: int) -> tuple[Plan, Engine, Params, Schedule]:
    """The engine of a run in one process, and the work of its first clients in round 1."""
    (plan,) = check_jobs(compose_words(read_command_line(list(words))))
    simulation = build(plan).simulation
    engine = simulation.components.engine
    return plan, engine, simulation.params, schedule_of(engine, np.arange(clients), 1)


def test_ragged_clients_stacked_in_torch_are_equal_up_to_rounding() -> None:
    """torch multiplies matrices of other sizes, or at other places in memory, in another order of
    additions."""
    _, engine, params, schedule = made([*WORDS, *RAGGED, "engine=batched"], 12)
    alone = engine.backend.train([params] * 12, schedule)
    for cut in (*split_evenly(schedule.samples, 3).values(), slice(0, 1)):
        part = schedule.rows(cut)
        found = train_part(engine.backend, [params] * len(part), part)
        for name, whole in alone.delta.items():
            bound = 1e-6 * float(whole.abs().max())
            torch.testing.assert_close(found.delta[name], whole[cut], rtol=0, atol=bound)


def test_a_run_that_stopped_goes_on_over_another_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [
        *WORDS,
        *RAGGED,
        "engine=native",
        "selector=oort",
        "checkpoint.every=1",
        "num_rounds=6",
    ]
    assert run([*words, "output_dir=alone"]) == 0
    step, last = Simulation.step, [0]

    def stop(self: Simulation) -> Any:
        if self.round == last[-1]:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Simulation, "step", stop)
    for count, after in ((2, 2), (3, 4)):
        last.append(after)
        with pytest.raises(KeyboardInterrupt):
            run_over(count, words)
    last.append(6)
    assert run(words) == 0
    assert result(Path("alone")) == result(Path("outputs"))


def test_corrections_travel_and_losses_and_momentum_come_back_with_the_updates() -> None:
    """One shift for all clients lies in memory once, which C and messages have to undo."""
    words = [*WORDS, *RAGGED, "engine=native", "optimizer.momentum=0.9"]
    plan, alone, params, schedule = made(words, 12)
    shift = {name: value.mul(0.1).expand(12, *value.shape) for name, value in params.items()}
    plain, schedule = schedule, replace(schedule, correction=Correction(0.1, shift))
    expected = alone.backend.train([params] * 12, schedule)
    assert not np.array_equal(expected.losses, alone.backend.train([params] * 12, plain).losses)
    with ranks(3, words):
        RANKS.agree([plan], {})
        engine = RANKS.build(plan, build).simulation.components.engine
        found = engine.backend.train([params] * 12, schedule)
    assert np.array_equal(found.losses, expected.losses)
    assert expected.momentum is not None
    for mine, theirs in ((found.delta, expected.delta), (found.momentum or {}, expected.momentum)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_single_client_of_a_stack_is_trained_twice_beside_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's convolutions of one client add in another order than those of several."""
    words = (
        "dataset=femnist_generated",
        "model=cnn",
        "engine=batched",
        "num_clients=3",
        "cohort_size=3",
        *EVEN,
    )
    _, engine, params, schedule = made([*words, "local.batch_size=8"], 3)
    whole = engine.backend.train([params] * 3, schedule).delta
    last = slice(2, 3)

    def equal() -> bool:
        found = train_part(engine.backend, [params], schedule.rows(last)).delta
        return all(torch.equal(found[name], whole[name][last]) for name in whole)

    assert equal()
    monkeypatch.setattr("fedsim.engine.batched.BatchedBackend.fewest_clients", 1)
    assert not equal()


def test_the_test_set_is_cut_where_passes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*WORDS, *WRITERS, "engine=batched", "model=mlp"]
    plan, alone, params, _ = made(words, 1)
    with ranks(3, words) as link:
        RANKS.agree([plan], {})
        components = RANKS.build(plan, build).simulation.components
        engine, x = components.engine, components.server_data.test.x
        assert EVALUATION_BATCH < len(x) < 2 * EVALUATION_BATCH
        whole = alone.backend.forward(params, x)
        assert torch.equal(engine.backend.forward(params, x), whole)
        assert link.kinds[-1] == "forward"
        cut: list[tuple[int, ...]] = []  # other cuts may or may not give other bits, by the machine
        monkeypatch.setattr(
            divided,
            "split_evenly",
            lambda work, *of: cut.append((len(work), *of)) or split_evenly(work, *of),
        )
        engine.backend.forward(params, x)
        assert cut == [(2, 3, EVALUATION_BATCH)]


CUTS = (
    ([1] * 10, 2, [5, 10]),
    ([1] * 5, 2, [2, 5]),
    ([6, 1, 1, 1, 1, 1, 1], 2, [1, 7]),
    ([1, 1, 8], 2, [2, 3]),
    ([1, 1], 4, [0, 1, 1, 2]),
    ([0, 0], 2, [0, 2]),
)


def test_shares_are_consecutive_and_even_and_those_of_samples_end_at_multiples_of_a_pass() -> None:
    for work, count, ends in CUTS:
        pairs = enumerate(zip([0, *ends[:-1]], ends, strict=True))
        assert split_evenly(work, count) == {
            rank: slice(*pair) for rank, pair in pairs if pair[1] > pair[0]
        }
    assert split_evenly([1, 1, 1], 2, 1000) == {0: slice(0, 1000), 1: slice(1000, 3000)}


# --- messages, and what goes wrong -----------------------------------------------------------------------------------


def test_a_message_arrives_as_it_was_sent() -> None:
    models = [
        {"w": torch.arange(6.0).reshape(2, 3).T, "n": torch.tensor(True)},
        {"w": torch.zeros(3, 2).double()},
    ]
    part = Schedule(np.arange(6).reshape(1, 2, 3), np.array([[3, 0]]), None, 0.1)
    sent = Message(
        "train",
        {"models": models, "part": part, "empty": np.zeros((2, 0, 0), np.int64), "name": "x"},
    )
    head, flat = packed(sent)
    room = empty_tensors_for(head, torch.device("cpu"))
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
    steps = [
        {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a"},
        {"MASTER_PORT": "29500"},
    ]
    for values, expected in zip(
        [*steps, {"WORLD_SIZE": "1"}], [World(), World(3, 8, 1), World()], strict=True
    ):
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        assert world() == expected


def test_commands_that_ask_are_told_apart_from_experiments() -> None:
    assert all(
        asks(words)
        for words in (["list"], ["report", "x"], ["--help"], ["help"], ["seed=1", "--version"])
    )
    assert not any(asks(words) for words in ([], ["seed=1"], ["-m", "seed=0,1"]))


def test_what_does_not_go_together_with_ranks_is_refused() -> None:
    words = [*WORDS, "-m", "seed=0,1", "hydra/launcher=lanes"]
    with ranks(2, words) as link:
        with pytest.raises(ConfigError, match="hydra/launcher: Lanes runs jobs at the same time"):
            run(words)
        assert RANKS.end(2) == 2
    assert link.kinds == ["end"]  # those that wait for a first question are let go, too
    assert not Path("outputs").exists()
    (plan,) = check_jobs(compose_words(read_command_line([*WORDS, "num_rounds=1"])))
    object.__setattr__(plan.settings, "device", "cuda:1")
    with pytest.raises(ConfigError, match="device='cuda:1': is one GPU for all processes"):
        check_for_ranks([plan], {})


def test_a_sweep_runs_its_jobs_one_after_another_over_all_ranks_and_says_so() -> None:
    kinds = equal_over(2, ["-m", *WORDS, *RAGGED, "engine=native", "num_rounds=1", "seed=0,1"])
    assert kinds.count("build") == 2
    paths = sorted(Path("over2").glob("*/*/summary.json"))
    for path in paths:
        summary = read_summary(path.parent) or {}
        assert summary["environment"]["processes"] == {"count": 2, "backend": "gloo"}
        assert summary["engine"] == "native, over 2 processes"
    assert len(paths) == 2


def test_ranks_that_have_other_jobs_or_build_something_else_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [*WORDS, "engine=native"]
    told = r"rank 1 has another list of jobs: .*; all ranks need"
    with ranks(2, [*words, "seed=1"]), pytest.raises(FedsimError, match=told):
        run(words)
    theirs = iter([{"engine": "batched"}])
    monkeypatch.setattr(
        "fedsim.running.ranks.experiment_facts", lambda made: next(theirs, {"engine": "native"})
    )
    with (
        ranks(2, words),
        pytest.raises(FedsimError, match="rank 1 has another engine: 'batched', not 'native'"),
    ):
        run(words)


@pytest.mark.parametrize("raising", [0, 1])
def test_what_a_rank_raises_ends_the_job_alone_and_is_kept(
    raising: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["-m", *WORDS, "engine=native", "num_rounds=2", "seed=0,1"]
    errors: list[BaseException] = [SystemExit("enough"), ZeroDivisionError("in a rank")][
        raising : raising + 1
    ]
    compute = Holdings.compute

    def failing(self: Holdings, kind: str, content: Any) -> Any:
        if errors and kind == "train" and (self is link.workers[1]._holdings) == bool(raising):
            raise errors.pop()
        return compute(self, kind, content)

    monkeypatch.setattr(Holdings, "compute", failing)
    with ranks(2, words) as link:
        assert run(words) == 1
        assert RANKS.others is not None
        assert RANKS.others.in_step
    summaries = {
        s["seed"]: s
        for s in (read_summary(p.parent) or {} for p in Path("outputs").glob("*/*/summary.json"))
    }
    assert [summaries[seed]["status"] for seed in (0, 1)] == ["failed", "done"]
    assert ("rank 1 has raised" if raising else "SystemExit: enough") in summaries[0]["error"]
    (error,) = Path("outputs").glob("*/*/error.txt")
    assert (
        "ZeroDivisionError: in a rank" if raising else "SystemExit: enough"
    ) in error.read_text()


def test_a_rank_that_dies_ends_the_command_and_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["-m", *WORDS, *RAGGED, "engine=native", "checkpoint.every=1", "seed=0,1"]
    receive, left = LocalLink.receive, iter(range(6))

    def dying(self: LocalLink, rank: int) -> Message:
        if rank == 2 and next(left, None) is None:
            raise LostRankError(2, 3, "connection closed")
        return receive(self, rank)

    with monkeypatch.context() as patch, ranks(3, words):
        patch.setattr(LocalLink, "receive", dying)
        assert run(words) == 1
        assert (
            RANKS.end(75) == 1
        )  # whatever torchrun, which has noticed, too, has asked this rank to do
    (summary,) = (read_summary(p.parent) or {} for p in Path("outputs").glob("*/*/summary.json"))
    assert summary["error"].startswith(
        "rank 2 of 3 has ended or cannot be reached any more (connection closed); "
    )
    assert "rank 2 of 3 has ended" in capsys.readouterr().err  # the second job is refused
    assert run(words) == 0
