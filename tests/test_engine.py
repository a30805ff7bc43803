"""The batched engine equals the sequential one, which is plain PyTorch: to 1e-10 in double precision."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.core.rng import Streams
from fedsim.engine.batched import BatchedBackend
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine
from fedsim.engine.model import initial
from fedsim.engine.optimizers import SGD, Adam, Constant, LocalOptimizer
from fedsim.engine.schedule import LocalWork, Schedule
from tests.engines import auto, batched, reference


def mlp(*extra: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), *extra, nn.ReLU(), nn.Linear(8, 3))


def conv(*norms: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), *norms, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3))


def shared_dropout() -> nn.Module:
    dropout = nn.Dropout(0.5)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), dropout, nn.ReLU(), nn.Linear(8, 8), dropout, nn.Linear(8, 3))


MODELS = {
    "mlp": lambda: mlp(),
    "dropout": lambda: mlp(nn.Dropout(0.5), nn.Dropout(0.2)),
    "batch norm 1d": lambda: mlp(nn.BatchNorm1d(8)),
    "batch norm without affine": lambda: mlp(nn.BatchNorm1d(8, affine=False)),
    "batch norm 1d and dropout": lambda: mlp(nn.BatchNorm1d(8), nn.Dropout(0.3)),
    "shared dropout": shared_dropout,
    "conv": lambda: conv(),
    "batch norm 2d": lambda: conv(nn.BatchNorm2d(4)),
    "group norm": lambda: conv(nn.GroupNorm(2, 4)),
    "batch norm and dropout": lambda: conv(nn.BatchNorm2d(4), nn.Dropout(0.3)),
}
OPTIMIZERS: dict[str, LocalOptimizer] = {
    "sgd": SGD(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0, schedule=Constant()),
    "decay": SGD(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.1, schedule=Constant()),
    "momentum": SGD(lr=0.1, momentum=0.9, nesterov=False, weight_decay=0.1, schedule=Constant()),
    "nesterov": SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, schedule=Constant()),
    "adam": Adam(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-4, weight_decay=0.1, decoupled=False, schedule=Constant()),
    "adamw": Adam(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-4, weight_decay=0.1, decoupled=True, schedule=Constant()),
}
SIZES = {"equal": [8, 8, 8], "ragged": [7, 1, 13, 4, 2], "one": [1], "some empty": [5, 0, 9], "all empty": [0, 0]}
WORKS = {"epochs": LocalWork(2, None, 4), "steps": LocalWork(None, 5, 4), "big batch": LocalWork(3, None, 64)}


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
    model: nn.Module, data: ClientData, work: LocalWork, optimizer: LocalOptimizer, workers: int = 1, **switches: Any
) -> tuple[Engine, Engine]:
    common = (model, data, work, optimizer, Streams(3))
    return batched(*common, **switches), reference(*common, workers=workers)


def assert_equal(one: Engine, other: Engine, ids: np.ndarray, tolerance: float = 1e-10) -> None:
    params = initial(one.workload.model)
    before = copy.deepcopy(params)
    a, b = (e.train(params, ids, round=2, lr=e.workload.optimizer.lr) for e in (one, other))
    for name in params:
        assert torch.equal(params[name], before[name])
        torch.testing.assert_close(a.delta[name], b.delta[name], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(a.loss, b.loss, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(a.rms_loss, b.rms_loss, rtol=tolerance, atol=tolerance)
    assert (a.momentum is None) == (b.momentum is None)
    for name in a.momentum or {}:
        torch.testing.assert_close(a.momentum[name], b.momentum[name], rtol=tolerance, atol=tolerance)
    assert a.steps.tolist() == b.steps.tolist()
    assert a.samples.tolist() == b.samples.tolist()


@pytest.mark.parametrize("name", MODELS)
def test_batched_equals_sequential_for_every_model(name: str) -> None:
    data = problem(SIZES["ragged"])
    assert_equal(*engines(model_of(name), data, WORKS["epochs"], OPTIMIZERS["sgd"]), np.arange(5))


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", ["mlp", "batch norm 1d and dropout"])
def test_batched_equals_sequential_for_every_shape_of_work(name: str, sizes: str, work: str) -> None:
    data = problem(SIZES[sizes])
    assert_equal(*engines(model_of(name), data, WORKS[work], OPTIMIZERS["sgd"]), np.arange(len(SIZES[sizes])))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["mlp", "batch norm 1d and dropout"])
def test_batched_equals_sequential_for_every_optimiser(name: str, optimizer: str) -> None:
    data = problem(SIZES["ragged"])
    assert_equal(*engines(model_of(name), data, WORKS["epochs"], OPTIMIZERS[optimizer]), np.arange(5))


@pytest.mark.parametrize("name", ["dropout", "batch norm and dropout", "group norm"])
def test_engines_agree_in_single_precision_too(name: str) -> None:
    data = problem(SIZES["ragged"], torch.float32)
    model = model_of(name, torch.float32)
    assert_equal(*engines(model, data, WORKS["epochs"], OPTIMIZERS["momentum"]), np.arange(5), tolerance=2e-5)


@pytest.mark.parametrize("chunk_size", [1, 2, 3])
def test_a_chunked_cohort_equals_the_whole(chunk_size: int) -> None:
    data = problem(SIZES["ragged"])
    model = model_of("batch norm 1d and dropout")
    whole, _ = engines(model, data, WORKS["epochs"], OPTIMIZERS["momentum"])
    chunked, _ = engines(model, data, WORKS["epochs"], OPTIMIZERS["momentum"], chunk_size=chunk_size)
    assert_equal(whole, chunked, np.arange(5))


def test_a_client_is_trained_the_same_in_any_company_and_in_the_order_asked_for() -> None:
    data = problem(SIZES["ragged"])
    engine, _ = engines(model_of("dropout"), data, WORKS["steps"], OPTIMIZERS["sgd"])
    params = initial(engine.workload.model)
    together = engine.train(params, np.array([3, 0, 2]), 1, 0.1)
    for row, client in enumerate([3, 0, 2]):
        alone = engine.train(params, np.array([client]), 1, 0.1)
        for name in params:
            torch.testing.assert_close(together.delta[name][row], alone.delta[name][0], rtol=1e-10, atol=1e-12)


def of_a_gpu() -> None:
    raise torch.OutOfMemoryError


def of_a_cpu() -> None:
    torch.empty(2**50)


@pytest.mark.parametrize("run_out", [of_a_gpu, of_a_cpu])
def test_running_out_of_memory_halves_the_chunk_and_loses_nothing(
    run_out: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = problem(SIZES["ragged"])
    whole, _ = engines(model_of("mlp"), data, WORKS["epochs"], OPTIMIZERS["sgd"])
    small, _ = engines(model_of("mlp"), data, WORKS["epochs"], OPTIMIZERS["sgd"])
    backend = small.backend
    assert isinstance(backend, BatchedBackend)
    train_chunk = backend._train_chunk

    def refuse_large(start: Any, schedule: Schedule) -> Any:
        if len(schedule) > 2:
            run_out()
        return train_chunk(start, schedule)

    monkeypatch.setattr(backend, "_train_chunk", refuse_large)
    assert_equal(whole, small, np.arange(5))
    assert backend.chunk_size == 2


def test_a_client_too_large_for_the_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engines(model_of("mlp"), problem([4]), WORKS["epochs"], OPTIMIZERS["sgd"])

    def refuse(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(engine.backend, "_train_chunk", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        engine.train(initial(engine.workload.model), np.array([0]), 1, 0.1)


def test_one_clients_nan_stays_its_own() -> None:
    data = problem([4, 4, 4])
    broken = data.x.clone()
    broken[data.train[1]] = torch.nan
    clean, _ = engines(model_of("mlp"), data, WORKS["epochs"], OPTIMIZERS["sgd"])
    dirty, _ = engines(
        model_of("mlp"), ClientData(broken, data.y, data.train, data.evaluate, 3), WORKS["epochs"], OPTIMIZERS["sgd"]
    )
    params, ids = initial(clean.workload.model), np.arange(3)
    a, b = (e.train(params, ids, 1, 0.1).delta["1.weight"] for e in (clean, dirty))
    assert torch.equal(a[[0, 2]], b[[0, 2]])
    assert torch.isnan(b[1]).any()


class OneWeight(nn.Module):
    """Logits (w x, 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.w * x, 0 * x], dim=1)


