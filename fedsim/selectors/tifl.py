"""TiFL: select all clients of a round from one tier of similarly fast clients.

Chai, Ali, Zawad, Truex, Anwar, Baracaldo, Zhou, Ludwig, Yan and Cheng, "TiFL: A Tier-based
Federated Learning System", HPDC 2020 (arXiv 2001.09249).

A round waits for its slowest client. TiFL groups clients into tiers by how long they take to train,
and draws the K clients of a round from one tier. So a round with a fast tier waits for no slow
client. Tiers on whose data the model is bad are drawn more often, so that slow clients count, too.

Profiling: each client trains once when it is first available, and the server notes how long that
takes. Clients sorted by this time are cut into `num_tiers` tiers of equal size, tier 0 the fastest.

Adaptive policy (`probabilities: null`, Algorithm 2), starting from equal probabilities:

1. Every `interval` rounds all clients report the accuracy of the current model on their samples.
   If the tier selected last is not more accurate than `interval` rounds ago, the probabilities of
   the tiers are set by rank (lines 3 to 5). Of the n tiers with credits, the least accurate one
   gets n / D, the next one (n - 1) / D, and so on, with D = n (n + 1) / 2.
2. Draw a tier (lines 6 to 10). In a run of T rounds a tier has ceil(`credits` T / `num_tiers`)
   credits, at most T, and spends one each time it is selected. A tier without credits is not drawn,
   unless no tier has any.
3. Draw K clients of the tier.

Static policies (section 4.3) give the `probabilities` of the tiers, and use neither accuracies nor
credits.

Deviations: Ranks and their ties (to the faster tier) are those of two public implementations
(bacox/fltk and FLGo). The paper does not say how many credits a tier has; in fltk `credits` is 1.0.
The paper cuts a histogram of the times into tiers; here they are of equal size. Profiling has no
time limit, so that no client drops out. The accuracy of a tier is that of its clients' pooled
samples, not of a test set at the server. If fewer than K clients of a tier are available, the rest
is drawn from the nearest tiers, the faster one of two equally near tiers first. If no client is
available when accuracies are due, they are reported in the next round with available clients.
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

    state = (
        "training_seconds",
        "tier_probabilities",
        "credits_left",
        "latest_tier",
        "tier_accuracies",
        "num_reports_due",
    )
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
        times = {Signal.RESPONSE_TIMES}
        self.needs = frozenset(times | {Signal.ACCURACIES} if static is None else times)
        weights = [1.0] * num_tiers if static is None else static
        self.tier_probabilities = np.array(weights) / sum(weights)  # [num_tiers]
        credits = ceil(min(self.credits * num_rounds / num_tiers, num_rounds))
        self.credits_left = np.full(num_tiers, max(credits, 1))
        # seconds that a training takes [N], nan: the client is not profiled yet
        self.training_seconds = np.full(self.population.num_clients, np.nan)
        self.latest_tier = 0  # the tier selected last
        self.tier_accuracies = np.full(num_tiers, np.nan)  # at the latest report [num_tiers]
        # Reports are due in the rounds 1, 1 + interval, 1 + 2 interval, and so on. This counts them
        # up to the latest round with a selection.
        self.num_reports_due = 0

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        new = available[np.isnan(self.training_seconds[available])]
        if len(new):
            self.training_seconds[new] = clients.response_times(new)
        tiers = self.tiers()
        # 1. Probabilities
        if self.adapts and round > self.num_reports_due * self.interval:
            self.num_reports_due = (round - 1) // self.interval + 1
            self._adapt(self._measure_accuracies(clients, tiers))
        # 2. Tier
        has_clients = np.array([np.isin(tier, available).any() for tier in tiers])
        self.latest_tier = self._draw_tier(has_clients, rng)
        if self.adapts:
            self.credits_left[self.latest_tier] -= 1
        # 3. Clients of this tier and, if they are too few, of the nearest other tiers
        count = self.cohort_size(clients)
        chosen = np.empty(0, np.int64)
        by_nearness = sorted(
            range(self.num_tiers), key=lambda tier: (abs(tier - self.latest_tier), tier)
        )
        for tier in by_nearness:
            members = tiers[tier][np.isin(tiers[tier], available)]
            num_drawn = min(count - len(chosen), len(members))
            chosen = np.concatenate([chosen, rng.choice(members, num_drawn, replace=False)])
        return Selection(ascending(chosen))

    def tiers(self) -> list[Ids]:
        """Return the ids of the profiled clients of each tier, the fastest tier first.

        Of two equally fast clients the lower id comes first.
        """
        profiled = np.flatnonzero(~np.isnan(self.training_seconds))
        order = np.argsort(self.training_seconds[profiled], kind="stable")
        return np.array_split(profiled[order], self.num_tiers)

    def _measure_accuracies(self, clients: Clients, tiers: list[Ids]) -> Floats:
        """Return the accuracy of each tier on its available clients' samples [num_tiers].

        It is nan for a tier without available clients.
        """
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
        # a comparison with nan is False: without two accuracies of the tier nothing changes
        if accuracies[self.latest_tier] <= self.tier_accuracies[self.latest_tier]:
            with_credits = np.flatnonzero(self.credits_left > 0)
            num = len(with_credits)
            # a tier of unknown accuracy counts as average
            known = np.nan_to_num(accuracies[with_credits], nan=float(np.nanmean(accuracies)))
            order = np.argsort(known, kind="stable")  # the least accurate first
            self.tier_probabilities = np.zeros(self.num_tiers)
            by_rank = np.arange(num, 0, -1) / (num * (num + 1) / 2)
            self.tier_probabilities[with_credits[order]] = by_rank
        self.tier_accuracies = accuracies

    def _draw_tier(self, has_clients: Bools, rng: Generator) -> int:
        """Return a tier with available clients. In the adaptive policy it has credits if possible.

        `has_clients` [num_tiers] marks the tiers with available clients.
        """
        weights = self.tier_probabilities * has_clients
        if self.adapts:
            with_credits = weights * (self.credits_left > 0)
            if with_credits.sum() > 0:
                weights = with_credits
        if not weights.sum():  # no tier of positive probability has available clients
            weights = has_clients.astype(np.float64)
        return int(rng.choice(self.num_tiers, p=weights / weights.sum()))
