"""Seconds a round by phase of finished runs, and what selection costs beside the training it steers.

    uv run python scripts/phases.py outputs/<name> [--markdown]

Means over all rounds but the first. "select" is what the server computes, "ask" what clients compute to answer its
questions, "train" local training, whoever asked for it. "worst" is the longest selection of a round,
the first included.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

PHASES = ("select", "ask", "train", "aggregate", "evaluate")


def row_of(choice: str, records: list[dict[str, Any]]) -> list[str]:
    """Milliseconds of each phase and of all, the share of selection in training, the worst selection."""
    later = records[1:] or records
    means = {p: 1e3 * float(np.mean([r[f"seconds_{p}"] for r in later])) for p in PHASES}
    share = means["select"] / means["train"] if means["train"] else float("nan")
    worst = 1e3 * max(r["seconds_select"] for r in records)
    return [choice, *(f"{means[p]:.1f}" for p in PHASES), f"{sum(means.values()):.1f}", f"{share:.0%}", f"{worst:.0f}"]


def table_of(folders: list[Path]) -> Table:
    table = Table(title="Milliseconds a round")
    for column in ("selector", *PHASES, "all", "select / train", "worst select"):
        table.add_column(column, justify="left" if column == "selector" else "right")
    for folder in folders:
        choice = json.loads((folder / "summary.json").read_text())["choices"]["selector"]
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        table.add_row(*row_of(choice, records))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    table = table_of([p.parent for root in options.folders for p in sorted(root.rglob("summary.json"))])
    if options.markdown:
        table.box, table.title = box.MARKDOWN, None
    Console(width=200 if options.markdown else None).print(table)


if __name__ == "__main__":
    main()
