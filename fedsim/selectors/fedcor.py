"""FedCor (Tang et al., "FedCor: Correlation-Based Active Client Selection Strategy for Heterogeneous Federated
Learning", CVPR 2022): a Gaussian process over the clients' loss changes."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedsim.communication.clients import Clients
from fedsim.communication.signals import Signal
from fedsim.errors import at_least, between, check, positive
from fedsim.selectors.base import Selector, ascending
from fedsim.selectors.tools.gaussian_process import Kernel, Objective, Parameters, greedy_falls, process_for
from fedsim.types import Params, Population, Selection

Floats = NDArray[np.float64]
SMALLEST_DISCOUNT = 1e-12


class FedCor(Selector):
    """The K clients whose expected loss falls would lower the losses of all the most, given how losses move together.

    Counting rounds e from 0: until e = `warmup` clients are drawn uniformly and all report their losses before and
    after, which gives one observation each. Then the process is fitted (`first_steps`; with `warmup_steps` > 0 also
    after every earlier warm-up round, as in the 2022 code). After each later round divisible by `interval`, K random
    clients train *virtually*, everybody reports the losses of the present and of the virtual model, the virtual one is
    thrown away, the process is refitted (`refit_steps`) and all discounts start again at 1; after any other round the
    discounts of the selected are multiplied by `beta` (section 4.3). `uniform_shares` sets p_k = 1 (GPFL's code).

    Observations count with weight `gamma`^age and are forgotten after `window` rounds. `history: intervals` (the 2022
    code): fits after the warm-up see the last ceil((window + 1) / interval) observations only, each of which counts as
    `interval` rounds older than the next, whenever it was made. `update_mean` fits residuals from the weighted mean of
    the observations, else from 0 (2022).

    `kernel`: linear (the default of the code, with no amplitude), linear_normalised or se (amplitude trained, `length`
    fixed); `objective`: marginal likelihood (mml) or leave-one-out (loo). Linear kernels with mml cost O(N q) a step,
    the others O(N^3). `epsilon`: share of random picks; `least_fall`: fewer than K where no other client promises as
    much (both off in the paper's runs).

    The questions "after round e" are asked at the beginning of round e + 1, whose model is the same; a client that was
    asked and is then selected does not download it again. Clients that are away report no change. The virtual training
    of a client is its real one if it is selected in that round. The rule of the 2022 code differs by its noise variance
    (1e-4), which stands in the denominators alone.
    """

    needs = frozenset({Signal.LOSSES})
    state = ("losses", "changes", "rounds", "parameters", "discounts")

    def __init__(
        self,
        population: Population,
        *,
        dimension: int,
        noise: float,
        kernel: Kernel,
        length: float,
        objective: Objective,
        warmup: int,
        interval: int,
        window: int,
        history: Literal["rounds", "intervals"],
        gamma: float,
        beta: float,
        first_steps: int,
        refit_steps: int,
        warmup_steps: int,
        fit_lr: float,
        update_mean: bool,
        uniform_shares: bool,
        epsilon: float,
        least_fall: float | None,
    ) -> None:
        super().__init__(population)
        check(
            at_least("dimension", dimension, 1),
            positive("noise", noise),
            positive("length", length),
            between("epsilon", epsilon, 0, 1),
            at_least("warmup", warmup, 0),
            at_least("interval", interval, 1),
            at_least("window", window, 1),
            between("gamma", gamma, 0, 1),
            between("beta", beta, 0, 1),
            at_least("first_steps", first_steps, 1),
            at_least("refit_steps", refit_steps, 0),
            at_least("warmup_steps", warmup_steps, 0),
            positive("fit_lr", fit_lr),
        )
        n = population.num_clients
        self.process = process_for(kernel, objective, noise, length, fit_lr)
        self.warmup, self.interval, self.window = warmup, interval, window
        self.history = history
        self.gamma, self.beta = gamma, beta
        self.first_steps, self.refit_steps, self.warmup_steps = first_steps, refit_steps, warmup_steps
        self.update_mean = update_mean
        self.shares = np.ones(n) if uniform_shares else population.shares
        self.losses = np.full(n, np.nan)
        self.changes: list[Floats] = []
        self.rounds: list[int] = []
        self.dimension = dimension
        self.parameters: Parameters = {}
        self.discounts = np.ones(n)
        self.epsilon, self.least_fall = epsilon, least_fall
        self.adaptive = least_fall is not None

    @property
    def start_up_rounds(self) -> int:
        return self.warmup + 2  # what the last round of the warm-up has changed is asked for in the next one

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        e, count = round - 1, self.cohort_size(clients)
        if e == 0:
            embedding = rng.standard_normal((self.dimension, self.population.num_clients)) / np.sqrt(self.dimension)
            self.parameters = {"embedding": embedding, "amplitude": np.ones(())}
        self._learn(e - 1, clients, count, rng)
        if e <= self.warmup:
            return Selection(ascending(rng.choice(clients.available, count, replace=False)))
        ids = clients.available
        covariance = self.process.covariance({**self.parameters, "embedding": self.parameters["embedding"][:, ids]})
        shares, discounts = self.shares[ids], self.discounts[ids]
        falls = greedy_falls(covariance, shares, discounts, count, rng, epsilon=self.epsilon, least=self.least_fall)
        chosen = ids[falls]
        if e % self.interval:
            self.discounts[chosen] = np.maximum(self.discounts[chosen] * self.beta, SMALLEST_DISCOUNT)
        return Selection(ascending(chosen))

    def _learn(self, last: int, clients: Clients, count: int, rng: np.random.Generator) -> None:
        """What the paper does after round `last`, on the same model."""
        if last <= self.warmup:
            before, self.losses = self.losses, self._ask(clients)
            if last < 0:
                return
            self._remember(self.losses - before, last)
            steps = self.first_steps if last == self.warmup else self.warmup_steps
            self._fit(steps, last)
        elif last % self.interval == 0:
            virtual = clients.collect(ascending(rng.choice(clients.available, count, replace=False)))
            average: Params = {n: w + virtual.delta[n].mean(0) for n, w in virtual.start.items()}
            before = self._ask(clients)
            self._remember(self._ask(clients.broadcast(average)) - before, last)
            self._fit(self.refit_steps, last)
            self.discounts[:] = 1

    def _ask(self, clients: Clients) -> Floats:
        """Losses of all [N], those of clients that are away as they were (nan if never known)."""
        losses = self.losses.copy()
        losses[clients.available] = clients.losses(clients.available)
        return losses

    def _remember(self, change: Floats, e: int) -> None:
        self.changes.append(np.nan_to_num(change, nan=0.0, posinf=0.0, neginf=0.0))
        self.rounds.append(e)
        while self.rounds[0] < e - self.window:
            del self.rounds[0], self.changes[0]

    def _fit(self, steps: int, now: int) -> None:
        if not steps:
            return
        changes, weights = self._observations(now)
        mean = weights @ changes / weights.sum() if self.update_mean else np.zeros(changes.shape[1])
        self.parameters = self.process.fit(self.parameters, changes - mean, weights, steps)

    def _observations(self, now: int) -> tuple[Floats, Floats]:
        """What a fit after round `now` sees: loss changes [E, N], the latest last, and their weights [E]."""
        ages = now - np.array(self.rounds, dtype=np.float64)
        if self.history == "intervals" and now > self.warmup:
            count = min(-(-(self.window + 1) // self.interval), len(ages))
            ages = self.interval * np.arange(count, dtype=np.float64)[::-1]
        return np.stack(self.changes[-len(ages) :]), self.gamma**ages
