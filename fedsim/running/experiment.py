"""One run from its plan: assemble it, run the rounds or those that are missing, keep the records.

Nothing is written into the run's folder before everything that can refuse has been built.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedsim.config.build import instantiate
from fedsim.config.plan import Plan
from fedsim.core.encoding import dataclasses_known_to, encode
from fedsim.core.errors import FedsimError
from fedsim.core.record import Record
from fedsim.results.files import (
    FINAL,
    PARTITION,
    TRACE,
    HeldError,
    RunFolder,
    is_free,
    owned,
    read_summary,
    replace_folder,
    replacement_of,
)
from fedsim.rounds.loop import Components, Simulation
from fedsim.running.assembly import Experiment, build
from fedsim.running.checkpoint import START_ANEW, Checkpoint, CheckpointError, Checkpoints, fault, identity_of
from fedsim.running.endings import UNWATCHED, Ending, Incidents, Watch, ended_by, failed_before_rounds
from fedsim.running.interleaving import InterleavedRun
from fedsim.running.outcome import Outcome, keep, of_clients, outcome_in, outcome_on_file, rewrite_summary, totals_of
from fedsim.running.process import CODES, STOP
from fedsim.running.provenance import environment, own_revision
from fedsim.running.ranks import RANKS
from fedsim.tracking.base import RunInfo, Tracker, Trackers


def execute(plan: Plan, interleaved: InterleavedRun | None = None, watch: Watch = UNWATCHED) -> Outcome:
    """Run `plan`, or go on with it from its checkpoint, or return at once what an identical finished run recorded.

    `interleaved`: the run among several side by side that this is; `watch` is told of its rounds. Raises `FedsimError`s
    that are found before round 1, `HeldError` if another process is running it; later ones, and whatever a user's class
    raises, end in the status.
    """
    earlier = outcome_on_file(plan)
    if earlier.final and not plan.settings.overwrite:
        return replace(earlier, skipped=True)
    if earlier.summary.get("status") in FINAL and not earlier.final:
        sys.stderr.write(f"fedsim: {plan.folder}: {earlier.summary['error']}; it is run again\n")
    if not is_free(plan.folder):  # known before it is built, which may take long
        raise HeldError(plan.folder)
    try:
        with watch.setting_up():
            experiment = RANKS.build(plan, build)
    except FedsimError:
        raise
    except (Exception, SystemExit) as error:
        STOP.raise_if_asked()  # an interrupted import may raise anything
        place = replacement_of(plan.folder) if outcome_on_file(plan).final else plan.folder
        return failed_before_rounds(plan, place, error, owned(plan.folder))
    if interleaved is not None:
        interleaved.join(experiment.simulation, experiment.model)
    with owned(plan.folder):
        if settled := _settled_meanwhile(plan):
            return settled
        replaces = outcome_on_file(plan).final
        place = replacement_of(plan.folder) if replaces else plan.folder
        outcome = record(plan, experiment, place, watch, alone=interleaved is None)
        if replaces and outcome.final:  # it was run beside a finished result
            replace_folder(plan.folder)
        return outcome


def _settled_meanwhile(plan: Plan) -> Outcome | None:
    """What another process has finished since this one looked, or had finished but for its last step. For the owner of
    the folder's lock."""
    if outcome_in(replacement_of(plan.folder)).final:
        replace_folder(plan.folder)
        return replace(outcome_on_file(plan), skipped=True)
    found = outcome_on_file(plan)
    return replace(found, skipped=True) if found.final and not plan.settings.overwrite else None


@dataclass(frozen=True)
class _Beginning:
    """A run whose next round can be run, after `records` since `begun`. `incidents` and `start_up_rounds` are what its
    selector says of itself."""

    folder: RunFolder
    checkpoints: Checkpoints
    begun: Checkpoint
    records: list[Record]
    trackers: Trackers
    incidents: Incidents
    start_up_rounds: int


