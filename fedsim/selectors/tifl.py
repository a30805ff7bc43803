"""TiFL: select all clients of a round from one tier of similarly fast clients.

Chai, Ali, Zawad, Truex, Anwar, Baracaldo, Zhou, Ludwig, Yan and Cheng, "TiFL: A Tier-based
Federated Learning System", HPDC 2020 (arXiv 2001.09249).

A round waits for its slowest client. TiFL groups clients into tiers by how long they take to train,
and draws all clients of a round from one tier, so that fast rounds are fast. So that slow clients
count, too, tiers on whose data the model is bad are drawn more often.

Profiling: each client trains once when it is first available, and the server notes how long that
takes. Clients sorted by this time are cut into `num_tiers` tiers of equal size, tier 0 the fastest.

Adaptive policy (`probabilities: null`, Algorithm 2), starting from equal probabilities:

1. Every `interval` rounds all clients report the accuracy of the current model on their samples.
   If the tier selected last is not more accurate than `interval` rounds ago, probabilities follow
   ranks (lines 3 to 5). Of the n tiers with credits, the least accurate one gets n / D, the next
   one (n - 1) / D, and so on, with D = n (n + 1) / 2.
2. Draw a tier (lines 6 to 10). A tier has ceil(`credits` T / `num_tiers`) credits, at most T, and
   spends one each time it is selected. A tier without credits is not drawn, unless no tier has any.
3. Draw K clients of the tier.

Static policies (section 4.3) give the `probabilities` of the tiers, and use neither accuracies nor
credits.

Deviations: Ranks and their ties (to the faster tier) are those of two public implementations
(bacox/fltk and FLGo). The paper does not say how many credits a tier has; in fltk `credits` is 1.0.
The paper cuts a histogram of the times into tiers; here they are of equal size. Profiling has no
time limit, so that no client drops out. The accuracy of a tier is that of its clients' pooled
samples, not of a test set at the server. If fewer than K clients of a tier are available, the rest
is drawn from the next tiers, the nearer one first, of two the faster one. If nobody can be reached
when accuracies are due, they are reported in the next round in which somebody can.
"""

import math

import numpy as np

from fedsim.selectors.base import (
    Bools,
    Clients,
    Count,
    Floats,
    Generator,
    Ids,
    Positive,
    Problems,
    Selection,
    Selector,
    Signal,
    ascending,
    ceil,
    parameters,
    rule,
)


@parameters
class TiFL(Selector):
    """Draws a tier of similarly fast clients, and then K of its clients."""

    state = ("latency", "chances", "left", "current", "accuracies", "intervals")
    start_up_rounds = 1

    num_tiers: Count  # number of tiers
    interval: Count  # rounds between two reports of accuracies
    credits: Positive  # credits of a tier, as a multiple of T / num_tiers
    probabilities: list[float] | None  # None: adaptive; else those of the tiers, the fastest first

    def problems(self) -> Problems:
        num_clients, num_tiers = self.population.num_clients, self.num_tiers
        text = f"must lie in [1, num_clients={num_clients}]"
        yield rule(num_tiers <= num_clients, "num_tiers", num_tiers, text, "5 is the paper's")
        static = self.probabilities
        if static is not None:
            holds = len(static) == num_tiers and min(static) >= 0 and 0 < sum(static) < math.inf
            text = f"must be {num_tiers} numbers >= 0, one for each of num_tiers"
            yield rule(holds, "probabilities", static, text, "null adapts them")

    def __post_init__(self) -> None:
        num_tiers, num_rounds = self.num_tiers, self.population.num_rounds
        static = self.probabilities
        self.adapts = static is None
        self.needs = frozenset(
            {Signal.RESPONSE_TIMES, Signal.ACCURACIES} if self.adapts else {Signal.RESPONSE_TIMES}
        )
        chances = [1.0] * num_tiers if static is None else static
        self.chances = np.array(chances) / sum(chances)  # probabilities of the tiers
        credits = ceil(min(self.credits * num_rounds / num_tiers, num_rounds))
        self.left = np.full(num_tiers, max(credits, 1))  # credits left
        self.latency = np.full(self.population.num_clients, np.nan)  # seconds of a training
        self.current = 0  # the tier selected last
        self.accuracies = np.full(num_tiers, np.nan)
        self.intervals = 0  # reports of accuracies so far

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        new = available[np.isnan(self.latency[available])]
        if len(new):
            self.latency[new] = clients.response_times(new)
        tiers = self.tiers()
        # 1. Probabilities
        if self.adapts and round > self.intervals * self.interval:
            self.intervals = (round - 1) // self.interval + 1
            self._adapt(self._measure_accuracies(clients, tiers))
        # 2. Tier
        has_clients = np.array([np.isin(tier, available).any() for tier in tiers])
        self.current = self._draw_tier(has_clients, rng)
        if self.adapts:
            self.left[self.current] -= 1
        # 3. Clients, of the nearest tiers if there are too few
        count = self.cohort_size(clients)
        chosen = np.empty(0, np.int64)
        for tier in sorted(range(self.num_tiers), key=lambda t: (abs(t - self.current), t)):
            members = tiers[tier][np.isin(tiers[tier], available)]
            num_drawn = min(count - len(chosen), len(members))
            chosen = np.concatenate([chosen, rng.choice(members, num_drawn, replace=False)])
        return Selection(ascending(chosen))

    def tiers(self) -> list[Ids]:
        """Return the ids of the known clients by tier, the fastest first.

        Of two equally fast clients the lower id comes first.
        """
        known = np.flatnonzero(~np.isnan(self.latency))
        order = np.argsort(self.latency[known], kind="stable")
        return np.array_split(known[order], self.num_tiers)

    def _measure_accuracies(self, clients: Clients, tiers: list[Ids]) -> Floats:
        """Return the accuracy of each tier on its available clients' samples, [num_tiers]."""
        accuracies = np.full(self.population.num_clients, np.nan)
        accuracies[clients.available] = clients.accuracies(clients.available)
        by_tier = np.full(self.num_tiers, np.nan)
        for number, tier in enumerate(tiers):
            known = np.sort(tier[np.isfinite(accuracies[tier])])
            if len(known):
                sizes = self.population.sizes[known]
                by_tier[number] = np.average(accuracies[known], weights=sizes)
        return by_tier

    def _adapt(self, accuracies: Floats) -> None:
        """Set new probabilities if the tier selected last has not become more accurate."""
        if accuracies[self.current] <= self.accuracies[self.current]:
            able = np.flatnonzero(self.left > 0)
            num_able = len(able)
            known = np.nan_to_num(accuracies[able], nan=float(np.nanmean(accuracies)))
            order = np.argsort(known, kind="stable")  # the least accurate first
            self.chances = np.zeros(self.num_tiers)
            self.chances[able[order]] = np.arange(num_able, 0, -1) / (num_able * (num_able + 1) / 2)
        self.accuracies = accuracies

    def _draw_tier(self, has_clients: Bools, rng: Generator) -> int:
        """Return a tier with available clients and, if it matters, with credits."""
        weights = self.chances * has_clients
        if self.adapts:
            with_credits = weights * (self.left > 0)
            if with_credits.sum() > 0:
                weights = with_credits
        if not weights.sum():  # a static policy whose tiers are away
            weights = has_clients.astype(np.float64)
        return int(rng.choice(self.num_tiers, p=weights / weights.sum()))
