"""A command line and conf/ composed into the configs of all its jobs, and these checked, before anything runs.

Hydra stops at its first mistake and lets some pass (`+typo=1`, keys of a preset). Here mistakes are told in stages,
each with all of its own: of the words of the command line (`fedsim.config.mistakes`), then of the values of all jobs
(`fedsim.config.plan`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from hydra import initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from fedsim.config.declared import mistakes
from fedsim.config.diagnosis import choices_of, compose_one, plain, run_name, words_of_scale
from fedsim.config.hydra_node import check_search_path, check_words, elsewhere, restricted_resolvers
from fedsim.config.mistakes import explained, find
from fedsim.config.overlay import Jobs
from fedsim.config.sources import CheckedFolder, hidden_files
from fedsim.config.suggestions import UNKNOWN_KEY
from fedsim.config.words import (
    expand,
    key_of,
    options,
    parse,
    plugins,
    without_sweeps,
    words_of,
)
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError, Problem, check, rule

if TYPE_CHECKING:
    from fedsim.config.plan import Plan

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where configs are composed from: as on the command line; None for conf/."""

    config_dir: str | None
    config_path: str | None
    config_name: str


@dataclass(frozen=True)
class Composed:
    """One job's config as plain containers, the choice made in each group, and how jobs are launched.

    `overrides`: the words that it was composed of. `typed`: the keys of those that are on the command line; a preset
    adds others. `launcher`: the node hydra.launcher.
    """

    config: dict[str, Any]
    choices: dict[str, str]
    overrides: tuple[str, ...]
    typed: frozenset[str]
    launcher: dict[str, Any]
    place: Place


