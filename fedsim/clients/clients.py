"""How clients answer a selector's questions: what they compute and send, and what is charged for it.

All that a selector learns of the clients, it asks for here, and every answer is charged.

The first contact of a client with a version of the model charges one download; each answer charges its upload and the
samples passed. What the server already has of a client at this version is not sent again: a loss is the same number,
and a tensor of an update is charged once, whether `updates` or `collect` asks for it. A question that needs a signal
which the selector does not declare raises. Neither data set, engine nor config is reachable.

Each question is one exchange, whose clients work side by side. Where there is a simulated clock it takes as long as the
slowest of them, and the next question follows it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.clients.compression import Compressor, Identity
from fedsim.clients.context import RoundContext, Signal
from fedsim.clients.ledger import Exchange, Resources, Transfers, resources_of
from fedsim.clients.local_results import Lent, LentCopy, LocalResults, row_norms
from fedsim.core.errors import FedsimError
from fedsim.core.exact import length, mean_row, row_sums
from fedsim.core.record import Quantity
from fedsim.core.types import Cohort, Ids, Params, chosen, sizes_of
from fedsim.engine.engine import Engine


class Clients:
    """The clients of one round, at one version of the model. Creating it costs nothing: nobody has been contacted
    yet."""

    def __init__(
        self, engine: Engine, context: RoundContext, params: Params, first_model: Callable[[int], Params] | None = None
    ) -> None:
        """`first_model`: the model from which each client trains in place of `params` (it downloads `params` all the
        same)."""
        self._engine = engine
        self._context = context
        self._params = params
        self._first_model = first_model
        self._own = Lent(params)  # which a cohort's `start` is
        self._copy = LentCopy(params)
        self._ledger = context.ledger
        self._clock = context.clock
        self._losses: dict[int, float] = {}
        self._batch_losses: dict[int, float] = {}
        self._results = LocalResults()
        self._transfers = Transfers(context.ledger, params, context.simulated)

    @property
    def available(self) -> Ids:
        """Clients that can be reached this round and have data, ascending."""
        return self._context.available

    @property
    def in_first_round(self) -> bool:
        """Whether this is the first round in which clients can be reached: round 1, or a later one."""
        return self._context.first

    @property
    def lr(self) -> float:
        """The local learning rate of this round, which the server sets."""
        return self._context.lr

    @property
    def params(self) -> Params:
        """The version of the model: a copy, which is not to be modified either."""
        return self._copy.tensors

    @property
    def modified(self) -> list[str]:
        """Names of tensors in `params`, or in the `start` of a cohort, that the selector has modified in place."""
        return list(dict.fromkeys([*self._own.modified, *self._copy.modified]))

    @property
    def modified_updates(self) -> list[str]:
        """Names of tensors in the clients' updates that the selector has modified in place."""
        return self._results.modified

    def broadcast(self, params: Params) -> "Clients":
        """The same clients at another model in the same round (a virtual round), with the same ledger."""
        return Clients(self._engine, self._context, params)

    def losses(self, ids: Ids) -> NDArray[np.float64]:
        """Mean cross-entropy of the current model on all local (evaluation) samples of each client [len(ids)].

        Asking a client again at the same model is free.
        """
        return self._report_losses(ids, self._losses, lambda new: chosen(self._engine.data.evaluate, new))

    def batch_losses(self, ids: Ids) -> NDArray[np.float64]:
        """The same on one random mini-batch of the local batch size per client, drawn afresh every round [len(ids)]."""
        own = self._engine.data.evaluate
        return self._report_losses(ids, self._batch_losses, lambda new: [self._batch(own, i) for i in new])

    def accuracies(self, ids: Ids) -> NDArray[np.float64]:
        """Share of its local (evaluation) samples that the current model classifies rightly, of each client [len(ids)].

        nan for a client without any. One number up and one forward pass each.
        """
        self._context.require(Signal.ACCURACIES)
        positions = chosen(self._engine.data.evaluate, ids)
        with self._clock("ask"):
            accuracies = self._engine.accuracies(self._params, positions)
        self._report(ids, "forward_samples", positions.sizes)
        return accuracies

    def label_counts(self, ids: Ids) -> NDArray[np.int64]:
        """Training samples of each class per client [len(ids), C]: C numbers up each, without any model."""
        self._context.require(Signal.LABEL_COUNTS)
        data = self._engine.data
        counts = np.zeros((len(ids), data.num_classes), np.int64)
        known = data.y.cpu().numpy()  # in one copy from a GPU
        with self._clock("ask"):
            for row, i in enumerate(ids):
                counts[row] = np.bincount(known[data.train[i]], minlength=data.num_classes)
        with self._transfers.open() as exchange:
            self._transfers.upload_numbers(exchange, ids, data.num_classes)
        return counts

    def gradients(
        self,
        ids: Ids,
        *,
        batch: bool = False,
        layers: Sequence[str] | None = None,
        compressor: Compressor | None = None,
    ) -> Iterator[Tensor]:
        """The gradient of each client's mean training loss at the current model, flat [D], client after client.

        On all its training samples, or on one fresh mini-batch of them. `layers` picks the parameters whose names
        begin so. Charges D numbers up, or the size of what the `compressor` makes of them and is sent instead, and one
        training pass; the model is in eval mode (no dropout).
        """
        self._context.require(Signal.GRADIENTS)
        own = self._engine.data.train
        positions = [self._batch(own, i) if batch else own[i] for i in ids]
        names = None if layers is None else self.layer_names(layers)
        answers = self._timed(self._engine.client_gradients(self._params, positions, names))
        with self._transfers.open() as exchange:
            self._transfers.download(exchange, ids)
            for client, gradient, used in zip(ids, answers, positions, strict=True):
                exchange.charge("train_samples", [client], len(used))
                with self._clock("ask"):
                    sent = self._upload_vector(exchange, client, gradient, compressor)
                yield sent

    def gradient_norms(self, ids: Ids) -> NDArray[np.float64]:
        """Euclidean norm of each client's full gradient [len(ids)]: one number up and one training pass each."""
        self._context.require(Signal.GRADIENTS)
        positions = [self._engine.data.train[i] for i in ids]
        gradients = self._engine.client_gradients(self._params, positions, None)
        norms = self._fetched(map(length, gradients))
        self._report(ids, "train_samples", map(len, positions))
        return norms

    def gradient_spreads(self, ids: Ids) -> NDArray[np.float64]:
        """Each client's root mean square distance of its mini-batch gradients from their mean [len(ids)].

        One pass over its data in mini-batches of the local batch size, fresh every round; one number up each.
        """
        self._context.require(Signal.GRADIENTS)
        batches = [self._batches(i) for i in ids]
        reports = (self._engine.client_gradients(self._params, b, None) for b in batches)
        spreads = self._fetched(_spread(torch.stack(list(r)).double()) for r in reports)
        self._report(ids, "train_samples", (sum(map(len, some)) for some in batches))
        return spreads

    def train(self, ids: Ids) -> None:
        """Train `ids` locally (those that have not trained on this model yet); their models stay with them.

        Nothing is reported, so that nothing is waited for: on a simulated clock, it delays their next answer.
        """
        self._context.require(Signal.TRAINING)
        with self._transfers.open(answered=False) as exchange:
            self._train(ids, exchange)

    def update_norms(self, ids: Ids) -> NDArray[np.float64]:
        """Euclidean norm of the update of each client, after training [len(ids)]: one number up each."""
        self._context.require(Signal.TRAINING)
        with self._transfers.open() as exchange:
            self._train(ids, exchange)
            self._transfers.upload_numbers(exchange, ids, 1)
        with self._clock("ask"):
            return row_norms(self._matrices(ids, self.layer_names(None))) if len(ids) else np.empty(0)

    def updates(
        self, ids: Ids, *, layers: Sequence[str] | None = None, compressor: Compressor | None = None
    ) -> dict[str, Tensor]:
        """w_k - w of each client after training, of the `layers` named, as matrices [len(ids), d] by tensor.

        Charges up the tensors that the server does not have yet. With a `compressor` the result is one matrix
        "sketch" of compressed updates, which are charged by their size; collecting an update then sends all of it.
        """
        self._context.require(Signal.TRAINING)
        with self._transfers.open() as exchange:
            self._train(ids, exchange)
            names = self.layer_names(layers)
            matrices = self._matrices(ids, names)
            if compressor is None or isinstance(compressor, Identity):
                self._transfers.upload_tensors(exchange, ids, names)
                return matrices
            rows = (torch.cat([m[row] for m in matrices.values()]) for row in range(len(ids)))
            with self._clock("ask"):
                sent = [self._upload_vector(exchange, i, row, compressor) for i, row in zip(ids, rows, strict=True)]
            return {"sketch": torch.stack(sent)}

    def gradients_after_training(self, ids: Ids) -> Iterator[Tensor]:
        """The gradient of each client's mean training loss at the model it has trained, flat [D].

        Trains whoever has not; charges D numbers up and one more training pass each.
        """
        self._context.require(Signal.GRADIENTS)
        self._context.require(Signal.TRAINING)
        with self._transfers.open() as exchange:
            self._train(ids, exchange)
            for i in ids:
                positions = self._engine.data.train[i]
                model = self._trained_model(i)
                (gradient,) = self._timed(self._engine.client_gradients(model, [positions], None))
                exchange.charge("train_samples", [i], len(positions))
                yield self._upload_vector(exchange, i, gradient, None)

    def public_labels(self, ids: Ids) -> Iterator[Tensor]:
        """Log-probabilities of each client's trained model on the public samples, float64 [M, C], client after client.

        Trains whoever has not; charges M C numbers up and M forward samples each. The public samples themselves are
        taken as known to all.
        """
        self._context.require(Signal.PUBLIC)
        self._context.require(Signal.TRAINING)
        if (public := self._context.public) is None:
            raise FedsimError("this selector needs public samples: set server.public_samples")
        with self._transfers.open() as exchange:
            self._train(ids, exchange)
            for i in ids:
                with self._clock("ask"):
                    labels = self._engine.predict(self._trained_model(i), public)
                exchange.charge("forward_samples", [i], len(labels))
                self._transfers.upload_numbers(exchange, [i], labels.numel())
                yield labels

    def momentum_buffers(self, ids: Ids) -> dict[str, Tensor]:
        """The momentum buffer each client ended its training with, per parameter [len(ids), ...]: P numbers up each.

        Raises `FedsimError` where the optimiser has none.
        """
        self._context.require(Signal.TRAINING)
        with self._transfers.open() as exchange:
            self._train(ids, exchange)
            buffers = self._results.of(ids).momentum
            if buffers is None:
                raise FedsimError(
                    "this selector needs the momentum buffers of local training, and the optimiser has none: set "
                    "optimizer=sgd optimizer.momentum=0.9, say"
                )
            self._transfers.upload_numbers(exchange, ids, sum(b[0].numel() for b in buffers.values()))
        return buffers

    def resources(self, ids: Ids) -> Resources:
        """How long each client would take to download the model, to train and to upload its update [len(ids)].

        Three numbers up each, without any model (FedCS's resource request). Raises `FedsimError` without a `system`.
        """
        self._context.require(Signal.RESOURCES)
        clock = self._transfers.clock
        with self._transfers.open() as exchange:
            self._transfers.upload_numbers(exchange, ids, 3)
        samples = np.array([self._engine.work.num_samples(len(self._engine.data.train[i])) for i in ids], np.int64)
        return resources_of(clock, ids, samples, self._transfers.model_bytes)

    def response_times(self, ids: Ids) -> NDArray[np.float64]:
        """Seconds from the request until each client has trained and said so [len(ids)]: one number up each.

        Their models stay with them; whoever has trained already just answers. Raises `FedsimError` without a `system`.
        """
        self._context.require(Signal.RESPONSE_TIMES)
        with self._transfers.open() as exchange:
            self._train(ids, exchange)
            self._transfers.upload_numbers(exchange, ids, 1)
        return self._transfers.seconds(exchange, ids)

    def send_numbers(self, ids: Ids, count: int) -> None:
        """Charge `count` numbers up from each of `ids`: terms of a sum that only the sum of matters to the server."""
        with self._transfers.open() as exchange:
            self._transfers.upload_numbers(exchange, ids, count)

    def collect(self, ids: Ids) -> Cohort:
        """Train whoever of `ids` has not trained on this model yet, and receive all their updates.

        Counts them as uploaded. An update is sent once: tensors that `updates` has brought, and clients collected
        before, cost nothing.
        """
        extra = len({Signal.TRAINING_LOSS, Signal.SQUARED_LOSS} & self._context.needs)
        with self._transfers.open() as exchange:
            self._train(ids, exchange)
            self._transfers.upload_updates(exchange, ids, extra)
        durations = None if self._context.simulated is None else self._transfers.seconds(exchange, ids)
        return replace(self._results.of(ids), ids=ids, durations=durations, samples=None, momentum=None)

    def layer_names(self, layers: Sequence[str] | None) -> list[str]:
        """The trained parameters whose names begin with one of `layers` (None: all), in the model's order."""
        if layers is None:
            return self._engine.trained
        names = [n for n in self._engine.trained if any(n == p or n.startswith(f"{p}.") for p in layers)]
        if not names:
            raise FedsimError(
                f"selector.layers={list(layers)}: the model trains no such layer; it has {self._engine.trained}"
            )
        return names

    def _report(self, ids: Ids, quantity: Quantity, samples: Iterable[int]) -> None:
        """One exchange in which each of `ids` passes so many samples through the model and sends one number."""
        with self._transfers.open() as exchange:
            self._transfers.download(exchange, ids)
            exchange.charge(quantity, ids, samples)
            self._transfers.upload_numbers(exchange, ids, 1)

    def _report_losses(
        self, ids: Ids, known: dict[int, float], samples: Callable[[Ids], Sequence[NDArray[np.int64]]]
    ) -> NDArray[np.float64]:
        """Losses [len(ids)] on the `samples` of each client; only those not `known` are asked for, and charged."""
        self._context.require(Signal.LOSSES)
        new = np.array([i for i in ids if int(i) not in known], np.int64)
        if len(new):
            positions = samples(new)
            with self._clock("ask"):
                losses = self._engine.losses(self._params, positions)
            self._report(new, "forward_samples", sizes_of(positions))
            self._ledger.nonfinite_reports += int((~np.isfinite(losses)).sum())
            known.update(zip(new.tolist(), losses.tolist(), strict=True))
        return np.array([known[int(i)] for i in ids], dtype=np.float64)

    def _train(self, ids: Ids, exchange: Exchange) -> None:
        """Local training of those of `ids` who have not trained on this model yet."""
        new, context = self._results.missing(ids), self._context
        self._transfers.download(exchange, new)
        if len(new):
            self._ledger.trained.update(map(int, new))
            with self._clock("train"):
                start = None if self._first_model is None else [self._first_model(int(i)) for i in new]
                trained = self._engine.train(self._params, new, context.round, context.lr, start)
                assert trained.samples is not None
                exchange.charge("train_samples", new, trained.samples)
                self._results.add(trained)

    def _matrices(self, ids: Ids, names: Sequence[str]) -> dict[str, Tensor]:
        """Updates as one matrix [len(ids), d] for each tensor of `names`."""
        delta = self._results.of(ids).delta
        return {name: delta[name].flatten(1) for name in names}

    def _trained_model(self, client: int) -> Params:
        delta = self._results.of([client]).delta
        return {name: value + delta[name][0] for name, value in self._params.items()}

    def _upload_vector(self, exchange: Exchange, client: int, vector: Tensor, compressor: Compressor | None) -> Tensor:
        """What arrives at the server of a client's flat `vector` [D]."""
        used = compressor or Identity()
        exchange.charge("bytes_up", [client], used.num_bytes(len(vector)))
        return vector if compressor is None else compressor.compress(vector, self._context.compression_seed)

    def _timed(self, answers: Iterator[Tensor]) -> Iterator[Tensor]:
        """The same, with the time of each answer charged to the clients."""
        while True:
            with self._clock("ask"):
                answer = next(answers, None)
            if answer is None:
                return
            yield answer

    def _fetched(self, answers: Iterator[Tensor]) -> NDArray[np.float64]:
        """Answers of one number each, in one copy from a GPU; their time is charged to the clients."""
        with self._clock("ask"):
            numbers = list(answers)
            return np.array(torch.stack(numbers).tolist()) if numbers else np.empty(0)

    def _batch(self, samples: Sequence[NDArray[np.int64]], client: int) -> NDArray[np.int64]:
        """One mini-batch of a client's `samples`, fresh every round."""
        return self._context.shuffled(samples[client], client)[: self._engine.work.batch_size]

    def _batches(self, client: int) -> list[NDArray[np.int64]]:
        shuffled, size = self._context.shuffled(self._engine.data.train[client], client), self._engine.work.batch_size
        return [shuffled[start : start + size] for start in range(0, len(shuffled), size)]


def _spread(vectors: Tensor) -> Tensor:
    """Root mean square distance of the rows from their mean."""
    squares = row_sums((vectors - mean_row(vectors)).square())
    return mean_row(squares).sqrt()
