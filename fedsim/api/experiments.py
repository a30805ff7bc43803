"""Experiments from Python.

They are composed from overrides as on the command line, checked, and run in this process. fedsim
installs no signal handler, changes no thread setting and never exits here: errors are exceptions
(`fedsim.core.errors`). Ctrl-C, or a notebook's interrupt, stops a run as on the command line, and
the same call resumes it.
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
from fedsim.core.errors import Problem, check, rule
from fedsim.core.record import Record
from fedsim.jobs.narration import Narration, has_console
from fedsim.jobs.overwriting import Overwriting
from fedsim.jobs.prepare import check_files
from fedsim.jobs.progress import Progress
from fedsim.jobs.sweep import Attempts, Lanes
from fedsim.running.assembly import forget
from fedsim.running.experiment import execute
from fedsim.running.outcome import Outcome, Watch, outcome_on_file
from fedsim.tracking.tables import print_line

Words = Sequence[str]
"""Overrides as on the command line: `["selector=oort", "num_rounds=20"]`."""
OnRound = Callable[[Record], bool | None]
"""A callback of a run, which gets the record of each round.

If it returns True or raises `StopRun`, the run ends after this round.
"""
OnRoundOf = Callable[[Plan, Record], bool | None]
"""A callback of a sweep, which gets the plan and the record of each round of each run.

If it returns True or raises `StopRun`, the run of this plan ends after this round. The other runs
continue.
"""


class StopRun(Exception):  # noqa: N818  (a request, as StopIteration is)
    """A request of a callback to end its run after the round.

    A checkpoint is kept, from which the same call resumes.
    """


def compose(
    overrides: Words = (), *, config_dir: str | Path | None = None, **parts: Part
) -> list[Plan]:
    """Return the checked plans of the experiments that `overrides` describe.

    A sweep (`seed=0,1,2`, a preset) has several.

    `config_dir` is a folder of your own YAML files (`--config-dir`). `parts` are classes, or
    `functools.partial`s of classes with their values, that replace the choices of groups, as in
    `selector=partial(Median, quantile=0.5)`. If a preset sweeps over that group, several
    experiments become the same one, which is returned once. Nothing is loaded or run. Raises
    `ConfigError` with all problems of all experiments.

    >>> [plan.settings.seed for plan in compose(["selector=oort", "seed=0,1"])]
    [0, 1]
    """
    is_list = not isinstance(overrides, str)
    is_words = is_list and all(isinstance(word, str) for word in overrides)
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
    """Run one experiment, and return its result.

    `experiment` is a plan that `compose` has returned, or overrides. With overrides, `config_dir`
    and `parts` have the same meaning as in `compose`.

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
    text = f"describes {len(plans)} experiments"
    check(rule(len(plans) == 1, "overrides", ..., text, "run_sweep runs several"))
    ((plan, temporary),) = _with_folders(plans, keep)
    _make_ready([plan])
    callback = _Callback(on_round)
    outcome = execute(plan, watch=_CallbackWatch(callback))
    callback.raise_error()
    result = RunResult(plan, outcome.status, outcome.summary, outcome.skipped, temporary)
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
    """Run several experiments as `run_experiment` runs one, and return their results.

    `experiments` are plans that `compose` has returned, or overrides (`seed=0,1,2`). `lanes` is the
    number of runs that are trained together in common batches (None: one after another). A run that
    fails, or whose data are missing, does not stop the others; its status says so. Experiments with
    the same folder are one run. An error that `on_round` raises ends all runs, and is raised.

        sweep = run_sweep(["selector=random,oort", "seed=0,1,2", "tracker=files_only"])
        sweep.runs[["selector", "seed", "final_accuracy"]]
    """
    remedy = "run_experiment() runs the default one"
    check(rule(bool(experiments or parts), "experiments", [], "has no experiment", remedy))
    text, remedy = "must be an integer >= 1, or None", "it is the number of runs trained together"
    check(rule(lanes is None or (type(lanes) is int and lanes >= 1), "lanes", lanes, text, remedy))
    plans_by_folder = {plan.folder: plan for plan in _composed(experiments, config_dir, parts)}
    placed = _with_folders(list(plans_by_folder.values()), keep)
    plans = [plan for plan, _ in placed]
    _make_ready(plans)
    outcomes = _run_all(plans, lanes, on_round)
    results = []
    for plan, temporary in placed:
        outcome = outcomes.get(plan.folder) or outcome_on_file(plan)
        results.append(RunResult(plan, outcome.status, outcome.summary, outcome.skipped, temporary))
    return SweepResult(results)