@pytest.mark.parametrize("build", [batched, reference])
def test_one_step_by_hand(build: Any) -> None:
    """Loss -log sigmoid(w x) at w=0: gradient -x/2, so x = (2, 4) in two clients gives w = lr x / 2."""
    x = torch.tensor([[2.0], [4.0]], dtype=torch.float64)
    positions = [np.array([0]), np.array([1])]
    data = ClientData(x, torch.zeros(2, dtype=torch.long), positions, positions, 3)
    engine = build(OneWeight(), data, LocalWork(1, None, 1), OPTIMIZERS["sgd"], Streams(0))
    trained = engine.train({"w": torch.zeros(1, dtype=torch.float64)}, np.array([0, 1]), 1, 0.1)
    assert trained.delta["w"].ravel().tolist() == pytest.approx([0.1, 0.2])
    assert trained.loss.tolist() == pytest.approx([np.log(2), np.log(2)])


def test_frozen_parameters_neither_travel_nor_change() -> None:
    model = model_of("mlp")
    model[1].weight.requires_grad_(False)  # type: ignore[index]
    one, other = engines(model, problem([4, 4]), WORKS["epochs"], OPTIMIZERS["decay"])
    assert "1.weight" not in initial(model)
    assert_equal(one, other, np.arange(2))


