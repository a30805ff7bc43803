"""The looks of methods: the same colour, dash and marker in all figures, on the page, and in all
reports.

The look of a method is that of its selector. assets/looks.yaml has those of fedsim's selectors. Any
other selector has the look that a hash of its name gives, with another colour if a method of the
same report has that.
"""

import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from fedsim.core.configs import YAML_LOADER

Look = Mapping[str, Any]
"""The colour, dash and marker of a method, as matplotlib's keyword arguments.

The colour is `C0` to `C7`: a place in the palette of the style, such as `COLOURS`.
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
"""The palette of Okabe and Ito (2008), which can be told apart with any colour blindness. The wine
of Tol's scheme "muted" (2021) replaces its yellow, which cannot be seen on white paper."""
ON_DARK = ("#FFFFFF", *COLOURS[1:7], "#F0E442")
"""The palette for dark backgrounds: white replaces black, and the yellow the wine."""
CLASS_COLOURS = ("#AA4499", "#999933", "#EE6677", "#9F8FEF", "#666633", "#BBCC33")
"""The palette of classes of methods, on any background. No method has these colours. Most are from
Tol's schemes (2021). They, too, can be told apart with any colour blindness."""
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
"""Number of different looks."""


def make_looks(selectors: Mapping[str, str]) -> dict[str, Look]:
    """Return the look of each method by its name, in the order of `selectors`.

    `selectors` maps each method to its selector. The first method of a selector has the selector's
    look, and its further methods take the next free looks. A selector that fedsim does not know
    gets out of the way of the others: it has a colour that no other selector has, as long as there
    are such colours, and another marker after that.
    """
    # 1. Number the looks of fedsim's selectors.
    path = Path(__file__).parent / "assets" / "looks.yaml"
    numbers_of_selectors = {}
    for colour, names in enumerate(yaml.load(path.read_text("utf-8"), YAML_LOADER)):
        for place, selector in enumerate(names):
            numbers_of_selectors[selector] = place * len(COLOURS) + colour
    # 2. Sort the methods: those that have fedsim's looks before those that get out of their way.
    known, unknown, further = [], [], []
    seen = set()
    for method, selector in selectors.items():
        if selector in seen:
            further.append(method)
        elif selector in numbers_of_selectors:
            known.append(method)
        else:
            unknown.append(method)
        seen.add(selector)
    # 3. Give each method a number. A step of `len(COLOURS)` keeps the colour, a step of 1 does not.
    numbers: dict[str, int] = {}
    for method in (*known, *unknown, *further):
        selector = selectors[method]
        by_hash = zlib.crc32(selector.encode()) % NUM_LOOKS
        number = numbers_of_selectors.get(selector, by_hash)
        if method in unknown:
            number = _with_free_colour(number, numbers.values())
        step = 1 if method in further else len(COLOURS)
        numbers[method] = _first_free(number, step, numbers.values())
    return {method: _look(numbers[method]) for method in selectors}


def _with_free_colour(number: int, taken: Collection[int]) -> int:
    """Return the first number from `number` on whose colour no number that is taken has.

    If all colours are taken, return `number`.
    """
    taken_colours = {other % len(COLOURS) for other in taken}
    for candidate in range(number, number + len(COLOURS)):
        if candidate % len(COLOURS) not in taken_colours:
            return candidate % NUM_LOOKS
    return number


def _first_free(number: int, step: int, taken: Collection[int]) -> int:
    """Return the first of `number`, `number` + `step` and so on that is not taken.

    `NUM_LOOKS` is followed by 0. If all are taken, return `number`.
    """
    for num_steps in range(NUM_LOOKS):
        candidate = (number + num_steps * step) % NUM_LOOKS
        if candidate not in taken:
            return candidate
    return number


def _look(number: int) -> Look:
    """Return the look with a number from 0 to `NUM_LOOKS` - 1.

    The remainders by 8 and by 9 give colour and marker, so that neighbours differ in both. The two
    numbers have no common divisor, so that the first 72 looks differ in colour or marker. Eight
    looks after each other have the same dash.
    """
    dashes, markers = list(DASHES), list(MARKERS)
    return {
        "color": f"C{number % len(COLOURS)}",
        "linestyle": dashes[number // len(COLOURS) % len(dashes)],
        "marker": markers[number % len(markers)],
    }


def colour_on_page(look: Look, *, is_dark: bool = False) -> str:
    """Return the colour of a look on the page or on a dark background, such as `#0072B2`."""
    return (ON_DARK if is_dark else COLOURS)[int(look["color"].removeprefix("C"))]
