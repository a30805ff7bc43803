"""The presentation of a report's methods: their selection, names, order, reference and style.

A report keeps these choices in `report.yaml` in its folder, and the next report reads them. Users
may edit the values in the file. A report rewrites it without their comments.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from fedsim.core.text import nearest
from fedsim.report.looks import Look, make_looks
from fedsim.results.frames import by, selector_of
from fedsim.results.labels import sort_key
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
    "# How fedsim report presents these runs (docs/figures.md). Options of the command replace "
    "values here.\n"
)
KINDS = {
    "names": MAPPING,
    "order": LIST,
    "only": LIST,
    "reference": LIST,
    "log_x": Kinds({bool}) | NONE,
    "width": TEXT | NONE,
    "style": TEXT,
    "spread": TEXT,
    "labels": TEXT,
}
"""The types that values in the file may have."""
ALLOWED = {
    "style": ("paper", "slides", "dark"),
    "spread": ("interval", "sd"),
    "labels": ("legend", "ends"),
}
"""Values that a choice can have, for choices among a few."""
METHOD_KEYS = ("names", "order", "only", "reference")
"""Keys whose values name methods."""
WITHOUT_NAMES = {
    "only": "all methods are shown",
    "reference": "methods are compared with random selection",
}
"""What a report does if a list has no names."""
WIDTHS = {"column": "3.5in", "page": "7.16in"}
"""Widths of a column and of the text of a two-column page (IEEE)."""
UNITS = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72}
"""Units of widths, in inches. A point (pt) is 1/72 inch, as in PDF."""
NARROWEST, WIDEST = 1.5, 40.0
"""Limits of widths in inches."""


class ChoiceError(ReportError):
    """Choices are wrong, for example a name that belongs to no method.

    `keys` are the keys of these choices. The exit code is 2, as for all wrong options. If the
    choices are values in report.yaml, callers raise a `ReportError` with the file's name instead.
    """

    exit_code = 2

    def __init__(self, message: str, *keys: str) -> None:
        super().__init__(message)
        self.keys = set(keys)


@dataclass(frozen=True)
class Presentation:
    """The choices for a report.

    The choices use a method's usual name, which it has in a report without choices. The name of a
    selector stands for all of its methods.

    Attributes:
        names: Other names of methods, by their usual names.
        order: The methods that come first, in this order.
        only: The methods that the report shows. If it is empty, they are all shown.
        reference: The methods that others are compared with within a setting. If there are several,
            a method is compared with the one whose config is most like its own. If it is empty, it
            is random selection.
        log_x: Whether accuracy is drawn against logarithmic axes. If it is None, this is done where
            costs differ much.
        width: The width of all figures: a number with a unit of `UNITS`, or one of `WIDTHS`. If it
            is None, a figure is as wide as a column or a page.
        style: The style of figures (`fedsim.report.drawing.SHEETS`).
        spread: What follows a mean in tables: its 95 % interval (`interval`), or the standard
            deviation over seeds (`sd`).
        labels: Where lines of accuracy have their names: in a `legend`, or at their `ends`.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    order: Sequence[str] = field(default_factory=list)
    only: Sequence[str] = field(default_factory=list)
    reference: Sequence[str] = field(default_factory=list)
    log_x: bool | None = None
    width: str | None = None
    style: str = "paper"
    spread: str = "interval"
    labels: str = "legend"

    def __post_init__(self) -> None:
        """Raise `ChoiceError` for a value that is not allowed."""
        for key, allowed in ALLOWED.items():
            value = getattr(self, key)
            if value not in allowed:
                raise ChoiceError(f"{key}={value}: must be {' or '.join(allowed)}")
        if self.width is not None:
            _inches(self.width)
        for key in METHOD_KEYS:
            words = list(getattr(self, key))
            if key == "names":
                words += self.names.values()
            for word in words:
                if not (isinstance(word, str) and word):
                    raise ChoiceError(f"{key}: must have names as texts, not {word!r}", key)

    @property
    def inches(self) -> float | None:
        """The width of all figures in inches, or None."""
        return None if self.width is None else _inches(self.width)

    def arrange(self, frame: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, Look]]:
        """Return the rows of the methods to show, renamed and in order, and the methods' looks.

        The looks are in the order of legends. Raises `ChoiceError` for a name that belongs to no
        method, for two methods with the same name, and if `only` leaves out all references.
        """
        # 1. Methods in the order of legends.
        selectors = _selectors(frame)
        for key in METHOD_KEYS:
            for word, remark in _unknown(getattr(self, key), selectors).items():
                raise ChoiceError(f"{key}: {word} {remark}", key)
        shown = []
        for method, selector in selectors.items():
            if not self.only or method in self.only or selector in self.only:
                shown.append(method)
        ordered = sorted(shown, key=lambda method: self._place(method, selectors[method]))
        names = {method: self.rename(method) for method in ordered}
        repeated = [name for name, count in Counter(names.values()).items() if count > 1]
        if repeated:
            several = ", ".join(repeated)
            raise ChoiceError(f"names: several methods would have the name {several}", "names")
        # 2. Rows: settings stay in their order, and methods of a setting come in that of legends.
        frame = frame[frame["method"].isin(shown)].copy()
        if self.order:
            settings = list(dict.fromkeys(frame["setting"]))
            setting_places = frame["setting"].map(settings.index)
            method_places = frame["method"].map(ordered.index)
            frame = frame.iloc[np.lexsort((method_places, setting_places))]  # the last key leads
        if self.reference:
            references = self._references(shown, selectors)
            frame["is_reference"] = frame["method"].isin(references)
        # 3. Looks and names. A new name does not change the look, which belongs to the selector.
        lines = by(frame, "method")
        looks = make_looks({names[method]: selector_of(lines[method]) or "" for method in ordered})
        if self.names:
            frame["method"] = frame["method"].map(names)
            frame["group"] = (frame["setting"] + " " + frame["method"]).str.strip()
        return frame, looks

    def _references(self, shown: Sequence[str], selectors: Mapping[str, str]) -> list[str]:
        """Return the methods among those `shown` that `reference` names, by name or selector.

        Raises `ChoiceError` if `only` leaves out all of them.
        """
        references = []
        for method in shown:
            if method in self.reference or selectors[method] in self.reference:
                references.append(method)
        if not references:
            message = (
                f"reference: {', '.join(self.reference)} is not in only, which is "
                f"{', '.join(self.only)}; add it there, or choose another reference"
            )
            raise ChoiceError(message, "reference", "only")
        return references

    def _place(self, method: str, selector: str) -> int:
        """Return the place of a method in `order`, or otherwise the place of its selector.

        Methods without a place come after all others.
        """
        for word in (method, selector):
            if word in self.order:
                return self.order.index(word)
        return len(self.order)

    def rename(self, method: str) -> str:
        """Return the name of a method in the report, from the names of methods and selectors."""
        selector, space, rest = method.partition(" ")
        name = f"{self.names.get(selector, selector)}{space}{rest}"
        return str(self.names.get(method, name))

    def arrange_stored(
        self, frame: pd.DataFrame, path: Path, changed: Collection[str] = ()
    ) -> tuple[pd.DataFrame, dict[str, Look], list[str]]:
        """Return the rows and looks of `arrange`, and notes on names that are ignored.

        The choices were read from the file `path`, except those of the keys `changed`, which are
        options of the command line. A name in the file that belongs to no method is ignored,
        because the methods of a study change, and a report on some of them is no reason to edit
        the file. Raises `ChoiceError` if an option is wrong, and `ReportError` with the file's name
        if values of the file contradict each other.
        """
        presentation, notes = self._without_unknown(_selectors(frame), path, changed)
        try:
            arranged, looks = presentation.arrange(frame)
        except ChoiceError as error:
            if error.keys & set(changed):
                raise
            raise ReportError(f"{path}: {error}; correct the file") from error
        return arranged, looks, notes

    def _without_unknown(
        self, selectors: Mapping[str, str], path: Path, changed: Collection[str]
    ) -> tuple["Presentation", list[str]]:
        """Return the presentation without the names of the file `path` that belong to no method,
        and a note for each of them.

        `selectors` has the selector of each method. Keys in `changed` are not those of the file.
        """
        notes = []
        known: dict[str, Any] = {}  # the names that are left, by key
        for key in METHOD_KEYS:
            if key in changed:
                continue
            words = getattr(self, key)
            unknown = _unknown(words, selectors)
            for word, remark in unknown.items():
                remedy = f"it is ignored; correct {key} in the file, or delete the name there"
                notes.append(f"{path}: {key}: {word} {remark}; {remedy}")
            known_words = [word for word in words if word not in unknown]
            is_mapping = isinstance(words, Mapping)
            known[key] = {word: words[word] for word in known_words} if is_mapping else known_words
            if unknown and key in WITHOUT_NAMES and not known_words:
                notes.append(f"{path}: {key}: none of its names is left, so {WITHOUT_NAMES[key]}")
        return replace(self, **known), notes


