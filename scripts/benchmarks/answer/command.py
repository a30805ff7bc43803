"""Answer the selection benchmark, version 1, from the shipped runs: fill docs/benchmark.md and
docs/benchmark_details.md, and make docs/leaderboard.md.

    uv run python scripts/benchmark.py answer              # prints the tables and sentences
    uv run python scripts/benchmark.py answer --write      # writes the pages, figures and details
    uv run python scripts/benchmark.py answer --check      # exit code 1 if a page is stale

Parts of the pages stand between `<!-- answer: NAME -->` and `<!-- end of answer -->`. Details of
the gains in all regimes are in docs/measured/benchmark_v1_gains.csv.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from fedsim.benchmark.reader import read_cards, read_submissions
from fedsim.report.drawing import style
from scripts.benchmarks import leaderboard
from scripts.benchmarks.answer import scores
from scripts.benchmarks.answer.answer import Answer
from scripts.benchmarks.answer.evidence import evidence
from scripts.benchmarks.answer.figures import by_regime, curves, overview, save
from scripts.benchmarks.answer.remarks import baseline, early, not_run, seeds
from scripts.benchmarks.answer.sentences import sentences
from scripts.benchmarks.answer.tables import (
    by_setting_table,
    changes_table,
    gains_table,
    means_table,
    methods_table,
    one_shard_table,
    partial_table,
    prices_table,
    ranks_table,
    settings_table,
    tuning_table,
)
from scripts.benchmarks.answer.tuning import read_trials
from scripts.benchmarks.answer.variations import variations
from scripts.benchmarks.processes import ROOT
from scripts.benchmarks.server_only import FILE as SERVER

DOCS = ROOT / "docs"
PAGES = DOCS / "benchmark.md", DOCS / "benchmark_details.md"
LEADERBOARD = DOCS / "leaderboard.md"
RUNS = DOCS / "results" / "benchmark_v1"
DETAILS = DOCS / "measured" / "benchmark_v1_gains.csv"
MIN_SETTINGS = 3
"""Smallest number of sampled settings for which the sentences and tests have a meaning."""
FIGURES = {
    "benchmark_answer.png": overview,
    "benchmark_regimes.png": by_regime,
    "benchmark_curves.png": curves,
}
MAKERS: Mapping[str, Callable[[Answer], str]] = {
    "sentences": sentences,
    "evidence": evidence,
    "settings": settings_table,
    "not_run": not_run,
    "methods": methods_table,
    "means": means_table,
    "partial": partial_table,
    "gains": gains_table,
    "by_setting": by_setting_table,
    "one_shard": one_shard_table,
    "ranks": ranks_table,
    "prices": prices_table,
    "early": early,
    "changes": changes_table,
    "seeds": seeds,
    "baseline": baseline,
    "variations": variations,
    "tuning": tuning_table,
}
"""Makers of the parts of the pages, by the name in their marker."""
PART = re.compile(r"(<!-- answer: (\w+) -->\n).*?(<!-- end of answer -->)", re.DOTALL)


def fill(text: str, answer: Answer) -> str:
    """Return the text of the page with new parts."""
    return PART.sub(lambda part: f"{part[1]}\n{MAKERS[part[2]](answer)}\n\n{part[3]}", text)


def read_answer(runs: Path = RUNS) -> Answer:
    """Read the scored runs in a folder of submissions, in the settings that are in the results."""
    rounds = scores.in_results(read_submissions(runs))
    server = pd.read_csv(SERVER) if SERVER.is_file() else pd.DataFrame()
    cards = read_cards(runs)
    classes = {method: card["class"] for method, card in cards.items()}
    sources = {method: leaderboard.source_of(card) for method, card in cards.items()}
    return Answer(rounds, server, read_trials(runs), classes, sources)


def pages(answer: Answer, runs: Path) -> dict[Path, str]:
    """Return the texts of the pages by their files."""
    texts = {page: fill(page.read_text("utf-8"), answer) for page in PAGES}
    return {**texts, LEADERBOARD: leaderboard.page(runs)}


def write(answer: Answer, runs: Path) -> None:
    """Write the pages, the figures and the details."""
    for path, text in pages(answer, runs).items():
        path.write_text(text, "utf-8")
    answer.details.reset_index().round(4).to_csv(DETAILS, index=False)
    for name, draw in FIGURES.items():
        with style():
            save(draw(answer), DOCS / "figures" / name)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of submissions")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    answer = read_answer(options.runs)
    num_settings = len(answer.settings)
    if num_settings < MIN_SETTINGS:
        parser.error(
            f"--runs={options.runs}: has {num_settings} sampled settings in which all methods of "
            f"the first group have run, and must have at least {MIN_SETTINGS}; submit more settings"
        )
    if options.write:
        write(answer, options.runs)
    elif options.check:
        texts = pages(answer, options.runs)
        return int(any(path.read_text("utf-8") != text for path, text in texts.items()))
    else:
        for name, make in MAKERS.items():
            print(f"\n{name}\n\n{make(answer)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
