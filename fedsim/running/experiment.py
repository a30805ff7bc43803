"""One run from its plan: assemble it, run the rounds or those that are missing, keep the records.

Nothing is written into the run's folder before everything that can refuse has been built.
"""

import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedsim.config.build import instantiate
from fedsim.config.plan import Plan
from fedsim.errors import DivergedError, FedsimError
from fedsim.record import Record
from fedsim.running.assembly import Experiment, build
from fedsim.running.checkpoint import START_ANEW, Checkpoint, CheckpointError, Checkpoints, identity_of
from fedsim.running.encoding import dataclasses_known_to, encode
from fedsim.running.environment import environment
from fedsim.running.incidents import Incidents
from fedsim.running.interleaving import InterleavedRun
from fedsim.running.outcome import Outcome, outcome_in, outcome_on_file
from fedsim.running.ranks import RANKS
from fedsim.running.results import FINAL, keep, keep_traceback, of_clients, rewrite_summary, tell, totals_of
from fedsim.running.revision import own_revision
from fedsim.running.signals import CODES, STOP
from fedsim.running.watch import UNWATCHED, Watch
from fedsim.simulation import Simulation
from fedsim.tracking import Trackers
from fedsim.tracking.base import RunInfo, Tracker
from fedsim.tracking.files import (
    ERROR,
    PARTITION,
    TRACE,
    HeldError,
    OutputError,
    RunFolder,
    is_free,
    owned,
    read_summary,
    replace_folder,
    replacement_of,
)


def execute(plan: Plan, interleaved: InterleavedRun | None = None, watch: Watch = UNWATCHED) -> Outcome:
    """Run `plan`, or go on with it from its checkpoint, or return at once what an identical finished run recorded.

    `interleaved`: the run among several side by side that this is; `watch` is told of its rounds. Raises `FedsimError`s
    that are found before round 1, `HeldError` if another process is running it; later ones, and whatever a user's class
    raises, end in the status.
    """
    earlier = outcome_on_file(plan)
    if earlier.final and not plan.settings.overwrite:
        return replace(earlier, skipped=True)
    if not is_free(plan.folder):  # known before it is built, which may take long
        raise HeldError(plan.folder)
    try:
        experiment = RANKS.build(plan, build)
    except FedsimError:
        raise
    except (Exception, SystemExit) as error:
        STOP.raise_if_asked()  # an interrupted import may raise anything
        return _failed_to_build(plan, error)
    if interleaved is not None:
        interleaved.join(experiment.simulation, experiment.model)
    with owned(plan.folder):
        settled = _settled_meanwhile(plan)
        return settled or _record_in_place(plan, experiment, watch, alone=interleaved is None)


def _settled_meanwhile(plan: Plan) -> Outcome | None:
    """What another process has finished since this one looked, or had finished but for its last step.

    To be called by the owner of the folder's lock.
    """
    if outcome_in(replacement_of(plan.folder)).final:
        replace_folder(plan.folder)
        return replace(outcome_on_file(plan), skipped=True)
    found = outcome_on_file(plan)
    return replace(found, skipped=True) if found.final and not plan.settings.overwrite else None


def _record_in_place(plan: Plan, experiment: Experiment, watch: Watch, *, alone: bool) -> Outcome:
    """Run it in its folder, or beside a finished result, which it replaces when it is finished itself."""
    replaces = outcome_on_file(plan).final
    place = replacement_of(plan.folder) if replaces else plan.folder
    outcome = record(plan, experiment, place, watch, alone=alone)
    if replaces and outcome.final:
        replace_folder(plan.folder)
    return outcome


def _failed_to_build(plan: Plan, error: BaseException) -> Outcome:
    """Leave the traceback of what a user's class raised before round 1 in the run's folder."""
    finished = outcome_on_file(plan).final
    folder = RunFolder(replacement_of(plan.folder) if finished else plan.folder)

    def write(text: str) -> None:
        with owned(plan.folder):
            folder.write_error(plan.config, text)

    reason = f"{type(error).__name__}: {error}"
    kept = keep_traceback(write, "".join(traceback.format_exception(error)))
    where = f"    see {folder.path / ERROR}\n" if kept else ""
    with suppress(OSError):
        sys.stderr.write(f"fedsim: {plan.folder} failed before round 1: {reason}\n{where}")
    return Outcome("failed", {"error": reason}, cause=error)


@dataclass
class _Progress:
    """What of a run is on file: `started` in seconds since 1970."""

    records: list[Record]
    initial_accuracy: float
    started: float


