"""The command line composed with conf/ before anything runs, so that all its mistakes are told at once.

Hydra stops at the first mistake and lets some pass (`+typo=1`, keys of a preset). Here every job of the command is
composed; what Hydra refuses is diagnosed key by key, with the nearest valid spelling.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose
from hydra import version as hydra_version
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fedsim.config.build import unknown
from fedsim.errors import ConfigError, Problem, check, rule

MAX_JOBS = 10_000

COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, RecursionError, ValueError, TypeError)


@dataclass(frozen=True)
class Composed:
    """One job's config as plain containers, the choice made in each group, and how jobs are launched."""

    config: dict[str, Any]
    choices: dict[str, str]
    overrides: tuple[str, ...]
    launcher: dict[str, Any]


def conf_dir() -> Path:
    """The shipped conf/: beside the package in a checkout, inside it when installed from a wheel."""
    package = Path(__file__).parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


@contextmanager
def search_path(config_dir: str | None = None, config_path: str | None = None) -> Iterator[None]:
    """Hydra ready to compose from conf/ (or `config_path`), with the user's own `--config-dir` before it."""
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError([Problem("--config-dir", config_dir, "must be an existing folder")])
    hydra_version.setbase("1.3")
    places = create_config_search_path(str(Path(config_path or conf_dir()).resolve()))
    if config_dir is not None:
        own = f"file://{Path(config_dir).resolve()}"
        places.prepend(provider="command-line", path=own, anchor=SearchPathQuery(provider="schema"))
    GlobalHydra.instance().clear()
    Hydra.create_main_hydra2("fedsim", places)
    try:
        yield
    finally:
        GlobalHydra.instance().clear()


def compose_jobs(overrides: Sequence[str], *, multirun: bool, config_name: str = "config") -> list[Composed]:
    """Every job that the command line describes. Raises `ConfigError` with all problems of all jobs.

    Must be called inside `search_path`.
    """
    parsed = parse(overrides)
    fixed = [o.input_line or "" for o in parsed if not o.is_sweep_override()]
    base = compose_one(fixed, config_name)
    if not multirun and not _mode_is_multirun(base.hydra):
        return [_plain(compose_one(overrides, config_name), tuple(overrides))]
    jobs: list[Composed] = []
    problems: list[Problem] = []
    for job in expand(parsed, base.hydra.sweeper.get("params") or {}):
        try:
            jobs.append(_plain(compose_one(job, config_name), tuple(job)))
        except ConfigError as error:
            problems += [p for p in error.problems if p not in problems]
    if problems:
        raise ConfigError(problems)
    return jobs


def parse(overrides: Sequence[str]) -> list[Override]:
    """Command-line words by Hydra's grammar, all malformed ones told at once."""
    parser, parsed, problems = OverridesParser.create(), [], []
    for word in overrides:
        try:
            parsed += parser.parse_overrides([word])
        except COMPOSITION_ERRORS as error:
            problems.append(Problem(word[:200], ..., f"is not key=value: {_first_line(error)}"))
    if problems:
        raise ConfigError(problems)
    return parsed


def expand(parsed: Sequence[Override], params: Any) -> Iterator[list[str]]:
    """The jobs of a sweep, as Hydra's basic sweeper will make them: the command line replaces a preset's own axes."""
    axes = parse([f"{key}={value}" for key, value in params.items()]) + list(parsed)
    by_key = {o.get_key_element(): o for o in axes}
    sizes = [_num_values(o) for o in by_key.values()]
    if math.prod(sizes) > MAX_JOBS:
        raise ConfigError(
            [Problem("sweep", math.prod(sizes), f"must have at most {MAX_JOBS} jobs", "split it into several commands")]
        )
    for batch in BasicSweeper.split_arguments(list(by_key.values()), None):
        yield from batch


def _num_values(override: Override) -> int:
    if not override.is_sweep_override():
        return 1
    if not override.is_discrete_sweep():
        raise ConfigError([Problem(override.get_key_element(), ..., "must sweep single values: a,b or range()")])
    return sum(1 for _ in itertools.islice(override.sweep_iterator(), MAX_JOBS + 1))