def record(plan: Plan, experiment: Experiment, place: Path, watch: Watch = UNWATCHED, *, alone: bool = True) -> Outcome:
    """Run the rounds that are missing in the folder `place`; write every record as it comes, then the summary.

    Asked to end by a signal or by `watch`, it finishes its round, saves a checkpoint and returns; interrupted in
    mid-round, it leaves the latest checkpoint, and raises KeyboardInterrupt after the summary. What a user's class
    raises ends in the status, before the rounds and after them, too.
    """
    revision = own_revision()  # before the rounds: the checkout may change while they run
    with STOP.deferred():
        try:
            run = _begin(plan, experiment, RunFolder(place), watch, alone)
        except FedsimError:
            raise
        except (Exception, SystemExit) as error:
            return failed_before_rounds(plan, place, error)
        ending = _run_rounds(plan, experiment.simulation, run, watch)
        in_summary, clients = dict[str, Any](), None
        try:
            if ending[0] in FINAL:
                in_summary, clients = of_clients(experiment.simulation)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            ending = ended_by(error, run.folder)
        summary = _summary(plan, experiment, run, ending, in_summary, revision)
        summary = keep(run.folder, run.checkpoints.delete, summary, experiment.simulation.params, clients)
    try:
        run.trackers.finish(summary)
    finally:  # a signal may end the wait for a tracker
        if degraded := run.trackers.degraded:
            summary = {**summary, "trackers": degraded}
            rewrite_summary(run.folder, summary)
    _, _, reason = ending
    if isinstance(reason, KeyboardInterrupt):
        raise reason
    return Outcome(summary["status"], summary, cause=reason)


def _begin(plan: Plan, experiment: Experiment, folder: RunFolder, watch: Watch, alone: bool) -> _Beginning:
    """All that precedes the next round; trackers begin, and hear of earlier rounds, when nothing can refuse any more.

    Raises what the selector, the aggregator and the model raise.
    """
    simulation, selector = experiment.simulation, experiment.simulation.components.selector
    checkpoints = _checkpoints(plan, experiment, folder)
    warning, adaptive, start_up_rounds = selector.warning, selector.adaptive, selector.start_up_rounds
    begun, records = _progress(plan, experiment, folder, checkpoints)
    trackers = Trackers.made_by(
        {n: partial(instantiate, node, Tracker, f"tracker.{n}") for n, node in plan.config["tracker"].items()}
    )
    trackers.start(_run_info(plan, folder.path, watch, alone))
    if warning:
        trackers.message(warning)
    wanted = replace(simulation.components.population, cohort_size=plan.settings.cohort_size)  # without spare ones
    incidents = Incidents(wanted, adaptive, trackers.message)
    if records:
        trackers.message(f"going on after round {simulation.round} of {plan.settings.num_rounds}")
        for entry in records:
            trackers.replay(entry.as_dict())
    return _Beginning(folder, checkpoints, begun, records, trackers, incidents, start_up_rounds)


def _summary(
    plan: Plan,
    experiment: Experiment,
    run: _Beginning,
    ending: Ending,
    in_summary: Mapping[str, Any],
    revision: Mapping[str, Any] | None,
) -> Mapping[str, Any]:
    """The content of summary.json; `in_summary` is what it has of the clients."""
    status, error, _ = ending
    parts, begun = experiment.simulation.components, run.begun
    x = parts.server_data.test.x
    compiled = x.dtype if _backend_name(parts) == "native" else None
    return {
        "status": status,
        "error": error,
        **totals_of(run.records, begun.initial_accuracy),
        **in_summary,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begun.started)),
        "start_up_rounds": run.start_up_rounds,
        "seed": plan.settings.seed,
        "choices": dict(plan.choices),
        "engine": parts.engine.description,
        "data": dict(experiment.data_source),
        "incidents": run.incidents.counts(run.records),
        "partition_hash": experiment.division.hash,
        "config_hash": plan.config_hash,
        **({"earlier_code": begun.earlier_code} if begun.earlier_code else {}),
        "revision": revision,
        "environment": {**environment(x.device, compiled), **RANKS.description},
        "trackers": {},
    }


