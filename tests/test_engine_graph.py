"""Recorded local steps: a replay is what the steps come to, what may not be recorded, and where
recording fails.

That replays on a tape equal the reference is in tests/test_engine.py.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.core.errors import ConfigError
from fedsim.core.rng import Streams
from fedsim.core.types import Cohort, Params
from fedsim.engine import torch_backend
from fedsim.engine.backend import TrainingResult
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine
from fedsim.engine.graph import recorder
from fedsim.engine.graph import steps as graph_steps
from fedsim.engine.graph.backend import (
    MAX_STEPS,
    MAX_TRAINERS,
    longest_recording,
    round_up,
    split_into_recordings,
)
from fedsim.engine.graph.recorder import Body, NotRecordedError, Recorder
from fedsim.engine.graph.steps import SingleClientSteps
from fedsim.engine.model import initial
from fedsim.engine.optimizers import SGD
from fedsim.engine.schedule import LocalWork, Schedule
from fedsim.models.cnn import CNN
from fedsim.models.mlp import MLP
from fedsim.models.resnet20 import ResNet20
from tests.engines import graph, reference, schedule_of
from tests.pretended_cuda import PretendedCard, held
from tests.test_engine import OPTIMIZERS, SIZES, WORKS, assert_equal, model_of, problem, taped


def chain(rate: float = 0.0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        hidden = [
            nn.Linear(16, 8),
            nn.Dropout(rate),
            nn.ReLU(),
            nn.Linear(8, 6, bias=False),
            nn.ReLU(),
        ]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(6, 3)).double()


def pair(
    model: nn.Module, data: ClientData, work: LocalWork, optimizer: str = "sgd"
) -> tuple[Any, Engine]:
    """An engine that replays recorded steps, and the reference."""
    one, other = (
        build(model, data, work, OPTIMIZERS[optimizer], Streams(3)) for build in (taped, reference)
    )
    return one, other


def models_like(model: nn.Module, count: int) -> list[Params]:
    generator = torch.Generator().manual_seed(5)
    return [
        {
            n: v + 0.1 * torch.rand(v.shape, generator=generator, dtype=v.dtype)
            for n, v in initial(model).items()
        }
        for _ in range(count)
    ]


def same_bits(a: TrainingResult, b: TrainingResult, schedule: Schedule) -> bool:
    stacks = [(a.delta, b.delta), (a.momentum or {}, b.momentum or {})]
    same = [torch.equal(x[name], value) for x, y in stacks for name, value in y.items()]
    return all(same) and np.array_equal(a.losses[schedule.mask], b.losses[schedule.mask])


REPLAYS = [("chain", o) for o in ("decay", "nesterov", "adam")]
REPLAYS += [("conv", "adam"), ("batch norm and dropout", "nesterov")]


@pytest.mark.parametrize(("name", "optimizer"), REPLAYS)
def test_a_replay_is_to_the_last_bit_what_the_steps_come_to(name: str, optimizer: str) -> None:
    """With other clients, batches, models, dropout keys and learning rate than when it was
    recorded."""
    model = (chain(0.5) if name == "chain" else model_of(name)).float()
    data, work = problem([7, 1, 13, 4, 2], torch.float32), LocalWork(None, 5, 4)
    one, other = pair(model, data, work, optimizer)
    eager = graph(model, data, work, OPTIMIZERS[optimizer], Streams(3))
    first = one.backend.train(
        [initial(model)] * 3, schedule_of(other, np.array([0, 1, 3]), 1, lr=0.1)
    )
    kept, recorded = copy.deepcopy(first), len(one.backend.recorder.tapes)
    second = schedule_of(other, np.array([2, 1, 4]), 2, lr=0.03)
    start = models_like(model, 3)
    assert same_bits(one.backend.train(start, second), eager.backend.train(start, second), second)
    assert same_bits(
        first, kept, schedule_of(other, np.array([0, 1, 3]), 1)
    )  # results are not overwritten
    if name != "batch norm and dropout":  # whose other batches may be full
        assert len(one.backend.recorder.tapes) == recorded


# --- what is recorded ------------------------------------------------------------------------------------------------


def test_a_round_is_made_of_recordings_of_powers_of_two() -> None:
    assert split_into_recordings([False] * 30, 64) == [
        (16, False),
        (8, False),
        (4, False),
        (2, False),
    ]
    assert split_into_recordings([False] * 150, 64) == [
        (64, False),
        (64, False),
        (16, False),
        (4, False),
        (2, False),
    ]
    runs = split_into_recordings([True] * 3 + [False] + [True] * 4, 2)
    assert runs == [(2, True), (1, True), (1, False), (2, True), (2, True)]
    assert split_into_recordings([], 64) == []
    assert [longest_recording(n) for n in (0, 10, 1_000, 10**6)] == [MAX_STEPS, MAX_STEPS, 4, 1]
    assert [round_up(n) for n in (0, 5, 10, 15, 17, 100)] == [
        0,
        5,
        10,
        15,
        18,
        104,
    ]  # clients, or steps


def test_cohorts_of_many_sizes_keep_few_recordings_and_equal_the_reference() -> None:
    one, other = pair(chain(), problem([4] * 24), WORKS["steps"], "momentum")
    for count in (3, 1, 2, 24, 5, 7, 9, 11, 13, 15, 3):
        assert_equal(one, other, np.arange(count))
    assert len(one.backend._trainers) == MAX_TRAINERS


def test_fewer_clients_replay_what_was_recorded_for_more() -> None:
    """Where each client has recordings of its own."""
    one, other = pair(model_of("conv"), problem([4] * 5), WORKS["steps"], "momentum")
    assert_equal(one, other, np.arange(5))
    recorded = len(one.backend.recorder.tapes)
    for count in (2, 1, 4):
        assert_equal(one, other, np.arange(count))
    assert len(one.backend.recorder.tapes) == recorded
    assert len(one.backend._trainers) == 1


def test_batches_that_are_full_take_the_ordinary_batch_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where other clients have short batches."""
    forms: list[bool] = []
    step = SingleClientSteps.step

    def watched(self: SingleClientSteps, *, full: bool) -> None:
        forms.append(full)
        step(self, full=full)

    monkeypatch.setattr(SingleClientSteps, "step", watched)
    engine = graph(
        model_of("batch norm 2d"),
        problem([8, 13, 3]),
        LocalWork(1, None, 4),
        OPTIMIZERS["sgd"],
        Streams(3),
    )
    engine.train(initial(engine.workload.model), np.arange(3), 1, 0.1)
    assert sorted(forms) == 2 * [False] + 5 * [True]


