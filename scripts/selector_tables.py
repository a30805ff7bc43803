"""The tables of docs/selectors.md, made of the heads of conf/selector/*.yaml, which `fedsim list
selectors` shows too.

    uv run python scripts/selector_tables.py          # says whether the page is as they are
    uv run python scripts/selector_tables.py --write  # writes it

A comment before each table of the page names its methods, `<!-- selectors: random, md -->`. A
choice that builds on one of them stands in its row where it asks, needs and costs the same, and
otherwise in a row of its own below it. Other names of the first of a row (`also:`) stand after its
name.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from fedsim.commands.catalogue import Catalogue, Choice, Group

PAGE = Path(__file__).parents[1] / "docs" / "selectors.md"
TABLE = re.compile(r"(<!-- selectors: ([\w, ]+) -->\n\n)(?:\|.*\n)*")
COSTS = ("asks", "server", "bytes", "samples")
HEADER = ("`selector=`", "idea", "source", "asks of clients", "needs at the server")
HEADER += ("extra bytes a round", "extra samples a round")


def with_tables(page: str) -> str:
    """The text `page` with all of its tables as the heads of the files have it."""
    group = Catalogue().group("selector")
    return TABLE.sub(lambda found: found[1] + table(found[2].split(", "), group), page)


def table(names: list[str], group: Group) -> str:
    """The table of the methods `names`, as Markdown."""
    lines = [
        HEADER,
        ["---"] * len(HEADER),
        *(row for name in names for row in rows(group.choices[name], group)),
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def rows(method: Choice, group: Group) -> Iterator[list[str]]:
    """The rows of a method and of the choices that build on it."""
    alike: dict[tuple[str, ...], list[Choice]] = {}
    for choice in (method, *group.builds_on(method.name)):
        alike.setdefault(tuple(choice.fields[name] for name in COSTS), []).append(choice)
    for costs, choices in alike.items():
        first = choices[0]
        source = re.sub(r"^none \((.*)\)$", r"\1", first.fields["source"])
        cells = [first.idea.rstrip("."), source, *costs]
        names = ", ".join(f"`{choice.name}`" for choice in choices)
        yield [
            f"{names} ({also})" if (also := first.fields.get("also")) else names,
            *(cell.replace("|", r"\|") for cell in cells),
        ]


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(with_tables(page), encoding="utf-8")
    elif page != with_tables(page):
        sys.exit(f"{PAGE} differs from the heads of conf/selector/*.yaml: --write writes it")


if __name__ == "__main__":
    main()
