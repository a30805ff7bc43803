"""The server's side: a Flower strategy that runs fedsim's round loop over the nodes of a Grid."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from fedsim.api.experiments import compose
from fedsim.api.results import RunResult
from fedsim.clients.clients import Clients
from fedsim.clients.context import LabelledSamples, RoundContext, Signal
from fedsim.clients.local_algorithms import LocalAlgorithm
from fedsim.clients.server import ServerData
from fedsim.config.build import instantiate
from fedsim.config.plan import Plan, hash_config
from fedsim.core.arrays import Bools
from fedsim.core.errors import FedsimError, Problem, check, rule
from fedsim.core.record import Record
from fedsim.core.rng import Streams
from fedsim.core.types import (
    ClientPositions,
    Cohort,
    Ids,
    Params,
    Population,
    Selection,
    Weights,
    keep_rows,
)
from fedsim.engine.model import initial
from fedsim.flower.engine import RemoteEngine
from fedsim.flower.messages import ANSWERS, digest_of_frozen, packed
from fedsim.flower.nodes import LOG, Nodes
from fedsim.flower.secagg import MAX_CLIENTS
from fedsim.partitions.division import Division
from fedsim.rounds.aggregators import Aggregator
from fedsim.rounds.arrivals import Arrivals
from fedsim.rounds.availability import Availability
from fedsim.rounds.loop import Components, Simulation
from fedsim.running.assembly import Experiment, PreparedData, components_of
from fedsim.running.experiment import execute
from fedsim.selectors.base import Selector

NOBODY = np.empty(0, np.int64)


class Selecting(Strategy):
    """A Flower strategy in which a selector and an aggregator of fedsim choose.

    `words` are overrides as on fedsim's command line: the selector, the aggregator, the local
    work, `num_clients` and `num_rounds`. `config_dir` is a folder of your own YAML files
    (`--config-dir`). `model` is the server's model, on the device on which the server computes.
    `server` holds the server's samples, as the model takes them, on the same device. Without them,
    the clients evaluate the model. Raises `ConfigError` if the words are wrong or do not fit a
    deployment.

    A round has as many exchanges with nodes as the selector asks questions, so fedsim's loop runs
    the rounds. Its files are those of a simulated run, with the choice `engine=flower`.
    """

    def __init__(
        self,
        *words: str,
        model: nn.Module,
        server: ServerData | None = None,
        config_dir: str | Path | None = None,
    ) -> None:
        (self.simulated,) = compose(words, config_dir=config_dir)
        """The plan of the same run in the simulator."""
        self.plan = _deployed(self.simulated, words, model)
        """The plan of this run."""
        self.model = model
        self.server = server
        check(*_unfit(self.simulated))
        if self.plan.settings.secure_aggregation:
            has_server = server is not None and len(server.test.y) > 0
            check(*_unfit_for_sums(self.simulated, has_server=has_server))

    def start(self, grid: Grid, timeout: float = 3600) -> Result:  # type: ignore[override]
        """Run all rounds, or those that are missing in the run's folder; return the final model.

        The server waits `timeout` seconds for the answers to a question, and for all nodes before
        round 1. A client without an answer in this time is late. Raises `FedsimError` if the run
        cannot begin or fails.
        """
        self.summary()
        self.grid = grid
        self.timeout = timeout
        outcome = execute(self.plan, builder=self._build)
        if outcome.skipped:
            LOG.warning("the run had ended before: nothing was run (overwrite=true runs it again)")
        if not outcome.final:
            raise FedsimError(outcome.summary["error"]) from outcome.cause
        run = RunResult(self.plan, outcome.status, outcome.summary)
        return Result(arrays=packed(run.params or {}))

    def summary(self) -> None:
        """Log the selector and the folder of the run."""
        folder = self.plan.folder.absolute()
        LOG.info("fedsim: selector=%s, %s", self.plan.choices["selector"], folder)

    def _only_start(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a selector may ask nodes several times a round: call start")

    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = _only_start

    def _build(self, plan: Plan) -> Experiment:
        """Wait for the nodes, and build the run from what they say about themselves."""
        settings = plan.settings

        # 1. Find out what the clients have.
        population = Population(np.ones(settings.num_clients, np.int64), settings.cohort_size, 1)
        needs = instantiate(settings.selector, Selector, "selector", population).needs
        asks_labels = Signal.LABEL_COUNTS in needs
        nodes = Nodes(self.grid, settings.num_clients, self.timeout, asks_labels=asks_labels)
        nodes.wait_for_all()
        facts = [nodes.facts[client] for client in range(settings.num_clients)]
        empty = [fact["client"] for fact in facts if not fact["samples"]]
        fault = f"the nodes of the clients {empty} have no samples"
        check(
            rule(not empty, "num_clients", settings.num_clients, fault, "give each node samples"),
            *self._unanswered(needs, facts),
        )
        frozen = digest_of_frozen(self.model)
        others = [fact["client"] for fact in facts if fact["frozen"] != frozen]
        fault = f"has other frozen tensors than the models of the clients {others}"
        remedy = "make_model must return a model with the weights of the server's"
        check(rule(not others, "model", self.plan.choices["model"], fault, remedy))
        sizes = np.array([fact["samples"] for fact in facts], np.int64)
        num_classes = max(fact["classes"] for fact in facts)
        shape = tuple(facts[0]["shape"])
        # A client that tells no label counts has label 0 only. No selector then sees labels.
        labels = [np.empty(0, np.int64)]
        for fact in facts:
            counts = fact.get("label_counts", [fact["samples"]])
            labels.append(np.repeat(np.arange(len(counts)), counts))

        # 2. Build the components of the simulator around data that are elsewhere.
        positions = ClientPositions(np.arange(sizes.sum()), sizes)
        nothing = ClientPositions(NOBODY, np.zeros_like(sizes))
        no_histograms = np.zeros((len(sizes), num_classes), np.int64)
        division = Division(positions, nothing, NOBODY, NOBODY, no_histograms)
        device = next(self.model.parameters()).device
        no_samples = torch.empty(0, *shape, device=device)
        server = self.server or ServerData(LabelledSamples(no_samples, no_samples.long()))
        y = torch.from_numpy(np.concatenate(labels)).to(device)
        source = {"fingerprint": None, "sha256": None}
        data = PreparedData(no_samples, y, server.test, num_classes, shape, None, source)
        config = self.simulated.config
        streams = Streams(settings.seed)
        components = components_of(
            config, settings, plan.local, data, division, self.model, streams
        )

        # 3. Replace the engine that computes by one that asks.
        work = {
            "seed": settings.seed,
            "num_classes": num_classes,
            "total_steps": components.engine.workload.total_steps,
        }
        for key in ("local", "optimizer", "engine"):
            work[key] = config[key]
        engine = RemoteEngine(components.engine, nodes, json.dumps(work))
        components = replace(components, engine=engine, server_data=server)
        is_secure = bool(settings.secure_aggregation)
        simulation = Deployment(components, initial(self.model), engine, is_secure)
        return Experiment(simulation, division, self.model, source)

    def _unanswered(
        self, needs: frozenset[Signal], facts: list[Mapping[str, Any]]
    ) -> Iterator[Problem | None]:
        """Yield a problem for each signal that the selector needs and somebody does not give."""
        if self.server is None:
            needs |= {Signal.LOSSES, Signal.ACCURACIES}
        selector = self.plan.choices["selector"]
        secure = bool(self.plan.settings.secure_aggregation)
        masked = [fact["client"] for fact in facts if fact["only_masked"]]
        fault = f"must be true: the client apps of {masked} send masked updates only"
        yield rule(secure or not masked, "secure_aggregation", secure, fault)
        for signal, cost in ANSWERS.items():
            silent = [fact["client"] for fact in facts if signal not in fact["answers"]]
            fault = f"needs '{signal}', which the client apps of {silent} do not answer"
            remedy = f"client_app(..., answers=[..., '{signal}']): it takes {cost}"
            yield rule(signal not in needs or not silent, "selector", selector, fault, remedy)
        for signal in (Signal.TEST, Signal.VALIDATION, Signal.PUBLIC):
            is_met = signal not in needs or getattr(self.server, signal, None) is not None
            fault = f"needs '{signal}', of which the server has no samples"
            yield rule(is_met, "selector", selector, fault, f"ServerData({signal}=...)")


def _deployed(plan: Plan, words: tuple[str, ...], model: nn.Module) -> Plan:
    """Return the plan of a run that is the run of `plan` on nodes, with a folder of its own.

    Data, their division and the model are those of the config only if the words choose them.
    """
    typed = {word.partition("=")[0] for word in words}
    config = dict(plan.config, engine={"name": "flower", "clients": plan.config["engine"]})
    choices = dict(plan.choices, engine="flower")
    mine = {"dataset": "nodes", "partition": "nodes", "model": type(model).__name__}
    for group in mine.keys() - typed:
        config[group] = {"name": mine[group]}
        choices[group] = mine[group]
    if "model" not in typed:  # so that models of one class and different sizes are different runs
        shapes = {name: list(value.shape) for name, value in initial(model).items()}
        config["model"]["shapes"] = shapes
    digest = hash_config(config)
    name = f"flower-{choices['selector']}-s{plan.settings.seed}-{digest[:8]}"
    folder = plan.folder.with_name(name)
    return replace(plan, config=config, choices=choices, config_hash=digest, folder=folder)


def _unfit(plan: Plan) -> Iterator[Problem | None]:
    """Yield what the words ask for and only the simulator can do."""
    settings = plan.settings
    simulated = {
        "clients": settings.clients,
        "client_accuracy": settings.client_accuracy,
        "test_on": settings.test_on,
        "init_seed": "per_client" if settings.init_seed == "per_client" else None,
        "local.holdout_fraction": plan.local.holdout_fraction,
        "dataset.augment": plan.config["dataset"].get("augment"),
    }
    availability = instantiate(settings.availability, Availability, "availability")
    if availability.needs_labels:
        simulated["availability"] = plan.choices["availability"]
    for key, value in simulated.items():
        yield rule(not value, key, value, "only the simulator can do that", "leave it out")


def _unfit_for_sums(plan: Plan, has_server: bool) -> Iterator[Problem | None]:
    """Yield what does not work with SecAgg+ yet, by which the server gets one sum a round."""
    settings = plan.settings
    population = Population(np.ones(settings.num_clients, np.int64), settings.cohort_size, 1)
    selector = instantiate(settings.selector, Selector, "selector", population)
    aggregator = instantiate(settings.aggregator, Aggregator, "aggregator", frozenset())
    algorithm = LocalAlgorithm()
    if settings.local_algorithm is not None:
        algorithm = instantiate(settings.local_algorithm, LocalAlgorithm, "local_algorithm")
    is_plain = type(algorithm).combine is LocalAlgorithm.combine
    choices = plan.choices
    text = "does not work with SecAgg+ (secure_aggregation=true): "
    asks = f"{text}it asks clients to train before the selection"
    yield rule(Signal.TRAINING not in selector.needs, "selector", choices["selector"], asks)
    clips = f"{text}clients would have to clip updates"
    yield rule(aggregator.is_mean, "aggregator", choices["aggregator"], clips)
    combines = f"{text}it combines single updates"
    yield rule(is_plain, "local_algorithm", choices.get("local_algorithm"), combines)
    late = f"{text}the sum has no update that the server could count as late"
    yield rule(settings.system is None, "system", choices.get("system"), late)
    yield rule(not plan.local.drop_out, "local.drop_out", plan.local.drop_out, late)
    many = f"{text}the sum of more than {MAX_CLIENTS} clients may overflow"
    num_clients = settings.num_clients
    yield rule(num_clients <= MAX_CLIENTS, "num_clients", num_clients, many)
    alone = f"{text}the sum over one client is its update"
    yield rule(settings.cohort_size >= 2, "cohort_size", settings.cohort_size, alone)
    losses = f"{text}the clients would send single losses to evaluate the model"
    yield rule(has_server, "server", None, losses, "give the server test samples: ServerData(test)")


class Deployment(Simulation):
    """The round loop over nodes: only connected clients are available, and silent ones are late."""

    def __init__(
        self, components: Components, params: Params, engine: RemoteEngine, is_secure: bool
    ) -> None:
        """`is_secure`: the server gets a secure sum of the updates."""
        super().__init__(components, params)
        self.engine = engine
        self.is_secure = is_secure

    def step(self) -> Record:
        """Run the next round, and return its record with what was measured on the network."""
        nodes = self.engine.nodes
        nodes.wait_for_any()
        nodes.bytes_down = nodes.bytes_up = 0
        self.engine.silent.clear()
        record = super().step()
        silent = self.engine.silent.intersection(record.selected)
        if record.test_accuracy is not None and np.isnan(record.test_accuracy):
            record = replace(record, test_accuracy=None, test_loss=None)  # nobody evaluated
        return replace(
            record,
            late=sorted(silent.union(record.late or ())),
            wire_bytes_down=nodes.bytes_down,
            wire_bytes_up=nodes.bytes_up,
        )

    def _context(self, t: int) -> RoundContext:
        context = super()._context(t)
        connected = np.array(list(self.engine.nodes.node_of), np.int64)
        return replace(context, available=np.intersect1d(context.available, connected))

    def _select(self, t: int, clients: Clients, available: Ids) -> Selection:
        """Select, and give the engine the weights of a secure sum."""
        selection = super()._select(t, clients, available)
        if self.is_secure:
            sizes = self.components.population.sizes[selection.ids]
            if self.components.aggregator.weighting == "uniform":
                sizes = np.ones_like(sizes)
            weights = sizes if selection.weights is None else selection.weights
            self.engine.weights = np.asarray(weights, np.float64)
        return selection

    def _arrivals(
        self,
        context: RoundContext,
        cohort: Cohort,
        weights: Weights,
        is_new: Bools,
        asking_seconds: float,
    ) -> Arrivals:
        """Take out the silent clients; the simulator decides about the others."""
        answered = ~np.isin(cohort.ids, list(self.engine.silent))
        context.ledger.uploaded.difference_update(cohort.ids[~answered].tolist())
        if not answered.any():
            return Arrivals(late=cohort.ids)
        if not answered.all():
            cohort, weights = keep_rows(cohort, weights, answered)
        return super()._arrivals(context, cohort, weights, is_new[answered], asking_seconds)
