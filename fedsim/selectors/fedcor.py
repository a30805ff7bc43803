"""FedCor (Tang et al., "FedCor: Correlation-Based Active Client Selection Strategy for
Heterogeneous Federated Learning", CVPR 2022): a Gaussian process over the clients' loss changes."""

from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Le

from fedsim.core.arrays import Floats
from fedsim.core.errors import DivergedError
from fedsim.core.parameters import Count, CountOrZero, Positive, Problems, Share, parameters
from fedsim.core.types import Params, Selection
from fedsim.selectors.base import (
    Clients,
    Selector,
    Signal,
    ascending,
    drop_nonfinite,
    pairs_problem,
)
from fedsim.selectors.gaussian_process import (
    Kernel,
    Objective,
    Parameters,
    greedy_selection,
    is_dense,
    make_process,
)

Steps = Annotated[int, Ge(0), Le(1_000_000)]
SMALLEST_DISCOUNT = 1e-12


@parameters
class FedCor(Selector):
    """Selects the K clients whose training is expected to lower the weighted sum of all clients'
    losses the most.

    A Gaussian process models how the clients' losses change together. An observation is the vector
    of all clients' loss changes over one round. Rounds e are counted from 0 as in the paper.

    Warm-up (e <= `warmup`): clients are drawn uniformly; all clients report their losses before and
    after the round, which gives one observation. After its last round the process is fitted with
    `first_steps` steps; with `warmup_steps` > 0 after every earlier one, too, as in the 2022 code.

    Later rounds: clients are selected greedily (Eq. 13, see `greedy_selection`). After each round
    divisible by `interval`, K random clients train *virtually*: all clients report the losses of
    the present model and of the virtual average, which is then discarded; the process is refitted
    (`refit_steps`) and all discounts are reset to 1. After any other round the discounts of the
    selected clients are multiplied by `beta` (section 4.3).

    Observations are weighted by `gamma`^age and dropped after `window` rounds. `history: intervals`
    is the 2022 code: fits after the warm-up use only the last ceil((window + 1) / interval)
    observations, each counted as `interval` rounds older than the next one; its fits are around 0
    (`update_mean: false`), and its noise variance (1e-4) occurs only in the denominators of the
    selection rule, which is not done here.

    A fitting step costs O(N q) for linear kernels with the marginal likelihood (`mml`), O(N^3)
    otherwise. `epsilon` is the probability that a pick is random; `least_fall` selects fewer than K
    clients if no other one has so large an expected fall (both unused in the paper).

    Requests "after round e" are made at the beginning of the next round in which somebody is
    available, when the global model is the same; until the first fit clients are drawn uniformly.
    Unavailable clients count as unchanged. Virtual updates that are not finite are left out;
    without any other there is neither observation nor fit.
    """

    needs = frozenset({Signal.LOSSES})
    exact = False  # the fit of the process solves linear equations
    state = ("losses", "changes", "rounds", "parameters", "discounts", "last", "fitted")

    dimension: Annotated[int, Ge(1), Le(10_000)]
    noise: Positive
    kernel: Kernel
    length: Positive
    objective: Objective
    warmup: CountOrZero
    interval: Count
    window: Count
    history: Literal["rounds", "intervals"]
    gamma: Share
    beta: Share
    first_steps: Annotated[int, Ge(1), Le(1_000_000)]
    refit_steps: Steps
    warmup_steps: Steps
    fit_lr: Positive
    update_mean: bool
    uniform_shares: bool
    epsilon: Share
    least_fall: float | None

    def problems(self) -> Problems:
        if not is_dense(self.kernel, self.objective):
            return
        remedy = "selector.kernel=linear selector.objective=mml is linear in num_clients; or lower num_clients"
        features = 16 * min(self.dimension, 10_000) if self.kernel == "se" else 0
        yield pairs_problem(self.population, 64 + features, remedy)

    def __post_init__(self) -> None:
        n = self.population.num_clients
        self.process = make_process(
            self.kernel, self.objective, self.noise, self.length, self.fit_lr
        )
        self.shares = np.ones(n) if self.uniform_shares else self.population.shares
        self.losses = np.full(n, np.nan)
        self.changes: list[Floats] = []
        self.rounds: list[int] = []
        self.parameters: Parameters = {}
        self.discounts = np.ones(n)
        self.last = -1  # the latest round e with a selection
        self.fitted = False  # after the warm-up
        self.adaptive = self.least_fall is not None
        self.start_up_rounds = (
            self.warmup + 2
        )  # 0..warmup, and the one that requests the losses after the last of them

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        e, count = round - 1, self.cohort_size(clients)
        if not self.parameters:
            embedding = rng.standard_normal(
                (self.dimension, self.population.num_clients)
            ) / np.sqrt(self.dimension)
            self.parameters = {"embedding": embedding, "amplitude": np.ones(())}
        self._observe_and_fit(e, clients, count, rng)
        self.last = e
        if not self.fitted:
            return Selection(ascending(rng.choice(clients.available, count, replace=False)))
        ids = clients.available
        covariance = self.process.covariance(
            {**self.parameters, "embedding": self.parameters["embedding"][:, ids]}
        )
        shares, discounts = self.shares[ids], self.discounts[ids]
        chosen = ids[
            greedy_selection(
                covariance, shares, discounts, count, rng, self.epsilon, self.least_fall
            )
        ]
        if e % self.interval:
            self.discounts[chosen] = np.maximum(
                self.discounts[chosen] * self.beta, SMALLEST_DISCOUNT
            )
        return Selection(ascending(chosen))

    def _observe_and_fit(
        self, e: int, clients: Clients, count: int, rng: np.random.Generator
    ) -> None:
        if not self.fitted:
            before, self.losses = self.losses, self._query_losses(clients)
            if self.last < 0:
                return
            self._add_observation(self.losses - before, self.last)
            self.fitted = e > self.warmup
            self._fit(self.first_steps if self.fitted else self.warmup_steps, self.last)
        since = range(max(self.last, self.warmup + 1), e)
        if any(past % self.interval == 0 for past in since):
            self._train_virtually(e - 1, clients, count, rng)

    def _train_virtually(
        self, last: int, clients: Clients, count: int, rng: np.random.Generator
    ) -> None:
        trained = clients.collect(ascending(rng.choice(clients.available, count, replace=False)))
        try:
            virtual, *_ = drop_nonfinite(trained, None)
        except DivergedError:
            return
        average: Params = {n: w + virtual.delta[n].mean(0) for n, w in virtual.start.items()}
        before = self._query_losses(clients)
        self._add_observation(self._query_losses(clients.broadcast(average)) - before, last)
        self._fit(self.refit_steps, last)
        self.discounts[:] = 1

    def _query_losses(self, clients: Clients) -> Floats:
        """Losses of all clients [N]; the last known loss for unavailable ones (nan if there is
        none)."""
        losses = self.losses.copy()
        losses[clients.available] = clients.losses(clients.available)
        return losses

    def _add_observation(self, change: Floats, e: int) -> None:
        self.changes.append(np.nan_to_num(change, nan=0.0, posinf=0.0, neginf=0.0))
        self.rounds.append(e)
        while self.rounds[0] < e - self.window:
            del self.rounds[0], self.changes[0]

    def _fit(self, steps: int, now: int) -> None:
        if not steps:
            return
        ages = now - np.array(self.rounds, dtype=np.float64)  # of the oldest observation first
        if self.history == "intervals" and now > self.warmup:
            count = min(-(-(self.window + 1) // self.interval), len(ages))
            ages = self.interval * np.arange(count, dtype=np.float64)[::-1]
        changes, weights = np.stack(self.changes[-len(ages) :]), self.gamma**ages
        mean = weights @ changes / weights.sum() if self.update_mean else np.zeros(changes.shape[1])
        self.parameters = self.process.fit(self.parameters, changes - mean, weights, steps)