def compose_one(overrides: Sequence[str], config_name: str) -> DictConfig:
    """The config of one job, with Hydra's own node. Raises `ConfigError` with a diagnosis."""
    parsed = parse(overrides)
    outside = [Problem(o.key_or_group, o.value(), "must not lead out of conf/") for o in parsed if _leads_out(o)]
    if outside:
        raise ConfigError(outside)
    try:
        return compose(config_name, overrides=list(overrides), return_hydra_config=True)
    except COMPOSITION_ERRORS as error:
        problems = [p for o in parsed if (p := _group_problem(o)) is not None] or _diagnose(parsed, config_name)
        raise ConfigError(problems or [Problem("config", ..., _first_line(error))]) from error


def _leads_out(override: Override) -> bool:
    """Whether a group's choice climbs out of its folder."""
    choice = override.value() if _options(override.key_or_group) else None
    return isinstance(choice, str) and (".." in choice.split("/") or choice.startswith("/"))


def _plain(config: DictConfig, overrides: tuple[str, ...]) -> Composed:
    choices = {k: v for k, v in config.hydra.runtime.choices.items() if not k.startswith("hydra/") and v is not None}
    check(_scale_without_effect(choices))
    launcher = OmegaConf.to_container(config.hydra.launcher)
    assert isinstance(launcher, dict)
    return Composed(plain(config), choices, overrides, {str(k): v for k, v in launcher.items()})


def _scale_without_effect(choices: dict[str, str]) -> Problem | None:
    """`scale=small` where there is nothing of that size."""
    scale, wanted = choices.get("scale", "full"), choices.get("scaled", "")
    return rule(
        scale == "full" or wanted in _options("scaled"),
        "scale",
        scale,
        f"has no effect here: there is no conf/scaled/{wanted}.yaml",
        "it is for presets that have a smaller size: "
        + ", ".join(o.removesuffix("_small") for o in _options("scaled")),
    )


def plain(config: DictConfig) -> dict[str, Any]:
    """The job's part of a composed config as plain containers, interpolations resolved."""
    own = OmegaConf.masked_copy(config, [str(k) for k in config if k != "hydra"])
    try:
        resolved = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError([Problem(str(error.full_key or "config"), ..., _first_line(error))]) from error
    assert isinstance(resolved, dict)
    return {str(k): v for k, v in resolved.items()}


def _mode_is_multirun(hydra: DictConfig) -> bool:
    return hydra.get("mode") is not None and str(hydra.mode).endswith("MULTIRUN")


def _options(group: str) -> list[str]:
    instance = GlobalHydra.instance().hydra
    return [] if instance is None else list(instance.config_loader.get_group_options(group))


def _group_problem(override: Override) -> Problem | None:
    """A choice that its group does not have."""
    key, choice = override.key_or_group, override.value()
    options = _options(key)
    if not options or not isinstance(choice, str) or override.is_delete():
        return None
    if choice in options:
        return None
    return Problem(key, choice, f"is not a choice of conf/{key}/", unknown(choice, options).remedy)


def _diagnose(parsed: Sequence[Override], config_name: str) -> list[Problem]:
    """Which plain overrides name keys that the config, with the same group choices, does not have."""
    choices = [o.input_line or "" for o in parsed if _options(o.key_or_group)]
    try:
        base = compose(config_name, overrides=choices, return_hydra_config=True)
    except COMPOSITION_ERRORS:
        return []
    problems = []
    for o in parsed:
        if _options(o.key_or_group) or o.is_add() or o.is_force_add() or _has(base, o.key_or_group):
            continue
        problems.append(_unknown_path(base, o.key_or_group))
    return problems


def _has(config: DictConfig, path: str) -> bool:
    node: Any = OmegaConf.to_container(config, resolve=False)
    for part in path.split("."):
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True


def _unknown_path(config: DictConfig, path: str) -> Problem:
    node: Any = OmegaConf.to_container(config, resolve=False)
    known: list[str] = []
    for part in path.split("."):
        if not isinstance(node, dict) or part not in node:
            names = [str(n) for n in node if n != "_target_"] if isinstance(node, dict) else []
            return unknown(part, names, ".".join(known))
        known.append(part)
        node = node[part]
    return Problem(path, ..., "cannot be set")


def _first_line(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
