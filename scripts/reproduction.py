"""Fill the generated tables of docs/reproduction.md, docs/verdicts.md and docs/reproduction/*.md from docs/results.

    uv run python -m scripts.reproduction            # writes them
    uv run python -m scripts.reproduction --check    # changes nothing; exit code 1 if any table is not up to date

A table stands between `<!-- table: <maker> <arguments> -->` and `<!-- end of table -->`; the makers are in
reproduction_tables.py, reproduction_verdicts.py and reproduction_open.py. The rest of these files is written by hand.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts import reproduction_open, reproduction_tables, reproduction_verdicts
from scripts.shipped import RESULTS, Shipped, read_shipped

TABLE = re.compile(r"(<!-- table: (?P<words>[^>]*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)
DOCS = RESULTS.parent
MAKERS = {**reproduction_tables.MAKERS, **reproduction_verdicts.MAKERS, **reproduction_open.MAKERS}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the tables are up to date")
    check = parser.parse_args().check
    stale = update(read_shipped(), write=not check)
    return int(check and stale)


def update(shipped: Shipped, write: bool) -> bool:
    """Print which pages are not up to date; if `write`, fill them. Returns whether there was any."""
    stale = False
    for path in pages():
        before = path.read_text(encoding="utf-8")
        after = fill(before, shipped)
        if after != before:
            stale = True
            print(f"{path.relative_to(DOCS.parent)}: {'written' if write else 'not up to date'}")
            if write:
                path.write_text(after, encoding="utf-8")
    return stale


def pages() -> list[Path]:
    return [DOCS / "reproduction.md", DOCS / "verdicts.md", *sorted((DOCS / "reproduction").glob("*.md"))]


def fill(text: str, shipped: Shipped) -> str:
    """The text with all its tables made anew."""
    return TABLE.sub(lambda found: f"{found[1]}\n{make_table(found['words'].split(), shipped)}\n\n{found[3]}", text)


def make_table(words: Sequence[str], shipped: Shipped) -> str:
    """The table that the words of a marker ask for: the name of a maker, then its arguments."""
    name, *arguments = words
    return MAKERS[name](shipped, *arguments)


def tables_of(path: Path) -> list[list[str]]:
    """The words of all markers in a file."""
    return [found["words"].split() for found in TABLE.finditer(path.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    sys.exit(main())
