"""One run divided among ranks within one process: to the last bit the run of one process."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.config.compose import check_jobs, conf_dir
from fedsim.config.plan import Plan
from fedsim.core.types import Params
from fedsim.distributed import backend as divided
from fedsim.distributed.backend import shares, train_part
from fedsim.engine import data as engine_data
from fedsim.engine.engine import Engine
from fedsim.engine.schedule import Schedule
from fedsim.engine.torch_backend import EVALUATION_BATCH
from fedsim.jobs.cli import composed, run
from fedsim.results.files import read_summary
from fedsim.rounds.loop import Simulation
from fedsim.running.assembly import build
from fedsim.running.ranks import RANKS
from tests.engines import schedule_of
from tests.ranks import RAGGED, WORDS, equal_over, ranks, result, run_over

EVEN = ("partition=iid", "local.steps=3")
"""Clients that all have the same batches: in torch, other clients beside them change no bit."""
WRITERS = ("dataset=femnist_generated", "dataset.num_writers=20", "partition=natural", "num_rounds=2", "local.steps=2")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    return tmp_path


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
    "native_momentum": (*RAGGED, "engine=native", "optimizer.momentum=0.9"),
    "native_cnn": (*WRITERS, "engine=native", "model=cnn"),
    "sequential_adam": (*RAGGED, "engine=sequential", "optimizer=adam"),
    "sequential_cnn": (*WRITERS, "engine=sequential", "model=cnn"),
    "batched_adam": (*EVEN, "engine=batched", "optimizer=adam"),
    "batched_logistic": (*EVEN, "engine=batched", "model=logistic"),
    "graph": (*EVEN, "engine=graph"),
}


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 7])
@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_over_ranks_is_that_of_one_process(name: str, count: int) -> None:
    assert "train" in equal_over(count, WORDS, ENGINES[name])


SELECTORS = sorted(path.stem for path in (conf_dir() / "selector").glob("*.yaml"))
NEEDS = {
    **dict.fromkeys(("fedcs", "fedcs_sequential", "tifl", "tifl_uniform", "oort_by_speed"), "system=lognormal"),
    **dict.fromkeys(("greedy_shapley", "ucb_shapley", "s_fedavg"), "server.validation_fraction=0.1"),
    **{"lefl": "server.public_samples=40", "gpfl": "optimizer.momentum=0.9"},
}


@pytest.mark.slow
@pytest.mark.parametrize("selector", SELECTORS)
def test_every_selector_over_ranks_is_that_of_one_process(selector: str) -> None:
    more = [NEEDS[selector]] if selector in NEEDS else []
    assert "train" in equal_over(2, WORDS, (*RAGGED, "engine=native", f"selector={selector}", *more))


def made(words: Sequence[str], clients: int) -> tuple[Plan, Engine, Params, Schedule]:
    """The engine of a run in one process, and the work of its first clients in round 1."""
    (plan,) = check_jobs(composed(list(words))[0])
    simulation = build(plan).simulation
    engine = simulation.components.engine
    return plan, engine, simulation.params, schedule_of(engine, np.arange(clients), 1)


def test_ragged_clients_stacked_in_torch_are_equal_up_to_rounding() -> None:
    """torch multiplies matrices of other sizes, or at other places in memory, in another order of additions."""
    _, engine, params, schedule = made([*WORDS, *RAGGED, "engine=batched"], 12)
    alone = engine.backend.train([params] * 12, schedule)
    for cut in (*shares(schedule.samples, 3).values(), slice(0, 1)):
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
    computed = divided.DividedBackend._computed
    monkeypatch.setattr(divided.DividedBackend, "_computed", lambda *args: computed(*args)[::-1])
    with pytest.raises(AssertionError):
        equal_over(2, WORDS, CASES["losses"])


def test_losses_and_momentum_come_back_with_the_updates() -> None:
    words = [*WORDS, *RAGGED, "engine=native", "optimizer.momentum=0.9"]
    plan, alone, params, schedule = made(words, 12)
    expected = alone.backend.train([params] * 12, schedule)
    with ranks(3, words):
        RANKS.agree([plan], {})
        engine = RANKS.build(plan, build).simulation.components.engine
        found = engine.backend.train([params] * 12, schedule)
    assert np.array_equal(found.losses, expected.losses)
    assert expected.momentum is not None
    for mine, theirs in ((found.delta, expected.delta), (found.momentum or {}, expected.momentum)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_single_client_of_a_stack_is_trained_twice_beside_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's convolutions of one client add in another order than those of several."""
    words = ("dataset=femnist_generated", "model=cnn", "engine=batched", "num_clients=3", "cohort_size=3", *EVEN)
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
        monkeypatch.setattr(divided, "shares", lambda work, *of: cut.append((len(work), *of)) or shares(work, *of))
        engine.backend.forward(params, x)
        assert cut == [(2, 3, EVALUATION_BATCH)]


# --- how work is cut -------------------------------------------------------------------------------------------------


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
        expected = {rank: slice(first, last) for rank, (first, last) in pairs if last > first}
        assert shares(work, count) == expected
    assert shares([1, 1, 1], 2, 1000) == {0: slice(0, 1000), 1: slice(1000, 3000)}
    assert shares([1], 2, 1000) == {1: slice(0, 1000)}
