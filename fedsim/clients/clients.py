"""How clients answer a selector's questions: what they compute and send, and what is charged for
it.

All that a selector learns of the clients, it asks for here. The first contact of a client with a
version of the model charges one download; each answer charges its upload and the samples passed.
What the server already has of a client at this version is not sent again: neither a loss nor a
tensor of an update, whether `updates` or `collect` asks for it. A question that needs a signal
which the selector does not declare raises.

Each question is one exchange, whose clients work side by side. Where there is a simulated clock it
takes as long as the slowest of them, and the next question follows it. Answers that come client
after client are charged at the question.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.compression import NUMBER, Compressor, Identity
from fedsim.clients.context import RoundContext, Signal
from fedsim.clients.local_results import GuardedTensors, LocalResults, row_norms
from fedsim.clients.system import Resources
from fedsim.core.arrays import Bools, Floats, Ints
from fedsim.core.errors import FedsimError
from fedsim.core.exact import length, mean_row, row_sums
from fedsim.core.record import QUANTITIES
from fedsim.core.types import Cohort, Evaluation, Exchange, Ids, Params, positions_of, sizes_of
from fedsim.engine.engine import Engine

UNCOMPRESSED = Identity()
Amounts = int | Ints


class Clients:
    """The clients of one round, at one version of the model; nobody has been contacted yet."""

    def __init__(
        self,
        engine: Engine,
        context: RoundContext,
        params: Params,
        first_model: Callable[[int], Params] | None = None,
    ) -> None:
        """`first_model`: the model from which each client trains in place of `params` (it downloads
        `params` all the same)."""
        self.available = context.available
        """Clients that can be reached this round and have data, ascending."""
        self.in_first_round = context.first
        """Whether this is the first round in which clients can be reached: round 1, or a later
        one."""
        self.lr = context.lr
        """The local learning rate of this round, which the server sets."""
        self._engine, self._context, self._params, self._first_model = (
            engine,
            context,
            params,
            first_model,
        )
        self._lent = GuardedTensors(params)  # which a cohort's `start` is
        self._ledger, self._clock = context.ledger, context.clock
        self._losses, self._batch_losses = dict[int, float](), dict[int, float]()
        num = len(engine.data.train)
        self._results = LocalResults(num)
        self._bytes = {name: t.numel() * t.element_size() for name, t in params.items()}
        self._has_model, self._collected, self._is_to_train = np.zeros((3, num), bool)
        self._has_sent = defaultdict[str, Bools](
            lambda: np.zeros(num, bool)
        )  # by tensor of the update

    @cached_property
    def params(self) -> Params:
        """The version of the model: a copy, which is not to be modified either."""
        return self._lent.copy_of(self._params)

    @cached_property
    def _trained_bytes(self) -> int:
        return sum(self._bytes[name] for name in self._engine.trained)

    @property
    def modified(self) -> tuple[list[str], list[str]]:
        """Names of tensors in `params` or in the `start` of a cohort, and of tensors in the
        clients' updates, that the selector has modified in place."""
        return self._lent.modified, self._results.lent.modified

    def broadcast(self, params: Params) -> "Clients":
        """The same clients at another model in the same round (a virtual round), with the same
        ledger."""
        return Clients(self._engine, self._context, params)

    def losses(self, ids: Ids) -> Floats:
        """Mean cross-entropy of the current model on all local (evaluation) samples of each client
        [len(ids)]."""
        return self._report_losses(
            ids, self._losses, lambda new: positions_of(self._engine.data.evaluate, new)
        )

    def batch_losses(self, ids: Ids) -> Floats:
        """The same on one random mini-batch of the local batch size per client, drawn afresh every
        round [len(ids)]."""
        own = self._engine.data.evaluate
        return self._report_losses(
            ids, self._batch_losses, lambda new: [self._batch(own, i) for i in new]
        )

    def accuracies(self, ids: Ids) -> Floats:
        """Share of its local (evaluation) samples that the current model classifies rightly, of
        each client [len(ids)]; nan without any."""
        self._context.require(Signal.ACCURACIES)
        positions = positions_of(self._engine.data.evaluate, ids)
        with self._clock("ask"):
            accuracies = self._engine.accuracies(self._params, positions)
        self._exchange(ids, forward=positions.sizes, up=NUMBER)
        return accuracies

    def label_counts(self, ids: Ids) -> Ints:
        """Training samples of each class per client [len(ids), C]: C numbers up each, without any
        model."""
        self._context.require(Signal.LABEL_COUNTS)
        data = self._engine.data
        counts = np.zeros((len(ids), data.num_classes), np.int64)
        known = data.y.cpu().numpy()  # in one copy from a GPU
        with self._clock("ask"):
            for row, i in enumerate(ids):
                counts[row] = np.bincount(known[data.train[i]], minlength=data.num_classes)
        self._exchange(ids, model=False, up=NUMBER * data.num_classes)
        return counts

    def gradients(
        self,
        ids: Ids,
        *,
        batch: bool = False,
        layers: Sequence[str] | None = None,
        compressor: Compressor = UNCOMPRESSED,
    ) -> Iterator[Tensor]:
        """The gradient of each client's mean training loss at the current model in eval mode, flat
        [D], client after client, on all its training samples or on one fresh mini-batch of them.

        `layers` picks the parameters whose names begin so. Charges D numbers up, or the size of
        what the `compressor` makes of them and is sent instead, and one training pass.
        """
        self._context.require(Signal.GRADIENTS)
        own = self._engine.data.train
        positions = [self._batch(own, i) if batch else own[i] for i in ids]
        names = None if layers is None else self.layer_names(layers)
        gradients = self._gradients(self._params, ids, positions, names)
        numbers = sum(self._params[name].numel() for name in names or self._engine.trained)
        self._exchange(ids, train=sizes_of(positions), up=compressor.num_bytes(numbers))
        return self._timed(
            compressor.compress(one, self._context.compression_seed) for one in gradients
        )

    def gradient_norms(self, ids: Ids) -> Floats:
        """Euclidean norm of each client's full gradient [len(ids)]: one number up and one training
        pass each."""
        self._context.require(Signal.GRADIENTS)
        positions = [self._engine.data.train[i] for i in ids]
        norms = self._fetched(map(length, self._gradients(self._params, ids, positions, None)))
        self._exchange(ids, train=sizes_of(positions), up=NUMBER)
        return norms

    def gradient_spreads(self, ids: Ids) -> Floats:
        """Each client's root mean square distance of its mini-batch gradients from their mean
        [len(ids)], by one pass over its data, shuffled every round; one number up each."""
        self._context.require(Signal.GRADIENTS)
        own, size = self._engine.data.train, self._engine.work.batch_size
        shuffled = [self._context.shuffled(own[i], i) for i in ids]
        batches = (
            [one[start : start + size] for start in range(0, len(one), size)] for one in shuffled
        )
        reports = (self._engine.client_gradients(self._params, some, None) for some in batches)
        spreads = self._fetched(_spread(torch.stack(list(report)).double()) for report in reports)
        self._exchange(ids, train=sizes_of(shuffled), up=NUMBER)
        return spreads

    def train(self, ids: Ids) -> None:
        """Train `ids` locally (those that have not trained on this model yet); their models stay
        with them. On a simulated clock, this is not waited for, but delays their next answer."""
        self._context.require(Signal.TRAINING)
        self._exchange(ids, train=self._train(ids), up=None)

    def update_norms(self, ids: Ids) -> Floats:
        """Euclidean norm of the update of each client, after training [len(ids)]: one number up
        each."""
        self._context.require(Signal.TRAINING)
        self._exchange(ids, train=self._train(ids), up=NUMBER)
        with self._clock("ask"):
            return row_norms(self._matrices(ids, self._engine.trained)) if len(ids) else np.empty(0)

    def updates(
        self,
        ids: Ids,
        *,
        layers: Sequence[str] | None = None,
        compressor: Compressor = UNCOMPRESSED,
    ) -> dict[str, Tensor]:
        """w_k - w of each client after training, of the `layers` named, as matrices [len(ids), d]
        by tensor.

        Charges up the tensors that the server does not have yet. With a `compressor` the result is
        one matrix "sketch" of compressed updates; collecting an update then sends all of it.
        """
        self._context.require(Signal.TRAINING)
        names, train = self.layer_names(layers), self._train(ids)
        matrices = self._matrices(ids, names)
        if isinstance(compressor, Identity):
            self._exchange(ids, train=train, up=self._tensors_to_send(ids, names))
            return matrices
        self._exchange(
            ids, train=train, up=compressor.num_bytes(sum(m.shape[1] for m in matrices.values()))
        )
        rows = (torch.cat([m[row] for m in matrices.values()]) for row in range(len(ids)))
        with self._clock("ask"):
            return {
                "sketch": torch.stack(
                    [compressor.compress(row, self._context.compression_seed) for row in rows]
                )
            }

    def gradients_after_training(self, ids: Ids) -> Iterator[Tensor]:
        """The gradient of each client's mean training loss at the model it has trained, flat [D]: D
        numbers up and one more training pass each."""
        self._context.require(Signal.GRADIENTS, Signal.TRAINING)
        positions = [self._engine.data.train[i] for i in ids]
        numbers = sum(self._params[name].numel() for name in self._engine.trained)
        self._exchange(ids, train=self._train(ids) + sizes_of(positions), up=NUMBER * numbers)
        return self._timed(
            next(self._gradients(self._trained_model(i), [i], [own], None))
            for i, own in zip(ids, positions, strict=True)
        )

    def public_labels(self, ids: Ids) -> Iterator[Tensor]:
        """Log-probabilities of each client's trained model on the public samples, which all have,
        float64 [M, C], client after client: M C numbers up and M forward samples each."""
        self._context.require(Signal.PUBLIC, Signal.TRAINING)
        if (public := self._context.public) is None:
            raise FedsimError("this selector needs public samples: set server.public_samples")
        numbers = len(public) * self._engine.data.num_classes
        self._exchange(ids, train=self._train(ids), forward=len(public), up=NUMBER * numbers)
        return self._timed(self._engine.predict(self._trained_model(i), public) for i in ids)

    def momentum_buffers(self, ids: Ids) -> dict[str, Tensor]:
        """The momentum buffer each client ended its training with, per parameter [len(ids), ...]: P
        numbers up each."""
        self._context.require(Signal.TRAINING)
        train = self._train(ids)
        buffers = self._results.of(ids).momentum
        if buffers is None:
            raise FedsimError(
                "this selector needs momentum buffers: set optimizer=sgd optimizer.momentum=0.9, say"
            )
        self._exchange(ids, train=train, up=NUMBER * sum(b[0].numel() for b in buffers.values()))
        return buffers

    def resources(self, ids: Ids) -> Resources:
        """How long each client would take to download the model, to train and to upload its update
        [len(ids)]: three numbers up each, without any model (FedCS's resource request)."""
        self._context.require(Signal.RESOURCES)
        clock = self._context.simulated_clock()
        self._exchange(ids, model=False, up=3 * NUMBER)
        samples = np.array(
            [self._engine.work.num_samples(len(self._engine.data.train[i])) for i in ids], np.int64
        )
        algorithm, model = self._context.local_algorithm, sum(self._bytes.values())
        samples += algorithm.extra_passes * sizes_of([self._engine.data.train[i] for i in ids])
        down, up = (
            model + extra * self._trained_bytes
            for extra in (algorithm.extra_down, algorithm.extra_up)
        )
        return clock.resources(ids, samples, down, up)

    def response_times(self, ids: Ids) -> Floats:
        """Seconds from the request until each client has trained and said so [len(ids)]: one number
        up each. Their models stay with them; whoever has trained already just answers."""
        self._context.require(Signal.RESPONSE_TIMES)
        self._context.simulated_clock()  # or refuse
        seconds = self._exchange(ids, train=self._train(ids), up=NUMBER)
        assert seconds is not None
        return seconds

    def send_numbers(self, ids: Ids, count: int) -> None:
        """Charge `count` numbers up from each of `ids`: terms of a sum that only the sum of matters
        to the server."""
        self._exchange(ids, model=False, up=NUMBER * count)

    def collect(self, ids: Ids) -> Cohort:
        """Train whoever of `ids` has not trained on this model yet, and receive all their updates:
        they are uploaded. Tensors that `updates` has brought, and clients collected before, cost
        nothing."""
        extra = len({Signal.TRAINING_LOSS, Signal.SQUARED_LOSS} & self._context.needs)
        train = self._train(ids)
        once = NUMBER * extra + self._context.local_algorithm.extra_up * self._trained_bytes
        up = self._tensors_to_send(ids, self._bytes) + once * ~self._collected[ids]
        self._collected[ids] = True
        self._ledger.uploaded.update(ids.tolist())
        seconds = self._exchange(ids, train=train, up=up)
        return replace(
            self._results.of(ids), ids=ids, durations=seconds, samples=None, momentum=None
        )

    def validate(self, params: Params) -> Evaluation:
        """Accuracy and loss of `params` on the server's validation split, as `Server.validate`: no
        client is asked."""
        return self._context.validate(self._engine, params)

    def layer_names(self, layers: Sequence[str] | None) -> list[str]:
        """The trained parameters whose names begin with one of `layers` (None: all), in the model's
        order."""
        if layers is None:
            return self._engine.trained
        names = [
            n for n in self._engine.trained if any(n == p or n.startswith(f"{p}.") for p in layers)
        ]
        if not names:
            raise FedsimError(
                f"selector.layers={layers}: the model has no such layer, but {self._engine.trained}"
            )
        return names

    def _exchange(
        self,
        ids: Ids,
        *,
        up: Amounts | None,
        model: bool = True,
        forward: Amounts = 0,
        train: Amounts = 0,
    ) -> Floats | None:
        """One request to `ids` and their answers: whoever lacks the `model` downloads it, and what
        the local algorithm needs besides if it is to train; passes so many samples, and sends so
        many bytes `up` (None: nothing that is waited for). Seconds [n] that it took each on the
        simulated clock, 0 where there was nothing to do."""
        new = ~self._has_model[ids] & model
        self._has_model[ids[new]] = True
        self._ledger.contacted.update(ids[new].tolist())
        down = sum(self._bytes.values()) * new
        down += (
            self._context.local_algorithm.extra_down * self._trained_bytes * self._is_to_train[ids]
        )
        self._is_to_train[ids] = False
        sent, trained = 0 if up is None else up, train * self._context.behaviour.works(ids)
        amounts = [np.full(len(ids), each) for each in (down, forward, trained, sent)]
        for quantity, each in zip(QUANTITIES, amounts, strict=True):
            setattr(self._ledger, quantity, getattr(self._ledger, quantity) + int(each.sum()))
        if self._context.simulated is None:
            return None
        busy, seconds = np.any(amounts, axis=0), np.zeros(len(ids))
        work = Exchange(ids[busy], *(each[busy] for each in amounts))
        seconds[busy] = self._context.simulated.spend(work, answered=up is not None)
        return seconds

    def _tensors_to_send(self, ids: Ids, names: Iterable[str]) -> Ints:
        """Bytes [n] of the tensors `names` of the clients' updates, but for those sent before."""
        total = np.zeros(len(ids), np.int64)
        for name in names:
            total += self._bytes[name] * ~self._has_sent[name][ids]
            self._has_sent[name][ids] = True
        return total

    def _report_losses(
        self,
        ids: Ids,
        known: dict[int, float],
        samples: Callable[[Ids], Sequence[Ints]],
    ) -> Floats:
        """Losses [len(ids)] on the `samples` of each client; only those not `known` are asked for,
        and charged."""
        self._context.require(Signal.LOSSES)
        new = np.array([i for i in ids if int(i) not in known], np.int64)
        if len(new):
            positions = samples(new)
            with self._clock("ask"):
                losses = self._engine.losses(self._params, positions)
            self._exchange(new, forward=sizes_of(positions), up=NUMBER)
            self._ledger.nonfinite_reports += int((~np.isfinite(losses)).sum())
            known.update(zip(new.tolist(), losses.tolist(), strict=True))
        return np.array([known[int(i)] for i in ids], dtype=np.float64)

    def _train(self, ids: Ids) -> Ints:
        """Local training of those of `ids` who have not trained on this model yet; the samples [n]
        that it takes."""
        new, samples, context = (
            ~self._results.known(ids),
            np.zeros(len(ids), np.int64),
            self._context,
        )
        if new.any():
            self._ledger.trained.update(ids[new & context.behaviour.works(ids)].tolist())
            with self._clock("train"):
                start = (
                    None
                    if self._first_model is None
                    else [self._first_model(int(i)) for i in ids[new]]
                )
                own = {name: self._params[name] for name in self._engine.trained}
                correction = context.local_algorithm.correction(ids[new], own)
                trained = self._engine.train(
                    self._params, ids[new], context.round, context.lr, start, correction
                )
            assert trained.samples is not None
            samples[new] = trained.samples + context.local_algorithm.extra_passes * trained.sizes
            self._is_to_train[ids[new]] = True
            self._results.add(context.behaviour.sent(trained, context.round))
        return samples

    def _gradients(
        self,
        params: Params,
        ids: Iterable[int],
        positions: Sequence[Ints],
        names: Sequence[str] | None,
    ) -> Iterator[Tensor]:
        """What the clients send in place of their gradients at `params`."""
        sent, round = self._context.behaviour.sent_gradient, self._context.round
        true = self._engine.client_gradients(params, positions, names)
        return (sent(gradient, round, int(i)) for i, gradient in zip(ids, true, strict=True))

    def _matrices(self, ids: Ids, names: Sequence[str]) -> dict[str, Tensor]:
        delta = self._results.of(ids).delta
        return {name: delta[name].flatten(1) for name in names}

    def _trained_model(self, client: int) -> Params:
        delta = self._results.of(np.array([client])).delta
        return {name: value + delta[name][0] for name, value in self._params.items()}

    def _timed(self, answers: Iterator[Tensor]) -> Iterator[Tensor]:
        """The same, with the time of each answer charged to the clients."""
        while True:
            with self._clock("ask"):
                answer = next(answers, None)
            if answer is None:
                return
            yield answer

    def _fetched(self, answers: Iterator[Tensor]) -> Floats:
        """Answers of one number each, in one copy from a GPU."""
        with self._clock("ask"):
            numbers = list(answers)
            return np.array(torch.stack(numbers).tolist()) if numbers else np.empty(0)

    def _batch(self, samples: Sequence[Ints], client: int) -> Ints:
        return self._context.shuffled(samples[client], client)[: self._engine.work.batch_size]


def _spread(vectors: Tensor) -> Tensor:
    squares = row_sums((vectors - mean_row(vectors)).square())
    return mean_row(squares).sqrt()
