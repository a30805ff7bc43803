"""`fedsim cite`: BibTeX entries of the papers behind choices such as gpfl or scaffold.

The entries stand in assets/references.bib. Its blocks are separated by an empty line; the first
line of a block names the choices that the entry below it belongs to.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from fedsim.commands.dispatch import MistakeError
from fedsim.config.choice_files import ChoiceFiles
from fedsim.config.yaml_files import spelt
from fedsim.core.disk import conf_dir
from fedsim.core.text import nearest

REFERENCES = Path(__file__).parent / "assets" / "references.bib"


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="*", help="choices, such as gpfl or scaffold; without any, all names"
    )


def run(options: Namespace) -> int:
    entries = read_entries()
    if not options.name:
        print("\n".join(sorted(entries)))
        return 0
    cited: list[str] = []
    mistakes = []
    for word in options.name:
        names = word.rpartition("=")[2]  # of selector=gpfl,oort
        for name in names.split(","):
            try:
                cited += find_entries(name, entries)
            except MistakeError as mistake:
                mistakes.append(str(mistake))
    if cited:
        print("\n\n".join(dict.fromkeys(cited)))
    if mistakes:
        raise MistakeError("; ".join(mistakes))
    return 0


def read_entries() -> dict[str, list[str]]:
    """Return the BibTeX entries of each choice by its name."""
    entries: dict[str, list[str]] = {}
    for block in REFERENCES.read_text(encoding="utf-8").strip().split("\n\n"):
        names, _, entry = block.partition("\n")
        for name in names.removeprefix("% ").split():
            entries.setdefault(name, []).append(entry)
    return entries


def find_entries(name: str, entries: dict[str, list[str]]) -> list[str]:
    """Return the entries of a choice, which may be called by a name that the literature uses.

    Raises `MistakeError` with the nearest name if it is unknown.
    """
    name = spelt(name)
    if name in entries:
        return entries[name]
    files = ChoiceFiles([conf_dir()])
    for group in files.groups:
        choice = files.meant(group, name)
        if choice in entries:
            return entries[choice]
    close = nearest(name, entries)
    hint = f"did you mean {close}?" if close else "`fedsim cite` lists all names"
    raise MistakeError(f"{name} has no reference; {hint}")
