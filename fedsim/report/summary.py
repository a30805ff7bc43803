"""A report in a few numbers: small enough to be kept with the code, so that anybody can compare theirs with it."""

from collections.abc import Sequence
from typing import Any

from fedsim.report import measures
from fedsim.report.groups import Group
from fedsim.report.verdicts import Judged

KEPT = {
    "final_accuracy": measures.final_accuracy(),
    "accuracy_after_15_percent": measures.accuracy_after(0.15),
    "accuracy_after_50_percent": measures.accuracy_after(0.5),
    "rounds_to_cover": measures.rounds_to_cover(),
    "selection_gini": measures.selection_gini,
    "most_selections": measures.most_selections,
    "participation": measures.mean_participation,
}


def summary_of(groups: Sequence[Group], judged: Sequence[Judged]) -> dict[str, Any]:
    """Per group and seed what `KEPT` measures, and all verdicts."""
    return {
        "groups": [
            {
                "labels": dict(group.labels),
                "diverged": group.num_diverged,
                "seeds": {str(run.seed): {n: _rounded(m(run)) for n, m in KEPT.items()} for run in group.complete},
            }
            for group in groups
        ],
        "verdicts": {one.printed.id: one.verdict for one in judged},
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