def test_auto_says_what_it_chose_and_why() -> None:
    data = problem([4])
    for name, expected in (("mlp", "batched (auto: no convolutions)"), ("conv", "sequential (auto: convolutions on a")):
        engine = auto(model_of(name), data, WORKS["epochs"], OPTIMIZERS["sgd"], Streams(0), compile=False)
        assert engine.description.startswith(expected)


def test_losses_and_evaluation_equal_plain_means() -> None:
    data = problem([5, 0, 2300])
    engine, _ = engines(model_of("batch norm 2d"), data, WORKS["epochs"], OPTIMIZERS["sgd"])
    params = initial(engine.workload.model)
    with torch.no_grad():
        output = model_of("batch norm 2d").eval()(data.x)
    each = nn.functional.cross_entropy(output, data.y, reduction="none").numpy()
    losses = engine.losses(params, data.evaluate)
    assert losses[[0, 2]] == pytest.approx([each[data.evaluate[i]].mean() for i in (0, 2)])
    assert np.isnan(losses[1])
    evaluation = engine.evaluate(params, data.x, data.y)
    assert evaluation.loss == pytest.approx(each.mean())
    assert evaluation.accuracy == float((output.argmax(1) == data.y).double().mean())


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", ["dropout", "batch norm and dropout"])
@pytest.mark.parametrize("sizes", ["ragged", "equal", "one"])
def test_clients_side_by_side_equal_those_one_after_another(name: str, sizes: str, workers: int) -> None:
    data = problem(SIZES[sizes])
    _, alone = engines(model_of(name), data, WORKS["epochs"], OPTIMIZERS["momentum"])
    _, crew = engines(model_of(name), data, WORKS["epochs"], OPTIMIZERS["momentum"], workers=workers)
    assert_equal(alone, crew, np.arange(len(SIZES[sizes])))
    assert torch.get_num_threads() == 1  # as the tests set it: the crew's threads keep theirs to themselves


@pytest.mark.parametrize("name", ["mlp", "conv", "batch norm and dropout"])
def test_bfloat16_is_close_and_keeps_parameters_in_single_precision(name: str) -> None:
    data = problem(SIZES["ragged"], torch.float32)
    model, work, sgd = model_of(name, torch.float32), WORKS["epochs"], OPTIMIZERS["sgd"]
    task = (model, data, work, sgd, Streams(3))
    exact, rough = batched(*task), [build(*task, precision="bf16") for build in (batched, reference)]
    params = initial(model)
    wanted = exact.train(params, np.arange(5), 2, 0.1)
    for engine in rough:
        got = engine.train(params, np.arange(5), 2, 0.1)
        for n, delta in got.delta.items():
            assert delta.dtype is torch.float32
            assert float((delta - wanted.delta[n]).norm()) < 0.1 * float(wanted.delta[n].norm()) + 1e-3
        assert any(not torch.equal(delta, wanted.delta[n]) for n, delta in got.delta.items())
        assert abs(engine.evaluate(params, data.x, data.y).loss - exact.evaluate(params, data.x, data.y).loss) < 0.05
