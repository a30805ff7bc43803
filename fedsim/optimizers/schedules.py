"""Learning-rate schedules over rounds (1-based)."""

import math

from fedsim.errors import check, positive, rule
from fedsim.optimizers.base import Schedule


class Constant(Schedule):
    """A constant learning rate."""

    def factor(self, round: int, num_rounds: int) -> float:
        return 1.0


class Step(Schedule):
    """Multiplies the learning rate by `factor` after each round in `milestones`; round m still has the old rate.

    The published codes count rounds from 0 and multiply before their round m, which is also after m rounds: FedCor's at
    150 and 300, GPFL's at 162 and 244.
    """

    def __init__(self, *, milestones: list[int], factor: float) -> None:
        check(
            rule(
                all(m >= 1 for m in milestones) and sorted(set(milestones)) == milestones,
                "milestones",
                milestones,
                "must be ascending rounds >= 1",
            ),
            positive("factor", factor),
        )
        self.milestones = milestones
        self.multiplier = factor

    def factor(self, round: int, num_rounds: int) -> float:
        return self.multiplier ** sum(round > m for m in self.milestones)


class Exponential(Schedule):
    """Multiplies the learning rate by `gamma` in every round from the second on."""

    def __init__(self, *, gamma: float) -> None:
        check(positive("gamma", gamma))
        self.gamma = gamma

    def factor(self, round: int, num_rounds: int) -> float:
        return self.gamma ** (round - 1)


class Cosine(Schedule):
    """A factor that falls along half a cosine from 1 in the first round to `final` in the last."""

    def __init__(self, *, final: float) -> None:
        check(positive("final", final))
        self.final = final

    def factor(self, round: int, num_rounds: int) -> float:
        progress = (round - 1) / max(num_rounds - 1, 1)
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2
