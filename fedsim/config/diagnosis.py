"""One composition by Hydra.

To be called inside `fedsim.config.compose.search_path`. Hydra itself stops at its first mistake; all of them are found
in `fedsim.config.mistakes`.
"""

import re
from collections.abc import Sequence

from hydra import compose
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from fedsim.config.choice_files import on_search_path
from fedsim.config.hydra_node import check_node, check_words
from fedsim.config.interpolations import check_size
from fedsim.config.overrides import (
    COMPOSITION_ERRORS,
    as_hydra_reads,
    first_line,
    options,
    parse,
    typed_in,
    without_choice,
)
from fedsim.config.suggestions import choices_with_group, unknown_choice
from fedsim.errors import ConfigError, Problem, check

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
