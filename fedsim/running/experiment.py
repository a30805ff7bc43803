"""One run, from its plan to its files: assemble it, run the rounds that are missing, write records.

`execute` is the entry: `fedsim.jobs.sweep` calls it for each job, and `fedsim verify` for each run
that it repeats. A plan is the checked description of a run: its config, its folder, and more.
`execute` and its second half `_run` take it apart. Only `build`, which needs most of it, gets the
whole plan.

An outcome is how a run ended (`fedsim.running.outcome`). A lane is a coroutine in which a run
trains together with others (`fedsim.running.lanes`). Ranks are the processes of torchrun, which
build and train the same run (`fedsim.running.ranks`).

Nothing is written into the run's folder until everything that can raise an error is built.
"""

import io
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.clients.context import UNASKED_SIGNALS
from fedsim.config.build import instantiate
from fedsim.config.plan import Plan
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
from fedsim.running.incidents import Incidents
from fedsim.running.lanes import Lane
from fedsim.running.outcome import (
    BEFORE_ROUND_1,
    Outcome,
    Watch,
    claimed,
    ended_by,
    outcome_in,
    warn,
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
    `builder` makes the simulation of the plan; None: `build`.

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
    if recorded.status == "failed" and recorded.summary.get("status") in FINAL:
        # The summary says done or diverged, but a file is missing or damaged.
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
        place = worked_in(folder, recorded, overwrite=overwrite)
        return ended_by(error, config, place, BEFORE_ROUND_1)

    # 3. Let the run train together with others.
    if lane is not None:
        lane.join(experiment.simulation, experiment.model)

    # 4. Claim the run. Another process may have finished it while this one built components.
    with claimed(folder, config, overwrite=overwrite) as claim:
        if isinstance(claim, Outcome):
            return replace(claim, skipped=True)
        # 5. Run the rounds in the folder that the claim names.
        return _run(plan, experiment, claim, watch, alone=lane is None)


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
            run_folder = RunFolder(place)
            checkpoints = Checkpoints(run_folder, plan.config, plan.checkpoint, experiment)
            run = _RunInProgress(experiment, plan.config, run_folder, checkpoints, watch)
            run.begin_or_resume(overwrite=settings.overwrite)
            run.start_trackers(info, settings.cohort_size)
        except FedsimError:
            raise
        except (Exception, SystemExit) as error:
            return ended_by(error, plan.config, place, BEFORE_ROUND_1)
        # 2. Run the rounds.
        ending = run.run_to_end()
        # 3. Write what the run leaves.
        summary = run.summary(
            ending, seed=settings.seed, choices=plan.choices, config_hash=plan.config_hash
        )
        if plan.swept:
            summary["swept"] = plan.swept
        summary = run.write_results(summary)
    # 4. End the trackers, and record which of them failed. A signal may end the wait for them.
    try:
        run.trackers.finish(summary)
    finally:
        if run.trackers.degraded:
            summary = {**summary, "trackers": run.trackers.degraded}
            run.rewrite(summary)
    if isinstance(ending.cause, KeyboardInterrupt):
        raise ending.cause
    return Outcome(summary["status"], summary, cause=ending.cause)


class _RunInProgress:
    """A run that is ready for its next round: what `_run` keeps while the rounds run.

    `_run` calls `begin_or_resume`, `start_trackers`, `run_to_end`, `summary` and `write_results` in
    this order. `origin` is the checkpoint that the run was resumed from. For a run that starts, it
    has no state, only facts such as the initial accuracy. `records` are the records of all rounds
    up to now, including the rounds of earlier processes. `client_summary` and `client_arrays` are
    the final model's accuracies on the clients, empty and None before the run has ended for good.
    """

    def __init__(
        self,
        experiment: Experiment,
        config: Mapping[str, Any],
        folder: RunFolder,
        checkpoints: Checkpoints,
        watch: Watch,
    ) -> None:
        self.window = window_of(config)
        self.experiment = experiment
        self.config = config
        self.folder = folder
        self.checkpoints = checkpoints
        self.watch = watch
        self.simulation = experiment.simulation
        self.components = experiment.simulation.components
        self.revision = own_revision()  # before the rounds: the checkout may change while they run
        self.num_rounds = self.components.population.num_rounds
        self.client_summary: dict[str, Any] = {}
        self.client_arrays: Mapping[str, Any] | None = None
        self.has_noted_weights = False
        # A user's selector may raise an error here, so these come before anything is written.
        self.warnings = component_warnings(self.simulation)
        self.adaptive = self.components.selector.adaptive
        self.start_up_rounds = self.components.selector.start_up_rounds

    def begin_or_resume(self, *, overwrite: bool) -> None:
        """Load the checkpoint and its records, or write the files of a run that starts.

        `overwrite` is that of the config.
        """
        resumed = self.checkpoints.load(overwrite)
        if resumed is None:
            self.records: list[Record] = []
            self.origin = self._begin(overwrite)
            return
        checkpoint, self.records = resumed
        self.simulation.load_state_dict(checkpoint.state)
        self.folder.reopen(checkpoint.lengths)
        self._write_description()  # its files may have been lost
        self.checkpoints.saved_at = self.simulation.wall_seconds
        self.origin = replace(checkpoint, overwrite=overwrite)

    def _begin(self, overwrite: bool) -> Checkpoint:
        """Create the folder of a run that starts, and return its `origin`."""
        RunFolder.create(self.folder.path, self.config)
        self._write_description()
        return Checkpoint(
            state={},
            lengths={},
            initial_accuracy=self.simulation.evaluate().accuracy,
            started=time.time(),
            overwrite=overwrite,
        )

    def _write_description(self) -> None:
        """Write the files that describe the run and stay as they are."""
        self.folder.write_config(self.config)
        self.folder.write_bytes(files.PARTITION, self.experiment.division.to_bytes())
        imperfect = self.components.behaviour.imperfect
        if len(imperfect):
            text = json.dumps({"clients": imperfect.tolist()}) + "\n"
            self.folder.write_text(files.IMPERFECT, text)

    def start_trackers(self, info: RunInfo, cohort_size: int) -> None:
        """Start the trackers and replay the records of earlier processes.

        `cohort_size` is that of the config. A `system` may select more clients, because some
        updates come too late. A round has too few clients only if it has fewer than `cohort_size`.
        """
        nodes = self.config["tracker"]

        def make(name: str) -> Tracker:
            return instantiate(nodes[name], Tracker, f"tracker.{name}")

        self.trackers = Trackers(nodes, make)
        self.trackers.start(info)
        for warning in self.warnings:
            self.trackers.message(warning)
        short = short_run_warning(self.num_rounds, self.window)
        sweep = self.watch.sweep
        if short and (sweep is None or sweep.number == 1):  # once in a sweep
            self.trackers.message(short)
        population = replace(self.components.population, cohort_size=cohort_size)
        self.incidents = Incidents(population, self.adaptive, self.trackers.message)
        if self.records:
            resumed = f"resuming after round {self.simulation.round} of {self.num_rounds}"
            self.trackers.message(resumed)
        for record in self.records:
            self.incidents.see(record, silent=True)
            self.trackers.replay(record.as_dict())

    def run_to_end(self) -> Outcome:
        """Run the rounds that are missing, and return how that ended, also by an error.

        Only `status`, `summary["error"]` and `cause` of the outcome are set. After the last round,
        or divergence, the accuracies of the clients are measured, which may fail, too.
        """
        try:
            try:
                ending = self._run_rounds()
            except DivergedError as error:
                ending = Outcome("diverged", {"error": str(error)}, cause=error)
            if ending.final:
                self.client_summary, self.client_arrays = client_accuracies(self.simulation)
            return ending
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            round = len(self.records) + 1  # its record is not written, as the trace may have failed
            when = f"round {round}" if round <= self.num_rounds else "after the last round"
            return ended_by(error, self.config, self.folder.path, when)

    def _run_rounds(self) -> Outcome:
        while self.simulation.round < self.num_rounds:
            if STOP.status is not None:
                if self.simulation.round:  # before round 1 there is nothing to save
                    self.checkpoints.save(self.origin)
                reason = f"stopped by a signal after round {self.simulation.round}"
                return Outcome(STOP.status, {"error": f"{reason}; the same command resumes it"})
            record = self.simulation.step()
            self._write(record)
            stop_reason = self.watch.round_ended(record)
            stop_at = self.config.get("stop_at")
            target = math.inf if stop_at is None else stop_at
            accuracies = [record.test_accuracy for record in self.records[-self.window :]]
            if reaches(accuracies, target, self.window, self.num_rounds):
                return Outcome("reached", {"error": None})
            if record.round == self.num_rounds:  # the run is done, whatever the watch says
                break
            if stop_reason is not None:
                self.checkpoints.save(self.origin)
                error = f"{stop_reason} after round {record.round}"
                return Outcome("interrupted", {"error": error})
            # After a signal, the next turn of the loop saves.
            if STOP.status is None and self.checkpoints.due(record.round, record.wall_seconds):
                self.checkpoints.save(self.origin)
        return Outcome("done", {"error": None})

    def _write(self, record: Record) -> None:
        """Write the record of a round, and the selector's trace of it if it observed the round."""
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

    def summary(
        self, ending: Outcome, *, seed: int, choices: Mapping[str, str], config_hash: str
    ) -> dict[str, Any]:
        """Return the content of summary.json for this ending. `trackers` is filled later.

        `seed`, `choices` and `config_hash` are those of the plan.
        """
        needs = self.components.selector.needs
        engine = self.components.engine
        identity = self.checkpoints.identity  # everything that decides the result (`identity_of`)
        test_data = self.components.server_data.test.x
        # The engine `native` calls the C library, whose variant depends on the type of the numbers.
        compiled = test_data.dtype if identity["engine"] == "native" else None
        machine = environment(test_data.device, compiled)
        if RANKS.others is not None:
            machine["processes"] = {"count": RANKS.others.size, "backend": backend_name()}
        summary = {"status": ending.status, "error": ending.summary["error"]}
        summary |= totals_of(self.records, self.origin.initial_accuracy, self.window)
        summary |= self.client_summary
        summary |= {
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.origin.started)),
            "start_up_rounds": self.start_up_rounds,
            "seed": seed,
            "choices": dict(choices),
            "asks": "; ".join(sorted(needs - UNASKED_SIGNALS)) or "nothing",
            "server_data": server_data(needs),
            "server_sees": server_sees(needs),
            "engine": engine.description,
            "data": dict(self.experiment.data_source),
            "incidents": self.incidents.counts,
            "partition_hash": self.experiment.division.hash,
            "config_hash": config_hash,
        }
        if identity["code"]:
            summary["code"] = identity["code"]
        if self.origin.earlier_code:
            summary["earlier_code"] = self.origin.earlier_code
        unsaved = self.checkpoints.unsaved_changes()
        if unsaved:
            summary["unsaved_attributes"] = unsaved
            print_unsaved(", ".join(unsaved))
        return summary | {"revision": self.revision, "environment": machine, "trackers": {}}

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
                files.save_model(self.folder, files.MODEL, self.simulation.params)
                if self.client_arrays is not None:
                    file = io.BytesIO()
                    np.savez_compressed(file, allow_pickle=False, **self.client_arrays)
                    self.folder.write_bytes(files.CLIENTS, file.getvalue())
            self.folder.write_summary(summary)
        except OutputError as error:
            warn(f"fedsim: {error}\n")
            # The summary may be complete although forcing its folder to the disk raised an error.
            # The run is then as good as without the error.
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

    def rewrite(self, summary: Mapping[str, Any]) -> None:
        """Write the summary again, with changes. If that is not possible, print why."""
        try:
            self.folder.write_summary(summary)
        except OutputError as error:
            warn(f"fedsim: {error}\n")
