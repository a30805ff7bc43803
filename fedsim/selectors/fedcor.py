"""FedCor: select clients whose training is expected to lower the losses of all clients most.

Tang, Ning, Wang, Sun, Wang, Li and Chen, "FedCor: Correlation-Based Active Client Selection
Strategy for Heterogeneous Federated Learning", CVPR 2022 (arXiv 2103.13822).

If training on one client lowers the loss of another one, their losses are correlated. FedCor models
the loss changes of all clients over a round by a Gaussian process. It then picks clients one by one
such that the expected fall of the weighted sum of all losses is largest (Eq. 13, see
`greedy_selection`). Clients that are well correlated with a pick are not worth
picking any more.

Symbols: N clients, K of them to select, p_k the share of client k in all samples, q the dimension
of the embeddings of the process. Rounds e are counted from 0, as in the paper: e is fedsim's round
minus 1.

1. Warm-up (e <= `warmup`): Clients are drawn uniformly. All clients report their losses before and
   after the round, which gives one observation. After the last warm-up round the process is fitted.
2. Later rounds: Clients are selected by Eq. 13, which multiplies each client's expected fall by a
   discount. The discounts of the selected clients are then multiplied by `beta`, so that other
   clients get their turn (section 4.3).
3. Virtual rounds, after each round divisible by `interval`: K random clients train. All clients
   report the losses of the present model and of the average of these K models, which is then
   discarded. The process is fitted again, and all discounts become 1.

Observations are weighted by `gamma`^age and dropped after `window` rounds. A step of a fit costs
O(N q) for linear kernels with the marginal likelihood (`mml`), and O(N^3) otherwise.

`history: intervals` is the 2022 code. Fits after the warm-up use only the last
ceil((window + 1) / interval) observations, and count each as `interval` rounds older than the next
one. Its fits are around 0 (`update_mean: false`), and after each warm-up round it fits
(`warmup_steps`). Its noise variance (1e-4) occurs only in the denominators of the selection rule,
which fedsim does not copy.

What the paper leaves open: Requests "after round e" are made at the beginning of the next round
with available clients, when the global model is still the same. Until the first fit clients are
drawn uniformly. Losses of unavailable clients count as unchanged. Virtual updates that are not
finite are skipped. If no virtual update is finite, there is neither an observation nor a fit, and
the discounts are not reset.

`epsilon` and `least_fall` are options that the paper does not use. `least_fall` is fedsim's reading
of the code's `Dynamic_TH`, which is off by default. The code stops at a pick if minus the expected
fall is below `Dynamic_TH`, and tests the first pick, too. With the threshold's default of 0 it
selects nobody as long as falls are positive. Here picking stops if the expected fall is below
`least_fall`, from the second pick on.
"""

from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Le

from fedsim.core.errors import DivergedError
from fedsim.selectors.base import (
    Clients,
    Count,
    CountOrZero,
    Floats,
    Generator,
    Positions,
    Positive,
    Problems,
    Selection,
    Selector,
    Share,
    Signal,
    ascending,
    drop_nonfinite,
    pairs_problem,
    parameters,
)
from fedsim.selectors.gaussian_process import (
    Covariance,
    Kernel,
    Objective,
    Parameters,
    is_dense,
    make_process,
)

Steps = Annotated[int, Ge(0), Le(1_000_000)]
MIN_DISCOUNT = 1e-12
"""Lower bound of discounts, so that the falls of all clients can still be compared."""


