"""Corrections of local gradients, by all backends: a loop in plain PyTorch in which the gradient is
changed by hand."""

import copy
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.core.errors import FedsimError
from fedsim.core.types import Correction, Params, Stack
from fedsim.engine.engine import Engine
from fedsim.engine.model import initial
from fedsim.engine.optimizers import SGD
from fedsim.engine.schedule import Schedule
from fedsim.engine.training_copies import for_sequential
from fedsim.engine.training_layers import keyed_dropouts
from tests.engines import batched, graph, reference, schedule_of
from tests.pretended_cuda import PretendedCard, held
from tests.test_engine import BACKENDS, OPTIMIZERS, PLAIN, fits, task_of
from tests.test_engine_graph import DROPOUT, Case

pytestmark = pytest.mark.usefixtures("compiled")


class Halved(SGD):
    """A user's optimiser, no step of which is merged with the gradient."""

    def step(self, params: Stack, grads: Stack, state: Stack, lr: float) -> None:
        super().step(params, grads, state, lr / 2)

    def torch_optimizer(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=lr / 2, weight_decay=self.weight_decay)


OWN = {"halved": Halved(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.1, **PLAIN)}
RULES: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "decay": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, 0.01, betas=(0.9, 0.99), eps=1e-4, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, betas=(0.9, 0.99), eps=1e-4, weight_decay=0.1),
    "halved": lambda p: torch.optim.SGD(p, 0.05, weight_decay=0.1),
}
KINDS = {"pull": (0.3, ""), "one shift": (0.0, "one"), "pull and shifts": (0.3, "each")}


def engine_of(build: Callable[..., Engine], name: str, rule: str) -> Engine:
    model, data, work, _, streams = task_of((name, "ragged", "epochs", "sgd"))
    return build(model, data, work, {**OPTIMIZERS, **OWN}[rule], streams)


def correction_of(engine: Engine, kind: str, seed: int = 0) -> Correction:
    """For all clients. Of one shift for all of them there is one row in memory, as FedProx has
    it."""
    (pull, shifts), count = KINDS[kind], len(engine.data.train)
    if not shifts:
        return Correction(pull)
    params, random = initial(engine.workload.model), torch.Generator().manual_seed(seed)
    like = {
        name: params[name].expand(1 if shifts == "one" else count, *params[name].shape)
        for name in engine.trained
    }
    shift = {
        name: 0.1 * torch.randn(value.shape, generator=random).to(value)
        for name, value in like.items()
    }
    return Correction(
        pull, {name: value.expand(count, *value.shape[1:]) for name, value in shift.items()}
    )


def by_hand(
    engine: Engine, rule: str, schedule: Schedule, row: int, correction: Correction
) -> Params:
    """The change of one client's model; dropout masks alone are the engine's."""
    model, data = for_sequential(copy.deepcopy(engine.workload.model)).train(), engine.data
    before, named = (
        {n: v.detach().clone() for n, v in model.state_dict().items()},
        dict(model.named_parameters()),
    )
    optimizer = RULES[rule](list(named.values()))
    for step, count in enumerate(schedule.counts[row]):
        for layer in keyed_dropouts(model).values() if count else ():
            layer.key.fill_(int(schedule.keys[row, step]))  # type: ignore[index]
            layer.calls = 0
        if count:
            chosen = torch.as_tensor(schedule.positions[row, step, :count])
            loss = nn.functional.cross_entropy(model(data.x[chosen]), data.y[chosen])
            for (name, p), slope in zip(
                named.items(), torch.autograd.grad(loss, list(named.values())), strict=True
            ):
                shift = 0.0 if correction.shift is None else correction.shift[name][row]
                p.grad = slope + correction.pull * p.detach() + shift
            optimizer.step()
    return {name: model.state_dict()[name] - value for name, value in before.items()}


@cache
def expected(name: str, rule: str, kind: str) -> list[Params]:
    engine = engine_of(reference, name, rule)
    schedule, correction = schedule_of(engine, np.arange(5), 2), correction_of(engine, kind)
    return [by_hand(engine, rule, schedule, row, correction) for row in range(5)]


