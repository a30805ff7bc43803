"""Gradients of many clients at once equal those of one client after another."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.core.rng import Streams
from fedsim.engine import torch_backend
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine
from fedsim.engine.model import initial, trained_names
from fedsim.engine.schedule import LocalWork
from fedsim.engine.vmapped import joint_gradients
from fedsim.models.mlp import MLP
from tests.card_runs import W1, counts_of_round_2
from tests.engines import batched, graph, reference
from tests.pretended_cuda import PretendedCard, held
from tests.test_engine import OPTIMIZERS

SHAPE, CLASSES = (1, 3, 4), 5
SIZES = [4, 1, 0, 9, 3, 4, 2]
POSITIONS = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])


def mlp() -> nn.Module:
    return MLP(SHAPE, CLASSES, hidden=[6], dropout=0.5)


def batch_norms() -> nn.Module:
    hidden = nn.BatchNorm1d(6, momentum=0.1), nn.Tanh(), nn.Dropout(0.5)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 6), *hidden, nn.Linear(6, CLASSES))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(4, CLASSES))


class BranchesInEvalMode(nn.Sequential):
    """Decides by a sample's value, which vmap does not support."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)
        return output * 2 if not self.training and bool(x.sum() > 0) else output


def branching() -> nn.Module:
    return BranchesInEvalMode(nn.Flatten(), nn.Linear(12, CLASSES))


def engine(
    device: str,
    build: Callable[..., Engine] = batched,
    model: Callable[[], nn.Module] = mlp,
    dtype: torch.dtype = torch.float32,
    **parameters: Any,
) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        built = model()
        x, y = torch.randn(sum(SIZES), *SHAPE), torch.randint(CLASSES, (sum(SIZES),))
    data = ClientData(x.to(device, dtype), y.to(device), POSITIONS, POSITIONS, CLASSES)
    work, optimizer = LocalWork(1, None, 4), OPTIMIZERS["decay"]
    return build(built.to(device, dtype), data, work, optimizer, Streams(0), **parameters)


def gradients(engine: Engine, names: Sequence[str] | None = None) -> Tensor:
    params = initial(engine.workload.model)
    return torch.stack(
        [held(gradient).clone() for gradient in engine.client_gradients(params, POSITIONS, names)]
    )


@pytest.mark.parametrize("max_samples", [1000, 3])
@pytest.mark.parametrize("model", [mlp, batch_norms])
def test_joint_gradients_equal_those_of_the_reference(
    model: Callable[[], nn.Module], max_samples: int
) -> None:
    one_by_one = engine("cpu", reference, model, torch.float64)
    module, data = one_by_one.workload.model, one_by_one.data
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point():
            buffer.add_(0.3 if name.endswith("mean") else 0.5)
    params = initial(module)
    for names in (trained_names(module)[-1:], trained_names(module)):
        joint = joint_gradients(
            module.eval(), data, "float32", params, POSITIONS, names, max_samples
        )
        expected = gradients(one_by_one, names)
        torch.testing.assert_close(joint, expected, rtol=1e-12, atol=1e-12)
        assert joint.any(1).tolist() == [size > 0 for size in SIZES]
    # A sample that is not finite stays with its client. Position 0 is also padding's default.
    data.x[POSITIONS[0]] = torch.nan
    broken = joint_gradients(module, data, "float32", params, POSITIONS, names, max_samples)
    assert broken[0].isnan().any()
    assert torch.equal(broken[1:], joint[1:])


@pytest.mark.parametrize("build", [batched, graph])
@pytest.mark.parametrize("chunk_size", ["auto", 2])
def test_gradients_on_a_gpu_equal_those_of_the_reference(
    build: Callable[..., Engine], chunk_size: Any
) -> None:
    expected = gradients(engine("cpu", reference))
    with PretendedCard():
        on_card = gradients(engine("cuda", build, chunk_size=chunk_size))
    torch.testing.assert_close(on_card, expected, rtol=1e-5, atol=1e-7)


def test_a_gpu_computes_gradients_jointly_unless_the_model_need_not_take_padding() -> None:
    with PretendedCard():
        assert engine("cuda").backend._lists_that_fit(7, 9) > 10**6
        assert engine("cuda", graph, convolutions).backend._lists_that_fit(7, 9) == 1


@pytest.mark.parametrize(("chunk_size", "at_once"), [("auto", 1000), (2, 2)])
def test_a_cpu_computes_gradients_of_many_small_clients_jointly(
    chunk_size: Any, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = engine("cpu", chunk_size=chunk_size)
    expected = gradients(few)
    assert few.backend._lists_that_fit(len(POSITIONS), 9) == 1
    monkeypatch.setattr(torch_backend, "JOINT_LIST_COUNT", len(POSITIONS))
    assert few.backend._lists_that_fit(len(POSITIONS), 9) >= at_once
    assert few.backend._lists_that_fit(len(POSITIONS), 65) == 1
    torch.testing.assert_close(gradients(few), expected, rtol=1e-5, atol=1e-7)


def test_a_model_that_vmap_does_not_support_takes_one_client_after_another_and_says_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    expected = gradients(engine("cpu", reference, branching))
    with PretendedCard():
        on_card = engine("cuda", model=branching)
        for _ in range(2):
            assert torch.equal(gradients(on_card), expected)
    assert capfd.readouterr().err.count("gradients of one client after another (slower") == 1


@pytest.mark.parametrize(("selector", "max_launches"), [("grad_norm", 105), ("divfl", 122)])
def test_a_round_of_a_selector_of_gradients_keeps_its_budget(
    selector: str, max_launches: int
) -> None:
    """One client after another, it would be 690 launches and 23 waits, or 716 and 6."""
    words = [*W1, f"selector={selector}", "local.steps=2", "num_clients=20", "engine=graph"]
    counts = counts_of_round_2(words, 300)
    assert counts.launches.total() <= max_launches, counts
    assert counts.waits.total() <= 4, counts
