"""Experiments from Python: composed from overrides as on the command line, checked, and run in this
process.

fedsim installs no signal handler, changes no thread setting and never exits here: errors are
exceptions (`fedsim.core.errors`). Ctrl-C, or a notebook's interrupt, stops a run as on the command
line, and the same call resumes it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from hydra.core.global_hydra import GlobalHydra

from fedsim.api.parts import Part, check_overrides, is_lasting, with_parts
from fedsim.api.results import RunFailedError, RunResult, SweepResult, TemporaryFolder
from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.config.plan import Plan
from fedsim.core.errors import ConfigError, Problem, check, rule
from fedsim.core.record import Record
from fedsim.jobs.narration import Narration, has_console
from fedsim.jobs.overwriting import Overwriting
from fedsim.jobs.prepare import require_room
from fedsim.jobs.progress import Progress
from fedsim.jobs.sweep import Attempts, Lanes
from fedsim.running.assembly import forget
from fedsim.running.experiment import execute
from fedsim.running.outcome import Watch, outcome_on_file
from fedsim.tracking.tables import print_line

Words = Sequence[str]
"""Overrides as on the command line: `["selector=oort", "num_rounds=20"]`."""
OnRound = Callable[[Record], bool | None]
"""A callback that gets the record of each round. It ends the run there if it returns True or raises
`StopRun`."""
OnRoundOf = Callable[[Plan, Record], bool | None]
"""The same for a sweep, with the experiment of the round. It ends that run alone."""


class StopRun(Exception):  # noqa: N818  (a request, as StopIteration is)
    """A callback raises this to end its run after the round. A checkpoint is kept, from which the
    same call resumes."""


def compose(
    overrides: Words = (), *, config_dir: str | Path | None = None, **parts: Part
) -> list[Plan]:
    """Return the experiments that `overrides` describe, checked. A sweep (`seed=0,1,2`, a preset)
    has several.

    `config_dir` is a folder of your own YAML files (`--config-dir`). `parts` are classes, or
    `functools.partial`s of classes with their values, that replace the choices of groups, as in
    `selector=partial(Median, quantile=0.5)`. If a preset sweeps over that group, experiments that
    become the same are one. Nothing is loaded or run. Raises `ConfigError` with all problems of all
    experiments.

    >>> [plan.settings.seed for plan in compose(["selector=oort", "seed=0,1"])]
    [0, 1]
    """
    is_words = not isinstance(overrides, str) and all(isinstance(w, str) for w in overrides)
    text = "must be a list of words such as 'selector=oort'"
    remedy = "run_experiment runs a Plan, run_sweep a list"
    check(rule(is_words, "overrides", ..., text, remedy))
    check_overrides(overrides, parts)
    hydra_before = GlobalHydra.instance().hydra
    try:
        with search_path(None if config_dir is None else str(config_dir)):
            jobs = compose_jobs(list(overrides), multirun=True)
            plans = check_jobs([with_parts(job, parts) for job in jobs])
    finally:
        GlobalHydra.instance().hydra = hydra_before  # for programs that use Hydra themselves
    return list({plan.folder: plan for plan in plans}.values()) if parts else plans


def run_experiment(
    experiment: Plan | Words = (),
    *,
    on_round: OnRound | None = None,
    keep: bool | None = None,
    config_dir: str | Path | None = None,
    **parts: Part,
) -> RunResult:
    """Run one experiment: a plan of `compose`, or the one that overrides (and `parts`) describe.

    The result is that of the same command, in the same folder, `outputs/...`: a finished run is
    skipped (`overwrite=true` runs it again), and an unfinished one is resumed. `on_round` is called
    after each round that is run here.

    With `keep=False` the files are temporary. That is the default, and required, for classes that
    are defined in a notebook or in the script itself, because a folder's name stands for a config
    that any process can run again.

    Raises `ConfigError` and `DataError` before round 1, `RunFailedError` if a round fails,
    `HeldError` if another process is running it, and what `on_round` raises.

        result = run_experiment(["selector=oort", "num_rounds=20", "tracker=files_only"])
        result.final_accuracy, result.rounds
    """
    experiments = [experiment] if isinstance(experiment, Plan) else experiment
    plans = _composed(experiments, config_dir, parts)
    if len(plans) > 1:
        text = f"describes {len(plans)} experiments"
        raise ConfigError([Problem("overrides", ..., text, "run_sweep runs several")])
    ((plan, place),) = _prepared(plans, keep)
    callback = _Callback(None if on_round is None else lambda _, record: on_round(record), plan)
    outcome = execute(plan, watch=callback)
    callback.raise_error()
    result = RunResult(plan, outcome.status, outcome.summary, outcome.skipped, place)
    if outcome.status == "failed":
        raise RunFailedError(result) from outcome.cause
    return result


def run_sweep(
    experiments: Sequence[Plan] | Words,
    *,
    lanes: int | None = None,
    on_round: OnRoundOf | None = None,
    keep: bool | None = None,
    config_dir: str | Path | None = None,
    **parts: Part,
) -> SweepResult:
    """Run several experiments, as `run_experiment` runs one: plans of `compose`, or those that
    overrides describe (`seed=0,1,2`).

    `lanes` is the number of runs that are trained together in common batches (None: one after
    another). A run that fails, or whose data are missing, does not stop the others; its status says
    so. Experiments that mean the same run are one. `on_round` also gets the experiment.

        sweep = run_sweep(["selector=random,oort", "seed=0,1,2", "tracker=files_only"])
        sweep.runs[["selector", "seed", "final_accuracy"]]
    """
    if not (experiments or parts):
        remedy = "run_experiment() runs the default one"
        raise ConfigError([Problem("experiments", [], "has no experiment", remedy)])
    text, remedy = "must be an integer >= 1, or None", "it is the number of runs trained together"
    check(rule(lanes is None or (type(lanes) is int and lanes >= 1), "lanes", lanes, text, remedy))
    plans_by_folder = {plan.folder: plan for plan in _composed(experiments, config_dir, parts)}
    prepared = _prepared(list(plans_by_folder.values()), keep)
    overwriting = Overwriting([plan for plan, _ in prepared])
    plans = [overwriting.without_replaced(plan) for plan, _ in prepared]
    callback = _Callback(on_round)
    progress = Progress(plans)
    words = []
    for plan in plans:
        choices = [f"{group}={choice}" for group, choice in plan.choices.items()]
        words.append([*choices, f"seed={plan.settings.seed}"])
    screen = Narration(plans, words, (), progress) if any(map(has_console, plans)) else None
    if screen is not None and overwriting.notice:
        print_line(overwriting.notice)
    attempts = Attempts(progress, screen, callback, overwriting)
    with overwriting.noted():
        if lanes is None:
            for plan in plans:
                attempts.run(plan)
                callback.raise_error()
        else:
            Lanes(max_lanes=lanes).run(attempts, plans)
        callback.raise_error()
        attempts.run_held(attempts.run_in_turn)
        callback.raise_error()
    results = []
    for plan, place in prepared:
        outcome = attempts.ended.get(plan.folder) or outcome_on_file(plan)
        results.append(RunResult(plan, outcome.status, outcome.summary, outcome.skipped, place))
    return SweepResult(results)


def _composed(
    experiments: Sequence[Plan] | Words, config_dir: str | Path | None, parts: Mapping[str, Part]
) -> list[Plan]:
    """Return plans as they are, or the plans that overrides describe."""
    plans = [plan for plan in experiments if isinstance(plan, Plan)]
    if not plans:
        return compose(cast(Words, experiments), config_dir=config_dir, **parts)
    is_all_plans = len(plans) == len(experiments)
    text = "must be overrides or composed experiments, not both"
    problems = [rule(is_all_plans, "experiments", ..., text, "[*plans, *compose(overrides)]")]
    unused = [*parts, "config_dir"] if config_dir is not None else parts
    for name in unused:
        text = "has no effect on a composed experiment"
        problems.append(Problem(name, ..., text, "give it to compose"))
    check(*problems)
    return plans


class _Callback(Watch):
    """A user's callback, whose answers and exceptions become reasons to end a run. `plan` is that
    of a single run."""

    def __init__(self, function: OnRoundOf | None, plan: Plan | None = None) -> None:
        self._function, self._plan = function, plan
        self._error: Exception | None = None

    def __call__(self, plan: Plan, record: Record) -> str | None:
        """Return why the run ends; None if it does not."""
        if self._error is not None:  # raised in another lane
            return "ended with another run"
        try:
            stop = self._function is not None and self._function(plan, record)
        except StopRun:
            stop = True
        except Exception as error:
            self._error = error
            return f"ended by on_round ({type(error).__name__}: {error})"
        return "ended by on_round" if stop else None

    def round_ended(self, record: Record) -> str | None:
        """Return why the single run ends; None if it does not."""
        assert self._plan is not None
        return self(self._plan, record)

    def raise_error(self) -> None:
        """Raise the exception of the callback, if there was one."""
        if self._error is not None:
            raise self._error


def _prepared(
    plans: Sequence[Plan], keep: bool | None
) -> list[tuple[Plan, TemporaryFolder | None]]:
    """Return each plan with the folder in which it will run, and its temporary folder if there is
    one.

    Plans that overwrite read their data again. Raises what prevents them from being run.
    """
    lasting = [is_lasting(plan) for plan in plans]
    if keep and not all(lasting):
        text = (
            "cannot be kept: no other process can import a class of a notebook, a script or a "
            "function"
        )
        remedy = "move the class to a module, or leave keep out"
        raise ConfigError([Problem("keep", True, text, remedy)])
    prepared: list[tuple[Plan, TemporaryFolder | None]] = []
    temporary: TemporaryFolder | None = None
    for plan, can_last in zip(plans, lasting, strict=True):
        if can_last and keep is not False:
            prepared.append((plan, None))
            continue
        temporary = temporary or TemporaryFolder()
        folder = temporary.path / plan.folder.name
        prepared.append((replace(plan, folder=folder), temporary))
    require_room(plan for plan, _ in prepared)
    if any(plan.settings.overwrite for plan in plans):
        forget()
    return prepared
