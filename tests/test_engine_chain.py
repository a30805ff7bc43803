"""Chains of layers are recognised, and trained by the engines made for them as by plain PyTorch."""

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
from fedsim.engine.chain import find_chain
from fedsim.models.mlp import MLP
from tests.engines import batched, graph, reference
from tests.test_engine import BACKENDS, OPTIMIZERS, SIZES, WORKS, assert_equal, model_of, problem


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 8), nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(torch.flatten(x, 1))))  # type: ignore[no-any-return]


class TwoLayers(nn.Module):
    """Attributes are called as functions of torch are, whatever they hold."""

    def __init__(
        self, flatten: nn.Module | None = None, relu: nn.Module | None = None, width: int = 8
    ) -> None:
        super().__init__()
        self.flatten, self.relu = flatten or nn.Flatten(), relu or nn.ReLU()
        self.a, self.b = nn.Linear(16, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.relu(self.a(self.flatten(x))))  # type: ignore[no-any-return]


class Residual(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.b(x + self.a(x).relu())  # type: ignore[no-any-return]


class Shared(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(self.flatten(x)))
        return self.b(torch.relu(self.a(x)))  # type: ignore[no-any-return]


class SoftmaxInOneMode(TwoLayers):
    """In eval mode, or in training mode alone."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.mode = training

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        return F.softmax(z, 1) if self.training == self.mode else z


def changed(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 3))
        change(model)
        return model

    return build


def linear(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *layers)


def images(*layers: nn.Module, flat: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, 3))


CHAINS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLP((1, 4, 4), 3, hidden=[8, 5], dropout=0.0),
    "logistic": lambda: linear(nn.Linear(16, 3)),
    "no bias": lambda: linear(nn.Linear(16, 8, bias=False), nn.ReLU(), nn.Linear(8, 3)),
    "functional": Functional,
    "named as it is": TwoLayers,
    "dropout": lambda: MLP((1, 4, 4), 3, hidden=[8, 5], dropout=0.5),
    "dropout of everything": lambda: linear(
        nn.Linear(16, 8), nn.Dropout(1.0), nn.ReLU(), nn.Linear(8, 3)
    ),
    "dropout behind": lambda: linear(
        *(nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.3)),
        *(nn.Linear(8, 6), nn.Dropout(0.2), nn.ReLU(), nn.Linear(6, 3)),
    ),
}
CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: model_of("conv"),
    "pool behind relu": lambda: images(
        nn.Conv2d(1, 2, 3, padding=2), nn.ReLU(), nn.MaxPool2d(2), flat=18
    ),
    "conv without bias": lambda: images(nn.Conv2d(1, 2, 3, bias=False), nn.ReLU(), flat=8),
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
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
    "other in eval mode": lambda: SoftmaxInOneMode(False),
    "other in training mode": lambda: SoftmaxInOneMode(True),
    "forward hook": changed(lambda model: model[1].register_forward_hook(print)),
    "forward pre-hook": changed(lambda model: model[1].register_forward_pre_hook(print)),
    "backward hook": changed(lambda model: model[1].register_full_backward_hook(print)),
    "backward pre-hook": changed(lambda model: model[1].register_full_backward_pre_hook(print)),
    "a pass put in place": changed(lambda model: setattr(model[2], "forward", torch.tanh)),
    "flattens less": lambda: nn.Sequential(nn.Flatten(2), nn.Linear(16, 3)),
    "stride": lambda: images(nn.Conv2d(1, 2, 3, stride=2), nn.ReLU(), flat=2),
    "dilation": lambda: images(nn.Conv2d(1, 2, 2, dilation=2), nn.ReLU(), flat=8),
    "groups": lambda: images(nn.Conv2d(2, 2, 3, groups=2), nn.ReLU(), flat=8),
    "oblong": lambda: images(nn.Conv2d(1, 2, (3, 1)), nn.ReLU(), flat=16),
    "oblong padding": lambda: images(nn.Conv2d(1, 2, 3, padding=(1, 0)), nn.ReLU(), flat=16),
    "wide padding": lambda: images(nn.Conv2d(1, 2, 1, padding=1), nn.ReLU(), flat=72),
    "padding by name": lambda: images(nn.Conv2d(1, 2, 3, padding="same"), nn.ReLU(), flat=32),
    "reflections": lambda: images(
        nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), nn.ReLU(), flat=32
    ),
    "no relu": lambda: images(nn.Conv2d(1, 2, 3), flat=8),
    "dropout behind conv": lambda: images(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Dropout(0.5), flat=8),
    "three by three": lambda: images(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(3), flat=2),
    "sliding pool": lambda: images(
        nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2, stride=1), flat=8
    ),
    "padded pool": lambda: images(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2, padding=1), flat=8
    ),
    "rounded up": lambda: images(
        nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True), flat=8
    ),
    "two pools": lambda: images(
        nn.Conv2d(1, 2, 1), nn.ReLU(), nn.MaxPool2d(2), nn.MaxPool2d(2), flat=2
    ),
    "pool first": lambda: images(nn.MaxPool2d(2), nn.Conv2d(1, 2, 1), nn.ReLU(), flat=8),
    "average": lambda: images(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.AvgPool2d(2), flat=2),
    "norm behind conv": lambda: model_of("batch norm 2d"),
    "not flat": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Linear(2, 3)),
    "conv last": lambda: nn.Sequential(
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
    model.double()(torch.zeros(2, 1, 4, 4).double())  # its sizes fit


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_not(name: str) -> None:
    assert find_chain(OTHERS[name]()) is None


def work_of(optimizer: str) -> tuple[Any, ...]:
    return WORKS["epochs"], OPTIMIZERS[optimizer], Streams(3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("backend", ["batched", "graph", "native"])
@pytest.mark.parametrize("name", CHAINS)
def test_chains_equal_the_reference(name: str, backend: str, optimizer: str) -> None:
    if backend == "native" and optimizer.startswith("adam"):
        return
    model = CHAINS[name]().double()
    for sizes in ("ragged", "some empty"):
        one, other = (
            b(model, problem(SIZES[sizes]), *work_of(optimizer))
            for b in (BACKENDS[backend], reference)
        )
        assert_equal(one, other, np.arange(len(SIZES[sizes])))


@pytest.mark.parametrize("engine", [batched, graph])
def test_a_layer_along_the_last_axis_of_samples_is_not_written_out(engine: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 3)).double()
    work, data = work_of("sgd"), problem(SIZES["ragged"])
    assert Workload(model, data, OPTIMIZERS["sgd"]).chain is None
    assert_equal(
        engine(model, data, *work, rounds=10**4), reference(model, data, *work), np.arange(5)
    )


def test_a_layer_in_front_of_a_flattening_is_written_out_where_samples_are_vectors() -> None:
    data = problem(SIZES["ragged"])
    model = nn.Sequential(nn.Linear(16, 5), nn.ReLU(), nn.Flatten(), nn.Linear(5, 3)).double()
    for axis in (1, 2):
        samples = replace(data, x=data.x.flatten(axis))
        assert Workload(model, samples, OPTIMIZERS["sgd"]).chain is not None
        assert_equal(
            *(build(model, samples, *work_of("sgd")) for build in (batched, reference)),
            np.arange(5),
        )
