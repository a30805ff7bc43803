"""The experiment that is meant: the configs of its jobs, its folders, and the data sets that are there."""

import shutil
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from fedsim.commands.catalogue.choices import Catalogue
from fedsim.commands.doctor.finding import Finding, fail, ok, warn
from fedsim.config.build import instantiate
from fedsim.config.check import check_jobs
from fedsim.config.command_line import for_hydra
from fedsim.config.compose import compose_jobs, search_path
from fedsim.config.plan import Plan
from fedsim.data.base import Dataset
from fedsim.disk import existing_folder, reading_problem, room_problem
from fedsim.errors import ConfigError, FedsimError, Problem
from fedsim.jobs.launchers import own_launcher
from fedsim.jobs.overwriting import Overwriting
from fedsim.jobs.room import BYTES_OF_RUN, by_source, output_problems, source_problems
from fedsim.running.outcome import outcome_on_file
from fedsim.shell import command

LITTLE = 1e9
"""Free bytes below which a folder is soon full."""


def plans_of(args: Namespace) -> tuple[list[Plan], list[Finding]]:
    """The plans of all jobs, and whether they can be made: as `fedsim show` judges them, one line a problem."""
    words = for_hydra(args)
    what = f"`{command('fedsim', *words)}`" if words else "the default experiment"
    try:
        with search_path(args.config_dir, args.config_path):
            jobs = compose_jobs(args.overrides, multirun=args.multirun, config_name=args.config_name or "config")
        plans = check_jobs(jobs)
        own_launcher(jobs[0].launcher)
        plans = [*map(Overwriting(plans).as_found, plans)]
    except ConfigError as error:
        return [], [_failed("config", problem) for problem in error.problems]
    except FedsimError as error:
        return [], [fail(f"config: {what} is refused: {' '.join(str(error).split())}", "`fedsim` with it tells more")]
    return plans, [ok(f"config: {what} is accepted{f', {len(plans)} jobs' if len(plans) > 1 else ''}")]


def _failed(topic: str, problem: Problem) -> Finding:
    """A problem of the words, as a line of its own."""
    return fail(f"{topic}: {_without_remedy(problem)}", problem.remedy or "correct it")


def _without_remedy(problem: Problem) -> str:
    return str(Problem(problem.key, problem.value, problem.rule))


def _to_come(plans: Sequence[Plan]) -> list[Plan]:
    return [plan for plan in plans if plan.settings.overwrite or not outcome_on_file(plan).final]


def folders(plans: Sequence[Plan]) -> Iterator[Finding]:
    """Whether results and decoded data can be written, and how much room there is."""
    problems = output_problems(_to_come(plans))
    yield from (_failed("disk", problem) for problem in problems)
    told = {str(problem.value) for problem in problems}
    for folder in dict.fromkeys(plan.settings.output_dir for plan in plans):
        if str(folder) not in told:
            yield _room("output_dir", folder)
    for folder in dict.fromkeys(plan.cache_dir for plan in plans):
        yield _room("cache_dir", folder)


def _room(key: str, folder: Path) -> Finding:
    if problem := room_problem(key, folder, BYTES_OF_RUN):
        return warn(f"disk: {_without_remedy(problem)}", problem.remedy)
    free = shutil.disk_usage(existing_folder(folder)).free
    text = f"disk: {key}={folder} can be written, {free / 1e9:.1f} GB free"
    return warn(text, f"make room there, or choose another {key}") if free < LITTLE else ok(text)


def data(plans: Sequence[Plan]) -> Iterator[Finding]:
    """Which data sets of conf/ are in data_dir, and what is missing of those of the experiment."""
    for plan in {plan.data_dir: plan for plan in plans}.values():
        if problem := reading_problem("data_dir", plan.data_dir):
            yield warn(f"data: {_without_remedy(problem)}", problem.remedy)
        yield _there(plan)
    yield from (_failed("data", problem) for problem in source_problems(_to_come(plans)))
    yield from (found for plan in by_source(_to_come(plans)) if (found := _absent(plan)))


def _there(plan: Plan) -> Finding:
    """The data sets of conf/: those that are in data_dir, those that are fetched, and those without files."""
    nodes = {name: choice.values for name, choice in Catalogue().group("dataset").choices.items()}
    there: list[str] = []
    fetched: list[str] = []
    without: list[str] = []
    for name, node in nodes.items():
        with suppress(FedsimError):  # those that need a path are the user's own
            found = instantiate(node, Dataset, "dataset", plan.data_dir, plan.cache_dir)
            empty = instantiate(node, Dataset, "dataset", Path("/nonexistent"), plan.cache_dir)
            kind = fetched if found.missing() else there if empty.missing() else without
            kind.append(name)
    parts = {"there": there, "fetched at first use": fetched, "without files": without}
    listed = "; ".join(f"{title}: {', '.join(names)}" for title, names in parts.items() if names)
    return ok(f"data: data_dir={plan.data_dir}: {listed}")


def _absent(plan: Plan) -> Finding | None:
    """What is not on disk of the data set of a job."""
    node = plan.config["dataset"]
    absent = instantiate(node, Dataset, "dataset", plan.data_dir, plan.cache_dir).absent()
    if not absent:
        return None
    path = node.get("path")
    key, value = ("data_dir", str(plan.data_dir)) if path is None else ("dataset.path", path)
    elsewhere = f"point data_dir or FEDSIM_DATA to the folder that has it (data_dir={plan.data_dir})"
    remedy = "correct it, or set FEDSIM_DATA" if path is None else f"correct it, or {elsewhere}"
    return _failed("data", Problem(key, value, f"is missing {', '.join(absent)}", remedy))
