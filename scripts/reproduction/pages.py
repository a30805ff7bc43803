"""Fill the generated tables of the docs from docs/results.

    uv run python -m scripts.reproduction.pages            # writes them
    uv run python -m scripts.reproduction.pages --check    # exit code 1 if one is not up to date

The pages are docs/reproduction.md, verdicts.md, benchmark_v0.md and reproduction/*.md. A table
stands between `<!-- table: <maker> <words> -->` and `<!-- end of table -->`. The makers are in
tables.py, verdict_tables.py and open_items.py. `TABLE_FILES` are tables that pages link to.
"""

import argparse
import csv
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.reproduction import open_items, tables, verdict_tables
from scripts.reproduction.shipped import RESULTS, Shipped, read_shipped

TABLE = re.compile(r"(<!-- table: (?P<words>[^>]*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)
DOCS = RESULTS.parent
MAKERS = dict(tables.MAKERS) | dict(verdict_tables.MAKERS) | dict(open_items.MAKERS)


ALL_SETTINGS = "gpfl_settings gpfl_table2_fmnist gpfl_settings_code"
PRINTED = "gpfl_settings model.hidden=[64,_30] model.dropout=0.0"
AUTHORS = "gpfl_settings_code model.hidden=[64] model.dropout=0.5"
FEDABC = "differences fedabc_fig2_small"
TABLE_FILES = {
    "gpfl_minus_random": f"settings {ALL_SETTINGS}",
    "gpfl_minus_round_robin": f"settings {ALL_SETTINGS} against=round_robin",
    "gpfl_by_size": f"by_size {ALL_SETTINGS}",
    "fedcor_by_size": f"rivals_by_size {ALL_SETTINGS}",
    "printed_minus_random": f"differences {PRINTED}",
    "printed_minus_round_robin": f"differences {PRINTED} against=round_robin",
    "authors_minus_random": f"differences {AUTHORS}",
    "authors_minus_round_robin": f"differences {AUTHORS} against=round_robin",
    "authors_rounds_31_to_50": f"early {AUTHORS}",
    "alpha_minus_fixed_0": "differences gpfl_alpha against=fixed_0",
    "logs": "logs gpfl_alpha_code gpfl_rho_code",
    "cost": "cost",
    "open_by_preset": "what_is_open",
    "pncs_fmnist_minus_round_robin": "differences pncs_fmnist_small against=round_robin",
    "pncs_k4_minus_round_robin": "differences pncs_k4_small against=round_robin",
    "pncs_layers_minus_round_robin": "differences pncs_layers_small against=round_robin",
    "pncs_sketch_minus_identity": "differences pncs_sketch_small against=identity",
    "pncs_queue_minus_4": "differences pncs_queue_small against=pncs_q4",
    "fedabc_minus_full": f"{FEDABC} against=full",
    "fedabc_minus_top_loss_7": f"{FEDABC} against=top_loss_7",
    "fedabc_last_round_minus_top_loss_7": f"{FEDABC} against=top_loss_7 measure=accuracy@1.0",
    "fedabc_all_rounds_minus_full": f"{FEDABC} against=full measure=mean_accuracy",
    "fedabc_all_rounds_minus_top_loss_7": f"{FEDABC} against=top_loss_7 measure=mean_accuracy",
}
"""Tables that pages link to, by the name of their file in results/tables/."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only print what is not up to date")
    check = parser.parse_args().check
    are_stale = update(read_shipped(), write=not check)
    return 1 if check and are_stale else 0


def update(shipped: Shipped, write: bool) -> bool:
    """Print the files that are not up to date, and write them if `write` is true.

    Return whether there is any.
    """
    new_texts = {}
    for path in pages():
        new_texts[path] = fill(path.read_text(encoding="utf-8"), shipped)
    for name, words in TABLE_FILES.items():
        new_texts[RESULTS / "tables" / f"{name}.csv"] = as_csv(make_table(words.split(), shipped))
    are_stale = False
    for path, text in new_texts.items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        are_stale = True
        print(f"{path.relative_to(DOCS.parent)}: {'written' if write else 'not up to date'}")
        if write:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return are_stale


def as_csv(table: str) -> str:
    """Return a Markdown table as CSV."""
    header, _, *rows = table.splitlines()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for line in [header, *rows]:
        writer.writerow([cell.strip() for cell in line.strip("|").split("|")])
    return text.getvalue()


def pages() -> list[Path]:
    names = ("reproduction", "verdicts", "benchmark_v0")
    return [*(DOCS / f"{name}.md" for name in names), *sorted(DOCS.glob("reproduction/*.md"))]


def fill(text: str, shipped: Shipped) -> str:
    """Return a page with new tables."""

    def filled(marker: re.Match[str]) -> str:
        table = make_table(marker["words"].split(), shipped)
        return f"{marker[1]}\n{table}\n\n{marker[3]}"

    return TABLE.sub(filled, text)


def make_table(words: Sequence[str], shipped: Shipped) -> str:
    """Return the table that a marker asks for: the name of a maker, then its words."""
    name, *arguments = words
    return MAKERS[name](shipped, *arguments)


if __name__ == "__main__":
    sys.exit(main())
