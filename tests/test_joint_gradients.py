"""Gradients of many clients at once, as on a GPU: equal to those of one client after another, in chunks that fit."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.core.rng import Streams
from fedsim.engine import stacked
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine
from fedsim.engine.model import initial, trained_names
from fedsim.engine.schedule import LocalWork
from fedsim.engine.stacked import joint_gradients, padded
from fedsim.models.mlp import MLP
from tests.card_workloads import W1, counts_of_a_round
from tests.engines import batched, graph, reference
from tests.pretended_cuda import PretendedCard, held
from tests.test_engine import OPTIMIZERS

SHAPE, CLASSES = (1, 3, 4), 5
SIZES = [4, 1, 0, 9, 3, 4, 2]
OWN = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])


class BatchNorms(nn.Sequential):
    """With statistics that travel, a dropout, and an activation that is no ReLU."""

    def __init__(self) -> None:
        first = nn.Flatten(), nn.Linear(12, 6), nn.BatchNorm1d(6, momentum=0.1), nn.Tanh(), nn.Dropout(0.5)
        super().__init__(*first, nn.Linear(6, CLASSES))


class Looks(nn.Sequential):
    """Decides by a sample's value, which vmap does not know."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(12, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)
        return output * 2 if not self.training and bool(x.sum() > 0) else output


def made(kind: type[nn.Module] | None = None) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = MLP(SHAPE, CLASSES, hidden=[6], dropout=0.5) if kind is None else kind()
        return model, torch.randn(sum(SIZES), *SHAPE), torch.randint(CLASSES, (sum(SIZES),))


def engine(device: str, build: Any = batched, kind: type[nn.Module] | None = None, **switches: Any) -> Engine:
    model, x, y = made(kind)
    data = ClientData(x.to(device), y.to(device), OWN, OWN, CLASSES)
    work = LocalWork(1, None, 4)
    found: Engine = build(model.to(device), data, work, OPTIMIZERS["decay"], Streams(0), **switches)
    return found


def gradients(engine: Engine, names: Sequence[str] | None = None) -> Tensor:
    found = engine.client_gradients(initial(engine.workload.model), OWN, names)
    return torch.stack([held(gradient).clone() for gradient in found])


def joint(model: nn.Module, data: ClientData, names: Sequence[str], most_samples: int = 1000) -> Tensor:
    return joint_gradients(model.eval(), data, "float32", initial(model), OWN, names, most_samples)


@pytest.mark.parametrize("most_samples", [1000, 3])
@pytest.mark.parametrize("kind", [None, BatchNorms])
def test_equals_one_client_after_another_in_float64(kind: type[nn.Module] | None, most_samples: int) -> None:
    model, x, y = made(kind)
    model, data = model.double(), ClientData(x.double(), y, OWN, OWN, CLASSES)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.add_(0.3 if name.endswith("mean") else 0.5)
    one_by_one = reference(model, data, LocalWork(1, None, 4), OPTIMIZERS["decay"], Streams(0))
    for names in (trained_names(model), trained_names(model)[-1:]):
        wanted = torch.stack(list(one_by_one.client_gradients(initial(model), OWN, names)))
        found = joint(model, data, names, most_samples)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        assert not found[2].any()
        assert found[[0, 1, 3]].any(1).all()


@pytest.mark.parametrize("build", [batched, graph])
@pytest.mark.parametrize("chunk_size", ["auto", 2])
def test_equals_one_client_after_another_on_the_card(build: Any, chunk_size: Any) -> None:
    wanted = gradients(engine("cpu", reference))
    with PretendedCard():
        found = gradients(engine("cuda", build, chunk_size=chunk_size))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_a_chunk_is_computed_when_its_first_gradient_is_asked_for() -> None:
    with PretendedCard() as card:
        asked = engine("cuda", chunk_size=3)
        positions = [OWN[0]] * 6
        answers = asked.client_gradients(initial(asked.workload.model), positions, None)
        card.counts.reset()
        launches = [card.counts.launches.total() for answer in answers]
        assert card.counts.waits.total() == 0
    assert launches == [launches[0]] * 3 + [2 * launches[0]] * 3


def test_a_sample_that_is_not_finite_stays_with_its_client() -> None:
    model, x, y = made()
    sound = joint(model, ClientData(x, y, OWN, OWN, CLASSES), trained_names(model))
    for client in (0, 3):
        broken = x.clone()
        broken[OWN[client]] = torch.nan
        found = joint(model, ClientData(broken, y, OWN, OWN, CLASSES), trained_names(model))
        others = np.arange(len(OWN)) != client
        assert found[client].isnan().any()
        assert torch.equal(found[others], sound[others])


def test_padding_by_hand() -> None:
    where, weights = padded([np.array([5, 2]), np.array([], dtype=np.int64), np.array([7, 1, 3])])
    assert where.tolist() == [[5, 2, 5], [0, 0, 0], [7, 1, 3]]
    assert weights.tolist() == [[0.5, 0.5, 0], [0, 0, 0], [1 / 3, 1 / 3, 1 / 3]]


def test_running_out_of_memory_halves_the_chunk(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(positions: Sequence[NDArray[np.int64]]) -> Any:
        sizes.append(len(positions))
        if len(positions) > 3:
            raise torch.OutOfMemoryError("pretended")
        return padded(positions)

    sizes: list[int] = []
    monkeypatch.setattr(stacked, "padded", refuse)
    with PretendedCard():
        found = gradients(engine("cuda"))
    torch.testing.assert_close(found, gradients(engine("cpu", reference)), rtol=1e-5, atol=1e-7)
    line = "engine.chunk_size: out of memory with 7 gradients at once; going on with 3\n"
    assert capfd.readouterr().err.count(line) == 1
    assert sizes == [7, 3, 3]  # after the first, which comes alone


def test_a_model_that_vmap_does_not_know_is_asked_for_one_client_after_another(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with PretendedCard():
        asked = engine("cuda", kind=Looks)
        found = [gradients(asked), gradients(asked)]
    wanted = gradients(engine("cpu", reference, Looks))
    assert all(torch.equal(each, wanted) for each in found)
    assert capfd.readouterr().err.count("gradients of one client after another, which is slower") == 1


def test_no_padding_where_a_model_need_not_take_it_nor_for_convolutions() -> None:
    class Convolutions(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(4, CLASSES))

    with PretendedCard():
        assert engine("cuda").backend._lists_that_fit(OWN) > 10**6  # type: ignore[attr-defined]
        assert engine("cuda", reference).backend._lists_that_fit(OWN) == 1  # type: ignore[attr-defined]
        assert engine("cuda", graph, Convolutions).backend._lists_that_fit(OWN) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(("selector", "launches", "waits"), [("grad_norm", 105, 4), ("divfl", 122, 4)])
def test_a_round_of_a_selector_of_gradients_keeps_its_budget(selector: str, launches: int, waits: int) -> None:
    words = [word for word in W1 if not word.startswith(("selector=", "local.steps", "num_clients"))]
    more = (f"selector={selector}", "local.steps=2", "num_clients=20", "engine=graph")
    counts = counts_of_a_round((*words, *more), 2, 300)  # one client after another: 690 and 23, 716 and 6
    assert counts.launches.total() <= launches, counts.table("launches")
    assert counts.waits.total() <= waits, counts.table("waits")
