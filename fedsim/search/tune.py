"""`fedsim tune`: every selector in the search space that its own file declares.

A search space is a line `tune:` at the head of conf/selector/<name>.yaml: words of a sweep over at
most three parameters. A point is a value for each of them. All selectors have the same budget: the
default and the points of a Sobol sequence, which fill the space evenly. All points run in the same
settings (everything but selector and seed) at the same seeds, as jobs of one sweep. The command
gives `Tuning.batches` to `fedsim.jobs.cli.run_jobs`.
"""

import json
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
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
from fedsim.config.words import key_of, parse, parse_one, values_of
from fedsim.config.yaml_files import head_of, read_text
from fedsim.core.disk import write_atomically
from fedsim.core.errors import ConfigError, Problem, at_least, check, rule
from fedsim.jobs.cli import run_jobs
from fedsim.jobs.sweep import Attempts
from fedsim.search.own_keys import stop_at_problem, take_settings, with_own_keys
from fedsim.search.race import accuracies_of
from fedsim.tracking.tables import CONSOLE, print_line, show_share

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

MAX_PARAMETERS = 3
"""Maximum number of parameters in a search space."""
MAX_POINTS = 63
"""Maximum of `points`: with the point zero, which is left out, they are 2**6 points of Sobol."""

TUNE_REMEDY = (
    "write values or an interval, without blanks: selector.x=1,2,5 or selector.x=interval(0.1,0.9) "
    "or selector.x=int(interval(2,9)) or selector.x=tag(log,interval(0.01,1))"
)
"""The remedy for a wrong word of a line `tune:`."""


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """The keys of the command line that belong to the tuning itself.

    `points` is the number of points of the Sobol sequence, besides the default. Equal points, as
    several points of a choice among three values may be, are run once.
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

    `words` are its overrides, which come after those of the command. The default has none.
    `accuracy` is the mean final accuracy of its jobs, None before all have ended. tuning.json has
    these names.
    """

    words: Sequence[str]
    accuracy: float | None = None


