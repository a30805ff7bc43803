"""One run from its plan: assemble it, run the rounds or those that are missing, keep the records.

Nothing is written into the run's folder before everything that can refuse has been built.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fedsim.config.build import instantiate
from fedsim.config.plan import Plan
from fedsim.core.encoding import dataclasses_known_to, encode
from fedsim.core.errors import FedsimError
from fedsim.core.record import Record
from fedsim.core.types import Population
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
from fedsim.running.assembly import Experiment, build
from fedsim.running.checkpoint import START_ANEW, Checkpoint, CheckpointError, Checkpoints, fault, identity_of
from fedsim.running.interleaving import InterleavedRun
from fedsim.running.outcome import (
    Ending,
    Outcome,
    ended_by,
    failed_before_rounds,
    keep,
    of_clients,
    outcome_in,
    outcome_on_file,
    rewrite_summary,
    totals_of,
    worked_in,
)
from fedsim.running.process import CODES, STOP
from fedsim.running.provenance import environment, own_revision
from fedsim.running.ranks import RANKS
from fedsim.tracking.base import RunInfo, SweepPosition, Tracker, Trackers


class Watch:
    """The one to whom a run is told. This one does nothing. `sweep`: where the run stands in its sweep."""

    sweep: SweepPosition | None = None

    def setting_up(self) -> AbstractContextManager[None]:
        """Within it, all that the run needs before its first round is made."""
        return nullcontext()

    def round_ended(self, record: Record) -> str | None:
        """The record of a round that is in the run's files. Returns why the run is to end here, or None to go on."""
        return None


UNWATCHED = Watch()


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
        return failed_before_rounds(plan, worked_in(plan), error, owned(plan.folder))
    if interleaved is not None:
        interleaved.join(experiment.simulation, experiment.model)
    with owned(plan.folder):
        if settled := _settled_meanwhile(plan):
            return settled
        place = worked_in(plan)
        outcome = record(plan, experiment, place, watch, alone=interleaved is None)
        if outcome.final and place != plan.folder:  # it was run beside a finished result
            replace_folder(plan.folder)
        return outcome


def _settled_meanwhile(plan: Plan) -> Outcome | None:
    """What another process has finished since this one looked, or had finished but for its last step. For the owner of
    the folder's lock."""
    if outcome_in(replacement_of(plan.folder)).final:
        replace_folder(plan.folder)
    elif plan.settings.overwrite:
        return None
    found = outcome_on_file(plan)
    return replace(found, skipped=True) if found.final else None


def record(plan: Plan, experiment: Experiment, place: Path, watch: Watch = UNWATCHED, *, alone: bool = True) -> Outcome:
    """Run the rounds that are missing in the folder `place`; write every record as it comes, then the summary.

    Asked to end by a signal or by `watch`, it finishes its round, saves a checkpoint and returns; interrupted in
    mid-round, it leaves the latest checkpoint, and raises KeyboardInterrupt after the summary. What a user's class
    raises ends in the status, before the rounds and after them, too.
    """
    revision = own_revision()  # before the rounds: the checkout may change while they run
    with STOP.deferred():
        try:
            run = _Run(plan, experiment, place, watch, alone)
        except FedsimError:
            raise
        except (Exception, SystemExit) as error:
            return failed_before_rounds(plan, place, error)
        ending = run.run_rounds()
        of_each, clients = dict[str, Any](), None
        try:
            if ending[0] in FINAL:
                of_each, clients = of_clients(experiment.simulation)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            ending = ended_by(error, run.folder)
        summary = run.summary(ending, of_each, revision)
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


TEXTS = {
    "dropped_updates": "updates that hold a nan or infinity are left out of the average",
    "nonfinite_reports": "clients report losses that are nan or infinity",
    "rounds_with_too_few_clients": "fewer clients than cohort_size are available; those there take part",
    "rounds_without_clients": "no client takes part; the model stays as it is",
    "empty_clients": "clients hold no training samples and never take part",
}


