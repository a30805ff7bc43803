"""Aggregators that bound what one client's update can do to the model, be it hostile or private.
Distances are of the trained tensors; running statistics (`buffers`) are trimmed, clipped or taken
of the same clients likewise."""

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
from fedsim.core.types import Cohort, Ids, Params
from fedsim.rounds.aggregators import Aggregator, Weighting
from fedsim.rounds.privacy import Accountant, why_no_epsilon
from fedsim.selectors.base import Sampling, Selector


@parameters
class Unweighted(Aggregator):
    """Every update counts once: a selector's weights, which would give some clients more of a say,
    are ignored."""

    weighting: ClassVar[Weighting] = "uniform"  # type: ignore[misc]


@parameters
class TrimmedMean(Unweighted):
    """The mean of each coordinate without the largest and the smallest `share` of its K values:
    floor(share K) at each end, but for the middle one or two. At share = 1 / 2, the median (Yin et
    al., "Byzantine-Robust Distributed Learning", 2018, definitions 1 and 2). A selector's weights
    are ignored."""

    share: Annotated[float, Interval(ge=0, le=0.5)]

    def unfit_for(self, selector: Selector, updates: int) -> Problems:
        text = f"must be at least 1 / {updates}, or it trims none of a round's {updates} updates (cohort_size)"
        yield rule(
            not self.share or floor(self.share * updates) >= 1 or updates < 3,
            "share",
            self.share,
            text,
        )

    def aggregate(self, params: Params, cohort: Cohort, weights: Floats | None) -> Params:
        num = len(cohort.ids)
        cut = min(floor(self.share * num), (num - 1) // 2)
        return add_models(
            params,
            {n: mean_row(t.sort(0).values[cut : num - cut]) for n, t in cohort.delta.items()},
        )


@parameters
class Krum(Unweighted):
    """The mean of the `m` updates whose squared distances to their K - f - 2 nearest others have
    the lowest sums (Blanchard et al., "Machine Learning with Adversaries", 2017, section 4): Krum
    for m = 1, else Multi-Krum. `f`: hostile clients among K >= 2 f + 3.

    m None: K - f - 2, as in AggregaThor (Damaskinos et al., 2019). Ties go to the lower client id.
    Where fewer than 2 f + 3 updates arrive, f is the largest that fits, (K - 3) / 2 rounded down,
    or 0. A selector's weights are ignored.
    """

    f: CountOrZero
    m: Count | None

    def unfit_for(self, selector: Selector, updates: int) -> Problems:
        least = 2 * self.f + 3
        text = f"needs 2 f + 3 = {least} updates a round, and there are {updates} (cohort_size)"
        lower = f", or aggregator.f={(updates - 3) // 2}" if updates >= 3 else ""
        yield rule(updates >= least, "f", self.f, text, f"set cohort_size={least} or more{lower}")
        text = f"must be at most {updates}, the updates of a round (cohort_size)"
        yield rule(self.m is None or self.m <= updates, "m", self.m, text)

    def aggregate(self, params: Params, cohort: Cohort, weights: Floats | None) -> Params:
        num, rows = len(cohort.ids), cohort.updates
        near = max(num - max(min(self.f, (num - 3) // 2), 0) - 2, 0)
        squares = np.zeros((num, num))
        for i in range(num - 1):  # by differences: products would cancel
            squares[i, i + 1 :] = _lengths(rows[i + 1 :] - rows[i]) ** 2
        scores = np.sort(squares + squares.T, axis=1)[:, 1 : near + 1].sum(axis=1)
        chosen = np.argsort(scores, kind="stable")[: max(near, 1) if self.m is None else self.m]
        used = np.isin(np.arange(num), chosen) / len(chosen)
        return add_models(params, weighted_sums(cohort.delta, used, cohort.start))


def _lengths(rows: Tensor) -> Floats:
    """The Euclidean norms of `rows` [K, D], [K]."""
    return np.sqrt(row_sums(rows.double().square()).cpu().numpy())


@parameters
class GeometricMedian(Aggregator):
    """RFA: the geometric median of the updates by smoothed Weiszfeld steps (Pillutla et al.,
    "Robust Aggregation for Federated Learning", 2022, Algorithm 2).

    From their mean v on: v <- sum_k b_k d_k / sum_k b_k, b_k = a_k / max(smoothing, |v - d_k|). a_k
    are the weights of the selector or the aggregator, divided by their sum.
    """

    iterations: Annotated[int, Ge(1), Le(1000)]
    smoothing: Positive

    def aggregate(self, params: Params, cohort: Cohort, weights: Floats | None) -> Params:
        own = self.averaging_weights(cohort, self.weights(cohort) if weights is None else weights)
        rows, used = cohort.updates, own
        for _ in range(self.iterations):
            centre = weighted_sum(
                rows, to_device(torch.as_tensor(used, dtype=rows.dtype), rows.device)
            )
            used = own / np.maximum(_lengths(rows - centre), self.smoothing)
            used = used / used.sum()
        return add_models(params, weighted_sums(cohort.delta, used, cohort.start))


@parameters
class NormClipping(Aggregator):
    """The weighted mean of updates that are scaled down to a length of at most `norm` (Sun et al.,
    "Can You Really Backdoor Federated Learning?", 2019, section 4); running statistics likewise, by
    weights that sum to one."""

    norm: Positive

    def aggregate(self, params: Params, cohort: Cohort, weights: Floats | None) -> Params:
        used = self.weights(cohort) if weights is None else weights
        steps, buffers = self.parts(cohort)
        changes = _clipped(steps, used, self.norm, params)
        return add_models(
            params,
            changes | _clipped(buffers, self.averaging_weights(cohort, used), self.norm, params),
        )


def _clipped(updates: Params, weights: Floats, norm: float, like: Params) -> Params:
    """sum_k weights_k min(1, norm / |d_k|) d_k of the rows d_k of `updates`."""
    factors = norm / np.maximum(_lengths(flat_rows(updates)), norm) if updates else weights
    return weighted_sums(updates, weights * factors, like)


@parameters
class DPFedAvg(Unweighted):
    """DP-FedAvg: w + (sum_k min(1, clip / |d_k|) d_k + N(0, (noise_multiplier clip)^2)) /
    denominator, private client by client (McMahan et al., "Learning Differentially Private
    Recurrent Language Models", 2018, Algorithm 1 with flat clipping and a fixed denominator; None:
    the number of clients that is selected on average). All clients weigh the same; a selector's
    weights are ignored. A round in which no update arrives adds the noise and counts like any
    other.

    Epsilon, at `delta`, is that of how the selector draws (`Selector.sampling`); docs/privacy.md
    says what it promises. The rate of a round of K clients is K divided by the number of available
    ones. Rounds in which no client is available change and cost nothing.
    """

    clip: Positive
    noise_multiplier: Annotated[float, Ge(0.01)]
    delta: Positive
    denominator: Count | None

    is_private = True
    state = ("rates",)

    def __post_init__(self) -> None:
        self.rates: list[float] = []  # of the rounds so far

    def problems(self) -> Problems:
        there, remedy = (
            find_spec("dp_accounting"),
            "pip install 'fedsim-selection[privacy]' (in a checkout, uv sync)",
        )
        yield rule(
            there is not None,
            "",
            ...,
            "needs the package dp-accounting, which computes epsilon",
            remedy,
        )

    def unfit_for(self, selector: Selector, updates: int) -> Problems:
        num, name = selector.population.num_clients, type(selector).__name__
        text = f"must be below 1 / num_clients = {1 / num:.4g}, or a client's data could be given away whole"
        yield rule(self.delta < 1 / num, "delta", self.delta, text)
        text, remedy = (
            f"must be given for {name}, which decides how many take part",
            f"set it to {num} for all, say",
        )
        known = not selector.adaptive or selector.sampling is not None
        yield rule(known or self.denominator is not None, "denominator", None, text, remedy)

    def begin(self, selector: Selector, params: Params) -> None:
        text = f"adds noise to running statistics, as {min(self.buffers, default='')}: variances may fall below 0"
        check(
            rule(
                not self.buffers,
                "aggregator",
                type(self).__name__,
                text,
                "take a model without batch norm",
            )
        )

    def account(
        self, selector: Selector, algorithm: LocalAlgorithm, clock: SimulatedClock | None
    ) -> None:
        population, self._sampling = selector.population, selector.sampling
        takes_all = self._sampling is Sampling.ALL
        self._expected = population.num_clients if takes_all else population.cohort_size
        self._usual_rate = self._expected / population.num_clients
        self._accountant = Accountant(self._sampling, self.noise_multiplier)
        self._doubt = why_no_epsilon(selector, algorithm, clock)

    @property
    def warning(self) -> str:
        if self._doubt is not None:
            return f"no epsilon is recorded: {self._doubt} (docs/privacy.md)"
        exchanged = self._sampling is Sampling.FIXED_SIZE
        neighbours = (
            "exchanging one client for another" if exchanged else "adding or removing one client"
        )
        return (
            f"epsilon is that of {neighbours}, for whoever sees the models alone (docs/privacy.md)"
        )

    def begin_round(self, context: RoundContext, selected: Ids) -> None:
        is_fixed = self._sampling is Sampling.FIXED_SIZE
        self._rate = len(selected) / len(context.available) if is_fixed else self._usual_rate
        self._rng = context.streams.generator(Purpose.PRIVACY, context.round)

    def aggregate(self, params: Params, cohort: Cohort, weights: Floats | None) -> Params:
        self.rates.append(self._rate)
        divisor = self.denominator or self._expected
        if num := len(cohort.ids):
            params = add_models(
                params, _clipped(cohort.delta, np.full(num, 1 / divisor), self.clip, params)
            )
        values = list(params.values())
        noise = normal(self._rng, sum(t.numel() for t in values)) * (
            self.noise_multiplier * self.clip / divisor
        )
        flat = to_device(torch.from_numpy(noise).to(values[0].dtype), values[0].device)
        return add_models(params, split_flat(flat, params))

    @property
    def epsilon_spent(self) -> float | None:
        return self._accountant.epsilon(self.rates, self.delta) if self._doubt is None else None
