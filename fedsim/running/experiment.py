"""One run from its plan: assemble it, run the rounds or those that are missing, keep the records.
Nothing is written into the run's folder before everything that can refuse has been built."""

import io
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.clients.context import SERVER_SIGNALS
from fedsim.config.build import instantiate
from fedsim.config.plan import Plan
from fedsim.config.user_code import user_code
from fedsim.core.errors import DivergedError, FedsimError
from fedsim.core.record import CLIENT_ACCURACY, Record
from fedsim.core.server_data import server_data
from fedsim.core.types import Population
from fedsim.results import files
from fedsim.results.files import OutputError, RunFolder, replace_folder
from fedsim.results.reading import FINAL, read_summary
from fedsim.rounds.aggregators import weighting_warning
from fedsim.rounds.client_accuracy import aggregates
from fedsim.rounds.loop import Simulation
from fedsim.running.assembly import Experiment, build
from fedsim.running.checkpoint import Checkpoint, Checkpoints
from fedsim.running.lanes import Lane
from fedsim.running.outcome import (
    Outcome,
    Watch,
    ended_by,
    outcome_on_file,
    totals_of,
    warn,
    worked_in,
)
from fedsim.running.process import STOP
from fedsim.running.provenance import environment, own_revision
from fedsim.running.ranks import RANKS, backend_name
from fedsim.tracking.base import RunInfo, Tracker, Trackers

UNWATCHED = Watch()


def execute(plan: Plan, interleaved: Lane | None = None, watch: Watch = UNWATCHED) -> Outcome:
    """Run `plan`, or go on with it from its checkpoint, or return at once what an identical
    finished run recorded. Raises `FedsimError`s that are found before round 1, `HeldError` if
    another process is running it; later ones, and whatever a user's class raises, end in the
    status. `interleaved`: which of several side by side it is."""
    earlier = outcome_on_file(plan)
    if earlier.final and not plan.settings.overwrite:
        return replace(earlier, skipped=True)
    if earlier.summary.get("status") in FINAL and earlier.status == "failed":
        sys.stderr.write(f"fedsim: {plan.folder}: {earlier.summary['error']}; it is run again\n")
    if not files.is_free(plan.folder):  # known before it is built, which may take long
        raise files.HeldError(plan.folder)
    try:
        with watch.setting_up():
            experiment = RANKS.build(plan, build)
    except FedsimError:
        raise
    except (Exception, SystemExit) as error:
        STOP.raise_if_asked()  # an interrupted import may raise anything
        return ended_by(error, plan, worked_in(plan))
    if interleaved is not None:
        interleaved.join(experiment.simulation, experiment.model)
    with files.owned(plan.folder):
        complete = outcome_on_file(
            plan, files.replacement_of(plan.folder)
        ).final  # but for its last step
        if complete:
            replace_folder(plan.folder)
        found = outcome_on_file(plan)
        if found.status == "changed":
            now = files.code_digits({"code": user_code(plan.config)})
            aside = files.set_aside(plan.folder, files.code_digits(found.summary), now)
            warn(
                f"fedsim: {plan.folder}: {found.summary['error']}; that result is kept in {aside.name}\n"
            )
            found = outcome_on_file(plan)
        if found.final and (
            complete or not plan.settings.overwrite
        ):  # another process has been faster
            return replace(found, skipped=True)
        place = worked_in(plan)
        outcome = _run(plan, experiment, place, watch, alone=interleaved is None)
        if outcome.final and place != plan.folder:  # it was run beside a finished result
            replace_folder(plan.folder)
        return outcome


def _run(plan: Plan, experiment: Experiment, place: Path, watch: Watch, *, alone: bool) -> Outcome:
    """Run the rounds that are missing in the folder `place`; write every record as it comes, then
    the summary. Interrupted in mid-round, it leaves the latest checkpoint, and raises
    KeyboardInterrupt after the summary."""
    with STOP.deferred():
        try:
            run = _Run(plan, experiment, place, watch, alone)
        except FedsimError:
            raise
        except (Exception, SystemExit) as error:
            return ended_by(error, plan, place)
        ending = run.to_its_end()
        summary = run.kept(run.summary(ending))
    try:
        run.trackers.finish(summary)
    finally:  # a signal may end the wait for a tracker
        if degraded := run.trackers.degraded:
            summary = {**summary, "trackers": degraded}
            run.rewrite(summary)
    if isinstance(ending.cause, KeyboardInterrupt):
        raise ending.cause
    return Outcome(summary["status"], summary, cause=ending.cause)