def _inches(width: str) -> float:
    """Return a width in inches. Raises `ChoiceError` for a text that is no width, or is out of
    range."""
    text = WIDTHS.get(width, width)
    match = re.fullmatch(r"(\d+\.?\d*) ?(in|cm|mm|pt)", text)
    inches = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not NARROWEST <= inches <= WIDEST:
        raise ChoiceError(
            f"width={width}: must be {', '.join(WIDTHS)}, or from {NARROWEST:g}in to "
            f"{WIDEST:g}in, such as 3.3in, 8.4cm, 84mm or 240pt"
        )
    return inches


def _selectors(frame: pd.DataFrame) -> dict[str, str]:
    """Return the selector of each method of a frame. Methods are sorted.

    A method's name begins with its selector, unless all methods have the same selector.
    """
    methods = by(frame, "method")
    distinct = {selector_of(rows) for rows in methods.values()}
    selectors = {}
    for method in sorted(methods, key=sort_key):
        selectors[method] = method.partition(" ")[0]
        if len(distinct) == 1:
            selectors[method] = selector_of(methods[method]) or selectors[method]
    return selectors


def _unknown(words: Iterable[str], selectors: Mapping[str, str]) -> dict[str, str]:
    """Return the words that name neither a method nor a selector, each with a remark.

    `selectors` has the selector of each method.
    """
    known = dict.fromkeys([*selectors, *selectors.values()])
    unknown = {}
    for word in words:
        if word not in known:
            similar = nearest(str(word), known)
            hint = f"did you mean {similar}? " if similar else ""
            unknown[word] = f"is no method of this report; {hint}there are {', '.join(known)}"
    return unknown


