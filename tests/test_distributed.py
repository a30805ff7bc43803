"""One run divided among ranks within one process: to the last bit the run of one process."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.cli import composed, run
from fedsim.commands.dispatch import asks
from fedsim.config.check import check_jobs
from fedsim.config.compose import conf_dir
from fedsim.distributed import backend as divided
from fedsim.distributed.links import Link, LostRankError, Others
from fedsim.distributed.messages import Message, head_of, read_head
from fedsim.distributed.parts import train_part
from fedsim.distributed.shares import aligned_shares, shares
from fedsim.distributed.world import World, world
from fedsim.engine import data as engine_data
from fedsim.engine.torch_backend import EVALUATION_BATCH
from fedsim.errors import ConfigError, FedsimError
from fedsim.running.assembly import build
from fedsim.running.ranks import RANKS, holdings
from fedsim.running.ranks import check_jobs as check_for_ranks
from fedsim.simulation import Simulation
from fedsim.tracking.files import read_summary
from tests.engines import schedule_of
from tests.ranks import LocalLink, ranks, result, run_over

WORDS = ("num_rounds=3", "tracker=files_only", "num_clients=12", "cohort_size=5")
RAGGED = ("partition=dirichlet_class",)
EVEN = ("partition=iid", "local.steps=3")
"""Clients that all have the same batches: in torch, other clients beside them change no bit."""
WRITERS = ("dataset=femnist_generated", "dataset.num_writers=20", "partition=natural", "num_rounds=2", "local.steps=2")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    return tmp_path


def equal_over(count: int, words: Sequence[str], more: Sequence[str] = ()) -> list[str]:
    """The kinds of messages of a run over `count` ranks, which is that of one process."""
    assert run([*words, *more, "output_dir=alone"]) == 0
    code, kinds = run_over(count, [*words, *more, f"output_dir=over{count}"])
    assert code == 0
    assert result(Path("alone")) == result(Path(f"over{count}"))
    return kinds


# --- equal to one process --------------------------------------------------------------------------------------------

CASES = {
    "losses": (*RAGGED, "engine=native", "selector=power_of_choice", "client_accuracy=labels"),
    "narrow_batches": (*RAGGED, "engine=native", "num_clients=60", "cohort_size=4", "local.batch_size=64"),
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
    """`top_loss` asks all clients for their losses: most of all samples, which pass in their order."""
    if room == "three_clients":
        monkeypatch.setattr(engine_data, "ROOM_BYTES", 0)
    words = ("dataset=synthetic", "dataset.num_owners=12", "dataset.samples_per_owner=200", "dataset.test_samples=1001")
    kinds = equal_over(2, [*WORDS, *words, "cohort_size=2"], (*EVEN, f"engine={engine}", f"selector={selector}"))
    assert "train" in kinds
    assert "forward" in kinds or room == "three_clients"  # which is less than a pass, as torch's are


def test_the_summary_says_how_many_processes_there_were() -> None:
    run_over(2, [*WORDS, "engine=native", "num_rounds=1"])
    (folder,) = Path("outputs").glob("*/*-s0-*")
    summary = read_summary(folder) or {}
    assert summary["environment"]["processes"] == {"count": 2, "backend": "gloo"}
    assert summary["engine"] == "native, over 2 processes"


ENGINES = {
    "native": RAGGED,
    "native_momentum": (*RAGGED, "engine=native", "optimizer.momentum=0.9"),
    "native_cnn": (*WRITERS, "engine=native", "model=cnn"),
    "sequential": RAGGED,
    "sequential_adam": (*RAGGED, "engine=sequential", "optimizer=adam"),
    "sequential_cnn": (*WRITERS, "engine=sequential", "model=cnn"),
    "batched": EVEN,
    "batched_adam": (*EVEN, "engine=batched", "optimizer=adam"),
    "batched_logistic": (*EVEN, "engine=batched", "model=logistic"),
    "graph": (*EVEN, "engine=graph", "engine.program=torch"),
}


@pytest.mark.faults
@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_over_ranks_is_that_of_one_process(name: str, count: int) -> None:
    more = ENGINES[name] if "_" in name or name == "graph" else (*ENGINES[name], f"engine={name}")
    assert "train" in equal_over(count, WORDS, more)


SELECTORS = sorted(path.stem for path in (conf_dir() / "selector").glob("*.yaml"))
MORE = {
    "lefl": ("server.public_samples=40",),
    "momentum": ("optimizer.momentum=0.9",),
    "clock": ("system=lognormal",),
    "validation": ("server.validation_fraction=0.1",),
}
NEEDS = {
    **dict.fromkeys(("fedcs", "fedcs_sequential", "tifl", "tifl_uniform", "oort_by_speed"), "clock"),
    **dict.fromkeys(("greedy_shapley", "ucb_shapley", "s_fedavg"), "validation"),
    "lefl": "lefl",
    "gpfl": "momentum",
}


@pytest.mark.faults
@pytest.mark.parametrize("selector", SELECTORS)
def test_every_selector_over_ranks_is_that_of_one_process(selector: str) -> None:
    more = MORE[NEEDS[selector]] if selector in NEEDS else ()
    assert "train" in equal_over(2, WORDS, (*RAGGED, "engine=native", f"selector={selector}", *more))


def test_ragged_clients_stacked_in_torch_are_equal_up_to_rounding() -> None:
    """torch multiplies matrices of other sizes, or at other places in memory, in another order of additions."""
    (plan,) = check_jobs(composed([*WORDS, *RAGGED, "engine=batched"])[0])
    experiment = build(plan)
    engine, params = experiment.simulation.components.engine, experiment.simulation.params
    schedule = schedule_of(engine, np.arange(12), 1)
    alone = engine.backend.train([params] * 12, schedule)
    for cut in (*shares(schedule.samples, 3), slice(0, 1)):
        part = schedule.rows(cut)
        found = train_part(engine.backend, [params] * len(part), part)
        for name, whole in alone.delta.items():
            bound = 1e-6 * float(whole.abs().max())
            torch.testing.assert_close(found.delta[name], whole[cut], rtol=0, atol=bound)


def test_a_run_that_stopped_goes_on_over_another_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*WORDS, *RAGGED, "engine=native", "selector=oort", "checkpoint.every=1", "num_rounds=6"]
    assert run([*words, "output_dir=alone"]) == 0
    for count, last in ((2, 2), (3, 4), (1, None)):
        with monkeypatch.context() as patch:
            if last is not None:
                patch.setattr(Simulation, "step", _stopping_after(last, Simulation.step))
                with pytest.raises(KeyboardInterrupt):
                    run_over(count, words)
            else:
                assert run(words) == 0
    assert result(Path("alone")) == result(Path("outputs"))


def _stopping_after(last: int, step: Callable[[Simulation], Any]) -> Callable[[Simulation], Any]:
    def stop(self: Simulation) -> Any:
        if self.round == last:
            raise KeyboardInterrupt
        return step(self)

    return stop


# --- what the tests above would notice -------------------------------------------------------------------------------


def test_parts_in_the_order_of_ranks_that_answer_last_first_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = divided.DividedBackend._asked
    monkeypatch.setattr(divided.DividedBackend, "_asked", lambda *args: asked(*args)[::-1])
    with pytest.raises(AssertionError):
        equal_over(2, WORDS, CASES["losses"])


def test_losses_and_momentum_come_back_with_the_updates() -> None:
    words = [*WORDS, *RAGGED, "engine=native", "optimizer.momentum=0.9"]
    (plan,) = check_jobs(composed(words)[0])
    alone = build(plan).simulation.components.engine
    with ranks(3, words):
        RANKS.agree([plan], {})
        experiment = RANKS.build(plan, build)
        engine, params = experiment.simulation.components.engine, experiment.simulation.params
        schedule = schedule_of(engine, np.arange(12), 1)
        expected, found = (e.backend.train([params] * 12, schedule) for e in (alone, engine))
        assert np.array_equal(found.losses, expected.losses)
        assert expected.momentum is not None
        for mine, theirs in ((found.delta, expected.delta), (found.momentum or {}, expected.momentum)):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_single_client_of_a_stack_is_trained_twice_beside_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's convolutions of one client add in another order than those of several."""
    words = ("dataset=femnist_generated", "model=cnn", "engine=batched", "num_clients=3", "cohort_size=3", *EVEN)
    (plan,) = check_jobs(composed([*words, "local.batch_size=8"])[0])
    experiment = build(plan)
    engine, params = experiment.simulation.components.engine, experiment.simulation.params
    schedule = schedule_of(engine, np.arange(3), 1)
    whole = engine.backend.train([params] * 3, schedule).delta
    last = slice(2, 3)

    def equal() -> bool:
        found = train_part(engine.backend, [params], schedule.rows(last)).delta
        return all(torch.equal(found[name], whole[name][last]) for name in whole)

    assert equal()
    monkeypatch.setattr("fedsim.engine.batched.backend.BatchedBackend.fewest_clients", 1)
    assert not equal()


