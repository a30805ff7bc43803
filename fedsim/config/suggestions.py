"""The nearest valid spelling of what a command line got wrong; inside of
`fedsim.config.compose.search_path`."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.types import Override

from fedsim.config.build import unknown
from fedsim.config.choice_files import ChoiceFiles
from fedsim.config.sources import loader, on_search_path
from fedsim.config.words import options, without_choice
from fedsim.core.configs import SHORTHANDS, all_keys, has_key
from fedsim.core.disk import conf_dir
from fedsim.core.errors import Problem, rule
from fedsim.core.text import nearest

OPTIONAL = ("preset", "cell")
"""Config groups of which no choice need be made: `preset=null`."""
UNKNOWN_KEY = "is not a known key"
SYMBOLS = {
    "K": "cohort_size",
    "N": "num_clients",
    "T": "num_rounds",
    "E": "local.epochs",
    "B": "local.batch_size",
    "eta": "optimizer.lr",
    "d": "selector.num_candidates (selector=power_of_choice)",
    "Q": "selector.queue_length (selector=pncs)",
    "alpha": "selector.exploration.value (selector=gpfl selector/exploration=fixed)",
    "rho": "selector.exploration.rho (selector=gpfl)",
    "tau": "selector.threshold.start (selector=fedabc)",
    "lambda": "selector.threshold.strength (selector=fedabc selector/threshold=lambda)",
    "beta": "optimizer.momentum",
}
"""The words to type for the symbols of papers."""


def mistaken_choice(override: Override) -> Problem | None:
    """The problem of a choice that its group does not have, or of none where one must be made."""
    group, choice = override.key_or_group, cast(Any, override.value())
    if (
        not options(group)
        or override.is_delete()
        or (group in OPTIONAL and without_choice(override))
    ):
        return None
    if group == "hydra/sweeper":
        remedy = "sweep over values, seed=0,1,2, or search in them: fedsim search 'optimizer.lr=interval(0.01,0.3)'"
        return rule(choice == "basic", group, choice, "is not supported", remedy)
    if isinstance(choice, str) and (".." in choice.split("/") or choice.startswith("/")):
        return Problem(group, choice, "must not lead out of conf/")
    if isinstance(choice, str) and loader().repository.config_exists(f"{group}/{choice}"):
        return None
    is_name = isinstance(choice, str) and re.fullmatch(
        r"[\w.-]{1,60}", choice
    )  # no folder or pattern, nor too long
    meant = (_named_otherwise(group, choice) or _elsewhere(group, choice)) if is_name else None
    remedy = meant or unknown(str(choice), options(group)).remedy
    if group == "dataset" and remedy.startswith("known"):
        remedy = f"images in folders: dataset=image_folder; a set of Hugging Face: dataset=parquet; {remedy}"
    return Problem(group, choice, f"is not a choice of conf/{group}/", remedy)


def _named_otherwise(group: str, choice: str) -> str:
    """The several choices of the group that the literature calls `choice`, with what tells them
    apart; "" where there are none."""
    names = on_search_path().called(group, choice)
    rows = [f"{name}: {idea}" for name, idea in names.items()]
    return "\n      ".join(["did you mean one of these?", *rows]) if rows else ""


def _elsewhere(group: str, choice: str) -> str | None:
    """What to do where another group has `choice`, or a folder of the user's for which --config-dir
    was forgotten."""
    files = on_search_path()
    forgotten = [
        folder
        for folder in map(Path, (".", "conf"))
        if (folder / group / f"{choice}.yaml").is_file()
    ]
    if forgotten and len(files.folders) == 1:
        return f"{forgotten[0] / group / choice}.yaml is there: add --config-dir {forgotten[0]}"
    groups = [
        one for one in files.groups if (conf_dir() / one).is_dir() and not one.startswith("hydra/")
    ]
    found = [f"{one}={choice}" for one in groups if files.has(one, choice)]
    # none is typed to leave a part out, and not for another group's
    return f"did you mean {' or '.join(found)}?" if found and choice != "none" else None


def unknown_key(config: Mapping[str, Any], path: str, files: ChoiceFiles) -> Problem:
    """The problem of a key that is none of `config`'s, or that no part takes: it may be of a choice
    that was not made, misspelt, or elsewhere in the config."""
    prefix, _, part = path.rpartition(".")
    node: Any = config
    while prefix and not has_key(config, prefix):
        prefix, _, part = prefix.rpartition(".")
    for above in prefix.split(".") if prefix else ():
        node = node[above]
    names = (
        [str(n) for n in node if n not in ("_target_", "hydra", part)]
        if isinstance(node, Mapping)
        else []
    )
    near = unknown(part, names, prefix)
    if takers := _takers(config, path, files):
        others = [f"did you mean {SYMBOLS[part]}?"] if path in SHORTHANDS else []
        others += [near.remedy] if nearest(part, names) else []
        return Problem(path, ..., UNKNOWN_KEY, "; or ".join([f"it is a key of {takers}", *others]))
    meant = [] if prefix else _places(config, path, files)
    symbol = SYMBOLS.get(path.rpartition(".")[2])
    if symbol and symbol.split()[0] not in [place.split()[0] for place in meant]:
        meant.append(symbol)
    if meant:
        return Problem(path, ..., UNKNOWN_KEY, f"did you mean {' or '.join(meant)}?")
    return near


def _takers(config: Mapping[str, Any], key: str, files: ChoiceFiles) -> str:
    """The choices that have `key`, as `selector=gpfl|pncs`; "" if none has. They are of the
    innermost group that `config` has a place for."""
    groups = sorted(files.keys.get(key, {}).items())  # the outer ones first
    there = [one for one in groups if has_key(config, one[0].replace("/", "."))]
    group, names = (there[-1:] or groups[:1] or [("", [])])[0]
    return f"{group}={'|'.join(names)}" if names else ""


def _places(config: Mapping[str, Any], path: str, files: ChoiceFiles) -> list[str]:
    """The groups and keys that end with `path`, those of choices that are not made only if there
    are no others."""
    own = {key: value for key, value in config.items() if key not in ("hydra", "small", "debug")}
    groups = [
        group
        for group in files.groups
        if group.endswith(f"/{path}") and not group.startswith("hydra/")
    ]
    there = [
        key
        for key in all_keys(own)
        if key.endswith(f".{path}") and key.replace(".", "/") not in groups
    ]
    if groups or there or path.startswith("_"):
        return [*groups, *there]
    elsewhere = [
        key
        for key in sorted(files.keys)
        if key.endswith(f".{path}") and not key.startswith("hydra.")
    ]
    return [f"{key} ({_takers(config, key, files)})" for key in elsewhere]
