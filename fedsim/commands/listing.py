"""`fedsim list`: what can be chosen, with idea, source, cost and what a method asks of clients."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedsim.commands.catalogue import GROUP as LAUNCHERS
from fedsim.commands.catalogue import Catalogue, Choice, Group, size_of
from fedsim.commands.dispatch import entries, entry, wrap
from fedsim.core.errors import FedsimError, nearest

SYMBOLS = (
    "What a method adds comes on top of K models down, K up and the training of the selected. B: bytes of a model, "
    "N: clients, K: selected, d: candidates, C: classes; a reported number is 4 bytes. PBFL is the code of GPFL's "
    "authors."
)
"""What the fields of selectors are about."""
ABOUT_COSTS = ("asks", "bytes", "samples")


class UnknownNameError(FedsimError):
    """A group or a choice that there is not."""

    exit_code = 2


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("group", nargs="?", help="selectors, presets, datasets, models, ...; without it, the groups")
    parser.add_argument("choice", nargs="*", help="choices of the group: all that is known of each, values too")
    parser.add_argument("--config-dir", "-cd", type=Path, metavar="DIR", help="a folder with choices of your own")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(options: Namespace) -> int:
    catalogue = Catalogue(options.config_dir)
    if options.group is None:
        found = [catalogue.group(name, plugins=options.json) for name in catalogue.names]
        if options.json:
            _print_json({g.name: {"about": g.about, "choices": list(g.choices)} for g in found})
        else:
            print(groups_text(found))
        return 0
    group = catalogue.group(find_group(options.group, catalogue.names))
    chosen = [find_choice(name, group) for name in options.choice]
    if options.json:
        _print_json({c.name: as_json(c) for c in chosen or group.choices.values()})
    else:
        print("\n\n".join(details(c, group) for c in chosen) if chosen else group_text(group))
    return 0


def find_group(word: str, names: Iterable[str]) -> str:
    """The group that `word` names: as it is, in the plural, or by the last part of its name."""
    spoken: dict[str, str] = {}
    for name in sorted(names, key=lambda name: name.count("/"), reverse=True):
        for singular in (name, name.rpartition("/")[2]):
            spoken |= dict.fromkeys(
                (singular, f"{singular}s", f"{singular}es", f"{singular.removesuffix('y')}ies"), name
            )
    if word not in spoken:
        close = nearest(word, spoken)
        hint = f"did you mean {spoken[close]}?" if close else f"there are {', '.join(sorted(set(spoken.values())))}"
        raise UnknownNameError(f"{word} is no group of the config; {hint}")
    return spoken[word]


def find_choice(word: str, group: Group) -> Choice:
    if word in group.with_extra and word not in group.choices:
        raise UnknownNameError(f"{word} is not installed; {_install(group.with_extra[word])}")
    if word not in group.choices:
        close = nearest(word, group.choices)
        hint = f"did you mean {close}?" if close else f"`fedsim list {group.name}` has them all"
        raise UnknownNameError(f"{word} is not a choice of {group.name}; {hint}")
    return group.choices[word]


def groups_text(groups: Sequence[Group]) -> str:
    """All groups, each with the number of its choices."""
    more = {LAUNCHERS: ", and those of Hydra and its plugins"}
    rows = [(g.name, f"{g.about} ({len(g.choices)}{more.get(g.name, '')})" if g.about else "") for g in groups]
    return "\n\n".join(["Groups of the config, with their numbers of choices", entries(rows), "fedsim list GROUP"])


def group_text(group: Group) -> str:
    """All choices of a group; where they have costs, those that build on another one are only named below it."""
    costs = any(choice.fields.keys() & set(ABOUT_COSTS) for choice in group.choices.values())
    shown = [choice for choice in group.choices.values() if choice.base is None or not costs]
    column = min(max((len(choice.name) for choice in shown), default=0) + 4, 26)
    lines = []
    for choice in shown:
        lines.append(entry(choice.name, choice.idea, 2, column))
        if costs:
            also = ", ".join(variant.name for variant in group.builds_on(choice.name))
            lines += [wrap(text, 6) for text in (_facts(choice), also and f"also {also}") if text]
        elif runs := _runs(choice):
            lines.append(wrap(runs, column))
    title = f"{group.name}: {group.about}" if group.about else group.name
    hint = f"Choose by {group.name}=NAME. `fedsim list {group.name} NAME` has all about one, its values too."
    missing: dict[str, list[str]] = {}
    for name, extra in group.with_extra.items():
        missing.setdefault(extra, []).append(name)
    listed = ", ".join(f"{', '.join(names)} ({_install(extra)})" for extra, names in missing.items())
    more = [wrap(text) for text in (SYMBOLS if costs else "", listed and f"Not installed: {listed}") if text]
    return "\n\n".join([wrap(title), "\n".join(lines), *more, wrap(hint)])


def _install(extra: str) -> str:
    from fedsim.config.suggestions import install  # takes time: it imports Hydra

    return install(extra)


def _runs(choice: Choice) -> str:
    """The runs that a choice sweeps over by itself."""
    sizes = {key: size for key, size in size_of(choice.sweeps).items() if size > 1}
    if not choice.sweeps:
        return ""
    runs = " x ".join(f"{size} {key.rpartition('.')[2]}" for key, size in sizes.items()) or "1 run"
    rounds = choice.values.get("num_rounds")
    return runs if rounds is None else f"{runs}, {rounds} {'round' if rounds == 1 else 'rounds'}"


def _facts(choice: Choice) -> str:
    """Source, questions to clients and cost in one line."""
    fields = choice.fields
    source = fields.get("source", "")
    adds = f"adds {fields['bytes']}" if "bytes" in fields else ""
    parts = ["" if source.startswith("none") else source, _asked(choice), adds]
    return " · ".join([*filter(None, parts), *([f"needs {fields['needs']}"] if "needs" in fields else [])])


def _asked(choice: Choice) -> str:
    """What it asks of clients: what its file says, else what its class declares."""
    if "asks" in choice.fields:
        return f"asks {choice.fields['asks']}"
    if choice.group == "selector" and choice.code is not None and choice.code.needs is not None:
        return "asks " + (", ".join(need.replace("_", " ") for need in choice.code.needs) or "nothing")
    return ""


def details(choice: Choice, group: Group) -> str:
    """All that is known of a choice."""
    parts = [f"{choice.group}={choice.name}\n" + wrap(choice.head.text or choice.idea, 2)]
    fields = list(choice.fields.items())
    if "asks" not in choice.fields and (asked := _asked(choice)):
        fields.append(("asks", asked.removeprefix("asks ")))
    if fields:
        parts.append(entries(fields))
    if choice.parameters:
        rows = ((f"{p.name}={_shown(p.value)}", p.comment) for p in choice.parameters)
        parts.append("Values\n" + entries(rows, widest=40))
    for title, values in (("Choices", choice.subgroups), ("Sweeps over", choice.sweeps), ("scale=small", choice.small)):
        if values:
            parts.append(f"{title}\n" + entries(((f"{k}={_shown(v)}", "") for k, v in values.items())))
    if variants := group.builds_on(choice.name):
        parts.append("Others that build on it\n" + entries((c.name, c.idea) for c in variants))
    if choice.code is not None and choice.code.docstring:
        parts.append(f"{choice.target}\n" + _indented(choice.code.docstring))
    if set(ABOUT_COSTS) & choice.fields.keys():
        parts.append(wrap(SYMBOLS))
    return "\n\n".join(parts)


def _indented(docstring: str) -> str:
    """A docstring by paragraphs and items of lists, each filled anew."""
    blocks: list[str] = []
    for paragraph in docstring.split("\n\n"):
        items: list[str] = []
        for line in paragraph.splitlines():
            if line.startswith("- ") or not items:
                items.append(line.strip())
            else:
                items[-1] += f" {line.strip()}"
        blocks.append("\n".join(wrap(item, 2, 4 if item.startswith("- ") else 2) for item in items))
    return "\n\n".join(blocks)


def _shown(value: Any) -> str:
    """A value as it is written in YAML."""
    return value if isinstance(value, str) else json.dumps(value)


def as_json(choice: Choice) -> dict[str, Any]:
    """All that is known of a choice, as JSON types."""
    return {
        "idea": choice.idea,
        "text": choice.head.text,
        "fields": dict(choice.fields),
        "builds_on": choice.base.name if choice.base else None,
        "class": choice.target,
        "needs": list(choice.code.needs) if choice.code and choice.code.needs is not None else None,
        "docstring": choice.code.docstring if choice.code else None,
        "values": {p.name: {"value": p.value, "comment": p.comment} for p in choice.parameters},
        "choices": dict(choice.subgroups),
        "sweeps": dict(choice.sweeps),
        "small": dict(choice.small),
    }


def _print_json(content: Any) -> None:
    print(json.dumps(content, indent=1, ensure_ascii=False, default=str))
