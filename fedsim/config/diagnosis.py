"""One composition by Hydra, what a preset implies beyond its values, and unknown keys in terms of what was typed.

A key may come from a preset for which another model or optimiser was chosen than its own. Hydra stops at its first
mistake; all of them are found in `fedsim.config.mistakes`. To be called inside `fedsim.config.compose.search_path`.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedsim.config.choice_files import ChoiceFiles, on_search_path
from fedsim.config.hydra_node import check_node, check_size, check_words
from fedsim.config.suggestions import (
    UNKNOWN_KEY,
    choices_taking,
    choices_with,
    choices_with_group,
    key_of_choices,
    unknown_choice,
    unknown_path,
)
from fedsim.config.words import (
    COMPOSITION_ERRORS,
    as_hydra_reads,
    first_line,
    key_of,
    options,
    parse,
    typed_in,
    without_choice,
    words_of,
)
from fedsim.core.errors import ConfigError, Problem, check, one_of

OWN_KEYS = ("scale", "small", "debug")
"""Top-level keys that are about the command line, and not in a run's config."""
SCALES = ("full", "small", "debug")


def choices_of(config: DictConfig) -> dict[str, str]:
    """The choice made in each config group but Hydra's own, and the scale."""
    made = {k: v for k, v in config.hydra.runtime.choices.items() if not k.startswith("hydra/") and v is not None}
    return {**made, "scale": str(config.get("scale", "full"))}


def run_name(choices: Mapping[str, str]) -> str:
    """The preset (`default` without one), with the size behind it where that is not the full one."""
    preset, scale = Path(choices.get("preset", "default")).name, choices["scale"]
    return preset if scale == "full" else f"{preset}_{scale}"


def plain(config: DictConfig, choices: Mapping[str, str]) -> dict[str, Any]:
    """The job's part of a composed config as plain containers, interpolations resolved, and with a name."""
    own = OmegaConf.masked_copy(config, [str(k) for k in config if k not in ("hydra", *OWN_KEYS)])
    try:
        resolved: Any = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError([Problem(str(error.full_key or "config"), ..., first_line(error))]) from error
    if resolved.get("name", "") is None:
        resolved["name"] = run_name(choices)
    return {str(k): v for k, v in resolved.items()}


def words_of_scale(config: DictConfig, given: Sequence[Override]) -> list[str]:
    """What `scale` changes, as overrides: the preset's `small`, and for `debug` that and what is under `debug`; but not
    keys that are `given`, nor those of a group whose choice is.

    None where the preset or the scale is swept over, as each job then has its own. Raises `ConfigError` where there is
    no such size.
    """
    scale, small = config.get("scale", "full"), config.get("small") or {}
    check(one_of("scale", scale, SCALES if "debug" in config else SCALES[:2]))
    if scale == "full" or any(o.is_sweep_override() and o.key_or_group in ("preset", "scale") for o in given):
        return []
    if scale == "small" and not small:
        raise ConfigError([_without_small(choices_of(config).get("preset"))])
    changes = {**small, **config["debug"]} if scale == "debug" else small
    keys = set(map(key_of, given))
    return words_of({key: value for key, value in changes.items() if not _is_set(str(key).lstrip("~"), keys)})


def _is_set(key: str, given: Collection[str]) -> bool:
    """Whether `key`, or the choice of a group that it belongs to, is `given`."""
    parts = key.split(".")
    groups = ["/".join(parts[:end]) for end in range(1, len(parts))]
    return key in given or any(group in given for group in groups)


def _without_small(preset: str | None) -> Problem:
    where = f"conf/preset/{preset}.yaml has no `small`" if preset else "no preset is chosen"
    files = on_search_path()
    sized = ", ".join(name for name in options("preset") if _has_small(files, name))
    return Problem(
        "scale", "small", f"has no effect here: {where}", f"it is for presets that have a small size: {sized}"
    )


def _has_small(files: ChoiceFiles, preset: str) -> bool:
    try:
        return files.has("preset", preset) and bool(files.config("preset", preset).get("small"))
    except ConfigError:  # another preset's mistake
        return False


OPTIONAL = ("preset", "cell")
"""Config groups of which no choice need be made: `preset=null`."""


def compose_one(overrides: Sequence[str], config_name: str = "config") -> DictConfig:
    """The config that `overrides` make, with Hydra's own node. Raises `ConfigError` with the first problem."""
    parsed = parse(overrides)
    check_words(parsed)
    check(*map(refused_choice, parsed))
    try:
        config = compose(config_name, overrides=[as_hydra_reads(o) for o in parsed], return_hydra_config=True)
    except ConfigError:  # of a file that Hydra reads
        raise
    except COMPOSITION_ERRORS as error:
        raise ConfigError([_without_group(error, parsed) or Problem("config", ..., first_line(error))]) from error
    check_size(config)
    check_node(config)
    return config


