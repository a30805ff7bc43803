"""The Triton kernels for chains of linear layers, in Triton's interpreter, against the reference backend.

What the interpreter cannot show is how the tensor cores round: its products are NumPy's float32. It takes 12 s to
start; by default two cases run that have most of the kernels' branches, the others with `-m slow`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.core.rng import Streams
from fedsim.core.types import Params
from fedsim.engine.backend import TrainingResult, Workload
from fedsim.engine.data import ClientData
from fedsim.engine.graph.triton_chain import unfit
from fedsim.engine.model import dropout_mask, has_dropout, initial
from fedsim.engine.optimizers import SGD, Adam, Constant, LocalOptimizer
from fedsim.engine.reference import ReferenceBackend
from fedsim.engine.schedule import LocalWork, make_schedule
from fedsim.models.mlp import MLP, Logistic
from tests.triton_interpreted import Interpreter, interpreter

pytest.importorskip("triton")
SHORT = {"batches of several tiles", "dropout, layers without bias"}

SHAPE, CLASSES = (1, 7, 10), 5
"""70 inputs: two passes of the kernels' loop over the first layer's inputs, the second of 6."""
ROUNDING = 1e-6
"""Of a tensor's largest value (`assert_close`). The largest difference seen is 4e-7."""


IN_FOURS = LocalWork(1, None, 4)
"""Few steps of few clients throughout: every operation of a program takes the interpreter 1 ms."""


def sgd(momentum: float = 0.0, nesterov: bool = False, decay: float = 0.0) -> SGD:
    return SGD(lr=0.1, momentum=momentum, nesterov=nesterov, weight_decay=decay, schedule=Constant())


def adam(decoupled: bool, decay: float = 0.1) -> Adam:
    rates = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-2}
    return Adam(**rates, weight_decay=decay, decoupled=decoupled, schedule=Constant())


def mlp(*hidden: int, dropout: float = 0.0) -> MLP:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return MLP(SHAPE, CLASSES, hidden=list(hidden), dropout=dropout)


def without_bias() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = nn.Linear(70, 6, bias=False), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, CLASSES)
        return nn.Sequential(nn.Flatten(), *layers)


def samples(sizes: list[int]) -> ClientData:
    generator = torch.Generator().manual_seed(0)
    total = max(sum(sizes), 1)
    x, y = torch.randn(total, *SHAPE, generator=generator), torch.randint(CLASSES, (total,), generator=generator)
    order = np.random.default_rng(0).permutation(sum(sizes))
    positions = np.split(order, np.cumsum(sizes)[:-1])
    return ClientData(x, y, positions, positions, CLASSES)


@dataclass
class Case:
    """A model, an optimiser and clients; `schedule` is of all of them."""

    model: nn.Module
    optimizer: LocalOptimizer
    sizes: tuple[int, ...] = (5, 1, 0)
    work: LocalWork = IN_FOURS

    def __post_init__(self) -> None:
        self.data = samples(list(self.sizes))
        self.workload = Workload(self.model, self.data, self.optimizer)
        ids, dropout = np.arange(len(self.sizes)), has_dropout(self.model)
        self.schedule = make_schedule(self.data.train, self.work, Streams(0), 1, ids, 0.1, dropout=dropout)
        self.start: list[Params] = [initial(self.model)] * len(self.sizes)

    def reference(self) -> TrainingResult:
        return ReferenceBackend(self.workload, precision="float32", workers=1).train(self.start, self.schedule)


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    with interpreter(tmp_path_factory.mktemp("triton")) as found:
        yield found


def assert_close(got: TrainingResult, want: TrainingResult, case: Case) -> None:
    """Up to `ROUNDING` of the largest parameter and change, which is what a sum of the two is rounded by."""
    start = {name: torch.stack([model[name] for model in case.start]) for name in case.start[0]}
    for found, wanted in ((got.delta, want.delta), (got.momentum or {}, want.momentum or {})):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            scale = float(value.abs().max() + start[name].abs().max())
            np.testing.assert_allclose(found[name], value, rtol=0, atol=ROUNDING * scale, err_msg=name)
    mask = case.schedule.mask
    np.testing.assert_allclose(got.losses[mask], want.losses[mask], rtol=ROUNDING, atol=ROUNDING)


CASES = {
    "sgd": lambda: Case(mlp(8), sgd()),
    "weight decay": lambda: Case(mlp(8), sgd(decay=0.1)),
    "momentum": lambda: Case(mlp(8), sgd(0.9, decay=0.1)),
    "nesterov": lambda: Case(mlp(8), sgd(0.9, nesterov=True, decay=0.1)),
    "adam": lambda: Case(mlp(8), adam(decoupled=False)),
    "adamw": lambda: Case(mlp(8), adam(decoupled=True)),
    "logistic regression": lambda: Case(mlp(), sgd(0.9)),
    "two hidden layers": lambda: Case(mlp(8, 6), sgd(0.9)),
    "three hidden layers, wider than a tile": lambda: Case(mlp(20, 70, 5), sgd(), sizes=(3,)),
    "dropout": lambda: Case(mlp(8, 6, dropout=0.4), sgd(0.5)),
    "dropout, layers without bias": lambda: Case(without_bias(), adam(decoupled=False)),
    "batches of several tiles": lambda: Case(mlp(8), sgd(), sizes=(35, 18), work=LocalWork(2, None, 35)),
    "steps in place of epochs": lambda: Case(mlp(8), sgd(0.9), sizes=(2, 0, 1), work=LocalWork(None, 3, 2)),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SHORT else pytest.mark.slow) for n in CASES])
