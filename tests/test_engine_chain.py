"""Chains of layers are recognised, and engines that compute their passes equal the reference."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.core.rng import Streams
from fedsim.engine.backend import Workload
from fedsim.engine.chain import find_chain
from fedsim.engine.engine import Engine
from fedsim.models.mlp import MLP
from tests.engines import batched, graph, reference
from tests.test_engine import (
    BACKENDS,
    OPTIMIZERS,
    SIZES,
    WORKS,
    assert_engines_equal,
    model_of,
    problem,
    supports,
)

Models = dict[str, Callable[[], nn.Module]]


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 8), nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(torch.flatten(x, 1))))  # type: ignore[no-any-return]


class TwoLayers(nn.Module):
    """A model whose attributes have the names of torch's functions."""

    def __init__(self, relu: nn.Module | None = None, width: int = 8) -> None:
        super().__init__()
        self.flatten, self.relu = nn.Flatten(), relu or nn.ReLU()
        self.a, self.b = nn.Linear(16, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.relu(self.a(self.flatten(x))))  # type: ignore[no-any-return]


class Residual(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.b(x + self.a(x).relu())  # type: ignore[no-any-return]


class PartlyFrozen(TwoLayers):
    """The first layer has no gradients in one mode, or in both."""

    def __init__(self, *, frozen_in: tuple[bool, ...]) -> None:
        super().__init__()
        self.frozen_in = frozen_in

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.training not in self.frozen_in):
            hidden = self.relu(self.a(self.flatten(x)))
        return self.b(hidden)  # type: ignore[no-any-return]


class DropoutInOneMode(TwoLayers):
    """The dropout stays in eval mode, or in training mode."""

    def __init__(self, *, drops: bool) -> None:
        super().__init__(relu=nn.Sequential(nn.ReLU(), nn.Dropout(0.5)))
        self.drops = drops

    def train(self, mode: bool = True) -> "DropoutInOneMode":
        super().train(mode)
        self.relu[1].train(self.drops)  # type: ignore[index]
        return self


class Shared(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(self.flatten(x)))
        return self.b(torch.relu(self.a(x)))  # type: ignore[no-any-return]


class SoftmaxInOneMode(TwoLayers):
    def __init__(self, training: bool) -> None:
        super().__init__()
        self.mode = training

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        return F.softmax(z, 1) if self.training == self.mode else z


def changed(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = linear(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 3))
        change(model)
        return model

    return build


def linear(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *layers)


def images(*layers: nn.Module, flat: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, 3))


def after_convolution(layer: nn.Module, flat: int, kernel: int = 2) -> Callable[[], nn.Module]:
    return images(nn.Conv2d(1, 2, kernel), nn.ReLU(), layer, flat=flat)


def convolution(flat: int, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    return images(nn.Conv2d(*args, **kwargs), nn.ReLU(), flat=flat)


CHAINS: Models = {
    "mlp": lambda: MLP((1, 4, 4), 3, hidden=[8, 5], dropout=0.0),
    "logistic": lambda: linear(nn.Linear(16, 3)),
    "no bias": lambda: linear(nn.Linear(16, 8, bias=False), nn.ReLU(), nn.Linear(8, 3)),
    "functional": Functional,
    "named as it is": TwoLayers,
    "dropout": lambda: MLP((1, 4, 4), 3, hidden=[8, 5], dropout=0.5),
    "dropout of everything": lambda: linear(
        nn.Linear(16, 8), nn.Dropout(1.0), nn.ReLU(), nn.Linear(8, 3)
    ),
    "dropout after relu": lambda: linear(
        *(nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.3)),
        *(nn.Linear(8, 6), nn.Dropout(0.2), nn.ReLU(), nn.Linear(6, 3)),
    ),
}
CONVOLUTIONS: Models = {
    "conv": lambda: model_of("conv"),
    "pool after relu": images(nn.Conv2d(1, 2, 3, padding=2), nn.ReLU(), nn.MaxPool2d(2), flat=18),
    "conv without bias": convolution(8, 1, 2, 3, bias=False),
    "dropout after convolution": after_convolution(nn.Dropout(0.5), 8, kernel=3),
    "dropouts between convolutions": images(
        *(nn.Conv2d(1, 2, 2, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.5)),
        *(nn.Conv2d(2, 4, 2, padding=1), nn.Dropout(0.3), nn.ReLU()),
        *(nn.Conv2d(4, 5, 2), nn.MaxPool2d(2), nn.Dropout(0.2), nn.ReLU()),
        flat=5,
    ),
}
OTHERS: Models = {
    "dropout first": lambda: linear(nn.Dropout(0.5), nn.Linear(16, 3)),
    "dropout last": lambda: linear(nn.Linear(16, 3), nn.Dropout(0.5)),
    "shared dropout": lambda: model_of("shared dropout"),
    "residual": lambda: Residual(width=16),
    "shared": lambda: Shared(width=16),
    "frozen": changed(lambda model: model[1].weight.requires_grad_(False)),
    "two linear": lambda: linear(nn.Linear(16, 8), nn.Linear(8, 3)),
    "relu last": lambda: linear(nn.Linear(16, 3), nn.ReLU()),
    "another activation": lambda: linear(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)),
    "another activation called relu": lambda: TwoLayers(relu=nn.LeakyReLU(0.5)),
    "norm": lambda: model_of("batch norm 1d"),
    "different in eval mode": lambda: SoftmaxInOneMode(training=False),
    "different in training mode": lambda: SoftmaxInOneMode(training=True),
    "without gradients": lambda: PartlyFrozen(frozen_in=(True, False)),
    "without gradients in training": lambda: PartlyFrozen(frozen_in=(True,)),
    "dropout never": lambda: DropoutInOneMode(drops=False),
    "dropout always": lambda: DropoutInOneMode(drops=True),
    "forward hook": changed(lambda model: model[1].register_forward_hook(print)),
    "forward pre-hook": changed(lambda model: model[1].register_forward_pre_hook(print)),
    "backward hook": changed(lambda model: model[1].register_full_backward_hook(print)),
    "backward pre-hook": changed(lambda model: model[1].register_full_backward_pre_hook(print)),
    "forward set on an object": changed(lambda model: setattr(model[2], "forward", torch.tanh)),
    "flattens less": lambda: nn.Sequential(nn.Flatten(2), nn.Linear(16, 3)),
    "stride": convolution(2, 1, 2, 3, stride=2),
    "dilation": convolution(8, 1, 2, 2, dilation=2),
    "groups": convolution(8, 2, 2, 3, groups=2),
    "oblong": convolution(16, 1, 2, (3, 1)),
    "oblong padding": convolution(16, 1, 2, 3, padding=(1, 0)),
    "wide padding": convolution(72, 1, 2, 1, padding=1),
    "padding by name": convolution(32, 1, 2, 3, padding="same"),
    "reflections": convolution(32, 1, 2, 3, padding=1, padding_mode="reflect"),
    "no relu": images(nn.Conv2d(1, 2, 3), flat=8),
    "dropout before pooling": after_convolution(
        nn.Sequential(nn.Dropout(0.5), nn.MaxPool2d(2)), 2, kernel=3
    ),
    "two dropouts": after_convolution(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), 8, kernel=3),
    "three by three": after_convolution(nn.MaxPool2d(3), 2),
    "sliding pool": after_convolution(nn.MaxPool2d(2, stride=1), 8),
    "padded pool": after_convolution(nn.MaxPool2d(2, padding=1), 8, kernel=3),
    "rounded up": after_convolution(nn.MaxPool2d(2, ceil_mode=True), 8),
    "two pools": after_convolution(nn.Sequential(nn.MaxPool2d(2), nn.MaxPool2d(2)), 2, kernel=1),
    "pool first": images(nn.MaxPool2d(2), nn.Conv2d(1, 2, 1), nn.ReLU(), flat=8),
    "average": after_convolution(nn.AvgPool2d(2), 2, kernel=3),
    "norm after convolution": lambda: model_of("batch norm 2d"),
    "not flat": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Linear(2, 3)),
    "convolution last": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 3, 2), nn.Flatten()
    ),
}


