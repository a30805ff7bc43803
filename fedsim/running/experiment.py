"""One run, from its plan to its files: assemble it, run the rounds that are missing, write records.

`execute` is the entry: `fedsim.jobs.sweep` calls it for each job, and `fedsim verify` for each run
that it repeats. A plan is the checked description of a run: its config, its folder, and more.
`execute` and its second half `_run` take the plan apart. Only `build`, which needs most of its
values, gets the whole plan.

An outcome is how a run ended (`fedsim.running.outcome`). A lane is a coroutine in which a run
trains together with others (`fedsim.running.lanes`). Ranks are the processes of torchrun, which
build and train the same run (`fedsim.running.ranks`).

Nothing is written into the run's folder until everything that can raise an error is built.
"""

import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.clients.context import UNASKED_SIGNALS
from fedsim.config.build import instantiate
from fedsim.config.plan import Plan
from fedsim.config.settings import RunSettings
from fedsim.core.errors import DivergedError, FedsimError
from fedsim.core.record import Record, reaches, short_run_warning
from fedsim.core.server_data import server_data, server_sees
from fedsim.results import files
from fedsim.results.files import OutputError, RunFolder
from fedsim.results.reading import FINAL, read_summary, window_of
from fedsim.rounds.checks import SelectionError
from fedsim.running.assembly import Experiment, build
from fedsim.running.checkpoint import Checkpoint, Checkpoints
from fedsim.running.component_warnings import (
    component_warnings,
    ignored_weights_warning,
    print_unsaved,
)
from fedsim.running.exits import warn
from fedsim.running.incidents import Incidents
from fedsim.running.lanes import Lane
from fedsim.running.outcome import (
    BEFORE_ROUND_1,
    Outcome,
    Watch,
    claimed,
    ended_by,
    outcome_in,
    worked_in,
)
from fedsim.running.process import STOP
from fedsim.running.provenance import environment, own_revision
from fedsim.running.ranks import RANKS, backend_name
from fedsim.running.summary import client_accuracies, totals_of
from fedsim.tracking.base import RunInfo, Tracker, Trackers

UNWATCHED = Watch()
"""A watch that does nothing."""


def execute(
    plan: Plan,
    lane: Lane | None = None,
    watch: Watch = UNWATCHED,
    builder: Callable[[Plan], Experiment] | None = None,
) -> Outcome:
    """Run `plan`, resume it from its checkpoint, or return the outcome that its folder records.

    `lane` is given if the run trains together with others. `watch` learns of every round.
    `builder` builds the simulation; None: `build` does.

    Raises a `FedsimError` that is found before round 1, `HeldError` if another process is running
    the plan, and KeyboardInterrupt or `Preempted` after a signal. All other errors are in the
    outcome: those of later rounds, and those that a user's class raises.
    """
    folder = plan.folder
    config = plan.config
    overwrite = plan.settings.overwrite
    # 1. Return the outcome of a run that has ended for good.
    recorded = outcome_in(folder, config, overwrite=overwrite)
    if recorded.final and not overwrite:
        return replace(recorded, skipped=True)
    if recorded.damaged:
        warn(f"fedsim: {folder}: {recorded.summary['error']}; it is run again\n")

    # 2. Build the components. This may take long, so first see whether another process has the run.
    if not files.is_free(folder):
        raise files.HeldError(folder)
    try:
        with watch.setting_up():
            experiment = RANKS.build(plan.config_hash, partial(builder or build, plan))
    except FedsimError:
        raise
    except (Exception, SystemExit) as error:
        STOP.raise_if_asked()  # an interrupted import may raise anything
        work_folder = worked_in(folder, recorded, overwrite=overwrite)
        return ended_by(error, config, work_folder, BEFORE_ROUND_1)

    # 3. Let the run train together with others.
    if lane is not None:
        lane.join(experiment.simulation, experiment.model)

    # 4. Claim the run, and run the rounds.
    with claimed(folder, config, overwrite=overwrite) as place:
        if place is None:  # another process has ended it while this one built components
            return replace(outcome_in(folder, config, overwrite=overwrite), skipped=True)
        return _run(plan, experiment, place, watch, alone=lane is None)


