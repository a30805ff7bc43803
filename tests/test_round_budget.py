"""What the host does in a round on a GPU, counted on a pretended one: launches of kernels and graphs, and waits."""

from collections.abc import Sequence

import pytest
from torch import Tensor

from fedsim.core.types import Cohort, Params
from fedsim.rounds.aggregators import FedAvg
from tests.card_workloads import RESNET20, W1, W2, counts_of_a_round
from tests.pretended_counts import Counts

RAGGED = ("partition.min_size=1", "local.batch_size=8")
BUDGETS = {
    "W1": ((*W1, "engine=graph"), 80),
    "W2, eight steps": ((*W2, "engine=graph", "local.steps=8", "eval_every=2"), 60),
    "W2": ((*W2, "engine=graph", "eval_every=2"), 120),
    "ResNet-20, ragged": ((*RESNET20, "engine=graph", *RAGGED), 200),
}
"""The workload, and the most launches of a round. Of waits, it is three."""
WAITS = 3


def over_budget(counts: Counts, launches: int, waits: int) -> list[str]:
    found = counts.totals()
    lines = [f"{found['launches']} launches:\n{counts.table('launches')}"] if found["launches"] > launches else []
    return lines + ([f"{found['waits']} waits:\n{counts.table('waits')}"] if found["waits"] > waits else [])


LONG = ("W2", "ResNet-20, ragged")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in LONG else ()) for n in BUDGETS])
def test_a_round_with_an_evaluation_keeps_its_budget(name: str) -> None:
    words, launches = BUDGETS[name]
    counts = counts_of_a_round(words, 2, 200)
    assert counts.replayed.total() > 500
    assert any("engine/engine.py" in where for where, _ in counts.launches)
    assert over_budget(counts, launches, WAITS) == []


@pytest.mark.parametrize("selector", ["md", "round_robin"])
def test_what_is_outside_of_the_steps_keeps_its_budget(selector: str) -> None:
    words = [word for word in W1 if not word.startswith(("selector=", "local.steps"))]
    counts = counts_of_a_round((*words, f"selector={selector}", "local.steps=1", "engine=batched"), 2, 300)
    steps = ("engine/batched.py:", "engine/stacked.py:")
    outside = {line: n for line, n in counts.launches.items() if not line[0].startswith(steps)}
    assert sum(outside.values()) <= 40, counts.table("launches")
    assert counts.waits.total() <= WAITS, counts.table("waits")


def test_one_item_breaks_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    aggregate = FedAvg.aggregate

    def waiting(self: FedAvg, params: Params, cohort: Cohort, weights: Sequence[float] | None) -> Params:
        new = aggregate(self, params, cohort, weights)  # type: ignore[arg-type]
        first: Tensor = next(iter(new.values()))
        first.abs().max().item()
        return new

    words = (*W1, "engine=graph", "local.steps=2")
    assert over_budget(counts_of_a_round(words, 2, 300), 80, WAITS) == []
    monkeypatch.setattr(FedAvg, "aggregate", waiting)
    (told,) = over_budget(counts_of_a_round(words, 2, 300), 80, WAITS)
    assert told.startswith("4 waits")
