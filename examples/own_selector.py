"""A selector of your own, as in the cells of a notebook: a class, a run with it, and another look
at every round.

    uv run python examples/own_selector.py [words of the command line]

The class is defined in this script, where no other process could import it: its run is not kept.
Moved to a module (`from my_lab import MostData`), the same call keeps it in outputs/, and goes on
with it after an interrupt.
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

# %% A selector: the K clients with the most data, but for a share that is drawn at random


class MostData(Selector):
    """Takes the clients with the most training samples; `random_share` of the K are drawn from the
    others."""

    def __init__(self, population: Population, *, random_share: float) -> None:
        super().__init__(population)
        check(between("random_share", random_share, 0, 1))
        self.random_share = random_share

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        count = self.cohort_size(clients)
        by_size = clients.available[
            np.argsort(-self.population.sizes[clients.available], kind="stable")
        ]
        num_random = int(self.random_share * count)
        others = rng.choice(by_size[count - num_random :], num_random, replace=False)
        return Selection(ascending(np.concatenate([by_size[: count - num_random], others])))


# %% A run with it; the callback sees each round, and ends the run at 90 %


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
