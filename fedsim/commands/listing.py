"""`fedsim list`: print what can be chosen, with its idea, source and costs."""

import json
import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedsim.commands.catalogue import Catalogue, Choice, Group
from fedsim.commands.dispatch import MistakeError
from fedsim.commands.layout import entries, entry, wrap
from fedsim.config.declared import ranges
from fedsim.config.yaml_files import other_names, spelt
from fedsim.core.disk import conf_dir
from fedsim.core.text import command, nearest

SYMBOLS = (
    "What a method adds comes on top of K models down, K up and the training of the selected. B: "
    "bytes of a model, N: clients, K: selected, d: candidates, C: classes; a reported number is 4 "
    "bytes. PBFL is the code of GPFL's authors."
)
"""Explanation of the symbols in the fields of selectors."""
PARENTS = {
    "selector/exploration": "selector=gpfl",
    "selector/sketch": "selector=pncs",
    "selector/threshold": "selector=fedabc server.public_samples=100",
    "selector/valuation": "selector=s_fedavg",
}
"""Overrides that choose a selector with a part from this config group."""
COST_FIELDS = {"asks", "bytes", "samples"}
"""Fields that only choices with costs have, such as selectors."""
FACTS = {
    "source": "",
    "asks": "asks ",
    "server": "at the server ",
    "sees": "server sees ",
    "bytes": "adds ",
    "state": "keeps ",
    "needs": "needs ",
    "also": "also called ",
}
"""Fields that are shown in one line, each with the words before its value."""


def arguments(parser: ArgumentParser) -> None:
    group_help = "selectors, presets, datasets, models, ...; without it, the groups"
    parser.add_argument("group", nargs="?", help=group_help)
    choice_help = "choices of the group: all that is known of each, values too"
    parser.add_argument("choice", nargs="*", help=choice_help)
    folder_help = "a folder with choices of your own"
    parser.add_argument("--config-dir", "-cd", type=Path, metavar="DIR", help=folder_help)
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(options: Namespace) -> int:
    catalogue = Catalogue(options.config_dir)
    content: dict[str, Any] = {}
    pages = []
    words = [] if options.group is None else [options.group, *options.choice]
    pairs = find_everywhere(words, catalogue)
    if not words:
        groups = [catalogue.group(name) for name in catalogue.names]
        pages.append(groups_text(groups))
        for group in groups:
            content[group.name] = {"about": group.about, "choices": list(group.choices)}
    elif pairs:
        for group, choice in pairs:
            pages.append(details(choice, group))
            content[f"{group.name}={choice.name}"] = as_json(choice)
    else:
        group = catalogue.group(find_group(options.group, catalogue.names))
        names = [catalogue.files.meant(group.name, name) for name in options.choice]
        choices = [find_choice(name, group) for name in names]
        pages = [details(choice, group) for choice in choices] or [group_text(group)]
        for choice in choices or group.choices.values():
            content[choice.name] = as_json(choice)
    if options.json:
        print(json.dumps(content, indent=1, ensure_ascii=False, default=str))
    else:
        print("\n\n".join(pages))
    return 0


def find_group(word: str, names: Iterable[str]) -> str:
    """Return the group that `word` names: its name, its plural, or the last part of its name.

    Raises `MistakeError` if there is none.
    """
    groups = _groups_by_word(names)
    word = word.lower()
    if word not in groups:
        close = nearest(word, groups)
        hint = f"did you mean {groups[close]}?" if close else "`fedsim list` has them all"
        raise MistakeError(f"{word} is no group of the config; {hint}")
    return groups[word]


def _groups_by_word(names: Iterable[str]) -> dict[str, str]:
    """Return the names of groups by the words for them."""
    groups: dict[str, str] = {}
    # Inner groups come first, so that an outer group with the same last part replaces them.
    for name in sorted(names, key=lambda name: name.count("/"), reverse=True):
        for singular in (name, name.rpartition("/")[2]):
            for form in ("", "s", "es"):
                groups[singular + form] = name
            groups[f"{singular.removesuffix('y')}ies"] = name
    return groups


def find_everywhere(words: Sequence[str], catalogue: Catalogue) -> list[tuple[Group, Choice]]:
    """Return the choices that `words` name, from all groups.

    A word that is the name of no choice may be another name of choices in the literature. Returns
    [] if the first word names a group, or if a word names nothing.
    """
    if not words or words[0].lower() in _groups_by_word(catalogue.names):
        return []
    pairs = []
    for name in catalogue.names:
        group = catalogue.group(name)
        pairs += [(group, choice) for choice in group.choices.values()]
    matches = []
    for word in map(spelt, words):
        named = [(group, choice) for group, choice in pairs if spelt(choice.name) == word]
        called = [(group, choice) for group, choice in pairs if word in other_names(choice.fields)]
        if not named and not called:
            return []
        matches += named or called
    return matches


def find_choice(word: str, group: Group) -> Choice:
    """Return the choice that `word` names. Raises `MistakeError` if there is none."""
    if word not in group.choices:
        close = nearest(word, group.choices)
        hint = f"did you mean {close}?" if close else f"`fedsim list {group.name}` has them all"
        raise MistakeError(f"{word} is not a choice of {group.name}; {hint}")
    return group.choices[word]


