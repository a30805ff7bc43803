"""Build the components of a plan before any work, to find mistakes that only they can tell.

`fedsim.config.compose` calls `check_parts` for each job. It finds two kinds of mistakes: those that
a constructor reports about its values, and violated rules between config groups, such as "FedNova
needs an aggregator that is a mean". The run builds the components again. The checks take time
because they import PyTorch and the modules of all components.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

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

T = TypeVar("T")
Form = tuple[tuple[int, ...], int]
"""The shape of an input, and the number of classes: `((1, 28, 28), 10)`."""

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
"""Groups that a config may lack: a config of an earlier version, or with null for the group."""
FEWEST_CLASSES = 2
"""The number of classes that stands in for the data set's, which is not known before its files are
read."""

_model_problems: dict[tuple[object, str, str], list[Problem]] = {}
"""The problems of models by class or function, node and form. The jobs of a sweep have few
different models."""


@dataclass(frozen=True)
class SmallComponents:
    """The components that are built quickly and that rules are about.

    A component is None if it has a problem, or if the config has none.
    """

    dataset: Dataset | None
    optimizer: LocalOptimizer | None
    aggregator: Aggregator | None
    local_algorithm: LocalAlgorithm | None
    system: System | None


def check_parts(plan: Plan, *, elsewhere: bool = False) -> None:
    """Build all components of a plan. Raises `ConfigError` with all problems.

    `elsewhere` says that another machine runs the job, so that its GPUs are not known here. Rules
    that need a component with a problem are not checked.
    """
    collector = ProblemCollector()
    components = _build_small_components(plan, collector)
    dataset = components.dataset
    form = None if dataset is None else collector.run_user_code(dataset.form)
    collector.run_user_code(_check_model, plan.config.get("model"), form)
    collector.run_user_code(_check_augmentation, dataset, plan.config.get("model"))
    collector.run_user_code(inspect_node, plan.config.get("engine"), Backend, "engine")
    collector.add(*_local_algorithm_problems(plan, components))
    collector.add(_privacy_problem(plan, components.aggregator))
    collector.run_user_code(_check_selector, plan, components, collector)
    if not elsewhere:
        collector.add(_device_problem(plan.settings.device))
    collector.add(*_holdout_problems(plan))
    check(*collector.problems)


def _build_small_components(plan: Plan, collector: ProblemCollector) -> SmallComponents:
    """Build all components but model, engine and selector. `collector` gets their problems."""

    def build(group: str, base: type[T], *passed: Any) -> T | None:
        """Return the group's component. `passed` stands in for the arguments that a run passes."""
        node = plan.config.get(group)
        if node is None and group in OPTIONAL:
            return None
        return collector.run_user_code(instantiate, node, base, group, *passed)

    dataset = build("dataset", Dataset, Path(), Path())
    build("partition", Partition)
    build("availability", Availability)
    optimizer = build("optimizer", LocalOptimizer)
    aggregator = build("aggregator", Aggregator, frozenset())
    build("clients", ClientBehaviour, plan.settings.num_clients, FEWEST_CLASSES, Streams(0))
    local_algorithm = build("local_algorithm", LocalAlgorithm)
    system = build("system", System)
    return SmallComponents(dataset, optimizer, aggregator, local_algorithm, system)


