"""Make the tables of docs/selectors.md from the heads of conf/selector/*.yaml.

    uv run python scripts/selector_tables.py          # exit code 1 if the page is not up to date
    uv run python scripts/selector_tables.py --write  # writes the page

A comment before each table of the page names its methods: `<!-- selectors: random, md -->`. A
choice that builds on one of them stands in the same row if it asks, needs and costs the same.
Otherwise it has its own row below. `fedsim list selectors` shows the same heads.
"""

import re
import sys
from pathlib import Path

from fedsim.commands.catalogue import Catalogue, Choice, Group

PAGE = Path(__file__).parents[1] / "docs" / "selectors.md"
TABLE = re.compile(r"(<!-- selectors: ([\w, ]+) -->\n\n)(?:\|.*\n)*")
COSTS = ("asks", "sees", "server", "bytes", "samples")
HEADER = (
    "`selector=`",
    "idea",
    "source",
    "asks of clients",
    "the server sees",
    "needs at the server",
    "extra bytes a round",
    "extra samples a round",
)


def with_tables(page: str) -> str:
    """Return the text `page` with new tables."""
    group = Catalogue().group("selector")
    return TABLE.sub(lambda found: found[1] + table(found[2].split(", "), group), page)


def table(names: list[str], group: Group) -> str:
    """Return the table of the methods `names`, as Markdown."""
    lines = [list(HEADER), ["---"] * len(HEADER)]
    for name in names:
        lines += rows(group.choices[name], group)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def rows(method: Choice, group: Group) -> list[list[str]]:
    """Return the rows of a method and of the choices that build on it."""
    by_costs: dict[tuple[str, ...], list[Choice]] = {}
    for choice in (method, *group.builds_on(method.name)):
        costs = tuple(choice.fields[name] for name in COSTS)
        by_costs.setdefault(costs, []).append(choice)
    found = []
    for costs, choices in by_costs.items():
        first = choices[0]
        names = ", ".join(f"`{choice.name}`" for choice in choices)
        other_names = first.fields.get("also")
        if other_names:
            names += f" ({other_names})"
        source = re.sub(r"^none \((.*)\)$", r"\1", first.fields["source"])
        cells = [first.idea.rstrip("."), source, *costs]
        found.append([names, *(cell.replace("|", r"\|") for cell in cells)])
    return found


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(with_tables(page), encoding="utf-8")
    elif page != with_tables(page):
        sys.exit(f"{PAGE} differs from the heads of conf/selector/*.yaml: --write writes it")


if __name__ == "__main__":
    main()
