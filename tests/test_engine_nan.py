"""NaN in, NaN out: what a model or sample that is not finite comes to is never hidden by ReLU, pooling or padding."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.core.errors import DataError
from fedsim.core.rng import Streams
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine
from fedsim.engine.model import initial
from fedsim.engine.schedule import LocalWork
from tests.engines import reference
from tests.test_engine import BACKENDS, OPTIMIZERS

pytestmark = pytest.mark.usefixtures("compiled")
ONE_STEP = LocalWork(None, 1, 4)
ENGINES = {name: BACKENDS[name] for name in ("native", "batched", "differentiated")} | {"sequential": reference}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(
        *(nn.Flatten(), nn.Linear(36, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
    ),
    "dropout": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 7), nn.Dropout(0.5), nn.ReLU(), nn.Linear(7, 3)),
    "convolution": lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)),
    "pooling": lambda: nn.Sequential(*(nn.Conv2d(1, 3, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 3))),
    "pooling first": lambda: nn.Sequential(
        *(nn.Conv2d(1, 3, 1), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 3))
    ),
    "two convolutions": lambda: nn.Sequential(
        *(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)),
    ),
}


def model_of(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return MODELS[name]().double()


def problem() -> ClientData:
    """Two clients with four and three samples."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 1, 6, 6, generator=generator, dtype=torch.float64)
    positions = [np.arange(4), np.arange(4, 7)]
    return ClientData(x, torch.arange(7) % 3, positions, positions, 3)


def engine_of(name: str, model: nn.Module, data: ClientData, work: LocalWork = ONE_STEP) -> Engine:
    return ENGINES[name](model, data, work, OPTIMIZERS["sgd"], Streams(3))


def answers(engine: Engine, params: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Everything that an engine says of a model, by name. Of updates, whether a client's has a NaN: NaN times a mask of
    0 is NaN or 0, by the order of operations."""
    data, ids = engine.data, np.arange(2)
    trained, evaluation = engine.train(params, ids, 1, 0.1), engine.evaluate(params, data.x, data.y)
    return {
        "losses": engine.losses(params, data.train),
        "losses of a few": engine.losses(params, data.train[1:]),
        "predictions": engine.predict(params, data.x).numpy(),
        "evaluation": np.array([evaluation.loss]),
        "gradients": torch.stack(list(engine.client_gradients(params, data.train, None))).numpy(),
        "training losses": np.stack([trained.loss, trained.rms_loss]),
        **{name: value.flatten(1).isnan().any(1).numpy() for name, value in trained.delta.items()},
    }


def assert_as_plain_torch(name: str, model: nn.Module, data: ClientData, params: dict[str, torch.Tensor]) -> None:
    """Equal, with NaN in the same places, and there are some."""
    found, wanted = (answers(engine_of(e, model, data), params) for e in (name, "sequential"))
    for key in found:
        np.testing.assert_allclose(found[key], wanted[key], rtol=1e-9, atol=1e-12, err_msg=key)
    assert np.isnan(found["losses"]).any()
    assert np.isnan(found["evaluation"]).all()
    assert np.isnan(found["training losses"]).any(1).all()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_weight_or_a_sample_that_is_nan_makes_the_losses_nan(engine: str, model: str) -> None:
    module, data = model_of(model), problem()
    for name, value in initial(module).items():
        broken = {**initial(module), name: value.clone()}
        broken[name].view(-1)[-1] = torch.nan
        assert_as_plain_torch(engine, module, data, broken)
    for pixel in [(0, 0), (0, 1), (1, 0), (1, 1)]:  # each place of a window of the pooling
        dirty = replace(data, x=data.x.clone())
        dirty.x[(5, 0, *pixel)] = torch.nan
        assert_as_plain_torch(engine, module, dirty, initial(module))
        found = engine_of(engine, module, dirty)
        trained = found.train(initial(module), np.arange(2), 1, 0.1)
        assert np.isnan(found.losses(initial(module), data.train)).tolist() == [False, True]
        assert np.isnan(trained.loss).tolist() == [False, True]
        assert [torch.stack([d[row].isnan().any() for d in trained.delta.values()]).any() for row in (0, 1)] == [0, 1]


@pytest.mark.parametrize(("label", "found"), [(-1, "-1..2"), (3, "0..3"), (10**9, "0..1000000000")])
def test_a_label_that_is_no_class_never_reaches_an_engine(label: int, found: str) -> None:
    y = torch.arange(7) % 3
    y[4] = label
    with pytest.raises(DataError, match=rf"labels of the training samples must lie in 0\.\.2, found {found}"):
        replace(problem(), y=y)
    with pytest.raises(DataError, match=r"must be int64, not torch\.int32"):
        replace(problem(), y=torch.arange(7, dtype=torch.int32) % 3)
