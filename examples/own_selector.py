"""A selector of your own, as in the cells of a notebook: a class, a run with it, and a comparison.

    uv run python examples/own_selector.py [overrides of the command line]

No other process could import a class that is defined in this script, so its run is not kept. If you
move the class to a module (`from my_lab import MostData`), the same call keeps the run in outputs/
and resumes it after an interrupt.
"""

import sys
from functools import partial

import numpy as np

import fedsim
from fedsim.selectors.base import (
    Clients,
    Population,
    Selection,
    Selector,
    ascending,
    between,
    check,
)

# %% A selector: the K clients with the most data, and a random share of others


class MostData(Selector):
    """Selects the clients with the most training samples; a `random_share` of the K clients is
    drawn from the others."""

    def __init__(self, population: Population, *, random_share: float) -> None:
        super().__init__(population)
        check(between("random_share", random_share, 0, 1))
        self.random_share = random_share

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        count = self.cohort_size(clients)
        num_random = int(self.random_share * count)
        num_largest = count - num_random
        sizes = self.population.sizes[clients.available]
        by_size = clients.available[np.argsort(-sizes, kind="stable")]
        drawn = rng.choice(by_size[num_largest:], num_random, replace=False)
        return Selection(ascending(np.concatenate([by_size[:num_largest], drawn])))


# %% A run with it. The callback sees each round, and ends the run at 90 %


def on_round(record: fedsim.Record) -> bool:
    print(f"round {record.round:3}: {record.selected}, test accuracy {record.test_accuracy:.3f}")
    return record.test_accuracy is not None and record.test_accuracy >= 0.9


words = ["partition=quantity_skew", "num_rounds=30", "tracker=files_only", *sys.argv[1:]]
mine = fedsim.run_experiment(words, selector=partial(MostData, random_share=0.4), on_round=on_round)
print(mine.status, mine.error or "")

# %% The same rounds with a shipped selector, paired: same seed, same data, same initial model

other = fedsim.run_experiment([*words, "selector=random"], keep=False)
both = mine.rounds.merge(other.rounds, on="round", suffixes=("_mine", "_random"))
print(both[["round", "test_accuracy_mine", "test_accuracy_random"]].tail())
