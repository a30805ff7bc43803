"""FedCor: select clients whose training is expected to lower the losses of all clients most.

Tang, Ning, Wang, Sun, Wang, Li and Chen, "FedCor: Correlation-Based Active Client Selection
Strategy for Heterogeneous Federated Learning", CVPR 2022 (arXiv 2103.13822).

If training on one client lowers the loss of another one, their losses are correlated. FedCor models
the loss changes of all clients over a round by a Gaussian process (gaussian_process.py). It then
picks clients one by one such that the expected fall of the weighted sum of all losses is largest
(Eq. 13, see `greedy_selection`). Clients that are well correlated with a pick are not worth picking
any more.

q is the dimension of the embeddings of the process. Rounds e are counted from 0, as in the paper: e
is fedsim's round minus 1.

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
the discounts stay as they are.

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
    KernelParameters,
    Objective,
    is_dense,
    make_process,
)

Steps = Annotated[int, Ge(0), Le(1_000_000)]
MIN_DISCOUNT = 1e-12
"""Lower bound of discounts, so that the falls of all clients can still be compared."""
MIN_VARIANCE = 1e-300
"""Lower bound of variances in the selection rule. Rounding may leave 0 or less."""


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
    objective: Objective  # what fits maximise: marginal or leave-one-out likelihood
    warmup: CountOrZero  # the last warm-up round e
    interval: Count  # rounds between virtual rounds
    window: Count  # rounds after which an observation is dropped
    history: Literal["rounds", "intervals"]  # ages of observations: true ones, or of the 2022 code
    gamma: Share  # factor of an observation's weight for each round of age
    beta: Share  # factor of a client's discount for each selection since the last virtual round
    first_steps: Annotated[int, Ge(1), Le(1_000_000)]  # steps of the fit after the warm-up
    refit_steps: Steps  # steps of a fit after a virtual round
    warmup_steps: Steps  # steps of a fit after an earlier warm-up round, 0 but for the 2022 code
    fit_lr: Positive  # learning rate of fits
    update_mean: bool  # whether fits subtract the weighted mean of the observations
    uniform_shares: bool  # whether losses are weighted by 1 instead of p_k
    epsilon: Share  # probability that a pick is random
    least_fall: float | None  # expected fall below which picking stops; None: K are picked

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
        self.changes: list[Floats] = []  # observations: changes of loss [N], the oldest first
        self.change_rounds: list[int] = []  # the round e of each observation
        self.parameters: KernelParameters = {}  # drawn when `select` is first called
        self.discounts = np.ones(num_clients)  # a [N]
        self.latest_round = -1  # the latest round e with a selection; -1: none
        self.warmup_is_over = False  # whether the process selects the clients
        self.adaptive = self.least_fall is not None
        # e = 0 to `warmup`, and the next round, which requests the losses after the warm-up
        self.start_up_rounds = self.warmup + 2

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        e = round - 1
        available = clients.available
        count = self.cohort_size(clients)
        if not self.parameters:
            embedding = rng.standard_normal((self.dimension, self.population.num_clients))
            embedding /= np.sqrt(self.dimension)
            self.parameters = {"embedding": embedding, "amplitude": np.ones(())}
        # What earlier rounds left to do: the observation of step 1, the virtual round of step 3
        if not self.warmup_is_over:
            self._observe_warmup(e, clients)
        rounds_since = range(max(self.latest_round, self.warmup + 1), e)
        if self.warmup_is_over and any(past % self.interval == 0 for past in rounds_since):
            self._train_virtually(e - 1, clients, count, rng)
        self.latest_round = e
        # 1. Warm-up
        if not self.warmup_is_over:
            return Selection(ascending(rng.choice(available, count, replace=False)))
        # 2. Later rounds
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

    def _observe_warmup(self, e: int, clients: Clients) -> None:
        """Observe the change of all losses over the latest warm-up round, and fit the process.

        This happens before the selection of round e, and ends the warm-up after its last round.
        """
        before = self.losses
        self.losses = self._query_losses(clients)
        if self.latest_round < 0:  # no round has changed the model yet
            return
        self._add_observation(self.losses - before, self.latest_round)
        self.warmup_is_over = e > self.warmup
        num_steps = self.first_steps if self.warmup_is_over else self.warmup_steps
        self._fit(num_steps, self.latest_round)

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

    def _fit(self, num_steps: int, e: int) -> None:
        """Fit the process to the observations up to round e. With 0 steps nothing changes."""
        if not num_steps:
            return
        ages = self._ages(e)
        changes = np.stack(self.changes[-len(ages) :])
        weights = self.gamma**ages
        if self.update_mean:
            changes = changes - weights @ changes / weights.sum()
        self.parameters = self.process.fit(self.parameters, changes, weights, num_steps)

    def _ages(self, e: int) -> Floats:
        """Return the ages of the latest observations, those to fit after round e, the oldest first.

        With `history: rounds` and in the warm-up these are all observations with their true ages in
        rounds. With `history: intervals` each counts as one interval older than the next one.
        """
        if self.history == "rounds" or e <= self.warmup:
            return e - np.array(self.change_rounds, dtype=np.float64)
        max_observations = -(-(self.window + 1) // self.interval)  # rounded up
        num_observations = min(max_observations, len(self.changes))
        return self.interval * np.arange(num_observations - 1.0, -1.0, -1.0)


def greedy_selection(
    covariance: Covariance,
    shares: Floats,
    discounts: Floats,
    count: int,
    rng: Generator,
    epsilon: float = 0.0,
    least_fall: float | None = None,
) -> Positions:
    """Return up to `count` positions, picked by the expected fall of all losses (Eq. 13).

    Starting from the covariance C of N clients, each step picks client j and conditions C on it:

        j = argmax_k a_k / sqrt(C_kk) * sum_i p_i C_ik,  C <- C - C_:j C_j: / C_jj

    with `shares` p [N] and `discounts` a [N]. Ties are broken at random. With probability `epsilon`
    a pick is random. From the second pick on, picking stops if the largest expected fall is below
    `least_fall`. The picks are uniform random ones if the covariance is not finite, after a fit
    that failed.
    """
    weighted_sums = covariance @ shares  # sum_i p_i C_ik
    if not np.isfinite(weighted_sums).all():
        return rng.choice(len(shares), count, replace=False)
    variances = covariance.diagonal().copy()  # C_kk
    is_left = np.ones(len(shares), dtype=bool)
    scaled_columns: list[Floats] = []  # C_:j / sqrt(C_jj) of the clients picked so far
    for num_picked in range(count):
        positive_variances = np.maximum(variances, MIN_VARIANCE)
        falls = discounts * weighted_sums / np.sqrt(positive_variances)
        falls[~is_left] = -np.inf
        largest = falls.max()
        if least_fall is not None and num_picked and largest < least_fall:
            break
        at_random = epsilon > 0 and rng.random() < epsilon
        candidates = np.flatnonzero(is_left if at_random else falls == largest)
        j = int(rng.choice(candidates))
        is_left[j] = False
        # Column j of the conditioned C: the original column less what earlier picks explain.
        column = covariance[:, j].copy()
        for earlier in scaled_columns:
            column -= earlier * earlier[j]
        if column[j] <= 0:  # by rounding: earlier picks already explain client j
            continue
        scaled = column / np.sqrt(column[j])
        weighted_sums -= scaled * (scaled @ shares)
        variances -= scaled**2
        scaled_columns.append(scaled)
    return np.flatnonzero(~is_left)
