"""One run from its plan: build the parts, run the rounds, keep the records.

Nothing is written into the run's folder before everything that can refuse has been built.
"""

import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

import fedsim
from fedsim.aggregators import Aggregator
from fedsim.availability import Availability
from fedsim.communication.ledger import PHASES
from fedsim.communication.server import Held, Holdings
from fedsim.config.build import make
from fedsim.config.plan import Plan
from fedsim.engine.engine import ClientData, Engine, LocalWork
from fedsim.engine.model.parameters import initial, trained_names
from fedsim.errors import DivergedError, FedsimError
from fedsim.optimizers.base import LocalOptimizer
from fedsim.partitions.base import Labelled, Partition
from fedsim.partitions.division import Division, divide
from fedsim.rng import Streams
from fedsim.running.prepared_data import ModelSamples, build_model, samples_of
from fedsim.selectors.base import Selector
from fedsim.simulation import Federation, Record, Simulation
from fedsim.tracking import Trackers
from fedsim.tracking.base import RunInfo, Tracker
from fedsim.tracking.files import TRACE, RunFolder, owned, read_summary
from fedsim.types import Params, Population

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


@dataclass(frozen=True)
class Experiment:
    """A simulation ready to run, with the division of its data."""

    simulation: Simulation
    division: Division


def execute(plan: Plan, join: Callable[[Simulation], None] | None = None) -> Outcome:
    """Run `plan`, or return at once what an identical finished run recorded.

    `join` makes its simulation one of several side by side. Raises `FedsimError`s that are found before round 1;
    later ones end in the summary's status.
    """
    earlier = outcome_on_file(plan)
    if earlier.status in ("done", "diverged") and not plan.settings.overwrite:
        return replace(earlier, skipped=True)
    experiment = build(plan)
    if join is not None:
        join(experiment.simulation)
    with owned(plan.folder):
        return record(plan, experiment, alone=join is None)


def outcome_on_file(plan: Plan) -> Outcome:
    """What the run's folder says of it; `failed` where there is no summary."""
    summary = read_summary(plan.folder)
    return Outcome("failed", {}) if summary is None else Outcome(summary["status"], summary)


def build(plan: Plan) -> Experiment:
    """All parts of a run from its config. Raises `ConfigError` and `DataError`; writes nothing but caches."""
    config, settings = plan.config, plan.settings
    init_seed = settings.init_seed if isinstance(settings.init_seed, int) else None
    streams = Streams(settings.seed, settings.partition_seed, init_seed)
    samples = samples_of(plan)
    model = build_model(config["model"], samples.input_shape, samples.num_classes, streams)
    division = divide(
        Labelled(samples.y.cpu().numpy(), samples.num_classes, samples.owners),
        make(config["partition"], Partition, "partition"),
        settings.num_clients,
        streams,
        plan.server,
        plan.local.holdout_fraction,
    )
    return Experiment(_simulation(plan, samples, division, model.to(samples.x.device), streams), division)


def _simulation(
    plan: Plan, samples: ModelSamples, division: Division, model: nn.Module, streams: Streams
) -> Simulation:
    config, settings, local = plan.config, plan.settings, plan.local
    x, y = samples.x, samples.y
    evaluated = division.train if local.evaluate_on == "train" else division.holdout
    clients = ClientData(x, y, division.train, evaluated, samples.num_classes)
    optimizer = make(config["optimizer"], LocalOptimizer, "optimizer")
    work = LocalWork(local.epochs, local.steps, local.batch_size, settings.num_rounds)
    population = Population(division.sizes, settings.cohort_size, settings.num_rounds)
    params = initial(model)
    validation = torch.as_tensor(division.validation, device=x.device)
    parts = Federation(
        engine=make(config["engine"], Engine, "engine", model, clients, work, optimizer, streams),
        population=population,
        selector=make(config["selector"], Selector, "selector", population),
        aggregator=make(
            config["aggregator"], Aggregator, "aggregator", frozenset(params) - frozenset(trained_names(model))
        ),
        availability=make(config["availability"], Availability, "availability"),
        holdings=Holdings(
            test=samples.test,
            validation=Held(x[validation], y[validation]) if len(validation) else None,
            public=x[torch.as_tensor(division.public, device=x.device)] if len(division.public) else None,
        ),
        eval_every=settings.eval_every,
        first_model=_first_models(plan, samples, streams) if settings.init_seed == "per_client" else None,
    )
    return Simulation(parts, params)


def _first_models(plan: Plan, samples: ModelSamples, streams: Streams) -> Callable[[int], Params]:
    """The model with which each client begins where every client has its own."""

    def of(client: int) -> Params:
        model = build_model(plan.config["model"], samples.input_shape, samples.num_classes, streams, client)
        return initial(model.to(samples.x.device))

    return of


def record(plan: Plan, experiment: Experiment, *, alone: bool = True) -> Outcome:
    """Run the rounds; write every record as it comes, then the summary."""
    simulation = experiment.simulation
    folder = RunFolder.create(plan.folder, plan.config)
    experiment.division.save(plan.folder / "partition.npz")
    trackers = Trackers({n: make(node, Tracker, f"tracker.{n}") for n, node in plan.config["tracker"].items()})
    trackers.start(_run_info(plan, alone))
    for warning in filter(None, (simulation.parts.selector.warning,)):
        trackers.message(warning)
    records: list[Record] = []
    status, error = "done", None
    initial_accuracy = simulation.evaluate().accuracy
    started = time.time()
    try:
        for entry in simulation:
            records.append(entry)
            folder.append(entry.as_dict())
            if (trace := simulation.parts.selector.trace) is not None:
                folder.append({"round": entry.round, **trace}, TRACE)
            trackers.log(entry.as_dict())
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
        "start_up_rounds": simulation.parts.selector.start_up_rounds,
        "seed": plan.settings.seed,
        "choices": dict(plan.choices),
        "engine": simulation.parts.engine.description,
        "partition_hash": experiment.division.hash,
        "config_hash": plan.config_hash,
        "environment": environment(simulation.parts.holdings.test.x.device),
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


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and machine, as far as a result depends on them."""
    return {
        "fedsim": fedsim.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": f"{sys.platform}-{platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }
