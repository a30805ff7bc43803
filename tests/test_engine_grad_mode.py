"""Whoever calls an engine under `torch.no_grad`, as a selector may, gets the same."""

from typing import Any

import numpy as np
import pytest
import torch

from fedsim.core.rng import Streams
from fedsim.engine.engine import Engine
from fedsim.engine.model import initial
from tests.engines import batched, graph, native, reference
from tests.test_engine import OPTIMIZERS, SIZES, WORKS, model_of, problem

ENGINES = {
    "sequential": (reference, {}),
    "sequential, side by side": (reference, {"workers": 2}),
    "batched": (batched, {}),
    "graph": (graph, {}),
    "native": (native, {}),
}


def engine_of(name: str, model: str) -> Engine:
    make, switches = ENGINES[name]
    data = problem(SIZES["ragged"], torch.float32)
    common = (model_of(model, torch.float32), data, WORKS["epochs"], OPTIMIZERS["momentum"], Streams(3))
    return make(*common, **switches)


CASES = [
    (name, model) for name in ENGINES for model in ("mlp", "batch norm 2d") if (name, model[:5]) != ("native", "batch")
]


@pytest.mark.parametrize(("name", "model"), CASES)
def test_an_engine_computes_the_same_without_the_callers_gradients(name: str, model: str) -> None:
    engine = engine_of(name, model)
    params, ids = initial(engine.workload.model), np.arange(5)

    def answers() -> list[Any]:
        trained = engine.train(params, ids, 1, 0.1)
        gradients = list(engine.client_gradients(params, engine.data.train))
        stacks = (trained.delta, trained.momentum or {})
        return [trained.loss.tolist(), *(value for stack in stacks for value in stack.values()), *gradients]

    expected = answers()
    with torch.no_grad():
        found = answers()
        assert not torch.is_grad_enabled()
    assert found[0] == expected[0]
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(found[1:], expected[1:], strict=True))
