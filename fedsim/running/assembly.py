"""The simulation of a run from its plan: data, kept for the next run that wants the same, division,
model, parts."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.clients.behaviour import HONEST, ClientBehaviour
from fedsim.clients.context import LabelledSamples, Signal
from fedsim.clients.local_algorithms import LocalAlgorithm
from fedsim.clients.server import ServerData
from fedsim.clients.system import SimulatedClock, System
from fedsim.config.build import instantiate, resolve
from fedsim.config.plan import Plan
from fedsim.config.user_code import user_code
from fedsim.core.arrays import Ints
from fedsim.core.errors import DataError, Problem, check
from fedsim.core.rng import Purpose, Streams, UniformDraws
from fedsim.core.types import Params, Population, sizes_of
from fedsim.data.base import Dataset, LoadedData, SampleSource
from fedsim.data.features import TrainsOnFeatures, extract
from fedsim.engine.backend import Backend, Workload
from fedsim.engine.data import ClientData
from fedsim.engine.device import is_out_of_memory
from fedsim.engine.device import prepare as prepare_device
from fedsim.engine.engine import Engine
from fedsim.engine.model import initial, trained_names
from fedsim.engine.on_demand import OnDemandBackend
from fedsim.engine.optimizers import LocalOptimizer
from fedsim.engine.schedule import LocalWork
from fedsim.partitions.base import Labelled, Partition
from fedsim.partitions.division import Division, divide
from fedsim.rounds.aggregators import Aggregator
from fedsim.rounds.availability import Availability
from fedsim.rounds.client_accuracy import client_accuracy
from fedsim.rounds.loop import Components, Simulation
from fedsim.running.process import world
from fedsim.selectors.base import Selector


@dataclass(frozen=True)
class PreparedData:
    """Training samples `x` [n, ...] float32, or what makes them on demand, `y` [n], and the test
    set; read only. `input_shape` is that of the data set, also where a model trains on features;
    `source` has its fingerprint."""

    x: Tensor | SampleSource
    y: Tensor
    test: LabelledSamples
    num_classes: int
    input_shape: tuple[int, ...]
    owners: Ints | None
    source: Mapping[str, str | None]
    test_owners: Ints | None = None

    def samples(self, positions: Ints) -> Tensor:
        """Training samples at `positions` [m], on the device [m, ...]."""
        if isinstance(self.x, SampleSource):
            return self.x.rows(positions).to(self.y.device)
        return self.x[torch.as_tensor(positions, device=self.y.device)]


_latest: dict[tuple[str, object, object], PreparedData] = {}
"""The samples of the latest run, by its `data_key` and its classes, which may be others of the same
names."""


def prepare(plan: Plan) -> PreparedData:
    """Load, decode and normalise, unless the run before had the same. Raises `DataError`."""
    classes = (
        resolve(plan.config["dataset"], Dataset, "dataset"),
        resolve(plan.config["model"], nn.Module, "model"),
    )
    key = (data_key(plan), *classes)
    if key not in _latest:
        _latest.clear()
        _latest[key] = _load(plan, torch.device(resolve_device(plan.settings.device)))
    return _latest[key]


def forget() -> None:
    """Let the next run load its data, whose files may have changed since."""
    _latest.clear()


def data_key(plan: Plan) -> str:
    """Equal for runs that have the same prepared data, from files that do not change. Paths may be
    relative."""
    places = [
        str(plan.data_dir),
        str(plan.cache_dir),
        str(Path.cwd()),
        resolve_device(plan.settings.device),
    ]
    decisive = [plan.config["dataset"], plan.config["model"], *places]
    return json.dumps(decisive, sort_keys=True, default=str)


def is_prepared(plan: Plan) -> bool:
    return data_key(plan) in [key for key, *_ in _latest]


def _load(plan: Plan, device: torch.device) -> PreparedData:
    prepare_device(device, None)  # for frozen features, which later runs read from the cache
    dataset = instantiate(plan.config["dataset"], Dataset, "dataset", plan.data_dir, plan.cache_dir)
    try:
        data: object = dataset.load()  # a class of the user's may return anything
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        remedy = "close other programs, lower dataset.size, or use a smaller data set"
        raise DataError(
            f"dataset: the data do not fit into memory ({error or 'no more'}); {remedy}"
        ) from error
    if not isinstance(data, LoadedData):
        expected = f"{LoadedData.__module__}.{LoadedData.__name__}"
        raise DataError(
            f"{type(dataset).__name__}.load must return a {expected}, not {type(data).__name__}"
        )
    shape, source = data.input_shape, {"fingerprint": data.fingerprint, "sha256": data.sha256}
    model_class = resolve(plan.config["model"], nn.Module, "model")
    if hasattr(model_class, "load_backbone") or not isinstance(
        model_class, type
    ):  # what a function returns: see there
        model = build_model(
            plan.config["model"], shape, data.num_classes, Streams(plan.settings.seed)
        )
        if isinstance(model, TrainsOnFeatures):
            code = user_code({key: plan.config[key] for key in ("dataset", "model")})
            data = extract(data, model, plan.data_dir, plan.cache_dir, device, code)
    test = LabelledSamples(
        _aligned(data.normalise(data.test.tensor).to(device)), data.test.y.to(device)
    )
    x, y = data.train.x, data.train.y.to(device)
    x = x if isinstance(x, SampleSource) else _aligned(data.normalise(x).to(device))
    return PreparedData(x, y, test, data.num_classes, shape, data.owners, source, data.test_owners)


def _aligned(x: Tensor) -> Tensor:
    """`x` at a multiple of 64 bytes, where torch puts it. What was read from a file lies at any
    address, on which the order of additions in products of matrices, and so their last bits,
    depend."""
    return x.clone() if x.data_ptr() % 64 else x


def build_model(
    node: Mapping[str, Any],
    shape: tuple[int, ...],
    num_classes: int,
    streams: Streams,
    client: int | None = None,
) -> nn.Module:
    """The model, initialised from its own stream, not torch's: the server's, or that with which
    `client` begins where every client has its own. Raises `ConfigError` for hooks on its
    parameters."""
    key = (
        () if client is None else (client + 1,)
    )  # a stream's key that ends in 0 is that without it
    with torch.random.fork_rng(devices=[]), UniformDraws():  # type: ignore[no-untyped-call]
        torch.manual_seed(streams.key(Purpose.INIT, *key))
        model = instantiate(node, nn.Module, "model", shape, num_classes)
    for name, p in model.named_parameters():
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            rule = f"has a hook on its parameter {name}: clients train copies, which torch makes without it"
            check(
                Problem("model", type(model).__name__, rule, "let the forward pass do what it does")
            )
    return model


def resolve_device(name: str) -> str:
    """`cpu`, or a GPU by its number (else that of the process's local rank), which becomes torch's
    current one."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return "cpu"
    device = torch.device("cuda" if name == "auto" else name)
    number = world().local_rank if device.index is None else device.index
    torch.cuda.set_device(number)
    return f"cuda:{number}"


@dataclass(frozen=True)
class Experiment:
    """A simulation ready to run, the division of its data, the model as it was built, and what
    identifies the data."""

    simulation: Simulation
    division: Division
    model: nn.Module
    data_source: Mapping[str, str | None]


def build(plan: Plan) -> Experiment:
    """All parts of a run from its config. Raises `ConfigError` and `DataError`; writes nothing but
    caches."""
    config, settings = plan.config, plan.settings
    init_seed = settings.init_seed if isinstance(settings.init_seed, int) else None
    streams = Streams(settings.seed, settings.partition_seed, init_seed)
    data = prepare(plan)
    model = build_model(config["model"], data.input_shape, data.num_classes, streams)
    labelled = Labelled(data.y.cpu().numpy(), data.num_classes, data.owners)
    partition = instantiate(config["partition"], Partition, "partition")
    division = divide(
        labelled, partition, settings.num_clients, streams, plan.server, plan.local.holdout_fraction
    )
    share, largest = plan.local.holdout_fraction, division.sizes.max(initial=0)
    if share and not sizes_of(division.holdout).any():
        fault = f"holds out no sample of any client, of whom the largest has {largest}"
        raise DataError(
            f"local.holdout_fraction={share}: {fault}; raise it, or set num_clients lower"
        )
    simulation = _simulation(plan, data, division, model.to(data.y.device), streams)
    return Experiment(simulation, division, model, data.source)


def _simulation(
    plan: Plan, data: PreparedData, division: Division, model: nn.Module, streams: Streams
) -> Simulation:
    config, settings, local = plan.config, plan.settings, plan.local
    behaviour = HONEST
    if config.get("clients") is not None:
        of_clients = settings.num_clients, data.num_classes, streams
        behaviour = instantiate(config["clients"], ClientBehaviour, "clients", *of_clients)
    clients = _client_data(plan, data, division, behaviour)
    optimizer = instantiate(config["optimizer"], LocalOptimizer, "optimizer")
    work = LocalWork(local.epochs, local.steps, local.batch_size)
    simulated, num_selected = None, settings.cohort_size
    if config.get("system") is not None:
        system = instantiate(config["system"], System, "system")
        num_selected = system.num_selected(settings.cohort_size, len(division.sizes))
        simulated = SimulatedClock(system, len(division.sizes), settings.cohort_size, streams)
    check(work.too_large(division.sizes, num_selected))
    workload = Workload(
        model, clients, optimizer, settings.num_rounds * work.median_steps(division.train)
    )
    population = Population(division.sizes, num_selected, settings.num_rounds)
    params, trained = initial(model), trained_names(model)
    selector = instantiate(config["selector"], Selector, "selector", population)
    if unfit := selector.unfit_for(trained):
        check(unfit.within("selector"))
    accuracy = None
    if settings.client_accuracy is not None:
        test_labels = data.test.y.cpu().numpy()
        accuracy = client_accuracy(
            settings.client_accuracy, division, test_labels, data.owners, data.test_owners
        )

    def backend(workload: Workload) -> Backend:
        return instantiate(config["engine"], Backend, "engine", workload)

    def first_model(client: int) -> Params:
        own = build_model(config["model"], data.input_shape, data.num_classes, streams, client)
        return initial(own.to(data.y.device))

    chosen = config.get("local_algorithm")
    trains = backend(workload) if clients.source is None else OnDemandBackend(workload, backend)
    components = Components(
        engine=Engine(trains, workload, work, streams),
        population=population,
        selector=selector,
        aggregator=instantiate(
            config["aggregator"], Aggregator, "aggregator", frozenset(params) - frozenset(trained)
        ),
        availability=instantiate(config["availability"], Availability, "availability"),
        server_data=_server_data(data, division, selector),
        streams=streams,
        learning_rate=lambda t: optimizer.lr_at(t, settings.num_rounds),
        eval_every=settings.eval_every,
        first_model=first_model if settings.init_seed == "per_client" else None,
        simulated_clock=simulated,
        client_accuracy=accuracy,
        behaviour=behaviour,
        local_algorithm=LocalAlgorithm()
        if chosen is None
        else instantiate(chosen, LocalAlgorithm, "local_algorithm"),
    )
    return Simulation(components, params)


def _client_data(
    plan: Plan, data: PreparedData, division: Division, behaviour: ClientBehaviour
) -> ClientData:
    evaluated = division.train if plan.local.evaluate_on == "train" else division.holdout
    held = (behaviour.labels(data.y, division), division.train, evaluated, data.num_classes)
    clients = (
        ClientData.on_demand(data.x, *held)
        if isinstance(data.x, SampleSource)
        else ClientData(data.x, *held)
    )
    return replace(clients, true_y=data.y)


def _server_data(data: PreparedData, division: Division, selector: Selector) -> ServerData:
    """The test set, and what the division leaves to the server: validation samples only for a
    selector that names them."""
    validation = public = None
    if len(division.validation) and Signal.VALIDATION in selector.needs:
        labels = data.y[torch.as_tensor(division.validation, device=data.y.device)]
        validation = LabelledSamples(data.samples(division.validation), labels)
    if len(division.public):
        public = data.samples(division.public)
    return ServerData(test=data.test, validation=validation, public=public)
