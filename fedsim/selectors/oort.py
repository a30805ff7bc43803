"""Oort (Lai, Zhu, Madhyastha and Chowdhury, "Oort: Efficient Federated Learning via Guided
Participant Selection", OSDI 2021), and its exploration by speed, as the paper's Algorithm 1 has
it."""

from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Gt, Interval, Le

from fedsim.core.arrays import Floats
from fedsim.core.exact import log, power
from fedsim.core.parameters import Count, NonNegative, Share, parameters
from fedsim.core.rounding import floor
from fedsim.core.types import Cohort, Ids, Selection
from fedsim.selectors.base import (
    Clients,
    Selector,
    Server,
    Signal,
    ascending,
    leading,
    weighted_without_replacement,
)
from fedsim.selectors.tools import clients_to_try

EXPLORATION_POOL = (
    5  # m unseen clients are drawn from the EXPLORATION_POOL * m unseen ones of highest prior
)


@parameters
class Oort(Selector):
    """Exploits clients of high statistical utility and explores clients that have not taken part
    yet ("unseen").

    Utility: U_k = n_k sqrt(mean squared loss of its samples), measured while client k last trained,
    over all its steps (FedScale: the last mini-batch). The score of a seen client is
    `normalised(U_k)` + sqrt(.1 ln t / L_k), where L_k is the round of its last participation, times
    (T / t_k)^`penalty` if its round duration t_k, observed on the simulated clock when it last took
    part, exceeds the preferred duration T (Eq. 1). Without a simulated clock, or with equal
    durations, time has no effect.

    Exploitation: m = (1 - eps) K clients are drawn with probability proportional to their scores,
    from all seen clients whose score is at least `cutoff` (.95 in the paper, .7 in the code) times
    the score of rank m (`cutoff_rank: last`, the paper) or m + 1 (`next`, the code). The other
    clients are unseen ones, drawn by `prior`: n_k (`size`) or equal; if there are too few, others
    are drawn uniformly. Once all clients with data have been seen, all K are exploited. eps starts
    at `exploration` and is multiplied by `exploration_decay` every round, down to
    `exploration_floor`.

    `first_round: prior` explores by prior in the first round in which clients can be reached, too.
    `random` follows the published code, whose driver draws round 1 uniformly and calls the selector
    from round 2 on, so that ln t is ln(t - 1). Deviation: the code draws uniformly for one more
    round after the last unseen client was selected.

    Pacer, as in the published code: T is a percentile of the durations seen so far, here
    interpolated between two of them. A round gains the mean utility of the exploited clients whose
    updates arrived, 0 if there are none. Every `pacer_window` rounds, the gains of the last window
    are compared with those of the one before: the percentile rises by `pacer_step` if their sums
    differ by at most 10 %, and falls if by 5 times the earlier one or more. (In the paper's
    Algorithm 1, T itself grows where the sum of utilities has fallen.) Oort's blacklist is not
    implemented.

    Nothing is learnt of clients whose updates do not arrive in time: they are explored again now
    and then (`clients_to_try`). Deviation: the published driver gives them the mean utility of
    those that arrived.
    """

    needs = frozenset({Signal.SQUARED_LOSS})
    state: ClassVar[tuple[str, ...]] = ("utility", "last_round", "last_tried", "durations")
    state += ("exploited", "gained", "gain", "percentile")

    exploration: Share
    exploration_decay: Share
    exploration_floor: Share
    cutoff: Share
    cutoff_rank: Literal["last", "next"]
    first_round: Literal["prior", "random"]
    clip: Share
    prior: Literal["size", "equal"]
    penalty: NonNegative
    percentile: Annotated[float, Interval(ge=0, le=100)]
    pacer_window: Count
    pacer_step: Annotated[float, Gt(0), Le(100)]

    def __post_init__(self) -> None:
        n = self.population.num_clients
        self.utility = np.zeros(n)
        self.last_round = np.zeros(n, np.int64)  # 0: never seen
        self.last_tried = np.zeros(n, np.int64)  # 0: never selected
        self.durations = np.full(n, np.nan)
        self.expected = np.full(
            n, np.nan
        )  # seconds that clients report, for a subclass that asks them
        self.exploited = np.empty(0, np.int64)
        self.gained: list[float] = []
        self.gain = 0.0  # of the latest round, not yet in `gained`

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids, count = clients.available, self.cohort_size(clients)
        while len(self.gained) < round - 1:
            self._pace()
        new = clients_to_try(ids, self.last_round > 0, self.last_tried, round)
        self.exploited = self._exploit(ids, self._num_exploited(round, count, new), round, rng)
        if self.first_round == "random" and clients.in_first_round:
            new = new[:0]
        chosen = np.concatenate(
            [self.exploited, self._explore(new, count - len(self.exploited), rng)]
        )
        if len(chosen) < count:
            others = np.setdiff1d(ids, chosen)
            chosen = np.concatenate(
                [chosen, rng.choice(others, count - len(chosen), replace=False)]
            )
        chosen = ascending(chosen)
        self.last_tried[chosen] = round
        return Selection(chosen)

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        assert cohort.rms_loss is not None
        self.utility[cohort.ids] = np.nan_to_num(cohort.sizes * cohort.rms_loss, nan=0, posinf=0)
        self.last_round[cohort.ids] = round
        if cohort.durations is not None:
            self.durations[cohort.ids] = cohort.durations
        arrived = np.intersect1d(self.exploited, cohort.ids)
        self.gain = float(self.utility[arrived].mean()) if len(arrived) else 0.0

    def scores(self, ids: Ids, t: int) -> Floats:
        """Scores in round t of the seen clients among the available `ids`."""
        seen = ids[self.last_round[ids] > 0]
        count = t if self.first_round == "prior" else max(t - 1, 1)
        stale = np.sqrt(0.1 * log(count) / self.last_round[seen])
        return (self.normalised(ids) + stale) * self._speed_factor(seen)

    def normalised(self, ids: Ids) -> Floats:
        """(min(U_k, c) - l) / (u - l) of the seen clients among `ids`, as in the published code.

        Of the M positive values of all `ids`, where that of an unseen client is its prior, c is the
        one of ascending rank floor(`clip` M) + 1, u the maximum and l .999 times the minimum. u - l
        is at least 1e-4.
        """
        seen = self.last_round[ids] > 0
        values = np.where(seen, self.utility[ids], self._priors(ids))
        known = values[values > 0]
        if not len(known):
            return np.zeros(np.count_nonzero(seen))
        rank = min(floor(self.clip * len(known)), len(known) - 1)
        clipped = np.minimum(values[seen], np.partition(known, rank)[rank])
        low = 0.999 * known.min()
        return (clipped - low) / max(known.max() - low, 1e-4)

    def _speed_factor(self, seen: Ids) -> Floats:
        known = self.durations[np.isfinite(self.durations)]
        if not len(known) or np.ptp(known) == 0:
            return np.ones(len(seen))
        preferred = np.percentile(known, self.percentile)
        durations = np.nan_to_num(self.durations[seen], nan=preferred)
        return np.where(durations > preferred, power(preferred / durations, self.penalty), 1.0)

    def _num_exploited(self, t: int, count: int, new: Ids) -> int:
        if not np.any(
            (self.last_round == 0) & (self.last_tried == 0) & (self.population.sizes > 0)
        ):
            return count - min(len(new), count)
        epsilon = max(self.exploration_floor, self.exploration * self.exploration_decay ** (t - 1))
        return floor((1 - epsilon) * count)

    def _exploit(self, ids: Ids, count: int, t: int, rng: np.random.Generator) -> Ids:
        seen = ids[self.last_round[ids] > 0]
        count = min(count, len(seen))
        if not count:
            return seen[:0]
        scores = self.scores(ids, t)
        falling = np.sort(scores)[::-1]
        pivot = falling[count - 1 if self.cutoff_rank == "last" else min(count, len(seen) - 1)]
        pool = np.flatnonzero(scores >= min(self.cutoff * pivot, falling[count - 1]))
        return seen[pool[weighted_without_replacement(np.maximum(scores[pool], 1e-12), count, rng)]]

    def _explore(self, new: Ids, count: int, rng: np.random.Generator) -> Ids:
        priors = self._priors(new)
        shuffled = rng.permutation(len(new))
        pool = shuffled[leading(priors[shuffled], EXPLORATION_POOL * count)]
        return new[pool[weighted_without_replacement(priors[pool], count, rng)]]

    def _priors(self, ids: Ids) -> Floats:
        return (
            self.population.sizes[ids].astype(np.float64)
            if self.prior == "size"
            else np.ones(len(ids))
        )

    def _pace(self) -> None:
        """Count a past round; at the end of each pacer window, adjust the percentile for the
        preferred duration."""
        self.gained.append(self.gain)
        self.gain = 0.0
        window = self.pacer_window
        if len(self.gained) % window or len(self.gained) < 2 * window:
            return
        before, now = sum(self.gained[-2 * window : -window]), sum(self.gained[-window:])
        if abs(now - before) <= 0.1 * before:
            self.percentile = min(self.percentile + self.pacer_step, 100.0)
        elif abs(now - before) >= 5 * before:
            self.percentile = max(self.percentile - self.pacer_step, self.pacer_step)


class OortBySpeed(Oort):
    """Oort whose unseen clients are drawn with probability proportional to their speed, 1 /
    (seconds of a round).

    A client is asked for its resources once, when it is first available. `prior` stays the value of
    unseen clients in the scale of utilities. Deviation: the paper infers speeds from device models.
    """

    start_up_rounds = 1  # in which all clients are unseen, and asked
    needs = Oort.needs | {Signal.RESOURCES}
    state = (*Oort.state, "expected")

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        new = clients.available[np.isnan(self.expected[clients.available])]
        if len(new):
            found = clients.resources(new)
            self.expected[new] = found.download + found.training + found.upload
        return super().select(round, clients, rng)

    def _explore(self, new: Ids, count: int, rng: np.random.Generator) -> Ids:
        return new[weighted_without_replacement(1 / self.expected[new], count, rng)]