def _check_model(node: Any, form: Form | None) -> None:
    """Check the target of a model's node, its names and types, and the rules of its constructor.

    `form` is the form of the data set, None if that is known only after files are read. Without it,
    the constructor is not called. Raises `ConfigError`.

    A model of fedsim is built on torch's meta device, so that no weights are made. A class of the
    user's may not work on that device and is built as in a run. A function of the user's, or a
    class of the user's with the method `load_backbone`, may read files of weights, so only the run
    calls it.
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


def _local_algorithm_problems(plan: Plan, components: SmallComponents) -> Iterator[Problem]:
    """Yield the rules of the local algorithm over other groups that the plan violates."""
    algorithm = components.local_algorithm
    if algorithm is None:
        return
    name = type(algorithm).__name__
    if components.optimizer is not None:
        problem = algorithm.unfit_for(components.optimizer)
        if problem is not None:
            yield problem.within("local_algorithm")
    aggregator = components.aggregator
    if aggregator is not None:
        choice = plan.choices.get("aggregator")
        if algorithm.needs_mean and not aggregator.is_mean:
            text = f"must be a mean of the updates for {name}"
            text = f"{text}: one whose class says `is_mean = True`"
            yield Problem("aggregator", choice, text, "aggregator=uniform or by_size, say")
        if algorithm.needs_average and not aggregator.is_average:
            text = (
                f"must be a plain mean for {name}, which sums all updates itself: "
                "its class must say `is_average = True`"
            )
            yield Problem("aggregator", choice, text, "aggregator=by_size or uniform")
        if aggregator.is_private and algorithm.kept_vectors:
            text = (
                f"must not be private with {name}, whose sums hold updates that are neither "
                "clipped nor noisy"
            )
            yield Problem("aggregator", choice, text, "local_algorithm=fedprox, say")
    init_seed = plan.settings.init_seed
    if algorithm.needs_same_start and init_seed == "per_client":
        text = (
            f"must be null or a number for {name}, which takes updates for sums of gradients "
            "since the server's model"
        )
        yield Problem("init_seed", init_seed, text, "init_seed=null")


def _privacy_problem(plan: Plan, aggregator: Aggregator | None) -> Problem | None:
    """Return the problem of a private run that ends at an accuracy, or None.

    Its epsilon would be that of a number of rounds that depends on the data.
    """
    stop_at = plan.settings.stop_at
    if stop_at is None or aggregator is None or not aggregator.is_private:
        return None
    text = (
        "must be null for a private aggregator: epsilon holds for a number of rounds that does not "
        "depend on the data"
    )
    return Problem("stop_at", stop_at, text, "leave it out; num_rounds ends the run")


def _holdout_problems(plan: Plan) -> Iterator[Problem]:
    """Yield a problem for each key that needs samples that clients hold out, if they hold out
    none."""
    if plan.local.holdout_fraction > 0:
        return
    text = "needs samples that are held out"
    if plan.settings.client_accuracy == "holdout":
        remedy = "set local.holdout_fraction=0.2, say, or client_accuracy=labels"
        yield Problem("client_accuracy", "holdout", text, remedy)
    if plan.settings.test_on == "holdout":
        yield Problem("test_on", "holdout", text, "set local.holdout_fraction=0.1, say")


def _check_selector(plan: Plan, components: SmallComponents, collector: ProblemCollector) -> None:
    """Build the selector, and collect the violated rules between it and other groups.

    Raises `ConfigError` if the selector itself has a problem.
    """
    selector = _build_selector(plan, components.system)
    if selector is not None:
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
    plan: Plan, selector: Selector, components: SmallComponents
) -> Iterator[Problem]:
    """Yield the rules between the selector and other groups that the plan violates."""
    settings = plan.settings
    name = type(selector).__name__
    system = components.system
    aggregator = components.aggregator
    in_every_run = "say, in every run that is compared with this one"
    if not hasattr(selector, "population"):
        text = "must call super().__init__(population) in its __init__"
        yield Problem("selector", name, text)
    if system is None and selector.needs & CLOCK_SIGNALS:
        text = f"must be a simulated clock for {name}"
        yield Problem("system", "none", text, f"choose system=lognormal, {in_every_run}")
    if settings.secure_aggregation:
        yield from _secrecy_problems(plan, selector, aggregator)

    # Samples of the server: signal, key, value, and an example of a value that provides them
    server = plan.server
    samples = [
        (Signal.VALIDATION, "validation_fraction", server.validation_fraction, 0.05),
        (Signal.PUBLIC, "public_samples", server.public_samples, 100),
    ]
    for signal, key, value, example in samples:
        if signal in selector.needs and value <= 0:
            text = f"must be > 0 for {name}"
            yield Problem(f"server.{key}", value, text, f"set it to {example}, {in_every_run}")

    # The largest number of updates that the aggregator gets in a round. An adaptive selector may
    # select all clients, but with over-selection the first K updates count.
    if aggregator is not None:
        has_over_selection = system is not None and system.over_selection > 1
        max_updates = settings.cohort_size
        if selector.adaptive and not has_over_selection:
            max_updates = settings.num_clients
        for problem in aggregator.unfit_for(selector, max_updates):
            if problem is not None:
                yield problem.within("aggregator")


def _secrecy_problems(
    plan: Plan, selector: Selector, aggregator: Aggregator | None
) -> Iterator[Problem]:
    """Yield what selector and aggregator need of single clients, which secure aggregation hides."""
    hidden = selector.needs & HIDDEN_SIGNALS
    if hidden:
        text = (
            f"needs {server_sees(hidden)} of single clients, which secure_aggregation=true hides "
            "from the server"
        )
        remedy = "choose random or aocs, say; `fedsim list selectors` says what the server sees"
        yield Problem("selector", plan.choices.get("selector"), text, remedy)
    if aggregator is not None and not (aggregator.is_mean or aggregator.is_private):
        text = (
            "needs more than the mean of the updates, and secure_aggregation=true hides single "
            "ones from the server (a mean is a class with `is_mean = True`)"
        )
        choice = plan.choices.get("aggregator")
        yield Problem("aggregator", choice, text, "aggregator=by_size or uniform")


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
