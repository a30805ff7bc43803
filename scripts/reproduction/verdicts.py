"""Verdicts on the papers from what docs/results holds of our runs, by the rules as they are now,
without any new run.

    uv run python -m scripts.reproduction.verdicts          # prints verdicts by paper, and which are not as recorded
    uv run python -m scripts.reproduction.verdicts --write  # also writes tables and verdicts of each folder, and
                                               # open.csv: what is not decided and which seeds would decide it

All folders are judged together, so that tests of a family are corrected together. Runs are read
from *.parquet in a folder; a folder of which nothing is judged stays as it is.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from fedsim.papers import tables as papers
from fedsim.papers.judge import Judged
from fedsim.papers.published import Number
from fedsim.report import tables as results
from fedsim.report.summary import read_summary_file
from scripts.reproduction.open_items import OPEN_FILE, open_csv, open_items
from scripts.reproduction.shipped import Shipped, read_shipped, write_summary


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the tables and the verdicts")
    update(read_shipped(), parser.parse_args().write)


def update(shipped: Shipped, write: bool) -> None:
    """Print the totals by paper and which verdicts differ from those recorded; if `write`, record
    them."""
    for folder, some in shipped.judged.items():
        ours = [one for _, found in some for one in found]
        if any(one.evidence is not None for one in ours):
            show_changes(folder, ours)
            if write:
                write_folder(folder, shipped.frames[folder], ours)
        elif ours:
            print(f"{folder.name}: left as it is; the summary holds nothing that a claim is about")
    if write:
        OPEN_FILE.write_text(open_csv(open_items(shipped)), encoding="utf-8")
    print(papers.totals(shipped.all_judged).markdown())


def show_changes(folder: Path, judged: Sequence[Judged]) -> None:
    recorded = read_summary_file(folder / "summary.json")["verdicts"]
    for one in judged:
        if (before := recorded.get(one.printed.id, "not judged")) != one.verdict:
            print(
                f"{folder.name}: {one.printed.id}: {before}, now {one.verdict}",
                f"({one.detail})" * bool(one.detail),
            )
    if gone := sorted(recorded.keys() - {one.printed.id for one in judged}):
        print(f"{folder.name}: no claims any more: {', '.join(gone)}")


def write_folder(folder: Path, runs: pd.DataFrame, judged: Sequence[Judged]) -> None:
    """Write tables in which anything is judged."""
    numbers = [one for one in judged if isinstance(one.printed, Number)]
    tables = (
        [papers.numbers(numbers), papers.all_numbers(numbers)]
        if any(one.evidence for one in numbers)
        else []
    )
    own = results.by_group("overview", runs), results.pairs(runs), results.pooled_pairs(runs)
    for table in (*tables, papers.claims(judged), *own):
        if len(table.values):
            (folder / f"{table.name}.csv").write_text(table.csv(), encoding="utf-8")
    summary = read_summary_file(folder / "summary.json")
    summary["verdicts"] = {one.printed.id: one.verdict for one in judged}
    write_summary(folder, summary)


if __name__ == "__main__":
    main()
