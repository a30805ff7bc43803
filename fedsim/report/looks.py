"""How each method is drawn: one colour, dash and marker per method, the same in all panels, figures and on the page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsim.report.groups import sort_key
from fedsim.report.panels import Panel

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Okabe and Ito's palette, told apart with any colour blindness, without its yellow, which white paper swallows."""
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")


@dataclass(frozen=True)
class Look:
    """The colour, dash and marker of a method, as matplotlib writes them."""

    colour: str
    dash: str
    marker: str


def make_looks(panels: Sequence[Panel]) -> Mapping[str, Look]:
    """The look of each line of the panels by its name, in the order in which legends have them.

    Colours repeat after seven methods, with another dash; colour and marker together after 63.
    """
    names = sorted({name for panel in panels for name in panel.lines}, key=sort_key)
    return {name: _look(number) for number, name in enumerate(names)}


def _look(number: int) -> Look:
    dash = DASHES[number // len(COLOURS) % len(DASHES)]
    return Look(COLOURS[number % len(COLOURS)], dash, MARKERS[number % len(MARKERS)])
