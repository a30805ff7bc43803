"""Every backend equals the reference, which is plain PyTorch, client by client: to 1e-10 in double
precision."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.core.errors import DataError
from fedsim.core.rng import Streams
from fedsim.core.types import Cohort
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine, mean_losses
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
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(16, 8),
        dropout,
        nn.ReLU(),
        nn.Linear(8, 8),
        dropout,
        nn.Linear(8, 3),
    )


class WithUnused(nn.Module):
    """Has a parameter that its forward pass never uses: its gradient is zero, whatever trains
    it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(16, 8), nn.Linear(8, 3), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x.flatten(1))))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(),
    "dropout": lambda: mlp(nn.Dropout(0.5)),
    "two dropouts": lambda: mlp(nn.Dropout(0.5), nn.Dropout(0.2)),
    "batch norm 1d": lambda: mlp(nn.BatchNorm1d(8)),
    "batch norm without affine": lambda: mlp(nn.BatchNorm1d(8, affine=False)),
    "batch norm 1d and dropout": lambda: mlp(nn.BatchNorm1d(8), nn.Dropout(0.3)),
    "shared dropout": shared_dropout,
    "conv": lambda: conv(),
    "batch norm 2d": lambda: conv(nn.BatchNorm2d(4)),
    "group norm": lambda: conv(nn.GroupNorm(2, 4)),
    "batch norm and dropout": lambda: conv(nn.BatchNorm2d(4), nn.Dropout(0.3)),
}
PLAIN: Any = {"schedule": Constant()}
OPTIMIZERS: dict[str, LocalOptimizer] = {
    "sgd": SGD(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0, **PLAIN),
    "decay": SGD(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.1, **PLAIN),
    "momentum": SGD(lr=0.1, momentum=0.9, nesterov=False, weight_decay=0.1, **PLAIN),
    "nesterov": SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, **PLAIN),
    "adam": Adam(
        lr=0.01, beta1=0.9, beta2=0.99, eps=1e-4, weight_decay=0.1, decoupled=False, **PLAIN
    ),
    "adamw": Adam(
        lr=0.01, beta1=0.9, beta2=0.99, eps=1e-4, weight_decay=0.1, decoupled=True, **PLAIN
    ),
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
    total = max(sum(sizes), 1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(total, 1, 4, 4, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randint(3, (total,), generator=generator)
    ends = np.cumsum(sizes)
    order = np.random.default_rng(0).permutation(sum(sizes))
    positions = [order[e - s : e] for s, e in zip(sizes, ends, strict=True)]
    return ClientData(x, y, positions, positions, 3)


def model_of(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return MODELS[name]().to(dtype)


def engines(
    model: nn.Module,
    data: ClientData,
    work: LocalWork,
    optimizer: LocalOptimizer,
    workers: int = 1,
    **switches: Any,
) -> tuple[Engine, Engine]:
    common = (model, data, work, optimizer, Streams(3))
    return batched(*common, **switches), reference(*common, workers=workers)


def differentiated(*task: Any, **switches: Any) -> Engine:
    """Batched, with chains of linear layers not written out."""
    engine: Any = batched(*task, **switches)
    engine.backend.chain = None
    return engine  # type: ignore[no-any-return]


def taped(*task: Any, **switches: Any) -> Engine:
    """What a CUDA graph would replay."""
    engine: Any = graph(*task, **switches)
    engine.backend.recorder = TapeRecorder()
    return engine  # type: ignore[no-any-return]


def on_two_cores(*task: Any, **switches: Any) -> Engine:
    return native(*task, workers=2, **switches)


def side_by_side(*task: Any, **switches: Any) -> Engine:
    return reference(*task, workers=3, **switches)


BACKENDS: dict[str, Callable[..., Engine]] = {
    "batched": batched,
    "differentiated": differentiated,
    "graph": taped,
    "native": on_two_cores,
    "side by side": side_by_side,
}
CHAINED = ("mlp", "dropout", "conv")


def fits(backend: str, model: str, optimizer: str = "sgd") -> bool:
    """Whether the backend trains this model, and in a way of its own."""
    native = backend == "native" and (model not in CHAINED or optimizer.startswith("adam"))
    return not native and not (backend == "differentiated" and model not in ("mlp", "dropout"))


def assert_alike(a: Cohort, b: Cohort, tolerance: float = 1e-10) -> None:
    for name, value in b.delta.items():
        torch.testing.assert_close(a.delta[name], value, rtol=tolerance, atol=tolerance)
        assert not a.delta[name].requires_grad
    np.testing.assert_allclose(a.loss, b.loss, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(a.rms_loss, b.rms_loss, rtol=tolerance, atol=tolerance)
    assert (a.momentum is None) == (b.momentum is None)
    for name in a.momentum or {}:
        torch.testing.assert_close(
            a.momentum[name], b.momentum[name], rtol=tolerance, atol=tolerance
        )
    assert a.steps.tolist() == b.steps.tolist()
    assert a.samples.tolist() == b.samples.tolist()


def assert_equal(one: Engine, other: Engine, ids: np.ndarray, tolerance: float = 1e-10) -> None:
    params = initial(one.workload.model)
    before = copy.deepcopy(params)
    a, b = (e.train(params, ids, round=2, lr=e.workload.optimizer.lr) for e in (one, other))
    assert all(torch.equal(params[name], before[name]) for name in params)
    assert_alike(a, b, tolerance)


NORM = "batch norm 1d and dropout"
Case = tuple[str, str, str, str]
CASES = [
    *((name, "ragged", "epochs", "sgd") for name in MODELS),
    *((name, sizes, work, "sgd") for name in ("mlp", NORM) for sizes in SIZES for work in WORKS),
    *(
        (name, "ragged", "epochs", optimizer)
        for name in ("mlp", "dropout", NORM)
        for optimizer in OPTIMIZERS
    ),
]


def task_of(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    name, sizes, work, optimizer = case
    return (
        model_of(name, dtype),
        problem(SIZES[sizes], dtype),
        WORKS[work],
        OPTIMIZERS[optimizer],
        Streams(3),
    )


@cache
def expected(case: Case) -> Cohort:
    engine = reference(*task_of(case))
    params, count = initial(engine.workload.model), len(SIZES[case[1]])
    return engine.train(params, np.arange(count), 2, OPTIMIZERS[case[3]].lr)


@pytest.mark.parametrize(
    ("backend", "case"),
    [(b, c) for b in BACKENDS for c in dict.fromkeys(CASES) if fits(b, c[0], c[3])],
    ids=str,
)
def test_a_backend_equals_the_reference(backend: str, case: Case) -> None:
    """Under `torch.no_grad` too, as a selector may call it."""
    engine = BACKENDS[backend](*task_of(case))
    wanted = expected(case)
    params, ids = initial(engine.workload.model), np.arange(len(SIZES[case[1]]))
    found = engine.train(params, ids, 2, OPTIMIZERS[case[3]].lr)
    assert_alike(found, wanted)
    assert all(torch.equal(value, wanted.start[name]) for name, value in params.items())
    with torch.no_grad():
        again = engine.train(params, ids, 2, OPTIMIZERS[case[3]].lr)
    assert all(torch.equal(value, found.delta[name]) for name, value in again.delta.items())
    assert (
        torch.get_num_threads() == 1
    )  # as the tests set it: threads of workers keep theirs to themselves


@pytest.mark.parametrize("name", ["dropout", "batch norm and dropout"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_questions_are_answered_as_plain_torch_does(backend: str, name: str) -> None:
    if not fits(backend, name):
        return
    model, data = model_of(name), problem([5, 0, 300])
    engine = BACKENDS[backend](model, data, WORKS["epochs"], OPTIMIZERS["sgd"], Streams(3))
    params = initial(model)
    with torch.no_grad():
        output = copy.deepcopy(model).eval()(data.x)
    each = nn.functional.cross_entropy(output, data.y, reduction="none").numpy()
    losses = engine.losses(params, data.evaluate)
    assert losses[[0, 2]] == pytest.approx(
        [each[data.evaluate[i]].mean() for i in (0, 2)], rel=1e-10
    )
    assert np.isnan(losses[1])
    few = engine.losses(
        params, data.evaluate[:1]
    )  # gathered; of all, samples are passed in their order
    assert few == pytest.approx(losses[:1], rel=1e-10)
    evaluation, hits = engine.evaluate_samples(params, data.x, data.y)
    assert evaluation.loss == pytest.approx(each.mean())
    assert torch.equal(hits, output.argmax(1) == data.y)
    assert evaluation.accuracy == float(hits.double().mean())
    torch.testing.assert_close(
        engine.predict(params, data.x), output.log_softmax(1), rtol=1e-10, atol=1e-10
    )
    plain = copy.deepcopy(model).eval()
    loss = nn.functional.cross_entropy(plain(data.x[data.train[2]]), data.y[data.train[2]])
    slopes = dict(zip(params, torch.autograd.grad(loss, list(plain.parameters())), strict=False))
    for names in (engine.trained, engine.trained[-2:]):
        with torch.no_grad():
            _, empty, found = engine.client_gradients(params, data.train, names)
        assert not empty.any()
        torch.testing.assert_close(
            found, torch.cat([slopes[n].flatten() for n in names]), rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize(
    ("backend", "chunk_size"), [("batched", 1), ("batched", 2), ("graph", 1), ("graph", 3)]
)
@pytest.mark.parametrize("name", ["dropout", "batch norm and dropout"])
def test_a_chunked_cohort_equals_the_whole(name: str, backend: str, chunk_size: int) -> None:
    task = task_of((name, "ragged", "epochs", "momentum"))
    assert_equal(BACKENDS[backend](*task, chunk_size=chunk_size), reference(*task), np.arange(5))


@pytest.mark.parametrize("name", ["dropout", "batch norm and dropout"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_clients_may_start_from_models_of_their_own_in_any_company(backend: str, name: str) -> None:
    if not fits(backend, name):
        return
    task = task_of((name, "ragged", "epochs", "momentum"))
    one, other = BACKENDS[backend](*task), reference(*task)
    model = initial(task[0])
    start = [model, {n: v + 0.1 for n, v in model.items()}]
    results = [
        e.backend.train([start[i] for i in (0, 1, 0, 0)], schedule_of(e, np.array([3, 0, 4, 2]), 2))
        for e in (one, other)
    ]
    for tensor, value in results[1].delta.items():
        torch.testing.assert_close(results[0].delta[tensor], value, rtol=1e-10, atol=1e-10)
    alone = one.backend.train(start[1:], schedule_of(one, np.array([0]), 2))
    for tensor, value in results[0].delta.items():
        torch.testing.assert_close(alone.delta[tensor][0], value[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", ["batched", "graph"])
def test_running_out_of_memory_halves_the_chunk_says_so_and_loses_nothing(
    backend: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    task, most = task_of(("mlp", "ragged", "epochs", "sgd")), 2
    engine: Any = BACKENDS[backend](*task)
    train_chunk = engine.backend._train_chunk

    def refuse_large(start: Any, schedule: Schedule) -> Any:
        if len(schedule) > most:
            torch.empty(2**50)
        return train_chunk(start, schedule)

    monkeypatch.setattr(engine.backend, "_train_chunk", refuse_large)
    assert_equal(engine, reference(*task), np.arange(5))
    assert engine.backend.chunk_size == 2
    assert (
        capfd.readouterr().err
        == "engine.chunk_size: out of memory with 5 clients at once; going on with 2\n"
    )
    most = 0
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):  # not even one client
        engine.train(initial(task[0]), np.array([0]), 1, 0.1)


@pytest.mark.parametrize("name", ["mlp", "conv", "batch norm 2d"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_clients_nan_stays_its_own(backend: str, name: str) -> None:
    """A client without steps is to the left of it, one that has finished to the right."""
    if not fits(backend, name):
        return
    data = problem([0, 9, 4, 8])
    broken = data.x.clone()
    broken[data.train[1]] = torch.nan
    dirty = ClientData(broken, data.y, data.train, data.evaluate, 3)
    task = WORKS["epochs"], OPTIMIZERS["momentum"], Streams(3)
    made = [BACKENDS[backend](model_of(name), some, *task) for some in (data, dirty)]
    clean, mixed = (engine.train(initial(model_of(name)), np.arange(4), 1, 0.1) for engine in made)
    for tensor, delta in mixed.delta.items():
        assert torch.equal(delta[[0, 2, 3]], clean.delta[tensor][[0, 2, 3]])
        assert torch.isnan(delta[1]).any()
        assert not delta[0].any()


@pytest.mark.parametrize(("label", "found"), [(-1, "-1..2"), (10**9, "0..1000000000")])
def test_a_label_that_is_no_class_never_reaches_an_engine(label: int, found: str) -> None:
    data = problem([7])
    with pytest.raises(
        DataError, match=rf"labels of the training samples must lie in 0\.\.2, found {found}"
    ):
        replace(data, y=torch.tensor([0, 1, 2, label, 0, 1, 2]))
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
def test_one_step_by_hand(build: Any) -> None:
    """Loss -log sigmoid(w x) at w=0: gradient -x/2, so x = (2, 4) in two clients gives w = lr x /
    2."""
    x = torch.tensor([[2.0], [4.0]], dtype=torch.float64)
    positions = [np.array([0]), np.array([1])]
    data = ClientData(x, torch.zeros(2, dtype=torch.long), positions, positions, 2)
    engine = build(OneWeight(), data, LocalWork(1, None, 1), OPTIMIZERS["sgd"], Streams(0))
    trained = engine.train({"w": torch.zeros(1, dtype=torch.float64)}, np.array([0, 1]), 1, 0.1)
    assert trained.delta["w"].ravel().tolist() == pytest.approx([0.1, 0.2])
    assert trained.loss.tolist() == pytest.approx([np.log(2), np.log(2)])


@pytest.mark.parametrize("build", [batched, taped])
def test_parameters_that_are_frozen_or_not_used(build: Any) -> None:
    """The former neither travel nor change, the latter change by weight decay alone, and their
    gradient is zero."""
    data = problem(SIZES["ragged"])
    for optimizer in OPTIMIZERS.values():
        model: Any = WithUnused().double()
        model.a.weight.requires_grad_(False)
        assert "a.weight" not in initial(model)
        one, other = (
            b(model, data, WORKS["epochs"], optimizer, Streams(3)) for b in (build, reference)
        )
        assert_equal(one, other, np.arange(5))
        decays = optimizer.weight_decay > 0  # type: ignore[attr-defined]
        assert (
            bool(one.train(initial(model), np.arange(5), 1, 0.1).delta["unused.weight"].any())
            == decays
        )
    for engine in (one, other):
        for gradient in engine.client_gradients(
            initial(model), data.train, ["b.bias", "unused.weight"]
        ):
            assert gradient[:3].any()
            assert gradient[3:].tolist() == [0.0] * 16


@pytest.mark.parametrize("name", ["mlp", "conv", "batch norm and dropout"])
def test_bfloat16_is_close_and_keeps_parameters_in_single_precision(name: str) -> None:
    task = task_of((name, "ragged", "epochs", "sgd"), torch.float32)
    exact, rough = (
        batched(*task),
        [build(*task, precision="bf16") for build in (batched, reference)],
    )
    params, data = initial(task[0]), task[1]
    wanted = exact.train(params, np.arange(5), 2, 0.1)
    for engine in rough:
        got = engine.train(params, np.arange(5), 2, 0.1)
        for n, delta in got.delta.items():
            assert delta.dtype is torch.float32
            assert (
                float((delta - wanted.delta[n]).norm()) < 0.1 * float(wanted.delta[n].norm()) + 1e-3
            )
        assert any(not torch.equal(delta, wanted.delta[n]) for n, delta in got.delta.items())
        assert (
            abs(
                engine.evaluate(params, data.x, data.y).loss
                - exact.evaluate(params, data.x, data.y).loss
            )
            < 0.05
        )


# --- what the losses of local training come to -----------------------------------------------------------------------


def counted(counts: np.ndarray, width: int) -> Schedule:
    return Schedule(np.zeros((*counts.shape, width), np.int64), counts, None, 0.1)


def test_losses_by_hand() -> None:
    """Of three clients in two steps of at most three samples; what stands behind the counts means
    nothing. Means over steps of the means of batches: (9/3 + 5) / 2 and 3. Squares over all
    samples: 1, 4, 36, 25 and 16, 4."""
    losses = np.array(
        [[[1, 2, 6], [5, np.nan, np.inf]], [[4, 2, 100], [7, 7, 7]], [[1, 1, 1], [1, 1, 1]]], float
    )
    schedule = counted(np.array([[3, 1], [2, 0], [0, 0]]), 3)
    means = mean_losses(losses, schedule)
    assert means[0][:2].tolist() == pytest.approx([4.0, 3.0])
    assert means[1][:2].tolist() == pytest.approx([np.sqrt(66 / 4), np.sqrt(20 / 2)])
    assert np.isnan([means[0][2], means[1][2]]).all()
    assert schedule.steps.tolist() == [2, 1, 0]
    assert schedule.samples.tolist() == [4, 2, 0]


def test_padding_changes_no_bit() -> None:
    """A client's losses are the same however many steps and samples the others have."""
    losses, counts = np.random.default_rng(0).random((1, 11, 13)), np.full((1, 11), 13)
    alone = mean_losses(losses, counted(counts, 13))
    padded = np.pad(losses, [(0, 0), (0, 9), (0, 7)], constant_values=3.0)
    beside = mean_losses(padded, counted(np.pad(counts, [(0, 0), (0, 9)]), 20))
    assert [mean[0] for mean in alone] == [mean[0] for mean in beside]
