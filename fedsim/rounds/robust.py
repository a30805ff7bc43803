"""Aggregators that bound what one client's update can do to the model, against hostile clients and
for privacy.

fedsim calls the methods of an aggregator in this order:

1. `problems`, when the aggregator is constructed. `unfit_for`, when the config is validated: it
   gets the selector and the number of updates in a round if all selected clients answer.
2. `begin` and then `account`, once before the first round. Then fedsim prints `warning`.
3. `begin_round` and then `aggregate`, in each round in which an update arrives. A private
   aggregator (`is_private`) is also called if no update arrives, unless no client is available.
   Only a private aggregator can get a cohort without clients.

Let K be the number of clients whose updates arrive, P the number of trained parameters, w the
global model and w_k the model of client k after training. `aggregate` gets:

- `params`: w. `cohort.start` has the same values.
- `cohort.delta`: w_k - w by name, for all tensors [K, ...]. It includes running statistics of
  BatchNorm, which are not trained (`buffers`).
- `cohort.updates`: the trained tensors of `cohort.delta` as one matrix [K, P].
- `weights`: the selector's weights [K], or None if the aggregator shall use its own.

Before `aggregate`, fedsim removes updates with nan or infinity. Distances between updates are
computed over trained tensors alone. Running statistics are trimmed or clipped in the same way by
themselves, or averaged with the same weights.
"""

from importlib.util import find_spec
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge, Interval, Le
from torch import Tensor

from fedsim.clients.context import RoundContext
from fedsim.clients.local_algorithms import LocalAlgorithm
from fedsim.clients.system import SimulatedClock
from fedsim.core.arrays import Floats
from fedsim.core.errors import check, rule
from fedsim.core.exact import mean_row, normal, row_sums, weighted_sum
from fedsim.core.flat import add_models, flat_rows, split_flat, to_device, weighted_sums
from fedsim.core.parameters import Count, CountOrZero, Positive, Problems, parameters
from fedsim.core.rng import Purpose
from fedsim.core.rounding import floor
from fedsim.core.types import Cohort, Ids, Params, Stack, Weights
from fedsim.rounds.aggregators import Aggregator, Weighting
from fedsim.rounds.availability import Availability
from fedsim.rounds.privacy import Accountant, why_no_epsilon
from fedsim.selectors.base import Sampling, Selector


@parameters
class Unweighted(Aggregator):
    """An aggregator for which every update counts once. It ignores the selector's weights, which
    would give some clients more influence."""

    weighting: ClassVar[Weighting] = "uniform"  # type: ignore[misc]
    ignores_weights: ClassVar[bool] = True


