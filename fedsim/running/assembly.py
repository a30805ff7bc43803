"""The simulation of a run from its plan: data, division, model, and every part that the config names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedsim.aggregators import Aggregator
from fedsim.availability import Availability
from fedsim.client_accuracy import ClientAccuracy, Samples, client_accuracy
from fedsim.communication.server import LabelledSamples, ServerData
from fedsim.communication.signals import Signal
from fedsim.config.build import instantiate
from fedsim.config.plan import Plan
from fedsim.data.on_demand import SampleSource
from fedsim.engine.backend import Backend, Workload
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine
from fedsim.engine.model.parameters import initial, trained_names
from fedsim.engine.on_demand import OnDemandBackend
from fedsim.engine.schedule import LocalWork
from fedsim.errors import check
from fedsim.optimizers.base import LocalOptimizer
from fedsim.partitions.base import Labelled, Partition
from fedsim.partitions.division import Division, divide
from fedsim.rng import Streams
from fedsim.running.prepared_data import PreparedData, build_model, prepare
from fedsim.selectors.base import Selector
from fedsim.simulation import Components, Simulation
from fedsim.system.clock import SimulatedClock
from fedsim.system.system import System
from fedsim.types import Params, Population


@dataclass(frozen=True)
class Experiment:
    """A simulation ready to run, the division of its data, the model as it was built, and what identifies the data."""

    simulation: Simulation
    division: Division
    model: nn.Module
    data_source: Mapping[str, str | None]


def build(plan: Plan) -> Experiment:
    """All parts of a run from its config. Raises `ConfigError` and `DataError`; writes nothing but caches."""
    config, settings = plan.config, plan.settings
    init_seed = settings.init_seed if isinstance(settings.init_seed, int) else None
    streams = Streams(settings.seed, settings.partition_seed, init_seed)
    data = prepare(plan)
    model = build_model(config["model"], data.input_shape, data.num_classes, streams)
    division = divide(
        Labelled(data.y.cpu().numpy(), data.num_classes, data.owners),
        instantiate(config["partition"], Partition, "partition"),
        settings.num_clients,
        streams,
        plan.server,
        plan.local.holdout_fraction,
    )
    model = model.to(data.device)
    return Experiment(_simulation(plan, data, division, model, streams), division, model, data.source)


def _simulation(plan: Plan, data: PreparedData, division: Division, model: nn.Module, streams: Streams) -> Simulation:
    config, settings, local = plan.config, plan.settings, plan.local
    clients = _client_data(data, division, division.train if local.evaluate_on == "train" else division.holdout)
    optimizer = instantiate(config["optimizer"], LocalOptimizer, "optimizer")
    work = LocalWork(local.epochs, local.steps, local.batch_size)
    system = instantiate(config["system"], System, "system") if config.get("system") is not None else None
    num_selected = (
        settings.cohort_size if system is None else system.num_selected(settings.cohort_size, len(division.sizes))
    )
    check(work.too_large(division.sizes, num_selected))
    workload = Workload(model, clients, optimizer, settings.num_rounds * work.median_steps(division.train))
    population = Population(division.sizes, num_selected, settings.num_rounds)
    params = initial(model)
    selector = instantiate(config["selector"], Selector, "selector", population)
    unfit = selector.unfit_for(trained_names(model))
    check(None if unfit is None else unfit.within("selector"))
    components = Components(
        engine=Engine(_backend(config["engine"], workload), workload, work, streams),
        population=population,
        selector=selector,
        aggregator=instantiate(
            config["aggregator"], Aggregator, "aggregator", frozenset(params) - frozenset(trained_names(model))
        ),
        availability=instantiate(config["availability"], Availability, "availability"),
        server_data=ServerData(
            test=data.test,
            validation=_labelled(data, division.validation)
            if len(division.validation) and Signal.VALIDATION in selector.needs
            else None,
            public=data.samples(division.public) if len(division.public) else None,
        ),
        streams=streams,
        learning_rate=lambda t: optimizer.lr_at(t, settings.num_rounds),
        eval_every=settings.eval_every,
        first_model=_first_models(plan, data, streams) if settings.init_seed == "per_client" else None,
        simulated=None
        if system is None
        else SimulatedClock(system, len(division.sizes), settings.cohort_size, streams),
        client_accuracy=_client_accuracy(plan, data, division),
    )
    return Simulation(components, params)


def _client_data(data: PreparedData, division: Division, evaluated: Sequence[NDArray[np.int64]]) -> ClientData:
    if isinstance(data.x, SampleSource):
        return ClientData.on_demand(data.x, data.y, division.train, evaluated, data.num_classes)
    return ClientData(data.x, data.y, division.train, evaluated, data.num_classes)


def _backend(node: Mapping[str, Any], workload: Workload) -> Backend:
    def build(workload: Workload) -> Backend:
        return instantiate(node, Backend, "engine", workload)

    return build(workload) if workload.data.source is None else OnDemandBackend(workload, build)


def _labelled(data: PreparedData, positions: NDArray[np.int64]) -> LabelledSamples:
    return LabelledSamples(data.samples(positions), data.y[torch.as_tensor(positions, device=data.device)])


def _client_accuracy(plan: Plan, data: PreparedData, division: Division) -> ClientAccuracy | None:
    if plan.settings.client_accuracy is None:
        return None
    samples = Samples(data.test.y.cpu().numpy(), data.owners, data.test_owners)
    return client_accuracy(plan.settings.client_accuracy, division, samples)


def _first_models(plan: Plan, data: PreparedData, streams: Streams) -> Callable[[int], Params]:
    """The model with which each client begins where every client has its own."""

    def of(client: int) -> Params:
        model = build_model(plan.config["model"], data.input_shape, data.num_classes, streams, client)
        return initial(model.to(data.device))

    return of