def _run(plan: Plan, experiment: Experiment, place: Path, watch: Watch, *, alone: bool) -> Outcome:
    """Run the rounds that are missing in the folder `place`, and write their records and a summary.

    `alone` is false if the run is in a lane. A run that is interrupted in a round leaves its latest
    checkpoint. KeyboardInterrupt is raised after the summary is written.
    """
    settings = plan.settings
    info = RunInfo(
        name=settings.name,
        folder=place,
        config=plan.config,
        choices=plan.choices,
        seed=settings.seed,
        num_rounds=settings.num_rounds,
        alone=alone,
        final_folder=plan.folder,
        sweep=watch.sweep,
        swept=plan.swept,
    )
    with STOP.deferred():  # signals wait for the end of a round
        # 1. Resume from the checkpoint or start anew, then start the trackers.
        try:
            checkpoints = Checkpoints(RunFolder(place), plan.config, plan.checkpoint, experiment)
            run = _RunInProgress(info, experiment, checkpoints, watch, settings)
        except FedsimError:
            raise
        except (Exception, SystemExit) as error:
            return ended_by(error, plan.config, place, BEFORE_ROUND_1)
        # 2. Run the rounds.
        ending = run.run_to_end()
        # 3. Write what the run leaves.
        summary = run.write_results(run.summary_of(ending, plan.config_hash))
    # 4. End the trackers, and record which of them failed. A signal may end the wait for them.
    try:
        run.trackers.finish(summary)
    finally:
        if run.trackers.degraded:
            summary["trackers"] = run.trackers.degraded
            run.rewrite(summary)
    if isinstance(ending.cause, KeyboardInterrupt):
        raise ending.cause
    return Outcome(summary["status"], summary, cause=ending.cause)