def test_equals_the_reference(triton: Interpreter, name: str) -> None:
    case = CASES[name]()
    assert_close(triton.train(case.workload, case.start, case.schedule), case.reference(), case)


@pytest.mark.slow
def test_every_client_from_its_own_model(triton: Interpreter) -> None:
    case = Case(mlp(8), sgd(), sizes=(3, 2))
    case.start = [{n: v + 0.1 * k * torch.sign(v) for n, v in case.start[0].items()} for k in range(2)]
    assert_close(triton.train(case.workload, case.start, case.schedule), case.reference(), case)


@pytest.mark.slow
def test_dropout_to_the_last_bit_of_its_rate(triton: Interpreter) -> None:
    """A rate at which the first element of a mask is just kept, and the next of the 2^24 rates, at which it is not."""
    key = torch.as_tensor(Case(mlp(8, dropout=0.5), sgd(), sizes=(1,)).schedule.keys)[0, 0]
    kept, dropped = 0, 2**24
    while dropped - kept > 1:
        middle = (kept + dropped) // 2
        stays = bool(dropout_mask(key, 0, 0, (1, 1), middle / 2**24))
        kept, dropped = (middle, dropped) if stays else (kept, middle)
    changes = []
    for rate in (kept / 2**24, dropped / 2**24):
        case = Case(mlp(8, dropout=rate), sgd(), sizes=(1,))
        case.start[0]["layers.1.bias"].add_(3)  # so that all hidden units are active
        found = triton.train(case.workload, case.start, case.schedule)
        assert_close(found, case.reference(), case)
        changes.append(bool(found.delta["layers.4.weight"][0, :, 0].any()))
    assert changes == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [sgd(0.9, decay=0.1), adam(decoupled=True)], ids=["momentum", "adamw"])
def test_alone_as_in_any_company(triton: Interpreter, optimizer: LocalOptimizer) -> None:
    """To the last bit, though the company has larger batches and more steps."""
    case = Case(mlp(8, 6, dropout=0.4), optimizer, sizes=(18, 3, 1), work=LocalWork(1, None, 17))
    together = triton.train(case.workload, case.start, case.schedule)
    for row in (1, 2):
        own = case.schedule.rows(slice(row, row + 1))
        alone = triton.train(case.workload, case.start[row : row + 1], own)
        assert all(torch.equal(value[0], together.delta[name][row]) for name, value in alone.delta.items())
        steps, width = own.counts.shape[1], own.positions.shape[2]
        assert (alone.losses[0][own.mask[0]] == together.losses[row, :steps, :width][own.mask[0]]).all()


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["model", "samples"])
def test_nan_stays_with_its_client(triton: Interpreter, broken: str) -> None:
    case = Case(mlp(8, dropout=0.4), sgd(0.9), sizes=(3, 5, 2))
    sound = triton.train(case.workload, case.start, case.schedule)
    if broken == "model":
        case.start = [case.start[0], {n: v * math.nan for n, v in case.start[1].items()}, case.start[2]]
    else:
        case.data.x[case.data.train[1]] = math.nan
    found = triton.train(case.workload, case.start, case.schedule)
    for name, value in found.delta.items():
        assert torch.equal(value[[0, 2]], sound.delta[name][[0, 2]])
        assert value[1].isnan().all()
    assert np.isnan(found.losses[1][case.schedule.mask[1]]).all()


def reason(model: nn.Module, optimizer: LocalOptimizer | None = None, dtype: torch.dtype = torch.float32) -> str:
    data = samples([3])
    data = ClientData(data.x.to(dtype), data.y, data.train, data.evaluate, CLASSES)
    return unfit(Workload(model, data, optimizer or sgd())) or ""


def test_what_does_not_fit_is_told() -> None:
    class Other(SGD):
        pass

    other = Other(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0, schedule=Constant())
    assert "no chain of linear layers" in reason(nn.Sequential(nn.Flatten(), nn.Linear(70, 5), nn.Tanh()))
    assert "no chain of linear layers" in reason(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(80, 5)))
    assert "129 outputs, more than 128" in reason(mlp(129))
    assert "6 layers, more than 5" in reason(mlp(4, 4, 4, 4, 4))
    assert "no kernel for Other" in reason(mlp(8), other)
    assert "float64, not float32" in reason(mlp(8).double(), dtype=torch.float64)
    assert "the device is cpu" in reason(Logistic(SHAPE, CLASSES))


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsim.engine.graph.triton_chain.find_spec", lambda name: None)
    assert reason(mlp(8)) == "Triton is not installed"
