"""The server's side: a Flower strategy that runs fedsim's round loop over the nodes of a Grid."""

import json
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
from fedsim.clients.context import LabelledSamples, Signal
from fedsim.clients.server import ServerData
from fedsim.config.plan import Plan, hash_config
from fedsim.core.errors import FedsimError, check
from fedsim.core.rng import Streams
from fedsim.core.types import (
    ClientPositions,
)
from fedsim.engine.model import initial
from fedsim.flower.deployment import Deployment
from fedsim.flower.engine import RemoteEngine
from fedsim.flower.messages import digest_of_frozen, packed
from fedsim.flower.nodes import LOG, Nodes
from fedsim.flower.requirements import (
    selector_of,
    simulated_only,
    unanswered,
    unfit_for_sums,
    unfit_nodes,
)
from fedsim.partitions.division import Division
from fedsim.running.assembly import Experiment, PreparedData, components_of
from fedsim.running.experiment import execute


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
        check(*simulated_only(self.simulated))
        if self.plan.settings.secure_aggregation:
            has_test_samples = server is not None and len(server.test.y) > 0
            check(*unfit_for_sums(self.simulated, has_test_samples=has_test_samples))

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
        settings, config = plan.settings, self.simulated.config
        nodes = self._connected_nodes()
        data, division = self._data_at(nodes)
        simulated = components_of(
            config, settings, plan.local, data, division, self.model, Streams(settings.seed)
        )
        # The engine that computes becomes one that asks.
        client_work = {
            "seed": settings.seed,
            "num_classes": data.num_classes,
            "total_steps": simulated.engine.workload.total_steps,
            "local": config["local"],
            "optimizer": config["optimizer"],
            "engine": config["engine"],
        }
        engine = RemoteEngine(simulated.engine, nodes, json.dumps(client_work))
        server = self.server or ServerData(data.test)
        components = replace(simulated, engine=engine, server_data=server)
        is_secure = bool(settings.secure_aggregation)
        simulation = Deployment(components, initial(self.model), engine, is_secure)
        return Experiment(simulation, division, self.model, data.source)

    def _connected_nodes(self) -> Nodes:
        """Wait for the nodes of all clients. Raises `ConfigError` if they do not fit the run."""
        plan = self.plan
        asks_labels = Signal.LABEL_COUNTS in selector_of(plan).needs
        nodes = Nodes(self.grid, plan.settings.num_clients, self.timeout, asks_labels=asks_labels)
        nodes.wait_for_all()
        facts = [nodes.facts[client] for client in range(plan.settings.num_clients)]
        check(
            *unfit_nodes(plan, digest_of_frozen(self.model), facts),
            *unanswered(plan, self.server, facts),
        )
        return nodes

    def _data_at(self, nodes: Nodes) -> tuple[PreparedData, Division]:
        """Return the simulator's description of the data at the `nodes`: without samples, but with
        the numbers of the clients' samples, and labels if the selector asks for them."""
        facts = [nodes.facts[client] for client in range(self.plan.settings.num_clients)]
        sizes = np.array([fact["samples"] for fact in facts], np.int64)
        num_classes = max(fact["classes"] for fact in facts)
        shape = tuple(facts[0]["shape"])
        labels = [np.empty(0, np.int64)]
        for fact in facts:
            # A client that tells no label counts has label 0 only. No selector then sees labels.
            counts = fact.get("label_counts", [fact["samples"]])
            labels.append(np.repeat(np.arange(len(counts)), counts))
        device = next(self.model.parameters()).device
        no_samples = torch.empty(0, *shape, device=device)
        data = PreparedData(
            no_samples,
            torch.from_numpy(np.concatenate(labels)).to(device),
            self.server.test if self.server else LabelledSamples(no_samples, no_samples.long()),
            num_classes,
            shape,
            None,
            {"fingerprint": None, "sha256": None},
        )
        nobody = np.empty(0, np.int64)
        division = Division(
            ClientPositions(np.arange(sizes.sum()), sizes),
            ClientPositions(nobody, np.zeros_like(sizes)),
            nobody,
            nobody,
            np.zeros((len(sizes), num_classes), np.int64),
        )
        return data, division


def _deployed(plan: Plan, words: tuple[str, ...], model: nn.Module) -> Plan:
    """Return the plan of the deployed run that corresponds to the simulated run of `plan`.

    It has a folder of its own. Its config has the data, division and model of `plan` only if the
    `words` choose them: otherwise they are those of the nodes.
    """
    typed_keys = {word.partition("=")[0].lstrip("+~") for word in words}
    config = dict(plan.config, engine={"name": "flower", "clients": plan.config["engine"]})
    choices = dict(plan.choices, engine="flower")
    of_nodes = {"dataset": "nodes", "partition": "nodes", "model": type(model).__name__}
    for group, name in of_nodes.items():
        if group not in typed_keys:
            config[group] = {"name": name}
            choices[group] = name
    if (
        "model" not in typed_keys
    ):  # so that models of one class and different sizes are different runs
        shapes = {name: list(value.shape) for name, value in initial(model).items()}
        config["model"]["shapes"] = shapes
    digest = hash_config(config)
    name = f"flower-{choices['selector']}-s{plan.settings.seed}-{digest[:8]}"
    folder = plan.folder.with_name(name)
    return replace(plan, config=config, choices=choices, config_hash=digest, folder=folder)
