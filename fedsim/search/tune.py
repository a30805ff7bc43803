"""`fedsim tune`: every selector in the search space that its own file declares.

A search space is a line `tune:` at the head of conf/selector/<name>.yaml: words of a sweep over at
most three parameters. A point is a value for each of them. All selectors have the same budget: the
default and the points of a Sobol sequence, which fill the space evenly. All points run in the same
settings (everything but selector and seed) at the same seeds, as jobs of one sweep. The best point
of a selector is the one with the highest mean final accuracy. The command gives `Tuning.batches` to
`fedsim.jobs.cli.run_jobs`.
"""

import json
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from fedsim.config.build import construct
from fedsim.config.command_line import read_words
from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.config.job import ComposedJob
from fedsim.config.plan import Plan
from fedsim.config.sources import known_choices
from fedsim.config.sweeps import values_of
from fedsim.config.words import dotted_key, key_of, long_form, parse, parse_one
from fedsim.config.yaml_files import head_of, read_text
from fedsim.core.disk import write_atomically
from fedsim.core.errors import ConfigError, Problem, at_least, check, rule
from fedsim.jobs.cli import run_jobs
from fedsim.jobs.sweep import Attempts
from fedsim.search.own_keys import stop_at_problem, take_settings, with_own_keys
from fedsim.search.race import WAITS, accuracies_of
from fedsim.tracking.tables import CONSOLE, print_line, show_share

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

MAX_PARAMETERS = 3
"""Maximum number of parameters in a search space."""
MAX_POINTS = 63
"""Maximum of `TuneSettings.points`."""

TUNE_REMEDY = (
    "write values or an interval, without blanks: selector.x=1,2,5 or selector.x=interval(0.1,0.9) "
    "or selector.x=int(interval(2,9)) or selector.x=tag(log,interval(0.01,1))"
)
"""The remedy for a wrong word of a line `tune:`."""
NO_OTHER = "no other point was run"
"""The remark on a default if all other points are invalid, or equal to it."""


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """The keys of the command line that belong to the tuning itself.

    `points` is the number of points of the Sobol sequence, without the default. Points with equal
    values, which are frequent in small spaces, are run once.
    """

    points: int = 8

    def __post_init__(self) -> None:
        fault = f"must be at most {MAX_POINTS}"
        check(
            at_least("points", self.points, 1),
            rule(self.points <= MAX_POINTS, "points", self.points, fault),
        )


@dataclass
class TunePoint:
    """A point of a search space.

    - `words`: its overrides, which come after those of the command. The default has none.
    - `accuracy`: the mean final accuracy of its jobs, None before all have ended.
    - `jobs`: the numbers of its jobs in `Tuning.jobs`.
    """

    words: Sequence[str]
    accuracy: float | None = None
    jobs: Sequence[int] = ()


@dataclass
class TunedSelector:
    """A selector that is tuned: its points, the default first."""

    points: list[TunePoint] = field(default_factory=list)

    @property
    def best(self) -> TunePoint | None:
        """The point with the highest accuracy, or None before the jobs of all points have ended.

        Of points with equal accuracy it is the first: the default stays if no point is better.
        """
        if any(point.accuracy is None for point in self.points):
            return None
        return max(self.points, key=lambda point: point.accuracy or 0.0)  # none is None here


def declared_space(selector: str) -> "list[Override]":
    """Return the search space that the file of a selector declares in its line `tune:`, or [].

    Raises `ConfigError` with all words of the line that are wrong.
    """
    path = known_choices().read("selector", selector).path
    words = head_of(read_text(path))[1].get("tune", "").split()
    line = f"{path.name}: tune"
    bound = f"at most {MAX_PARAMETERS} parameters are tuned"
    check(rule(len(words) <= MAX_PARAMETERS, line, " ".join(words), bound))
    problems = []
    for word in words:
        word_fault = _fault_in(word)
        if word_fault is not None:
            problems.append(Problem(line, word, word_fault, TUNE_REMEDY))
    check(*problems)
    return parse(words)


def _fault_in(word: str) -> str | None:
    """Return the rule that a word of a line `tune:` violates, or None if it violates none."""
    try:
        override = parse_one(word)
        if override.is_discrete_sweep():
            list(values_of(override))  # raises if it has no values, or one of them twice
            return None
    except ConfigError as error:
        return error.problems[0].rule
    if not override.is_sweep_override():
        return "is one value, and no choice to tune in"
    interval: Any = override.value()
    if not -math.inf < interval.start < interval.end < math.inf:
        return "must have a < b in interval(a,b), both finite"
    if "log" in interval.tags and interval.start <= 0:
        return "must have a > 0 in tag(log,interval(a,b))"
    return None


