"""Compose the config of one job by Hydra, and read its choices, name and scale.

compose.py and overlay.py call these functions, which must be called inside
`fedsim.config.sources.search_path`. The words are overrides of the command line, such as `seed=1`.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedsim.config.hydra_node import launcher_problems, node_problems
from fedsim.config.kept_configs import compose_by_hydra
from fedsim.config.mistakes import composition_problems
from fedsim.config.sources import options
from fedsim.config.suggestions import mistaken_choice
from fedsim.config.words import BAD_INPUT, first_line, key_of, parse, words_of
from fedsim.core.errors import ConfigError, Problem, check, rule

COMMAND_KEYS = ("scale", "small", "debug")
"""Top-level keys that only the command line has; they are not in a run's config."""
SCALES = ("full", "small", "debug")
"""Sizes of an experiment: as in the paper, the preset's `small`, and as small as possible."""


def compose_config(words: Sequence[str], config_name: str = "config") -> DictConfig:
    """Return the config that `words` make, with Hydra's own node `hydra`. Raises `ConfigError`."""
    overrides = parse(words)
    check(*node_problems(override.key_or_group for override in overrides))
    check(*map(mistaken_choice, overrides))
    try:
        config = compose_by_hydra(overrides, config_name)
    except ConfigError:  # the error of a file; it is a ValueError, and so in BAD_INPUT
        raise
    except BAD_INPUT as error:
        # The config of the choices alone tells which keys there are, for the message.
        choices = [override for override in overrides if options(override.key_or_group)]
        known: Any = None
        with suppress(*BAD_INPUT):
            known = OmegaConf.to_container(compose_by_hydra(choices, config_name), resolve=False)
        raise ConfigError(composition_problems(error, overrides, known)) from error
    launcher: Any = OmegaConf.to_container(config.hydra.launcher, resolve=False)
    check(*launcher_problems(launcher))
    return config


def choices_of(config: DictConfig) -> dict[str, str]:
    """Return the choice made in each config group except Hydra's own groups, and the scale."""
    choices = {}
    for group, choice in config.hydra.runtime.choices.items():
        if choice is not None and not group.startswith("hydra/"):
            choices[group] = choice
    choices["scale"] = str(config.get("scale", "full"))
    return choices


def run_name(choices: Mapping[str, str]) -> str:
    """Return the preset (`default` without one), followed by the scale unless that is `full`."""
    preset = Path(choices.get("preset", "default")).name
    scale = choices["scale"]
    return preset if scale == "full" else f"{preset}_{scale}"


def resolved(config: DictConfig, choices: Mapping[str, str]) -> dict[str, Any]:
    """Return the run's part of a composed config as plain containers.

    Interpolations are resolved, and a name that is null is filled in. Raises `ConfigError`.
    """
    keys = [str(key) for key in config if key not in ("hydra", *COMMAND_KEYS)]
    job = OmegaConf.masked_copy(config, keys)
    try:
        containers: Any = OmegaConf.to_container(job, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key or "config")
        raise ConfigError([Problem(key, ..., first_line(error))]) from error
    if containers.get("name", "") is None:
        containers["name"] = run_name(choices)
    return {str(key): value for key, value in containers.items()}


def words_of_scale(config: DictConfig, overrides: Sequence[Override]) -> list[str]:
    """Return the changes of the config's `scale` as overrides, without keys that `overrides` set.

    The changes are the mapping `small` of the preset; for `scale=debug` the mapping `debug` comes
    in addition. Raises `ConfigError` if there is no such scale, or no `small`.
    """
    scale = config.get("scale", "full")
    small = config.get("small") or {}
    check(rule(scale in SCALES, "scale", scale, f"must be one of {', '.join(SCALES)}"))
    remedy = "it is for presets with a `small`"
    check(rule(bool(small) or scale != "small", "scale", scale, "has no effect here", remedy))
    changes = {} if scale == "full" else dict(small)
    if scale == "debug":
        changes.update(config.get("debug") or {})
    set_keys = set(map(key_of, overrides))
    remaining = {}
    for key, value in changes.items():
        parts = str(key).lstrip("~").split(".")
        # A choice of the user's in a group above the key replaces the key, too.
        groups = {"/".join(parts[:end]) for end in range(1, len(parts))}
        if set_keys.isdisjoint({".".join(parts), *groups}):
            remaining[key] = value
    return words_of(remaining)
