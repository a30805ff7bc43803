"""Let Hydra compose configs, and keep those of choices, because Hydra takes 0.1 s for each.

A process composes more than one config if it sweeps, if it explains several mistakes, or if it is a
notebook. Hydra first reads the files of the choices (`selector=gpfl`), and then sets the values of
single keys (`seed=1`). So all configs with the same choices begin with the same config.
"""

import pickle
import re
from collections.abc import Sequence

import hydra
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from fedsim.config.sources import fingerprint_of_sources, options
from fedsim.config.words import BAD_INPUT, as_hydra_reads, is_plain_assignment

MAX_KEPT = 200
"""Maximum number of configs that are kept. Each takes some 20 kB."""
NODE_OF_HYDRA = re.compile(r"\$\{.*hydra", re.DOTALL)
"""What a text with an interpolation of Hydra's own node has, also in nested interpolations. That
node has the words and the working folder. Other texts may match, too; they are only not kept."""

KEPT: dict[object, bytes | None] = {}
"""Pickled configs of choices, by the choices and the state of all files. None: the config refers to
Hydra's own node, and depends on more than the choices."""


def compose_by_hydra(overrides: Sequence[Override], config_name: str) -> DictConfig:
    """Return Hydra's config of `overrides`, with its node `hydra`. Raises the errors of Hydra.

    Of the node `hydra`, the words and the working folder may be those of an earlier call.
    """
    words = [as_hydra_reads(override) for override in overrides]
    choices = [word for word, o in zip(words, overrides, strict=True) if _is_choice(o)]
    values = [override for override in overrides if _is_value(override)]
    if len(choices) + len(values) == len(words):  # the order of other words may matter
        config = _config_of_choices(choices, config_name)
        if config is not None and _set_values(config, values):
            return config
    return hydra.compose(config_name, words, return_hydra_config=True)


def _is_choice(override: Override) -> bool:
    """Return whether an override is `group=choice`."""
    is_plain = is_plain_assignment(override) and override.package is None
    has_name = isinstance(override.value(), str)
    return is_plain and has_name and bool(options(override.key_or_group))


def _is_value(override: Override) -> bool:
    """Return whether an override is `key=value` for a key of the run."""
    key = override.key_or_group
    is_plain = is_plain_assignment(override) and override.package is None
    refers_to_hydra = NODE_OF_HYDRA.search(override.input_line or "") is not None
    is_of_run = key.partition(".")[0] != "hydra" and not refers_to_hydra
    return is_plain and is_of_run and not options(key)


def _config_of_choices(choices: list[str], config_name: str) -> DictConfig | None:
    """Return a new copy of the config of `choices`; None if it refers to Hydra's own node."""
    key = (config_name, tuple(choices), fingerprint_of_sources())
    if key not in KEPT:
        config = hydra.compose(config_name, choices, return_hydra_config=True)
        names = [str(name) for name in config if name != "hydra"]
        text = OmegaConf.to_yaml(OmegaConf.masked_copy(config, names))
        if len(KEPT) >= MAX_KEPT:
            KEPT.clear()
        KEPT[key] = None if NODE_OF_HYDRA.search(text) else pickle.dumps(config)
    content = KEPT[key]
    return None if content is None else pickle.loads(content)


def _set_values(config: DictConfig, overrides: Sequence[Override]) -> bool:
    """Set values in a config as Hydra does. Return False if Hydra would raise an error."""
    try:
        for override in overrides:
            OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
    except BAD_INPUT:
        return False
    return True