@parameters
class FedCor(Selector):
    """Selects the K clients with the largest expected fall of all clients' losses."""

    needs = frozenset({Signal.LOSSES, Signal.UPDATES})
    exact = False  # fits solve linear equations
    state = (
        "losses",
        "changes",
        "change_rounds",
        "parameters",
        "discounts",
        "latest_round",
        "warmup_is_over",
    )

    dimension: Annotated[int, Ge(1), Le(10_000)]  # q, of each client's embedding
    noise: Positive  # sigma_n, standard deviation of the observation noise
    kernel: Kernel  # kernel of the process
    length: Positive  # length scale of the kernel `se`
    objective: Objective  # objective of fits: marginal likelihood, or leave one out
    warmup: CountOrZero  # the last warm-up round
    interval: Count  # rounds between virtual rounds
    window: Count  # rounds after which an observation is dropped
    history: Literal["rounds", "intervals"]  # observations used, and their ages
    gamma: Share  # weight of an observation for each round of age
    beta: Share  # discount of a client for each selection since the last virtual round
    first_steps: Annotated[int, Ge(1), Le(1_000_000)]  # steps of the fit after the warm-up
    refit_steps: Steps  # steps of a fit after a virtual round
    warmup_steps: Steps  # steps of fits after earlier warm-up rounds
    fit_lr: Positive  # learning rate of fits
    update_mean: bool  # whether fits subtract the weighted mean of the observations
    uniform_shares: bool  # whether losses are weighted by 1 instead of p_k
    epsilon: Share  # probability that a pick is random
    least_fall: float | None  # fewer clients are selected if the expected fall is smaller

    def problems(self) -> Problems:
        if not is_dense(self.kernel, self.objective):
            return
        remedy = (
            "selector.kernel=linear selector.objective=mml is linear in num_clients; or lower "
            "num_clients"
        )
        embedding_bytes = 16 * min(self.dimension, 10_000) if self.kernel == "se" else 0
        yield pairs_problem(self.population, 64 + embedding_bytes, remedy)

    def __post_init__(self) -> None:
        num_clients = self.population.num_clients
        self.process = make_process(
            self.kernel, self.objective, self.noise, self.length, self.fit_lr
        )
        self.shares = np.ones(num_clients) if self.uniform_shares else self.population.shares
        self.losses = np.full(num_clients, np.nan)  # latest losses of all clients [N]
        self.changes: list[Floats] = []  # observations: changes of loss [N] over a round
        self.change_rounds: list[int] = []  # the round e of each observation
        self.parameters: Parameters = {}  # of the process; drawn when `select` is first called
        self.discounts = np.ones(num_clients)  # a [N]
        self.latest_round = -1  # the latest round e with a selection; -1: none
        self.warmup_is_over = False  # whether the process selects the clients
        self.adaptive = self.least_fall is not None
        # the warm-up rounds, and the one that requests the losses after the last of them
        self.start_up_rounds = self.warmup + 2

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        e = round - 1
        available = clients.available
        count = self.cohort_size(clients)
        if not self.parameters:
            embedding = rng.standard_normal((self.dimension, self.population.num_clients))
            embedding /= np.sqrt(self.dimension)
            self.parameters = {"embedding": embedding, "amplitude": np.ones(())}
        self._learn(e, clients, count, rng)
        self.latest_round = e
        if not self.warmup_is_over:
            return Selection(ascending(rng.choice(available, count, replace=False)))
        embedding = self.parameters["embedding"][:, available]
        covariance = self.process.covariance(self.parameters | {"embedding": embedding})
        shares = self.shares[available]
        discounts = self.discounts[available]
        picks = greedy_selection(
            covariance, shares, discounts, count, rng, self.epsilon, self.least_fall
        )
        chosen = available[picks]
        self.discounts[chosen] = np.maximum(self.discounts[chosen] * self.beta, MIN_DISCOUNT)
        return Selection(ascending(chosen))

    def _learn(self, e: int, clients: Clients, count: int, rng: Generator) -> None:
        """Observe what is due before the selection of round e, and fit the process."""
        # 1. In the warm-up: the change of all losses over the latest round
        if not self.warmup_is_over:
            before = self.losses
            self.losses = self._query_losses(clients)
            if self.latest_round < 0:
                return
            self._add_observation(self.losses - before, self.latest_round)
            self.warmup_is_over = e > self.warmup
            steps = self.first_steps if self.warmup_is_over else self.warmup_steps
            self._fit(steps, self.latest_round)
        # 2. A virtual round, if one is due after a round since the latest selection
        later_rounds = range(max(self.latest_round, self.warmup + 1), e)
        if any(past % self.interval == 0 for past in later_rounds):
            self._train_virtually(e - 1, clients, count, rng)

    def _train_virtually(self, e: int, clients: Clients, count: int, rng: Generator) -> None:
        """Observe the loss changes of a virtual round of random clients after round e, and fit."""
        drawn = ascending(rng.choice(clients.available, count, replace=False))
        try:
            virtual, *_ = drop_nonfinite(clients.collect(drawn), None)
        except DivergedError:
            return
        average = {name: w + virtual.delta[name].mean(0) for name, w in virtual.start.items()}
        before = self._query_losses(clients)
        after = self._query_losses(clients.broadcast(average))
        self._add_observation(after - before, e)
        self._fit(self.refit_steps, e)
        self.discounts[:] = 1

    def _query_losses(self, clients: Clients) -> Floats:
        """Return the losses of all clients [N] at the model of `clients`.

        For an unavailable client it is the last known loss, or nan without any.
        """
        losses = self.losses.copy()
        losses[clients.available] = clients.losses(clients.available)
        return losses

    def _add_observation(self, change: Floats, e: int) -> None:
        """Add the loss `change` [N] over round e, and drop observations that are too old."""
        # nan: a client whose loss is not known before and after the round counts as unchanged
        self.changes.append(np.nan_to_num(change, nan=0.0, posinf=0.0, neginf=0.0))
        self.change_rounds.append(e)
        while self.change_rounds[0] < e - self.window:
            del self.change_rounds[0], self.changes[0]

    def _fit(self, steps: int, e: int) -> None:
        """Fit the process to the observations up to round e. Without `steps` nothing changes."""
        if not steps:
            return
        ages = e - np.array(self.change_rounds, dtype=np.float64)  # the oldest observation first
        if self.history == "intervals" and e > self.warmup:
            max_count = -(-(self.window + 1) // self.interval)  # rounded up
            count = min(max_count, len(ages))
            ages = self.interval * np.arange(count - 1.0, -1.0, -1.0)
        changes = np.stack(self.changes[-len(ages) :])
        weights = self.gamma**ages
        if self.update_mean:
            changes = changes - weights @ changes / weights.sum()
        self.parameters = self.process.fit(self.parameters, changes, weights, steps)


def greedy_selection(
    covariance: Covariance,
    shares: Floats,
    discounts: Floats,
    count: int,
    rng: Generator,
    epsilon: float = 0.0,
    min_fall: float | None = None,
) -> Positions:
    """Return up to `count` positions, picked by the expected fall of all losses (Eq. 13).

    Starting from the covariance C of N clients, each step picks client j and conditions C on it:

        j = argmax_k a_k / sqrt(C_kk) * sum_i p_i C_ik,  C <- C - C_:j C_j: / C_jj

    with `shares` p [N] and `discounts` a [N]. Ties are broken at random. With probability `epsilon`
    a pick is random. From the second pick on, picking stops if the largest expected fall is below
    `min_fall`. The picks are uniform random ones if the covariance is not finite (after a fit that
    failed).
    """
    weighted_sums = covariance @ shares  # sum_i p_i C_ik
    diagonal = covariance.diagonal().copy()
    if not np.isfinite(weighted_sums).all():
        return rng.choice(len(shares), count, replace=False)
    is_left = np.ones(len(shares), dtype=bool)
    removed: list[Floats] = []  # C_:j / sqrt(C_jj) of the clients picked so far
    for num_picked in range(count):
        variances = np.maximum(diagonal, 1e-300)  # rounding may leave 0 or less
        falls = discounts * weighted_sums / np.sqrt(variances)
        falls[~is_left] = -np.inf
        largest = falls.max()
        if min_fall is not None and num_picked and largest < min_fall:
            break
        at_random = epsilon > 0 and rng.random() < epsilon
        candidates = np.flatnonzero(is_left if at_random else falls == largest)
        j = int(rng.choice(candidates))
        is_left[j] = False
        # Only column j of the conditioned covariance is computed, from the original one.
        column = covariance[:, j].copy()
        for unit in removed:
            column -= unit * unit[j]
        if column[j] <= 0:  # by rounding: earlier picks already explain client j
            continue
        unit = column / np.sqrt(column[j])
        weighted_sums -= unit * (unit @ shares)
        diagonal -= unit**2
        removed.append(unit)
    return np.flatnonzero(~is_left)
