"""A run that is divided among ranks equals the run of one process to the last bit.

The ranks are in one process (tests/ranks.py). Errors of ranks end a job, or the command.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

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
from fedsim.distributed.links import (
    LostRankError,
    Message,
    Others,
    empty_tensors_for,
    packed,
    unpacked,
)
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

NATIVE = (*RAGGED, "engine=native")
EVEN = ("partition=iid", "local.steps=3")
"""All clients have batches of the same size. In torch, results then do not depend on the others."""
WRITERS = (
    "dataset=femnist_generated", "dataset.num_writers=20", "partition=natural", "num_rounds=2", "local.steps=2",
)  # fmt: skip
MOMENTUM = "optimizer.momentum=0.9"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)


def plan_of(*words: str) -> Plan:
    (plan,) = check_jobs(compose_words(read_command_line(list(words))))
    return plan


def summaries() -> list[dict[str, Any]]:
    return [read_summary(path.parent) or {} for path in Path().glob("outputs/*/*/summary.json")]


# --- equal to one process -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ((*NATIVE, "selector=power_of_choice", "client_accuracy=labels"), {"train", "forward"}),
        (
            (*NATIVE, "num_clients=60", "cohort_size=4", "local.batch_size=64"),
            {"train", "forward"},
        ),
        ((*NATIVE, "selector=divfl"), {"train", "forward", "gradients"}),
        ((*RAGGED, "engine=sequential", MOMENTUM, "selector=gpfl"), {"train"}),
        (
            (*EVEN, "engine=batched", "model.dropout=0.3", "selector=grad_norm"),
            {"train", "gradients"},
        ),
        ((*EVEN, "engine=batched", "init_seed=per_client", "cohort_size=3"), {"train"}),
    ],
)
def test_a_run_over_ranks_is_that_of_one_process(words: tuple[str, ...], kinds: set[str]) -> None:
    messages = equal_over(3, WORDS, words)
    assert messages.count("train") >= 3
    assert {"train", "forward", "gradients"} & set(messages) == kinds


@pytest.mark.parametrize("buffer_bytes", [None, 0])  # all samples fit; three clients' samples fit
@pytest.mark.parametrize("selector", ["random", "top_loss"])  # top_loss needs all clients' losses
@pytest.mark.parametrize("engine", ["sequential", "batched", "native"])
def test_samples_on_demand_are_divided_as_one_process_passes_them(
    engine: str, selector: str, buffer_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if buffer_bytes is not None:
        monkeypatch.setattr(engine_data, "BUFFER_BYTES", buffer_bytes)
    data = ("dataset=synthetic", "dataset.num_owners=12", "dataset.samples_per_owner=200")
    words = (*data, "dataset.test_samples=1001", "cohort_size=2", f"selector={selector}")
    messages = equal_over(2, [*WORDS, *words], (*EVEN, f"engine={engine}"))
    assert "train" in messages
    # Samples of three clients are less than a pass of torch's.
    assert "forward" in messages or buffer_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 7])
@pytest.mark.parametrize(
    "words",
    [
        (*NATIVE, MOMENTUM),
        (*WRITERS, "engine=native", "model=cnn"),
        (*RAGGED, "engine=sequential", "optimizer=adam"),
        (*EVEN, "engine=batched", "optimizer=adam"),
        (*EVEN, "engine=graph"),
    ],
)
def test_every_engine_over_ranks_is_that_of_one_process(words: tuple[str, ...], count: int) -> None:
    assert "train" in equal_over(count, WORDS, words)


SELECTORS = sorted(path.stem for path in (conf_dir() / "selector").glob("*.yaml"))
NEEDS = {
    "system=lognormal": [
        "fedcs",
        "fedcs_sequential",
        "tifl",
        "tifl_uniform",
        "oort_by_speed",
        "haccs",
    ],
    "server.validation_fraction=0.1": ["greedy_shapley", "ucb_shapley", "s_fedavg"],
    "server.public_samples=40": ["fedabc", "lefl"],
    MOMENTUM: ["gpfl"],
    "selector.layers=[layers.4,layers.7]": ["pncs_two"],
}
"""Selectors that need an override."""


@pytest.mark.slow
@pytest.mark.parametrize("selector", SELECTORS)
def test_every_selector_over_ranks_is_that_of_one_process(selector: str) -> None:
    needed = [word for word, selectors in NEEDS.items() if selector in selectors]
    messages = equal_over(2, WORDS, (*NATIVE, f"selector={selector}", *needed))
    # gpfl_official begins with one client a round.
    assert "train" in messages or selector == "gpfl_official"


def engine_and_work(
    words: Sequence[str], count: int
) -> tuple[Plan, Engine, list[Params], Schedule]:
    """Return the engine of a run in one process, and the work of the first clients in round 1."""
    plan = plan_of(*words)
    simulation = build(plan).simulation
    engine = simulation.components.engine
    return plan, engine, [simulation.params] * count, schedule_of(engine, np.arange(count), 1)


def test_ragged_clients_stacked_in_torch_are_equal_up_to_rounding() -> None:
    """torch multiplies matrices of another size or place in memory in another order."""
    _, engine, start, schedule = engine_and_work([*WORDS, *RAGGED, "engine=batched"], 12)
    whole = engine.backend.train(start, schedule).delta
    for rows in (*split_evenly(schedule.samples, 3).values(), slice(0, 1)):
        part = train_part(engine.backend, start[rows], schedule.rows(rows)).delta
        for name, value in whole.items():
            bound = 1e-6 * float(value.abs().max())
            torch.testing.assert_close(part[name], value[rows], rtol=0, atol=bound)


def test_a_run_that_stopped_resumes_over_another_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [*WORDS, *NATIVE, "selector=oort", "checkpoint.every=1", "num_rounds=6"]
    assert run([*words, "output_dir=alone"]) == 0
    step, last_round = Simulation.step, 0

    def step_until_last(self: Simulation) -> Any:
        if self.round == last_round:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Simulation, "step", step_until_last)
    for num_ranks, last_round in ((2, 2), (3, 4)):  # noqa: B007, step_until_last reads it
        with pytest.raises(KeyboardInterrupt):
            run_over(num_ranks, words)
    last_round = 6
    assert run(words) == 0
    assert result(Path("alone")) == result(Path("outputs"))


def test_corrections_losses_and_momentum_travel_with_the_updates() -> None:
    words = [*WORDS, *NATIVE, MOMENTUM]
    plan, alone, start, uncorrected = engine_and_work(words, 12)
    # One shift for all clients lies in memory once.
    shift = {name: value.mul(0.1).expand(12, *value.shape) for name, value in start[0].items()}
    schedule = replace(uncorrected, correction=Correction(0.1, shift))
    expected = alone.backend.train(start, schedule)
    assert not np.array_equal(expected.losses, alone.backend.train(start, uncorrected).losses)
    with ranks(3, words):
        RANKS.agree([plan], {})
        engine = RANKS.build(plan.config_hash, lambda: build(plan)).simulation.components.engine
        actual = engine.backend.train(start, schedule)
    assert np.array_equal(actual.losses, expected.losses)
    torch.testing.assert_close(actual.delta, expected.delta, rtol=0, atol=0)
    torch.testing.assert_close(actual.momentum, expected.momentum, rtol=0, atol=0)


def test_a_single_client_of_a_stack_is_trained_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's convolutions of one client add in another order than those of several."""
    data = ("dataset=femnist_generated", "model=cnn", "num_clients=3", "cohort_size=3")
    words = [*data, *EVEN, "engine=batched", "local.batch_size=8"]
    _, engine, start, schedule = engine_and_work(words, 3)
    whole = engine.backend.train(start, schedule).delta

    def last_client_is_equal() -> bool:
        part = train_part(engine.backend, start[2:], schedule.rows(slice(2, 3))).delta
        return all(torch.equal(part[name], value[2:]) for name, value in whole.items())

    assert last_client_is_equal()
    monkeypatch.setattr("fedsim.engine.batched.BatchedBackend.fewest_clients", 1)
    assert not last_client_is_equal()


