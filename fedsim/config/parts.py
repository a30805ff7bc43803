"""Build the components of a config before any work, to find mistakes that only they can tell.

`fedsim.config.compose` calls `check_parts` for each job. It finds the mistakes that a constructor
reports about its values, and violated rules between config groups. The run builds the components
again. The checks take time because they import PyTorch and the modules of all components.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedsim.clients.behaviour import ClientBehaviour
from fedsim.clients.context import CLOCK_SIGNALS, HIDDEN_SIGNALS, Signal
from fedsim.clients.local_algorithms import LocalAlgorithm
from fedsim.clients.system import System, over_selection_explained
from fedsim.config.build import inspect_node, instantiate
from fedsim.config.plan import Plan
from fedsim.core.errors import Problem, ProblemCollector, check, rule
from fedsim.core.rng import Streams
from fedsim.core.server_data import server_sees
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
"""The base class of each config group whose choice may be a class of the user's."""
OPTIONAL = ("clients", "local_algorithm", "system")
"""Groups that a config may lack: one of an earlier version, or one with null for the group."""

_model_problems: dict[tuple[object, str, str], list[Problem]] = {}
"""The problems of models by class or function, node and form. The jobs of a sweep have few
different models."""


def check_parts(plan: Plan, *, elsewhere: bool = False) -> None:
    """Build all components of a plan. Raises `ConfigError` with all problems.

    `elsewhere`: another machine runs the job, so that its GPUs are not known here. A component with
    a problem is None in what follows, and rules that need it are not checked.
    """
    collector = ProblemCollector()
    settings = plan.settings
    components = _build_small_components(plan, collector)
    dataset = components["dataset"]
    form = None if dataset is None else collector.run_user_code(dataset.form)
    collector.run_user_code(check_model, plan.config.get("model"), form)
    collector.run_user_code(_check_augmentation, dataset, plan.config.get("model"))
    collector.run_user_code(inspect_node, plan.config.get("engine"), Backend, "engine")
    collector.add(*_local_algorithm_problems(plan, components))
    collector.add(_privacy_problem(plan, components["aggregator"]))
    collector.run_user_code(_check_selector, plan, components, collector)
    if not elsewhere:
        collector.add(_device_problem(settings.device))
    needs_holdout = [
        ("client_accuracy", settings.client_accuracy, "0.2, say, or client_accuracy=labels"),
        ("test_on", settings.test_on, "0.1, say"),
    ]
    for key, value, remedy in needs_holdout:
        collector.add(
            rule(
                value != "holdout" or plan.local.holdout_fraction > 0,
                key,
                value,
                "needs samples that are held out",
                f"set local.holdout_fraction={remedy}",
            )
        )
    check(*collector.problems)


def _build_small_components(plan: Plan, collector: ProblemCollector) -> dict[str, Any]:
    """Return all components but model and selector by their group.

    A component is None if it has a problem, or if the config has none.
    """
    bases: dict[str, type] = dict(BASES, system=System)
    del bases["model"], bases["selector"]
    # Stand-ins for the arguments that a run passes by position (see `PASSED` in build.py). The
    # number of classes is not known before files are read; 2 is the least.
    passed: dict[str, tuple[Any, ...]] = {
        "dataset": (Path(), Path()),
        "aggregator": (frozenset(),),
        "clients": (plan.settings.num_clients, 2, Streams(0)),
    }
    components: dict[str, Any] = dict.fromkeys(bases)
    for group, base in bases.items():
        node = plan.config.get(group)
        if node is not None or group not in OPTIONAL:
            arguments = (node, base, group, *passed.get(group, ()))
            components[group] = collector.run_user_code(instantiate, *arguments)
    return components