def _checkpoints(plan: Plan, experiment: Experiment, folder: RunFolder) -> Checkpoints:
    parts = experiment.simulation.components
    device = parts.server_data.test.x.device
    state = {"selector": parts.selector.state_dict(), "aggregator": parts.aggregator.state_dict()}
    known = dataclasses_known_to(parts.selector, parts.aggregator)
    encode(state, {}, dataclasses=known)  # or refuse now
    fingerprint = experiment.data_source.get("fingerprint")
    identity = identity_of(plan, _backend_name(parts), device, fingerprint, experiment.division.hash)
    settings = plan.checkpoint
    wrong = partial(fault, simulation=experiment.simulation)
    return Checkpoints(folder, identity, settings.every, device, known, other_code=settings.other_code, fault=wrong)


def _backend_name(parts: Components) -> str:
    return parts.engine.backend.description.partition(",")[0]


def _progress(
    plan: Plan, experiment: Experiment, folder: RunFolder, checkpoints: Checkpoints
) -> tuple[Checkpoint, list[Record]]:
    """Go on from the checkpoint if there is one, or start anew."""
    simulation = experiment.simulation
    found = _checkpoint_to_go_on_from(plan, checkpoints)
    if found is None:
        RunFolder.create(folder.path, plan.config)
        folder.write_bytes(PARTITION, experiment.division.to_bytes())
        found = Checkpoint({}, {}, simulation.evaluate().accuracy, time.time(), plan.settings.overwrite), []
    else:
        checkpoint, _ = found
        try:
            simulation.load_state_dict(checkpoint.state)
        except KeyError as missing:
            raise CheckpointError(f"{folder.path}: its checkpoint lacks {missing}; {START_ANEW}") from missing
        folder.reopen(checkpoint.lengths)
    checkpoints.start(simulation.wall_seconds)
    return found


def _checkpoint_to_go_on_from(plan: Plan, checkpoints: Checkpoints) -> tuple[Checkpoint, list[Record]] | None:
    """`overwrite=true` goes on only from one of its own that was killed or asked to end."""
    if not plan.settings.overwrite:
        return checkpoints.load()
    if (read_summary(checkpoints.folder.path) or {"status": "preempted"})["status"] not in CODES:
        return None
    try:
        found = checkpoints.load()
    except FedsimError:
        return None
    return found if found is not None and found[0].overwrite else None


def _run_rounds(plan: Plan, simulation: Simulation, run: _Beginning, watch: Watch) -> Ending:
    """Run the rounds that are missing, as far as they can be run."""
    folder, checkpoints = run.folder, run.checkpoints

    def checkpoint() -> Checkpoint:
        state, lengths = simulation.state_dict(), folder.sync_records()
        return replace(run.begun, state=state, lengths=lengths, overwrite=plan.settings.overwrite)

    num_rounds = plan.settings.num_rounds
    try:
        while simulation.round < num_rounds:
            if STOP.status is not None:
                if simulation.round:
                    checkpoints.save(checkpoint)
                return STOP.status, f"asked to end after round {simulation.round}; the same command goes on", None
            entry = simulation.step()
            folder.append(entry.as_dict())
            run.records.append(entry)
            if simulation.observed and (trace := simulation.components.selector.trace) is not None:
                folder.append({"round": entry.round, **trace}, TRACE)
            run.incidents.see(entry)
            run.trackers.log(entry.as_dict())
            if (ended := watch.round_ended(entry)) is not None and entry.round < num_rounds:
                checkpoints.save(checkpoint)
                return "interrupted", f"{ended} after round {entry.round}", None
            if STOP.status is None and entry.round < num_rounds and checkpoints.due(entry.round, entry.wall_seconds):
                checkpoints.save(checkpoint)
    except (Exception, SystemExit, KeyboardInterrupt) as reason:
        return ended_by(reason, folder)
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