def test_the_test_set_is_cut_between_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*WORDS, *WRITERS, "engine=batched", "model=mlp"]
    plan, alone, (params,), _ = engine_and_work(words, 1)
    cuts: list[tuple[int, ...]] = []

    def noted_split(work: Any, *args: int) -> dict[int, slice]:
        cuts.append((len(work), *args))
        return split_evenly(work, *args)

    with ranks(3, words) as link:
        RANKS.agree([plan], {})
        components = RANKS.build(plan.config_hash, lambda: build(plan)).simulation.components
        x = components.server_data.test.x
        assert EVALUATION_BATCH < len(x) < 2 * EVALUATION_BATCH
        monkeypatch.setattr(divided, "split_evenly", noted_split)
        logits = components.engine.backend.forward(params, x)
    assert torch.equal(logits, alone.backend.forward(params, x))
    assert link.kinds[-1] == "forward"
    assert cuts == [(2, 3, EVALUATION_BATCH)]  # Two passes, three ranks


@pytest.mark.parametrize(
    ("work", "num_parts", "parts"),
    [
        ([1] * 10, 2, {0: (0, 5), 1: (5, 10)}),
        ([1] * 5, 2, {0: (0, 2), 1: (2, 5)}),
        ([6, 1, 1, 1, 1, 1, 1], 2, {0: (0, 1), 1: (1, 7)}),
        ([1, 1, 8], 2, {0: (0, 2), 1: (2, 3)}),
        ([1, 1], 4, {1: (0, 1), 3: (1, 2)}),
        ([0, 0], 2, {1: (0, 2)}),
    ],
)
def test_work_is_split_evenly(
    work: list[int], num_parts: int, parts: dict[int, tuple[int, int]]
) -> None:
    assert split_evenly(work, num_parts) == {part: slice(*ends) for part, ends in parts.items()}


