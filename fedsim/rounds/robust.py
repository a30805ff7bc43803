"""Aggregators that bound what one client's update can do to the model, be it hostile or private.

Distances and lengths are of the trained tensors. Running statistics (`buffers`) go by the same rule: of the same
clients, with the same weights, or trimmed and clipped in their own right.
"""

from functools import cache
from importlib.util import find_spec
from typing import Annotated, ClassVar
from warnings import catch_warnings, simplefilter

import numpy as np
import torch
from annotated_types import Interval
from numpy.typing import NDArray
from torch import Tensor

from fedsim.clients.context import RoundContext
from fedsim.core.errors import floor, rule
from fedsim.core.exact import mean_row, normal, row_sums, weighted_sum
from fedsim.core.flat import added, flat_rows, split_flat, to_device, weighted_sums
from fedsim.core.parameters import Count, CountOrZero, Positive, Problems, parameters
from fedsim.core.rng import Purpose
from fedsim.core.types import Cohort, Floats, Ids, Params
from fedsim.rounds.aggregators import Aggregator, Weighting
from fedsim.selectors.base import Selector


@parameters
class Unweighted(Aggregator):
    """Every update counts once: the weights of a selector are ignored, as they would give a client more of a say."""

    weighting: ClassVar[Weighting] = "uniform"  # type: ignore[misc]


class Median(Unweighted):
    """The median of each coordinate; of an even number of updates, the mean of the middle two (Yin et al.,
    "Byzantine-Robust Distributed Learning", 2018, definition 1). A selector's weights are ignored."""

    def aggregate(self, params: Params, cohort: Cohort, weights: NDArray[np.float64] | None) -> Params:
        return _trimmed(params, cohort, len(cohort.ids))


@parameters
class TrimmedMean(Unweighted):
    """The mean of each coordinate without the largest and the smallest `share` of its values, floor(share K) of K at
    each end (Yin et al., 2018, definition 2). A selector's weights are ignored."""

    share: Annotated[float, Interval(ge=0, lt=0.5)]

    def unfit_for(self, selector: Selector, updates: int) -> Problems:
        trims = not self.share or floor(self.share * updates) > 0
        text = f"must be at least 1 / {updates}, or it trims none of the {updates} updates of a round (cohort_size)"
        yield rule(trims, "share", self.share, text, "raise it, or set aggregator=median")

    def aggregate(self, params: Params, cohort: Cohort, weights: NDArray[np.float64] | None) -> Params:
        return _trimmed(params, cohort, floor(self.share * len(cohort.ids)))