def report_folder(source: Path) -> Path:
    """Return the folder of the report on a folder of runs or on an archive."""
    return (source.parent if source.is_file() else source) / "report"


def read_presentation(folder: Path, changes: Mapping[str, Any]) -> Presentation:
    """Return the choices in the file of a report's `folder` with `changes`, which replace them.

    Without a file, all other choices are the usual ones.

    Raises `ReportError` with the file's name if the file has other keys than `Presentation`, or
    values that are not allowed.
    """
    path = folder / FILE
    values: dict[str, Any] = {}
    if path.exists():
        values = parse_yaml(content_of(path).decode("utf-8", "replace"), str(path)) or {}
        if not (has_kinds(values, KINDS) and values.keys() <= KINDS.keys()):
            raise ReportError(
                f"{path}: must have values of {', '.join(KINDS)} as fedsim report writes them; "
                "correct or delete it"
            )
    unchanged = {key: value for key, value in values.items() if key not in changes}
    try:
        presentation = Presentation(**unchanged)
    except ReportError as error:
        raise ReportError(f"{path}: {error}; correct the file or give the option") from error
    return replace(presentation, **changes)


def presentation_file(presentation: Presentation, folder: Path) -> dict[str, bytes]:
    """Return the content of the file in a report's `folder` by its name.

    The result is empty if all choices are the usual ones, unless an earlier file must be replaced.
    """
    if presentation == Presentation() and not (folder / FILE).exists():
        return {}
    text = yaml.safe_dump(asdict(presentation), sort_keys=False, allow_unicode=True)
    return {FILE: f"{HEAD}{text}".encode()}