@pytest.mark.parametrize("name", [*CHAINS, *CONVOLUTIONS])
def test_chains_are_recognised(name: str) -> None:
    model = (CHAINS | CONVOLUTIONS)[name]()
    chain = find_chain(model)
    assert chain is not None
    assert chain.is_linear == (name in CHAINS)
    names = [n for layer in chain.layers for n in (layer.weight, layer.bias) if n]
    assert names == [n for n, _ in model.named_parameters()]
    model.double()(torch.zeros(2, 1, 4, 4).double())  # The sizes of the layers fit.


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_not(name: str) -> None:
    assert find_chain(OTHERS[name]()) is None


def test_a_chain_is_recognised_where_the_caller_has_switched_gradients_off() -> None:
    with torch.no_grad():
        assert find_chain(TwoLayers()) is not None


def work_of(optimizer: str) -> tuple[Any, ...]:
    return WORKS["epochs"], OPTIMIZERS[optimizer], Streams(3)


def cases_of_chains() -> list[Any]:
    """Return all combinations of backend, optimiser, sizes and chain.

    Fast tests have each backend with each chain at both sizes, and each backend with each of its
    optimisers. The other combinations are slow tests.
    """
    cases = []
    for backend in ("batched", "graph", "native"):
        optimizers = [name for name in OPTIMIZERS if supports(backend, "mlp", name)]
        for number, (sizes, name) in enumerate(product(("ragged", "some empty"), CHAINS)):
            fast_optimizer = optimizers[number % len(optimizers)]
            for optimizer in optimizers:
                marks = () if optimizer == fast_optimizer else pytest.mark.slow
                cases.append(pytest.param(backend, optimizer, sizes, name, marks=marks))
    return cases


@pytest.mark.parametrize(("backend", "optimizer", "sizes", "name"), cases_of_chains())
def test_chains_equal_the_reference(backend: str, optimizer: str, sizes: str, name: str) -> None:
    task = CHAINS[name]().double(), problem(SIZES[sizes]), *work_of(optimizer)
    ids = np.arange(len(SIZES[sizes]))
    assert_engines_equal(BACKENDS[backend](*task), reference(*task), ids)


@pytest.mark.parametrize("build", [batched, graph])
def test_a_layer_along_the_last_of_several_axes_belongs_to_no_chain(
    build: Callable[..., Engine],
) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 3)).double()
    task = model, problem(SIZES["ragged"]), *work_of("sgd")
    assert Workload(model, task[1], OPTIMIZERS["sgd"]).chain is None
    assert_engines_equal(build(*task), reference(*task), np.arange(5))


@pytest.mark.parametrize("first_axis", [1, 2])
def test_a_layer_before_flattening_belongs_to_a_chain_if_samples_are_vectors(
    first_axis: int,
) -> None:
    data = problem(SIZES["ragged"])
    vectors = replace(data, x=data.x.flatten(first_axis))
    model = nn.Sequential(nn.Linear(16, 5), nn.ReLU(), nn.Flatten(), nn.Linear(5, 3)).double()
    task = model, vectors, *work_of("sgd")
    assert Workload(model, vectors, OPTIMIZERS["sgd"]).chain is not None
    assert_engines_equal(batched(*task), reference(*task), np.arange(5))
