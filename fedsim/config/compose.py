"""Compose a command line and conf/ into the configs of all its jobs, and check these.

All of this happens before anything runs, in three stages. Each stage reports all of its mistakes at
once:

1. `compose_jobs` composes the jobs. Mistakes are in the words of the command line
   (`fedsim.config.mistakes`).
2. `outlined` makes a plan of each job. Mistakes are in names, types and ranges of values
   (`fedsim.config.plan`).
3. `check_components` builds the components of each plan. Mistakes are those that only components
   can tell (`fedsim.config.parts`).

`check_jobs` is stages 2 and 3. `make_plan` is both for a config that has been composed already.

    with search_path():
        jobs = compose_jobs(["selector=random,gpfl", "seed=0,1"], multirun=True)  # four jobs
        plans = check_jobs(jobs)  # four plans

The *words* are the overrides of the command line. A *preset* (conf/preset) is a whole experiment,
and may bring a sweep of its own. The *scale* (full, small or debug) says how much of it runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from fedsim.config.composition import choices_of, compose_config, run_name, words_of_scale
from fedsim.config.hydra_node import node_problems, runs_elsewhere
from fedsim.config.job import ComposedJob
from fedsim.config.mistakes import all_mistakes, explained, several_values
from fedsim.config.overlay import JobComposer
from fedsim.config.plan import Plan, outline
from fedsim.config.sources import known_choices, options
from fedsim.config.sources import search_path as search_path  # callers import it from here
from fedsim.config.suggestions import mistaken_choice
from fedsim.config.sweeps import expand, expand_some, too_many_jobs, values_of, without_sweeps
from fedsim.config.words import key_of, long_form, parse, parse_one, words_of
from fedsim.core.configs import differing_keys, labels_of, short_names
from fedsim.core.errors import ConfigError, Problem, ProblemCollector, check

SWEEPING = ("preset", "scale")
"""Groups and keys whose choices may have a sweep of their own."""


def compose_jobs(
    words: Sequence[str], *, multirun: bool, config_name: str = "config"
) -> list[ComposedJob]:
    """Return every job that the `words` of a command line describe.

    `multirun` says that words may have several values (-m). Must be called inside `search_path`.
    Raises `ConfigError` with all problems of all words.
    """
    words = long_form(words, known_choices())
    compose = partial(_compose_jobs, multirun=multirun, config_name=config_name)
    try:
        return compose(words)
    except ConfigError as error:
        raise ConfigError(all_mistakes(error, words, compose)) from error
    except RecursionError as error:
        raise ConfigError([Problem("config", ..., "is nested too deeply")]) from error


def _compose_jobs(words: Sequence[str], *, multirun: bool, config_name: str) -> list[ComposedJob]:
    """Return every job. Raises `ConfigError` with the problems of some words."""
    # 1. Read the words. A preset or scale may have a sweep of its own. So `preset=a,b` is split,
    # and this function is called again for each of them.
    overrides = parse(words)
    check(*node_problems(override.key_or_group for override in overrides))
    swept = [override for override in overrides if override.is_sweep_override()]
    if any(override.key_or_group in SWEEPING for override in swept):
        if not multirun:
            check(*map(several_values, swept))
        jobs = []
        for words_of_preset in expand_some(overrides, SWEEPING):
            jobs += _compose_jobs(words_of_preset, multirun=True, config_name=config_name)
            check(too_many_jobs(len(jobs), SWEEPING))
        return jobs
    for override in swept:
        if options(override.key_or_group):
            check(*(mistaken_choice(parse_one(word)) for word in values_of(override)))

    # 2. Compose the words with one value. This config has the preset's sweep and the scale.
    single_words = _single_words(overrides)
    config = compose_config(single_words, config_name)

    # 3. Expand the sweep. Later words replace earlier ones: the preset's sweep comes first, then
    # the changes of the scale, then the user's words.
    scale_words = words_of_scale(config, overrides)
    if multirun or str(config.hydra.mode).endswith("MULTIRUN"):
        preset_words = words_of(config.hydra.sweeper.get("params") or {})
        words_by_job = expand([*parse([*preset_words, *scale_words]), *overrides])
    else:
        check(*map(several_values, swept))
        words_by_job = [[*scale_words, *words]]

    # 4. Compose the jobs. Several are derived from few composed configs, which is faster. One
    # config is there already.
    typed = frozenset(map(key_of, overrides))
    composer = JobComposer(config_name, typed, {tuple(single_words): config})
    if len(words_by_job) == 1:
        return [composer.compose(words_by_job[0])]
    return [composer.derive(job_words) for job_words in words_by_job]


def _single_words(overrides: Sequence[Override]) -> list[str]:
    """Return the words of `overrides` with one value each.

    A sweep over the choices of a group has its first choice, so that a word such as
    `selector.alpha=1` finds its key. Other sweeps are left out.
    """
    words = []
    for override in overrides:
        if not override.is_sweep_override():
            words.append(override.input_line or "")
        elif options(override.key_or_group):
            words.append(next(values_of(override)))
    return words


def config_page(words: Sequence[str], *, config_name: str, resolve: bool) -> str:
    """Return the config that `words` make, as YAML: what `fedsim --cfg job` prints.

    It has the run's name and the changes of the scale. Words with several values are left out.
    `resolve` resolves interpolations. Must be called inside `search_path`. Raises `ConfigError`.
    """
    words = without_sweeps(long_form(words, known_choices()))
    config = compose_config(words, config_name)
    words = [*without_sweeps(words_of_scale(config, parse(words))), *words]
    if config.get("name", "") is None:
        words.append(f"name={run_name(choices_of(config))}")
    config = compose_config(words, config_name)
    keys = [str(key) for key in config if key != "hydra"]
    return OmegaConf.to_yaml(OmegaConf.masked_copy(config, keys), resolve=resolve)


def check_jobs(jobs: Sequence[ComposedJob]) -> list[Plan]:
    """Return the plan of every job.

    Raises one `ConfigError` with the problems of all jobs: problems of names, types and ranges, or,
    if there are none, problems that show when components are built.
    """
    plans = outlined(jobs)
    check_components(jobs, plans)
    return plans


def outlined(jobs: Sequence[ComposedJob]) -> list[Plan]:
    """Return the plan of every job without building its components.

    Raises `ConfigError` with all mistakes in names, types and ranges that show without PyTorch.
    """
    plans = []
    collector = ProblemCollector()
    for job, swept in zip(jobs, _names_by_swept_values(jobs), strict=True):
        no_effect = _epochs_without_effect(job)
        if no_effect is not None:
            collector.add(no_effect)
        try:
            plans.append(replace(outline(job.config, job.names), swept=swept))
        except ConfigError as error:
            collector.add(*explained(error.problems, job))
    check(*collector.problems)
    return plans


def _names_by_swept_values(jobs: Sequence[ComposedJob]) -> list[str]:
    """Return a name for each job of a sweep, such as `gpfl lr=0.1 s1`.

    It has the selector, the values in which the jobs differ, with the short names of their keys,
    and the seed. The name of the only job is empty.
    """
    if len(jobs) == 1:
        return [""]
    labels = [labels_of(job.overrides) for job in jobs]
    keys = [key for key in differing_keys(labels) if key not in ("selector", "seed")]
    short_keys = short_names(keys)
    names = []
    for job, values in zip(jobs, labels, strict=True):
        words = [job.names.get("selector", "custom")]
        for key, short_key in short_keys.items():
            if key in values:
                words.append(f"{short_key}={values[key]}")
        words.append(f"s{job.config.get('seed')}")
        names.append(" ".join(words))
    return names


def check_components(jobs: Sequence[ComposedJob], plans: Sequence[Plan]) -> None:
    """Build the components of jobs whose plans are `outlined`.

    Raises `ConfigError` with all problems that show only then.
    """
    if not jobs:
        return
    from fedsim.config.parts import check_parts  # imports PyTorch

    collector = ProblemCollector()
    for job, plan in zip(jobs, plans, strict=True):
        try:
            check_parts(plan, elsewhere=runs_elsewhere(job.launcher))
        except ConfigError as error:
            collector.add(*explained(error.problems, job))
    check(*collector.problems)


def make_plan(config: Mapping[str, Any], choices: Mapping[str, str]) -> Plan:
    """Return the plan of a composed config, with its components checked.

    `choices` has the choice made in each group, such as `{"selector": "gpfl"}`. Raises
    `ConfigError`.
    """
    from fedsim.config.parts import check_parts  # imports PyTorch

    plan = outline(config, choices)
    check_parts(plan)
    return plan


def _epochs_without_effect(job: ComposedJob) -> Problem | None:
    """Return the problem of `local.epochs` on the command line while the config has `local.steps`,
    which replaces it; None if there is none."""
    local = job.config.get("local")
    if not isinstance(local, dict) or "local.epochs" not in job.typed:
        return None
    epochs = local.get("epochs")
    steps = local.get("steps")
    if epochs is None or steps is None:
        return None
    text = f"has no effect while local.steps={steps}"
    return Problem("local.epochs", epochs, text, "leave it out, or add local.steps=null")
