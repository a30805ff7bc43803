"""The looks of methods: the same colour, dash and marker in all figures, on the page, and in all
reports.

The look of a method is that of its selector. assets/looks.yaml has those of fedsim's selectors. Any
other selector has the look that a hash of its name gives.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fedsim.core.configs import YAML_LOADER

Look = Mapping[str, Any]
"""The colour, dash and marker of a method, as matplotlib's keyword arguments.

The colour is `C0` to `C7`, a number in `COLOURS` or in another style's palette.
"""
COLOURS = (
    "#000000",
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#E69F00",
    "#882255",
)
"""The palette of Okabe and Ito (2008), told apart with any colour blindness. The wine of Tol's
scheme "muted" (2021) replaces its yellow, which cannot be seen on white paper."""
ON_DARK = ("#FFFFFF", *COLOURS[1:7], "#F0E442")
"""The palette for dark backgrounds: white for black, and the yellow for the wine."""
CLASS_COLOURS = ("#AA4499", "#999933", "#EE6677", "#9F8FEF", "#666633", "#BBCC33")
"""The palette of classes of methods, on any background: colours that are none of methods. Most are
from Tol's schemes (2021). They, too, are told apart with any colour blindness."""
DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}
MARKERS = {
    "o": "circle",
    "s": "square",
    "^": "triangle-up",
    "D": "diamond",
    "v": "triangle-down",
    "P": "cross",
    "X": "x",
    "<": "triangle-left",
    ">": "triangle-right",
}
"""matplotlib's dashes and markers, and plotly's names of them."""
NUM_LOOKS = len(COLOURS) * len(MARKERS) * len(DASHES)


def make_looks(selectors: Mapping[str, str]) -> dict[str, Look]:
    """Return the look of each method by its name, in the order of `selectors`.

    `selectors` has the selector of each method. The first method of each selector has the
    selector's look; its further methods take the next free looks. If two selectors that fedsim does
    not know have the same look, the second one keeps its colour and gets another marker.
    """
    # 1. The numbers of the looks of fedsim's selectors.
    path = Path(__file__).parent / "assets" / "looks.yaml"
    lines = yaml.load(path.read_text("utf-8"), YAML_LOADER)
    fixed = {}
    for colour, names in enumerate(lines):
        for place, selector in enumerate(names):
            fixed[selector] = place * len(COLOURS) + colour
    # 2. Each method's number: fedsim's selectors first, further methods of a selector last.
    first: dict[str, str] = {}
    for method, selector in selectors.items():
        first.setdefault(selector, method)
    known = [method for selector, method in first.items() if selector in fixed]
    numbers: dict[str, int] = {}
    for method in dict.fromkeys([*known, *first.values(), *selectors]):
        selector = selectors[method]
        number = fixed.get(selector, zlib.crc32(selector.encode()) % NUM_LOOKS)
        step = len(COLOURS) if method == first[selector] else 1
        for _ in range(NUM_LOOKS):
            if number in numbers.values():
                number = (number + step) % NUM_LOOKS
        numbers[method] = number
    return {method: _look(numbers[method]) for method in selectors}


def _look(number: int) -> Look:
    """Return a look. Neighbours differ in colour and marker, because 8 and 9 have no divisor in
    common, and eight after each other have the same dash."""
    dashes, markers = list(DASHES), list(MARKERS)
    return {
        "color": f"C{number % len(COLOURS)}",
        "linestyle": dashes[number // len(COLOURS) % len(dashes)],
        "marker": markers[number % len(markers)],
    }


def colour_on_page(look: Look, *, is_dark: bool = False) -> str:
    """Return the colour of a look as the page has it, or a dark background, such as `#0072B2`."""
    return (ON_DARK if is_dark else COLOURS)[int(look["color"].removeprefix("C"))]
