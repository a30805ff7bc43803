"""The engine of a deployed run: it asks nodes to do what the simulator's engine computes itself.

The server has no samples of clients, only their numbers n_k. Methods get *positions* of samples, as
in the simulator: those of client k are the n_k integers after the positions of client k - 1. Here a
position says whose sample it is, and which of this client's samples.

An answer is usable if it has the records that were requested, in the right form. A client without a
usable answer has the update 0 and is `silent`, or has the loss nan, or the gradient 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedsim.core.arrays import Floats, Ints
from fedsim.core.types import Cohort, Correction, Evaluation, Ids, Params
from fedsim.engine.engine import Engine
from fedsim.flower.messages import ACCURACIES, GRADIENTS, LOSSES, TRAIN, packed, unpacked
from fedsim.flower.nodes import LOG, Answers, Nodes
from fedsim.flower.secagg import SecureSum


class RemoteEngine(Engine):
    """Trains and evaluates clients by messages to their `nodes`.

    `local` is the simulator's engine of the run without the samples of clients. It evaluates models
    on the server's own samples. `client_work` describes the work of clients (`messages.engine_of`).
    """

    def __init__(self, local: Engine, nodes: Nodes, client_work: str) -> None:
        super().__init__(local.backend, local.workload, local.work, local._streams)
        self.nodes = nodes
        self._client_work = client_work
        self._ends = np.cumsum(self._sizes)
        self.silent: set[int] = set()
        """Clients that were asked to train in this round and sent no usable update."""
        self.weights: Floats | None = None
        """The weights of the selected clients in a secure sum [K], which `Deployment` sets in each
        round; None: updates come one by one."""

    @property
    def description(self) -> str:
        """The nodes that train, and the backend that evaluates on the server, for the summary."""
        return f"flower, {len(self._sizes)} nodes; at the server {super().description}"

    def train(
        self,
        params: Params,
        ids: Ids,
        round: int,
        lr: float,
        start: Sequence[Params] | None = None,
        correction: Correction | None = None,
    ) -> Cohort:
        """Let clients train. Those that send no usable update become `silent`.

        The update of a silent client is zero, or in a secure sum the mean of the others.
        `Deployment` drops the client with its losses, and clears `silent` before each round.
        `start` must be None: clients start from `params`.
        """
        assert start is None
        contents = self._train_requests(params, ids, round, lr, correction or Correction())
        if self.weights is not None:
            delta = self._masked_updates(params, ids, round, contents, self.weights)
            return self._cohort(ids, params, delta, round)
        clients = ids.tolist()
        answers = self.nodes.ask(clients, TRAIN, contents)
        updates = []
        for client, answer in zip(clients, answers, strict=True):
            update = self._usable_arrays(client, answer, params)
            if update is None:
                self.silent.add(client)
                update = {name: torch.zeros_like(value) for name, value in params.items()}
            updates.append(update)
        delta = {name: torch.stack([update[name] for update in updates]) for name in params}
        cohort = self._cohort(ids, params, delta, round)
        loss, rms_loss = _numbers(answers, "training_loss"), _numbers(answers, "squared_loss")
        return replace(cohort, loss=loss, rms_loss=rms_loss)

    def _train_requests(
        self, params: Params, ids: Ids, round: int, lr: float, correction: Correction
    ) -> list[RecordDict]:
        """Return the request to train for each client."""
        model = packed(params)
        contents = []
        for row in range(len(ids)):
            content = self._request(model, round=round, lr=lr, pull=correction.pull)
            if correction.shift is not None:
                shift = {name: values[row] for name, values in correction.shift.items()}
                content["shift"] = packed(shift)
            contents.append(content)
        return contents

    def _masked_updates(
        self,
        params: Params,
        ids: Ids,
        round: int,
        contents: Sequence[RecordDict],
        weights: Floats,
    ) -> Params:
        """Let clients train, and return the mean of their updates by `weights` [K] as the update of
        each of them [K, ...].

        If each client has the mean as its update, the weighted mean of an aggregator is the right
        one. Other aggregators and methods that use single updates are rejected before the run.
        Clients that are not in the mean become `silent`.
        """
        # SecAgg+ clips large values, so the largest scale is 1. The division below undoes it.
        scales = dict(zip(ids.tolist(), (weights / weights.max()).tolist(), strict=True))
        connected: dict[int, RecordDict] = {}
        for client, content in zip(ids.tolist(), contents, strict=True):
            content.config_records["request"]["scale"] = scales[client]
            if client in self.nodes.node_of:
                connected[client] = content
        total, clients = SecureSum(self.nodes, round, connected).collect(params)
        self.silent.update(set(scales).difference(clients))
        sum_of_scales = sum(scales[client] for client in clients)
        delta = {}
        for name, value in params.items():
            mean = total[name] / sum_of_scales if clients else torch.zeros_like(value)
            delta[name] = torch.stack([mean] * len(ids))
        return delta

    def _cohort(self, ids: Ids, params: Params, delta: Params, round: int) -> Cohort:
        """Return the cohort of clients with the updates `delta` [K, ...].

        The clients do not send their numbers of steps: the server draws the same ones from the
        streams of the run.
        """
        sizes = self._sizes[ids]
        steps = self.work.drawn_steps(sizes, self._streams, round, ids)
        samples = map(self.work.num_samples, sizes.tolist(), steps.tolist())
        return Cohort(
            ids=ids,
            sizes=sizes,
            start=params,
            delta=delta,
            loss=None,
            rms_loss=None,
            steps=steps,
            trained=self.trained,
            samples=np.array(list(samples), np.int64),
        )

    def losses(self, params: Params, positions: Sequence[Ints]) -> Floats:
        """Return the mean loss of each list of positions; nan for clients that do not answer."""
        return _numbers(self._ask(LOSSES, params, positions)[1], "value")

    def accuracies(self, params: Params, positions: Sequence[Ints]) -> Floats:
        """Return the accuracy of each list of positions; nan for clients that do not answer."""
        return _numbers(self._ask(ACCURACIES, params, positions)[1], "value")

    def client_gradients(
        self,
        params: Params,
        positions: Sequence[Ints],
        names: Sequence[str] | None = None,
    ) -> Iterator[Tensor]:
        """Yield the gradient of each list of positions; zeros for clients that do not answer."""
        names = list(self.trained if names is None else names)
        asked = {name: params[name] for name in names}
        zeros = torch.zeros_like(torch.cat([value.flatten() for value in asked.values()]))
        clients, answers = self._ask(GRADIENTS, params, positions, names=names)
        for client, answer in zip(clients, answers, strict=True):
            arrays = self._usable_arrays(client, answer, {"gradient": zeros})
            yield zeros if arrays is None else arrays["gradient"]

    def evaluate(self, params: Params, x: Tensor, y: Tensor) -> Evaluation:
        """Evaluate `params` on samples of the server, or by the clients if it has none.

        The values of clients that answer count by their numbers of samples. If no client answers,
        they are nan.
        """
        if len(y):
            return super().evaluate(params, x, y)
        accuracies = self.accuracies(params, self.data.evaluate)
        losses = self.losses(params, self.data.evaluate)
        return Evaluation(self._mean(accuracies), self._mean(losses))

    def _mean(self, values: Floats) -> float:
        """Return the mean of the clients' values that are not nan, by their numbers of samples."""
        answered = ~np.isnan(values)
        if not answered.any():
            return np.nan
        return float(np.average(values[answered], weights=self._sizes[answered]))

    def _ask(
        self, kind: str, params: Params, positions: Sequence[Ints], **request: Any
    ) -> tuple[list[int], Answers]:
        """Ask a client about each list of positions, which are those of one client. Return the
        clients and their answers.

        If the positions are not all of the client's samples, they are sent along, counted from its
        first sample.
        """
        model = packed(params)
        clients = []
        contents = []
        for of_client in positions:
            client = int(np.searchsorted(self._ends, of_client[0], side="right"))
            first = self._ends[client] - self._sizes[client]
            content = self._request(model, **request)
            if not np.array_equal(of_client, np.arange(first, self._ends[client])):
                content.config_records["request"]["positions"] = (of_client - first).tolist()
            clients.append(client)
            contents.append(content)
        return clients, self.nodes.ask(clients, kind, contents)

    def _request(self, model: ArrayRecord, **request: Any) -> RecordDict:
        record = ConfigRecord({"work": self._client_work, **request})
        return RecordDict({"model": model, "request": record})

    def _usable_arrays(self, client: int, answer: RecordDict | None, like: Params) -> Params | None:
        """Return the tensors of an answer; None if they do not have the form of those in `like`."""
        if answer is None:
            return None
        try:
            tensors = unpacked(answer, "arrays", self.data.y.device)
        except Exception as error:  # the bytes of an array may be anything
            LOG.warning("client %d is ignored: its arrays cannot be read: %s", client, error)
            return None
        if _forms(tensors) == _forms(like):
            return {name: tensors[name] for name in like}
        LOG.warning("client %d is ignored: %s instead of %s", client, _forms(tensors), _forms(like))
        return None


def _forms(tensors: Params) -> dict[str, str]:
    return {name: f"{value.dtype} {list(value.shape)}" for name, value in tensors.items()}


def _numbers(answers: Answers, name: str) -> Floats:
    """Return a number of each answer; nan for an answer without it."""
    values = []
    for answer in answers:
        record = None if answer is None else answer.metric_records.get("numbers")
        value = None if record is None else record.get(name)
        values.append(value if isinstance(value, (int, float)) else np.nan)
    return np.array(values, np.float64)
