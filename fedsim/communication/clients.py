"""The metered door between server and clients. A selector sees its clients through this and nothing else.

The first contact of a client with a model version charges one download; each answer charges its upload and the samples
passed. What the server already has of a client at this model is not sent again: a loss is the same number, and a tensor
of an update is charged once, whether `updates` or `collect` asks for it. Asking for a signal that the selector does not
declare raises. Neither data set, engine nor config is reachable.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.communication.compression import Identity, Sketch
from fedsim.communication.ledger import SCALAR_BYTES, Clock, Ledger
from fedsim.communication.local_results import Workshop, norms
from fedsim.communication.signals import Signal, require
from fedsim.engine.engine import Engine
from fedsim.errors import FedsimError
from fedsim.rng import Purpose
from fedsim.types import Cohort, Ids, Params, Population


@dataclass(frozen=True)
class RoundTerms:
    """What holds for one round: its number (1-based), local learning rate, who can be reached, what may be asked."""

    round: int
    lr: float
    available: Ids
    needs: frozenset[Signal]


class Clients:
    """A door on one version of the model. Opening it costs nothing: nobody has been contacted yet."""

    def __init__(
        self,
        engine: Engine,
        population: Population,
        terms: RoundTerms,
        params: Params,
        ledger: Ledger,
        clock: Clock,
        public: Tensor | None = None,
        first_model: Callable[[int], Params] | None = None,
    ) -> None:
        """`first_model`: from which each client trains in place of `params` (it downloads `params` all the same)."""
        self._engine = engine
        self._population = population
        self._terms = terms
        self._params = params
        self._ledger = ledger
        self._clock = clock
        self._public = public
        self._holders: set[int] = set()
        self._collected: set[int] = set()
        self._sent: dict[int, set[str]] = {}  # the tensors of each client's update that the server has
        self._losses: dict[int, float] = {}
        self._batch_losses: dict[int, float] = {}
        self._workshop = Workshop(engine, params, terms.round, terms.lr, first_model)
        self._tensor_bytes = {name: t.numel() * t.element_size() for name, t in params.items()}
        self._model_bytes = sum(self._tensor_bytes.values())

    @property
    def available(self) -> Ids:
        """Clients that can be reached this round and have data, ascending."""
        return self._terms.available

    @property
    def lr(self) -> float:
        """The local learning rate of this round, which the server sets."""
        return self._terms.lr

    @property
    def params(self) -> Params:
        """The model that this door is on; the server's own. Not to be modified."""
        return self._params

    def broadcast(self, params: Params) -> "Clients":
        """A door on another model in the same round (a what-if), with the same ledger."""
        return Clients(self._engine, self._population, self._terms, params, self._ledger, self._clock, self._public)

    # --- questions ---------------------------------------------------------------------------------------------

    def losses(self, ids: Ids) -> NDArray[np.float64]:
        """Mean cross-entropy of the current model on all local (evaluation) samples of each client [len(ids)].

        Asking a client again at the same model is free.
        """
        return self._report_losses(ids, self._losses, lambda i: self._engine.data.evaluate[i])

    def batch_losses(self, ids: Ids) -> NDArray[np.float64]:
        """The same on one random mini-batch of the local batch size per client, drawn afresh every round [len(ids)]."""
        return self._report_losses(ids, self._batch_losses, lambda i: self._batch(self._engine.data.evaluate, i))

    def label_counts(self, ids: Ids) -> NDArray[np.int64]:
        """Training samples of each class per client [len(ids), C]: C numbers up each, without any model."""
        require(Signal.LABEL_COUNTS, self._terms.needs)
        data = self._engine.data
        counts = np.zeros((len(ids), data.num_classes), np.int64)
        for row, i in enumerate(ids):
            labels = data.y[torch.as_tensor(data.train[i], device=data.y.device)]
            counts[row] = torch.bincount(labels, minlength=data.num_classes).cpu().numpy()
        self._ledger.bytes_up += counts.size * SCALAR_BYTES
        return counts

    def gradients(
        self,
        ids: Ids,
        *,
        batch: bool = False,
        layers: Sequence[str] | None = None,
        sketch: Sketch | None = None,
    ) -> Iterator[Tensor]:
        """The gradient of each client's mean training loss at the current model, flat [D], client after client.

        On all its training samples, or on one fresh mini-batch of them. `layers` picks the parameters whose names
        begin so. Charges D numbers up, or the size of the `sketch` that comes in its place, and one training pass; the
        model is evaluated as in testing (no dropout).
        """
        require(Signal.GRADIENTS, self._terms.needs)
        self._contact(ids)
        own = self._engine.data.train
        positions = [self._batch(own, i) if batch else own[i] for i in ids]
        names = None if layers is None else self.layer_names(layers)
        for gradient, used in zip(
            self._timed(self._engine.client_gradients(self._params, positions, names)), positions, strict=True
        ):
            self._ledger.train_samples += len(used)
            yield self._send(gradient, sketch)

    def gradient_norms(self, ids: Ids) -> NDArray[np.float64]:
        """Euclidean norm of each client's full gradient [len(ids)]: one number up and one training pass each."""
        require(Signal.GRADIENTS, self._terms.needs)
        self._contact(ids)
        positions = [self._engine.data.train[i] for i in ids]
        gradients = self._engine.client_gradients(self._params, positions, None)
        values = [float(norm) for norm in self._timed(g.norm() for g in gradients)]
        self._ledger.train_samples += sum(map(len, positions))
        self._ledger.bytes_up += len(ids) * SCALAR_BYTES
        return np.array(values)

    def gradient_spreads(self, ids: Ids) -> NDArray[np.float64]:
        """Each client's root mean square distance of its mini-batch gradients from their mean [len(ids)].

        One pass over its data in mini-batches of the local batch size, fresh every round; one number up each.
        """
        require(Signal.GRADIENTS, self._terms.needs)
        self._contact(ids)
        batches = [self._batches(i) for i in ids]
        reports = (self._engine.client_gradients(self._params, b, None) for b in batches)
        spreads = np.array([float(s) for s in self._timed(_spread(torch.stack(list(r)).double()) for r in reports)])
        self._ledger.train_samples += sum(len(b) for some in batches for b in some)
        self._ledger.bytes_up += len(ids) * SCALAR_BYTES
        return spreads

    def train(self, ids: Ids) -> None:
        """Train `ids` locally (those that have not trained on this model yet); their models stay with them."""
        require(Signal.TRAINING, self._terms.needs)
        self._train(ids)

    def update_norms(self, ids: Ids) -> NDArray[np.float64]:
        """Euclidean norm of the update of each client, after training [len(ids)]: one number up each."""
        self.train(ids)
        self._ledger.bytes_up += len(ids) * SCALAR_BYTES
        return norms(self._workshop.pieces(ids, self.layer_names(None))) if len(ids) else np.empty(0)

    def updates(
        self, ids: Ids, *, layers: Sequence[str] | None = None, sketch: Sketch | None = None
    ) -> dict[str, Tensor]:
        """w_k - w of each client after training, of the `layers` named, as matrices [len(ids), d] by tensor.

        Charges up the tensors that the server does not have yet. With a `sketch` the result is one matrix of sketches,
        which are charged by their size; collecting the update then sends all of it.
        """
        self.train(ids)
        names = self.layer_names(layers)
        pieces = self._workshop.pieces(ids, names)
        if sketch is None or isinstance(sketch, Identity):
            self._upload(ids, names)
            return pieces
        rows = (torch.cat([p[row] for p in pieces.values()]) for row in range(len(ids)))
        return {"sketch": torch.stack([self._send(row, sketch) for row in rows])}

    def gradients_after_training(self, ids: Ids) -> Iterator[Tensor]:
        """The gradient of each client's mean training loss at the model it has trained, flat [D].

        Trains whoever has not; charges D numbers up and one more training pass each.
        """
        require(Signal.GRADIENTS, self._terms.needs)
        self.train(ids)
        for i in ids:
            positions = self._engine.data.train[i]
            model = self._workshop.model(int(i))
            (gradient,) = self._timed(self._engine.client_gradients(model, [positions], None))
            self._ledger.train_samples += len(positions)
            yield self._send(gradient, None)

    def public_labels(self, ids: Ids) -> Iterator[Tensor]:
        """Log-probabilities of each client's trained model on the public samples, float64 [M, C], client after client.

        Trains whoever has not; charges M C numbers up and M forward samples each. The public samples themselves are
        taken as known to all.
        """
        require(Signal.PUBLIC, self._terms.needs)
        self.train(ids)
        if self._public is None:
            raise FedsimError("this selector needs public samples: set server.public_samples")
        for i in ids:
            with self._clock("ask"):
                labels = self._engine.predict(self._workshop.model(int(i)), self._public)
            self._ledger.forward_samples += len(labels)
            self._ledger.bytes_up += labels.numel() * SCALAR_BYTES
            yield labels

    def momentum_buffers(self, ids: Ids) -> dict[str, Tensor]:
        """The momentum buffer each client ended its training with, per parameter [len(ids), ...]: P numbers up each.

        Raises `FedsimError` where the optimiser has none.
        """
        self.train(ids)
        buffers = self._workshop.momentum(ids)
        self._ledger.bytes_up += sum(b.numel() * b.element_size() for b in buffers.values())
        return buffers

    def send_numbers(self, ids: Ids, count: int) -> None:
        """Charge `count` numbers up from each of `ids`: terms of a sum that only the sum of matters to the server."""
        self._ledger.bytes_up += len(ids) * count * SCALAR_BYTES

    def collect(self, ids: Ids) -> Cohort:
        """Train whoever of `ids` has not trained on this model yet, and receive all their updates.

        Counts them as uploaded. An update is sent once: tensors that `updates` has brought, and clients collected
        before, cost nothing.
        """
        self._train(ids)
        new = {int(i) for i in ids} - self._collected
        self._collected |= new
        self._ledger.uploaded.update(new)
        extra = len({Signal.TRAINING_LOSS, Signal.SQUARED_LOSS} & self._terms.needs)
        self._ledger.bytes_up += len(new) * extra * SCALAR_BYTES
        self._upload(ids, self._tensor_bytes)
        trained = self._workshop.of(ids)
        return Cohort(
            ids=ids,
            sizes=self._population.sizes[ids],
            start=self._params,
            delta=trained.delta,
            loss=trained.loss,
            rms_loss=trained.rms_loss,
            steps=trained.steps,
            trained=self._engine.trained,
        )

    # --- behind the door ---------------------------------------------------------------------------------------

    def _train(self, ids: Ids) -> None:
        new = self._workshop.missing(ids)
        self._contact(new)
        if len(new):
            self._ledger.trained.update(map(int, new))
            with self._clock("train"):
                self._ledger.train_samples += self._workshop.train(new)

    def _timed(self, answers: Iterator[Tensor]) -> Iterator[Tensor]:
        """The same, with the time of each answer charged to the clients."""
        while True:
            with self._clock("ask"):
                answer = next(answers, None)
            if answer is None:
                return
            yield answer

    def _upload(self, ids: Iterable[int], names: Iterable[str]) -> None:
        """Charge the tensors `names` of each client's update, but for those sent before."""
        for i in ids:
            sent = self._sent.setdefault(int(i), set())
            missing = set(names) - sent
            self._ledger.bytes_up += sum(self._tensor_bytes[name] for name in missing)
            sent |= missing

    def _send(self, vector: Tensor, sketch: Sketch | None) -> Tensor:
        """What arrives at the server of a client's `vector`."""
        used = sketch or Identity()
        self._ledger.bytes_up += used.num_bytes(len(vector))
        return used.compress(vector, self._engine.streams.key(Purpose.SKETCH, self._terms.round))

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

    def _report_losses(
        self, ids: Ids, known: dict[int, float], samples: Callable[[int], NDArray[np.int64]]
    ) -> NDArray[np.float64]:
        """Losses [len(ids)] on the `samples` of each client; only those not `known` are asked for, and charged."""
        require(Signal.LOSSES, self._terms.needs)
        new = [int(i) for i in ids if int(i) not in known]
        if new:
            self._contact(new)
            positions = [samples(i) for i in new]
            with self._clock("ask"):
                losses = self._engine.losses(self._params, positions)
            self._ledger.forward_samples += sum(map(len, positions))
            self._ledger.bytes_up += len(new) * SCALAR_BYTES
            self._ledger.nonfinite_reports += int((~np.isfinite(losses)).sum())
            known.update(zip(new, losses.tolist(), strict=True))
        return np.array([known[int(i)] for i in ids], dtype=np.float64)

    def _batch(self, samples: Sequence[NDArray[np.int64]], client: int) -> NDArray[np.int64]:
        """One mini-batch of a client's `samples`, fresh every round."""
        return self._shuffled(samples[client], client)[: self._engine.work.batch_size]

    def _batches(self, client: int) -> list[NDArray[np.int64]]:
        shuffled, size = self._shuffled(self._engine.data.train[client], client), self._engine.work.batch_size
        return [shuffled[start : start + size] for start in range(0, len(shuffled), size)]

    def _shuffled(self, positions: NDArray[np.int64], client: int) -> NDArray[np.int64]:
        rng = self._engine.streams.generator(Purpose.LOSS_BATCH, self._terms.round, int(client))
        return rng.permutation(positions)

    def _contact(self, ids: Iterable[int]) -> None:
        new = {int(i) for i in ids} - self._holders
        self._holders |= new
        self._ledger.download(new, self._model_bytes)


def _spread(vectors: Tensor) -> Tensor:
    """Root mean square distance of the rows from their mean."""
    return (vectors - vectors.mean(0)).square().sum(1).mean().sqrt()
