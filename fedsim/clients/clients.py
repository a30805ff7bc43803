"""`Clients`: the questions that a selector can ask clients, and what the answers cost.

The round loop (`fedsim.rounds.loop`) makes one `Clients` in each round, and passes it to
`Selector.select`. The selector learns everything about clients from it. After the selection, the
loop calls `receive` for the cohort (the selected clients). `Clients` computes answers with the
engine, and enters their cost in the round's ledger.

Each question is one exchange between the server and some clients. The first contact of a client
with a version of the model charges one download. Each answer charges its upload and the samples
that the client passes through its model.

A client does not send its loss or a tensor of its update twice. The server already has them, once
`losses`, `updates` or `receive` has brought them. A question that needs a signal (a kind of
information, `Signal`) which the selector does not declare raises `UndeclaredSignalError`.

The clients of an exchange work in parallel. On a simulated clock an exchange takes as long as its
slowest client, and the next question follows it. Methods that yield the answers of one client after
another charge all of them when they are called.

Symbols: N clients in the run, C classes, M public samples, D entries of a flat vector, and d
entries of one tensor. A client's update is w_k - w: its trained model minus the server's.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from textwrap import shorten

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.compression import NUMBER, Compressor, Identity
from fedsim.clients.context import QuestionError, RoundContext, Signal
from fedsim.clients.local_results import LocalResults, row_norms
from fedsim.clients.system import Resources
from fedsim.core.arrays import Bools, Floats, Ints
from fedsim.core.errors import FedsimError
from fedsim.core.exact import length, mean_row, row_sums
from fedsim.core.types import (
    Cohort,
    Correction,
    Evaluation,
    Exchange,
    Ids,
    Params,
    copied,
    empty_cohort,
    positions_of,
    sizes_of,
)
from fedsim.engine.engine import Engine

UNCOMPRESSED = Identity()
Amounts = int | Ints
"""An amount for each client of an exchange: one number for all of them, or an array [n]."""


class Clients:
    """The clients of one round, at one version of the model.

    At first the server has contacted no client. A question is for the clients `ids`, which must be
    available, each of them once. Answers are in the order of `ids`.
    """

    def __init__(
        self,
        engine: Engine,
        context: RoundContext,
        params: Params,
        first_model: Callable[[int], Params] | None = None,
    ) -> None:
        """`params` is the server's model, which clients download.

        `first_model` returns the model from which a client trains in place of `params`; None: all
        train from `params`.
        """
        self.available = context.available
        """Clients that can be reached in this round and have data, ascending."""
        self.in_first_round = context.is_first
        """True if no client could be reached in an earlier round, as in round 1."""
        self.lr = context.lr
        """The local learning rate of this round, which the server sets."""
        self._engine = engine
        self._context = context
        self._params = params
        self._first_model = first_model
        self._ledger = context.ledger
        self._timer = context.timer
        num_clients = len(engine.data.train)
        self._is_available = np.zeros(num_clients, bool)
        self._is_available[context.available] = True
        self._results = LocalResults(num_clients)
        """The updates of the clients that have trained on this model."""
        self._losses: dict[int, float] = {}
        """The losses that the server has, by client."""
        self._batch_losses: dict[int, float] = {}
        """The losses on a mini-batch that the server has, by client."""
        self._bytes = {name: t.numel() * t.element_size() for name, t in params.items()}
        """The size of each tensor of the model, and so of each tensor of an update."""
        self._model_bytes = sum(self._bytes.values())
        self._has_model = np.zeros(num_clients, bool)
        """Clients that have downloaded this model [N]."""
        self._is_collected = np.zeros(num_clients, bool)
        """Clients whose whole update `receive` has brought [N]."""
        self._owes_extra_download = np.zeros(num_clients, bool)
        """Clients that have trained, and are not charged yet for what the local algorithm sends to
        them before training [N]."""
        self._has_sent = defaultdict[str, Bools](lambda: np.zeros(num_clients, bool))
        """Clients whose update the server has [N], by tensor of the update."""

    @cached_property
    def params(self) -> Params:
        """A copy of this version of the model."""
        return copied(self._params)

    @cached_property
    def _trained_bytes(self) -> int:
        """The bytes of the P trained parameters, the unit of what local algorithms send in
        addition."""
        return sum(self._bytes[name] for name in self._engine.trained)

    def broadcast(self, params: Params) -> "Clients":
        """Return the same clients at another model `params` in the same round (a virtual round).

        All costs go to the same ledger. No client has this model yet, or has trained on it.
        """
        return Clients(self._engine, self._context, params)

    def losses(self, ids: Ids) -> Floats:
        """Return the mean cross-entropy of the current model on all evaluation samples of each
        client [len(ids)].

        These are its training samples, or its held-out samples if the run evaluates on these.
        """
        evaluated = self._engine.data.evaluate
        return self._report_losses(ids, self._losses, lambda new: positions_of(evaluated, new))

    def batch_losses(self, ids: Ids) -> Floats:
        """Return the mean cross-entropy of the current model on one random mini-batch of each
        client's evaluation samples [len(ids)].

        The batch has the local batch size and is drawn anew in every round.
        """
        evaluated = self._engine.data.evaluate
        return self._report_losses(
            ids, self._batch_losses, lambda new: [self._batch(evaluated, i) for i in new]
        )

    def accuracies(self, ids: Ids) -> Floats:
        """Return the share of each client's evaluation samples that the current model classifies
        correctly [len(ids)]; nan for a client without such samples."""
        self._context.require(Signal.ACCURACIES)
        ids = self._checked(ids)
        positions = positions_of(self._engine.data.evaluate, ids)
        with self._timer("ask"):
            accuracies = self._engine.accuracies(self._params, positions)
        self._exchange(ids, forward=positions.sizes, up=NUMBER)
        return accuracies

    def label_counts(self, ids: Ids) -> Ints:
        """Return the number of training samples of each client in each class [len(ids), C].

        Each client sends C numbers and needs no model.
        """
        self._context.require(Signal.LABEL_COUNTS)
        ids = self._checked(ids)
        data = self._engine.data
        counts = np.zeros((len(ids), data.num_classes), np.int64)
        labels = data.y.cpu().numpy()  # one copy from a GPU
        with self._timer("ask"):
            for row, i in enumerate(ids):
                counts[row] = np.bincount(labels[data.train[i]], minlength=data.num_classes)
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
        """Yield the gradient of each client's mean training loss, flat [D], client after client.

        The model is the current one, in eval mode. With `batch`, the gradient is that of one random
        mini-batch in place of all training samples. With `layers`, it has only the parameters whose
        names begin with one of these. Each client is charged for one training pass, and for the
        upload of D numbers, or of what the `compressor` makes of them.
        """
        self._context.require(Signal.GRADIENTS)
        ids = self._checked(ids)
        train = self._engine.data.train
        positions = [self._batch(train, i) if batch else train[i] for i in ids]
        names = self.layer_names(layers)
        gradients = self._gradients(self._params, ids, positions, names)
        num_bytes = compressor.num_bytes(self._num_entries(names))
        self._exchange(ids, train=sizes_of(positions), up=num_bytes)
        seed = self._context.compression_seed
        return self._timed(compressor.compress(gradient, seed) for gradient in gradients)

    def gradient_norms(self, ids: Ids) -> Floats:
        """Return the Euclidean norm of each client's full gradient [len(ids)].

        Each client makes one training pass and sends one number.
        """
        self._context.require(Signal.GRADIENTS)
        ids = self._checked(ids)
        positions = self._train_positions(ids)
        gradients = self._gradients(self._params, ids, positions)
        norms = self._numbers(length(gradient) for gradient in gradients)
        self._exchange(ids, train=sizes_of(positions), up=NUMBER)
        return norms

    def gradient_spreads(self, ids: Ids) -> Floats:
        """Return how much each client's mini-batch gradients differ [len(ids)]: the root of their
        mean squared distance from their mean.

        Each client makes one pass over its data, shuffled anew in every round, and sends one
        number.
        """
        self._context.require(Signal.GRADIENTS)
        ids = self._checked(ids)
        train = self._engine.data.train
        shuffled = [self._context.shuffled(train[i], i) for i in ids]
        spreads = self._numbers(self._gradient_spread(positions) for positions in shuffled)
        self._exchange(ids, train=sizes_of(shuffled), up=NUMBER)
        return spreads

    def train(self, ids: Ids) -> None:
        """Train the clients of `ids` that have not trained on this model yet. Nothing is uploaded.

        On a simulated clock the server does not wait for this training, but it delays the client's
        next answer.
        """
        self._context.require(Signal.TRAINING)
        ids = self._checked(ids)
        self._exchange(ids, train=self._train(ids), up=None)

    def update_norms(self, ids: Ids, *, only_sum: bool = False) -> Floats:
        """Return the Euclidean norm of each client's update, after training [len(ids)]. Each client
        sends one number.

        With `only_sum`, `Signal.UPDATES` need not be declared. The method must then be one in which
        the server uses the sum only, and each client its own norm.
        """
        self._context.require(Signal.TRAINING)
        if not only_sum:
            self._context.require(Signal.UPDATES)
        ids = self._checked(ids)
        self._exchange(ids, train=self._train(ids), up=NUMBER)
        with self._timer("ask"):
            return row_norms(self._matrices(ids, self._engine.trained))

    def updates(
        self,
        ids: Ids,
        *,
        layers: Sequence[str] | None = None,
        compressor: Compressor = UNCOMPRESSED,
    ) -> dict[str, Tensor]:
        """Return each client's w_k - w after training, as a matrix [len(ids), d] for each tensor of
        the `layers` (None: all).

        Clients are charged for the upload of tensors that the server does not have yet. With a
        `compressor` the result is one matrix "sketch" of compressed updates. The server then has no
        tensor of these updates, so collecting one later sends all of it.
        """
        self._context.require(Signal.TRAINING, Signal.UPDATES)
        ids = self._checked(ids)
        names = self.layer_names(layers)
        samples = self._train(ids)
        matrices = self._matrices(ids, names)
        if isinstance(compressor, Identity):
            self._exchange(ids, train=samples, up=self._tensors_to_send(ids, names))
            return self._context.lent(matrices)
        num_bytes = compressor.num_bytes(self._num_entries(names))
        self._exchange(ids, train=samples, up=num_bytes)
        seed = self._context.compression_seed
        sketches = []
        with self._timer("ask"):
            for row in range(len(ids)):
                vector = torch.cat([matrix[row] for matrix in matrices.values()])
                sketches.append(compressor.compress(vector, seed))
            if sketches:
                return {"sketch": torch.stack(sketches)}
            zeros = torch.cat([matrix.new_zeros(matrix.shape[1]) for matrix in matrices.values()])
            return {"sketch": compressor.compress(zeros, seed).unsqueeze(0)[:0]}

    def gradients_after_training(self, ids: Ids) -> Iterator[Tensor]:
        """Yield the gradient of each client's mean training loss at the model that it has trained,
        flat [D].

        Each client makes one more training pass and sends D numbers.
        """
        self._context.require(Signal.GRADIENTS, Signal.TRAINING)
        ids = self._checked(ids)
        positions = self._train_positions(ids)
        samples = self._train(ids) + sizes_of(positions)
        num_entries = self._num_entries(self._engine.trained)
        self._exchange(ids, train=samples, up=NUMBER * num_entries)
        # one call for each client, because each has another model
        return self._timed(
            next(self._gradients(self._trained_model(client), [client], [rows]))
            for client, rows in zip(ids, positions, strict=True)
        )

    def public_labels(self, ids: Ids) -> Iterator[Tensor]:
        """Yield log-probabilities of each client's trained model on the M public samples, float64
        [M, C], client after client.

        All clients have the public samples. Each passes M samples forward and sends M x C numbers.
        """
        self._context.require(Signal.PUBLIC, Signal.TRAINING)
        ids = self._checked(ids)
        public = self._context.public
        if public is None:
            raise FedsimError("this selector needs public samples: set server.public_samples")
        num_entries = len(public) * self._engine.data.num_classes
        self._exchange(ids, train=self._train(ids), forward=len(public), up=NUMBER * num_entries)
        return self._timed(self._engine.predict(self._trained_model(i), public) for i in ids)

    def momentum_buffers(self, ids: Ids) -> dict[str, Tensor]:
        """Return each client's momentum buffer at the end of its training [len(ids), ...] for each
        parameter. Each client sends P numbers."""
        self._context.require(Signal.TRAINING, Signal.UPDATES)
        ids = self._checked(ids)
        samples = self._train(ids)
        if not len(ids):
            return {name: self._params[name].unsqueeze(0)[:0] for name in self._engine.trained}
        buffers = self._results.of(ids).momentum
        if buffers is None:
            raise FedsimError(
                "this selector needs momentum buffers: "
                "set optimizer=sgd optimizer.momentum=0.9, for example"
            )
        self._exchange(ids, train=samples, up=NUMBER * self._num_entries(buffers))
        return self._context.lent(buffers)

    def resources(self, ids: Ids) -> Resources:
        """Return the time that each client would take to download the model, to train and to upload
        its update [len(ids)].

        This is FedCS's resource request: each client sends three numbers and needs no model.
        """
        self._context.require(Signal.RESOURCES)
        ids = self._checked(ids)
        clock = self._context.require_round_clock()
        self._exchange(ids, model=False, up=3 * NUMBER)
        algorithm = self._context.local_algorithm
        sizes = sizes_of(self._train_positions(ids))
        num_samples = [self._engine.work.num_samples(size) for size in sizes.tolist()]
        return clock.resources(
            ids,
            np.array(num_samples, np.int64) + algorithm.extra_passes * sizes,
            bytes_down=self._model_bytes + algorithm.extra_down * self._trained_bytes,
            bytes_up=self._model_bytes + algorithm.extra_up * self._trained_bytes,
        )

    def response_times(self, ids: Ids) -> Floats:
        """Return the seconds from the request until each client has trained and reported this
        [len(ids)].

        Each client sends one number, and its model stays with it. A client that has trained already
        only answers.
        """
        self._context.require(Signal.RESPONSE_TIMES)
        self._context.require_round_clock()
        ids = self._checked(ids)
        seconds = self._exchange(ids, train=self._train(ids), up=NUMBER)
        assert seconds is not None
        return seconds

    def send_numbers(self, ids: Ids, count: int) -> None:
        """Charge each of `ids` for `count` numbers, of which the server uses only the sum."""
        ids = self._checked(ids)
        self._exchange(ids, model=False, up=NUMBER * count)

    def collect(self, ids: Ids) -> Cohort:
        """Return the whole updates of `ids`, after training those that have not trained on this
        model yet.

        All of them count as uploaded in the ledger. Tensors that `updates` has brought, and clients
        that were collected before, cost nothing.
        """
        self._context.require(Signal.UPDATES)
        cohort = self.receive(ids).with_own_arrays()
        start = self._context.lent(cohort.start)
        return replace(cohort, start=start, delta=self._context.lent(cohort.delta))

    def receive(self, ids: Ids) -> Cohort:
        """Return the same as `collect`, with arrays and tensors that fedsim itself uses, too.

        The round loop calls this for the cohort, whatever the selector declares.
        """
        ids = self._checked(ids)
        if not len(ids):
            return empty_cohort(self._params, self._engine.trained)
        samples = self._train(ids)
        num_losses = len({Signal.TRAINING_LOSS, Signal.SQUARED_LOSS} & self._context.needs)
        extra_up = self._context.local_algorithm.extra_up * self._trained_bytes
        bytes_up = self._tensors_to_send(ids, self._bytes)
        # losses, and what the local algorithm adds, are sent with the first upload only
        bytes_up += (NUMBER * num_losses + extra_up) * ~self._is_collected[ids]
        self._is_collected[ids] = True
        self._ledger.uploaded.update(ids.tolist())
        seconds = self._exchange(ids, train=samples, up=bytes_up)
        cohort = self._results.of(ids)
        return replace(cohort, ids=ids, durations=seconds, samples=None, momentum=None)

    def server_has(self, ids: Ids) -> Bools:
        """Return whose whole update the server has already [len(ids)]."""
        has_all = np.ones(len(ids), bool)
        for name in self._bytes:
            has_all &= self._has_sent[name][ids]
        return has_all

    def validate(self, params: Params) -> Evaluation:
        """Return accuracy and loss of `params` on the server's validation split. No client is
        contacted."""
        return self._context.validate(self._engine, params)

    def layer_names(self, layers: Sequence[str] | None) -> list[str]:
        """Return the trained parameters whose names begin with one of `layers` (None: all), in the
        model's order."""
        if layers is None:
            return self._engine.trained
        prefixes = tuple(f"{layer}." for layer in layers)
        names = [n for n in self._engine.trained if n in layers or n.startswith(prefixes)]
        if not names:
            raise FedsimError(
                f"selector.layers={layers}: the model has no such layer, but {self._engine.trained}"
            )
        return names

    def _checked(self, ids: Ids) -> Ids:
        """Return the ids of a question as int64. Raises `QuestionError` unless they are a
        one-dimensional array of different clients that are available, and the round is not over."""
        self._context.require()
        ids = np.asarray(ids)
        if not ids.size:
            return np.empty(0, np.int64)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise QuestionError(
                "a question needs a one-dimensional array of client ids, not an array of "
                f"{ids.dtype} with shape {list(ids.shape)}; np.flatnonzero(mask) makes ids from a "
                "mask"
            )
        ids = ids.astype(np.int64, copy=False)
        in_range = (ids >= 0) & (ids < len(self._is_available))
        if not in_range.all() or not self._is_available[ids].all():
            unavailable = np.setdiff1d(ids, np.flatnonzero(self._is_available))
            raise QuestionError(
                f"a question is for clients that are not available this round: "
                f"{shorten(str(unavailable.tolist()), 60)}; ask `clients.available` or some of them"
            )
        is_asked = np.zeros(len(self._is_available), bool)
        is_asked[ids] = True
        if is_asked.sum() < len(ids):
            raise QuestionError(
                "a question names a client twice; np.unique(ids) has each client once"
            )
        return ids

    def _exchange(
        self,
        ids: Ids,
        *,
        up: Amounts | None,
        model: bool = True,
        forward: Amounts = 0,
        train: Amounts = 0,
    ) -> Floats | None:
        """Charge one request to `ids` and their answers.

        Call it after `_train`. With `model`, clients that lack the model download it. Clients that
        `_train` has just trained also download what the local algorithm needs. `forward` and
        `train` are numbers of samples, and `up` is bytes. If `up` is None, clients send nothing,
        and the server does not wait for them.

        Returns the seconds [n] of each client on the simulated clock, 0 if it had nothing to do;
        None without a simulated clock.
        """
        # 1. The clients that receive the model, and the bytes that they download
        is_new = ~self._has_model[ids] & model
        self._has_model[ids[is_new]] = True
        self._ledger.contacted.update(ids[is_new].tolist())
        extra_down = self._context.local_algorithm.extra_down * self._trained_bytes
        bytes_down = self._model_bytes * is_new + extra_down * self._owes_extra_download[ids]
        self._owes_extra_download[ids] = False

        # 2. The ledger. Free-riders are simulated as if they trained, but are not charged for it.
        num = len(ids)
        train_samples = train * self._context.behaviour.works(ids)
        bytes_up = np.full(num, 0 if up is None else up)
        exchange = Exchange(ids, bytes_down, np.full(num, forward), train_samples, bytes_up)
        self._ledger.charge_exchange(exchange)

        # 3. The simulated clock, for clients that have something to do
        clock = self._context.round_clock
        if clock is None:
            return None
        seconds = np.zeros(num)
        is_busy = exchange.has_work
        seconds[is_busy] = clock.spend(exchange.of_clients(is_busy), answered=up is not None)
        return seconds

    def _tensors_to_send(self, ids: Ids, names: Iterable[str]) -> Ints:
        """Return the bytes [n] of the tensors `names` of each client's update that the server does
        not have yet, and note that it has them."""
        num_bytes = np.zeros(len(ids), np.int64)
        for name in names:
            num_bytes += self._bytes[name] * ~self._has_sent[name][ids]
            self._has_sent[name][ids] = True
        return num_bytes

    def _report_losses(
        self,
        ids: Ids,
        reported: dict[int, float],
        samples_of: Callable[[Ids], Sequence[Ints]],
    ) -> Floats:
        """Return losses [len(ids)] of the current model on the samples of each client.

        `samples_of` returns the positions of the samples of some clients. `reported` holds the
        losses that the server has, by client. Only other clients are asked and charged, and their
        losses are added to it.
        """
        self._context.require(Signal.LOSSES)
        ids = self._checked(ids)
        new = np.array([i for i in ids if int(i) not in reported], np.int64)
        if len(new):
            positions = samples_of(new)
            with self._timer("ask"):
                losses = self._engine.losses(self._params, positions)
            self._exchange(new, forward=sizes_of(positions), up=NUMBER)
            self._ledger.nonfinite_reports += int((~np.isfinite(losses)).sum())
            reported.update(zip(new.tolist(), losses.tolist(), strict=True))
        return np.array([reported[int(i)] for i in ids], dtype=np.float64)

    def _train(self, ids: Ids) -> Ints:
        """Train the clients of `ids` that have not trained on this model yet.

        Returns the samples [n] that each passes forward and backward, 0 if it has trained before.
        The caller charges them by `_exchange`.
        """
        context = self._context
        samples = np.zeros(len(ids), np.int64)
        is_new = ~self._results.has_trained(ids)
        if not is_new.any():
            return samples
        new = ids[is_new]
        self._ledger.trained.update(new[context.behaviour.works(new)].tolist())
        with self._timer("train"):
            start = None
            if self._first_model is not None:
                start = [self._first_model(int(i)) for i in new]
            trained_params = {name: self._params[name] for name in self._engine.trained}
            correction = context.local_algorithm.correction(new, trained_params)
            _check_correction(context.local_algorithm, correction)
            cohort = self._engine.train(
                self._params, new, context.round, context.lr, start, correction
            )
        assert cohort.samples is not None
        samples[is_new] = cohort.samples + context.local_algorithm.extra_passes * cohort.sizes
        self._owes_extra_download[new] = True
        self._results.add(context.behaviour.sent(cohort, context.round))
        return samples

    def _gradients(
        self,
        params: Params,
        ids: Iterable[int],
        positions: Sequence[Ints],
        names: Sequence[str] | None = None,
    ) -> Iterator[Tensor]:
        """Yield what each client sends as its gradient at `params`, flat [D].

        Honest clients send the gradient on the samples at `positions`; see `ClientBehaviour`.
        `names` are the parameters; None: all that are trained.
        """
        gradients = self._engine.client_gradients(params, positions, names)
        for client, gradient in zip(ids, gradients, strict=True):
            yield self._context.behaviour.sent_gradient(gradient, self._context.round, int(client))

    def _gradient_spread(self, positions: Ints) -> Tensor:
        """Return the value of `gradient_spreads` for a client with samples at `positions`."""
        size = self._engine.work.batch_size
        batches = [positions[start : start + size] for start in range(0, len(positions), size)]
        gradients = torch.stack(list(self._engine.client_gradients(self._params, batches))).double()
        squares = row_sums((gradients - mean_row(gradients)).square())
        return mean_row(squares).sqrt()

    def _matrices(self, ids: Ids, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors `names` of the updates of `ids`, each as a matrix [len(ids), d]."""
        if not len(ids):
            return {name: self._params[name].reshape(1, -1)[:0] for name in names}
        delta = self._results.of(ids).delta
        return {name: delta[name].flatten(1) for name in names}

    def _trained_model(self, client: int) -> Params:
        """Return the model w_k that the client sends: w plus its update."""
        delta = self._results.of(np.array([client])).delta
        return {name: value + delta[name][0] for name, value in self._params.items()}

    def _num_entries(self, names: Iterable[str]) -> int:
        """Return the number of entries of the parameters `names` together."""
        return sum(self._params[name].numel() for name in names)

    def _train_positions(self, ids: Ids) -> list[Ints]:
        """Return the positions of each client's training samples."""
        return [self._engine.data.train[i] for i in ids]

    def _batch(self, samples: Sequence[Ints], client: int) -> Ints:
        """Return this round's random mini-batch of `samples[client]`."""
        return self._context.shuffled(samples[client], client)[: self._engine.work.batch_size]

    def _timed(self, answers: Iterator[Tensor]) -> Iterator[Tensor]:
        """Yield `answers`. The time to compute each counts for the phase `ask`.

        The time that the caller spends between two answers does not.
        """
        while True:
            with self._timer("ask"):
                answer = next(answers, None)
            if answer is None:
                return
            yield answer

    def _numbers(self, answers: Iterator[Tensor]) -> Floats:
        """Return `answers` of one number each as an array [n], in one copy from a GPU."""
        with self._timer("ask"):
            numbers = list(answers)
            return np.array(torch.stack(numbers).tolist()) if numbers else np.empty(0)


def _check_correction(algorithm: object, correction: object) -> None:
    """Raise `FedsimError` unless a local algorithm has returned a `Correction` or None."""
    if not isinstance(correction, Correction | None):
        raise FedsimError(
            f"{type(algorithm).__name__} must return a Correction or None from `correction`, not "
            f"{type(correction).__name__}"
        )
