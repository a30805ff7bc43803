"""Which rooms of fedsim/ may import which, and that no modules import in a circle: as
scripts/structure.py counts."""

from pathlib import Path

from scripts.structure import arrows, cycles, file_arrows, modules

ROOT = Path(__file__).parents[1]
ALLOWED = {
    room: set(names.split())
    for room, names in {
        "core": "",
        "data": "core",
        "partitions": "core",
        "engine": "core data",
        "models": "core data",
        "results": "core",
        "clients": "core partitions engine",
        "distributed": "core engine",
        "tracking": "core results",
        "selectors": "core clients",
        "rounds": "core partitions engine clients selectors",
        "config": "core data partitions engine clients tracking selectors rounds",
        "papers": "core results config report",
        "running": "core data partitions engine results clients distributed tracking selectors rounds config",
        "jobs": "core data results tracking config running",
        "report": "core results tracking",
        "api": "core results tracking config running jobs report",
        "flower": "core partitions engine clients selectors rounds config running api",
        "commands": "core data engine results tracking config running jobs report",
        "search": "core results tracking config running jobs",
        "benchmark": "core results tracking config running jobs search",
    }.items()
}
DOORS = {"__init__", "__main__", "run"}
REMEDY = (
    "what both need belongs into core/, or into the lower room; what only the upper one needs, into that. "
    "A new arrow is a decision: see docs/design.md"
)


def test_rooms_import_only_what_lies_below_them_and_what_they_are_allowed() -> None:
    code = modules(ROOT)
    found = arrows(code)
    inside = {(one, other) for one, other in found if one not in DOORS}
    allowed = {(one, other) for one, others in ALLOWED.items() for other in others}
    assert sorted(f"{one} imports {other}" for one, other in inside - allowed) == [], REMEDY
    assert sorted(f"{one} no longer imports {other}" for one, other in allowed - inside) == []
    assert cycles(found) == []
    assert cycles(file_arrows(code)) == []


def test_circles_are_found() -> None:
    assert cycles({("a", "b"), ("b", "c")}) == []
    assert cycles({("a", "b"), ("b", "a")}) == [{"a", "b"}]
