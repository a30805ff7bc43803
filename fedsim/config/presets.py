"""What a preset implies beyond its values: a name for its runs, and what `scale=small` changes.

To be called inside `fedsim.config.compose.search_path`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from fedsim.config.diagnosis import compose_one, options
from fedsim.config.overrides import words_of
from fedsim.errors import ConfigError, Problem, check, one_of

OWN_KEYS = ("scale", "small")
"""Top-level keys that are about the command line, and not in a run's config."""


def choices_of(config: DictConfig) -> dict[str, str]:
    """The choice made in each config group but Hydra's own, and the scale."""
    made = {k: v for k, v in config.hydra.runtime.choices.items() if not k.startswith("hydra/") and v is not None}
    return {**made, "scale": str(config.get("scale", "full"))}


def run_name(choices: Mapping[str, str]) -> str:
    """The preset, with the size behind it where that is not the full one; `default` without a preset."""
    preset, scale = Path(choices.get("preset", "default")).name, choices["scale"]
    return preset if scale == "full" else f"{preset}_{scale}"


def words_of_scale(config: DictConfig, given: Sequence[Override]) -> list[str]:
    """What `scale=small` changes: the preset's `small` as overrides, but for keys that are `given`.

    None where the preset or the scale is swept over, as each job then has its own. Raises `ConfigError` where there is
    no such size.
    """
    scale, small = config.get("scale", "full"), config.get("small")
    check(one_of("scale", scale, ("full", "small")))
    if scale == "full" or any(o.is_sweep_override() and o.key_or_group in ("preset", "scale") for o in given):
        return []
    if not small:
        raise ConfigError([_without_small(choices_of(config).get("preset"))])
    keys = {o.get_key_element() for o in given}
    return words_of({key: value for key, value in small.items() if key not in keys})


def _without_small(preset: str | None) -> Problem:
    where = f"conf/preset/{preset}.yaml has no `small`" if preset else "no preset is chosen"
    sized = ", ".join(name for name in options("preset") if _has_small(name))
    return Problem(
        "scale", "small", f"has no effect here: {where}", f"it is for presets that have a small size: {sized}"
    )


def _has_small(preset: str) -> bool:
    try:
        return bool(compose_one([f"preset={preset}"]).get("small"))
    except ConfigError:  # another preset's mistake
        return False