class Incidents:
    """`adaptive`: the selector decides how many clients take part, so that fewer than K are no incident."""

    def __init__(self, population: Population, adaptive: bool, tell: Callable[[str], None]) -> None:
        self._expected = 1 if adaptive else min(population.cohort_size, int((population.sizes > 0).sum()))
        self._empty = int((population.sizes == 0).sum())
        self._tell = tell
        self._told: set[str] = set()
        self._tell_first("before round 1", {"empty_clients": self._empty})

    def see(self, record: Record) -> None:
        """Tell what `record` is the first to show."""
        self._tell_first(f"round {record.round}", self._of(record))

    def counts(self, records: Sequence[Record]) -> dict[str, int]:
        """How much of each kind there was in all `records` of the run."""
        found = [self._of(record) for record in records]
        return {name: sum(one.get(name, 0) for one in found) for name in TEXTS} | {"empty_clients": self._empty}

    def _of(self, record: Record) -> dict[str, int]:
        count = len(record.selected)
        return {
            "dropped_updates": record.dropped_updates,
            "nonfinite_reports": record.nonfinite_reports,
            "rounds_with_too_few_clients": int(0 < count < self._expected),
            "rounds_without_clients": int(not count),
        }

    def _tell_first(self, when: str, found: dict[str, int]) -> None:
        for name, count in found.items():
            if count and name not in self._told:
                self._told.add(name)
                self._tell(f"{when}: {TEXTS[name]} (counted in summary.json as incidents.{name})")


