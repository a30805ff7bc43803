"""The graph engine: what is recorded, that a replay equals the steps, and what cannot be recorded.

tests/test_engine.py compares replays with the reference.
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
from fedsim.engine.graph import backend as graph_backend
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
from tests.test_engine import (
    OPTIMIZERS,
    SIZES,
    WORKS,
    assert_engines_equal,
    model_of,
    problem,
    taped,
)


def chain(dropout: float = 0.0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Flatten(),
            *(nn.Linear(16, 8), nn.Dropout(dropout), nn.ReLU()),
            *(nn.Linear(8, 6, bias=False), nn.ReLU()),
            nn.Linear(6, 3),
        ).double()


def engine(
    build: Callable[..., Engine],
    model: nn.Module,
    data: ClientData,
    work: LocalWork = WORKS["steps"],
    optimizer: str = "momentum",
) -> Any:
    return build(model, data, work, OPTIMIZERS[optimizer], Streams(3))


def models_like(model: nn.Module, count: int) -> list[Params]:
    """Return models with the parameters of `model` plus different noise."""
    generator = torch.Generator().manual_seed(5)
    models = []
    for _ in range(count):
        params = initial(model)
        for value in params.values():
            value += 0.1 * torch.rand(value.shape, generator=generator, dtype=value.dtype)
        models.append(params)
    return models


def assert_same_bits(a: TrainingResult, b: TrainingResult, schedule: Schedule) -> None:
    for actual, expected in ((a.delta, b.delta), (a.momentum or {}, b.momentum or {})):
        assert all(torch.equal(actual[name], value) for name, value in expected.items())
    assert np.array_equal(a.losses[schedule.mask], b.losses[schedule.mask])


# --- what is recorded -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *(("chain", "decay"), ("chain", "nesterov"), ("chain", "adam")),
        *(("conv", "adam"), ("batch norm and dropout", "nesterov")),
    ],
)
def test_a_replay_equals_the_steps_to_the_last_bit(name: str, optimizer: str) -> None:
    """Clients, batches, models, dropout keys and learning rate differ from those recorded."""
    model = (chain(0.5) if name == "chain" else model_of(name)).float()
    data, work = problem([7, 1, 13, 4, 2], torch.float32), LocalWork(None, 5, 4)
    replayed = engine(taped, model, data, work, optimizer)
    eager = engine(graph, model, data, work, optimizer)
    schedule = schedule_of(eager, np.array([0, 1, 3]), 1, lr=0.1)
    result = replayed.backend.train([initial(model)] * 3, schedule)
    copied, num_tapes = copy.deepcopy(result), len(replayed.backend.recorder.tapes)

    next_schedule = schedule_of(eager, np.array([2, 1, 4]), 2, lr=0.03)
    start = models_like(model, 3)
    actual = replayed.backend.train(start, next_schedule)
    assert_same_bits(actual, eager.backend.train(start, next_schedule), next_schedule)
    assert_same_bits(result, copied, schedule)  # The second training overwrites no result.
    if name != "batch norm and dropout":  # Other batches are full there, and recorded apart.
        assert len(replayed.backend.recorder.tapes) == num_tapes


def test_steps_are_split_into_recordings_of_powers_of_two_and_one_form() -> None:
    def sizes(num_steps: int, max_steps: int) -> list[int]:
        return [size for size, _ in split_into_recordings([False] * num_steps, max_steps)]

    assert sizes(30, 64) == [16, 8, 4, 2]
    assert sizes(150, 64) == [64, 64, 16, 4, 2]
    assert sizes(0, 64) == []
    mixed = split_into_recordings([True] * 3 + [False] + [True] * 4, 2)
    assert mixed == [(2, True), (1, True), (1, False), (2, True), (2, True)]


def test_a_recording_has_fewer_steps_the_more_kernels_a_step_has() -> None:
    assert [longest_recording(n) for n in (0, 10, 1_000, 10**6)] == [MAX_STEPS, MAX_STEPS, 4, 1]


def test_sizes_are_rounded_up_to_four_significant_digits() -> None:
    assert [round_up(n) for n in (0, 5, 10, 15, 17, 100)] == [0, 5, 10, 15, 18, 104]


def test_cohorts_of_many_sizes_keep_few_recordings_and_equal_the_reference() -> None:
    data = problem([4] * 24)
    replayed, expected = (engine(build, chain(), data) for build in (taped, reference))
    for count in (3, 1, 2, 24, 5, 7, 9, 11, 13, 15, 3):
        assert_engines_equal(replayed, expected, np.arange(count))
    assert len(replayed.backend._trainers) == MAX_TRAINERS


def test_fewer_clients_replay_the_recordings_for_more_if_each_client_has_its_own() -> None:
    data = problem([4] * 5)
    replayed, expected = (engine(build, model_of("conv"), data) for build in (taped, reference))
    assert_engines_equal(replayed, expected, np.arange(5))
    num_tapes = len(replayed.backend.recorder.tapes)
    for count in (2, 1, 4):
        assert_engines_equal(replayed, expected, np.arange(count))
    assert len(replayed.backend.recorder.tapes) == num_tapes
    assert len(replayed.backend._trainers) == 1


def test_full_batches_use_the_ordinary_batch_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    forms: list[bool] = []
    step = SingleClientSteps.step

    def noted_step(self: SingleClientSteps, *, full: bool) -> None:
        forms.append(full)
        step(self, full=full)

    monkeypatch.setattr(SingleClientSteps, "step", noted_step)
    eager = engine(graph, model_of("batch norm 2d"), problem([8, 13, 3]), LocalWork(1, None, 4))
    eager.train(initial(eager.workload.model), np.arange(3), 1, 0.1)
    # Batches of 4 4, 4 4 4 1 and 3 samples
    assert sorted(forms) == 2 * [False] + 5 * [True]


class FailingRecorder(Recorder):
    def record(self, step: Body, times: int, prepare: Body, track: int) -> Body:
        raise NotRecordedError("operation not permitted")


def test_steps_are_made_one_by_one_if_recording_fails(capfd: pytest.CaptureFixture[str]) -> None:
    data = problem(SIZES["ragged"])
    failing, expected = (engine(build, chain(), data) for build in (graph, reference))
    failing.backend.recorder = FailingRecorder("")
    assert_engines_equal(failing, expected, np.arange(5))
    assert failing.description == "graph, linear layers, step by step (operation not permitted)"
    message = "engine=graph: not recorded (slower, same results): operation not permitted"
    assert capfd.readouterr().err.splitlines() == [message]


def test_nothing_is_recorded_on_a_cpu() -> None:
    description = engine(graph, chain(), problem([4])).description
    assert description == "graph, linear layers, step by step (no CUDA graphs on device cpu)"


# --- what is rejected -----------------------------------------------------------------------------


class NormOverTokens(nn.Module):
    """BatchNorm over samples and tokens as one axis, which a mask of samples cannot describe."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(self.a(x.flatten(1, 2)).flatten(0, 1)).view(len(x), -1, 6)
        return self.b(tokens.mean(1))  # type: ignore[no-any-return]


