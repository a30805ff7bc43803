"""Oort: exploit clients with high losses that answer fast, and explore the others.

Lai, Zhu, Madhyastha and Chowdhury, "Oort: Efficient Federated Learning via Guided Participant
Selection", OSDI 2021 (arXiv 2010.06081).

A client is worth selecting if the model is bad on its data (statistical utility) and if it does not
delay the round (system utility). Both are known only of clients that have taken part ("seen"). A
part of the cohort therefore explores clients that have not ("unseen").

    U_k = n_k sqrt(mean squared loss of client k's samples)
    score of k = (U_k normalised + sqrt(0.1 ln t / L_k))
                 * (T / t_k)^penalty if t_k > T                  (Eq. 1)

n_k is the number of samples of client k. U_k is measured in the client's latest participation, over
all local steps. L_k is the round of this participation, and t_k its duration on the simulated
clock. t is the current round. In this file T is the preferred duration of a round, as in the paper,
and not the number of rounds. Without a simulated clock, or if all durations are equal, the second
factor is 1.

In each round, with K clients to select:

1. Pacer: T is a percentile of the clients' latest durations. The pacer moves this percentile.
   The gain of a round is the mean utility of the exploited clients whose updates arrived, 0
   without any. Every `pacer_window` rounds, the pacer compares the sum of the gains in the last
   window with the sum in the window before. The percentile rises by `pacer_step` if the sums differ
   by at most 10 % of the earlier one. It falls by `pacer_step` if they differ by 5 times the
   earlier one or more.
2. Exploit m = (1 - eps) K clients: draw them in proportion to their scores from the clients whose
   score is at least `cutoff` times the score of rank m. eps starts at `exploration` and is
   multiplied by `exploration_decay` every round, down to `exploration_floor`. Once all clients with
   data have been selected, only clients that are due for another try are explored.
3. Explore K - m unseen clients. They are drawn in proportion to `prior` from the 5 (K - m) unseen
   clients of highest prior. If there are too few, other clients are drawn uniformly.

Where the published code differs from the paper:

- The pacer and the prior above are those of the code. In the paper's Algorithm 1, T itself grows if
  the sum of utilities has fallen, and clients are explored by speed (`OortBySpeed`).
- `cutoff_rank: next` is the code, which takes the score of rank m + 1 in step 2.
- `first_round: random` is the code, which draws round 1 uniformly. Its selector counts from round 2
  on, so that ln t is ln(t - 1).

Where fedsim differs from the code, with a simulated clock only:

- In the code T comes from the durations of all registered clients, also of those that were never
  selected. Here it comes from durations that the server has seen. For example, five of ten clients
  take 1 s, the others 10 s, and two slow ones were selected. With percentile 10, T is 1 s in the
  code and 10 s here.
- The code multiplies the prior of an unseen client slower than T by (T / t_k)^penalty, and so
  explores fast clients first. Here the prior ignores speed. With K = 4 in the example, the code
  selects a fast unseen client with probability 0.79 and a slow one with 0.01. Here both have 0.5.
- The code takes the duration of one client as T. fedsim interpolates between two.

Where fedsim differs from the code with any clock:

- Oort's blacklist is not implemented.
- The code draws uniformly for one more round after the last unseen client was selected.
- A client whose update does not arrive in time stays unseen here, and is explored again now and
  then (`clients_to_try`). The published driver gives such clients the mean utility of the clients
  whose updates arrived.
- FedScale measures losses on the last mini-batch.
"""

from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Gt, Interval, Le

from fedsim.core.exact import power
from fedsim.selectors.base import (
    Clients,
    Cohort,
    Count,
    Floats,
    Generator,
    Ids,
    NonNegative,
    Selection,
    Selector,
    Server,
    Share,
    Signal,
    ascending,
    floor,
    leading,
    log,
    parameters,
    weighted_without_replacement,
)
from fedsim.selectors.candidates import clients_to_try, fill_up

EXPLORATION_POOL = 5
"""To explore c clients, they are drawn from the 5 c unseen clients of highest prior."""
SMALL_CHANGE = 0.1
"""The pacer raises the percentile if gains change by at most this share of the earlier gains."""
LARGE_CHANGE = 5
"""The pacer lowers the percentile if gains change by this multiple of the earlier gains or more."""