class _Run:
    """A run whose next round can be run, after `records` since `begun`."""

    def __init__(self, plan: Plan, experiment: Experiment, place: Path, watch: Watch, alone: bool) -> None:
        """All that precedes the next round; trackers begin, and hear of earlier rounds, when nothing can refuse any
        more. Raises what the selector, the aggregator and the model raise."""
        self.plan, self.experiment, self.watch = plan, experiment, watch
        self.simulation, self.parts = experiment.simulation, experiment.simulation.components
        self.device = self.parts.server_data.test.x.device
        self.backend = self.parts.engine.backend.description.partition(",")[0]
        self.folder = RunFolder(place)
        self.checkpoints = self._checkpoints()
        selector = self.parts.selector
        warning, adaptive, self.start_up_rounds = selector.warning, selector.adaptive, selector.start_up_rounds
        self.begun, self.records = self._progress()
        self.trackers = Trackers(
            {n: partial(instantiate, node, Tracker, f"tracker.{n}") for n, node in plan.config["tracker"].items()}
        )
        self.trackers.start(run_info(plan, place, watch, alone))
        if warning:
            self.trackers.message(warning)
        wanted = replace(self.parts.population, cohort_size=plan.settings.cohort_size)  # without spare ones
        self.incidents = Incidents(wanted, adaptive, self.trackers.message)
        if self.records:
            self.trackers.message(f"going on after round {self.simulation.round} of {plan.settings.num_rounds}")
            for entry in self.records:
                self.trackers.replay(entry.as_dict())

    def _checkpoints(self) -> Checkpoints:
        selector, aggregator = self.parts.selector, self.parts.aggregator
        known = dataclasses_known_to(selector, aggregator)
        state = {"selector": selector.state_dict(), "aggregator": aggregator.state_dict()}
        encode(state, {}, dataclasses=known)  # or refuse now
        fingerprint = self.experiment.data_source.get("fingerprint")
        identity = identity_of(self.plan, self.backend, self.device, fingerprint, self.experiment.division.hash)
        settings = self.plan.checkpoint
        sound = partial(fault, simulation=self.simulation)
        return Checkpoints(self.folder, identity, settings.every, self.device, known, settings.other_code, sound)

    def _progress(self) -> tuple[Checkpoint, list[Record]]:
        """Go on from the checkpoint if there is one, or start anew."""
        found = self._checkpoint_to_go_on_from()
        if found is None:
            RunFolder.create(self.folder.path, self.plan.config)
            self.folder.write_bytes(PARTITION, self.experiment.division.to_bytes())
            accuracy = self.simulation.evaluate().accuracy
            found = Checkpoint({}, {}, accuracy, time.time(), self.plan.settings.overwrite), []
        else:
            try:
                self.simulation.load_state_dict(found[0].state)
            except KeyError as missing:
                text = f"{self.folder.path}: its checkpoint lacks {missing}; {START_ANEW}"
                raise CheckpointError(text) from missing
            self.folder.reopen(found[0].lengths)
        self.checkpoints.start(self.simulation.wall_seconds)
        return found

    def _checkpoint_to_go_on_from(self) -> tuple[Checkpoint, list[Record]] | None:
        """`overwrite=true` goes on only from one of its own that was killed or asked to end."""
        if not self.plan.settings.overwrite:
            return self.checkpoints.load()
        if (read_summary(self.folder.path) or {"status": "preempted"})["status"] not in CODES:
            return None
        try:
            found = self.checkpoints.load()
        except FedsimError:
            return None
        return found if found is not None and found[0].overwrite else None

    def _checkpoint(self) -> Checkpoint:
        state, lengths = self.simulation.state_dict(), self.folder.sync_records()
        return replace(self.begun, state=state, lengths=lengths, overwrite=self.plan.settings.overwrite)

    def run_rounds(self) -> Ending:
        """Run the rounds that are missing, as far as they can be run."""
        simulation, num_rounds = self.simulation, self.plan.settings.num_rounds
        try:
            while simulation.round < num_rounds:
                if STOP.status is not None:
                    if simulation.round:
                        self.checkpoints.save(self._checkpoint)
                    return STOP.status, f"asked to end after round {simulation.round}; the same command goes on", None
                entry = simulation.step()
                self._keep(entry)
                ended, last = self.watch.round_ended(entry), entry.round == num_rounds
                if ended is not None and not last:
                    self.checkpoints.save(self._checkpoint)
                    return "interrupted", f"{ended} after round {entry.round}", None
                if STOP.status is None and not last and self.checkpoints.due(entry.round, entry.wall_seconds):
                    self.checkpoints.save(self._checkpoint)
        except (Exception, SystemExit, KeyboardInterrupt) as reason:
            return ended_by(reason, self.folder)
        return "done", None, None

    def _keep(self, entry: Record) -> None:
        self.folder.append(entry.as_dict())
        self.records.append(entry)
        if self.simulation.observed and (trace := self.parts.selector.trace) is not None:
            self.folder.append({"round": entry.round, **trace}, TRACE)
        self.incidents.see(entry)
        self.trackers.log(entry.as_dict())

    def summary(
        self, ending: Ending, of_each: Mapping[str, Any], revision: Mapping[str, Any] | None
    ) -> Mapping[str, Any]:
        """The content of summary.json; `of_each` is what it has of the clients."""
        status, error, _ = ending
        plan, begun, parts = self.plan, self.begun, self.parts
        compiled = parts.server_data.test.x.dtype if self.backend == "native" else None
        return {
            "status": status,
            "error": error,
            **totals_of(self.records, begun.initial_accuracy),
            **of_each,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begun.started)),
            "start_up_rounds": self.start_up_rounds,
            "seed": plan.settings.seed,
            "choices": dict(plan.choices),
            "engine": parts.engine.description,
            "data": dict(self.experiment.data_source),
            "incidents": self.incidents.counts(self.records),
            "partition_hash": self.experiment.division.hash,
            "config_hash": plan.config_hash,
            **({"earlier_code": begun.earlier_code} if begun.earlier_code else {}),
            "revision": revision,
            "environment": {**environment(self.device, compiled), **RANKS.description},
            "trackers": {},
        }


def run_info(plan: Plan, place: Path, watch: Watch, alone: bool) -> RunInfo:
    """What trackers are told of a run."""
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