def check_model(node: Any, form: Form | None) -> None:
    """Check the target of a model's node, its names and types, and the rules of its constructor.

    `form` is the form of the data set. If it is not known before files are read, it is None, and
    the constructor is not called. Raises `ConfigError`.

    A model of fedsim is built on torch's meta device, so that no weights are made. A class of the
    user's may not work on that device and is built as in a run. A function of the user's, or a
    class with the method `load_backbone`, may read files of weights, so only the run calls it.
    """
    constructor = inspect_node(node, nn.Module, "model")
    is_shipped = constructor.__module__.startswith("fedsim.models.")
    is_function = not isinstance(constructor, type)
    may_read_weights = is_function or hasattr(constructor, "load_backbone")
    if form is None or (may_read_weights and not is_shipped):
        return
    key = (constructor, json.dumps(node, sort_keys=True, default=repr), repr(form))
    if key not in _model_problems:
        collector = ProblemCollector()
        on_device = torch.device("meta") if is_shipped else nullcontext()
        # a user's class draws weights from torch's global generator, which must not change here
        with torch.random.fork_rng(devices=[]), on_device:
            collector.run(instantiate, node, nn.Module, "model", *form)
        _model_problems[key] = collector.problems
    check(*_model_problems[key])


def _check_augmentation(dataset: Dataset | None, node: Any) -> None:
    """Raise `ConfigError` if images are to be augmented for a model that trains on features."""
    augment = getattr(dataset, "augment", None)
    if augment is None:
        return
    on_features = hasattr(inspect_node(node, nn.Module, "model"), "load_backbone")
    text = "is for models that train on images, not on features that are computed once"
    remedy = "dataset.augment=null, or model=cnn, say"
    check(rule(not on_features, "dataset.augment", augment, text, remedy))


def _local_algorithm_problems(
    plan: Plan, components: Mapping[str, Any]
) -> Iterator[Problem | None]:
    """Yield the rules of the local algorithm over other groups that the plan violates."""
    algorithm: LocalAlgorithm | None = components["local_algorithm"]
    if algorithm is None:
        return
    name = type(algorithm).__name__
    optimizer: LocalOptimizer | None = components["optimizer"]
    if optimizer is not None and (problem := algorithm.unfit_for(optimizer)):
        yield problem.within("local_algorithm")
    aggregator: Aggregator | None = components["aggregator"]
    if aggregator is not None:
        choice = plan.choices.get("aggregator")
        yield rule(
            aggregator.is_mean or not algorithm.needs_mean,
            "aggregator",
            choice,
            f"must be a mean of the updates for {name}: one whose class says `is_mean = True`",
            "aggregator=uniform or by_size, say",
        )
        yield rule(
            aggregator.is_average or not algorithm.needs_average,
            "aggregator",
            choice,
            f"must be a plain mean for {name}, which sums all updates itself: "
            "its class must say `is_average = True`",
            "aggregator=by_size or uniform",
        )
        yield rule(
            not (aggregator.is_private and algorithm.kept_vectors),
            "aggregator",
            choice,
            f"must not be private with {name}, whose sums hold updates that are neither "
            "clipped nor noisy",
            "local_algorithm=fedprox, say",
        )
    yield rule(
        plan.settings.init_seed != "per_client" or not algorithm.needs_same_start,
        "init_seed",
        plan.settings.init_seed,
        f"must be null or a number for {name}, which takes updates for sums of gradients "
        "since the server's model",
        "init_seed=null",
    )


def _privacy_problem(plan: Plan, aggregator: Aggregator | None) -> Problem | None:
    """Return the problem of a private run that ends at an accuracy, or None.

    Its epsilon would be that of a number of rounds that depends on the data.
    """
    stops = plan.settings.stop_at is not None
    return rule(
        not (stops and aggregator is not None and aggregator.is_private),
        "stop_at",
        plan.settings.stop_at,
        "must be null for a private aggregator: epsilon holds for a number of rounds that does not "
        "depend on the data",
        "leave it out; num_rounds ends the run",
    )


def _check_selector(plan: Plan, components: Mapping[str, Any], collector: ProblemCollector) -> None:
    """Build the selector, and collect the violated rules between it and other groups.

    Raises `ConfigError` if the selector itself has a problem.
    """
    selector = _build_selector(plan, components["system"])
    if selector is None:
        return
    for problem in _selector_problems(plan, selector, components):
        collector.add(problem)