def _without_group(error: Exception, parsed: Sequence[Override]) -> Problem | None:
    """The problem of a choice in a group that none of the other choices has; None if it is another error."""
    found = re.match(r"Could not override '([^'@]+)'\. No match in the defaults list", str(error))
    words = [o for o in parsed if found and o.key_or_group == found[1]]
    if not words:
        return None
    group = words[-1].key_or_group
    parent, above = group.rpartition("/")[0], choices_with_group(on_search_path(), group)
    rule = f"has no effect: the choice of {parent} has no such group"
    return Problem(group, typed_in(words[-1]), rule, above and f"it goes with {above}")


def refused_choice(override: Override) -> Problem | None:
    """The problem of a choice that Hydra would take: one that climbs out of its group's folder, or none at all."""
    group, choice = override.key_or_group, override.value()
    if not options(group):
        return None
    if isinstance(choice, str) and (".." in choice.split("/") or choice.startswith("/")):
        return Problem(group, choice, "must not lead out of conf/")
    return unknown_choice(group, choice) if without_choice(override) and group not in OPTIONAL else None


def explained(
    problems: Sequence[Problem],
    config: Mapping[str, Any],
    choices: Mapping[str, str],
    words: Sequence[str],
    config_name: str,
) -> list[Problem]:
    """`problems` with those of unknown keys explained: by what has set them, or by where such a key is."""
    given = [key_of(override) for override in parse(words) if not options(override.key_or_group)]
    told: list[Problem] = []
    lacking: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        if problem.rule != UNKNOWN_KEY:
            told.append(problem)
        elif typed := next((key for key in given if _is_below(problem.key, key) or _is_below(key, problem.key)), None):
            told.append(_with_places(problem, config, typed))
        elif (group := group_of(problem.key, choices)) and (
            source := _source(problem.key, choices, words, config_name)
        ):
            lacking.setdefault((group, source), []).append(problem.key)
        else:
            told.append(problem)
    return told + [lacks(group, choices[group], source, keys) for (group, source), keys in lacking.items()]


def lacks(group: str, choice: Any, source: str, keys: Sequence[str], *, swept: bool = False) -> Problem:
    """The problem of a choice without the `keys` that `source` (`preset=...`) sets, or is `swept` over."""
    names = [key.removeprefix(f"{group.replace('/', '.')}.") for key in keys]
    having = [one for one in choices_with(group, keys) if one != choice]
    leave_out = [] if swept else ["leave out what it sets: " + " ".join(f"'~{key}'" for key in keys)]
    choose = [f"choose one that has it: {group}={'|'.join(having)}"] if having else []
    text = f"has no {', '.join(names)}, which {source} {'sweeps over' if swept else 'sets'}"
    return Problem(group, choice, text, "; or ".join([*leave_out, *choose]))


def group_of(key: str, choices: Mapping[str, str]) -> str | None:
    """The innermost config group that a dotted key belongs to, of those in which one of `choices` is made."""
    parts = key.split(".")[:-1]
    groups = ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((group for group in groups if group in choices and options(group)), None)


def _is_below(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.")


def _with_places(problem: Problem, config: Mapping[str, Any], typed: str) -> Problem:
    """The problem of the key `typed`, with the choices that take it, or the places where such a key is."""
    key = typed if _is_below(typed, problem.key) else problem.key
    if depth := problem.key.count("."):
        takers = choices_taking(key, depth)
        near = [problem.remedy.removeprefix("did you mean ").rstrip("?")] if "did you mean" in problem.remedy else []
        return Problem(key, ..., UNKNOWN_KEY, key_of_choices(takers, near)) if takers else problem
    return unknown_path({key: value for key, value in config.items() if key != problem.key}, key) or problem


def _source(key: str, choices: Mapping[str, str], words: Sequence[str], config_name: str) -> str | None:
    """The preset or cell without which the config has no such key."""
    for group in (name for name in reversed(OPTIONAL) if choices.get(name)):
        others = [o.input_line or "" for o in parse(words) if o.key_or_group != group]
        try:
            without = compose_one(others, config_name)
        except ConfigError:  # a word is about what it sets
            return f"{group}={choices[group]}"
        if OmegaConf.select(without, key) is None:
            return f"{group}={choices[group]}"
    return None
