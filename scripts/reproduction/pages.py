"""Fill the generated tables of docs/reproduction.md, verdicts.md, benchmark.md and
reproduction/*.md from docs/results, and write those of TABLE_FILES, which the pages link to.

    uv run python -m scripts.reproduction.pages            # writes them uv run python -m
    scripts.reproduction.pages --check    # changes nothing; exit code 1 if any table is not up to
    date

A table stands between `<!-- table: <maker> <arguments> -->` and `<!-- end of table -->`; the makers
are in tables.py, verdict_tables.py and open_items.py. The rest of these files is written by hand.
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
MAKERS = {**tables.MAKERS, **verdict_tables.MAKERS, **open_items.MAKERS}


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
    parser.add_argument(
        "--check", action="store_true", help="only say whether the tables are up to date"
    )
    check = parser.parse_args().check
    stale = update(read_shipped(), write=not check)
    return int(check and stale)


def update(shipped: Shipped, write: bool) -> bool:
    """Print which pages are not up to date; if `write`, fill them. Returns whether there was
    any."""
    stale = False
    for path in [*pages(), *(RESULTS / "tables" / f"{name}.csv" for name in TABLE_FILES)]:
        before = path.read_text(encoding="utf-8") if path.is_file() else ""
        words = TABLE_FILES.get(path.stem, "").split() if path.suffix == ".csv" else []
        after = _csv(make_table(words, shipped)) if words else fill(before, shipped)
        if after != before:
            stale = True
            print(f"{path.relative_to(DOCS.parent)}: {'written' if write else 'not up to date'}")
            if write:
                path.parent.mkdir(exist_ok=True)
                path.write_text(after, encoding="utf-8")
    return stale


def _csv(table: str) -> str:
    """A table in Markdown as CSV."""
    text = io.StringIO()
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    csv.writer(text, lineterminator="\n").writerows(line for i, line in enumerate(lines) if i != 1)
    return text.getvalue()


def pages() -> list[Path]:
    return [
        *(DOCS / f"{n}.md" for n in ("reproduction", "verdicts", "benchmark")),
        *sorted((DOCS / "reproduction").glob("*.md")),
    ]


def fill(text: str, shipped: Shipped) -> str:
    """The text with all its tables made anew."""
    return TABLE.sub(
        lambda found: f"{found[1]}\n{make_table(found['words'].split(), shipped)}\n\n{found[3]}",
        text,
    )


def make_table(words: Sequence[str], shipped: Shipped) -> str:
    """The table that the words of a marker ask for: the name of a maker, then its arguments."""
    name, *arguments = words
    return MAKERS[name](shipped, *arguments)


def tables_of(path: Path) -> list[list[str]]:
    """The words of all markers in a file."""
    return [found["words"].split() for found in TABLE.finditer(path.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    sys.exit(main())
