"""`fedsim list`: what can be chosen, with idea, source, cost, what a method asks of clients and
needs at the server."""

import json
import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedsim.commands.catalogue import SWEEPS, Catalogue, Choice, Group
from fedsim.commands.dispatch import MistakeError, entries, entry, wrap
from fedsim.config.declared import ranges
from fedsim.config.yaml_files import other_names, spelt
from fedsim.core.disk import conf_dir
from fedsim.core.text import command, nearest

SYMBOLS = (
    "What a method adds comes on top of K models down, K up and the training of the selected. B: bytes of a model, "
    "N: clients, K: selected, d: candidates, C: classes; a reported number is 4 bytes. PBFL is the code of GPFL's "
    "authors."
)
"""What the fields of selectors are about."""
PARENTS = {
    "selector/exploration": "selector=gpfl",
    "selector/sketch": "selector=pncs",
    "selector/threshold": "selector=fedabc server.public_samples=100",
    "selector/valuation": "selector=s_fedavg",
}
"""Words that choose a selector with the group."""
ABOUT_COSTS = {"asks", "bytes", "samples"}


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "group", nargs="?", help="selectors, presets, datasets, models, ...; without it, the groups"
    )
    parser.add_argument(
        "choice", nargs="*", help="choices of the group: all that is known of each, values too"
    )
    parser.add_argument(
        "--config-dir", "-cd", type=Path, metavar="DIR", help="a folder with choices of your own"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(options: Namespace) -> int:
    catalogue = Catalogue(options.config_dir)
    if options.group is None:
        groups = [catalogue.group(name) for name in catalogue.names]
        found = {
            group.name: {"about": group.about, "choices": list(group.choices)} for group in groups
        }
        page = groups_text(groups)
    elif named := find_everywhere([options.group, *options.choice], catalogue):
        found = {f"{group.name}={choice.name}": as_json(choice) for group, choice in named}
        page = "\n\n".join(details(choice, group) for group, choice in named)
    else:
        group = catalogue.group(find_group(options.group, catalogue.names))
        chosen = [
            find_choice(catalogue.files.meant(group.name, name), group) for name in options.choice
        ]
        found = {choice.name: as_json(choice) for choice in chosen or group.choices.values()}
        page = "\n\n".join(details(choice, group) for choice in chosen) or group_text(group)
    print(json.dumps(found, indent=1, ensure_ascii=False, default=str) if options.json else page)
    return 0


def find_group(word: str, names: Iterable[str]) -> str:
    """The group that `word` names: as it is, in the plural, or by the last part of its name."""
    spoken: dict[str, str] = {}
    for name in sorted(names, key=lambda name: name.count("/"), reverse=True):
        for one in (name, name.rpartition("/")[2]):
            spoken |= dict.fromkeys(
                (one, f"{one}s", f"{one}es", f"{one.removesuffix('y')}ies"), name
            )
    word = word.lower()
    if word not in spoken:
        close = nearest(word, spoken)
        hint = f"did you mean {spoken[close]}?" if close else "`fedsim list` has them all"
        raise MistakeError(f"{word} is no group of the config; {hint}")
    return spoken[word]


def find_everywhere(words: Sequence[str], catalogue: Catalogue) -> list[tuple[Group, Choice]]:
    """The choices of any group that `words` name, by a name of the literature if by no other; none
    where the first word names a group, or one of them nothing."""
    try:
        find_group(words[0], catalogue.names)
        return []
    except MistakeError:
        every = [
            (group, c)
            for group in map(catalogue.group, catalogue.names)
            for c in group.choices.values()
        ]
    found = [
        [(group, one) for group, one in every if spelt(one.name) == spelt(word)]
        or [(group, one) for group, one in every if spelt(word) in other_names(one.fields)]
        for word in words
    ]
    return [one for several in found for one in several] if all(found) else []


def find_choice(word: str, group: Group) -> Choice:
    if word not in group.choices:
        close = nearest(word, group.choices)
        hint = f"did you mean {close}?" if close else f"`fedsim list {group.name}` has them all"
        raise MistakeError(f"{word} is not a choice of {group.name}; {hint}")
    return group.choices[word]


def groups_text(groups: Sequence[Group]) -> str:
    rows = [(group.name, f"{group.about} ({len(group.choices)})") for group in groups]
    return "\n\n".join(
        ["Groups of the config, with their numbers of choices", entries(rows), "fedsim list GROUP"]
    )


def group_text(group: Group) -> str:
    """All choices of a group; where they have costs, those that build on another one are only named
    below it."""
    costs = any(choice.fields.keys() & ABOUT_COSTS for choice in group.choices.values())
    shown = [choice for choice in group.choices.values() if choice.base is None or not costs]
    column = min(max((len(choice.name) for choice in shown), default=0) + 4, 26)
    lines = []
    for choice in shown:
        lines.append(entry(choice.name, choice.idea, 2, column))
        if costs:
            variants = ", ".join(variant.name for variant in group.builds_on(choice.name))
            lines += [
                wrap(text, 6)
                for text in (_facts(choice), variants and f"variants {variants}")
                if text
            ]
        elif "also" in choice.fields:
            lines.append(wrap(f"also {choice.fields['also']}", column))
    parts = [
        wrap(f"{group.name}: {group.about}" if group.about else group.name),
        "\n".join(lines),
        wrap(SYMBOLS) if costs else "",
        wrap(
            f"Choose by {group.name}=NAME. `fedsim list {group.name} NAME` has all about one, its values too."
        ),
    ]
    return "\n\n".join(filter(None, parts))


def _facts(choice: Choice) -> str:
    """Source, questions to clients, samples at the server and cost in one line."""
    fields = {"source": "", **choice.fields}
    if fields.get("server") == "nothing":
        del fields["server"]
    words = {
        "asks": "asks ",
        "server": "at the server ",
        "bytes": "adds ",
        "state": "keeps ",
        "needs": "needs ",
        "also": "also ",
    }
    source = [] if fields["source"].startswith("none") else [fields["source"]]
    return " · ".join(
        filter(None, [*source, *(f"{word}{fields[k]}" for k, word in words.items() if k in fields)])
    )


def details(choice: Choice, group: Group) -> str:
    """All that is known of a choice."""
    made = {"Choices": choice.file.subgroups, "Sweeps over": choice.mapping(*SWEEPS)}
    made["scale=small"] = choice.mapping("small")
    limits = ranges(choice.target or "")
    told = [
        (name, value, comment, limits.get(name.rpartition(".")[2], ""))
        for name, value, comment in choice.values
    ]
    sections = {
        "Values": [
            (f"{k}={_shown(v)}", "; ".join(filter(None, (comment, limit))))
            for k, v, comment, limit in told
        ],
        **{
            title: [(f"{key}={_shown(value)}", "") for key, value in found.items()]
            for title, found in made.items()
        },
        "Variants": [(other.name, other.idea) for other in group.builds_on(choice.name)],
    }
    parts = [
        f"{group.name}={choice.name}\n" + wrap(choice.text or choice.idea, 2),
        entries(choice.fields.items()),
    ]
    parts += [f"{title}\n{entries(rows, widest=40)}" for title, rows in sections.items() if rows]
    if choice.docstring:
        paragraphs = re.split(
            r"(\n\n|\n(?=- |\d\. ))", choice.docstring
        )  # and items of lists, each filled anew
        filled = [
            p
            if p.isspace() or p.startswith("    ")  # formulas stay as they are
            else wrap(" ".join(p.split()), 2, 4 if re.match(r"-|\d\.", p) else 2)
            for p in paragraphs
        ]
        parts.append(f"{choice.target}\n" + "".join(filled))
    parts.append(f"File\n  {choice.file.path}\n\nTo choose it\n  {_line(choice, group)}")
    if ABOUT_COSTS & choice.fields.keys():
        parts.append(wrap(SYMBOLS))
    return "\n\n".join(filter(None, parts))


def _line(choice: Choice, group: Group) -> str:
    """A command with it, to copy; without what has no default, such as a path."""
    needed = [f"{choice.fields['needs']}=100"] if "needs" in choice.fields else []
    folder = choice.file.path.parents[group.name.count("/") + 1]
    if folder != conf_dir():
        needed += ["--config-dir", os.path.relpath(folder)]
    return command(
        "fedsim", *PARENTS.get(group.name, "").split(), f"{group.name}={choice.name}", *needed
    )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def as_json(choice: Choice) -> dict[str, Any]:
    return {
        "idea": choice.idea,
        "text": choice.text,
        "fields": dict(choice.fields),
        "builds_on": choice.base.name if choice.base else None,
        "class": choice.target,
        "docstring": choice.docstring or None,
        "values": {
            name: {"value": value, "comment": comment} for name, value, comment in choice.values
        },
        "choices": dict(choice.file.subgroups),
        "sweeps": dict(choice.mapping(*SWEEPS)),
        "small": dict(choice.mapping("small")),
    }
