"""Every backend equals the reference, which is plain PyTorch, client by client.

In double precision they agree to 1e-10.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.core.arrays import Ints
from fedsim.core.errors import DataError
from fedsim.core.rng import Streams
from fedsim.core.types import Cohort
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine, mean_losses
from fedsim.engine.graph import backend as graph_backend
from fedsim.engine.model import initial
from fedsim.engine.optimizers import SGD, Adam, Constant, LocalOptimizer
from fedsim.engine.schedule import LocalWork, Schedule
from tests.engines import batched, graph, native, reference, schedule_of
from tests.tape import TapeRecorder


def mlp(*extra: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), *extra, nn.ReLU(), nn.Linear(8, 3))


def conv(*norms: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), *norms, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3)
    )


def shared_dropout() -> nn.Module:
    dropout = nn.Dropout(0.5)
    first = nn.Flatten(), nn.Linear(16, 8), dropout, nn.ReLU()
    return nn.Sequential(*first, nn.Linear(8, 8), dropout, nn.Linear(8, 3))


class WithUnused(nn.Module):
    """Has a parameter that its forward pass never uses, whose gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(16, 8), nn.Linear(8, 3), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x.flatten(1))))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "dropout": lambda: mlp(nn.Dropout(0.5)),
    "two dropouts": lambda: mlp(nn.Dropout(0.5), nn.Dropout(0.2)),
    "batch norm 1d": lambda: mlp(nn.BatchNorm1d(8)),
    "batch norm without affine": lambda: mlp(nn.BatchNorm1d(8, affine=False)),
    "batch norm 1d and dropout": lambda: mlp(nn.BatchNorm1d(8), nn.Dropout(0.3)),
    "shared dropout": shared_dropout,
    "conv": conv,
    "batch norm 2d": lambda: conv(nn.BatchNorm2d(4)),
    "group norm": lambda: conv(nn.GroupNorm(2, 4)),
    "batch norm and dropout": lambda: conv(nn.BatchNorm2d(4), nn.Dropout(0.3)),
}
sgd = partial(SGD, lr=0.1, schedule=Constant())
adam = partial(
    Adam, lr=0.01, beta1=0.9, beta2=0.99, eps=1e-4, weight_decay=0.1, schedule=Constant()
)
OPTIMIZERS: dict[str, LocalOptimizer] = {
    "sgd": sgd(momentum=0.0, nesterov=False, weight_decay=0.0),
    "decay": sgd(momentum=0.0, nesterov=False, weight_decay=0.1),
    "momentum": sgd(momentum=0.9, nesterov=False, weight_decay=0.1),
    "nesterov": sgd(momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": adam(decoupled=False),
    "adamw": adam(decoupled=True),
}
SIZES = {
    "equal": [8, 8, 8],
    "ragged": [7, 1, 13, 4, 2],
    "one": [1],
    "some empty": [5, 0, 9],
    "all empty": [0, 0],
}
WORKS = {
    "epochs": LocalWork(2, None, 4),
    "steps": LocalWork(None, 5, 4),
    "big batch": LocalWork(3, None, 64),
}


def problem(sizes: list[int], dtype: torch.dtype = torch.float64) -> ClientData:
    """Return clients with `sizes` samples [1, 4, 4] of three classes, in random order."""
    total = max(sum(sizes), 1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(total, 1, 4, 4, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randint(3, (total,), generator=generator)
    order = np.random.default_rng(0).permutation(sum(sizes))
    positions = np.split(order, np.cumsum(sizes)[:-1])
    return ClientData(x, y, positions, positions, 3)


def model_of(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return MODELS[name]().to(dtype)


def differentiated(*task: Any, **parameters: Any) -> Engine:
    """Build the batched engine with vmap also for chains of linear layers."""
    engine: Any = batched(*task, **parameters)
    engine.backend.chain = None
    return engine  # type: ignore[no-any-return]


def taped(*task: Any, **parameters: Any) -> Engine:
    """Build the graph engine with a tape that behaves as CUDA graphs do."""
    engine: Any = graph(*task, **parameters)
    engine.backend.recorder = TapeRecorder()
    return engine  # type: ignore[no-any-return]


def stacked(*task: Any, **parameters: Any) -> Engine:
    """Build the graph engine whose clients all train together, as on a GPU."""
    with mock.patch.object(graph_backend, "STACKING_DEVICES", ("cpu", "cuda")):
        engine: Any = taped(*task, **parameters)
    assert engine.backend.chain is not None or engine.backend._stacked is not None
    engine.backend.min_share = 0.0
    engine.backend._faster_together = lambda *training: True
    return engine  # type: ignore[no-any-return]


BACKENDS: dict[str, Callable[..., Engine]] = {
    "batched": batched,
    "differentiated": differentiated,
    "graph": taped,
    "stacked": stacked,
    "native": partial(native, workers=2),
    "side by side": partial(reference, workers=3),
}


def supports(backend: str, model: str, optimizer: str = "sgd") -> bool:
    """Return whether the backend trains this model, and not as another backend does."""
    if backend == "native":
        return model in ("mlp", "dropout", "conv") and not optimizer.startswith("adam")
    if backend == "differentiated":
        return model in ("mlp", "dropout")
    return backend != "stacked" or model not in ("mlp", "dropout")


def backends_and(*models: str) -> pytest.MarkDecorator:
    """Parametrize a test with `backend` and `name`, the name of a model that it supports."""
    pairs = [(backend, name) for backend in BACKENDS for name in models if supports(backend, name)]
    return pytest.mark.parametrize(("backend", "name"), pairs)


def assert_cohorts_equal(actual: Cohort, expected: Cohort, tolerance: float = 1e-10) -> None:
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    for name, value in expected.delta.items():
        close(actual.delta[name], value)
        assert not actual.delta[name].requires_grad
    np.testing.assert_allclose(actual.loss, expected.loss, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(actual.rms_loss, expected.rms_loss, rtol=tolerance, atol=tolerance)
    close(actual.momentum, expected.momentum)
    assert actual.steps.tolist() == expected.steps.tolist()
    assert actual.samples.tolist() == expected.samples.tolist()


def assert_engines_equal(
    engine: Engine, expected: Engine, ids: Ints, tolerance: float = 1e-10
) -> None:
    """Check that two engines train clients `ids` equally, and leave the start as it was."""
    params = initial(engine.workload.model)
    before = copy.deepcopy(params)
    lr = engine.workload.optimizer.lr
    trained, expected_cohort = (each.train(params, ids, 2, lr) for each in (engine, expected))
    assert all(torch.equal(params[name], value) for name, value in before.items())
    assert_cohorts_equal(trained, expected_cohort, tolerance)


NORM = "batch norm 1d and dropout"
Case = tuple[str, str, str, str]
"""Names of a model, of clients' sizes, of the local work and of an optimiser."""
EVERY_MODEL: list[Case] = [(name, "ragged", "epochs", "sgd") for name in MODELS]
EVERY_OPTIMIZER: list[Case] = [
    (name, "ragged", "epochs", optimizer)
    for name in ("mlp", "dropout", NORM)
    for optimizer in OPTIMIZERS
]
EVERY_SIZE: list[Case] = [("mlp", sizes, work, "sgd") for sizes in SIZES for work in WORKS] + [
    (NORM, "one", "steps", "sgd"),
    (NORM, "equal", "epochs", "sgd"),
    (NORM, "ragged", "steps", "sgd"),
    (NORM, "ragged", "big batch", "sgd"),
    (NORM, "some empty", "epochs", "sgd"),
    (NORM, "all empty", "big batch", "sgd"),
]
MORE_SIZES: list[Case] = [(NORM, sizes, work, "sgd") for sizes in SIZES for work in WORKS]
CASES = list(dict.fromkeys([*EVERY_MODEL, *EVERY_OPTIMIZER, *EVERY_SIZE, *MORE_SIZES]))


def cases_of_backends() -> list[Any]:
    """Return a backend and a case for each test.

    Slow are `MORE_SIZES`, and all but each model and two sizes of "side by side": it trains as the
    reference does, in several workers.
    """
    fast = {*EVERY_MODEL, *EVERY_OPTIMIZER, *EVERY_SIZE}
    fast_side_by_side = {*EVERY_MODEL, (NORM, "one", "steps", "sgd")}
    fast_side_by_side.update([(NORM, "some empty", "epochs", "sgd")])
    cases = []
    for backend in BACKENDS:
        for case in CASES:
            if supports(backend, case[0], case[3]):
                is_fast = case in (fast_side_by_side if backend == "side by side" else fast)
                marks = () if is_fast else pytest.mark.slow
                cases.append(pytest.param(backend, case, marks=marks, id=f"{backend}-{case}"))
    return cases


def task_of(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    """Return the arguments of an engine's constructor."""
    name, sizes, work, optimizer = case
    data = problem(SIZES[sizes], dtype)
    return model_of(name, dtype), data, WORKS[work], OPTIMIZERS[optimizer], Streams(3)


@cache
def expected_cohort(case: Case) -> Cohort:
    engine = reference(*task_of(case))
    ids = np.arange(len(engine.data.train))
    return engine.train(initial(engine.workload.model), ids, 2, OPTIMIZERS[case[3]].lr)


@pytest.mark.parametrize(("backend", "case"), cases_of_backends())
def test_a_backend_equals_the_reference(backend: str, case: Case) -> None:
    engine, expected = BACKENDS[backend](*task_of(case)), expected_cohort(case)
    params, lr = initial(engine.workload.model), OPTIMIZERS[case[3]].lr
    trained = engine.train(params, expected.ids, 2, lr)
    assert_cohorts_equal(trained, expected)
    assert all(torch.equal(value, expected.start[name]) for name, value in params.items())
    with torch.no_grad():  # as a selector may call it
        again = engine.train(params, expected.ids, 2, lr)
    assert all(torch.equal(value, trained.delta[name]) for name, value in again.delta.items())
    assert torch.get_num_threads() == 1  # Workers do not change the caller's threads.


@backends_and("dropout", "batch norm and dropout")
def test_questions_are_answered_as_by_plain_torch(backend: str, name: str) -> None:
    model, data = model_of(name), problem([5, 0, 300])
    engine = BACKENDS[backend](model, data, WORKS["epochs"], OPTIMIZERS["sgd"], Streams(3))
    params, plain = initial(model), copy.deepcopy(model).eval()
    with torch.no_grad():
        logits = plain(data.x)
    sample_losses = nn.functional.cross_entropy(logits, data.y, reduction="none").numpy()
    first, _, last = (sample_losses[positions] for positions in data.evaluate)
    means = [first.mean(), np.nan, last.mean()]
    np.testing.assert_allclose(engine.losses(params, data.evaluate), means, rtol=1e-10)
    # Few samples are gathered; most of all pass in order.
    np.testing.assert_allclose(engine.losses(params, data.evaluate[:1]), means[:1], rtol=1e-10)
    evaluation, hits = engine.evaluate_samples(params, data.x, data.y)
    assert evaluation.loss == pytest.approx(sample_losses.mean())
    assert torch.equal(hits, logits.argmax(1) == data.y)
    assert evaluation.accuracy == float(hits.double().mean())
    predicted = engine.predict(params, data.x)
    torch.testing.assert_close(predicted, logits.log_softmax(1), rtol=1e-10, atol=1e-10)


@backends_and("dropout", "batch norm and dropout")
def test_gradients_are_those_of_plain_torch(backend: str, name: str) -> None:
    model, data = model_of(name), problem([5, 0, 300])
    engine = BACKENDS[backend](model, data, WORKS["epochs"], OPTIMIZERS["sgd"], Streams(3))
    params, plain = initial(model), copy.deepcopy(model).eval()
    loss = nn.functional.cross_entropy(plain(data.x[data.train[2]]), data.y[data.train[2]])
    grads = dict(zip(params, torch.autograd.grad(loss, list(plain.parameters())), strict=False))
    for names in (engine.trained, engine.trained[-2:]):
        with torch.no_grad():
            _, of_empty_list, gradient = engine.client_gradients(params, data.train, names)
        assert not of_empty_list.any()
        expected = torch.cat([grads[name].flatten() for name in names])
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("backend", "chunk_size"), [("batched", 1), ("batched", 2), ("graph", 1), ("graph", 3)]
)
@pytest.mark.parametrize("name", ["dropout", "batch norm and dropout"])
def test_a_chunked_cohort_equals_the_whole(name: str, backend: str, chunk_size: int) -> None:
    task = task_of((name, "ragged", "epochs", "momentum"))
    engine = BACKENDS[backend](*task, chunk_size=chunk_size)
    assert_engines_equal(engine, reference(*task), np.arange(5))


@backends_and("dropout", "batch norm and dropout")
def test_clients_may_start_from_different_models_next_to_any_others(
    backend: str, name: str
) -> None:
    task = task_of((name, "ragged", "epochs", "momentum"))
    engine, expected = BACKENDS[backend](*task), reference(*task)
    model = initial(task[0])
    other_model = {key: value + 0.1 for key, value in model.items()}
    start, ids = [model, other_model, model, model], np.array([3, 0, 4, 2])
    together = engine.backend.train(start, schedule_of(engine, ids, 2)).delta
    expected_delta = expected.backend.train(start, schedule_of(expected, ids, 2)).delta
    torch.testing.assert_close(together, expected_delta, rtol=1e-10, atol=1e-10)
    alone = engine.backend.train([other_model], schedule_of(engine, np.array([0]), 2)).delta
    for key, value in together.items():
        torch.testing.assert_close(alone[key][0], value[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", ["batched", "graph"])
def test_running_out_of_memory_halves_the_chunk_and_says_so(
    backend: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    task = task_of(("mlp", "ragged", "epochs", "sgd"))
    engine: Any = BACKENDS[backend](*task)
    train_chunk = engine.backend._train_chunk
    max_clients = 2

    def train_if_small(start: Any, schedule: Schedule) -> Any:
        if len(schedule) > max_clients:
            torch.empty(2**50)
        return train_chunk(start, schedule)

    monkeypatch.setattr(engine.backend, "_train_chunk", train_if_small)
    assert_engines_equal(engine, reference(*task), np.arange(5))
    assert engine.backend.chunk_size == 2
    message = "engine.chunk_size: out of memory with 5 clients at once; going on with 2\n"
    assert capfd.readouterr().err == message
    max_clients = 0
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        engine.train(initial(task[0]), np.array([0]), 1, 0.1)


@backends_and("mlp", "conv", "batch norm 2d")
def test_one_clients_nan_stays_its_own(backend: str, name: str) -> None:
    """Client 1 has nan. Client 0 makes no step, and client 2 finishes before client 1."""
    data = problem([0, 9, 4, 8])
    x = data.x.clone()
    x[data.train[1]] = torch.nan
    task = WORKS["epochs"], OPTIMIZERS["momentum"], Streams(3)
    params = initial(model_of(name))
    clean, dirty = (
        BACKENDS[backend](model_of(name), each, *task).train(params, np.arange(4), 1, 0.1).delta
        for each in (data, replace(data, x=x))
    )
    for key, value in dirty.items():
        assert torch.equal(value[[0, 2, 3]], clean[key][[0, 2, 3]])
        assert torch.isnan(value[1]).any()
        assert not value[0].any()


@pytest.mark.parametrize(("label", "range_"), [(-1, "-1..2"), (10**9, "0..1000000000")])
def test_a_label_that_is_no_class_is_rejected(label: int, range_: str) -> None:
    message = rf"labels of the training samples must lie in 0\.\.2, found {range_}"
    with pytest.raises(DataError, match=message):
        replace(problem([7]), y=torch.tensor([0, 1, 2, label, 0, 1, 2]))


def test_labels_that_are_not_int64_are_rejected() -> None:
    data = problem([7])
    with pytest.raises(DataError, match=r"must be int64, not torch\.int32"):
        replace(data, y=data.y.int())


class OneWeight(nn.Module):
    """Logits (w x, 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.w * x, 0 * x], dim=1)


@pytest.mark.parametrize("build", [batched, reference, graph])
def test_one_step_by_hand(build: Callable[..., Engine]) -> None:
    """The loss -log sigmoid(w x) has the gradient -x / 2 at w = 0, so a step gives w = lr x / 2."""
    x = torch.tensor([[2.0], [4.0]], dtype=torch.float64)
    positions = [np.array([0]), np.array([1])]
    data = ClientData(x, torch.zeros(2, dtype=torch.long), positions, positions, 2)
    engine = build(OneWeight(), data, LocalWork(1, None, 1), OPTIMIZERS["sgd"], Streams(0))
    start = {"w": torch.zeros(1, dtype=torch.float64)}
    trained = engine.train(start, np.array([0, 1]), 1, lr=0.1)
    assert trained.delta["w"].ravel().tolist() == pytest.approx([0.1 * 2 / 2, 0.1 * 4 / 2])
    assert trained.loss.tolist() == pytest.approx([np.log(2), np.log(2)])


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("build", [batched, taped])
def test_frozen_parameters_do_not_travel_and_unused_ones_only_decay(
    build: Callable[..., Engine], optimizer: Any
) -> None:
    model: Any = WithUnused().double()
    model.a.weight.requires_grad_(False)
    task = model, problem(SIZES["ragged"]), WORKS["epochs"], optimizer, Streams(3)
    engine, expected = build(*task), reference(*task)
    assert "a.weight" not in initial(model)
    assert_engines_equal(engine, expected, np.arange(5))
    change = engine.train(initial(model), np.arange(5), 1, 0.1).delta["unused.weight"]
    assert bool(change.any()) == (optimizer.weight_decay > 0)
    for each in (engine, expected):
        names = ["b.bias", "unused.weight"]
        for gradient in each.client_gradients(initial(model), each.data.train, names):
            assert gradient[:3].any()
            assert not gradient[3:].any()


@pytest.mark.parametrize("build", [batched, reference])
@pytest.mark.parametrize("name", ["mlp", "conv", "batch norm and dropout"])
def test_bfloat16_is_close_and_keeps_parameters_in_single_precision(
    name: str, build: Callable[..., Engine]
) -> None:
    task = task_of((name, "ragged", "epochs", "sgd"), torch.float32)
    exact, rough = batched(*task), build(*task, precision="bf16")
    params, data = initial(task[0]), task[1]
    expected, actual = (each.train(params, np.arange(5), 2, 0.1).delta for each in (exact, rough))
    for key, value in actual.items():
        assert value.dtype is torch.float32
        assert (value - expected[key]).norm() < 0.1 * expected[key].norm() + 1e-3
    assert any(not torch.equal(value, expected[key]) for key, value in actual.items())
    losses = [each.evaluate(params, data.x, data.y).loss for each in (exact, rough)]
    assert losses[0] == pytest.approx(losses[1], rel=0, abs=0.05)


# --- losses of local training ---------------------------------------------------------------------


def schedule_with(counts: Ints, width: int) -> Schedule:
    return Schedule(np.zeros((*counts.shape, width), np.int64), counts, None, 0.1)


def test_losses_by_hand() -> None:
    """Three clients make up to two steps of up to three samples."""
    nan, inf = np.nan, np.inf
    losses = np.array(
        [[[1, 2, 6], [5, nan, inf]], [[4, 2, 100], [7, 7, 7]], [[1, 1, 1], [1, 1, 1]]], float
    )
    schedule = schedule_with(np.array([[3, 1], [2, 0], [0, 0]]), 3)
    loss, rms_loss = mean_losses(losses, schedule)
    # Means over steps of the means over samples
    np.testing.assert_allclose(loss, [((1 + 2 + 6) / 3 + 5) / 2, (4 + 2) / 2, nan])
    squares = [1 + 4 + 36 + 25, 16 + 4]
    np.testing.assert_allclose(rms_loss, [np.sqrt(squares[0] / 4), np.sqrt(squares[1] / 2), nan])
    assert schedule.steps.tolist() == [2, 1, 0]
    assert schedule.samples.tolist() == [4, 2, 0]


def test_padding_changes_no_bit_of_a_clients_losses() -> None:
    losses, counts = np.random.default_rng(0).random((1, 11, 13)), np.full((1, 11), 13)
    padded_losses = np.pad(losses, [(0, 0), (0, 9), (0, 7)], constant_values=3.0)
    padded_counts = np.pad(counts, [(0, 0), (0, 9)])
    expected = mean_losses(losses, schedule_with(counts, 13))
    assert mean_losses(padded_losses, schedule_with(padded_counts, 20)) == expected