def _run_all(
    plans: Sequence[Plan], lanes: int | None, on_round: OnRoundOf | None
) -> Mapping[Path, Outcome]:
    """Run plans as `run_sweep` does, and return their outcomes by folder.

    An error of `on_round` is raised when no run is in progress.
    """
    # 1. An earlier call may have stopped while it overwrote results. Those that it has replaced are
    #    not run again.
    overwriting = Overwriting(plans)
    plans = [overwriting.without_replaced(plan) for plan in plans]
    # 2. The display, if a plan has it.
    progress = Progress(plans)
    screen = None
    if any(map(has_console, plans)):
        screen = Narration(plans, _display_overrides(plans), (), progress)
        if overwriting.notice:
            print_line(overwriting.notice)
    # 3. The runs. Those that other processes hold come last, when these have ended.
    callback = _Callback(on_round)
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
    return attempts.ended


def _composed(
    experiments: Sequence[Plan] | Words, config_dir: str | Path | None, parts: Mapping[str, Part]
) -> list[Plan]:
    """Return `experiments` if they are plans, otherwise the plans that these overrides describe."""
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


def _display_overrides(plans: Sequence[Plan]) -> list[list[str]]:
    """Return overrides for each plan by which the display names it: its choices and seed."""
    overrides = []
    for plan in plans:
        words = [f"{group}={choice}" for group, choice in plan.choices.items()]
        words.append(f"seed={plan.settings.seed}")
        overrides.append(words)
    return overrides


class _Callback:
    """A user's `OnRound` or `OnRoundOf`, whose answers and exceptions become reasons to end a
    run."""

    def __init__(self, function: Callable[..., bool | None] | None) -> None:
        self._function = function
        self._error: Exception | None = None

    def __call__(self, *values: Plan | Record) -> str | None:
        """Call the function after a round. Returns why the run ends, or None if it does not."""
        if self._error is not None:  # raised in another lane
            return "ended with another run"
        try:
            stop = self._function is not None and self._function(*values)
        except StopRun:
            stop = True
        except Exception as error:
            self._error = error
            return f"ended by on_round ({type(error).__name__}: {error})"
        return "ended by on_round" if stop else None

    def raise_error(self) -> None:
        """Raise the exception of the callback, if there was one."""
        if self._error is not None:
            raise self._error


class _CallbackWatch(Watch):
    """A watch that calls the callback after each round of a single run."""

    def __init__(self, callback: _Callback) -> None:
        self._callback = callback

    def round_ended(self, record: Record) -> str | None:
        return self._callback(record)


def _with_folders(
    plans: Sequence[Plan], keep: bool | None
) -> list[tuple[Plan, TemporaryFolder | None]]:
    """Return each plan with the folder in which it will run, and the temporary folder around it.

    The latter is None if the files are kept. `keep` is as in `run_experiment`. Raises `ConfigError`
    if it is True and the files of a plan must be temporary.
    """
    lasting = [is_lasting(plan) for plan in plans]
    text = (
        "cannot be kept: no other process can import a class of a notebook, a script or a function"
    )
    remedy = "move the class to a module, or leave keep out"
    check(rule(not keep or all(lasting), "keep", True, text, remedy))
    placed: list[tuple[Plan, TemporaryFolder | None]] = []
    temporary: TemporaryFolder | None = None
    for plan, can_last in zip(plans, lasting, strict=True):
        if can_last and keep is not False:
            placed.append((plan, None))
            continue
        temporary = temporary or TemporaryFolder()
        folder = temporary.path / plan.folder.name
        placed.append((replace(plan, folder=folder), temporary))
    return placed


def _make_ready(plans: Sequence[Plan]) -> None:
    """Check that the plans can write their folders and read their data (`check_files`).

    If a plan overwrites, forget the data in memory, so that all plans read them again. Raises
    `ConfigError`.
    """
    check_files(plans)
    if any(plan.settings.overwrite for plan in plans):
        forget()