@dataclass
class TunedSelector:
    """A selector's points, the default first. `jobs` are the numbers of the jobs of each point."""

    points: list[TunePoint] = field(default_factory=list)
    jobs: list[list[int]] = field(default_factory=list)

    @property
    def best(self) -> TunePoint | None:
        """The point of the highest accuracy, or None before all have ended.

        Of points with equal accuracy it is the first: the default stays if nothing is better.
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
    fault = f"at most {MAX_PARAMETERS} parameters are tuned"
    check(rule(len(words) <= MAX_PARAMETERS, line, " ".join(words), fault))
    check(*(_mistake_in(word, line) for word in words))
    return parse(words)


def _mistake_in(word: str, line: str) -> Problem | None:
    """Return what is wrong with a word of the line `tune:` of a file, or None."""
    try:
        override = parse_one(word)
        if override.is_discrete_sweep():
            list(values_of(override))  # raises if it has none, or one twice
    except ConfigError as error:
        fault = error.problems[0].rule
    else:
        fault = _fault_of(override)
    return rule(not fault, line, word, fault, TUNE_REMEDY)


def _fault_of(override: "Override") -> str:
    """Return the rule that an override in a line `tune:` violates; "" if it violates none."""
    value: Any = override.value()
    if override.is_discrete_sweep():
        return ""
    if not override.is_sweep_override():
        return "is one value, and no choice to tune in"
    if not -math.inf < value.start < value.end < math.inf:
        return "must have a < b in interval(a,b), both finite"
    if "log" in value.tags and value.start <= 0:
        return "must have a > 0 in tag(log,interval(a,b))"
    return ""


def points_of(space: "Sequence[Override]", count: int) -> list[TunePoint]:
    """Return the default and the first `count` points of the Sobol sequence after the point zero.

    Zero is the corner of all lower ends. Points that repeat are left out.
    """
    from scipy.stats.qmc import Sobol

    # The sequence is balanced in powers of two: 2**bit_length is the lowest above `count`.
    sequence = Sobol(len(space), scramble=False).random_base2(count.bit_length())
    all_words: list[tuple[str, ...]] = [()]
    for row in sequence[1 : count + 1]:
        all_words.append(tuple(map(word_at, space, row)))
    return [TunePoint(words) for words in dict.fromkeys(all_words)]


def word_at(override: "Override", share: float) -> str:
    """Return the word `key=value` at a coordinate of a point: a `share` in [0, 1).

    - An interval from a to b: a + share (b - a), with tag(log, ...) a (b / a)**share; rounded to
      three digits, or to a whole number with int(...).
    - A choice or a range: the value that is this share of the way through the list.
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

    - `selectors`: the points of each selector that declares a search space.
    - `skipped`: the selectors that declare none.
    - `jobs`: all jobs; `TunedSelector.jobs` has their numbers.

    Points that are not valid in a setting are left out, and printed. Raises `ConfigError` if no
    selector declares a search space, or if a default is not valid.
    """

    def __init__(self, args: Namespace, settings: TuneSettings) -> None:
        self.selectors: dict[str, TunedSelector] = {}
        self.jobs: list[ComposedJob] = []
        self.skipped: list[str] = []
        compose = partial(compose_jobs, multirun=True, config_name=args.config_name)
        # Points give the selector themselves.
        words = [word for word in args.overrides if word.partition("=")[0] != "selector"]
        with search_path(args.config_dir, args.config_path):
            names = dict.fromkeys(job.choices["selector"] for job in compose(args.overrides))
            for name in names:
                space = declared_space(name)
                if not space:
                    self.skipped.append(name)
                    continue
                self.selectors[name] = TunedSelector()
                for point in points_of(space, settings.points):
                    jobs = compose([*words, f"selector={name}", *point.words])
                    try:
                        check_jobs(jobs)
                    except ConfigError as error:
                        if not point.words:  # the default: the fault is in the user's words
                            raise
                        print_line(f"{name}: {why_not_run(point.words, error)}")
                        continue
                    self._add(self.selectors[name], point, jobs)
        remedy = "a line `tune:` at the head of a selector's file does (docs/benchmark_rules.md)"
        fault = "declare no search space"
        check(rule(bool(self.selectors), "selector", ",".join(names), fault, remedy))
        check(stop_at_problem(job.config for job in self.jobs))

    def _add(self, tuned: TunedSelector, point: TunePoint, jobs: list[ComposedJob]) -> None:
        """Add a point with its jobs, unless an earlier one has the same config.

        The words of a point may give the values of the default.
        """
        for numbers in tuned.jobs:
            if self.jobs[numbers[0]].config == jobs[0].config:
                return
        first = len(self.jobs)
        self.jobs += jobs
        tuned.points.append(point)
        tuned.jobs.append(list(range(first, len(self.jobs))))

    def batches(self, plans: Sequence[Plan], attempts: Attempts) -> Iterator[list[Plan]]:
        """Yield the jobs of one selector after another, all its points together.

        The caller runs the jobs that are yielded before it goes on.
        """
        for name, tuned in self.selectors.items():
            batch: list[Plan] = []
            for numbers in tuned.jobs:
                batch += [plans[number] for number in numbers]
            yield batch
            for point, numbers in zip(tuned.points, tuned.jobs, strict=True):
                accuracies = accuracies_of([plans[number] for number in numbers], attempts)
                if len(accuracies) == len(numbers):
                    point.accuracy = float(np.mean(accuracies))
            print_line(f"{name}: {_in_words(tuned)}")
            if attempts.screen is not None:
                self._write(attempts.screen.folder / "tuning.json")

    def _write(self, path: Path) -> None:
        """Write tuning.json: the points of each selector, for users."""
        points: dict[str, object] = {}
        for name, tuned in self.selectors.items():
            points[name] = [asdict(point) for point in tuned.points]
        with suppress(OSError):  # nothing needs the file
            write_atomically(path, json.dumps(points, indent=1).encode(), alone=False)

    def print_table(self) -> None:
        """Print a line for each selector."""
        table = Table("selector", "default", "best", "with", box=None, pad_edge=False)
        for name, tuned in self.selectors.items():
            best = tuned.best
            if best is None:
                table.add_row(escape(name), "", "", WAITS)
            else:
                default = show_share(tuned.points[0].accuracy)
                words = escape(" ".join(best.words) or "its default")
                if len(tuned.points) == 1:
                    words += f": {NO_OTHER}"
                table.add_row(escape(name), default, show_share(best.accuracy), words)
        CONSOLE.print(table)
        if self.skipped:
            print_line(f"without a search space: {', '.join(self.skipped)}")
        print_line("the best of several points looks better than it is: compare it at other seeds")


WAITS = "waits for a run that is not done"
"""What is printed on a selector of which a job has not ended."""
NO_OTHER = "no other point was run"
"""The remark on a default if all points are invalid, or equal to it."""


def why_not_run(words: Sequence[str], error: ConfigError) -> str:
    """Return in a line which rules a point violates that is not valid in a setting."""
    rules = [str(replace(problem, remedy="")) for problem in error.problems]
    return f"{' '.join(words)} is not valid here: {'; '.join(rules)}"


def _in_words(tuned: TunedSelector) -> str:
    """Return the accuracies of the default and of the best point in words."""
    if tuned.best is None:
        return WAITS
    default = show_share(tuned.points[0].accuracy)
    if len(tuned.points) == 1:
        return f"default {default}, {NO_OTHER}"
    return f"default {default}, best {show_share(tuned.best.accuracy)}"


def run(words: Sequence[str]) -> int:
    """Tune as the command line says. Raises `FedsimError` before any work is done."""
    _, args = read_words(_parser(), words)
    args.multirun = True
    keys = list(TuneSettings.__dataclass_fields__)
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
