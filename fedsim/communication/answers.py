"""How clients answer a selector's questions: what they compute and send, and what is charged for it."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.communication.context import RoundContext
from fedsim.communication.exchanges import Exchanges
from fedsim.communication.ledger import Clock, Exchange, Ledger, Quantity
from fedsim.communication.lent_params import LentParams
from fedsim.communication.local_results import Lent, LocalResults, local_training
from fedsim.communication.signals import Signal
from fedsim.communication.transfers import Transfers
from fedsim.engine.engine import Engine
from fedsim.system.clock import RoundClock
from fedsim.types import Ids, Params, Population


class Answers:
    """What the questions of `Clients` are made of: reports of numbers, local training, mini-batches, times."""

    def __init__(
        self,
        engine: Engine,
        population: Population,
        context: RoundContext,
        params: Params,
        ledger: Ledger,
        clock: Clock,
        public: Tensor | None = None,
        first_model: Callable[[int], Params] | None = None,
        simulated: RoundClock | None = None,
    ) -> None:
        """`public`: the public samples [M, ...], if there are any. `first_model`: the model from which each client
        trains in place of `params` (it downloads `params` all the same). `simulated`: the simulated clock."""
        self._engine = engine
        self._population = population
        self._context = context
        self._params = params
        self._own = Lent(params)  # which a cohort's `start` is
        self._lent: LentParams | None = None
        self._ledger = ledger
        self._clock = clock
        self._public = public
        self._simulated = simulated
        self._exchanges = Exchanges(ledger, simulated)
        self._losses: dict[int, float] = {}
        self._batch_losses: dict[int, float] = {}
        self._results = LocalResults(local_training(engine, context, params, first_model))
        self._transfers = Transfers(ledger, params, context.compression_seed)

    def _report(self, ids: Ids, quantity: Quantity, samples: Iterable[int]) -> None:
        """One exchange in which each of `ids` passes so many samples through the model and sends one number."""
        with self._exchanges.open() as exchange:
            self._transfers.download(exchange, ids)
            exchange.charge(quantity, ids, samples)
            self._transfers.upload_numbers(exchange, ids, 1)

    def _train(self, ids: Ids, exchange: Exchange) -> None:
        new = self._results.missing(ids)
        self._transfers.download(exchange, new)
        if len(new):
            self._ledger.trained.update(map(int, new))
            with self._clock("train"):
                exchange.charge("train_samples", new, self._results.train(new))

    def _matrices(self, ids: Ids, names: Sequence[str]) -> dict[str, Tensor]:
        """Updates as one matrix [len(ids), d] for each tensor of `names`."""
        delta = self._results.updates(ids).delta
        return {name: delta[name].flatten(1) for name in names}

    def _trained_model(self, client: int) -> Params:
        delta = self._results.updates(np.array([client])).delta
        return {name: value + delta[name][0] for name, value in self._params.items()}

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

    def _report_losses(
        self, ids: Ids, known: dict[int, float], samples: Callable[[int], NDArray[np.int64]]
    ) -> NDArray[np.float64]:
        """Losses [len(ids)] on the `samples` of each client; only those not `known` are asked for, and charged."""
        self._context.require(Signal.LOSSES)
        new = [int(i) for i in ids if int(i) not in known]
        if new:
            positions = [samples(i) for i in new]
            with self._clock("ask"):
                losses = self._engine.losses(self._params, positions)
            self._report(np.array(new, np.int64), "forward_samples", map(len, positions))
            self._ledger.nonfinite_reports += int((~np.isfinite(losses)).sum())
            known.update(zip(new, losses.tolist(), strict=True))
        return np.array([known[int(i)] for i in ids], dtype=np.float64)

    def _batch(self, samples: Sequence[NDArray[np.int64]], client: int) -> NDArray[np.int64]:
        """One mini-batch of a client's `samples`, fresh every round."""
        return self._context.shuffled(samples[client], client)[: self._engine.work.batch_size]

    def _batches(self, client: int) -> list[NDArray[np.int64]]:
        shuffled, size = self._context.shuffled(self._engine.data.train[client], client), self._engine.work.batch_size
        return [shuffled[start : start + size] for start in range(0, len(shuffled), size)]
