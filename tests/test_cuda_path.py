"""Whole experiments with device=cuda equal those with device=cpu.

The GPU is a pretended one (tests/pretended_cuda.py), and results are equal to the last bit. On a
real GPU they are equal up to rounding:

    TEST_ON_GPU=1 uv run pytest -m 'slow or not slow' tests/test_cuda_path.py
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsim.engine.graph.backend import GraphBackend
from fedsim.running import assembly
from tests.card_runs import BATCHED, SMALL, Run, run, run_on_card
from tests.clocks import NEED_A_CLOCK
from tests.environment import ON_GPU
from tests.pretended_cuda import PretendedCard

CONF = Path(__file__).parents[1] / "conf" / "selector"
SELECTORS = sorted(path.stem for path in CONF.glob("*.yaml"))
FAST_SELECTORS = {
    "clustered2", "delta", "divfl", "fedabc", "fedcbs", "fedcor", "gpfl", "grad_norm", "hics", "lefl", "ocs", "oort",
    "pair_study", "pncs", "power_of_choice", "ucb_shapley",
}  # fmt: skip
"""One selector of each kind of question and arithmetic. The others are slow tests."""
SKETCHES = sorted(path.stem for path in (CONF / "sketch").glob("*.yaml"))
FAST_SKETCHES = {"coord", "countsketch", "gauss", "int8", "topk"}
SEQUENTIAL = ("engine=sequential", "engine.workers=1")
RAGGED = ("partition=dirichlet_class", "partition.alpha=0.3", "local.epochs=2")
MOMENTUM = "optimizer.momentum=0.9"
DROPOUT = "model.dropout=0.3"
IMAGES = (
    "num_rounds=1", "num_clients=3", "cohort_size=2", "local.epochs=null", "local.steps=2", "local.batch_size=8",
)  # fmt: skip
GRAPH = "engine=graph"
CASES: dict[str, Sequence[str]] = {
    "linear chain": (*SMALL, *BATCHED),
    "ragged, dropout, momentum": (*SMALL, *BATCHED, *RAGGED, DROPOUT, MOMENTUM),
    "ragged, one by one": (*SMALL, *SEQUENTIAL, *RAGGED, DROPOUT, MOMENTUM),
    "nesterov": (*SMALL, *BATCHED, MOMENTUM, "optimizer.nesterov=true"),
    "adam": (*SMALL, *BATCHED, "optimizer=adam"),
    "adam, one by one": (*SMALL, *SEQUENTIAL, "optimizer=adam"),
    "femnist_cnn": ("model=femnist_cnn", *BATCHED, *IMAGES),
    "femnist_cnn, one by one": ("model=femnist_cnn", *SEQUENTIAL, *IMAGES),
    "resnet20": ("model=resnet20", *BATCHED, *IMAGES),
    "norms of our own": ("model=logistic", "model._target_=tests.goldens.Norms", *BATCHED),
    "linear chain, recorded": (*SMALL, GRAPH, *RAGGED, DROPOUT),
    "femnist_cnn, recorded": ("model=femnist_cnn", GRAPH, *IMAGES),
    "fedavgm": (*SMALL, *BATCHED, "aggregator=fedavgm"),
    "fedadam": (*SMALL, *BATCHED, "aggregator=fedadam"),
    "holdout": (
        *SMALL, *BATCHED, "local.holdout_fraction=0.2", "local.evaluate_on=holdout", "selector=top_loss",
    ),
}  # fmt: skip
SLOW_CASES: dict[str, Sequence[str]] = {
    "in chunks": (*SMALL, *BATCHED, *RAGGED, "engine.chunk_size=2"),
    "resnet20, one by one": ("model=resnet20", *SEQUENTIAL, *IMAGES),
    "resnet20, group norm": (
        "model=resnet20", "model.norm=group", "model.shortcut=conv", *BATCHED, *IMAGES,
    ),
    "resnet20, recorded": ("model=resnet20", GRAPH, *IMAGES),
    "a model for each client": (*SMALL, *BATCHED, "init_seed=per_client"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _forget_samples() -> None:
    assembly._latest.clear()  # Samples of one device are of no use on the other.


def slow_except(names: Iterable[str], fast: Collection[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in names]


def without_seconds(run: Run) -> list[dict[str, Any]]:
    """Return the records of a run without times; None for nan, so that they can be compared."""
    records = []
    for record in run.records:
        values = {name: value for name, value in asdict(record).items() if "seconds" not in name}
        for name, value in values.items():
            if isinstance(value, float) and math.isnan(value):
                values[name] = None
        records.append(values)
    return records


def assert_equal(card: Run, cpu: Run) -> None:
    """Check that two runs are equal, on a real GPU up to rounding."""
    assert set(card.params) == set(cpu.params)
    if not ON_GPU:
        assert without_seconds(card) == without_seconds(cpu)
        assert all(torch.equal(card.params[name], value) for name, value in cpu.params.items())
        return
    one_test_sample = 1 / 300
    for actual, expected in zip(without_seconds(card), without_seconds(cpu), strict=True):
        for name, value in expected.items():
            if isinstance(value, float):
                value = pytest.approx(value, rel=1e-3, abs=one_test_sample)
            assert actual[name] == value, name
    flat_card = torch.cat([card.params[name].flatten() for name in cpu.params])
    flat_cpu = torch.cat([value.flatten() for value in cpu.params.values()])
    assert (flat_card - flat_cpu).norm() <= 1e-3 * flat_cpu.norm()


@pytest.mark.parametrize("case", slow_except({**CASES, **SLOW_CASES}, CASES))
def test_training_on_a_gpu_equals_the_cpu(case: str) -> None:
    words = (CASES | SLOW_CASES)[case]
    assert_equal(run_on_card(words), run(words, "cpu"))


@pytest.mark.parametrize("selector", slow_except(SELECTORS, FAST_SELECTORS))
def test_selectors_on_a_gpu_equal_the_cpu(selector: str) -> None:
    clock = "tiers" if selector in NEED_A_CLOCK else "none"
    words = (*SMALL, *BATCHED, f"selector={selector}", f"system={clock}", MOMENTUM, "num_rounds=2")
    card = PretendedCard()
    assert_equal(run_on_card(words, card), run(words, "cpu"))
    assert "index from the host" not in card.counts.copied


@pytest.mark.parametrize("sketch", slow_except(SKETCHES, FAST_SKETCHES))
def test_sketches_on_a_gpu_equal_the_cpu(sketch: str) -> None:
    words = (*SMALL, *BATCHED, "selector=pncs", f"selector/sketch={sketch}", "num_rounds=2")
    assert_equal(run_on_card(words), run(words, "cpu"))


def test_auto_uses_recorded_steps_on_a_gpu() -> None:
    card = run_on_card((*SMALL, "engine=auto"))
    assert card.simulation.components.engine.description.endswith("(auto: a GPU)")
    assert_equal(card, run((*SMALL, GRAPH), "cpu"))


DIFFERS = "whose first steps on this machine differ from those of the other engines"
FAILS = "which fails on this machine: no kernel image is available"


@pytest.mark.parametrize("message", [DIFFERS, FAILS])
@pytest.mark.parametrize("extra", [(), (DROPOUT, "optimizer=adam")])
def test_auto_trains_without_recorded_steps_that_are_wrong(
    message: str,
    extra: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    train = GraphBackend.train

    def damaged_train(*args: Any) -> Any:
        if message == FAILS:
            raise RuntimeError("no kernel image is available\nand more")
        result = train(*args)
        return replace(result, delta={name: 0.9 * value for name, value in result.delta.items()})

    monkeypatch.setattr(GraphBackend, "train", damaged_train)
    card = run_on_card((*SMALL, *extra, "engine=auto", "engine.compile=false"))
    assert card.simulation.components.engine.description == "batched (auto: no convolutions)"
    assert capfd.readouterr().err.count(f"engine=auto: not engine=graph, {message}\n") == 1
    assert_equal(card, run((*SMALL, *extra, *BATCHED), "cpu"))
