"""`fedsim search`: the command line of a search by Optuna (`fedsim.search.study`).

`fedsim race` and `fedsim tune` also read their own keys by `take_settings` and `with_own_keys`.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedsim.config.build import construct
from fedsim.config.command_line import place_flags, read_words
from fedsim.config.compose import check_jobs, search_path
from fedsim.config.plan import Plan
from fedsim.config.suggestions import UNKNOWN_KEY
from fedsim.config.words import parse, typed_in
from fedsim.core.configs import SEED_KEYS
from fedsim.core.errors import ConfigError, Problem, check, rule
from fedsim.jobs.prepare import compose_words, require_room
from fedsim.running.process import STOP


def run(words: Sequence[str]) -> int:
    """Search as the command line says. Raises `FedsimError` before any work is done."""
    _, args = read_words(_parser(), words)
    try:
        from fedsim.search.study import OWN_KEYS, SearchSettings, mistake_in, search, space_of
    except ModuleNotFoundError as error:
        fault = f"needs {error.name}, which is not installed"
        remedy = "pip install 'fedsim-selection[search]'"
        raise ConfigError([Problem("search", ..., fault, remedy)]) from error
    # 1. The settings of the search, and the space.
    with search_path(args.config_dir, args.config_path):
        check(*map(mistake_in, parse(args.overrides)))
        settings = construct(SearchSettings, take_settings(args, OWN_KEYS), "")
        space = space_of(parse(args.overrides))

    def plans_of(params: Mapping[str, Any]) -> list[Plan]:
        """Return the checked plans of the trial with these values, one for each seed."""
        trial_args = Namespace(**vars(args))
        trial_args.overrides = space.words_of(params)
        trial_args.multirun = True
        return _of_seeds_only(check_jobs(compose_words(trial_args)))

    # 2. Check trials with each choice and each end of a range.
    plans: list[Plan] = []
    problems: list[Problem] = []
    for corner in space.corners():
        try:
            plans += plans_of(corner)
        except ConfigError as error:
            problems += error.problems
    check(*(with_own_keys(problem, OWN_KEYS) for problem in dict.fromkeys(problems)))
    check(stop_at_problem(plan.config for plan in plans), overwrite_problem(plans))
    require_room(plans)
    # 3. Search.
    with STOP.working():
        return search(space, settings, plans_of, plans[0].settings.num_rounds, place_flags(args))


def take_settings(args: Namespace, keys: Collection[str]) -> dict[str, Any]:
    """Remove the settings of the command itself from `args.overrides`, and return their values.

    `keys` are the names of these settings. A sweep over a setting gives a list, which only a
    setting that is a list accepts.
    """
    values: dict[str, Any] = {}
    other_words = []
    for word, override in zip(args.overrides, parse(args.overrides), strict=True):
        key = override.key_or_group
        if key not in keys:
            other_words.append(word)
        elif override.is_sweep_override():
            values[key] = typed_in(override).split(",")
        else:
            values[key] = override.value()
    args.overrides = other_words
    return values


def stop_at_problem(configs: Iterable[Mapping[str, Any]]) -> Problem | None:
    """Return the problem of runs that end near one accuracy: none of them is the best."""
    targets = [config["stop_at"] for config in configs if config["stop_at"] is not None]
    fault = "ends runs near the same accuracy, so they cannot be ranked by it"
    return rule(not targets, "stop_at", targets[:1], fault, "leave it out")


def overwrite_problem(plans: Sequence[Plan]) -> Problem | None:
    """Return the problem of runs with `overwrite=true` in a command that runs jobs step by step.

    Such a command does not know all its jobs at the start. If it is stopped, the same command
    cannot tell which of them it has replaced, and would run them again.
    """
    overwrites = any(plan.settings.overwrite for plan in plans)
    fault = "is rejected here: if the command is stopped, it could not resume"
    remedy = f"delete {plans[0].folder.parent}, or choose another name=... or output_dir=..."
    return rule(not overwrites, "overwrite", True, fault, remedy)


def with_own_keys(problem: Problem, keys: Collection[str], command: str = "search") -> Problem:
    """Return `problem`. If it is about an unknown key, its remedy also names the command's keys."""
    if problem.rule != UNKNOWN_KEY:
        return problem
    own_keys = f"keys of the {command} itself: {', '.join(keys)}"
    return replace(problem, remedy=f"{problem.remedy}; {own_keys}")


def _parser() -> ArgumentParser:
    return ArgumentParser(
        prog="fedsim search",
        usage="fedsim search KEY=VALUES ... [trials=20] [startup=5] [warmup=ROUNDS]\n"
        "                     [pruner=median|none] [search_seed=0]\n"
        "                     [words of a run: key=value ..., --config-dir DIR]",
        description="Searches in everything that is swept over except seeds, of which a trial is "
        "the mean. The value of a trial is the final accuracy, the mean of the last `final_window` "
        "rounds. A trial whose accuracy is below the median of earlier ones at the same round is "
        "pruned (never with pruner=none, in the first 5 trials, `startup`, and in the first "
        "quarter of the rounds, `warmup`): its run is saved, and `fedsim` with its words resumes "
        "it. The same command resumes the search; with trials=40 it adds to what is there.",
        epilog="example: fedsim search 'optimizer.lr=tag(log,interval(0.01,0.3))' "
        "selector=gpfl,random seed=0,1",
        allow_abbrev=False,
    )


def _of_seeds_only(plans: list[Plan]) -> list[Plan]:
    """Return `plans`, the runs of one trial.

    Raises `ConfigError` if they differ in more than their seeds, as with a preset that is a sweep.
    """
    groups = set()
    for plan in plans:
        values = {key: value for key, value in plan.config.items() if key not in SEED_KEYS}
        groups.add(repr((sorted(plan.choices.items()), values)))
    preset = plans[0].choices.get("preset", ...)
    fault = "makes each trial a sweep over more than seeds"
    remedy = "give one value, or values to search in, for each key that the preset sweeps over"
    check(rule(len(groups) == 1, "preset", preset, fault, remedy))
    return plans
