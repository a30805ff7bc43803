"""torch.compile: chosen by a fixed rule, equal up to rounding, and never in the way."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.core.rng import Streams
from fedsim.engine import device as compiled
from fedsim.engine.device import WORTH_STEPS
from fedsim.engine.engine import Engine
from fedsim.engine.schedule import LocalWork
from tests.engines import batched, reference
from tests.test_engine import OPTIMIZERS, SIZES, assert_engines_equal, model_of, problem


def tanh() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def engine(model: nn.Module, num_rounds: int, compile: Any) -> Engine:
    task = (model, problem(SIZES["ragged"]), LocalWork(2, None, 4), OPTIMIZERS["sgd"], Streams(3))
    return batched(*task, rounds=num_rounds, compile=compile)


def test_compiling_is_chosen_by_the_steps_of_the_run() -> None:
    # 7, 1, 13, 4, 2 samples in batches of 4: the middling client makes 1 step an epoch, two epochs
    # a round
    assert engine(tanh(), 7, "auto").workload.total_steps == 14
    assert engine(tanh(), WORTH_STEPS // 2 - 1, "auto").description == "batched"
    assert engine(tanh(), WORTH_STEPS // 2, "auto").description == "batched, compiled"
    assert (
        engine(model_of("mlp"), WORTH_STEPS, "auto").description == "batched"
    )  # a chain, which is written out
    assert engine(tanh(), WORTH_STEPS, False).description == "batched"
    assert (
        engine(tanh(), 1, True).backend.max_joint_clients == 1
    )  # several runs are not trained jointly
    assert engine(tanh(), 1, False).backend.max_joint_clients > 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equals_sequential(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch traces it; with code generated from the trace, which takes ten times as long, in the
    long form."""
    monkeypatch.setattr(compiled.torch, "compile", partial(torch.compile, backend=backend))
    fast = engine(tanh(), 1, True)
    plain = reference(tanh(), fast.data, fast.work, OPTIMIZERS["sgd"], Streams(3))
    assert_engines_equal(fast, plain, np.arange(5))
    if backend == "inductor" and fast.description != "batched, compiled":
        pytest.skip(fast.description)
    assert fast.description == "batched, compiled"


def test_what_cannot_be_compiled_runs_all_the_same_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: Any) -> Any:
        def call(*_: Any) -> Any:
            raise RuntimeError("no compiler\nand much more")

        return call

    monkeypatch.setattr(compiled.torch, "compile", broken)
    compiled.warn_not_compiled.cache_clear()
    fast = engine(tanh(), 1, True)
    plain = reference(tanh(), fast.data, fast.work, OPTIMIZERS["sgd"], Streams(3))
    assert_engines_equal(fast, plain, np.arange(5))
    assert_engines_equal(fast, plain, np.arange(3))
    assert fast.description == "batched, not compiled: no compiler"
    told = capsys.readouterr().err
    assert told.count("no compiler") == 1  # though full batches and padded ones are compiled apart
    assert "much more" not in told