def of_clients(simulation: Simulation) -> tuple[dict[str, Any], dict[str, NDArray[Any]] | None]:
    """What the summary has of the final model's accuracy on each client, and the arrays of
    clients.npz (all [N]): `accuracy`, nan where there is none; `samples`, on how many it rests;
    `selected`, whether the client ever was."""
    measure = simulation.components.client_accuracy
    accuracies = None if measure is None else simulation.measure()[1]
    if accuracies is None or measure is None:
        return {}, None
    selected = simulation.covered
    counts = {
        "clients": int(np.isfinite(accuracies).sum()),
        "clients_never_selected": int((~selected).sum()),
    }
    arrays = {"accuracy": accuracies, "samples": measure.samples, "selected": selected}
    return {CLIENT_ACCURACY: {**aggregates(accuracies, selected), **counts}}, arrays


TEXTS = {
    "dropped_updates": "updates that hold a nan or infinity are left out of the average",
    "nonfinite_reports": "clients report losses that are nan or infinity",
    "rounds_with_too_few_clients": "fewer clients than cohort_size are available; those there take part",
    "rounds_without_clients": "no client takes part; the model stays as it is, or a private aggregator adds its noise",
    "empty_clients": "clients hold no training samples and never take part",
}


class Incidents:
    """How much of each kind there was; the first of a kind is told. `adaptive`: fewer than K
    clients are none."""

    def __init__(self, population: Population, adaptive: bool, tell: Callable[[str], None]) -> None:
        self._expected = (
            1 if adaptive else min(population.cohort_size, int((population.sizes > 0).sum()))
        )
        self._tell = tell
        self.counts = dict.fromkeys(TEXTS, 0)
        self._add("before round 1", {"empty_clients": int((population.sizes == 0).sum())})

    def see(self, record: Record, told: bool = False) -> None:
        """Count what there is in a round; `told`: an earlier process has told it."""
        count = len(record.selected)
        found = {
            "dropped_updates": record.dropped_updates,
            "nonfinite_reports": record.nonfinite_reports,
            "rounds_with_too_few_clients": int(0 < count < self._expected),
            "rounds_without_clients": int(not count),
        }
        self._add(f"round {record.round}", found, told)

    def _add(self, when: str, found: Mapping[str, int], told: bool = False) -> None:
        for name, count in found.items():
            if count and not self.counts[name] and not told:
                self._tell(f"{when}: {TEXTS[name]} (counted in summary.json as incidents.{name})")
            self.counts[name] += count


