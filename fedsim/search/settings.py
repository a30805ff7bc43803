"""What the command line says of a search itself."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from fedsim.config.settings import Settings as RunSettings
from fedsim.config.spelling import nearest
from fedsim.config.suggestions import UNKNOWN_KEY
from fedsim.errors import Problem, at_least, check


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`trials` in all, of which the first `startup` are drawn at random and never pruned; rounds up to `warmup` (None:
    a quarter of a run's) are never pruned either."""

    trials: int = 20
    startup: int = 5
    search_seed: int = 0
    pruner: Literal["median", "none"] = "median"
    warmup: int | None = None

    def __post_init__(self) -> None:
        check(
            at_least("trials", self.trials, 1),
            at_least("startup", self.startup, 1),
            at_least("search_seed", self.search_seed, 0),
            None if self.warmup is None else at_least("warmup", self.warmup, 0),
        )


OWN_KEYS = tuple(field.name for field in fields(Settings))
OF_RUNS = tuple(field.name for field in fields(RunSettings))


def with_own_keys(problems: Sequence[Problem]) -> list[Problem]:
    """The problems of a run's config, where an unknown key may be meant for one of the search's own."""
    return [_with_own_key(problem) if problem.rule == UNKNOWN_KEY else problem for problem in problems]


def _with_own_key(problem: Problem) -> Problem:
    near = nearest(problem.key, [*OWN_KEYS, *OF_RUNS])
    if near not in OWN_KEYS or "." in problem.key:
        return problem
    _, meant, others = problem.remedy.partition("did you mean ")
    return replace(problem, remedy=f"did you mean {near} or {others}" if meant else f"did you mean {near}?")
