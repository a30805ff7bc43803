"""Linear chains are recognised, and written out equal to automatic differentiation."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.core.rng import Streams
from fedsim.engine.backend import Workload
from fedsim.engine.batched import Differentiated, LinearChain
from fedsim.engine.chain import any_chain
from fedsim.engine.data import ClientData
from fedsim.engine.model import initial
from fedsim.engine.optimizers import SGD, Constant
from fedsim.models.mlp import MLP
from tests.engines import auto, batched, graph, reference
from tests.test_engine import OPTIMIZERS, SIZES, WORKS, assert_equal, model_of, problem


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 8), nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(torch.flatten(x, 1))))  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.b(x + self.a(x).relu())  # type: ignore[no-any-return]


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat, self.a, self.b = nn.Flatten(), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(self.flat(x)))
        return self.b(torch.relu(self.a(x)))  # type: ignore[no-any-return]


class Named(nn.Module):
    """Attributes are called as functions of torch are, whatever they hold."""

    def __init__(self, flatten: nn.Module, relu: nn.Module) -> None:
        super().__init__()
        self.flatten, self.a, self.relu, self.b = flatten, nn.Linear(16, 8), relu, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.b(self.relu(self.a(self.flatten(x))))
        return z


class SoftmaxInEvalMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = CHAINS["logistic"]()

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.layers(x)
        return z if self.training else F.softmax(z, 1)


class SoftmaxInTrainingMode(SoftmaxInEvalMode):
    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.layers(x)
        return F.softmax(z, 1) if self.training else z


def hooked(register: str, hook: Callable[..., Any]) -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 3))
    getattr(model[1], register)(hook)
    return model


def with_another_pass() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 3))
    model[2].forward = torch.tanh  # type: ignore[method-assign]
    return model


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 3))
    model[1].weight.requires_grad_(False)
    return model


CHAINS = {
    "mlp": lambda: MLP((1, 4, 4), 3, hidden=[8, 5], dropout=0.0),
    "logistic": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)),
    "no bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8, bias=False), nn.ReLU(), nn.Linear(8, 3)),
    "functional": Functional,
    "named as it is": lambda: Named(nn.Flatten(), nn.ReLU()),
    "dropout": lambda: MLP((1, 4, 4), 3, hidden=[8, 5], dropout=0.5),
    "dropout of everything": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(16, 8), nn.Dropout(1.0), nn.ReLU(), nn.Linear(8, 3)
    ),
    "dropout behind": lambda: nn.Sequential(
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(8, 6),
        nn.Dropout(0.2),
        nn.ReLU(),
        nn.Linear(6, 3),
    ),
}
OTHERS = {
    "dropout first": lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 3)),
    "dropout last": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.Dropout(0.5)),
    "shared dropout": lambda: model_of("shared dropout"),
    "residual": Residual,
    "shared": Shared,
    "frozen": frozen,
    "two linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 3)),
    "relu last": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.ReLU()),
    "another activation": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)),
    "another activation called relu": lambda: Named(nn.Flatten(), nn.LeakyReLU(0.5)),
    "norm": lambda: model_of("batch norm 1d"),
    "conv": lambda: model_of("conv"),
    "other in eval mode": SoftmaxInEvalMode,
    "other in training mode": SoftmaxInTrainingMode,
    "forward hook": lambda: hooked("register_forward_hook", lambda layer, given, output: 2 * output),
    "forward pre-hook": lambda: hooked("register_forward_pre_hook", lambda layer, given: (2 * given[0],)),
    "backward hook": lambda: hooked("register_full_backward_hook", lambda layer, grads, given: (2 * grads[0],)),
    "backward pre-hook": lambda: hooked("register_full_backward_pre_hook", lambda layer, given: (2 * given[0],)),
    "a pass put in place": with_another_pass,
    "flattens less": lambda: nn.Sequential(nn.Flatten(2), nn.Linear(16, 3)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains_are_recognised(name: str) -> None:
    model: Any = CHAINS[name]()
    chain = any_chain(model)
    assert chain is not None
    assert chain.is_linear
    assert [n for link in chain.links for n in (link.weight, link.bias) if n] == [
        n for n, _ in model.named_parameters()
    ]


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_not(name: str) -> None:
    chain = any_chain(OTHERS[name]())
    assert chain is None or not chain.is_linear


def images(*layers: nn.Module, flat: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, 3))


CONVOLUTIONS = {
    "conv": lambda: model_of("conv"),
    "pool behind relu": lambda: images(nn.Conv2d(1, 2, 3, padding=2), nn.ReLU(), nn.MaxPool2d(2), flat=18),
    "no bias": lambda: images(nn.Conv2d(1, 2, 3, bias=False), nn.ReLU(), flat=8),
}
OTHER_CONVOLUTIONS = {
    "stride": lambda: images(nn.Conv2d(1, 2, 3, stride=2), nn.ReLU(), flat=2),
    "dilation": lambda: images(nn.Conv2d(1, 2, 2, dilation=2), nn.ReLU(), flat=8),
    "groups": lambda: images(nn.Conv2d(2, 2, 3, groups=2), nn.ReLU(), flat=8),
    "oblong": lambda: images(nn.Conv2d(1, 2, (3, 1)), nn.ReLU(), flat=16),
    "oblong padding": lambda: images(nn.Conv2d(1, 2, 3, padding=(1, 0)), nn.ReLU(), flat=16),
    "wide padding": lambda: images(nn.Conv2d(1, 2, 1, padding=1), nn.ReLU(), flat=72),
    "padding by name": lambda: images(nn.Conv2d(1, 2, 3, padding="same"), nn.ReLU(), flat=32),
    "reflections": lambda: images(nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), nn.ReLU(), flat=32),
    "no relu": lambda: images(nn.Conv2d(1, 2, 3), flat=8),
    "dropout": lambda: images(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Dropout(0.5), flat=8),
    "three by three": lambda: images(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(3), flat=2),
    "sliding pool": lambda: images(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2, stride=1), flat=8),
    "padded pool": lambda: images(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2, padding=1), flat=8),
    "rounded up": lambda: images(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True), flat=8),
    "two pools": lambda: images(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.MaxPool2d(2), nn.MaxPool2d(2), flat=2),
    "pool first": lambda: images(nn.MaxPool2d(2), nn.Conv2d(1, 2, 1), nn.ReLU(), flat=8),
    "average": lambda: images(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.AvgPool2d(2), flat=2),
    "norm": lambda: model_of("batch norm 2d"),
    "not flat": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Linear(2, 3)),
    "conv last": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 3, 2), nn.Flatten()),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_chains_with_convolutions_are_another_kind(name: str) -> None:
    model: Any = CONVOLUTIONS[name]()
    chain = any_chain(model)
    assert chain is not None
    assert chain.links[0].kernel > 0
    assert not chain.is_linear
    model.double()(torch.zeros(2, 1, 4, 4).double())  # its sizes fit


@pytest.mark.parametrize("name", OTHER_CONVOLUTIONS)
def test_other_convolutional_models_are_none(name: str) -> None:
    assert any_chain(OTHER_CONVOLUTIONS[name]()) is None


def work_of(optimizer: str) -> tuple[Any, ...]:
    return WORKS["epochs"], OPTIMIZERS[optimizer], Streams(3)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", CHAINS)
def test_written_out_steps_equal_differentiated_ones(name: str, optimizer: str, sizes: str) -> None:
    model: Any = CHAINS[name]().double()
    data = problem(SIZES[sizes])
    engines = [batched(model, data, *work_of(optimizer)) for _ in range(2)]
    backends: list[Any] = [engine.backend for engine in engines]
    backends[1].chain = None
    params, ids = initial(model), np.arange(len(SIZES[sizes]))
    start = {n: value.unsqueeze(0) for n, value in params.items()}
    assert isinstance(backends[0]._program(start, 0.1), LinearChain)
    assert isinstance(backends[1]._program(start, 0.1), Differentiated)
    one, other = (e.train(params, ids, 2, 0.1) for e in engines)
    for n in params:
        torch.testing.assert_close(one.delta[n], other.delta[n], rtol=1e-10, atol=1e-10)
        assert one.delta[n].is_contiguous()
    np.testing.assert_allclose(one.loss, other.loss, rtol=1e-10)
    np.testing.assert_allclose(one.rms_loss, other.rms_loss, rtol=1e-10)
    assert (one.momentum is None) == (other.momentum is None)
    for n in one.momentum or {}:
        torch.testing.assert_close(one.momentum[n], other.momentum[n], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("engine", [batched, graph, auto])
def test_a_layer_along_the_last_axis_of_samples_is_not_written_out(engine: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 3)).double()
    work, data = work_of("sgd"), problem(SIZES["ragged"])
    assert_equal(engine(model, data, *work, rounds=10**4), reference(model, data, *work), np.arange(5))


def test_a_layer_in_front_of_a_flattening_is_written_out_where_samples_are_vectors() -> None:
    data = problem(SIZES["ragged"])
    model = nn.Sequential(nn.Linear(16, 5), nn.ReLU(), nn.Flatten(), nn.Linear(5, 3)).double()
    vectors = [replace(data, x=data.x.flatten(axis)) for axis in (1, 2)]
    for samples in vectors:
        assert Workload(model, samples, OPTIMIZERS["sgd"]).chain is not None
        assert_equal(*(build(model, samples, *work_of("sgd")) for build in (batched, reference)), np.arange(5))


def test_losses_are_the_same_gathered_or_passed_in_order() -> None:
    model: Any = CHAINS["mlp"]().double()
    data = problem(SIZES["ragged"])
    engine = batched(model, data, *work_of("sgd"))
    params = initial(model)
    everybody = engine.losses(params, data.train)  # all samples: passed in order
    alone = [engine.losses(params, [p])[0] for p in data.train]
    np.testing.assert_allclose(everybody, alone, rtol=1e-12)


@pytest.mark.parametrize(("shape", "inputs", "is_chain"), [((4,), 6, True), ((2, 4), 12, False)])
def test_what_flattens_behind_a_layer_is_a_chain_on_vectors(
    shape: tuple[int, ...], inputs: int, is_chain: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Flatten(), nn.Linear(inputs, 3))
    positions = [np.arange(2)]
    data = ClientData(torch.zeros(2, *shape), torch.zeros(2, dtype=torch.int64), positions, positions, 3)
    optimizer = SGD(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0, schedule=Constant())
    assert (Workload(model, data, optimizer).chain is not None) == is_chain