def test_samples_are_split_at_multiples_of_a_unit() -> None:
    assert split_evenly([1, 1, 1], 2, 1000) == {0: slice(0, 1000), 1: slice(1000, 3000)}


# --- messages -------------------------------------------------------------------------------------


def test_a_message_arrives_as_it_was_sent() -> None:
    models = [
        {"w": torch.arange(6.0).reshape(2, 3).T, "n": torch.tensor(True)},
        {"w": torch.zeros(3, 2).double()},
    ]
    part = Schedule(np.arange(6).reshape(1, 2, 3), np.array([[3, 0]]), None, 0.1)
    empty = np.zeros((2, 0, 0), np.int64)
    content = {"models": models, "part": part, "empty": empty, "name": "x"}
    head, flat = packed(Message("train", content))
    targets = empty_tensors_for(head, torch.device("cpu"))
    assert [(t.shape, t.dtype) for t in targets] == [(t.shape, t.dtype) for t in flat]
    arrived = unpacked(head, flat, torch.device("cpu"))
    assert (arrived.kind, arrived.content["name"]) == ("train", "x")
    assert arrived.content["part"].lr == 0.1
    assert np.array_equal(arrived.content["part"].positions, part.positions)
    assert arrived.content["empty"].shape == (2, 0, 0)
    torch.testing.assert_close(arrived.content["models"], models, rtol=0, atol=0)
    strides = [{n: value.stride() for n, value in m.items()} for m in arrived.content["models"]]
    assert strides == [{n: value.stride() for n, value in m.items()} for m in models]


