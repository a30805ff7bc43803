"""Assembles a run's simulation from its plan: data, division, model and all other components.

`fedsim.running.experiment` calls `build` for each run, and `fedsim.running.replay` for each method.
A plan is the checked description of a run. Functions that need most of its values get the whole
plan. All others get only the values that they need.

A division says which samples each client has, which samples are held out, and which samples the
server has. Prepared data (`prepare`) are decoded, normalised and on the device. They stay in memory
for the next run, which often needs the same data.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.clients.behaviour import HONEST, ClientBehaviour
from fedsim.clients.context import LabelledSamples, Signal
from fedsim.clients.local_algorithms import LocalAlgorithm
from fedsim.clients.server import ServerData
from fedsim.clients.system import SimulatedClock, System, over_selection_explained
from fedsim.config.build import instantiate, resolve
from fedsim.config.plan import Plan
from fedsim.config.settings import LocalSettings, RunSettings
from fedsim.config.user_code import user_code
from fedsim.core.arrays import Ints
from fedsim.core.errors import ConfigError, DataError, Problem, check, rule
from fedsim.core.rng import Purpose, Streams, UniformDraws
from fedsim.core.types import Params, Population, sizes_of
from fedsim.data.base import Dataset, LoadedData, SampleSource
from fedsim.data.features import TrainsOnFeatures, extract
from fedsim.engine.augment import CropFlip
from fedsim.engine.backend import Backend, Workload
from fedsim.engine.data import ClientData
from fedsim.engine.device import is_out_of_memory
from fedsim.engine.device import prepare as prepare_device
from fedsim.engine.engine import Engine
from fedsim.engine.model import initial, model_problems, trained_names
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
    """The samples of a run, read only: n training samples and the test set.

    - `x` [n, ...] float32: the training samples, or a `SampleSource` that makes them on demand.
    - `y` [n]: the labels of the training samples.
    - `input_shape`: the shape of a sample of the data set, even if the model trains on features.
    - `owners` [n], `test_owners`: the client of each training and test sample in a data set that is
      made of clients, such as FEMNIST; None for other data sets.
    - `source`: what identifies the data, `fingerprint` and `sha256`.
    - `augment`: changes the training samples in local training; None leaves them as they are.
    """

    x: Tensor | SampleSource
    y: Tensor
    test: LabelledSamples
    num_classes: int
    input_shape: tuple[int, ...]
    owners: Ints | None
    source: Mapping[str, str | None]
    test_owners: Ints | None = None
    augment: CropFlip | None = None

    def samples(self, positions: Ints) -> Tensor:
        """Return the training samples at `positions` [m], on the device [m, ...]."""
        if isinstance(self.x, SampleSource):
            return self.x.rows(positions).to(self.y.device)
        return self.x[positions]

    def labelled(self, positions: Ints) -> LabelledSamples:
        """Return the training samples at `positions` [m] with their labels."""
        return LabelledSamples(self.samples(positions), self.y[positions])

    def tested_on(self, positions: Ints) -> "PreparedData":
        """Return the same data with a new test set: the training samples at `positions` [m]."""
        owners = None if self.owners is None else self.owners[positions]
        return replace(self, test=self.labelled(positions), test_owners=owners)


@dataclass(frozen=True)
class Experiment:
    """A simulation that is ready to run, and what it was made of.

    `division` says who has which samples. `model` is the server's model before round 1.
    `data_source` is the `source` of the `PreparedData`.
    """

    simulation: Simulation
    division: Division
    model: nn.Module
    data_source: Mapping[str, str | None]


def build(plan: Plan) -> Experiment:
    """Build all components of a run from its config.

    Writes nothing but caches. Raises `ConfigError`, `DataError`, and what a user's class raises.
    """
    settings = plan.settings
    streams = _streams(plan)
    # 1. The data and the model.
    data = prepare(plan)
    model = build_model(plan.config["model"], data.input_shape, data.num_classes, streams)
    # 2. The division of the data among the clients.
    labelled = Labelled(data.y.cpu().numpy(), data.num_classes, data.owners)
    division = _divide(plan, labelled)
    fraction = plan.local.holdout_fraction
    if fraction and not sizes_of(division.holdout).any():
        largest = division.sizes.max(initial=0)
        fault = f"holds out no sample of any client: the largest client has {largest} samples"
        remedy = "raise it, or lower num_clients"
        raise DataError(f"local.holdout_fraction={fraction}: {fault}; {remedy}")
    # 3. Everything that acts in a round.
    if settings.test_on == "holdout":
        data = data.tested_on(np.concatenate(division.holdout))
    model = model.to(data.y.device)
    components = components_of(plan.config, settings, plan.local, data, division, model, streams)
    simulation = Simulation(components, initial(model))
    return Experiment(simulation, division, model, data.source)


class Divider:
    """Divides the data of runs, and builds nothing else of them. Reads each data set once."""

    def __init__(self) -> None:
        self._labelled: dict[str, Labelled] = {}

    def division_of(self, plan: Plan) -> Division:
        """Return the division of a run's data.

        Raises `ConfigError`, `DataError`, and what a user's class raises.
        """
        source = plan.data_source
        if source not in self._labelled:
            node = plan.config["dataset"]
            data = instantiate(node, Dataset, "dataset", plan.data_dir, plan.cache_dir).load()
            labelled = Labelled(data.train.y.numpy(), data.num_classes, data.owners)
            self._labelled[source] = labelled
        return _divide(plan, self._labelled[source])


def division_key(plan: Plan) -> str:
    """Return a key that is equal for runs with the same division: all that `_divide` uses."""
    settings = plan.settings
    seed = settings.seed if settings.partition_seed is None else settings.partition_seed
    key = [
        plan.data_source,
        plan.config["partition"],
        settings.num_clients,
        seed,
        plan.config.get("server"),
        plan.local.holdout_fraction,
    ]
    return json.dumps(key, sort_keys=True, default=str)


def _divide(plan: Plan, labelled: Labelled) -> Division:
    """Divide the labels of a training set among the clients and the server."""
    return divide(
        labelled,
        instantiate(plan.config["partition"], Partition, "partition"),
        plan.settings.num_clients,
        _streams(plan),
        plan.server,
        plan.local.holdout_fraction,
    )


def _streams(plan: Plan) -> Streams:
    """Return the random streams of a run."""
    settings = plan.settings
    # `init_seed` may also be the word `per_client`, which is no seed.
    init_seed = settings.init_seed if isinstance(settings.init_seed, int) else None
    return Streams(settings.seed, settings.partition_seed, init_seed)


def components_of(
    config: Mapping[str, Any],
    settings: RunSettings,
    local: LocalSettings,
    data: PreparedData,
    division: Division,
    model: nn.Module,
    streams: Streams,
) -> Components:
    """Build everything that acts in a round.

    `settings` and `local` are the checked values of `config`, whose groups describe the components.
    `model` is the server's model, on the device of the data.
    """
    num_clients = len(division.sizes)

    # 1. Build the components that need no other one.
    behaviour = HONEST
    if config.get("clients") is not None:
        behaviour = instantiate(
            config["clients"],
            ClientBehaviour,
            "clients",
            settings.num_clients,
            data.num_classes,
            streams,
        )
    local_algorithm = LocalAlgorithm()
    if config.get("local_algorithm") is not None:
        local_algorithm = instantiate(config["local_algorithm"], LocalAlgorithm, "local_algorithm")
    optimizer = instantiate(config["optimizer"], LocalOptimizer, "optimizer")
    availability = instantiate(config["availability"], Availability, "availability")
    simulated_clock = None
    num_selected = settings.cohort_size
    if config.get("system") is not None:
        system = instantiate(config["system"], System, "system")
        # The server selects more clients than cohort_size if some updates will come too late.
        num_selected = system.num_selected(settings.cohort_size, num_clients)
        simulated_clock = SimulatedClock(system, num_clients, settings.cohort_size, streams)

    # 2. Give the clients their data and their work.
    labels = behaviour.labels(data.y, division)  # imperfect clients may have wrong ones
    client_data = _client_data(data, division, labels, local.evaluate_on)
    work = LocalWork(
        local.epochs,
        local.steps,
        local.batch_size,
        partial_rate=local.partial_rate or 0.0,
        partial_once=local.partial_draw == "client",
    )
    with over_selection_explained(settings.cohort_size, num_selected):
        check(work.too_large(division.sizes, num_selected))
    total_steps = settings.num_rounds * work.median_steps(division.train)
    check(*model_problems(model, client_data))
    workload = Workload(model, client_data, optimizer, total_steps)

    # 3. Build the components that need the population, the model or the workload.
    accuracy_measure = None
    if settings.client_accuracy is not None:
        test_labels = data.test.y.cpu().numpy()
        accuracy_measure = client_accuracy(
            settings.client_accuracy, division, test_labels, data.owners, data.test_owners
        )
    population = Population(division.sizes, num_selected, settings.num_rounds)
    # This stream has no key. A round has its number as the key, from 1.
    stream = streams.generator(Purpose.AVAILABILITY)
    availability.begin(population.sizes, division.histograms, stream)
    with over_selection_explained(settings.cohort_size, num_selected):
        selector = instantiate(config["selector"], Selector, "selector", population)
    trained = trained_names(model)
    unfit = selector.unfit_for(trained)
    if unfit is not None:
        check(unfit.within("selector"))
    untrained = frozenset(initial(model)) - frozenset(trained)
    aggregator = instantiate(config["aggregator"], Aggregator, "aggregator", untrained)
    build_backend = partial(instantiate, config["engine"], Backend, "engine")
    if client_data.source is None:
        backend = build_backend(workload)
    else:
        # This backend copies the samples of each call into a buffer. The config's backend trains on
        # the buffer.
        backend = OnDemandBackend(workload, build_backend)

    def first_model(client: int) -> Params:
        """Return the model that `client` starts with (`init_seed=per_client`)."""
        client_model = build_model(
            config["model"], data.input_shape, data.num_classes, streams, client
        )
        return initial(client_model.to(data.y.device))

    # 4. Put all components together.
    return Components(
        engine=Engine(backend, workload, work, streams),
        population=population,
        selector=selector,
        aggregator=aggregator,
        availability=availability,
        server_data=_server_data(data, division, selector),
        streams=streams,
        learning_rate=lambda t: optimizer.lr_at(t, settings.num_rounds),
        eval_every=settings.eval_every,
        first_model=first_model if settings.init_seed == "per_client" else None,
        simulated_clock=simulated_clock,
        client_accuracy=accuracy_measure,
        behaviour=behaviour,
        local_algorithm=local_algorithm,
        drop_out=local.drop_out or 0.0,
    )


def _client_data(
    data: PreparedData, division: Division, labels: Tensor, evaluate_on: str
) -> ClientData:
    """Return the samples of all clients, with the `labels` [n] that the clients have for them.

    A client's loss is measured on the samples that it trains on (`evaluate_on="train"`), or on the
    samples that it holds out.
    """
    evaluated = division.train if evaluate_on == "train" else division.holdout
    if isinstance(data.x, SampleSource):
        samples = ClientData.on_demand(data.x, labels, division.train, evaluated, data.num_classes)
    else:
        samples = ClientData(data.x, labels, division.train, evaluated, data.num_classes)
    return replace(samples, true_y=data.y, augment=data.augment)


def build_model(
    node: Mapping[str, Any],
    shape: tuple[int, ...],
    num_classes: int,
    streams: Streams,
    client: int | None = None,
) -> nn.Module:
    """Build the model of the config's node `model`, with initial values from its own random stream.

    It is the server's model, or the initial model of `client` if each client has a model of its
    own. `shape` is that of a sample. torch's global generator stays as it was. Raises `ConfigError`
    for hooks on parameters.
    """
    # NumPy gives a key that ends in 0 the same stream as the key without this 0. Clients are
    # therefore counted from 1, so that client 0 does not get the server's model.
    key = () if client is None else (client + 1,)
    with torch.random.fork_rng(devices=[]), UniformDraws():  # type: ignore[no-untyped-call]
        torch.manual_seed(streams.key(Purpose.INIT, *key))
        model = instantiate(node, nn.Module, "model", shape, num_classes)
    for name, param in model.named_parameters():
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            fault = f"has a hook on its parameter {name}, which the copies that clients train lack"
            remedy = "let the forward pass do what the hook does"
            raise ConfigError([Problem("model", type(model).__name__, fault, remedy)])
    return model


def _server_data(data: PreparedData, division: Division, selector: Selector) -> ServerData:
    """Return the server's data: the test set, validation samples and public samples.

    The division sets validation and public samples aside. Public samples have no labels. Only a
    selector that declares the signal `VALIDATION` gets validation samples.
    """
    validation = None
    if len(division.validation) and Signal.VALIDATION in selector.needs:
        validation = data.labelled(division.validation)
    public = data.samples(division.public) if len(division.public) else None
    return ServerData(test=data.test, validation=validation, public=public)


_latest: dict[tuple[str, object, object], PreparedData] = {}
"""The prepared data of the latest run: one entry, or none before the first run.

