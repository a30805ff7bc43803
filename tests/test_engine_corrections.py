"""Corrections of local gradients: every backend equals a loop in plain PyTorch that changes the
gradient by hand."""

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.core.errors import FedsimError
from fedsim.core.types import Correction, Params, Stack
from fedsim.engine.engine import Engine
from fedsim.engine.model import initial
from fedsim.engine.optimizers import SGD, Constant
from fedsim.engine.schedule import Schedule
from fedsim.engine.training_copies import for_sequential
from fedsim.engine.training_layers import keyed_dropouts
from tests.engines import batched, graph, reference, schedule_of
from tests.pretended_cuda import PretendedCard, held
from tests.test_engine import BACKENDS, OPTIMIZERS, supports, task_of
from tests.test_engine_graph import DROPOUT

pytestmark = pytest.mark.usefixtures("compiled")


class Halved(SGD):
    """A user's optimiser, whose steps are not merged with the gradient."""

    def step(self, params: Stack, grads: Stack, state: Stack, lr: float) -> None:
        super().step(params, grads, state, lr / 2)

    def torch_optimizer(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=lr / 2, weight_decay=self.weight_decay)


HALVED = Halved(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.1, schedule=Constant())
BUILDS = dict[str, Callable[..., Engine]](
    BACKENDS, reference=reference, chunked=partial(batched, chunk_size=2)
)
RULES = ("sgd", "decay", "nesterov", "adam", "adamw", "halved")
KINDS = ("pull", "one shift", "pull and shifts")


def engine_of(build: Callable[..., Engine], name: str, rule: str) -> Engine:
    model, data, work, _, streams = task_of((name, "ragged", "epochs", "sgd"))
    return build(model, data, work, HALVED if rule == "halved" else OPTIMIZERS[rule], streams)


def correction_of(engine: Engine, kind: str, seed: int = 0) -> Correction:
    """Return a correction for all clients.

    "one shift" is the same for all clients, and lies in memory once, as FedProx has it.
    """
    pull = 0.0 if kind == "one shift" else 0.3
    if kind == "pull":
        return Correction(pull)
    count = len(engine.data.train)
    rows = 1 if kind == "one shift" else count
    params, random = initial(engine.workload.model), torch.Generator().manual_seed(seed)
    shift = {}
    for name in engine.trained:
        shape = params[name].shape
        values = 0.1 * torch.randn(rows, *shape, generator=random).to(params[name])
        shift[name] = values.expand(count, *shape)
    return Correction(pull, shift)


def train_by_hand(engine: Engine, schedule: Schedule, row: int, correction: Correction) -> Params:
    """Return the change of one client's model. Only dropout masks are the engine's."""
    model, data = for_sequential(copy.deepcopy(engine.workload.model)), engine.data
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    params = dict(model.named_parameters())
    optimizer = engine.workload.optimizer.torch_optimizer(
        list(params.values()), engine.workload.optimizer.lr
    )
    for step, count in enumerate(schedule.counts[row]):
        if count == 0:
            break
        for layer in keyed_dropouts(model).values():
            assert schedule.keys is not None
            layer.key.fill_(int(schedule.keys[row, step]))
            layer.calls = 0
        batch = torch.as_tensor(schedule.positions[row, step, :count])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data.x[batch]), data.y[batch]).backward()
        for name, parameter in params.items():
            assert parameter.grad is not None
            parameter.grad += correction.pull * parameter.detach()
            if correction.shift is not None:
                parameter.grad += correction.shift[name][row]
        optimizer.step()
    return {name: model.state_dict()[name] - value for name, value in before.items()}


@cache
def expected_changes(name: str, rule: str, kind: str) -> list[Params]:
    engine = engine_of(reference, name, rule)
    schedule, correction = schedule_of(engine, np.arange(5), 2), correction_of(engine, kind)
    return [train_by_hand(engine, schedule, row, correction) for row in range(5)]


MODELS = ("dropout", "conv", "batch norm and dropout")
TASKS = [(name, rule, "pull and shifts") for name in MODELS for rule in RULES]
TASKS += [("dropout", rule, kind) for rule in ("sgd", "adam") for kind in ("pull", "one shift")]
FAST_RULES = {
    "dropout": RULES,
    "conv": ("decay", "adam", "halved"),
    "batch norm and dropout": ("nesterov", "adamw", "halved"),
}
ONE_BY_ONE = ("reference", "side by side")
"""Backends that train as the reference does. Their fast tests have fewer rules."""


