"""A parameter that the forward pass never uses has a gradient of zero, whatever trains it."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.core.rng import Streams
from fedsim.engine.model import initial
from tests.engines import batched, graph, reference
from tests.test_engine import OPTIMIZERS, SIZES, WORKS, problem


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.unused = nn.Linear(16, 8), nn.Linear(8, 3), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x.flatten(1))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make", [batched, graph])
def test_engines_agree_on_what_weight_decay_does_to_it(make: type, optimizer: str) -> None:
    data, model = problem(SIZES["ragged"]), WithUnused().double()
    common = (model, data, WORKS["epochs"], OPTIMIZERS[optimizer], Streams(3))
    params, ids = initial(model), np.arange(5)
    one, other = (build(*common).train(params, ids, 1, 0.1) for build in (make, reference))
    for name in params:
        torch.testing.assert_close(one.delta[name], other.delta[name], rtol=1e-10, atol=1e-10)
    decays = OPTIMIZERS[optimizer].weight_decay > 0  # type: ignore[attr-defined]
    assert bool(other.delta["unused.weight"].any()) == decays


@pytest.mark.parametrize("make", [batched, graph, reference])
def test_its_gradient_is_zero(make: type) -> None:
    data, model = problem(SIZES["ragged"]), WithUnused().double()
    engine = make(model, data, WORKS["epochs"], OPTIMIZERS["sgd"], Streams(3))
    names = ["b.bias", "unused.weight"]
    for gradient in engine.client_gradients(initial(model), data.train, names):
        assert gradient[:3].any()
        assert gradient[3:].tolist() == [0.0] * 16
