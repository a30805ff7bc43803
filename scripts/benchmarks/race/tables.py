"""What the speed race found, as tables and as records of its JSON file."""

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from scripts.benchmarks.peers.workloads import Workload
from scripts.benchmarks.race.entries import PEERS, Entry
from scripts.benchmarks.race.measuring import Result


@dataclass(frozen=True)
class Summary:
    """The repeats of one entry. `error` is that of any repeat; `rates` are rounds a second."""

    entry: Entry
    rates: tuple[float, ...]
    startup: float | None
    accuracy: tuple[int, float] | None
    version: str
    error: str | None

    @property
    def rate(self) -> float | None:
        return statistics.median(self.rates) if self.rates else None


def summarise(entry: Entry, results: Sequence[Result]) -> Summary:
    good = [r for r in results if "error" not in r]
    errors = [r["error"] for r in results if "error" in r]
    return Summary(
        entry,
        rates=tuple(r["rounds_per_second"] for r in good),
        startup=statistics.median(r["startup_seconds"] for r in good) if good else None,
        accuracy=tuple(good[0]["accuracies"][-1]) if good and good[0]["accuracies"] else None,
        version=good[0]["versions"].get(PEERS[entry.peer].package, "") if good else "",
        error=errors[0] if errors else None,
    )


def ceiling_of(results: Sequence[Result]) -> dict[str, float]:
    """The best rate seen, by precision; empty where none was measured."""
    rates = [r["flops"] for r in results if "flops" in r]
    return {name: max(rate[name] for rate in rates) for name in rates[0]} if rates else {}


COLUMNS = (
    "peer",
    "version",
    "rounds/s",
    "range",
    "/ framework",
    "/ JAX",
    "of ceiling",
    "start-up s",
    "accuracy @ round",
)
"""`/ framework`: times the fastest framework's rate."""


def table_of(
    summaries: Sequence[Summary], workload: Workload, ceiling: Mapping[str, float]
) -> Table:
    rates = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in ceiling.items())
    table = Table(
        title=f"{workload.name}: {workload.title}",
        caption=f"{workload.round_flops / 1e9:.3g} GFLOP a round; matrix products: {rates or 'not measured'}",
    )
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "peer" else "right")
    framework = max(
        (s.rate for s in summaries if PEERS[s.entry.peer].framework and s.rate), default=None
    )
    by_hand = next((s.rate for s in summaries if s.entry.peer == "jax"), None)
    for summary in summaries:
        table.add_row(*cells_of(summary, workload, framework, by_hand, ceiling))
    return table


def cells_of(
    summary: Summary,
    workload: Workload,
    framework: float | None,
    by_hand: float | None,
    ceiling: Mapping[str, float],
) -> list[str]:
    rate = summary.rate
    if rate is None:
        return [f"{summary.entry.label}: {summary.error or 'not run'}"]
    label = f"{summary.entry.label} ({summary.error})" if summary.error else summary.entry.label
    peak = ceiling.get(summary.entry.precision)
    return [
        label,
        summary.version,
        f"{rate:.4g}",
        f"{min(summary.rates):.4g} - {max(summary.rates):.4g}",
        _ratio(rate, framework),
        _ratio(rate, by_hand),
        f"{rate * workload.round_flops / peak:.0%}" if peak else "-",
        f"{summary.startup:.1f}",
        f"{summary.accuracy[1]:.3f} @ {summary.accuracy[0]}" if summary.accuracy else "-",
    ]


def _ratio(rate: float, other: float | None) -> str:
    return f"{rate / other:.2f}" if other else "-"


def as_record(entry: Entry, workload: Workload, results: Sequence[Result]) -> dict[str, Any]:
    """An entry's part of the JSON: its summary, and every repeat as it was reported."""
    summary = summarise(entry, results)
    return {
        "workload": workload.name,
        "peer": entry.peer,
        "options": list(entry.words),
        "label": entry.label,
        "rounds_per_second": summary.rate,
        "slowest": min(summary.rates, default=None),
        "fastest": max(summary.rates, default=None),
        "startup_seconds": summary.startup,
        "error": summary.error,
        "repeats": list(results),
    }


def machine() -> dict[str, Any]:
    """What a rate depends on, and nothing that tells whose machine it is."""
    return {
        "cpu": cpu_model(Path("/proc/cpuinfo")),
        "cores": os.cpu_count(),
        "system": f"{platform.system()}-{platform.machine()}",
        "python": platform.python_version(),
    }


def cpu_model(info: Path) -> str:
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