class _RunInProgress:
    """A run that is ready for its next round, and its files, checkpoints and trackers.

    The constructor resumes the run from its checkpoint or starts it anew, and starts the trackers.

    - `records`: the records of all rounds up to now, including the rounds of earlier processes.
    - `origin`: when and how the run began. It is the checkpoint from which the run was resumed. A
      run that starts anew has no checkpoint yet: then `state` and `lengths` are empty.
    - `client_summary`, `client_arrays`: the final model's accuracies on the clients
      (`client_accuracies`); empty and None until the run has ended for good.
    """

    def __init__(
        self,
        info: RunInfo,
        experiment: Experiment,
        checkpoints: Checkpoints,
        watch: Watch,
        settings: RunSettings,
    ) -> None:
        self.info = info
        self.config = info.config
        self.window = window_of(info.config)
        self.experiment = experiment
        self.simulation = experiment.simulation
        self.components = experiment.simulation.components
        self.checkpoints = checkpoints
        self.folder = checkpoints.folder
        self.watch = watch
        self.revision = own_revision()  # before the rounds: the checkout may change while they run
        self.client_summary: dict[str, Any] = {}
        self.client_arrays: Mapping[str, Any] | None = None
        self.has_noted_weights = False
        # A user's selector may raise an error here, before anything is written.
        warnings = component_warnings(self.simulation)
        is_adaptive = self.components.selector.adaptive
        self.start_up_rounds = self.components.selector.start_up_rounds

        self.origin, self.records = self._resume_or_begin(overwrite=settings.overwrite)
        self.trackers = self._start_trackers(warnings)
        # A `system` may select more clients than the config's cohort_size, because some updates
        # come too late. Only a round with fewer clients than cohort_size is an incident.
        population = replace(self.components.population, cohort_size=settings.cohort_size)
        self.incidents = Incidents(population, is_adaptive, self.trackers.message)
        self._replay_records()

    def _resume_or_begin(self, *, overwrite: bool) -> tuple[Checkpoint, list[Record]]:
        """Load the checkpoint, or write the files of a run that starts.

        `overwrite` is that of the config. Returns `origin` and the records of earlier processes.
        """
        resumed = self.checkpoints.load(overwrite)
        if resumed is None:
            RunFolder.create(self.folder.path, self.config)
            self._write_description()
            accuracy = self.simulation.evaluate().accuracy
            return Checkpoint({}, {}, accuracy, started=time.time(), overwrite=overwrite), []
        checkpoint, records = resumed
        self.simulation.load_state_dict(checkpoint.state)
        self.folder.reopen(checkpoint.lengths)
        self._write_description()  # its files may have been lost
        self.checkpoints.saved_at = self.simulation.wall_seconds
        return replace(checkpoint, overwrite=overwrite), records

    def _write_description(self) -> None:
        """Write the files that describe the run and stay as they are."""
        self.folder.write_config(self.config)
        self.folder.write_bytes(files.PARTITION, self.experiment.division.to_bytes())
        imperfect = self.components.behaviour.imperfect
        if len(imperfect):
            text = json.dumps({"clients": imperfect.tolist()}) + "\n"
            self.folder.write_text(files.IMPERFECT, text)

    def _start_trackers(self, warnings: Sequence[str]) -> Trackers:
        """Start the config's trackers, and pass the `warnings` on to them."""
        nodes = self.config["tracker"]
        trackers = Trackers(
            nodes, make=lambda name: instantiate(nodes[name], Tracker, f"tracker.{name}")
        )
        trackers.start(self.info)
        for warning in warnings:
            trackers.message(warning)
        short = short_run_warning(self.info.num_rounds, self.window)
        sweep = self.info.sweep
        if short and (sweep is None or sweep.number == 1):  # once in a sweep
            trackers.message(short)
        return trackers

    def _replay_records(self) -> None:
        """Show the records of earlier processes to the trackers, and count their incidents."""
        if self.records:
            resumed = f"resuming after round {self.simulation.round} of {self.info.num_rounds}"
            self.trackers.message(resumed)
        for record in self.records:
            self.incidents.see(record, silent=True)
            self.trackers.replay(record.as_dict())

    def run_to_end(self) -> Outcome:
        """Run the rounds that are missing, and return how the run ended, also by an error.

        The `summary` of this outcome has only the key `error`. After the last round, or divergence,
        the accuracies of the clients are measured, which may fail, too.
        """
        try:
            ending = self._run_rounds()
            if ending.final:
                self.client_summary, self.client_arrays = client_accuracies(self.simulation)
            return ending
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            round = len(self.records) + 1  # its record is not written, as the trace may have failed
            when = f"round {round}" if round <= self.info.num_rounds else "after the last round"
            return ended_by(error, self.config, self.folder.path, when)

    def _run_rounds(self) -> Outcome:
        """Run the rounds that are missing, and return how they ended."""
        while self.simulation.round < self.info.num_rounds:
            try:
                ending = self._run_round()
            except DivergedError as error:
                return Outcome("diverged", {"error": str(error)}, cause=error)
            if ending is not None:
                return ending
        return Outcome("done", {"error": None})

    def _run_round(self) -> Outcome | None:
        """Run the next round. Return the outcome if the run ends before its last round."""
        if STOP.status is not None:
            if self.simulation.round:  # before round 1 there is nothing to save
                self.checkpoints.save(self.origin)
            reason = f"stopped by a signal after round {self.simulation.round}"
            return Outcome(STOP.status, {"error": f"{reason}; the same command resumes it"})
        record = self.simulation.step()
        self._write(record)
        stop_reason = self.watch.round_ended(record)
        stop_at = self.config.get("stop_at")
        accuracies = [record.test_accuracy for record in self.records[-self.window :]]
        num_rounds = self.info.num_rounds
        if stop_at is not None and reaches(accuracies, stop_at, self.window, num_rounds):
            return Outcome("reached", {"error": None})
        if record.round == num_rounds:  # the run is done, whatever the watch says
            return None
        if stop_reason is not None:
            self.checkpoints.save(self.origin)
            return Outcome("interrupted", {"error": f"{stop_reason} after round {record.round}"})
        # After a signal, the next call saves.
        if STOP.status is None and self.checkpoints.due(record.round, record.wall_seconds):
            self.checkpoints.save(self.origin)
        return None

    def _write(self, record: Record) -> None:
        """Write the record of a round, and the selector's trace if it observed the round."""
        selector = self.components.selector
        trace = selector.trace if self.simulation.observed else None
        self.folder.append(record.as_dict())
        self.records.append(record)
        if trace is not None:
            try:
                self.folder.append({"round": record.round, **trace}, files.TRACE)
            except (TypeError, ValueError) as error:
                fault = f"{type(selector).__name__}.trace must be a dict of JSON values: {error}"
                raise SelectionError(f"round {record.round}: {fault}") from error
        self.incidents.see(record)
        if not self.has_noted_weights and self.simulation.weights_are_ignored:
            self.has_noted_weights = True
            self.trackers.message(ignored_weights_warning(self.components))
        self.trackers.log(record.as_dict())

    def summary_of(self, ending: Outcome, config_hash: str) -> dict[str, Any]:
        """Return the content of summary.json for this ending. `trackers` is filled later.

        `config_hash` is that of the plan.
        """
        needs = self.components.selector.needs
        summary = {"status": ending.status, "error": ending.summary["error"]}
        summary |= totals_of(self.records, self.origin.initial_accuracy, self.window)
        summary |= self.client_summary
        summary |= {
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.origin.started)),
            "start_up_rounds": self.start_up_rounds,
            "seed": self.info.seed,
            "choices": dict(self.info.choices),
            "asks": "; ".join(sorted(needs - UNASKED_SIGNALS)) or "nothing",
            "server_data": server_data(needs),
            "server_sees": server_sees(needs),
            "engine": self.components.engine.description,
            "data": dict(self.experiment.data_source),
            "incidents": self.incidents.counts,
            "partition_hash": self.experiment.division.hash,
            "config_hash": config_hash,
        }
        code = self.checkpoints.identity["code"]
        if code:
            summary["code"] = code
        if self.origin.earlier_code:
            summary["earlier_code"] = self.origin.earlier_code
        unsaved = self.checkpoints.unsaved_changes()
        if unsaved:
            summary["unsaved_attributes"] = unsaved
            print_unsaved(", ".join(unsaved))
        summary |= {"revision": self.revision, "environment": self._environment(), "trackers": {}}
        if self.info.swept:
            summary["swept"] = self.info.swept
        return summary

    def _environment(self) -> dict[str, Any]:
        """Return the software and the machine that the run used (`environment`), and its ranks."""
        test_data = self.components.server_data.test.x
        # The engine `native` calls the C library, whose variant depends on the type of the numbers.
        is_native = self.checkpoints.identity["engine"] == "native"
        machine = environment(test_data.device, test_data.dtype if is_native else None)
        if RANKS.others is not None:
            machine["processes"] = {"count": RANKS.others.size, "backend": backend_name()}
        return machine

    def write_results(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Write the summary. After a run that ended for good, also write the final model.

        The summary is written last: it says that the other files are complete. Then the checkpoints
        of a run that ended for good are deleted. If a file cannot be written, the checkpoints stay,
        the run has failed, and `error` names the file. Returns the summary as it was written.
        """
        final = summary["status"] in FINAL
        try:
            self.folder.sync_records()
            if final:
                self._write_final_model()
            self.folder.write_summary(summary)
        except OutputError as error:
            warn(f"fedsim: {error}\n")
            # If the summary is complete, only forcing its folder to the disk raised the error, and
            # the run keeps its status.
            if read_summary(self.folder.path) != files.json_ready(summary):
                earlier_error = summary["error"]
                summary["error"] = f"{earlier_error}; {error}" if earlier_error else str(error)
                if final:
                    summary["status"] = "failed"
                self.rewrite(summary)
                return summary
        if final:
            self.checkpoints.delete()
        return summary

    def _write_final_model(self) -> None:
        """Write the final model, and its accuracies on the clients if they were measured."""
        files.save_model(self.folder, files.MODEL, self.simulation.params)
        if self.client_arrays is not None:
            file = io.BytesIO()
            np.savez_compressed(file, allow_pickle=False, **self.client_arrays)
            self.folder.write_bytes(files.CLIENTS, file.getvalue())

    def rewrite(self, summary: Mapping[str, Any]) -> None:
        """Write the summary again, with changes. If that is not possible, print why."""
        try:
            self.folder.write_summary(summary)
        except OutputError as error:
            warn(f"fedsim: {error}\n")
