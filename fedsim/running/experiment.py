"""One run from its plan: assemble it, run the rounds, keep the records.

Nothing is written into the run's folder before everything that can refuse has been built.
"""

import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedsim.communication.ledger import PHASES
from fedsim.config.build import instantiate
from fedsim.config.plan import Plan
from fedsim.errors import DivergedError, FedsimError
from fedsim.running.assembly import Experiment, build
from fedsim.running.environment import environment
from fedsim.running.incidents import Incidents
from fedsim.running.interleaving import InterleavedRun
from fedsim.running.revision import own_revision
from fedsim.simulation import Record
from fedsim.tracking import Trackers
from fedsim.tracking.base import RunInfo, Tracker
from fedsim.tracking.files import TRACE, RunFolder, owned, read_summary

LEDGER_TOTALS = (
    "contacted",
    "trained",
    "uploaded",
    "bytes_down",
    "bytes_up",
    "forward_samples",
    "train_samples",
    "server_forward_samples",
    *(f"seconds_{phase}" for phase in PHASES),
    "nonfinite_reports",
    "dropped_updates",
)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `done`, `diverged`, `failed`, `interrupted`; `skipped` if an earlier run did so."""

    status: str
    summary: Mapping[str, Any]
    skipped: bool = False


def execute(plan: Plan, interleaved: InterleavedRun | None = None) -> Outcome:
    """Run `plan`, or return at once what an identical finished run recorded.

    `interleaved`: the run among several side by side that this is. Raises `FedsimError`s that are found before round 1;
    later ones end in the summary's status.
    """
    earlier = outcome_on_file(plan)
    if earlier.status in ("done", "diverged") and not plan.settings.overwrite:
        return replace(earlier, skipped=True)
    experiment = build(plan)
    if interleaved is not None:
        interleaved.join(experiment.simulation, experiment.model)
    with owned(plan.folder):
        return record(plan, experiment, alone=interleaved is None)


def outcome_on_file(plan: Plan) -> Outcome:
    """What the run's folder says of it; `failed` where there is no summary."""
    summary = read_summary(plan.folder)
    return Outcome("failed", {}) if summary is None else Outcome(summary["status"], summary)


def record(plan: Plan, experiment: Experiment, *, alone: bool = True) -> Outcome:
    """Run the rounds; write every record as it comes, then the summary."""
    simulation = experiment.simulation
    revision = own_revision()  # before the rounds: the checkout may change while they run
    folder = RunFolder.create(plan.folder, plan.config)
    experiment.division.save(plan.folder / "partition.npz")
    trackers = Trackers({n: instantiate(node, Tracker, f"tracker.{n}") for n, node in plan.config["tracker"].items()})
    trackers.start(_run_info(plan, alone))
    for warning in filter(None, (simulation.components.selector.warning,)):
        trackers.message(warning)
    parts = simulation.components
    incidents = Incidents(parts.population, parts.selector.adaptive, trackers.message)
    records: list[Record] = []
    status, error = "done", None
    initial_accuracy = simulation.evaluate().accuracy
    started = time.time()
    try:
        for entry in simulation:
            records.append(entry)
            folder.append(entry.as_dict())
            if (trace := simulation.components.selector.trace) is not None:
                folder.append({"round": entry.round, **trace}, TRACE)
            trackers.log(entry.as_dict())
            incidents.see(entry)
    except DivergedError as reason:
        status, error = "diverged", str(reason)
    except KeyboardInterrupt:
        status, error = "interrupted", "Ctrl-C"
    except FedsimError as reason:
        status, error = "failed", str(reason)
    except Exception as reason:
        status, error = "failed", f"{type(reason).__name__}: {reason}"
        folder.write_text("error.txt", traceback.format_exc())
    summary = {
        "status": status,
        "error": error,
        **_results(records, initial_accuracy),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "start_up_rounds": simulation.components.selector.start_up_rounds,
        "seed": plan.settings.seed,
        "choices": dict(plan.choices),
        "engine": simulation.components.engine.description,
        "incidents": incidents.counts(records),
        "data": dict(experiment.data_source),
        "partition_hash": experiment.division.hash,
        "config_hash": plan.config_hash,
        "revision": revision,
        "environment": environment(simulation.components.server_data.test.x.device),
        "trackers": {},
    }
    folder.write_summary(summary)
    trackers.finish(summary)
    if trackers.degraded:
        summary["trackers"] = trackers.degraded
        folder.write_summary(summary)
    return Outcome(status, summary)


def _run_info(plan: Plan, alone: bool) -> RunInfo:
    return RunInfo(
        name=plan.settings.name,
        folder=plan.folder,
        config=plan.config,
        choices=plan.choices,
        seed=plan.settings.seed,
        num_rounds=plan.settings.num_rounds,
        alone=alone,
    )


def _results(records: list[Record], initial_accuracy: float) -> dict[str, Any]:
    evaluated = [r.test_accuracy for r in records if r.test_accuracy is not None]
    return {
        "rounds": len(records),
        "initial_accuracy": initial_accuracy,
        "final_accuracy": evaluated[-1] if evaluated else None,
        "best_accuracy": max(evaluated, default=None),
        "mean_participation_ratio": float(np.mean([r.participation_ratio for r in records])) if records else None,
        "coverage": records[-1].coverage if records else 0.0,
        "wall_seconds": records[-1].wall_seconds if records else 0.0,
        "totals": {name: sum(getattr(r, name) for r in records) for name in LEDGER_TOTALS},
    }
