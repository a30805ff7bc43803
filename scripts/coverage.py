"""How finished runs spread their selections, how accurate they became, and what they sent.

    uv run python scripts/coverage.py outputs/<name> [outputs/<other name> ...]

One line a run, with the values in which the runs' selectors differ from each other. "min" to "Gini" are over clients'
numbers of selections; accuracies are means of the first five and last ten evaluations; MB are sent in all, both ways.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from fedsim.report.measures import gini


def counts_of(records: list[dict[str, Any]], num_clients: int) -> NDArray[np.int64]:
    """How often each client was selected [N]."""
    times = Counter(i for r in records for i in r["selected"])
    return np.array([times[i] for i in range(num_clients)])


def covered_in(records: list[dict[str, Any]]) -> str:
    """The first round after which every client has been selected, or the share that was."""
    full = next((r["round"] for r in records if r["coverage"] == 1), None)
    return str(full) if full else f"never ({records[-1]['coverage']:.0%})"


def flat(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted key."""
    values: dict[str, Any] = {}
    for key, value in node.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values


def table_of(folders: list[Path]) -> Table:
    runs = [(f, yaml.safe_load((f / "config.yaml").read_text()), _records(f)) for f in folders]
    nodes = [flat(config["selector"]) for _, config, _ in runs]
    kinds = [json.loads((f / "summary.json").read_text())["choices"]["selector"] for f in folders]
    table = Table(title="Selections")
    for column in ("selector", "seed", "all covered in", "min", "median", "max", "Gini", "first", "last", "MB"):
        table.add_column(column, justify="left" if column == "selector" else "right")
    for (_, config, records), node, kind in zip(runs, nodes, kinds, strict=True):
        common = [n for n, k in zip(nodes, kinds, strict=True) if k == kind]
        own = [f"{k}={v}" for k, v in node.items() if sum(n.get(k) == v for n in common) * 2 < len(common)]
        counts = counts_of(records, config["num_clients"])
        accuracies = [r["test_accuracy"] for r in records if r["test_accuracy"] is not None]
        megabytes = sum(r["bytes_down"] + r["bytes_up"] for r in records) / 1e6
        spread = (
            f"{counts.min()}",
            f"{np.median(counts):g}",
            f"{counts.max()}",
            f"{gini(counts.astype(np.float64)):.3f}",
        )
        results = (f"{np.mean(accuracies[:5]):.3f}", f"{np.mean(accuracies[-10:]):.3f}", f"{megabytes:.0f}")
        table.add_row(" ".join([kind, *own]), str(config["seed"]), covered_in(records), *spread, *results)
    return table


def _records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


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