def test_the_test_set_is_cut_where_passes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    (plan,) = check_jobs(composed([*WORDS, *WRITERS, "engine=batched", "model=mlp"])[0])
    with ranks(3, [*WORDS, *WRITERS, "engine=batched", "model=mlp"]) as link:
        RANKS.agree([plan], {})
        experiment = RANKS.build(plan, build)
        engine, params = experiment.simulation.components.engine, experiment.simulation.params
        alone = holdings(build(plan)).backend
        x = experiment.simulation.components.server_data.test.x
        assert EVALUATION_BATCH < len(x) < 2 * EVALUATION_BATCH
        whole = alone.forward(params, x)
        assert torch.equal(engine.backend.forward(params, x), whole)
        assert link.kinds[-1] == "forward"
        monkeypatch.setattr(divided, "aligned_shares", lambda length, unit, count: aligned_shares(length, 7, count))
        assert not torch.equal(engine.backend.forward(params, x), whole)


# --- how work is cut -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work", "count", "ends"),
    [
        ([1] * 10, 2, [5, 10]),
        ([1] * 5, 2, [2, 5]),
        ([6, 1, 1, 1, 1, 1, 1], 2, [1, 7]),
        ([1, 1, 8], 2, [2, 3]),
        ([1, 1], 4, [0, 1, 1, 2]),
        ([0, 0], 2, [0, 2]),
    ],
)
def test_shares_are_consecutive_and_even(work: list[int], count: int, ends: list[int]) -> None:
    found = shares(work, count)
    assert [cut.start for cut in found] == [0, *ends[:-1]]
    assert [cut.stop for cut in found] == ends


