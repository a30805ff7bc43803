"""What a preset implies beyond its values: a name for its runs, and what `scale=small` changes.

To be called inside `fedsim.config.compose.search_path`.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedsim.config.choice_files import ChoiceFiles, on_search_path
from fedsim.config.overrides import first_line, key_of, options, words_of
from fedsim.errors import ConfigError, Problem, check, one_of

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
