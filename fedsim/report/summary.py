"""The summary of a report: a JSON file small enough to be kept with the code, for comparison with later results."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedsim.report import measures
from fedsim.report.groups import Group, show_labels
from fedsim.report.tables.table import Table

SUMMARY_MEASURES = {
    "final_accuracy": measures.final_accuracy(),
    "accuracy_after_15_percent": measures.accuracy_after(0.15),
    "accuracy_after_50_percent": measures.accuracy_after(0.5),
    "accuracy_after_last_round": measures.accuracy_after(1.0),
    "rounds_to_cover": measures.rounds_to_cover(),
    "selection_gini": measures.selection_gini,
    "most_selections": measures.most_selections,
    "participation": measures.mean_participation,
}


def make_summary(groups: Sequence[Group], verdicts: Mapping[str, str]) -> dict[str, Any]:
    """The `SUMMARY_MEASURES` of each group and seed, and all verdicts by the ids of numbers and claims."""
    return {
        "groups": [
            {
                "labels": dict(group.labels),
                "diverged": group.num_diverged,
                "seeds": {
                    str(run.seed): {n: _rounded(m(run)) for n, m in SUMMARY_MEASURES.items()} for run in group.complete
                },
            }
            for group in groups
        ],
        "verdicts": dict(verdicts),
    }


def compare_summaries(current: Mapping[str, Any], earlier: Mapping[str, Any]) -> Table:
    """A table comparing two summaries: final accuracies at the seeds that both have, and verdicts that differ."""
    earlier_seeds = {_key(group): group["seeds"] for group in earlier["groups"]}
    rows = []
    for group in current["groups"]:
        before = earlier_seeds.get(_key(group), {})
        common = [s for s in group["seeds"] if s in before and _final(group["seeds"][s]) and _final(before[s])]
        differences = [_final(group["seeds"][s]) - _final(before[s]) for s in common]
        name = show_labels(group["labels"]) or "run"
        largest = f"{max(map(abs, differences)):.4f}" if differences else "-"
        mean = f"{sum(differences) / len(differences):+.4f}" if differences else "-"
        rows.append([name, str(len(common)), mean, largest])
    changed = [k for k, v in current["verdicts"].items() if earlier["verdicts"].get(k, v) != v]
    note = f"Verdicts that differ: {', '.join(changed) or 'none'}."
    head = ["run", "common seeds", "mean difference of final accuracy", "largest"]
    return Table("against", "Against an earlier summary", head, rows, note)


def _key(group: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(group["labels"].items()))


def _final(measured: Mapping[str, Any]) -> float:
    return measured["final_accuracy"] or 0.0


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
