"""The entry point: `fedsim`, or `python -m fedsim.run`. Composes the command line, checks it, runs every job.

Exit codes: 0 done, 1 a run failed, 2 config, 3 data, 4 diverged, 130 interrupted. FEDSIM_DEBUG=1 shows tracebacks.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from fedsim.config.compose import Composed, compose_jobs, conf_dir, plain, search_path
from fedsim.errors import ConfigError, DataError, FedsimError, Problem, check, rule
from fedsim.running.process import tune

if TYPE_CHECKING:
    from fedsim.config.plan import Plan
    from fedsim.running.experiment import Outcome
    from fedsim.running.interleaving import InterleavedRun, Lanes

EXIT_CODES = {"done": 0, "failed": 1, "config": 2, "data": 3, "diverged": 4, "interrupted": 130}
SEVERITY = ("done", "diverged", "data", "config", "failed", "interrupted")


def main() -> None:
    """Run the command line and exit with its code."""
    tune()
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # finds a user's own classes, as `python -m` does
    try:
        code = run(sys.argv[1:])
    except FedsimError as error:
        if os.environ.get("FEDSIM_DEBUG") == "1":
            raise
        tell(error)
        code = error.exit_code
    except KeyboardInterrupt:
        code = EXIT_CODES["interrupted"]
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Do what the command line asks for and return the exit code. Raises `FedsimError` before any work is done."""
    args = get_args_parser().parse_intermixed_args(argv)
    sys.argv = [sys.argv[0], *_in_hydras_order(args)]
    if args.experimental_rerun:
        raise ConfigError([Problem("--experimental-rerun", ..., "is not supported: it would unpickle a file")])
    if args.help or args.hydra_help or args.cfg or args.info or args.shell_completion:
        hand_to_hydra(lambda config: None)
        return 0
    with search_path(args.config_dir, args.config_path):
        jobs = compose_jobs(args.overrides, multirun=args.multirun, config_name=args.config_name or "config")
    return run_jobs(jobs)


def run_jobs(jobs: Sequence[Composed]) -> int:
    """Check all jobs, let Hydra launch them, and close a sweep with one table."""
    from fedsim.running.experiment import outcome_on_file
    from fedsim.tracking.console import sweep_table

    plans = check_jobs(jobs)
    lanes = _lanes(jobs)
    attempts = Attempts()
    if lanes is not None and len(plans) > 1:
        run_in_lanes(plans, lanes, attempts)
    elif lanes is not None:
        attempts.run(plans[0])
    else:
        checked = {_task(job.overrides): plan for job, plan in zip(jobs, plans, strict=True)}
        hand_to_hydra(lambda config: attempts.run(_launched(checked, config)).status)
    if attempts.refused and len(plans) == 1:
        raise attempts.refused[0]
    for error in attempts.refused:
        tell(error)
    outcomes = [attempts.ended.get(plan.folder) or outcome_on_file(plan) for plan in plans]
    if len(plans) > 1:
        sweep_table([_row(*one) for one in zip(jobs, plans, outcomes, strict=True)])
    return EXIT_CODES[max((outcome.status for outcome in outcomes), key=SEVERITY.index)]


class Attempts:
    """Jobs as they are run: how each ended, and what was refused before its first round."""

    def __init__(self) -> None:
        self.ended: dict[Path, Outcome] = {}
        self.refused: list[FedsimError] = []

    def run(self, plan: "Plan", interleaved: "InterleavedRun | None" = None) -> "Outcome":
        """Run a job. Raises KeyboardInterrupt after an interrupted one."""
        from fedsim.running.experiment import Outcome, execute

        try:
            outcome = execute(plan, interleaved)
        except FedsimError as error:  # Hydra would bury it
            self.refused.append(error)
            outcome = Outcome("data" if isinstance(error, DataError) else "failed", {"error": str(error)})
        self.ended[plan.folder] = outcome
        if outcome.skipped:
            print(f"already {outcome.status}: {plan.folder} (overwrite=true runs it again)")
        if outcome.status == "interrupted":
            raise KeyboardInterrupt
        return outcome