@pytest.mark.parametrize(
    ("port", "size", "expected"),
    [(None, "8", World()), ("29500", "8", World(3, 8, 1)), ("29500", "1", World())],
)
def test_the_world_is_what_torchrun_says(
    port: str | None, size: str, expected: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    variables = {"RANK": "3", "WORLD_SIZE": size, "LOCAL_RANK": "1", "MASTER_ADDR": "a"}
    if port is not None:
        variables["MASTER_PORT"] = port
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert world() == expected


def test_one_process_without_torchrun_is_a_world_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert world() == World()


@pytest.mark.parametrize(
    "words", [["list"], ["report", "x"], ["--help"], ["help"], ["seed=1", "--version"]]
)
def test_commands_that_ask_run_on_one_rank(words: list[str]) -> None:
    assert asks(words)


@pytest.mark.parametrize("words", [[], ["seed=1"], ["-m", "seed=0,1"]])
def test_experiments_run_on_all_ranks(words: list[str]) -> None:
    assert not asks(words)


# --- errors ---------------------------------------------------------------------------------------


def test_a_launcher_of_parallel_jobs_is_rejected_and_the_other_ranks_end() -> None:
    words = [*WORDS, "-m", "seed=0,1", "hydra/launcher=lanes"]
    with ranks(2, words) as link:
        with pytest.raises(ConfigError, match="hydra/launcher: Lanes runs jobs at the same time"):
            run(words)
        assert RANKS.end(2) == 2
    assert link.kinds == ["end"]
    assert not Path("outputs").exists()


def test_one_gpu_for_all_ranks_is_rejected() -> None:
    plan = plan_of(*WORDS)
    object.__setattr__(plan.settings, "device", "cuda:1")
    with pytest.raises(ConfigError, match="device='cuda:1': is one GPU for all processes"):
        check_for_ranks([plan], {})


def test_a_sweep_runs_its_jobs_one_after_another_over_all_ranks() -> None:
    messages = equal_over(2, ["-m", *WORDS, *NATIVE, "num_rounds=1", "seed=0,1"])
    assert messages.count("build") == 2
    folders = [path.parent for path in Path("over2").glob("*/*/summary.json")]
    assert len(folders) == 2
    for folder in folders:
        summary = read_summary(folder) or {}
        assert summary["environment"]["processes"] == {"count": 2, "backend": "gloo"}
        assert summary["engine"] == "native, over 2 processes"


def test_a_rank_with_other_jobs_is_named() -> None:
    words = [*WORDS, "engine=native"]
    message = r"rank 1 has another list of jobs: .*; all ranks need"
    with ranks(2, [*words, "seed=1"]), pytest.raises(FedsimError, match=message):
        run(words)


def test_a_rank_that_builds_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptions = iter([{"engine": "batched"}, {"engine": "native"}])
    monkeypatch.setattr(
        "fedsim.running.ranks.experiment_facts", lambda experiment: next(descriptions)
    )
    words = [*WORDS, "engine=native"]
    message = "rank 1 has another engine: 'batched', not 'native'"
    with ranks(2, words), pytest.raises(FedsimError, match=message):
        run(words)


@pytest.mark.parametrize(
    ("rank", "error", "in_summary", "in_file"),
    [
        (0, SystemExit("enough"), "SystemExit: enough", "SystemExit: enough"),
        (1, ZeroDivisionError("bad"), "rank 1 has raised", "ZeroDivisionError: bad"),
    ],
)
def test_an_error_of_a_rank_ends_only_the_job_and_is_recorded(
    rank: int,
    error: BaseException,
    in_summary: str,
    in_file: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors, compute = [error], Holdings.compute

    def failing_compute(self: Holdings, kind: str, content: Any) -> Any:
        on_rank_1 = self is link.workers[1]._holdings
        if errors and kind == "train" and on_rank_1 == bool(rank):
            raise errors.pop()
        return compute(self, kind, content)

    monkeypatch.setattr(Holdings, "compute", failing_compute)
    words = ["-m", *WORDS, "engine=native", "num_rounds=2", "seed=0,1"]
    with ranks(2, words) as link:
        assert run(words) == 1
        assert RANKS.others is not None
        assert RANKS.others.in_step
    first, second = sorted(summaries(), key=lambda summary: summary["seed"])
    assert (first["status"], second["status"]) == ("failed", "done")
    assert in_summary in first["error"]
    (file,) = Path("outputs").glob("*/*/error.txt")
    assert in_file in file.read_text()


def test_an_error_here_is_raised_also_if_a_rank_is_lost_at_the_same_time() -> None:
    link = mock.Mock(size=2)
    link.receive.side_effect = LostRankError(1, 2, "connection closed")
    others = Others(link)
    with pytest.raises(ValueError, match="first"):
        others.ask({1: Message("train")}, mock.Mock(side_effect=ValueError("first")))
    with pytest.raises(LostRankError):
        others.ask({1: Message("train")}, mock.Mock())


def test_logits_are_measured_by_the_backend_of_the_rank() -> None:
    backend = mock.Mock()
    whole = divided.DividedBackend(Holdings(backend, {}), mock.Mock())
    logits, labels = torch.zeros(1, 2), torch.zeros(1)
    assert whole.hits(logits, labels) is backend.hits.return_value
    assert whole.cross_entropies(logits, labels) is backend.cross_entropies.return_value


def test_a_rank_that_dies_ends_the_command_and_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    receive, num_received = LocalLink.receive, 0

    def dying_receive(self: LocalLink, rank: int) -> Message:
        nonlocal num_received
        num_received += rank == 2
        if num_received > 6:
            raise LostRankError(2, 3, "connection closed")
        return receive(self, rank)

    words = ["-m", *WORDS, *NATIVE, "checkpoint.every=1", "seed=0,1"]
    with monkeypatch.context() as patch, ranks(3, words):
        patch.setattr(LocalLink, "receive", dying_receive)
        assert run(words) == 1
        assert RANKS.end(75) == 1  # although torchrun has asked this rank to end with 75
    message = "rank 2 of 3 has ended or cannot be reached any more (connection closed); "
    (summary,) = summaries()
    assert summary["error"].startswith(message)
    assert "rank 2 of 3 has ended" in capsys.readouterr().err  # of the second job
    assert run(words) == 0