def _trimmed(params: Params, cohort: Cohort, cut: int) -> Params:
    """Without `cut` values at each end, but for the middle one or two."""
    num = len(cohort.ids)
    cut = min(cut, (num - 1) // 2)
    return added(params, {n: mean_row(t.sort(0).values[cut : num - cut]) for n, t in cohort.delta.items()})


@parameters
class Krum(Unweighted):
    """The mean of the `m` updates whose squared distances to their K - f - 2 nearest others have the lowest sums
    (Blanchard et al., "Machine Learning with Adversaries", 2017, section 4): Krum for m = 1, else Multi-Krum. `f`:
    hostile clients among K >= 2 f + 3.

    m None: K - f - 2, as in AggregaThor (Damaskinos et al., 2019). Ties go to the lower client id. Where fewer than 2 f
    + 3 updates arrive, f is the largest that fits, (K - 3) / 2 rounded down, or 0. A selector's weights are ignored.
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

    def aggregate(self, params: Params, cohort: Cohort, weights: NDArray[np.float64] | None) -> Params:
        num = len(cohort.ids)
        near = max(num - max(min(self.f, (num - 3) // 2), 0) - 2, 0)
        scores = np.sort(_squared_distances(cohort.updates), axis=1)[:, 1 : near + 1].sum(axis=1)
        chosen = np.argsort(scores, kind="stable")[: max(near, 1) if self.m is None else self.m]
        used = np.zeros(num)
        used[chosen] = 1 / len(chosen)
        return added(params, weighted_sums(cohort.delta, used, cohort.start))


def _squared_distances(rows: Tensor) -> Floats:
    """Of all pairs of `rows` [K, D], [K, K]; by differences, since products would cancel."""
    squares = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for i in range(len(rows) - 1):
        squares[i, i + 1 :] = row_sums((rows[i + 1 :] - rows[i]).double().square())
    return (squares + squares.T).cpu().numpy()


def _lengths(rows: Tensor) -> Floats:
    """The Euclidean norms of `rows` [K, D], [K]."""
    return np.sqrt(row_sums(rows.double().square()).cpu().numpy())


@parameters
class GeometricMedian(Aggregator):
    """RFA: the geometric median of the updates by smoothed Weiszfeld steps (Pillutla et al., "Robust Aggregation for
    Federated Learning", 2022, Algorithm 2).

    From their mean v on: v <- sum_k b_k d_k / sum_k b_k, b_k = a_k / max(smoothing, |v - d_k|). a_k are the weights of
    the selector or the aggregator, divided by their sum.
    """

    iterations: Count
    smoothing: Positive

    def aggregate(self, params: Params, cohort: Cohort, weights: NDArray[np.float64] | None) -> Params:
        own = self.averaging_weights(cohort, self.weights(cohort) if weights is None else weights)
        rows, used = cohort.updates, own
        for _ in range(self.iterations):
            centre = weighted_sum(rows, to_device(torch.as_tensor(used, dtype=rows.dtype), rows.device))
            used = own / np.maximum(_lengths(rows - centre), self.smoothing)
            used = used / used.sum()
        return added(params, weighted_sums(cohort.delta, used, cohort.start))


@parameters
class NormClipping(Aggregator):
    """The weighted mean of updates that are scaled down to a length of at most `norm` (Sun et al., "Can You Really
    Backdoor Federated Learning?", 2019, section 4); running statistics likewise, by weights that sum to one."""

    norm: Positive

    def aggregate(self, params: Params, cohort: Cohort, weights: NDArray[np.float64] | None) -> Params:
        used = self.weights(cohort) if weights is None else weights
        steps = {name: delta for name, delta in cohort.delta.items() if name not in self.buffers}
        others = {name: delta for name, delta in cohort.delta.items() if name in self.buffers}
        parts = (steps, used), (others, self.averaging_weights(cohort, used))
        return added(params, {n: t for some, by in parts for n, t in _clipped(some, by, self.norm, params).items()})


def _clipped(updates: Params, weights: Floats, norm: float, like: Params) -> Params:
    """sum_k weights_k min(1, norm / |d_k|) d_k of the rows d_k of `updates`."""
    factors = norm / np.maximum(_lengths(flat_rows(updates)), norm) if updates else weights
    return weighted_sums(updates, weights * factors, like)


ORDERS = [*(1 + x / 10 for x in range(1, 100)), *range(11, 64), 128, 256, 512, 1024]
"""Of Rényi divergences."""


@cache
def _divergences(rate: float, noise_multiplier: float) -> Floats:
    """Of one round, at `ORDERS`."""
    from opacus.accountants.analysis.rdp import compute_rdp

    return np.asarray(compute_rdp(q=rate, noise_multiplier=noise_multiplier, steps=1, orders=ORDERS))


@parameters
class DPFedAvg(Unweighted):
    """DP-FedAvg: w + (sum_k min(1, clip / |d_k|) d_k + N(0, (noise_multiplier clip)^2)) / denominator, private client
    by client (McMahan et al., "Learning Differentially Private Recurrent Language Models", 2018, Algorithm 1 with flat
    clipping and a fixed denominator).

    `denominator` None: the clients selected a round, K. All clients weigh the same; a selector's weights are ignored.
    Noise is drawn by seed and round.

    `epsilon`, at `delta`, is Opacus's, by the Rényi divergences of the sampled Gaussian mechanism (Mironov et al.,
    2019), for a client more or less. The sampling rate of a round is that of the selected among those available. As is
    usual, cohorts of K count as if each client came by chance at that rate. Rounds without updates change and cost
    nothing.
    """

    clip: Positive
    noise_multiplier: Positive
    delta: Positive
    denominator: Count | None

    state = ("rounds_by_rate",)

    def __post_init__(self) -> None:
        self.rounds_by_rate: dict[float, int] = {}

    def problems(self) -> Problems:
        remedy = "pip install 'fedsim-selection[privacy]' (in a checkout, uv sync brings it)"
        there = find_spec("opacus") is not None
        yield rule(there, "", ..., "needs the package opacus, which counts epsilon", remedy)

    def unfit_for(self, selector: Selector, updates: int) -> Problems:
        num, name = selector.population.num_clients, type(selector).__name__
        text = f"must be below 1 / num_clients = {1 / num:.4g}, or one client's data could be given away whole"
        yield rule(self.delta < 1 / num, "delta", self.delta, text)
        text, remedy = f"must be given for {name}, which decides how many take part", f"set it to {num} for all, say"
        yield rule(not (selector.adaptive and self.denominator is None), "denominator", None, text, remedy)
        text = f"adds noise to running statistics ({min(self.buffers, default='')}, ...): variances may fall below 0"
        yield rule(not self.buffers, "", ..., text, "take a model without batch norm")

    def begin(self, selector: Selector, params: Params) -> None:
        self._selector, self._divisor = selector, self.denominator or selector.population.cohort_size

    @property
    def warning(self) -> str | None:
        selector, name = self._selector, type(self._selector).__name__
        if selector.uniform:
            return None
        asked = f"asks clients for {', '.join(sorted(selector.needs))}" if selector.needs else "chooses otherwise"
        return (
            f"epsilon assumes clients drawn uniformly at random; {name} {asked}, and it does not hold for its choices"
        )

    def begin_round(self, context: RoundContext, selected: Ids) -> None:
        self._rate = len(selected) / len(context.available)
        self._rng = context.streams.generator(Purpose.PRIVACY, context.round)

    def aggregate(self, params: Params, cohort: Cohort, weights: NDArray[np.float64] | None) -> Params:
        self.rounds_by_rate[self._rate] = self.rounds_by_rate.get(self._rate, 0) + 1
        mean = _clipped(cohort.delta, np.full(len(cohort.ids), 1 / self._divisor), self.clip, params)
        first = next(iter(params.values()))
        noise = normal(self._rng, sum(t.numel() for t in params.values()))
        noise *= self.noise_multiplier * self.clip / self._divisor
        flat = to_device(torch.from_numpy(noise).to(first.dtype), first.device)
        return added(added(params, mean), split_flat(flat, params))

    @property
    def epsilon(self) -> float:
        from opacus.accountants.analysis.rdp import get_privacy_spent

        spent = [count * _divergences(rate, self.noise_multiplier) for rate, count in self.rounds_by_rate.items()]
        if not spent:
            return 0.0
        with catch_warnings():
            simplefilter("ignore")  # that the best order is the first or the last: epsilon holds, if not tightly
            return max(float(get_privacy_spent(orders=ORDERS, rdp=sum(spent), delta=self.delta)[0]), 0.0)