def run_in_lanes(plans: "Sequence[Plan]", lanes: "Lanes", attempts: Attempts) -> None:
    """Run the jobs side by side, as many at a time as there are lanes and as fit together."""
    from fedsim.running.interleaving import run_interleaved
    from fedsim.tracking.console import lanes_progress

    for group in lanes.groups(plans):
        with lanes_progress(len(group), max(plan.settings.num_rounds for plan in group)) as progress:
            run_interleaved([partial(attempts.run, plan) for plan in group], progress)


def check_jobs(jobs: Sequence[Composed]) -> "list[Plan]":
    """The plan of every job; one `ConfigError` with the problems of all of them."""
    plans, problems = [], []
    for job in jobs:
        try:
            check(_work_without_effect(job))
            plans.append(_plan(job.config, job.choices))
        except ConfigError as error:
            problems += [p for p in error.problems if p not in problems]
    if problems:
        raise ConfigError(problems)
    return plans


def hand_to_hydra(job: Callable[[DictConfig], Any]) -> None:
    """Let Hydra do what the command line says, with `job` as its task."""
    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(job)()


def tell(error: FedsimError) -> None:
    """One screen on stderr."""
    if isinstance(error, ConfigError):
        count = len(error.problems)
        print(f"fedsim: {count} problem{'s' if count > 1 else ''} in the config; nothing was run", file=sys.stderr)
        for problem in error.problems:
            print(f"  {problem}", file=sys.stderr)
    else:
        print(f"fedsim: {error}", file=sys.stderr)


def _in_hydras_order(args: Namespace) -> list[str]:
    """The command line again, flags first: Hydra, which parses it anew, takes none behind an override."""
    given = {name: value for name, value in vars(args).items() if value not in (None, False, [])}
    overrides = given.pop("overrides", [])
    words = [[f"--{name.replace('_', '-')}", *([] if value is True else [value])] for name, value in given.items()]
    return [*chain.from_iterable(words), *overrides]


def _task(overrides: Sequence[str]) -> tuple[str, ...]:
    """Those that are not about Hydra itself, as `hydra.overrides.task` has them."""
    return tuple(o for o in overrides if not o.lstrip("+~").startswith("hydra"))


def _launched(checked: "Mapping[tuple[str, ...], Plan]", config: DictConfig) -> "Plan":
    """The plan that was checked for the job that Hydra has launched: conf/ may have been edited since, which must not
    change the jobs of a sweep that are still to come."""
    plan = checked.get(_task(HydraConfig.get().overrides.task))
    return plan or _plan(plain(config), dict(HydraConfig.get().runtime.choices))


def _plan(config: Mapping[str, Any], choices: Mapping[str, Any]) -> "Plan":
    from fedsim.config.plan import make_plan

    return make_plan(config, {g: c for g, c in choices.items() if c is not None and not g.startswith("hydra/")})


def _lanes(jobs: Sequence[Composed]) -> "Lanes | None":
    """What `hydra/launcher=lanes` says; None for other launchers, which are Hydra's affair."""
    from fedsim.config.build import make
    from fedsim.running.interleaving import Lanes

    node = jobs[0].launcher
    return make(node, Lanes, "hydra.launcher") if node.get("_target_") == "fedsim.running.interleaving.Lanes" else None


def _work_without_effect(job: Composed) -> Problem | None:
    """`local.epochs` on the command line, although `local.steps` takes its place."""
    steps = (job.config.get("local") or {}).get("steps")
    given = [o for o in job.overrides if o.startswith("local.epochs=") and not o.endswith("=null")]
    return rule(
        not (given and steps is not None),
        "local.epochs",
        given[0].split("=", 1)[1] if given else None,
        f"has no effect while local.steps={steps}",
        "leave it out, or add local.steps=null",
    )


def _row(job: Composed, plan: "Plan", outcome: "Outcome") -> dict[str, Any]:
    return {
        "labels": {k.lstrip("+"): v for k, _, v in (o.partition("=") for o in job.overrides) if k != "seed"},
        "seed": plan.settings.seed,
        "status": outcome.status,
        "summary": outcome.summary,
        "folder": plan.folder,
    }


if __name__ == "__main__":
    main()