def _build_selector(plan: Plan, system: System | None) -> Selector | None:
    """Return the plan's selector, for clients of equal size.

    Returns None if the plan has a simulated clock with a problem, so that `system` is None. Raises
    `ConfigError` if the selector has a problem.
    """
    node = plan.config.get("selector")
    inspect_node(node, Selector, "selector")
    if system is None and plan.config.get("system") is not None:
        return None
    settings = plan.settings
    num_selected = settings.cohort_size
    if system is not None:
        num_selected = system.num_selected(settings.cohort_size, settings.num_clients)
    sizes = np.ones(settings.num_clients, np.int64)
    population = Population(sizes, num_selected, settings.num_rounds)
    with over_selection_explained(settings.cohort_size, num_selected):
        return instantiate(node, Selector, "selector", population)


def _selector_problems(
    plan: Plan, selector: Selector, components: Mapping[str, Any]
) -> Iterator[Problem | None]:
    """Yield the rules between the selector and other groups that the plan violates."""
    settings = plan.settings
    name = type(selector).__name__
    system: System | None = components["system"]
    in_every_run = "say, in every run that is compared with this one"
    yield rule(
        hasattr(selector, "population"),
        "selector",
        name,
        "must call super().__init__(population) in its __init__",
    )
    yield rule(
        system is not None or not selector.needs & CLOCK_SIGNALS,
        "system",
        "none",
        f"must be a simulated clock for {name}",
        f"choose system=lognormal, {in_every_run}",
    )
    aggregator: Aggregator | None = components["aggregator"]
    if settings.secure_aggregation:
        yield from _secrecy_problems(plan, selector, aggregator)

    # Samples of the server: signal, key, value, and an example of a value that provides them
    server = plan.server
    samples = [
        (Signal.VALIDATION, "validation_fraction", server.validation_fraction, 0.05),
        (Signal.PUBLIC, "public_samples", server.public_samples, 100),
    ]
    for signal, key, value, example in samples:
        yield rule(
            value > 0 or signal not in selector.needs,
            f"server.{key}",
            value,
            f"must be > 0 for {name}",
            f"set it to {example}, {in_every_run}",
        )

    # The largest number of updates that the aggregator gets in a round. An adaptive selector may
    # select all clients, but with over-selection the first K updates count.
    if aggregator is not None:
        has_over_selection = system is not None and system.over_selection > 1
        max_updates = settings.cohort_size
        if selector.adaptive and not has_over_selection:
            max_updates = settings.num_clients
        for problem in aggregator.unfit_for(selector, max_updates):
            yield problem and problem.within("aggregator")


def _secrecy_problems(
    plan: Plan, selector: Selector, aggregator: Aggregator | None
) -> Iterator[Problem | None]:
    """Yield what selector and aggregator need of single clients, which secure aggregation hides."""
    hidden = selector.needs & HIDDEN_SIGNALS
    yield rule(
        not hidden,
        "selector",
        plan.choices.get("selector"),
        f"needs {server_sees(hidden)} of single clients, which secure_aggregation=true hides from "
        "the server",
        "choose random or aocs, say; `fedsim list selectors` says what the server sees",
    )
    if aggregator is not None:
        yield rule(
            aggregator.is_mean or aggregator.is_private,
            "aggregator",
            plan.choices.get("aggregator"),
            "needs more than the mean of the updates, and secure_aggregation=true hides single "
            "ones from the server (a mean is a class with `is_mean = True`)",
            "aggregator=by_size or uniform",
        )


def _device_problem(device: str) -> Problem | None:
    """Return the problem of a GPU, `cuda` or `cuda:<number>`, that torch does not see; or None."""
    if not device.startswith("cuda"):
        return None
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus == 0:
        text = "needs a CUDA GPU that torch can see"
        return Problem("device", device, text, "use device=cpu or device=auto")
    last = num_gpus - 1
    number = int(device.partition(":")[2] or 0)
    text = f"torch sees GPUs 0 to {last}"
    return rule(number <= last, "device", device, text, f"use device=cuda:{last}, say")
