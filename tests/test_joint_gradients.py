"""Gradients of many clients at once: equal to those of one client after another, in chunks that
fit."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.core.rng import Streams
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine
from fedsim.engine.model import initial, trained_names
from fedsim.engine.schedule import LocalWork
from fedsim.engine.vmapped import joint_gradients
from fedsim.models.mlp import MLP
from tests.card_runs import W1, counts_of_a_round
from tests.engines import batched, graph, reference
from tests.pretended_cuda import PretendedCard, held
from tests.test_engine import OPTIMIZERS

SHAPE, CLASSES = (1, 3, 4), 5
SIZES = [4, 1, 0, 9, 3, 4, 2]
OWN = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])


def mlp() -> nn.Module:
    return MLP(SHAPE, CLASSES, hidden=[6], dropout=0.5)


def batch_norms() -> nn.Module:
    """With statistics that travel, a dropout, and an activation that is no ReLU."""
    first = (
        nn.Flatten(),
        nn.Linear(12, 6),
        nn.BatchNorm1d(6, momentum=0.1),
        nn.Tanh(),
        nn.Dropout(0.5),
    )
    return nn.Sequential(*first, nn.Linear(6, CLASSES))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(4, CLASSES))


class Looks(nn.Sequential):
    """Decides by a sample's value, which vmap does not know."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(12, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)
        return output * 2 if not self.training and bool(x.sum() > 0) else output


def engine(
    device: str, build: Any = batched, kind: Any = mlp, dtype: Any = torch.float32, **switches: Any
) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model, x, y = kind(), torch.randn(sum(SIZES), *SHAPE), torch.randint(CLASSES, (sum(SIZES),))
    data = ClientData(x.to(device, dtype), y.to(device), OWN, OWN, CLASSES)
    task = model.to(device, dtype), data, LocalWork(1, None, 4), OPTIMIZERS["decay"], Streams(0)
    return build(*task, **switches)


def gradients(engine: Engine, names: Sequence[str] | None = None) -> Tensor:
    found = engine.client_gradients(initial(engine.workload.model), OWN, names)
    return torch.stack([held(gradient).clone() for gradient in found])


@pytest.mark.parametrize("most_samples", [1000, 3])
@pytest.mark.parametrize("kind", [mlp, batch_norms])
def test_equals_one_client_after_another_in_float64(kind: Any, most_samples: int) -> None:
    """A sample that is not finite stays with its client."""
    one_by_one = engine("cpu", reference, kind, torch.float64)
    model, data = one_by_one.workload.model, one_by_one.data
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.add_(0.3 if name.endswith("mean") else 0.5)

    def joint() -> Tensor:
        return joint_gradients(
            model.eval(), data, "float32", initial(model), OWN, names, most_samples
        )

    for names in (trained_names(model)[-1:], trained_names(model)):
        sound = joint()
        torch.testing.assert_close(sound, gradients(one_by_one, names), rtol=1e-12, atol=1e-12)
        assert sound.any(1).tolist() == [size > 0 for size in SIZES]
    data.x[OWN[0]] = torch.nan  # the first sample of all, which stands for those of an empty list
    found = joint()
    assert found[0].isnan().any()
    assert torch.equal(found[1:], sound[1:])


@pytest.mark.parametrize("build", [batched, graph])
@pytest.mark.parametrize("chunk_size", ["auto", 2])
def test_equals_one_client_after_another_on_the_card(build: Any, chunk_size: Any) -> None:
    wanted = gradients(engine("cpu", reference))
    with PretendedCard():
        found = gradients(engine("cuda", build, chunk_size=chunk_size))
        many = engine("cuda", build).backend._lists_that_fit(len(OWN), 9)
        few = [engine("cuda", graph, convolutions).backend, engine("cuda", reference).backend]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    assert many > 10**6
    assert [backend._lists_that_fit(len(OWN), 9) for backend in few] == [
        1,
        1,
    ]  # which need not take padding


@pytest.mark.parametrize(("chunk_size", "at_once"), [("auto", 1000), (2, 2)])
def test_a_cpu_takes_many_small_clients_at_once(
    chunk_size: Any, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = engine("cpu", chunk_size=chunk_size)
    wanted = gradients(asked)
    assert asked.backend._lists_that_fit(len(OWN), 9) == 1
    monkeypatch.setattr("fedsim.engine.torch_backend.JOINT_LIST_COUNT", len(OWN))
    assert asked.backend._lists_that_fit(len(OWN), 9) >= at_once
    assert asked.backend._lists_that_fit(len(OWN), 65) == 1
    torch.testing.assert_close(gradients(asked), wanted, rtol=1e-5, atol=1e-7)


def test_without_an_operation_of_vmap_it_goes_on_and_says_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with PretendedCard():
        asked = engine("cuda", kind=Looks)
        found = [gradients(asked), gradients(asked)]
    wanted = gradients(engine("cpu", reference, Looks))
    assert all(torch.equal(each, wanted) for each in found)
    assert (
        capfd.readouterr().err.count("gradients of one client after another (slower, same results)")
        == 1
    )


@pytest.mark.parametrize(
    ("selector", "launches", "waits"), [("grad_norm", 105, 4), ("divfl", 122, 4)]
)
def test_a_round_of_a_selector_of_gradients_keeps_its_budget(
    selector: str, launches: int, waits: int
) -> None:
    words = [
        word for word in W1 if not word.startswith(("selector=", "local.steps", "num_clients"))
    ]
    more = (f"selector={selector}", "local.steps=2", "num_clients=20", "engine=graph")
    counts = counts_of_a_round(
        (*words, *more), 2, 300
    )  # one client after another: 690 and 23, 716 and 6
    assert counts.launches.total() <= launches, counts.table("launches")
    assert counts.waits.total() <= waits, counts.table("waits")