class _Run:
    """A run whose next round can be run, after `records` since `begun`."""

    def __init__(
        self, plan: Plan, experiment: Experiment, place: Path, watch: Watch, alone: bool
    ) -> None:
        """Trackers begin, and hear of earlier rounds, when nothing can refuse any more."""
        self.plan, self.experiment, self.watch = plan, experiment, watch
        self.simulation, self.parts = experiment.simulation, experiment.simulation.components
        self.revision = own_revision()  # before the rounds: the checkout may change while they run
        self.folder = RunFolder(place)
        self.checkpoints = Checkpoints(self.folder, plan, experiment)
        selector = self.parts.selector
        size = sum(value.nbytes for value in self.simulation.params.values())
        of_states = self.parts.local_algorithm.warning(self.parts.population.num_clients, size)
        aggregator = self.parts.aggregator
        by_size = weighting_warning(selector, aggregator)
        warnings = (
            selector.warning,
            aggregator.warning,
            by_size,
            of_states,
            self.parts.engine.warning,
        )
        adaptive, self.start_up_rounds = selector.adaptive, selector.start_up_rounds
        self.begun, self.records = self._begin()
        self.of_clients: tuple[dict[str, Any], Mapping[str, Any] | None] = {}, None
        nodes, settings = plan.config["tracker"], plan.settings
        self.trackers = Trackers(
            {n: partial(instantiate, nodes[n], Tracker, f"tracker.{n}") for n in nodes}
        )
        of_run = settings.name, place, plan.config, plan.choices, settings.seed, settings.num_rounds
        self.trackers.start(RunInfo(*of_run, alone, plan.folder, watch.sweep))
        for warning in filter(None, warnings):
            self.trackers.message(warning)
        wanted = replace(
            self.parts.population, cohort_size=plan.settings.cohort_size
        )  # without spare ones
        self.incidents = Incidents(wanted, adaptive, self.trackers.message)
        if self.records:
            self.trackers.message(
                f"going on after round {self.simulation.round} of {plan.settings.num_rounds}"
            )
        for entry in self.records:
            self.incidents.see(entry, told=True)
            self.trackers.replay(entry.as_dict())

    def _begin(self) -> tuple[Checkpoint, list[Record]]:
        """Go on from the checkpoint if there is one, or start anew."""
        overwrite = self.plan.settings.overwrite
        found = self.checkpoints.load(overwrite)
        if found is None:
            RunFolder.create(self.folder.path, self.plan.config)
            self.folder.write_bytes(files.PARTITION, self.experiment.division.to_bytes())
            if len(imperfect := self.parts.behaviour.imperfect):
                self.folder.write_text(
                    files.IMPERFECT, json.dumps({"clients": imperfect.tolist()}) + "\n"
                )
            return Checkpoint(
                {}, {}, self.simulation.evaluate().accuracy, time.time(), overwrite
            ), []
        begun, records = found
        self.simulation.load_state_dict(begun.state)
        self.folder.reopen(begun.lengths)
        self.checkpoints.saved_at = self.simulation.wall_seconds
        return replace(begun, overwrite=overwrite), records

    def to_its_end(self) -> Outcome:
        """Run the rounds that are missing, as far as they can be run; how that ended."""
        try:
            try:
                ending = self._run_rounds()
            except DivergedError as reason:
                ending = Outcome("diverged", {"error": str(reason)}, cause=reason)
            if ending.final:
                self.of_clients = of_clients(self.simulation)
            return ending
        except (Exception, SystemExit, KeyboardInterrupt) as reason:
            return ended_by(reason, self.plan, self.folder.path, self.simulation.round + 1)

    def _run_rounds(self) -> Outcome:
        simulation, num_rounds = self.simulation, self.plan.settings.num_rounds
        while simulation.round < num_rounds:
            if STOP.status is not None:
                if simulation.round:
                    self.checkpoints.save(self.begun)
                told = f"asked to end after round {simulation.round}; the same command goes on"
                return Outcome(STOP.status, {"error": told})
            entry = simulation.step()
            self.folder.append(entry.as_dict())
            self.records.append(entry)
            if simulation.observed and (trace := self.parts.selector.trace) is not None:
                self.folder.append({"round": entry.round, **trace}, files.TRACE)
            self.incidents.see(entry)
            self.trackers.log(entry.as_dict())
            ended, last = self.watch.round_ended(entry), entry.round == num_rounds
            if ended is not None and not last:
                self.checkpoints.save(self.begun)
                return Outcome("interrupted", {"error": f"{ended} after round {entry.round}"})
            if (
                STOP.status is None
                and not last
                and self.checkpoints.due(entry.round, entry.wall_seconds)
            ):
                self.checkpoints.save(self.begun)
        return Outcome("done", {"error": None})

    def summary(self, ending: Outcome) -> dict[str, Any]:
        """The content of summary.json."""
        plan, begun, checkpoints = self.plan, self.begun, self.checkpoints
        ranks = (
            {}
            if RANKS.others is None
            else {"processes": {"count": RANKS.others.size, "backend": backend_name()}}
        )
        compiled = (
            self.parts.server_data.test.x.dtype
            if checkpoints.identity["engine"] == "native"
            else None
        )
        return {
            "status": ending.status,
            "error": ending.summary["error"],
            **totals_of(self.records, begun.initial_accuracy),
            **self.of_clients[0],
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begun.started)),
            "start_up_rounds": self.start_up_rounds,
            "seed": plan.settings.seed,
            "choices": dict(plan.choices),
            "asks": "; ".join(sorted(self.parts.selector.needs - SERVER_SIGNALS)) or "nothing",
            "server_data": server_data(self.parts.selector.needs),
            "engine": self.parts.engine.description,
            "data": dict(self.experiment.data_source),
            "incidents": self.incidents.counts,
            "partition_hash": self.experiment.division.hash,
            "config_hash": plan.config_hash,
            **({"code": code} if (code := checkpoints.identity["code"]) else {}),
            **({"earlier_code": begun.earlier_code} if begun.earlier_code else {}),
            "revision": self.revision,
            "environment": {**environment(checkpoints.device, compiled), **ranks},
            "trackers": {},
        }

    def kept(self, summary: Mapping[str, Any]) -> Mapping[str, Any]:
        """Write what a run leaves: of one that has an end, the final model, too, in place of its
        checkpoints. If it cannot be written, these stay, and the run counts as failed. Returns the
        summary as it should be."""
        final = summary["status"] in FINAL
        try:
            self.folder.sync_records()
            if final:
                files.save_model(self.folder, files.MODEL, self.simulation.params)
                if self.of_clients[1] is not None:
                    file = io.BytesIO()
                    np.savez_compressed(file, allow_pickle=False, **self.of_clients[1])
                    self.folder.write_bytes(files.CLIENTS, file.getvalue())
            self.folder.write_summary(summary)
        except OutputError as error:
            warn(f"fedsim: {error}\n")
            there = read_summary(self.folder.path) == files.json_ready(
                summary
            )  # if not yet on the disk
            if not there:
                reason = "; ".join(filter(None, (summary["error"], str(error))))
                summary = {
                    **summary,
                    "status": "failed" if final else summary["status"],
                    "error": reason,
                }
                self.rewrite(summary)
                return summary
        if final:
            self.checkpoints.delete()
        return summary

    def rewrite(self, summary: Mapping[str, Any]) -> None:
        try:
            self.folder.write_summary(summary)
        except OutputError as error:
            warn(f"fedsim: {error}\n")