Its key is the `data_key` of the run, and the classes of its data set and its model. The classes
matter because a user who edits a class in a notebook gets another class of the same name.
"""


def prepare(plan: Plan) -> PreparedData:
    """Return the prepared data of a run.

    The next run gets the same object if it needs the same data. Raises `DataError`.
    """
    dataset_class = resolve(plan.config["dataset"], Dataset, "dataset")
    model_class = resolve(plan.config["model"], nn.Module, "model")
    key = (data_key(plan), dataset_class, model_class)
    if key not in _latest:
        _latest.clear()
        device = torch.device(resolve_device(plan.settings.device))
        _latest[key] = _load(plan, model_class, device)
    return _latest[key]


def forget() -> None:
    """Make the next run load its data anew, because files may have changed."""
    _latest.clear()


def data_key(plan: Plan) -> str:
    """Return a key that is equal for runs with the same prepared data.

    It contains the model, because the data may be features that the model computes. It contains the
    working folder, because paths may be relative.
    """
    key = [
        plan.config["dataset"],
        plan.config["model"],
        plan.data_dir,
        plan.cache_dir,
        Path.cwd(),
        resolve_device(plan.settings.device),
    ]
    return json.dumps(key, sort_keys=True, default=str)


def is_prepared(plan: Plan) -> bool:
    """Return whether the latest run had the same data, so that this one loads none."""
    key = data_key(plan)
    return any(key == latest_key for latest_key, _, _ in _latest)


def _load(plan: Plan, model_class: Callable[..., nn.Module], device: torch.device) -> PreparedData:
    """Load the data set of a run, and prepare its samples on `device`.

    `model_class` is the class or function that the config's node `model` names. Every value of the
    plan that decides the data must be in the key of `_latest`. The seed is not one of them: it only
    draws the initial values of a model that step 2 builds and drops again.
    """
    dataset_node = plan.config["dataset"]
    model_node = plan.config["model"]
    # Features are computed below and cached for later runs: make their computation deterministic.
    prepare_device(device, None)
    # 1. Load the data set, which may be of a user's class.
    dataset = instantiate(dataset_node, Dataset, "dataset", plan.data_dir, plan.cache_dir)
    try:
        data: object = dataset.load()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        fault = f"the data do not fit into memory ({error or 'no more'})"
        remedy = "close other programs, lower dataset.size, or use a smaller data set"
        raise DataError(f"dataset: {fault}; {remedy}") from error
    if not isinstance(data, LoadedData):
        expected = f"{LoadedData.__module__}.{LoadedData.__name__}"
        fault = f"{type(dataset).__name__}.load must return a {expected}"
        raise DataError(f"{fault}, not {type(data).__name__}")
    shape = data.input_shape
    source = {"fingerprint": data.fingerprint, "sha256": data.sha256}
    # 2. Replace samples by features if the model trains on features. A class of such models has
    #    `load_backbone`. A function must be called to see which model it returns.
    if hasattr(model_class, "load_backbone") or not isinstance(model_class, type):
        model = build_model(model_node, shape, data.num_classes, Streams(plan.settings.seed))
        if isinstance(model, TrainsOnFeatures):
            code = user_code({"dataset": dataset_node, "model": model_node})
            data = extract(data, model, plan.data_dir, plan.cache_dir, device, code)
    # 3. Normalise, and move to the device.
    augment = _augmentation(dataset, data, device)
    x = data.train.x
    if not isinstance(x, SampleSource):
        x = _aligned(data.normalise(x).to(device))
    test_x = _aligned(data.normalise(data.test.tensor).to(device))
    test = LabelledSamples(test_x, data.test.y.to(device))
    return PreparedData(
        x=x,
        y=data.train.y.to(device),
        test=test,
        num_classes=data.num_classes,
        input_shape=shape,
        owners=data.owners,
        source=source,
        test_owners=data.test_owners,
        augment=augment,
    )


def _augmentation(dataset: Dataset, data: LoadedData, device: torch.device) -> CropFlip | None:
    """Return the change of images in local training; None unless the config asks for one.

    Raises `ConfigError` if the samples that the model trains on are no images.
    """
    augment = getattr(dataset, "augment", None)
    if augment is None:
        return None
    shape = data.input_shape
    fault = f"is for models that train on images [C, H, W], not on samples of shape {list(shape)}"
    check(rule(len(shape) == 3, "dataset.augment", augment, fault, "dataset.augment=null"))
    black = torch.zeros(1, shape[0], 1, 1)
    return CropFlip(data.normalise(black)[0].to(device))


def _aligned(x: Tensor) -> Tensor:
    """Return `x` at a multiple of 64 bytes, where torch itself puts tensors.

    Data read from a file lie at any address. The address decides the order of additions in matrix
    products, and so their last bits.
    """
    return x.clone() if x.data_ptr() % 64 else x


def resolve_device(name: str) -> str:
    """Return `cpu` or the numbered GPU for the config's `device`. Make a GPU torch's current one.

    If the config gives no number, it is the number of this process among torchrun's processes on
    this machine (`local_rank`).
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return "cpu"
    device = torch.device("cuda" if name == "auto" else name)
    number = world().local_rank if device.index is None else device.index
    torch.cuda.set_device(number)
    return f"cuda:{number}"
