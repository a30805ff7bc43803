"""Judge the papers by the runs in docs/results and the present rules, without any new run.

    uv run python -m scripts.reproduction.verdicts          # prints verdicts, and which are new
    uv run python -m scripts.reproduction.verdicts --write  # also writes them

With --write it writes the tables and verdicts of each folder, and open.csv: what is not decided,
and how many seeds would decide it. All folders are judged together, so that tests of a family are
corrected together. A folder of which nothing is judged stays as it is.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from fedsim.papers import tables as papers
from fedsim.papers.judge import Judgement
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
    """Print the totals by paper, and verdicts that differ from the recorded ones."""
    for folder in shipped.judged:
        judgements = shipped.judgements(folder)
        if any(judged.evidence is not None for judged in judgements):
            show_changes(folder, judgements)
            if write:
                write_folder(folder, shipped.frames[folder], judgements)
        elif judgements:
            print(f"{folder.name}: stays as it is, because no claim is about its runs")
    if write:
        OPEN_FILE.write_text(open_csv(open_items(shipped)), encoding="utf-8")
    print(papers.totals_table(shipped.all_judged).markdown())


def show_changes(folder: Path, judgements: Sequence[Judgement]) -> None:
    """Print which verdicts differ from those in the folder's summary.json."""
    recorded = read_summary_file(folder / "summary.json")["verdicts"]
    for judged in judgements:
        before = recorded.get(judged.printed.id, "not judged")
        if before != judged.verdict:
            detail = f" ({judged.detail})" if judged.detail else ""
            print(f"{folder.name}: {judged.printed.id}: {before}, now {judged.verdict}{detail}")
    gone = recorded.keys() - {judged.printed.id for judged in judgements}
    if gone:
        print(f"{folder.name}: no claims any more: {', '.join(sorted(gone))}")


def write_folder(folder: Path, runs: pd.DataFrame, judgements: Sequence[Judgement]) -> None:
    """Write the tables that have rows, and the verdicts."""
    tables = [
        papers.claims_table(judgements),
        results.by_group("overview", runs),
        results.pairs(runs),
        results.pooled_pairs(runs),
    ]
    numbers = [judged for judged in judgements if isinstance(judged.printed, Number)]
    if any(judged.evidence for judged in numbers):
        tables += [papers.numbers_table(numbers), papers.omnibus_table(numbers)]
    for table in tables:
        if len(table.values):
            (folder / f"{table.name}.csv").write_text(table.csv(), encoding="utf-8")
    summary = read_summary_file(folder / "summary.json")
    summary["verdicts"] = {judged.printed.id: judged.verdict for judged in judgements}
    write_summary(folder, summary)


if __name__ == "__main__":
    main()