@parameters
class Oort(Selector):
    """Exploits clients of high utility and explores clients that have not taken part yet."""

    needs = frozenset({Signal.SQUARED_LOSS})
    state: ClassVar[tuple[str, ...]] = (  # a subclass has more of them
        "utility",
        "last_round",
        "last_tried",
        "durations",
        "exploited",
        "past_gains",
        "latest_gain",
        "percentile",
    )

    exploration: Share  # eps in round 1
    exploration_decay: Share  # factor of eps in every round
    exploration_floor: Share  # lower bound of eps
    cutoff: Share  # share of the score of `cutoff_rank` that clients must reach (paper: 0.95)
    cutoff_rank: Literal["last", "next"]  # rank of this score: m (the paper), or m + 1 (code)
    first_round: Literal["prior", "random"]  # how the first round draws
    clip: Share  # quantile of utilities at which they are clipped
    prior: Literal["size", "equal"]  # prior utility of unseen clients: n_k, or equal
    penalty: NonNegative  # exponent of the factor of slow clients
    percentile: Annotated[float, Interval(ge=0, le=100)]  # gives T; the pacer moves it
    pacer_window: Count  # rounds of a window of the pacer
    pacer_step: Annotated[float, Gt(0), Le(100)]  # change of the percentile

    def __post_init__(self) -> None:
        num_clients = self.population.num_clients
        self.utility = np.zeros(num_clients)  # U [N]
        self.last_round = np.zeros(num_clients, np.int64)  # L [N], 0: unseen
        self.last_tried = np.zeros(num_clients, np.int64)  # latest selection [N], 0: never
        self.durations = np.full(num_clients, np.nan)  # t_k in seconds [N], nan: unknown
        self.exploited = np.empty(0, np.int64)  # clients exploited in the latest round
        self.past_gains: list[float] = []  # gains of the rounds that the pacer has counted
        self.latest_gain = 0.0  # gain of the next round to count, 0 until an update arrives

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        count = self.cohort_size(clients)
        # 1. Pacer. It also counts the past rounds without available clients, with a gain of 0.
        while len(self.past_gains) < round - 1:
            self._pace()
        # 2. Exploit
        new = clients_to_try(available, self.last_round > 0, self.last_tried, round)
        num_exploited = self._num_exploited(round, count, new)
        self.exploited = self._exploit(available, num_exploited, round, rng)
        # 3. Explore
        if self.first_round == "random" and clients.in_first_round:
            new = new[:0]
        explored = self._explore(new, count - len(self.exploited), rng)
        chosen = np.concatenate([self.exploited, explored])
        chosen = ascending(fill_up(chosen, available, count, rng))
        self.last_tried[chosen] = round
        return Selection(chosen)

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        assert cohort.rms_loss is not None
        self.utility[cohort.ids] = np.nan_to_num(cohort.sizes * cohort.rms_loss, nan=0, posinf=0)
        self.last_round[cohort.ids] = round
        if cohort.durations is not None:
            self.durations[cohort.ids] = cohort.durations
        arrived = np.intersect1d(self.exploited, cohort.ids)
        self.latest_gain = float(self.utility[arrived].mean()) if len(arrived) else 0.0

    def _pace(self) -> None:
        """Count a past round, and adjust the percentile at the end of each window."""
        self.past_gains.append(self.latest_gain)
        self.latest_gain = 0.0
        window = self.pacer_window
        if len(self.past_gains) % window or len(self.past_gains) < 2 * window:
            return
        before = sum(self.past_gains[-2 * window : -window])
        change = abs(sum(self.past_gains[-window:]) - before)
        if change <= SMALL_CHANGE * before:
            self.percentile = min(self.percentile + self.pacer_step, 100.0)
        elif change >= LARGE_CHANGE * before:
            self.percentile = max(self.percentile - self.pacer_step, self.pacer_step)

    def _num_exploited(self, t: int, count: int, new: Ids) -> int:
        """Return m, the number of clients to exploit in round t.

        `count` is K, and `new` are the unseen clients that may be explored.
        """
        never_selected = (self.last_round == 0) & (self.last_tried == 0)
        if not never_selected[self.population.sizes > 0].any():
            # All clients have had their turn: `new` holds only clients due for another try.
            num_explored = min(len(new), count)
            return count - num_explored
        decayed = self.exploration * self.exploration_decay ** (t - 1)
        eps = max(self.exploration_floor, decayed)
        return floor((1 - eps) * count)

    def _exploit(self, available: Ids, count: int, t: int, rng: Generator) -> Ids:
        """Return up to `count` seen clients, drawn in proportion to their scores."""
        seen = self._seen_among(available)
        count = min(count, len(seen))
        if not count:
            return seen[:0]
        scores = self.scores_of_seen(available, t)
        falling = np.sort(scores)[::-1]
        rank = count if self.cutoff_rank == "last" else min(count + 1, len(seen))
        # `cutoff` times a negative score is higher than the score itself, and could leave fewer
        # than `count` clients in the pool. The pool therefore has at least the best `count` ones.
        threshold = min(self.cutoff * falling[rank - 1], falling[count - 1])
        pool = np.flatnonzero(scores >= threshold)
        weights = np.maximum(scores[pool], 1e-12)  # a weight of 0 would never be drawn
        drawn = weighted_without_replacement(weights, count, rng)
        return seen[pool[drawn]]

    def _explore(self, new: Ids, count: int, rng: Generator) -> Ids:
        """Return up to `count` of the unseen clients `new`, drawn by prior."""
        priors = self._priors(new)
        shuffled = rng.permutation(len(new))  # breaks ties of priors at random
        pool = shuffled[leading(priors[shuffled], EXPLORATION_POOL * count)]
        drawn = weighted_without_replacement(priors[pool], count, rng)
        return new[pool[drawn]]

    def _seen_among(self, available: Ids) -> Ids:
        """Return the seen clients among the `available` ones, in the same order."""
        return available[self.last_round[available] > 0]

    def scores_of_seen(self, available: Ids, t: int) -> Floats:
        """Return the scores in round t of the seen clients among the `available` ones (Eq. 1).

        The array has an entry for each client of `_seen_among(available)`.
        """
        seen = self._seen_among(available)
        num_rounds = t if self.first_round == "prior" else max(t - 1, 1)
        staleness = np.sqrt(0.1 * log(num_rounds) / self.last_round[seen])
        utilities = self.normalised_utilities_of_seen(available)
        return (utilities + staleness) * self._speed_factors(seen)

    def normalised_utilities_of_seen(self, available: Ids) -> Floats:
        """Return (min(U_k, c) - l) / (u - l) for the seen clients among the `available` ones.

        c, u and l are made of the M positive utilities of all `available` clients, as in the
        published code. The utility of an unseen client is its prior. c is the utility of ascending
        rank floor(`clip` M) + 1, u is the maximum, and l is 0.999 times the minimum. A difference
        u - l below 1e-4 counts as 1e-4.
        """
        is_seen = self.last_round[available] > 0
        utilities = np.where(is_seen, self.utility[available], self._priors(available))
        positive = utilities[utilities > 0]
        if not len(positive):
            return np.zeros(np.count_nonzero(is_seen))
        rank = min(floor(self.clip * len(positive)), len(positive) - 1)
        ceiling = np.partition(positive, rank)[rank]  # c
        low = 0.999 * positive.min()  # l
        width = max(positive.max() - low, 1e-4)  # u - l
        return (np.minimum(utilities[is_seen], ceiling) - low) / width

    def _speed_factors(self, seen: Ids) -> Floats:
        """Return (T / t_k)^penalty for the `seen` clients slower than T, and 1 for the others."""
        known = self.durations[np.isfinite(self.durations)]
        if not len(known) or known.min() == known.max():
            return np.ones(len(seen))
        preferred = np.percentile(known, self.percentile)  # T
        durations = np.nan_to_num(self.durations[seen], nan=preferred)
        factors = power(preferred / durations, self.penalty)
        return np.where(durations > preferred, factors, 1.0)

    def _priors(self, ids: Ids) -> Floats:
        """Return the prior utilities of the clients `ids`."""
        sizes = self.population.sizes[ids].astype(np.float64)
        return sizes if self.prior == "size" else np.ones(len(ids))


class OortBySpeed(Oort):
    """Oort that explores fast clients first: in proportion to 1 / (seconds of a round).

    The paper's Algorithm 1 explores by speed. A client is asked for its resources once, when it is
    first available. `prior` is still the utility of unseen clients when utilities are normalised.
    Deviation: The paper infers speeds from device models.
    """

    start_up_rounds = 1  # in which all clients are asked
    needs = Oort.needs | {Signal.RESOURCES}
    state = (*Oort.state, "expected_seconds")

    def __post_init__(self) -> None:
        super().__post_init__()
        # seconds of a round by the client's resources [N], nan: not asked yet
        self.expected_seconds = np.full(self.population.num_clients, np.nan)

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        new = clients.available[np.isnan(self.expected_seconds[clients.available])]
        if len(new):
            seconds = clients.resources(new)
            self.expected_seconds[new] = seconds.download + seconds.training + seconds.upload
        return super().select(round, clients, rng)

    def _explore(self, new: Ids, count: int, rng: Generator) -> Ids:
        speeds = 1 / self.expected_seconds[new]
        return new[weighted_without_replacement(speeds, count, rng)]