class Failing(Recorder):
    """Cannot record."""

    def record(self, step: Body, times: int, prepare: Body, track: int) -> Body:
        raise NotRecordedError("operation not permitted")


def test_where_recording_fails_steps_are_taken_one_by_one_and_that_is_said(
    capfd: pytest.CaptureFixture[str],
) -> None:
    one, other = pair(chain(), problem(SIZES["ragged"]), WORKS["epochs"], "adam")
    one.backend.recorder = Failing("no reason")
    assert_equal(one, other, np.arange(5))
    assert one.description == "graph, linear layers, step by step (operation not permitted)"
    told = "engine=graph: not recorded (slower, same results): operation not permitted"
    assert capfd.readouterr().err.splitlines() == [told]
    one = graph(chain(), problem([4]), WORKS["epochs"], OPTIMIZERS["sgd"], Streams(3))
    assert one.description == "graph, linear layers, step by step (no CUDA graphs on device cpu)"


# --- what is refused -------------------------------------------------------------------------------------------------


class NormOverTokens(nn.Module):
    """BatchNorm over samples and tokens as one axis, of which a mask of samples says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.a(x.flatten(1, 2)).flatten(0, 1)).view(len(x), -1, 6)
        return self.b(h.mean(1))  # type: ignore[no-any-return]


class OwnRule(SGD):
    """A user's optimiser."""


def test_what_cannot_be_recorded_is_refused_at_the_start() -> None:
    data, own = (
        problem([4]),
        OwnRule(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0, schedule=PLAIN),
    )
    untracked = nn.Sequential(
        nn.Flatten(), nn.BatchNorm1d(16, track_running_stats=False), nn.Linear(16, 3)
    ).double()
    for model, optimizer, text in (
        (
            NormOverTokens().double(),
            OPTIMIZERS["sgd"],
            r"NormOverTokens cannot take padded batches: .*\n.*sequential",
        ),
        (chain(), own, r"cannot record the steps of OwnRule.*\n.*engine=batched"),
        (untracked, OPTIMIZERS["sgd"], "BatchNorm1d"),
    ):
        with pytest.raises(ConfigError, match=text):
            graph(model, data, WORKS["epochs"], optimizer, Streams(3))