def points_of(space: "Sequence[Override]", count: int) -> list[TunePoint]:
    """Return the default and the first `count` points of the Sobol sequence, each point once.

    The sequence lies in [0, 1)**d for d parameters (`word_at`). Its point zero, at which every
    parameter has its lower end, does not count.
    """
    from scipy.stats.qmc import Sobol

    # SciPy draws 2**m points, because these are balanced. The point zero is one of them.
    m = count.bit_length()  # the lowest m with 2**m > count
    zero_and_points = Sobol(len(space), scramble=False).random_base2(m)
    default: tuple[str, ...] = ()
    words_of_points = [default]
    for coordinates in zero_and_points[1 : count + 1]:
        words_of_points.append(tuple(map(word_at, space, coordinates)))
    return [TunePoint(words) for words in dict.fromkeys(words_of_points)]


def problems_of_tuned_keys(
    selector: str, space: "Sequence[Override]", jobs: Sequence[ComposedJob]
) -> list[Problem]:
    """Return the problems of words in `jobs` that set a parameter in the space of their selector.

    Such words are the user's or the preset's. They would change the default of the selector, but
    not its points, which come after them.
    """
    space_words = [override.input_line or "" for override in space]
    # Long forms, because those of jobs are: selector.exploration.rho for selector.rho.
    long_words = long_form([f"selector={selector}", *space_words], known_choices())
    tuned_keys = set(map(dotted_key, long_words)) - {"selector"}
    values_by_key: dict[str, dict[str, None]] = {}
    for job in jobs:
        for word in job.overrides:
            key = dotted_key(word)
            if key in tuned_keys:
                values_by_key.setdefault(key, {})[word.partition("=")[2]] = None
    fault = f"is tuned, as the file of selector={selector} says, and cannot have values of its own"
    remedy = "leave it out; if the preset sets it, choose another preset"
    problems = []
    for key, values in values_by_key.items():
        problems.append(Problem(key, ",".join(values), fault, remedy))
    return problems


def word_at(override: "Override", share: float) -> str:
    """Return the word `key=value` of a parameter at the coordinate `share`, in [0, 1).

    - An interval from a to b: a + share (b - a), with tag(log, ...) a (b / a)**share; rounded to
      three digits, or to a whole number with int(...).
    - A choice or a range: the value at this share of the list.
    """
    value: Any = override.value()
    if override.is_discrete_sweep():
        words = list(values_of(override))
        return words[int(share * len(words))]
    low = float(value.start)
    high = float(value.end)
    number = low + share * (high - low)
    if "log" in value.tags:
        number = low * (high / low) ** share
    if isinstance(value.start, int):  # int(interval(...)); other intervals have floats
        return f"{key_of(override)}={round(number)}"
    return f"{key_of(override)}={float(f'{number:.3g}')}"


