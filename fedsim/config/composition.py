"""Compose the config of one job by Hydra, and read its choices, name and scale.

A *word* is an override as text, such as `seed=1`. compose.py composes the jobs of a command in two
steps: it composes the user's words, adds the changes of the scale that this config has
(`words_of_scale`), and composes again. overlay.py makes most jobs of a sweep from one config that
Hydra composed, and uses the same functions. `compose_config` must be called inside the context
manager `fedsim.config.sources.search_path`.
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
from fedsim.config.words import BAD_INPUT, key_of, parse, words_of
from fedsim.core.configs import COMMAND_KEYS
from fedsim.core.errors import ConfigError, Problem, check, rule
from fedsim.core.text import first_line

SCALES = ("full", "small", "debug")
"""Sizes of an experiment: without changes, with the changes in the preset's key `small`, and with
those in `small` and in conf/config.yaml's key `debug`, which make it as small as possible."""


def compose_config(words: Sequence[str], config_name: str = "config") -> DictConfig:
    """Return the config that `words` make, with Hydra's own node `hydra`. Raises `ConfigError`."""
    overrides = parse(words)
    check(*node_problems(override.key_or_group for override in overrides))
    check(*map(mistaken_choice, overrides))
    try:
        config = compose_by_hydra(overrides, config_name)
    except ConfigError:  # fedsim's own error of a config file; BAD_INPUT would catch it, too
        raise
    except BAD_INPUT as error:
        # For the message, compose again with nothing but the choices of groups: that config says
        # which keys there are.
        group_overrides = [override for override in overrides if options(override.key_or_group)]
        known: Any = None
        with suppress(*BAD_INPUT):
            config = compose_by_hydra(group_overrides, config_name)
            known = OmegaConf.to_container(config, resolve=False)
        raise ConfigError(composition_problems(error, overrides, known)) from error
    launcher: Any = config.hydra.launcher
    key, remedy = "hydra.launcher", "hydra/launcher=lanes chooses one"
    check(rule(isinstance(launcher, Mapping), key, launcher, "is no launcher", remedy))
    parameters: Any = OmegaConf.to_container(launcher, resolve=False)
    check(*launcher_problems(parameters))
    return config


def choices_of(config: DictConfig) -> dict[str, str]:
    """Return the choice in each config group, without Hydra's own groups. `scale` has the scale."""
    choices = {}
    for group, choice in config.hydra.runtime.choices.items():
        if choice is not None and not group.startswith("hydra/"):
            choices[group] = choice
    choices["scale"] = str(config.get("scale", "full"))
    return choices


def run_name(choices: Mapping[str, str]) -> str:
    """Return the name of the runs' folder in `output_dir`: the preset without its folder
    (`default` without one), followed by the scale unless that is `full`."""
    preset = Path(choices.get("preset", "default")).name
    scale = choices["scale"]
    return preset if scale == "full" else f"{preset}_{scale}"


def resolved(config: DictConfig, choices: Mapping[str, str]) -> dict[str, Any]:
    """Return the run's part of a composed config as plain containers.

    Interpolations are resolved. Then a name that is null becomes `run_name`. Raises `ConfigError`.
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
    """Return the changes of the config's `scale` as words (`SCALES`).

    A change of a key that `overrides` set is left out. So is a change below a group in which
    `overrides` make a choice: the preset's `model.width` was meant for the preset's own model.
    Raises `ConfigError` if there is no such scale, if `small` or `debug` is no mapping, or if the
    scale is `small` and there are no such changes.
    """
    scale = config.get("scale", "full")
    check(rule(scale in SCALES, "scale", scale, f"must be one of {', '.join(SCALES)}"))
    small, debug = config.get("small"), config.get("debug")
    for key, changes in (("small", small), ("debug", debug)):
        is_mapping = changes is None or isinstance(changes, Mapping)
        text = "must be a mapping of keys to the values that they have at this scale"
        check(rule(is_mapping, key, changes, text, f"scale={key} chooses the scale"))
    if scale == "small" and not small:
        remedy = "it is for presets that have the key `small`"
        raise ConfigError([Problem("scale", scale, "has no effect here", remedy)])

    changes = {}
    if scale != "full":
        changes.update(small or {})
    if scale == "debug":
        changes.update(debug or {})
    overridden_keys = set(map(key_of, overrides))  # with dots, or with slashes for a group
    remaining = {}
    for key, value in changes.items():
        parts = str(key).lstrip("~").split(".")
        groups_above = {"/".join(parts[:end]) for end in range(1, len(parts))}
        if overridden_keys.isdisjoint({".".join(parts), *groups_above}):
            remaining[key] = value
    return words_of(remaining)