@parameters
class TrimmedMean(Unweighted):
    """The mean of each coordinate without its largest and smallest values (Yin et al.,
    "Byzantine-Robust Distributed Learning", 2018, definitions 1 and 2).

    Each coordinate has K values, one of each client. floor(share K) of them are dropped at each
    end, but the middle one or two always remain. share = 0.5 gives the median, and share = 0 the
    mean.
    """

    share: Annotated[float, Interval(ge=0, le=0.5)]

    def unfit_for(self, selector: Selector, num_updates: int) -> Problems:
        """Reject a share > 0 that drops no value. Of fewer than 3 updates, no share drops any."""
        if self.share > 0 and num_updates >= 3:
            text = (
                f"must be at least 1 / {num_updates}, or it trims none of a round's {num_updates} "
                "updates (cohort_size)"
            )
            yield rule(floor(self.share * num_updates) >= 1, "share", self.share, text)

    def aggregate(self, params: Params, cohort: Cohort, weights: Weights) -> Params:
        num_clients = len(cohort.ids)
        num_dropped = min(floor(self.share * num_clients), (num_clients - 1) // 2)  # at each end
        means = {}
        for name, delta in cohort.delta.items():
            ascending = delta.sort(0).values
            means[name] = mean_row(ascending[num_dropped : num_clients - num_dropped])
        return add_models(params, means)


@parameters
class Krum(Unweighted):
    """The mean of the `m` updates that are closest to their neighbours (Blanchard et al., "Machine
    Learning with Adversaries", 2017, section 4).

    The score of an update is the sum of its squared distances to its K - f - 2 nearest others, with
    K the number of updates that arrive. The `m` updates of lowest score are averaged: m = 1 is
    Krum, m > 1 is Multi-Krum. m None means K - f - 2, as in AggregaThor (Damaskinos et al., 2019).
    Ties go to the lower client id.

    `f` hostile clients are expected among K >= 2 f + 3. If fewer updates arrive, f is the largest
    number that fits, (K - 3) / 2 rounded down, or 0. If fewer than m arrive, all are averaged.
    """

    f: CountOrZero
    m: Count | None

    def unfit_for(self, selector: Selector, num_updates: int) -> Problems:
        required = 2 * self.f + 3
        text = (
            f"needs 2 f + 3 = {required} updates a round, and there are {num_updates} (cohort_size)"
        )
        remedy = f"set cohort_size={required} or more"
        if num_updates >= 3:
            remedy += f", or aggregator.f={(num_updates - 3) // 2}"
        yield rule(num_updates >= required, "f", self.f, text, remedy)
        text = f"must be at most {num_updates}, the updates of a round (cohort_size)"
        yield rule(self.m is None or self.m <= num_updates, "m", self.m, text)

    def aggregate(self, params: Params, cohort: Cohort, weights: Weights) -> Params:
        num_clients = len(cohort.ids)

        # 1. The number of near updates, by the f that fits K. It is 0 for one or two updates.
        largest_f = max((num_clients - 3) // 2, 0)
        effective_f = min(self.f, largest_f)
        num_near = max(num_clients - effective_f - 2, 0)

        # 2. Squared distances of all pairs [K, K], by differences: inner products would cancel
        updates = cohort.updates
        squares = np.zeros((num_clients, num_clients))
        for i in range(num_clients - 1):
            squares[i, i + 1 :] = _norms(updates[i + 1 :] - updates[i]) ** 2
        squares += squares.T

        # 3. Scores [K]. The first column is the distance of an update to itself, which is 0.
        ascending = np.sort(squares, axis=1)
        scores = ascending[:, 1 : num_near + 1].sum(axis=1)

        # 4. The mean of the updates of lowest score. A stable sort gives ties to the lower id.
        num_averaged = max(num_near, 1) if self.m is None else self.m
        averaged = np.argsort(scores, kind="stable")[:num_averaged]
        mean_weights = np.isin(np.arange(num_clients), averaged) / len(averaged)
        return add_models(params, weighted_sums(cohort.delta, mean_weights, params))


def _norms(rows: Tensor) -> Floats:
    """Return the Euclidean norm [K] of each row of `rows` [K, D]."""
    return np.sqrt(row_sums(rows.double().square()).cpu().numpy())


@parameters
class GeometricMedian(Aggregator):
    """RFA: the geometric median of the updates by smoothed Weiszfeld steps (Pillutla et al.,
    "Robust Aggregation for Federated Learning", 2022, Algorithm 2).

    The geometric median v has the smallest weighted sum of distances to the updates d_k of the K
    clients. It begins at their mean, sum_k a_k d_k. The a_k are the weights of the selector or the
    aggregator, divided by their sum. Each iteration is v <- sum_k b_k d_k / sum_k b_k with
    b_k = a_k / max(smoothing, |v - d_k|). `smoothing` keeps b_k finite where v meets an update.
    """

    iterations: Annotated[int, Ge(1), Le(1000)]
    """The paper uses 3. Each iteration reads all updates, and more than 1,000 would only cost."""
    smoothing: Positive

    def aggregate(self, params: Params, cohort: Cohort, weights: Weights) -> Params:
        if weights is None:
            weights = self.weights(cohort)
        updates = cohort.updates  # the d_k
        mean_weights = self.averaging_weights(cohort, weights)  # the a_k
        step_weights = mean_weights  # the b_k, divided by their sum
        for _ in range(self.iterations):
            row = to_device(torch.as_tensor(step_weights, dtype=updates.dtype), updates.device)
            median = weighted_sum(updates, row)  # v
            distances = _norms(updates - median)
            step_weights = mean_weights / np.maximum(distances, self.smoothing)
            step_weights = step_weights / step_weights.sum()
        return add_models(params, weighted_sums(cohort.delta, step_weights, params))


@parameters
class NormClipping(Aggregator):
    """The weighted sum of updates that are scaled down to a length of at most `norm` (Sun et al.,
    "Can You Really Backdoor Federated Learning?", 2019, section 4).

    It is a mean if the weights [K] of the K clients sum to one. A selector's weights need not: the
    sum of updates by importance weights is right on average. Running statistics are clipped in the
    same way, by themselves. Their weights are divided by their sum. Otherwise the result could lie
    beyond all clients' statistics, and a variance below zero.
    """

    norm: Positive

    def aggregate(self, params: Params, cohort: Cohort, weights: Weights) -> Params:
        if weights is None:
            weights = self.weights(cohort)
        trained, buffers = self.parts(cohort)
        changes = _clipped_sum(trained, weights, self.norm, params)
        mean_weights = self.averaging_weights(cohort, weights)
        changes |= _clipped_sum(buffers, mean_weights, self.norm, params)
        return add_models(params, changes)


def _clipped_sum(deltas: Stack, weights: Floats, norm: float, like: Params) -> Params:
    """Return sum_k weights_k min(1, norm / |d_k|) d_k, with tensors like those of `like`.

    d_k is the k-th row of all tensors of `deltas` together. The result is empty if `deltas` is.
    """
    if not deltas:
        return {}
    factors = norm / np.maximum(_norms(flat_rows(deltas)), norm)  # min(1, norm / |d_k|)
    return weighted_sums(deltas, weights * factors, like)


MIN_DELTA = 1e-14
"""Smallest privacy delta of `dp_fedavg` for each round. dp-accounting cuts a probability of 1e-15
off the privacy loss when it adds a round, and epsilon is infinite if they add up to delta."""


@parameters
class DPFedAvg(Unweighted):
    """DP-FedAvg: federated averaging that is private client by client (McMahan et al., "Learning
    Differentially Private Recurrent Language Models", 2018, Algorithm 1 with flat clipping and a
    fixed denominator).

    w <- w + (sum_k min(1, clip / |d_k|) d_k + N(0, (noise_multiplier clip)^2)) / denominator, with
    d_k the updates of the K clients that answer. The denominator None is the number of clients that
    are selected on average. All clients count the same. A round in which no update arrives adds the
    noise and counts as any other. A round in which no client is available changes and costs
    nothing.

    The models are (epsilon, delta)-private if `why_no_epsilon` finds no reason against it. `delta`
    is the privacy delta; in `cohort.delta` the word means updates. Epsilon depends on how the
    selector draws clients (`Selector.sampling`; docs/privacy.md says what it promises):

    - The sampling rate of a round is the chance of an available client to be drawn. The lower it
      is, the less a round costs. If a fixed number of clients is drawn, it is the number of
      selected clients divided by the number of available ones. Otherwise it is the expected number
      of clients divided by N, the number of all clients.
    - The sensitivity is the distance by which one client can move the sum of clipped updates. One
      more client moves it by `clip`. If a fixed number of clients is drawn, one client takes the
      place of another, which moves the sum by 2 `clip`. `Accountant` then counts with half the
      noise multiplier, and with losses in both directions (Zhu et al. 2022, theorem 11).
    """

    clip: Positive
    noise_multiplier: Annotated[float, Ge(0.01)]
    """Deviation of the noise on the sum, divided by `clip`. Below 0.01, epsilon would be above
    100,000 and mean nothing."""
    delta: Positive
    """The privacy delta, below 1 / N, and at least MIN_DELTA for each round."""
    denominator: Count | None

    is_private = True
    state = ("rates",)

    def __post_init__(self) -> None:
        self.rates: list[float] = []
        """Sampling rates of the rounds so far."""

    def problems(self) -> Problems:
        """Reject an environment without the optional package that computes epsilon."""
        text = "needs the package dp-accounting, which computes epsilon"
        remedy = "pip install 'fedsim-selection[privacy]' (in a checkout, uv sync)"
        yield rule(find_spec("dp_accounting") is not None, "", ..., text, remedy)

    def unfit_for(self, selector: Selector, num_updates: int) -> Problems:
        """Reject a delta that is too large or too small, and an unknown expected number without
        denominator."""
        num_clients = selector.population.num_clients
        text = (
            f"must be below 1 / num_clients = {1 / num_clients:.4g}, or all data of one client "
            "could be disclosed"
        )
        yield rule(self.delta < 1 / num_clients, "delta", self.delta, text)
        num_rounds = selector.population.num_rounds
        smallest = MIN_DELTA * num_rounds
        text = (
            f"must be at least {smallest:.4g}, {MIN_DELTA:g} for each of {num_rounds} rounds "
            "(num_rounds), or no epsilon can be computed"
        )
        yield rule(self.delta >= smallest, "delta", self.delta, text)
        # an adaptive selector decides itself how many clients take part; `sampling` says how many
        # it draws on average
        has_expected_number = not selector.adaptive or selector.sampling is not None
        has_denominator = self.denominator is not None
        text = (
            f"must be given for {type(selector).__name__}, which decides how many clients take part"
        )
        remedy = f"set it, for example to {num_clients} if all take part"
        yield rule(has_expected_number or has_denominator, "denominator", None, text, remedy)

    def begin(self, selector: Selector, params: Params) -> None:
        """Reject a model with running statistics. `aggregate` relies on it: it adds noise to
        all."""
        text = (
            f"adds noise to running statistics such as {min(self.buffers, default='')}: variances "
            "may fall below 0"
        )
        remedy = "take a model without batch norm"
        check(rule(not self.buffers, "aggregator", type(self).__name__, text, remedy))

    def account(
        self,
        selector: Selector,
        algorithm: LocalAlgorithm,
        clock: SimulatedClock | None,
        availability: Availability,
    ) -> None:
        """Store what epsilon depends on: how the selector draws, and what it releases."""
        population = selector.population
        self._sampling = selector.sampling
        self._expected_number = population.cohort_size
        if self._sampling is Sampling.ALL:
            self._expected_number = population.num_clients
        self._expected_rate = self._expected_number / population.num_clients
        if clock is not None and clock.system.over_selection > 1:
            self._expected_number = min(self._expected_number, clock.num_counted)
        self._accountant = Accountant(self._sampling, self.noise_multiplier)
        self._why_no_epsilon = why_no_epsilon(selector, algorithm, clock, availability)

    @property
    def warning(self) -> str:
        """A line that always says what epsilon protects, or why there is none."""
        if self._why_no_epsilon is not None:
            return f"no epsilon is recorded: {self._why_no_epsilon} (docs/privacy.md)"
        difference = "adding or removing one client"
        if self._sampling is Sampling.FIXED_SIZE:
            difference = "exchanging one client for another"
        observer = "an observer who sees only the models"
        return f"epsilon is that of {difference}, for {observer} (docs/privacy.md)"

    def begin_round(self, context: RoundContext, selected: Ids) -> None:
        """Store the sampling rate of the round, and the random stream of its noise."""
        self._rate = self._expected_rate
        if self._sampling is Sampling.FIXED_SIZE:
            self._rate = len(selected) / len(context.available)
        self._rng = context.streams.generator(Purpose.PRIVACY, context.round)

    def aggregate(self, params: Params, cohort: Cohort, weights: Weights) -> Params:
        self.rates.append(self._rate)
        divisor = self._expected_number if self.denominator is None else self.denominator

        # 1. Add the sum of clipped updates, divided by a fixed number
        num_clients = len(cohort.ids)
        if num_clients > 0:
            equal_weights = np.full(num_clients, 1 / divisor)
            changes = _clipped_sum(cohort.delta, equal_weights, self.clip, params)
            params = add_models(params, changes)

        # 2. Add noise to all parameters. A model's tensors have one type, and are on one device.
        tensors = list(params.values())
        deviation = self.noise_multiplier * self.clip / divisor
        noise = normal(self._rng, sum(tensor.numel() for tensor in tensors)) * deviation
        flat = to_device(torch.from_numpy(noise).to(tensors[0].dtype), tensors[0].device)
        return add_models(params, split_flat(flat, params))

    @property
    def epsilon_spent(self) -> float | None:
        """Epsilon of the rounds so far at the privacy delta, or None (see `why_no_epsilon`)."""
        if self._why_no_epsilon is not None:
            return None
        return self._accountant.epsilon(self.rates, self.delta)
