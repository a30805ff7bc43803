"""The presentation of a report's methods: their selection, names, order, reference and style.

The choices are kept in the report's folder, in `report.yaml`, where the next report reads them.
Users may edit the values in the file. A report rewrites it, without comments of the user.
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
"""The effect of a list without names."""
WIDTHS = {"column": "3.5in", "page": "7.16in"}
"""Widths of a column and of the text of a two-column page (IEEE)."""
UNITS = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72}
"""Units of widths, in inches. A point (pt) is 1/72 inch, as in PDF."""
NARROWEST, WIDEST = 1.5, 40.0
"""Limits of widths in inches."""


class ChoiceError(ReportError):
    """Choices are wrong, such as a name of no method. `keys` are theirs.

    The exit code is 2, that of wrong options. If values in report.yaml are wrong, callers raise a
    `ReportError` instead, which names the file.
    """

    exit_code = 2

    def __init__(self, message: str, *keys: str) -> None:
        super().__init__(message)
        self.keys = set(keys)


@dataclass(frozen=True)
class Presentation:
    """The choices for a report.

    They name a method as a report without choices does, before `names` gives it another name. The
    name of a selector stands for all of its methods.

    Attributes:
        names: Other names of methods, by their usual names.
        order: The methods that come first, in this order.
        only: The methods that the report has; all if it is empty.
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
            words = [*getattr(self, key)]
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

        The looks are in the order of legends. Raises `ChoiceError` for names of no method, for two
        methods with the same name, and if `only` leaves out all references.
        """
        # 1. Methods in the order of legends.
        selectors = _selectors(frame)
        for key in METHOD_KEYS:
            self._check_words(key, selectors)
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
        # 2. Rows: by setting as before, and then by method.
        frame = frame[frame["method"].isin(shown)].copy()
        if self.order:
            settings = list(dict.fromkeys(frame["setting"]))
            setting_places = frame["setting"].map(settings.index)
            method_places = frame["method"].map(ordered.index)
            frame = frame.iloc[np.lexsort((method_places, setting_places))]  # the last key leads
        if self.reference:
            references = self._references(shown, selectors)
            frame["is_reference"] = frame["method"].isin(references)
        # 3. Looks and names. A look is that of the selector, whatever the method's new name is.
        lines = by(frame, "method")
        looks = make_looks({names[method]: selector_of(lines[method]) or "" for method in ordered})
        if self.names:
            frame["method"] = frame["method"].map(names)
            frame["group"] = (frame["setting"] + " " + frame["method"]).str.strip()
        return frame, looks

    def _check_words(self, key: str, selectors: Mapping[str, str]) -> None:
        """Raise `ChoiceError` if a word of a choice names no method. `selectors` has the selector
        of each method."""
        for word, remark in _unknown(getattr(self, key), selectors).items():
            raise ChoiceError(f"{key}: {word} {remark}", key)

    def _references(self, shown: Sequence[str], selectors: Mapping[str, str]) -> list[str]:
        """Return the methods among those `shown` that `reference` names, by their selector or name.

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
        """Return the place of a method, or otherwise of its selector, in `order`. Methods that are
        not there come after all others."""
        for word in (method, selector):
            if word in self.order:
                return list(self.order).index(word)
        return len(self.order)

    def rename(self, method: str) -> str:
        """Return the name that a method, or its selector, is to have in the report."""
        selector, space, rest = method.partition(" ")
        name = f"{self.names.get(selector, selector)}{space}{rest}"
        return str(self.names.get(method, name))

    def arrange_stored(
        self, frame: pd.DataFrame, path: Path, changed: Collection[str] = ()
    ) -> tuple[pd.DataFrame, dict[str, Look], list[str]]:
        """Return the rows and looks of `arrange`, without an error for unknown names in a file.

        The choices were read from the file `path`, except the keys `changed`, which are options of
        the command line. The methods of a study change, and a report on some of them is no reason
        to edit the file. So a name there that belongs to no method is ignored, and the third value
        has a note on it. Raises `ChoiceError` if an option is wrong, and `ReportError` with the
        file's name if values of the file contradict each other.
        """
        selectors = _selectors(frame)
        for key in METHOD_KEYS:
            if key in changed:
                self._check_words(key, selectors)
        presentation, notes = self._without_unknown(frame, path, changed)
        try:
            arranged, looks = presentation.arrange(frame)
        except ChoiceError as error:
            if error.keys & set(changed):
                raise
            raise ReportError(f"{path}: {error}; correct the file") from error
        return arranged, looks, notes

    def _without_unknown(
        self, frame: pd.DataFrame, path: Path, changed: Collection[str]
    ) -> tuple["Presentation", list[str]]:
        """Return the presentation without the names in the file `path` that belong to no method of
        the frame, and a note for each."""
        selectors = _selectors(frame)
        notes = []
        known: dict[str, Any] = {}  # what is left of each of `METHOD_KEYS`
        for key in METHOD_KEYS:
            words = getattr(self, key)
            unknown = {} if key in changed else _unknown(words, selectors)
            for word, remark in unknown.items():
                remedy = f"it is ignored; correct {key} in the file, or delete the name there"
                notes.append(f"{path}: {key}: {word} {remark}; {remedy}")
            if isinstance(words, Mapping):
                known[key] = {word: words[word] for word in words if word not in unknown}
            else:
                known[key] = [word for word in words if word not in unknown]
            if unknown and key in WITHOUT_NAMES and not known[key]:
                notes.append(f"{path}: {key}: none of its names is left, so {WITHOUT_NAMES[key]}")
        return replace(self, **known), notes


def _inches(width: str) -> float:
    """Return a width in inches. Raises `ChoiceError` if it is no width, or out of range."""
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
    """Return the selector of each method of a frame; methods are sorted.

    A method's name begins with its selector, unless all methods have the same one.
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
    """Return the choices in the file of a report's `folder`, if there is one, with `changes`.

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
    kept = {key: value for key, value in values.items() if key not in changes}
    try:
        presentation = Presentation(**kept)
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
