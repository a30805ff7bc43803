"""Folders of runs with made-up records, for reports."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from fedsim.commands.dispatch import answer
from fedsim.core.record import LAST_FIELDS, TOTAL_FIELDS, mean_of_last
from fedsim.partitions.division import Division
from fedsim.report.contrasts import runs_to_show
from fedsim.report.looks import Look
from fedsim.report.presentation import Presentation
from fedsim.report.table import Table
from fedsim.results.frames import by, by_setting, runs_frame
from fedsim.results.reading import read_metrics
from fedsim.results.runs import Run, read_runs

PHASES = ("select", "ask", "train", "aggregate", "evaluate")


def seconds(*each: float) -> dict[str, Sequence[float]]:
    """Columns in which every phase of a round takes so many seconds."""
    return {f"seconds_{phase}": each for phase in PHASES}


def write_run(
    folder: Path,
    accuracies: Sequence[float | None],
    selected: Sequence[Sequence[int]],
    *,
    status: str = "done",
    columns: Mapping[str, Sequence[Any]] | None = None,
    summary: Mapping[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A run's folder with made-up records: every upload costs 10 bytes, every phase a second a
    round.

    `columns`: other values of the records, round by round; `summary`: other values of the summary.
    """
    own = config.pop("choices", {})
    choices = {"selector": "random", "dataset": "digits", "partition": "iid", "model": "mlp"} | own
    config = {
        "seed": 0,
        "num_clients": 4,
        "num_rounds": len(accuracies),
        "lr": 0.1,
        "name": "x",
    } | config
    num = config["num_clients"]
    path = folder / f"{'-'.join(choices.values())}-{config['seed']}-{config['lr']}"
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(
        yaml.safe_dump({"selector": {"_target_": choices["selector"]}, **config})
    )
    seen: set[int] = set()
    records = []
    for round, (accuracy, ids) in enumerate(zip(accuracies, selected, strict=True), 1):
        seen |= set(ids)
        record = {
            "round": round,
            "test_accuracy": accuracy,
            "selected": list(ids),
            "coverage": len(seen) / num,
        }
        record |= {
            "participation_ratio": len(ids) / num,
            "bytes_down": 10 * len(ids),
            "bytes_up": 10 * len(ids),
        }
        record |= {
            "train_samples": 5 * len(ids),
            "forward_samples": 0,
            **{f"seconds_{phase}": 1.0 for phase in PHASES},
        }
        records.append(
            record | {name: values[round - 1] for name, values in (columns or {}).items()}
        )
    write_records(path, records)
    window = config.get("final_window", 11)
    told = {
        "status": status,
        "choices": choices,
        "seed": config["seed"],
        "environment": {"torch": "1"},
    }
    (path / "summary.json").write_text(
        json.dumps({**told, **summary_of(records, window), **(summary or {})})
    )
    return path


def change_run(folder: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Let `change` have the records of a run; its summary agrees with them again."""
    records, summary = read_metrics(folder), json.loads((folder / "summary.json").read_text())
    change(records)
    write_records(folder, records)
    (folder / "summary.json").write_text(json.dumps(summary | summary_of(records)))


def write_records(folder: Path, records: Sequence[Mapping[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def summary_of(records: Sequence[Mapping[str, Any]], window: int = 11) -> dict[str, Any]:
    """What the summary of a run has of its records."""
    accuracies = [
        record["test_accuracy"] for record in records if record["test_accuracy"] is not None
    ]
    last = records[-1] if records else {}
    return {
        "rounds": len(records),
        "final_accuracy": mean_of_last([record["test_accuracy"] for record in records], window),
        "last_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        **{name: last[name] for name in LAST_FIELDS if name in last},
        "totals": {
            name: sum(record[name] for record in records) for name in TOTAL_FIELDS if name in last
        },
    }


def write_partition(folder: Path, histograms: Sequence[Sequence[int]]) -> None:
    """The partition of a run in which each client holds as many samples of each class."""
    counts, empty = np.array(histograms), np.empty(0, np.int64)
    ends = np.cumsum(counts.sum(1))
    parts = [np.arange(end - size, end) for end, size in zip(ends, counts.sum(1), strict=True)]
    division = Division(parts, [empty] * len(parts), empty, empty, counts)
    (folder / "partition.npz").write_bytes(division.to_bytes())


def make_report(words: Sequence[str]) -> int:
    """The exit code of `fedsim report` with these words."""
    return answer(["report", *words]) or 0


def only_run(folder: Path) -> Run:
    (run,) = read_runs(folder)
    return run


def frame_of(folder: Path) -> pd.DataFrame:
    return runs_frame(read_runs(folder))


def groups_of(folder: Path) -> dict[str, pd.DataFrame]:
    return by(frame_of(folder), "group")


def drawn_runs(folder: Path) -> pd.DataFrame:
    """Return the runs below a folder that figures show."""
    return runs_to_show(frame_of(folder))


def looks_of(runs: pd.DataFrame) -> dict[str, Look]:
    """Return the look of each method, in the order of legends."""
    return Presentation().arrange(runs)[1]


def lines_of(runs: pd.DataFrame) -> dict[str, dict[str, list[Run]]]:
    """Return the runs by setting and method, as figures take them."""
    settings = {title: by(rows, "method") for title, rows in by_setting(runs).items()}
    return {
        title: {method: list(rows["run"]) for method, rows in lines.items()}
        for title, lines in settings.items()
    }


def rows_of(table: Table) -> list[dict[str, str]]:
    """Return the rows of a table: texts by column."""
    return table.texts.to_dict("records")


def two_methods(folder: Path, seeds: int = 3) -> None:
    for seed in range(seeds):
        for selector, gain in (("random", 0.0), ("gpfl", 0.1)):
            accuracies = [0.3 + 0.01 * seed, 0.5 + 0.01 * seed + gain]
            selected = [[0, 1], [2, 3] if selector == "gpfl" else [0, 1]]
            write_run(folder, accuracies, selected, seed=seed, choices={"selector": selector})
