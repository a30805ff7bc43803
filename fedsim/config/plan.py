"""A config checked as a whole before any work: one run, and the name of its folder.

Mistakes of every group are told at once: of a node whose names or types are mistaken these, of a sound one what its
constructor says, and then what one group says of another.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import platformdirs
import torch
from torch import nn

from fedsim.clients.context import OF_SYSTEM, Signal
from fedsim.clients.system import System
from fedsim.config.build import Gathered, inspect_node, instantiate
from fedsim.config.settings import CheckpointSettings, LocalSettings, Settings, built, with_one_amount_of_work
from fedsim.core.configs import IRRELEVANT, by_meaning
from fedsim.core.errors import ConfigError, Problem, check, rule
from fedsim.core.types import Population
from fedsim.data.base import Dataset
from fedsim.engine.backend import Backend
from fedsim.engine.optimizers import LocalOptimizer
from fedsim.partitions.base import Partition
from fedsim.partitions.division import ServerSplit
from fedsim.rounds.aggregators import Aggregator
from fedsim.rounds.availability import Availability
from fedsim.selectors.base import Selector
from fedsim.tracking.base import Tracker

Form = tuple[tuple[int, ...], int]
"""The shape of an input, and the number of classes."""
_of_models: dict[tuple[object, str, str], list[Problem]] = {}
"""By class, values and form: the jobs of a sweep have few models."""


def check_model(node: Any, form: Form | None) -> None:
    """Raise `ConfigError` for a model's target, for names and types, and for what its constructor says of its values.

    `form`: that of the data set, None where it is not known before files are read; the constructor is not called then.
    It is called on torch's meta device for a model of this package, so that no weights are made. A class of the user's
    is built as a run builds it, since it may not know that device; one that has a backbone, and a function, may
    read files of weights and are called by the run alone.
    """
    cls = inspect_node(node, nn.Module, "model")
    own = not cls.__module__.startswith("fedsim.models.")
    if form is None or (own and not (isinstance(cls, type) and not hasattr(cls, "load_backbone"))):
        return
    known = (cls, json.dumps(node, sort_keys=True, default=repr), repr(form))
    if known not in _of_models:
        found = Gathered()
        with torch.random.fork_rng(devices=[]), nullcontext() if own else torch.device("meta"):
            found.run(instantiate, node, nn.Module, "model", *form)
        _of_models[known] = found.problems
    check(*_of_models[known])


T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """One run, checked. `config` is what its config.yaml will hold; `folder` is a function of it:
    outputs/<name>/<dataset>-<partition>-<model>-<selector>-s<seed>-<hash>."""

    config: Mapping[str, Any]
    choices: Mapping[str, str]
    settings: Settings
    local: LocalSettings
    server: ServerSplit
    checkpoint: CheckpointSettings
    config_hash: str
    folder: Path

    @property
    def data_dir(self) -> Path:
        return self.settings.data_dir or platformdirs.user_cache_path("fedsim") / "data"

    @property
    def cache_dir(self) -> Path:
        return self.settings.cache_dir or platformdirs.user_cache_path("fedsim") / "decoded"


def make_plan(config: Mapping[str, Any], choices: Mapping[str, str], *, elsewhere: bool = False) -> Plan:
    """Check `config` (plain containers, resolved). Raises `ConfigError` with all its problems. `elsewhere`: another
    machine runs it, and has GPUs of its own."""
    config = with_one_amount_of_work(config)
    if config.get("device") == "auto" and torch.cuda.is_available():
        config["device"] = "cuda"  # in the record and in its hash: a CPU's result is not taken for a GPU's
    problems = Gathered()
    local = problems.run(built, config.get("local") or {}, LocalSettings, "local")
    server = problems.run(built, config.get("server") or {}, ServerSplit, "server")
    checkpoint = problems.run(built, config.get("checkpoint") or {}, CheckpointSettings, "checkpoint")
    settings = problems.run(built, config, Settings, "")
    system = _check_groups(config, problems)
    problems.run_users(_check_selector, config, settings, system, problems)
    if settings is not None:
        problems.add(None if elsewhere else _device_problem(settings.device))
        met = settings.client_accuracy != "holdout" or local is None or local.holdout_fraction > 0
        remedy = "set local.holdout_fraction=0.2, say, or client_accuracy=labels"
        text = "needs samples that are held out"
        problems.add(rule(met, "client_accuracy", settings.client_accuracy, text, remedy))
    if problems.problems or settings is None or local is None or server is None or checkpoint is None:
        raise ConfigError(problems.problems)
    config_hash = hash_config(config)
    readable = [Path(choices.get(g, "custom")).name for g in ("dataset", "partition", "model", "selector")]
    folder = settings.output_dir / settings.name / "-".join([*readable, f"s{settings.seed}", config_hash[:8]])
    return Plan(config, choices, settings, local, server, checkpoint, config_hash, folder)


def hash_config(config: Mapping[str, Any]) -> str:
    """SHA-256 over every value that can change a result (`fedsim.core.configs.by_meaning`)."""
    relevant = by_meaning({k: v for k, v in config.items() if k not in IRRELEVANT})
    return hashlib.sha256(json.dumps(relevant, sort_keys=True, default=str).encode()).hexdigest()


GROUPS: Mapping[str, tuple[type, tuple[Any, ...]]] = {
    "dataset": (Dataset, (Path(), Path())),
    "partition": (Partition, ()),
    "availability": (Availability, ()),
    "system": (System, ()),
    "optimizer": (LocalOptimizer, ()),
    "aggregator": (Aggregator, (frozenset(),)),
}
"""Groups whose parts are cheap to make: the base of each, and what it is passed in place of what it gets in a run."""


def _check_groups(config: Mapping[str, Any], problems: Gathered) -> System | None:
    """All but the selector; returns the simulated clock, if there is a sound one."""
    made = {
        group: problems.run_users(instantiate, config.get(group), base, group, *passed)
        for group, (base, passed) in GROUPS.items()
        if group != "system" or config.get(group) is not None
    }
    dataset = made["dataset"]
    problems.run_users(check_model, config.get("model"), None if dataset is None else problems.run_users(dataset.form))
    problems.run_users(inspect_node, config.get("engine"), Backend, "engine")
    trackers = config.get("tracker")
    for name, node in trackers.items() if isinstance(trackers, Mapping) else ():
        problems.run_users(instantiate, node, Tracker, f"tracker.{name}")
    return made.get("system")


def _check_selector(
    config: Mapping[str, Any], settings: Settings | None, system: System | None, problems: Gathered
) -> None:
    """The selector is checked with clients of equal size, once their numbers are known to be sound."""
    node = config.get("selector")
    inspect_node(node, Selector, "selector")
    has_clock = config.get("system") is not None
    if settings is None or (has_clock and system is None):
        return
    n, k = settings.num_clients, settings.cohort_size
    num_selected = k if system is None else system.num_selected(k, n)
    population = Population(np.ones(n, np.int64), num_selected, settings.num_rounds)
    selector = instantiate(node, Selector, "selector", population)
    name, text = type(selector).__name__, "must call super().__init__(population) in its __init__"
    problems.add(rule(hasattr(selector, "population"), "selector", name, text))
    remedy = "choose system=lognormal, say, in every run that is compared with this one"
    met = has_clock or not selector.needs & OF_SYSTEM
    problems.add(rule(met, "system", "none", f"must be a simulated clock for {name}", remedy))
    problems.add(_unmet(Signal.VALIDATION, selector, config.get("server"), "validation_fraction", 0.05))
    problems.add(_unmet(Signal.PUBLIC, selector, config.get("server"), "public_samples", 100))


def _unmet(signal: Signal, selector: Selector, server: Any, key: str, example: float) -> Problem | None:
    value = server.get(key) if isinstance(server, Mapping) else None
    met = signal not in selector.needs or not isinstance(value, int | float) or value > 0
    remedy = f"set it to {example}, say, in every run that is compared with this one"
    return rule(met, f"server.{key}", value, f"must be > 0 for {type(selector).__name__}", remedy)


def _device_problem(device: str) -> Problem | None:
    if not device.startswith("cuda"):
        return None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return Problem("device", device, "needs a CUDA GPU that torch can see", "use device=cpu or device=auto")
    there = int(device.partition(":")[2] or 0) < count
    return rule(there, "device", device, f"torch sees GPUs 0 to {count - 1}", f"use device=cuda:{count - 1}, say")
