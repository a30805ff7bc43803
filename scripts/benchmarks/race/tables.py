"""The table of the speed race."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from scripts.benchmarks.peers.workloads import Workload
from scripts.benchmarks.race.entries import Entry
from scripts.benchmarks.race.measuring import Result

COLUMNS = (
    "peer",
    "version",
    "rounds/s",
    "clients/s",
    "range",
    "/ framework",
    "/ JAX",
    "of ceiling",
    "start-up s",
    "accuracy @ round",
)
"""`/ framework` is the rate divided by that of the fastest framework."""


def ceiling_of(results: Sequence[Result]) -> dict[str, float]:
    """Return the best rate of matrix products by precision, or nothing if none was measured."""
    best: dict[str, float] = {}
    for result in results:
        for precision, rate in result.get("flops", {}).items():
            best[precision] = max(rate, best.get(precision, 0.0))
    return best


def common_round(results: Iterable[Sequence[Result]]) -> int | None:
    """Return the last round that all peers evaluated, or None if there is none."""
    rounds = [
        {number for number, _ in repeats[0]["accuracies"]}
        for repeats in results
        if repeats and "error" not in repeats[0]
    ]
    return max(set.intersection(*rounds), default=None) if rounds else None


def median_rate(results: Sequence[Result]) -> float | None:
    """Return the median rounds per second of the repeats that succeeded."""
    rates = [result["rounds_per_second"] for result in results if "error" not in result]
    return statistics.median(rates) if rates else None


def rows_of(
    results: Mapping[Entry, Sequence[Result]], workload: Workload, ceiling: Mapping[str, float]
) -> list[list[str]]:
    """Return the cells of all entries, by `COLUMNS`. An entry without a result has its error."""
    rates = {entry: median_rate(repeats) for entry, repeats in results.items()}
    of_frameworks = [rate for entry, rate in rates.items() if rate and entry.peer.is_framework]
    fastest = max(of_frameworks, default=None)
    by_jax = rates.get(Entry("jax"))
    evaluated = common_round(results.values())
    rows = []
    for entry, repeats in results.items():
        rate = rates[entry]
        good = [result for result in repeats if "error" not in result]
        errors = [result["error"] for result in repeats if "error" in result]
        if rate is None:
            rows.append([f"{entry.label}: {errors[0] if errors else 'not run'}"])
            continue
        all_rates = [result["rounds_per_second"] for result in good]
        peak = ceiling.get(entry.precision)
        accuracies = dict(good[0]["accuracies"])
        startup = statistics.median(result["startup_seconds"] for result in good)
        rows.append(
            [
                f"{entry.label} ({errors[0]})" if errors else entry.label,
                good[0]["versions"].get(entry.peer.package, ""),
                f"{rate:.4g}",
                f"{rate * workload.cohort_size:.4g}",
                f"{min(all_rates):.4g} - {max(all_rates):.4g}",
                f"{rate / fastest:.2f}" if fastest else "-",
                f"{rate / by_jax:.2f}" if by_jax else "-",
                f"{rate * workload.round_flops / peak:.0%}" if peak else "-",
                f"{startup:.1f}",
                f"{accuracies[evaluated]:.4f} @ {evaluated}" if evaluated in accuracies else "-",
            ]
        )
    return rows
