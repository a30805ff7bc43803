"""Whole experiments with device=cuda, on a pretended device (tests/pretended_cuda.py), against
device=cpu.

TEST_ON_GPU=1 uv run pytest -m 'slow or not slow' tests/test_cuda_path.py    # on a real GPU, equal
up to rounding
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsim.engine.graph.backend import GraphBackend
from fedsim.running import assembly as prepared_data
from tests.card_runs import BATCHED, Run, run, run_on_card
from tests.clocks import NEED_A_CLOCK
from tests.environment import ON_GPU
from tests.pretended_cuda import PretendedCard

CONF = Path(__file__).parents[1] / "conf"
SELECTORS = sorted(path.stem for path in (CONF / "selector").glob("*.yaml"))
IN_SHORT = {
    "clustered2", "delta", "divfl", "fedabc", "fedcbs", "fedcor", "gpfl", "grad_norm", "hics", "lefl", "ocs", "oort",
    "pair_study", "pncs", "power_of_choice", "ucb_shapley",
}  # fmt: skip
"""One selector of each kind of question and arithmetic; the others only with `-m slow`."""
SKETCHES = sorted(path.stem for path in (CONF / "selector" / "sketch").glob("*.yaml"))
SMALL = ("model.hidden=[16,8]",)
SEQUENTIAL = ("engine=sequential", "engine.workers=1")
RAGGED = ("partition=dirichlet_class", "partition.alpha=0.3", "local.epochs=2")
IMAGES = (
    "num_rounds=1",
    "num_clients=3",
    "cohort_size=2",
    "local.epochs=null",
    "local.steps=2",
    "local.batch_size=8",
)
LONG = (
    "resnet20, recorded",
    "resnet20, one by one",
    "resnet20, group norm",
    "a model for each client",
    "in chunks",
)
GRAPH = ("engine=graph",)
ONE_SAMPLE = 1 / 300  # of the test set, by which accuracies may differ on a real GPU
CASES: dict[str, Sequence[str]] = {
    "linear chain": (*SMALL, *BATCHED),
    "ragged, dropout, momentum": (
        *SMALL,
        *BATCHED,
        *RAGGED,
        "model.dropout=0.3",
        "optimizer.momentum=0.9",
    ),
    "ragged, one by one": (
        *SMALL,
        *SEQUENTIAL,
        *RAGGED,
        "model.dropout=0.3",
        "optimizer.momentum=0.9",
    ),
    "in chunks": (*SMALL, *BATCHED, *RAGGED, "engine.chunk_size=2"),
    "nesterov": (*SMALL, *BATCHED, "optimizer.momentum=0.9", "optimizer.nesterov=true"),
    "adam": (*SMALL, *BATCHED, "optimizer=adam"),
    "adam, one by one": (*SMALL, *SEQUENTIAL, "optimizer=adam"),
    "femnist_cnn": ("model=femnist_cnn", *BATCHED, *IMAGES),
    "femnist_cnn, one by one": ("model=femnist_cnn", *SEQUENTIAL, *IMAGES),
    "resnet20": ("model=resnet20", *BATCHED, *IMAGES),
    "resnet20, one by one": ("model=resnet20", *SEQUENTIAL, *IMAGES),
    "resnet20, group norm": (
        "model=resnet20",
        "model.norm=group",
        "model.shortcut=conv",
        *BATCHED,
        *IMAGES,
    ),
    "norms of our own": ("model=logistic", "model._target_=tests.goldens.Norms", *BATCHED),
    "step by step on static buffers": (*SMALL, *GRAPH, *RAGGED, "model.dropout=0.3"),
    "femnist_cnn, recorded": ("model=femnist_cnn", *GRAPH, *IMAGES),
    "resnet20, recorded": ("model=resnet20", *GRAPH, *IMAGES),
    "fedavgm": (*SMALL, *BATCHED, "aggregator=fedavgm"),
    "fedadam": (*SMALL, *BATCHED, "aggregator=fedadam"),
    "a model for each client": (*SMALL, *BATCHED, "init_seed=per_client"),
    "holdout": (
        *SMALL,
        *BATCHED,
        "local.holdout_fraction=0.2",
        "local.evaluate_on=holdout",
        "selector=top_loss",
    ),
}


@pytest.fixture(autouse=True)
def _fresh_samples() -> None:
    prepared_data._latest.clear()  # those of one device are of no use to the other


def in_short(names: Iterable[str], short: Collection[str]) -> list[Any]:
    """All `names`, those that are not in `short` only with `-m slow`."""
    return [pytest.param(name, marks=() if name in short else pytest.mark.slow) for name in names]


def assert_equal(card: Run, cpu: Run) -> None:
    """To the last bit, but for seconds; on a real GPU floating-point numbers up to rounding."""
    found, wanted = ([timeless(record) for record in run.records] for run in (card, cpu))
    assert set(card.params) == set(cpu.params)
    if ON_GPU:
        for own, right in zip(found, wanted, strict=True):
            for name, value in right.items():
                rounded = (
                    pytest.approx(value, rel=1e-3, abs=ONE_SAMPLE)
                    if isinstance(value, float)
                    else value
                )
                assert own[name] == rounded, name
        own, right = (
            torch.cat([run.params[name].flatten() for name in cpu.params]) for run in (card, cpu)
        )
        assert (own - right).norm() <= 1e-3 * right.norm()
        return
    assert found == wanted
    assert [
        name for name in cpu.params if not torch.equal(card.params[name], cpu.params[name])
    ] == []


def timeless(record: Any) -> dict[str, Any]:
    values = {name: value for name, value in asdict(record).items() if "seconds" not in name}
    return {n: None if isinstance(v, float) and math.isnan(v) else v for n, v in values.items()}


@pytest.mark.parametrize("case", in_short(CASES, CASES.keys() - set(LONG)))
def test_equals_the_cpu(case: str) -> None:
    assert_equal(run_on_card(CASES[case]), run(CASES[case], "cpu"))


def test_auto_takes_recorded_steps_on_a_gpu() -> None:
    card = run_on_card((*SMALL, "engine=auto"))
    assert card.simulation.components.engine.description.endswith("(auto: a GPU)")
    assert_equal(card, run((*SMALL, *GRAPH), "cpu"))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (
            "a tenth is forgotten",
            "whose first steps on this machine differ from those of the other engines",
        ),
        (
            "no kernel image is available\nmore",
            "which fails on this machine: no kernel image is available",
        ),
    ],
)
@pytest.mark.parametrize("more", [(), ("model.dropout=0.3", "optimizer=adam")])
def test_auto_goes_on_without_recorded_steps_that_prove_wrong(
    damage: str,
    told: str,
    more: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    train = GraphBackend.train

    def damaged(*args: Any) -> Any:
        if "\n" in damage:
            raise RuntimeError(damage)
        result = train(*args)
        return replace(result, delta={name: 0.9 * value for name, value in result.delta.items()})

    monkeypatch.setattr(GraphBackend, "train", damaged)
    card = run_on_card((*SMALL, *more, "engine=auto", "engine.compile=false"))
    assert card.simulation.components.engine.description == "batched (auto: no convolutions)"
    assert capfd.readouterr().err.count(f"engine=auto: not engine=graph, {told}\n") == 1
    assert_equal(card, run((*SMALL, *more, *BATCHED), "cpu"))


@pytest.mark.parametrize("selector", in_short(SELECTORS, IN_SHORT))
def test_selectors_equal_the_cpu(selector: str) -> None:
    clock = ("system=tiers",) if selector in NEED_A_CLOCK else ()
    words = (
        f"selector={selector}",
        *clock,
        *SMALL,
        *BATCHED,
        "optimizer.momentum=0.9",
        "num_rounds=2",
    )
    card = PretendedCard()
    assert_equal(run_on_card(words, card), run(words, "cpu"))
    assert not [what for _, what in card.counts.copied if what == "index from the host"]


@pytest.mark.parametrize(
    "sketch", in_short(SKETCHES, {"coord", "countsketch", "gauss", "int8", "topk"})
)
def test_sketches_equal_the_cpu(sketch: str) -> None:
    words = ("selector=pncs", f"selector/sketch={sketch}", *SMALL, *BATCHED, "num_rounds=2")
    assert_equal(run_on_card(words), run(words, "cpu"))
