"""The jobs of a command line, ready to be run: composed and checked, with their launcher and room
for results."""

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import fedsim
from fedsim.config.build import instantiate
from fedsim.config.compose import check_rest, compose_jobs, outlined, search_path
from fedsim.config.declared import declared
from fedsim.config.overlay import Composed
from fedsim.config.plan import Plan
from fedsim.core.configs import leaves
from fedsim.jobs.overwriting import Overwriting
from fedsim.jobs.sweep import Lanes, require_room
from fedsim.running.outcome import outcome_on_file

if TYPE_CHECKING:
    from fedsim.jobs.tasks import TaskLauncher


def compose_words(args: Namespace) -> list[Composed]:
    """The jobs that a command line (`fedsim.config.words.read`) describes. Raises `ConfigError`."""
    with search_path(args.config_dir, args.config_path):
        return compose_jobs(
            args.overrides, multirun=args.multirun, config_name=args.config_name or "config"
        )


def prepare(jobs: Sequence[Composed]) -> tuple[list[Plan], Overwriting]:
    """The plans of jobs, as their overwriting has found them. Raises `ConfigError` with all
    mistakes that show without PyTorch."""
    plans = outlined(jobs)
    overwriting = Overwriting(plans)
    return [overwriting.as_found(plan) for plan in plans], overwriting


def check_all(
    jobs: Sequence[Composed], plans: Sequence[Plan], *, room: bool = True
) -> "Lanes | TaskLauncher | None":
    """Check all else that can be checked before work starts, and return the launcher, None where
    jobs run one after another. Raises `FedsimError`; with all problems of all jobs where their
    configs are wrong. `room`: also whether there is room for results, and whether data can be read
    or fetched. Nothing of jobs that have ended takes PyTorch."""
    node = jobs[0].launcher
    left = [number for number, plan in enumerate(plans) if not has_passed(plan)]
    check_rest([jobs[number] for number in left], [plans[number] for number in left])
    launcher = own_launcher(node)
    if ranks := sys.modules.get("fedsim.running.ranks"):  # imported before where there are several
        ranks.RANKS.agree(plans, node)
    if room:
        require_room(plans)
    return launcher


def own_launcher(node: Mapping[str, Any]) -> "Lanes | TaskLauncher | None":
    """What the config's node `hydra.launcher` describes; None for `basic`, Hydra's own. Raises
    `ConfigError`."""
    module_name, _, name = str(node.get("_target_")).rpartition(".")
    if not module_name.startswith("fedsim."):
        return None
    module = import_module(module_name)
    cls = getattr(module, name)
    return (
        module.launcher_of(node, cls)
        if hasattr(cls, "cluster")
        else instantiate(node, cls, "hydra.launcher")
    )


def has_passed(plan: Plan) -> bool:
    """Whether a job has passed all checks before: this version of fedsim has run it to its end, and
    it is made of classes of fedsim alone, whose values are in the hash that names its folder."""
    if plan.settings.overwrite or plan.settings.device not in ("auto", "cpu"):
        return False
    found = outcome_on_file(plan)
    version = (found.summary.get("environment") or {}).get("fedsim")
    made_of = [
        str(value)
        for key, value in leaves(plan.config)
        if key.endswith("._target_") and key[:8] != "tracker."
    ]
    known = all(target.startswith("fedsim.") and declared(target) is not None for target in made_of)
    return found.final and version == fedsim.__version__ and known
