"""A config checked as a whole before any work: one run, and the name of its folder.

Mistakes of every group are told at once: of a node whose names or types are mistaken these, of a sound one what its
constructor says, and then what one group says of another.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import platformdirs
import torch
from torch import nn

from fedsim.clients.context import OF_SYSTEM, Signal
from fedsim.clients.system import System
from fedsim.config.build import inspect_node, instantiate
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
SHIPPED = "fedsim.models."

_found: dict[tuple[object, str, str], list[Problem]] = {}
"""By class, values and form: the jobs of a sweep have few models."""


def check_model(node: Any, form: Form | None) -> None:
    """Raise `ConfigError` for a model's target, for names and types, and for what its constructor says of its values.

    `form`: that of the data set, None where it is not known before files are read; the constructor is not called then.
    It is called on torch's meta device for a model of this package, so that no weights are made. A class of the user's
    is built as a run builds it, since it may not know that device; one that has an `extractor`, and a function, may
    read files of weights and are called by the run alone.
    """
    cls = inspect_node(node, nn.Module, "model")
    shipped = cls.__module__.startswith(SHIPPED)
    if form is None or not (shipped or (isinstance(cls, type) and not hasattr(cls, "extractor"))):
        return
    known = (cls, json.dumps(node, sort_keys=True, default=lambda v: [type(v).__name__, repr(v)]), repr(form))
    if known not in _found:
        _found[known] = []
        try:
            with torch.random.fork_rng(devices=[]), torch.device("meta") if shipped else nullcontext():
                instantiate(node, nn.Module, "model", *form)
        except ConfigError as error:
            _found[known] = list(error.problems)
    check(*_found[known])


T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """One run, checked. `config` is what its config.yaml will hold; `folder` is a function of it."""

    config: Mapping[str, Any]
    choices: Mapping[str, str]
    settings: Settings
    local: LocalSettings
    server: ServerSplit
    checkpoint: CheckpointSettings
    config_hash: str
    folder: Path

    def __post_init__(self) -> None:
        assert self.folder.name.endswith(self.config_hash[:8])

    @property
    def data_dir(self) -> Path:
        return self.settings.data_dir or platformdirs.user_cache_path("fedsim") / "data"

    @property
    def cache_dir(self) -> Path:
        return self.settings.cache_dir or platformdirs.user_cache_path("fedsim") / "decoded"


class _Problems:
    """Runs checks and gathers what they find, one problem of each value."""

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def run(self, build: Callable[..., T], *args: Any) -> T | None:
        """What `build` makes; None where it cannot."""
        try:
            return build(*args)
        except ConfigError as error:
            self.add(*error.problems)
            return None

    def run_users(self, build: Callable[..., T], *args: Any) -> T | None:
        """As `run`, where a user's class is called: whatever else it raises ends its own job, when that is built."""
        try:
            return self.run(build, *args)
        except (Exception, SystemExit):
            return None

    def add(self, *problems: Problem | None) -> None:
        for problem in problems:
            if problem is not None and (problem.key, problem.value) not in [(p.key, p.value) for p in self.found]:
                self.found.append(problem)


def make_plan(config: Mapping[str, Any], choices: Mapping[str, str], *, elsewhere: bool = False) -> Plan:
    """Check `config` (plain containers, resolved). Raises `ConfigError` with all its problems.

    `elsewhere`: another machine runs it, and has GPUs of its own.
    """
    config = with_one_amount_of_work(with_device(config))
    problems = _Problems()
    local = problems.run(built, config.get("local") or {}, LocalSettings, "local")
    server = problems.run(built, config.get("server") or {}, ServerSplit, "server")
    checkpoint = problems.run(built, config.get("checkpoint") or {}, CheckpointSettings, "checkpoint")
    settings = problems.run(built, config, Settings, "")
    _check_groups(config, problems)
    problems.run_users(_check_selector, config, settings, problems)
    if settings is not None:
        problems.add(None if elsewhere else _device_problem(settings.device))
        problems.add(_client_accuracy_problem(settings, local))
    if problems.found or settings is None or local is None or server is None or checkpoint is None:
        raise ConfigError(problems.found)
    config_hash = hash_config(config)
    folder = folder_of(settings, choices, config_hash)
    return Plan(config, choices, settings, local, server, checkpoint, config_hash, folder)


def hash_config(config: Mapping[str, Any]) -> str:
    """SHA-256 over every value that can change a result (`fedsim.core.configs.by_meaning`)."""
    relevant = by_meaning({k: v for k, v in config.items() if k not in IRRELEVANT})
    return hashlib.sha256(json.dumps(relevant, sort_keys=True, default=str).encode()).hexdigest()


