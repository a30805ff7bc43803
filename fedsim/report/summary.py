"""A report in a few numbers: small enough to be kept with the code, so that anybody can compare theirs with it."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedsim.report import measures
from fedsim.report.groups import Group, show_labels
from fedsim.report.tables.table import Table

KEPT = {
    "final_accuracy": measures.final_accuracy(),
    "accuracy_after_15_percent": measures.accuracy_after(0.15),
    "accuracy_after_50_percent": measures.accuracy_after(0.5),
    "accuracy_after_last_round": measures.accuracy_after(1.0),
    "rounds_to_cover": measures.rounds_to_cover(),
    "selection_gini": measures.selection_gini,
    "most_selections": measures.most_selections,
    "participation": measures.mean_participation,
}


def summary_of(groups: Sequence[Group], verdicts: Mapping[str, str]) -> dict[str, Any]:
    """Per group and seed what `KEPT` measures, and all verdicts by the claims' ids."""
    return {
        "groups": [
            {
                "labels": dict(group.labels),
                "diverged": group.num_diverged,
                "seeds": {str(run.seed): {n: _rounded(m(run)) for n, m in KEPT.items()} for run in group.complete},
            }
            for group in groups
        ],
        "verdicts": dict(verdicts),
    }


def compare(now: Mapping[str, Any], shipped: Mapping[str, Any]) -> Table:
    """Two summaries: final accuracies at the seeds that both have, and verdicts that differ."""
    others = {_key(group): group["seeds"] for group in shipped["groups"]}
    rows = []
    for group in now["groups"]:
        theirs = others.get(_key(group), {})
        common = [s for s in group["seeds"] if s in theirs and _final(group["seeds"][s]) and _final(theirs[s])]
        apart = [_final(group["seeds"][s]) - _final(theirs[s]) for s in common]
        name = show_labels(group["labels"]) or "run"
        largest = f"{max(map(abs, apart)):.4f}" if apart else "-"
        mean = f"{sum(apart) / len(apart):+.4f}" if apart else "-"
        rows.append([name, str(len(common)), mean, largest])
    changed = [k for k, v in now["verdicts"].items() if shipped["verdicts"].get(k, v) != v]
    note = f"Verdicts that differ: {', '.join(changed) or 'none'}."
    head = ["run", "common seeds", "mean difference of final accuracy", "largest"]
    return Table("against", "Against an earlier summary", head, rows, note)


def _key(group: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(group["labels"].items()))


def _final(measured: Mapping[str, Any]) -> float:
    return measured["final_accuracy"] or 0.0


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
