"""Which rooms of fedsim/ may import which, counted as scripts/structure.py does."""

from pathlib import Path

import pytest

from scripts.structure import arrows, cycles, modules

ROOT = Path(__file__).parents[1]
ALLOWED = {
    room: set(names.split())
    for room, names in {
        "core": "",
        "data": "core",
        "partitions": "core",
        "engine": "core data",
        "models": "core data",
        "results": "core partitions",
        "clients": "core partitions engine",
        "distributed": "core engine",
        "tracking": "core results",
        "selectors": "core results clients",
        "rounds": "core partitions engine clients selectors",
        "config": "core data partitions engine clients tracking selectors rounds",
        "papers": "core results config",
        "running": "core data partitions engine results clients distributed tracking selectors rounds config",
        "jobs": "core data results tracking config running",
        "report": "core results tracking papers",
        "api": "core data partitions engine results tracking selectors rounds config running jobs",
        "commands": "core data engine results tracking config running jobs report",
        "search": "core results tracking config running jobs",
    }.items()
}
DOORS = {"__init__", "__main__", "run"}
REMEDY = (
    "what both need belongs into core/, or into the lower room; what only the upper one needs, into that. "
    "A new arrow is a decision: see docs/design.md"
)


def test_rooms_import_only_what_lies_below_them() -> None:
    found = {(one, other) for one, other in arrows(modules(ROOT)) if one not in DOORS}
    wrong = sorted(f"{one} imports {other}" for one, other in found if other not in ALLOWED[one])
    assert wrong == [], REMEDY


def test_no_room_is_allowed_an_import_that_it_does_not_make() -> None:
    found = arrows(modules(ROOT))
    assert [(one, other) for one in ALLOWED for other in sorted(ALLOWED[one]) if (one, other) not in found] == []


def test_rooms_form_no_circle() -> None:
    assert cycles(arrows(modules(ROOT))) == []


@pytest.mark.parametrize(
    ("edges", "expected"), [({("a", "b"), ("b", "c")}, []), ({("a", "b"), ("b", "a")}, [{"a", "b"}])]
)
def test_circles_are_found(edges: set[tuple[str, str]], expected: list[set[str]]) -> None:
    assert cycles(edges) == expected
