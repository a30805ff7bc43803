"""Recorded local steps equal those of the reference backend, which is plain PyTorch: to 1e-10 in double precision."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.core.errors import ConfigError
from fedsim.core.rng import Streams
from fedsim.core.types import Params
from fedsim.engine.backend import TrainingResult
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine
from fedsim.engine.graph.backend import GraphBackend
from fedsim.engine.model import initial
from fedsim.engine.optimizers import LocalOptimizer
from fedsim.engine.schedule import LocalWork, Schedule, concatenate_schedules
from fedsim.models.cnn import CNN
from fedsim.models.resnet20 import ResNet20
from tests.engines import graph, reference, schedule_of
from tests.tape import TapeRecorder
from tests.test_engine import MODELS, OPTIMIZERS, SIZES, WORKS, assert_equal, model_of, problem


def chain(rate: float = 0.0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        hidden = [nn.Linear(16, 8), nn.Dropout(rate), nn.ReLU(), nn.Linear(8, 6, bias=False), nn.ReLU()]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(6, 3)).double()


def pair(
    model: nn.Module,
    data: ClientData,
    work: LocalWork,
    optimizer: LocalOptimizer,
    *,
    tape: bool = True,
    **switches: Any,
) -> tuple[Engine, Engine]:
    """An engine that replays recorded steps, and the reference."""
    one, other = (build(model, data, work, optimizer, Streams(3)) for build in (graph, reference))
    if switches:
        one = graph(model, data, work, optimizer, Streams(3), **switches)
    if tape:
        backend_of(one).recorder = TapeRecorder()
    return one, other


def backend_of(engine: Engine) -> GraphBackend:
    assert isinstance(engine.backend, GraphBackend)
    return engine.backend


@pytest.mark.parametrize("name", MODELS)
def test_replayed_steps_equal_the_reference_for_every_model(name: str) -> None:
    engines = pair(model_of(name), problem(SIZES["ragged"]), WORKS["epochs"], OPTIMIZERS["sgd"])
    assert_equal(*engines, np.arange(5))


NORM = "batch norm 1d and dropout"
SHAPES = [
    *[("mlp", sizes, work) for sizes in SIZES for work in WORKS],
    *[(NORM, sizes, "big batch") for sizes in SIZES],
    (NORM, "some empty", "steps"),
]


@pytest.mark.parametrize(("name", "sizes", "work"), SHAPES)
def test_replayed_steps_equal_the_reference_for_every_shape_of_work(name: str, sizes: str, work: str) -> None:
    engines = pair(model_of(name), problem(SIZES[sizes]), WORKS[work], OPTIMIZERS["sgd"])
    assert_equal(*engines, np.arange(len(SIZES[sizes])))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_chains_equal_the_reference_for_every_optimiser(rate: float, optimizer: str) -> None:
    engines = pair(chain(rate), problem(SIZES["ragged"]), WORKS["epochs"], OPTIMIZERS[optimizer])
    assert backend_of(engines[0]).description == "graph, linear layers, a tape"
    assert_equal(*engines, np.arange(5))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_other_models_equal_the_reference_for_every_optimiser(optimizer: str) -> None:
    model = model_of("batch norm 1d and dropout")
    engines = pair(model, problem(SIZES["ragged"]), WORKS["epochs"], OPTIMIZERS[optimizer])
    assert backend_of(engines[0]).description == "graph, one client a stream, a tape"
    assert_equal(*engines, np.arange(5))


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_resnet20_equals_the_reference(norm: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = ResNet20((1, 4, 4), 3, shortcut="conv", norm=norm, groups=4).double()
    engines = pair(model, problem([8, 5]), LocalWork(1, None, 4), OPTIMIZERS["momentum"])
    assert_equal(*engines, np.arange(2), tolerance=1e-8)


def test_the_convolutional_network_equals_the_reference() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = CNN((1, 18, 18), 3).double()
    small = problem([6, 3])
    data = ClientData(small.x.repeat(1, 1, 5, 5)[:, :, :18, :18].contiguous(), small.y, small.train, small.evaluate, 3)
    assert_equal(*pair(model, data, LocalWork(1, None, 4), OPTIMIZERS["adam"]), np.arange(2))


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_chains_agree_in_single_precision_too(rate: float) -> None:
    engines = pair(
        chain(rate).float(), problem(SIZES["ragged"], torch.float32), WORKS["epochs"], OPTIMIZERS["momentum"]
    )
    assert_equal(*engines, np.arange(5), tolerance=2e-5)


@pytest.mark.parametrize(
    ("name", "chunk_size"), [("chain", 1), ("chain", 2), ("chain", 3), ("batch norm and dropout", 2)]
)
def test_a_chunked_cohort_equals_the_whole(name: str, chunk_size: int) -> None:
    model = chain(0.5) if name == "chain" else model_of(name)
    task = (model, problem(SIZES["ragged"]), WORKS["epochs"], OPTIMIZERS["momentum"])
    (whole, _), (chunked, _) = pair(*task), pair(*task, chunk_size=chunk_size)
    assert_equal(whole, chunked, np.arange(5))


def models_like(model: nn.Module, count: int) -> list[Params]:
    generator = torch.Generator().manual_seed(5)
    return [
        {n: v + 0.1 * torch.rand(v.shape, generator=generator, dtype=v.dtype) for n, v in initial(model).items()}
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", ["chain", "batch norm and dropout"])
def test_clients_that_start_from_models_of_their_own_equal_the_reference(name: str) -> None:
    model = chain(0.5) if name == "chain" else model_of(name)
    one, other = pair(model, problem(SIZES["ragged"]), WORKS["epochs"], OPTIMIZERS["adam"])
    a, b = models_like(model, 2)
    results = [e.backend.train([a, b, a, a, b], schedule_of(other, np.arange(5), 2)) for e in (one, other)]
    for tensor in results[1].delta:
        torch.testing.assert_close(results[0].delta[tensor], results[1].delta[tensor], rtol=1e-10, atol=1e-10)


def same_bits(a: TrainingResult, b: TrainingResult, schedule: Schedule) -> bool:
    stacks = [(a.delta, b.delta), (a.momentum or {}, b.momentum or {})]
    same = [torch.equal(x[name], value) for x, y in stacks for name, value in y.items()]
    return all(same) and np.array_equal(a.losses[schedule.mask], b.losses[schedule.mask])


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("chain", "decay"),
        ("chain", "nesterov"),
        ("chain", "adam"),
        ("conv", "adam"),
        ("batch norm and dropout", "nesterov"),
    ],
)
def test_a_replay_is_to_the_last_bit_what_the_steps_come_to(name: str, optimizer: str) -> None:
    """With other clients, batches, models, dropout keys and learning rate than when it was recorded."""
    model = (chain(0.5) if name == "chain" else model_of(name)).float()
    data = problem([7, 1, 13, 4, 2], torch.float32)
    one, other = pair(model, data, LocalWork(None, 5, 4), OPTIMIZERS[optimizer])
    eager = graph(model, data, LocalWork(None, 5, 4), OPTIMIZERS[optimizer], Streams(3))
    recorder = backend_of(one).recorder
    assert isinstance(recorder, TapeRecorder)
    first = schedule_of(other, np.array([0, 1, 3]), 1, lr=0.1)
    one.backend.train([initial(model)] * 3, first)
    recorded = len(recorder.tapes)
    second = schedule_of(other, np.array([2, 1, 4]), 2, lr=0.03)
    start = models_like(model, 3)
    assert same_bits(one.backend.train(start, second), eager.backend.train(start, second), second)
    if name != "batch norm and dropout":  # whose other batches may be full
        assert len(recorder.tapes) == recorded


@pytest.mark.parametrize("name", ["chain", "batch norm and dropout"])
def test_a_run_in_a_lane_is_to_the_last_bit_what_it_is_alone(name: str) -> None:
    model = (chain(0.5) if name == "chain" else model_of(name)).float()
    one, _ = pair(model, problem([7, 4, 13, 4, 6], torch.float32), WORKS["epochs"], OPTIMIZERS["momentum"])
    schedules = [schedule_of(one, np.array(ids), 2) for ids in ([0], [1, 3], [2, 4])]
    assert len({one.backend.joint_key(schedule) for schedule in schedules}) == 1
    starts = models_like(model, 3)
    owners = [start for start, schedule in zip(starts, schedules, strict=True) for _ in range(len(schedule))]
    joint = one.backend.train(owners, concatenate_schedules(schedules))
    first = 0
    for start, schedule in zip(starts, schedules, strict=True):
        rows = slice(first, first := first + len(schedule))
        alone = one.backend.train([start] * len(schedule), schedule)
        _, steps, width = schedule.positions.shape
        part = TrainingResult(
            {n: v[rows] for n, v in joint.delta.items()},
            joint.losses[rows, :steps, :width],
            {n: v[rows] for n, v in (joint.momentum or {}).items()},
        )
        assert same_bits(part, alone, schedule)


@pytest.mark.parametrize("name", ["chain", "batch norm 2d"])
def test_one_clients_nan_stays_its_own(name: str) -> None:
    """A client without steps is to the left of it, one that has finished to the right."""
    model = chain() if name == "chain" else model_of(name)
    data = problem([0, 9, 4, 8])
    broken = data.x.clone()
    broken[data.train[1]] = torch.nan
    dirty = ClientData(broken, data.y, data.train, data.evaluate, 3)
    results = []
    for some in (data, dirty):
        engine, _ = pair(model, some, WORKS["epochs"], OPTIMIZERS["momentum"])
        results.append(engine.train(initial(model), np.arange(4), 1, 0.1))
    clean, mixed = results
    for tensor, delta in mixed.delta.items():
        assert torch.equal(delta[[0, 2, 3]], clean.delta[tensor][[0, 2, 3]])
        assert torch.isnan(delta[1]).any()
        assert not delta[0].any()


def test_results_are_not_overwritten_by_the_next_round() -> None:
    model = model_of("batch norm 2d")
    one, _ = pair(model, problem(SIZES["ragged"]), WORKS["epochs"], OPTIMIZERS["momentum"])
    schedules = [schedule_of(one, np.arange(3), round) for round in (1, 2)]
    first = one.backend.train([initial(model)] * 3, schedules[0])
    kept = copy.deepcopy(first)
    one.backend.train([initial(model)] * 3, schedules[1])
    assert same_bits(first, kept, schedules[0])


class NormOverTokens(nn.Module):
    """BatchNorm over samples and tokens as one axis, of which a mask of samples says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.a(x.flatten(1, 2)).flatten(0, 1)).view(len(x), -1, 6)
        return self.b(h.mean(1))  # type: ignore[no-any-return]


def test_a_model_that_cannot_take_padded_batches_is_refused_at_the_start() -> None:
    data, work = problem(SIZES["ragged"]), WORKS["epochs"]
    with pytest.raises(ConfigError, match=r"NormOverTokens cannot take padded batches: .*\n.*engine=sequential"):
        graph(NormOverTokens().double(), data, work, OPTIMIZERS["sgd"], Streams(3))
    reference(NormOverTokens().double(), data, work, OPTIMIZERS["sgd"], Streams(3))