BUILDS = dict[str, Callable[..., Engine]](
    BACKENDS, reference=reference, chunked=partial(batched, chunk_size=2)
)
TASKS = [
    *(
        (name, rule, "pull and shifts")
        for name in ("dropout", "conv", "batch norm and dropout")
        for rule in RULES
    ),
    *(("dropout", rule, kind) for rule in ("sgd", "adam") for kind in ("pull", "one shift")),
]
REFUSED = [("native", "halved"), ("graph", "halved")]
CASES = [
    (b, *task)
    for b in BUILDS
    for task in TASKS
    if fits(b, *task[:2]) and (b, task[1]) not in REFUSED
]


@pytest.mark.parametrize(("backend", "name", "rule", "kind"), CASES, ids=str)
def test_a_corrected_gradient_is_what_the_optimiser_sees(
    backend: str, name: str, rule: str, kind: str
) -> None:
    engine = engine_of(BUILDS[backend], name, rule)
    params, correction = initial(engine.workload.model), correction_of(engine, kind)
    before = copy.deepcopy(correction.shift or {})
    found = engine.train(
        params, np.arange(5), 2, engine.workload.optimizer.lr, correction=correction
    )
    assert len(set(found.steps.tolist())) > 1
    for row, wanted in enumerate(expected(name, rule, kind)):
        for tensor, value in found.delta.items():
            torch.testing.assert_close(value[row], wanted[tensor], rtol=1e-10, atol=1e-10)
    assert all(
        torch.equal(value, before[tensor]) for tensor, value in (correction.shift or {}).items()
    )


@pytest.mark.parametrize("backend", BUILDS)
def test_each_round_has_its_own_correction_and_none_is_that_of_today(backend: str) -> None:
    """Whatever the rounds before left in static buffers; a correction that adds nothing is none, to
    the last bit."""
    engine = engine_of(BUILDS[backend], "dropout", "decay")
    task = initial(engine.workload.model), np.arange(5), 2, 0.1
    corrections = [correction_of(engine, kind, seed) for seed, kind in enumerate(KINDS)]
    for own in (None, *corrections, Correction(), *corrections):
        found = engine.train(*task, correction=own).delta
        wanted = (
            engine_of(BUILDS[backend], "dropout", "decay")
            .train(*task, correction=own or None)
            .delta
        )
        assert all(torch.equal(value, wanted[name]) for name, value in found.items())


@pytest.mark.parametrize(("build", "case"), [(graph, DROPOUT), (batched, DROPOUT)])
def test_on_the_card_it_is_that_of_the_cpu_to_the_last_bit(
    build: Callable[..., Engine], case: Case
) -> None:
    def trained(device: str) -> list[Params]:
        engine = case.engine(device, build)
        params, ids = initial(engine.workload.model), np.arange(len(engine.data.train))
        corrections = [correction_of(engine, "pull and shifts", seed) for seed in (1, 2)]
        return [engine.train(params, ids, 1, 0.1, correction=own).delta for own in corrections]

    wanted = trained("cpu")
    with PretendedCard():
        for found, right in zip(trained("cuda"), wanted, strict=True):
            assert all(torch.equal(held(value), right[name]) for name, value in found.items())


def test_a_shift_that_does_not_fit_the_model_is_refused() -> None:
    engine = engine_of(reference, "batch norm and dropout", "sgd")
    params, shift = initial(engine.workload.model), correction_of(engine, "pull and shifts").shift
    assert shift is not None
    wrong = {
        r"6.bias is \[3\] torch.float64 cpu; must be \[5, 3\]": {
            **shift,
            "6.bias": shift["6.bias"][0],
        },
        "6.bias is .*float32": {**shift, "6.bias": shift["6.bias"].float()},
        "6.bias is missing": {name: value for name, value in shift.items() if name != "6.bias"},
        "1.running_mean is ": {**shift, "1.running_mean": torch.zeros(5, 4).double()},
    }
    for text, one in wrong.items():
        with pytest.raises(FedsimError, match=f"the shift of a correction: {text}"):
            engine.train(params, np.arange(5), 1, 0.1, correction=Correction(0.0, one))
