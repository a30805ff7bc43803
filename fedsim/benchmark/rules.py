"""The rules of the selection benchmark as code. docs/benchmark_rules.md has them in words.

A setting is a file conf/cell/v1_*.yaml. A regime is a schedule of the learning rate with a number
of rounds. A method is a selector with its tuned values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.core.configs import IRRELEVANT_KEYS

VERSION = "1.1"
"""Version of the rules. Runs of different versions are not compared."""
PRESET = "benchmark_v1"
"""The preset that all runs have, and the name of their folder."""

FREE_KEYS = (*IRRELEVANT_KEYS, "device")
"""Config keys that may have any value. The rules fix all others."""

# --- regimes and seeds ---

SCHEDULES = ("constant", "step", "cosine")
HORIZONS = (200, 800)
"""Numbers of rounds of the scored runs, the smallest first. Trials have the first, unless their
phase says otherwise."""
SEEDS = (0, 1, 2)
"""Seeds of the scored runs."""

# --- tuning ---

RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""The learning rates among which each method's is chosen, in each setting and for each schedule."""
NUM_LONG_RATES = 2
"""Number of rates tried for runs of more rounds than the first horizon: the rate that is best at
the first horizon, and the next lower ones. More rounds call for a lower rate, seldom for a higher
one: in bounds of convergence, the best constant rate falls with the root of the number of rounds.
"""
TUNING_SEEDS = (1000, 1001)
TUNING_WORDS = ("test_on=holdout", "local.holdout_fraction=0.1")
"""Words of a trial: it is tested on a tenth of each client's training samples, and nobody trains on
these."""
NUM_POINTS = 5
"""Number of points of a method's own parameters. The defaults are one more, so there are as many as
rates."""
CONTROLS = {
    "random_control": ("selector=random_control",),
    "random_control_2": ("selector=random_control", "selector.stream=2"),
}
"""Methods that are random selection with other draws, each with the words that choose it. They are
not tuned: they have the rates of random selection."""
FIRST_GROUP = (
    "random",
    "round_robin",
    *CONTROLS,
    "entropy_greedy",
    "fedcbs",
    "flips",
    "haccs",
    "fedlecc",
    "clustered1",
    "clustered2",
    "fl_dp3s",
    "fedcor",
    "gpfl",
    "kvib",
    "refl",
    "power_of_choice",
    "rpow_d",
    "afl",
    "top_loss",
)
"""The methods that run first in each setting. A setting is in the results when all of them have
run in it."""
# For the search spaces of other methods see the line `tune:` in their files.
SCALED_SPACES: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "entropy_greedy": ("selector.queue_length", "num_clients", (0.0, 0.2, 0.4, 0.7, 0.9)),
    "flips": ("selector.num_clusters", "num_clients", (0.03, 0.05, 0.1, 0.15, 0.2)),
    "power_of_choice": ("selector.num_candidates", "cohort_size", (3, 4, 6, 8, 10)),
    "rpow_d": ("selector.num_candidates", "cohort_size", (3, 4, 6, 8, 10)),
}
"""Search spaces by method, in place of those that their files declare, which suit only 100 clients.
A space has a parameter, a key of the setting, and multiples of that key's value. The parameter
takes these multiples, rounded. All other methods have the space that their file declares."""

# --- the sampled settings ---

DRAW_SEED = 20261127
COHORT_SHARES = (0.03, 0.05, 0.1)
"""Shares K / N. Each setting draws one of them."""
LABEL_SKEWS = ("shards_1", "shards_2", "dirichlet_01", "dirichlet_05", "dirichlet_client")
SKEWS = (*LABEL_SKEWS, "quantity_skew")
MAX_COHORT = 50
"""Largest K, which bounds the cost of settings with many clients."""
NOT_FOR_1000 = ("dirichlet_01", "dirichlet_05")
"""Partitions that do not exist with 1,000 clients: some clients would have no sample."""
BASE = ("fmnist", "shards_2", 100)
"""Data, skew and number of clients of the second block's base. The first block never draws them."""


@dataclass(frozen=True)
class Stratum:
    """Settings with the same data and model, of which `count` are drawn.

    A setting has one of `skews` and a number of clients out of `sizes`. Strata with the same `data`
    differ in their models. They never draw the same pair of skew and number of clients.
    """

    name: str
    data: str
    skews: Sequence[str]
    sizes: Sequence[int]
    count: int


STRATA = (
    Stratum("fmnist", "fmnist", SKEWS, (50, 100, 1000), 5),
    Stratum("lenet", "fmnist", SKEWS, (50, 100, 1000), 3),
    Stratum("cifar", "cifar", SKEWS, (50, 100, 1000), 5),
    Stratum("plays", "plays", ("natural",), (50, 100, 800), 2),
    Stratum("watch", "watch", ("natural",), (10, 20), 2),
    Stratum("writers", "writers", ("natural",), (50, 100, 1000), 3),
)


@dataclass(frozen=True)
class Draw:
    """A setting that was drawn.

    `cohort_size` is K, the number of clients that are selected in each round.
    """

    stratum: str
    skew: str
    num_clients: int
    cohort_size: int

    @property
    def name(self) -> str:
        """The name of the setting's file in conf/cell/."""
        skew = "" if self.skew == "natural" else f"_{self.skew}"
        return f"v1_{self.stratum}{skew}_{self.num_clients}"


def draw_settings() -> list[Draw]:
    """Return the settings of the first block, in the order in which they were drawn.

    Each stratum is a random sample without replacement of its pairs of skew and number of clients.
    K / N is drawn for each setting. K is rounded up, and is at most `MAX_COHORT`.
    """
    rng = np.random.default_rng(DRAW_SEED)
    used = {BASE}
    draws = []
    for stratum in STRATA:
        pairs = []
        for skew in stratum.skews:
            for num_clients in stratum.sizes:
                exists = num_clients < 1000 or skew not in NOT_FOR_1000
                if exists and (stratum.data, skew, num_clients) not in used:
                    pairs.append((skew, num_clients))
        drawn = rng.permutation(len(pairs))[: stratum.count]
        for index in drawn:
            skew, num_clients = pairs[index]
            share = COHORT_SHARES[rng.integers(len(COHORT_SHARES))]
            exact_size = round(share * num_clients, 6)  # without the error of 0.03 as a float
            cohort_size = min(int(np.ceil(exact_size)), MAX_COHORT)
            used.add((stratum.data, skew, num_clients))
            draws.append(Draw(stratum.name, skew, num_clients, cohort_size))
    return draws


VARIATIONS = (
    "v1_base",
    "v1_base_noisy",
    "v1_base_labels_away",
    "v1_base_deadline",
    "v1_base_scaffold",
)
"""The settings of the second block: a base, and settings that differ from it in one thing."""