def untracked_norm() -> nn.Module:
    norm = nn.BatchNorm1d(16, track_running_stats=False)
    return nn.Sequential(nn.Flatten(), norm, nn.Linear(16, 3))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (NormOverTokens, r"NormOverTokens cannot take padded batches: .*\n.*sequential"),
        (untracked_norm, "BatchNorm1d"),
    ],
)
def test_a_model_that_cannot_take_padded_batches_is_rejected(
    model: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(graph, model().double(), problem([4]))


class UsersOptimizer(SGD):
    """A subclass, which may have another rule."""


def test_a_users_optimiser_is_rejected() -> None:
    schedule = OPTIMIZERS["sgd"].schedule
    own = UsersOptimizer(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0, schedule=schedule)
    message = r"cannot record the steps of UsersOptimizer.*\n.*engine=batched"
    with pytest.raises(ConfigError, match=message):
        graph(chain(), problem([4]), WORKS["epochs"], own, Streams(3))


# --- on a pretended CUDA device -------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Local training of clients with `sizes` samples of a `shape`."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    sizes: list[int]
    work: LocalWork
    optimizer: str

    def engine(self, device: str, build: Callable[..., Engine]) -> Engine:
        total = sum(self.sizes)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = self.model()
            x, y = torch.randn(total, *self.shape), torch.randint(10, (total,))
        positions = np.split(np.arange(total), np.cumsum(self.sizes)[:-1])
        data = ClientData(x.to(device), y.to(device), positions, positions, 10)
        return build(model.to(device), data, self.work, OPTIMIZERS[self.optimizer], Streams(0))


def train(engine: Engine, round: int) -> Cohort:
    ids = np.arange(len(engine.data.train))
    return engine.train(initial(engine.workload.model), ids, round, 0.1 / round)


def small_resnet() -> nn.Module:
    return ResNet20((1, 4, 4), 10, shortcut="pad", norm="batch", groups=4)


def small_mlp() -> nn.Module:
    return MLP((1, 4, 4), 10, hidden=[8], dropout=0.5)


RESNET = Case(small_resnet, (1, 4, 4), [2, 3], LocalWork(1, None, 2), "adam")
DROPOUT = Case(small_mlp, (1, 4, 4), [3, 0, 9], LocalWork(2, None, 4), "nesterov")
CONVOLUTIONS = Case(
    lambda: CNN((1, 18, 18), 10), (1, 18, 18), [3, 2], LocalWork(1, None, 2), "momentum"
)


@pytest.mark.parametrize("case", [DROPOUT, CONVOLUTIONS, RESNET])
def test_cuda_graphs_equal_tapes_on_the_cpu_to_the_last_bit(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case is not DROPOUT:
        monkeypatch.setattr(torch_backend, "layout_for", lambda *args: torch.channels_last)
    on_cpu = case.engine("cpu", taped)
    expected = [train(on_cpu, round) for round in (1, 2)]
    with PretendedCard():
        on_card = case.engine("cuda", graph)
        for round in (1, 2):
            actual, cohort = train(on_card, round), expected[round - 1]
            for name, value in cohort.delta.items():
                assert torch.equal(held(actual.delta[name]), value)
            np.testing.assert_array_equal(actual.loss, cohort.loss)


@pytest.mark.parametrize(("choice", "num_programs"), [("together", 1), ("side by side", 3)])
def test_the_faster_program_trains(
    choice: str, num_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(small_resnet, (1, 4, 4), [2, 2, 2], LocalWork(1, None, 2), "adam")
    timed = []

    def fastest(device: torch.device, what: str, times: Any) -> str:
        timed.append(what)
        assert all(measure() > 0 for measure in times.values())
        return choice

    monkeypatch.setattr(graph_backend, "STACKING_DEVICES", ("cpu",))
    monkeypatch.setattr(graph_backend, "fastest", fastest)
    on_cpu: Any = case.engine("cpu", graph)
    train(on_cpu, 1)
    assert len(timed) == 1
    assert "3 clients, batches of 2" in timed[0]
    *_, trainer = on_cpu.backend._trainers.values()
    assert len(trainer.programs) == num_programs


def test_a_step_that_waits_for_the_device_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    samples_at = graph_steps.samples_at

    def waiting(*args: Any) -> Any:
        x = samples_at(*args)
        assert not x.isnan().any().item()
        return x

    monkeypatch.setattr(graph_steps, "samples_at", waiting)
    with PretendedCard() as card:
        on_card = DROPOUT.engine("cuda", graph)
        train(on_card, 1)
        card.counts.reset()
        train(on_card, 2)
    reason = "_local_scalar_dense: operation not permitted when stream is capturing"
    assert on_card.description == f"graph, linear layers, step by step ({reason})"
    message = f"engine=graph: not recorded (slower, same results): {reason}\n"
    assert capfd.readouterr().err == message
    # It then breaks the budget of a round (tests/test_round_budget.py).
    assert card.counts.waits.total() > 3
    assert card.counts.launches.total() > 120


def test_recordings_that_replay_side_by_side_have_streams_and_workspaces_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before torch 2.15, workspaces are cleared before each capture, so that it takes new ones."""
    events: list[Any] = []
    with PretendedCard():
        captured = torch.cuda.graph

        def noted_capture(graph: Any, pool: Any = None, stream: Any = None) -> Any:
            events.append(stream)
            return captured(graph, pool, stream)

        def clear() -> None:
            events.append("clear")

        with monkeypatch.context() as patch:
            patch.setattr(recorder, "FIRST_WITH_OWN_WORKSPACES", "99.1")
            patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
            patch.setattr(torch.cuda, "graph", noted_capture)
            train(CONVOLUTIONS.engine("cuda", graph), 1)
    assert set(events[::2]) == {"clear"}
    streams = events[1::2]
    assert None not in streams
    assert len({id(stream) for stream in streams}) == len(CONVOLUTIONS.sizes)
