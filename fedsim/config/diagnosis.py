"""One composition by Hydra, which stops at its first mistake, and what a preset and `scale` imply
beyond its values.

To be called inside `fedsim.config.compose.search_path`.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedsim.config.build import Gathered, unknown
from fedsim.config.choice_files import ChoiceFile, ChoiceFiles, no_package
from fedsim.config.hydra_node import check_node, check_words
from fedsim.config.sources import on_search_path
from fedsim.config.suggestions import mistaken_choice
from fedsim.config.words import (
    BAD_INPUT,
    as_hydra_reads,
    first_line,
    key_of,
    parse,
    parse_one,
    typed_in,
    words_of,
)
from fedsim.core.errors import ConfigError, Problem, check, rule

OWN_KEYS = ("scale", "small", "debug")
"""Top-level keys that are about the command line, and not in a run's config."""
SCALES = ("full", "small", "debug")


def choices_of(config: DictConfig) -> dict[str, str]:
    """The choice made in each config group but Hydra's own, and the scale."""
    made = {
        k: v
        for k, v in config.hydra.runtime.choices.items()
        if not k.startswith("hydra/") and v is not None
    }
    return {**made, "scale": str(config.get("scale", "full"))}


def run_name(choices: Mapping[str, str]) -> str:
    """The preset (`default` without one), with the size behind it where that is not the full
    one."""
    preset, scale = Path(choices.get("preset", "default")).name, choices["scale"]
    return preset if scale == "full" else f"{preset}_{scale}"


def plain(config: DictConfig, choices: Mapping[str, str]) -> dict[str, Any]:
    """The job's part of a composed config as plain containers, interpolations resolved, and with a
    name."""
    own = OmegaConf.masked_copy(config, [str(k) for k in config if k not in ("hydra", *OWN_KEYS)])
    try:
        resolved: Any = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            [Problem(str(error.full_key or "config"), ..., first_line(error))]
        ) from error
    if resolved.get("name", "") is None:
        resolved["name"] = run_name(choices)
    return {str(k): v for k, v in resolved.items()}


def words_of_scale(config: DictConfig, given: Sequence[Override]) -> list[str]:
    """What `scale` changes, as overrides: the preset's `small`, and for `debug` that and what is
    under `debug`; but not keys that are `given`, nor those of a group whose choice is. None where
    the preset or the scale is swept over, as each job then has its own. Raises `ConfigError` where
    there is no such size."""
    scale, small = config.get("scale", "full"), config.get("small") or {}
    scales = SCALES if "debug" in config else SCALES[:2]
    check(rule(scale in scales, "scale", scale, f"must be one of {', '.join(scales)}"))
    if scale == "full" or any(
        o.is_sweep_override() and o.key_or_group in ("preset", "scale") for o in given
    ):
        return []
    remedy = "it is for presets with a `small`"
    check(rule(bool(small) or scale != "small", "scale", scale, "has no effect here", remedy))
    changes = {**small, **config["debug"]} if scale == "debug" else small
    keys = set(map(key_of, given))
    places = {key: {str(key).lstrip("~"), *groups_above(str(key).lstrip("~"))} for key in changes}
    return words_of({key: value for key, value in changes.items() if places[key].isdisjoint(keys)})


def groups_above(key: str) -> list[str]:
    """The groups that a dotted key may belong to: a, a/b of a.b.c."""
    parts = key.split(".")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def compose_one(overrides: Sequence[str], config_name: str = "config") -> DictConfig:
    """The config that `overrides` make, with Hydra's own node. Raises `ConfigError` with the first
    problem."""
    parsed = parse(overrides)
    check_words(parsed)
    check(*map(mistaken_choice, parsed))
    try:
        config = compose(
            config_name, overrides=[as_hydra_reads(o) for o in parsed], return_hydra_config=True
        )
    except ConfigError:  # of a file that Hydra reads
        raise
    except BAD_INPUT as error:
        raise ConfigError(_causes(error, parsed)) from error
    check_node(config)
    return config


def _causes(error: Exception, parsed: Sequence[Override]) -> list[Problem]:
    """The problems of the files and words that an error of Hydra is about, at least one."""
    files = on_search_path()
    in_files = Gathered()
    for group, choice in [(o.key_or_group, str(o.value())) for o in parsed]:
        if files.has(group, choice):
            in_files.add(*_mistaken_defaults(files.read(group, choice), files))
    if in_files.problems:
        return in_files.problems
    text = str(error)
    word = next(
        (o for o in parsed if re.search(rf"(?<![\w./]){re.escape(o.key_or_group)}(?![\w/])", text)),
        None,
    )
    if word is None:
        return [Problem("config", ..., first_line(error))]
    key, typed = word.key_or_group, word.input_line or ""
    parent = key.rpartition("/")[0]
    if parent and "No match in the defaults list" in text:
        rule, remedy = (
            f"has no effect: the choice of {parent} has no such group",
            f"choose a {parent} that has one",
        )
    elif typed.startswith("+"):
        rule, remedy = (
            "is a key already, and + adds one",
            f"leave out the +: {shlex.quote(typed.lstrip('+'))}",
        )
    else:
        rule, remedy = first_line(error), ""
    return [Problem(key, typed_in(word) or ..., rule, remedy)]


def _mistaken_defaults(file: ChoiceFile, files: ChoiceFiles) -> Iterator[Problem]:
    """The problems of the entries of a file's defaults list that choose in groups of the config's
    top."""
    for entry in file.entries:
        for key, choice in entry.items() if isinstance(entry, dict) else ():
            group = str(key).split(" ")[-1].lstrip("/")
            place = f"{file.path}: `- {key}: {choice}`"
            if group not in files.groups:
                if str(key).startswith("override /"):
                    yield replace(
                        unknown(group, files.groups),
                        key=place,
                        rule="is about no group that there is",
                    )
            elif "/" not in group and key != f"override /{group}":
                yield Problem(
                    place,
                    ...,
                    "does not replace the choice made",
                    f"write `- override /{group}: {choice}`",
                )
            elif mistake := mistaken_choice(parse_one(f"{group}={choice}")):
                yield replace(mistake, key=place, value=...)
            elif file.package == file.group:
                yield no_package(file)