PLAIN = OPTIMIZERS["sgd"].schedule


# --- on a pretended CUDA device --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Local training of clients with so many samples of a shape."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    sizes: list[int]
    work: LocalWork
    optimizer: str

    def engine(self, device: str, build: Callable[..., Engine] | None = None) -> Engine:
        total = sum(self.sizes)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = self.model()
            x, y = torch.randn(total, *self.shape), torch.randint(10, (total,))
        positions = np.split(np.arange(total), np.cumsum(self.sizes)[:-1])
        data = ClientData(x.to(device), y.to(device), positions, positions, 10)
        build = build or (taped if device == "cpu" else graph)
        return build(model.to(device), data, self.work, OPTIMIZERS[self.optimizer], Streams(0))


def train(engine: Engine, round: int) -> Cohort:
    return engine.train(
        initial(engine.workload.model), np.arange(len(engine.data.train)), round, 0.1 / round
    )


SMALL_RESNET = Case(
    lambda: ResNet20((1, 4, 4), 10, shortcut="pad", norm="batch", groups=4),
    *((1, 4, 4), [2, 5], LocalWork(1, None, 2), "adam"),
)
DROPOUT = Case(
    lambda: MLP((1, 4, 4), 10, hidden=[8], dropout=0.5),
    (1, 4, 4),
    [3, 0, 9],
    LocalWork(2, None, 4),
    "nesterov",
)
SMALL_CNN = Case(
    lambda: CNN((1, 18, 18), 10), (1, 18, 18), [3, 2], LocalWork(1, None, 2), "momentum"
)


@pytest.mark.parametrize(
    "case", [DROPOUT, SMALL_CNN, SMALL_RESNET], ids=["dropout", "convolutions", "batch norm"]
)
def test_replays_on_the_card_equal_those_on_the_cpu_to_the_last_bit(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case is not DROPOUT:  # images
        monkeypatch.setattr(torch_backend, "layout_for", lambda *args: torch.channels_last)
    engine = case.engine("cpu")
    wanted = [train(engine, round) for round in (1, 2)]
    with PretendedCard():
        engine = case.engine("cuda")
        for round, want in enumerate(wanted, 1):
            got = train(engine, round)
            assert all(
                torch.equal(held(got.delta[name]), value) for name, value in want.delta.items()
            )
            np.testing.assert_array_equal(got.loss, want.loss)


def test_a_step_that_waits_for_the_device_is_not_recorded_and_breaks_the_budget(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def waiting(*args: Any) -> Any:
        x = samples_at(*args)
        assert not x.isnan().any().item()
        return x

    samples_at = graph_steps.samples_at
    monkeypatch.setattr(graph_steps, "samples_at", waiting)
    with PretendedCard() as card:
        engine = DROPOUT.engine("cuda")
        train(engine, 1)
        card.counts.reset()
        train(engine, 2)
        totals = card.counts.totals()
    reason = "_local_scalar_dense: operation not permitted when stream is capturing"
    assert engine.description == f"graph, linear layers, step by step ({reason})"
    assert (
        capfd.readouterr().err == f"engine=graph: not recorded (slower, same results): {reason}\n"
    )
    assert totals["waits"] > 3
    assert totals["launches"] > 120


def test_recordings_that_replay_side_by_side_have_streams_and_workspaces_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before torch 2.15 a library's workspace is that of the stream, which has to lie in the pool
    of its graphs."""
    events: list[Any] = []

    def watched(graph: Any, pool: Any = None, stream: Any = None) -> Any:
        events.append(stream)
        return captured(graph, pool, stream)

    with PretendedCard():
        captured = torch.cuda.graph
        monkeypatch.setattr(recorder, "FIRST_WITH_OWN_WORKSPACES", "99.1")
        monkeypatch.setattr(
            torch._C, "_cuda_clearCublasWorkspaces", lambda: events.append("clear"), raising=False
        )
        monkeypatch.setattr(torch.cuda, "graph", watched)
        train(SMALL_RESNET.engine("cuda"), 1)
        monkeypatch.undo()
    assert set(events[::2]) == {"clear"}
    assert None not in events
    assert len({id(stream) for stream in events[1::2]}) == 2  # clients
