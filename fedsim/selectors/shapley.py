"""Shapley values of a cohort's clients on the server's validation split."""

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedsim.communication.server import Server
from fedsim.errors import at_least, check
from fedsim.types import Cohort, Params

Floats = NDArray[np.float64]
Worth = Callable[[frozenset[int]], float]
"""V of a set of positions in a cohort."""


class Valuation:
    """What each client's model of a round is worth.

    V(A) is `utility`: the accuracy, or minus the loss, on the validation split, of the average of the models of A
    (`average` uniform or by_size); V of nobody is that of the round's starting model. `method: exact` evaluates all 2^K
    averages, `sampled` walks `permutations` random orders, each cut short once the average is within `tolerance` of
    everybody's; `auto` is exact up to 10 clients.
    """

    def __init__(
        self,
        *,
        utility: Literal["loss", "accuracy"],
        average: Literal["uniform", "by_size"],
        method: Literal["auto", "exact", "sampled"],
        permutations: int,
        tolerance: float,
    ) -> None:
        check(at_least("permutations", permutations, 1), at_least("tolerance", tolerance, 0))
        self.utility, self.average, self.method = utility, average, method
        self.permutations, self.tolerance = permutations, tolerance

    def values(self, cohort: Cohort, server: Server, rng: np.random.Generator) -> Floats:
        """Shapley values [K]; one validation pass per average evaluated."""
        worth = _cached(lambda members: self._worth(members, cohort, server))
        num = len(cohort.ids)
        if self.method == "exact" or (self.method == "auto" and num <= 10):
            return exact_values(worth, num)
        return sampled_values(worth, num, self.permutations, self.tolerance, rng)

    def _worth(self, members: frozenset[int], cohort: Cohort, server: Server) -> float:
        evaluation = server.validate(averaged(cohort, members, self.average == "by_size"))
        return evaluation.accuracy if self.utility == "accuracy" else -evaluation.loss


def averaged(cohort: Cohort, members: frozenset[int], by_size: bool) -> Params:
    """The average model of the `members` (positions in the cohort); the starting model if there are none."""
    if not members:
        return cohort.start
    rows = sorted(members)
    weights = cohort.sizes[rows].astype(np.float64) if by_size else np.ones(len(rows))
    row = torch.zeros(len(cohort.ids))
    row[rows] = torch.as_tensor(weights / weights.sum(), dtype=row.dtype)
    deltas = {n: (row.to(d) @ d.flatten(1)).view(d.shape[1:]) for n, d in cohort.delta.items()}
    return {n: w + deltas[n] for n, w in cohort.start.items()}


def _cached(worth: Worth) -> Worth:
    """The same, evaluated once per set."""
    known: dict[frozenset[int], float] = {}

    def look_up(members: frozenset[int]) -> float:
        if members not in known:
            known[members] = worth(members)
        return known[members]

    return look_up


def exact_values(worth: Worth, num: int) -> Floats:
    """Shapley values [num] by enumeration of all 2^num sets."""
    worths = np.array([worth(frozenset(i for i in range(num) if code >> i & 1)) for code in range(2**num)])
    codes = np.arange(2**num)
    sizes = np.array([code.bit_count() for code in codes.tolist()])
    weights = np.array([1 / (num * math.comb(num - 1, s)) for s in range(num)])
    values = np.zeros(num)
    for i in range(num):
        without = codes[(codes >> i & 1) == 0]
        values[i] = (weights[sizes[without]] * (worths[without | (1 << i)] - worths[without])).sum()
    return values


def sampled_values(worth: Worth, num: int, permutations: int, tolerance: float, rng: np.random.Generator) -> Floats:
    """Means [num] of marginal worths over random orders, truncated (Ghorbani and Zou 2019, Algorithm 1)."""
    values = np.zeros(num)
    everybody = worth(frozenset(range(num)))
    for _ in range(permutations):
        members: frozenset[int] = frozenset()
        before = worth(members)
        for i in rng.permutation(num):
            if abs(everybody - before) < tolerance:
                break
            members = members | {int(i)}
            after = worth(members)
            values[i] += after - before
            before = after
    return values / permutations
