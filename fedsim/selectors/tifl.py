"""TiFL (Chai, Ali, Zawad et al., "TiFL: A Tier-based Federated Learning System", HPDC 2020)."""

import math

import numpy as np

from fedsim.core.arrays import Floats
from fedsim.core.parameters import Count, Positive, Problems, parameters
from fedsim.selectors.base import (
    Clients,
    Ids,
    Selection,
    Selector,
    Signal,
    ascending,
    ceil,
    rule,
)


@parameters
class TiFL(Selector):
    """Puts clients into tiers by how long they take to train, and selects all K of a round from one
    tier.

    Profiling: whoever is available and not known yet trains once, and the server notes how long
    that took. Clients sorted by this time are cut into `num_tiers` tiers of equal size; tier 0 is
    the fastest.

    Adaptive policy (`probabilities: null`, Algorithm 2): tiers are equally likely at first. Every
    `interval` rounds all clients report the accuracy of the current model on their own samples; if
    that of the tier selected last is not higher than `interval` rounds ago, probabilities follow
    ranks: of the n tiers with credits the least accurate one gets n / D, the next (n - 1) / D, and
    so on, D = n (n + 1) / 2. A tier has ceil(`credits` T / `num_tiers`) credits, at most T, and
    spends one each time it is selected; without any it is not drawn, unless no tier has any. Static
    policies (section 4.3) give the `probabilities` of the tiers, fastest first, and use neither.

    Deviations: ranks and their ties (to the faster tier) are those of two public implementations
    (bacox/fltk and FLGo); how many credits a tier has is left open by the paper, and 1.0 in fltk.
    The paper cuts a histogram of the times into tiers, here they are of equal size. Profiling has
    no time limit, so that none is left out as a dropout. The accuracy of a tier is that of its
    clients' pooled samples, not of a test set at the server. Where fewer than K clients of a tier
    are available, the rest is drawn from the next tiers, the nearer one first, and the faster one
    of two. If nobody can be reached when accuracies are due, they are reported in the next round in
    which somebody can.
    """

    state = ("latency", "chances", "left", "current", "accuracies", "intervals")
    start_up_rounds = 1

    num_tiers: Count
    interval: Count
    credits: Positive
    probabilities: list[float] | None

    def problems(self) -> Problems:
        n, tiers, static = self.population.num_clients, self.num_tiers, self.probabilities
        yield rule(
            tiers <= n, "num_tiers", tiers, f"must lie in [1, num_clients={n}]", "5 is the paper's"
        )
        if static is not None:
            holds = len(static) == tiers and min(static) >= 0 and 0 < sum(static) < math.inf
            told = f"must be {tiers} numbers >= 0, one for each of num_tiers"
            yield rule(holds, "probabilities", static, told, "null adapts them")

    def __post_init__(self) -> None:
        tiers, rounds, static = self.num_tiers, self.population.num_rounds, self.probabilities
        self.adapts = static is None
        self.needs = frozenset(
            {Signal.RESPONSE_TIMES, *([Signal.ACCURACIES] if self.adapts else [])}
        )
        self.chances = (
            np.full(tiers, 1 / tiers) if static is None else np.array(static) / sum(static)
        )
        self.left = np.full(
            tiers, max(ceil(min(self.credits * rounds / tiers, rounds)), 1)
        )  # credits
        self.latency = np.full(self.population.num_clients, np.nan)
        self.current = 0
        self.accuracies = np.full(tiers, np.nan)
        self.intervals = 0  # for which accuracies were reported, the present one included

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids = clients.available
        new = ids[np.isnan(self.latency[ids])]
        if len(new):
            self.latency[new] = clients.response_times(new)
        tiers = self.tiers()
        if self.adapts and round > self.intervals * self.interval:
            self.intervals = (round - 1) // self.interval + 1
            self._adapt(self._measured(clients, tiers))
        self.current = self._draw([np.isin(tier, ids).any() for tier in tiers], rng)
        if self.adapts:
            self.left[self.current] -= 1
        return Selection(self._members(tiers, ids, self.cohort_size(clients), rng))

    def tiers(self) -> list[Ids]:
        """The ids of the known clients by tier, the fastest first; of two equally fast ones the
        lower id is first."""
        known = np.flatnonzero(~np.isnan(self.latency))
        return np.array_split(known[np.argsort(self.latency[known], kind="stable")], self.num_tiers)

    def _measured(self, clients: Clients, tiers: list[Ids]) -> Floats:
        """The accuracy of each tier [num_tiers]: of its available clients, weighted by their
        samples."""
        asked = [np.sort(tier[np.isin(tier, clients.available)]) for tier in tiers]
        everybody = ascending(np.concatenate(asked))
        found = np.full(self.population.num_clients, np.nan)
        found[everybody] = clients.accuracies(everybody)
        sizes = self.population.sizes
        told = [ids[np.isfinite(found[ids])] for ids in asked]
        return np.array(
            [np.average(found[ids], weights=sizes[ids]) if len(ids) else np.nan for ids in told]
        )

    def _adapt(self, accuracies: Floats) -> None:
        """Lines 3 to 5 of Algorithm 2: new probabilities if the tier selected last has not become
        more accurate."""
        if accuracies[self.current] <= self.accuracies[self.current]:
            able = np.flatnonzero(self.left > 0)
            known = np.nan_to_num(accuracies[able], nan=float(np.nanmean(accuracies)))
            ranks = np.argsort(
                np.argsort(known, kind="stable"), kind="stable"
            )  # 0: the least accurate
            self.chances = np.zeros(self.num_tiers)
            self.chances[able] = (len(able) - ranks) / (len(able) * (len(able) + 1) / 2)
        self.accuracies = accuracies

    def _draw(self, possible: list[np.bool_], rng: np.random.Generator) -> int:
        """A tier with available clients and, where that matters, credits (lines 6 to 10)."""
        weights = self.chances * possible
        if self.adapts and (weights * (self.left > 0)).sum() > 0:
            weights = weights * (self.left > 0)
        if not weights.sum():  # a static policy of tiers that are away
            weights = np.array(possible, dtype=np.float64)
        return int(rng.choice(self.num_tiers, p=weights / weights.sum()))

    def _members(
        self, tiers: list[Ids], available: Ids, count: int, rng: np.random.Generator
    ) -> Ids:
        """`count` clients at random: of the current tier, then of those next to it."""
        nearest = sorted(range(self.num_tiers), key=lambda t: (abs(t - self.current), t))
        chosen = np.empty(0, np.int64)
        for tier in nearest:
            members = tiers[tier][np.isin(tiers[tier], available)]
            drawn = rng.choice(members, min(count - len(chosen), len(members)), replace=False)
            chosen = np.concatenate([chosen, drawn])
        return ascending(chosen)
