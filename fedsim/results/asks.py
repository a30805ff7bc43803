"""The class of a method: what it asks of clients before the choice."""

import re
from collections.abc import Mapping, Sequence
from functools import cache

from fedsim.core.disk import conf_dir
from fedsim.results.groups import Group

ALL_TRAIN, UNKNOWN = "everybody trains", "unknown"
CLASSES: Mapping[str, str] = {
    "updates": r"gradient|update of|soft labels|(^|; )training(;|$)",
    "label counts": r"label.counts",
    "losses": r"loss",
    "speeds": r"seconds|timed|resources|response",
    "nothing": r"^nothing",
    "something else": r".",
}
"""What a class is told by: of several the first."""


def class_of(groups: Sequence[Group]) -> str:
    """The class of a method with these groups: by the signals that its runs tell (`asks` of summary.json), or by the
    file of the shipped choice for runs of earlier versions."""
    runs = [run for group in groups for run in group.complete]
    if all((run.columns["participation_ratio"] == 1).all() for run in runs):
        return ALL_TRAIN
    text = runs[0].summary.get("asks") or shipped(runs[0].choices.get("selector", ""))
    return next((name for name, pattern in CLASSES.items() if re.search(pattern, str(text))), UNKNOWN)


@cache
def shipped(choice: str) -> str:
    """What a shipped selector asks for, as its file or that of the one that it builds on says; empty if none does."""
    path = conf_dir() / "selector" / f"{choice}.yaml"
    text = path.read_text(encoding="utf-8") if re.fullmatch(r"\w+", choice) and path.is_file() else ""
    told, base = (re.search(line, text, re.MULTILINE) for line in (r"^#\s+asks:\s+(.+)$", r"^\s+- (\w+)$"))
    return told[1] if told else shipped(base[1]) if base else ""
