"""Prepares the jobs of a command line: composes and checks them, and returns their launcher.

Before any work starts, it is checked that data can be read or fetched, and that there is room for
results.
"""

import json
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fedsim
from fedsim.config.build import instantiate
from fedsim.config.compose import check_rest, compose_jobs, outlined, search_path
from fedsim.config.declared import stand_in
from fedsim.config.job import ComposedJob
from fedsim.config.plan import Plan
from fedsim.core.configs import leaves
from fedsim.core.disk import space_problem
from fedsim.core.errors import Problem, check
from fedsim.jobs.overwriting import Overwriting
from fedsim.jobs.sweep import Lanes, to_come
from fedsim.results.files import refuse_links
from fedsim.running.outcome import outcome_on_file

if TYPE_CHECKING:
    from fedsim.jobs.tasks import TaskLauncher

# Roughly what a run's files need, without models.
BYTES_OF_RUN = 2_000_000  # its division, config and summary
BYTES_OF_ROUND = 1_000  # a line of metrics.jsonl
BYTES_OF_ID = 8  # a client's id in such a line


def compose_words(args: Namespace) -> list[ComposedJob]:
    """Return the jobs of a command line (`fedsim.config.command_line.read_command_line`). Raises
    `ConfigError`."""
    with search_path(args.config_dir, args.config_path):
        return compose_jobs(args.overrides, multirun=args.multirun, config_name=args.config_name)


def prepare(jobs: Sequence[ComposedJob]) -> tuple[list[Plan], Overwriting]:
    """Return the plans of jobs, and what is known of their overwriting.

    Raises `ConfigError` with all mistakes that can be found without PyTorch.
    """
    plans = outlined(jobs)
    overwriting = Overwriting(plans)
    return list(map(overwriting.as_found, plans)), overwriting


def check_all(
    jobs: Sequence[ComposedJob], plans: Sequence[Plan], *, room: bool = True
) -> "Lanes | TaskLauncher | None":
    """Check everything else that can be checked before work starts, and return the launcher.

    The launcher is None if jobs run one after another. `room` is whether to check for data and for
    room for results, too. Jobs that have ended need no PyTorch. Raises `FedsimError`, with all
    problems of all jobs if their configs are wrong.
    """
    node = jobs[0].launcher
    unchecked_jobs = []
    unchecked_plans = []
    for job, plan in zip(jobs, plans, strict=True):
        if not has_passed(plan):
            unchecked_jobs.append(job)
            unchecked_plans.append(plan)
    check_rest(unchecked_jobs, unchecked_plans)
    launcher = own_launcher(node)
    ranks = sys.modules.get("fedsim.running.ranks")  # imported by now if there are several
    if ranks is not None:
        ranks.RANKS.agree(plans, node)
    if room:
        require_room(plans)
    return launcher


def own_launcher(node: Mapping[str, Any]) -> "Lanes | TaskLauncher | None":
    """Return the launcher that `hydra.launcher` describes; None for `basic`, Hydra's own.

    Raises `ConfigError`.
    """
    module_name, _, name = str(node.get("_target_")).rpartition(".")
    if not module_name.startswith("fedsim."):
        return None
    module = import_module(module_name)
    cls = getattr(module, name)
    if hasattr(cls, "cluster"):
        launcher: TaskLauncher = module.launcher_of(node, cls)
        return launcher
    return instantiate(node, cls, "hydra.launcher")


def has_passed(plan: Plan) -> bool:
    """Return whether a job has passed all checks before.

    This version of fedsim has run it to its end. It is made of classes of fedsim only, whose values
    are in the hash that names its folder.
    """
    if plan.settings.overwrite or plan.settings.device not in ("auto", "cpu"):
        return False
    recorded = outcome_on_file(plan)
    environment = recorded.summary.get("environment") or {}
    if not recorded.final or environment.get("fedsim") != fedsim.__version__:
        return False
    targets = [
        str(value)
        for key, value in leaves(plan.config)
        if key.endswith("._target_") and not key.startswith("tracker.")
    ]
    return all(target.startswith("fedsim.") and stand_in(target) for target in targets)


def require_room(plans: Iterable[Plan]) -> None:
    """Check that folders for results can be written and have room for the runs still to come.

    Also checks that source files of their data can be read, or fetched. Raises `ConfigError`.
    """
    plans = to_come(plans)
    for plan in plans:
        refuse_links(plan.folder)
    check(*output_problems(plans), *source_problems(plans))


def output_problems(plans: Iterable[Plan]) -> list[Problem]:
    """Return the problems of the folders for the results of runs."""
    needs: Counter[Path] = Counter()
    for plan in plans:
        needs[plan.settings.output_dir] += _bytes_of(plan)
    problems = [space_problem("output_dir", folder, need) for folder, need in needs.items()]
    return list(filter(None, problems))


def _bytes_of(plan: Plan) -> int:
    settings = plan.settings
    cohort_size = min(settings.cohort_size, settings.num_clients)
    return BYTES_OF_RUN + settings.num_rounds * (BYTES_OF_ROUND + BYTES_OF_ID * cohort_size)


def source_problems(plans: Iterable[Plan]) -> list[Problem]:
    """Return the problems of source files that can be found without reading them."""
    problems = map(_source_problem, by_source(plans))
    return list(filter(None, dict.fromkeys(problems)))


def by_source(plans: Iterable[Plan]) -> list[Plan]:
    """Return one plan for each data set and `data_dir`."""
    by_key = {}
    for plan in plans:
        source = [plan.config["dataset"], str(plan.data_dir)]
        by_key[json.dumps(source, sort_keys=True, default=str)] = plan
    return list(by_key.values())


def _source_problem(plan: Plan) -> Problem | None:
    from fedsim.data.base import Dataset

    node = plan.config["dataset"]
    # Its own job reports whatever else is wrong with a data set, which may be of a user's class.
    with suppress(Exception):
        dataset = instantiate(node, Dataset, "dataset", plan.data_dir, plan.cache_dir)
        return dataset.source_problem()
    return None