def groups_text(groups: Sequence[Group]) -> str:
    rows = [(group.name, f"{group.about} ({len(group.choices)})") for group in groups]
    title = "Groups of the config, with their numbers of choices"
    return "\n\n".join([title, entries(rows), "fedsim list GROUP"])


def group_text(group: Group) -> str:
    """Return a page with all choices of a group.

    In a group whose choices have costs, a choice that builds on another one is only named below the
    other.
    """
    choices = list(group.choices.values())
    has_costs = any(choice.fields.keys() & COST_FIELDS for choice in choices)
    if has_costs:
        choices = [choice for choice in choices if choice.base is None]
    column = min(max((len(choice.name) for choice in choices), default=0) + 4, 26)
    lines = []
    for choice in choices:
        lines.append(entry(choice.name, choice.idea, 2, column))
        if has_costs:
            if facts := _facts(choice):
                lines.append(wrap(facts, 6))
            if variants := group.builds_on(choice.name):
                lines.append(wrap(f"variants {', '.join(v.name for v in variants)}", 6))
        elif "also" in choice.fields:
            lines.append(wrap(f"also called {choice.fields['also']}", column))
    title = f"{group.name}: {group.about}" if group.about else group.name
    parts = [wrap(title), "\n".join(lines)]
    if has_costs:
        parts.append(wrap(SYMBOLS))
    usage = f"`fedsim list {group.name} NAME` has all about one, its values too."
    parts.append(wrap(f"Choose by {group.name}=NAME. {usage}"))
    return "\n\n".join(parts)


def _facts(choice: Choice) -> str:
    """Return the `FACTS` of a choice in one line, without a source `none` and a server's
    `nothing`."""
    texts = []
    for key, words in FACTS.items():
        text = choice.fields.get(key)
        if not text or (key, text) == ("server", "nothing"):
            continue
        if key != "source" or not text.startswith("none"):
            texts.append(f"{words}{text}")
    return " · ".join(texts)


def details(choice: Choice, group: Group) -> str:
    """Return a page with all that is known of a choice."""
    limits = ranges(choice.target)
    values = []
    for key, value, comment in choice.values:
        limit = limits.get(key.rpartition(".")[2], "")
        values.append((f"{key}={_shown(value)}", "; ".join(filter(None, [comment, limit]))))
    variants = [(variant.name, variant.idea) for variant in group.builds_on(choice.name)]
    sections = {
        "Values": values,
        "Choices": _assignments(choice.file.included),
        "Sweeps over": _assignments(choice.sweeps),
        "scale=small": _assignments(choice.small),
        "Variants": variants,
    }
    parts = [f"{group.name}={choice.name}\n{wrap(choice.text or choice.idea, 2)}"]
    if choice.fields:
        parts.append(entries(choice.fields.items()))
    for title, rows in sections.items():
        if rows:
            parts.append(f"{title}\n{entries(rows, widest=40)}")
    if choice.docstring:
        parts.append(f"{choice.target}\n{_filled(choice.docstring)}")
    parts.append(f"File\n  {choice.file.path}\n\nTo choose it\n  {_command(choice, group)}")
    if COST_FIELDS & choice.fields.keys():
        parts.append(wrap(SYMBOLS))
    return "\n\n".join(parts)


def _assignments(values: Any) -> list[tuple[str, str]]:
    return [(f"{key}={_shown(value)}", "") for key, value in values.items()]


def _filled(docstring: str) -> str:
    """Return a docstring with each paragraph, and each item of a list, filled to the page's width.

    Formulas, which are indented, stay as they are.
    """
    texts = []
    for paragraph in re.split(r"(\n\n|\n(?=- |\d\. ))", docstring):
        if not paragraph.isspace() and not paragraph.startswith("    "):
            hanging = 4 if re.match(r"-|\d\.", paragraph) else 2
            paragraph = wrap(" ".join(paragraph.split()), 2, hanging)
        texts.append(paragraph)
    return "".join(texts)


def _command(choice: Choice, group: Group) -> str:
    """Return a command that makes the choice.

    It lacks values that the user must know, such as a path. But it has a number of samples where
    the choice `needs` them.
    """
    words = [*PARENTS.get(group.name, "").split(), f"{group.name}={choice.name}"]
    if "needs" in choice.fields:
        words.append(f"{choice.fields['needs']}=100")
    folder = choice.file.path.parents[group.name.count("/") + 1]
    if folder != conf_dir():
        words += ["--config-dir", os.path.relpath(folder)]
    return command("fedsim", *words)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def as_json(choice: Choice) -> dict[str, Any]:
    values = {key: {"value": value, "comment": text} for key, value, text in choice.values}
    return {
        "idea": choice.idea,
        "text": choice.text,
        "fields": dict(choice.fields),
        "builds_on": choice.base.name if choice.base else None,
        "class": choice.target or None,
        "docstring": choice.docstring or None,
        "values": values,
        "choices": dict(choice.file.included),
        "sweeps": dict(choice.sweeps),
        "small": dict(choice.small),
    }