class Tuning:
    """The points and jobs of each selector that a command line names.

    - `selectors`: the selectors that declare a search space, by name.
    - `skipped`: the names of those that declare none.
    - `jobs`: the jobs of all points.

    Points that are not valid in a setting are printed and do not run. Raises `ConfigError` if no
    selector declares a search space, if words set a parameter that is tuned, or if a default is not
    valid.
    """

    def __init__(self, args: Namespace, settings: TuneSettings) -> None:
        self.selectors: dict[str, TunedSelector] = {}
        self.jobs: list[ComposedJob] = []
        self.skipped: list[str] = []
        compose = partial(compose_jobs, multirun=True, config_name=args.config_name)
        with search_path(args.config_dir, args.config_path):
            jobs_by_selector: dict[str, list[ComposedJob]] = {}
            for job in compose(args.overrides):
                jobs_by_selector.setdefault(job.choices["selector"], []).append(job)
            common_words = [word for word in args.overrides if word.partition("=")[0] != "selector"]
            for name, jobs_of_words in jobs_by_selector.items():
                space = declared_space(name)
                if not space:
                    self.skipped.append(name)
                    continue
                check(*problems_of_tuned_keys(name, space, jobs_of_words))
                self.selectors[name] = TunedSelector()
                for point in points_of(space, settings.points):
                    jobs = compose([*common_words, f"selector={name}", *point.words])
                    self._add(name, point, jobs)
        remedy = "a line `tune:` at the head of a selector's file does (docs/benchmark_rules.md)"
        fault = "declare no search space"
        check(rule(bool(self.selectors), "selector", ",".join(jobs_by_selector), fault, remedy))
        check(stop_at_problem(job.config for job in self.jobs))

    def _add(self, name: str, point: TunePoint, jobs: list[ComposedJob]) -> None:
        """Add a point of the selector `name` with its jobs, if it is valid and no repetition.

        A point repeats an earlier one if all its jobs have the same configs. This happens if its
        words give values that the default has in all settings.
        """
        try:
            check_jobs(jobs)
        except ConfigError as error:
            if not point.words:  # the default: the fault is in the user's words
                raise
            print_line(f"{name}: {why_not_run(point.words, error)}")
            return
        points = self.selectors[name].points
        configs = [job.config for job in jobs]
        for earlier in points:
            if configs == [self.jobs[number].config for number in earlier.jobs]:
                return
        first = len(self.jobs)
        self.jobs += jobs
        point.jobs = range(first, len(self.jobs))
        points.append(point)

    def batches(self, plans: Sequence[Plan], attempts: Attempts) -> Iterator[list[Plan]]:
        """Yield the jobs of one selector after another, all its points together.

        `plans` are those of `jobs`. The caller runs the yielded jobs before it continues.
        """
        for name, selector in self.selectors.items():
            batch: list[Plan] = []
            for point in selector.points:
                batch += [plans[number] for number in point.jobs]
            yield batch
            for point in selector.points:
                accuracies = accuracies_of([plans[number] for number in point.jobs], attempts)
                if len(accuracies) == len(point.jobs):
                    point.accuracy = float(np.mean(accuracies))
            print_line(f"{name}: {_in_words(selector)}")
            if attempts.screen is not None:
                self._write(attempts.screen.folder / "tuning.json")

    def _write(self, path: Path) -> None:
        """Write tuning.json: the points of each selector, for users."""
        content: dict[str, object] = {}
        for name, selector in self.selectors.items():
            points = []
            for point in selector.points:
                points.append({"words": point.words, "accuracy": point.accuracy})
            content[name] = points
        with suppress(OSError):  # nothing needs the file
            write_atomically(path, json.dumps(content, indent=1).encode(), alone=False)

    def print_table(self) -> None:
        """Print a line for each selector."""
        table = Table("selector", "default", "best", "with", box=None, pad_edge=False)
        for name, selector in self.selectors.items():
            best = selector.best
            if best is None:
                table.add_row(escape(name), "", "", WAITS)
            else:
                default = show_share(selector.points[0].accuracy)
                words = escape(" ".join(best.words) or "its default")
                if len(selector.points) == 1:
                    words += f": {NO_OTHER}"
                table.add_row(escape(name), default, show_share(best.accuracy), words)
        CONSOLE.print(table)
        if self.skipped:
            print_line(f"without a search space: {', '.join(self.skipped)}")
        print_line("the best of several points looks better than it is: compare it at other seeds")


def why_not_run(words: Sequence[str], error: ConfigError) -> str:
    """Return a line about a point that is not valid: its `words`, and the rules that it violates.

    `error` is that of its config.
    """
    rules = [str(replace(problem, remedy="")) for problem in error.problems]
    return f"{' '.join(words)} is not valid here: {'; '.join(rules)}"


def _in_words(selector: TunedSelector) -> str:
    """Return the accuracies of the default and of the best point in words."""
    if selector.best is None:
        return WAITS
    default = show_share(selector.points[0].accuracy)
    if len(selector.points) == 1:
        return f"default {default}, {NO_OTHER}"
    return f"default {default}, best {show_share(selector.best.accuracy)}"


def run(words: Sequence[str]) -> int:
    """Tune as the command line says. Raises `FedsimError` before any work is done."""
    _, args = read_words(_parser(), words)
    args.multirun = True
    keys = [setting.name for setting in fields(TuneSettings)]
    with search_path(args.config_dir, args.config_path):
        values = take_settings(args, keys)
    settings = construct(TuneSettings, values, "")
    try:
        tuning = Tuning(args, settings)
    except ConfigError as error:
        problems = [with_own_keys(problem, keys, "tune") for problem in error.problems]
        raise ConfigError(problems) from error
    code = run_jobs(tuning.jobs, ["tune", *words], tuning.batches)
    tuning.print_table()
    return code


def _parser() -> ArgumentParser:
    return ArgumentParser(
        prog="fedsim tune",
        usage="fedsim tune selector=NAMES KEY=VALUES ... [points=8] [--config-dir DIR]",
        description="Runs each selector with its defaults and at 8 (`points`) points of the search "
        "space that its file declares (line `tune:`; `fedsim list NAME` shows it), in all settings "
        "and at all seeds of the sweep, and prints which values have the highest mean final "
        "accuracy. A diverged run counts as accuracy 0. Selectors that declare no space are "
        "skipped. The same command resumes the tuning.",
        epilog="example: fedsim tune selector=oort,power_of_choice partition=shards_1,iid seed=0,1",
        allow_abbrev=False,
    )
