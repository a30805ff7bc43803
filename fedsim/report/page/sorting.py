"""The number that a table cell is sorted by."""

import math
import re

UNITS = {
    **{"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0},
    **{"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
    **{"": 1.0, "%": 1.0},
}
NUMBER = re.compile(
    r"(?P<below><\s*)?(?P<number>[+-]?(?:\d{1,3}(?:,\d{3})+|\d*)(?:\.\d+)?(?:e[+-]?\d+)?)(?:\s?(?P<unit>%|[A-Za-z]+))?"
)
NEVER = "never"
"""The text for what runs never reached; it counts as more than any number."""


def sort_value(cell: str) -> float | None:
    """The number that a cell begins with, in seconds or bytes where it has such a unit; None for other text.

    `0.74 [0.73, 0.75]` is 0.74, `1.5 min` 90, `12 (4/5)` 12, `never (2/5)` infinity, and `< .001` lies below .001.
    """
    if cell.startswith(NEVER):
        return math.inf
    found = NUMBER.match(cell)
    if found is None or not any(c.isdigit() for c in found["number"]) or cell[found.end() :][:1] not in ("", " ", ","):
        return None
    if (unit := found["unit"] or "") not in UNITS:
        return None
    value = float(found["number"].replace(",", "")) * UNITS[unit]
    return math.nextafter(value, -math.inf) if found["below"] else value
