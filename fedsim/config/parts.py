"""The parts of a config built as a run builds them, before any work: what their constructors say of
their values, and what one group says of another. Takes time: it imports PyTorch and the modules of
all parts."""

import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedsim.clients.behaviour import ClientBehaviour
from fedsim.clients.context import CLOCK_SIGNALS, Signal
from fedsim.clients.local_algorithms import LocalAlgorithm
from fedsim.clients.system import System
from fedsim.config.build import Gathered, inspect_node, instantiate
from fedsim.config.plan import Plan
from fedsim.core.errors import Problem, check, rule
from fedsim.core.rng import Streams
from fedsim.core.types import Population
from fedsim.data.base import Dataset
from fedsim.engine.backend import Backend
from fedsim.engine.optimizers import LocalOptimizer
from fedsim.partitions.base import Partition
from fedsim.rounds.aggregators import Aggregator
from fedsim.rounds.availability import Availability
from fedsim.selectors.base import Selector

Form = tuple[tuple[int, ...], int]
"""The shape of an input, and the number of classes."""
_of_models: dict[tuple[object, str, str], list[Problem]] = {}
"""By class, values and form: the jobs of a sweep have few models."""


def check_model(node: Any, form: Form | None) -> None:
    """Raise `ConfigError` for a model's target, for names and types, and for what its constructor
    says of its values.

    `form`: that of the data set, None where it is not known before files are read; the constructor
    is not called then. It is called on torch's meta device for a model of this package, so that no
    weights are made. A class of the user's is built as a run builds it, since it may not know that
    device; one that has a backbone, and a function, may read files of weights and are called by the
    run alone.
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


def check_parts(plan: Plan, *, elsewhere: bool = False) -> None:
    """Raise `ConfigError` with all problems. `elsewhere`: another machine runs it, and has GPUs of
    its own."""
    settings, problems = plan.settings, Gathered()
    made = _check_groups(plan, problems)
    problems.run_users(_check_selector, plan, made, problems)
    problems.add(None if elsewhere else _device_problem(settings.device))
    met = settings.client_accuracy != "holdout" or plan.local.holdout_fraction > 0
    remedy = "set local.holdout_fraction=0.2, say, or client_accuracy=labels"
    problems.add(
        rule(
            met,
            "client_accuracy",
            settings.client_accuracy,
            "needs samples that are held out",
            remedy,
        )
    )
    check(*problems.problems)


BASES: Mapping[str, type] = {
    "dataset": Dataset,
    "partition": Partition,
    "availability": Availability,
    "model": nn.Module,
    "optimizer": LocalOptimizer,
    "selector": Selector,
    "aggregator": Aggregator,
    "clients": ClientBehaviour,
    "local_algorithm": LocalAlgorithm,
}
"""Config groups whose choice may be a class of the user's, by its base."""
COSTLY = ("model", "selector")
"""Groups whose parts take more than their values to make."""
OPTIONAL = ("clients", "local_algorithm")
"""Groups that a config may lack: nothing of the kind happens then."""
IN_PLACE: Mapping[str, tuple[Any, ...]] = {
    "dataset": (Path(), Path()),
    "aggregator": (frozenset(),),
}
"""What parts of other groups are passed in place of what they get in a run."""


def _check_groups(plan: Plan, problems: Gathered) -> dict[str, Any]:
    """All but the selector; returns the sound parts by group, the simulated clock, too."""
    config = plan.config
    passed = {
        **IN_PLACE,
        "clients": (config["num_clients"], 2, Streams(0)),
    }  # classes are counted in a run
    made: dict[str, Any] = {
        group: problems.run_users(
            instantiate, config.get(group), base, group, *passed.get(group, ())
        )
        for group, base in BASES.items()
        if group not in COSTLY and (group not in OPTIONAL or config.get(group) is not None)
    }
    dataset = made["dataset"]
    problems.run_users(
        check_model,
        config.get("model"),
        None if dataset is None else problems.run_users(dataset.form),
    )
    problems.run_users(inspect_node, config.get("engine"), Backend, "engine")
    if made.get("local_algorithm") is not None:
        problems.add(*_unfit(plan, made["local_algorithm"], made["optimizer"], made["aggregator"]))
    system = config.get("system")
    made["system"] = (
        None if system is None else problems.run_users(instantiate, system, System, "system")
    )
    return made