def record(plan: Plan, experiment: Experiment, place: Path, watch: Watch = UNWATCHED, *, alone: bool = True) -> Outcome:
    """Run the rounds that are missing in the folder `place`; write every record as it comes, then the summary.

    Asked to end by a signal or by `watch`, it finishes its round, saves a checkpoint and returns; interrupted in
    mid-round, it leaves the latest checkpoint, and raises KeyboardInterrupt after the summary.
    """
    simulation = experiment.simulation
    revision = own_revision()  # before the rounds: the checkout may change while they run
    folder = RunFolder(place)
    with STOP.deferred():
        checkpoints = _checkpoints(plan, simulation, folder)
        progress = _begin(plan, experiment, folder, checkpoints)
        trackers = Trackers(
            {n: instantiate(node, Tracker, f"tracker.{n}") for n, node in plan.config["tracker"].items()}
        )
        trackers.start(_run_info(plan, place, watch, alone))
        for warning in filter(None, (simulation.components.selector.warning,)):
            trackers.message(warning)
        parts = simulation.components
        incidents = Incidents(parts.population, parts.selector.adaptive, trackers.message)
        if progress.records:
            trackers.message(f"going on after round {simulation.round} of {plan.settings.num_rounds}")
            for entry in progress.records:
                trackers.replay(entry.as_dict())
        status, error, reason = _run_rounds(plan, simulation, folder, checkpoints, progress, trackers, incidents, watch)
        in_summary, clients = of_clients(simulation) if status in FINAL else ({}, None)
        summary: Mapping[str, Any] = {
            "status": status,
            "error": error,
            **totals_of(progress.records, progress.initial_accuracy),
            **in_summary,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(progress.started)),
            "start_up_rounds": simulation.components.selector.start_up_rounds,
            "seed": plan.settings.seed,
            "choices": dict(plan.choices),
            "engine": simulation.components.engine.description,
            "data": dict(experiment.data_source),
            "incidents": incidents.counts(progress.records),
            "partition_hash": experiment.division.hash,
            "config_hash": plan.config_hash,
            "revision": revision,
            "environment": {
                **environment(simulation.components.server_data.test.x.device),
                **RANKS.description,
            },
            "trackers": {},
        }
        summary = keep(folder, checkpoints, summary, simulation.params, clients)
    trackers.finish(summary)
    if trackers.degraded:
        summary = {**summary, "trackers": trackers.degraded}
        rewrite_summary(folder, summary)
    if isinstance(reason, KeyboardInterrupt):
        raise reason
    return Outcome(summary["status"], summary, cause=reason)


def _checkpoints(plan: Plan, simulation: Simulation, folder: RunFolder) -> Checkpoints:
    parts = simulation.components
    device = parts.server_data.test.x.device
    encode({"selector": parts.selector.state_dict(), "aggregator": parts.aggregator.state_dict()}, {})  # or refuse now
    backend = parts.engine.backend.description.partition(",")[0]
    return Checkpoints(folder, identity_of(plan, backend, device), plan.checkpoint.every, device)


def _begin(plan: Plan, experiment: Experiment, folder: RunFolder, checkpoints: Checkpoints) -> _Progress:
    """Go on from the checkpoint if there is one, or start anew."""
    simulation = experiment.simulation
    found = _checkpoint_to_go_on_from(plan, simulation, checkpoints)
    if found is None:
        RunFolder.create(folder.path, plan.config)
        folder.write_bytes(PARTITION, experiment.division.to_bytes())
        progress = _Progress([], simulation.evaluate().accuracy, time.time())
    else:
        checkpoint, records = found
        try:
            simulation.load_state_dict(checkpoint.state)
        except KeyError as missing:
            raise CheckpointError(f"{folder.path}: its checkpoint lacks {missing}; {START_ANEW}") from missing
        folder.reopen(checkpoint.lengths)
        progress = _Progress(records, checkpoint.initial_accuracy, checkpoint.started)
    checkpoints.start(simulation.wall_seconds)
    return progress


def _checkpoint_to_go_on_from(
    plan: Plan, simulation: Simulation, checkpoints: Checkpoints
) -> tuple[Checkpoint, list[Record]] | None:
    """`overwrite=true` goes on only from one of its own that was killed or asked to end."""
    known = dataclasses_known_to(simulation.components.selector, simulation.components.aggregator)
    if not plan.settings.overwrite:
        return checkpoints.load(known)
    if (read_summary(checkpoints.folder.path) or {"status": "preempted"})["status"] not in CODES:
        return None
    try:
        found = checkpoints.load(known)
    except FedsimError:
        return None
    return found if found is not None and found[0].overwrite else None


def _run_rounds(
    plan: Plan,
    simulation: Simulation,
    folder: RunFolder,
    checkpoints: Checkpoints,
    progress: _Progress,
    trackers: Trackers,
    incidents: Incidents,
    watch: Watch,
) -> tuple[str, str | None, BaseException | None]:
    """The status, its reason in words, and the exception that ended the rounds."""

    def checkpoint() -> Checkpoint:
        state, began = simulation.state_dict(), (progress.initial_accuracy, progress.started)
        return Checkpoint(state, folder.sync_records(), *began, plan.settings.overwrite)

    num_rounds = plan.settings.num_rounds
    try:
        while simulation.round < num_rounds:
            if STOP.status is not None:
                if simulation.round:
                    checkpoints.save(checkpoint)
                return STOP.status, f"asked to end after round {simulation.round}; the same command goes on", None
            entry = simulation.step()
            folder.append(entry.as_dict())
            progress.records.append(entry)
            if simulation.observed and (trace := simulation.components.selector.trace) is not None:
                folder.append({"round": entry.round, **trace}, TRACE)
            incidents.see(entry)
            trackers.log(entry.as_dict())
            if (ended := watch.round_ended(entry)) is not None and entry.round < num_rounds:
                checkpoints.save(checkpoint)
                return "interrupted", f"{ended} after round {entry.round}", None
            if STOP.status is None and entry.round < num_rounds and checkpoints.due(entry.round, entry.wall_seconds):
                checkpoints.save(checkpoint)
    except DivergedError as reason:
        return "diverged", str(reason), reason
    except KeyboardInterrupt as reason:
        return "interrupted", "Ctrl-C", reason
    except FedsimError as reason:
        if isinstance(reason, OutputError):
            tell(reason)
        return "failed", str(reason), reason
    except (Exception, SystemExit) as reason:
        keep_traceback(partial(folder.write_text, ERROR), traceback.format_exc())
        return "failed", f"{type(reason).__name__}: {reason}", reason
    return "done", None, None


def _run_info(plan: Plan, place: Path, watch: Watch, alone: bool) -> RunInfo:
    return RunInfo(
        name=plan.settings.name,
        folder=place,
        final_folder=plan.folder,
        config=plan.config,
        choices=plan.choices,
        seed=plan.settings.seed,
        num_rounds=plan.settings.num_rounds,
        alone=alone,
        sweep=watch.sweep,
    )