def folder_of(settings: Settings, choices: Mapping[str, str], config_hash: str) -> Path:
    """outputs/<name>/<dataset>-<partition>-<model>-<selector>-s<seed>-<hash>."""
    readable = [Path(choices.get(g, "custom")).name for g in ("dataset", "partition", "model", "selector")]
    return settings.output_dir / settings.name / "-".join([*readable, f"s{settings.seed}", config_hash[:8]])


def with_device(config: Mapping[str, Any]) -> dict[str, Any]:
    """`device: auto` is `cuda` where there is a GPU, in the record and in its hash, so that what was computed on a CPU
    is not taken for a GPU's result. Where there is none it stays `auto`."""
    on_gpu = config.get("device") == "auto" and torch.cuda.is_available()
    return {**config, "device": "cuda"} if on_gpu else dict(config)


GROUPS: Mapping[str, tuple[type, tuple[Any, ...]]] = {
    "dataset": (Dataset, (Path(), Path())),
    "partition": (Partition, ()),
    "availability": (Availability, ()),
    "system": (System, ()),
    "optimizer": (LocalOptimizer, ()),
    "aggregator": (Aggregator, (frozenset(),)),
}
"""Groups whose parts are cheap to make: the base of each, and what it is passed in place of what it gets in a run."""


def _check_groups(config: Mapping[str, Any], problems: _Problems) -> None:
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


def _check_selector(config: Mapping[str, Any], settings: Settings | None, problems: _Problems) -> None:
    """The selector is checked with clients of equal size, once their numbers are known to be sound."""
    node = config.get("selector")
    inspect_node(node, Selector, "selector")
    has_clock = config.get("system") is not None
    system = problems.run_users(instantiate, config["system"], System, "system") if has_clock else None
    if settings is None or (has_clock and system is None):
        return
    n, k = settings.num_clients, settings.cohort_size
    num_selected = k if system is None else system.num_selected(k, n)
    population = Population(np.ones(n, np.int64), num_selected, settings.num_rounds)
    try:
        selector = instantiate(node, Selector, "selector", population)
    except ConfigError as error:
        raise ConfigError(_with_over_selection(one, k, num_selected) for one in error.problems) from error
    problems.add(rule(hasattr(selector, "population"), "selector", type(selector).__name__, UNINITIALISED))
    if not has_clock and selector.needs & OF_SYSTEM:
        problems.add(Problem("system", "none", f"must be a simulated clock for {type(selector).__name__}", CLOCKS))
    problems.add(_unmet(Signal.VALIDATION, selector, config.get("server"), "validation_fraction", 0.05))
    problems.add(_unmet(Signal.PUBLIC, selector, config.get("server"), "public_samples", 100))


UNINITIALISED = "must call super().__init__(population) in its __init__"
CLOCKS = "choose system=lognormal, say, in every run that is compared with this one"


def _with_over_selection(problem: Problem, k: int, num_selected: int) -> Problem:
    """Where a selector's rule names the K' clients to select as cohort_size, which is another: where K' is from."""
    if num_selected == k or f"cohort_size={num_selected}" not in problem.rule:
        return problem
    origin = f"{num_selected} clients are selected for cohort_size={k} by system.over_selection"
    return replace(problem, remedy="; ".join(filter(None, (problem.remedy, origin))))


def _unmet(signal: Signal, selector: Selector, server: Any, key: str, example: float) -> Problem | None:
    value = server.get(key) if isinstance(server, Mapping) else None
    met = signal not in selector.needs or not isinstance(value, int | float) or value > 0
    remedy = f"set it to {example}, say, in every run that is compared with this one"
    return rule(met, f"server.{key}", value, f"must be > 0 for {type(selector).__name__}", remedy)


def _client_accuracy_problem(settings: Settings, local: LocalSettings | None) -> Problem | None:
    met = settings.client_accuracy != "holdout" or local is None or local.holdout_fraction > 0
    remedy = "set local.holdout_fraction=0.2, say, or client_accuracy=labels"
    return rule(met, "client_accuracy", settings.client_accuracy, "needs samples that are held out", remedy)


def _device_problem(device: str) -> Problem | None:
    if not device.startswith("cuda"):
        return None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return Problem("device", device, "needs a CUDA GPU that torch can see", "use device=cpu or device=auto")
    there = int(device.partition(":")[2] or 0) < count
    return rule(there, "device", device, f"torch sees GPUs 0 to {count - 1}", f"use device=cuda:{count - 1}, say")