def cases() -> list[Any]:
    """Return all combinations of backend and task, of which a covering subset is fast."""
    found = []
    for backend in BUILDS:
        for name, rule, kind in TASKS:
            cannot_record = backend in ("native", "graph", "stacked") and rule == "halved"
            if not supports(backend, name, rule) or cannot_record:
                continue
            is_fast = rule in FAST_RULES[name]
            if backend in (*ONE_BY_ONE, "chunked"):
                is_fast = rule in ("nesterov", "adam")
            marks = () if is_fast else pytest.mark.slow
            found.append(pytest.param(backend, name, rule, kind, marks=marks))
    return found


@pytest.mark.parametrize(("backend", "name", "rule", "kind"), cases())
def test_the_optimiser_sees_the_corrected_gradient(
    backend: str, name: str, rule: str, kind: str
) -> None:
    engine = engine_of(BUILDS[backend], name, rule)
    params, correction = initial(engine.workload.model), correction_of(engine, kind)
    before, lr = copy.deepcopy(correction), engine.workload.optimizer.lr
    cohort = engine.train(params, np.arange(5), 2, lr, correction=correction)
    assert len(set(cohort.steps.tolist())) > 1
    for row, change in enumerate(expected_changes(name, rule, kind)):
        for key, value in cohort.delta.items():
            torch.testing.assert_close(value[row], change[key], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(correction.shift, before.shift, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BUILDS)
def test_a_correction_affects_its_own_round_only(backend: str) -> None:
    """The result of a round depends on no correction that an engine had before."""
    used = engine_of(BUILDS[backend], "dropout", "decay")
    task = initial(used.workload.model), np.arange(5), 2, 0.1
    corrections = [correction_of(used, kind, seed) for seed, kind in enumerate(KINDS)]
    expected = []
    for correction in (None, *corrections):
        new = engine_of(BUILDS[backend], "dropout", "decay")
        expected.append(new.train(*task, correction=correction).delta)
    # `Correction()` adds nothing, as None.
    in_turn = (None, *corrections, Correction(), *corrections)
    for correction, delta in zip(in_turn, 2 * expected, strict=True):
        actual = used.train(*task, correction=correction).delta
        assert all(torch.equal(value, delta[name]) for name, value in actual.items())


@pytest.mark.parametrize("build", [graph, batched])
def test_a_correction_on_a_gpu_gives_the_bits_of_the_cpu(build: Callable[..., Engine]) -> None:
    def changes(device: str) -> list[dict[str, Tensor]]:
        engine = DROPOUT.engine(device, build)
        params, ids = initial(engine.workload.model), np.arange(len(engine.data.train))
        corrections = [correction_of(engine, "pull and shifts", seed) for seed in (1, 2)]
        return [engine.train(params, ids, 1, 0.1, correction=each).delta for each in corrections]

    expected = changes("cpu")
    with PretendedCard():
        for on_card, on_cpu in zip(changes("cuda"), expected, strict=True):
            assert all(torch.equal(held(on_card[name]), value) for name, value in on_cpu.items())


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("6.bias", torch.zeros(3).double(), r"6.bias is \[3\] torch.float64 cpu; must be \[5, 3\]"),
        ("6.bias", torch.zeros(5, 3), "6.bias is .*float32"),
        ("6.bias", None, "6.bias is missing"),
        ("1.running_mean", torch.zeros(5, 4).double(), "1.running_mean is "),
    ],
)
def test_a_shift_that_does_not_fit_the_model_is_rejected(
    name: str, wrong: Tensor | None, message: str
) -> None:
    engine = engine_of(reference, "batch norm and dropout", "sgd")
    shift = dict(correction_of(engine, "pull and shifts").shift or {})
    if wrong is None:
        del shift[name]
    else:
        shift[name] = wrong
    params, correction = initial(engine.workload.model), Correction(0.0, shift)
    with pytest.raises(FedsimError, match=f"the shift of a correction: {message}"):
        engine.train(params, np.arange(5), 1, 0.1, correction=correction)
