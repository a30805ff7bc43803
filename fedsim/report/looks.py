"""The looks of methods: the same colour, dash and marker in all figures and on the page."""

from collections.abc import Iterable, Mapping
from typing import Any

from fedsim.results.frames import sort_key

Look = Mapping[str, Any]
"""The colour, dash and marker of a method, as matplotlib's keyword arguments."""
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Okabe and Ito's palette, told apart with any colour blindness, without its yellow, which cannot
be seen on white paper."""
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


def make_looks(methods: Iterable[str]) -> Mapping[str, Look]:
    """Return the look of each method by its name, in the order in which legends have them.

    Colours repeat after seven methods, with another dash; colour and marker together after 63.
    """
    dashes, markers = list(DASHES), list(MARKERS)
    looks = {}
    for number, name in enumerate(sorted(set(methods), key=sort_key)):
        looks[name] = {
            "color": COLOURS[number % len(COLOURS)],
            "linestyle": dashes[number // len(COLOURS) % len(dashes)],
            "marker": markers[number % len(markers)],
            "markerfacecolor": "white",
        }
    return looks
