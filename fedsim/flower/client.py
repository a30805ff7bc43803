"""The client's side: an app that answers the questions of `fedsim.flower.Selecting`."""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedsim.clients.context import Signal
from fedsim.core.arrays import Floats, Ints
from fedsim.core.errors import FedsimError, check, rule
from fedsim.core.types import Cohort, Correction, Params
from fedsim.engine.engine import Engine
from fedsim.flower.messages import (
    ANSWERS,
    digest_of_frozen,
    engine_of,
    num_outputs,
    packed,
    unpacked,
)
from fedsim.flower.secagg import is_of_secagg, secagg_mod, to_mask

DEFAULT_ANSWERS = frozenset(ANSWERS) - {Signal.LABEL_COUNTS}
"""Signals that an app answers by default: all that tell nothing about classes."""


class _Question:
    """A question of the server to one client: the model, the positions and the request itself."""

    def __init__(self, message: Message, engine: Engine, client: int) -> None:
        self.engine = engine
        self.client = client
        self.request: Any = message.content.config_records["request"]
        self.model = self._tensors(message, "model")
        shift = {name: value[None] for name, value in self._tensors(message, "shift").items()}
        pull: Any = self.request.get("pull", 0.0)
        self.correction = Correction(pull, shift or None)
        positions: Ints = engine.data.train[client]
        if "positions" in self.request:
            positions = np.array(self.request["positions"], np.int64)
        self.positions = [positions]

    def train(self) -> Cohort:
        """Return the update of this client, after training as the request says."""
        round, lr = self.request["round"], self.request["lr"]
        ids = np.array([self.client])
        return self.engine.train(self.model, ids, round, lr, correction=self.correction)

    def _tensors(self, message: Message, name: str) -> Params:
        return unpacked(message.content, name, self.engine.data.y.device)


def client_app(
    make_model: Callable[[], nn.Module],
    load: Callable[[Context], tuple[Tensor, Tensor]],
    *,
    answers: Collection[str] = DEFAULT_ANSWERS,
    only_masked: bool = False,
) -> ClientApp:
    """Return a Flower app that trains the user's model on the samples of its node.

    `make_model` returns a new model. `load` returns the samples x [n, ...] of the node as the model
    takes them, and their labels y [n], int64 from 0 on. The client computes on the device of its
    samples. `answers` are the signals that this app answers, of those in `ANSWERS`. With
    `only_masked` it sends its update only if SecAgg+ masks it (`secure_aggregation=true`), and
    answers no questions but that for label counts. The
    config of the node must have the client's number, from 0 on, as `partition-id`.
    """
    for signal in answers:
        check(rule(signal in ANSWERS, "answers", signal, f"must be one of {', '.join(ANSWERS)}"))
    if only_masked:  # gradients and losses of chosen samples would disclose the samples
        answers = frozenset(answers) & {Signal.LABEL_COUNTS}
    app = ClientApp()
    engines: dict[tuple[str, int], Engine] = {}

    def question_in(message: Message, context: Context) -> _Question:
        """Return the question in a message, with the engine of this node."""
        work = str(message.content.config_records["request"]["work"])
        key = work, context.node_id
        client = _client_of(context)
        if key not in engines:
            engines[key] = engine_of(work, make_model(), *load(context), client)
        return _Question(message, engines[key], client)

    def require(signal: Signal) -> None:
        if signal not in answers:
            raise FedsimError(f"this app does not answer '{signal}'")

    @app.query("about")
    def about(message: Message, context: Context) -> Message:
        client = _client_of(context)
        x, y = load(context)
        model = make_model()
        facts = ConfigRecord(
            {
                "client": client,
                "samples": len(y),
                "shape": list(x.shape[1:]),
                "classes": num_outputs(model, x),
                "answers": sorted(answers),
                "only_masked": only_masked,
                "frozen": digest_of_frozen(model),
            }
        )
        wants_labels = message.content.config_records["request"]["labels"]
        if wants_labels and Signal.LABEL_COUNTS in answers:
            facts["label_counts"] = torch.bincount(y).tolist()
        return Message(RecordDict({"facts": facts}), reply_to=message)

    @app.train(mods=[secagg_mod])
    def train(message: Message, context: Context) -> Message:
        if only_masked and not is_of_secagg(message):
            raise FedsimError("this app sends its update only for a secure sum")
        question = question_in(message, context)
        update = question.train()
        if is_of_secagg(message):
            row = {name: rows[0] for name, rows in update.delta.items()}
            content = to_mask(row, question.request["scale"])
            return Message(content, reply_to=message)
        numbers = MetricRecord()
        if Signal.TRAINING_LOSS in answers and update.loss is not None:
            numbers["training_loss"] = float(update.loss[0])
        if Signal.SQUARED_LOSS in answers and update.rms_loss is not None:
            numbers["squared_loss"] = float(update.rms_loss[0])
        delta = packed({name: rows[0] for name, rows in update.delta.items()})
        return Message(RecordDict({"arrays": delta, "numbers": numbers}), reply_to=message)

    @app.train("gradients")
    def gradients(message: Message, context: Context) -> Message:
        require(Signal.GRADIENTS)
        question = question_in(message, context)
        names = list(question.request["names"])
        rows = question.engine.client_gradients(question.model, question.positions, names)
        arrays = packed({"gradient": next(rows)})
        return Message(RecordDict({"arrays": arrays}), reply_to=message)

    @app.evaluate("losses")
    def losses(message: Message, context: Context) -> Message:
        require(Signal.LOSSES)
        question = question_in(message, context)
        return _number(message, question.engine.losses(question.model, question.positions))

    @app.evaluate("accuracies")
    def accuracies(message: Message, context: Context) -> Message:
        require(Signal.ACCURACIES)
        question = question_in(message, context)
        return _number(message, question.engine.accuracies(question.model, question.positions))

    return app


def _number(message: Message, values: Floats) -> Message:
    """Return the answer to a message that asks for one number."""
    numbers = MetricRecord({"value": float(values[0])})
    return Message(RecordDict({"numbers": numbers}), reply_to=message)


def _client_of(context: Context) -> int:
    """Return the number of a node's client. Raises `FedsimError` if the node has none."""
    remedy = "start the node with --node-config 'partition-id=0' (from 0 on, one for each client)"
    if "partition-id" not in context.node_config:
        raise FedsimError(f"the node has no partition-id; {remedy}")
    return int(context.node_config["partition-id"])
