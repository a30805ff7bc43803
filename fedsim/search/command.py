"""`fedsim search`: hyper-parameters found by Optuna, over ordinary run folders."""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedsim.config.build import construct
from fedsim.config.compose import check_jobs, search_path
from fedsim.config.plan import Plan
from fedsim.config.suggestions import UNKNOWN_KEY
from fedsim.config.words import flags_of, parse, read_words
from fedsim.core.configs import SEED_KEYS
from fedsim.core.errors import ConfigError, Problem, check, rule
from fedsim.jobs.prepare import compose_words
from fedsim.jobs.sweep import require_room
from fedsim.running.process import STOP


def run(words: Sequence[str]) -> int:
    """Search as the command line says. Raises `FedsimError` before any work is done."""
    _, args = read_words(_parser(), words)
    try:
        from fedsim.search.study import OWN_KEYS, Settings, mistaken, search, space_of
    except ModuleNotFoundError as error:
        remedy = "pip install 'fedsim-selection[search]'"
        raise ConfigError(
            [Problem("search", ..., f"needs {error.name}, which is not installed", remedy)]
        ) from error
    with search_path(args.config_dir, args.config_path):
        parsed = parse(args.overrides)
        check(*map(mistaken, parsed))
        settings = construct(
            Settings, {o.key_or_group: o.value() for o in parsed if o.key_or_group in OWN_KEYS}, ""
        )
        space = space_of([o for o in parsed if o.key_or_group not in OWN_KEYS])

    def plans_of(params: Mapping[str, Any]) -> list[Plan]:
        jobs = compose_words(
            Namespace(**{**vars(args), "overrides": space.words_of(params), "multirun": True})
        )
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
    """`plans`, which a trial is the mean of. Raises `ConfigError` where they differ in more than
    their seeds, as with a preset that is a sweep."""
    configs = [
        {key: value for key, value in plan.config.items() if key not in SEED_KEYS} for plan in plans
    ]
    groups = {
        repr((sorted(plan.choices.items()), config))
        for plan, config in zip(plans, configs, strict=True)
    }
    text = "makes each trial a sweep over more than seeds"
    remedy = "give one value, or values to search in, for each key that the preset sweeps over"
    check(rule(len(groups) == 1, "preset", plans[0].choices.get("preset", ...), text, remedy))
    return plans
