"""A command line and conf/ composed into the configs of all its jobs, and these checked, before
anything runs.

Mistakes are told in stages, each with all of its own: of the words of the command line
(`fedsim.config.mistakes`), then of the values of all jobs (`fedsim.config.plan`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from hydra import initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from fedsim.config.build import Gathered
from fedsim.config.diagnosis import choices_of, compose_one, plain, run_name, words_of_scale
from fedsim.config.hydra_node import check_search_path, check_words, elsewhere, guarded_environment
from fedsim.config.mistakes import explained, find
from fedsim.config.overlay import Composed, Jobs
from fedsim.config.plan import Plan, outline
from fedsim.config.sources import CheckedFolder, hidden_files, loader, on_search_path
from fedsim.config.words import expand, key_of, long_form, parse, plugins, without_sweeps, words_of
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError, Problem, check, rule

T = TypeVar("T")


class ConfigDir(SearchPathPlugin):
    """Puts the folder of `--config-dir` behind conf/ on Hydra's search path, whose folders
    `CheckedFolder` reads. It is registered until the process ends; outside of `safeguards` it
    changes nothing."""

    active: ClassVar[bool] = False
    folder: ClassVar[str | None] = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if not self.active:
            return
        if self.folder is not None:
            search_path.append(
                provider="command-line", path=f"file://{Path(self.folder).resolve()}"
            )
        for element in search_path.get_path():
            path = str(element.path).removeprefix("file://")
            if Path(path).is_absolute():
                element.path = f"{CheckedFolder.scheme()}://{path}"


@contextmanager
def safeguards(config_dir: str | None = None) -> Iterator[None]:
    """Hydra reads folders by `CheckedFolder`, and `${oc.env:...}` tells no secrets: wherever it
    composes for fedsim. A program that uses Hydra itself finds both as they were."""
    plugins().register(ConfigDir)
    plugins().register(CheckedFolder)
    before = ConfigDir.active, ConfigDir.folder
    ConfigDir.active, ConfigDir.folder = True, config_dir
    try:
        with nullcontext() if before[0] else guarded_environment():
            yield
    finally:
        ConfigDir.active, ConfigDir.folder = before


@contextmanager
def search_path(config_dir: str | None = None, config_path: str | None = None) -> Iterator[None]:
    """Hydra ready to compose from conf/ (or `config_path`) and the user's own `config_dir`. Raises
    `ConfigError` if that is no folder, or has files that those of conf/ hide."""
    primary = Path(config_path or conf_dir()).resolve()
    if config_dir is not None:
        check(
            rule(
                Path(config_dir).is_dir(), "--config-dir", config_dir, "must be an existing folder"
            )
        )
        check(*hidden_files(Path(config_dir), primary))
    with safeguards(config_dir):
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(primary), "fedsim", version_base="1.3"):
            yield


@contextmanager
def _base(
    words: Sequence[str], config_name: str, *, multirun: bool
) -> Iterator[tuple[list[Override], DictConfig]]:
    """The overrides that `words` are, and what those compose to that are not swept over, nor about
    a choice that is.

    In place of the first mistake that Hydra finds, there or afterwards, all of those in `words` are
    raised.
    """
    check_search_path(loader(), config_name)  # composing imports its packages
    try:
        parsed = parse(words)
        check_words(parsed)
        swept = tuple(
            f"{o.key_or_group.replace('/', '.')}." for o in parsed if o.is_sweep_override()
        )
        kept = [
            o
            for o in parsed
            if not (o.is_sweep_override() or o.key_or_group.replace("/", ".").startswith(swept))
        ]
        yield parsed, compose_one([o.input_line or "" for o in kept], config_name)
    except ConfigError as error:
        raise ConfigError(find(words, config_name, multirun=multirun) or error.problems) from error
    except RecursionError as error:
        raise ConfigError([Problem("config", ..., "is nested too deeply")]) from error


def compose_jobs(
    overrides: Sequence[str], *, multirun: bool, config_name: str = "config"
) -> list[Composed]:
    """Every job that the command line describes. Raises `ConfigError` with all problems of all
    jobs. Must be called inside `search_path`."""
    overrides = long_form(overrides, on_search_path())
    with _base(overrides, config_name, multirun=multirun) as (parsed, base):
        more = words_of_scale(base, parsed)
        jobs = [[*more, *overrides]]
        if multirun or str(base.hydra.mode).endswith("MULTIRUN"):
            params = words_of(base.hydra.sweeper.get("params") or {})
            jobs = expand([*parse([*params, *more]), *parsed])
        return _composed(jobs, parsed, config_name, base)


def implied(overrides: Sequence[str], config_name: str = "config") -> list[str]:
    """The overrides that a command line implies, and that Hydra does not know of: the name, and
    what `scale` changes, as far as it is one value. Must be called inside `search_path`."""
    with _base(overrides, config_name, multirun=True) as (parsed, base):
        more = words_of_scale(base, parsed)
    name = [f"name={run_name(choices_of(base))}"] if base.get("name", "") is None else []
    return [*without_sweeps(more), *name]


def _composed(
    jobs: Sequence[Sequence[str]], given: Sequence[Override], config_name: str, base: DictConfig
) -> list[Composed]:
    """The jobs of these words; `base` is what those `given` that are not swept over compose to."""
    files = on_search_path()
    words_of_base = [override.input_line for override in given if not override.is_sweep_override()]
    typed = frozenset(map(key_of, given))

    def by_hydra(words: Sequence[str]) -> tuple[DictConfig, Composed]:
        config = base if list(words) == words_of_base else compose_one(words, config_name)
        choices = choices_of(config)
        launcher: Any = OmegaConf.to_container(config.hydra.launcher)
        return config, Composed(
            plain(config, choices), choices, tuple(words), typed, launcher, files
        )

    composing = Jobs(by_hydra, several=len(jobs) > 1)
    return [composing.compose(words) for words in jobs]


def check_jobs(jobs: Sequence[Composed]) -> list[Plan]:
    """The plan of every job. One `ConfigError` with the problems of all of them: those of names,
    types and ranges, or, if there are none, those that show when the parts are built."""
    plans = outlined(jobs)
    check_rest(jobs, plans)
    return plans


def outlined(jobs: Sequence[Composed]) -> list[Plan]:
    """The plan of every job, whose parts are not built. Raises `ConfigError` with all mistakes in
    names, types and ranges that show without PyTorch."""

    def plan_of(job: Composed) -> Plan:
        check(_work_without_effect(job))
        return outline(job.config, job.choices)

    return _of_all(jobs, plan_of)


def check_rest(jobs: Sequence[Composed], plans: Sequence[Plan]) -> None:
    """Raise `ConfigError` with all problems that show when parts are built."""

    def check_one(job: Composed, plan: Plan) -> None:
        from fedsim.config.parts import check_parts  # takes time: it imports PyTorch

        check_parts(plan, elsewhere=elsewhere(job.launcher))

    _of_all(jobs, check_one, plans)


def make_plan(config: Mapping[str, Any], choices: Mapping[str, str]) -> Plan:
    """The plan of `config` with its parts checked. Raises `ConfigError` with all problems."""
    from fedsim.config.parts import check_parts

    plan = outline(config, choices)
    check_parts(plan)
    return plan


def _of_all(jobs: Sequence[Composed], make: Callable[..., T], *more: Sequence[Any]) -> list[T]:
    made, found = [], Gathered()
    for job, *others in zip(jobs, *more, strict=True):
        try:
            made.append(make(job, *others))
        except ConfigError as error:
            found.add(*explained(error.problems, job))
    check(*found.problems)
    return made


def _work_without_effect(job: Composed) -> Problem | None:
    """`local.epochs` on the command line, although `local.steps` takes its place."""
    local = job.config.get("local")
    if not isinstance(local, dict) or local.get("steps") is None or local.get("epochs") is None:
        return None
    text, remedy = (
        f"has no effect while local.steps={local['steps']}",
        "leave it out, or add local.steps=null",
    )
    return rule("local.epochs" not in job.typed, "local.epochs", local["epochs"], text, remedy)
