"""The entry point: `fedsim`, or `python -m fedsim.run`. Composes the command line, checks it, runs every job.

Exit codes: 0 done, 1 a run failed, 2 config, 3 data, 4 diverged, 130 interrupted. FEDSIM_DEBUG=1 shows tracebacks.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from fedsim.compose import Composed, compose_jobs, conf_dir, plain, search_path
from fedsim.errors import ConfigError, FedsimError, Problem

EXIT_CODES = {"done": 0, "failed": 1, "config": 2, "data": 3, "diverged": 4, "interrupted": 130}


def main() -> None:
    """Run the command line and exit with its code."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # a user's own classes, as with `python -m`
    try:
        code = run(sys.argv[1:])
    except FedsimError as error:
        if os.environ.get("FEDSIM_DEBUG") == "1":
            raise
        code = report(error)
    except KeyboardInterrupt:
        code = EXIT_CODES["interrupted"]
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Everything that the command line asks for; the exit code. Raises `FedsimError` before any work is done."""
    args = get_args_parser().parse_args(argv)
    if args.experimental_rerun:
        raise ConfigError([Problem("--experimental-rerun", ..., "is not supported: it would unpickle a file")])
    if args.help or args.hydra_help or args.cfg or args.info or args.shell_completion:
        _hand_to_hydra(lambda config: None)
        return 0
    with search_path(args.config_dir, args.config_path) as extra:
        jobs = compose_jobs(
            args.overrides, multirun=args.multirun, config_name=args.config_name or "config", extra=extra
        )
    return _run_jobs(jobs)


def _run_jobs(jobs: Sequence[Composed]) -> int:
    from fedsim.experiment import Outcome, execute
    from fedsim.plan import make_plan
    from fedsim.tracking.files import read_summary

    plans = _gather(jobs)
    outcomes: dict[Path, Outcome] = {}
    failures: dict[Path, FedsimError] = {}

    def job(config: DictConfig) -> str:
        plan = make_plan(plain(config), dict(HydraConfig.get().runtime.choices))
        try:
            outcomes[plan.folder] = execute(plan)
        except FedsimError as error:
            failures[plan.folder] = error
            return "failed"
        return outcomes[plan.folder].status

    _hand_to_hydra(job)
