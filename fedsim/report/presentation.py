"""The presentation of a report's methods: their selection, names, order and style.

The choices are kept in the report's folder, in `report.yaml`, where the next report reads them.
Users may edit the file.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fedsim.core.text import nearest
from fedsim.report.looks import Look, make_looks
from fedsim.results.frames import by, selector_of, sort_key
from fedsim.results.reading import (
    LIST,
    MAPPING,
    NONE,
    TEXT,
    Kinds,
    content_of,
    has_kinds,
    parse_yaml,
)
from fedsim.results.runs import ReportError

FILE = "report.yaml"
HEAD = (
    "# How fedsim report presents these runs (docs/figures.md). Its options replace values here.\n"
)
KINDS = {
    "names": MAPPING,
    "order": LIST,
    "only": LIST,
    "log_x": Kinds({bool}) | NONE,
    "width": TEXT | NONE,
    "style": TEXT,
    "spread": TEXT,
}
"""Types of the values in the file."""
KNOWN = {"style": ("paper", "slides", "dark"), "spread": ("interval", "sd")}
"""The values that there are."""
WIDTHS = {"column": "3.5in", "page": "7.16in"}
"""Widths of a column and of the text of a two-column page (IEEE)."""
UNITS = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72}
"""Units of widths in inches. A pt is that of PDF, 1/72 inch."""
NARROWEST, WIDEST = 1.5, 40.0
"""Limits of widths in inches."""


@dataclass(frozen=True)
class Presentation:
    """The choices for a report. Methods have the names of a report without choices here, or that of
    their selector, the first word.

    Attributes:
        names: Other names of methods.
        order: The methods that come first, in this order.
        only: The methods that the report has; all if it is empty.
        log_x: Whether accuracy is drawn against logarithmic axes; None: where costs differ much.
        width: The width of all figures: a number with a unit of `UNITS`, or one of `WIDTHS`. None:
            that of a column or of a page, depending on the figure.
        style: The style of figures (`fedsim.report.drawing.SHEETS`).
        spread: What follows a mean in tables: its 95 % `interval`, or the `sd` over seeds.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    order: Sequence[str] = ()
    only: Sequence[str] = ()
    log_x: bool | None = None
    width: str | None = None
    style: str = "paper"
    spread: str = "interval"

    def __post_init__(self) -> None:
        """Raise `ReportError` for a value that is not allowed."""
        for key, known in KNOWN.items():
            value = getattr(self, key)
            if value not in known:
                raise ReportError(f"{key}={value}: must be {' or '.join(known)}")
        _ = self.inches

    @property
    def inches(self) -> float | None:
        """The width in inches."""
        if self.width is None:
            return None
        text = WIDTHS.get(self.width, self.width)
        match = re.fullmatch(r"(\d+\.?\d*) ?(in|cm|mm|pt)", text)
        inches = float(match[1]) * UNITS[match[2]] if match else 0.0
        if not NARROWEST <= inches <= WIDEST:
            raise ReportError(
                f"width={self.width}: must be {', '.join(WIDTHS)}, or from {NARROWEST:g}in to "
                f"{WIDEST:g}in, such as 3.3in, 8.4cm, 84mm or 240pt"
            )
        return inches

    def arrange(self, frame: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, Look]]:
        """Return the rows of the methods to show, renamed and in order, and the methods' looks.

        The looks are in the order of legends. Raises `ReportError` for names of no method, and for
        two methods with the same name.
        """
        # 1. Methods in the order of legends.
        methods = sorted(set(frame["method"]), key=sort_key)
        self._check_words(methods)
        only = self.only or methods
        shown = [method for method in methods if _place(method, only) < len(only)]
        ordered = sorted(shown, key=lambda method: _place(method, self.order))
        names = {method: self.rename(method) for method in ordered}
        if len(set(names.values())) < len(names):
            raise ReportError(
                f"names: methods must have different names, not {', '.join(names.values())}"
            )
        # 2. Rows, first by setting.
        frame = frame[frame["method"].isin(shown)].copy()
        if self.order:
            settings = list(dict.fromkeys(frame["setting"]))
            setting_places = frame["setting"].map(settings.index)
            ranks = len(ordered) * setting_places + frame["method"].map(ordered.index)
            frame = frame.iloc[ranks.argsort(kind="stable")]
        # 3. Looks, before the names hide the selectors.
        lines = by(frame, "method")
        looks = make_looks({names[method]: selector_of(lines[method]) or "" for method in ordered})
        if self.names:
            frame["method"] = frame["method"].map(names)
            frame["group"] = (frame["setting"] + " " + frame["method"]).str.strip()
        return frame, looks

    def rename(self, method: str) -> str:
        """Return the name that a method, or its selector, is to have in the report."""
        selector, space, rest = method.partition(" ")
        name = f"{self.names.get(selector, selector)}{space}{rest}"
        return str(self.names.get(method, name))

    def _check_words(self, methods: Sequence[str]) -> None:
        """Raise `ReportError` if an option names no method of the report."""
        known = dict.fromkeys([*methods, *(method.partition(" ")[0] for method in methods)])
        for key in ("names", "order", "only"):
            for word in getattr(self, key):
                if word not in known:
                    similar = nearest(str(word), known)
                    hint = f"did you mean {similar}? " if similar else ""
                    raise ReportError(
                        f"{key}: {word} is no method of this report; {hint}there are "
                        f"{', '.join(known)}"
                    )


def _place(method: str, words: Sequence[str]) -> int:
    """Return the place of a method, or otherwise of its selector, in `words`; their number if
    neither is there."""
    for word in (method, method.partition(" ")[0]):
        if word in words:
            return list(words).index(word)
    return len(words)


def read_presentation(folder: Path, changes: Mapping[str, Any]) -> Presentation:
    """Return the choices in the file of a report's `folder`, if there is one, with `changes`.

    Raises `ReportError` if the file has other keys or values than those of `Presentation`.
    """
    path = folder / FILE
    values: dict[str, Any] = {}
    if path.exists():
        values = parse_yaml(content_of(path).decode("utf-8", "replace"), FILE)
        if not (has_kinds(values, KINDS) and values.keys() <= KINDS.keys()):
            raise ReportError(
                f"{path}: must have values of {', '.join(KINDS)} as fedsim report writes them; "
                "correct or delete it"
            )
    return Presentation(**{**values, **changes})


def presentation_file(presentation: Presentation, folder: Path) -> dict[str, bytes]:
    """Return the content of the file in a report's `folder` by its name.

    Return nothing if all choices are the usual ones, unless an earlier file must be replaced.
    """
    if presentation == Presentation() and not (folder / FILE).exists():
        return {}
    text = yaml.safe_dump(asdict(presentation), sort_keys=False, allow_unicode=True)
    return {FILE: f"{HEAD}{text}".encode()}