def test_shares_of_samples_end_at_multiples_of_a_pass() -> None:
    assert [(c.start, c.stop) for c in aligned_shares(2500, 1000, 2)] == [(0, 1000), (1000, 2500)]
    assert [(c.start, c.stop) for c in aligned_shares(10, 1000, 2)] == [(0, 0), (0, 10)]


# --- messages and ranks ----------------------------------------------------------------------------------------------


def test_a_message_arrives_as_it_was_sent() -> None:
    arrays = {"a": np.arange(6).reshape(2, 3).T, "b": np.array([True]), "empty": np.zeros((2, 0, 0), np.int64)}
    sent = Message("train", {"lr": 0.1, "names": ["x"]}, arrays, torch.zeros(3, dtype=torch.float64))
    found = read_head(head_of(sent), torch.device("cpu"))
    assert (found.kind, found.values) == (sent.kind, sent.values)
    assert all(np.array_equal(found.arrays[name], array) for name, array in arrays.items())
    assert found.flat is not None
    assert (found.flat.shape, found.flat.dtype) == ((3,), torch.float64)


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


@pytest.mark.faults
def test_a_sweep_runs_its_jobs_one_after_another_over_all_ranks() -> None:
    kinds = equal_over(2, ["-m", *WORDS, *RAGGED, "engine=native", "num_rounds=2", "seed=0,1"])
    assert kinds.count("build") == 2
    assert len(list(Path("over2").glob("*/*/summary.json"))) == 2


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_ranks_that_have_other_jobs_or_build_something_else_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*WORDS, "engine=native"]
    RANKS.others = Others(LocalLink(2, lambda: check_jobs(composed([*words, "seed=1"])[0])))
    try:
        with pytest.raises(FedsimError, match="rank 1: has other jobs; all ranks need the same installation"):
            run(words)
        RANKS.others = Others(LocalLink(2, lambda: check_jobs(composed(words)[0])))
        monkeypatch.setattr("fedsim.running.rank_worker.built", lambda made: {"engine": "batched"})
        with pytest.raises(FedsimError, match="rank 1 has another engine: 'batched', not 'native'"):
            run(words)
    finally:
        RANKS.others, RANKS.plans = None, ()


def test_what_another_rank_raises_ends_the_job_alone_and_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["-m", *WORDS, "engine=native", "num_rounds=2", "seed=0,1"]

    def train(*args: Any) -> Any:
        raise ZeroDivisionError("in a rank")

    with ranks(2, words) as link:
        failing = iter([train])
        answer = link.workers[1]._answer
        answers = lambda request: next(failing, lambda: None)() if request.kind == "train" else answer(request)
        monkeypatch.setattr(link.workers[1], "_answer", lambda r: answers(r) or answer(r))
        assert run(words) == 1
    summaries = {s["seed"]: s for s in (read_summary(p.parent) or {} for p in Path("outputs").glob("*/*/summary.json"))}
    assert summaries[0]["status"] == "failed"
    assert "rank 1 has raised" in summaries[0]["error"]
    assert summaries[1]["status"] == "done"
    (error,) = Path("outputs").glob("*/*/error.txt")
    assert "ZeroDivisionError: in a rank" in error.read_text()


class Dying(LocalLink):
    """Rank 2 dies after so many messages to it."""

    left = 0

    def receive(self, rank: int) -> Message:
        self.left -= rank == 2
        if self.left < 0 and rank == 2:
            raise LostRankError(2, 3, "connection closed")
        return super().receive(rank)


@pytest.mark.parametrize(
    ("messages", "told"), [(4, "there is no checkpoint yet"), (6, "the checkpoint after round 1 stays")]
)
def test_a_rank_that_dies_ends_the_command_and_is_named(
    messages: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["-m", *WORDS, *RAGGED, "engine=native", "checkpoint.every=1", "seed=0,1"]
    link = Dying(3, lambda: check_jobs(composed(words)[0]))
    link.left = messages
    RANKS.others = Others(link)
    try:
        assert run(words) == 1
        assert RANKS.others.lost is not None
        assert RANKS.end(75) == 1  # whatever torchrun, which has noticed, too, has asked this rank to do
    finally:
        RANKS.others, RANKS.plans = None, ()
    (summary,) = (read_summary(p.parent) or {} for p in Path("outputs").glob("*/*/summary.json"))
    assert summary["error"].startswith("rank 2 of 3 has ended or cannot be reached any more (connection closed); ")
    assert told in summary["error"]
    assert "rank 2 of 3 has ended" in capsys.readouterr().err  # the second job is refused
    assert run(words) == 0


def test_a_link_is_abstract() -> None:
    with pytest.raises(TypeError):
        Link(2)  # type: ignore[abstract]
