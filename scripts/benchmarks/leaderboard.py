"""The text of docs/leaderboard.md: what each submission to the selection benchmark gains over
random selection. `benchmark.py answer --write` writes it.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedsim.benchmark.reader import read_cards, read_submissions
from fedsim.benchmark.rules import CONTROLS, FIRST_GROUP, SCHEDULES
from fedsim.results.labels import REFERENCE
from scripts.benchmarks.answer import inference, scores
from scripts.reproduction.cells import markdown

HEAD = """# Leaderboard

This page lists all submissions to the [selection benchmark](benchmark_rules.md#submit), the highest
gain first. A gain is the accuracy of a method minus that of random selection in the same setting,
regime and seed, in percentage points. It is the mean over the sampled settings in which the method
has run in all regimes. **Gains over different settings do not compare.** [The benchmark's
page](benchmark.md) says which gains are significant.

`scripts/benchmark.py answer --write` makes this page from `docs/results/benchmark_v1`.
"""
GAINS = """## Gains

The interval covers settings and seeds (95 %). *Bytes* are those of a run divided by those of random
selection. *Failed* is the number of scored runs that diverged. Controls are random selection with
other draws.
"""
BY_REGIME = """## Gains by regime

A regime is a schedule of the learning rate with a number of rounds.
"""
REMARKS = {
    **dict.fromkeys(CONTROLS, " (control)"),
    **dict.fromkeys(scores.NO_METHODS, " (reference)"),
}
UNLISTED = "Submissions that have not run in all regimes of a sampled setting in the results"
EMPTY = "There is no submission of a method and of random selection yet.\n"


def page(folder: Path, first_group: Sequence[str] = FIRST_GROUP) -> str:
    """Return the text of the page for the submissions in a folder.

    It is about the settings in which all methods of the first group have run.
    """
    cards = read_cards(folder)
    if not cards.keys() - {REFERENCE} or REFERENCE not in cards:
        return f"{HEAD}\n{EMPTY}"
    rounds = scores.sampled(scores.in_results(read_submissions(folder), first_group))
    if rounds.empty:
        return f"{HEAD}\n{_unlisted(cards)}"
    table = scores.gains(scores.finals(rounds))
    overall = overall_gains(table)
    if overall.empty:
        return f"{HEAD}\n{_unlisted(cards)}"
    costs = relative_bytes(rounds)
    statuses = scores.all_runs(rounds)["status"]
    failed = (statuses != "done").groupby("method").sum()
    rows = []
    for method, row in overall.iterrows():
        card = cards[method]
        rows.append(
            {
                "method": f"{method}{REMARKS.get(method, '')}",
                "asks clients; needs at the server": card["class"],
                "settings": f"{row['settings']:.0f}",
                "gain": _with_interval(row),
                "bytes": f"{costs[method]:.2f}",
                "failed": str(failed[method]),
                "source": source_of(card),
            }
        )
    by_method = table.mean(axis="columns").groupby(["method", *scores.REGIME]).mean()
    by_regime = by_method.unstack(scores.REGIME).loc[overall.index]
    by_regime = by_regime[sorted(by_regime, key=lambda key: (key[1], SCHEDULES.index(key[0])))]
    header = ["method", *(f"{schedule}, {number}" for schedule, number in by_regime)]
    lines = []
    for method, gains in by_regime.iterrows():
        lines.append([str(method), *(f"{gain:+.1f}" for gain in gains)])
    all_gains = markdown(list(rows[0]), [list(row.values()) for row in rows])
    parts = [HEAD, GAINS, all_gains, ""]
    if unlisted := cards.keys() - {REFERENCE, *overall.index}:
        parts.append(_unlisted(unlisted))
    return "\n".join([*parts, BY_REGIME, markdown(header, lines), ""])


def _unlisted(methods: Iterable[str]) -> str:
    """Name submitted methods that have no row. Random selection never has one."""
    names = ", ".join(f"`{name}`" for name in sorted(methods) if name != REFERENCE)
    return f"{UNLISTED}: {names}.\n"


def overall_gains(table: pd.DataFrame) -> pd.DataFrame:
    """Return the mean gain over regimes of each method with its interval, the highest first."""
    gains = {}
    for method, of_method in scores.over_regimes(table).groupby("method"):
        gains[method] = inference.crossed_mean(of_method.to_numpy())
    rows = pd.DataFrame(gains, index=["settings", "gain", "half"]).T
    return rows.sort_values("gain", ascending=False)


def relative_bytes(rounds: pd.DataFrame) -> pd.Series:
    """Return the mean over runs of each method's bytes, divided by those of random selection."""
    done = rounds[rounds["status"] == "done"]
    totals = done.groupby(scores.KEYS)["bytes"].max()
    of_random = scores.totals_of_random(done, "bytes").rename("of_random")
    pairs = totals.to_frame().join(of_random, on=scores.PAIR)
    return (pairs["bytes"] / pairs["of_random"]).groupby("method").mean()


def _with_interval(row: pd.Series) -> str:
    """Return a gain with its interval, if there are two settings or more."""
    if pd.isna(row["half"]):
        return f"{row['gain']:+.2f}"
    low, high = row["gain"] - row["half"], row["gain"] + row["half"]
    return f"{row['gain']:+.2f} [{low:+.2f}, {high:+.2f}]"


def source_of(card: Mapping[str, Any]) -> str:
    """Return where a method comes from, as its card says."""
    link = f"[code]({card['link']})" if "link" in card else ""
    author = f"run by {card['author']}" if "author" in card else ""
    return "; ".join(text for text in (card["source"], link, author) if text)
