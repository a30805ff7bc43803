"""The jobs of a command line, ready to be run: composed and checked, with their launcher and room for results."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsim.config.build import instantiate
from fedsim.config.compose import Composed, check_jobs, compose_jobs, search_path
from fedsim.config.plan import Plan
from fedsim.jobs.launchers import JoblibJobs, LocalJobs, RayJobs, SlurmJobs, SubmititJobs, launcher_of
from fedsim.jobs.overwriting import Overwriting
from fedsim.jobs.sweep import require_room
from fedsim.jobs.tasks import TaskLauncher
from fedsim.running.interleaving import Lanes
from fedsim.running.ranks import RANKS

LAUNCHERS: dict[str, type[Lanes | TaskLauncher]] = {
    cls.__name__: cls for cls in (Lanes, JoblibJobs, RayJobs, LocalJobs, SlurmJobs)
}


@dataclass(frozen=True)
class Prepared:
    """`plans`: as `overwriting` has found them; `launcher`: None where they run one after another."""

    plans: list[Plan]
    launcher: Lanes | TaskLauncher | None
    overwriting: Overwriting


def compose_words(args: Namespace) -> list[Composed]:
    """The jobs that a command line (`fedsim.config.words.read`) describes. Raises `ConfigError`."""
    with search_path(args.config_dir, args.config_path):
        return compose_jobs(args.overrides, multirun=args.multirun, config_name=args.config_name or "config")


def prepare(jobs: Sequence[Composed], *, room: bool = True) -> Prepared:
    """Check all that can be checked before work starts. Raises `FedsimError`; with all problems of all jobs where their
    configs are wrong. `room`: also whether there is room for results, and whether data can be read or fetched."""
    plans = check_jobs(jobs)
    launcher = own_launcher(jobs[0].launcher)
    RANKS.agree(plans, jobs[0].launcher)
    overwriting = Overwriting(plans)
    plans = [overwriting.as_found(plan) for plan in plans]
    if room:
        require_room(plans)
    return Prepared(plans, launcher, overwriting)


def own_launcher(node: Mapping[str, Any]) -> Lanes | TaskLauncher | None:
    """What the config's node `hydra.launcher` describes; None for `basic`, Hydra's own. Raises `ConfigError`."""
    cls = LAUNCHERS.get(str(node.get("_target_")).rpartition(".")[2])
    if cls is None:
        return None
    return launcher_of(node, cls) if issubclass(cls, SubmititJobs) else instantiate(node, cls, "hydra.launcher")
