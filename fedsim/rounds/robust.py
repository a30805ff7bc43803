"""Aggregators that bound what one client's update can do to the model, against hostile clients and
for privacy.

Distances are computed over the trained tensors. Running statistics (`buffers`) are trimmed, clipped
or averaged over the same clients in the same way.
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
from fedsim.rounds.privacy import Accountant, why_no_epsilon
from fedsim.selectors.base import Sampling, Selector


@parameters
class Unweighted(Aggregator):
    """An aggregator for which every update counts once. It ignores the selector's weights, which
    would give some clients more influence."""

    weighting: ClassVar[Weighting] = "uniform"  # type: ignore[misc]


@parameters
class TrimmedMean(Unweighted):
    """The mean of each coordinate without its largest and smallest values (Yin et al.,
    "Byzantine-Robust Distributed Learning", 2018, definitions 1 and 2).

    floor(share K) of the K values are dropped at each end, but the middle one or two always remain.
    At share = 1 / 2 it is the median. The selector's weights are ignored.
    """

    share: Annotated[float, Interval(ge=0, le=0.5)]

    def unfit_for(self, selector: Selector, updates: int) -> Problems:
        trims = not self.share or updates < 3 or floor(self.share * updates) >= 1
        text = (
            f"must be at least 1 / {updates}, or it trims none of a round's {updates} updates "
            "(cohort_size)"
        )
        yield rule(trims, "share", self.share, text)

    def aggregate(self, params: Params, cohort: Cohort, weights: Weights) -> Params:
        num = len(cohort.ids)
        cut = min(floor(self.share * num), (num - 1) // 2)
        means = {}
        for name, delta in cohort.delta.items():
            means[name] = mean_row(delta.sort(0).values[cut : num - cut])
        return add_models(params, means)


@parameters
class Krum(Unweighted):
    """The mean of the `m` updates that are closest to their K - f - 2 nearest others (Blanchard et
    al., "Machine Learning with Adversaries", 2017, section 4).

    The score of an update is the sum of its squared distances to these. m = 1 is Krum, m > 1 is
    Multi-Krum. m None: K - f - 2, as in AggregaThor (Damaskinos et al., 2019). `f` hostile clients
    are expected among K >= 2 f + 3. If fewer updates arrive, f is the largest that fits,
    (K - 3) / 2 rounded down, or 0. Ties go to the lower client id. The selector's weights are
    ignored.
    """

    f: CountOrZero
    m: Count | None

    def unfit_for(self, selector: Selector, updates: int) -> Problems:
        required = 2 * self.f + 3
        text = f"needs 2 f + 3 = {required} updates a round, and there are {updates} (cohort_size)"
        remedy = f"set cohort_size={required} or more"
        if updates >= 3:
            remedy += f", or aggregator.f={(updates - 3) // 2}"
        yield rule(updates >= required, "f", self.f, text, remedy)
        text = f"must be at most {updates}, the updates of a round (cohort_size)"
        yield rule(self.m is None or self.m <= updates, "m", self.m, text)

    def aggregate(self, params: Params, cohort: Cohort, weights: Weights) -> Params:
        num = len(cohort.ids)
        updates = cohort.updates
        num_near = max(num - max(min(self.f, (num - 3) // 2), 0) - 2, 0)
        squares = np.zeros((num, num))
        for i in range(num - 1):  # by differences: inner products would cancel
            squares[i, i + 1 :] = _lengths(updates[i + 1 :] - updates[i]) ** 2
        ascending = np.sort(
            squares + squares.T, axis=1
        )  # the first column is the distance to itself
        scores = ascending[:, 1 : num_near + 1].sum(axis=1)
        num_used = max(num_near, 1) if self.m is None else self.m
        used = np.argsort(scores, kind="stable")[:num_used]
        used_weights = np.isin(np.arange(num), used) / len(used)
        return add_models(params, weighted_sums(cohort.delta, used_weights, cohort.start))


def _lengths(rows: Tensor) -> Floats:
    """Return the Euclidean norms [K] of `rows` [K, D]."""
    return np.sqrt(row_sums(rows.double().square()).cpu().numpy())


@parameters
class GeometricMedian(Aggregator):
    """RFA: the geometric median of the updates by smoothed Weiszfeld steps (Pillutla et al.,
    "Robust Aggregation for Federated Learning", 2022, Algorithm 2).

    v begins at the mean of the updates d_k. Then v <- sum_k b_k d_k / sum_k b_k with
    b_k = a_k / max(smoothing, |v - d_k|). a_k are the weights of the selector or the aggregator,
    divided by their sum.
    """

    iterations: Annotated[int, Ge(1), Le(1000)]
    smoothing: Positive

    def aggregate(self, params: Params, cohort: Cohort, weights: Weights) -> Params:
        if weights is None:
            weights = self.weights(cohort)
        averaging = self.averaging_weights(cohort, weights)
        updates = cohort.updates
        used = averaging
        for _ in range(self.iterations):
            row = to_device(torch.as_tensor(used, dtype=updates.dtype), updates.device)
            distances = _lengths(updates - weighted_sum(updates, row))
            used = averaging / np.maximum(distances, self.smoothing)
            used = used / used.sum()
        return add_models(params, weighted_sums(cohort.delta, used, cohort.start))


@parameters
class NormClipping(Aggregator):
    """The weighted mean of updates that are scaled down to a length of at most `norm` (Sun et al.,
    "Can You Really Backdoor Federated Learning?", 2019, section 4).

    Running statistics are clipped in the same way and averaged by weights that sum to one.
    """

    norm: Positive

    def aggregate(self, params: Params, cohort: Cohort, weights: Weights) -> Params:
        if weights is None:
            weights = self.weights(cohort)
        trained, buffers = self.parts(cohort)
        changes = _clipped_sum(trained, weights, self.norm, params)
        averaging = self.averaging_weights(cohort, weights)
        changes |= _clipped_sum(buffers, averaging, self.norm, params)
        return add_models(params, changes)


def _clipped_sum(updates: Stack, weights: Floats, norm: float, like: Params) -> Params:
    """Return sum_k weights_k min(1, norm / |d_k|) d_k over the rows d_k of `updates`."""
    if not updates:
        return {}
    factors = norm / np.maximum(_lengths(flat_rows(updates)), norm)
    return weighted_sums(updates, weights * factors, like)


@parameters
class DPFedAvg(Unweighted):
    """DP-FedAvg: federated averaging that is private client by client (McMahan et al., "Learning
    Differentially Private Recurrent Language Models", 2018, Algorithm 1 with flat clipping and a
    fixed denominator).

    w <- w + (sum_k min(1, clip / |d_k|) d_k + N(0, (noise_multiplier clip)^2)) / denominator. The
    denominator None is the number of clients that are selected on average. All clients count the
    same; the selector's weights are ignored. A round in which no update arrives adds the noise and
    counts as any other. A round in which no client is available changes and costs nothing.

    Epsilon, at `delta`, depends on how the selector draws (`Selector.sampling`); docs/privacy.md
    says what it promises. If a fixed number of clients is drawn, the sampling rate of a round is
    the number of selected clients divided by that of available ones.
    """

    clip: Positive
    noise_multiplier: Annotated[float, Ge(0.01)]
    delta: Positive
    denominator: Count | None

    is_private = True
    state = ("rates",)

    def __post_init__(self) -> None:
        self.rates: list[float] = []
        """Sampling rates of the rounds so far."""

    def problems(self) -> Problems:
        text = "needs the package dp-accounting, which computes epsilon"
        remedy = "pip install 'fedsim-selection[privacy]' (in a checkout, uv sync)"
        yield rule(find_spec("dp_accounting") is not None, "", ..., text, remedy)

    def unfit_for(self, selector: Selector, updates: int) -> Problems:
        num_clients = selector.population.num_clients
        text = (
            f"must be below 1 / num_clients = {1 / num_clients:.4g}, or all data of one client "
            "could be disclosed"
        )
        yield rule(self.delta < 1 / num_clients, "delta", self.delta, text)
        is_known = not selector.adaptive or selector.sampling is not None
        text = (
            f"must be given for {type(selector).__name__}, which decides how many clients take part"
        )
        remedy = f"set it, for example to {num_clients} if all take part"
        is_given = self.denominator is not None
        yield rule(is_known or is_given, "denominator", None, text, remedy)

    def begin(self, selector: Selector, params: Params) -> None:
        text = (
            f"adds noise to running statistics such as {min(self.buffers, default='')}: variances "
            "may fall below 0"
        )
        remedy = "take a model without batch norm"
        check(rule(not self.buffers, "aggregator", type(self).__name__, text, remedy))

    def account(
        self, selector: Selector, algorithm: LocalAlgorithm, clock: SimulatedClock | None
    ) -> None:
        population = selector.population
        self._sampling = selector.sampling
        self._expected_updates = population.cohort_size
        if self._sampling is Sampling.ALL:
            self._expected_updates = population.num_clients
        self._usual_rate = self._expected_updates / population.num_clients
        self._accountant = Accountant(self._sampling, self.noise_multiplier)
        self._why_no_epsilon = why_no_epsilon(selector, algorithm, clock)

    @property
    def warning(self) -> str:
        if self._why_no_epsilon is not None:
            return f"no epsilon is recorded: {self._why_no_epsilon} (docs/privacy.md)"
        difference = "adding or removing one client"
        if self._sampling is Sampling.FIXED_SIZE:
            difference = "exchanging one client for another"
        observer = "an observer who sees only the models"
        return f"epsilon is that of {difference}, for {observer} (docs/privacy.md)"

    def begin_round(self, context: RoundContext, selected: Ids) -> None:
        self._rate = self._usual_rate
        if self._sampling is Sampling.FIXED_SIZE:
            self._rate = len(selected) / len(context.available)
        self._rng = context.streams.generator(Purpose.PRIVACY, context.round)

    def aggregate(self, params: Params, cohort: Cohort, weights: Weights) -> Params:
        self.rates.append(self._rate)
        divisor = self._expected_updates if self.denominator is None else self.denominator
        num = len(cohort.ids)
        if num:
            mean = _clipped_sum(cohort.delta, np.full(num, 1 / divisor), self.clip, params)
            params = add_models(params, mean)
        tensors = list(params.values())
        deviation = self.noise_multiplier * self.clip / divisor
        noise = normal(self._rng, sum(tensor.numel() for tensor in tensors)) * deviation
        flat = to_device(torch.from_numpy(noise).to(tensors[0].dtype), tensors[0].device)
        return add_models(params, split_flat(flat, params))

    @property
    def epsilon_spent(self) -> float | None:
        if self._why_no_epsilon is not None:
            return None
        return self._accountant.epsilon(self.rates, self.delta)