def _unfit(
    plan: Plan,
    algorithm: LocalAlgorithm,
    optimizer: LocalOptimizer | None,
    aggregator: Aggregator | None,
) -> Iterator[Problem | None]:
    """What a local algorithm asks of other groups that these do not have."""
    name, settings, chosen = type(algorithm).__name__, plan.settings, plan.choices.get("aggregator")
    if optimizer is not None and (unfit := algorithm.unfit_for(optimizer)):
        yield unfit.within("local_algorithm")
    if aggregator is not None:
        text = f"must be a mean of the updates for {name}: one whose class says `is_mean = True`"
        met = aggregator.is_mean or not algorithm.needs_mean
        yield rule(met, "aggregator", chosen, text, "aggregator=uniform or by_size, say")
        text = f"must be a plain mean for {name}, which sums all updates itself: its class must say `is_average = True`"
        met = aggregator.is_average or not algorithm.needs_average
        yield rule(met, "aggregator", chosen, text, "aggregator=by_size or uniform")
        text = f"must not be private with {name}, whose sums hold updates that are neither clipped nor noisy"
        met = not (aggregator.is_private and algorithm.kept_vectors)
        yield rule(met, "aggregator", chosen, text, "local_algorithm=fedprox, say")
    met = settings.init_seed != "per_client" or not algorithm.needs_same_start
    text = f"must be null or a number for {name}, which takes updates for sums of gradients since the server's model"
    yield rule(met, "init_seed", settings.init_seed, text, "init_seed=null")


def _check_selector(plan: Plan, made: Mapping[str, Any], problems: Gathered) -> None:
    """The selector is checked with clients of equal size, and the aggregator beside it."""
    config, settings, system = plan.config, plan.settings, made["system"]
    node = config.get("selector")
    inspect_node(node, Selector, "selector")
    has_clock = config.get("system") is not None
    if has_clock and system is None:
        return
    n, k = settings.num_clients, settings.cohort_size
    num_selected = k if system is None else system.num_selected(k, n)
    population = Population(np.ones(n, np.int64), num_selected, settings.num_rounds)
    selector = instantiate(node, Selector, "selector", population)
    name, text = type(selector).__name__, "must call super().__init__(population) in its __init__"
    problems.add(rule(hasattr(selector, "population"), "selector", name, text))
    remedy = "choose system=lognormal, say, in every run that is compared with this one"
    met = has_clock or not selector.needs & CLOCK_SIGNALS
    problems.add(rule(met, "system", "none", f"must be a simulated clock for {name}", remedy))
    problems.add(
        _unmet(Signal.VALIDATION, selector, config.get("server"), "validation_fraction", 0.05)
    )
    problems.add(_unmet(Signal.PUBLIC, selector, config.get("server"), "public_samples", 100))
    if made["aggregator"] is not None:
        unfit = made["aggregator"].unfit_for(selector, n if selector.adaptive else k)
        problems.add(*(problem and problem.within("aggregator") for problem in unfit))


def _unmet(
    signal: Signal, selector: Selector, server: Any, key: str, example: float
) -> Problem | None:
    value = server.get(key) if isinstance(server, Mapping) else None
    met = signal not in selector.needs or not isinstance(value, int | float) or value > 0
    remedy = f"set it to {example}, say, in every run that is compared with this one"
    return rule(met, f"server.{key}", value, f"must be > 0 for {type(selector).__name__}", remedy)


def _device_problem(device: str) -> Problem | None:
    if not device.startswith("cuda"):
        return None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return Problem(
            "device", device, "needs a CUDA GPU that torch can see", "use device=cpu or device=auto"
        )
    there = int(device.partition(":")[2] or 0) < count
    return rule(
        there,
        "device",
        device,
        f"torch sees GPUs 0 to {count - 1}",
        f"use device=cuda:{count - 1}, say",
    )