class ConfigDir(SearchPathPlugin):
    """Puts the folder of `--config-dir` behind conf/ on Hydra's search path, whose folders `CheckedFolder` reads.

    Hydra keeps it registered until the process ends; outside of `safeguards` it changes nothing.
    """

    active: ClassVar[bool] = False
    folder: ClassVar[Path | None] = None
    primary: ClassVar[str | None] = None
    words: ClassVar[Sequence[str]] = ()
    """What names both of them on a command line, as it was typed."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if not self.active:
            return
        if self.folder is not None:
            search_path.append(provider="command-line", path=f"file://{self.folder}")
        for element in search_path.get_path():
            path = str(element.path).removeprefix("file://")
            if Path(path).is_absolute():
                element.path = f"{CheckedFolder.scheme()}://{path}"


@contextmanager
def safeguards() -> Iterator[None]:
    """Hydra reads folders by `CheckedFolder`, and `${oc.env:...}` tells no secrets: wherever it composes for fedsim.

    A program that uses Hydra itself finds both as they were.
    """
    plugins().register(ConfigDir)
    plugins().register(CheckedFolder)
    before, ConfigDir.active = ConfigDir.active, True
    try:
        with restricted_resolvers():
            yield
    finally:
        ConfigDir.active = before


@contextmanager
def search_path(config_dir: str | None = None, config_path: str | None = None) -> Iterator[None]:
    """Hydra ready to compose from conf/ (or `config_path`) and the user's own `config_dir`.

    Raises `ConfigError` if that is no folder, or has files that those of conf/ hide.
    """
    primary = Path(config_path or conf_dir()).resolve()
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError([Problem("--config-dir", config_dir, "must be an existing folder")])
    check(*([] if config_dir is None else hidden_files(Path(config_dir), primary)))
    with safeguards():
        GlobalHydra.instance().clear()
        ConfigDir.folder = None if config_dir is None else Path(config_dir).resolve()
        ConfigDir.primary = config_path
        flags = {"--config-path": config_path, "--config-dir": config_dir}
        ConfigDir.words = [word for flag, value in flags.items() if value is not None for word in (flag, value)]
        try:
            with initialize_config_dir(str(primary), "fedsim", version_base="1.3"):
                yield
        finally:
            ConfigDir.folder = ConfigDir.primary = None
            ConfigDir.words = ()


def flags_of(config_name: str) -> list[str]:
    """What a command needs before its overrides to compose from the same place. Inside `search_path`."""
    return [*ConfigDir.words, *([] if config_name == "config" else ["--config-name", config_name])]


@contextmanager
def _all_mistakes(words: Sequence[str], config_name: str, *, multirun: bool) -> Iterator[None]:
    """In place of the first mistake that Hydra has found, all of those in `words`."""
    try:
        yield
    except ConfigError as error:
        problems = find(words, config_name, flags_of(config_name), multirun=multirun)
        raise ConfigError(problems or error.problems) from error


def compose_jobs(overrides: Sequence[str], *, multirun: bool, config_name: str = "config") -> list[Composed]:
    """Every job that the command line describes. Raises `ConfigError` with all problems of all jobs.

    Must be called inside `search_path`.
    """
    check_search_path(GlobalHydra.instance().config_loader(), config_name)  # composing imports its packages
    with _all_mistakes(overrides, config_name, multirun=multirun):
        parsed = parse(overrides)
        base = _base(parsed, config_name)
        more = words_of_scale(base, parsed)
        if multirun or str(base.hydra.mode).endswith("MULTIRUN"):
            params = words_of(base.hydra.sweeper.get("params") or {})
            jobs = expand([*parse([*params, *more]), *parsed])
        elif more or any(o.is_sweep_override() for o in parsed):
            jobs = [[*more, *overrides]]
        else:
            return [_composed(base, overrides, parsed, config_name)]

        def by_hydra(words: Sequence[str]) -> tuple[DictConfig, Composed]:
            config = compose_one(words, config_name)
            return config, _composed(config, words, parsed, config_name)

        composing = Jobs(by_hydra)
        return [composing.compose(words) for words in jobs]


def implied(overrides: Sequence[str], config_name: str = "config") -> list[str]:
    """The overrides that a command line implies, and that Hydra does not know of: the name, and what `scale` changes,
    as far as it is one value. Must be called inside `search_path`.
    """
    with _all_mistakes(overrides, config_name, multirun=True):
        parsed = parse(overrides)
        base = _base(parsed, config_name)
        more = words_of_scale(base, parsed)
    name = [f"name={run_name(choices_of(base))}"] if base.get("name", "") is None else []
    return [*without_sweeps(more), *name]


def check_question(overrides: Sequence[str]) -> None:
    """Raise `ConfigError` where `--cfg job` is asked of a command that would be refused. Inside `search_path`."""
    check(*find(overrides, "config", flags_of("config"), multirun=False))
    parsed = parse(overrides)
    single = [o.input_line or "" for o in parsed if not o.is_sweep_override()]
    config = compose_one(single, "config")
    if more := without_sweeps(words_of_scale(config, parsed)):
        config = compose_one([*more, *single], "config")
    check_values([_composed(config, overrides, parsed, "config")])


def _base(parsed: Sequence[Override], config_name: str) -> DictConfig:
    """What the overrides that are not swept over compose to; all of them are checked."""
    check_words(parsed)
    check_search_path(GlobalHydra.instance().config_loader(), config_name)
    return compose_one([o.input_line or "" for o in parsed if not o.is_sweep_override()], config_name)


def _composed(config: DictConfig, words: Sequence[str], given: Sequence[Override], config_name: str) -> Composed:
    node = config.hydra
    sweeper = str(node.runtime.choices["hydra/sweeper"])
    check(rule(sweeper == "basic", "hydra/sweeper", sweeper, "is not supported", "sweep over values: seed=0,1,2"))
    choices = choices_of(config)
    launcher: Any = OmegaConf.to_container(node.launcher)
    folder = None if ConfigDir.folder is None else str(ConfigDir.folder)
    place = Place(folder, ConfigDir.primary, config_name)
    typed = frozenset(map(key_of, given))
    return Composed(plain(config, choices), choices, tuple(words), typed, launcher, place)


def check_jobs(jobs: Sequence[Composed]) -> "list[Plan]":
    """The plan of every job. One `ConfigError` with the problems of all of them: those of names, types and ranges, or,
    if there are none, those that show when the parts are built."""
    check_values(jobs)
    from fedsim.config.plan import make_plan  # takes time: it imports PyTorch

    return _of_all(jobs, lambda job: make_plan(job.config, job.choices, elsewhere=elsewhere(job.launcher)))


def check_values(jobs: Sequence[Composed]) -> None:
    """Raise `ConfigError` with all mistakes in names, types and ranges that show without PyTorch."""
    _of_all(jobs, lambda job: check(_work_without_effect(job.config, job.overrides), *mistakes(job.config)))


def _of_all(jobs: Sequence[Composed], make: Callable[[Composed], T]) -> list[T]:
    made = []
    problems: list[Problem] = []
    seen: list[tuple[Problem, ...]] = []
    for job in jobs:
        try:
            made.append(make(job))
        except ConfigError as error:
            if error.problems not in seen:
                seen.append(error.problems)
                problems += [p for p in _explained(error.problems, job) if p not in problems]
    check(*problems)
    return made


def _work_without_effect(config: Mapping[str, Any], words: Sequence[str]) -> Problem | None:
    """`local.epochs` on the command line, although `local.steps` takes its place."""
    local = config.get("local")
    steps = local.get("steps") if isinstance(local, Mapping) else None
    given = [word for word in words if word.startswith("local.epochs=") and not word.endswith("=null")]
    return rule(
        not (given and steps is not None),
        "local.epochs",
        given[0].split("=", 1)[1] if given else None,
        f"has no effect while local.steps={steps}",
        "leave it out, or add local.steps=null",
    )


def _explained(problems: Sequence[Problem], job: Composed) -> list[Problem]:
    if all(p.rule != UNKNOWN_KEY for p in problems):
        return list(problems)
    ready = GlobalHydra.instance().is_initialized()
    with nullcontext() if ready else search_path(job.place.config_dir, job.place.config_path):
        return explained(problems, job.config, job.choices, [key for key in job.typed if not options(key)])
