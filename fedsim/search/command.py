"""`fedsim search`: hyper-parameters found by Optuna, over ordinary run folders."""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from fedsim.config.build import construct
from fedsim.config.compose import check_jobs, search_path
from fedsim.config.plan import Plan
from fedsim.config.suggestions import UNKNOWN_KEY
from fedsim.config.words import flags_of, parse, read_words, typed_in
from fedsim.core.configs import SEEDS
from fedsim.core.errors import ConfigError, Problem, at_least, check, rule
from fedsim.jobs.prepare import compose_words
from fedsim.jobs.sweep import require_room
from fedsim.running.process import STOP

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`trials` in all, of which the first `startup` are drawn at random and never pruned; rounds up to `warmup` (None:
    a quarter of a run's) are never pruned either."""

    trials: int = 20
    startup: int = 5
    search_seed: int = 0
    pruner: Literal["median", "none"] = "median"
    warmup: int | None = None

    def __post_init__(self) -> None:
        check(
            at_least("trials", self.trials, 1),
            at_least("startup", self.startup, 1),
            at_least("search_seed", self.search_seed, 0),
            None if self.warmup is None else at_least("warmup", self.warmup, 0),
        )


OWN_KEYS = tuple(field.name for field in fields(Settings))


def run(words: Sequence[str]) -> int:
    """Search as the command line says. Raises `FedsimError` before any work is done."""
    _, args = read_words(_parser(), words)
    try:
        from fedsim.search.study import search, space_of
    except ModuleNotFoundError as error:
        remedy = "pip install 'fedsim-selection[search]'"
        raise ConfigError([Problem("search", ..., f"needs {error.name}, which is not installed", remedy)]) from error
    with search_path(args.config_dir, args.config_path):
        parsed = parse(args.overrides)
        check(*map(_mistaken, parsed))
        settings = construct(Settings, {o.key_or_group: o.value() for o in parsed if o.key_or_group in OWN_KEYS}, "")
        space = space_of([o for o in parsed if o.key_or_group not in OWN_KEYS])

    def plans_of(params: Mapping[str, Any]) -> list[Plan]:
        jobs = compose_words(Namespace(**{**vars(args), "overrides": space.words_of(params), "multirun": True}))
        return _of_seeds_alone(check_jobs(jobs))

    plans: list[Plan] = []
    problems: list[Problem] = []
    for corner in space.corners():
        try:
            plans += plans_of(corner)
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    check(*(with_own_keys(problem, OWN_KEYS) for problem in problems))
    require_room(plans)
    with STOP.working():
        return search(space, settings, plans_of, plans[0].settings.num_rounds, flags_of(args))


def with_own_keys(problem: Problem, keys: Sequence[str], command: str = "search") -> Problem:
    """That a key is not known, with the `keys` of the command itself."""
    own = f"{problem.remedy}; keys of the {command} itself: {', '.join(keys)}"
    return replace(problem, remedy=own) if problem.rule == UNKNOWN_KEY else problem


def _mistaken(override: "Override") -> Problem | None:
    """What is wrong with a word that is about the search, and not about its runs."""
    key = override.key_or_group
    if key in OWN_KEYS and override.is_sweep_override():
        return Problem(key, typed_in(override), "is a setting of the search itself, and takes one value", "give one")
    if key == "hydra/launcher" and typed_in(override) != "basic":
        told = "must be basic: a search runs its trials one after another, in this process"
        remedy = "leave it out; on a cluster, let a job of the scheduler run the search (docs/clusters.md)"
        return Problem(key, typed_in(override), told, remedy)
    return None


def _parser() -> ArgumentParser:
    return ArgumentParser(
        prog="fedsim search",
        usage="fedsim search KEY=VALUES ... [trials=20] [startup=5] [warmup=ROUNDS]\n"
        "                     [pruner=median|none] [search_seed=0]\n"
        "                     [words of a run: key=value ..., --config-dir DIR]",
        description="Searches in everything that is swept over, but for seeds, of which a trial is the mean. The value "
        "of a trial is the final accuracy (the mean of the last 11 rounds). A trial whose accuracy is below the median "
        "of earlier ones at the same round is ended (with pruner=none, none is; the first 5 trials, `startup`, and the "
        "first quarter of the rounds, `warmup`, are spared): its run is saved, and `fedsim` with its words goes on "
        "with it. The same command goes on where it was ended; with trials=40 it adds to what is there.",
        epilog="example: fedsim search 'optimizer.lr=tag(log,interval(0.01,0.3))' selector=gpfl,random seed=0,1",
        allow_abbrev=False,
    )


def _of_seeds_alone(plans: list[Plan]) -> list[Plan]:
    """`plans`, which a trial is the mean of. Raises `ConfigError` where they differ in more than their seeds, as with a
    preset that is a sweep."""
    configs = [{key: value for key, value in plan.config.items() if key not in SEEDS} for plan in plans]
    groups = {repr((sorted(plan.choices.items()), config)) for plan, config in zip(plans, configs, strict=True)}
    text = "makes each trial a sweep over more than seeds"
    remedy = "give one value, or values to search in, for each key that the preset sweeps over"
    check(rule(len(groups) == 1, "preset", plans[0].choices.get("preset", ...), text, remedy))
    return plans
