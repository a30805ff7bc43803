"""Experiments from Python: composed of the words of the command line, checked, and run in this
process.

No signal handler is installed, no thread setting changed, nothing exits: errors are exceptions
(`fedsim.core.errors`). Ctrl-C, or a notebook's interrupt, leaves a run as on the command line, and
the same call goes on with it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from hydra.core.global_hydra import GlobalHydra

from fedsim.api.parts import Part, is_lasting, with_parts
from fedsim.api.results import RunFailedError, RunResult, SweepResult, TemporaryFolder
from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.config.plan import Plan
from fedsim.core.errors import ConfigError, Problem, check, rule
from fedsim.core.record import Record
from fedsim.jobs.narration import Narration, Progress, has_console
from fedsim.jobs.prepare import require_room
from fedsim.jobs.sweep import Attempts, Lanes
from fedsim.running.assembly import forget
from fedsim.running.experiment import execute
from fedsim.running.outcome import Watch, outcome_on_file

Words = Sequence[str]
"""Overrides as on the command line: `["selector=oort", "num_rounds=20"]`."""
OnRound = Callable[[Record], bool | None]
"""Is called with the record of each round; True, or raising `StopRun`, ends the run there."""
OnRoundOf = Callable[[Plan, Record], bool | None]
"""The same in a sweep, with the experiment that the round is of; it ends that run alone."""


class StopRun(Exception):  # noqa: N818  (a request, as StopIteration is)
    """Raised by a callback to end its run after the round; a checkpoint is kept, and the same call
    goes on."""


def compose(
    overrides: Words = (), *, config_dir: str | Path | None = None, **parts: Part
) -> list[Plan]:
    """The experiments that `overrides` describe, checked; a sweep (`seed=0,1,2`, a preset) has
    several.

    `config_dir`: a folder of your own YAML files (`--config-dir`). `parts`: a class, or a
    `functools.partial` of one with its values, in place of the choice of a group, as in
    `selector=partial(Median, quantile=0.5)`; where a preset sweeps over that group, experiments
    that become the same are one. Nothing is loaded or run. Raises `ConfigError` with all problems
    of all experiments.

    >>> [plan.settings.seed for plan in compose(["selector=oort", "seed=0,1"])]
    [0, 1]
    """
    told, remedy = (
        "must be a list of words such as 'selector=oort'",
        "run_experiment runs a Plan, run_sweep a list",
    )
    words = not isinstance(overrides, str) and all(isinstance(word, str) for word in overrides)
    check(rule(words, "overrides", ..., told, remedy))
    before = GlobalHydra.instance().hydra
    try:
        with search_path(None if config_dir is None else str(config_dir)):
            plans = check_jobs(
                [with_parts(job, parts) for job in compose_jobs(list(overrides), multirun=True)]
            )
    finally:
        GlobalHydra.instance().hydra = before  # a program that uses Hydra itself finds it as it was
    return list({plan.folder: plan for plan in plans}.values()) if parts else plans


def run_experiment(
    experiment: Plan | Words = (),
    *,
    on_round: OnRound | None = None,
    keep: bool | None = None,
    config_dir: str | Path | None = None,
    **parts: Part,
) -> RunResult:
    """Run one experiment: one that `compose` has made, or the one that these overrides (and
    `parts`) describe.

    It gives what the same command gives, in the same folder, `outputs/...`: a finished one is not
    run again (`overwrite=true` does), an unfinished one goes on. `on_round` is called after each
    round that is run here. With `keep=False` its files are temporary. That is so by default, and
    must be, where a class is defined in a notebook or in the script itself: a folder's name stands
    for a config that any process can run again.

    Raises `ConfigError` and `DataError` before round 1, `RunFailedError` if a round fails,
    `HeldError` if another process is running it, and what `on_round` raises.

        result = run_experiment(["selector=oort", "num_rounds=20", "tracker=files_only"])
        result.final_accuracy, result.rounds
    """
    plans = _composed(
        [experiment] if isinstance(experiment, Plan) else experiment, config_dir, parts
    )
    if len(plans) > 1:
        raise ConfigError(
            [
                Problem(
                    "overrides",
                    ...,
                    f"describes {len(plans)} experiments",
                    "run_sweep runs several",
                )
            ]
        )
    ((plan, place),) = _made_ready(plans, keep)
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
    """Run several experiments, as `run_experiment` runs one: those that `compose` has made, or that
    these overrides describe (`seed=0,1,2`).

    `lanes`: how many run side by side, trained in common batches (None: one after another). A run
    that fails, or whose data are missing, does not stop the others; its status says so. `on_round`
    is called with the experiment, too.

        sweep = run_sweep(["selector=random,oort", "seed=0,1,2", "tracker=files_only"])
        sweep.summaries[["selector", "seed", "final_accuracy"]]
    """
    if not (experiments or parts):
        raise ConfigError(
            [
                Problem(
                    "experiments", [], "has no experiment", "run_experiment() runs the default one"
                )
            ]
        )
    placed = _made_ready(_composed(experiments, config_dir, parts), keep)
    plans = [plan for plan, _ in placed]
    callback = _Callback(on_round)
    progress = Progress(plans)
    words = [
        [*(f"{k}={v}" for k, v in plan.choices.items()), f"seed={plan.settings.seed}"]
        for plan in plans
    ]
    screen = Narration(plans, words, (), progress) if any(map(has_console, plans)) else None
    attempts = Attempts(progress, screen, callback)
    if lanes is None:
        for plan in plans:
            attempts.run(plan)
            callback.raise_error()
    else:
        Lanes(max_lanes=lanes).run(attempts, plans)
    callback.raise_error()
    attempts.run_held(attempts.run_in_turn)
    found = [
        (plan, attempts.ended.get(plan.folder) or outcome_on_file(plan), place)
        for plan, place in placed
    ]
    return SweepResult(
        [RunResult(plan, one.status, one.summary, one.skipped, place) for plan, one, place in found]
    )


def _composed(
    given: Sequence[Plan] | Words, config_dir: str | Path | None, parts: dict[str, Part]
) -> list[Plan]:
    plans = [one for one in given if isinstance(one, Plan)]
    if not plans:
        return compose(cast(Words, given), config_dir=config_dir, **parts)
    told, remedy = (
        "must be overrides or composed experiments, not both",
        "[*plans, *compose(overrides)]",
    )
    unused = [*parts, *(["config_dir"] if config_dir is not None else [])]
    no_effect = [
        Problem(name, ..., "has no effect on a composed experiment", "give it to compose")
        for name in unused
    ]
    check(rule(len(plans) == len(given), "experiments", ..., told, remedy), *no_effect)
    return plans


class _Callback(Watch):
    """A user's callback, whose answers and exceptions become reasons to end a run. `plan`: that of
    a single run."""

    def __init__(self, function: OnRoundOf | None, plan: Plan | None = None) -> None:
        self._function, self._plan = function, plan
        self._error: Exception | None = None

    def __call__(self, plan: Plan, record: Record) -> str | None:
        if self._error is not None:  # of a run beside this one
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
        assert self._plan is not None
        return self(self._plan, record)

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _made_ready(
    plans: Sequence[Plan], keep: bool | None
) -> list[tuple[Plan, TemporaryFolder | None]]:
    """Each plan where it is to be run, with the temporary folder that this is in, if it is one;
    what is to be run again reads its data again. Raises what keeps them from being run."""
    lasting = [is_lasting(plan) for plan in plans]
    if keep and not all(lasting):
        told = "cannot be kept: no other process can import a class of a notebook, a script or a function"
        raise ConfigError(
            [Problem("keep", True, told, "move the class to a module, or leave keep out")]
        )
    kept = [keep is not False and one for one in lasting]
    place = None if all(kept) else TemporaryFolder()
    placed: list[tuple[Plan, TemporaryFolder | None]] = [
        (plan, None)
        if place is None or stays
        else (replace(plan, folder=place.path / plan.folder.name), place)
        for plan, stays in zip(plans, kept, strict=True)
    ]
    require_room(plan for plan, _ in placed)
    if any(plan.settings.overwrite for plan in plans):
        forget()
    return placed
