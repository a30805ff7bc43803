"""Means with intervals and paired differences from the summary.json files of reports, where the runs are gone.

    uv run python scripts/intervals.py docs/results/pncs_k2_small/summary.json --reference random

Prints Markdown. The same statistics as `fedsim.report`: Student's t, Holm's correction over all comparisons of a file.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedsim.report.groups import show_labels
from fedsim.report.statistics import Difference, estimate, holm, paired

Values = Mapping[int, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("summaries", nargs="+", type=Path)
    parser.add_argument("--measure", default="final_accuracy")
    parser.add_argument("--reference", default="random", help="the choice that others are compared with")
    options = parser.parse_args()
    for path in options.summaries:
        groups = json.loads(path.read_text(encoding="utf-8"))["groups"]
        print(f"\n### {path.parent.name}: {options.measure}\n")
        print_means(groups, options.measure)
        print_differences(groups, options.measure, options.reference)


def print_means(groups: list[dict[str, Any]], measure: str) -> None:
    print("| run | mean | 95 % interval | seeds |\n|---|---|---|---|")
    for group in groups:
        found = estimate(list(values_of(group, measure).values()))
        if found is not None:
            name = show_labels(group["labels"]) or "run"
            print(f"| {name} | {found.mean:.3f} | {found.low:.3f} to {found.high:.3f} | {found.num} |")


def print_differences(groups: list[dict[str, Any]], measure: str, reference: str) -> None:
    compared = [
        (show_labels(group["labels"]), found)
        for group in groups
        if (other := counterpart(group, groups, reference)) is not None
        and (found := paired(values_of(group, measure), values_of(other, measure))) is not None
    ]
    if not compared:
        return
    print(f"\n| minus {reference} | mean | 95 % interval | p | p (Holm) | pairs |\n|---|---|---|---|---|---|")
    for (name, found), after in zip(compared, holm([d.p_value for _, d in compared]), strict=True):
        print(f"| {name} | {show(found)} | {found.p_value:.4f} | {after:.4f} | {found.num} |")


def counterpart(group: dict[str, Any], groups: list[dict[str, Any]], reference: str) -> dict[str, Any] | None:
    """The group that made the reference's choice and shares all other labels; None for itself, or without one."""
    for key, choice in group["labels"].items():
        wanted = {**group["labels"], key: reference}
        if choice != reference and (found := next((g for g in groups if g["labels"] == wanted), None)) is not None:
            return found
    return None


def values_of(group: dict[str, Any], measure: str) -> Values:
    return {int(seed): kept[measure] for seed, kept in group["seeds"].items() if kept.get(measure) is not None}


def show(found: Difference) -> str:
    return f"{found.mean:+.3f} | {found.low:+.3f} to {found.high:+.3f}"


if __name__ == "__main__":
    main()
